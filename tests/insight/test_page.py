"""The report in a browser: no errors, no requests, readable on a phone and in dark mode, with tooltips and sorting."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from insight.folders import digits_samples, make_comparison, make_run

from hardneg.insight.report import write_report

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
sync_api = pytest.importorskip("playwright.sync_api", reason="the browser test needs playwright")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="the browser test needs chromium on the path")
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run",
]  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("report")
    runs = make_comparison(folder, ("simclr", "hcl", "hscl", "decoupled"), seeds=2)
    content = json.loads((runs[0] / "evaluation.json").read_text())
    described = {"uniformity": {"title": "uniformity", "better": "lower", "percent": False}}
    (runs[0] / "evaluation.json").write_text(json.dumps({**content, "metrics": described}))
    bad = ["<script>alert(1)</script>", *map(str, range(1, 10))]
    return write_report(
        runs,
        folder / "report.html",
        extra_rows={
            "raw pixels": {"knn": [0.98], "uniformity": [-1.0]},
            "a-name-without-any-line-break-" * 3: {"knn": [0.5], "uniformity": [-2.0]},
        },
        load_samples=lambda run: digits_samples()(run)._replace(classes=bad),
    )


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, written: Path) -> Iterator[Any]:
    """The page in a window; no test may cause an error or a request."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    messages: list[str] = []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("dialog", lambda dialog: messages.append(dialog.message))
    page.on("request", lambda request: request.url[:5] in ("file:", "data:") or messages.append(request.url))
    page.goto(written.as_uri())
    yield page
    page.close()
    assert messages == []


def open_everything(page: Any) -> None:
    page.evaluate("document.querySelectorAll('details').forEach((details) => { details.open = true; })")


REVERSED, ARABIC, LONG = "\u202ereversed", "\u0635\u0648\u0631\u0629", "unbroken" * 60
ODD = [f"{REVERSED} (1)", ARABIC, LONG, "\u8d85\u957f" * 80, "W" * 90, "a\u2067b", "6", "7", "8", "9"]


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of runs with long and bidirectional names, classes, metrics, settings and environments."""
    folder: Path = tmp_path_factory.mktemp("odd")
    values = {"simclr": (0.5, 0.51), "hcl": (0.8, 0.81), "hscl": (0.6, 0.61), "scl": (0.7, 0.71)}
    runs = []
    for preset, given in values.items():
        for seed, value in enumerate(given):
            evaluation = {"knn": value, LONG: value / 2, REVERSED: value / 3, ARABIC: value / 4}
            run = make_run(folder / preset / str(seed), preset, seed, 4, overrides=[f"about={json.dumps(LONG)}",
                           f"data.source={json.dumps(ARABIC + LONG)}"], evaluation=evaluation)  # fmt: skip
            (run / "environment.json").write_text(json.dumps({"command": ["run", REVERSED, LONG], LONG: LONG,
                                                              REVERSED: REVERSED}))  # fmt: skip
            lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            for number, line in enumerate(lines):
                line["seconds"] |= {LONG: 0.1, REVERSED: 0.1}
                line["objective"] |= {LONG: number, REVERSED: number + 1}
            (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
            runs.append(run)
    load = digits_samples()
    return write_report(
        runs,
        folder / "report.html",
        names=[LONG, REVERSED, ARABIC, "\u8d85\u957f" * 80],
        extra_rows={"W" * 200: {"knn": [0.4]}},
        load_samples=lambda run: load(run)._replace(classes=ODD),
    )


@pytest.mark.parametrize("width", [320, 1280])
def test_long_and_bidirectional_names_stay_inside_their_box(browser: Any, odd: Path, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto(odd.as_uri())
    for _ in ("as it opens", "with everything open"):
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        open_everything(page)
    if shots := os.environ.get("HARDNEG_SCREENSHOTS"):
        page.screenshot(path=f"{shots}/odd-{width}.png", full_page=True)
    # Every element stays inside its section, except in boxes that scroll.
    wide = page.evaluate("""[...document.querySelectorAll("main *")].filter((element) => {
        if (element.closest(".wide, pre, .hidden, svg, script")) return false;
        return element.getBoundingClientRect().right > element.closest("section").getBoundingClientRect().right + 1;
    }).map((element) => element.outerHTML.slice(0, 80))""")
    assert wide == []
    # A long name does not widen a table that scrolls.
    widths = page.evaluate("[...document.querySelectorAll('.wide table')].map((table) => table.scrollWidth)")
    assert max(widths) < 1800
    cut = page.evaluate("""[...document.querySelectorAll(".plot text.name")].filter((name) =>
        name.getBoundingClientRect().right > name.closest("svg").getBoundingClientRect().right).length""")
    assert cut == 0
    page.close()


def test_the_writing_direction_of_a_name_is_isolated(browser: Any, odd: Path) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(odd.as_uri())
    open_everything(page)
    # Every text that can change the direction is in an element that isolates it.
    loose = page.evaluate("""(() => {
        const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
        const found = [];
        while (walker.nextNode()) {
            const [at, words] = [walker.currentNode.parentElement, walker.currentNode.data];
            if (!/[\\u202e\\u2067\\u0600-\\u06ff]/.test(words) || at.closest("script, style")) continue;
            const own = ["text", "title", "code", "pre", "option"].includes(at.localName);  // a paragraph, or escaped
            if (!at.closest("bdi") && !own) found.push(at.outerHTML.slice(0, 80));
        }
        return found;
    })()""")
    assert loose == []
    # In a sentence, the text after a name is also displayed after it.
    found = page.evaluate("""[...document.querySelectorAll("bdi")].filter((name) =>
        name.textContent.includes("\\u202e") && name.nextSibling instanceof Text && name.nextSibling.data.trim()
    ).map((name) => {
        const after = document.createRange();
        after.selectNodeContents(name.nextSibling);
        const [one, other] = [name.getClientRects()[0], after.getClientRects()[0]];
        return other.top > one.top + 4 || other.left >= one.right - 1;
    })""")
    assert len(found) >= 2
    assert all(found)
    # Direction marks are escaped where no element isolates them.
    text = odd.read_text(encoding="utf-8")
    assert "\u202e" not in text[text.index("<title>") : text.index("</title>")]
    attributes = page.evaluate("""[...document.querySelectorAll("[aria-label], [alt], [title]")].map((element) =>
        ["aria-label", "alt", "title"].map((name) => element.getAttribute(name) ?? "").join(" ")).join(" ")""")
    assert "reversed" in attributes
    assert "\u202e" not in attributes
    assert "\u202e" not in "".join(page.locator("pre, code, .plot text, .plot title").all_text_contents())
    page.close()


def test_all_images_are_decoded(page: Any) -> None:
    open_everything(page)
    widths = page.evaluate("""Promise.all([...document.querySelectorAll("#gallery img, #hubs img")].map((image) =>
        image.decode().then(() => image.naturalWidth)))""")
    assert len(widths) == 6 * (1 + 4 * 9) + 4 * 6  # the gallery and the hubs
    assert set(widths) == {8}
    assert page.evaluate("getComputedStyle(document.images[0]).imageRendering") == "pixelated"


@pytest.mark.parametrize("width", [320, 360, 768, 1280, 2560])
def test_the_page_never_scrolls_sideways(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 740})
    for _ in ("as it opens", "with everything open"):
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        open_everything(page)


@pytest.mark.parametrize("width", [360, 1280])
def test_labels_of_charts_do_not_overlap_and_are_not_cut_off(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 740})
    open_everything(page)
    faults = page.evaluate("""[...document.querySelectorAll(".plot")].flatMap((plot) => {
        const outer = plot.getBoundingClientRect();
        const texts = [...plot.querySelectorAll("text")].map((t) => [t.textContent, t.getBoundingClientRect()]);
        const cut = texts.filter(([, box]) => box.left < outer.left - 1 || box.right > outer.right + 1);
        const overlapping = texts.filter(([, a], i) => texts.slice(i + 1).some(([, b]) =>
            a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3));
        return [...cut, ...overlapping].map(([words]) => plot.getAttribute("aria-label").slice(0, 30) + ": " + words);
    })""")
    assert faults == []


def test_text_of_charts_is_at_least_10_pixels_on_a_phone(page: Any) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    scale = page.evaluate(
        "(() => { const p = document.querySelector('#curves .plot'); return p.clientWidth / 340; })()"
    )
    assert 11 * scale >= 10


def test_dark_mode_changes_the_background_and_keeps_the_contrast(page: Any) -> None:
    backgrounds = {}
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        colors = page.evaluate("""["body", ".hint", "th", ".line.s0", ".line.s3"].map((name) => {
            const style = getComputedStyle(document.querySelector(name));
            return name.startsWith(".line") ? style.stroke : style.color;
        }).concat(getComputedStyle(document.querySelector("section")).backgroundColor)""")
        *inks, background = (luminance(color) for color in colors)
        backgrounds[scheme] = background
        for ink, least in zip(inks, (7, 4.5, 4.5, 3, 3), strict=True):
            assert (max(ink, background) + 0.05) / (min(ink, background) + 0.05) >= least, (scheme, colors)
    assert backgrounds["dark"] < 0.05 < 0.9 < backgrounds["light"]


def luminance(color: str) -> float:
    """Relative luminance of "rgb(r, g, b)", as defined by the WCAG."""
    parts = [int(part) / 255 for part in color[4:-1].split(",")]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_hovering_shows_the_values_of_all_lines(page: Any) -> None:
    chart = page.locator("#curves [data-chart]").first
    plot = chart.locator(".plot")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 14, box["y"] + 60)
    tip = chart.locator(".tip")
    assert tip.locator("strong").inner_text() == "epoch 60 (nats)"
    final = plot.get_attribute("aria-label").rpartition("Last values: ")[2].rstrip(".")
    expected = dict(entry.rsplit(" ", 1) for entry in final.split(", "))
    shown = {row.locator("span").inner_text(): row.locator("b").inner_text() for row in tip.locator("div").all()}
    assert {name: float(value) for name, value in shown.items()} == {n: float(v) for n, v in expected.items()}
    page.mouse.move(0, 0)
    assert not tip.is_visible()


def test_arrow_keys_show_the_values(page: Any) -> None:
    chart = page.locator("#histograms [data-chart]").first
    chart.locator(".plot").focus()
    page.keyboard.press("ArrowLeft")
    assert chart.locator(".tip strong").inner_text() == "cosine 0.98 (% of pairs)"
    page.keyboard.press("ArrowLeft")
    assert chart.locator(".tip strong").inner_text() == "cosine 0.94 (% of pairs)"
    page.keyboard.press("Escape")
    assert not chart.locator(".tip").is_visible()


def test_a_click_on_a_heading_sorts_by_that_column_with_the_best_first(page: Any) -> None:
    page.locator("#comparison th", has_text="uniformity").locator("button").click()
    column = "[...document.querySelectorAll('#comparison tbody tr')].map((row) => row.cells[7].dataset.value)"
    rising = [float(value) for value in page.evaluate(column) if value]
    assert len(rising) == 2
    assert rising == sorted(rising)  # lower is better: the best value first
    head = page.locator("#comparison th", has_text="kNN")
    values = "[...document.querySelectorAll('#comparison tbody tr')].map((row) => row.cells[{}].dataset.value)"
    head.locator("button").click()
    falling = [float(value) for value in page.evaluate(values.format(2))]
    assert falling == sorted(falling, reverse=True)
    assert head.get_attribute("aria-sort") == "descending"
    head.locator("button").click()
    assert [float(value) for value in page.evaluate(values.format(2))] == falling[::-1]
    page.locator("#comparison th", has_text="linear").locator("button").click()
    assert page.evaluate(values.format(4))[-2:] == ["", ""]  # empty cells stay at the end
    page.locator("#comparison th", has_text="method").locator("button").click()
    names = page.evaluate(values.format(0))
    assert names == sorted(names)


def test_a_group_can_be_shown_alone(page: Any) -> None:
    button = page.locator("#curves .legend button", has_text="hscl")
    faded = "document.querySelectorAll('#curves .plot .faded').length"
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    assert page.evaluate(faded) > 0
    assert page.locator("#curves .plot .faded[data-name$=hscl]").count() == 0
    button.click()
    assert page.evaluate(faded) == 0


def test_tables_and_charts_are_shown_without_scripts(browser: Any, written: Path) -> None:
    page = browser.new_page(java_script_enabled=False)
    page.goto(written.as_uri())
    assert page.locator("#comparison tbody tr").count() == 6
    assert page.locator("#curves .plot").first.is_visible()
    page.close()
