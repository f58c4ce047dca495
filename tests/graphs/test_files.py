"""Graphs in the user's own files are those that PyG batches."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.testing import assert_close

pytest.importorskip("torch_geometric", reason='needs pip install "hardneg[graph]"')

from torch_geometric.data import Batch, Data

from hardneg.graphs.data import GraphSet
from hardneg.graphs.files import read_graphs


def drawn(sizes: list[int]) -> list[Data]:
    """Random directed graphs of these sizes; every edge has an attribute of its own."""
    draws = torch.Generator().manual_seed(len(sizes))
    graphs = []
    for number, size in enumerate(sizes):
        edges = torch.rand(size, size, generator=draws).gt(0.5).nonzero().T  # (2, E)
        marks = torch.rand(edges.shape[1], 2, generator=draws)
        x = torch.randn(size, 3, generator=draws)
        graphs.append(Data(x=x, edge_index=edges, edge_attr=marks, y=torch.tensor([number % 3 - 1])))
    return graphs


def write(path: Path, arrays: dict[str, torch.Tensor]) -> Path:
    if path.suffix == ".npz":
        np.savez(path, **{name: tensor.numpy() for name, tensor in arrays.items()})
    else:
        save_file({name: tensor.contiguous() for name, tensor in arrays.items()}, path)
    return path


def arrays_of(graphs: list[Data]) -> dict[str, torch.Tensor]:
    collated = Batch.from_data_list(graphs)
    return {name: collated[name] for name in ("x", "edge_index", "edge_attr", "batch", "ptr", "y")}


def same(found: GraphSet, graphs: list[Data]) -> None:
    assert len(found) == len(graphs)
    for number, graph in enumerate(graphs):
        for name in ("x", "edge_index", "edge_attr", "y"):
            assert_close(found[number][name], graph[name])


@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any))
@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_the_arrays_of_a_pyg_batch_are_read_as_its_graphs(
    suffix: str, sizes: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    graphs = drawn(sizes)
    same(read_graphs(write(tmp_path_factory.mktemp("own") / f"mine.{suffix}", arrays_of(graphs))), graphs)


def test_edges_in_any_order_keep_their_attributes(tmp_path: Path) -> None:
    graphs = drawn([4, 3, 5])
    arrays = arrays_of(graphs)
    order = torch.randperm(arrays["edge_index"].shape[1], generator=torch.Generator().manual_seed(0))
    shuffled = arrays | {"edge_index": arrays["edge_index"][:, order], "edge_attr": arrays["edge_attr"][order]}
    found = read_graphs(write(tmp_path / "mine.npz", shuffled))
    for number, graph in enumerate(graphs):
        marks = [
            dict(zip(map(tuple, each.edge_index.T.tolist()), each.edge_attr.tolist(), strict=True))
            for each in (found[number], graph)
        ]
        assert marks[0] == marks[1]


def test_labels_and_features_may_be_absent_and_of_any_number_type(tmp_path: Path) -> None:
    edges = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32)
    arrays = {"edge_index": edges, "batch": torch.tensor([0, 0, 1], dtype=torch.uint8)}
    found = read_graphs(write(tmp_path / "mine.npz", arrays))
    assert found.labels.tolist() == [-1, -1]
    assert_close(found.x, torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, 0.0]]))  # degrees 1, 1, 0
    found = read_graphs(write(tmp_path / "mine.npz", arrays | {"x": torch.tensor([5, 6, 7])}))
    assert_close(found.x, torch.tensor([[5.0], [6.0], [7.0]]))
    assert_close(read_graphs(tmp_path / "mine.npz", "constant").x, torch.ones(3, 1))
    # Graphs without nodes are those that have a label only.
    found = read_graphs(write(tmp_path / "mine.npz", arrays | {"y": torch.tensor([[2], [0], [1], [1]])}))
    assert (found.ptr.tolist(), found.labels.tolist()) == ([0, 2, 3, 3, 3], [2, 0, 1, 1])
    # As many labels as nodes are those of graphs if ptr says so.
    three = {"y": torch.tensor([2, 0, 1]), "ptr": torch.tensor([0, 2, 3, 3])}
    found = read_graphs(write(tmp_path / "mine.npz", arrays | three))
    assert (found.ptr.tolist(), found.labels.tolist()) == ([0, 2, 3, 3], [2, 0, 1])


GOOD = {
    "x": torch.ones(3, 2),
    "edge_index": torch.tensor([[0, 1], [1, 0]]),
    "batch": torch.tensor([0, 0, 1]),
    "y": torch.tensor([0, 1]),
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch": None}, r"it lacks 'batch', \(n,\), the graph of each node"),
        ({"edge_index": None}, "it lacks 'edge_index'"),
        ({"batch": torch.tensor([0, 1, 0])}, "batch must number graphs from 0 in ascending order"),
        ({"batch": torch.tensor([-1, 0, 1])}, "batch must number graphs from 0"),
        ({"batch": torch.tensor([0.0, 0.0, 1.0])}, "batch must have an integer dtype"),
        ({"batch": torch.tensor([[0, 0, 1]])}, r"batch must have shape \(3,\)"),
        ({"batch": torch.tensor([], dtype=torch.int64)}, "batch must number graphs"),
        ({"batch": torch.tensor([0, 0, 2])}, "y has 2 labels, but batch numbers graphs up to 2"),
        ({"batch": torch.tensor([0, 0, 2**60]), "y": None}, f"batch numbers graphs up to {2**60}, .* 3 nodes"),
        ({"edge_index": torch.tensor([[0, 1], [1, 0], [0, 0]])}, r"shape \(2, E\), got \(3, 2\): transpose it"),
        ({"edge_index": torch.tensor([[0, 1], [1, 3]])}, "edge_index must hold indices from 0 to 2"),
        ({"edge_index": torch.tensor([[0, 1], [1, 2]])}, "edge_index must join nodes of one graph"),
        ({"x": torch.ones(2, 2)}, r"x must have 3 rows, got shape \(2, 2\)"),
        ({"x": torch.full((3, 2), torch.nan)}, "x holds NaN or inf"),
        ({"x": torch.ones(3, 2, 2)}, r"x must have shape \(nodes, features\)"),
        ({"y": torch.tensor([0.5, 1.0])}, "y must have an integer dtype"),
        ({"y": torch.tensor([0, -2])}, "labels must be ≥ −1"),
        ({"edge_attr": torch.ones(3)}, "edge_attr must have 2 rows"),
        ({"y": torch.tensor([0, 0, 1])}, "y has 3 labels, one per node, but batch numbers 2 graphs"),
        ({"ptr": torch.tensor([0, 1, 3])}, "ptr must hold the first node of each graph"),
        ({"ptr": torch.tensor([0, 2, 3, 3])}, r"labels must have shape \(3,\)"),
        ({"ptr": torch.tensor([0, 2]), "y": None}, "ptr must hold the first node"),
        ({"ptr": torch.tensor([], dtype=torch.int64)}, "ptr must hold the first node"),
    ],
)
@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_malformed_arrays_are_refused_by_name(
    suffix: str, changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    arrays = {name: array for name, array in {**GOOD, **changed}.items() if array is not None}
    with pytest.raises(ValueError, match=rf"mine\.{suffix}: .*{message}") as raised:
        read_graphs(write(tmp_path / f"mine.{suffix}", arrays))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_arrays_that_nothing_reads_are_listed(suffix: str, tmp_path: Path) -> None:
    others = {"labels": torch.tensor([0, 1]), "pos": torch.ones(3, 2)}
    with pytest.raises(ValueError, match=r"unknown arrays: 'labels', 'pos': .*y \(N,\), the label of each graph"):
        read_graphs(write(tmp_path / f"mine.{suffix}", {**GOOD, **others}))


@pytest.mark.parametrize("suffix", ["npz", "safetensors", "zip"])
@pytest.mark.parametrize("kept", [0, 7, 100, -20])
def test_a_broken_file_is_refused(suffix: str, kept: int, tmp_path: Path) -> None:
    file = tmp_path / f"mine.{suffix}"
    whole = write(tmp_path / ("whole.safetensors" if suffix == "safetensors" else "whole.npz"), GOOD).read_bytes()
    file.write_bytes(whole[:kept])
    with pytest.raises(ValueError, match=rf"mine\.{suffix} cannot be read .*: (write|copy)"):
        read_graphs(file)


def test_an_array_of_objects_is_not_unpickled(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", edge_index=np.array([{}, {}], dtype=object), batch=np.array([0, 0]))
    with pytest.raises(ValueError, match=r"cannot be read .*allow_pickle=False"):
        read_graphs(tmp_path / "mine.npz")


def text_set(folder: Path, name: str = "TOY") -> None:
    folder.mkdir(parents=True)
    texts = {"A": "1, 2\n2, 1\n", "graph_indicator": "1\n1\n2\n", "graph_labels": "4\n7\n"}
    for part, text in texts.items():
        (folder / f"{name}_{part}.txt").write_text(text)


@pytest.mark.parametrize("place", ["mine", "mine/raw"])
def test_a_folder_or_zip_of_tu_text_files_is_read_whatever_it_is_called(place: str, tmp_path: Path) -> None:
    text_set(tmp_path / place)
    with zipfile.ZipFile(tmp_path / "TOY.zip", "w") as archive:
        for file in (tmp_path / place).iterdir():
            archive.write(file, f"anything/{file.name}")
    for source in ("mine", "TOY.zip"):
        found = read_graphs(tmp_path / source)
        assert (found.name, found.ptr.tolist(), found.labels.tolist()) == ("TOY", [0, 2, 3], [0, 1])


def test_folders_without_one_set_and_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"empty has no NAME_A.txt, the edges of a TU set"):
        read_graphs(tmp_path / "empty")
    text_set(tmp_path / "two", "A")
    (tmp_path / "two" / "B_A.txt").touch()
    with pytest.raises(ValueError, match="two holds several sets, A, B: put each into a folder of its own"):
        read_graphs(tmp_path / "two")
    with pytest.raises(FileNotFoundError, match=r"none.npz does not exist: give an .npz or .safetensors file"):
        read_graphs(tmp_path / "none.npz")
    for name, function in {"graphs.pt": "module:function", "graphs.py": "graphs:function"}.items():
        (tmp_path / name).touch()
        with pytest.raises(
            ValueError, match=rf"{name} is a .p[ty] file, which cannot be read as graphs: .*{function},"
        ):
            read_graphs(tmp_path / name)
    for name, function in {"graphs.load": "graphs:load", "a.b.load": "a.b:load", "none": "module:function"}.items():
        with pytest.raises(FileNotFoundError, match=rf"{name} does not exist: .* or {function}, a function that"):
            read_graphs(tmp_path / name)
    with zipfile.ZipFile(tmp_path / "OTHER.zip", "w") as archive:
        archive.writestr("TOY_A.txt", "1, 1\n")
    with pytest.raises(FileNotFoundError, match=r"OTHER.zip has no OTHER_A.txt"):
        read_graphs(tmp_path / "OTHER.zip")
