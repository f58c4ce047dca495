"""Images as a modality: sources, views, encoders, embeddings and evaluation in one place."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn

from hardneg import callables, checks
from hardneg.division import Division
from hardneg.evaluation import DEFAULT_METRICS, EvaluationResult, evaluate_features
from hardneg.images import encoders
from hardneg.images.features import extract_all, labeled
from hardneg.images.folders import holds_images
from hardneg.images.image_set import ImageSet, StreamedImages
from hardneg.images.splits import comparable, load_split
from hardneg.images.transform import ImageTransform
from hardneg.images.views import ImageViews, moco_views, simclr_views
from hardneg.modality import GIVEN, DataSection, EvaluationRequest, Modality, ProjectedEncoderSection, ViewsSection
from hardneg.recipe_section import Count, CountOrZero, Section, naming

ImageSamples = ImageSet | StreamedImages
_DATA_KEYS = ("source", "size")
PRESETS: dict[str, Callable[..., ImageViews]] = {"simclr": simclr_views, "moco": moco_views}


class ImageData(DataSection):
    """Images from a source."""

    source: str = "digits"
    """``digits``, ``hf:NAME``, an .npz, .parquet, .arrow or .tar file, a folder, or ``package.module:callable``."""
    size: Count | None = None
    """Side of the images in pixels, if they differ in size."""
    workers: CountOrZero = 2
    """Processes that decode images which do not fit in memory."""


class ImageViewsSection(ViewsSection):
    """Augmentations of images."""

    preset: str = "simclr"
    """``simclr``, ``moco``, or ``package.module:callable``, which is called with ``size`` and the options."""


class ImageEncoder(ProjectedEncoderSection):
    """An image encoder and its projection head."""

    name: str = "tiny"
    """``tiny``, ``resnet18``, ``resnet34``, ``resnet50``, or ``package.module:callable``."""


class ImageTrainerOptions(Section):
    """Trainer settings for convolutional networks."""

    compile: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = None
    """A mode of torch.compile for the networks."""
    channels_last: bool = True
    """Memory layout of images and weights."""
    chunk_size: Count | None = None
    """Samples that an encoder processes at a time, with the gradient of the whole batch."""

    @model_validator(mode="after")
    def _check_chunks(self) -> Self:
        if self.chunk_size is not None and self.compile is not None:
            raise ValueError(
                f"chunk_size={self.chunk_size} runs encoders that are not compiled: leave out trainer.compile"
            )
        return self


class Images(Modality):
    """Images (C, H, W) uint8, in memory or decoded on demand."""

    name = unit = "images"
    Data, Views, Encoder, TrainerOptions = ImageData, ImageViewsSection, ImageEncoder, ImageTrainerOptions
    encoders = encoders.ENCODERS
    has_test_set = True

    def accepts(self, source: str) -> bool:
        return source == "digits" or source.startswith("hf:") or holds_images(Path(source).expanduser())

    def resolve(self, source: str) -> str:
        path = self.location(source)
        if path is None:
            return source
        # Links are not resolved, except if ".." follows a link.
        return str(path.resolve() if ".." in path.parts else path.absolute())

    def location(self, source: str) -> Path | None:
        by_name = source in ("digits", GIVEN) or source.startswith("hf:") or callables.is_name(source)
        return None if by_name else Path(source).expanduser()

    def load(self, data: Any, *, labels: bool = False, given: Any = None) -> ImageSamples:
        with naming("data", _DATA_KEYS):
            images = load_split(_source(data.source, given), "train", data.size)
        if labels:
            _require_labels(
                images, data.source, "this loss", "; or choose a loss without labels, objective.preset=simclr"
            )
        return images

    def load_test(self, data: Any, train: Any, *, given: Any = None) -> ImageSamples:
        with naming("data", _DATA_KEYS):
            found = load_split(
                _source(data.source, given), "test", data.size, channels=train.shape[0], division=train.division
            )
        return comparable(train, found)

    def load_shown(self, data: Any, shape: tuple[int, ...], division: Division, *, given: Any = None) -> ImageSamples:
        source = _source(data.source, given)
        try:
            return load_split(source, "test", data.size, channels=shape[0], division=division)
        except ValueError:
            train = load_split(source, "train", data.size, channels=shape[0])
            if train.labels is not None:
                raise
            return train

    def shape(self, samples: Any) -> tuple[int, ...]:
        shape: tuple[int, ...] = samples.shape
        return shape

    def check_shape(self, shape: tuple[int, ...]) -> None:
        if len(shape) != 3 or min(shape) < 1 or max(shape) >= 1 << 31:
            raise ValueError(f"shape {shape} is not (C, H, W) of an image")

    def views(self, views: Any, shape: tuple[int, ...]) -> Any:
        if views.preset == GIVEN:
            raise ValueError("the views of this run were given in Python: pass views=")
        options = {"size": shape[-1], **views.options}
        if callables.is_name(views.preset):
            make: Callable[..., Any] = callables.load(views.preset, "views.preset")
        elif views.preset in PRESETS:
            make = PRESETS[views.preset]
        else:
            raise ValueError(f"views.preset={views.preset!r} is not known: use one of {', '.join(PRESETS)}")
        keys = {*views.options, *(ImageViews.__dataclass_fields__.keys() - {"size"})}  # the default size is the data's
        try:
            with naming("data", {"size"} - {*views.options}), naming("views.options", keys):
                return make(**options)
        except TypeError as error:
            raise ValueError(f"views.options: {error}") from error

    def view_bytes(self, views: Any, shape: tuple[int, ...], count: int) -> int:
        side = getattr(views, "size", 0)
        return 2 * count * 4 * shape[0] * side * side  # two views in float32

    def encoder(self, encoder: Any, shape: tuple[int, ...]) -> nn.Module:
        channels, height, width = shape
        options: dict[str, Any] = {"channels": channels, **encoder.options}
        if encoder.name == "tiny":
            if height != width:
                raise ValueError(
                    f"encoder.name=tiny takes square images, got {height}x{width}: set data.size={min(height, width)}"
                )
            options.setdefault("size", width)
        checks.choice("encoder.name", encoder.name, tuple(encoders.ENCODERS))
        return encoders.build(encoder.name, **options)

    def feature_size(self, encoder: nn.Module, shape: tuple[int, ...]) -> int:
        return encoders.feature_size(encoder, shape)

    def embed(self, network: nn.Module, samples: Any, views: Any = None, workers: int = 0) -> Tensor:
        return extract_all(network, samples, prepare=getattr(views, "plain", None), workers=workers)

    def labeled(self, features: Tensor, samples: Any) -> tuple[Tensor, Tensor]:
        return labeled(features, samples)

    def evaluate(self, encoder: nn.Module, request: EvaluationRequest, workers: int = 0) -> EvaluationResult:
        train, test = self._evaluation_sets(request)
        test = comparable(train, test)
        features = [labeled(self.embed(encoder, part, request.views, workers), part) for part in (train, test)]
        found = evaluate_features(*features[0], *features[1], metrics=request.metrics or DEFAULT_METRICS)
        found.measured = f"probes trained on {len(features[0][1]):,} images, tested on {len(features[1][1]):,} others"
        return found

    def sample(self, samples: Any, rows: Tensor) -> ImageSet:
        if isinstance(samples, ImageSet):
            return samples.subset(rows)
        # A broken image is replaced by another one, which may be among the rows already.
        images = dict(samples[int(row)] for row in rows)
        labels = None if samples.labels is None else samples.labels[torch.tensor([*images])]
        return ImageSet(torch.stack([*images.values()]), labels, samples.classes, samples.name)

    def thumbnail(self, samples: Any, index: int) -> Tensor:
        image: Tensor = samples[index][1]
        return image

    def example(self, shape: tuple[int, ...], views: Any) -> Tensor | None:
        prepare = getattr(views, "plain", None)
        image = torch.zeros(1, *shape, dtype=torch.uint8)
        found: Tensor | None = None if prepare is None else prepare(image)
        return found

    def transform(
        self, data: Any, shape: tuple[int, ...], views: Any, recorded: Mapping[str, Any]
    ) -> Callable[[Any], Tensor]:
        channels, height, width = shape
        return ImageTransform((channels, height, width), data.size, getattr(views, "plain", None))

    def features(self, encoder: nn.Module, inputs: Sequence[Any], device: torch.device) -> Tensor:
        found: Tensor = encoder(torch.stack(list(inputs)).to(device))
        return found

    def resident(self, samples: Any) -> ImageSet | None:
        return samples if isinstance(samples, ImageSet) else None

    def _evaluation_sets(self, request: EvaluationRequest) -> tuple[ImageSamples, ImageSamples]:
        source = _source(request.data.source, request.given)
        size = request.size if request.size is not None else request.shape[-1] if request.named else request.data.size

        def parts(division: Division | None) -> tuple[ImageSamples, ImageSamples]:
            train = load_split(source, "train", size, channels=request.shape[0], division=division)
            _require_labels(train, request.data.source, "an evaluation")
            return train, load_split(source, "test", size, labels=True, channels=request.shape[0], division=division)

        with nullcontext() if request.named else naming("data", _DATA_KEYS):
            if request.own or request.division is None:
                return parts(request.division)
            train, test = parts(None)
            return parts(request.division) if _holds_copies(request.division, train, test) else (train, test)


def _source(source: str, given: Any) -> Any:
    """The source of a recipe as `load_images` takes it: a name, a path, or an object."""
    if given is not None:
        return given
    if source == GIVEN:
        raise ValueError("the data of this run were given in Python: pass data=")
    if callables.is_name(source) and not source.startswith("hf:"):
        return callables.load(source, "data.source")
    return source


def _require_labels(images: ImageSamples, source: str, user: str, otherwise: str = "") -> None:
    """Raise if no image has a label. user: what needs them · otherwise: another remedy than labels."""
    if images.labels is None or not bool((images.labels >= 0).any()):
        raise ValueError(
            f"{source!r} has no labels, and {user} needs them: use one folder per class, an array 'labels' in an .npz, "
            f"or a column 'label' in parquet{otherwise}"
        )


def _holds_copies(division: Division, train: ImageSamples, test: ImageSamples) -> bool:
    """Whether a source without a test part contains images that the run held out.

    The rest of such a source may have been trained on. A source with a test part keeps it, with a warning if some of
    its images were not held out.
    """
    held_out = torch.tensor(division.held_out, dtype=torch.int64)
    inside = [
        torch.isin(part.ids, held_out)
        if isinstance(part, ImageSet) and part.ids is not None
        else torch.zeros(0, dtype=torch.bool)
        for part in (train, test)
    ]
    found = int(inside[1].sum())
    if bool(inside[0].any()) or (found and (train.division or Division()).test == Division.HELD_OUT):
        return True
    if 0 < found < len(test):
        warnings.warn(
            f"{len(test) - found} of the {len(test)} images of {test.name} were not held out by the run, and it may "
            "have been trained on them",
            stacklevel=3,
        )
    return False
