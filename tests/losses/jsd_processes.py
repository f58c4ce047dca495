"""`JSD` with gathered graphs in real processes, and the inputs of the comparison with one process."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hardneg.losses.jsd import JSD

SHARES = [(slice(0, 7), slice(0, 3)), (slice(7, 12), slice(3, 5))]  # nodes and graphs of each process
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "hard": {"beta": 1.0, "class_prior": 0.1},
    "labels": {"beta": 0.5, "supervision": "full"},
    "sum": {"beta": 1.0, "weight_range": None, "reduction": "sum"},
}


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Nodes (12, 4), graphs (5, 4), the graph of each node, labels of graphs, and counts of nodes."""
    generator = torch.Generator().manual_seed(0)
    nodes, graphs = (torch.randn(n, 4, generator=generator, dtype=torch.float64) for n in (12, 5))
    batch = torch.tensor([0, 0, 1, 1, 2, 2, 2, 3, 3, 4, 4, 4])
    return nodes, graphs, batch, torch.tensor([0, 1, 0, 1, -1]), torch.arange(12) % 3 + 1


def result(name: str, rows: slice, graph_rows: slice, gather: bool) -> dict[str, Tensor]:
    """The loss of some rows and its gradients."""
    nodes, graphs, batch, labels, counts = inputs()
    loss = JSD(**CASES[name], gather=gather)
    z, g = nodes[rows].clone().requires_grad_(), graphs[graph_rows].clone().requires_grad_()
    given = labels[graph_rows] if loss.supervision != "none" else None
    value = loss(z, g, batch[rows] - graph_rows.start, given, counts[rows])
    value.backward()
    assert loss.diagnostics()["anchors"] == int(counts[rows].sum())
    assert z.grad is not None
    assert g.grad is not None
    return {"loss": value.detach(), "nodes": z.grad, "graphs": g.grad}


def work(rank: int, folder: Path) -> None:
    """Compute and save the results of one of two processes."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.save({name: result(name, *SHARES[rank], gather=True) for name in CASES}, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()
