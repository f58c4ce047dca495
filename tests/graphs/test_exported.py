"""An exported graph encoder gives the features that the encoder gives for PyG batches of any size."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

pytest.importorskip("torch_geometric", reason='needs pip install "hardneg[graph]"')

from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, global_mean_pool

from hardneg.export import SUFFIXES, export, export_run, read_info
from hardneg.graphs.data import GraphSet
from hardneg.graphs.exported import GraphTensors
from hardneg.graphs.gin import GIN
from hardneg.training import recipe, run


def graphs() -> GraphSet:
    draws = torch.Generator().manual_seed(0)
    made = []
    for number in range(24):
        size = 1 + number % 7
        pairs = torch.rand(size, size, generator=draws).triu(1).gt(0.4).nonzero().T  # (2, P), none for one node
        edges = torch.cat([pairs, pairs.flip(0)], dim=1)
        made.append(Data(x=torch.randn(size, 3, generator=draws), edge_index=edges, y=number % 2))
    return GraphSet.of(made)


def loaded(file: Path) -> Any:
    """The program of a file, called with tensors by name."""
    if file.suffix == ".onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        names = [entry.name for entry in session.get_inputs()]
        return lambda **given: torch.from_numpy(
            session.run(["features"], {name: given[name].numpy() for name in names})[0]
        )
    return torch.jit.load(str(file)) if file.suffix == ".pt" else torch.export.load(str(file)).module()  # type: ignore[no-untyped-call]


def check(file: Path, encoder: nn.Module, samples: GraphSet) -> None:
    program = loaded(file)
    encoder.eval()
    for index in ([0], [5], [0, 1], [7, 0, 14], list(range(24))):  # 0, 7 and 14 have one node and no edges
        batch = samples.batch(torch.tensor(index))
        with torch.no_grad():
            expected = encoder(batch)
            found = program(x=batch.x, edge_index=batch.edge_index, batch=batch.batch, sizes=batch.ptr.diff())
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("format", ["torchscript", "torch_export", "onnx"])
def test_a_gin_is_exported_for_batches_of_any_size(format: str, tmp_path: Path) -> None:
    encoder = GIN(3, width=8, layers=2)
    encoder(graphs().batch(torch.arange(24)))  # running statistics that are not those of a fresh network
    file = export(GraphTensors(encoder, 3), None, tmp_path / "encoder", format)  # type: ignore[arg-type]
    check(file, encoder, graphs())
    shapes = {"x": ["nodes", 3], "edge_index": [2, "edges"], "batch": ["nodes"], "sizes": ["graphs"]}
    assert json.loads(read_info(file)["shape"]) == shapes


class Own(nn.Module):
    """An encoder as users write them."""

    features = 5

    def __init__(self) -> None:
        super().__init__()
        self.convolution = GCNConv(3, 5)

    def forward(self, batch: Any) -> Tensor:
        nodes = self.convolution(batch.x, batch.edge_index).relu()
        return global_mean_pool(nodes, batch.batch, batch.num_graphs)  # type: ignore[no-any-return]


class Weighted(Own):
    def forward(self, batch: Any) -> Tensor:
        return super().forward(batch) * batch.edge_attr.sum()


def test_an_own_encoder_is_exported_and_one_that_needs_more_is_refused(tmp_path: Path) -> None:
    encoder = Own()
    check(export(GraphTensors(encoder, 3), None, tmp_path / "own", "onnx"), encoder, graphs())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"needs more than x, edge_index, batch, ptr and num_graphs .*edge_attr"):
        export(GraphTensors(Weighted(), 3), None, tmp_path / "weighted")  # type: ignore[arg-type]
    assert [file.name for file in tmp_path.iterdir()] == ["own.onnx"]


def test_a_graph_run_is_exported_in_every_format(tmp_path: Path) -> None:
    samples = graphs()
    owner = torch.repeat_interleave(torch.arange(len(samples)), samples.ptr.diff())
    arrays = {"x": samples.x, "edge_index": samples.edge_index, "batch": owner, "y": samples.labels}
    np.savez(tmp_path / "mine.npz", **{name: tensor.numpy() for name, tensor in arrays.items()})
    changed = [f"data.source={tmp_path / 'mine.npz'}", "trainer.epochs=1", "trainer.batch_size=8"]
    trained = run.train(recipe.load(recipe.find("mutag-infograph"), changed), tmp_path / "run")
    for format, suffix in SUFFIXES.items():
        file, difference = export_run(tmp_path / "run", format)
        assert (file.suffix, difference < 1e-3) == (suffix, True)
        metadata = read_info(file)
        assert (metadata["features"], "recipe" in metadata, "mean" in metadata) == ("96", True, False)
        if format != "safetensors":
            check(file, trained.encoder.cpu(), samples)
    written, own = (load_file(tmp_path / "run" / f"{name}.safetensors") for name in ("exported", "encoder"))
    assert {name: tensor.tolist() for name, tensor in written.items()} == {
        name.removeprefix("encoder."): tensor.tolist() for name, tensor in own.items()
    }
