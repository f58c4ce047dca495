"""Where the samples lie: embeddings in two dimensions, a small chart for each group."""

from hardneg.insight import svg
from hardneg.insight.contents import Contents, Part, named
from hardneg.insight.samples import Evidence, Plane


def plane(contents: Contents) -> Part:
    """The two directions in which the embeddings of a group differ most."""
    see = (
        "Clouds of one colour that lie apart are classes that the encoder tells apart; two dimensions show only a part "
        "of what it knows."
    )
    found = {
        group.name: evidence
        for group in contents.groups
        if isinstance(evidence := contents.evidence.get(group.name), Evidence)
    }
    if not found:
        return Part("plane", "Embeddings in two dimensions", see, '<p class="note">No run could be looked at.</p>')
    names = next(iter(found.values())).plane.classes
    legend = "".join(f"<li>{svg.mark_sign(number)}{named(name)}</li>" for number, name in enumerate(names))
    figures = "".join(_figure(name, evidence.plane) for name, evidence in found.items())
    body = (
        f'<ul class="legend">{legend}</ul><div class="charts">{figures}</div>'
        '<p class="small">The two first principal components of the unit-length features, from one seed of each group. '
        "Directions and signs mean nothing across charts.</p>"
    )
    return Part("plane", "Embeddings in two dimensions", see, body)


def _figure(name: str, shown: Plane) -> str:
    labels = [f"component {place}, {100 * share:.0f} % of the variance" for place, share in enumerate(shown.shares, 1)]
    description = f"Embeddings of {len(shown.points)} samples of {name} in two dimensions."
    chart = svg.scatter_chart(shown.points, shown.styles, labels[0], labels[1], description)
    return f'<figure class="chart"><figcaption>{named(name)}</figcaption>{chart}</figure>'
