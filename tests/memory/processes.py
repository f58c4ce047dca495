"""Processes with a gathered queue and bank: each takes its part of a batch and saves its results for the tests."""

from pathlib import Path
from typing import Any

import children
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hardneg as hn
from hardneg.memory import MemoryBank, Queue

ROWS, DIM, STEPS = 8, 6, 3


def inputs(step: int) -> dict[str, Tensor]:
    """A whole batch of one step."""
    generator = torch.Generator().manual_seed(step)
    return {
        "keys": torch.randn(ROWS, DIM, generator=generator, dtype=torch.float64),
        "images": torch.randn(ROWS, DIM, generator=generator, dtype=torch.float64),
        "labels": torch.randint(-1, 5, (ROWS,), generator=generator),
        "ids": torch.randint(12, (ROWS,), generator=generator),  # some twice
    }


def queue_states(rows: slice, gather: bool) -> dict[str, Tensor]:
    """The state of the queue after STEPS batches, of which this process has some rows."""
    queue = Queue(11, DIM, gather=gather)
    for step in range(STEPS):
        batch = {name: tensor[rows] for name, tensor in inputs(step).items()}
        queue.enqueue(batch["keys"], batch["labels"], batch["ids"])
    return queue.state_dict()


def bank_states(rows: slice, gather: bool) -> dict[str, Tensor]:
    """The state of the bank after the same batches."""
    bank = MemoryBank(12, DIM, gather=gather)
    for step in range(STEPS):
        batch = inputs(step)
        bank.update(batch["ids"][rows], batch["keys"][rows])
    return bank.state_dict()


def moco_gradients(rows: slice, gather: bool) -> Tensor:
    """The gradients of a linear encoder at every step of MoCo, (steps, 4, d)."""
    generator = torch.Generator().manual_seed(9)
    encoder = nn.Linear(DIM, 4, bias=False).double()
    key_encoder = nn.Linear(DIM, 4, bias=False).double()
    for module in (encoder, key_encoder):
        module.weight.data = torch.randn(4, DIM, generator=generator, dtype=torch.float64)
    queue, loss = Queue(11, 4, dtype=torch.float64, gather=gather), hn.moco(gather=gather)
    found = []
    for step in range(STEPS):
        batch = {name: tensor[rows] for name, tensor in inputs(step).items()}
        keys = key_encoder(batch["images"]).detach()
        others = ~queue.same_instance(batch["ids"])
        encoder.zero_grad()
        loss(encoder(batch["images"]), keys, negatives=queue.keys, negative_mask=others).backward()
        queue.enqueue(keys, ids=batch["ids"])
        assert encoder.weight.grad is not None
        found.append(encoder.weight.grad.clone())
    return torch.stack(found)


def work(rank: int, sizes: list[int], folder: str) -> None:
    """One process: its rows are the ``rank``-th part of every batch."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=len(sizes))
    start = sum(sizes[:rank])
    rows = slice(start, start + sizes[rank])
    found: dict[str, Any] = {"queue": queue_states(rows, True), "bank": bank_states(rows, True)}
    if 0 not in sizes:
        found["gradients"] = moco_gradients(rows, True)
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def launch(sizes: list[int], folder: Path) -> list[dict[str, Any]]:
    """The results of ``len(sizes)`` processes."""
    children.spawn(work, (sizes, str(folder)), len(sizes))
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(len(sizes))]
