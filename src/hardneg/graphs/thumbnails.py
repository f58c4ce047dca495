"""Small images of graphs, for the report."""

import numpy as np
import torch
from torch import Tensor

from hardneg.extras import required

SIDE, MARGIN = 56, 5  # pixels
OVERSAMPLING = 4  # images are drawn larger by this factor and then reduced, so that lines are smooth
MAX_PAIRS = 2_000_000  # node pairs that a layout may visit: 50 iterations for 200 nodes


def draw(num_nodes: int, edges: Tensor) -> Tensor:
    """Draw a graph with edges (2, E) as an image (3, SIDE, SIDE) uint8, by a force-directed layout with a fixed seed.

    Examples:
        >>> image = draw(3, torch.tensor([[0, 1], [1, 2]]))
        >>> image.shape, int(image.min()) < 128 < int(image.max())
        (torch.Size([3, 56, 56]), True)
    """
    networkx = required("networkx", "graph")
    pil_image, pil_draw = (required(f"PIL.{name}", "train") for name in ("Image", "ImageDraw"))
    graph = networkx.Graph()
    graph.add_nodes_from(range(num_nodes))
    graph.add_edges_from(edges.T.tolist())
    iterations = max(1, min(50, MAX_PAIRS // max(num_nodes * num_nodes, 1)))
    layout = networkx.spring_layout(graph, seed=0, iterations=iterations) if num_nodes else {}
    points = np.array([layout[node] for node in range(num_nodes)]).reshape(num_nodes, 2)
    side, margin = SIDE * OVERSAMPLING, MARGIN * OVERSAMPLING
    if num_nodes:
        lowest, span = points.min(axis=0), np.ptp(points, axis=0).max() or 1.0
        points = margin + (points - lowest) / span * (side - 2 * margin)
    canvas = pil_image.new("RGB", (side, side), "white")
    pen, radius = pil_draw.Draw(canvas), OVERSAMPLING * (2.2 if num_nodes <= 40 else 1.2)
    for one, other in graph.edges:
        pen.line([*points[one], *points[other]], fill=(150, 150, 150), width=OVERSAMPLING)
    for x, y in points:
        pen.ellipse([x - radius, y - radius, x + radius, y + radius], fill=(20, 80, 160))
    return torch.from_numpy(np.array(canvas.resize((SIDE, SIDE)))).permute(2, 0, 1)
