"""The benchmark of the fused kernel: its peers, its first calls and the claims it prints."""

import importlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import hardneg as hn


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Imports modules of the benchmarks, one of which has the name of a folder of tests."""
    folder = Path(__file__).parents[1] / "benchmarks"
    names = [path.stem for path in folder.glob("*.py")]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(folder))
    yield
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def report() -> ModuleType:
    return importlib.import_module("fused_report")


def verdict(report: ModuleType, sections: dict[str, list[dict[str, Any]]], claim: str) -> str:
    """What is printed about the only claim that contains these words."""
    found = report.claims({name: {"rows": rows} for name, rows in sections.items()})
    (answer,) = [answer for text, answer in found if claim in text]
    return str(answer)


def test_plain_supcon_equals_a_loop_over_the_formula_of_its_paper() -> None:
    draws = torch.Generator().manual_seed(0)
    z1, z2 = (torch.randn(6, 5, generator=draws) for _ in range(2))
    labels, t = torch.tensor([0, 1, 0, 2, 1, 0]), 0.07
    z = [(row.double() / row.double().norm()).tolist() for row in (*z1, *z2)]
    names = labels.repeat(2).tolist()

    def score(i: int, j: int) -> float:
        return sum(a * b for a, b in zip(z[i], z[j], strict=True)) / t

    total = 0.0
    for i in range(12):
        others = [j for j in range(12) if j != i]
        positives = [j for j in others if names[j] == names[i]]
        denominator = sum(math.exp(score(i, j)) for j in others)
        total -= sum(math.log(math.exp(score(i, j)) / denominator) for j in positives) / len(positives) / 12
    found = importlib.import_module("peers").plain_supcon(z1, z2, labels)
    assert float(found) == pytest.approx(total, rel=1e-5)
    assert_close(hn.supcon()(z1, z2, labels=labels), found)


def test_first_calls_of_every_preset_are_timed() -> None:
    first_call = importlib.import_module("first_call")
    found = first_call.first_calls(list(first_call.PRESETS), torch.device("cpu"), "tiled", 64)
    assert list(found) == ["simclr", "hcl", "hscl", "supcon", "queue", "clip", "ring"]
    assert all(0 < seconds < 60 for seconds in found.values())


def test_a_claim_is_met_only_by_every_row(report: ModuleType) -> None:
    def first(*seconds: float) -> dict[str, list[dict[str, Any]]]:
        return {"first": [{"cache": "on disk", "peer": str(place), "first_s": s} for place, s in enumerate(seconds)]}

    claim = "first call from the disk cache"
    assert verdict(report, first(0.5, 0.9), claim) == "met (0.9)"
    assert verdict(report, first(0.5, 1.4), claim) == "NOT MET (1.4)"
    assert verdict(report, {}, claim) == "not measured"


def test_a_claim_is_not_met_if_a_row_failed(report: ModuleType) -> None:
    row = {"peer": "hardneg scl", "batch": 256}
    rows = [row | {"ratio": 0.8}, row | {"error": "RuntimeError: out of memory"}]
    assert verdict(report, {"supervised": rows}, "hn.scl not slower").startswith("NOT MET")


def test_fewer_random_settings_than_claimed_do_not_meet_the_claim(report: ModuleType) -> None:
    for tried, wrong, expected in ((150, 0, "met (0)"), (150, 2, "NOT MET (2)"), (40, 0, "NOT MET (nan)")):
        rows = [{"seed": 1, "tried": tried, "wrong": wrong, "worst": 0.5}]
        assert verdict(report, {"random": rows}, "random settings") == expected


def test_limits_in_ms_are_compared_with_hcl_in_the_same_run(report: ModuleType) -> None:
    size = {"case": "one tower", "rows": 65_536, "dim": 128}
    rows = [size | {"peer": "HCL", "difference_ms": 0.0}, size | {"peer": "labels", "difference_ms": 1.2}]
    assert verdict(report, {"generality": rows}, "labels within 1 ms") == "NOT MET (1.2)"
    fast = size | {"peer": "hardneg", "ms": 5.2}
    assert verdict(report, {"limit": [fast]}, "65,536 rows, d = 128: at most 5.3 ms") == "met (5.2)"


def test_rows_that_failed_show_their_reason(report: ModuleType) -> None:
    table = report.table("first", [{"cache": "cold", "peer": "ring", "error": "RuntimeError: exit status 1"}])
    assert "| ring | RuntimeError: exit status 1 |" in table
