"""Random views of a batch of graphs: GraphCL's augmentations, each graph with its own, without a loop over graphs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hardneg import checks, randomness
from hardneg.graphs.data import assemble, attribute_kind, refers_to_nodes
from hardneg.matmul import precise_dtype

KINDS = ("identity", "drop_nodes", "perturb_edges", "mask_attributes", "subgraph")


@dataclass(frozen=True)
class GraphViews:
    """Makes two views of each graph, each by a fixed augmentation or by one that is drawn for every graph.

    ``"drop_nodes"`` removes ⌊ratio · nodes⌋ nodes; ``"perturb_edges"`` gives ⌊ratio · pairs⌋ of the connected pairs of
    nodes new random end nodes, where a pair is the edges in both directions (loops are not changed);
    ``"mask_attributes"`` sets ⌊ratio · nodes⌋ nodes to the mean features of their graph; ``"subgraph"`` starts at a
    random node and adds random neighbors of the nodes it has, until it has ⌈(1 − ratio) · nodes⌉ nodes or the whole
    component. A graph that has nodes keeps at least one.

    Attributes per node (``pos``, ``z``, …) are kept with their nodes, attributes per edge (``edge_attr``,
    ``edge_weight``, …) with their edges. An edge with new end nodes keeps its attributes; it is removed if that pair
    exists already. Only ``x`` is masked. Attributes per graph are repeated with the graphs. Any other attribute, or one
    that holds node numbers (``face``), raises an error.

    Args:
        first: a name of the above or ``"identity"``, or several to draw from
        second: the same for the second view; by default the unchanged graph is compared with any of the four, as
            GraphCL's authors train on TU sets
        ratio: share of nodes or edges that is changed, in [0, 1]

    Called with a PyG batch and a generator on its device (see `hardneg.randomness.generator`), it returns one batch:
    all first views and then all second ones.

    Examples:
        >>> from hardneg.graphs.data import GraphSet
        >>> from hardneg.randomness import generator
        >>> ring = torch.tensor([[0, 1, 2, 3, 4, 1, 2, 3, 4, 0], [1, 2, 3, 4, 0, 0, 1, 2, 3, 4]])
        >>> batch = GraphSet(torch.ones(5, 1), ring, torch.tensor([0, 5])).batch(torch.tensor([0]))
        >>> seen = GraphViews("identity", "drop_nodes")(batch, generator("cpu", 0, 5))
        >>> seen.batch.bincount().tolist()
        [5, 4]
    """

    first: str | Sequence[str] = "identity"
    second: str | Sequence[str] = KINDS[1:]
    ratio: float = 0.2

    def __post_init__(self) -> None:
        for name in ("first", "second"):
            if not isinstance(getattr(self, name), Sequence):
                raise ValueError(f"{name} must be a name or several of {', '.join(KINDS)}, got {getattr(self, name)!r}")
            if not _names(getattr(self, name)):
                raise ValueError(f"{name} is empty: name at least one of {', '.join(KINDS)}")
            for kind in _names(getattr(self, name)):
                checks.choice(name, kind, KINDS)
        checks.number("ratio", self.ratio, at_least=0, at_most=1)

    @torch.no_grad()
    def __call__(
        self, batch: Any, generator: torch.Generator, views: int = 2, first: int = 0, total: int | None = None
    ) -> Any:
        """One or two views of each graph in one PyG batch.

        first, total: if the batch is shared between processes, the position of its first graph and the number of all;
        every process then draws from its own generator.
        """
        if total is not None:
            generator = randomness.generator(generator.device, generator.initial_seed(), first)
        if views not in (1, 2):
            raise ValueError(f"views must be 1 or 2, got {views!r}: an anchor and its positive are two views")
        graphs = _Graphs.of(batch)
        parts = [graphs.augmented(_names(kinds), self.ratio, generator) for kinds in (self.first, self.second)[:views]]
        return _joined(parts)


def _names(kinds: str | Sequence[str]) -> tuple[str, ...]:
    return (kinds,) if isinstance(kinds, str) else tuple(kinds)


@dataclass(frozen=True)
class _Graphs:
    """The tensors of a batch of G graphs with n nodes and E edges, graph after graph."""

    x: Tensor  # (n, F)
    edge_index: Tensor  # (2, E)
    batch: Tensor  # (n,)
    count: int  # G
    nodes: dict[str, Tensor]  # further attributes, (n, …) each
    edges: dict[str, Tensor]  # (E, …) each
    graphs: dict[str, Tensor | list[Any]]  # (G, …) each

    @classmethod
    def of(cls, batch: Any) -> "_Graphs":
        for name in ("x", "edge_index", "batch"):
            if not isinstance(getattr(batch, name, None), Tensor):
                raise ValueError(
                    f"batch must be a PyG batch with x, edge_index and batch, but the {type(batch).__name__} has no "
                    f"{name}: make one with GraphSet.of(graphs).batch(index) or a PyG DataLoader"
                )
        count, edge_index, owner = int(batch.num_graphs), batch.edge_index, batch.batch[batch.edge_index[0]]
        nodes, edges, graphs = _attributes(batch, count, owner)
        if bool((owner.diff() < 0).any()):  # a user's batch may have edges in any order
            order = owner.argsort(stable=True)
            edge_index, edges = edge_index[:, order], {key: tensor[order] for key, tensor in edges.items()}
        return cls(batch.x, edge_index, batch.batch, count, nodes, edges, graphs)

    @property
    def sizes(self) -> Tensor:
        """Nodes of each graph, (G,)."""
        return self.batch.bincount(minlength=self.count)

    def augmented(self, kinds: tuple[str, ...], ratio: float, generator: torch.Generator) -> "_Graphs":
        """Every graph changed by one of the kinds; all graphs draw, so that one graph's kind does not affect others."""
        drawn = torch.randint(len(kinds), (self.count,), generator=generator, device=self.x.device)  # (G,)
        kept = torch.ones_like(self.batch, dtype=torch.bool)
        changed = self
        for number, kind in enumerate(kinds):
            chosen = drawn == number  # (G,)
            if kind == "drop_nodes":
                kept &= ~(chosen[self.batch] & self.some_nodes(ratio, generator))
            elif kind == "subgraph":
                kept &= ~chosen[self.batch] | self.grown(ratio, generator)
            elif kind == "mask_attributes":
                changed = changed.masked(chosen[self.batch] & self.some_nodes(ratio, generator))
            elif kind == "perturb_edges":
                changed = changed.rewired(chosen, ratio, generator)
        return changed.restricted(kept)

    def some_nodes(self, ratio: float, generator: torch.Generator) -> Tensor:
        """⌊ratio · nodes⌋ random nodes of each graph, but never all, (n,) bool."""
        most = (self.sizes - 1).clamp(min=0)
        wanted = torch.minimum(_share(self.sizes, ratio), most)
        return _random_ranks(self.batch, self.sizes, generator) < wanted[self.batch]

    def masked(self, chosen: Tensor) -> "_Graphs":
        """Chosen nodes (n,) get the mean features of their graph."""
        sums = self.x.new_zeros(self.count, self.x.shape[1]).index_add_(0, self.batch, self.x)
        means = sums / self.sizes.clamp(min=1)[:, None]  # (G, F)
        return self.with_(x=torch.where(chosen[:, None], means[self.batch], self.x))

    def rewired(self, chosen: Tensor, ratio: float, generator: torch.Generator) -> "_Graphs":
        """In chosen graphs (G,), some connected pairs get other end nodes; duplicate pairs are removed."""
        nodes = len(self.x)
        low, high = self.edge_index.amin(dim=0), self.edge_index.amax(dim=0)  # (E,)
        pairs, pair_of = torch.unique(low * nodes + high, return_inverse=True)  # (P,), (E,)
        owner = self.batch[pairs // max(nodes, 1)]  # (P,)
        counts = owner.bincount(minlength=self.count)
        moved = _random_ranks(owner, counts, generator) < _share(counts, ratio)[owner]
        moved &= (chosen & (self.sizes > 1))[owner]  # one node alone has no other pair
        moved &= pairs % (nodes + 1) != 0  # a loop, low = high, has one edge, and a pair would need two

        # Two different nodes of the graph, uniformly: the second is drawn among those that are not the first.
        dtype = precise_dtype(self.x.device)
        uniform = torch.rand(2, len(pairs), generator=generator, device=self.x.device, dtype=dtype)
        size = self.sizes[owner]
        # In float32 the largest draw times the size may be rounded up to the size.
        first = (uniform[0] * size).long().minimum(size - 1)
        second = (first + 1 + (uniform[1] * (size - 1)).long().minimum((size - 2).clamp(min=0))) % size.clamp(min=1)
        start = (self.sizes.cumsum(0) - self.sizes)[owner]
        ends = torch.stack([torch.minimum(first, second), torch.maximum(first, second)]) + start  # (2, P)
        made = torch.where(moved, ends[0] * nodes + ends[1], pairs)

        # Of equal pairs one is kept, preferably one that was not moved: moved ones come later in this order.
        order = torch.argsort(made * 2 + moved)
        sorted_ = made[order]
        double = torch.zeros_like(moved)
        double[order[1:]] = sorted_[1:] == sorted_[:-1]

        forward = self.edge_index[0] <= self.edge_index[1]  # (E,)
        new = torch.where(forward, ends[:, pair_of], ends.flip(0)[:, pair_of])
        kept = ~double[pair_of]
        edge_index = torch.where(moved[pair_of], new, self.edge_index)[:, kept]
        return self.with_(edge_index=edge_index, edges={key: tensor[kept] for key, tensor in self.edges.items()})

    def grown(self, ratio: float, generator: torch.Generator) -> Tensor:
        """The first ⌈(1 − ratio) · nodes⌉ nodes of a subgraph that grows from a random node, (n,) bool.

        Growth by uniform neighbors is first-passage percolation: every node has an exponential waiting time from the
        moment its first neighbor is reached, and since these are memoryless, the next node is uniform. Arrival times
        are therefore lengths of shortest paths, computed for all graphs together.
        """
        device = self.x.device
        uniform = torch.rand(len(self.x), generator=generator, device=device, dtype=precise_dtype(device))
        waits = -torch.log1p(-uniform)  # (n,)
        begins = _random_ranks(self.batch, self.sizes, generator) == 0
        arrival = torch.where(begins, 0.0, torch.inf).to(waits)
        sources = torch.cat([self.edge_index[0], self.edge_index[1]])  # edges are followed in both directions
        targets = torch.cat([self.edge_index[1], self.edge_index[0]])
        while True:
            reached = arrival.scatter_reduce(0, targets, arrival[sources] + waits[targets], "amin")
            if torch.equal(reached, arrival):
                break
            arrival = reached
        keep = (self.sizes - _share(self.sizes, ratio)).clamp(min=1)  # (G,)
        order = torch.argsort(arrival, stable=True)
        return (_ranks(order, self.batch, self.sizes) < keep[self.batch]) & arrival.isfinite()

    def restricted(self, kept: Tensor) -> "_Graphs":
        """Only the kept nodes (n,), and the edges between them."""
        edges = kept[self.edge_index].all(dim=0)  # (E,)
        number = kept.cumsum(0) - 1  # (n,) new numbers of the kept nodes
        return self.with_(
            x=self.x[kept],
            edge_index=number[self.edge_index[:, edges]],
            batch=self.batch[kept],
            nodes={key: tensor[kept] for key, tensor in self.nodes.items()},
            edges={key: tensor[edges] for key, tensor in self.edges.items()},
        )

    def with_(self, **parts: Any) -> "_Graphs":
        return _Graphs(**{**self.__dict__, **parts})


def _attributes(
    batch: Any, count: int, owner: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor | list[Any]]]:
    """The attributes of a batch except its structure: of nodes, of edges (whose graph is ``owner``), and of graphs."""
    nodes: dict[str, Tensor] = {}
    edges: dict[str, Tensor] = {}
    graphs: dict[str, Tensor | list[Any]] = {}
    slices = getattr(batch, "_slice_dict", {})
    for key in batch.keys():  # noqa: SIM118 (not a mapping)
        value = batch[key]
        if key in ("x", "edge_index", "batch", "ptr", "num_nodes"):
            continue
        if isinstance(value, list) and len(value) == count:
            graphs[key] = value
            continue
        if not isinstance(value, Tensor) or value.dim() == 0:
            raise ValueError(f"batch.{key} is a {type(value).__name__}, not per node, edge or graph: del batch.{key}")
        if key != "index" and refers_to_nodes(key):
            raise ValueError(f"batch.{key} holds numbers of nodes, which views change: del batch.{key}")
        kind: str | None = {"index": "graphs", "y": "graphs", "edge_attr": "edges"}.get(key)
        totals = {"nodes": len(batch.x), "graphs": count, "edges": len(owner)}
        if kind is None and key in slices:
            counts = {
                "nodes": batch.batch.bincount(minlength=count),
                "graphs": owner.new_ones(count),
                "edges": owner.bincount(minlength=count),
            }
            kind = attribute_kind(key, slices[key].diff().to(owner), counts)
        if kind is None or len(value) != totals[kind]:
            kind = attribute_kind(
                key, torch.tensor(len(value)), {name: torch.tensor(total) for name, total in totals.items()}
            )
        if kind is None:
            raise ValueError(
                f"batch.{key} has {len(value)} rows, but there are {totals['nodes']} nodes, {totals['edges']} edges "
                f"and {count} graphs: del batch.{key}"
            )
        if kind == "graphs":
            graphs[key] = value
        else:
            (nodes if kind == "nodes" else edges)[key] = value
    return nodes, edges, graphs


def _share(counts: Tensor, ratio: float) -> Tensor:
    """⌊ratio · counts⌋, where 0.2 · 5 is 1."""
    return (counts * ratio + 1e-9).floor().long()


def _random_ranks(groups: Tensor, sizes: Tensor, generator: torch.Generator) -> Tensor:
    """A random rank from 0 of each member within its group, (m,)."""
    return _ranks(torch.randperm(len(groups), generator=generator, device=groups.device), groups, sizes)


def _ranks(order: Tensor, groups: Tensor, sizes: Tensor) -> Tensor:
    """The rank of each member within its group (m,), if all members come in this order (m,)."""
    order = order[groups[order].argsort(stable=True)]  # group after group
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(len(order), device=order.device)
    return ranks - (sizes.cumsum(0) - sizes)[groups]


def _joined(parts: list[_Graphs]) -> Any:
    """One PyG batch of all parts, one after the other."""
    nodes, graphs = 0, 0
    edges, owners = [], []
    for part in parts:
        edges.append(part.edge_index + nodes)
        owners.append(part.batch + graphs)
        nodes, graphs = nodes + len(part.x), graphs + part.count
    batch = torch.cat(owners)
    sizes = batch.bincount(minlength=graphs)
    ptr = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    attributes = [
        {key: _end_to_end([getattr(part, kind)[key] for part in parts]) for key in getattr(parts[0], kind)}
        for kind in ("nodes", "edges", "graphs")
    ]
    return assemble(torch.cat([part.x for part in parts]), torch.cat(edges, dim=1), batch, ptr, *attributes)


def _end_to_end(values: list[Any]) -> Any:
    return torch.cat(values) if isinstance(values[0], Tensor) else [item for value in values for item in value]
