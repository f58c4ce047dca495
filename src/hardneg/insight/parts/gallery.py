"""Section "Hardest negatives": some anchors, each with the samples that every encoder ranks as most similar."""

from hardneg.insight.contents import Contents, Part, breakable, isolated, unavailable, visible
from hardneg.insight.samples import EmbeddingSummary, Thumbnail


def gallery(contents: Contents) -> Part:
    """For each anchor one row of hardest negatives per group."""
    hint = (
        "For each anchor, the samples with the highest cosine similarity, hardest first. Framed samples marked “same "
        "class” are false negatives: a loss without labels pushes them away from the anchor."
    )
    summaries = contents.available_summaries
    anchors: dict[str, list[tuple[str, Thumbnail, list[Thumbnail]]]] = {}
    for name, summary in summaries.items():
        for anchor, negatives in summary.gallery:
            anchors.setdefault(anchor.uri or anchor.text, []).append((name, anchor, negatives))
    boxes = "".join(_anchor(number, rows) for number, rows in enumerate(anchors.values()))
    return Part("gallery", "Hardest negatives", hint, unavailable(contents) + _shares(summaries) + boxes)


def _shares(summaries: dict[str, EmbeddingSummary]) -> str:
    """A table with the share of false negatives, over all samples as anchors."""
    rows = "".join(
        f'<tr><th scope="row">{breakable(name)}</th><td class="number">{100 * summary.hardest_same_share:.1f} %</td>'
        f'<td class="number">{100 * summary.all_same_share:.1f} %</td></tr>'
        for name, summary in summaries.items()
        if summary.hardest_same_share is not None and summary.all_same_share is not None
    )
    if not rows:
        return ""
    hardest = max(len(negatives) for summary in summaries.values() for _, negatives in summary.gallery)
    return (
        '<table class="narrow"><caption>False negatives: share with the anchor’s class</caption><thead><tr>'
        f'<th scope="col">method</th><th scope="col">of the {hardest} hardest negatives</th>'
        f'<th scope="col">of all negatives</th></tr></thead><tbody>{rows}</tbody></table>'
    )


def _anchor(number: int, rows: list[tuple[str, Thumbnail, list[Thumbnail]]]) -> str:
    anchor = rows[0][1]
    label = _label(anchor)
    shown = f'<img src="{anchor.uri}" alt="Anchor, {visible(label)}"><span>anchor: {isolated(label)}</span>'
    if anchor.text:
        shown = f"<span>anchor: {isolated(anchor.text)} · {isolated(label)}</span>"
    lines = "".join(
        f'<div class="row"><h3>{isolated(name)}</h3>'
        f'<div class="{"texts" if anchor.text else "thumbnails"}">{"".join(map(_negative, negatives))}</div></div>'
        for name, _, negatives in rows
    )
    return f'<details class="anchor"{" open" * (number == 0)}><summary>{shown}</summary>{lines}</details>'


def _negative(shown: Thumbnail) -> str:
    label = _label(shown)
    kind, addition = (' class="false"', ", same class as the anchor") if shown.same_class else ("", "")
    mark = "<b>same class</b>" if shown.same_class else ""
    if shown.text:
        return f"<p{kind}>{shown.cosine:.2f} · {isolated(shown.text)} <small>{isolated(label)}</small> {mark}</p>"
    return (
        f'<figure{kind}><img src="{shown.uri}" '
        f'alt="{visible(label)}, cosine {shown.cosine:.2f}{addition}">'
        f"<figcaption>{shown.cosine:.2f} · {isolated(label)}{mark}</figcaption></figure>"
    )


def _label(shown: Thumbnail) -> str:
    return "no label" if shown.label is None else shown.label
