"""The encoder of a run, ready to embed raw samples."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hardneg import checks
from hardneg.evaluation.features import evaluating
from hardneg.training.recipe import ENCODER_CODE, Recipe
from hardneg.training.saved_run import load_run


@dataclass(frozen=True)
class TrainedEncoder:
    """The encoder of a run and what it needs to embed raw samples.

    Called with one sample it returns its features (d,), with a list or tuple of samples (N, d), without gradients. A
    sample is a path, a PIL image or a uint8 array for images, a ``torch_geometric.data.Data`` for graphs, a string for
    texts.

    Args:
        module: the network, in evaluation mode; maps a batch to features (B, d)
        transform: turns one raw sample into an input of the network, without a batch dimension; usable in a Dataset
        settings: the recipe of the run
        run: its folder
    """

    module: nn.Module
    transform: Callable[[Any], Any]
    settings: Recipe
    run: Path | None = None

    @torch.no_grad()
    def __call__(self, samples: Any, batch_size: int = 256) -> Tensor:
        batch_size = checks.whole("batch_size", batch_size)
        if not isinstance(samples, list | tuple):
            return self([samples])[0]
        if not samples:
            raise ValueError("samples is empty: give at least one")
        device = next((parameter.device for parameter in self.module.parameters()), torch.device("cpu"))
        features = []
        with evaluating(self.module):
            for start in range(0, len(samples), batch_size):
                inputs = [
                    self._input(samples, number) for number in range(start, min(start + batch_size, len(samples)))
                ]
                features.append(self.settings.kind.features(self.module, inputs, device))
        return torch.cat(features)

    def _input(self, samples: Sequence[Any], number: int) -> Any:
        """The input of one sample; errors name its position."""
        try:
            return self.transform(samples[number])
        except ValueError as error:
            raise ValueError(f"samples[{number}]: {error}" if len(samples) > 1 else str(error)) from None

    def __repr__(self) -> str:
        parameters = sum(parameter.numel() for parameter in self.module.parameters())
        sizes = tuple(getattr(self.transform, "shape", ()))
        return (
            f"TrainedEncoder({str(self.run)!r}: {self.settings.method} on {self.settings.data.source!r},\n"
            f"  module: {self.settings.encoder.name!r}, {parameters:,} parameters\n"
            f"  transform: {type(self.transform).__name__}{f' to {sizes}' if sizes else ''})"
        )

    def __getattr__(self, name: str) -> Any:
        network = self.__dict__.get("module")  # not there while a copy is made
        remedy = f": use encoder.module.{name}" if network is not None and hasattr(network, name) else ""
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{remedy}")

    def to(self, device: torch.device | str) -> "TrainedEncoder":
        """The same with the network on another device."""
        return replace(self, module=self.module.to(device))


def load_encoder(
    run: str | Path, *, trust: bool = False, data: Any = None, views: Any = None, encoder: nn.Module | None = None
) -> TrainedEncoder:
    """The encoder of a run with its weights; arguments as for `hardneg.load_encoder`."""
    loaded = load_run(run, trust=trust, data=data, views=views, encoder=encoder, code=ENCODER_CODE)
    loaded.warn_if_unfinished()
    kind = loaded.settings.kind
    transform = kind.transform(loaded.settings.data, loaded.shape, loaded.views, loaded.recorded)
    return TrainedEncoder(loaded.encoder, transform, loaded.settings, loaded.folder)
