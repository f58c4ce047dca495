"""The page of a mining: numbers, histograms, queries with their negatives and dropped candidates, and hubs."""

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from hardneg.insight import svg
from hardneg.insight.contents import Part, breakable, isolated, scrollable
from hardneg.insight.frame import framed

if TYPE_CHECKING:
    from hardneg.mining.result import Mined

_BINS = 40
_LONGEST = 400  # characters of a text that are shown
_DROPPED = 10  # candidates of a query that are shown
_HUBS = 20


def html(mined: "Mined", queries: int) -> str:
    """The page. queries: how many are shown"""
    parts = [_numbers(mined), _histograms(mined), _queries(mined, queries), _hubs(mined)]
    number = int((mined.indices >= 0).sum())
    return framed(
        "hardneg: mined negatives", "Mined negatives", f"{len(mined):,} queries, {number:,} negatives", "", parts
    )


def _numbers(mined: "Mined") -> Part:
    rows = [("queries", len(mined)), ("negatives", int((mined.indices >= 0).sum()))]
    rows += [("queries with too few negatives", len(mined.short))]
    rows += [(f"dropped by {rule}", number) for rule, number in mined.dropped.items()]
    cells = "".join(f'<tr><th scope="row">{breakable(n)}</th><td class="number">{v:,}</td></tr>' for n, v in rows)
    if mined.recall is not None:
        cells += f'<tr><th scope="row">recall of the index</th><td class="number">{mined.recall:.3f}</td></tr>'
    hint = "A dropped candidate is counted for the first rule that drops it."
    return Part("numbers", "Numbers", hint, f'<table class="narrow"><tbody>{cells}</tbody></table>')


def _histograms(mined: "Mined") -> Part:
    hint = "Cosines with the query. Negatives close to the positives are hard; those above them are probably false."
    found = (("positives", "same", mined.positive_scores), ("negatives", "different", mined.scores[mined.indices >= 0]))
    shown = [(name, kind, scores) for name, kind, scores in found if len(scores)]
    if not shown:
        return Part("cosines", "Cosines", hint, '<p class="note">There are no negatives.</p>')
    low = min(float(scores.min()) for _, _, scores in shown)
    edges = np.linspace(min(low, 0.99), 1.0, _BINS + 1)
    bars = [(name, kind, _shares(scores, edges), float(scores.mean())) for name, kind, scores in shown]
    top = max(max(shares) for _, _, shares, _ in bars)
    chart = svg.histogram_chart(edges.tolist(), bars, top, "cosine", "% of pairs", "Cosines of positives and negatives")
    legend = "".join(f'<li><span class="block {kind}" aria-hidden="true"></span>{name}</li>' for name, kind, _ in shown)
    body = (
        f'<ul class="legend">{legend}</ul><div class="charts"><figure class="chart" data-chart>{chart}</figure></div>'
    )
    return Part("cosines", "Cosines", hint, body)


def _shares(scores: Tensor, edges: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> list[float]:
    """The share of each bin in %; rounding may put a cosine just above 1."""
    counts = np.histogram(scores.clamp(max=1.0).numpy(), edges)[0]
    return (100 * counts / max(len(scores), 1)).tolist()  # type: ignore[no-any-return]


def _queries(mined: "Mined", count: int) -> Part:
    chosen = {*np.linspace(0, len(mined) - 1, min(count, len(mined))).astype(int).tolist()}
    boxes: list[str] = []
    for query, positives, negatives in mined.queries_with_scores():
        if query not in chosen:
            continue
        rows = [("positive", document, score) for document, score in positives]
        rows += [("negative", document, score) for document, score in negatives]
        rows += [
            (f"dropped by {rule}", document, score) for document, score, rule in mined.dropped_of(query)[:_DROPPED]
        ]
        lines = "".join(
            f'<tr><th scope="row">{breakable(kind)}</th><td class="number">{score:.3f}</td>'
            f"<td>{_text(mined.document(document))}</td></tr>"
            for kind, document, score in rows
        )
        head = '<th scope="col">kind</th><th scope="col">cosine</th><th scope="col">document</th>'
        table = f'<table class="narrow"><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>'
        opened = " open" * (not boxes)
        title = _text(mined.query(query))
        boxes.append(f"<details{opened}><summary>{title}</summary>{scrollable(table, f'query {query}')}</details>")
    hint = f"{len(boxes)} of {len(mined):,} queries, each with up to {_DROPPED} of the candidates dropped."
    return Part("queries", "Queries", hint, "".join(boxes))


def _hubs(mined: "Mined") -> Part:
    hint = "Documents that are a negative of many queries. A model learns little from seeing one document so often."
    rows = "".join(
        f'<tr><th scope="row">{_text(mined.document(document))}</th><td class="number">{number:,}</td></tr>'
        for document, number in mined.hubs(_HUBS)
    )
    head = '<thead><tr><th scope="col">document</th><th scope="col">negative of queries</th></tr></thead>'
    return Part("hubs", "Hubs", hint, f'<table class="narrow">{head}<tbody>{rows}</tbody></table>')


def _text(given: str | int) -> str:
    """A text that is shown as text, cut after some characters; an index as a number."""
    if isinstance(given, int):
        return f"#{given}"
    return isolated(given if len(given) <= _LONGEST else given[:_LONGEST] + "…")
