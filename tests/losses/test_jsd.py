"""JSD is the formula of METHODS section 5 for any tiling; published=True is that of the published code."""

import copy
import math
from pathlib import Path
from typing import Any

import children
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from losses import jsd_processes
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hardneg as hn
from hardneg.losses.jsd import JSD

SUPERVISION = ("none", "positives", "negatives", "full")


def softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def loop(
    nodes: Tensor,
    graphs: Tensor,
    batch: Tensor,
    beta: float = 0.0,
    prior: float = 0.0,
    reach: float | None = 2.0,
    labels: Tensor | None = None,
    supervision: str = "none",
) -> float:
    """METHODS section 5, one node and one graph at a time."""
    scores = [[float(node @ graph) for graph in graphs.double()] for node in nodes.double()]
    groups: list[tuple[list[int], list[int]]] = []
    for own in batch.tolist():
        same = {own}
        if labels is not None and int(labels[own]) >= 0:
            same |= {g for g in range(len(graphs)) if int(labels[g]) == int(labels[own])}
        positives = sorted(same) if supervision in ("positives", "full") else [own]
        excluded = same if supervision in ("negatives", "full") else {own}
        groups.append((positives, [g for g in range(len(graphs)) if g not in excluded]))
    sizes = [abs(scores[u][g]) for u, (_, negatives) in enumerate(groups) for g in negatives]
    unit = 1.0 if reach is None or not sizes or max(sizes) == 0 else reach / max(sizes)

    def expected(row: list[float], chosen: list[int]) -> float:
        top = max(beta * unit * row[g] for g in chosen)
        weights = [math.exp(beta * unit * row[g] - top) for g in chosen]
        return sum(w * softplus(row[g]) for w, g in zip(weights, chosen, strict=True)) / sum(weights)

    losses = []
    for row, (positives, negatives) in zip(scores, groups, strict=True):
        if negatives:
            attraction = sum(softplus(-row[g]) for g in positives) / len(positives)
            repulsion = (expected(row, negatives) - prior * expected(row, positives)) / (1 - prior)
            losses.append(attraction + repulsion)
    return sum(losses) / len(losses) if losses else 0.0


def published_loop(nodes: Tensor, graphs: Tensor, batch: Tensor, beta: float) -> float:
    """The sum of the published code: all pairs, the masked ones with score 0, τ⁺ = 1/2."""
    count, total = len(graphs), 0.0
    scores = (nodes.double() @ graphs.double().T).tolist()
    for own, row in zip(batch.tolist(), scores, strict=True):
        row[own], row_own = 0.0, row[own]
        row.append(row_own)
    largest = max(abs(score) for row in scores for score in row[:count])
    for own, row in zip(batch.tolist(), scores, strict=True):
        for g in range(count):
            p = row[count] if g == own else 0.0
            total -= math.log(2) - softplus(-p) - softplus(p)
        weights = [math.exp(-2 * beta * score / largest) for score in row[:count]]
        for weight, score in zip(weights, row[:count], strict=True):
            if beta == 0:
                total += 2 * (softplus(score) - math.log(2)) / (count - 1)
            else:
                total += (2 * weight / (sum(weights) / count) * softplus(score) - math.log(2)) / (count - 1)
    return total / len(nodes)


def problem(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Five graphs of 4, 1, 0, 5 and 3 nodes; two share a label and one label is unknown."""
    draws = torch.Generator().manual_seed(seed)
    batch = torch.repeat_interleave(torch.arange(5), torch.tensor([4, 1, 0, 5, 3]))
    nodes, graphs = (torch.randn(size, 6, generator=draws, dtype=dtype) for size in (13, 5))
    return nodes, graphs, batch, torch.tensor([1, 0, 1, -1, 0])


@pytest.mark.parametrize("supervision", SUPERVISION)
@pytest.mark.parametrize("beta", [0.0, 1.0, 10.0])
@pytest.mark.parametrize("prior", [0.0, 0.1])
@pytest.mark.parametrize("reach", [2.0, None])
def test_the_loss_agrees_with_a_loop(supervision: str, beta: float, prior: float, reach: float | None) -> None:
    nodes, graphs, batch, labels = problem()
    given = None if supervision == "none" else labels
    loss = JSD(beta, prior, weight_range=reach, supervision=supervision)(nodes, graphs, batch, given)
    expected = loop(nodes, graphs, batch, beta, prior, reach, given, supervision)
    assert_close(loss, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("beta", [0.0, 1.0, 10.0])
def test_the_published_form_agrees_with_the_published_code(beta: float) -> None:
    nodes, graphs, batch, _ = problem(1)
    loss = JSD(beta, published=True)(nodes, graphs, batch)
    assert_close(loss, torch.tensor(published_loop(nodes, graphs, batch, beta), dtype=torch.float64))


@pytest.mark.parametrize("options", [{}, {"published": True}])
@pytest.mark.parametrize("tile", [1, 4, 13])
def test_tiling_changes_neither_loss_nor_gradient(options: dict[str, bool], tile: int) -> None:
    results = []
    for size in (None, tile):
        nodes, graphs, batch, _ = problem(2)
        nodes.requires_grad_(), graphs.requires_grad_()
        loss = JSD(2.0, tile=size, **options)(nodes, graphs, batch)
        loss.backward()
        results.append((loss, nodes.grad, graphs.grad))
    assert_close(results[0], results[1])


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operation returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return made


@pytest.mark.parametrize("options", [{}, {"class_prior": 0.1}, {"published": True}])
def test_no_tensor_grows_with_nodes_times_graphs(options: dict[str, Any]) -> None:
    nodes, graphs = torch.randn(3000, 2, requires_grad=True), torch.randn(50, 2, requires_grad=True)
    batch = torch.arange(3000) % 50
    with Largest() as mode:
        JSD(2.0, tile=100, **options)(nodes, graphs, batch).backward()
    assert mode.elements <= 3000 * 2  # the inputs; all scores would be 150,000


@pytest.mark.parametrize("tile", [None, 4])
@pytest.mark.parametrize("options", [{}, {"beta": 3.0, "class_prior": 0.0}, {"beta": 3.0, "class_prior": 0.2}])
@pytest.mark.parametrize("supervision", ["none", "full"])
def test_gradients_agree_with_finite_differences(tile: int | None, options: dict[str, float], supervision: str) -> None:
    nodes, graphs, batch, labels = problem(3)
    # A range would hold the largest score constant, which differences do not.
    loss = JSD(**options, weight_range=None, supervision=supervision, tile=tile)
    given = None if supervision == "none" else labels
    inputs = nodes.requires_grad_(), graphs.requires_grad_()
    assert torch.autograd.gradcheck(lambda n, g: loss(n, g, batch, given), inputs)


@pytest.mark.parametrize("supervision", SUPERVISION)
@pytest.mark.parametrize("prior", [0.0, 0.2])
@pytest.mark.parametrize("through", [True, False])
def test_gradients_agree_with_autograd_on_masked_matrices(supervision: str, prior: float, through: bool) -> None:
    nodes, graphs, batch, labels = problem(15)
    leaves = nodes.requires_grad_(), graphs.requires_grad_()
    upstream = torch.rand(13, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    loss = JSD(3.0, prior, supervision=supervision, grad_through_weights=through, reduction="none", tile=4)
    losses = loss(nodes, graphs, batch, None if supervision == "none" else labels)
    found = torch.autograd.grad((losses * upstream).sum(), leaves)

    own = torch.nn.functional.one_hot(batch, 5).bool()
    same = own | ((labels[batch][:, None] == labels) & (labels >= 0))
    positive = same if supervision in ("positives", "full") else own
    negative = ~(same if supervision in ("negatives", "full") else own)
    scores, sp = nodes @ graphs.T, torch.nn.functional.softplus
    stretch = 2 / scores[negative].abs().max().detach()

    def expected(chosen: Tensor) -> Tensor:
        weights = (3 * stretch * (scores if through else scores.detach())).masked_fill(~chosen, -torch.inf).softmax(1)
        return (weights * sp(scores)).sum(dim=1)

    repulsion = (expected(negative) - prior * expected(positive)) / (1 - prior)
    plain = (sp(-scores) * positive).sum(dim=1) / positive.sum(dim=1) + repulsion
    assert_close(losses, plain)
    assert_close(found, torch.autograd.grad((plain * upstream).sum(), leaves))


def test_the_published_gradient_includes_the_largest_score() -> None:
    nodes, graphs, batch, _ = problem(4)
    loss = JSD(2.0, published=True)
    assert torch.autograd.gradcheck(lambda n, g: loss(n, g, batch), (nodes.requires_grad_(), graphs.requires_grad_()))


def test_the_largest_score_is_a_constant_in_the_gradient() -> None:
    nodes, graphs, batch, _ = problem(5)
    scores = nodes @ graphs.T
    largest = float(scores.abs().masked_fill(torch.nn.functional.one_hot(batch, 5).bool(), 0).max())
    gradients = []
    for loss in (JSD(1.0), JSD(2.0 / largest, weight_range=None)):
        nodes.grad = None
        loss(nodes.requires_grad_(), graphs, batch).backward()
        gradients.append(nodes.grad)
    assert_close(gradients[0], gradients[1])


def test_a_large_tilt_is_the_hardest_graph() -> None:
    nodes, graphs, batch, _ = problem(6)
    scores = nodes @ graphs.T
    own = scores.gather(1, batch[:, None])[:, 0]
    hardest = scores.scatter(1, batch[:, None], -torch.inf).amax(dim=1)
    sp = torch.nn.functional.softplus
    losses = JSD(1e6, reduction="none")(nodes, graphs, batch)
    assert_close(losses, sp(-own) + sp(hardest))


def test_a_tilt_raises_the_loss_and_the_published_one_lowers_it() -> None:
    nodes, graphs, batch, _ = problem(7)
    losses = [float(JSD(beta)(nodes, graphs, batch)) for beta in (0.0, 1.0, 2.0, 10.0)]
    assert losses == sorted(losses)
    weighted = [float(JSD(beta, published=True)(nodes, graphs, batch)) for beta in (1.0, 2.0, 10.0)]
    assert weighted == sorted(weighted, reverse=True)  # it has the largest weights on the easiest graphs


def test_embeddings_overwritten_before_the_backward_pass_raise() -> None:
    nodes, graphs, batch, _ = problem(14)
    middle = nodes.requires_grad_() * 1.0
    loss = JSD(1.0)(middle, graphs, batch)
    with torch.no_grad():
        middle += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_weights_without_gradient_are_constants() -> None:
    nodes, graphs, batch, _ = problem(8)
    nodes.requires_grad_()
    JSD(3.0, weight_range=None, grad_through_weights=False)(nodes, graphs, batch).backward()
    scores = nodes.detach() @ graphs.T
    own = torch.nn.functional.one_hot(batch, 5).bool()
    weights = (3 * scores).masked_fill(own, -torch.inf).softmax(dim=1)
    derivative = torch.where(own, -torch.sigmoid(-scores), weights * torch.sigmoid(scores))
    assert_close(nodes.grad, derivative @ graphs / len(nodes))


def test_supervision_has_no_effect_if_all_labels_are_unknown_or_different() -> None:
    nodes, graphs, batch, _ = problem(9)
    plain = JSD(1.0, 0.1)(nodes, graphs, batch)
    for labels in (torch.full((5,), -1), torch.arange(5)):
        for supervision in SUPERVISION[1:]:
            assert_close(JSD(1.0, 0.1, supervision=supervision)(nodes, graphs, batch, labels), plain)


@pytest.mark.parametrize("published", [False, True])
def test_a_batch_of_one_graph_contributes_nothing(published: bool) -> None:
    nodes = torch.randn(4, 3, requires_grad=True)
    graphs = torch.randn(1, 3, requires_grad=True)
    loss = JSD(1.0, published=published)
    value = loss(nodes, graphs, torch.zeros(4, dtype=torch.int64))
    value.backward()
    assert value.item() == 0
    assert not nodes.grad.any()
    assert not graphs.grad.any()
    assert loss.diagnostics()["without_candidates"] == 4


def test_nodes_without_a_graph_of_another_label_are_not_averaged() -> None:
    nodes, graphs, batch, _ = problem(10)
    labels = torch.zeros(5, dtype=torch.int64)
    assert JSD(supervision="negatives")(nodes, graphs, batch, labels).item() == 0
    labels[3] = 1  # now each node has one
    losses = JSD(supervision="negatives", reduction="none")(nodes, graphs, batch, labels)
    assert_close(JSD(supervision="negatives")(nodes, graphs, batch, labels), losses.mean())
    assert_close(JSD(supervision="negatives", reduction="sum")(nodes, graphs, batch, labels), losses.sum())


@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(lambda sizes: sum(sizes) > 0),
    scale=st.sampled_from([0.0, 1e-30, 1e-20, 1.0, 1e3, 1e15]),
    beta=st.sampled_from([0.0, 1.0, 1e3, 1e30]),
    prior=st.sampled_from([0.0, 0.5, 0.99]),
    published=st.booleans(),
    tile=st.sampled_from([None, 1, 3]),
    equal=st.booleans(),
    supervision=st.sampled_from(SUPERVISION),
)
@example([1], 1.0, 1e3, 0.5, False, None, False, "none")  # positives without a negative to scale by
@example([3, 4, 4], 0.0, 1e30, 0.0, True, None, False, "none")  # zeros only
@example([2, 2, 1], 1e15, 1e30, 0.5, False, None, False, "full")
def test_degenerate_batches_are_finite(
    sizes: list[int],
    scale: float,
    beta: float,
    prior: float,
    published: bool,
    tile: int | None,
    equal: bool,
    supervision: str,
) -> None:
    batch = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    draws = torch.Generator().manual_seed(sum(sizes))
    nodes, graphs = (torch.randn(size, 3, generator=draws) * scale for size in (len(batch), len(sizes)))
    if equal:
        nodes, graphs = torch.full_like(nodes, scale), torch.full_like(graphs, scale)
    nodes.requires_grad_(), graphs.requires_grad_()
    if published:
        prior, supervision = 0.0, "none"
    loss = JSD(beta, prior, published=published, tile=tile, supervision=supervision)
    value = loss(nodes, graphs, batch, None if supervision == "none" else torch.arange(len(sizes)) % 2)
    value.backward()
    assert value.isfinite()
    assert nodes.grad.isfinite().all()
    assert graphs.grad.isfinite().all()
    assert all(math.isfinite(number) for number in loss.diagnostics().values())


def test_schedules_move_and_are_saved() -> None:
    nodes, graphs, batch, _ = problem(11)
    loss = JSD(beta=hn.Linear(0.0, 4.0), class_prior=hn.Linear(0.2, 0.0))
    loss.set_progress(0.5)
    assert_close(loss(nodes, graphs, batch), JSD(2.0, 0.1)(nodes, graphs, batch))
    other = JSD(beta=hn.Linear(0.0, 4.0), class_prior=hn.Linear(0.2, 0.0))
    other.load_state_dict(loss.state_dict())
    assert_close(other(nodes, graphs, batch), loss(nodes, graphs, batch))
    with pytest.raises(RuntimeError, match="call the loss first"):
        copy.deepcopy(loss).diagnostics()


def test_diagnostics_agree_with_matrices() -> None:
    nodes, graphs, batch, _ = problem(12)
    loss = JSD(5.0, weight_range=None, tile=4)
    loss(nodes, graphs, batch)
    scores = nodes @ graphs.T
    own = torch.nn.functional.one_hot(batch, 5).bool()
    weights = (5 * scores).masked_fill(own, -torch.inf).softmax(dim=1)
    report = loss.diagnostics()
    assert report["anchors"] == 13
    assert report["support"] == 4
    assert report["effective_negatives"] == pytest.approx(float((1 / weights.square().sum(dim=1)).mean()))
    assert report["positive_score"] == pytest.approx(float(scores[own].mean()))
    assert report["negative_score"] == pytest.approx(float(scores[~own].mean()))


@pytest.mark.parametrize(
    "options", [{}, {"beta": 3.0, "class_prior": 0.2}, {"supervision": "negatives"}, {"beta": 1.0, "published": True}]
)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_counts_are_the_same_as_repeated_nodes(options: dict[str, Any], reduction: str) -> None:
    nodes, graphs, batch, labels = problem(13)
    counts = torch.arange(13) % 3 + 1
    known = labels if "supervision" in options else None
    loss = JSD(**options, reduction=reduction, tile=5)
    once = loss(nodes, graphs, batch, known, counts)
    report = loss.diagnostics()
    assert_close(once, loss(nodes.repeat_interleave(counts, 0), graphs, batch.repeat_interleave(counts), known))
    assert report == pytest.approx(loss.diagnostics())
    alone = JSD(**options, reduction="none")(nodes, graphs, batch, known, counts)
    assert_close(alone, JSD(**options, reduction="none")(nodes, graphs, batch, known))


def test_diagnostics_count_nodes_whose_second_term_is_negative() -> None:
    graphs = 3 * torch.eye(2)
    loss = JSD(class_prior=0.5)
    loss(graphs, graphs, torch.arange(2))
    assert loss.diagnostics()["below_zero"] == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    nodes, graphs, batch, _ = problem(13, torch.float32)
    nodes, graphs = nodes.to(dtype), graphs.to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = JSD(2.0)(nodes, graphs, batch)
    assert loss.dtype == torch.float32
    assert_close(loss, JSD(2.0)(nodes.float(), graphs.float(), batch))


def test_invalid_settings_raise_with_the_name_of_the_argument() -> None:
    for options, message in (
        ({"beta": -1.0}, "beta must be"),
        ({"class_prior": 1.0}, "class_prior must be"),
        ({"weight_range": 0.0}, "weight_range must be"),
        ({"supervision": "negative"}, "did you mean 'negatives'"),
        ({"published": True, "class_prior": 0.1}, "leave class_prior"),
        ({"published": 1}, "published must be True or False"),
        ({"tile": 0}, "tile must be"),
        ({"beta": hn.Adaptive(step=0.1, window=2, minimum=0.1)}, "Adaptive"),
    ):
        with pytest.raises(ValueError, match=message):
            JSD(**options)


def test_invalid_inputs_raise_with_the_name_of_the_argument() -> None:
    nodes, graphs, batch, labels = problem()
    for arguments, message in (
        ((nodes[:0], graphs, batch[:0]), "nodes must have shape"),
        ((nodes, graphs[:, :5], batch), "graphs must have d = 6"),
        ((nodes, graphs, batch[:4]), "batch must have shape"),
        ((nodes, graphs, batch + 3), "batch must hold indices"),
        ((nodes, graphs, batch, labels), "supervision='none' ignores them"),
        ((nodes, graphs, batch, None, torch.ones(4).long()), "counts must have shape"),
        ((nodes, graphs, batch, None, torch.zeros(13).long()), "counts must be ≥ 1"),
        ((nodes * torch.inf, graphs, batch), "nodes holds NaN or inf"),
        ((nodes.float() * 1e20, graphs.float() * 1e20, batch), "inner products overflow"),
    ):
        with pytest.raises(ValueError, match=message):
            JSD()(*arguments)
    with pytest.raises(ValueError, match="needs labels"):
        JSD(supervision="full")(nodes, graphs, batch)


@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {"published": True}])
def test_no_argument_may_be_overwritten_before_the_backward_pass(options: dict[str, Any]) -> None:
    names = ["batch", "counts"] + ([] if "published" in options else ["labels"])
    for name in names:
        nodes, graphs = torch.randn(6, 4, requires_grad=True), torch.randn(3, 4)
        given = {
            "batch": torch.tensor([0, 0, 1, 1, 2, 2]),
            "counts": torch.tensor([1, 2, 1, 1, 1, 3]),
            "labels": torch.tensor([0, 1, 0]) if "labels" in names else None,
        }
        loss = JSD(beta=1.0, **options, supervision="full" if "labels" in names else "none")
        value = loss(nodes, graphs, **given)
        given[name].zero_()
        with pytest.raises(RuntimeError, match="inplace operation"):
            value.sum().backward()


def test_two_processes_have_the_loss_and_the_gradients_of_one(tmp_path: Path) -> None:
    children.spawn(jsd_processes.work, (tmp_path,), 2)
    for name in jsd_processes.CASES:
        whole = jsd_processes.result(name, slice(0, 12), slice(0, 5), gather=False)
        assert whole["nodes"].abs().max() > 1e-3
        for rank, (rows, graph_rows) in enumerate(jsd_processes.SHARES):
            found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)[name]
            assert_close(found["loss"], whole["loss"])
            # DDP averages the gradients of weights over the processes: each gives twice its part.
            assert_close(found["nodes"] / 2, whole["nodes"][rows])
            assert_close(found["graphs"] / 2, whole["graphs"][graph_rows])
