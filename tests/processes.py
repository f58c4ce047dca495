"""Processes of the distributed tests: each runs the same cases on its share of a batch and saves the results."""

from pathlib import Path
from typing import Any

import children
import torch
import torch.distributed as dist
from torch import Tensor

import hardneg as hn

ROWS, DIM = 12, 6


def settings() -> dict[str, tuple[dict[str, Any], list[str]]]:
    """Options of `InfoNCE` by name, and the names of further arguments of the call."""
    labeled = ["labels"]
    queue = ["negatives", "exclude", "negative_mask"]
    learnable = {"temperature": hn.Learnable(0.3)}
    return {
        "simclr": ({}, []),
        "hcl": ({"hardening": hn.Exponential(1.0), "class_prior": 0.05}, []),
        "learnable temperature": ({**learnable, "hardening": hn.Exponential(0.5), "class_prior": 0.05}, []),
        "other view": ({**learnable, "in_batch": "other"}, []),
        "symmetric": ({**learnable, "in_batch": "other", "symmetric": True, "hardening": hn.Threshold(1.0)}, []),
        "hscl": ({"supervision": "full", "negative_count": "batch", "hardening": hn.Exponential(1.0)}, labeled),
        "pairs": ({"supervision": "full", "average": "pairs"}, labeled),
        "in denominator": ({"supervision": "full", "combine_positives": "in_denominator"}, labeled),
        "ring": ({"hardening": hn.Ring(0.5, 0.9)}, []),
        "below positive": ({"hardening": hn.BelowPositive(0.1), "negative_count": "batch"}, []),
        "weight range": ({"normalize": False, "weight_range": 2.0, "hardening": hn.Exponential(1.0)}, []),
        "draws": ({"num_negatives": 5}, []),
        "queue": ({"in_batch": None, "temperature": 0.2}, queue),
        "batch and queue": ({"hardening": hn.Exponential(2.0)}, queue),
        "own rows": ({"in_batch": None, "temperature": 0.3}, ["bank", "bank exclude"]),
        "own rows and mask": ({"hardening": hn.Ring(0.2, 0.9)}, ["bank", "bank mask"]),
        "own labelled rows": (
            {"supervision": "full", "combine_positives": "log_of_sum"},
            ["bank", "bank exclude", "bank labels", "labels"],
        ),
        "sources": (
            {
                "hardening": {"batch": hn.BelowPositive(), "bank": hn.Exponential(1.0), "queue": hn.Ring(0.1, 0.8)},
                "class_prior": 0.05,
                "negative_count": "batch",
            },
            ["bank", "bank mask", "queue"],
        ),
        "ids": ({"normalize_weights": False, "hardening": hn.Exponential(0.5)}, ["bank", "bank ids", "ids", "pairs"]),
        "ids and labels": ({"supervision": "full"}, ["bank", "bank ids", "bank labels", "labels", "ids"]),
        "guide": ({"hardening": (hn.Guided(0.1), hn.Exponential(0.5))}, ["bank", "bank guide", "guide"]),
        "directions": ({"in_batch": ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")}, []),
        "sum": ({"reduction": "sum"}, []),
        "none": ({"reduction": "none"}, []),
    }


def inputs() -> dict[str, Tensor]:
    """A whole batch; the queue is the same on all processes, the rest is divided by rows.

    The bank has a row for each row of the batch, so that each process has its own part.
    """
    generator = torch.Generator().manual_seed(5)
    z1 = torch.randn(ROWS, DIM, generator=generator, dtype=torch.float64)
    return {
        "z1": z1,
        "z2": z1 + torch.randn(ROWS, DIM, generator=generator, dtype=torch.float64),
        "labels": torch.tensor([0, 0, 1, 2, 1, -1, 3, 0, 2, -1, 4, 1]),  # 3 and 4 occur once
        "negatives": torch.randn(9, DIM, generator=generator, dtype=torch.float64),
        "exclude": torch.randint(9, (ROWS,), generator=generator),
        "negative_mask": torch.rand(ROWS, 9, generator=generator) < 0.8,
        "bank": torch.randn(ROWS, DIM, generator=generator, dtype=torch.float64),
        "bank labels": torch.tensor([0, 1, -1, 2, 1, 3, 3, 0, 5, 0, 4, 1]),
        "bank ids": torch.tensor([1, 20, 3, 21, 22, 4, 4, 23, -1, 24, 25, 9]),
        "bank guide": torch.randn(ROWS, 3, generator=generator, dtype=torch.float64),
        "guide": torch.randn(ROWS, 2, 3, generator=generator, dtype=torch.float64),
        "ids": torch.stack([torch.arange(ROWS), torch.arange(ROWS) // 3 + 10], dim=1),
        "pairs": torch.tensor([[8, 20], [20, 2], [0, 11], [5, 21], [11, 5], [13, 24], [3, 3], [9, 1], [40, 41],
                               [22, 12], [23, 7], [25, 6]]),
    }  # fmt: skip


def sources(whole: dict[str, Tensor], rows: slice, names: list[str]) -> dict[str, Any]:
    """The arguments of a call with a bank, of which each process has the rows of its share of the batch."""
    share = whole["bank"][rows]
    own, bank = torch.arange(len(share)), whole["bank"][rows].clone().requires_grad_()
    found: dict[str, Any] = {"negatives": {"bank": bank} | ({"queue": whole["negatives"]} if "queue" in names else {})}
    if "bank exclude" in names:
        found["exclude"] = {"bank": own}
    if "bank mask" in names:
        found["negative_mask"] = {"bank": own[:, None] != own}
    if "guide" in names:
        found["guide"] = whole["guide"][rows].unbind(dim=1)
    bank_arguments = (("labels", "negative_labels"), ("ids", "negative_ids"), ("guide", "negative_guide"))
    for name, key in [(f"bank {name}", key) for name, key in bank_arguments]:
        if name in names:
            found[key] = {"bank": whole[name][rows]}
    for name, key in (("labels", "labels"), ("ids", "ids"), ("pairs", "not_negatives")):
        if name in names:
            found[key] = whole[name][rows]
    return found


def run(name: str, rows: slice, gather: bool, backend: str) -> dict[str, Tensor]:
    """Loss and gradients of one case on some rows of the batch, and the gradients of the squared gradients."""
    options, names = settings()[name]
    if "num_negatives" in options:
        options["generator"] = torch.Generator().manual_seed(1)
    loss = hn.InfoNCE(**options, gather=gather, backend=backend).double()
    whole = inputs()
    z1, z2 = (whole[view][rows].clone().requires_grad_() for view in ("z1", "z2"))
    extra: dict[str, Any] = {}
    if "bank" in names:
        extra = sources(whole, rows, names)
    else:
        extra = {key: whole[key] if key == "negatives" else whole[key][rows] for key in names}
    value = loss(z1, z2, **extra)
    value.sum().backward()
    found = {"loss": value.detach(), "z1": z1.grad, "z2": z2.grad}
    if "bank" in names:
        found["bank"] = extra["negatives"]["bank"].grad
    if isinstance(loss.temperature, hn.Learnable):
        found["temperature"] = loss.temperature.log_value.grad
    again = loss(z1, z2, **extra)
    first = torch.autograd.grad(again.sum(), (z1, z2), create_graph=True)
    second = torch.autograd.grad(first[0].square().sum() + first[1].square().sum(), (z1, z2))
    found |= {"second z1": second[0], "second z2": second[1]}
    if isinstance(loss.temperature, hn.Learnable):
        found["second temperature"] = second_temperature(loss, z1, z2)
    return {key: tensor for key, tensor in found.items() if tensor is not None}


def second_temperature(loss: hn.InfoNCE, z1: Tensor, z2: Tensor) -> Tensor:
    """The second derivative of the loss by the logarithm of its learnable temperature, ()."""
    log_value = loss.temperature.log_value
    (first,) = torch.autograd.grad(loss(z1, z2), log_value, create_graph=True)
    (second,) = torch.autograd.grad(first, log_value)
    return second


def work(rank: int, sizes: list[int], folder: str) -> None:
    """One process: its rows are the ``rank``-th part of the batch."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=len(sizes))
    start = sum(sizes[:rank])
    rows = slice(start, start + sizes[rank])
    found = {
        f"{name}/{backend}": run(name, rows, True, backend) for name in settings() for backend in ("reference", "tiled")
    }
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def launch(sizes: list[int], folder: Path) -> list[dict[str, dict[str, Tensor]]]:
    """The results of ``len(sizes)`` processes."""
    children.spawn(work, (sizes, str(folder)), len(sizes))
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(len(sizes))]


def plain_encoder() -> torch.nn.Module:
    """An encoder without batch-norm, whose features of an image do not depend on its batch."""
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
