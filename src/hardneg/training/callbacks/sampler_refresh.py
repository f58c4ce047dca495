"""The callback that gives a batch sampler new embeddings during training."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from hardneg import distributed
from hardneg.methods.step_timer import StepTimer
from hardneg.samplers.refreshed import RefreshedBatchSampler


class Refresh(L.Callback):
    """Moves a sampler's schedules with training, and refreshes it every ``refresh_every`` batches.

    If ``refresh_every`` is None, it is refreshed once, before the first batch.

    Works with any LightningModule and any loader. Pass Lightning's Trainer ``use_distributed_sampler=False``, or it
    replaces the sampler in several processes.

    Args:
        sampler: `ProximityBatchSampler` or `KNNBatchSampler`
        embeddings: returns the embeddings of all samples, (N, d), or None if there are none yet; with several
            processes, all use those of the first. `shared_embeddings` makes such a function that divides the work
    """

    def __init__(self, sampler: RefreshedBatchSampler, embeddings: Callable[[], Tensor | None]) -> None:
        self.sampler, self.embeddings = sampler, embeddings
        self.seconds = 0.0  # spent on embeddings and graphs since it was last set to 0
        self.encoding_seconds = 0.0  # of these, on embeddings
        self._timer: StepTimer | None = None  # of the module, if it has one
        self._total_steps: float = 1

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._total_steps = trainer.estimated_stepping_batches
        self._timer = getattr(pl_module, "clock", None)
        if self.sampler.refresh_every is None and self.sampler.refreshes == 0:
            began = time.perf_counter()
            if (rows := self._same_on_all_processes()) is not None:
                self.sampler.refresh(rows)
            self.seconds += time.perf_counter() - began

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.sampler.set_progress(min(trainer.global_step / self._total_steps, 1.0))
        timer = self._timer
        if timer is not None:
            timer.mark("network")
        if self.sampler.refresh_every is None:
            return
        began = time.perf_counter()
        if self.sampler.after_step(self._same_on_all_processes):
            self.seconds += time.perf_counter() - began
            if timer is not None:
                timer.mark("graph")

    def _same_on_all_processes(self) -> Tensor | None:
        began = time.perf_counter()
        rows = self.embeddings()
        if rows is None:
            return None
        if rows.device.type == "cuda":
            torch.cuda.synchronize(rows.device)  # of a refresh, every so many steps
        self.encoding_seconds += time.perf_counter() - began
        if self._timer is not None:
            self._timer.mark("encoding")
        if distributed.world_size() > 1:
            # Running statistics differ between processes, and a difference in one bit can change a neighbor.
            rows = rows.clone(memory_format=torch.contiguous_format)
            torch.distributed.broadcast(rows, 0)
        return rows


def shared_embeddings(
    embed: Callable[[Tensor], Tensor], size: int, networks: Sequence[nn.Module]
) -> Callable[[], Tensor]:
    """A function that returns the embeddings of all samples; each process computes a share of them.

    All processes compute with the buffers of the first one, such as running statistics, so that the result is the
    embeddings that the first process would compute alone.

    Args:
        embed: returns the embeddings (n, d) of the samples with these indices (n,)
        size: number of samples, N
        networks: what ``embed`` runs

    Examples:
        >>> encoder, samples = nn.Linear(4, 2), torch.randn(10, 4)
        >>> embeddings = shared_embeddings(lambda index: encoder(samples[index]), 10, [encoder])
        >>> embeddings().shape
        torch.Size([10, 2])
    """

    def embeddings() -> Tensor:
        processes = distributed.world_size()
        if processes == 1:
            return embed(torch.arange(size))
        shares = torch.arange(size).tensor_split(processes)
        with torch.no_grad(), _buffers_of_first_process(networks):
            rows = embed(shares[torch.distributed.get_rank()])
        return distributed.gather(rows, [len(share) for share in shares])

    return embeddings


@contextmanager
def _buffers_of_first_process(networks: Sequence[nn.Module]) -> Iterator[None]:
    """Set the buffers of the networks to those of the first process while the context is active."""
    buffers = list(dict.fromkeys(buffer for network in networks for buffer in network.buffers()))
    own = [buffer.clone() for buffer in buffers]
    for buffer in buffers:
        torch.distributed.broadcast(buffer, 0)
    try:
        yield
    finally:
        for buffer, value in zip(buffers, own, strict=True):
            buffer.copy_(value)
