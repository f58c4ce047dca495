"""The page of results: its tables are those of the recorded runs, and its verdicts follow from them."""

import importlib
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hardneg.training import recipe

ROOT = Path(__file__).parents[1]
VERDICT = re.compile(
    r"(partly )?not run yet \(.+\)|.*: not run yet \(.+\)|(.*: )?cannot be tested here \(.+\)|not confirmed \(.+\)"
    r"|(confirmed|not contradicted)( for .+ only| with a correction)? \(.+\)(, .+)?|refuted"
    r"|not refuted \(a conjecture\)"
)


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("claims")


def test_the_pages_hold_every_recorded_table_and_all_claims_as_they_are_computed(claims: ModuleType) -> None:
    pages = {page: page.read_text(encoding="utf-8") for page in claims.PAGES}
    named = {name for text in pages.values() for name in re.findall(r"<!-- ([\w-]+) -->", text)} - {"end"}
    recorded = {file.stem for file in claims.RESULTS.glob("*.jsonl")}
    assert {"auto-digits", "digits", "graphs", "proximity"} <= recorded
    assert recorded | {"claims"} <= named
    for page, text in pages.items():
        assert claims.filled(text) == text, f"{page.name} is out of date: run `python benchmarks/claims.py --write`"


def test_the_plots_are_those_of_the_recorded_runs(claims: ModuleType) -> None:
    drawn = claims.drawings()
    assert len(drawn) > 3
    shown = "".join(page.read_text(encoding="utf-8") for page in claims.PAGES)
    for name, text in drawn.items():
        file = claims.DOCS / name
        assert file.exists(), f"docs/{name} is missing: run `python benchmarks/claims.py --write`"
        assert file.read_text(encoding="utf-8") == text, f"{name} is out of date: `python benchmarks/claims.py --write`"
        assert f"({name})" in shown, f"no page shows {name}"


def test_a_plot_has_the_mean_and_spread_of_each_row(claims: ModuleType) -> None:
    plots = importlib.import_module("evidence_plots")
    table = claims.load_table("proximity")
    found = plots.plots(table, claims.RESULTS)
    values = [line["knn"]["30"] for line in claims.rows("proximity")["SimCLR"]]
    assert len(values) > 2
    assert f">{100 * statistics.fmean(values):.1f} · SimCLR<" in found["results-proximity.svg"]
    titles = re.findall(r"<title>\S+ · SimCLR: (\S+) kNN, %</title>", found["results-proximity.svg"])
    assert sorted(map(float, titles)) == pytest.approx(sorted(100 * value for value in values), abs=0.01)
    legend = re.findall(r'class="name"[^>]*>([^<]+)', found["results-proximity-epochs.svg"])
    assert legend == list(table.curves)


def test_every_verdict_is_one_of_the_words_that_the_page_explains(claims: ModuleType) -> None:
    verdicts = [claims.measured(claim)[1] for listed in claims.load().values() for claim in listed]
    assert len(verdicts) > 40
    for verdict in verdicts:
        assert all(VERDICT.fullmatch(part) for part in verdict.split("; ")), verdict


def test_every_recipe_that_a_verdict_names_exists(claims: ModuleType) -> None:
    named = re.findall(r"recipe `([\w-]+)`", (ROOT / "benchmarks" / "claims.yaml").read_text(encoding="utf-8"))
    assert named
    for name in named:
        recipe.load(recipe.find(name), [])


@pytest.fixture
def judged(claims: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, str]]:
    """What is said of one comparison of `row` with `base`, by kNN and by linear probe."""

    def judge(row: list[tuple[float, float]], base: list[tuple[float, float]], **check: Any) -> tuple[str, str]:
        runs = {
            name: [{"kNN": knn, "linear probe": linear} for knn, linear in values]
            for name, values in (("row", row), ("base", base))
        }
        names = check.pop("columns", ["kNN", "linear probe"])
        monkeypatch.setattr(claims, "rows", lambda source: runs)
        monkeypatch.setattr(claims, "columns", lambda source, _: {name: claims._path(name) for name in names})
        found: tuple[str, str] = claims.measured(
            {"checks": [{"table": "digits", "row": "row", "against": "base", **check}]}
        )
        return found

    return judge


HIGH, LOW, WIDE = [(0.95, 0.97), (0.951, 0.971), (0.952, 0.969)], [(0.9, 0.97), (0.901, 0.969), (0.902, 0.971)], (
    [(0.2, 0.2), (0.9, 0.9), (0.5, 0.5)]
)  # fmt: skip


def test_a_verdict_follows_from_the_sign_and_the_significance(judged: Callable[..., tuple[str, str]]) -> None:
    text, verdict = judged(HIGH, LOW)
    assert verdict == "confirmed for kNN only (digits)"
    assert text == "[digits](#digits): row against base +5.0 ± 0.1 \\* (kNN) and +0.0 ± 0.1 (linear probe)"
    assert judged(HIGH, LOW, columns=["kNN"])[1] == "confirmed (digits)"
    assert judged(LOW, HIGH, columns=["kNN"])[1] == "not confirmed (digits)"
    assert judged(LOW, HIGH, columns=["kNN"], expect="below")[1] == "confirmed (digits)"
    assert judged(HIGH, WIDE)[1] == "not confirmed (digits)"
    assert judged(HIGH, LOW, expect="not below")[1] == "not contradicted (digits)"
    assert judged(HIGH, LOW, columns=["kNN"], expect="not above")[1] == "not confirmed (digits)"
    assert judged(HIGH, LOW, expect="not above")[1] == "not contradicted for linear probe only (digits)"


def test_one_seed_confirms_nothing_and_no_run_is_not_run_yet(judged: Callable[..., tuple[str, str]]) -> None:
    assert judged(HIGH[:1], LOW[:1])[1] == "not confirmed (digits)"
    assert judged(HIGH[:1], LOW[:1], expect="not below")[1] == "not confirmed (digits)"
    assert judged([], LOW) == ("–", "not run yet (digits, `digits`)")


def test_a_claim_about_a_row_that_a_table_does_not_have_is_an_error(claims: ModuleType) -> None:
    with pytest.raises(ValueError, match="simclr"):
        claims.measured({"checks": [{"table": "digits", "row": "simclr", "against": "SimCLR"}]})


def test_a_bound_is_of_all_epochs_hardenings_and_seeds(claims: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def line(first: float, last: float) -> dict[str, Any]:
        orderings = {"1": {"β = 1": {"h_ucl": 3.0, "h_scl": 2.5, "assumption_1": first}}}
        orderings["2"] = {"β = 1": {"h_ucl": 3.0, "h_scl": 3.1, "assumption_1": last}}
        return {"epochs": 2, "orderings": orderings}

    monkeypatch.setattr(claims, "rows", lambda source: {"a": [line(0.9, 1.0), line(0.96, 0.98)], "b": []})
    check = {"table": "digits", "ordering": "assumption_1", "rows": ["a", "b"], "at_least": 0.95}
    found = claims.bounded(check)
    assert (found.holds, found.text) == (False, "least 0.900, mean 0.960, least after the last epoch 0.980")
    assert claims.bounded({**check, "at_least": 0.9}).holds
    assert claims.bounded({**check, "ordering": "gap", "at_least": 0}).text.startswith("least -0.100, mean 0.200")
    assert claims.bounded({**check, "rows": ["b"]}).holds is None
