"""How to get these numbers again: commands, recipes and environments."""

import shlex
from collections.abc import Sequence

from hardneg.insight.contents import Contents, Part, named, plain
from hardneg.insight.runs import Group, Run


def provenance(contents: Contents) -> Part:
    """The command of every run, and the recipe and environment of each group."""
    see = "The command as it was typed; the recipe is what it resolved to, with every default written out."
    typed = _commands([run for group in contents.groups for run in group.runs])
    if len(typed) == 1:  # one command made them all
        body = f'<p class="commands"><code>{plain(next(iter(typed)))}</code></p>'
        body += "".join(_group(group, with_commands=False) for group in contents.groups)
    else:
        body = "".join(_group(group, with_commands=True) for group in contents.groups)
    if contents.extra:
        names = ", ".join(map(named, contents.extra))
        body += f'<p class="small">Without a run folder, given as numbers: {names}.</p>'
    return Part("provenance", "Commands and recipes", see, body)


def _group(group: Group, with_commands: bool) -> str:
    items = "".join(
        f"<li><span>seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}</span><code>{plain(command)}</code></li>"
        for command, seeds in _commands(group.runs).items()
    )
    commands = f'<ul class="commands">{items}</ul>' if with_commands else ""
    first = group.runs[0]
    return (
        f"<article><h3>{named(group.name)}</h3>{commands}"
        f"<details><summary>Recipe (seed {first.seed})</summary>"
        f'<pre tabindex="0">{plain(first.text.rstrip())}</pre></details>'
        f"<details><summary>Environment</summary>{_environment(group)}</details></article>"
    )


def _commands(runs: Sequence[Run]) -> dict[str, list[int]]:
    """Each command with the seeds that it ran."""
    typed: dict[str, list[int]] = {}
    for run in runs:
        typed.setdefault(_command(run), []).append(run.seed)
    return typed


def _command(run: Run) -> str:
    command = run.environment.get("command")
    if isinstance(command, list) and command:
        return shlex.join(map(str, command))
    return str(command) if command else f"not recorded; the run is in {run.folder}"


def _environment(group: Group) -> str:
    """Each setting once, with all its values where seeds ran in different places."""
    keys = dict.fromkeys(key for run in group.runs for key in run.environment if key != "command")
    rows = "".join(
        f'<tr><th scope="row">{named(str(key))}</th><td>'
        + " | ".join(dict.fromkeys(named(str(run.environment.get(key, "–"))) for run in group.runs))
        + "</td></tr>"
        for key in keys
    )
    folders = "".join(f"<tr><th scope='row'>folder</th><td>{named(str(run.folder))}</td></tr>" for run in group.runs)
    return f'<table class="narrow"><caption class="hidden">Environment</caption><tbody>{rows}{folders}</tbody></table>'
