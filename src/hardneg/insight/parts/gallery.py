"""Section "Hardest negatives": some anchors, each with the samples of other classes that an encoder ranks first."""

from hardneg.insight.contents import Contents, Part, breakable, isolated, unavailable, visible
from hardneg.insight.samples import HARDEST, EmbeddingSummary, Neighbors, Thumbnail


def gallery(contents: Contents) -> Part:
    """For each anchor, one line per group: its hardest negatives, and beside them its false negatives."""
    unit = contents.unit
    hint = (
        f"The {unit} of other classes with the highest cosine similarity to an anchor, hardest first: what the encoder "
        f"confuses. Beside them, framed, the most similar {unit} of the anchor’s own class: a loss without labels "
        "pushes them away, too (false negatives)."
    )
    summaries = contents.available_summaries
    if summaries and all(each.anchor.label is None for summary in summaries.values() for each in summary.gallery):
        hint = f"The {unit} with the highest cosine similarity to an anchor, hardest first; their classes are unknown."
    anchors: dict[str, list[tuple[str, Neighbors]]] = {}
    for name, summary in summaries.items():
        for neighbors in summary.gallery:
            anchor = neighbors.anchor
            anchors.setdefault(anchor.uri or anchor.text, []).append((name, neighbors))
    boxes = "".join(_anchor(number, rows) for number, rows in enumerate(anchors.values()))
    body = unavailable(contents) + _shares(summaries, contents.heading, unit) + boxes
    return Part("gallery", "Hardest negatives", hint, body)


def _shares(summaries: dict[str, EmbeddingSummary], heading: str, unit: str) -> str:
    """A table with the share of false negatives, over all samples as anchors."""
    rows = "".join(
        f'<tr><th scope="row">{breakable(name)}</th><td class="number">{100 * summary.hardest_same_share:.1f} %</td>'
        f'<td class="number">{100 * summary.all_same_share:.1f} %</td></tr>'
        for name, summary in summaries.items()
        if summary.hardest_same_share is not None and summary.all_same_share is not None
    )
    if not rows:
        return ""
    return (
        '<table class="narrow"><caption>Share of the anchor’s own class, mean over all anchors</caption><thead><tr>'
        f'<th scope="col">{isolated(heading)}</th><th scope="col">among the {HARDEST} most similar {unit}</th>'
        f'<th scope="col">among all {unit}</th></tr></thead><tbody>{rows}</tbody></table>'
    )


def _anchor(number: int, rows: list[tuple[str, Neighbors]]) -> str:
    anchor = rows[0][1].anchor
    name = "" if anchor.label is None else f": {isolated(anchor.label)}"
    described = "Anchor" if anchor.label is None else f"Anchor, {visible(anchor.label)}"
    shown = f'<img src="{anchor.uri}" alt="{described}"><span>anchor{name}</span>'
    if anchor.text:
        label = "" if anchor.label is None else f" · {isolated(anchor.label)}"
        shown = f"<span>anchor: {isolated(anchor.text)}{label}</span>"
    lines = "".join(_line(name, neighbors) for name, neighbors in rows)
    return f'<details class="anchor"{" open" * (number == 0)}><summary>{shown}</summary>{lines}</details>'


def _line(name: str, neighbors: Neighbors) -> str:
    known = neighbors.anchor.label is not None
    sides = _side("other classes" if known else "", "", neighbors.negatives)
    sides += _side("same class: false negatives", ' class="false"', neighbors.same_class)
    return f'<div class="row"><h3>{isolated(name)}</h3><div class="sides">{sides}</div></div>'


def _side(title: str, attributes: str, shown: list[Thumbnail]) -> str:
    if not shown:
        return ""
    kind = "texts" if shown[0].text else "thumbnails"
    return f'<div{attributes}><p>{title}</p><div class="{kind}">{"".join(map(_thumbnail, shown))}</div></div>'


def _thumbnail(shown: Thumbnail) -> str:
    if shown.text:
        label = "" if shown.label is None else f" <small>{isolated(shown.label)}</small>"
        return f"<p>{shown.cosine:.3f} · {isolated(shown.text)}{label}</p>"
    described, caption = f"cosine {shown.cosine:.3f}", f"{shown.cosine:.3f}"
    if shown.label is not None:
        described, caption = f"{visible(shown.label)}, {described}", f"{caption} · {isolated(shown.label)}"
    return f'<figure><img src="{shown.uri}" alt="{described}"><figcaption>{caption}</figcaption></figure>'
