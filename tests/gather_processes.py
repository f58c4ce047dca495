"""Processes that gather rows: what they communicate in a backward pass, and the results within process groups."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import children
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import hardneg as hn
from hardneg import distributed

DIM = 6
REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
COLLECTIVES = ("all_gather", "all_reduce", "all_to_all_single", REDUCE_SCATTER)
Calls = list[tuple[str, int]]


def inputs(rows: int) -> tuple[Tensor, Tensor]:
    """Both views of a whole batch, (rows, d) each."""
    generator = torch.Generator().manual_seed(3)
    z1 = torch.randn(rows, DIM, generator=generator, dtype=torch.float64)
    return z1, z1 + torch.randn(rows, DIM, generator=generator, dtype=torch.float64)


def infonce(rows: list[int] | slice, total: int, gather: Any) -> dict[str, Tensor]:
    """Loss and gradients of some rows of a batch of ``total``."""
    z1, z2 = (view[rows].clone().requires_grad_() for view in inputs(total))
    value = hn.InfoNCE(hardening=hn.Exponential(1.0), class_prior=0.05, gather=gather)(z1, z2)
    value.backward()
    assert z1.grad is not None
    assert z2.grad is not None
    return {"loss": value.detach(), "z1": z1.grad, "z2": z2.grad}


def sources(rows: list[int] | slice, total: int, gather: Any) -> dict[str, Tensor]:
    """The same with ids, a bank of which each process has its rows, and a queue that is the same on all processes."""
    z1, z2 = (view[rows].clone().requires_grad_() for view in inputs(total))
    bank, queue = inputs(2 * total)[0][total:], inputs(total + 5)[1][total:]
    bank = bank[rows].clone().requires_grad_()
    loss = hn.InfoNCE(hardening={"batch": hn.Exponential(1.0), "bank": hn.Ring(0.1, 0.9)}, gather=gather)
    ids, own = torch.arange(total)[rows] // 2, torch.arange(len(bank))
    value = loss(
        z1, z2, ids=ids, negatives={"bank": bank, "queue": queue}, exclude={"bank": own},
        negative_ids={"bank": ids + 1}, not_negatives=torch.stack([ids, ids + 2], dim=1),
    )  # fmt: skip
    value.backward()
    assert z1.grad is not None
    assert z2.grad is not None
    assert bank.grad is not None
    return {"loss": value.detach(), "z1": z1.grad, "z2": z2.grad, "bank": bank.grad}


def jsd(rows: list[int] | slice, total: int, gather: Any) -> dict[str, Tensor]:
    """Loss and gradients of graphs with one node each."""
    nodes, graphs = (view[rows].clone().requires_grad_() for view in inputs(total))
    value = hn.JSD(beta=1.0, gather=gather)(nodes, graphs, torch.arange(len(nodes)))
    value.backward()
    assert nodes.grad is not None
    assert graphs.grad is not None
    return {"loss": value.detach(), "z1": nodes.grad, "z2": graphs.grad}


def network() -> torch.nn.Linear:
    """A linear encoder with fixed weights."""
    torch.manual_seed(0)
    return torch.nn.Linear(DIM, 4).double()


@contextmanager
def counted() -> Iterator[Calls]:
    """The collectives called inside, with the bytes of the tensor that each process passes."""
    calls: Calls = []
    with mock.patch.multiple(dist, **{name: _counting(name, calls) for name in COLLECTIVES}):
        yield calls


def _counting(name: str, calls: Calls) -> Any:
    original = getattr(dist, name)

    def call(*args: Any, **named: Any) -> Any:
        sent = args[0] if name == "all_reduce" else args[1]
        calls.append((name, sent.numel() * sent.element_size()))
        return original(*args, **named)

    return call


def backward_calls(rows: int, sizes: list[int]) -> Calls:
    """The collectives of the backward pass of `distributed.gather`."""
    given = torch.randn(rows, DIM, dtype=torch.float64, requires_grad=True)
    found = distributed.gather(given, sizes)
    with counted() as calls:
        found.square().sum().backward()
    return calls


def work(rank: int, sizes: list[int], folder: str) -> None:
    """One process: its rows are the ``rank``-th part of the batch; processes 0 and 2 also form a group."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=len(sizes))
    total, start = sum(sizes), sum(sizes[:rank])
    rows = slice(start, start + sizes[rank])
    found: dict[str, Any] = {"calls": backward_calls(sizes[rank], sizes)}
    with counted() as calls:
        found["all"] = infonce(rows, total, gather=True)
    found["calls of a loss"] = calls
    with mock.patch.object(distributed, "_WITHOUT_REDUCE_SCATTER", ()):  # as with NCCL
        found["reduce-scatter calls"] = backward_calls(sizes[rank], sizes)
        found["reduce-scatter"] = infonce(rows, total, gather=True)
    even, odd = (dist.new_group(list(range(first, len(sizes), 2))) for first in (0, 1))
    group = odd if rank % 2 else even
    found["group"] = infonce(rows, total, gather=group)
    found["group sources"] = sources(rows, total, gather=group)
    found["group jsd"] = jsd(rows, total, gather=group)
    try:
        hn.InfoNCE(gather=even if rank % 2 else odd)
    except ValueError as error:
        found["other group"] = str(error)

    encoder = DistributedDataParallel(network())
    z1, z2 = (encoder(view[rows]) for view in inputs(total))
    hn.InfoNCE(gather=group)(z1, z2).backward()
    found["ddp"] = encoder.module.weight.grad
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def launch(sizes: list[int], folder: Path) -> list[dict[str, Any]]:
    """The results of ``len(sizes)`` processes."""
    children.spawn(work, (sizes, str(folder)), len(sizes))
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(len(sizes))]
