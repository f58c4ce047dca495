"""Two processes that share the work of a refresh: alone with networks, and in a whole run."""

import sys
from pathlib import Path
from typing import Any

import children
import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hardneg.samplers import ProximityBatchSampler
from hardneg.training import recipe, run
from hardneg.training.callbacks.sampler_refresh import Refresh, shared_embeddings

SIZE = 23


def network(rank: int) -> nn.Module:
    """The same weights for every rank, with running statistics of its own."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    torch.manual_seed(rank + 1)
    made(torch.randn(50, 4, dtype=torch.float64) + rank)
    return made.eval()


def samples() -> Tensor:
    return torch.randn(SIZE, 4, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def embed_shares(rank: int, folder: str) -> None:
    """One of two processes: saves the embeddings, the indices that it embedded, and its statistics after."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    encoder, indices = network(rank), []

    def embed(index: Tensor) -> Tensor:
        indices.append(index)
        rows: Tensor = encoder(samples()[index])
        return rows

    rows = shared_embeddings(embed, SIZE, [encoder])()
    torch.save(
        {"rows": rows, "indices": torch.cat(indices), "buffers": dict(encoder.named_buffers())}, f"{folder}/{rank}"
    )
    dist.barrier()
    dist.destroy_process_group()


def launch(folder: Path) -> list[dict[str, Any]]:
    """What each of two processes found."""
    children.spawn(embed_shares, (str(folder),), 2)
    return [torch.load(folder / str(rank), weights_only=True) for rank in range(2)]


class Watch(L.Callback):
    """Saves the graph of a run, and how many samples its encoder embedded in evaluation mode."""

    def __init__(self, folder: str) -> None:
        self.folder, self.embedded = folder, 0

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        pl_module.encoder.register_forward_hook(self._count)

    def _count(self, encoder: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        self.embedded += 0 if encoder.training else len(inputs[0])

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        (refresh,) = (callback for callback in trainer.callbacks if isinstance(callback, Refresh))  # type: ignore[attr-defined]
        assert isinstance(refresh.sampler, ProximityBatchSampler)
        assert refresh.sampler.graph is not None
        found = {"neighbors": refresh.sampler.graph.neighbors, "embedded": self.embedded}
        torch.save(found, f"{self.folder}.{trainer.global_rank}")


if __name__ == "__main__":
    folder, *overrides = sys.argv[1:]
    run.train(recipe.load(recipe.find("digits-simclr"), overrides), folder, callbacks=[Watch(folder)])
