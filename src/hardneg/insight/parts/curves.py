"""Section "Training curves": loss, kNN accuracy and diagnostics of the loss and the batches, by epoch."""

from collections.abc import Sequence

from hardneg.evaluation.metrics import is_number
from hardneg.insight.contents import Contents, Part, isolated
from hardneg.insight.parts.epoch_charts import Read, epoch_chart, row_legend, series
from hardneg.insight.runs import Group

# Title, unit and meaning by key. Other keys are drawn under their own name.
_QUANTITIES: dict[str, tuple[str, str, str]] = {
    "loss": ("Loss", "nats", "losses of different methods have different scales"),
    "knn": ("kNN accuracy", "%", "on the test set, from the encoder’s features"),
    "effective_negatives": (
        "Effective negatives",
        "per anchor",
        "effective sample size of the weights q: 1/Σq²",
    ),
    "effective_share": (
        "Effective share of negatives",
        "%",
        "effective negatives divided by the negatives of each anchor",
    ),
    "beta": ("Tilt β", "β", "weights e^{βs}; computed from the scores by an effective share"),
    "support": ("Candidates in the support", "per anchor", "negatives left by masks and bands"),
    "positive_score": ("Score of positives", "score", "mean over positives; cosine / temperature, or dot product"),
    "negative_score": ("Score of negatives", "score", "mean over the support; cosine / temperature, or dot product"),
    "floored": ("Floored anchors", "per batch", "debiased estimate at its floor: no gradient from negatives"),
    "without_candidates": ("Anchors without negatives", "per batch", "they contribute nothing"),
    "without_positives": ("Anchors without positives", "per batch", "they contribute nothing"),
    "mean_cosine": ("Cosine of batch pairs", "cosine", "last batch of each epoch; higher means harder negatives"),
    "anchors": ("Anchors", "per batch", "last batch of each epoch"),
}

_FRACTIONS = ("knn", "effective_share")  # drawn in percent
_ELSEWHERE = ("false_negatives",)  # has a section of its own


def curves(contents: Contents) -> Part:
    """One chart for each quantity that changes, one line for each group."""
    several = any(len(group.runs) > 1 for group in contents.groups)
    hint = (
        "Lines are means over seeds, bands reach from the lowest to the highest seed. " * several
        + "Hover over a chart or touch it to read its values."
    )
    figures = [
        figure
        for key, read in _quantities(contents.groups)
        if (figure := _figure(contents.groups, key, read)) is not None
    ]
    if not figures:
        return Part("curves", "Training curves", hint, '<p class="note">The runs have no metrics yet.</p>')
    body = f'{row_legend(contents.groups)}{_diverged(contents.groups)}<div class="charts">{"".join(figures)}</div>'
    return Part("curves", "Training curves", hint, body)


def _quantities(groups: Sequence[Group]) -> list[tuple[str, Read]]:
    """The quantities to draw: loss and kNN, then the diagnostics of the objective and of the batches."""
    reported = {
        (key, source)
        for group in groups
        for run in group.runs
        for line in run.metrics
        for source in ("objective", "batches")
        if isinstance(line.get(source), dict)
        for key in line[source]
        if not key.endswith("_seconds") and key not in _ELSEWHERE  # the former are in the section on time
    }
    known = list(_QUANTITIES)
    order = sorted(reported, key=lambda entry: (known.index(entry[0]) if entry[0] in known else len(known), entry))

    def from_line(key: str) -> Read:
        return lambda line: line.get(key)

    def from_section(key: str, source: str) -> Read:
        return lambda line: line[source].get(key) if isinstance(line.get(source), dict) else None

    return [
        ("loss", from_line("loss")),
        ("knn", from_line("knn")),
        *((entry[0], from_section(*entry)) for entry in order),
    ]


def _figure(groups: Sequence[Group], key: str, read: Read) -> str | None:
    """The chart of one quantity; None if it is constant, equal in all rows, or has one value per run."""
    title, unit, meaning = _QUANTITIES.get(key, (key.replace("_", " "), "value", "reported by the objective"))
    lines = [series(group, number, read, 100.0 if key in _FRACTIONS else 1.0) for number, group in enumerate(groups)]
    lines = [line for line in lines if line.x]
    values = {y for line in lines for y in (*line.y, *line.low, *line.high)}
    longest = max((len(line.x) for line in lines), default=0)
    if not values or (longest == 1 and key != "loss"):
        return None
    # Rows that draw the same batches have the same values, in which only noise would be seen.
    equal = len(lines) > 1 and all((line.x, line.y) == (lines[0].x, lines[0].y) for line in lines)
    if key not in ("loss", "knn") and (len(values) == 1 or equal):
        return None
    return epoch_chart(lines, title, unit, meaning, key in _FRACTIONS)


def _diverged(groups: Sequence[Group]) -> str:
    """A note on runs whose loss is not finite, which a line that ends would not show."""
    notes = []
    for group in groups:
        for run in group.runs:
            bad = [line.get("epoch") for line in run.metrics if "loss" in line and not is_number(line["loss"])]
            if bad:
                notes.append(f"{isolated(group.name)}, seed {run.seed}: from epoch {isolated(str(bad[0]))}")
    return f'<p class="note">The loss is not finite: {"; ".join(notes)}.</p>' if notes else ""
