"""Section "Cosine similarity of pairs": histograms of same-class and of different-class pairs."""

from collections.abc import Iterable

from hardneg.insight import svg
from hardneg.insight.contents import Contents, Part, isolated, unavailable
from hardneg.insight.diagnostics import MAX_SAMPLES, Histograms
from hardneg.insight.samples import EmbeddingSummary

_KEY, _TITLE = "histograms", "Cosine similarity of pairs"
_KINDS = (("same class", "same"), ("different classes", "different"))


def histograms(contents: Contents) -> Part:
    """A chart for each group, all with the same axes."""
    hint = (
        "The less the two histograms overlap, the better the cosine similarity separates the classes. Pairs of "
        "different classes with high cosines are hard negatives. A loss without labels also treats pairs of the same "
        "class as negatives: false negatives."
    )
    summaries = contents.available_summaries
    drawable = {
        name: summary.histograms
        for name, summary in summaries.items()
        if summary.histograms is not None and int(summary.histograms.same.sum() + summary.histograms.different.sum())
    }
    notes = unavailable(contents) + "".join(
        f'<p class="note"><strong>{isolated(name)}</strong>: its {contents.unit} have no labels.</p>'
        for name in summaries
        if name not in drawable
    )
    if contents.has_no_labels:
        hint = f"Not shown: these histograms compare classes, and the {contents.unit} have no labels."
        return Part(_KEY, _TITLE, hint, unavailable(contents))
    if not drawable:
        return Part(_KEY, _TITLE, hint, notes)
    first = _first_bin(drawable.values())
    top = max(max(shares) for one in drawable.values() for shares in _shares(one))
    legend = "".join(f'<li><span class="block {kind}" aria-hidden="true"></span>{name}</li>' for name, kind in _KINDS)
    figures = "".join(_figure(name, one, summaries[name], first, top) for name, one in drawable.items())
    body = (
        f'{notes}<ul class="legend">{legend}<li><span class="dashes" aria-hidden="true"></span>mean</li></ul>'
        f'<div class="charts">{figures}</div>'
        f'<p class="small">Features of the encoder, without any projection head, of up to {MAX_SAMPLES:,} '
        f"{contents.unit} of the test set, or of the whole set if there is none; one seed of each row. Each histogram "
        "sums to 100 %; the overlap is the area that both cover.</p>"
    )
    return Part(_KEY, _TITLE, hint, body)


def _figure(name: str, shown: Histograms, summary: EmbeddingSummary, first: int, top: float) -> str:
    edges = shown.edges[first:].tolist()
    same, different = (shares[first:] for shares in _shares(shown))
    means = (shown.same_mean, shown.different_mean)
    overlap = sum(min(pair) for pair in zip(same, different, strict=True))
    text = f"mean cosine {_mean(means[0])} same class, {_mean(means[1])} different classes · overlap {overlap:.0f} %"
    drawn = [
        (label, kind, shares, mean)
        for (label, kind), shares, mean in zip(_KINDS, (same, different), means, strict=True)
        if sum(shares)
    ]
    chart = svg.histogram_chart(edges, drawn, top, "cosine", "% of pairs", f"{name}: {text}.")
    return (
        f'<figure class="chart" data-chart><figcaption>{isolated(name)} '
        f"<span>{text} · seed {summary.seed}, {summary.samples:,} {summary.unit}</span></figcaption>{chart}</figure>"
    )


def _shares(given: Histograms) -> tuple[list[float], list[float]]:
    """Both histograms in percent of their pairs."""
    same, different = (
        (100 * counts.double() / max(int(counts.sum()), 1)).tolist() for counts in (given.same, given.different)
    )
    return same, different


def _first_bin(given: Iterable[Histograms]) -> int:
    """The bin before the first one in use: encoders that end in a ReLU have no negative cosines."""
    firsts = [int((one.same + one.different).nonzero()[0]) for one in given]
    return max(0, min(firsts) - 1)


def _mean(mean: float) -> str:
    return f"{mean:.2f}".replace("-", "−") if mean == mean else "–"
