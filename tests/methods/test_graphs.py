"""GraphCL and InfoGraph compute the losses of their papers, learn, and take batches of graphs or of indices."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import children
import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

pytest.importorskip("torch_geometric", reason='needs pip install "hardneg[graph]"')

from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader

import hardneg as hn
from hardneg.evaluation.svm import svm_accuracy
from hardneg.graphs.data import GraphSet, load_graphs
from hardneg.graphs.features import extract_graphs
from hardneg.graphs.gin import GIN, Discriminator
from hardneg.graphs.views import GraphViews
from hardneg.losses.jsd import JSD
from hardneg.methods.graphcl import GraphCL, graph_projection
from hardneg.methods.infograph import InfoGraph
from hardneg.methods.method import Method
from hardneg.randomness import generator
from hardneg.samplers import UniformBatchSampler
from hardneg.training.batches import Batches
from hardneg.training.callbacks.sampler_refresh import Refresh


def paths_and_stars(count: int = 24) -> GraphSet:
    """Two classes of graphs with the same number of edges; all nodes have the same features."""
    graphs = []
    for number in range(count):
        size = 5 + number // 2 % 4
        others = torch.arange(1, size)
        pairs = torch.stack([torch.zeros_like(others) if number % 2 else others - 1, others])
        edges = torch.cat([pairs, pairs.flip(0)], dim=1)
        graphs.append(Data(x=torch.ones(size, 1), edge_index=edges, y=torch.tensor([number % 2])))
    return GraphSet.of(graphs)


def in_float64(graphs: GraphSet) -> GraphSet:
    return GraphSet(graphs.x.double(), graphs.edge_index, graphs.ptr, graphs.labels)


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), 1e-2)


def make_method(kind: str, objective: Any = None, seed: int = 0) -> Method:
    torch.manual_seed(seed)
    encoder = GIN(1, width=8, layers=2)
    if kind == "graphcl":
        head = graph_projection(16)
        return GraphCL(encoder, head, objective or hn.graphcl(), GraphViews(), adam, seed=seed)
    return InfoGraph(encoder, Discriminator(16), Discriminator(16), objective or JSD(1.0), adam, seed=seed)


def trainer(**options: Any) -> L.Trainer:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return L.Trainer(accelerator="cpu", **{"max_epochs": 1, **quiet, **options})


class FakeTrainer:
    """The attributes of a trainer that a method reads."""

    global_step, world_size = 0, 1

    @property
    def fit_loop(self) -> SimpleNamespace:
        return SimpleNamespace(total_batch_idx=self.global_step)


def with_trainer(module: Method) -> Method:
    module._trainer = FakeTrainer()  # type: ignore[assignment]
    module.total_steps = 10
    return module.train()


def test_graphcl_is_the_authors_loss_of_two_views() -> None:
    module, batch = with_trainer(make_method("graphcl")), paths_and_stars().batch(torch.arange(6))
    loss = module.training_step(batch, 0)
    seen = module.views(batch, generator("cpu", 0, 0))
    z1, z2 = nn.functional.normalize(module.head(module.encoder(seen))).chunk(2)
    scores = (z1 @ z2.T / 0.2).exp()
    own = scores.diagonal()
    assert_close(loss, -(own / (scores.sum(dim=1) - own)).log().mean())


def test_infograph_is_the_loss_of_its_nodes_and_graphs() -> None:
    module, batch = with_trainer(make_method("infograph", JSD())), paths_and_stars().batch(torch.arange(6))
    assert isinstance(module, InfoGraph)
    loss = module.training_step(batch, 0)
    nodes = module.encoder.nodes(batch)
    graphs = torch.stack([nodes[batch.batch == graph].sum(dim=0) for graph in range(6)])
    scores = module.node_head(nodes) @ module.head(graphs).T
    own = nn.functional.one_hot(batch.batch, 6).bool()
    sp = nn.functional.softplus
    assert_close(loss, sp(-scores[own]).mean() + sp(scores[~own]).mean())


class WithoutHops(GIN):
    """A GIN without the attribute ``hops``."""

    def __init__(self) -> None:
        super().__init__(1, width=8, layers=2)
        del self.hops


@pytest.mark.parametrize("objective", [JSD(), JSD(2.0, 0.1), JSD(1.0, supervision="full"), JSD(1.0, published=True)])
def test_infograph_compares_equivalent_nodes_once_with_the_same_gradient(objective: JSD) -> None:
    graphs, found = in_float64(paths_and_stars()), []
    for hops in (None, 2):
        module = with_trainer(make_method("infograph", objective)).double()
        sizes: list[int] = []
        assert isinstance(module, InfoGraph)
        module.node_head.register_forward_pre_hook(lambda _, inputs, sizes=sizes: sizes.append(len(inputs[0])))
        module.training_step(graphs.batch(torch.arange(12), hops), 0).backward()
        found.append(([each.grad for each in module.parameters()], objective.diagnostics(), sizes[0]))
    for plain, once in zip(found[0][0], found[1][0], strict=True):
        assert_close(plain, once, rtol=1e-9, atol=1e-9)
    assert found[0][1] == pytest.approx(found[1][1])
    # Within two hops a path has three kinds of nodes and a star has two.
    assert [size for *_, size in found] == [2 * (5 + 6 + 7 + 8 + 5 + 6), 6 * (3 + 2)]


def test_an_encoder_without_hops_embeds_every_node() -> None:
    graphs, module = paths_and_stars(), with_trainer(make_method("infograph"))
    module.samples = graphs
    assert module.look_up(torch.arange(4)).equivalent_index is not None
    module.encoder = WithoutHops()
    assert getattr(module.look_up(torch.arange(4)), "equivalent_index", None) is None
    assert module.training_step(torch.arange(4), 0).isfinite()


@pytest.mark.parametrize("kind", ["graphcl", "infograph"])
def test_indices_and_batches_train_to_the_same_encoder(kind: str) -> None:
    graphs, results = in_float64(paths_and_stars()), []
    for indexed in (False, True):
        # Equivalent nodes are added in another order, and Adam amplifies gradients that are 0 but for rounding.
        module, sampler = make_method(kind).double(), UniformBatchSampler(len(graphs), 8, seed=1)
        if indexed:
            module.samples = graphs
            trainer(max_epochs=2).fit(module, Batches(sampler))
        else:
            trainer(max_epochs=2).fit(module, DataLoader(graphs, batch_sampler=sampler))
        results.append(extract_graphs(module.encoder, graphs))
    assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["graphcl", "infograph"])
def test_training_lowers_the_loss(kind: str) -> None:
    graphs, module = paths_and_stars(), make_method(kind)
    with_trainer(module)
    batch, optimizer, losses = graphs.batch(torch.arange(24)), adam(module), []
    for step in range(30):
        module._trainer.global_step = step % 10  # type: ignore[misc]
        loss = module.training_step(batch, 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < sum(losses[:5])


def test_the_proximity_sampler_is_refreshed_during_training() -> None:
    graphs, module = paths_and_stars(), make_method("graphcl", hn.hcl(temperature=0.2, in_batch="other"))
    sampler = hn.ProximityBatchSampler(24, 8, candidates=10, neighbors=4, restart=hn.Linear(0.2, 0.05), refresh_every=2)
    module.samples = graphs
    callbacks = [Refresh(sampler, lambda: extract_graphs(module.encoder, graphs))]
    trainer(max_epochs=2, callbacks=callbacks).fit(module, Batches(sampler))
    assert sampler.refreshes == 3


@pytest.mark.parametrize("kind", ["graphcl", "infograph"])
def test_embeddings_of_a_batch_are_kept_until_the_memory_update(kind: str) -> None:
    module = with_trainer(make_method(kind))
    module.recent = hn.MemoryBank(24, 16, momentum=0.0)
    index = torch.tensor([3, 1, 20])
    module.training_step(paths_and_stars().batch(index), 0)
    assert module.noted is not None
    assert module.noted[0].tolist() == [3, 1, 20]
    noted = module.noted[1]
    assert module.diagnostics()["support"] == 2
    module.update_memory()
    assert_close(module.recent[index], nn.functional.normalize(noted))


@pytest.mark.parametrize(
    ("kind", "objective"),
    [("graphcl", lambda: hn.scl(temperature=0.2)), ("infograph", lambda: JSD(1.0, supervision="negatives"))],
)
def test_labels_are_passed_to_an_objective_that_uses_them(kind: str, objective: Callable[[], Any]) -> None:
    module = with_trainer(make_method(kind, objective()))
    batch = paths_and_stars().batch(torch.arange(6))
    module.training_step(batch, 0)
    assert module.diagnostics()["support"] == (3 if kind == "infograph" else 6)  # of another label
    del batch.y
    with pytest.raises(ValueError, match="needs labels, and the batch has no y"):
        module.training_step(batch, 0)


def test_extracting_features_restores_the_mode_of_every_module() -> None:
    module = make_method("infograph").train()
    module.encoder.layers[0].eval()
    before: Tensor = extract_graphs(module.encoder, paths_and_stars())
    assert module.encoder.layers[1].training
    assert not module.encoder.layers[0].training
    assert_close(extract_graphs(module.encoder, paths_and_stars(), batch_size=5), before)


def test_batches_and_encoders_that_do_not_fit_are_refused() -> None:
    graphs = paths_and_stars()
    with pytest.raises(ValueError, match=r"set module.samples"):
        with_trainer(make_method("graphcl")).training_step(torch.arange(3), 0)
    plain = Data(x=torch.ones(2, 1), edge_index=torch.zeros(2, 0, dtype=torch.int64))
    (batch,) = DataLoader([plain, plain], batch_size=2)
    with pytest.raises(ValueError, match="has no index"):
        with_trainer(make_method("graphcl")).training_step(batch, 0)
    with pytest.raises(ValueError, match="encoder has no nodes"):
        InfoGraph(nn.Linear(1, 1), nn.Identity(), nn.Identity(), JSD(), adam)
    assert len(graphs) == 24


@pytest.mark.parametrize("kind", ["graphcl", "infograph"])
def test_a_batch_of_one_graph_has_zero_gradient(kind: str) -> None:
    module = with_trainer(make_method(kind))
    loss = module.training_step(paths_and_stars().batch(torch.tensor([4])), 0)
    loss.backward()
    assert loss.item() == 0
    assert all(weight.grad is None or not weight.grad.any() for weight in module.parameters())


@pytest.mark.parametrize("odd", [[0, 1, 3], [0, 0], [1, 1], [3, 3]])
@pytest.mark.parametrize("kind", ["graphcl", "infograph"])
def test_empty_and_edgeless_graphs_are_trained_on(kind: str, odd: list[int]) -> None:
    """Graphs without nodes, of a single one, or without edges, beside an ordinary one."""
    graphs = GraphSet.of(
        [Data(x=torch.ones(size, 1), edge_index=torch.zeros(2, 0, dtype=torch.int64)) for size in odd]
        + [Data(x=torch.ones(3, 1), edge_index=torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]))]
    )
    module = with_trainer(make_method(kind))
    module.samples = graphs
    for step, index in enumerate([torch.arange(len(graphs)), torch.arange(len(graphs)).flip(0)]):
        module._trainer.global_step = step  # type: ignore[misc]
        module.zero_grad()
        loss = module.training_step(index, step)
        loss.backward()
        assert loss.isfinite()
        assert all(weight.grad is None or weight.grad.isfinite().all() for weight in module.parameters())
    embedded = extract_graphs(module.encoder, graphs)
    assert embedded.isfinite().all()
    assert not embedded[: len(odd)][torch.tensor(odd) == 0].any()  # an empty sum


@pytest.mark.parametrize("kind", ["graphcl", "infograph"])
def test_a_batch_without_any_node_is_refused(kind: str) -> None:
    empty = Data(x=torch.ones(0, 1), edge_index=torch.zeros(2, 0, dtype=torch.int64))
    module = with_trainer(make_method(kind))
    module.samples = GraphSet.of([empty, empty])
    with pytest.raises(ValueError, match="batch has 0 nodes"):
        module.training_step(torch.arange(2), 0)


TWO = """
import sys
from methods.gradients import FirstStep
from methods.test_graphs import paths_and_stars
from hardneg.training import recipe, run
folder, *overrides = sys.argv[1:]
run.train(recipe.load({}, overrides), folder, callbacks=[FirstStep(folder)], data=paths_and_stars(24))
"""


def environment() -> dict[str, str]:
    folders = Path(__file__).parents[1], Path(hn.__file__).parents[1]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_graphcl_in_two_processes_compares_all_graphs_of_both_with_views_of_their_own(tmp_path: Path) -> None:
    script = tmp_path / "two.py"
    script.write_text(TWO)
    overrides = ["method=graphcl", "objective.preset=graphcl", "trainer.devices=2", "trainer.accelerator=cpu",
                 "trainer.batch_size=24", "trainer.epochs=2", "encoder.options={width: 8, layers: 2}",
                 "views.options.second=drop_nodes"]  # fmt: skip
    children.run([sys.executable, str(script), str(tmp_path / "run"), *overrides], check=True, env=environment())
    first, second = (torch.load(tmp_path / f"run.{rank}", weights_only=True) for rank in (0, 1))
    assert first["support"] == second["support"] == 23  # of 24 graphs, of which a process holds 12

    # The gradient of one loss over the views of both processes; batch-norm acts within each.
    module = make_method("graphcl")
    module.load_state_dict(first["weights"])
    outputs = []
    for found in (first, second):
        views = Batch(**found["views"])
        views._num_graphs = 24
        outputs.append(module.head(module.encoder(views)).chunk(2))
    loss = hn.graphcl()(*(torch.cat(parts) for parts in zip(*outputs, strict=True)))
    loss.backward()
    for name, weight in module.named_parameters():
        assert_close(first["gradients"][name], weight.grad, rtol=1e-4, atol=1e-5)
        assert torch.equal(first["gradients"][name], second["gradients"][name])


@pytest.mark.slow
def test_infograph_in_two_processes_compares_nodes_with_the_graphs_of_both(tmp_path: Path) -> None:
    script = tmp_path / "two.py"
    script.write_text(TWO.replace("callbacks=[FirstStep(folder)], ", ""))
    overrides = ["method=infograph", "objective.preset=infograph", "trainer.devices=2", "trainer.accelerator=cpu",
                 "trainer.batch_size=24", "trainer.epochs=2", "encoder.options={width: 8, layers: 2}"]  # fmt: skip
    children.run([sys.executable, str(script), str(tmp_path / "run"), *overrides], check=True, env=environment())
    first, last = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert first["objective"]["support"] == last["objective"]["support"] == 23  # of 24 graphs, 12 in each process
    assert last["loss"] < first["loss"]


def test_processes_draw_different_views_of_equal_graphs() -> None:
    batch = paths_and_stars().batch(torch.zeros(6, dtype=torch.int64))
    views = GraphViews("identity", "drop_nodes", ratio=0.5)
    one, again, other = (views(batch, generator("cpu", 0, 3), first=first, total=12).edge_index for first in (0, 0, 6))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("HARDNEG_DATA"), reason="set HARDNEG_DATA to a folder with tu/")
@pytest.mark.parametrize("kind", ["graphcl", "infograph"])
def test_mutag_is_classified_well_above_its_larger_class(kind: str) -> None:
    graphs = load_graphs("MUTAG")
    torch.manual_seed(0)
    encoder = GIN(graphs.node_features)
    if kind == "graphcl":
        module: Method = GraphCL(encoder, graph_projection(96), hn.graphcl(), GraphViews(), adam)
    else:
        module = InfoGraph(encoder, Discriminator(96), Discriminator(96), JSD(1.0), adam)
    module.samples = graphs
    trainer(max_epochs=20).fit(module, Batches(UniformBatchSampler(len(graphs), 64, seed=0)))
    assert svm_accuracy(extract_graphs(module.encoder, graphs), graphs.labels).mean > 0.8  # the larger class is 0.665
