"""Measurements of a run of `fused.py`, and the file of their results."""

import argparse
import gc
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import record
import torch
from loss import BETA, PRIOR, TEMPERATURE, Loss
from stopwatch import Run, Stopwatch, summary
from torch import Tensor
from torch.nn.functional import normalize

import hardneg as hn
from hardneg.randomness import generator

OURS = "hardneg"
QUEUE = 65_536

Make = Callable[[], Run]  # called when it is measured, so that one that fails does not affect the others


class Poisoned(Exception):
    """The device failed: only a new process can continue."""


class Bench:
    """Device and options of the measurements, and the results of this section so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device, self.backend, self.quick = torch.device(options.device), options.backend, options.quick
        self.seed: int = options.seed
        self.commit: str = options.commit or record.commit()
        self.out: Path | None = None if options.quick else options.out
        self.watch = Stopwatch(self.device)
        self.began, self.deadline = time.perf_counter(), time.perf_counter() + options.seconds
        kept = self.out is not None and self.out.exists()
        self.found: dict[str, Any] = (
            json.loads(self.out.read_text(encoding="utf-8")) if kept and self.out else {"sections": {}}
        )
        self.found |= {
            "machine": {
                "gpu": torch.cuda.get_device_name(self.device) if self.watch.on_gpu else None,
                "processor": record.processor(),
                "cores": os.cpu_count(),
            },
            "versions": versions(),
            "settings": {"beta": BETA, "class_prior": PRIOR, "temperature": TEMPERATURE, "seed": 0},
        }
        self.rate = self.product_rate()
        print(f"{self.found['machine']}, product of bfloat16: {self.rate / 1e12:.0f} TFLOP/s", flush=True)

    def product_rate(self) -> float:
        """Operations per second of a large product in bfloat16."""
        return self.watch.product_rate(256 if self.quick else 8192)

    def open(self, name: str) -> None:
        """Begin a section."""
        self.rows: list[dict[str, Any]] = []
        self.section = {
            "command": "python " + " ".join(["benchmarks/fused.py", *sys.argv[1:]]),
            "commit": self.commit,
            "product_tflops": self.rate / 1e12,
            "rows": self.rows,
        }
        self.found["sections"][name] = self.section
        self.opened = time.perf_counter()
        print(f"\n{name}", flush=True)

    def add(self, row: dict[str, Any]) -> None:
        """Store a row, also on disk."""
        self.rows.append(row)
        self.section["seconds"] = time.perf_counter() - self.opened
        if self.out is not None:
            self.out.parent.mkdir(exist_ok=True, parents=True)
            self.out.write_text(json.dumps(self.found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        shown = {name: f"{given:.4g}" if isinstance(given, float) else given for name, given in row.items()}
        clock = f"{time.perf_counter() - self.began:6.1f} s"
        print(clock, ", ".join(f"{name} {given}" for name, given in shown.items()), flush=True)

    def cell(self, settings: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """A row with the results of ``measure``, or with its error."""
        try:
            row = settings | measure()
        except Exception as error:  # an error of one peer must not stop the others
            row = settings | {"error": f"{type(error).__name__}: {str(error).strip()[:300]}"}
        self.add(row)
        if "error" in row:
            self.tidy()
        return row

    def tidy(self) -> None:
        """Free the memory that a failure or a large peer left."""
        gc.collect()
        if self.watch.on_gpu:
            try:
                self.watch.wait()
                torch.cuda.empty_cache()
            except RuntimeError as error:
                raise Poisoned(str(error)) from error

    def contest(
        self, settings: dict[str, Any], runs_by_name: dict[str, Make], turns: int, timer: Callable[[Run], float]
    ) -> None:
        """Peers are interleaved, each time in another order, because a chip is slower after a long kernel.

        Ratios and differences to the first are medians of those within each turn.
        """
        runs: dict[str, Run] = {}
        for name, make in runs_by_name.items():
            print(f"{'':9}{name}", flush=True)
            try:
                run = make()
                self.watch.wall(run)  # compiles, tunes, warms up
                runs[name] = run
            except Exception as error:
                self.add(settings | {"peer": name, "error": f"{type(error).__name__}: {str(error).strip()[:300]}"})
            if name not in runs:
                self.tidy()
        times: dict[str, list[float]] = {name: [] for name in runs}
        order, draws = list(runs), random.Random(0)
        for _ in range(turns):
            draws.shuffle(order)
            for name in order:
                times[name].append(timer(runs[name]))
        base = times.get(next(iter(runs_by_name)))
        for name, taken in times.items():
            compared = {}
            if base:
                pairs = list(zip(taken, base, strict=True))
                compared["ratio"] = statistics.median(a / b for a, b in pairs)
                compared["difference_ms"] = statistics.median(a - b for a, b in pairs)
            self.add(settings | {"peer": name, **summary(taken), **compared})

    def views(self, batch: int, dim: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
        """Two noisy views (B, d) of the same points, rounded to bfloat16 unless a dtype is given."""
        draws = generator(self.device, 0, batch, dim)
        z1 = torch.randn(batch, dim, generator=draws, device=self.device)
        z2 = z1 + torch.randn(batch, dim, generator=draws, device=self.device)
        return z1.to(dtype).requires_grad_(), z2.to(dtype).requires_grad_()

    def autocast(self, loss: Loss, dtype: torch.dtype = torch.bfloat16) -> Loss:
        """The loss as it is used in mixed precision."""

        def mixed(z1: Tensor, z2: Tensor) -> Tensor:
            with torch.autocast(self.device.type, dtype):
                return loss(z1, z2)

        return mixed

    def measured(self, make: Make, leaves: tuple[Tensor, ...]) -> dict[str, Any]:
        """First run, time and extra memory of a step."""
        first = self.watch.wall(make())  # compiles, tunes, warms up
        run = make()  # again, because a loss keeps its last call, and that memory counts
        for leaf in leaves:
            leaf.grad = None
        before = self.watch.used_bytes()
        once = self.watch.each(run, 1)
        peak = self.watch.peak_bytes()
        gradients = sum(leaf.grad.nbytes for leaf in leaves if leaf.grad is not None)
        extra = None if peak is None else (peak - before - gradients) / 2**20
        if once[0] < 100:
            # The first one waits for the host, and is not counted.
            once = self.watch.each(run, min(max(int(300 / once[0]), 5), 20) + 1)[1:]
        elif once[0] < 1500:
            once += self.watch.each(run, 2)
        return {**summary(once), "first_s": first / 1000, "extra_mib": extra}


def versions() -> dict[str, str | None]:
    """Versions of everything that affects speed."""
    try:
        import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        triton = None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": getattr(triton, "__version__", None),
        "hardneg": hn.__version__,
    }


def step(loss: Callable[..., Tensor], *leaves: Tensor, **given: Any) -> Run:
    """Forward and backward, with new gradients."""

    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        torch.autograd.backward(loss(*leaves, **given))

    return run


def as_float(leaves: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The same embeddings as leaves in float32."""
    z1, z2 = (leaf.detach().float().requires_grad_() for leaf in leaves)
    return z1, z2


def keys_of(bench: Bench, dim: int) -> Tensor:
    """A queue of unit vectors (65,536, d) in bfloat16."""
    draws = generator(bench.device, 1, dim)
    keys = torch.randn(1024 if bench.quick else QUEUE, dim, generator=draws, device=bench.device)
    return normalize(keys, dim=1).bfloat16()
