"""Charts as inline SVG, drawn in Python and colored by the style sheet of the page, dark mode included.

A charting library would be larger than the rest of the page, and would need scripts to draw.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, pairwise
from unicodedata import east_asian_width

from hardneg.printable import printable

WIDTH, HEIGHT = 340, 208  # in user units: the width of a phone, so that its text is not scaled there
_TOP, _RIGHT, _BOTTOM = 20, 12, 34
_CHARACTER = 6.2  # width of a digit in user units
COLORS = 16  # of the style sheet
_SHAPES = (  # of marks, of a size of about 1 around the origin; with the colors, 112 distinct series
    "M1,0A1,1 0 1 1 -1,0A1,1 0 1 1 1,0Z",  # circle
    "M-.9,-.9H.9V.9H-.9Z",  # square
    "M0,-1.2L1.15,.8H-1.15Z",  # triangle
    "M0,-1.35L1.05,0L0,1.35L-1.05,0Z",  # diamond
    "M0,1.2L1.15,-.8H-1.15Z",  # triangle, downwards
    "M-.4,-1.2H.4V-.4H1.2V.4H.4V1.2H-.4V.4H-1.2V-.4H-.4Z",  # plus
    "M0,-1.2L1.14,-.37L.7,.97H-.7L-1.14,-.37Z",  # pentagon
)
_LEAST_SPAN = 0.1  # of the largest number on an axis: a range below would magnify noise
_MARKS = 8  # on a line


@dataclass(frozen=True)
class Series:
    """A line. style: number of its color and marks, or a CSS class · low, high: a band around it, or empty."""

    name: str
    style: int | str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()

    @property
    def classes(self) -> str:
        """The CSS class of its color."""
        return style_classes(self.style)


@dataclass(frozen=True)
class Axes:
    """The plotting area: its left edge in user units, and the range of x and y."""

    left: float
    x: tuple[float, float]
    y: tuple[float, float]
    height: float = HEIGHT

    def user_x(self, x: float) -> float:
        """x in user units from the left."""
        return self.left + (x - self.x[0]) / (self.x[1] - self.x[0]) * (WIDTH - _RIGHT - self.left)

    def user_y(self, y: float) -> float:
        """y in user units from the top."""
        return self.height - _BOTTOM - (y - self.y[0]) / (self.y[1] - self.y[0]) * (self.height - _BOTTOM - _TOP)


def style_classes(style: int | str) -> str:
    """The CSS class of the n-th series: colors repeat after 16, with another shape of marks."""
    return style if isinstance(style, str) else f"s{style % COLORS}"


def mark(style: int | str, x: float, y: float, size: float, kind: str = "dot", title: str = "") -> str:
    """The mark of the n-th series at a point in user units, with a tooltip."""
    shape = _SHAPES[style % len(_SHAPES) if isinstance(style, int) else 0]
    shown = f"<title>{escape(printable(title))}</title>" if title else ""
    return (
        f'<path class="{kind} {style_classes(style)}" d="{shape}" '
        f'transform="translate({x:.1f} {y:.1f}) scale({size:g})">{shown}</path>'
    )


def swatch(style: int | str) -> str:
    """A short line with its mark, for a legend."""
    line = '<line x1="1" y1="6" x2="27" y2="6"/>' + mark(style, 14, 6, 4)
    return f'<svg class="swatch {style_classes(style)}" viewBox="0 0 28 12" aria-hidden="true">{line}</svg>'


def widened(low: float, high: float, least: float | None = None) -> tuple[float, float]:
    """A range around this one that does not magnify noise; it does not cross 0 or, with ``least``, 100.

    least: the least length, of percentages; by default a tenth of the largest number

    Examples:
        >>> widened(90.0, 90.4, 5.0), widened(99.0, 99.4, 5.0), widened(0.01, 0.02)
        ((87.7, 92.7), (95.0, 100.0), (0.01, 0.02))
    """
    room = max((_LEAST_SPAN * max(abs(low), abs(high)) if least is None else least) - (high - low), 0.0) / 2
    first, last = low - room, high + room
    if low >= 0 > first:
        first, last = 0.0, last - first
    if least is not None and high <= 100 < last:
        first, last = first - (last - 100), 100.0
    return first, last


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers that cover ``low`` to ``high`` in about ``about`` steps.

    Examples:
        >>> ticks(0.3, 9.2)
        [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
        >>> ticks(7, 7)
        [6.5, 6.75, 7.0, 7.25, 7.5]
    """
    if not high - low > 1e-9 * max(abs(low), abs(high)):  # a single number: add a margin
        room = abs(low) / 20 or 0.5
        low, high, about = low - room, high + room, 2
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = min((power * factor for factor in (1, 2, 2.5, 5, 10)), key=lambda step: abs(math.log(step / rough)))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = max(12, 3 - math.floor(math.log10(step)))  # a tiny step must not be rounded to 0
    return [round(number * step, digits) for number in range(first, last + 1)]


def tick_text(value: float, step: float) -> str:
    """Format a tick with as few digits as the step between ticks allows: 12k, 0.25, 3.

    Examples:
        >>> tick_text(12000, 4000), tick_text(-0.5, 0.25), tick_text(-0.0, 2), tick_text(2e-7, 1e-7)
        ('12k', '−0.50', '0', '2e-07')
    """
    value = value + 0.0  # −0 becomes 0
    if value < 0:
        return "−" + tick_text(-value, step)
    if step >= 1000:
        return f"{value / 1000:g}k"
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if abs(step * 10.0**decimals - round(step * 10.0**decimals)) > 0.01:  # 0.25 needs two digits
        decimals += 1
    return f"{value:.{decimals}f}" if decimals <= 4 else f"{value:g}"


def line_chart(
    series: Sequence[Series], x_label: str, y_label: str, description: str, least: float | None = None
) -> str:
    """Lines with their bands, and their values for the tooltip. least: as for `widened`."""
    points = [(x, y) for line in series for x, y in zip(line.x, line.y, strict=True)]
    extremes = [y for _, y in points] + [y for line in series for y in (*line.low, *line.high)]
    y_ticks = ticks(*widened(min(extremes), max(extremes), least))
    ends = min(x for x, _ in points), max(x for x, _ in points)
    x_ticks = ticks(*ends) if ends[0] == ends[1] else [t for t in ticks(*ends, 5) if ends[0] <= t <= ends[1]]
    whole = [tick for tick in x_ticks if tick == round(tick)]
    x_ticks = whole if len(whole) > 1 else x_ticks  # no fractions of epochs
    span = ends if ends[0] < ends[1] else (x_ticks[0], x_ticks[-1])
    axes = Axes(_margin(y_ticks), span, (y_ticks[0], y_ticks[-1]))
    if ends[0] == ends[1]:
        x_ticks = [ends[0]]
    drawn = [_frame(axes, x_ticks, y_ticks, x_label, y_label)]
    drawn += [_band(line, axes) for line in series if line.low]
    drawn += [_line(line, axes, number / len(series)) for number, line in enumerate(series)]
    return _chart("".join(drawn), axes, series, x_label, y_label, description)


def histogram_chart(
    edges: Sequence[float],
    shares: Sequence[tuple[str, str, Sequence[float], float]],
    top: float,
    x_label: str,
    y_label: str,
    description: str,
) -> str:
    """Overlaid histograms, each (name, CSS class, share of each bin in %, mean); top: upper end of the y axis."""
    y_ticks = ticks(0, top)
    axes = Axes(_margin(y_ticks), (edges[0], edges[-1]), (0, y_ticks[-1]))
    x_ticks = [tick for tick in ticks(edges[0], edges[-1], 5) if edges[0] - 1e-9 <= tick <= edges[-1] + 1e-9]
    drawn = [_frame(axes, x_ticks, y_ticks, x_label, y_label)]
    for _, kind, share, mean in shares:
        steps = [f"M{axes.user_x(edges[0]):.1f},{axes.user_y(0):.1f}"]
        for (left, right), height in zip(pairwise(edges), share, strict=True):
            y = axes.user_y(height)
            steps.append(f"L{axes.user_x(left):.1f},{y:.1f}L{axes.user_x(right):.1f},{y:.1f}")
        steps.append(f"L{axes.user_x(edges[-1]):.1f},{axes.user_y(0):.1f}Z")
        drawn.append(f'<path class="area {kind}" d="{"".join(steps)}"/>')
        if math.isfinite(mean):
            x = axes.user_x(mean)
            drawn.append(f'<line class="mean {kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{axes.user_y(0):.1f}"/>')
    centers = [(left + right) / 2 for left, right in pairwise(edges)]
    series = [Series(name, kind, centers, share) for name, kind, share, _ in shares]
    return _chart("".join(drawn), axes, series, x_label, y_label, description)


def scatter_chart(
    points: Sequence[tuple[float, float]],
    styles: Sequence[int],
    x_label: str,
    y_label: str,
    description: str,
    titles: Sequence[str] = (),
    large: Sequence[bool] = (),
) -> str:
    """A mark at each point in its style, −1 for an unknown class. titles: tooltips · large: which marks are larger"""
    columns = [[point[axis] for point in points] for axis in (0, 1)]
    x_ticks, y_ticks = (ticks(min(column), max(column)) for column in columns)
    axes = Axes(_margin(y_ticks), (x_ticks[0], x_ticks[-1]), (y_ticks[0], y_ticks[-1]))
    marks = [
        mark(
            style if style >= 0 else "unknown",
            axes.user_x(x),
            axes.user_y(y),
            5.0 if large and large[number] else 2.4,
            "mark",
            titles[number] if titles else "",
        )
        for number, ((x, y), style) in enumerate(zip(points, styles, strict=True))
    ]
    return _svg(_frame(axes, x_ticks, y_ticks, x_label, y_label) + "".join(marks), HEIGHT, description)


def mark_sign(style: int) -> str:
    """A mark of a scatter chart, for legends."""
    return f'<svg class="sign" viewBox="0 0 12 12" aria-hidden="true">{mark(style, 6, 6, 4, "mark")}</svg>'


def dot_chart(
    rows: Sequence[tuple[str, int | str, Sequence[float]]], x_label: str, description: str, least: float | None = None
) -> str:
    """A row for each name, with a mark for each of its values and a bar at their mean. least: as for `widened`."""
    values = [value for _, _, given in rows for value in given]
    marks = ticks(*widened(min(values), max(values), least))
    height = _TOP / 2 + 34 * len(rows) + _BOTTOM
    axes = Axes(10, (marks[0], marks[-1]), (0, 1), height)
    foot = height - _BOTTOM
    drawn = [
        f'<line class="grid" x1="{axes.user_x(mark):.1f}" x2="{axes.user_x(mark):.1f}" y1="4" y2="{foot:.1f}"/>'
        for mark in marks
    ]
    drawn.append(_x_axis(axes, marks, x_label))
    for number, (name, style, given) in enumerate(rows):
        y = _TOP / 2 + 34 * number + 24
        drawn.append(f'<text class="name" x="10" y="{y - 10:.1f}">{escape(_short(printable(name)))}</text>')
        drawn.append(f'<line class="axis faint" x1="10" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        for value in given:
            drawn.append(mark(style, axes.user_x(value), y, 4, title=f"{name}: {value:.4g} {x_label}"))
        if len(given) > 1:
            x = axes.user_x(sum(given) / len(given))
            drawn.append(f'<line class="bar" x1="{x:.1f}" x2="{x:.1f}" y1="{y - 8:.1f}" y2="{y + 8:.1f}"/>')
    return _svg("".join(drawn), height, description)


def _chart(drawn: str, axes: Axes, series: Sequence[Series], x_label: str, y_label: str, description: str) -> str:
    """The SVG and its values as JSON for the tooltip; box: plotting area in user units, span: ranges of x and y."""
    xs = sorted({x for line in series for x in line.x})
    values = {
        "x": xs,
        "xLabel": x_label,
        "yLabel": y_label,
        "box": [round(axes.left, 1), _TOP, WIDTH - _RIGHT, HEIGHT - _BOTTOM],
        "span": [*axes.x, *axes.y],
        "series": [
            {"name": line.name, "style": line.classes, "y": [_rounded(at.get(x)) for x in xs]}
            for line, at in ((line, dict(zip(line.x, line.y, strict=True))) for line in series)
        ],
    }
    cursor = '<g class="cursor" aria-hidden="true"></g>'
    # "</script>" in a name would end the element, so "<" is escaped.
    data = json.dumps(values, separators=(",", ":")).replace("<", "\\u003c")
    return f'{_svg(drawn + cursor, HEIGHT, description)}<script type="application/json">{data}</script>'


def _svg(drawn: str, height: float, description: str) -> str:
    label = escape(printable(description))
    return f'<svg class="plot" viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{label}">{drawn}</svg>'


def _frame(axes: Axes, x_ticks: Sequence[float], y_ticks: Sequence[float], x_label: str, y_label: str) -> str:
    """Grid, ticks and axis labels; the label of y is above its axis."""
    step = y_ticks[1] - y_ticks[0]
    drawn = []
    for tick in y_ticks:
        y = axes.user_y(tick)
        drawn.append(f'<line class="grid" x1="{axes.left:.1f}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        text = tick_text(tick, step)
        drawn.append(f'<text class="end" x="{axes.left - 5:.1f}" y="{y + 4:.1f}">{text}</text>')
    drawn.append(f'<text x="2" y="11">{escape(y_label)}</text>')
    return "".join(drawn) + _x_axis(axes, x_ticks, x_label)


def _x_axis(axes: Axes, marks: Sequence[float], label: str) -> str:
    foot = axes.height - _BOTTOM
    step = marks[1] - marks[0] if len(marks) > 1 else 1.0
    drawn = [f'<line class="axis" x1="{axes.left:.1f}" x2="{WIDTH - _RIGHT}" y1="{foot:.1f}" y2="{foot:.1f}"/>']
    for mark in marks:
        x, text = axes.user_x(mark), tick_text(mark, step)
        # Keep labels at the ends inside the chart.
        half = _text_width(text) / 2
        text_x = min(max(x, half), WIDTH - half)
        drawn.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{foot:.1f}" y2="{foot + 4:.1f}"/>')
        drawn.append(f'<text class="middle" x="{text_x:.1f}" y="{foot + 16:.1f}">{text}</text>')
    drawn.append(f'<text class="end" x="{WIDTH - _RIGHT}" y="{foot + 30:.1f}">{escape(label)}</text>')
    return "".join(drawn)


def _line(line: Series, axes: Axes, offset: float) -> str:
    """The line with a few of its points marked; offset: in [0, 1), so that marks of other lines do not cover them."""
    points = [(axes.user_x(x), axes.user_y(y)) for x, y in zip(line.x, line.y, strict=True)]
    step = max(1.0, len(points) / _MARKS)
    chosen = sorted({int((number + offset) * step) for number in range(math.ceil(len(points) / step))})
    marks = "".join(mark(line.style, *points[index], 2.8) for index in chosen if index < len(points))
    return f'<g data-name="{escape(line.name)}"><path class="line {line.classes}" d="{_path(points)}"/>{marks}</g>'


def _band(line: Series, axes: Axes) -> str:
    above = [(axes.user_x(x), axes.user_y(y)) for x, y in zip(line.x, line.high, strict=True)]
    below = [(axes.user_x(x), axes.user_y(y)) for x, y in zip(line.x, line.low, strict=True)]
    return f'<path class="band {line.classes}" data-name="{escape(line.name)}" d="{_path(above + below[::-1])}Z"/>'


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _margin(y_ticks: Sequence[float]) -> float:
    step = y_ticks[1] - y_ticks[0]
    return 10 + max(_text_width(tick_text(tick, step)) for tick in y_ticks)


def _text_width(number: str) -> float:
    # A minus sign is wider than a digit in common fonts.
    return _CHARACTER * (len(number) + 0.6 * number.count("−"))


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def _short(name: str, most: int = 50) -> str:
    """Truncate a name to a width, in digits.

    Examples:
        >>> _short("abcdef", 4), _short("ABC", 4), _short("好好", 4)
        ('abc…', 'A…', '好好')
    """
    widths = [2 if letter.isupper() or letter in "mw@%" or east_asian_width(letter) in "WF" else 1 for letter in name]
    if sum(widths) <= most:
        return name
    kept = sum(1 for width in accumulate(widths) if width < most)
    return name[:kept] + "…"
