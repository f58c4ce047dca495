"""From a recipe to the parts of a run: data, method, batches and the callback that refreshes a sampler."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hardneg import methods, randomness
from hardneg.division import fingerprint
from hardneg.losses.infonce import InfoNCE
from hardneg.losses.inputs import normalized
from hardneg.losses.jsd import JSD
from hardneg.memory import MemoryBank
from hardneg.methods.method import Method, Plan
from hardneg.modality import GIVEN
from hardneg.not_negatives import read_not_negatives
from hardneg.recipe_section import naming
from hardneg.samplers.refreshed import RefreshedBatchSampler
from hardneg.training import optimizers, run_folder
from hardneg.training.batches import Batches
from hardneg.training.callbacks.sampler_refresh import Refresh, shared_embeddings
from hardneg.training.recipe import Recipe


@dataclass(frozen=True)
class Given:
    """Parts of a run that are passed as Python objects instead of being named in the recipe.

    data: a set of samples, a mapping from split to set, or a function of the split · views: as `ImageViews` ·
    encoder: a module
    """

    data: Any = None
    views: Any = None
    encoder: nn.Module | None = None

    def recorded(self, settings: Recipe) -> Recipe:
        """The recipe with these parts marked as given."""
        if self.views is not None and not methods.get(settings.method).uses_views:
            raise ValueError(f"method={settings.method} makes no views: leave out views=")
        changes: dict[str, Any] = {}
        for section, key, part in (
            ("data", "source", self.data),
            ("views", "preset", self.views),
            ("encoder", "name", self.encoder),
        ):
            if part is not None:
                changes[section] = getattr(settings, section).model_copy(update={key: GIVEN})
        return settings.model_copy(update=changes)


NOTHING = Given()
FEW = 16  # samples; fewer give a warning


def resolved(settings: Recipe) -> Recipe:
    """The recipe with the precision of this machine, and absolute paths, so that a run finds its files everywhere."""
    settings = with_precision(settings).with_source(settings.kind.resolve(settings.data.source))
    if settings.data.not_negatives is not None:
        file = str(Path(settings.data.not_negatives).expanduser().absolute())
        settings = settings.model_copy(update={"data": settings.data.model_copy(update={"not_negatives": file})})
    name = settings.kind.resolve_encoder(settings.encoder.name)
    return settings.model_copy(update={"encoder": settings.encoder.model_copy(update={"name": name})})


def with_precision(settings: Recipe) -> Recipe:
    """The recipe with the precision that suits this machine if its own is ``auto``."""
    trainer = settings.trainer
    if trainer.precision != "auto":
        return settings
    half = trainer.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    precision = "bf16-mixed" if half and torch.cuda.is_bf16_supported(including_emulation=False) else "32-true"
    return settings.model_copy(update={"trainer": trainer.model_copy(update={"precision": precision})})


def auto_batch_size(samples: int, processes: int = 1) -> int:
    """The largest power of two, up to 256, with which an epoch has at least four steps; at least 2 per process.

    Examples:
        >>> [auto_batch_size(samples) for samples in (3, 320, 100_000)]
        [2, 64, 256]
    """
    largest = min(256, max(samples // 4, 2))
    return max(1 << largest.bit_length() - 1, 2) // processes * processes or 2 * processes


def warn_if_few(settings: Recipe, samples: int) -> None:
    """Warn if the samples are too few for an encoder to learn from."""
    if 1 < samples < FEW:
        warnings.warn(
            f"{samples} {settings.kind.unit} are too few to train an encoder: it will know little more than these; "
            "hundreds are a beginning",
            stacklevel=3,
        )


def check_source(settings: Recipe, folder: Path) -> None:
    """Raise if the data of the run in a folder are no longer where its recipe says."""
    path = settings.kind.location(settings.data.source)
    if path is not None and not path.exists():
        raise ValueError(
            f"{folder}: data.source={settings.data.source!r} does not exist: restore the data, or write their new path "
            f"into {folder / run_folder.RECIPE}"
        )


def data(settings: Recipe, given: Given = NOTHING) -> Any:
    """The training set."""
    labels = settings.make_loss().supervision != "none"
    return settings.kind.load(settings.data, labels=labels, given=given.data)


def not_negatives(settings: Recipe, whole: Any) -> Tensor | None:
    """The pairs (P, 2) of rows of the training set that the file ``data.not_negatives`` lists; None without one."""
    file = settings.data.not_negatives
    if file is None:
        return None
    ids = settings.kind.sample_ids(whole)
    with naming("data", ["not_negatives"]):
        if ids is not None:
            return read_not_negatives(file, ids)
        return read_not_negatives(file, range(len(whole)), "" if whole.division is None else whole.division.fingerprint)


def stated_pairs(pairs: Tensor | None) -> dict[str, Any]:
    """The record of the pairs for the run folder, empty without any: another file with the same pairs is the same."""
    return {} if pairs is None else {"not_negatives": {"pairs": len(pairs), "fingerprint": fingerprint(pairs)}}


def method(settings: Recipe, train_set: Any, processes: int = 1, given: Given = NOTHING) -> Method:
    """The method that the recipe describes, with fresh weights drawn from its seed."""
    kind, trainer = settings.kind, settings.trainer
    shape = kind.shape(train_set)
    optimizer, rate = optimizers.of_recipe(settings)
    channels_last = getattr(trainer, "channels_last", False)

    plan = Plan(
        modality=kind,
        shape=shape,
        count=len(train_set),
        encoder=settings.encoder,
        settings=settings.memory,
        make_loss=lambda: loss(settings, processes),
        make_views=lambda: kind.views(settings.views, shape) if given.views is None else given.views,
        optimizer=optimizer,
        rate=rate,
        seed=settings.seed,
        batch_size=trainer.batch_size,
        processes=processes,
        drop_last=settings.batches.drop_last,
        channels_last=channels_last,
        given_encoder=given.encoder,
    )
    torch.manual_seed(randomness.mix(settings.seed))
    module = methods.get(settings.method).build(plan)
    if channels_last:
        for network in module.networks():
            network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    module.samples, module.labels = kind.resident(train_set), train_set.labels
    return module


def loss(settings: Recipe, processes: int = 1) -> InfoNCE | JSD:
    """The loss of the recipe; arguments that it does not set have the defaults of its method."""
    defaults = methods.get(settings.method).loss_defaults(settings.memory)
    made = settings.make_loss(**{key: value for key, value in defaults.items() if key not in settings.objective})
    if processes > 1 and settings.objective.get("gather", True) is not True:
        raise ValueError(
            f"objective.gather={str(settings.objective['gather']).lower()} is not used by recipes: the {processes} "
            "processes of a run compare their batches with each other; leave it out"
        )
    made.gather = processes > 1
    if isinstance(made, InfoNCE) and made.in_batch is not None and settings.trainer.batch_size < 2:
        raise ValueError("trainer.batch_size=1 leaves no negatives in the batch: use at least 2")
    if made.reduction == "none":
        raise ValueError("objective.reduction=none gives no single loss to train on: use mean or sum")
    return made


def compile_networks(settings: Recipe, module: Method) -> None:
    """Compile the networks and the loss, if the recipe sets ``trainer.compile``."""
    mode = getattr(settings.trainer, "compile", None)
    if mode is None:
        return
    for network in module.networks():
        network.compile(mode=mode)
    # Its diagnostics outlive the step, so its tensors must not be in the reused memory of a CUDA graph.
    module.objective.compile()


def dry_run(settings: Recipe, module: Method, train_set: Any) -> int:
    """One forward pass of a few samples, before anything is written; returns the dimension of the embeddings."""
    index = torch.arange(min(module.smallest_batch, len(train_set)))
    if module.samples is not None:
        samples = module.look_up(index)
    else:
        samples = torch.stack([train_set[int(row)][1] for row in index])
    labels = None
    if module.objective.supervision != "none":
        labels = module.known_labels()[index]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # statistics of so few samples mean nothing
            return module.dry_run(samples, index, labels)
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        reason = " ".join(f"{error}".split())[:300]
        raise ValueError(
            f"a forward pass of {len(index)} samples failed ({type(error).__name__}: {reason}): check that encoder, "
            "views and data fit"
        ) from error


def loader(batches: Batches, train_set: Any, settings: Recipe) -> Any:
    """The loader of a run: indices alone if the method holds the samples, else with decoded samples."""
    if settings.kind.resident(train_set) is not None:
        return batches
    workers = getattr(settings.data, "workers", 0)
    return DataLoader(
        train_set,
        batch_sampler=_Lists(batches),
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
        persistent_workers=workers > 0,
    )


def refresh(
    batches: Batches, module: Method, train_set: Any, settings: Recipe, processes: int = 1, dim: int = 128
) -> Refresh | None:
    """The callback that gives the sampler new embeddings, if it uses any. dim: of the embeddings of a training step."""
    if not isinstance(batches.sampler, RefreshedBatchSampler):
        return None
    kind = settings.kind

    def encode(index: Tensor) -> Tensor:
        part = train_set if len(index) == len(train_set) else train_set.subset(index)
        workers = getattr(settings.data, "workers", 0)
        with module.trainer.precision_plugin.forward_context():  # as in a training step
            rows = kind.embed(module.embedding_network(), part, module.views, workers)
        # As the loss scores them: by raw inner products, samples of large norm would be neighbors of all others.
        cosines = isinstance(module.objective, InfoNCE) and module.objective.normalize
        return normalized(rows) if cosines else rows

    shared = shared_embeddings(encode, len(train_set), [module.encoder, module.head])
    if settings.batches.embeddings == "encode":
        return Refresh(batches.sampler, shared)
    sampler = batches.sampler
    bank = module.recent = MemoryBank(len(train_set), dim, momentum=0.0, gather=processes > 1, seed=settings.seed)

    def last_embeddings() -> Tensor | None:
        # A row is random until its sample has been in a batch, and walks would hardly reach it. Batches of the first
        # epoch are uniform and hold every sample.
        return None if sampler.steps < len(sampler) else bank.rows

    return Refresh(sampler, last_embeddings)


class _Lists:
    """Batches of indices as lists, for a DataLoader."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        for index in self.batches:
            yield index.tolist()
