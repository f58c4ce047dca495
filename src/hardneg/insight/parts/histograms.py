"""How well the classes come apart: cosines of same-class and of different-class pairs over one another."""

from collections.abc import Iterable

from hardneg.insight import svg
from hardneg.insight.contents import Contents, Part, missing, named
from hardneg.insight.diagnostics import Histograms
from hardneg.insight.samples import Evidence

_KINDS = (("same class", "same"), ("different classes", "different"))


def histograms(contents: Contents) -> Part:
    """A small histogram for each group, all with the same axes."""
    see = (
        "The less the two shapes overlap, the better cosines tell classes apart; different-class pairs far to the "
        "right are hard negatives, and same-class pairs are what a method without labels may push away by mistake."
    )
    found = {
        group.name: evidence
        for group in contents.groups
        if isinstance(evidence := contents.evidence.get(group.name), Evidence)
    }
    drawable = {
        name: evidence.histograms
        for name, evidence in found.items()
        if evidence.histograms is not None and int(evidence.histograms.same.sum() + evidence.histograms.different.sum())
    }
    notes = missing(contents) + "".join(
        f'<p class="note"><strong>{named(name)}</strong>: its pictures have no labels.</p>'
        for name in found
        if name not in drawable
    )
    if not drawable:
        return Part("histograms", "Cosines of pairs", see, notes)
    first = _first_bin(drawable.values())
    top = max(max(shares) for one in drawable.values() for shares in _shares(one))
    legend = "".join(f'<li><span class="block {kind}" aria-hidden="true"></span>{name}</li>' for name, kind in _KINDS)
    figures = "".join(_figure(name, one, found[name], first, top) for name, one in drawable.items())
    body = (
        f'{notes}<ul class="legend">{legend}<li><span class="dashes" aria-hidden="true"></span>mean</li></ul>'
        f'<div class="charts">{figures}</div>'
        '<p class="small">Cosines of the encoder’s features (before the projection head) between pictures of the test '
        "set, from one seed of each group; each shape sums to 100 %. Overlap: the area the two shapes share.</p>"
    )
    return Part("histograms", "Cosines of pairs", see, body)


def _figure(name: str, found: Histograms, evidence: Evidence, first: int, top: float) -> str:
    edges = found.edges[first:].tolist()
    same, different = (shares[first:] for shares in _shares(found))
    means = (found.same_mean, found.different_mean)
    overlap = sum(min(pair) for pair in zip(same, different, strict=True))
    words = f"mean cosine {_mean(means[0])} same class, {_mean(means[1])} different · overlap {overlap:.0f} %"
    shapes = [
        (label, kind, shares, mean)
        for (label, kind), shares, mean in zip(_KINDS, (same, different), means, strict=True)
        if sum(shares)
    ]
    chart = svg.histogram_chart(edges, shapes, top, "cosine", "% of pairs", f"{name}: {words}.")
    return (
        f'<figure class="chart" data-chart><figcaption>{named(name)} '
        f"<span>{words} · seed {evidence.seed}, {evidence.pictures:,} pictures</span></figcaption>{chart}</figure>"
    )


def _shares(found: Histograms) -> tuple[list[float], list[float]]:
    """Both histograms in percent of their own pairs."""
    same, different = (
        (100 * counts.double() / max(int(counts.sum()), 1)).tolist() for counts in (found.same, found.different)
    )
    return same, different


def _first_bin(found: Iterable[Histograms]) -> int:
    """The first bin that any histogram fills: encoders that end in a rectifier have no negative cosines at all."""
    firsts = [int((one.same + one.different).nonzero()[0]) for one in found]
    return max(0, min(firsts) - 1)


def _mean(mean: float) -> str:
    return f"{mean:.2f}".replace("-", "−") if mean == mean else "–"
