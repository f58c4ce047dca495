"""A batch cut from a set is the one PyG collates, and every graph keeps its number; TU files are read as they lie."""

import os
import pickle
import sys
import zipfile
from pathlib import Path

import children
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

pytest.importorskip("torch_geometric", reason='needs pip install "hardneg[graph]"')

from torch_geometric.data import Data
from torch_geometric.loader import DataLoader

import hardneg as hn
from hardneg.data import graphs as module
from hardneg.data.graphs import GraphSet, load_graphs

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


def test_a_batch_can_be_taken_apart() -> None:
    graphs = GraphSet.of(drawn([3, 0, 5, 1]))
    for graph in graphs.batch(torch.tensor([2, 1, 0])).to_data_list():
        original = graphs[int(graph.index)]
        assert_close(graph.x, original.x)
        assert_close(graph.edge_index, original.edge_index)


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


def test_a_graph_survives_the_way_to_another_process() -> None:
    graph = pickle.loads(pickle.dumps(GraphSet.of(drawn([4]))[0]))
    assert type(graph) is module.IndexedGraph
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


def test_graphs_without_labels_are_unknown() -> None:
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


def test_raw_files_and_a_zip_of_them_are_one_set(tmp_path: Path) -> None:
    written(tmp_path / "source", "TOY")
    (tmp_path / "zipped").mkdir()
    with zipfile.ZipFile(tmp_path / "zipped" / "TOY.zip", "w") as archive:
        for path in (tmp_path / "source").rglob("*.txt"):
            archive.write(path, path.relative_to(tmp_path / "source"))
    check_triangle(load_graphs("TOY", tmp_path / "zipped"))
    assert [path.name for path in (tmp_path / "zipped").iterdir()] == ["TOY.zip"]  # nothing is left there
    check_triangle(load_graphs("TOY", tmp_path / "source"))


def test_packed_bits_are_unpacked(tmp_path: Path) -> None:
    # A triangle of 3 and a node with a loop: upper triangles, diagonals included.
    bits = [0, 1, 1, 0, 1, 0, 1]
    packed = {"num_nodes": np.array([3, 1]), "labels": np.array([1, 3]), "triu_bits": np.packbits(bits)}
    np.savez(tmp_path / "TOY.npz", **packed)
    graphs = load_graphs("TOY", tmp_path)
    assert graphs.labels.tolist() == [0, 1]
    edges = sorted(graphs.edge_index.T.tolist())
    assert edges == [[0, 1], [0, 2], [1, 0], [1, 2], [2, 0], [2, 1], [3, 3]]


def test_a_set_that_is_not_there_says_what_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, "TOY")
    with pytest.raises(FileNotFoundError, match=r"which has TOY: check the name"):
        load_graphs("MUTAG", tmp_path)
    monkeypatch.delenv("HARDNEG_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match="set HARDNEG_DATA"):
        load_graphs("MUTAG")


def test_nothing_is_imported_before_it_is_used() -> None:
    modules = "hardneg.data.graphs, hardneg.views.graphs, hardneg.encoders.gin, hardneg.evaluation.svm"
    check = f"import sys, {modules}, hardneg.objectives.jsd; print({{'torch_geometric', 'sklearn'}} & set(sys.modules))"
    done = children.run([sys.executable, "-c", check], check=True)
    assert done.stdout.strip() == "set()"


def test_a_missing_package_names_the_extra() -> None:
    with pytest.raises(ImportError, match=r'pip install "hardneg\[graph\]"'):
        module.geometric("torch_geometric.no_such_part")


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"x": torch.ones(3)}, "x must have shape"),
        ({"ptr": torch.tensor([0, 2])}, "ptr must rise"),
        ({"edge_index": torch.tensor([[0], [2]])}, "must join nodes of one graph"),
        ({"edge_index": torch.tensor([[2, 0], [2, 0]])}, "graph after graph"),
        ({"edge_index": torch.tensor([[0], [5]])}, "edge_index must hold indices"),
        ({"labels": torch.tensor([0, -2])}, "labels must be"),
    ],
)
def test_bad_parts_name_the_argument(parts: dict[str, Tensor], message: str) -> None:
    good = {"x": torch.ones(3, 1), "edge_index": torch.tensor([[0], [1]]), "ptr": torch.tensor([0, 2, 3])}
    with pytest.raises(ValueError, match=message):
        GraphSet(**{**good, **parts})


@needs_data
@pytest.mark.parametrize(
    ("name", "count", "classes", "features"),
    [("MUTAG", 188, [63, 125], 7), ("PTC_MR", 344, [192, 152], 18), ("IMDB-BINARY", 1000, [500, 500], 136)],
)
def test_real_sets_have_their_known_counts(name: str, count: int, classes: list[int], features: int) -> None:
    graphs = load_graphs(name)
    assert len(graphs) == count
    assert graphs.labels.bincount().tolist() == classes
    assert graphs.node_features == features
