"""Modalities: everything the rest of the package needs to know about images, graphs or another kind of data.

A modality loads a source, makes views, builds an encoder, embeds and evaluates a whole set, and draws a sample. No code
outside its folder depends on the type of a sample. `get` finds one by name, `of_source` by the form of a source.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from hardneg import callables
from hardneg.division import Division
from hardneg.recipe_section import Count, CountOrZero, Section

if TYPE_CHECKING:
    from hardneg.evaluation import EvaluationResult, Metric

GIVEN = "given in Python"  # the name, in a recipe, of a part that was passed as an object


class Samples(Protocol):
    """A set of samples with labels (N,), −1 where unknown, or None."""

    @property
    def name(self) -> str: ...
    @property
    def labels(self) -> Tensor | None: ...
    @property
    def classes(self) -> Sequence[str]: ...
    @property
    def division(self) -> Division | None: ...
    def __len__(self) -> int: ...
    def subset(self, indices: Tensor | Sequence[int]) -> Self: ...


class ResidentSamples(Protocol):
    """Samples that are held in memory, and whose batches are selected on the device."""

    def to(self, device: torch.device | str) -> "ResidentSamples": ...
    def batch(self, index: Tensor) -> Any: ...


class DataSection(Section):
    """Where the samples come from."""

    source: str
    """A name, file or folder (see docs/own-data.md), or ``package.module:callable``, called with the split."""
    not_negatives: str | None = None
    """A .jsonl or .parquet file of pairs that are not negatives of each other: columns ``a`` and ``b`` with values of
    the data's column ``id``, else row numbers in the training split."""


class ViewsSection(Section):
    """Random views of a batch."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of the views; they replace those of the preset."""


class EncoderSection(Section):
    """The network that is kept after training."""

    name: str
    """A name, or ``package.module:callable``, which returns a torch.nn.Module."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the encoder."""


class ProjectedEncoderSection(EncoderSection):
    """An encoder with a projection head, which most methods train."""

    hidden: CountOrZero = 512
    """Hidden units of the projection head; 0 makes it linear."""
    outputs: Count = 128
    """Dimension of the embeddings."""
    norm: bool = True
    """Batch-norm in the head."""


@dataclass(frozen=True)
class EvaluationRequest:
    """The data, views and metrics of an evaluation of a trained encoder.

    data: the section of the recipe, or of another source · shape: of a training sample · division: that the run
    recorded, or None · views: the run's, which prepare samples · named: whether the user named the source · own:
    whether it is the run's own · size: of its samples, if the user named one · metrics: None for all that
    fit · seed: of what an evaluation draws · given: data passed as an object
    """

    data: Any
    shape: tuple[int, ...]
    division: Division | None
    views: Any
    named: bool = False
    own: bool = True
    size: int | None = None
    metrics: "Sequence[Metric] | None" = None
    seed: int = 0
    given: Any = None


class Modality(ABC):
    """A kind of data. Subclasses are registered in ``MODALITIES``; there is one instance of each."""

    name: ClassVar[str]
    unit: ClassVar[str] = "samples"  # what a report calls its samples
    Data: ClassVar[type[DataSection]]
    Views: ClassVar[type[ViewsSection]]
    Encoder: ClassVar[type[EncoderSection]]
    TrainerOptions: ClassVar[type[Section]]
    """Settings of the trainer that only this modality has."""
    encoders: ClassVar[Mapping[str, Callable[..., nn.Module]]]
    """The built-in encoders by name."""
    has_test_set: ClassVar[bool]
    """False if a set is evaluated by cross-validation; there is no online evaluation then."""

    @abstractmethod
    def accepts(self, source: str) -> bool:
        """Whether a source of this form is of this modality, unless the method is for another."""

    @abstractmethod
    def resolve(self, source: str) -> str:
        """The source with an absolute path, so that a run finds it from every working directory."""

    def resolve_encoder(self, name: str) -> str:
        """The name of an encoder, with an absolute path if it is a folder."""
        return name

    @abstractmethod
    def location(self, source: str) -> Path | None:
        """The file or folder of a source; None if the source is found by name."""

    @abstractmethod
    def load(self, data: Any, *, labels: bool = False, given: Any = None) -> Any:
        """The training set of a data section, or of data passed as an object. labels: raise if there are none."""

    @abstractmethod
    def load_test(self, data: Any, train: Any, *, given: Any = None) -> Any:
        """The test set, with its labels numbered as in the training set; None if the modality has none."""

    @abstractmethod
    def load_shown(self, data: Any, shape: tuple[int, ...], division: Division, *, given: Any = None) -> Any:
        """The set that a report shows: the test set, or the whole set if there is none."""

    def sample_ids(self, samples: Any) -> Sequence[Any] | None:
        """The values of the data's column ``id``, one per sample; None if there is none."""
        found: Sequence[Any] | None = getattr(samples, "sample_ids", None)
        return found

    @abstractmethod
    def shape(self, samples: Any) -> tuple[int, ...]:
        """The size of one sample, from which an encoder is built."""

    @abstractmethod
    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise unless this can be the shape of a sample."""

    @abstractmethod
    def views(self, views: Any, shape: tuple[int, ...]) -> Any:
        """The callable that makes random views of a batch of such samples."""

    @abstractmethod
    def view_bytes(self, views: Any, shape: tuple[int, ...], count: int) -> int:
        """Bytes of the views of ``count`` samples, or 0 if samples differ in size."""

    @abstractmethod
    def encoder(self, encoder: Any, shape: tuple[int, ...]) -> nn.Module:
        """A fresh encoder for samples of this shape."""

    def encoder_options(self, name: str) -> set[str]:
        """The arguments that ``encoder.options`` can set for an encoder of this name; none if it is not a built-in."""
        made = self.encoders.get(name)
        return set() if made is None else {*inspect.signature(made).parameters}

    def unused_encoder_keys(self, name: str) -> set[str]:
        """The keys of the section ``encoder`` that an encoder of this name does not use."""
        return set()

    @abstractmethod
    def feature_size(self, encoder: nn.Module, shape: tuple[int, ...]) -> int:
        """Number of features that the encoder returns."""

    @abstractmethod
    def embed(self, network: nn.Module, samples: Any, views: Any = None, workers: int = 0) -> Tensor:
        """Outputs (N, d) of the network in evaluation mode for all samples. views: prepare them for the network."""

    @abstractmethod
    def labeled(self, features: Tensor, samples: Any) -> tuple[Tensor, Tensor]:
        """Features and labels of the samples that have a label."""

    @abstractmethod
    def evaluate(self, encoder: nn.Module, request: EvaluationRequest, workers: int = 0) -> "EvaluationResult":
        """The metrics of a trained encoder."""

    @abstractmethod
    def sample(self, samples: Any, rows: Tensor) -> Any:
        """The samples of these rows, in memory; those that cannot be read are left out."""

    def caption(self, samples: Any, index: int) -> str | None:
        """One sample as a text that is shown instead of an image; None if it has an image."""
        return None

    @abstractmethod
    def thumbnail(self, samples: Any, index: int) -> Tensor:
        """One sample as an image (C, H, W) uint8."""

    def example(self, shape: tuple[int, ...], views: Any) -> Tensor | None:
        """A batch of one sample in the form of the encoder's input, for export; None if it is not a tensor."""
        return None

    def exportable(self, encoder: nn.Module, shape: tuple[int, ...]) -> nn.Module:
        """The encoder in a form that can be exported: with tensors as inputs; `example` shows them."""
        return encoder

    def recorded(self, data: Any, samples: Any) -> dict[str, Any]:
        """What a run records of its training set, as JSON, so that `transform` can prepare new samples alike."""
        return {}

    @abstractmethod
    def transform(
        self, data: Any, shape: tuple[int, ...], views: Any, recorded: Mapping[str, Any]
    ) -> Callable[[Any], Any]:
        """The function that turns one raw sample into an input of the encoder, without a batch dimension.

        data: the section of the recipe · shape: of a training sample · views: of the run · recorded: by `recorded`
        """

    @abstractmethod
    def features(self, encoder: nn.Module, inputs: Sequence[Any], device: torch.device) -> Tensor:
        """Features (B, d) of a batch of inputs that `transform` has returned, by an encoder on this device."""

    @abstractmethod
    def resident(self, samples: Any) -> ResidentSamples | None:
        """The samples if they are in memory, else None: a loader reads them then."""


def make_encoder(modality: Modality, encoder: EncoderSection, shape: tuple[int, ...]) -> nn.Module:
    """The encoder that a section names: one of the modality, or a user-defined one."""
    if encoder.name == GIVEN:
        raise ValueError("the encoder of this run was given in Python: pass encoder=")
    if ":" in encoder.name:
        return callables.module_from(encoder.name, "encoder.name", dict(encoder.options))
    return modality.encoder(encoder, shape)


MODALITIES = {
    "images": "hardneg.images.modality:Images",
    "graphs": "hardneg.graphs.modality:Graphs",
    "text": "hardneg.text.modality:Text",
}
_instances: dict[str, Modality] = {}


def get(name: str) -> Modality:
    """The modality of this name.

    Examples:
        >>> get("images").accepts("digits")
        True
    """
    if name not in _instances:
        module, _, attribute = MODALITIES[name].partition(":")
        _instances[name] = getattr(import_module(module), attribute)()
    return _instances[name]


def of_source(source: str, preferred: Sequence[str] = ()) -> str | None:
    """The name of the first modality that accepts a source of this form, the preferred ones first, or None."""
    return next((name for name in (*preferred, *MODALITIES) if get(name).accepts(source)), None)
