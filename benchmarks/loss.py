"""Time and peak memory of a forward and backward pass of the loss, compared with other implementations.

    python benchmarks/loss.py [--quick]
    python benchmarks/loss.py --libraries  only the comparison with losses of other libraries; keeps the other results
    python benchmarks/loss.py --table      the last results as Markdown, for docs/kernels.md

Peers, all given the same unnormalized embeddings, which they normalize:
  hardneg tiled      hn.hcl(), the default here
  hardneg reference  the same through plain autograd
  published HCL      the formula of HCL's published code: exponentials, masked_select, clamp
  cross-entropy      NT-Xent as cross-entropy over the full matrix of logits: no hardening, no debiasing
  metric-learning    pytorch-metric-learning's NTXentLoss, up to B = 256 (it would need 34 GB at 1,024)

Then, on one thread, losses of other libraries beside ours that computes the same value (`peers.LIBRARIES`), d = 128.

Times are medians over interleaved repetitions, so that a slow phase of the machine affects all peers. Memory is
the rise of the process's peak resident size in a new process, beyond inputs and their gradients.
"""

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import record
import stopwatch
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

import hardneg as hn

Loss = Callable[[Tensor, Tensor], Tensor]
BETA, PRIOR, TEMPERATURE = 1.0, 0.1, 0.5
PEERS = ("hardneg tiled", "hardneg reference", "published HCL", "cross-entropy")
RESULTS = Path(__file__).parents[1] / "results" / "loss.json"


def published_hcl(z1: Tensor, z2: Tensor) -> Tensor:
    """HCL's loss as in its published code."""
    batch = len(z1)
    z = torch.cat([normalize(z1, dim=1), normalize(z2, dim=1)])
    exponentials = torch.exp(z @ z.T / TEMPERATURE)
    others = ~torch.eye(batch, dtype=torch.bool, device=z.device).repeat(2, 2)
    negatives = exponentials.masked_select(others).view(2 * batch, -1)
    positive = torch.exp((z[:batch] * z[batch:]).sum(dim=1) / TEMPERATURE).repeat(2)
    count = 2 * batch - 2
    importance = (BETA * negatives.log()).exp()
    reweighted = (importance * negatives).sum(dim=1) / importance.mean(dim=1)
    total = ((reweighted - PRIOR * count * positive) / (1 - PRIOR)).clamp(min=count * math.exp(-1 / TEMPERATURE))
    return -(positive / (positive + total)).log().mean()


def cross_entropy_nt_xent(z1: Tensor, z2: Tensor) -> Tensor:
    """SimCLR's loss as cross-entropy over logits."""
    z = torch.cat([normalize(z1, dim=1), normalize(z2, dim=1)])
    logits = (z @ z.T / TEMPERATURE).fill_diagonal_(-torch.inf)
    return cross_entropy(logits, torch.arange(len(z), device=z.device).roll(len(z1)))


def metric_learning(z1: Tensor, z2: Tensor) -> Tensor:
    """pytorch-metric-learning's NT-Xent."""
    from pytorch_metric_learning.losses import NTXentLoss

    labels = torch.arange(len(z1), device=z1.device).repeat(2)
    value: Tensor = NTXentLoss(temperature=TEMPERATURE)(torch.cat([z1, z2]), labels)
    return value


def peer(name: str) -> Loss:
    """The loss of this name; of another library's row: ``name:peer`` or ``name:ours``."""
    row, _, side = name.partition(":")
    if side:
        from peers import LIBRARIES

        found: Loss = LIBRARIES[row][side == "ours"]()
        return found
    if name.startswith("hardneg"):
        return hn.hcl(BETA, PRIOR, TEMPERATURE, backend=name.split()[1])
    return {"published HCL": published_hcl, "cross-entropy": cross_entropy_nt_xent, "metric-learning": metric_learning}[
        name
    ]


def inputs(batch: int, dim: int) -> tuple[Tensor, Tensor]:
    """Two noisy views of the same points."""
    generator = torch.Generator().manual_seed(0)
    z1 = torch.randn(batch, dim, generator=generator)
    z2 = z1 + torch.randn(batch, dim, generator=generator)
    return z1.requires_grad_(), z2.requires_grad_()


def step(loss: Loss, z1: Tensor, z2: Tensor) -> None:
    """Forward and backward."""
    z1.grad = z2.grad = None
    torch.autograd.backward(loss(z1, z2))


def times(batch: int, dim: int, names: list[str], seconds: float) -> dict[str, list[float]]:
    """Milliseconds of each peer's repetitions, interleaved for about this long."""
    z1, z2 = inputs(batch, dim)
    losses = {name: peer(name) for name in names}
    for loss in losses.values():
        step(loss, z1, z2)
        step(loss, z1, z2)
    found: dict[str, list[float]] = {name: [] for name in names}
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends or len(found[names[0]]) < 3:
        for name, loss in losses.items():
            begin = time.perf_counter()
            step(loss, z1, z2)
            found[name].append(1000 * (time.perf_counter() - begin))
    return found


def peak_memory(name: str, batch: int, dim: int) -> float:
    """MiB by which one step raises the peak resident size of a new process."""
    command = [sys.executable, __file__, "--memory", name, str(batch), str(dim)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True, encoding="utf-8").stdout)


def print_peak_memory(name: str, batch: int, dim: int) -> None:
    """What the process started by `peak_memory` does."""
    small = inputs(8, dim)
    step(peer(name), *small)  # libraries loaded, threads started
    z1, z2 = inputs(batch, dim)
    z1.grad, z2.grad = torch.ones_like(z1), torch.ones_like(z2)  # allocated before counting
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # reset the peak

    def resident(kind: str) -> float:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith(kind))) / 1024

    before = resident("VmRSS")
    torch.autograd.backward(peer(name)(z1, z2))
    print(resident("VmHWM") - before)


def compare_libraries(quick: bool) -> list[dict[str, Any]]:
    """Time and memory of losses of other libraries and of ours, on one thread."""
    from peers import LIBRARIES

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = []
    print(f"\n{'B':>6}  {'peer / ours, one thread':<42} {'peer ms':>9} {'ours ms':>9} {'ratio':>6} {'MiB':>15}")
    for batch in (64, 256, 1024) if quick else (64, 256, 1024, 4096):
        for name in LIBRARIES:
            sides = [f"{name}:peer", f"{name}:ours"]
            measured = times(batch, 128, sides, seconds=1.0 if quick else max(4.0, batch / 200))
            z1, z2 = inputs(batch, 128)
            with torch.no_grad():  # the two compute the same
                torch.testing.assert_close(peer(sides[0])(z1, z2), peer(sides[1])(z1, z2), rtol=1e-3, atol=1e-4)
            ours = stopwatch.summary(measured[sides[1]])
            row: dict[str, Any] = {
                "batch": batch,
                "dim": 128,
                "row": name,
                "peer": stopwatch.summary(measured[sides[0]]),
                "ours": ours,
            }
            row["ratio"] = row["peer"]["ms"] / ours["ms"]
            memory = ""
            if batch == 4096:
                row["peer_mib"], row["ours_mib"] = (peak_memory(side, batch, 128) for side in sides)
                memory = f"{row['peer_mib']:,.0f} / {row['ours_mib']:,.0f}"
            rows.append(row)
            print(
                f"{batch:>6}  {name:<42} {row['peer']['ms']:>9.2f} {ours['ms']:>9.2f} {row['ratio']:>6.2f} {memory:>15}"
            )
    torch.set_num_threads(threads)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a second per size, small sizes only")
    parser.add_argument("--libraries", action="store_true", help="only the losses of other libraries")
    parser.add_argument("--table", action="store_true", help="print the stored results as Markdown")
    parser.add_argument("--memory", nargs=3, metavar=("PEER", "BATCH", "DIM"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        name, batch, dim = options.memory
        print_peak_memory(name, int(batch), int(dim))
        return

    if options.table:
        print_table()
        return
    if options.libraries:
        stored = json.loads(RESULTS.read_text(encoding="utf-8"))
        stored["libraries"] = compare_libraries(options.quick)
        if not options.quick:
            record.write(RESULTS, stored)
        return
    sizes = [(64, 128), (256, 128), (256, 768), (1024, 128)]
    if not options.quick:
        sizes += [(1024, 768), (4096, 128), (16384, 128)]
    rows = []
    header = f"{'B':>6} {'d':>4}  {'peer':<18} {'ms':>9} {'spread':>14} {'× tiled':>8} {'MiB':>9}"
    print(header + "\n" + "-" * len(header))
    for batch, dim in sizes:
        whole = 4 * (2 * batch) ** 2 / 2**20  # MiB of one float32 matrix of scores
        names = [name for name in PEERS if name == "hardneg tiled" or whole < 600]
        measured = times(batch, dim, names, seconds=1.0 if options.quick else 6.0)
        if batch <= 256:
            # It is hundreds of times slower and would evict the caches of the others, so it runs separately.
            measured |= times(batch, dim, ["metric-learning"], seconds=1.0)
        base = statistics.median(measured["hardneg tiled"])
        for name in measured:
            median = statistics.median(measured[name])
            quartiles = statistics.quantiles(measured[name], n=4)
            memory = peak_memory(name, batch, dim)
            rows.append(
                {
                    "batch": batch,
                    "dim": dim,
                    "peer": name,
                    "ms": median,
                    "ms_quartiles": [quartiles[0], quartiles[2]],
                    "repetitions": len(measured[name]),
                    "times_tiled": median / base,
                    "peak_mib": memory,
                }
            )
            spread = f"{quartiles[0]:.1f}–{quartiles[2]:.1f}"
            print(f"{batch:>6} {dim:>4}  {name:<18} {median:>9.2f} {spread:>14} {median / base:>8.2f} {memory:>9.1f}")
        if "published HCL" not in names:
            # exp, log, product, masked copies and their gradients: at least five matrices live at once
            print(f"{'':>12} published HCL: five matrices of {whole:,.0f} MiB, {5 * whole / 1024:.0f} GiB (computed)")
    found = {
        "command": "python " + " ".join(["benchmarks/loss.py", *sys.argv[1:]]),
        "commit": record.commit(),
        "machine": {"processor": record.processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "hardneg": hn.__version__},
        "settings": {"beta": BETA, "class_prior": PRIOR, "temperature": TEMPERATURE, "seed": 0, "dtype": "float32"},
        "rows": rows,
        "libraries": compare_libraries(options.quick),
    }
    if not options.quick:
        record.write(RESULTS, found)


def print_table() -> None:
    """The stored results as Markdown tables."""
    stored = json.loads(RESULTS.read_text(encoding="utf-8"))
    print("| B | d | | ms (quartiles) | × tiled | extra MiB |\n|---:|---:|---|---:|---:|---:|")
    for row in stored["rows"]:
        low, high = row["ms_quartiles"]
        print(
            f"| {row['batch']:,} | {row['dim']} | {row['peer']} | {row['ms']:,.1f} ({low:,.1f}–{high:,.1f}) "
            f"| {row['times_tiled']:,.2f} | {row['peak_mib']:,.0f} |"
        )
    ratios = {(row["row"], row["batch"]): row for row in stored["libraries"]}
    print("\n| | B = 64 | 256 | 1,024 | 4,096 | extra MiB at 4,096, peer / ours |\n|---|---:|---:|---:|---:|---:|")
    for name in dict.fromkeys(row["row"] for row in stored["libraries"]):
        cells = [f"{ratios[name, batch]['ratio']:.2f}" for batch in (64, 256, 1024, 4096)]
        last = ratios[name, 4096]
        print(f"| {name} | {' | '.join(cells)} | {last['peer_mib']:,.0f} / {last['ours_mib']:,.0f} |")


if __name__ == "__main__":
    main()
