"""The time that each part of a training step takes, measured without synchronizing the device."""

import time

import torch

_LEFT_OUT = ""  # the name of intervals that are not counted


class StepTimer:
    """Sums the time between consecutive marks under the name of the second mark.

    On a GPU a mark records an event in the stream, which only `read` waits for. Events are reused.

    Examples:
        >>> timer = StepTimer()
        >>> timer.mark("start"); timer.mark("work")
        >>> list(timer.read())
        ['work']
    """

    def __init__(self) -> None:
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []
        self._free: list[torch.cuda.Event] = []
        self.on_gpu = False

    def mark(self, name: str) -> None:
        """End the interval since the last mark, and count it under this name."""
        if self.on_gpu:
            event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks.append((name, event))
        else:
            self._marks.append((name, time.perf_counter()))

    def read(self) -> dict[str, float]:
        """Seconds under each name since the last call; waits for the device."""
        if self.on_gpu:
            torch.cuda.synchronize()
        seconds: dict[str, float] = {}
        for (_, before), (name, after) in zip(self._marks, self._marks[1:], strict=False):
            if isinstance(before, torch.cuda.Event) and isinstance(after, torch.cuda.Event):
                passed = before.elapsed_time(after) / 1000
            elif isinstance(before, float) and isinstance(after, float):
                passed = after - before
            else:  # the device changed between the two
                continue
            if name == _LEFT_OUT:
                continue
            seconds[name] = seconds.get(name, 0.0) + passed
        self._free += [moment for _, moment in self._marks[:-1] if isinstance(moment, torch.cuda.Event)]
        self._marks = self._marks[-1:]
        return seconds

    def restart(self) -> None:
        """End the interval since the last mark without counting it."""
        self.mark(_LEFT_OUT)
