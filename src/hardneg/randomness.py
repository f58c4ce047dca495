"""Counter-based randomness: every draw is a function of a seed and of counters such as the epoch and the step.

A run that is resumed at any step therefore makes the same draws as an uninterrupted run.
"""

import torch
from torch import Tensor

_MASK = (1 << 64) - 1


def mix(*counters: int) -> int:
    """A 63-bit number that depends on all counters and their order (the finalizer of SplitMix64 on each).

    Examples:
        >>> mix(0, 1) != mix(1, 0)
        True
    """
    state = 0
    for counter in counters:
        state = (state + 0x9E3779B97F4A7C15 + (counter & _MASK)) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def generator(device: torch.device | str, *counters: int) -> torch.Generator:
    """A generator on ``device`` whose draws depend on the counters alone.

    Examples:
        >>> one, other = (generator("cpu", 0, 5) for _ in range(2))
        >>> bool(torch.rand(1, generator=one) == torch.rand(1, generator=other))
        True
    """
    return torch.Generator(device).manual_seed(mix(*counters))


def integers(key: Tensor, rows: Tensor, columns: int) -> Tensor:
    """Integers in [0, 2⁶²), (len(rows), columns), each a function of the key, the row number and the column.

    key: (2,) int64, a seed and a counter · rows: (R,) int64. The same on every device and inside compiled graphs.

    Examples:
        >>> key, rows = torch.tensor([3, 0]), torch.arange(4)
        >>> bool((integers(key, rows, 2)[1:] == integers(key, rows[1:], 2)).all())
        True
    """
    column = torch.arange(columns, device=rows.device)
    state = _finalize(_finalize(key[0] + _GOLDEN) + key[1])  # ()
    state = _finalize(state + rows[:, None])  # (R, 1)
    return _finalize(state + column) >> 2 & ((1 << 62) - 1)


_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # int64 arithmetic wraps around: these are SplitMix64's unsigned constants


def _finalize(state: Tensor) -> Tensor:
    """SplitMix64's next output, on int64 tensors."""
    state = state + _GOLDEN
    state = (state ^ _shifted(state, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    state = (state ^ _shifted(state, 27)) * (0x94D049BB133111EB - (1 << 64))
    return state ^ _shifted(state, 31)


def _shifted(state: Tensor, bits: int) -> Tensor:
    return (state >> bits) & ((1 << (64 - bits)) - 1)  # a logical shift: int64 would fill with the sign bit
