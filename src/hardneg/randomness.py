"""Randomness by counters: every draw is a function of a seed and of where training stands, never of what ran before.

A run that is resumed at any step therefore draws what the uninterrupted run would have drawn.
"""

import torch

_MASK = (1 << 64) - 1


def mix(*counters: int) -> int:
    """A 63-bit number that depends on all counters and their order (the finaliser of SplitMix64 on each).

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
