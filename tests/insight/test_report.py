"""The report shows the values of the runs in one valid HTML file, with untrusted names escaped and files missing."""

import json
import os
import re
import statistics
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from insight.folders import PRESETS, digits_samples, make_comparison, make_run

from hardneg.insight import frame
from hardneg.insight.report import write_report
from hardneg.insight.runs import read_run, source_names
from hardneg.insight.samples import HUBS, EncodedSamples, summarize

VOID = {"meta", "link", "img", "wbr", "br", "input"}
INLINE = {"bdi", "wbr", "strong", "em"}


class Page(HTMLParser):
    """Elements and text of a page; raises if an element is not closed by its own end tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.texts.append("" if tag in INLINE else " ")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, self.getpos()
        self.texts.append("" if tag in INLINE else " ")

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.texts).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def write(folder: Path, runs: list[Path], **options: object) -> tuple[Page, str]:
    options = {"load_samples": digits_samples(), **options}
    text = write_report(runs, folder / "report.html", **options).read_text(encoding="utf-8")  # type: ignore[arg-type]
    return Page(text), text


def broken_samples(folder: Path) -> EncodedSamples:
    raise FileNotFoundError("encoder.safetensors is gone")


def row(text: str, name: str, metric: int) -> str:
    """The text of one cell of the table of metrics."""
    table = text[text.index('<table class="sortable">') :]
    line = next(part for part in table.split("<tr>") if f'data-value="{name}"' in part)
    return " ".join(re.sub(r"<[^>]+>", " ", line.split("<td")[metric + 2].split("</td>")[0]).split(">", 1)[1].split())


def test_the_page_is_valid_and_loads_nothing(tmp_path: Path) -> None:
    page, text = write(tmp_path, make_comparison(tmp_path / "runs", ("simclr", "hcl"), seeds=2))
    keys = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(keys) == len({*keys})
    assert {
        "comparison",
        "curves",
        "false-negatives",
        "alignment",
        "losses",
        "histograms",
        "classes",
        "projection",
        "gallery",
        "hubs",
        "time",
        "provenance",
    } <= {*keys}
    assert len(page.all("img")) == 6 * (1 + 2 * 9) + 2 * HUBS
    assert all(image["alt"] and (image["src"] or "").startswith("data:image/png;base64,") for image in page.all("img"))
    assert all(plot["aria-label"] for plot in page.all("svg") if "plot" in (plot["class"] or ""))
    assert all((link["href"] or "")[0] == "#" for link in page.all("a"))
    assert not re.search(r"@import|url\(|src=\"(?!data:)|<link(?! rel=\"icon\" href=\"data:,\")", text)
    # A screen reader reads the last values of each chart.
    assert "Loss (nats) by epoch. Last values: simclr 4." in text


def test_the_table_shows_mean_std_and_difference(tmp_path: Path) -> None:
    values = {"simclr": [0.90, 0.91, 0.92], "hcl": [0.95, 0.96, 0.94]}
    runs = [
        make_run(tmp_path / f"{preset}{seed}", preset, seed, evaluation={"knn": value})
        for preset, given in values.items()
        for seed, value in enumerate(given)
    ]
    page, text = write(tmp_path, runs, names=["plain", "hard"])
    assert row(text, "plain", 0) == "91.0 ± 1.0"
    error = 100 * (2 * statistics.variance(values["hcl"]) / 3) ** 0.5
    assert row(text, "hard", 0) == f"95.0 ± 1.0 ▲ +4.0 ± {error:.1f}"
    assert "<strong>95.0</strong>" in text
    assert "hard beats plain in kNN." in page.text


def test_the_best_row_is_not_bold_without_significance(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / f"{preset}{seed}", preset, seed, evaluation={"knn": 0.9 + 0.02 * seed + gain})
        for preset, gain in (("simclr", 0), ("hcl", 0.001))
        for seed in range(3)
    ]
    page, text = write(tmp_path, runs)
    assert "≈ +0.1" in row(text, "hcl", 0)
    assert "<strong>" not in text[text.index("<table") : text.index("</table>")]
    assert "hcl does not differ from simclr by more than the noise between seeds." in page.text


def test_a_single_run_has_no_verdict_and_no_baseline(tmp_path: Path) -> None:
    page, _ = write(tmp_path, [make_run(tmp_path / "run", epochs=3)])
    assert "Evaluation" in page.text
    for word in ("Comparison", "baseline", "significant", "differ", "Mean ±", "Values of all seeds"):
        assert word not in page.text[: page.text.index("Training curves Hover")], word
    assert "1 run " in page.text


def test_a_comparison_of_single_seeds_has_no_test(tmp_path: Path) -> None:
    page, _ = write(tmp_path, make_comparison(tmp_path / "runs", ("simclr", "hcl"), seeds=1, epochs=2))
    assert "Each row has one seed, so that no difference can be told from noise" in page.text
    assert "Below each value, its difference from simclr." in page.text
    assert "significant" not in page.text


def test_the_first_column_is_named_after_what_was_compared(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(t), epochs=2, overrides=[f"objective.temperature={t}"]) for t in (0.1, 0.2)]
    page, text = write(tmp_path, runs)
    assert text.count("temperature</bdi>") == 6  # in the tables of metrics, alignment, classes, hubs, neighbors, times
    assert ">method<" not in text
    page, _ = write(tmp_path, runs, heading="<b>mine")
    assert page.text.count("<b>mine") == 6
    page, text = write(tmp_path, runs, extra_rows={"raw pixels": {"knn": [0.5]}})
    assert text.count("method</bdi>") == 6


def test_a_quantity_that_is_equal_in_all_rows_is_not_drawn(tmp_path: Path) -> None:
    runs = make_comparison(tmp_path / "runs", ("simclr", "hcl"), seeds=1, epochs=4)
    for number, run in enumerate(runs):
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            line["batches"] = {"walk_length": 0.1 + 0.01 * line["epoch"], "mean_cosine": line["epoch"] + number}
        (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    page, _ = write(tmp_path, runs)
    assert "Cosine of batch pairs" in page.text
    assert "walk length" not in page.text
    page, _ = write(tmp_path, runs[:1])
    assert "walk length" in page.text


def test_rows_without_runs_are_shown_and_can_be_the_baseline(tmp_path: Path) -> None:
    runs = make_comparison(tmp_path / "runs", ("simclr", "hcl"), seeds=3, epochs=5)
    extra = {"raw pixels": {"knn": [0.98], "silhouette": [-0.25]}}
    page, text = write(tmp_path, runs, extra_rows=extra, baseline="raw pixels")
    assert row(text, "raw pixels", 0) == "98.0"
    assert "▼ −" in row(text, "simclr", 0)
    assert row(text, "simclr", 5) == "–"
    assert row(text, "raw pixels", 5) == "−0.25"  # not a fraction, so not a percentage
    assert "given as values: raw pixels" in page.text


def test_lower_is_better_for_a_metric_that_a_run_folder_describes_so(tmp_path: Path) -> None:
    described = {"spread_of_z": {"title": "spread of z", "better": "lower", "percent": False}}
    values = {"simclr": [-1.0, -1.1, -1.2], "hcl": [-2.0, -2.1, -2.2], "scl": [0.5, 0.6, 0.7]}
    runs = [
        make_run(
            tmp_path / f"{preset}{seed}",
            preset,
            seed,
            evaluation={"spread_of_z": value, "metrics": described},
            epochs=10,
        )
        for preset, given in values.items()
        for seed, value in enumerate(given)
    ]
    page, text = write(tmp_path, runs, names=["base", "low", "high"])
    assert row(text, "low", 0) == "−2.1 ± 0.1 ▲ −1 ± 0.0816"
    assert row(text, "high", 0) == "0.6 ± 0.1 ▼ +1.7 ± 0.0816"
    assert "<strong>−2.1</strong>" in text
    assert '<span class="change better">▲ −1' in text
    assert "low beats base in spread of z. high is worse than base in spread of z." in page.text
    assert "spread of z ↓" in page.text
    assert "↓ in a heading: lower is better." in page.text


def test_columns_are_in_the_order_of_the_registry(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", evaluation={"few_10": 0.5, "other": 0.1, "few_2": 0.4, "linear": 0.9, "knn": 0.8})
    page, _ = write(tmp_path, [run])
    heads = ["kNN %", "linear probe %", "2 labels/class %", "10 labels/class %", "other %"]
    assert " ".join(heads) in page.text


def test_a_run_without_its_data_is_compared_by_its_metrics(tmp_path: Path) -> None:
    runs = make_comparison(tmp_path / "runs", ("simclr", "hcl"), seeds=2, epochs=5)

    def half(folder: Path) -> EncodedSamples:
        return broken_samples(folder) if "hcl" in str(folder) else digits_samples()(folder)

    page, text = write(tmp_path, runs, load_samples=half)
    reason = "cannot be read (FileNotFoundError: encoder.safetensors is gone)"
    assert page.text.count(reason) == 2  # in the histograms and in the gallery
    assert len(page.all("img")) == 6 * 10 + HUBS
    assert row(text, "hcl", 0)
    page, _ = write(tmp_path, runs, load_samples=broken_samples)
    assert page.text.count(reason) == 4
    assert not page.all("img")


def test_the_next_seed_is_shown_if_the_first_has_no_weights(tmp_path: Path) -> None:
    runs = make_comparison(tmp_path / "runs", ("hcl",), seeds=2, epochs=5)
    page, _ = write(
        tmp_path, runs, load_samples=lambda f: broken_samples(f) if f.name == "seed-0" else digits_samples()(f)
    )
    assert "seed 1, 300 samples" in page.text
    assert "is gone" not in page.text


def test_a_run_with_only_a_recipe_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("{seed: 3, trainer: {epochs: 9}}")
    page, _ = write(tmp_path, [tmp_path / "run"], load_samples=broken_samples)
    for text in ("No run has an evaluation", "have no metrics", "have no times", "not recorded", "0 of 9 epochs"):
        assert text in page.text


def test_samples_without_labels_have_a_gallery_and_no_histogram(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", epochs=2)
    page, _ = write(
        tmp_path, [run], load_samples=lambda folder: digits_samples()(folder)._replace(labels=None, classes=())
    )
    assert "compare classes, and the samples have no labels" in page.text
    for text in ("no label ", "· no label", "colored by class", "separates the classes"):
        assert text not in page.text
    assert len(page.all("img")) == 6 * (1 + 6) + HUBS
    assert "their classes are unknown" in page.text
    assert "false" not in {attributes.get("class") for attributes in page.all("div")}


def test_a_run_on_data_without_labels_is_not_told_to_be_evaluated(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", epochs=2)
    (run / "evaluation.json").unlink()
    unlabeled = digits_samples()(run)._replace(labels=None, classes=())
    page, _ = write(tmp_path, [run], load_samples=lambda folder: unlabeled)
    assert "Not evaluated: the data have no labels." in page.text
    assert "hardneg evaluate" not in page.text
    labeled, _ = write(tmp_path, [run], load_samples=digits_samples())
    assert "No run has an evaluation: run hardneg evaluate" in labeled.text


def test_a_report_creates_no_folder(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", epochs=2)
    with pytest.raises(ValueError, match=r"there is no folder '.*nowhere' for page.html: create it"):
        write_report([run], tmp_path / "nowhere" / "page.html", load_samples=digits_samples())
    assert not (tmp_path / "nowhere").exists()


def test_a_sample_without_a_label_is_neither_a_true_nor_a_false_negative() -> None:
    features = torch.tensor([[1.0, 0.0], [0.99, 0.1], [0.9, 0.4], [0.0, 1.0]])
    images = torch.arange(4, dtype=torch.uint8)[:, None, None, None].expand(4, 3, 8, 8).contiguous()
    samples = EncodedSamples(images, torch.tensor([0, 1, 0, -1]), ["cat", "dog"], features)
    first, *_ = summarize(samples).gallery
    assert first.anchor.label == "cat"
    assert [negative.label for negative in first.negatives] == ["dog"]
    assert [negative.label for negative in first.same_class] == ["cat"]


def test_anchors_are_the_same_for_every_encoder_and_of_different_classes() -> None:
    samples = digits_samples()(Path("a/b"))
    one = summarize(samples)
    other = summarize(samples._replace(features=torch.randn(300, 4, generator=torch.Generator().manual_seed(0))))
    assert [each.anchor for each in one.gallery] == [each.anchor for each in other.gallery]
    assert len({each.anchor.label for each in one.gallery}) == 6


def test_untrusted_names_are_escaped(tmp_path: Path) -> None:
    bad = '<script>alert("x")</script>&amp;"\'>'
    run = make_run(
        tmp_path / "run", epochs=2, overrides=[f"about={json.dumps(bad)}"], evaluation={bad: 0.5, "knn": 0.9}
    )
    (run / "environment.json").write_text(json.dumps({"command": ["run", bad], bad: bad}))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for number, line in enumerate(lines):
        line["objective"][bad] = number
        line["seconds"][bad] = 0.1
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    page, text = write(
        tmp_path,
        [run],
        names=[bad],
        extra_rows={bad + "2": {bad: [0.4]}},
        load_samples=lambda folder: digits_samples()(folder)._replace(classes=[bad] * 10),
    )
    assert "<script>alert" not in text
    assert [script.get("type") for script in page.all("script")].count(None) == 1  # the page's own
    assert page.text.count(bad) > 10


def test_a_class_name_that_is_not_utf_8_is_shown_escaped(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    run = make_run(tmp_path / "run", epochs=2)
    page, _ = write(tmp_path, [run], load_samples=lambda folder: digits_samples()(folder)._replace(classes=[name] * 10))
    assert "anchor: caf\\udce9" in page.text


def test_curves_show_mean_and_range_over_seeds(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(seed), seed=seed, epochs=4) for seed in range(3)]
    losses = [[json.loads(t)["loss"] for t in (run / "metrics.jsonl").read_text().splitlines()] for run in runs]
    _, text = write(tmp_path, runs)
    data = json.loads(text.split('<script type="application/json">')[1].split("</script>")[0])
    means = [statistics.fmean(at) for at in zip(*losses, strict=True)]
    assert data["series"][0]["y"] == pytest.approx(means, rel=1e-4)
    assert 'class="band' in text


def test_curves_show_beta_and_the_effective_share_in_percent(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", epochs=3)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for number, line in enumerate(lines):
        line["objective"] |= {"beta": 2.5 + number, "effective_share": 0.5 + 0.125 * number}
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    _, text = write(tmp_path, [run])
    for title, last in (("Tilt β (β)", "4.5"), ("Effective share of negatives (%)", "75")):
        assert f"{title} by epoch. Last values: simclr {last}." in text


def test_a_loss_that_is_not_finite_has_a_note(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", epochs=4)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[2]["loss"] = float("nan")
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    page, text = write(tmp_path, [run])
    assert "The loss is not finite: simclr, seed 0: from epoch 3" in page.text
    assert "nan" not in text[text.index('id="curves"') : text.index('id="histograms"')]


@pytest.mark.parametrize("odd", [None, True, "x", [], {}, 10**400, 1e308, -1e308, float("inf"), float("nan")])
def test_values_that_are_not_finite_numbers_are_left_out(tmp_path: Path, odd: object) -> None:
    runs = [make_run(tmp_path / str(seed), seed=seed, epochs=3) for seed in range(2)]
    lines = [json.loads(line) for line in (runs[0] / "metrics.jsonl").read_text().splitlines()]
    for line, key in zip(lines, ("loss", "seconds", "epoch"), strict=True):
        line[key] = odd
    (runs[0] / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (runs[0] / "evaluation.json").write_text(json.dumps({"knn": odd, "linear": 0.5}))
    (runs[0] / "environment.json").write_text(json.dumps({"command": odd, "python": odd}))
    page, _ = write(tmp_path, runs)
    assert "0 of 3 epochs" in page.text


def test_constant_quantities_are_not_drawn(tmp_path: Path) -> None:
    page, _ = write(tmp_path, [make_run(tmp_path / "run", "simclr", epochs=4)])
    assert "Effective negatives" in page.text
    assert "Anchors without negatives" not in page.text
    assert "Candidates in the support" not in page.text


def test_time_per_step_excludes_the_first_epoch(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", epochs=3)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line, factor in zip(lines, (100, 1, 2), strict=True):
        line["seconds"] = {"data": 0.01 * factor, "augmentation": 0.02 * factor, "network": 0.5 * factor, "pause": 9}
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    page, _ = write(tmp_path, [run])
    # Ten steps in the two epochs: 0.03 s, 0.06 s and 1.5 s.
    assert "3.0 6.0 150.0 159.0" in page.text
    assert "pause" not in page.text


def test_a_page_shows_neither_where_programs_nor_where_data_are(tmp_path: Path) -> None:
    source = tmp_path / "somewhere" / "photos"
    run = make_run(tmp_path / "run", epochs=2, overrides=[f"data.source={source}", "modality=images"])
    environment = json.loads((run / "environment.json").read_text())
    command = ["/opt/venv/bin/hardneg", "train", "my-images", "data.source=photos", "trainer.epochs=2"]
    environment |= {"command": command, "resumed": [{"epochs": 3}, {}, {"epochs": 5}]}
    (run / "environment.json").write_text(json.dumps(environment))
    page, text = write(tmp_path, [run], load_samples=digits_samples())
    assert "<title>hardneg: photos</title>" in text
    assert "/opt/venv" not in text
    assert "hardneg train my-images data.source=photos trainer.epochs=2, extended to trainer.epochs=5" in page.text


@pytest.mark.parametrize(
    ("program", "shown"),
    [("C:\\venv\\hardneg.exe", "hardneg"), ("/lib/hardneg/__main__.py", "python -m hardneg"), ("a/fit.py", "fit.py")],
)
def test_a_command_begins_with_the_name_of_its_program(tmp_path: Path, program: str, shown: str) -> None:
    run = make_run(tmp_path / "run", epochs=2)
    (run / "environment.json").write_text(json.dumps({"command": [program, "train", "a b"]}))
    page, _ = write(tmp_path, [run], load_samples=broken_samples)
    assert f"{shown} train 'a b'" in page.text


def test_sources_that_end_alike_are_shown_whole(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, overrides=[f"data.source=/{name}/x.npz"], epochs=2) for name in ("a", "b")]
    assert source_names([read_run(run) for run in runs]) == ["/a/x.npz", "/b/x.npz"]
    assert source_names([read_run(runs[0])]) == ["x.npz"]


def test_a_command_shared_by_all_runs_is_shown_once(tmp_path: Path) -> None:
    runs = make_comparison(tmp_path / "runs", ("simclr", "hcl"), seeds=2, epochs=2)
    page, _ = write(tmp_path, runs)
    assert page.text.count("hardneg train digits-simclr objective.preset=hcl seed=1") == 1
    for run in runs:
        (run / "environment.json").write_text(json.dumps({"command": ["hardneg", "compare", "a b"]}))
    page, _ = write(tmp_path, runs)
    assert page.text.count("hardneg compare 'a b'") == 1


def test_a_page_of_seven_groups_and_three_seeds_is_below_5_mb(tmp_path: Path) -> None:
    runs = make_comparison(tmp_path / "runs", PRESETS, seeds=3, epochs=400)
    generator = torch.Generator().manual_seed(0)

    def noise(folder: Path) -> EncodedSamples:  # incompressible images, different for each group
        images = torch.randint(0, 256, (120, 3, 96, 96), dtype=torch.uint8, generator=generator)
        return EncodedSamples(images, torch.arange(120) % 10, [*"abcdefghij"], torch.randn(120, 8, generator=generator))

    _, text = write(tmp_path, runs, load_samples=noise)
    assert len(text.encode()) < 5_000_000


def test_writing_twice_gives_the_same_file_and_no_temporary_file(tmp_path: Path) -> None:
    runs = make_comparison(tmp_path / "runs", ("simclr", "hcl"), seeds=1, epochs=3)
    (tmp_path / "page").mkdir()
    _, one = write(tmp_path / "page", runs)
    _, two = write(tmp_path / "page", runs)
    assert one == two
    assert [file.name for file in (tmp_path / "page").iterdir()] == ["report.html"]


def test_errors_name_the_argument_and_the_fix(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", epochs=1)
    to = tmp_path / "report.html"
    with pytest.raises(ValueError, match="runs is empty: pass at least one run folder"):
        write_report([], to)
    with pytest.raises(ValueError, match="is a folder: name a file in it"):
        write_report([run], tmp_path)
    with pytest.raises(ValueError, match="baseline='mina' is not known: did you mean 'mine'"):
        write_report([run], to, names=["mine"], baseline="mina")
    with pytest.raises(ValueError, match="extra_rows names 'mine', which is already a group of runs"):
        write_report([run], to, names=["mine"], extra_rows={"mine": {"knn": [0.5]}})
    with pytest.raises(ValueError, match=r"extra_rows\['raw'\]\['knn'\] must be a list of finite numbers"):
        write_report([run], to, extra_rows={"raw": {"knn": [float("nan")]}})
    with pytest.raises(ValueError, match=r"extra_rows\['raw'\]\['knn'\] must be a list"):
        write_report([run], to, extra_rows={"raw": {"knn": 0.5}})  # type: ignore[dict-item]
    assert not to.exists()


def test_assets_cannot_end_their_element() -> None:
    assert "</script" not in frame.asset("page.js")
    assert "</style" not in frame.asset("page.css")
