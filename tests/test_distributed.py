"""Gathering across gloo processes gives the loss and gradients of a single process."""

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import gather_processes
import processes
import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

import hardneg as hn

Found = list[dict[str, dict[str, torch.Tensor]]]


SIZES = [
    pytest.param([5, 7], id="uneven"),
    *(pytest.param(sizes, id=str(len(sizes)), marks=pytest.mark.slow) for sizes in ([12], [6, 6], [3, 3, 3, 3])),
]


@pytest.fixture(scope="module", params=SIZES)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[int], Found]:
    folder: Path = tmp_path_factory.mktemp("processes")
    return request.param, processes.launch(request.param, folder)


@pytest.mark.parametrize("backend", ["reference", "tiled"])
@pytest.mark.parametrize("name", processes.settings())
def test_processes_have_the_loss_and_gradients_of_one(found: tuple[list[int], Found], name: str, backend: str) -> None:
    sizes, ranks = found
    single = processes.run(name, slice(0, processes.ROWS), gather=False, backend="reference")
    parts = [rank[f"{name}/{backend}"] for rank in ranks]
    # DDP averages gradients over processes, so each is scaled by the number of processes.
    factor = len(sizes)
    if name == "none":  # each process has the losses of its own anchors: first views, then second views
        halves = [part["loss"].reshape(2, -1) for part in parts]
        assert_close(torch.cat(halves, dim=1).flatten(), single["loss"], rtol=1e-6, atol=1e-9)
        factor = 1  # each process sums the losses of its own anchors
    else:
        for part in parts:
            assert_close(part["loss"], single["loss"], rtol=1e-6, atol=1e-9)
    assert single["loss"].abs().min() > 1e-3
    for view in ("z1", "z2"):
        assert single[view].abs().max() > 1e-3
        gathered = torch.cat([part[view] for part in parts]) / factor
        assert_close(gathered, single[view], rtol=1e-6, atol=1e-9)
        squared = torch.cat([part[f"second {view}"] for part in parts]) / factor**2
        assert float(single[f"second {view}"].norm()) > 1e-6
        assert_close(squared, single[f"second {view}"], rtol=1e-6, atol=1e-9)
    if "bank" in single:
        assert single["bank"].abs().max() > 1e-3
        gathered = torch.cat([part["bank"] for part in parts]) / factor
        assert_close(gathered, single["bank"], rtol=1e-6, atol=1e-9)
    if "temperature" in single:
        assert min(single["temperature"].abs(), single["second temperature"].abs()) > 1e-3
        for part in parts:  # averaged already: the loss need not be inside the module that DDP wraps
            assert_close(part["temperature"], single["temperature"], rtol=1e-6, atol=1e-9)
            assert_close(part["second temperature"], single["second temperature"], rtol=1e-6, atol=1e-9)


@pytest.fixture(scope="module", params=[pytest.param([5, 7], id="two"), pytest.param([3, 5, 4], id="three")])
def gathered(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[int], list[dict[str, Any]]]:
    return request.param, gather_processes.launch(request.param, tmp_path_factory.mktemp("gather"))


@pytest.mark.parametrize("way", ["all", "reduce-scatter"])
def test_uneven_batches_have_the_loss_and_gradients_of_one_process(
    gathered: tuple[list[int], list[dict[str, Any]]], way: str
) -> None:
    sizes, ranks = gathered
    whole = gather_processes.infonce(slice(None), sum(sizes), gather=False)
    for found in ranks:
        assert_close(found[way]["loss"], whole["loss"], rtol=1e-12, atol=0)
    for view in ("z1", "z2"):
        together = torch.cat([found[way][view] for found in ranks]) / len(sizes)
        assert_close(together, whole[view], rtol=1e-9, atol=1e-12)


def test_the_backward_pass_sends_every_process_the_gradient_of_its_own_rows_only(
    gathered: tuple[list[int], list[dict[str, Any]]],
) -> None:
    sizes, ranks = gathered
    row = 8 * gather_processes.DIM  # bytes
    for rank, found in enumerate(ranks):
        # An all_reduce of all rows sends and receives 2 · (P − 1)/P · sum(sizes) rows on every process.
        assert found["calls"] == [("all_to_all_single", sum(sizes) * row)]
        sent = (sum(sizes) - sizes[rank]) * row  # its own rows stay where they are
        assert sent < 2 * (len(sizes) - 1) / len(sizes) * sum(sizes) * row
        # Padded to the largest batch where the backend has a reduce-scatter.
        assert found["reduce-scatter calls"] == [(gather_processes.REDUCE_SCATTER, len(sizes) * max(sizes) * row)]
        # In a whole loss only numbers are all-reduced: the number of anchors, and the loss.
        numbers = [size for name, size in found["calls of a loss"] if name == "all_reduce"]
        assert numbers == [8, 8]


def test_a_process_group_has_the_loss_and_gradients_of_its_own_batch(
    gathered: tuple[list[int], list[dict[str, Any]]],
) -> None:
    sizes, ranks = gathered
    parts = torch.arange(sum(sizes)).split(sizes)
    for first in (0, 1):
        members = range(first, len(sizes), 2)
        rows = torch.cat([parts[member] for member in members]).tolist()
        for name, function in (
            ("group", gather_processes.infonce),
            ("group sources", gather_processes.sources),
            ("group jsd", gather_processes.jsd),
        ):
            whole = function(rows, sum(sizes), gather=False)
            for member in members:
                assert_close(ranks[member][name]["loss"], whole["loss"], rtol=1e-12, atol=0)
            for view in whole.keys() - {"loss"}:
                together = torch.cat([ranks[member][name][view] for member in members]) / len(members)
                assert_close(together, whole[view], rtol=1e-9, atol=1e-12)
    for found in ranks:
        assert found["other group"].startswith("gather: this process is not in the group")


def test_ddp_over_all_processes_averages_the_losses_of_their_groups(
    gathered: tuple[list[int], list[dict[str, Any]]],
) -> None:
    sizes, ranks = gathered
    parts = torch.arange(sum(sizes)).split(sizes)
    encoder, total = gather_processes.network(), torch.zeros((), dtype=torch.float64)
    for first in (0, 1):
        members = range(first, len(sizes), 2)
        rows = torch.cat([parts[member] for member in members])
        z1, z2 = (encoder(view[rows]) for view in gather_processes.inputs(sum(sizes)))
        total = total + len(members) / len(sizes) * hn.InfoNCE()(z1, z2)
    total.backward()
    assert encoder.weight.grad is not None
    for found in ranks:
        assert_close(found["ddp"], encoder.weight.grad, rtol=1e-9, atol=1e-12)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """A group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield dist.new_group([0])
    dist.destroy_process_group()


LOSSES = {"InfoNCE": hn.InfoNCE, "JSD": hn.JSD}


@pytest.mark.parametrize("name", LOSSES)
def test_copies_of_a_loss_share_its_process_group(name: str, group: dist.ProcessGroup) -> None:
    loss = LOSSES[name](gather=group)
    assert copy.deepcopy(loss).gather is group
    model = copy.deepcopy(torch.nn.ModuleDict({"loss": loss, "again": loss}))
    assert model["loss"].gather is group
    assert model["again"] is model["loss"]
    loss.gather = False
    assert copy.deepcopy(loss).gather is False
    assert model["loss"].gather is group


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_with_a_process_group_is_not_pickled_but_has_its_state(name: str, group: dist.ProcessGroup) -> None:
    loss = LOSSES[name](gather=group)
    with pytest.raises(TypeError, match=r"process group.*loss\.state_dict\(\)"):
        pickle.dumps(loss)
    assert repr(loss) == repr(LOSSES[name]())
    assert loss.state_dict().keys() == LOSSES[name]().state_dict().keys()
    LOSSES[name]().load_state_dict(loss.state_dict())
    loss.gather = True
    assert pickle.loads(pickle.dumps(loss)).gather is True


@pytest.mark.parametrize("name", LOSSES)
def test_a_process_group_is_not_used_after_its_end(name: str, group: dist.ProcessGroup) -> None:
    loss = LOSSES[name](gather=group)
    z = torch.eye(4)
    arguments = (z, z) if name == "InfoNCE" else (z, z, torch.arange(4))
    assert float(loss(*arguments)) == float(LOSSES[name]()(*arguments))
    with mock.patch.object(dist, "is_initialized", return_value=False), pytest.raises(RuntimeError, match="assign"):
        loss(*arguments)


@pytest.mark.parametrize("given", [None, 1, "nccl", torch.tensor([True])])
@pytest.mark.parametrize("name", LOSSES)
def test_gather_takes_booleans_and_process_groups_only(name: str, given: object) -> None:
    with pytest.raises(ValueError, match=r"gather must be True, False or a torch\.distributed\.ProcessGroup, got "):
        LOSSES[name](gather=given)  # type: ignore[arg-type]
