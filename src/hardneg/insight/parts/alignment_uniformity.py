"""Section "Alignment and uniformity": the path of each run through the plane of Wang and Isola (2020)."""

from typing import NamedTuple

from hardneg.evaluation.metrics import is_number
from hardneg.insight import svg
from hardneg.insight.contents import Contents, Part, breakable, isolated, scrollable
from hardneg.insight.parts.epoch_charts import from_insight, last_values
from hardneg.insight.runs import Group

_ALIGNMENT, _UNIFORMITY = from_insight("alignment"), from_insight("uniformity")
_MOST = 60  # points of a row


class _Point(NamedTuple):
    x: float
    y: float
    title: str
    is_last: bool  # of its run


def alignment_uniformity(contents: Contents) -> Part | None:
    """A point for each measured epoch of each run."""
    hint = (
        "Left: two views of the same data are close (alignment). Down: embeddings cover the sphere evenly "
        "(uniformity). A good loss moves both ways, to the lower left; a collapsed encoder is at the upper left."
    )
    points = {number: _points(group) for number, group in enumerate(contents.groups)}
    shown = [(point, number) for number, found in points.items() for point in found]
    if not shown:
        return None
    text = f"Alignment and uniformity of {len(shown)} measurements."
    chart = svg.scatter_chart(
        [(point.x, point.y) for point, _ in shown],
        [number for _, number in shown],
        "alignment",
        "uniformity",
        text,
        [point.title for point, _ in shown],
        [point.is_last for point, _ in shown],
    )
    legend = "".join(
        f"<li>{svg.mark_sign(number)}{isolated(group.name)}</li>"
        for number, group in enumerate(contents.groups)
        if points[number]
    )
    rows = "".join(
        f'<tr><th scope="row">{breakable(group.name)}</th>{_cell(group, "alignment")}{_cell(group, "uniformity")}</tr>'
        for number, group in enumerate(contents.groups)
        if points[number]
    )
    table = (
        '<table class="narrow"><caption>After the last epoch, mean over seeds</caption><thead><tr>'
        f'<th scope="col">{isolated(contents.heading)}</th><th scope="col">alignment ↓</th>'
        f'<th scope="col">uniformity ↓</th></tr></thead><tbody>{rows}</tbody></table>'
    )
    body = (
        f'<ul class="legend">{legend}</ul><div class="charts"><figure class="chart"><figcaption>One mark per measured '
        f"epoch and seed <span>large: the last epoch of a seed</span></figcaption>"
        f"{chart}</figure><div>{scrollable(table, 'Alignment and uniformity')}</div></div>"
        '<p class="small">Alignment: E‖z − z⁺‖², from 0 to 4. Uniformity: log E e<sup>−2‖z − z′‖²</sup>, at most 0. Of '
        "the embeddings that the loss got in the last batch of an epoch.</p>"
    )
    return Part("alignment", "Alignment and uniformity", hint, body)


def _points(group: Group) -> list[_Point]:
    found: list[_Point] = []
    for run in group.runs:
        measured = [
            (float(x), float(y), f"{group.name}, epoch {line.get('epoch')}")  # type: ignore[arg-type]
            for line in run.metrics
            if is_number(x := _ALIGNMENT(line)) and is_number(y := _UNIFORMITY(line))
        ]
        step = -(-len(measured) * len(group.runs) // _MOST) or 1
        kept = measured[::-1][::step][::-1]  # the last one is kept
        found += [_Point(*each, number == len(kept)) for number, each in enumerate(kept, 1)]
    return found


def _cell(group: Group, key: str) -> str:
    values = last_values(group, from_insight(key))
    text = f"{sum(values) / len(values):.3f}".replace("-", "−") if values else "–"
    return f'<td class="number">{text}</td>'
