"""Section "Hubs": samples that are a hard negative of many anchors."""

from hardneg.insight.contents import Contents, Part, breakable, isolated, scrollable, visible
from hardneg.insight.samples import HubSample, HubSummary


def hubs(contents: Contents) -> Part | None:
    """For each group, how unevenly samples are hard negatives, and the samples that are most often."""
    found = {name: summary.hubs for name, summary in contents.available_summaries.items() if summary.hubs is not None}
    if not found:
        return None
    k = next(iter(found.values())).k
    unit = contents.unit
    hint = (
        f"A hub is among the {k} most similar {unit} of many anchors, so it is a hard negative again and again. A high "
        f"skewness means that a few {unit} dominate the hard negatives; they are often duplicates, blank or mislabeled."
    )
    rows = "".join(
        f'<tr><th scope="row">{breakable(name)}</th><td class="number">{each.skewness:.2f}</td>'
        f'<td class="number">{100 * each.unused:.1f} %</td><td class="number">{each.shown[0].anchors:,}</td></tr>'
        for name, each in found.items()
    )
    table = (
        f'<table class="narrow"><caption>How often one of the {unit} is among the {k} most similar of another; {k} on '
        f'average</caption><thead><tr><th scope="col">{isolated(contents.heading)}</th>'
        f'<th scope="col">skewness</th><th scope="col">never</th><th scope="col">most often</th>'
        f"</tr></thead><tbody>{rows}</tbody></table>"
    )
    lines = "".join(f'<div class="row"><h3>{isolated(name)}</h3>{_samples(each)}</div>' for name, each in found.items())
    note = f'<p class="small">Features of the encoder, of the {unit} of the histograms; one seed of each row.</p>'
    opened = f'<details class="anchor" open><summary>The largest hubs of each row</summary>{lines}</details>'
    return Part("hubs", "Hubs: hard negatives of many anchors", hint, scrollable(table, "Hubs") + opened + note)


def _samples(summary: HubSummary) -> str:
    kind = "texts" if summary.shown[0].thumbnail.text else "thumbnails"
    return f'<div class="{kind}">{"".join(map(_sample, summary.shown))}</div>'


def _sample(hub: HubSample) -> str:
    shown, label = hub.thumbnail, hub.thumbnail.label or "no label"
    different = None if hub.different is None else 100 * hub.different / max(hub.anchors, 1)
    wrong = "" if different is None else f", {different:.0f}\u00a0% of other classes"
    if shown.text:
        return f"<p>{hub.anchors} anchors{wrong} · {isolated(shown.text)} <small>{isolated(label)}</small></p>"
    return (
        f'<figure><img src="{shown.uri}" alt="{visible(label)}, near to {hub.anchors} anchors">'
        f"<figcaption>{isolated(label)}: {hub.anchors} anchors{wrong}</figcaption></figure>"
    )
