"""Processes with a loss whose β is an effective share of the gathered negatives."""

from pathlib import Path
from typing import Any

import children
import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import brentq

import hardneg as hn

ROWS, TEMPERATURE, SHARE = 20, 0.3, 0.5


def own_root(rows: slice) -> float:
    """The β at which the anchors of these instances, with the candidates of all, have the share; by a loop."""
    z1, z2 = batch()
    z = torch.nn.functional.normalize(torch.cat([z1, z2]), dim=1)
    scores = (z @ z.T / TEMPERATURE).numpy()
    anchors = [i for i in range(2 * ROWS) if i % ROWS in range(rows.start, rows.stop)]

    def mean_share(beta: float) -> float:
        found = []
        for i in anchors:
            weight = np.exp(beta * np.array([scores[i, j] for j in range(2 * ROWS) if j % ROWS != i % ROWS]))
            found.append(weight.sum() ** 2 / (weight**2).sum() / len(weight))
        return float(np.mean(found))

    return float(brentq(lambda beta: mean_share(beta) - SHARE, 1e-6, 50.0))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Both views of the whole batch, (ROWS, d) each."""
    generator = torch.Generator().manual_seed(8)
    z1 = torch.randn(ROWS, 5, generator=generator, dtype=torch.float64)
    return z1, z1 + torch.randn(ROWS, 5, generator=generator, dtype=torch.float64)


def work(rank: int, processes: int, folder: str) -> None:
    """One process: its instances are an equal part of the batch."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=processes)
    rows = slice(rank * ROWS // processes, (rank + 1) * ROWS // processes)
    z1, z2 = (view[rows].clone().requires_grad_() for view in batch())
    loss = hn.InfoNCE(TEMPERATURE, hn.Exponential(hn.EffectiveShare(SHARE)), gather=True)
    loss(z1, z2).backward()
    loss(z1, z2).backward()
    torch.save({"state": loss.tilt_state, "own": own_root(rows)}, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def launch(processes: int, folder: Path) -> list[dict[str, Any]]:
    """The state of each process after two calls on the same batch, and the root for its own anchors."""
    children.spawn(work, (processes, str(folder)), processes)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(processes)]
