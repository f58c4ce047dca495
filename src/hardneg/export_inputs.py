"""The inputs of an encoder that is exported: one tensor, several by name, or tensors of samples that differ in size."""

import inspect
import json
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hardneg import checks, randomness
from hardneg.checks import as_tensor

IMAGES, FEATURES = "images", "features"  # names of the input and the output in ONNX files


class RaggedEncoder(nn.Module):
    """An encoder of samples that differ in size, called with tensors by name, so that it can be exported.

    encoder: its weights are written under its own names
    """

    dynamic: ClassVar[dict[str, dict[int, str]]]
    """The name of each dimension of each input that differs between batches."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    @abstractmethod
    def random(self, samples: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Inputs of as many random samples."""


def weights_of(encoder: nn.Module) -> nn.Module:
    """The module whose weights are written."""
    return encoder.encoder if isinstance(encoder, RaggedEncoder) else encoder


@dataclass(frozen=True)
class Inputs:
    """One example of the inputs of an encoder, and how they are passed.

    tensors: (1, …) by name · passing: "tensor" (one tensor), "dict" (one dict) or "keywords"
    """

    tensors: dict[str, Tensor]
    passing: str

    def arguments(self, tensors: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of the encoder for these inputs."""
        if self.passing == "keywords":
            return (), tensors
        return ((tensors,) if self.passing == "dict" else tuple(tensors.values())), {}

    def call(self, program: Callable[..., Any], tensors: dict[str, Tensor]) -> Any:
        positional, keywords = self.arguments(tensors)
        return program(*positional, **keywords)

    def random(self, batch: int) -> dict[str, Tensor]:
        """Random inputs of ``batch`` rows: normal floats, and permutations of the integers of the example."""
        generator = randomness.generator("cpu", batch)
        found = {}
        for name, tensor in self.tensors.items():
            shape = (batch, *tensor.shape[1:])
            if tensor.is_floating_point():
                found[name] = torch.randn(shape, generator=generator)
            else:
                order = torch.rand(batch, tensor.numel(), generator=generator).argsort(dim=1)
                found[name] = tensor.flatten()[order].view(shape)
        return found

    def doubled(self) -> dict[str, Tensor]:
        """The example twice: torch.export treats a batch of one as a constant."""
        return {name: torch.cat([tensor, tensor]) for name, tensor in self.tensors.items()}

    def dimensions(self) -> dict[str, dict[int, Any]]:
        """The dynamic dimensions of each input, for torch.export."""
        batch = torch.export.Dim("batch")
        return {name: {0: batch} for name in self.tensors}

    def shape(self) -> str:
        """The shapes without the batch dimension, as text."""
        shapes = {name: list(tensor.shape[1:]) for name, tensor in self.tensors.items()}
        return ",".join(map(str, shapes[IMAGES])) if self.passing == "tensor" else json.dumps(shapes)


@dataclass(frozen=True)
class RaggedInputs(Inputs):
    """Inputs of a `RaggedEncoder`, which draws them itself."""

    encoder: RaggedEncoder

    def random(self, batch: int) -> dict[str, Tensor]:
        return self.encoder.random(batch, randomness.generator("cpu", batch))

    def doubled(self) -> dict[str, Tensor]:
        return self.random(2)

    def dimensions(self) -> dict[str, dict[int, Any]]:
        names = {name for dynamic in self.encoder.dynamic.values() for name in dynamic.values()}
        made = {name: torch.export.Dim(name) for name in names}
        return {key: {at: made[name] for at, name in dynamic.items()} for key, dynamic in self.encoder.dynamic.items()}

    def shape(self) -> str:
        dynamic = self.encoder.dynamic
        shapes = {
            name: [dynamic[name].get(at, size) for at, size in enumerate(tensor.shape)]
            for name, tensor in self.tensors.items()
        }
        return json.dumps(shapes)


def example_inputs(encoder: nn.Module, example: object) -> Inputs:
    """The inputs that an example shows: a tensor (1, …) or a mapping of tensors (1, …); a ragged encoder needs none."""
    if isinstance(encoder, RaggedEncoder):
        return RaggedInputs(encoder.random(1, randomness.generator("cpu", 0)), "keywords", encoder)
    if not isinstance(example, Mapping):
        tensor = checks.floating("example", as_tensor("example", example))
        if tensor.dim() < 2 or len(tensor) != 1 or tensor.numel() == 0:
            raise ValueError(f"example must be one image (1, C, H, W), got {tuple(tensor.shape)}: use images[:1]")
        return Inputs({IMAGES: tensor.detach().float().cpu()}, "tensor")
    tensors: dict[str, Tensor] = {}
    for name, given in example.items():
        tensor = as_tensor(f"example[{name!r}]", given).detach().cpu()
        if tensor.dim() < 1 or len(tensor) != 1 or tensor.numel() == 0:
            raise ValueError(f"example[{name!r}] must have shape (1, …), one sample, got {tuple(tensor.shape)}")
        tensors[name] = tensor.float() if tensor.is_floating_point() else tensor
    if not tensors or not all(isinstance(name, str) for name in tensors):
        raise ValueError(f"example must map the names of the inputs to tensors, got {list(tensors)}")
    if FEATURES in tensors:
        raise ValueError(f"example has an input {FEATURES!r}, the name of the output: rename it in encoder.forward")
    try:
        inspect.signature(encoder.forward).bind(**tensors)
    except TypeError:  # no parameters of these names
        return Inputs(tensors, "dict")
    return Inputs(tensors, "keywords")
