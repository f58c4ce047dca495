"""Where the time of a step goes."""

import statistics
from typing import Any

from hardneg.insight.contents import Contents, Part, breakable, named, scrolling
from hardneg.insight.runs import Group, Run, is_finite

_KNOWN = ("data", "augmentation", "network")
_BETWEEN_STEPS = ("pause",)  # what online evaluation took belongs to no step


def time(contents: Contents) -> Part:
    """Milliseconds of a step by what they were spent on, and pictures per second."""
    see = (
        "The longest piece of a bar is what a faster step must shorten; bars of one length: the negatives cost no time."
    )
    steps = {group.name: _step(group) for group in contents.groups}
    measured = {name: parts for name, parts in steps.items() if parts}
    if not measured:
        return Part("time", "Time", see, '<p class="note">The runs hold no times.</p>')
    kinds = sorted(
        {kind for parts in measured.values() for kind in parts},
        key=lambda kind: (_KNOWN.index(kind) if kind in _KNOWN else len(_KNOWN), kind),
    )
    longest = max(sum(parts.values()) for parts in measured.values()) or 1.0
    rows = []
    for group in contents.groups:
        if group.name not in measured:
            continue
        parts = measured[group.name]
        bar = "".join(
            f'<i class="t{place % 4}" style="width:{100 * parts.get(kind, 0) / longest:.2f}%"></i>'
            for place, kind in enumerate(kinds)
        )
        cells = "".join(f'<td class="number">{1000 * parts.get(kind, 0):.1f}</td>' for kind in kinds)
        speed = _speed(group)
        rows.append(
            f'<tr><th scope="row">{breakable(group.name)}</th><td class="bars" aria-hidden="true">{bar}</td>{cells}'
            f'<td class="number">{1000 * sum(parts.values()):.1f}</td>'
            f'<td class="number">{"–" if speed is None else f"{speed:,.0f}"}</td></tr>'
        )
    legend = "".join(
        f'<li><span class="block t{place % 4}" aria-hidden="true"></span>{named(kind)}</li>'
        for place, kind in enumerate(kinds)
    )
    head = "".join(f'<th scope="col">{named(kind)}<span class="unit"> ms</span></th>' for kind in kinds)
    table = (
        '<table><caption class="hidden">Time of a step</caption><thead><tr><th scope="col">negatives</th>'
        f'<th scope="col" class="bars">a step</th>{head}<th scope="col">step<span class="unit"> ms</span></th>'
        f'<th scope="col">pictures<span class="unit"> /s</span></th></tr></thead><tbody>{"".join(rows)}</tbody></table>'
    )
    note = (
        '<p class="small">Mean over steps and seeds, without each run’s first epoch where there are more; '
        "pictures per second: median over epochs. Runs on different machines are not comparable.</p>"
    )
    return Part("time", "Time", see, f'<ul class="legend">{legend}</ul>{scrolling(table, "Time of a step")}{note}')


def _step(group: Group) -> dict[str, float]:
    """Seconds of a step by kind, mean over the group's runs."""
    runs = [seconds for run in group.runs if (seconds := _run_step(run))]
    kinds = dict.fromkeys(kind for seconds in runs for kind in seconds)
    return {kind: statistics.fmean(seconds.get(kind, 0.0) for seconds in runs) for kind in kinds}


def _run_step(run: Run) -> dict[str, float]:
    lines = [line for line in run.metrics if isinstance(line.get("seconds"), dict) and is_finite(line.get("step"))]
    if not lines:
        return {}
    # The first epoch compiles, allocates and warms caches.
    timed = lines[1:] or lines
    steps = timed[-1]["step"] - (lines[0]["step"] if len(lines) > 1 else 0)
    totals: dict[str, float] = {}
    for line in timed:
        for kind, seconds in line["seconds"].items():
            if kind not in _BETWEEN_STEPS and is_finite(seconds):
                totals[kind] = totals.get(kind, 0.0) + seconds
    return {kind: seconds / steps for kind, seconds in totals.items()} if steps > 0 else {}


def _speed(group: Group) -> float | None:
    lines: list[dict[str, Any]] = [line for run in group.runs for line in run.metrics[1:] or run.metrics]
    speeds = [line["images_per_second"] for line in lines if is_finite(line.get("images_per_second"))]
    return statistics.median(speeds) if speeds else None
