"""The sections on false negatives, alignment, losses, classes, hubs and cost show the numbers of their runs."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from insight.folders import digits_samples, make_comparison, make_run

from hardneg.insight import class_means, hubs, svg
from hardneg.insight.report import write_report
from hardneg.insight.samples import NEAREST, EncodedSamples, summarize

SECTIONS = ("false-negatives", "alignment", "losses", "classes", "hubs", "time")


def sections(folder: Path, runs: list[Path], **options: Any) -> dict[str, str]:
    """The HTML of each section by its key."""
    options.setdefault("load_samples", digits_samples())
    text = write_report(runs, folder / "report.html", **options).read_text(encoding="utf-8")
    return {found[1]: found[0] for found in re.finditer(r'<section id="([\w-]+)".*?</section>', text, flags=re.DOTALL)}


def rewrite(run: Path, change: Any) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        change(line)
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))


def test_runs_without_measurements_have_no_empty_sections(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", epochs=3)
    rewrite(run, lambda line: (line.pop("insight", None), line.pop("batches")))
    found = sections(tmp_path, [run])
    assert not {"false-negatives", "alignment", "losses"} & found.keys()
    assert {"classes", "hubs", "time"} <= found.keys()  # of the encoder and of the times
    few = lambda folder: EncodedSamples(torch.zeros(3, 1, 8, 8, dtype=torch.uint8), None, [], torch.eye(3))  # noqa: E731
    assert not {"classes", "hubs"} & sections(tmp_path, [run], load_samples=few).keys()


def test_the_four_losses_have_a_chart_for_each_row_and_the_assumption_one_for_all(tmp_path: Path) -> None:
    runs = make_comparison(tmp_path / "runs", ("simclr", "hcl"), seeds=2, epochs=20)
    losses = sections(tmp_path, runs)["losses"]
    assert losses.count("data-chart") == 3
    charts = [json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', losses)]
    assert [line["name"] for line in charts[0]["series"]] == ["UCL", "H-UCL", "SCL", "H-SCL"]
    assert charts[0]["x"] == [1, 10, 20]
    measured = 5.3 + 0.6 * math.exp(-20 / 15)
    assert charts[0]["series"][3]["y"][-1] == pytest.approx(measured, rel=1e-4)
    assert [line["name"] for line in charts[2]["series"]] == ["simclr", "hcl"]
    assert charts[2]["series"][0]["y"][-1] == pytest.approx(100 * (0.97 - 0.1 * math.exp(-20 / 15)), rel=1e-4)


def test_the_plane_of_alignment_and_uniformity_has_a_mark_for_each_measurement(tmp_path: Path) -> None:
    runs = make_comparison(tmp_path / "runs", ("simclr", "hcl"), seeds=2, epochs=20)
    found = sections(tmp_path, runs)["alignment"]
    plot = found[found.index('<svg class="plot"') : found.index("</svg>", found.index('<svg class="plot"'))]
    assert plot.count('class="mark') == 2 * 2 * 3
    # The direction of time: the last epoch of each run is larger, and each mark has its epoch.
    assert plot.count("scale(5)") == 2 * 2
    assert plot.count("epoch 20</title>") == 2 * 2
    assert f"{0.4 + 0.5 * math.exp(-20 / 15):.3f}" in found


def test_a_long_run_has_a_limited_number_of_marks_and_keeps_its_last(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", epochs=300)

    def measured(line: dict[str, Any]) -> None:
        line["insight"] = {"alignment": line["epoch"] / 100, "uniformity": -1.0}

    rewrite(run, measured)
    found = sections(tmp_path, [run])["alignment"]
    assert found.count('class="mark') <= 62
    assert "3.000" in found


def test_the_cosines_of_class_means_are_shaded_against_the_simplex(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", epochs=2)
    samples = digits_samples()(run)
    assert samples.labels is not None
    expected = class_means(samples.features, samples.labels, centered=True)
    found = sections(tmp_path, [run])["classes"]
    assert "whose cosines are −0.11" in found
    cells = re.findall(r'<td class="(same|different)" style="--share:(\d+)%">(.*?)</td>', found)
    assert len(cells) == 10 * 9
    first = float(expected.cosines()[0, 1])
    kind, share, text = cells[0]
    assert float(text.replace("−", "-")) == pytest.approx(first, abs=0.005)
    assert kind == ("different" if first > -1 / 9 else "same")
    assert 0 <= int(share) <= 60
    assert f"{expected.deviation:.3f}" in found


def test_many_classes_have_a_summary_without_a_table_of_all_pairs(tmp_path: Path) -> None:
    def many(folder: Path) -> EncodedSamples:
        features = torch.randn(200, 8, generator=torch.Generator().manual_seed(0))
        names = [f"<i>{number}" for number in range(100)]
        return EncodedSamples(torch.zeros(200, 1, 8, 8, dtype=torch.uint8), torch.arange(200) % 100, names, features)

    found = sections(tmp_path, [make_run(tmp_path / "run", epochs=2)], load_samples=many)["classes"]
    assert "--share" not in found
    assert "<i>" not in found
    assert "&lt;i&gt;" in found


def test_the_largest_hubs_are_shown_with_their_counts(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", epochs=2)
    samples = digits_samples()(run)
    expected = hubs(samples.features, NEAREST, samples.labels)
    summary = summarize(samples)
    assert summary.hubs is not None
    assert [hub.anchors for hub in summary.hubs.shown] == expected.counts[expected.order[:6]].tolist()
    found = sections(tmp_path, [run])["hubs"]
    assert f"{expected.skewness:.2f}" in found
    assert f"{int(expected.counts.max())} anchors" in found


def test_the_cost_of_choosing_batches_is_shown_if_a_sampler_is_refreshed(tmp_path: Path) -> None:
    runs = make_comparison(tmp_path / "runs", ("simclr", "hcl"), seeds=1, epochs=4)
    assert "choice of batches" not in sections(tmp_path, runs)["time"]

    def refreshed(line: dict[str, Any]) -> None:
        line["batches"] = {"sampling_seconds": 0.01, "graph_seconds": 0.5, "encoding_seconds": 0.3}

    rewrite(runs[0], refreshed)
    found = sections(tmp_path, runs)["time"]
    row = found[found.index("What the choice of batches costs") :]
    assert re.findall(r'<td class="number">([\d.]+)</td>', row)[:3] == ["2.00", "60.00", "40.00"]  # ms of 5 steps


def test_false_negatives_are_drawn_although_all_rows_have_the_same_batches(tmp_path: Path) -> None:
    runs = make_comparison(tmp_path / "runs", ("simclr", "hcl"), seeds=1, epochs=4)
    for run in runs:
        rewrite(run, lambda line: line.update(batches={"false_negatives": 0.1}))
    found = sections(tmp_path, runs)
    assert "pairs of a batch with the same class" in found["false-negatives"]
    assert "pairs of a batch with the same class" not in found["curves"]


@pytest.mark.parametrize("bad", [None, "x", float("nan"), [1], {"alignment": "<b>", "ucl": None}])
def test_measurements_of_strangers_are_not_trusted(bad: object, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", epochs=3)
    rewrite(run, lambda line: line.update(insight=bad, batches={"false_negatives": "<b>"}))
    assert not {"false-negatives", "alignment", "losses"} & sections(tmp_path, [run]).keys()


@pytest.mark.parametrize("values", [(3e-17, 5e-17), (1e-200, 2e-200), (0.0, 1e-14), (-1e-18, 1e-18)])
def test_ticks_of_tiny_numbers_differ(values: tuple[float, float]) -> None:
    found = svg.ticks(*values)
    assert len({*found}) == len(found) > 1
    assert found[0] <= values[0] <= values[1] <= found[-1]
