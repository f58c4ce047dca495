"""Section "Angles between classes": cosines of class means against those of a simplex."""

from collections.abc import Sequence

from hardneg.insight.contents import Contents, Part, breakable, isolated, scrollable
from hardneg.insight.parts.epoch_charts import from_insight, row_legend, rows_chart
from hardneg.insight.samples import ClassGeometry

_DARKEST = 60  # percent of the color in a cell


def class_geometry(contents: Contents) -> Part | None:
    """For each group a shaded table of the cosines of class means, and the spread within classes."""
    found = {
        name: summary.geometry for name, summary in contents.available_summaries.items() if summary.geometry is not None
    }
    charts = [
        rows_chart(contents.groups, from_insight(key), title, unit, meaning)
        for key, title, unit, meaning in (
            ("class_spread", "Spread within classes, encoder", "E‖z − mean‖²", "features of the training set"),
            ("head_spread", "Spread within classes, head", "E‖z − mean‖²", "the loss’s embeddings of a batch"),
            ("head_deviation", "Distance from a simplex, head", "cosine", "mean |cos − (−1/(C − 1))| over class pairs"),
        )
    ]
    drawn = "".join(chart for chart in charts if chart is not None)
    if not found and not drawn:
        return None
    hint = (
        "The cosine of the means of every two classes. Classes that are as far apart as possible form a simplex: all "
        "cosines are −1/(C − 1). Orange cells are above it: classes that the encoder may confuse. Blue cells are below."
    )
    tables = "".join(_table(name, geometry, number == 0) for number, (name, geometry) in enumerate(found.items()))
    summary = _summary(found, contents.heading) if found else ""
    note = (
        f'<p class="small">Tables: features of the encoder, of the {contents.unit} of the histograms, one seed of each '
        "row, after the mean of all classes was subtracted. Charts: the training set.</p>"
    )
    curves = f'{row_legend(contents.groups)}<div class="charts">{drawn}</div>' if drawn else ""
    return Part("classes", "Angles between classes", hint, summary + tables + curves + note)


def _summary(found: dict[str, ClassGeometry], heading: str) -> str:
    rows = "".join(
        f'<tr><th scope="row">{breakable(name)}</th><td class="number">{each.spread:.3f}</td>'
        f'<td class="number">{each.deviation:.3f}</td><td>{_pair(each)}</td></tr>'
        for name, each in found.items()
    )
    target = next(iter(found.values())).target
    table = (
        f'<table class="narrow"><caption>Against a simplex, whose cosines are {_number(target)}</caption><thead><tr>'
        f'<th scope="col">{isolated(heading)}</th><th scope="col">spread within classes ↓</th>'
        '<th scope="col">mean distance from the simplex ↓</th><th scope="col">closest classes</th></tr></thead>'
        f"<tbody>{rows}</tbody></table>"
    )
    return scrollable(table, "Class means against a simplex")


def _pair(geometry: ClassGeometry) -> str:
    one, other, cosine = geometry.nearest
    return f"{isolated(one)} and {isolated(other)} ({_number(cosine)})"


def _table(name: str, geometry: ClassGeometry, is_open: bool) -> str:
    """The cosines as a shaded table, if there are not too many classes."""
    if not geometry.cosines:
        return ""
    head = "".join(f'<th scope="col">{isolated(label)}</th>' for label in geometry.classes)
    rows = "".join(
        f'<tr><th scope="row">{isolated(label)}</th>{_cells(number, row, geometry.target)}</tr>'
        for number, (label, row) in enumerate(zip(geometry.classes, geometry.cosines, strict=True))
    )
    table = (
        f'<table class="heat"><caption class="hidden">Cosines of class means</caption><thead><tr><th scope="col">'
        f"class</th>{head}</tr></thead><tbody>{rows}</tbody></table>"
    )
    shown = scrollable(table, f"Cosines of {name}")
    return f"<details{' open' * is_open}><summary>Cosines of {isolated(name)}</summary>{shown}</details>"


def _cells(number: int, row: Sequence[float], target: float) -> str:
    cells = []
    for column, cosine in enumerate(row):
        if column == number:
            cells.append("<td></td>")
            continue
        above = cosine > target
        # From the target to the farthest possible cosine on its side.
        share = (cosine - target) / (1 - target) if above else (target - cosine) / max(target + 1, 1e-9)
        cells.append(
            f'<td class="{"different" if above else "same"}" style="--share:{_DARKEST * min(share, 1):.0f}%">'
            f"{_number(cosine)}</td>"
        )
    return "".join(cells)


def _number(cosine: float) -> str:
    return f"{cosine + 0.0:.2f}".replace("-", "−").replace("−0.00", "0.00")
