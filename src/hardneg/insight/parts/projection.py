"""Section "Embeddings in two dimensions": a PCA projection for each group."""

from hardneg.insight import svg
from hardneg.insight.contents import Contents, Part, isolated
from hardneg.insight.samples import Projection

_KEY, _TITLE = "projection", "Embeddings in two dimensions (PCA)"


def projection(contents: Contents) -> Part:
    """A scatter chart of each group's embeddings, colored by class."""
    hint = (
        f"Each point is one of the {contents.unit}, colored by class: well-separated colors mean that the encoder "
        "separates the classes. Two dimensions show only part of the variance, which the axes state."
    )
    if contents.has_no_labels:
        hint = (
            f"Each point is one of the {contents.unit}: near points are {contents.unit} that the encoder takes for "
            "similar. Two dimensions show only part of the variance, which the axes state."
        )
    summaries = contents.available_summaries
    if not summaries:
        return Part(_KEY, _TITLE, hint, '<p class="note">No run has embeddings to show.</p>')
    names = next(iter(summaries.values())).projection.classes
    legend = "".join(f"<li>{svg.mark_sign(number)}{isolated(name)}</li>" for number, name in enumerate(names))
    figures = "".join(_figure(name, summary.projection, summary.unit) for name, summary in summaries.items())
    body = (
        (f'<ul class="legend">{legend}</ul>' if legend else "") + f'<div class="charts">{figures}</div>'
        '<p class="small">First two principal components of the normalized features, of one seed of each row. '
        + "The axes of different charts are not comparable." * (len(summaries) > 1)
        + "</p>"
    )
    return Part(_KEY, _TITLE, hint, body)


def _figure(name: str, shown: Projection, unit: str) -> str:
    labels = [
        f"component {number}, {100 * share:.0f} % of the variance"
        for number, share in enumerate(shown.variance_shares, 1)
    ]
    description = f"Embeddings of {len(shown.points)} {unit} by {name} in two dimensions."
    chart = svg.scatter_chart(shown.points, shown.styles, labels[0], labels[1], description)
    return f'<figure class="chart"><figcaption>{isolated(name)}</figcaption>{chart}</figure>'
