"""Products of float32 matrices by oneDNN and by MKL, and the loss with either, on a CPU.

    python benchmarks/products.py              # writes results/products.json

The sizes are those of the loss (a strip of scores) and of mining (a tile). Both libraries take turns, so that a slow
phase of the machine affects both; medians.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import record
import torch

import hardneg as hn
from hardneg import matmul

RESULTS = Path(__file__).parents[1] / "results"
SIZES = [
    (64, 128, 64),
    (128, 128, 128),
    (256, 128, 256),
    (512, 128, 512),
    (512, 768, 512),
    (128, 128, 8192),
    (384, 384, 5461),
]
BATCHES = (64, 256, 1024, 4096)
SECONDS = 4.0  # of each comparison


def choose(onednn: bool) -> None:
    """Compute all further products by this library, where both can."""
    matmul._onednn_is_faster = lambda: onednn  # type: ignore[assignment]


def compare(run: Callable[[], object], **case: Any) -> dict[str, Any]:
    """Median milliseconds with each library."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for onednn in times:
        choose(onednn)
        run()
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        for onednn, spent in times.items():
            choose(onednn)
            start = time.perf_counter()
            run()
            spent.append(1000 * (time.perf_counter() - start))
    ours, mkl = statistics.median(times[True]), statistics.median(times[False])
    print(f"{case}: oneDNN {ours:.3f} ms, MKL {mkl:.3f} ms, {mkl / ours:.2f} times", flush=True)
    return {**case, "onednn_ms": ours, "mkl_ms": mkl, "ratio": mkl / ours, "repetitions": len(times[True])}


def step(loss: hn.InfoNCE, views: torch.Tensor) -> None:
    """A forward and backward pass."""
    loss(*views).backward()


def main() -> None:
    rows = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for size in SIZES:
            left, right = torch.randn(size[:2]), torch.randn(size[2], size[1])
            out = torch.empty(size[0], size[2])
            run = partial(matmul.multiply, left, right, out, any_size=True)
            found = compare(run, product=size, threads=threads)
            rows.append({**found, "gflops": 2e-6 * size[0] * size[1] * size[2] / found["onednn_ms"]})
        for batch in BATCHES:
            views = torch.randn(2, batch, 128, requires_grad=True)
            rows.append(compare(partial(step, hn.hcl(), views), batch=batch, threads=threads))
    versions = {"torch": torch.__version__, "hardneg": hn.__version__}
    settings = {"command": "python benchmarks/products.py", "commit": record.commit(), "processor": record.processor()}
    record.write(RESULTS / "products.json", {**settings, "versions": versions, "rows": rows})


if __name__ == "__main__":
    main()
