"""What a list of pairs that are not negatives costs in a training step, on a CPU.

    python benchmarks/not_negatives.py

Forward and backward pass of HCL on a batch of 256, d = 128, without an encoder, in one thread: the median CPU time of
25 steps. A list has P random pairs of N samples. "found by the batch" is what recipes do: the pairs of the batch are
looked up, and a batch without any has no ids. "whole list" passes the list to the loss, as a loop of one's own may do.
"""

import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import record
import torch

import hardneg as hn
from hardneg.methods.batch_pairs import BatchPairs
from hardneg.randomness import generator

RESULTS = Path(__file__).parents[1] / "results"
BATCH, DIM, REPEATS = 256, 128, 25


def milliseconds(run: Callable[[], object]) -> float:
    """The median CPU time of a call."""
    times = []
    for _ in range(REPEATS + 3):
        began = time.process_time()
        run()
        times.append(time.process_time() - began)
    return round(1e3 * statistics.median(times[3:]), 2)


def main() -> None:
    torch.set_num_threads(1)
    loss, draw = hn.hcl(beta=1.0, tau_plus=0.0), generator("cpu", 0)
    z1, z2 = (torch.randn(BATCH, DIM, generator=draw).requires_grad_() for _ in range(2))

    def step(**arguments: Any) -> None:
        z1.grad = z2.grad = None
        loss(z1, z2, **arguments).backward()

    rows = []
    for count in (1_297, 50_000):
        ids = torch.randperm(count, generator=draw)[:BATCH]
        for number in (0, 100, 100_000):
            pairs = torch.randint(count, (number, 2), generator=draw)
            pairs = pairs[pairs[:, 0] != pairs[:, 1]]
            listed = BatchPairs(pairs)

            def found(listed: BatchPairs = listed, ids: torch.Tensor = ids) -> dict[str, Any]:
                some = listed.of(ids, within=True)
                return {"ids": ids, "not_negatives": some} if len(some) else {}

            rows.append(
                {
                    "samples": count,
                    "pairs": number,
                    "pairs_of_the_batch": len(listed.of(ids, within=True)) // 2,
                    "look_up_ms": milliseconds(found),
                    "step_found_by_the_batch_ms": milliseconds(lambda found=found: step(**found())),  # type: ignore[misc]
                    "step_whole_list_ms": milliseconds(lambda: step(ids=ids, not_negatives=pairs)),  # noqa: B023
                }
            )
            print(rows[-1], flush=True)
    record.write(
        RESULTS / "not_negatives.json",
        {
            "command": "python benchmarks/not_negatives.py",
            "versions": {"hardneg": hn.__version__, "torch": torch.__version__, "python": platform.python_version()},
            "processor": record.processor(),
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
