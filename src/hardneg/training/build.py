"""From a recipe to the parts of a run: the method with its networks, and the batches."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hardneg import checks, randomness
from hardneg.graphs.data import GraphSet
from hardneg.images import ImageSet, StreamedImages, encoders, load_split
from hardneg.images import views as image_views
from hardneg.images.features import extract_all
from hardneg.images.two_views import TwoHeads, TwoViews, channels_of, split_of
from hardneg.losses.infonce import InfoNCE
from hardneg.losses.inputs import normalized
from hardneg.memory import Clusters, MemoryBank, Queue
from hardneg.memory.clustered_bank import Past
from hardneg.methods.cmc import CMC
from hardneg.methods.graphcl import GraphMethod
from hardneg.methods.instance_discrimination import InstanceDiscrimination
from hardneg.methods.local_aggregation import LocalAggregationMethod
from hardneg.methods.method import Method
from hardneg.methods.moco import MoCo
from hardneg.methods.moco_v3 import MoCoV3
from hardneg.methods.simclr import SimCLR
from hardneg.samplers.proximity import RefreshedBatchSampler
from hardneg.training import graphs, optimizers, recipe, run_folder
from hardneg.training.batches import Batches
from hardneg.training.callbacks.sampler_refresh import Refresh, shared_embeddings
from hardneg.training.recipe import Recipe

Samples = ImageSet | StreamedImages | GraphSet
VIEWS = {"simclr": image_views.simclr_views, "moco": image_views.moco_views}
METHODS: dict[str, Callable[..., Method]] = {
    "simclr": SimCLR,
    "moco": MoCo,
    "moco_v3": MoCoV3,
    "instance_discrimination": InstanceDiscrimination,
    "cmc": CMC,
    "local_aggregation": LocalAggregationMethod,
}


def resolved(settings: Recipe) -> Recipe:
    """The recipe with the absolute path of its data: a run must find them from every folder."""
    source = settings.data.source
    if source.startswith(graphs.SOURCE):
        source = graphs.located(source)
    elif (path := _path(source)) is not None:
        # A link keeps its name, but what ".." leads to after a link must be looked up.
        source = str(path.resolve() if ".." in path.parts else path.absolute())
    return replace(settings, data=replace(settings.data, source=source))


def check_source(settings: Recipe, folder: Path) -> None:
    """Raise if the data of the run in a folder are no longer where its recipe says."""
    path = _path(settings.data.source)
    if path is not None and not path.exists():
        raise ValueError(
            f"{folder}: data.source={settings.data.source!r} is not there: put the data back, or write where they are "
            f"now into {folder / run_folder.RECIPE}"
        )


def _path(source: str) -> Path | None:
    """The file or folder that a source lies in; None if the source is found by its name."""
    if source.startswith(graphs.SOURCE):
        place = Path(source.removeprefix(graphs.SOURCE))
        return place.parent if place.is_absolute() else None
    return None if source == "digits" or source.startswith("hf:") else Path(source).expanduser()


def data(settings: Recipe) -> Samples:
    """What the recipe trains on: pictures, or graphs."""
    if settings.data.source.startswith(graphs.SOURCE):
        return graphs.load(settings)
    labels = recipe.objective(settings).supervision != "none"
    return load_split(settings.data.source, "train", settings.data.size, labels)


def method(settings: Recipe, train_set: Samples, processes: int = 1) -> Method:
    """The method that the recipe describes, with fresh weights drawn from its seed."""
    if isinstance(train_set, GraphSet):
        return graphs.method(settings, train_set, processes)
    checks.choice("method", settings.method, tuple(METHODS))
    channels, height, side = train_set.shape
    if settings.encoder.name == "tiny" and height != side:
        raise ValueError(
            f"encoder.name=tiny takes square pictures, got {height}x{side}: set data.size={min(height, side)}"
        )
    torch.manual_seed(randomness.mix(settings.seed))
    encoder = encoder_of(settings, channels, side)
    module = METHODS[settings.method](
        encoder,
        head_of(settings, encoder, channels, side),
        objective_of(settings, gather=processes > 1),
        views_of(settings, side),
        *optimizers.of_recipe(settings),
        settings.seed,
        settings.trainer.channels_last,
        **_memory_of(settings, len(train_set), processes),
    )
    if settings.trainer.channels_last:
        for network in module.networks():
            network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if settings.trainer.compile is not None:
        for network in module.networks():
            network.compile(mode=settings.trainer.compile)
        # Its diagnostics outlive the step, so its tensors must not lie in a graph's reused memory.
        module.objective.compile()
    if isinstance(train_set, ImageSet):
        module.images = train_set.images
    module.labels = train_set.labels
    return module


def objective_of(settings: Recipe, gather: bool = False) -> InfoNCE:
    """The objective, with the candidates that fit the method where the recipe does not say."""
    fitting: dict[str, Any] = {}
    if settings.method == "moco_v3":
        fitting["in_batch"] = "other"
    elif settings.method != "simclr":
        fitting["in_batch"] = None
    if settings.memory.close == "positives":
        fitting["combine_positives"] = "log_of_mean"
    made = recipe.objective(
        settings, gather=gather, **{k: v for k, v in fitting.items() if k not in settings.objective}
    )
    if not isinstance(made, InfoNCE):
        raise ValueError(f"objective.preset={settings.objective['preset']} is for graphs, and these are pictures")
    if settings.method == "simclr" and made.in_batch is None:
        raise ValueError(
            f"method=simclr has no negatives but those of the batch, and objective.preset="
            f"{settings.objective.get('preset')} takes none of them: use method=moco or instance_discrimination"
        )
    if made.in_batch is not None and settings.trainer.batch_size < 2:
        raise ValueError("trainer.batch_size=1 leaves no negatives in the batch: use at least 2")
    if made.reduction == "none":
        raise ValueError("objective.reduction=none gives no single loss to train on: use mean or sum")
    return made


def _memory_of(settings: Recipe, size: int, processes: int) -> dict[str, Any]:
    """What the method takes beside what all take: its memory of so many pictures."""
    chosen, outputs = settings.memory, settings.encoder.outputs
    if settings.method == "moco":
        share = settings.trainer.batch_size // processes
        if share % chosen.split:
            raise ValueError(
                f"memory.split={chosen.split} does not divide the batch of {share} that a process sees: "
                "choose a divisor, or 1 for plain batch-norm"
            )
        queue = Queue(chosen.queue, outputs, gather=processes > 1)
        return {"queue": queue, "momentum": chosen.momentum, "split": chosen.split}
    if settings.method == "moco_v3":
        predictor = encoders.projection(outputs, settings.encoder.hidden, outputs, settings.encoder.norm)
        return {"predictor": predictor, "momentum": chosen.momentum}
    if settings.method == "instance_discrimination":
        return {"past": _past(settings, size, processes)}
    if settings.method == "cmc":
        return {"pasts": tuple(_past(settings, size, processes, view) for view in range(2))}
    if settings.method == "local_aggregation":
        return {"past": _past(settings, size, processes), "background": chosen.background, "form": chosen.form}
    return {}


def _past(settings: Recipe, size: int, processes: int, view: int = 0) -> Past:
    """The bank of one of a picture's views, and its clusters."""
    chosen, seed = settings.memory, randomness.mix(settings.seed, view)
    bank = MemoryBank(size, settings.encoder.outputs, chosen.bank, gather=processes > 1, seed=seed)
    clusters = Clusters(chosen.clusters, chosen.repeats, seed) if chosen.clusters > 0 else None
    steps = size // settings.trainer.batch_size  # of an epoch
    return Past(bank, clusters, chosen.close, chosen.cluster_after * steps, chosen.cluster_every * steps, seed)


def encoder_of(settings: Recipe, channels: int, side: int) -> nn.Module:
    """The encoder, for pictures of so many channels and pixels a side."""
    if settings.method != "cmc":
        return _encoder(settings, channels, side, ":" not in settings.encoder.name)
    if settings.views.options.get("mean") is not None:
        raise ValueError("method='cmc' splits pictures in [0, 1] itself: leave mean and std out of views.options")
    split = split_of(channels)
    first, second = (_encoder(settings, count, side, True) for count in channels_of(split))
    return TwoViews(first, second, split)


def _encoder(settings: Recipe, channels: int, side: int, says_channels: bool) -> nn.Module:
    options = dict(settings.encoder.options)
    if says_channels:
        options = {"channels": channels, **options}
    if settings.encoder.name == "tiny":
        options.setdefault("size", side)
    return encoders.build(settings.encoder.name, **options)


def head_of(settings: Recipe, encoder: nn.Module, channels: int, side: int) -> nn.Module:
    """The projection head on an encoder, or the two on one of two views."""
    chosen = settings.encoder

    def on(encoder: nn.Module, channels: int) -> tuple[nn.Module, int]:
        width = encoders.feature_size(encoder, (channels, side, side))
        if chosen.hidden == 0:
            return nn.Linear(width, chosen.outputs), width
        return encoders.projection(width, chosen.hidden, chosen.outputs, chosen.norm), width

    if not isinstance(encoder, TwoViews):
        return on(encoder, channels)[0]
    first, second = map(on, (encoder.first, encoder.second), channels_of(encoder.split))
    return TwoHeads(first[0], second[0], (first[1], second[1]))


def views_of(settings: Recipe, side: int) -> image_views.ImageViews:
    """What makes the views."""
    if settings.views.preset not in VIEWS:
        raise ValueError(f"views.preset={settings.views.preset!r} is not known: use one of {', '.join(VIEWS)}")
    try:
        return VIEWS[settings.views.preset](**{"size": side, **settings.views.options})
    except TypeError as error:
        raise ValueError(f"views.options: {error}") from error


def loader(batches: Batches, train_set: Samples, settings: Recipe) -> Any:
    """What hands batches to the method: indices alone where it holds the samples, else with decoded pictures."""
    if not isinstance(train_set, StreamedImages):
        return batches
    workers = settings.data.workers
    return DataLoader(
        train_set, batch_sampler=_Lists(batches), num_workers=workers, pin_memory=True, persistent_workers=workers > 0
    )


def refresh(
    batches: Batches, module: Method, train_set: Samples, settings: Recipe, processes: int = 1
) -> Refresh | None:
    """The callback that gives the sampler new embeddings, if it wants any."""
    if not isinstance(batches.sampler, RefreshedBatchSampler):
        return None
    checks.choice("batches.embeddings", settings.batches.embeddings, ("encode", "bank"))

    def encode(index: Tensor) -> Tensor:
        whole = len(index) == len(train_set)
        if isinstance(train_set, GraphSet):
            assert isinstance(module, GraphMethod)
            rows = module.embeddings(train_set)[index]
        else:
            network = nn.Sequential(module.encoder, module.head)
            prepare = getattr(module.views, "plain", None)
            part = train_set if whole else train_set.subset(index)
            with module.trainer.precision_plugin.forward_context():  # as in a training step
                rows = extract_all(network, part, prepare=prepare, workers=settings.data.workers)
        # As the loss scores them: by raw inner products, the samples of largest norm would be everyone's neighbours.
        cosines = isinstance(module.objective, InfoNCE) and module.objective.normalize
        return normalized(rows) if cosines else rows

    shared = shared_embeddings(encode, len(train_set), [module.encoder, module.head])
    if settings.batches.embeddings == "encode":
        return Refresh(batches.sampler, shared)
    # A row is random until its sample has been seen.
    module.recent = MemoryBank(
        len(train_set), settings.encoder.outputs, momentum=0.0, gather=processes > 1, seed=settings.seed
    )
    return Refresh(batches.sampler, lambda: module.recent.rows if module.recent is not None else shared())


class _Lists:
    """Batches of indices as lists, for a DataLoader."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        for index in self.batches:
            yield index.tolist()
