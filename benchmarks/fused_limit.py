"""The sections of `fused.py` that compare with the limit of the machine."""

import time
from functools import partial
from typing import Any

import torch
from bench import OURS, Bench, as_float, keys_of, step
from loss import BETA, PRIOR, TEMPERATURE, Loss, cross_entropy_nt_xent, published_hcl
from peers import chunked_hcl, filled_hcl, tiled_infonce
from stopwatch import Run
from torch import Tensor

import hardneg as hn

WHOLE: dict[str, Loss] = {
    "published HCL": published_hcl,
    "filled HCL": filled_hcl,
    "cross-entropy": cross_entropy_nt_xent,
}
BLOCKS: dict[str, Loss] = {"tiled InfoNCE": tiled_infonce, "chunked HCL": chunked_hcl}
FEW: dict[str, Loss] = {"published HCL": published_hcl, "tiled InfoNCE": tiled_infonce}
LARGE = 65_536
LONGEST_PEER = 3000  # ms a step
FIXED_RATE = 790e12  # operations per second of large bfloat16 products on an H200 at its best, to compare runs

Past = dict[tuple[str, int], tuple[int, float]]  # rows and ms of a peer (name, d) when it last ran


def limit(bench: Bench) -> None:
    """The documented sizes first, then the largest sizes, towers, queues and compiled peers."""
    large = 512 if bench.quick else LARGE
    past: Past = {}
    for rows in (128, large) if bench.quick else (1024, 4096, 16_384, large):
        one_tower(bench, rows, 128, WHOLE | BLOCKS, past)
    for dim in (256, 768, 64):
        one_tower(bench, large, dim, FEW, past)
    for rows in (2 * large,) if bench.quick else (4 * large, 16 * large):
        one_tower(bench, rows, 128, BLOCKS, past)
    for dim in (128, 768):
        towers(bench, large // 2, dim)
    for batch in (16, 32) if bench.quick else (256, 1024, 4096):
        queue(bench, batch, 128)
    narrow(bench, large, 128)
    compiled(bench, large, 128)


def grid(bench: Bench) -> None:
    """The other sizes at the other dimensions, hardneg only, while time remains."""
    for rows in (128, 256) if bench.quick else (1024, 16_384, 4 * LARGE, 16 * LARGE):
        for dim in (64, 256, 768):
            least = 2 * 2 * rows**2 * dim / bench.rate  # T*, s
            if least / 0.3 * steps_of_a_cell(bench, rows) > bench.deadline - time.perf_counter():
                settings = {"case": "one tower", "rows": rows, "candidates": rows, "dim": dim, "peer": OURS}
                bench.add(settings | {"skipped": "--seconds are over"})
            else:
                one_tower(bench, rows, dim, {}, {})


def steps_of_a_cell(bench: Bench, rows: int) -> float:
    """Steps whose time a cell may take: the first run measures several tile sizes, as it did in `limit` at d = 128."""
    for row in bench.found["sections"].get("limit", {"rows": []})["rows"]:
        if row.get("rows") == rows and row.get("peer") == OURS and "first_s" in row:
            return 2 + 1000 * float(row["first_s"]) / float(row["ms"])
    return 20


def share(bench: Bench, products: int, rows: int, candidates: int, dim: int, row: dict[str, Any]) -> dict[str, Any]:
    """The row with its T*/T, at the rate measured now and at the fixed one, and the bound on its memory."""
    rate = bench.product_rate()  # at the same chip temperature
    operations = products * 2 * rows * candidates * dim
    least, fixed = 1000 * operations / rate, 1000 * operations / FIXED_RATE  # ms
    bound = (12 * rows * dim + 64 * rows) / 2**20 + 64
    shares = {"limit_share": least / row["ms"], "fixed_share": fixed / row["ms"]}
    return row | shares | {"product_tflops": rate / 1e12, "bound_mib": bound}


def one_tower(bench: Bench, rows: int, dim: int, peers: dict[str, Loss], past: Past) -> None:
    """HCL over both views, and the peers where they fit; ``past`` has their earlier times."""
    settings = {"case": "one tower", "rows": rows, "candidates": rows, "dim": dim}
    leaves = bench.views(rows // 2, dim)

    def make() -> Run:
        return step(hn.hcl(BETA, PRIOR, TEMPERATURE, backend=bench.backend), *leaves)

    ours = bench.cell(settings | {"peer": OURS}, lambda: share(bench, 2, rows, rows, dim, bench.measured(make, leaves)))
    floats = as_float(leaves)
    for name, peer in peers.items():
        before_rows, before_ms = past.get((name, dim), past.get((name, 128), (rows, 0.0)))
        expected = before_ms * (rows / before_rows) ** 2
        why = "would not fit" if name in WHOLE and not fits(bench, rows) else None
        if expected > LONGEST_PEER:
            why = why or f"about {expected / 1000:.0f} s a step"
        if why is not None:
            bench.add(settings | {"peer": name, "skipped": why})
            continue
        against(bench, settings | {"peer": name}, bench.autocast(peer), floats, ours)
        if "ms" in bench.rows[-1]:
            past[name, dim] = rows, bench.rows[-1]["ms"]


def fits(bench: Bench, rows: int) -> bool:
    """Whether six float32 matrices of scores fit, as many as the published formula needs at once."""
    if not bench.watch.on_gpu:
        return rows <= 4096
    bench.tidy()
    return 6 * 4 * rows**2 < torch.cuda.mem_get_info(bench.device)[0]


def against(
    bench: Bench, settings: dict[str, Any], loss: Loss, leaves: tuple[Tensor, Tensor], ours: dict[str, Any]
) -> None:
    """A peer's row, with its time relative to hardneg."""

    def measure() -> dict[str, Any]:
        row = bench.measured(lambda: step(loss, *leaves), leaves)
        return row | ({"times_hardneg": row["ms"] / ours["ms"]} if "ms" in ours else {})

    bench.cell(settings, measure)
    for leaf in leaves:
        leaf.grad = None
    bench.tidy()


def narrow(bench: Bench, rows: int, dim: int) -> None:
    """The published formula in bfloat16 throughout: half the memory, and three times the error of autocast."""
    settings = {"case": "one tower", "rows": rows, "candidates": rows, "dim": dim}
    ours = next((row for row in bench.rows if row.items() >= (settings | {"peer": OURS}).items()), {})
    against(bench, settings | {"peer": "published HCL bfloat16"}, published_hcl, bench.views(rows // 2, dim), ours)


def compiled(bench: Bench, rows: int, dim: int) -> None:
    """The published formula under torch.compile, as it is and in the form that compiles without a break."""
    settings = {"case": "one tower", "rows": rows, "candidates": rows, "dim": dim}
    ours = next((row for row in bench.rows if row.items() >= (settings | {"peer": OURS}).items()), {})
    leaves = as_float(bench.views(rows // 2, dim))
    for name in ("published HCL", "filled HCL"):
        print(f"{'':9}compiling {name}", flush=True)
        loss = torch.compile(WHOLE[name], dynamic=False)
        against(bench, settings | {"peer": f"{name} compiled"}, bench.autocast(loss), leaves, ours)
        torch._dynamo.reset()


def towers(bench: Bench, batch: int, dim: int) -> None:
    """HCL between two towers, in one direction and in both."""
    leaves = bench.views(batch, dim)

    def measure(symmetric: bool) -> dict[str, Any]:
        options: dict[str, Any] = {"in_batch": "other", "symmetric": symmetric, "backend": bench.backend}
        row = bench.measured(lambda: step(hn.hcl(BETA, PRIOR, TEMPERATURE, **options), *leaves), leaves)
        return share(bench, 3, batch, batch, dim, row)

    for symmetric, name in ((False, "two towers"), (True, "two towers, both ways")):
        settings = {"case": name, "rows": batch, "candidates": batch, "dim": dim, "peer": OURS}
        bench.cell(settings, partial(measure, symmetric))


def queue(bench: Bench, batch: int, dim: int) -> None:
    """MoCo's loss over a queue."""
    keys = keys_of(bench, dim)
    queries, positives = bench.views(batch, dim)

    def make() -> Run:
        return step(hn.moco(backend=bench.backend), queries, z2=positives.detach(), negatives=keys)

    bench.cell(
        {"case": "queue", "rows": batch, "candidates": len(keys), "dim": dim, "peer": OURS},
        lambda: share(bench, 2, batch, len(keys), dim, bench.measured(make, (queries,))),
    )
