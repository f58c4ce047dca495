"""Sets of graphs to train on: the TU collection from local files or by download, or any list of PyG graphs."""

import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hardneg import checks
from hardneg.division import Division, fingerprint
from hardneg.extras import required
from hardneg.graphs import tu_files
from hardneg.graphs.equivalent_nodes import equivalent_nodes

FEATURES = ("auto", "own", "degree", "constant")
MOST_DEGREES = 1000  # from this degree on, degrees are one number instead of a one-hot vector, as in HCL's code


@cache
def _graph_class() -> Any:
    class IndexedGraph(required("torch_geometric.data", "graph").Data):  # type: ignore[misc]
        """A PyG graph with its number in the set as ``index``."""

        def __inc__(self, key: str, value: Any, *rest: Any, **named: Any) -> Any:
            # PyG adds the number of nodes before it to every attribute with "index" in its name.
            return 0 if key == "index" else super().__inc__(key, value, *rest, **named)

    # Processes of a loader find the class by its name.
    IndexedGraph.__module__, IndexedGraph.__qualname__ = __name__, "IndexedGraph"
    return IndexedGraph


def __getattr__(name: str) -> Any:
    if name == "IndexedGraph":
        return _graph_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class GraphSet(Dataset[Any]):
    """Graphs stored in a few large tensors, from which a batch is selected without a loop over graphs.

    As a dataset it yields PyG graphs with ``x``, ``edge_index``, ``y`` and their number ``index``, for PyG's DataLoader
    with any ``batch_sampler=``; `batch` returns the same batch directly, on the device of the set.

    Args:
        x: (n, F) floats, features of all nodes, graph after graph
        edge_index: (2, E), numbering nodes of the whole set, graph after graph
        ptr: (N + 1,) the first node of each graph, and n
        labels: (N,) integers ≥ −1, −1 = unknown; None if there are none
        edge_attr: (E, …) or None
        name: of the set, in messages
        node_attributes: further tensors (n, …) by name, such as ``pos`` or ``z``; every graph and batch has them
        edge_attributes: the same of edges, (E, …), such as ``edge_weight``

    Examples:
        >>> path, point = torch.tensor([[0, 1], [1, 0]]), torch.tensor([0, 2, 3])
        >>> graphs = GraphSet(torch.ones(3, 1), path, point, torch.tensor([0, 1]))
        >>> graphs.batch(torch.tensor([1, 0])).batch.tolist(), graphs[1].index.item()
        ([0, 1, 1], 1)
    """

    def __init__(
        self,
        x: Tensor,
        edge_index: Tensor,
        ptr: Tensor,
        labels: Tensor | None = None,
        edge_attr: Tensor | None = None,
        name: str = "graphs",
        node_attributes: Mapping[str, Tensor] | None = None,
        edge_attributes: Mapping[str, Tensor] | None = None,
    ) -> None:
        checks.floating("x", x)
        if x.dim() != 2:
            raise ValueError(f"x must have shape (nodes, features), got {tuple(x.shape)}")
        checks.require_finite("x", x)
        if ptr.dim() != 1 or len(ptr) < 2 or int(ptr[0]) != 0 or int(ptr[-1]) != len(x) or bool((ptr.diff() < 0).any()):
            raise ValueError(f"ptr must rise from 0 to the {len(x)} nodes of x, one entry per graph and one more")
        checks.integers("edge_index", edge_index, (2, edge_index.shape[-1]), "sources and targets")
        checks.require_in_range("edge_index", edge_index, len(x))
        graph_of = torch.searchsorted(ptr, edge_index, right=True) - 1  # (2, E)
        if bool((graph_of[0] != graph_of[1]).any()) or bool((graph_of[0].diff() < 0).any()):
            raise ValueError("edge_index must join nodes of one graph, and list edges graph after graph")
        count = len(ptr) - 1
        if labels is None:
            labels = torch.full((count,), -1)
        labels = checks.integers("labels", labels, (count,), "one per graph")
        checks.require(labels >= -1, "labels must be ≥ −1, where −1 means unknown")
        self.node_attributes, self.edge_attributes = dict(node_attributes or {}), dict(edge_attributes or {})
        of_edges = {**({} if edge_attr is None else {"edge_attr": edge_attr}), **self.edge_attributes}
        for attributes, rows in ((self.node_attributes, len(x)), (of_edges, edge_index.shape[1])):
            for key, tensor in attributes.items():
                if tensor.dim() == 0 or len(tensor) != rows:
                    raise ValueError(f"{key} must have {rows} rows, got shape {tuple(tensor.shape)}")
        self.x, self.edge_index, self.edge_attr, self.ptr, self.labels = x, edge_index, edge_attr, ptr, labels
        self.edge_ptr = torch.searchsorted(graph_of[0].contiguous(), torch.arange(count + 1, device=ptr.device))
        self.name = name
        self._equivalent: dict[int, Tensor] = {}

    @classmethod
    def of(cls, graphs: Sequence[Any], features: str = "auto", name: str = "graphs") -> "GraphSet":
        """A set of PyG graphs, with ``y`` a whole number or absent; features as for `load_graphs`.

        Attributes per node and per edge are kept; a warning names the others.
        """
        _check_graphs(graphs)
        sizes = torch.tensor([int(graph.num_nodes) for graph in graphs])
        ptr = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])  # (N + 1,)
        edges = torch.cat([graph.edge_index + start for graph, start in zip(graphs, ptr, strict=False)], dim=1)
        nodes, of_edges = _attributes(graphs, sizes)
        own = nodes.pop("x", None)
        labels = torch.tensor([_label(graph.y, number) for number, graph in enumerate(graphs)])
        x = features_of_nodes(None if own is None else own.float(), edges, int(ptr[-1]), features, name)
        return cls(x, edges, ptr, labels, of_edges.pop("edge_attr", None), name, nodes, of_edges)

    @property
    def node_features(self) -> int:
        """F, the width of ``x``."""
        return self.x.shape[1]

    def __len__(self) -> int:
        return len(self.ptr) - 1

    def __getitem__(self, number: int) -> Any:
        if isinstance(number, slice):
            start, stop, step = number.indices(len(self))
            raise TypeError(f"a GraphSet takes one number, not a slice: use subset(range({start}, {stop}, {step}))")
        if not -len(self) <= number < len(self):
            raise IndexError(f"{self.name} has {len(self)} graphs, but no graph {number}")
        number = int(number) % len(self)
        nodes = slice(int(self.ptr[number]), int(self.ptr[number + 1]))
        edges = slice(int(self.edge_ptr[number]), int(self.edge_ptr[number + 1]))
        return _graph_class()(
            x=self.x[nodes],
            edge_index=self.edge_index[:, edges] - nodes.start,
            y=self.labels[number : number + 1],
            index=torch.tensor([number]),
            **{key: tensor[nodes] for key, tensor in self.node_attributes.items()},
            **{key: tensor[edges] for key, tensor in self._of_edges().items()},
        )

    def _of_edges(self) -> dict[str, Tensor]:
        """Every attribute of edges, (E, …) each."""
        return {**({} if self.edge_attr is None else {"edge_attr": self.edge_attr}), **self.edge_attributes}

    def equivalent_nodes(self, hops: int) -> Tensor:
        """The first equivalent node of each node, (n,), for encoders of ``hops`` layers."""
        if hops not in self._equivalent:
            owner = torch.repeat_interleave(torch.arange(len(self), device=self.ptr.device), self.ptr.diff())
            # Nodes that differ in any attribute are not equivalent: an encoder may read each attribute.
            columns = [tensor[:, None].flatten(1).double() for tensor in (self.x, *self.node_attributes.values())]
            self._equivalent[hops] = equivalent_nodes(torch.cat(columns, dim=1), self.edge_index, owner, hops)
        return self._equivalent[hops]

    def batch(self, index: Tensor, hops: int | None = None) -> Any:
        """The PyG batch of graphs ``index`` (B,), in this order, on the device of the set.

        With ``hops``, ``equivalent_index`` (n,) is the first equivalent node of each node.
        """
        index = checks.integers("index", index, (len(index),), "numbers of graphs").to(self.ptr.device)
        checks.require_in_range("index", index, len(self))
        nodes, ptr, batch = _ranges(self.ptr, index)
        edges, _, owner = _ranges(self.edge_ptr, index)
        shift = ptr[:-1] - self.ptr[index]  # (B,)
        of_nodes = {key: tensor[nodes] for key, tensor in self.node_attributes.items()}
        if hops is not None:
            of_nodes["equivalent_index"] = self.equivalent_nodes(hops)[nodes] + shift[batch]
        return assemble(
            self.x[nodes],
            self.edge_index[:, edges] + shift[owner],
            batch,
            ptr,
            of_nodes,
            {key: tensor[edges] for key, tensor in self._of_edges().items()},
            {"index": index, "y": self.labels[index]},
        )

    @property
    def division(self) -> Division:
        """Graphs are tested by folds over the whole set."""
        tensors = (self.x, self.edge_index, self.ptr, self.labels)
        return Division(Division.FOLDS, len(self), fingerprint(*tensors))

    @property
    def classes(self) -> tuple[str, ...]:
        """The name of each label."""
        return tuple(f"class {number}" for number in range(int(self.labels.max()) + 1)) if len(self) else ()

    def subset(self, indices: Tensor | Sequence[int]) -> "GraphSet":
        """The graphs of these rows, in this order, numbered from 0."""
        rows = torch.as_tensor(indices, dtype=torch.int64)
        checks.require_in_range("indices", rows, len(self))
        part = self.batch(rows)
        nodes = {key: part[key] for key in self.node_attributes}
        edges = {key: part[key] for key in self.edge_attributes}
        return GraphSet(
            part.x, part.edge_index, part.ptr, part.y, getattr(part, "edge_attr", None), self.name, nodes, edges
        )

    def to(self, device: torch.device | str) -> "GraphSet":
        """The same set on another device."""
        x, edge_index, ptr, labels = (t.to(device) for t in (self.x, self.edge_index, self.ptr, self.labels))
        edge_attr = None if self.edge_attr is None else self.edge_attr.to(device)
        nodes, edges = (
            {key: tensor.to(device) for key, tensor in attributes.items()}
            for attributes in (self.node_attributes, self.edge_attributes)
        )
        return GraphSet(x, edge_index, ptr, labels, edge_attr, self.name, nodes, edges)


def _ranges(ptr: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The members of the segments ``index``, concatenated; where each begins, (B + 1,); the segment of each member."""
    sizes = ptr[index + 1] - ptr[index]  # (B,)
    starts = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    owner = torch.repeat_interleave(torch.arange(len(index), device=ptr.device), sizes)
    members = torch.arange(len(owner), device=ptr.device) + (ptr[index] - starts[:-1])[owner]
    return members, starts, owner


def attribute_kind(name: str, rows: Tensor, counts: Mapping[str, Tensor]) -> str | None:
    """Whether an attribute is of nodes, graphs or edges: the key of ``counts`` that equals ``rows``, or None.

    rows: (G,) rows in each graph · counts: "nodes", "graphs" and "edges" in each graph, (G,) each. If several fit, an
    attribute with "edge" in its name is of edges, any other is of the first kind that fits.

    Examples:
        >>> ring, one = torch.tensor([4]), torch.tensor([1])  # as many nodes as edges
        >>> counts = {"nodes": ring, "graphs": one, "edges": ring}
        >>> [attribute_kind(name, ring, counts) for name in ("pos", "edge_weight")]
        ['nodes', 'edges']
    """
    fitting = [kind for kind, numbers in counts.items() if torch.equal(rows, numbers)]
    return "edges" if "edge" in name and "edges" in fitting else fitting[0] if fitting else None


def refers_to_nodes(name: str) -> bool:
    """Whether PyG treats an attribute of this name as node or graph numbers, which it shifts in a batch."""
    return "index" in name or "batch" in name or name in ("face", "ptr")


def _check_graphs(graphs: Any) -> None:
    """Raise unless these are PyG graphs with edges."""
    graph_class = required("torch_geometric.data", "graph").Data
    if isinstance(graphs, graph_class):
        raise ValueError("graphs is one PyG graph or batch: pass a list of graphs, for a batch batch.to_data_list()")
    if len(graphs) == 0:
        raise ValueError("graphs is empty: give at least one graph")
    for number, graph in enumerate(graphs):
        if not isinstance(graph, graph_class):
            raise ValueError(f"graph {number} must be a torch_geometric.data.Data, got {type(graph).__name__}")
        edges = graph.edge_index
        if not isinstance(edges, Tensor) or edges.dim() != 2 or len(edges) != 2:
            given = f"shape {tuple(edges.shape)}" if isinstance(edges, Tensor) else type(edges).__name__
            raise ValueError(f"edge_index of graph {number} must have shape (2, E), got {given}")
        checks.integers(f"edge_index of graph {number}", edges, tuple(edges.shape), "sources and targets")


def _attributes(graphs: Sequence[Any], sizes: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The attributes that all graphs have for each node, and for each edge, one graph after the other."""
    counts = {"nodes": sizes, "edges": torch.tensor([graph.edge_index.shape[1] for graph in graphs])}
    found: dict[str, dict[str, Tensor]] = {"nodes": {}, "edges": {}}
    left_out = []
    names = {key for graph in graphs for key in graph.keys()}  # noqa: SIM118 (not a mapping)
    for key in sorted(names - {"edge_index", "y", "index", "num_nodes"}):
        values = [getattr(graph, key, None) for graph in graphs]
        if any(value is None for value in values):
            lacking = next(number for number, value in enumerate(values) if value is None)
            raise ValueError(f"graph {lacking} has no {key}, but others have: give it to all graphs or to none")
        tensors = [value for value in values if isinstance(value, Tensor) and value.dim() > 0]
        kind = None
        if len(tensors) == len(values) and not refers_to_nodes(key):
            kind = attribute_kind(key, torch.tensor([len(tensor) for tensor in tensors]), counts)
        if kind is None:
            left_out.append(key)
            continue
        for number, tensor in enumerate(tensors):
            if tensor.shape[1:] != tensors[0].shape[1:]:
                raise ValueError(
                    f"{key} of graph {number} has shape {tuple(tensor.shape)}, that of graph 0 "
                    f"{tuple(tensors[0].shape)}: give all graphs the same number of columns"
                )
        found[kind][key] = torch.cat(tensors)
    if left_out:
        warnings.warn(
            f"left out attributes that are neither per node nor per edge: {', '.join(left_out)}", stacklevel=3
        )
    return found["nodes"], found["edges"]


def _label(y: Any, number: int) -> int:
    """The label of a graph, −1 without one."""
    if y is None:
        return -1
    try:
        found = torch.as_tensor(y)
    except (TypeError, ValueError, RuntimeError):
        found = torch.tensor(torch.nan)  # not a number
    if found.numel() != 1 or found.double() != found.double().round():
        given = repr(y) if found.numel() == 1 else f"shape {tuple(found.shape)}"
        raise ValueError(f"y of graph {number} must be one whole number, got {given}: set y to its class, or to None")
    return int(found)


def assemble(
    x: Tensor,
    edge_index: Tensor,
    batch: Tensor,
    ptr: Tensor,
    nodes: Mapping[str, Tensor],
    edges: Mapping[str, Tensor],
    graphs: Mapping[str, Tensor | list[Any]],
) -> Any:
    """A PyG batch from its parts, in the order of the graphs; ``to_data_list`` can split it again.

    x: (n, F) · edge_index: (2, E) · batch: (n,) · ptr: (B + 1,) · nodes, edges, graphs: further attributes by name,
    with n, E and B rows
    """
    each = torch.arange(len(ptr), device=ptr.device)
    of_edges = torch.searchsorted(batch[edge_index[0]], each)  # (B + 1,)
    parts = [({"x": x, **nodes}, ptr), ({"edge_index": edge_index, **edges}, of_edges), (graphs, each)]
    present = {key: tensor for tensors, _ in parts for key, tensor in tensors.items()}
    made = required("torch_geometric.data", "graph").Batch(_base_cls=_graph_class(), **present, batch=batch, ptr=ptr)
    made._num_graphs = len(ptr) - 1
    made._slice_dict = {key: cuts for tensors, cuts in parts for key in tensors}
    nothing = torch.zeros_like(ptr[:-1])
    made._inc_dict = {key: ptr[:-1] if key in ("edge_index", "equivalent_index") else nothing for key in present}
    return made


def load_graphs(
    name: str,
    root: str | Path | None = None,
    features: str = "auto",
    attributes: bool = False,
    download: bool = False,
) -> GraphSet:
    """A set of the TU collection by name, such as ``"MUTAG"``.

    name: as the collection spells it · root: folder with ``NAME.zip``, the text files in ``NAME/`` or ``NAME/raw/``, or
    ``NAME.npz`` (packed adjacency bits); by default ``data/tu``, then ``$HARDNEG_DATA/tu`` · features: of nodes:
    ``"own"`` (labels, one-hot), ``"degree"`` (one-hot, or one standardized number where degrees reach 1000),
    ``"constant"`` (1), or ``"auto"``: own, or degree if a set has none · attributes: use the set's continuous node
    attributes as well · download: into ``root`` or ``data/tu``, if the set is not there
    """
    checks.choice("features", features, FEATURES)
    searched = tu_files.folders() if root is None else [Path(root).expanduser()]
    if download and not any(tu_files.holds(folder, name) for folder in searched):
        tu_files.fetch(name, searched[0])
    folder = tu_files.find(name) if root is None else searched[0]
    return GraphSet.of(tu_files.read(folder, name, attributes), features, name)


def features_of_nodes(own: Tensor | None, edge_index: Tensor, nodes: int, wanted: str, name: str) -> Tensor:
    """The features of each node, (n, F)."""
    checks.choice("features", wanted, FEATURES)
    has_own = own is not None and own.shape[1] > 0
    if wanted == "own" and not has_own:
        raise ValueError(f"features='own', but the nodes of {name} have none: use 'degree' or 'constant'")
    if has_own and wanted in ("auto", "own"):
        assert own is not None
        return own
    if wanted == "constant":
        return torch.ones(nodes, 1)
    degrees = edge_index[0].bincount(minlength=nodes)  # (n,)
    if int(degrees.max()) < MOST_DEGREES:
        return torch.nn.functional.one_hot(degrees).float()
    std, mean = torch.std_mean(degrees.float())
    return ((degrees - mean) / std.clamp(min=1e-6))[:, None]
