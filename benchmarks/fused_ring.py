"""The section of `fused.py` about bands of ranks."""

from typing import Any

import torch
from bench import Bench, Make, keys_of, step
from stopwatch import Run
from torch import Tensor
from torch.nn.functional import normalize

import hardneg as hn

RING, TEMPERATURE = hn.Ring(0.9, 0.99), 0.07
DIM = 128


def ring(bench: Bench) -> None:
    """Bands of ranks over a queue: time of the device alone, since the host can run ahead."""
    for rows in (8, 32) if bench.quick else (256, 1024):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            finding(bench, rows, dtype)
        whole_loss(bench, rows)


def made(bench: Bench, *hardening: hn.Ring) -> hn.InfoNCE:
    """MoCo's loss with these bands."""
    bands: dict[str, Any] = {"hardening": hardening} if hardening else {}
    return hn.InfoNCE(temperature=TEMPERATURE, in_batch=None, backend=bench.backend, **bands)


def finding(bench: Bench, rows: int, dtype: torch.dtype) -> None:
    """Our kernel computes the band with its sums, so the whole forward pass is measured; peers find the band only."""
    queries, positives = (view.detach().to(dtype) for view in bench.views(rows, DIM))
    keys = keys_of(bench, DIM).to(dtype)
    units = normalize(queries.float(), dim=1).to(dtype)  # peers get unit vectors

    def forward() -> Run:
        loss = made(bench, RING)

        def run() -> None:
            with torch.no_grad():
                loss(queries, positives, negatives=keys)

        return run

    def product() -> Tensor:
        if dtype is torch.float32:
            return units @ keys.T
        if not bench.watch.on_gpu:
            return (units @ keys.T).float()
        return torch.mm(units, keys.T, out_dtype=torch.float32)

    runs_by_name: dict[str, Make] = {
        "ring, forward": forward,
        "product and sort": lambda: lambda: product().sort(dim=1),
        "product and topk": lambda: lambda: product().topk(len(keys) // 10, dim=1),
        "product": lambda: product,
    }
    settings = {"task": "find", "dtype": str(dtype).removeprefix("torch."), "rows": rows, "candidates": len(keys)}
    turns = 2 if bench.quick else 9
    bench.contest(settings | {"dim": DIM}, runs_by_name, turns, bench.watch.queued)


def whole_loss(bench: Bench, rows: int) -> None:
    """The loss and its gradient with and without a band, in bfloat16."""
    keys = keys_of(bench, DIM)
    queries, positives = bench.views(rows, DIM)
    given = {"z2": positives.detach(), "negatives": keys}
    steps: dict[str, Make] = {
        "without a band": lambda: step(made(bench), queries, **given),
        "ring": lambda: step(made(bench, RING), queries, **given),
    }
    settings = {"task": "loss", "dtype": "bfloat16", "rows": rows, "candidates": len(keys), "dim": DIM}
    bench.contest(settings, steps, 2 if bench.quick else 9, bench.watch.queued)
