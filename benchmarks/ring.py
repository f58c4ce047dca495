"""Time to find the exact band of ranks of each anchor among a queue of keys, compared with sorting in the same run.

    python benchmarks/ring.py [--quick]
    python benchmarks/ring.py --table      the last results as Markdown

Finding the band, from embeddings to a strip of scores where all but the band is −inf:
  hardneg          the tiled kernel: product, selection, mask
  sort by strips   the same product in the same strips, then torch.sort of each; the band not yet cut out
  sort             one product, one torch.sort of the whole matrix; the band not yet cut out
  product          one product alone: the lower limit

The whole loss, forward and backward, over the same keys:
  ring_nce         the tiled kernel
  by sorting       the tiled kernel with its bands found by a stable sort
  moco             no band

Repetitions are interleaved, so that a slow phase of the machine affects all peers. Times are medians; ratios are
medians of the ratios within each repetition. Before timing, every band is compared with that of a stable sort, index by
index.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import record
import torch
from torch import Tensor
from torch.nn.functional import normalize

import hardneg as hn
from hardneg.losses.kernels import percentiles, tiled
from hardneg.losses.kernels.interface import Eligibility, Rule

ANCHORS, DIM, TEMPERATURE = 256, 128, 0.07
RINGS = ((0.9, 0.99), (0.0, 0.9))
RESULTS = Path(__file__).parents[1] / "results" / "ring.json"

Peers = dict[str, Callable[[], object]]


def inputs(keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """Anchors, their positives and a queue, all of unit length."""
    generator = torch.Generator().manual_seed(0)
    anchors, noise = torch.randn(2, ANCHORS, DIM, generator=generator)
    queue = torch.randn(keys, DIM, generator=generator)
    return tuple(normalize(z, dim=1) for z in (anchors, anchors + noise, queue))  # type: ignore[return-value]


def strips_of_bands(anchors: Tensor, queue: Tensor, ring: tuple[float, float]) -> Any:
    """Rows and scores, strip by strip, −inf outside the band; as in the tiled kernel."""
    rule = Rule(rings=(ring,))
    for rows, scores in tiled.strips(anchors, [queue], torch.tensor(1 / TEMPERATURE)):
        Eligibility(len(queue)).mask_(scores, rows, -torch.inf)
        yield rows, scores.masked_fill_(percentiles.edges(scores, rule).outside(scores), -torch.inf)


def finding(anchors: Tensor, queue: Tensor, ring: tuple[float, float]) -> Peers:
    """The implementations that find a band."""

    def selecting() -> None:
        for _ in strips_of_bands(anchors, queue, ring):
            pass

    def sorting_strips() -> None:
        for _, scores in tiled.strips(anchors, [queue], torch.tensor(1 / TEMPERATURE)):
            scores.sort(dim=1)

    def product() -> Tensor:
        return (anchors / TEMPERATURE) @ queue.T

    return {
        "hardneg": selecting,
        "sort by strips": sorting_strips,
        "sort": lambda: product().sort(dim=1),
        "product": product,
    }


def losses(anchors: Tensor, positives: Tensor, queue: Tensor, progress: float) -> Peers:
    """The whole loss, forward and backward, with and without selection."""
    anchors = anchors.clone().requires_grad_()
    ring, plain = hn.ring_nce(temperature=TEMPERATURE, backend="tiled"), hn.moco(TEMPERATURE, backend="tiled")
    ring.set_progress(progress)

    def step(loss: hn.InfoNCE) -> None:
        anchors.grad = None
        torch.autograd.backward(loss(anchors, positives, negatives=queue))

    def sorting() -> None:
        usual, percentiles.SHORTEST_ROW = percentiles.SHORTEST_ROW, sys.maxsize
        try:
            step(ring)
        finally:
            percentiles.SHORTEST_ROW = usual

    return {"ring_nce": lambda: step(ring), "by sorting": sorting, "moco": lambda: step(plain)}


def is_exact(anchors: Tensor, queue: Tensor, ring: tuple[float, float]) -> bool:
    """Whether every band equals that of a stable sort, index by index."""
    start = int(ring[0] * len(queue) + 1e-9)
    end = max(int(ring[1] * len(queue) + 1e-9), start + 1)
    plain = tiled.strips(anchors, [queue], torch.tensor(1 / TEMPERATURE))
    for (_, scores), (_, banded) in zip(plain, strips_of_bands(anchors, queue, ring), strict=True):
        order = np.argsort(scores.numpy(), axis=1, kind="stable")
        expected = np.zeros(scores.shape, dtype=bool)
        np.put_along_axis(expected, order[:, start:end], True, axis=1)
        if not np.array_equal(expected, banded.numpy() > -np.inf):
            return False
    return True


def times(peers: Peers, turns: int) -> dict[str, list[float]]:
    """Milliseconds of each peer in each repetition."""
    for run in peers.values():
        run()
    found: dict[str, list[float]] = {name: [] for name in peers}
    for _ in range(turns):
        for name, run in peers.items():
            begin = time.perf_counter()
            run()
            found[name].append(1000 * (time.perf_counter() - begin))
    return found


def rows_of(task: str, ring: tuple[float, float], keys: int, measured: dict[str, list[float]]) -> list[dict[str, Any]]:
    """A row of results per peer, also printed; ratios are relative to the first."""
    rows = []
    ours = next(iter(measured.values()))
    for name, taken in measured.items():
        ratio = statistics.median(other / own for other, own in zip(taken, ours, strict=True))
        low, _, high = statistics.quantiles(taken, n=4)
        row = {
            "task": task,
            "ring": ring,
            "keys": keys,
            "contestant": name,
            "ms": statistics.median(taken),
            "ms_quartiles": [low, high],
            "ms_least": min(taken),
            "turns": len(taken),
            "times_hardneg": ratio,
            "times_hardneg_least": min(taken) / min(ours),
        }
        rows.append(row)
        band = f"{ring[0]:g}–{ring[1]:g}"
        print(
            f"{task:<5} {band:<9} {keys:>6}  {name:<15} {row['ms']:>8.1f} {f'{low:.1f}–{high:.1f}':>16} "
            f"{min(taken):>8.1f} {ratio:>9.2f}"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="3 turns over 8,192 keys; nothing is written")
    parser.add_argument("--table", action="store_true", help="print the stored results as Markdown")
    options = parser.parse_args()
    if options.table:
        print_table()
        return
    keys, turns = (8192, 3) if options.quick else (65536, 15)
    anchors, positives, queue = inputs(keys)
    exact = {f"{low:g}–{high:g}": is_exact(anchors, queue, (low, high)) for low, high in RINGS}
    print("identical to a stable sort:", ", ".join(f"{band} {'yes' if same else 'NO'}" for band, same in exact.items()))
    header = f"{'task':<5} {'ring':<9} {'keys':>6}  {'':<15} {'ms':>8} {'quartiles':>16} {'least':>8} {'× hardneg':>9}"
    print(header + "\n" + "-" * len(header))
    rows = []
    for ring in RINGS:
        rows += rows_of("find", ring, keys, times(finding(anchors, queue, ring), turns))
    for progress, ring in ((1.0, (0.9, 0.99)), (0.0, (0.0, 0.9))):
        rows += rows_of("loss", ring, keys, times(losses(anchors, positives, queue, progress), turns))
    found = {
        "command": "python " + " ".join(["benchmarks/ring.py", *sys.argv[1:]]),
        "machine": {
            "processor": record.processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "load_average": os.getloadavg()[0],
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "hardneg": hn.__version__,
        },
        "settings": {"anchors": ANCHORS, "dim": DIM, "temperature": TEMPERATURE, "seed": 0, "dtype": "float32"},
        "identical_to_stable_sort": exact,
        "rows": rows,
    }
    if not options.quick:
        record.write(RESULTS, found)


def print_table() -> None:
    """The stored results as a Markdown table."""
    print("| task | ring | | ms (quartiles) | × hardneg |\n|---|---|---|---:|---:|")
    for row in json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]:
        (low, high), (lower, upper) = row["ms_quartiles"], row["ring"]
        print(
            f"| {row['task']} | {lower:g}–{upper:g} | {row['contestant']} | {row['ms']:,.0f} ({low:,.0f}–{high:,.0f}) "
            f"| {row['times_hardneg']:,.2f} |"
        )


if __name__ == "__main__":
    main()
