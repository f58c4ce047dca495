"""Gathering across gloo processes gives the loss and gradients of a single process."""

from pathlib import Path

import processes
import pytest
import torch
from torch.testing import assert_close

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
        average = torch.stack([part["temperature"] for part in parts]).mean()
        assert_close(average, single["temperature"], rtol=1e-6, atol=1e-9)
