"""The fused kernel compared with the limit of the machine and with other implementations, in one run on one GPU.

    python benchmarks/fused.py [--only limit small …] [--seconds 480] [--seed 0] [--out results/fused.json]
    python benchmarks/fused.py --table                                 the stored results as Markdown, and the claims
    python benchmarks/fused.py --quick --device cpu --backend tiled    tiny sizes on a CPU, to test the script

first       first calls in new processes (`first_call.py`), cold and from Triton's disk cache, B = 256, d = 128: the
            presets one after the other, and the first call of torch.compile
compiled    torch.compile(loss, fullgraph=True) against eager at B = 16,384: memory and time; CUDA graphs at B = 256
supervised  SCL, H-SCL and SupCon against SupCon in plain PyTorch, including the host, as in `small`
ring        bands of ranks over a queue, time of the device: finding the band (the forward pass) against product and
            sort and against product and topk of as many as lie above the band's lower edge; scores in float32 from
            inputs of the same precision. And the loss with and without a band.
nan         NaN, inf, labels and indices out of range: a NaN loss, without waiting for the device, and the next call
            is right. A loss on a CPU raises instead.
random      150 random settings and inputs (`random_settings.py`) against float64; the seed is that of the day
limit       HCL (β = 1, τ⁺ = 0.1, t = 0.5), forward and backward, from 1,024 rows (two views of 512) to 1,048,576;
            two towers; a queue. T*/T is the share of the time that the matrix products alone would take, at the
            rate of an 8192³ product in bfloat16 measured right after, and at 790 TFLOP/s:
            T* = g·2·rows·candidates·d / rate, with g = 2 (one tower: scores, and (W + Wᵀ)Z), 3 (two towers) or 2
            (queue without gradient). What a kernel computes twice does not count. Two towers in both directions
            share their scores: rows is B, not 2B.
generality  HCL with one setting changed, as a difference to HCL in ms
small       small batches, including the host: mean time of a step over a loop of 200
accuracy    gradients against the published formula in float64
grid        the other sizes at the other dimensions, until --seconds are over

All get the same embeddings, rounded to bfloat16. The fused kernel gets them as bfloat16. The peers get them as float32
under bfloat16 autocast, which is how they are used: products in bfloat16, exponentials and sums in float32. Peers: the
published HCL formula (`loss.py`), the same compiled, plain cross-entropy NT-Xent, and those of `peers.py`. A peer is
left out if its matrices would not fit or a step would take more than 3 s. Times are medians of CUDA events; memory is
the peak beyond inputs and their gradients, from an allocator whose segments can grow. Results are written after every
cell; sections not run are kept.
"""

import argparse
import json
import os

# Otherwise free memory is fragmented, and the published formula does not fit at 65,536 rows.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import fused_report
import torch
from bench import OURS, Bench, Make, Poisoned, as_float, step
from fused_calls import compiled, first, invalid, random
from fused_limit import grid, limit
from fused_ring import ring
from loss import BETA, PRIOR, TEMPERATURE, Loss, cross_entropy_nt_xent, published_hcl
from peers import chunked_hcl, plain_supcon
from random_settings import seed_of_the_day
from stopwatch import Run
from torch import Tensor

import hardneg as hn
from hardneg.randomness import generator

RESULTS = Path(__file__).parents[1] / "results" / "fused.json"


def generality(bench: Bench) -> None:
    """HCL and the same with one setting changed, in the same kernel."""
    rows, dim = (256, 64) if bench.quick else (65_536, 128)
    leaves = bench.views(rows // 2, dim)
    labels = torch.randint(100, (rows // 2,), generator=generator(bench.device, 2), device=bench.device)

    def variant(given: dict[str, Any] | None = None, **changed: Any) -> Make:
        hcl = {"hardening": hn.Exponential(BETA), "class_prior": PRIOR, "temperature": TEMPERATURE}
        options: dict[str, Any] = {**hcl, "backend": bench.backend, **changed}
        return lambda: step(hn.InfoNCE(**options).to(bench.device), *leaves, **(given or {}))

    variants = {
        "HCL": variant(),
        **{f"β = {beta:g}": variant(hardening=hn.Exponential(beta)) for beta in (0.5, 2.0, 1.5)},
        "labels": variant({"labels": labels}, supervision="negatives"),
        "threshold": variant(hardening=(hn.Exponential(BETA), hn.Threshold(1.0))),  # cosines of at least 0
        "learnt temperature": variant(temperature=hn.Learnable(TEMPERATURE)),
        "plain InfoNCE": variant(hardening=hn.Uniform(), class_prior=0.0),
    }
    turns = 2 if bench.quick else 15
    settings = {"case": "one tower", "rows": rows, "candidates": rows, "dim": dim}
    bench.contest(settings, variants, turns, lambda run: statistics.fmean(bench.watch.each(run, 10)[4:]))


def small(bench: Bench) -> None:
    """Small batches: bound by the number of launches."""
    steps, turns = (3, 2) if bench.quick else (200, 3)
    for batch in (16,) if bench.quick else (64, 256, 1024):
        leaves = bench.views(batch, 128)
        floats = as_float(leaves)
        ours = partial(hn.hcl, BETA, PRIOR, TEMPERATURE, backend=bench.backend)
        runs_by_name: dict[str, Make] = {
            "hardneg bfloat16": partial(make_step, ours, leaves),
            "hardneg float32": partial(make_step, ours, floats),
            "published HCL float32": partial(step, published_hcl, *floats),
            "published HCL autocast": partial(step, bench.autocast(published_hcl), *floats),
            "cross-entropy float32": partial(step, cross_entropy_nt_xent, *floats),
        }
        settings = {"rows": 2 * batch, "batch": batch, "dim": 128}
        bench.contest(settings, runs_by_name, turns, lambda run: bench.watch.loop(run, steps))


def make_step(make: Callable[[], Loss], leaves: tuple[Tensor, Tensor]) -> Run:
    """A step with a new loss."""
    return step(make(), *leaves)


def supervised(bench: Bench) -> None:
    """Losses with labels on small batches, against SupCon in plain PyTorch."""
    steps, turns = (3, 2) if bench.quick else (100, 7)  # many turns, because the time of the host varies
    for batch in (16,) if bench.quick else (256, 1024):
        labels = torch.randint(10, (batch,), generator=generator(bench.device, 2), device=bench.device)
        for dtype in (torch.bfloat16, torch.float32):
            leaves = bench.views(batch, 128, dtype)
            runs_by_name: dict[str, Make] = {"plain SupCon": partial(step, plain_supcon, *leaves, labels=labels)}
            for preset in (hn.hscl, hn.scl, hn.supcon):
                ours = preset(backend=bench.backend)
                runs_by_name[f"hardneg {preset.__name__}"] = partial(step, ours, *leaves, labels=labels)
            settings = {"batch": batch, "dim": 128, "dtype": str(dtype).removeprefix("torch.")}
            bench.contest(settings, runs_by_name, turns, lambda run: bench.watch.loop(run, steps))


def accuracy(bench: Bench) -> None:
    """Relative errors of gradients (Frobenius), each dtype against float64 of the same inputs."""
    hcl, every = partial(hn.hcl, BETA, PRIOR, TEMPERATURE), (torch.bfloat16, torch.float16, torch.float32)
    sizes: tuple[tuple[int, int, tuple[torch.dtype, ...]], ...] = (
        ((24, 128, every),)
        if bench.quick
        # The last uses the code for many wide rows; the published formula would not fit in float64.
        else ((512, 128, every), (2048, 128, every), (16_384, 768, every[:1]))
    )
    for batch, dim, dtypes in sizes:
        large = batch > 4096
        for dtype in dtypes:
            leaves = bench.views(batch, dim, dtype)
            exact = chunked_hcl if large else published_hcl
            truth = gradient(exact, *(leaf.detach().double() for leaf in leaves))
            peers: dict[str, Callable[[], Loss]] = {OURS: partial(hcl, backend=bench.backend)}
            if not large:
                peers |= {
                    "hardneg reference": partial(hcl, backend="reference"),
                    "published HCL": lambda: published_hcl,
                }
            if dtype is not torch.float32:
                peers["published HCL autocast"] = partial(bench.autocast, published_hcl, dtype)
            settings = {"rows": 2 * batch, "dim": dim, "dtype": str(dtype).removeprefix("torch.")}
            for peer, make in peers.items():
                bench.cell(settings | {"peer": peer}, partial(twice, make, leaves, truth))
    rows = 256 if bench.quick else 65_536
    settings = {"rows": rows, "dim": 128, "dtype": "bfloat16", "peer": OURS}
    bench.cell(settings, partial(twice, partial(hcl, backend=bench.backend), bench.views(rows // 2, 128), None))


def twice(make: Callable[[], Loss], leaves: tuple[Tensor, Tensor], truth: Tensor | None) -> dict[str, Any]:
    """The error of a gradient if the reference is known, and whether a second run is bitwise equal."""
    loss = make()
    one, other = (gradient(loss, *(leaf.detach() for leaf in leaves)) for _ in range(2))
    error = None if truth is None else float((one.double() - truth).norm() / truth.norm())
    return {"error_of_gradient": error, "bitwise_twice": torch.equal(one, other), "finite": bool(one.isfinite().all())}


def gradient(loss: Loss, z1: Tensor, z2: Tensor) -> Tensor:
    """Gradient of the sum over anchors: that of the mean would underflow in float16."""
    leaves = (z1.clone().requires_grad_(), z2.clone().requires_grad_())
    torch.autograd.backward(loss(*leaves) * (2 * len(z1)))
    return torch.cat([leaf.grad for leaf in leaves if leaf.grad is not None])


# The grid comes last, because --seconds cut it.
SECTIONS = {
    "first": first, "compiled": compiled, "supervised": supervised, "ring": ring, "nan": invalid, "random": random,
    "limit": limit, "generality": generality, "small": small, "accuracy": accuracy, "grid": grid,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections to run")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="fused", help="of hardneg's losses (default: fused)")
    parser.add_argument(
        "--seconds", type=float, default=480, help="cells of the grid that would go beyond are left out"
    )
    parser.add_argument("--seed", type=int, default=seed_of_the_day(), help="of the random settings")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", default="", help="of this copy of a checkout")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, nothing written")
    parser.add_argument("--table", action="store_true", help="print the stored results as Markdown")
    options = parser.parse_args()
    if options.table:
        print(fused_report.text(json.loads(options.out.read_text(encoding="utf-8"))))
        return
    bench = Bench(options)
    for position, name in enumerate(options.only):
        bench.open(name)
        try:
            SECTIONS[name](bench)
        except Poisoned as error:
            bench.add({"error": f"the device answers no more: {error}"})
            rest = options.only[position + 1 :]
            if rest:
                print("restarting for", *rest, flush=True)
                os.execv(sys.executable, [sys.executable, __file__, *arguments(options), "--only", *rest])
        except Exception as error:
            bench.add({"error": f"{type(error).__name__}: {error}"})
    print(fused_report.text(bench.found), flush=True)


def arguments(options: argparse.Namespace) -> list[str]:
    """The options as they were given, without the sections."""
    given = [f"--device={options.device}", f"--backend={options.backend}", f"--out={options.out}"]
    given += [f"--seconds={options.seconds}", f"--seed={options.seed}", f"--commit={options.commit}"]
    return [*given, *(["--quick"] if options.quick else [])]


if __name__ == "__main__":
    main()
