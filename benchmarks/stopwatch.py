"""Time and memory of work on a device that runs asynchronously."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

Run = Callable[[], object]


def summary(ms: list[float]) -> dict[str, Any]:
    """Median, quartiles and number of some milliseconds."""
    low, _, high = statistics.quantiles(ms, n=4) if len(ms) > 1 else (ms[0],) * 3
    return {"ms": statistics.median(ms), "ms_quartiles": [low, high], "repetitions": len(ms)}


@dataclass(frozen=True)
class Stopwatch:
    """Measures on one device; on a CPU all methods measure wall time."""

    device: torch.device

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def wait(self) -> None:
        """Wait until all queued work is done."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def wall(self, run: Run) -> float:
        """Milliseconds of one run, including the wait for the device."""
        self.wait()
        begin = time.perf_counter()
        run()
        self.wait()
        return 1000 * (time.perf_counter() - begin)

    def each(self, run: Run, repetitions: int) -> list[float]:
        """Milliseconds of each of several runs, queued one after the other without waiting, as in training."""
        self.wait()
        return self._timed(run, repetitions)

    def queued(self, run: Run, repetitions: int = 5) -> float:
        """Mean milliseconds of the device alone: the host queues the runs while the device is busy."""
        self.wait()
        if self.on_gpu:
            torch.cuda._sleep(80_000_000)  # type: ignore[no-untyped-call]  # cycles, about 40 ms: several times what queueing takes
        return statistics.fmean(self._timed(run, repetitions))

    def _timed(self, run: Run, repetitions: int) -> list[float]:
        if not self.on_gpu:
            return [self.wall(run) for _ in range(repetitions)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repetitions + 1)]  # type: ignore[no-untyped-call]
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        self.wait()
        return [begin.elapsed_time(end) for begin, end in pairwise(events)]

    def loop(self, run: Run, steps: int) -> float:
        """Mean milliseconds of a step over a loop of steps, including the host."""

        def many() -> None:
            for _ in range(steps):
                run()

        return self.wall(many) / steps

    def used_bytes(self) -> int:
        """Memory in use now; resets the peak."""
        if not self.on_gpu:
            return 0
        self.wait()
        torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.memory_allocated(self.device)

    def peak_bytes(self) -> int | None:
        """The peak of the memory in use since `used_bytes`; None on a device without this counter."""
        return torch.cuda.max_memory_allocated(self.device) if self.on_gpu else None

    def product_rate(self, size: int) -> float:
        """Operations per second of a bfloat16 product of two square matrices of this size."""
        one, other = (torch.randn(size, size, device=self.device).bfloat16() for _ in range(2))
        self.each(lambda: one @ other, 10)
        return 2 * size**3 / (statistics.median(self.each(lambda: one @ other, 30)) / 1000)
