"""Graphs as small pictures, drawn when they are looked at."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hardneg.extras import required

SIDE, MARGIN, SHARPER = 56, 5, 4  # pixels; drawn so many times larger, then shrunk, so that lines are smooth
STEPS = 2_000_000  # node pairs that a layout may look at: 50 rounds for 200 nodes


class Drawings:
    """A sequence of pictures (3, SIDE, SIDE) uint8 of the graphs of a set, by forces between their nodes.

    graphs: a `hardneg.graphs.data.GraphSet` · rows: which of them
    """

    def __init__(self, graphs: Any, rows: Tensor) -> None:
        self.graphs, self.rows = graphs, rows

    def __getitem__(self, place: int) -> Tensor:
        graph = self.graphs[int(self.rows[place])]
        return draw(int(graph.num_nodes), graph.edge_index)

    def __len__(self) -> int:
        return len(self.rows)


def draw(nodes: int, edges: Tensor) -> Tensor:
    """A graph of so many nodes and the edges (2, E) as a picture (3, SIDE, SIDE) uint8, always the same.

    Examples:
        >>> picture = draw(3, torch.tensor([[0, 1], [1, 2]]))
        >>> picture.shape, int(picture.min()) < 128 < int(picture.max())
        (torch.Size([3, 56, 56]), True)
    """
    networkx = required("networkx", "graph")
    image, drawing = (required(f"PIL.{name}", "train") for name in ("Image", "ImageDraw"))
    graph = networkx.Graph()
    graph.add_nodes_from(range(nodes))
    graph.add_edges_from(edges.T.tolist())
    rounds = max(1, min(50, STEPS // max(nodes * nodes, 1)))
    layout = networkx.spring_layout(graph, seed=0, iterations=rounds) if nodes else {}
    places = np.array([layout[node] for node in range(nodes)]).reshape(nodes, 2)
    large, edge = SIDE * SHARPER, MARGIN * SHARPER
    if nodes:
        low, span = places.min(axis=0), np.ptp(places, axis=0).max() or 1.0
        places = edge + (places - low) / span * (large - 2 * edge)
    canvas = image.new("RGB", (large, large), "white")
    pen, radius = drawing.Draw(canvas), SHARPER * (2.2 if nodes <= 40 else 1.2)
    for one, other in graph.edges:
        pen.line([*places[one], *places[other]], fill=(150, 150, 150), width=SHARPER)
    for x, y in places:
        pen.ellipse([x - radius, y - radius, x + radius, y + radius], fill=(20, 80, 160))
    return torch.from_numpy(np.array(canvas.resize((SIDE, SIDE)))).permute(2, 0, 1)
