"""Two processes, each with a model under DDP and its share of a batch; they save their gradients for the tests."""

from pathlib import Path
from typing import Any

import children
import torch
import torch.distributed as dist
from integrations.tiny_model import sentences, tiny_model
from sentence_transformers import SentenceTransformer
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import hardneg as hn
from hardneg.integrations.sentence_transformers import CachedHardNegativeLoss, HardNegativeLoss

SIZES = (5, 3)


def texts() -> list[list[str]]:
    """Three columns; one positive occurs on both processes."""
    found = sentences(3 * sum(SIZES))
    columns = [found[start::3] for start in range(3)]
    columns[1][6] = columns[1][1]
    return columns


def losses(model: Any, gather: bool) -> dict[str, HardNegativeLoss]:
    """A plain loss, one by source, and a cached one with a learnable temperature."""
    by_source = {"batch": hn.BelowPositive(0.1), "own": hn.Exponential(0.5), "others": hn.Exponential(0.2)}
    return {
        "plain": HardNegativeLoss(model, symmetric=True, gather_across_devices=gather),
        "by source": HardNegativeLoss(model, hn.simcse(0.1, hardening=by_source), gather_across_devices=gather),
        "cached": CachedHardNegativeLoss(model, mini_batch_size=2, gather_across_devices=gather),
    }


def gradients(model: SentenceTransformer, loss: HardNegativeLoss, rows: slice) -> dict[str, Tensor]:
    model.zero_grad()
    value = loss([model.preprocess(column[rows]) for column in texts()])
    assert isinstance(value, Tensor)
    value.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found | {"loss": value.detach()}


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    model = tiny_model(Path(folder) / f"model {rank}").double()  # first: in a group only rank 0 saves it
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=len(SIZES))
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    wrapped.preprocess = model.preprocess  # as the trainer does
    start = sum(SIZES[:rank])
    rows = slice(start, start + SIZES[rank])
    found = {name: gradients(model, loss, rows) for name, loss in losses(wrapped, gather=True).items()}
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def launch(folder: Path) -> list[dict[str, dict[str, Tensor]]]:
    """The results of both processes."""
    children.spawn(work, (str(folder),), len(SIZES))
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(len(SIZES))]
