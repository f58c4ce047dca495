"""Settings that change over training, as functions of the fraction of training done.

Any of temperature, tilt, threshold, ring bounds or class prior may be a schedule. A schedule is a pure function of the
progress in [0, 1], so that resuming a run needs only the progress; `Adaptive` alone has a state. Schedules
support arithmetic, so one schedule can drive several settings:

Examples:
    >>> import hardneg as hn
    >>> share = hn.RingAnneal()
    >>> ring = hn.Ring(1 - share, 1 - 0.1 * share)
    >>> [round(value(ring.lower, p), 3) for p in (0.0, 1 / 6, 1 / 3, 1.0)]
    [0.0, 0.45, 0.9, 0.9]
"""

import inspect
import itertools
import math
import operator
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal


class Schedule(ABC):
    """A number that depends on the fraction of training done. Subclasses define ``at(progress)``."""

    __array_ufunc__ = None  # numpy scalars leave arithmetic with schedules to the methods below

    @abstractmethod
    def at(self, progress: float) -> float:
        """The value when the fraction ``progress`` of training is done."""

    def leaves(self) -> Iterator["Schedule"]:
        """The schedules this one is computed from: itself, unless it is an expression."""
        yield self

    def exp(self) -> "Schedule":
        """e to the power of this schedule."""
        return _Exponential(self)

    def __repr__(self) -> str:
        """The call that makes this schedule, if its attributes have the names of its constructor's arguments."""
        names = list(inspect.signature(type(self)).parameters)
        if not all(name in vars(self) for name in names):
            return super().__repr__()
        return f"{type(self).__name__}({', '.join(f'{name}={vars(self)[name]!r}' for name in names)})"

    def __add__(self, other: "Setting") -> "Schedule":
        return _Operation("+", self, other)

    def __radd__(self, other: "Setting") -> "Schedule":
        return _Operation("+", other, self)

    def __sub__(self, other: "Setting") -> "Schedule":
        return _Operation("-", self, other)

    def __rsub__(self, other: "Setting") -> "Schedule":
        return _Operation("-", other, self)

    def __mul__(self, other: "Setting") -> "Schedule":
        return _Operation("*", self, other)

    def __rmul__(self, other: "Setting") -> "Schedule":
        return _Operation("*", other, self)

    def __truediv__(self, other: "Setting") -> "Schedule":
        return _Operation("/", self, other)

    def __rtruediv__(self, other: "Setting") -> "Schedule":
        return _Operation("/", other, self)

    def __neg__(self) -> "Schedule":
        return _Operation("-", 0.0, self)


Setting = float | Schedule


def value(setting: Setting, progress: float) -> float:
    """The value of a setting at this progress."""
    return setting.at(progress) if isinstance(setting, Schedule) else float(setting)


def schedules_of(settings: Mapping[str, object]) -> tuple[Schedule, ...]:
    """The schedules among settings by name."""
    return tuple(setting for setting in settings.values() if isinstance(setting, Schedule))


def _number(name: str, given: float) -> float:
    """A number, a numpy scalar or a tensor without dimensions as a Python float."""
    from hardneg import checks  # here, because it imports this module

    if isinstance(given, Schedule):
        raise ValueError(f"{name} must be a number, got the schedule {given!r}")
    return float(checks.number(name, given))


def _whole(name: str, given: int) -> int:
    from hardneg import checks

    return checks.whole(name, given)


OPERATIONS: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}


class _Operation(Schedule):
    """Two settings combined by an arithmetic operation."""

    def __init__(self, symbol: str, left: Setting, right: Setting) -> None:
        self.symbol = symbol
        self.left = left if isinstance(left, Schedule) else _number("left operand", left)
        self.right = right if isinstance(right, Schedule) else _number("right operand", right)

    def at(self, progress: float) -> float:
        return OPERATIONS[self.symbol](value(self.left, progress), value(self.right, progress))

    def leaves(self) -> Iterator[Schedule]:
        for side in (self.left, self.right):
            if isinstance(side, Schedule):
                yield from side.leaves()

    def __repr__(self) -> str:
        return f"({self.left!r} {self.symbol} {self.right!r})"


class _Exponential(Schedule):
    """e to the power of a schedule."""

    def __init__(self, exponent: Schedule) -> None:
        self.exponent = exponent

    def at(self, progress: float) -> float:
        return math.exp(self.exponent.at(progress))

    def leaves(self) -> Iterator[Schedule]:
        return self.exponent.leaves()

    def __repr__(self) -> str:
        return f"{self.exponent!r}.exp()"


class Constant(Schedule):
    """The same value throughout.

    Examples:
        >>> Constant(0.5).at(0.9)
        0.5
    """

    def __init__(self, constant: float) -> None:
        self.constant = _number("constant", constant)

    def at(self, progress: float) -> float:
        return self.constant


class Linear(Schedule):
    """From ``start`` to ``end`` in a straight line until the fraction ``until`` of training, then ``end``.

    Examples:
        >>> [Linear(0.2, 0.0, until=0.5).at(p) for p in (0.0, 0.25, 0.5, 1.0)]
        [0.2, 0.1, 0.0, 0.0]
    """

    def __init__(self, start: float, end: float, until: float = 1.0) -> None:
        self.start, self.end = _number("start", start), _number("end", end)
        self.until = _number("until", until)
        if not 0 < self.until <= 1:
            raise ValueError(f"until must be > 0 and ≤ 1 (a fraction of training), got {until!r}")

    def at(self, progress: float) -> float:
        done = min(progress / self.until, 1.0)
        return self.end if done == 1.0 else self.start + done * (self.end - self.start)


class Steps(Schedule):
    """``values[i]`` from the i-th of ``boundaries`` on: one value more than boundaries.

    Examples:
        >>> [Steps([1.0, 0.5, 0.1], boundaries=[0.25, 0.5]).at(p) for p in (0.0, 0.25, 0.9)]
        [1.0, 0.5, 0.1]
    """

    def __init__(self, values: Sequence[float], boundaries: Sequence[float]) -> None:
        if len(values) != len(boundaries) + 1:
            raise ValueError(f"values must be one more than boundaries, got {len(values)} and {len(boundaries)}")
        self.values = [_number("values", number) for number in values]
        self.boundaries = [_number("boundaries", number) for number in boundaries]
        if any(after <= before for before, after in itertools.pairwise(self.boundaries)):
            raise ValueError(f"boundaries must increase, got {self.boundaries}")

    def at(self, progress: float) -> float:
        return self.values[bisect_right(self.boundaries, progress)]


class HardnessAnneal(Schedule):
    """HCL's annealing (appendix D.1): ``beta·(1 − ⌊progress·changes⌋/changes)``, down to 0 in equal steps.

    direction: ``"down"``, or ``"up"`` for the same values in reverse order

    Examples:
        >>> [HardnessAnneal(1.0, changes=4).at(p) for p in (0.0, 0.25, 0.99, 1.0)]
        [1.0, 0.75, 0.25, 0.0]
    """

    def __init__(self, beta: float, changes: int, direction: Literal["down", "up"] = "down") -> None:
        if direction not in ("down", "up"):
            raise ValueError(f"direction must be 'down' or 'up', got {direction!r}")
        self.beta, self.changes, self.direction = _number("beta", beta), _whole("changes", changes), direction

    def at(self, progress: float) -> float:
        # The 1e-9 corrects the rounding of epoch/epochs: 0.29·100 is 28.999…
        done = math.floor(progress * self.changes + 1e-9)
        if self.direction == "down":
            return self.beta * (1 - done / self.changes)
        return self.beta * min(done + 1, self.changes) / self.changes


class RingAnneal(Linear):
    """Ring's annealing: the share of closest candidates decreases from ``start`` to ``end`` over the first third.

    Ring, section 5 and appendix E: 1 → 0.1 over 100 of 300 epochs. The ring is then
    ``Ring(1 - share, 1 - 0.1 * share)``: from [0, 0.9] to [0.9, 0.99].

    Examples:
        >>> RingAnneal().at(1.0)
        0.1
    """

    def __init__(self, start: float = 1.0, end: float = 0.1, until: float = 1 / 3) -> None:
        super().__init__(start, end, until)


class Adaptive(Schedule):
    """Moves by ``step`` towards ``minimum`` while a metric improves, and back while it does not (Ring, appendix E).

    start, step: first value and size of a move · window: number of past readings whose mean the newest is compared
    with · minimum, maximum: the range · better: ``"higher"`` (validation accuracy) or ``"lower"`` (training loss).
    Ring's two policies: ``Adaptive(step=0.05, window=5)`` on validation accuracy after each epoch, and
    ``Adaptive(step=0.01, window=10, better="lower")`` on the training loss after each step.

    Examples:
        >>> share = Adaptive(step=0.05, window=2)
        >>> for accuracy in (0.5, 0.6, 0.7):
        ...     share.update(accuracy)
        >>> round(share.at(0.0), 2)
        0.9
    """

    def __init__(
        self,
        start: float = 1.0,
        step: float = 0.05,
        window: int = 5,
        minimum: float = 0.1,
        maximum: float = 1.0,
        better: Literal["higher", "lower"] = "higher",
    ) -> None:
        self.minimum, self.maximum = _number("minimum", minimum), _number("maximum", maximum)
        self.start, self.step, self.window = _number("start", start), _number("step", step), _whole("window", window)
        self.better = better
        if not self.minimum <= self.start <= self.maximum:
            raise ValueError(f"start must be in [minimum, maximum] = [{minimum}, {maximum}], got {start!r}")
        if self.step <= 0:
            raise ValueError(f"step must be > 0, got {step!r}")
        if better not in ("higher", "lower"):
            raise ValueError(f"better must be 'higher' or 'lower', got {better!r}")
        self.current = self.start
        self.readings: list[float] = []

    def at(self, progress: float) -> float:
        return self.current

    def update(self, reading: float) -> None:
        """Record a new reading of the metric and move; the first one is only recorded."""
        reading = float(reading)
        if not math.isfinite(reading):
            raise ValueError(f"reading must be finite, got {reading!r}")
        if self.readings:
            gain = reading - sum(self.readings) / len(self.readings)
            improved = gain > 0 if self.better == "higher" else gain < 0
            moved = self.current + (-self.step if improved else self.step)
            self.current = min(max(moved, self.minimum), self.maximum)
        self.readings = [*self.readings, reading][-self.window :]

    def state(self) -> list[float]:
        """Its state as numbers: the current value, then the readings."""
        return [self.current, *self.readings]

    def load_state(self, state: Sequence[float]) -> None:
        """Restore what ``state()`` returned."""
        self.current, self.readings = float(state[0]), [float(reading) for reading in state[1:]]
