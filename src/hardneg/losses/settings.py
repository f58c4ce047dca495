"""Settings of the losses: the types of their options, and assignment after construction."""

import copy
import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self, get_args

import torch
from torch import Tensor

from hardneg.distributed import Gather, gathers
from hardneg.losses import hints
from hardneg.losses.debiasing import Prior
from hardneg.losses.hardening import Hardening
from hardneg.losses.schedules import Adaptive, Schedule, Setting
from hardneg.losses.state import LenientState
from hardneg.losses.temperature import Learnable

Debias = Literal["hcl", "exact"]
Direction = Literal["query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"]
InBatch = Literal["both", "other"] | tuple[Direction, ...]
Supervision = Literal["none", "positives", "negatives", "full"]
CombinePositives = Literal["mean_of_logs", "log_of_mean", "log_of_sum", "in_denominator"]
Average = Literal["anchors", "pairs"]
NegativeCount = Literal["support", "batch"]
Backend = Literal["auto", "reference", "tiled", "fused"]
Reduction = Literal["mean", "sum", "none"]

SUPERVISION: tuple[str, ...] = get_args(Supervision)
REDUCTION: tuple[str, ...] = get_args(Reduction)
DIRECTIONS: tuple[str, ...] = get_args(Direction)


@dataclass(frozen=True)
class SourceHardening:
    """The hardening of one source: as `weighting` and `bands` of `Settings`."""

    weighting: Hardening | None = None
    bands: tuple[Hardening, ...] = ()


@dataclass(frozen=True)
class Settings:
    """The settings of `InfoNCE` at one moment of training, with every schedule replaced by its value.

    A call keeps its settings, so that its backward pass uses them even if those of the module have changed.

    weighting: the hardening with a tilt or general weights · bands: those with a range of scores or ranks, in terms of
    scores · needs_positive, needs_guide: whether a band depends on the positive's score, or on a guide's scores ·
    prior: None for no debiasing · max_abs_score: upper bound of |score|, if one is known without computing scores ·
    learned_scale: 1/temperature is a smaller bound, which only the device knows · by_source: the hardening of each
    source with a distribution of its own, or None for one distribution over all candidates; ``weighting`` and ``bands``
    are then those of the batch · cosine_bands: whether a band was given in cosines
    """

    temperature: float | Learnable
    weighting: Hardening | None
    bands: tuple[Hardening, ...]
    needs_positive: bool
    prior: Prior | None
    max_abs_score: float | None
    learned_scale: bool
    debias: str
    in_batch: str | tuple[str, ...] | None
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
    gather: Gather
    reduction: str
    normalize_weights: bool = True
    by_source: Mapping[str, SourceHardening] | None = None
    cosine_bands: bool = False
    needs_guide: bool = False

    @property
    def needs_general(self) -> bool:
        """Whether only the general path has these settings, and not the short one for paired batches."""
        by_parts = self.by_source is not None or isinstance(self.in_batch, tuple)
        return by_parts or not self.normalize_weights or self.combine_positives == "log_of_sum" or self.needs_guide

    def is_guided(self, source: str) -> bool:
        """Whether the candidates of a source are chosen by the scores of a guide."""
        return any(band.needs_guide for band in self.of_source(source).bands)

    @property
    def has_general_weights(self) -> bool:
        """Whether a source has weights that only the reference kernel computes."""
        hardenings = [self] if self.by_source is None else self.by_source.values()
        return any(part.weighting is not None and part.weighting.has_general_weights for part in hardenings)

    @property
    def effective_shares(self) -> dict[str, float]:
        """The targets from which β is computed, by source; of the source ``""`` for one distribution over all."""
        parts = {"": self.weighting}
        if self.by_source is not None:
            parts = {name: part.weighting for name, part in self.by_source.items()}
        shares = {name: part.effective_share() for name, part in parts.items() if part is not None}
        return {name: share for name, share in shares.items() if share is not None}

    def of_source(self, name: str) -> "Settings":
        """The settings for the distribution of one source; only the batch is debiased."""
        if self.by_source is None:
            return self
        own = self.by_source.get(name, SourceHardening())
        prior = self.prior if name == "batch" else None
        return replace(self, weighting=own.weighting, bands=own.bands, prior=prior, by_source=None)


class Adjustable(LenientState, ABC):
    """A loss whose settings may be assigned at any time: the assignment takes effect, or raises and changes nothing.

    Its settings are the arguments of its constructor, stored as attributes of the same names. A subclass checks and
    stores all of them in `_configure`, which its constructor calls last.
    """

    SETTINGS: ClassVar[tuple[str, ...]]
    progress: float = 0.0  # fraction of training done
    _scheduled: tuple[Schedule, ...] = ()  # the schedules among the settings
    _adaptive: tuple[Adaptive, ...] = ()  # the adaptive schedules among the settings, each once, in a fixed order
    _warned: tuple[str, ...] = ()  # the kinds of warnings given so far
    _unmoved_calls: int | None = 0  # calls in training before the first `set_progress`; None if no longer counted

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if Adjustable in cls.__bases__:  # a subclass of a loss may have other arguments
            cls.SETTINGS = tuple(inspect.signature(cls.__init__).parameters)[1:]

    @abstractmethod
    def _configure(self, given: dict[str, Any]) -> None:
        """Check all settings together, convert and store them; raise before anything is changed."""

    @abstractmethod
    def _move_schedules(self, progress: float) -> None:
        """Compute the numbers of all schedules at this progress; raise before anything is changed."""

    def set_progress(self, fraction: float) -> None:
        """Move all schedules to the fraction of training done, in [0, 1]."""
        if not 0 <= fraction <= 1:
            raise ValueError(f"fraction must be in [0, 1], got {fraction!r}: pass steps done / total steps")
        self._move_to(float(fraction))
        self.__dict__["_unmoved_calls"] = None

    def _move_to(self, progress: float) -> None:
        self._move_schedules(progress)
        self.__dict__["progress"] = progress

    def observe(self, *, accuracy: float | None = None, loss: float | None = None) -> None:
        """Update adaptive schedules: those for which higher is better with the accuracy, the others with the loss.

        accuracy: on validation, after an epoch · loss: of training, after a step
        """
        for schedule in self._adaptive:
            reading = accuracy if schedule.better == "higher" else loss
            if reading is not None:
                schedule.update(reading)

    @property
    def observes_loss(self) -> bool:
        """Whether an adaptive schedule observes the loss of every step."""
        return any(schedule.better == "lower" for schedule in self._adaptive)

    @property
    def accuracy_schedules(self) -> tuple[Adaptive, ...]:
        """The adaptive schedules that observe a validation accuracy."""
        return tuple(schedule for schedule in self._adaptive if schedule.better == "higher")

    def _warn_once(self, kind: str, message: str | None, stacklevel: int) -> None:
        """Give a warning, unless the message is None or this loss has given one of this kind."""
        if message is not None and kind not in self._warned:
            self.__dict__["_warned"] = (*self._warned, kind)
            warnings.warn(message, stacklevel=stacklevel + 1)

    def _give_hints(self, gather: Gather, labels: Tensor | None, one_view: bool = False, alone: bool = False) -> None:
        """Warn of a call that is valid, but rarely meant, called by ``forward``.

        labels: (B,), if they are used and the batch has the only negatives · one_view: all positives come from labels ·
        alone: the batch is one row, and has the only negatives
        """
        if alone and "alone" not in self._warned and not gathers(gather):
            self._warn_once("alone", hints.ALONE, stacklevel=5)
        if gather is False and "gather" not in self._warned:
            self._warn_once("gather", hints.local_negatives(), stacklevel=5)
        if labels is not None and "single class" not in self._warned and not gathers(gather):
            self._warn_once("single class", hints.single_class(labels), stacklevel=5)
        if labels is not None and one_view and "no positives" not in self._warned and not gathers(gather):
            self._warn_once("no positives", hints.no_positives(labels), stacklevel=5)

    def _count_call(self, loss: Tensor) -> None:
        """Warn of schedules that are not moved during training, called by ``forward`` in eager mode."""
        calls = self._unmoved_calls
        if not self._scheduled or calls is None or not self.training or not loss.requires_grad:
            return
        # Written to __dict__: nn.Module's own assignment searches parameters, buffers and children first.
        self.__dict__["_unmoved_calls"] = calls + 1
        if calls + 1 == hints.UNMOVED_CALLS:
            self.__dict__["_unmoved_calls"] = None
            self._warn_once("progress", hints.unmoved_schedule(self._scheduled), stacklevel=5)

    def get_extra_state(self) -> Tensor:
        """Progress and the state of adaptive schedules as one tensor, which every checkpoint format can hold."""
        numbers = [self.progress]
        for schedule in self._adaptive:
            state = schedule.state()
            numbers += [float(len(state)), *state]
        return torch.tensor(numbers, dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        """Restore what `get_extra_state` returned."""
        progress, *rest = state.tolist()
        for schedule in self._adaptive:
            if not rest:
                raise ValueError(
                    "the state holds no Adaptive schedule, but this loss has one: was it saved by a different loss?"
                )
            size = int(rest[0])
            schedule.load_state(rest[1 : 1 + size])
            rest = rest[1 + size :]
        self._move_to(progress)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": None, "_plan": None}  # a copy has no last call

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not isinstance(getattr(self, "gather", False), bool):
            raise TypeError(
                "gather holds a process group, which exists in this process only: assign loss.gather = True or False "
                "before the loss is pickled, or save loss.state_dict()"
            )
        return super().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        group = getattr(self, "gather", False)
        memo[id(group)] = group  # a copy communicates with the same processes
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))  # type: ignore[no-untyped-call]
        return copied

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "progress":
            self.set_progress(value)
        elif name in self.SETTINGS:
            self._configure({**{setting: getattr(self, setting) for setting in self.SETTINGS}, name: value})
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.SETTINGS:
            raise AttributeError(f"{name} is a setting and cannot be deleted: assign another value")
        super().__delattr__(name)


def check_no_adaptive(name: str, setting: Setting | Learnable) -> None:
    """Raise if a setting uses an adaptive schedule, for losses that do not save its state."""
    if isinstance(setting, Schedule) and any(isinstance(leaf, Adaptive) for leaf in setting.leaves()):
        raise ValueError(f"{name} takes no Adaptive schedule, because this loss does not save its state: use another")
