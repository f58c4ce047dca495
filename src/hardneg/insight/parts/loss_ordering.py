"""Section "Four losses on one model": UCL, H-UCL, SCL and H-SCL of each row, and the share with Assumption 1."""

from collections.abc import Iterable

from hardneg.insight import svg
from hardneg.insight.contents import Contents, Part, isolated
from hardneg.insight.parts.epoch_charts import epoch_chart, from_insight, rows_chart, series
from hardneg.insight.runs import Group

# Name, key and style, which differs from those of the first rows.
_LOSSES = (("UCL", "ucl", 4), ("H-UCL", "h_ucl", 5), ("SCL", "scl", 6), ("H-SCL", "h_scl", 7))


def loss_ordering(contents: Contents) -> Part | None:
    """A chart of the four losses for each group, and one of Assumption 1 for all."""
    hint = (
        "Four losses of the same embeddings: without and with hard negatives (H-), without labels (UCL) and with "
        "labels that leave out false negatives (SCL). For anchors whose own class is closer to them than other classes "
        "are (Assumption 1), H-SCL is at most H-UCL (Lemma 1 of H-SCL)."
    )
    shares = rows_chart(
        contents.groups,
        from_insight("assumption_1"),
        "Anchors with Assumption 1",
        "% of anchors",
        "among anchors with others of their class in the batch",
        True,
    )
    figures = "".join(chart for group in contents.groups if (chart := _losses(group)) is not None)
    if not figures:
        return None
    rows = ((group.name, number) for number, group in enumerate(contents.groups))
    body = (
        f'{_legend((name, style) for name, _, style in _LOSSES)}<div class="charts">{figures}</div>'
        + (f'{_legend(rows)}<div class="charts">{shares}</div>' if shares else "")
        + '<p class="small">All four with the same positives (the other view), the same number Q of negatives, the '
        "temperature of the run, β = 1 and no debiasing, whatever loss was trained; of the last batch of an epoch, "
        "with labels of the training set.</p>"
    )
    return Part("losses", "Four losses on one model", hint, body)


def _losses(group: Group) -> str | None:
    lines: list[svg.Series] = []
    for name, key, style in _LOSSES:
        found = series(Group(name, group.runs), style, from_insight(key), 1.0)
        if found.x:
            lines.append(found)
    if not lines:
        return None
    return epoch_chart(lines, f"Trained: {group.name}", "nats", "the four losses of its embeddings")


def _legend(entries: Iterable[tuple[str, int]]) -> str:
    """Names with their lines. Without buttons: those of rows would hide the losses."""
    items = "".join(f"<li>{svg.swatch(style)}{isolated(name)}</li>" for name, style in entries)
    return f'<ul class="legend">{items}</ul>'
