"""Section "Time per step": how long each phase of a training step takes."""

import statistics
from typing import Any

from hardneg.diagnostics.step_cost import step_cost
from hardneg.evaluation.metrics import is_number
from hardneg.insight.contents import Contents, Part, breakable, isolated, scrollable
from hardneg.insight.runs import Group, Run

_KEY, _TITLE = "time", "Time per step"
_PHASES = ("data", "augmentation", "network", "encoding", "graph")
_BETWEEN_STEPS = ("pause",)  # online evaluation is not part of a step


def step_time(contents: Contents) -> Part:
    """Milliseconds of a step by phase, and samples per second."""
    hint = "Mean time of a training step by phase." + (
        " If the bars are equally long, the choice of negatives costs no time." * contents.is_comparison
    )
    steps = {group.name: _step(group) for group in contents.groups}
    measured = {name: parts for name, parts in steps.items() if parts}
    if not measured:
        return Part(_KEY, _TITLE, hint, '<p class="note">The runs have no times.</p>')
    phases = sorted(
        {phase for parts in measured.values() for phase in parts},
        key=lambda phase: (_PHASES.index(phase) if phase in _PHASES else len(_PHASES), phase),
    )
    longest = max(sum(parts.values()) for parts in measured.values()) or 1.0
    rows = []
    for group in contents.groups:
        if group.name not in measured:
            continue
        parts = measured[group.name]
        bar = "".join(
            f'<i class="t{number % 5}" style="width:{100 * parts.get(phase, 0) / longest:.2f}%"></i>'
            for number, phase in enumerate(phases)
        )
        cells = "".join(f'<td class="number">{1000 * parts.get(phase, 0):.1f}</td>' for phase in phases)
        speed = _speed(group)
        rows.append(
            f'<tr><th scope="row">{breakable(group.name)}</th><td class="bars" aria-hidden="true">{bar}</td>{cells}'
            f'<td class="number">{1000 * sum(parts.values()):.1f}</td>'
            f'<td class="number">{"–" if speed is None else f"{speed:,.0f}"}</td></tr>'
        )
    legend = "".join(
        f'<li><span class="block t{number % 5}" aria-hidden="true"></span>{isolated(phase)}</li>'
        for number, phase in enumerate(phases)
    )
    head = "".join(f'<th scope="col">{isolated(phase)}<span class="unit"> ms</span></th>' for phase in phases)
    table = (
        '<table><caption class="hidden">Time per step</caption><thead><tr>'
        f'<th scope="col">{isolated(contents.heading)}</th><th scope="col" class="bars">phases</th>{head}'
        '<th scope="col">total<span class="unit"> ms</span></th>'
        f'<th scope="col">{contents.unit}<span class="unit"> /s</span></th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )
    note = (
        '<p class="small">Mean over steps and seeds, without the first epoch of each run if there are more; '
        f"{contents.unit} per second: median over epochs. Times on different machines are not comparable.</p>"
    )
    body = f'<ul class="legend">{legend}</ul>{scrollable(table, "Time per step")}{note}{_choice(contents)}'
    return Part(_KEY, _TITLE, hint, body)


def _choice(contents: Contents) -> str:
    """What the choice of batches costs per step, as in table 11 of ProSampler; nothing if all batches are random."""
    costs = {group.name: [cost for run in group.runs if (cost := step_cost(run.metrics))] for group in contents.groups}
    if not any(cost.encoding + cost.graph > 0 for found in costs.values() for cost in found):
        return ""
    rows = []
    for name, found in costs.items():
        if not found:
            continue
        sampling, encoding, graph, training = (
            1000 * statistics.fmean(getattr(cost, part) for cost in found)
            for part in ("sampling", "encoding", "graph", "training")
        )
        share = 100 * (sampling + encoding + graph) / max(training, 1e-9)
        numbers = "".join(f'<td class="number">{value:.2f}</td>' for value in (sampling, encoding, graph, training))
        rows.append(f'<tr><th scope="row">{breakable(name)}</th>{numbers}<td class="number">{share:.1f} %</td></tr>')
    heads = "".join(
        f'<th scope="col">{name}<span class="unit"> ms</span></th>'
        for name in ("sampling", "encoding", "graph", "training")
    )
    table = (
        '<table class="narrow"><caption>What the choice of batches costs per step</caption><thead><tr>'
        f'<th scope="col">{isolated(contents.heading)}</th>{heads}<th scope="col">added to training</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )
    note = (
        '<p class="small">Sampling: drawing the batch. Encoding and graph: refreshing the sampler, divided by the '
        "number of steps. Training: views, forward and backward pass, and optimizer.</p>"
    )
    return scrollable(table, "Cost of the choice of batches") + note


def _step(group: Group) -> dict[str, float]:
    """Seconds of a step by phase, mean over the group's runs."""
    runs = [seconds for run in group.runs if (seconds := _run_step(run))]
    phases = dict.fromkeys(phase for seconds in runs for phase in seconds)
    return {phase: statistics.fmean(seconds.get(phase, 0.0) for seconds in runs) for phase in phases}


def _run_step(run: Run) -> dict[str, float]:
    lines = [line for line in run.metrics if isinstance(line.get("seconds"), dict) and is_number(line.get("step"))]
    if not lines:
        return {}
    # The first epoch includes compilation, allocation and cold caches.
    timed = lines[1:] or lines
    steps = timed[-1]["step"] - (lines[0]["step"] if len(lines) > 1 else 0)
    totals: dict[str, float] = {}
    for line in timed:
        for phase, seconds in line["seconds"].items():
            if phase not in _BETWEEN_STEPS and is_number(seconds):
                totals[phase] = totals.get(phase, 0.0) + seconds
    return {phase: seconds / steps for phase, seconds in totals.items()} if steps > 0 else {}


def _speed(group: Group) -> float | None:
    lines: list[dict[str, Any]] = [line for run in group.runs for line in run.metrics[1:] or run.metrics]
    speeds = [line["samples_per_second"] for line in lines if is_number(line.get("samples_per_second"))]
    return statistics.median(speeds) if speeds else None
