"""The registry: every family runs, with finite numbers and the verdicts of the documentation."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hardneg.theory import FAMILIES, Finding

VERDICTS = {
    "cnce": {"Theorem 3.1": "holds", "Table 5": "holds", "Bands from 0": "does not hold as printed",
             "Theorem 3.2": "holds"},
    "hcl": {"Proposition 3": "holds", "Theorem 4": "holds with a correction", "Theorem 5": "holds with a correction"},
    "hscl": {"Proposition 2": "holds", "Lemma 1": "holds", "Assumption 1": "holds"},
    "prosampler": {"Proposition 1": "does not hold as printed", "Proposition 2": "holds with a correction",
                   "Locality of walks": "holds"},
    "class-vectors": {"Lemma 1": "holds", "Balanced classes": "holds", "Unbalanced classes": "not refuted"},
}  # fmt: skip


def check(findings: list[Finding], name: str) -> None:
    assert {each.name: each.verdict for each in findings} == VERDICTS[name]
    assert sum(each.chart is not None for each in findings) == 1
    for each in findings:
        assert each.rows
        assert all(len(row) == len(each.columns) for row in each.rows)
        assert all(math.isfinite(value) for value in each.numbers.values()), each.numbers
        json.dumps([each.numbers, each.rows], allow_nan=False)  # no numpy scalars, no NaN
        if each.chart is not None:
            points = [(x, y) for line in each.chart.lines for x, y in zip(line.x, line.y, strict=True)]
            assert all(math.isfinite(x) and math.isfinite(y) for x, y in points)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_quick_checks_give_the_documented_verdicts(name: str, seed: int) -> None:
    check(list(FAMILIES[name].run(quick=True, seed=seed)), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_full_checks_give_the_documented_verdicts(name: str) -> None:
    check(list(FAMILIES[name].run()), name)


def test_results_file_has_the_verdicts_of_the_full_checks() -> None:
    content = json.loads((Path(__file__).parents[2] / "results" / "theory.json").read_text(encoding="utf-8"))
    assert not content["quick"]
    found = {
        name: {each["name"]: each["verdict"] for each in family["findings"]}
        for name, family in content["families"].items()
    }
    assert found == VERDICTS


def test_listing_imports_neither_torch_nor_scipy() -> None:
    code = "import sys, hardneg.theory; print({'torch', 'scipy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "set()\n"


def test_the_page_has_the_verdicts_of_the_results() -> None:
    page = (Path(__file__).parents[2] / "docs" / "theory.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w-]+) \| ([^:|]+): .* \| ([a-z ]+) \|$", page, flags=re.MULTILINE)
    assert rows == [(name, title, verdict) for name, found in VERDICTS.items() for title, verdict in found.items()]
