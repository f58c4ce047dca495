"""Sizes of strips: blocks of anchors against all their candidates."""

import torch

# Scores per strip. On a CPU 4 MiB in float32, the fastest of 2¹⁷ … 2²² at B = 4,096 on 2 cores; on an accelerator
# 128 MiB, because every strip takes several launches.
STRIP_ELEMENTS = {"cpu": 1 << 20, "accelerator": 1 << 25}

# Each strip reads all shared candidates again, so with few rows per strip reading dominates. Where STRIP_ELEMENTS gives
# fewer rows than this on a CPU, a strip may hold four times as many scores. At N = 65,536 that halves the time.
LEAST_ROWS = 64

# Up to this x, e^{±x} and sums of millions of them are normal float32 numbers, so no row maximum is subtracted.
SAFE_EXPONENT = 40.0


def strip_height(rows: int, cost: int, device: torch.device, shared: bool = True) -> int:
    """The number of rows of a strip. cost: numbers read per row · shared: all rows have the same candidates."""
    on_cpu = device.type == "cpu"
    budget = STRIP_ELEMENTS["cpu" if on_cpu else "accelerator"]
    height = budget // max(cost, 1)
    if on_cpu and height < LEAST_ROWS and shared:
        height = min(LEAST_ROWS, 4 * budget // max(cost, 1))
    return max(1, min(rows, height))
