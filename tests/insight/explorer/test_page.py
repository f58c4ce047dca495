"""The explorer in a browser: its numbers are those of the library, and everything works by keyboard alone."""

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import check_reached
from torch import Tensor

import hardneg as hn
from hardneg.insight.explorer import write_explorer
from hardneg.insight.explorer.settings import loss_of
from hardneg.insight.explorer.stored import unpack

Open = Callable[..., Any]
OPTIONS = ", in_batch=None, reduction='none', backend='reference')"
COMPUTE = """(cases) => {
    const explorer = hardneg.explorers[0];
    return cases.map(({anchor, setting, checkpoint, positive}) => {
        if (positive !== null) explorer.state.positive = positive;
        const full = {...hardneg.UNIFORM, ...setting};
        if (full.candidates === undefined) full.candidates = Infinity;
        const {rule, weight, gradient, share, ...rest} = explorer.compute(anchor, full, checkpoint);
        return {...rest, R: String(rest.R), G: String(rest.G), rule: [...rule], weight: [...weight],
                gradient: [...gradient], share: [...share], line: hardneg.pythonLine(full),
                fault: hardneg.settingError(full)};
    });
}"""


pytestmark = pytest.mark.filterwarnings("ignore:.* anchors are floored")


def drawn_settings(count: int, seed: int, exact: bool) -> list[dict[str, Any]]:
    """Random settings; ``exact``: such that all scores and limits are exact numbers, and ties are common."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        setting: dict[str, Any] = {"temperature": draw.choice([0.25, 0.5, 1.0] if exact else [0.05, 0.1, 0.5, 1.3])}
        setting["beta"] = draw.choice([0.0, 0.0, 0.5, 1.0, 4.0, 20.0])
        setting["prior"] = draw.choice([0.0, 0.0, 0.05, 0.1, 0.4])
        setting["labels"] = draw.random() < 0.4
        if draw.random() < 0.5:
            lower = draw.choice([0.0, 0.1, 0.3, 0.5, 0.9, 0.999])
            setting |= {"lower": lower, "upper": draw.choice([lower + 1e-4, (1 + lower) / 2, 1.0])}
        if draw.random() < 0.4:
            setting["threshold"] = draw.choice([-0.75, -0.25, 0.0, 0.125, 0.5, 1.0])
        setting["limit"] = draw.choice(["off", "off", "margin", "relative"])
        setting["margin"], setting["relative"] = draw.choice([0.0, 0.125, 0.5]), draw.choice([0.25, 0.5, 1.0])
        setting["candidates"] = draw.choice([1, 5, 30, 1000, 1000])
        found.append(setting)
    return found


class Stored:
    """What a page holds, as the library's input."""

    def __init__(self, page: Any) -> None:
        data = page.evaluate("hardneg.explorers[0].data")
        self.data = data
        self.features = [unpack(each["features"], data["dtype"], data["dim"]) for each in data["checkpoints"]]
        self.positives = data["checkpoints"][0]["positives"]
        known = data["labels"]
        self.labels = torch.full((data["count"],), -1) if known is None else torch.tensor(known)

    def mask(self, anchor: int, setting: dict[str, Any], marked: list[int]) -> Tensor:
        """The candidates of an anchor before labels and bands, (1, N)."""
        order = [row for row in self.data["order"] if row != anchor][: setting["candidates"]]
        mask = torch.zeros(1, self.data["count"], dtype=torch.bool)
        mask[0, order] = True
        mask[0, marked] = False
        return mask

    def check(self, found: dict[str, Any], case: dict[str, Any], z2: Tensor, marked: list[int]) -> hn.InfoNCE:
        """Compare what the page computed with the library's reference in float64, and with autograd."""
        anchor, setting = case["anchor"], case["setting"]
        assert found["fault"] == ""
        z1 = self.features[case["checkpoint"]][anchor : anchor + 1].clone().requires_grad_()
        z2 = z2[None].clone().requires_grad_()
        candidates = self.features[case["checkpoint"]].clone().requires_grad_()
        arguments = {"negatives": candidates, "negative_mask": self.mask(anchor, setting, marked)}
        if setting["labels"]:
            arguments |= {"labels": self.labels[anchor : anchor + 1], "negative_labels": self.labels}
        mine = loss_of(setting)
        loss = hn.InfoNCE(
            mine.temperature, mine.hardening, class_prior=mine.class_prior, supervision=mine.supervision,
            in_batch=None, reduction="none", backend="reference",
        )  # fmt: skip
        value = loss(z1, z2, **arguments)
        pasted = eval(found["line"][:-1] + OPTIONS, {"hn": hn})
        torch.testing.assert_close(pasted(z1, z2, **arguments), value, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(found["loss"], float(value.detach()), rtol=1e-6, atol=1e-9)
        # ∂L/∂n_j = ∂L/∂s_j · (ẑ − cos·n̂_j) / (t·‖n_j‖), and the same for the positive.
        unit, rows = z1.detach() / z1.detach().norm(), candidates.detach()
        hats = rows / rows.norm(dim=1, keepdim=True)
        slopes = torch.tensor(found["gradient"], dtype=torch.float64)[:, None] / setting["temperature"]
        expected = slopes * (unit - (hats @ unit.T) * hats) / rows.norm(dim=1, keepdim=True)
        by_candidate, by_positive = torch.autograd.grad(value.sum(), [candidates, z2])
        torch.testing.assert_close(by_candidate, expected, rtol=1e-6, atol=1e-8)
        hat = z2.detach() / z2.detach().norm()
        slope = found["positiveGradient"] / setting["temperature"]
        expected = slope * (unit - (hat @ unit.T) * hat) / z2.detach().norm()
        torch.testing.assert_close(by_positive, expected, rtol=1e-6, atol=1e-8)
        told = loss.diagnostics()
        assert found["support"] == told["support"]
        assert found["floored"] == bool(told["floored"])
        np.testing.assert_allclose(found["effective"], told["effective_negatives"], rtol=1e-6)
        weight, share = np.array(found["weight"]), np.array(found["share"])
        slopes = np.abs(found["gradient"])
        np.testing.assert_allclose(share, slopes / max(slopes.sum(), 1e-300), rtol=1e-9)
        kept = np.array(found["rule"]) == 0
        assert not weight[~kept].any()
        if kept.any():
            scores = (hats @ unit.T)[:, 0].numpy()[kept] / setting["temperature"]
            q = np.exp(setting["beta"] * (scores - scores.max()))
            np.testing.assert_allclose(weight[kept], q / q.sum(), rtol=1e-6)
            # R and G from their definitions
            r = float(((q / q.sum()) * np.exp(scores)).sum())
            np.testing.assert_allclose(float(found["R"]), r, rtol=1e-6)
            p = float((hat @ unit.T)[0, 0]) / setting["temperature"]
            floor = np.exp(-1 / setting["temperature"])
            prior = setting["prior"]
            g = max((r - prior * np.exp(p)) / (1 - prior), floor) if prior else r
            np.testing.assert_allclose(float(found["G"]), g, rtol=1e-6)
        return loss


def count_rules(reached: Counter[str], found: dict[str, Any], names: list[str]) -> None:
    for rule in set(found["rule"]):
        reached[names[rule] or "negative"] += 1
    reached["floored"] += found["floored"]
    reached["empty"] += found["support"] == 0
    reached["not empty"] += found["support"] > 1


COUNTS = [100, pytest.param(1500, marks=pytest.mark.slow)]


def shares(count: int, **least: float) -> dict[str, int]:
    """The least numbers of cases, given as shares."""
    return {name.replace("_", " "): int(share * count) for name, share in least.items()}


@pytest.mark.parametrize("count", COUNTS)
def test_every_number_is_that_of_the_reference_in_float64(tmp_path: Path, open_page: Open, count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(70, 9, generator=generator) + 0.3
    second = features + 0.5 * torch.randn(70, 9, generator=generator)
    earlier = torch.randn(70, 5, generator=generator)
    labels = torch.randint(-1, 4, (70,), generator=generator)
    file = write_explorer(
        features, tmp_path / "x.html", labels=labels, positives=second, checkpoints={"early": earlier}
    )
    page = open_page(file.path)
    stored, reached = Stored(page), Counter[str]()
    cases = [
        {"anchor": number % 70, "setting": setting, "checkpoint": int(number % 5 == 0), "positive": 0.625}
        for number, setting in enumerate(drawn_settings(count, 1, exact=False))
    ]
    names = page.evaluate("hardneg.RULES")
    expected = torch.nn.functional.cosine_similarity(features.double(), second.double())
    np.testing.assert_allclose(stored.positives, expected, rtol=1e-12)
    for case, found in zip(cases, page.evaluate(COMPUTE, cases), strict=True):
        z2 = at_cosine(stored.features[0][case["anchor"]], stored.positives[case["anchor"]])
        if case["checkpoint"]:  # it has no second view: the positive's cosine is the slider's
            z2 = at_cosine(stored.features[1][case["anchor"]], 0.625)
        stored.check(found, case, z2, [])
        count_rules(reached, found, names)
    # Every rule, and each special case, was met often.
    least = shares(
        count, below_the_ring=0.2, above_the_ring=0.08, below_the_threshold=0.1, same_label=0.1, floored=0.06,
        above_the_limit_below_the_positive=0.12, beyond_the_number_of_candidates=0.4, empty=0.04, not_empty=0.4,
        own_instance=1,
    )  # fmt: skip
    check_reached(reached, least)


def at_cosine(vector: Tensor, cosine: float) -> Tensor:
    """A unit vector at this cosine to a vector."""
    unit = vector / vector.norm()
    other = torch.linspace(-1, 2, len(unit), dtype=torch.float64)
    other = other - (other @ unit) * unit
    return cosine * unit + (1 - cosine**2) ** 0.5 * other / other.norm()


@pytest.mark.parametrize("count", COUNTS)
def test_ties_are_ranked_as_in_the_library(tmp_path: Path, open_page: Open, count: int) -> None:
    # Rows of ±1/4 have length 1 and cosines that are multiples of 1/8: exact in any order of summation.
    features = torch.randint(0, 2, (64, 16), generator=torch.Generator().manual_seed(1)).double() / 2 - 0.25
    labels = torch.arange(64) % 5 - 1
    page = open_page(write_explorer(features.float(), tmp_path / "x.html", labels=labels).path)
    stored, reached = Stored(page), Counter[str]()
    assert torch.equal(stored.features[0], features)
    marked = [3, 17]
    page.evaluate("for (const row of [3, 17]) hardneg.explorers[0].decisions.set(`${row},40`, 'drop')")
    cases = [
        {"anchor": 40 if number % 3 == 0 else number % 64, "setting": setting, "checkpoint": 0, "flipped": number % 9}
        for number, setting in enumerate(drawn_settings(count, 2, exact=True))
    ]
    for case in cases:
        case["positive"] = 1 - case["flipped"] / 8  # type: ignore[operator]
    names = page.evaluate("hardneg.RULES")
    for case, found in zip(cases, page.evaluate(COMPUTE, cases), strict=True):
        z2 = features[case["anchor"]].clone()
        z2[: case["flipped"]] *= -1
        # An anchor that equals its positive or opposes it has no gradient in its direction.
        stored.check(found, case, z2, marked if case["anchor"] == 40 else [40] if case["anchor"] in marked else [])
        count_rules(reached, found, names)
        cosines = features @ features[case["anchor"]]
        rule = torch.tensor(found["rule"])
        ring = (rule == names.index("below the ring")) | (rule == names.index("above the ring"))
        split = {float(c) for c in cosines[ring]} & {float(c) for c in cosines[rule == 0]}
        reached["a tie is split by the ring"] += bool(split)
        limit = case["positive"] * (1 if case["setting"]["limit"] == "relative" else 0) or None
        reached["at the limit"] += limit is not None and case["setting"]["relative"] == 1.0
    least = shares(
        count, a_tie_is_split_by_the_ring=0.12, marked_as_not_a_negative=0.1, at_the_limit=0.05, floored=0.04,
        empty=0.1, same_label=0.1,
    )  # fmt: skip
    check_reached(reached, least)


def test_wrong_settings_are_refused_as_by_the_library(tmp_path: Path, open_page: Open) -> None:
    page = open_page(write_explorer(torch.randn(10, 4), tmp_path / "x.html").path)
    wrong = [{"temperature": 0}, {"temperature": -1}, {"beta": -1}, {"prior": 1}, {"prior": -0.1},
             {"lower": 0.5, "upper": 0.5}, {"lower": -0.1}, {"upper": 1.1}, {"threshold": 2},
             {"relative": 0, "limit": "relative"}]  # fmt: skip
    for setting in wrong:
        assert page.evaluate("(setting) => hardneg.settingError({...hardneg.UNIFORM, ...setting})", setting)
        full = {"temperature": 0.5, "prior": 0.0, "lower": 0.0, "upper": 1.0, **setting}
        make = (lambda: hn.Exponential(-1)) if "beta" in setting else (lambda full=full: loss_of(full))
        with pytest.raises(ValueError, match="must"):
            make()
    assert page.evaluate("hardneg.settingError(hardneg.UNIFORM)") == ""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of small images with labels, texts as ids, and a second checkpoint."""
    generator = torch.Generator().manual_seed(3)
    centers = torch.randn(4, 12, generator=generator)
    labels = torch.arange(80) % 4
    features = centers[labels] + 0.6 * torch.randn(80, 12, generator=generator)
    return write_explorer(
        features,
        tmp_path_factory.mktemp("explorer") / "x.html",
        labels=labels,
        classes=["ant", "bee", "cat", "dog"],
        images=torch.randint(0, 256, (80, 6, 6, 3), dtype=torch.uint8, generator=generator),
        ids=[10**17 + row for row in range(80)],  # beyond the range of numbers in a browser
        checkpoints={"early": torch.randn(80, 12, generator=generator)},
        loss=hn.hcl(beta=1.0, tau_plus=0.05, temperature=0.5),
    ).path


def column(page: Any, number: int) -> list[str]:
    texts: list[str] = page.locator(f"[data-candidates] tr > :nth-child({number})").all_inner_texts()
    return texts


def numbers(page: Any) -> dict[str, list[str]]:
    """The table of the anchor: title → values of A and B."""
    rows = page.locator("[data-numbers] tr").all()
    return {row.locator("th").inner_text(): row.locator("td").all_inner_texts() for row in rows}


def percentages(texts: list[str]) -> list[float]:
    return [0.0 if text in ("0", "<0.01 %") else float(text.removesuffix(" %")) for text in texts]


def test_moving_a_slider_changes_weights_and_numbers_as_the_library_computes(written: Path, open_page: Open) -> None:
    page = open_page(written)
    stored, anchor = Stored(page), page.evaluate("hardneg.explorers[0].state.anchor")
    mask = stored.mask(anchor, {"candidates": 79}, [])
    before = percentages(column(page, 4))
    slider = page.locator("#x-A-beta")
    slider.focus()
    for _ in range(10):
        slider.press("ArrowRight")
    assert page.locator("[data-setting=A-beta]").input_value() == "2"
    after = percentages(column(page, 4))
    assert before != after
    unit = torch.nn.functional.normalize(stored.features[0], dim=1)
    scores = (unit @ unit[anchor] / 0.5).masked_fill(~mask[0], -torch.inf)
    q = (2 * scores).softmax(dim=0)
    np.testing.assert_allclose(after, 100 * q[scores.argsort(descending=True)[:20]], atol=0.006)
    loss = hn.hcl(beta=2.0, tau_plus=0.05, temperature=0.5, in_batch=None, reduction="none", backend="reference")
    z2 = at_cosine(stored.features[0][anchor], 0.9)[None]
    value = loss(stored.features[0][anchor : anchor + 1], z2, negatives=stored.features[0], negative_mask=mask)
    shown = numbers(page)
    assert float(shown["loss of the anchor"][0]) == pytest.approx(float(value), rel=1e-4)
    assert float(shown["effective number of negatives"][0]) == pytest.approx(
        loss.diagnostics()["effective_negatives"], rel=1e-4
    )
    line = page.locator("[data-line=A]").inner_text()
    expected = "hn.InfoNCE(temperature=0.5, hardening=hn.Exponential(2.0), class_prior=0.05)"
    assert line == expected
    # The number input accepts what the slider cannot reach, and refuses what the library refuses.
    box = page.locator("[data-setting=A-temperature]")
    box.fill("0.0375")
    assert "temperature=0.0375" in page.locator("[data-line=A]").inner_text()
    box.fill("0")
    assert "temperature=0.0375" in page.locator("[data-line=A]").inner_text()
    assert "temperature must be above 0" in page.locator(".x-A .x-problem").first.inner_text()


def test_each_dropped_candidate_names_its_rule_and_the_order_follows_the_weights(
    written: Path, open_page: Open
) -> None:
    page = open_page(written)
    assert column(page, 2) == sorted(column(page, 2), key=float, reverse=True)
    page.locator("[data-setting=A-lower]").fill("0.2")
    page.locator("[data-setting=A-upper]").fill("0.9")
    page.locator("[data-setting=A-labels]").check()
    labels, rules = column(page, 3), column(page, 6)
    assert {"same", "different"} == set(labels)
    assert all(rule == "same label" for label, rule in zip(labels, rules, strict=True) if label == "same")
    assert "above the ring" in rules
    page.locator("[data-order]").select_option("shareA")
    assert percentages(column(page, 5)) == sorted(percentages(column(page, 5)), reverse=True)
    assert set(column(page, 6)) == {""}  # negatives come first
    page.locator("[data-order]").select_option("weightB")
    assert percentages(column(page, 7)) == sorted(percentages(column(page, 7)), reverse=True)
    page.locator("[data-setting=A-threshold]").fill("1")
    assert numbers(page)["negatives (support)"][0] == "0"
    assert numbers(page)["loss of the anchor"][0] == "0"


def test_an_anchor_is_chosen_by_image_map_search_and_candidate(written: Path, open_page: Open) -> None:
    page = open_page(written)
    anchor = "hardneg.explorers[0].state.anchor"
    second = page.locator("[data-samples] button").nth(1)
    second.click()
    chosen = page.evaluate(anchor)
    assert chosen == page.evaluate("hardneg.explorers[0].data.order")[1]
    assert page.locator("[data-samples] button[aria-pressed=true]").count() == 1
    page.locator("[data-candidates] th button").first.click()
    assert page.evaluate(anchor) != chosen
    page.locator("[data-search]").fill("bee")
    assert page.locator("[data-range]").inner_text().endswith("of 20")
    page.locator("[data-search]").fill("nothing like this")
    assert page.locator("[data-range]").inner_text() == "nothing found"
    # A click on the map chooses the nearest point.
    place = page.evaluate("""(() => {
        const {map} = hardneg.explorers[0].data;
        const spread = (axis) => { const v = map.map((p) => p[axis]); return [Math.min(...v), Math.max(...v)]; };
        const [[x0, x1], [y0, y1]] = [spread(0), spread(1)];
        const canvas = document.querySelector("[data-map]"), box = canvas.getBoundingClientRect();
        const x = (12 + (map[7][0] - x0) / (x1 - x0) * (canvas.width - 24)) / canvas.width;
        const y = (canvas.height - 12 - (map[7][1] - y0) / (y1 - y0) * (canvas.height - 24)) / canvas.height;
        return [x * box.width, y * box.height];
    })()""")
    page.locator("[data-map]").click(position={"x": place[0], "y": place[1]})
    assert page.evaluate(anchor) == 7
    page.locator("[data-map]").focus()
    page.keyboard.press("ArrowRight")
    moved = page.evaluate(anchor)
    assert moved != 7
    points = page.evaluate("hardneg.explorers[0].data.map")
    assert points[moved][0] > points[7][0]
    assert f"{10**17 + moved}" in json.loads(page.evaluate("JSON.stringify(hardneg.explorers[0].data.ids)"))


def test_a_checkpoint_changes_the_cosines_of_the_same_anchor(written: Path, open_page: Open) -> None:
    page = open_page(written)
    before = column(page, 2)
    assert page.locator("[data-checkpoints] tbody tr").count() == 2
    losses = page.locator("[data-checkpoints] tbody td:nth-child(2)").all_inner_texts()
    assert losses[0] == numbers(page)["loss of the anchor"][0]
    page.locator("[data-setting=checkpoint]").select_option("1")
    assert column(page, 2) != before
    assert numbers(page)["loss of the anchor"][0] == losses[1]


def test_pairs_are_reviewed_by_keys_alone_and_saved_as_json_lines(
    written: Path, open_page: Open, tmp_path: Path
) -> None:
    page = open_page(written)
    suspects = page.evaluate("hardneg.explorers[0].data.suspects")
    ids = [10**17 + row for row in range(80)]
    text = page.locator("[data-progress-text]")
    total = len(suspects)
    # By tab alone the queue is reached.
    page.locator("[data-more]").focus()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.hasAttribute('data-queue')")
    for key in ("d", "k", "d", "D"):
        page.keyboard.press(key)
    assert text.inner_text() == f"4 of {total} pairs reviewed; 3 marked as not a negative"
    page.keyboard.press("u")
    assert text.inner_text() == f"3 of {total} pairs reviewed; 2 marked as not a negative"
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert page.locator("[data-pair]").inner_text().count("Pair 2 of") == 1
    assert "kept as a negative" in page.locator("[data-pair]").inner_text()
    page.keyboard.press("ArrowRight")
    assert "not a negative" in page.locator("[data-pair]").inner_text()
    # A marked pair is no negative any more.
    one, other = suspects[0][:2]
    page.evaluate("(row) => hardneg.explorers[0].choose(row)", one)
    result = page.evaluate(
        "([a, b]) => hardneg.RULES[hardneg.explorers[0].compute(a, hardneg.UNIFORM).rule[b]]", [one, other]
    )
    assert result == "marked as not a negative"
    page.locator("[data-download]").focus()
    with page.expect_download() as download:
        page.keyboard.press("Enter")
    assert download.value.suggested_filename == "not_negatives.jsonl"
    download.value.save_as(tmp_path / "saved.jsonl")
    lines = (tmp_path / "saved.jsonl").read_text().splitlines()
    expected = [{"a": ids[pair[0]], "b": ids[pair[1]]} for pair in (suspects[0], suspects[2])]
    assert [json.loads(line) for line in lines] == expected
    # The labels of setting A take pairs of one label out of the queue.
    page.locator("[data-setting=A-labels]").check()
    labels = torch.arange(80) % 4
    different = sum(bool(labels[pair[0]] != labels[pair[1]]) for pair in suspects)
    assert 0 < different < total
    assert f"of {different} pairs" in text.inner_text()


def test_a_candidate_is_marked_in_the_table(written: Path, open_page: Open) -> None:
    page = open_page(written)
    negatives = int(numbers(page)["negatives (support)"][0])
    page.locator("[data-candidates] tr td:last-child button").first.click()
    assert column(page, 6)[0] == "marked as not a negative"
    assert numbers(page)["negatives (support)"] == [str(negatives - 1)] * 2
    page.locator("[data-candidates] tr td:last-child button").first.click()
    assert numbers(page)["negatives (support)"] == [str(negatives)] * 2


HOSTILE = [
    "<script>alert(1)</script>", "</script><script>alert(2)</script>", "<img src=x onerror=alert(3)>", "<!-- <script>",
    "$title ${script} {{7*7}}", '"><svg onload=alert(4)>', "\u202e reversed \x1b[31m", "javascript:alert(5)",
]  # fmt: skip


def test_text_from_data_is_never_interpreted(tmp_path: Path, open_page: Open) -> None:
    count = len(HOSTILE)
    features = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))
    file = tmp_path / "x.html"
    write_explorer(
        features, file, labels=HOSTILE, texts=HOSTILE[::-1], ids=[f"{text} id" for text in HOSTILE],
        checkpoints={text: features for text in HOSTILE[:3]}, name=HOSTILE[1],
    )  # fmt: skip
    text = file.read_text(encoding="utf-8")
    assert text.count("<script") == 2  # the data and the script of the page
    assert text.count("</script>") == 2
    page = open_page(file)
    for row in range(count):
        page.evaluate("(row) => hardneg.explorers[0].choose(row)", row)
        page.keyboard.press("Tab")
    assert page.locator("img, svg[onload], main script:not([type])").count() == 0
    shown = page.locator("[data-samples]").inner_text()
    assert all(text in shown for text in HOSTILE if "\u202e" not in text)
    attributes = page.evaluate("[...document.querySelectorAll('[aria-label]')].map((e) => e.ariaLabel).join(' ')")
    assert "<script>alert(1)</script>" in attributes
    assert "\u202e" not in page.locator("body").inner_text()
    page.locator("[data-queue]").focus()
    page.keyboard.press("d")
    line = page.evaluate("hardneg.explorers[0].markedLines()")
    assert {*json.loads(line).values()} <= {f"{text} id" for text in HOSTILE}


@pytest.mark.parametrize("width", [320, 400, 1280])
def test_the_page_never_scrolls_sideways(written: Path, open_page: Open, width: int) -> None:
    page = open_page(written, viewport={"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_every_control_has_a_name_and_the_dark_mode_keeps_the_contrast(written: Path, open_page: Open) -> None:
    page = open_page(written, color_scheme="dark")
    nameless = page.evaluate("""[...document.querySelectorAll(".explorer :is(button, input, select, canvas, progress)")]
        .filter((e) => !(e.ariaLabel || e.labels?.length || e.textContent.trim())).map((e) => e.outerHTML)""")
    assert nameless == []
    colors = page.evaluate("""["section", ".explorer button", ".x-rule", ".x-control label"].map((name) => {
        const style = getComputedStyle(document.querySelector(name));
        return name === "section" ? style.backgroundColor : style.color;
    })""")
    background, *inks = (luminance(color) for color in colors)
    assert background < 0.05
    assert all((ink + 0.05) / (background + 0.05) >= 4.5 for ink in inks)


def luminance(color: str) -> float:
    """Relative luminance of "rgb(r, g, b)", as defined by the WCAG."""
    parts = [int(part) / 255 for part in color[4:-1].split(",")]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_the_scripts_are_small() -> None:
    folder = Path(hn.__file__).parent / "insight" / "page"
    assert sum(file.stat().st_size for file in folder.glob("*.js")) < 300_000


def test_a_page_that_would_be_too_large_shows_fewer_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hardneg.insight.explorer.page.MAX_BYTES", 200_000)
    ids = [f"{'long' * 200} {row}" for row in range(400)]
    written = write_explorer(torch.randn(400, 16), tmp_path / "x.html", ids=ids)
    assert written.path.stat().st_size <= 200_000
    assert 50 < len(written.samples) < 400
    assert any(f"Of 400 samples, {len(written.samples)} are shown" in note for note in written.notes)


@pytest.mark.slow
def test_an_interaction_with_5000_samples_takes_less_than_100_milliseconds(tmp_path: Path, open_page: Open) -> None:
    features = torch.randn(5000, 128, generator=torch.Generator().manual_seed(0))
    page = open_page(write_explorer(features, tmp_path / "x.html", labels=torch.arange(5000) % 10).path)
    times = []
    for step in range(1, 21):
        page.locator("[data-setting=A-beta]").fill(str(step / 10))
        times.append(page.evaluate("hardneg.explorers[0].state.milliseconds"))
    print(f"median {sorted(times)[10]:.1f} ms, worst {max(times):.1f} ms")
    assert sorted(times)[10] < 100
