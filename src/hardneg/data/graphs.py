"""Sets of graphs to train on: the TU collection from local files or by download, or any list of PyG graphs."""

import contextlib
import io
import os
import tempfile
import zipfile
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hardneg import checks
from hardneg.data.twins import twins

REMEDY = 'pip install "hardneg[graph]"'
FEATURES = ("auto", "own", "degree", "constant")
MOST_DEGREES = 1000  # from this degree on it is one number instead of a one-hot vector, as in HCL's code


def geometric(module: str) -> Any:
    """A module of torch_geometric, imported where it is used; if it is missing, say what installs it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"graphs need torch_geometric, which cannot be imported ({error}): {REMEDY}") from error


@cache
def _graph_class() -> Any:
    class IndexedGraph(geometric("torch_geometric.data").Data):  # type: ignore[misc]
        """A PyG graph whose ``index`` says which one of its set it is."""

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
    """Graphs in a few large tensors, from which a batch is cut without a loop over graphs.

    As a dataset it yields PyG graphs with ``x``, ``edge_index``, ``y`` and their number ``index``, for PyG's DataLoader
    with any ``batch_sampler=``; `batch` gives the same batch at once, and on the device where the set is.

    Args:
        x: (n, F) floats, features of all nodes, graph after graph
        edge_index: (2, E), numbering nodes of the whole set, graph after graph
        ptr: (N + 1,) the first node of each graph, and n
        labels: (N,) integers ≥ −1, −1 = unknown; None if there are none
        edge_attr: (E, …) or None
        name: what to call the set

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
    ) -> None:
        checks.floating("x", x)
        if x.dim() != 2:
            raise ValueError(f"x must have shape (nodes, features), got {tuple(x.shape)}")
        checks.finite("x", x)
        if ptr.dim() != 1 or len(ptr) < 2 or int(ptr[0]) != 0 or int(ptr[-1]) != len(x) or bool((ptr.diff() < 0).any()):
            raise ValueError(f"ptr must rise from 0 to the {len(x)} nodes of x, one entry per graph and one more")
        checks.integers("edge_index", edge_index, (2, edge_index.shape[-1]), "sources and targets")
        checks.in_range("edge_index", edge_index, len(x))
        graph_of = torch.searchsorted(ptr, edge_index, right=True) - 1  # (2, E)
        if bool((graph_of[0] != graph_of[1]).any()) or bool((graph_of[0].diff() < 0).any()):
            raise ValueError("edge_index must join nodes of one graph, and list edges graph after graph")
        count = len(ptr) - 1
        if labels is None:
            labels = torch.full((count,), -1)
        labels = checks.integers("labels", labels, (count,), "one per graph")
        checks.values(labels >= -1, "labels must be ≥ −1, where −1 means unknown")
        self.x, self.edge_index, self.edge_attr, self.ptr, self.labels = x, edge_index, edge_attr, ptr, labels
        self.edge_ptr = torch.searchsorted(graph_of[0].contiguous(), torch.arange(count + 1, device=ptr.device))
        self.name = name
        self._twins: dict[int, Tensor] = {}

    @classmethod
    def of(cls, graphs: Sequence[Any], features: str = "auto", name: str = "graphs") -> "GraphSet":
        """A set of PyG graphs, with ``y`` a whole number or absent; features as for `load_graphs`."""
        if len(graphs) == 0:
            raise ValueError("graphs is empty: give at least one graph")
        sizes = torch.tensor([int(graph.num_nodes) for graph in graphs])
        ptr = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])  # (N + 1,)
        edges = torch.cat([graph.edge_index + start for graph, start in zip(graphs, ptr, strict=False)], dim=1)
        own = None if any(graph.x is None for graph in graphs) else torch.cat([graph.x for graph in graphs]).float()
        labels = [-1 if graph.y is None else int(graph.y) for graph in graphs]
        attributed = all(getattr(graph, "edge_attr", None) is not None for graph in graphs)
        edge_attr = torch.cat([graph.edge_attr for graph in graphs]) if attributed else None
        x = _features(own, edges, int(ptr[-1]), features, name)
        return cls(x, edges, ptr, torch.tensor(labels), edge_attr, name)

    @property
    def node_features(self) -> int:
        """F, the width of ``x``."""
        return self.x.shape[1]

    def __len__(self) -> int:
        return len(self.ptr) - 1

    def __getitem__(self, number: int) -> Any:
        if not -len(self) <= number < len(self):
            raise IndexError(f"{self.name} has {len(self)} graphs, and none of number {number}")
        number = int(number) % len(self)
        nodes = slice(int(self.ptr[number]), int(self.ptr[number + 1]))
        edges = slice(int(self.edge_ptr[number]), int(self.edge_ptr[number + 1]))
        extra = {} if self.edge_attr is None else {"edge_attr": self.edge_attr[edges]}
        return _graph_class()(
            x=self.x[nodes],
            edge_index=self.edge_index[:, edges] - nodes.start,
            y=self.labels[number : number + 1],
            index=torch.tensor([number]),
            **extra,
        )

    def twins(self, hops: int) -> Tensor:
        """The first twin of each node, (n,), for encoders that see so many hops far; see `hardneg.data.twins`."""
        if hops not in self._twins:
            owner = torch.repeat_interleave(torch.arange(len(self), device=self.ptr.device), self.ptr.diff())
            self._twins[hops] = twins(self.x, self.edge_index, owner, hops)
        return self._twins[hops]

    def batch(self, index: Tensor, hops: int | None = None) -> Any:
        """The PyG batch of graphs ``index`` (B,), in this order, on the device of the set.

        With ``hops``, ``twin_index`` (n,) is the first twin of each node, as `twins` finds them.
        """
        index = checks.integers("index", index, (len(index),), "numbers of graphs").to(self.ptr.device)
        checks.in_range("index", index, len(self))
        nodes, ptr, batch = _ranges(self.ptr, index)
        edges, _, owner = _ranges(self.edge_ptr, index)
        shift = ptr[:-1] - self.ptr[index]  # (B,)
        return assemble(
            self.x[nodes],
            self.edge_index[:, edges] + shift[owner],
            batch,
            ptr,
            edge_attr=None if self.edge_attr is None else self.edge_attr[edges],
            index=index,
            y=self.labels[index],
            twin_index=None if hops is None else self.twins(hops)[nodes] + shift[batch],
        )

    def to(self, device: torch.device | str) -> "GraphSet":
        """The same set on another device."""
        x, edge_index, ptr, labels = (t.to(device) for t in (self.x, self.edge_index, self.ptr, self.labels))
        edge_attr = None if self.edge_attr is None else self.edge_attr.to(device)
        return GraphSet(x, edge_index, ptr, labels, edge_attr, self.name)


def _ranges(ptr: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The members of some segments, one after the other, where each begins (B + 1,), and whose each is."""
    sizes = ptr[index + 1] - ptr[index]  # (B,)
    starts = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    owner = torch.repeat_interleave(torch.arange(len(index), device=ptr.device), sizes)
    members = torch.arange(len(owner), device=ptr.device) + (ptr[index] - starts[:-1])[owner]
    return members, starts, owner


def assemble(
    x: Tensor,
    edge_index: Tensor,
    batch: Tensor,
    ptr: Tensor,
    edge_attr: Tensor | None = None,
    index: Tensor | None = None,
    y: Tensor | None = None,
    twin_index: Tensor | None = None,
) -> Any:
    """A PyG batch from its parts, which ``to_data_list`` can take apart again; all graph after graph.

    x: (n, F) · edge_index: (2, E) · batch, twin_index: (n,) · ptr: (B + 1,) · edge_attr: (E, …) · index, y: (B,)
    """
    each = torch.arange(len(ptr), device=ptr.device)
    cuts = {"x": ptr, "edge_index": torch.searchsorted(batch[edge_index[0]], each), "index": each, "y": each}
    cuts |= {"edge_attr": cuts["edge_index"], "twin_index": ptr}
    given = {"x": x, "edge_index": edge_index, "edge_attr": edge_attr, "index": index, "y": y, "twin_index": twin_index}
    present = {key: tensor for key, tensor in given.items() if tensor is not None}
    made = geometric("torch_geometric.data").Batch(_base_cls=_graph_class(), **present, batch=batch, ptr=ptr)
    made._num_graphs = len(ptr) - 1
    made._slice_dict = {key: cuts[key] for key in present}
    nothing = torch.zeros_like(ptr[:-1])
    made._inc_dict = {key: ptr[:-1] if key in ("edge_index", "twin_index") else nothing for key in present}
    return made


def load_graphs(
    name: str,
    root: str | Path | None = None,
    features: str = "auto",
    attributes: bool = False,
    download: bool = False,
) -> GraphSet:
    """A set of the TU collection by name, such as ``"MUTAG"``.

    name: as the collection spells it · root: folder with ``NAME.zip``, ``NAME/raw/NAME_A.txt`` or ``NAME.npz`` (packed
    adjacency bits); by default ``$HARDNEG_DATA/tu`` · features: of nodes: ``"own"`` (labels, one-hot), ``"degree"``
    (one-hot, or one standardised number where degrees reach 1000), ``"constant"`` (1), or ``"auto"``: own, and degree
    where a set has none · attributes: take the set's continuous node attributes as well · download: into ``root``, if
    it is not there
    """
    checks.choice("features", features, FEATURES)
    if root is None:
        home = os.environ.get("HARDNEG_DATA")
        if home is None and not download:
            raise FileNotFoundError(
                f"{name!r} has no place: pass root=, or set HARDNEG_DATA to the folder that holds tu/, or download=True"
            )
        root = Path(home) / "tu" if home else Path("data") / "tu"
    folder = Path(root).expanduser()
    if (packed := folder / f"{name}.npz").exists():
        return GraphSet.of(_unpacked(packed), features, name)
    if (folder / name / "raw").is_dir() or (download and not (folder / f"{name}.zip").exists()):
        return GraphSet.of(_read(folder, name, attributes), features, name)
    if not (folder / f"{name}.zip").exists():
        there = sorted({path.name.removesuffix(".zip").removesuffix(".npz") for path in folder.glob("*")})
        raise FileNotFoundError(
            f"{name!r} is not in {folder}, which has {', '.join(there) or 'nothing'}: check the name, or download=True"
        )
    # The data's own folder may not be writable; and the reader tells the terminal that it is at work.
    with tempfile.TemporaryDirectory() as unpacked, contextlib.redirect_stderr(io.StringIO()):
        zipfile.ZipFile(folder / f"{name}.zip").extractall(unpacked)
        return GraphSet.of(_read(Path(unpacked), name, attributes), features, name)


def _read(folder: Path, name: str, attributes: bool) -> list[Any]:
    """Graphs from the raw files of the collection."""
    found = geometric("torch_geometric.datasets").TUDataset(str(folder), name, use_node_attr=attributes)
    # PyG counts graphs by their edges, and forgets those without any at the end of a set.
    longest = max(len(cuts) for cuts in found.slices.values())
    found.slices = {key: cuts[torch.arange(longest).clamp(max=len(cuts) - 1)] for key, cuts in found.slices.items()}
    return list(found)


def _unpacked(path: Path) -> list[Any]:
    """Graphs from an .npz of ``num_nodes`` (N,), ``labels`` (N,) and the bits of all upper triangles."""
    stored = np.load(path)
    sizes = stored["num_nodes"].astype(np.int64)
    cuts = np.cumsum(sizes * (sizes + 1) // 2)
    bits = np.unpackbits(stored["triu_bits"])[: cuts[-1]].astype(bool)
    _, labels = np.unique(stored["labels"], return_inverse=True)
    graphs = []
    for size, label, present in zip(sizes.tolist(), labels.tolist(), np.split(bits, cuts[:-1]), strict=True):
        pairs = np.stack(np.triu_indices(size))[:, present]  # (2, P), self-loops included
        pairs = np.concatenate([pairs, pairs[::-1, pairs[0] != pairs[1]]], axis=1)
        graphs.append(_graph_class()(edge_index=torch.from_numpy(pairs), y=torch.tensor([label]), num_nodes=size))
    return graphs


def _features(own: Tensor | None, edge_index: Tensor, nodes: int, wanted: str, name: str) -> Tensor:
    """What describes each node, (n, F)."""
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
