"""Section "Commands and recipes": how to reproduce the runs."""

import shlex
from collections.abc import Sequence
from pathlib import PurePath

from hardneg.insight.contents import Contents, Part, isolated, visible
from hardneg.insight.runs import Group, Run


def provenance(contents: Contents) -> Part:
    """The command of every run, and the recipe and environment of each group."""
    hint = "The command that started each run, and the full recipe with all defaults."
    commands = _commands([run for group in contents.groups for run in group.runs])
    if len(commands) == 1:  # of a comparison
        body = f'<p class="commands"><code>{visible(next(iter(commands)))}</code></p>'
        body += "".join(_group(group, with_commands=False) for group in contents.groups)
    else:
        body = "".join(_group(group, with_commands=True) for group in contents.groups)
    if contents.extra_rows:
        names = ", ".join(map(isolated, contents.extra_rows))
        body += f'<p class="small">Without a run folder, given as values: {names}.</p>'
    return Part("provenance", "Commands and recipes", hint, body)


def _group(group: Group, with_commands: bool) -> str:
    items = "".join(
        f"<li><span>seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}</span>"
        f"<code>{visible(command)}</code></li>"
        for command, seeds in _commands(group.runs).items()
    )
    commands = f'<ul class="commands">{items}</ul>' if with_commands else ""
    first = group.runs[0]
    return (
        f"<article><h3>{isolated(group.name)}</h3>{commands}"
        f"<details><summary>Recipe (seed {first.seed})</summary>"
        f'<pre tabindex="0">{visible(first.text.rstrip())}</pre></details>'
        f"<details><summary>Environment</summary>{_environment(group)}</details></article>"
    )


def _commands(runs: Sequence[Run]) -> dict[str, list[int]]:
    """Each command with the seeds of its runs."""
    seeds_of: dict[str, list[int]] = {}
    for run in runs:
        seeds_of.setdefault(_command(run), []).append(run.seed)
    return seeds_of


def _command(run: Run) -> str:
    command = run.environment.get("command")
    if isinstance(command, list) and command:
        return shlex.join([*_program(str(command[0])), *map(str, command[1:])]) + _extension(run)
    return str(command) if command else f"not recorded; run folder: {run.folder}"


def _program(path: str) -> list[str]:
    """How a script is called: by its name, wherever it was installed."""
    script = PurePath(path.replace("\\", "/"))
    if script.name == "__main__.py":
        return ["python", "-m", script.parent.name]
    return [script.name.removesuffix(".exe")]


def _extension(run: Run) -> str:
    """The number of epochs that a run was extended to after it was started, if it was."""
    resumed = run.environment.get("resumed")
    parts = resumed if isinstance(resumed, list) else []
    epochs = [part["epochs"] for part in parts if isinstance(part, dict) and "epochs" in part]
    return f", extended to trainer.epochs={epochs[-1]}" if epochs else ""


def _environment(group: Group) -> str:
    """Each entry once, with all its values if they differ between seeds."""
    keys = dict.fromkeys(key for run in group.runs for key in run.environment if key != "command")
    rows = "".join(
        f'<tr><th scope="row">{isolated(str(key))}</th><td>'
        + " | ".join(dict.fromkeys(isolated(str(run.environment.get(key, "–"))) for run in group.runs))
        + "</td></tr>"
        for key in keys
    )
    folders = "".join(f"<tr><th scope='row'>folder</th><td>{isolated(str(run.folder))}</td></tr>" for run in group.runs)
    return f'<table class="narrow"><caption class="hidden">Environment</caption><tbody>{rows}{folders}</tbody></table>'
