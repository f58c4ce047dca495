"""A batch of a set is the one that PyG collates, with the index of each graph; TU files are read without PyG."""

import os
import pickle
import sys
import zipfile
from pathlib import Path
from typing import Any

import children
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

pytest.importorskip("torch_geometric", reason='needs pip install "hardneg[graph]"')

from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader

import hardneg as hn
from hardneg.extras import required
from hardneg.graphs import data
from hardneg.graphs.data import GraphSet, load_graphs

TU = Path(os.environ.get("HARDNEG_DATA", "")) / "tu"
needs_data = pytest.mark.skipif(
    not os.environ.get("HARDNEG_DATA") or not TU.is_dir(), reason="set HARDNEG_DATA to a folder with tu/"
)


def drawn(sizes: list[int], seed: int = 0, features: int = 3) -> list[Data]:
    """Random undirected graphs of these sizes, whose edges have attributes."""
    draws = torch.Generator().manual_seed(seed)
    graphs = []
    for number, size in enumerate(sizes):
        pairs = torch.rand(size, size, generator=draws).triu(1).gt(0.6).nonzero().T  # (2, P)
        edges = torch.cat([pairs, pairs.flip(0)], dim=1)
        weights = torch.arange(pairs.shape[1], dtype=torch.float32).repeat(2)[:, None]
        x = torch.randn(size, features, generator=draws)
        graphs.append(Data(x=x, edge_index=edges, edge_attr=weights, y=torch.tensor([number % 2])))
    return graphs


def same(one: object, other: object) -> None:
    for name in ("x", "edge_index", "edge_attr", "y", "index", "batch", "ptr"):
        assert_close(getattr(one, name), getattr(other, name))


@given(sizes=st.lists(st.integers(0, 6), min_size=1, max_size=8), chosen=st.lists(st.integers(0, 7), max_size=8))
def test_a_batch_is_what_pyg_collates(sizes: list[int], chosen: list[int]) -> None:
    graphs = GraphSet.of(drawn(sizes))
    index = torch.tensor([number % len(sizes) for number in [0, *chosen]])
    batch = graphs.batch(index)
    (collated,) = DataLoader([graphs[int(number)] for number in index], batch_size=len(index))
    same(batch, collated)
    assert_close(batch.index, index)  # PyG alone would add node counts to what is called an index
    assert batch.num_graphs == len(index)


def test_a_batch_is_split_into_its_graphs() -> None:
    graphs = GraphSet.of(drawn([3, 0, 5, 1]))
    for graph in graphs.batch(torch.tensor([2, 1, 0])).to_data_list():
        original = graphs[int(graph.index)]
        assert_close(graph.x, original.x)
        assert_close(graph.edge_index, original.edge_index)


def with_attributes() -> list[Data]:
    graphs = drawn([3, 0, 5, 1])
    for graph in graphs:
        nodes, edges = int(graph.num_nodes), graph.edge_index.shape[1]
        graph.pos, graph.z = torch.randn(nodes, 3), torch.arange(nodes)
        graph.edge_weight, graph.bond = torch.rand(edges), torch.randint(4, (edges, 2))
    return graphs


def test_batches_keep_attributes_of_nodes_and_edges() -> None:
    graphs = with_attributes()
    made = GraphSet.of(graphs)
    index = torch.tensor([2, 1, 0, 3, 2])
    batch = made.to("cpu").batch(index)
    for number, cut, single in zip(index.tolist(), batch.to_data_list(), [made[int(i)] for i in index], strict=True):
        for name in ("x", "edge_attr", "pos", "z", "edge_weight", "bond"):
            assert_close(getattr(cut, name), getattr(graphs[number], name))
            assert_close(getattr(single, name), getattr(graphs[number], name))


def test_nodes_that_differ_in_an_attribute_are_not_equivalent() -> None:
    star = Data(x=torch.ones(3, 1), edge_index=torch.tensor([[0, 0, 1, 2], [1, 2, 0, 0]]))
    assert GraphSet.of([star]).equivalent_nodes(2).tolist() == [0, 1, 1]
    star.z = torch.tensor([6, 1, 8])
    assert GraphSet.of([star]).equivalent_nodes(2).tolist() == [0, 1, 2]


def test_attributes_that_a_set_cannot_hold_are_named() -> None:
    graphs = with_attributes()
    for graph in graphs:
        graph.smiles, graph.face = "C", torch.zeros(3, 1, dtype=torch.int64)
    with pytest.warns(UserWarning, match="left out attributes that are neither per node nor per edge: face, smiles"):
        GraphSet.of(graphs)
    for name in ("z", "edge_attr", "x"):
        one_less = with_attributes()
        delattr(one_less[2], name)
        with pytest.raises(ValueError, match=f"graph 2 has no {name}, but others have"):
            GraphSet.of(one_less)
    for y, message in ((torch.tensor([0.7]), "got tensor"), (torch.tensor([0, 1]), r"got shape \(2,\)")):
        graphs = drawn([3])
        graphs[0].y = y
        with pytest.raises(ValueError, match=f"y of graph 0 must be one whole number, {message}"):
            GraphSet.of(graphs)


RING = torch.tensor([[0, 1, 2], [1, 2, 0]])


@pytest.mark.parametrize(
    ("graphs", "message"),
    [
        (Batch.from_data_list(drawn([3, 4])), r"graphs is one PyG graph or batch: .*batch\.to_data_list\(\)"),
        (Data(edge_index=RING, num_nodes=3), "graphs is one PyG graph or batch"),
        ((1, 2, 3), r"graph 0 must be a torch_geometric\.data\.Data, got int"),
        ([Data(x=torch.ones(3, 1))], r"edge_index of graph 0 must have shape \(2, E\), got NoneType"),
        ([Data(edge_index=RING.T, num_nodes=3)], r"edge_index of graph 0 must have shape \(2, E\), got shape \(3, 2\)"),
        ([Data(edge_index=RING.float(), num_nodes=3)], "edge_index of graph 0 must have an integer dtype"),
        ([Data(x=torch.ones(3, width), edge_index=RING) for width in (2, 4)],
         r"x of graph 1 has shape \(3, 4\), that of graph 0 \(3, 2\)"),
        ([Data(edge_index=RING, num_nodes=3, y="a")], "y of graph 0 must be one whole number, got 'a'"),
    ],
)  # fmt: skip
def test_what_is_no_list_of_graphs_is_refused_in_one_line(graphs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        GraphSet.of(graphs)
    assert "\n" not in str(raised.value)


def test_a_slice_names_the_subset_to_take() -> None:
    graphs = GraphSet.of(drawn([3, 4, 5, 6]))
    with pytest.raises(TypeError, match=r"use subset\(range\(1, 4, 1\)\)"):
        graphs[1:10]
    assert graphs.subset(range(1, 4, 1)).ptr.tolist() == [0, 4, 9, 15]


@pytest.mark.parametrize("workers", [0, 1])
def test_the_proximity_sampler_composes_the_batches_of_a_loader(workers: int) -> None:
    graphs = GraphSet.of(drawn([2, 3, 4, 5] * 10))
    sampler = hn.ProximityBatchSampler(len(graphs), batch_size=8, candidates=10, neighbors=4)
    sampler.refresh(torch.randn(40, 4, generator=torch.Generator().manual_seed(0)))
    sampler.set_epoch(0)
    expected = list(sampler)
    sampler.set_epoch(0)
    seen = [batch.index.tolist() for batch in DataLoader(graphs, batch_sampler=sampler, num_workers=workers)]
    assert seen == expected


def test_graphs_can_be_sent_to_another_process() -> None:
    graph = pickle.loads(pickle.dumps(GraphSet.of(drawn([4]))[0]))
    assert type(graph) is data.IndexedGraph
    assert graph.index.item() == 0


def test_features_are_degrees_or_a_constant_where_there_are_none() -> None:
    star = Data(edge_index=torch.tensor([[0, 0, 0, 1, 2, 3], [1, 2, 3, 0, 0, 0]]), num_nodes=5)
    assert_close(GraphSet.of([star]).x, torch.eye(4)[[3, 1, 1, 1, 0]])
    assert_close(GraphSet.of([star], features="constant").x, torch.ones(5, 1))
    with pytest.raises(ValueError, match="have none: use 'degree'"):
        GraphSet.of([star], features="own")
    many = torch.arange(1, 1002)
    hub = torch.cat([torch.stack([many * 0, many]), torch.stack([many, many * 0])], dim=1)
    x = GraphSet.of([Data(edge_index=hub, num_nodes=1002)]).x
    assert x.shape == (1002, 1)
    assert float(x.mean()) == pytest.approx(0, abs=1e-5)
    assert float(x.std()) == pytest.approx(1, rel=1e-3)


def test_graphs_without_labels_get_the_unknown_label() -> None:
    graphs = GraphSet.of([Data(edge_index=torch.zeros(2, 0, dtype=torch.int64), num_nodes=2)], features="constant")
    assert graphs.labels.tolist() == [-1]


def written(folder: Path, name: str) -> None:
    """A set of a triangle and a lone node in the raw layout of the collection."""
    raw = folder / name / "raw"
    raw.mkdir(parents=True)
    texts = {"A": "1, 2\n2, 1\n2, 3\n3, 2\n1, 3\n3, 1\n", "graph_indicator": "1\n1\n1\n2\n", "graph_labels": "-1\n1\n"}
    for part, text in {**texts, "node_labels": "0\n1\n0\n1\n"}.items():
        (raw / f"{name}_{part}.txt").write_text(text)


def check_triangle(graphs: GraphSet) -> None:
    assert graphs.ptr.tolist() == [0, 3, 4]
    assert graphs.labels.tolist() == [0, 1]
    assert_close(graphs.x, torch.eye(2)[[0, 1, 0, 1]])
    assert sorted(graphs.edge_index.T.tolist()) == [[0, 1], [0, 2], [1, 0], [1, 2], [2, 0], [2, 1]]


def test_raw_files_and_a_zip_of_them_give_the_same_set(tmp_path: Path) -> None:
    written(tmp_path / "source", "TOY")
    (tmp_path / "zipped").mkdir()
    with zipfile.ZipFile(tmp_path / "zipped" / "TOY.zip", "w") as archive:
        for path in (tmp_path / "source").rglob("*.txt"):
            archive.write(path, path.relative_to(tmp_path / "source"))
    check_triangle(load_graphs("TOY", tmp_path / "zipped"))
    assert [path.name for path in (tmp_path / "zipped").iterdir()] == ["TOY.zip"]  # nothing is left there
    check_triangle(load_graphs("TOY", tmp_path / "source"))


class Hostile:
    """Its pickle makes a file when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("zipped", [False, True])
def test_a_pickle_beside_the_raw_files_is_never_loaded(zipped: bool, tmp_path: Path) -> None:
    written(tmp_path / "sets", "TOY")
    (tmp_path / "sets" / "TOY" / "processed").mkdir()
    for name in ("data.pt", "pre_transform.pt", "pre_filter.pt"):
        torch.save(Hostile(tmp_path / "ran"), tmp_path / "sets" / "TOY" / "processed" / name)
    if zipped:
        with zipfile.ZipFile(tmp_path / "TOY.zip", "w") as archive:
            for path in (tmp_path / "sets").rglob("*.*"):
                archive.write(path, path.relative_to(tmp_path / "sets"))
    check_triangle(load_graphs("TOY", tmp_path if zipped else tmp_path / "sets"))
    assert not (tmp_path / "ran").exists()
    torch.load(tmp_path / "sets" / "TOY" / "processed" / "data.pt", weights_only=False)
    assert (tmp_path / "ran").exists()  # the pickle does run code where it is loaded


def test_a_zip_of_the_tu_collection_is_read_without_a_folder_raw(tmp_path: Path) -> None:
    written(tmp_path / "source", "TOY")
    with zipfile.ZipFile(tmp_path / "TOY.zip", "w") as archive:
        for path in (tmp_path / "source").rglob("*.txt"):
            archive.write(path, f"TOY/{path.name}")
    check_triangle(load_graphs("TOY", tmp_path))


def test_fractional_targets_are_not_truncated_to_classes(tmp_path: Path) -> None:
    written(tmp_path, "TOY")
    (tmp_path / "TOY" / "raw" / "TOY_graph_attributes.txt").write_text("0.2\n0.9\n")
    with pytest.warns(UserWarning, match="TOY has targets that are not classes of graphs: it is read without labels"):
        assert load_graphs("TOY", tmp_path).labels.tolist() == [-1, -1]


def test_a_folder_without_the_edges_is_refused(tmp_path: Path) -> None:
    (tmp_path / "TOY" / "raw").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"TOY has no TOY_A.txt, the edges of a TU set: copy or download"):
        load_graphs("TOY", tmp_path)


def test_packed_bits_are_unpacked(tmp_path: Path) -> None:
    # A triangle of 3 and a node with a loop: upper triangles, diagonals included.
    bits = [0, 1, 1, 0, 1, 0, 1]
    packed = {"num_nodes": np.array([3, 1]), "labels": np.array([1, 3]), "triu_bits": np.packbits(bits)}
    np.savez(tmp_path / "TOY.npz", **packed)
    graphs = load_graphs("TOY", tmp_path)
    assert graphs.labels.tolist() == [0, 1]
    edges = sorted(graphs.edge_index.T.tolist())
    assert edges == [[0, 1], [0, 2], [1, 0], [1, 2], [2, 0], [2, 1], [3, 3]]


PACKED = {"num_nodes": np.array([3, 1]), "labels": np.array([1, 3]), "triu_bits": np.packbits([0, 1, 1, 0, 1, 0, 1])}


@pytest.mark.parametrize(
    "changed",
    [
        *({"without": key} for key in PACKED),
        {"labels": np.array([1])},
        {"triu_bits": PACKED["triu_bits"][:0]},
        {"num_nodes": np.array([], np.int64)},
        {"num_nodes": np.array([3, -1])},
        {"num_nodes": np.array([2**40, 1])},
        {"num_nodes": np.array(["a", "b"])},
        {"num_nodes": np.array([None, 1])},
    ],
)
def test_a_malformed_packed_set_is_refused(changed: dict[str, Any], tmp_path: Path) -> None:
    arrays = {**PACKED, **changed}
    arrays.pop(arrays.pop("without", ""), None)
    np.savez(tmp_path / "TOY.npz", **arrays)
    with pytest.raises(ValueError, match=r"TOY.npz cannot be read .*: copy or download the set again$"):
        load_graphs("TOY", tmp_path)


@pytest.mark.parametrize("suffix", ["zip", "npz"])
@pytest.mark.parametrize("kept", [0, 10, 300, -30])
def test_a_broken_archive_is_refused(suffix: str, kept: int, tmp_path: Path) -> None:
    file = tmp_path / f"TOY.{suffix}"
    np.savez(tmp_path / "TOY.npz", **PACKED)
    file.write_bytes((tmp_path / "TOY.npz").read_bytes()[:kept])
    if suffix == "zip":
        (tmp_path / "TOY.npz").unlink()
    with pytest.raises(ValueError, match=rf"TOY.{suffix} cannot be read .*: copy or download the set again$"):
        load_graphs("TOY", tmp_path)


@pytest.mark.parametrize(("part", "text"), [("A", "1, x\n"), ("graph_indicator", ""), ("node_labels", "0\n")])
def test_malformed_text_of_a_set_is_refused(part: str, text: str, tmp_path: Path) -> None:
    written(tmp_path, "TOY")
    (tmp_path / "TOY" / "raw" / f"TOY_{part}.txt").write_text(text)
    with pytest.raises(ValueError, match=r"raw cannot be read .*: copy or download the set again$"):
        load_graphs("TOY", tmp_path)


def test_a_missing_set_is_refused_with_those_there_are(tmp_path: Path) -> None:
    written(tmp_path, "TOY")
    with pytest.raises(FileNotFoundError, match=r"which has TOY: check the name"):
        load_graphs("MUTAG", tmp_path)


def test_pyg_is_imported_at_first_use() -> None:
    modules = "hardneg.graphs.data, hardneg.graphs.views, hardneg.graphs.gin, hardneg.evaluation.svm"
    check = f"import sys, {modules}, hardneg.losses.jsd; print({{'torch_geometric', 'sklearn'}} & set(sys.modules))"
    done = children.run([sys.executable, "-c", check], check=True)
    assert done.stdout.strip() == "set()"


def test_a_missing_package_names_the_extra() -> None:
    with pytest.raises(ImportError, match=r'pip install "hardneg\[graph\]"'):
        required("torch_geometric.no_such_part", "graph")


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"x": torch.ones(3)}, "x must have shape"),
        ({"ptr": torch.tensor([0, 2])}, "ptr must rise"),
        ({"edge_index": torch.tensor([[0], [2]])}, "must join nodes of one graph"),
        ({"edge_index": torch.tensor([[2, 0], [2, 0]])}, "graph after graph"),
        ({"edge_index": torch.tensor([[0], [5]])}, "edge_index must hold indices"),
        ({"labels": torch.tensor([0, -2])}, "labels must be"),
        ({"edge_attr": torch.ones(2)}, "edge_attr must have 1 rows"),
        ({"node_attributes": {"pos": torch.ones(2, 3)}}, "pos must have 3 rows"),
    ],
)
def test_malformed_tensors_are_refused_by_argument(parts: dict[str, Any], message: str) -> None:
    good = {"x": torch.ones(3, 1), "edge_index": torch.tensor([[0], [1]]), "ptr": torch.tensor([0, 2, 3])}
    with pytest.raises(ValueError, match=message):
        GraphSet(**{**good, **parts})


@needs_data
@pytest.mark.parametrize(
    ("name", "count", "classes", "features"),
    [("MUTAG", 188, [63, 125], 7), ("PTC_MR", 344, [192, 152], 18), ("IMDB-BINARY", 1000, [500, 500], 136)],
)
def test_tu_sets_have_the_published_counts(name: str, count: int, classes: list[int], features: int) -> None:
    graphs = load_graphs(name)
    assert len(graphs) == count
    assert graphs.labels.bincount().tolist() == classes
    assert graphs.node_features == features


@needs_data
@pytest.mark.parametrize(("name", "attributes"), [("MUTAG", False), ("ENZYMES", True), ("IMDB-BINARY", False)])
def test_raw_files_are_read_as_pyg_reads_them(name: str, attributes: bool, tmp_path: Path) -> None:
    from torch_geometric.datasets import TUDataset

    zipfile.ZipFile(TU / f"{name}.zip").extractall(tmp_path)
    theirs = TUDataset(str(tmp_path), name, use_node_attr=attributes)
    ours = load_graphs(name, attributes=attributes)
    assert len(ours) == len(theirs)
    for number, graph in enumerate(theirs):
        assert_close(ours[number].edge_index, graph.edge_index)
        assert ours[number].num_nodes == graph.num_nodes
        assert int(ours[number].y) == int(graph.y)
        if graph.x is not None:
            assert_close(ours[number].x, graph.x)
        if graph.edge_attr is not None:
            assert_close(ours[number].edge_attr, graph.edge_attr)
