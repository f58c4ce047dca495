"""Two processes, each with an encoder under DDP and its share of a batch; they save their gradients for the tests."""

from datetime import timedelta
from pathlib import Path

import children
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hardneg as hn

ROWS, FEATURES = 26, 5
SIZES = (17, 9)  # unequal, so that the numbers of chunks differ


class Model(nn.Module):
    """Two encoders with buffers, and a loss with a learnable temperature."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (
            nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.BatchNorm1d(7).eval(), nn.Linear(7, 4)).double()
            for _ in range(2)
        )
        self.loss = hn.InfoNCE(hn.Learnable(0.3), hardening=hn.Exponential(1.0), gather=True).double()


def batch() -> Tensor:
    return torch.randn(2, ROWS, FEATURES, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=len(SIZES),
        timeout=timedelta(seconds=60),  # a wrong number of reductions would make a process wait
    )
    start = sum(SIZES[:rank])
    view1, view2 = batch()[:, start : start + SIZES[rank]]
    found = {}
    model = Model()
    encoder = DistributedDataParallel(model.first)
    for step in range(2):  # DDP reports an unfinished reduction in the next step
        encoder.zero_grad()
        sent = count_reductions(encoder)
        hn.cached_step(encoder, (view1, view2), model.loss, chunk_size=4)
        found[f"one encoder, step {step}"] = gradients(model.first)
        found[f"reductions, step {step}"] = {"": torch.tensor(len(sent))}

    model = Model()
    pair = [DistributedDataParallel(model.first), DistributedDataParallel(model.second)]
    hn.cached_step(pair, (view1, view2), model.loss, chunk_size=(4, 6))
    found["two encoders"] = {
        name: gradient for name, gradient in gradients(model).items() if not name.startswith("loss")
    }
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def count_reductions(encoder: DistributedDataParallel) -> list[int]:
    """A list to which the index of every bucket that DDP reduces is appended."""
    sent: list[int] = []
    if not hasattr(encoder, "sent"):
        encoder.sent = sent  # type: ignore[assignment]  # a hook may be registered once
        encoder.register_comm_hook(encoder, _averaged)
    encoder.sent = sent  # type: ignore[assignment]
    return sent


def _averaged(encoder: DistributedDataParallel, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    encoder.sent.append(bucket.index())  # type: ignore[operator, union-attr]
    future = dist.all_reduce(bucket.buffer().div_(len(SIZES)), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def launch(folder: Path) -> list[dict[str, dict[str, Tensor]]]:
    """The results of each process."""
    children.spawn(work, (str(folder),), len(SIZES))
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(len(SIZES))]
