"""The settings of a loss: which values are allowed, which go together, and what they are at one moment of training."""

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hardneg import checks, distributed
from hardneg.losses.debiasing import Prior
from hardneg.losses.hardening import Hardening
from hardneg.losses.kernels import BACKENDS
from hardneg.losses.schedules import Adaptive, Schedule, value
from hardneg.losses.temperature import Learnable


class Adjustable(nn.Module, ABC):
    """A module whose settings may be assigned at any time: the assignment takes effect, or raises and changes nothing.

    Its settings are the arguments of its constructor, kept as attributes of the same names. A subclass checks and
    applies all of them in `_settle`, which its constructor calls last.
    """

    SETTINGS: ClassVar[tuple[str, ...]]
    _settled = False  # True once `_settle` has run

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if Adjustable in cls.__bases__:  # a subclass of a loss may have arguments of its own
            cls.SETTINGS = tuple(inspect.signature(cls.__init__).parameters)[1:]

    @abstractmethod
    def _settle(self) -> None:
        """Check all settings together and make them effective; raise before anything is changed."""

    @abstractmethod
    def set_progress(self, fraction: float) -> None:
        """Move all schedules to the fraction of training done, in [0, 1]."""

    def __setattr__(self, name: str, given: Any) -> None:
        if self._settled and name == "progress":
            self.set_progress(given)
            return
        if not self._settled or name not in self.SETTINGS:
            super().__setattr__(name, given)
            return
        before = getattr(self, name)
        self._replace(name, given)
        try:
            self._settle()
        except Exception:
            self._replace(name, before)
            raise

    def __delattr__(self, name: str) -> None:
        if name in self.SETTINGS:
            raise AttributeError(f"{name} is a setting and cannot be deleted: assign another value")
        super().__delattr__(name)

    def _replace(self, name: str, given: Any) -> None:
        # A Learnable is a child module and a number is not: PyTorch refuses to put one in the other's place.
        for place in (self._modules, self._parameters, self._buffers, self.__dict__):
            place.pop(name, None)
        super().__setattr__(name, given)


@dataclass(frozen=True)
class Settings:
    """The settings of `InfoNCE` at one moment of training: every schedule is a number here.

    A loss keeps the settings of its call, so that a backward pass uses them even if the module has moved on.
    """

    temperature: float | Learnable
    hardening: tuple[Hardening, ...]
    prior: Prior | None  # None: no debiasing
    debias: str
    in_batch: str | None
    symmetric: bool
    supervision: str
    combine_positives: str
    average: str
    negative_count: str | float
    positive_in_denominator: bool
    num_negatives: int | None
    weight_range: float | None
    grad_through_weights: bool
    normalize: bool
    gather: bool
    reduction: str

    @property
    def largest_score(self) -> float | None:
        """A bound of every |score|, if one is known without computing scores."""
        if not self.normalize:
            return None
        return 1 / (self.temperature.minimum if isinstance(self.temperature, Learnable) else self.temperature)


def resolve(given: Mapping[str, Any], progress: float) -> Settings:
    """The settings at this progress. given: by the names of `InfoNCE`'s arguments, which `check` has passed."""
    temperature = given["temperature"]
    if not isinstance(temperature, Learnable):
        checks.number("temperature", temperature := value(temperature, progress), above=0, below=math.inf)
    checks.number("class_prior", prior := value(given["class_prior"], progress), at_least=0, below=1)
    same = {name: given[name] for name in Settings.__dataclass_fields__ if name in given}
    resolved = {
        "temperature": temperature,
        "hardening": tuple(part.at(progress).in_scores(temperature) for part in given["hardening"]),
        "prior": Prior.of(prior) if prior > 0 else None,
    }
    return Settings(**{**same, **resolved})


def check(given: Mapping[str, Any]) -> None:
    """Raise unless every setting is known, in its range, and fits the others. given: as in `resolve`."""
    if not isinstance(given["temperature"], Learnable):
        checks.number("temperature", given["temperature"], above=0, below=math.inf)
    for part in given["hardening"]:
        if not isinstance(part, Hardening):
            raise ValueError(f"hardening must be a Hardening or a tuple of them, got {part!r}")
    if sum(part.weighs for part in given["hardening"]) > 1:
        raise ValueError(f"hardening takes at most one tilt (Exponential or Custom), got {given['hardening']!r}")
    checks.number("class_prior", given["class_prior"], at_least=0, below=1)
    checks.choice("debias", given["debias"], ("hcl", "exact"))
    if given["in_batch"] is not None:
        checks.choice("in_batch", given["in_batch"], ("both", "other"))
    if given["symmetric"] and given["in_batch"] != "other":
        raise ValueError(f"symmetric=True needs in_batch='other', got in_batch={given['in_batch']!r}")
    checks.choice("supervision", given["supervision"], ("none", "positives", "negatives", "full"))
    checks.choice("combine_positives", given["combine_positives"], ("mean_of_logs", "log_of_mean", "in_denominator"))
    if given["combine_positives"] == "in_denominator" and not given["positive_in_denominator"]:
        raise ValueError("combine_positives='in_denominator' contradicts positive_in_denominator=False: change one")
    checks.choice("average", given["average"], ("anchors", "pairs"))
    if isinstance(given["negative_count"], str):
        checks.choice("negative_count", given["negative_count"], ("support", "batch"))
    else:
        checks.number("negative_count", given["negative_count"], above=0, below=math.inf)
    if given["num_negatives"] is not None:
        checks.whole("num_negatives", given["num_negatives"])
    if given["weight_range"] is not None:
        checks.number("weight_range", given["weight_range"], above=0, below=math.inf)
    checks.choice("backend", given["backend"], BACKENDS)
    checks.choice("reduction", given["reduction"], ("mean", "sum", "none"))
    for name in ("symmetric", "positive_in_denominator", "grad_through_weights", "normalize", "gather"):
        if not isinstance(given[name], bool):
            raise ValueError(f"{name} must be True or False, got {given[name]!r}")
    if given["generator"] is not None and not isinstance(given["generator"], torch.Generator):
        raise ValueError(f"generator must be a torch.Generator or None, got {given['generator']!r}")


def adaptive(given: Mapping[str, Any]) -> Iterator[Adaptive]:
    """The schedules with a memory, each once, in a fixed order. given: as in `resolve`."""
    scheduled = [given["temperature"], given["class_prior"]]
    for part in given["hardening"]:
        scheduled += part.schedules()
    seen: set[int] = set()
    for setting in scheduled:
        for leaf in setting.leaves() if isinstance(setting, Schedule) else ():
            if isinstance(leaf, Adaptive) and id(leaf) not in seen:
                seen.add(id(leaf))
                yield leaf


def is_plain(
    settings: Settings,
    z1: Tensor,
    z2: Tensor | None,
    negatives: Tensor | None,
    exclude: Tensor | None,
    negative_labels: Tensor | None,
    negative_mask: Tensor | None,
    positive_mask: Tensor | None,
) -> bool:
    """Is this a plain case: pairs against one or both views of all others, or anchors against a queue or bank?"""
    given = (exclude, negative_labels, negative_mask)
    if settings.in_batch is not None:
        plain = negatives is None and all(part is None for part in given)
        # In both directions all are anchors at once: a band of each anchor's own would have to be one for both.
        plain = plain and not (settings.symmetric and any(map(_differs_between_anchors, settings.hardening)))
    else:
        plain = isinstance(negatives, Tensor) and negatives.dim() == 2 and len(negatives) > 0
        plain = plain and negatives.dtype != torch.float64  # type: ignore[union-attr]
        # What is not met must not be counted.
        plain = plain and (settings.negative_count != "batch" or (exclude is None and negative_mask is None))
    return (
        plain
        and settings.supervision == "none"
        and settings.normalize
        and isinstance(z1, Tensor)
        and isinstance(z2, Tensor)
        and z2.dim() == 2
        and positive_mask is None
        and z1.dtype != torch.float64 != z2.dtype
        and (settings.prior is None or settings.debias == "hcl")
        and settings.num_negatives is None
        and settings.weight_range is None
        and not any(part.needs_positive for part in settings.hardening)
        and not (settings.gather and distributed.world_size() > 1)
    )


def _differs_between_anchors(part: Hardening) -> bool:
    """Does every anchor have a band of its own?"""
    if part.needs_positive or part.percentiles() is not None:
        return True
    return any(isinstance(bound, Tensor) for bound in part.bounds(None))
