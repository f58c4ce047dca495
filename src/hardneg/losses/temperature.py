"""A temperature that is trained with the encoder."""

import math

import torch
from torch import Tensor, nn

from hardneg import checks
from hardneg.losses.schedules import Schedule
from hardneg.losses.state import LenientState


class Learnable(LenientState):
    """A temperature trained in log-space and kept at or above a minimum, as in CLIP.

    initial: first value · minimum: smallest value; a step below it is projected back at the next call

    Examples:
        >>> import hardneg as hn
        >>> loss = hn.InfoNCE(temperature=hn.Learnable(0.07))
        >>> [name for name, _ in loss.named_parameters()]
        ['temperature.log_value']
    """

    def __init__(self, initial: float = 0.07, minimum: float = 0.01) -> None:
        super().__init__()
        for name, given in (("initial", initial), ("minimum", minimum)):
            if isinstance(given, Schedule):
                raise ValueError(f"{name} must be a number: a learnable temperature takes no schedule, got {given!r}")
            check_no_gradient(name, given)
        self.minimum = checks.number("minimum", minimum, above=0, below=float("inf"))
        initial = checks.number("initial", initial, at_least=self.minimum, below=float("inf"))
        self.log_value = nn.Parameter(torch.tensor(math.log(initial)))

    def forward(self) -> Tensor:
        """The temperature, ()."""
        if torch._C._are_functorch_transforms_active():  # they allow no change in place
            log_value: Tensor = self.log_value
            return (log_value + (log_value.clamp(min=math.log(self.minimum)) - log_value).detach()).exp()
        with torch.no_grad():  # projection: a clamp inside the graph would leave a zero gradient below the minimum
            self.log_value.data.clamp_(min=math.log(self.minimum))
        return self.log_value.exp()

    def extra_repr(self) -> str:
        return f"{float(self.log_value.detach().exp()):.4g}, minimum={self.minimum:g}"


def check_no_gradient(name: str, given: object) -> None:
    """Raise if a temperature is a tensor that requires a gradient, such as a parameter: it would not be trained."""
    if isinstance(given, Tensor) and given.requires_grad:
        number = float(given.detach()) if given.numel() == 1 else 0.07
        raise ValueError(
            f"{name} requires a gradient: pass hn.Learnable({number:.4g}), which has a parameter of its own, and "
            "loss.parameters() to the optimizer"
        )
