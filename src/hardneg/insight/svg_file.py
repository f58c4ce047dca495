"""Charts as SVG files of their own: with their colors, a legend and a description, and without scripts."""

import re
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from importlib import resources

from hardneg.insight import svg
from hardneg.printable import printable

_LEGEND_LINE, _MARGIN = 16, 6  # user units; the margin is for numbers at the end of an axis
_RULES = """
text { font: 11px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; fill: var(--muted); }
.name { fill: var(--ink); } .middle { text-anchor: middle; } .end { text-anchor: end; }
.card { fill: var(--card); } .grid { stroke: var(--grid); } .axis { stroke: var(--muted); }
.line { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; } .band { fill: var(--c); opacity: .16; }
.dot { fill: var(--c); stroke: var(--card); stroke-width: 1; vector-effect: non-scaling-stroke; }
.bar { stroke: var(--ink); stroke-width: 2; } .faint { opacity: .3; }
"""


def line_chart_file(series: Sequence[svg.Series], x_label: str, y_label: str, description: str) -> str:
    """The text of an SVG file with these lines; it follows the reader's light or dark mode.

    Examples:
        >>> text = line_chart_file([svg.Series("loss", 0, [0, 1], [2.0, 1.0])], "epoch", "nats", "The loss falls")
        >>> text.startswith("<svg xmlns=") and "<title>The loss falls</title>" in text
        True
    """
    series = [replace(line, name=printable(line.name)) for line in series]  # control characters are no XML
    drawing = svg.line_chart(series, x_label, y_label, description).partition("<script")[0]
    height = svg.HEIGHT + _LEGEND_LINE * len(series) + 4
    legend = "".join(
        svg.mark(line.style, 16, y, 4) + f'<text class="name" x="28" y="{y + 4}">{escape(line.name)}</text>'
        for y, line in zip(range(svg.HEIGHT + 6, height, _LEGEND_LINE), series, strict=True)
    )
    return _file(drawing, height, description, legend)


def dot_chart_file(rows: Sequence[tuple[str, int | str, Sequence[float]]], x_label: str, description: str) -> str:
    """The text of an SVG file with a row for each (name, style, values): a mark for each value, a bar at their mean.

    Examples:
        >>> "<title>Two seeds</title>" in dot_chart_file([("SimCLR", 0, [40.1, 40.9])], "kNN, %", "Two seeds")
        True
    """
    drawing = svg.dot_chart(rows, x_label, description)
    return _file(drawing, float(re.findall(r'viewBox="0 0 \S+ (\S+)"', drawing)[0]), description)


def _file(drawing: str, height: float, description: str, legend: str = "") -> str:
    """A chart of the report as a file of this height in user units."""
    inner = re.sub(r"^<svg[^>]*>|</svg>$|<g class=\"cursor\"[^>]*></g>", "", drawing)
    width = svg.WIDTH + 2 * _MARGIN
    colors = "".join(f".s{number} {{ --c: var(--c{number}); }} " for number in range(svg.COLORS))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{-_MARGIN} 0 {width} {height:g}" width="{2 * width}" '
        f'role="img"><title>{escape(printable(description))}</title>'
        f"<style>{escape(_variables() + _RULES + colors, quote=False)}</style>"
        f'<rect class="card" x="{-_MARGIN}" width="{width}" height="{height:g}"/>{inner}{legend}</svg>\n'
    )


def _variables() -> str:
    """The colors of the report's style sheet, for light and dark mode."""
    sheet = resources.files("hardneg.insight").joinpath("page", "page.css").read_text(encoding="utf-8")
    return sheet[sheet.index(":root") : sheet.index("* {")]
