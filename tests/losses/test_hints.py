"""Warnings about calls that are valid but rarely meant: once for each loss, at the line of the call, without a cost."""

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import hardneg as hn

GRAPHS = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
Loss = Callable[..., Tensor]


def views() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 4, requires_grad=True), torch.randn(8, 4)


def nodes() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(8, 4, requires_grad=True), torch.randn(4, 4), GRAPHS


def warnings_of(call: Callable[[], object]) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return found


def test_a_batch_of_one_row_warns_once_that_it_trains_nothing() -> None:
    loss = hn.simclr()
    row, other = torch.randn(1, 4), torch.randn(1, 4)
    (found,) = warnings_of(lambda: [loss(row, other) for _ in range(2)])
    assert "a batch of one row has no negatives" in str(found.message)
    assert found.filename == __file__
    assert loss(row, other) == 0
    assert not warnings_of(lambda: hn.simclr()(*views()))
    assert not warnings_of(lambda: hn.moco()(row, other, negatives=torch.randn(3, 4)))
    assert not warnings_of(lambda: hn.simclr()(row, other, negatives=torch.randn(3, 4)))


@pytest.fixture
def _three_processes() -> Iterator[None]:
    """A group of three processes, of which only this one exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_three_processes")
@pytest.mark.parametrize(("loss", "inputs"), [(hn.simclr(), views), (hn.simclr(backend="reference"), views),
                                              (hn.JSD(), nodes)])  # fmt: skip
def test_a_loss_that_does_not_gather_warns_once_in_several_processes(loss: Loss, inputs: Callable[[], Any]) -> None:
    loss = copy.deepcopy(loss)
    (found,) = warnings_of(lambda: loss(*inputs()))
    assert str(found.message).startswith("gather=False with 3 processes: each takes negatives from its own batch only")
    assert found.filename == __file__
    assert warnings_of(lambda: loss(*inputs())) == []


@pytest.mark.usefixtures("_three_processes")
def test_the_warning_gives_the_filter_that_hides_it() -> None:
    (found,) = warnings_of(lambda: hn.simclr()(*views()))
    line = str(found.message).rpartition(": ")[2]
    with warnings.catch_warnings(record=True) as others:
        warnings.simplefilter("always")
        exec(line, {"warnings": warnings})
        hn.simclr()(*views())
    assert others == []


@pytest.mark.usefixtures("_three_processes")
@pytest.mark.parametrize(
    "call",
    [
        lambda: hn.moco()(*views(), negatives=torch.randn(16, 4)),  # the queue gathers
        lambda: torch.no_grad()(hn.simclr())(*views()),  # an evaluation in one of the processes
        lambda: torch.compile(hn.simclr(), fullgraph=True, backend="eager")(*views()),
        lambda: torch.func.grad(lambda z: hn.simclr()(z, z.flip(0)))(torch.randn(8, 4)),
    ],
    ids=["queue", "evaluation", "compiled", "transformed"],
)
def test_no_warning_where_other_processes_would_not_help_or_the_call_is_traced(call: Callable[[], object]) -> None:
    assert warnings_of(call) == []


def test_a_single_process_gets_no_warning() -> None:
    assert warnings_of(lambda: hn.simclr()(*views())) == []


SUPERVISED: dict[str, Callable[[Tensor], object]] = {
    "short path": lambda labels: hn.scl()(*views(), labels=labels),
    "reference": lambda labels: hn.supcon(backend="reference")(*views(), labels=labels),
    "one view": lambda labels: hn.supcon()(views()[0], labels=labels),
    "negatives": lambda labels: hn.simclr(supervision="negatives")(*views(), labels=labels),
    "graphs": lambda labels: hn.JSD(supervision="full")(*nodes(), labels=labels[:4]),
}


@pytest.mark.parametrize("name", SUPERVISED)
def test_a_supervised_batch_of_a_single_class_warns(name: str) -> None:
    (found,) = warnings_of(lambda: SUPERVISED[name](torch.full((8,), 3)))
    assert "labels are 3, so the batch has no negatives of another class" in str(found.message)
    assert found.filename == __file__


@pytest.mark.parametrize("name", SUPERVISED)
@pytest.mark.parametrize("labels", [torch.arange(8) % 2, torch.full((8,), -1), torch.tensor([3, -1] * 4)],
                         ids=["two classes", "unknown", "some unknown"])  # fmt: skip
def test_batches_with_possible_negatives_do_not_warn(name: str, labels: Tensor) -> None:
    assert warnings_of(lambda: SUPERVISED[name](labels)) == []


def test_the_single_class_is_reported_once_and_not_where_a_queue_has_others() -> None:
    labels, loss = torch.full((8,), 3), hn.scl()
    assert len(warnings_of(lambda: [loss(*views(), labels=labels) for _ in range(3)])) == 1
    queue = hn.Queue(16, 4)
    queue.enqueue(torch.randn(16, 4), labels=torch.arange(16) % 4)
    assert warnings_of(lambda: hn.scl()(*views(), labels=labels, negatives=queue)) == []


def test_one_view_whose_labels_all_differ_has_no_positives_and_warns_once() -> None:
    labels, loss = torch.tensor([5, 1, -1, 2, -1, 9, 0, 3]), hn.supcon()
    (found,) = warnings_of(lambda: [loss(views()[0], labels=labels) for _ in range(2)])
    assert "all 6 known labels differ, so no row has a positive and the loss is 0" in str(found.message)
    assert found.filename == __file__
    assert loss(views()[0], labels=labels) == 0
    assert warnings_of(lambda: hn.supcon()(*views(), labels=labels)) == []  # the other view is the positive
    labels[0] = labels[1]
    assert warnings_of(lambda: hn.supcon()(views()[0], labels=labels)) == []


QUEUED: dict[str, Callable[[hn.Queue], object]] = {
    "queue": lambda queue: hn.supcon()(views()[0], labels=torch.arange(8) % 2, negatives=queue),
    "by source": lambda queue: hn.scl()(*views(), labels=torch.arange(8) % 2, negatives={"old": queue}),
    "only the queue": lambda queue: hn.moco(supervision="negatives")(
        *views(), labels=torch.arange(8) % 2, negatives=queue
    ),
}


@pytest.mark.parametrize("name", QUEUED)
def test_a_queue_without_labels_warns(name: str) -> None:
    queue = hn.Queue(16, 4)
    assert warnings_of(lambda: QUEUED[name](queue) if name != "only the queue" else None) == []  # empty
    queue.enqueue(torch.randn(16, 4))
    (found,) = warnings_of(lambda: QUEUED[name](queue))
    argument = "negatives['old']" if name == "by source" else "negatives"
    assert f"no row of {argument} has a label, so all 16 are negatives" in str(found.message)
    assert found.filename == __file__
    unknown = torch.full((16,), -1)  # stated by the caller
    call = {"labels": torch.arange(8) % 2, "negatives": queue, "negative_labels": unknown}
    assert warnings_of(lambda: hn.scl()(*views(), **call)) == []
    queue.enqueue(torch.randn(1, 4), labels=torch.tensor([0]))
    assert warnings_of(lambda: QUEUED[name](queue)) == []


def test_labels_on_an_accelerator_are_not_read() -> None:
    from hardneg.losses import hints

    labels = torch.full((8,), 3, device="meta")  # has no values
    assert hints.single_class(labels) is hints.no_positives(labels) is hints.no_labels(labels) is None


def annealed() -> hn.InfoNCE:
    return hn.ring_nce(in_batch="both")


def scheduled_aggregation() -> Callable[[], Tensor]:
    rows, clusters = torch.randn(8, 4), hn.Clusters(k=2)
    clusters.fit(rows)
    loss = hn.LocalAggregation(hn.Linear(0.2, 0.1), background=4)
    return lambda: loss(torch.randn(8, 4, requires_grad=True), rows, torch.arange(8), clusters)


def calls_of(loss: nn.Module, inputs: Callable[[], Any] = views) -> Callable[[], Tensor]:
    return lambda: loss(*inputs())


@pytest.mark.parametrize(
    ("call", "schedule"),
    [
        (calls_of(annealed()), "so RingAnneal(start=1.0, "),
        (calls_of(hn.hcl(temperature=hn.Linear(0.5, 0.1))), "Linear(start=0.5, end=0.1"),
        (calls_of(hn.JSD(beta=hn.Linear(2.0, 0.0)), nodes), "Linear(start=2.0"),
        (scheduled_aggregation(), "Linear(start=0.2"),
    ],
    ids=["ring", "temperature", "graphs", "local aggregation"],
)
def test_a_schedule_that_is_never_moved_warns_once_after_a_hundred_steps(
    call: Callable[[], Tensor], schedule: str
) -> None:
    assert warnings_of(lambda: [call() for _ in range(99)]) == []
    (found,) = warnings_of(lambda: [call() for _ in range(150)])
    assert str(found.message).startswith("set_progress was never called in 100 training steps, so ")
    assert schedule in str(found.message)
    assert found.filename == __file__


def test_a_loss_restored_from_a_checkpoint_must_be_moved_too() -> None:
    loss, saved = annealed(), annealed()
    saved.set_progress(0.5)
    loss.load_state_dict(saved.state_dict())
    assert len(warnings_of(lambda: [loss(*views()) for _ in range(100)])) == 1


def moved() -> nn.Module:
    loss = annealed()
    loss.set_progress(0.0)
    return loss


@pytest.mark.parametrize(
    "call",
    [
        calls_of(hn.hcl()),
        calls_of(moved()),
        calls_of(annealed().eval()),
        calls_of(hn.hcl(beta=hn.Adaptive())),  # moves by `observe`
        calls_of(hn.hcl(beta=hn.Constant(1.0))),
        torch.no_grad()(calls_of(annealed())),
        calls_of(torch.compile(annealed(), fullgraph=True, backend="eager")),  # type: ignore[arg-type]
    ],
    ids=["no schedule", "moved", "evaluation mode", "adaptive", "constant", "no gradient", "compiled"],
)
def test_no_warning_of_schedules_outside_of_training_or_if_they_do_not_need_the_progress(
    call: Callable[[], Tensor],
) -> None:
    assert warnings_of(lambda: [call() for _ in range(120)]) == []


def test_the_trainer_moves_schedules_before_the_loss_is_called(
    monkeypatch: pytest.MonkeyPatch, empty_folder: Path
) -> None:
    pytest.importorskip("lightning")
    from hardneg.losses import hints
    from hardneg.training import recipe, run

    monkeypatch.setattr(hints, "UNMOVED_CALLS", 1)
    (found,) = warnings_of(lambda: annealed()(*views()))
    assert "set_progress" in str(found.message)
    changes = ["trainer.epochs=1", "trainer.accelerator=cpu", "trainer.knn_every=0", "objective.preset=ring_nce"]
    settings = recipe.load(recipe.find("digits-moco"), changes)
    assert not any("set_progress" in str(x.message) for x in warnings_of(lambda: run.train(settings, Path("run"))))
