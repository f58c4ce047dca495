"""The sections of `fused.py` about single calls: the first one, compiled ones, invalid values, random settings."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench import Bench, Make, keys_of, step
from first_call import BATCH, CLASSES, COMPILED, DIM, PRESETS
from loss import BETA, PRIOR, TEMPERATURE
from random_settings import Limits, run_in_processes
from stopwatch import Run, summary
from torch import Tensor
from torch._dynamo.utils import counters

import hardneg as hn
from hardneg.randomness import generator


def first(bench: Bench) -> None:
    """First calls in new processes: no kernel compiled before, and all of them in the disk cache."""
    command = [f"--device={bench.device}", f"--backend={bench.backend}", f"--keys={1024 if bench.quick else 65_536}"]
    # Otherwise the first process to import the compiler would also measure the disk.
    subprocess.run([sys.executable, "-c", "import triton, torch._inductor.compile_fx"], check=False)

    def seconds(names: tuple[str, ...], folder: str) -> dict[str, float]:
        caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("first_call.py")), *names, *command],
            env=os.environ | caches, capture_output=True, text=True, encoding="utf-8", timeout=300,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"exit status {done.returncode}: {done.stderr.strip()[-200:]}")
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return found

    def add(cache: str, names: tuple[str, ...], folder: str) -> None:
        settings = {"cache": cache, "batch": BATCH, "dim": DIM}
        try:
            for name, taken in seconds(names, folder).items():
                bench.add(settings | {"peer": name, "first_s": taken})
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            bench.add(settings | {"peer": " ".join(names), "error": f"{type(error).__name__}: {error}"})

    with tempfile.TemporaryDirectory() as folder:
        add("cold", (COMPILED,), folder)
    with tempfile.TemporaryDirectory() as folder:
        add("cold", PRESETS, folder)
        add("on disk", PRESETS, folder)


def compiled(bench: Bench) -> None:
    """HCL under torch.compile: time and memory of a large batch, and CUDA graphs for a small one."""

    def hcl() -> hn.InfoNCE:
        return hn.hcl(BETA, PRIOR, TEMPERATURE, backend=bench.backend)

    batch = 64 if bench.quick else 16_384
    leaves = bench.views(batch, DIM)
    settings = {"batch": batch, "dim": DIM}
    eager = bench.cell(settings | {"peer": "eager"}, lambda: bench.measured(lambda: step(hcl(), *leaves), leaves))

    def make() -> Run:
        return step(torch.compile(hcl(), fullgraph=True, dynamic=False), *leaves)

    def compiled_step() -> dict[str, Any]:
        found = bench.measured(make, leaves)
        run = make()
        run()  # a new loss may be compiled again, which must not be in the time
        found |= summary(bench.watch.each(run, 21)[1:])
        known = found["extra_mib"] is not None and eager.get("extra_mib")
        return found | ({"memory_ratio": found["extra_mib"] / eager["extra_mib"]} if known else {})

    bench.cell(settings | {"peer": "compiled"}, compiled_step)
    torch._dynamo.reset()

    small = bench.views(16 if bench.quick else BATCH, DIM)
    graph = torch.compile(hcl(), fullgraph=True, dynamic=False, mode="reduce-overhead")

    def replayed(*given: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        value: Tensor = graph(*given)
        return value

    skipped = counters["inductor"]["cudagraph_skips"]
    settings = {"batch": len(small[0]), "dim": DIM}
    runs: dict[str, Make] = {
        "eager": lambda: step(hcl(), *small),
        "compiled": lambda: step(torch.compile(hcl(), fullgraph=True, dynamic=False), *small),
        "CUDA graph": lambda: warmed(step(replayed, *small)),
    }
    steps, turns = (3, 2) if bench.quick else (200, 3)
    bench.contest(settings, runs, turns, lambda run: bench.watch.loop(run, steps))

    def present() -> dict[str, Any]:
        """Whether a replay computes the loss and the gradient of values copied into its inputs."""
        before = result(replayed, small)
        with torch.no_grad():
            for leaf in small:
                leaf.copy_(torch.randn(leaf.shape, generator=generator(bench.device, 5), device=bench.device))
        after, expected = result(replayed, small), result(hcl(), small)
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(after, expected, strict=True)]
        changed = not torch.equal(before[0], after[0])
        graphs = counters["inductor"]["cudagraph_skips"] == skipped
        return {"difference": max(errors), "right": changed and max(errors) < 1e-2, "replays": graphs}

    bench.cell(settings | {"peer": "CUDA graph, new values"}, present)
    torch._dynamo.reset()


def warmed(run: Run) -> Run:
    """The run after the calls in which `torch.compile` records its CUDA graphs."""
    for _ in range(4):
        run()
    return run


def result(loss: Callable[..., Tensor], leaves: tuple[Tensor, ...]) -> list[Tensor]:
    """Copies of the loss and of its gradients: a replay overwrites its results."""
    for leaf in leaves:
        leaf.grad = None
    value = loss(*leaves)
    found = [value.detach().clone()]
    torch.autograd.backward(value)
    return found + [leaf.grad.clone() for leaf in leaves if leaf.grad is not None]


def invalid(bench: Bench) -> None:
    """Invalid values on a GPU: the loss is NaN, nothing waits for the device, and the next call is right.

    On a CPU they raise.
    """
    z1, z2 = (view.detach() for view in bench.views(32 if bench.quick else BATCH, DIM))
    negatives = keys_of(bench, DIM)[:4096]
    labels = torch.randint(CLASSES, (len(z1),), generator=generator(bench.device, 2), device=bench.device)
    exclude = torch.arange(len(z1), device=bench.device)
    views = {"z1": z1, "z2": z2}
    queue = views | {"negatives": negatives}
    below = hn.InfoNCE(hardening=hn.BelowPositive(0.1), backend=bench.backend)  # takes the general path
    hcl, moco = hn.hcl(BETA, PRIOR, TEMPERATURE, backend=bench.backend), hn.moco(backend=bench.backend)
    ring, hscl = hn.ring_nce(anneal="none", backend=bench.backend), hn.hscl(backend=bench.backend)
    nan, inf = torch.nan, torch.inf
    cases: list[tuple[str, hn.InfoNCE, dict[str, Tensor], str, float]] = [
        *(("HCL", hcl, views, name, bad) for name in views for bad in (nan, inf)),
        *(("below the positive", below, views, name, bad) for name in views for bad in (nan, inf)),
        *(("queue", moco, queue, name, bad) for name in queue for bad in (nan, inf)),
        *(("ring", ring, queue, name, bad) for name in queue for bad in (nan, inf)),
        ("H-SCL", hscl, views | {"labels": labels}, "labels", -2),
        *(("queue", moco, queue | {"exclude": exclude}, "exclude", bad) for bad in (-1, len(negatives))),
    ]
    for case, loss, given, name, bad in cases:
        settings = {"case": case, "argument": name, "value": str(bad)}
        bench.cell(settings, partial(with_bad_value, bench, loss, given, name, bad))


def with_bad_value(bench: Bench, loss: hn.InfoNCE, given: dict[str, Tensor], name: str, bad: float) -> dict[str, Any]:
    """What happens if one value of an argument is bad. given: valid arguments of the loss"""
    valid = given | {"z1": given["z1"].clone().requires_grad_()}
    wrong = valid | {name: given[name].clone()}
    wrong[name].view(-1)[wrong[name].numel() // 2] = bad
    wrong["z1"].requires_grad_()
    before = loss(**valid)
    torch.autograd.backward(before)  # compiles
    bench.watch.wait()
    raised = None
    if bench.watch.on_gpu:
        torch.cuda.set_sync_debug_mode("error")
    try:
        value = loss(**wrong)
        torch.autograd.backward(value)
    except (RuntimeError, ValueError) as error:  # a wait for the device is a RuntimeError
        raised = f"{type(error).__name__}: {error}"[:100]
    finally:
        if bench.watch.on_gpu:
            torch.cuda.set_sync_debug_mode("default")
    right = bool(loss(**valid) == before)
    found = {"is_nan": raised is None and bool(value.isnan()), "right_after": right}
    return found if raised is None else found | {"raised": raised}


def random(bench: Bench) -> None:
    """Random settings against the reference kernel in float64, in several processes that compile kernels."""
    workers = max(1, (os.cpu_count() or 1) - 2)
    limits = Limits(device=str(bench.device), backend=bench.backend)
    if bench.quick:
        limits = Limits(str(bench.device), rows=12, keys=20, dim=40, backend=bench.backend)
    print(f"{'':9}seed {bench.seed}", flush=True)

    def tried() -> dict[str, Any]:
        tally = run_in_processes(10 if bench.quick else 150, bench.seed, limits, workers)
        reached = {kind: tally.reached[kind] for kind in sorted(tally.reached)}
        found = {"tried": tally.tried, "wrong": tally.wrong, "worst": tally.worst, "reached": reached}
        return found | ({"failures": tally.failures} if tally.failures else {})

    bench.cell({"seed": bench.seed, "workers": workers}, tried)
