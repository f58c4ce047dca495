"""Charts draw values at the right coordinates, for every range of values."""

import json
import math
import re
from importlib import resources
from itertools import combinations, pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardneg.insight import svg

numbers = st.floats(-1e9, 1e9, allow_nan=False).filter(lambda value: value == 0 or abs(value) > 1e-9)


def parsed(chart: str) -> tuple[ElementTree.Element, dict[str, object]]:
    drawing, _, data = chart.partition("<script")
    reading = json.loads(data[data.index(">") + 1 : data.rindex("</script>")]) if data else {}
    return ElementTree.fromstring(drawing), reading


@given(numbers, numbers)
def test_ticks_are_few_equidistant_and_cover_the_range(one: float, other: float) -> None:
    low, high = min(one, other), max(one, other)
    marks = svg.ticks(low, high)
    room = 1e-6 * max(abs(low), abs(high), 1e-9)
    assert 2 <= len(marks) <= 9
    assert marks[0] <= low + room
    assert marks[-1] >= high - room
    assert all(math.isclose(b - a, marks[1] - marks[0], rel_tol=1e-3) for a, b in pairwise(marks))


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=20))
def test_all_elements_are_inside_the_chart(points: list[tuple[float, float]]) -> None:
    points = sorted(dict(points).items())
    xs, ys = zip(*points, strict=True)
    drawing, _ = parsed(svg.line_chart([svg.Series("a", 0, xs, ys, ys, ys)], "epoch", "nats", "words"))
    for path in drawing.iter("path"):  # marks are moved to their place
        for x, y in re.findall(r"([-\d.]+)[, ]([-\d.]+)", path.attrib.get("transform", path.attrib["d"])):
            assert 0 <= float(x) <= svg.WIDTH
            assert 0 <= float(y) <= svg.HEIGHT
    for text in drawing.iter("text"):
        width, x = 6.2 * len(text.text or ""), float(text.attrib["x"])
        left = {"middle": x - width / 2, "end": x - width}.get(text.attrib.get("class", ""), x)
        assert left >= -1, text.text
        assert left + width <= svg.WIDTH + 1, text.text


def test_a_line_passes_through_its_points() -> None:
    drawing, reading = parsed(svg.line_chart([svg.Series("a", 0, [0, 10], [0.0, 100.0])], "epoch", "%", "words"))
    left, top, right, bottom = reading["box"]  # type: ignore[misc]
    (path,) = (p for p in drawing.iter("path") if "line" in p.attrib["class"])
    assert path.attrib["d"] == f"M{left:.1f},{bottom:.1f}L{right:.1f},{top:.1f}"
    assert reading["series"] == [{"name": "a", "style": "s0", "y": [0.0, 100.0]}]


@pytest.mark.parametrize("epochs", [2, 3, 15, 60, 400])
def test_ticks_of_epochs_are_whole_numbers(epochs: int) -> None:
    xs = list(range(1, epochs + 1))
    drawing, _ = parsed(svg.line_chart([svg.Series("a", 0, xs, xs)], "epoch", "nats", "words"))
    shown = [text.text or "" for text in drawing.iter("text") if text.attrib.get("class") == "middle"]
    assert 2 <= len(shown) <= 9
    assert all(1 <= int(text) <= epochs for text in shown)


def test_tooltip_values_of_lines_with_different_epochs() -> None:
    lines = [svg.Series("a", 0, [1, 2, 3], [1.0, 2.0, 3.0]), svg.Series("b", 1, [2], [5.0])]
    _, reading = parsed(svg.line_chart(lines, "epoch", "nats", "words"))
    assert reading["x"] == [1, 2, 3]
    assert [line["y"] for line in reading["series"]] == [[1, 2, 3], [None, 5, None]]  # type: ignore[union-attr]


def test_112_series_have_different_marks_or_colors_and_16_different_colors() -> None:
    marks = [svg.mark(number, 0, 0, 1) for number in range(112)]
    assert len({*marks}) == 112
    assert len({svg.style_classes(number) for number in range(16)}) == 16


@pytest.mark.parametrize(("scheme", "background"), [(0, "#ffffff"), (1, "#1b1d21")])
def test_all_colors_differ_from_each_other_and_from_the_background(scheme: int, background: str) -> None:
    from colorsys import rgb_to_yiq

    style = resources.files("hardneg.insight").joinpath("page", "page.css").read_text(encoding="utf-8")
    assert f"--card: {background}" in style
    colors = [re.findall(rf"--c{number}: (#\w{{6}});", style)[scheme] for number in range(svg.COLORS)]

    def parts(color: str) -> list[float]:
        return [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]

    def luminance(color: str) -> float:
        linear = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts(color))
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    for color in colors:
        low, high = sorted((luminance(color), luminance(background)))
        assert (high + 0.05) / (low + 0.05) >= 3, color
    for one, other in combinations(colors, 2):
        assert math.dist(rgb_to_yiq(*parts(one)), rgb_to_yiq(*parts(other))) > 0.1, (one, other)


@given(numbers, numbers, st.sampled_from([None, 5.0]))
def test_an_axis_covers_its_values_and_does_not_magnify_noise(one: float, other: float, least: float | None) -> None:
    low, high = min(one, other), max(one, other)
    first, last = svg.widened(low, high, least)
    room = 1e-6 * max(abs(low), abs(high), 1.0)
    assert first <= low + room
    assert last >= high - room
    assert last - first >= (least or 0.1 * max(abs(low), abs(high))) - room
    assert low < 0 or first >= 0 or least is not None
    if least is not None and low >= 0 and high <= 100:
        assert -room <= first
        assert last <= 100 + room


def test_values_of_a_percentage_that_differ_by_noise_are_close_in_the_chart() -> None:
    drawing, _ = parsed(svg.dot_chart([("a", 0, [91.0, 91.1])], "%", "words", 5.0))
    one, other = (
        float(re.findall(r"translate\(([\d.]+)", path.attrib["transform"])[0]) for path in drawing.iter("path")
    )
    assert 0 < other - one < svg.WIDTH / 20


def test_names_are_escaped_in_svg_and_json() -> None:
    name = '</script><script>alert("&")</script>'
    charts = [
        svg.line_chart([svg.Series(name, 0, [1], [1.0])], name, name, name),
        svg.histogram_chart([-1, 0, 1], [(name, "same", [50, 50], 0.0)], 50, name, name, name),
        svg.dot_chart([(name, 0, [1.0])], name, name),
    ]
    for chart in charts:
        assert "<script>" not in chart
        parsed(chart)


@pytest.mark.parametrize("mean", [0.5, math.nan])
def test_the_area_of_a_histogram_equals_its_shares(mean: float) -> None:
    edges, shares = [-1.0, -0.5, 0.0, 0.5, 1.0], [10.0, 20.0, 30.0, 40.0]
    drawing, reading = parsed(svg.histogram_chart(edges, [("a", "same", shares, mean)], 40, "cosine", "%", "words"))
    (path,) = drawing.iter("path")
    corners = [(float(x), float(y)) for x, y in re.findall(r"([-\d.]+),([-\d.]+)", path.attrib["d"])]
    area = (
        abs(sum(x1 * y2 - x2 * y1 for (x1, y1), (x2, y2) in zip(corners, corners[1:] + corners[:1], strict=True))) / 2
    )
    left, top, right, bottom = reading["box"]  # type: ignore[misc]
    assert area == pytest.approx((right - left) / 4 * (bottom - top) / 40 * sum(shares), rel=1e-3)
    assert len([line for line in drawing.iter("line") if "mean" in line.attrib["class"]]) == (mean == mean)
