"""Sets of graphs from the user's own files: arrays in .npz or .safetensors, or a folder or zip of TU text files."""

import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hardneg import callables, checks
from hardneg.extras import required
from hardneg.graphs import tu_files
from hardneg.graphs.data import GraphSet, features_of_nodes

SUFFIXES = (".npz", ".safetensors")
_ARRAYS = {
    "edge_index": "(2, E), the nodes that each edge joins",
    "batch": "(n,), the graph of each node",
    "x": "(n, F), features of nodes",
    "y": "(N,), the label of each graph",
    "edge_attr": "(E, …), attributes of edges",
    "ptr": "(N + 1,), the first node of each graph, and n",
}
_REQUIRED = ("edge_index", "batch")


def read_graphs(path: str | Path, features: str = "auto") -> GraphSet:
    """A set of graphs from a file or folder.

    path: an ``.npz`` or ``.safetensors`` file of the arrays of a PyG batch, ``edge_index`` (2, E) and ``batch`` (n,),
    with ``x`` (n, F), ``y`` (N,), ``edge_attr`` (E, …) and ``ptr`` (N + 1,) if there are any; or a folder or a zip of
    the text files of a TU set · features: as for `hardneg.graphs.data.load_graphs`

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:  # a path of three nodes and a pair
        ...     edges = [[0, 1, 1, 2, 3, 4], [1, 0, 2, 1, 4, 3]]
        ...     np.savez(Path(folder) / "two.npz", edge_index=edges, batch=[0, 0, 0, 1, 1], y=[0, 1])
        ...     graphs = read_graphs(Path(folder) / "two.npz")
        >>> len(graphs), graphs.ptr.tolist(), graphs.labels.tolist()
        (2, [0, 3, 5], [0, 1])
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist: give an .npz or .safetensors file of graphs, a folder of TU text files, "
            f"{tu_files.TU}NAME, or {_function(path)}"
        )
    if path.is_dir():
        folder, name = tu_files.text_files(path)
        return GraphSet.of(tu_files.read_texts(folder, name, False), features, name)
    match checks.regular_file(path).suffix.lower():
        case ".npz":
            arrays, unknown = _npz(path)
        case ".safetensors":
            arrays, unknown = _safetensors(path)
        case ".zip":
            return GraphSet.of(tu_files.read_zip(path, path.stem, False), features, path.stem)
        case suffix:
            raise ValueError(
                f"{path} is a {suffix or 'suffixless'} file, which cannot be read as graphs: give .npz, .safetensors, "
                f"a folder or zip of TU text files, or {_function(path)}"
            )
    if unknown:
        known = ", ".join(f"{name} {meaning}" for name, meaning in _ARRAYS.items())
        raise ValueError(f"{path} has unknown arrays: {', '.join(unknown)}: rename or remove them; known are {known}")
    try:
        return _graph_set(arrays, features, path.stem)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _function(path: Path) -> str:
    """How to name a function, for a path that may be meant as one.

    Examples:
        >>> _function(Path("mine.load"))
        'mine:load, a function that returns a list of PyG graphs'
    """
    module, _, name = path.name.rpartition(".")
    files = (".npz", ".safetensors", ".zip", ".pt", ".pth", ".pkl", ".txt", ".csv", ".json")
    if path.suffix in files or not callables.is_name(f"{module}:{name}"):
        module, name = "module", "function"
    elif path.suffix == ".py":
        name = "function"
    return f"{module}:{name}, a function that returns a list of PyG graphs"


def _npz(path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """The known arrays, and the names of the others."""
    try:
        with zipfile.ZipFile(path), np.load(path, allow_pickle=False) as stored:
            names = stored.files
            read = {name: stored[name] for name in names if name in _ARRAYS}
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}): write plain arrays with numpy.savez") from error
    return {name: checks.as_tensor(name, array) for name, array in read.items()}, _unknown(names)


def _safetensors(path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """The known arrays, and the names of the others."""
    package = required("safetensors", "train")
    try:
        with package.safe_open(path, framework="pt") as stored:
            names = list(stored.keys())
            return {name: stored.get_tensor(name) for name in names if name in _ARRAYS}, _unknown(names)
    except package.SafetensorError as error:
        raise ValueError(f"{path} cannot be read ({error}): write it with safetensors.torch.save_file") from error


def _unknown(names: list[str]) -> list[str]:
    return [repr(name) for name in names if name not in _ARRAYS]


def _graph_set(arrays: dict[str, Tensor], features: str, name: str) -> GraphSet:
    """The set of the arrays of a PyG batch; edges are sorted by graph."""
    for key in _REQUIRED:
        if key not in arrays:
            raise ValueError(f"it lacks {key!r}, {_ARRAYS[key]}")
    batch, edges = arrays["batch"], arrays["edge_index"]
    batch = checks.integers("batch", batch, (batch.numel(),), "the graph of each node")
    if edges.dim() != 2 or len(edges) != 2:
        raise ValueError(f"edge_index must have shape (2, E), got {tuple(edges.shape)}: transpose it if it is (E, 2)")
    edges = checks.integers("edge_index", edges, tuple(edges.shape), "the nodes that each edge joins")
    if len(batch) == 0 or int(batch[0]) < 0 or bool((batch.diff() < 0).any()):
        raise ValueError("batch must number graphs from 0 in ascending order: list nodes graph after graph")
    last, labels, x = int(batch[-1]), arrays.get("y"), arrays.get("x")
    if labels is not None:
        labels = checks.integers("y", labels.reshape(-1), (labels.numel(),), "one label per graph")
    elif last >= len(batch):
        raise ValueError(f"batch numbers graphs up to {last}, but there are {len(batch)} nodes: leave out no number")
    ptr = arrays.get("ptr")
    if ptr is not None:
        ptr = checks.integers("ptr", ptr, (ptr.numel(),), "the first node of each graph, and n")
    elif labels is not None and len(labels) == len(batch) > last + 1:
        raise ValueError(
            f"y has {len(labels)} labels, one per node, but batch numbers {last + 1} graphs: give one label per graph "
            "(if the last graphs have no nodes, add ptr)"
        )
    count = len(ptr) - 1 if ptr is not None else last + 1 if labels is None else len(labels)
    starts = torch.searchsorted(batch, torch.arange(max(count, 0) + 1))  # (N + 1,)
    if ptr is not None and (last >= count or not torch.equal(ptr, starts)):
        raise ValueError("ptr must hold the first node of each graph of batch, and the number of nodes")
    if last >= count:
        raise ValueError(f"y has {count} labels, but batch numbers graphs up to {last}: give one label per graph")
    checks.require_in_range("edge_index", edges, len(batch))
    if x is not None:
        x = _rows("x", x, len(batch)).float()
        x = x[:, None] if x.dim() == 1 else x
    order = batch[edges[0]].argsort(stable=True)  # (E,)
    edge_attr = arrays.get("edge_attr")
    return GraphSet(
        features_of_nodes(x, edges, len(batch), features, name),
        edges[:, order],
        starts,
        labels,
        None if edge_attr is None else _rows("edge_attr", edge_attr, edges.shape[1])[order],
        name,
    )


def _rows(name: str, tensor: Tensor, rows: int) -> Tensor:
    if tensor.dim() == 0 or len(tensor) != rows:
        raise ValueError(f"{name} must have {rows} rows, got shape {tuple(tensor.shape)}")
    return tensor
