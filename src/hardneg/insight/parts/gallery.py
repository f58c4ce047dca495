"""The negatives themselves: pictures of a few anchors, each with what every encoder finds most similar."""

from hardneg.insight.contents import Contents, Part, breakable, missing, named, plain
from hardneg.insight.samples import Evidence, Picture


def gallery(contents: Contents) -> Part:
    """For each anchor one row per group; the same anchors for all groups that look at the same pictures."""
    see = (
        "Each row shows the pictures most similar to the anchor, hardest first: ringed and marked “same class” are "
        "false negatives, which a method without labels pushes away although it should not."
    )
    found = [
        (group.name, evidence)
        for group in contents.groups
        if isinstance(evidence := contents.evidence.get(group.name), Evidence)
    ]
    anchors: dict[str, list[tuple[str, Picture, list[Picture]]]] = {}
    for name, evidence in found:
        for anchor, negatives in evidence.gallery:
            anchors.setdefault(anchor.uri, []).append((name, anchor, negatives))
    boxes = "".join(_anchor(number, rows) for number, rows in enumerate(anchors.values()))
    return Part("gallery", "Hard negatives", see, missing(contents) + _shares(found) + boxes)


def _shares(found: list[tuple[str, Evidence]]) -> str:
    """How many of the hardest are false negatives, over all pictures and not only those shown."""
    rows = "".join(
        f'<tr><th scope="row">{breakable(name)}</th><td class="number">{100 * evidence.share:.1f} %</td>'
        f'<td class="number">{100 * evidence.chance:.1f} %</td></tr>'
        for name, evidence in found
        if evidence.share is not None and evidence.chance is not None
    )
    if not rows:
        return ""
    hardest = max(len(negatives) for _, evidence in found for _, negatives in evidence.gallery)
    return (
        '<table class="narrow"><caption>Negatives that share the anchor’s class</caption><thead><tr>'
        f'<th scope="col">negatives</th><th scope="col">of the {hardest} hardest</th><th scope="col">of all</th></tr>'
        f"</thead><tbody>{rows}</tbody></table>"
    )


def _anchor(number: int, rows: list[tuple[str, Picture, list[Picture]]]) -> str:
    anchor = rows[0][1]
    label = _label(anchor)
    lines = "".join(
        f'<div class="row"><h3>{named(name)}</h3><div class="pictures">{"".join(map(_negative, negatives))}</div></div>'
        for name, _, negatives in rows
    )
    return (
        f'<details class="anchor"{" open" * (number == 0)}><summary>'
        f'<img src="{anchor.uri}" alt="Anchor, {plain(label)}"><span>anchor: {named(label)}</span></summary>'
        f"{lines}</details>"
    )


def _negative(picture: Picture) -> str:
    label = _label(picture)
    kind, said = (' class="false"', ", same class as the anchor") if picture.same else ("", "")
    mark = "<b>same class</b>" if picture.same else ""
    return (
        f'<figure{kind}><img src="{picture.uri}" '
        f'alt="{plain(label)}, cosine {picture.cosine:.2f}{said}">'
        f"<figcaption>{picture.cosine:.2f} · {named(label)}{mark}</figcaption></figure>"
    )


def _label(picture: Picture) -> str:
    return "no label" if picture.label is None else picture.label
