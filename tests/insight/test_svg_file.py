"""A chart as a file: well-formed, described, with a legend, offline and without scripts."""

import re
from xml.etree import ElementTree

import pytest

from hardneg.insight.svg import Series
from hardneg.insight.svg_file import dot_chart_file, line_chart_file

NAME = "<script>alert(1)</script> & \x1b[31m"


def test_the_file_is_well_formed_and_describes_itself() -> None:
    lines = [Series("first", 0, [0, 1, 2], [1.0, 2.0, 3.0]), Series(NAME, 1, [0, 1, 2], [3.0, 2.0, 1.0])]
    text = line_chart_file(lines, "x", "y", f"Two lines {NAME}")
    root = ElementTree.fromstring(text)
    shape = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{shape}svg"
    assert root.get("role") == "img"
    assert root[0].tag == f"{shape}title"
    assert root[0].text is not None
    assert root[0].text.startswith("Two lines")
    legend = [node.text for node in root.iter(f"{shape}text") if node.get("class") == "name"]
    assert legend == ["first", NAME.replace("\x1b", "\\x1b")]
    assert not list(root.iter(f"{shape}script"))
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")  # nothing is loaded


def test_every_mark_has_a_color_and_lies_in_the_drawing() -> None:
    lines = [Series(str(number), number, [0, 1], [number, number + 1]) for number in range(5)]
    text = line_chart_file(lines, "x", "y", "Five lines")
    left, width, height = map(float, re.findall(r'viewBox="(\S+) 0 (\S+) (\S+)"', text)[0])
    marks = re.findall(r'class="dot (s\d+)"[^>]*translate\((\S+) (\S+)\)', text)
    assert {color for color, _, _ in marks} == {f"s{number}" for number in range(5)}
    assert all(left <= float(x) <= left + width and 0 <= float(y) <= height for _, x, y in marks)
    for color in {color for color, _, _ in marks}:
        assert f".{color} {{ --c: var(--c{color[1:]}); }}" in text
        assert f"--c{color[1:]}: #" in text


def test_a_dot_chart_has_a_mark_for_each_value() -> None:
    text = dot_chart_file([("first", 0, [1.0, 2.0, 4.0]), (NAME, 1, [3.0])], "x", f"Two rows {NAME}")
    root = ElementTree.fromstring(text)
    shape = "{http://www.w3.org/2000/svg}"
    names = [node.text for node in root.iter(f"{shape}text") if node.get("class") == "name"]
    assert names == ["first", NAME.replace("\x1b", "\\x1b")]
    marks = [float(x) for x in re.findall(r'class="dot s0"[^>]*translate\((\S+) ', text)]
    assert (marks[2] - marks[0]) / (marks[1] - marks[0]) == pytest.approx(3, rel=0.01)
    assert not list(root.iter(f"{shape}script"))
    height = float(str(root.get("viewBox")).split()[3])
    assert all(float(y) < height for y in re.findall(r'class="dot[^>]*translate\(\S+ (\S+)\)', text))
