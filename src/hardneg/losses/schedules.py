"""Settings that change over training, as functions of the fraction of training done.

Any of temperature, tilt, threshold, ring bounds or class prior may be a schedule. A schedule is a pure function
of the progress in [0, 1], so that resuming a run needs nothing but the progress; only `Adaptive` has a memory.
Schedules take part in arithmetic, so one schedule can drive several settings:

Examples:
    >>> import hardneg as hn
    >>> share = hn.RingAnneal()
    >>> ring = hn.Ring(1 - share, 1 - 0.1 * share)
    >>> [round(value(ring.lower, p), 3) for p in (0.0, 1 / 6, 1 / 3, 1.0)]
    [0.0, 0.45, 0.9, 0.9]
"""

import itertools
import math
import operator
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence


class Schedule(ABC):
    """A number that depends on the fraction of training done. Subclasses define ``at(progress)``."""

    @abstractmethod
    def at(self, progress: float) -> float:
        """The value when the fraction ``progress`` of training is done."""

    def leaves(self) -> Iterator["Schedule"]:
        """The schedules this one is computed from: itself, unless it is an expression."""
        yield self

    def exp(self) -> "Schedule":
        """e to the power of this schedule."""
        return _Expression(_exponential, self, 0.0)

    def __add__(self, other: "Setting") -> "Schedule":
        return _Expression(operator.add, self, other)

    def __radd__(self, other: "Setting") -> "Schedule":
        return _Expression(operator.add, other, self)

    def __sub__(self, other: "Setting") -> "Schedule":
        return _Expression(operator.sub, self, other)

    def __rsub__(self, other: "Setting") -> "Schedule":
        return _Expression(operator.sub, other, self)

    def __mul__(self, other: "Setting") -> "Schedule":
        return _Expression(operator.mul, self, other)

    def __rmul__(self, other: "Setting") -> "Schedule":
        return _Expression(operator.mul, other, self)

    def __truediv__(self, other: "Setting") -> "Schedule":
        return _Expression(operator.truediv, self, other)

    def __rtruediv__(self, other: "Setting") -> "Schedule":
        return _Expression(operator.truediv, other, self)

    def __neg__(self) -> "Schedule":
        return _Expression(operator.sub, 0.0, self)


Setting = float | Schedule


def value(setting: Setting, progress: float) -> float:
    """The number a setting stands for at this progress."""
    return setting.at(progress) if isinstance(setting, Schedule) else float(setting)


def _exponential(exponent: float, _: float) -> float:
    return math.exp(exponent)


class _Expression(Schedule):
    """Two settings joined by an arithmetic operation."""

    def __init__(self, operation: Callable[[float, float], float], left: Setting, right: Setting) -> None:
        self.operation, self.left, self.right = operation, left, right

    def at(self, progress: float) -> float:
        return self.operation(value(self.left, progress), value(self.right, progress))

    def leaves(self) -> Iterator[Schedule]:
        for side in (self.left, self.right):
            if isinstance(side, Schedule):
                yield from side.leaves()


class Constant(Schedule):
    """The same value throughout.

    Examples:
        >>> Constant(0.5).at(0.9)
        0.5
    """

    def __init__(self, constant: float) -> None:
        self.constant = float(constant)

    def at(self, progress: float) -> float:
        return self.constant


class Linear(Schedule):
    """From ``start`` to ``end`` in a straight line until the fraction ``until`` of training, then ``end``.

    Examples:
        >>> [Linear(0.2, 0.0, until=0.5).at(p) for p in (0.0, 0.25, 0.5, 1.0)]
        [0.2, 0.1, 0.0, 0.0]
    """

    def __init__(self, start: float, end: float, until: float = 1.0) -> None:
        if not 0 < until <= 1:
            raise ValueError(f"until must be > 0 and ≤ 1 (a fraction of training), got {until!r}")
        self.start, self.end, self.until = float(start), float(end), float(until)

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
        if any(b <= a for a, b in itertools.pairwise(boundaries)):
            raise ValueError(f"boundaries must increase, got {list(boundaries)}")
        self.values, self.boundaries = [float(v) for v in values], [float(b) for b in boundaries]

    def at(self, progress: float) -> float:
        return self.values[bisect_right(self.boundaries, progress)]


class HardnessAnneal(Schedule):
    """HCL's annealing (appendix D.1): ``beta·(1 − ⌊progress·changes⌋/changes)``, down to 0 in equal steps.

    direction: ``"down"``, or ``"up"`` for the same values in reverse order

    Examples:
        >>> [HardnessAnneal(1.0, changes=4).at(p) for p in (0.0, 0.25, 0.99, 1.0)]
        [1.0, 0.75, 0.25, 0.0]
    """

    def __init__(self, beta: float, changes: int, direction: str = "down") -> None:
        if changes < 1:
            raise ValueError(f"changes must be ≥ 1, got {changes!r}")
        if direction not in ("down", "up"):
            raise ValueError(f"direction must be 'down' or 'up', got {direction!r}")
        self.beta, self.changes, self.direction = float(beta), int(changes), direction

    def at(self, progress: float) -> float:
        # The 1e-9 undoes the rounding of epoch/epochs: 0.29·100 is 28.999…
        done = math.floor(progress * self.changes + 1e-9)
        if self.direction == "down":
            return self.beta * (1 - done / self.changes)
        return self.beta * min(done + 1, self.changes) / self.changes


class RingAnneal(Linear):
    """Ring's annealing: the share of closest candidates falls from ``start`` to ``end`` over the first third.

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

    start, step: first value and size of a move · window: how many past readings the newest is compared with (their
    mean) · minimum, maximum: the range · better: ``"higher"`` (validation accuracy) or ``"lower"`` (training loss).
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
        better: str = "higher",
    ) -> None:
        if not minimum <= start <= maximum:
            raise ValueError(f"start must be in [minimum, maximum] = [{minimum}, {maximum}], got {start!r}")
        if step <= 0 or window < 1:
            raise ValueError(f"step must be > 0 and window ≥ 1, got step={step!r}, window={window!r}")
        if better not in ("higher", "lower"):
            raise ValueError(f"better must be 'higher' or 'lower', got {better!r}")
        self.current, self.step, self.window = float(start), float(step), int(window)
        self.minimum, self.maximum, self.better = float(minimum), float(maximum), better
        self.readings: list[float] = []

    def at(self, progress: float) -> float:
        return self.current

    def update(self, reading: float) -> None:
        """Take a new reading of the metric; the first one only starts the record."""
        if not math.isfinite(reading):
            raise ValueError(f"reading must be finite, got {reading!r}")
        if self.readings:
            gain = reading - sum(self.readings) / len(self.readings)
            improved = gain > 0 if self.better == "higher" else gain < 0
            moved = self.current + (-self.step if improved else self.step)
            self.current = min(max(moved, self.minimum), self.maximum)
        self.readings = [*self.readings, float(reading)][-self.window :]

    def state(self) -> list[float]:
        """Its memory, as numbers: the current value, then the readings."""
        return [self.current, *self.readings]

    def load_state(self, state: Sequence[float]) -> None:
        """Take back what ``state()`` gave."""
        self.current, self.readings = float(state[0]), [float(r) for r in state[1:]]
