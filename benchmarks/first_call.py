"""Time of the first call of losses in this process, for `fused.py`, as JSON.

    TRITON_CACHE_DIR=… python benchmarks/first_call.py simclr hcl … [--device cuda] [--backend fused] [--keys 65536]

The clock runs from the call to the synchronised end of the backward pass, after a product that starts the device. It
includes imports at the first call and the compilation of kernels. Losses are called in the order given: later ones use
the kernels of earlier ones. B = 256, d = 128, bfloat16. ``compiled`` is the masked-fill formula of HCL under
`torch.compile`, from float32 under bfloat16 autocast.
"""

import argparse
import json
import time
from collections.abc import Callable

import torch
from peers import filled_hcl
from stopwatch import Stopwatch
from torch import Tensor

import hardneg as hn

BATCH, DIM, CLASSES = 256, 128, 10
PRESETS = ("simclr", "hcl", "hscl", "supcon", "queue", "clip", "ring")
COMPILED = "compiled"


def first_calls(names: list[str], device: torch.device, backend: str, keys: int) -> dict[str, float]:
    """Seconds of the first forward and backward pass of each loss."""
    watch, draws = Stopwatch(device), torch.Generator().manual_seed(0)

    def vectors(rows: int) -> Tensor:
        return torch.randn(rows, DIM, generator=draws).to(device, torch.bfloat16)

    z1, z2 = vectors(BATCH).requires_grad_(), vectors(BATCH).requires_grad_()
    negatives, positives = vectors(keys), z2.detach()
    labels = torch.randint(CLASSES, (BATCH,), generator=draws).to(device)
    square = vectors(DIM)
    torch.autograd.backward((z1 @ square).sum())
    z1.grad = None
    watch.wait()

    losses = {
        "simclr": hn.simclr(backend=backend),
        "hcl": hn.hcl(backend=backend),
        "hscl": hn.hscl(backend=backend),
        "supcon": hn.supcon(backend=backend),
        "queue": hn.moco(backend=backend),
        "clip": hn.clip(backend=backend).to(device),
        "ring": hn.ring_nce(anneal="none", backend=backend),
    }

    def call(name: str) -> Callable[[], None]:
        if name == COMPILED:
            floats = [z.detach().float().requires_grad_() for z in (z1, z2)]
            formula = torch.compile(filled_hcl, dynamic=False)

            def mixed() -> None:
                with torch.autocast(device.type, torch.bfloat16):
                    value = formula(*floats)
                torch.autograd.backward(value)

            return mixed
        loss = losses[name]
        if name in ("queue", "ring"):
            return lambda: torch.autograd.backward(loss(z1, positives, negatives=negatives))
        given = {"labels": labels} if name in ("hscl", "supcon") else {}
        return lambda: torch.autograd.backward(loss(z1, z2, **given))

    seconds = {}
    for name in names:
        run = call(name)
        watch.wait()
        begin = time.perf_counter()
        run()
        watch.wait()
        seconds[name] = time.perf_counter() - begin
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="+", choices=(*PRESETS, COMPILED))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="fused")
    parser.add_argument("--keys", type=int, default=65_536, help="length of the queue")
    options = parser.parse_args()
    found = first_calls(options.names, torch.device(options.device), options.backend, options.keys)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
