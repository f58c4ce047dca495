"""Section "False negatives over training": how many negatives have the anchor's class, and how much they count."""

from hardneg.insight.contents import Contents, Part
from hardneg.insight.parts.epoch_charts import Read, from_insight, row_legend, rows_chart


def false_negatives(contents: Contents) -> Part | None:
    """The share of false negatives among the pairs of a batch, and of the gradient that comes from them."""
    hint = (
        f"Pairs of {contents.unit} of the same class within a batch. A loss without labels pushes them apart: the "
        "higher their share of the gradient, the more it works against the classes. Hard negatives raise it above the "
        "share of pairs."
    )
    charts = [
        rows_chart(
            contents.groups, _of_batches, "Share of pairs", "% of pairs", "pairs of a batch with the same class", True
        ),
        rows_chart(
            contents.groups,
            from_insight("gradient_false"),
            "Share of the gradient",
            "% of the gradient",
            "|∂L/∂s| of false negatives, mean over 64 anchors of a batch",
            True,
        ),
        rows_chart(
            contents.groups,
            from_insight("gradient_largest"),
            "Share of the ten largest",
            "% of the gradient",
            "|∂L/∂s| of an anchor’s ten negatives with the largest gradient",
            True,
        ),
    ]
    if charts[0] is None and charts[1] is None:
        return None
    figures = "".join(chart for chart in charts if chart is not None)
    note = (
        '<p class="small">Labels of the training set. A loss that leaves out negatives of the anchor’s class has 0 % '
        "of its gradient from them.</p>"
    )
    body = f'{row_legend(contents.groups)}<div class="charts">{figures}</div>{note}'
    return Part("false-negatives", "False negatives over training", hint, body)


_of_batches: Read = lambda line: (  # noqa: E731
    line["batches"].get("false_negatives") if isinstance(line.get("batches"), dict) else None
)
