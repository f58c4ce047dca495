"""Read run folders for a report, and group the runs that differ only in their seed.

The recipe is read as plain YAML, so that runs of older versions with other keys can be reported on.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from hardneg.evaluation.metrics import is_number
from hardneg.evaluation.results import EvaluationResult, notes_of_seeds
from hardneg.extras import required
from hardneg.training import row_names, run_folder


@dataclass(frozen=True)
class Run:
    """One run folder.

    recipe: nested mappings · text: the recipe as YAML · metrics: one mapping per epoch · evaluation: values by metric
    """

    folder: Path
    recipe: dict[str, Any]
    text: str
    environment: dict[str, Any]
    metrics: list[dict[str, Any]]
    evaluation: EvaluationResult

    @property
    def seed(self) -> int:
        """The recipe's seed."""
        return int(self.recipe.get("seed", 0))

    @property
    def settings(self) -> dict[str, Any]:
        """The recipe by dotted key, without the seed."""
        return row_names.flat(self.recipe)

    @property
    def source(self) -> str:
        """The source of its data."""
        return str(self.settings.get("data.source", "digits"))

    @property
    def epochs(self) -> tuple[int, int | None]:
        """Number of finished epochs, and of epochs in the recipe."""
        planned = self.settings.get("trainer.epochs")
        done = self.metrics[-1].get("epoch") if self.metrics else 0
        return (int(done) if isinstance(done, int | float) and is_number(done) else 0), planned


def source_names(runs: Sequence[Run]) -> list[str]:
    """The different sources of runs, those that are paths by the last part of it, unless two end alike."""
    sources = dict.fromkeys(run.source for run in runs)
    short = {source: PurePath(source).name if PurePath(source).is_absolute() else source for source in sources}
    names = [name or source for source, name in short.items()]
    return names if len({*names}) == len(sources) else [*sources]


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed, in the order of their seeds, and the name of the group."""

    name: str
    runs: list[Run] = field(default_factory=list)

    def values(self, metric: str) -> list[float]:
        """The metric of each run that has it."""
        return [run.evaluation[metric] for run in self.runs if metric in run.evaluation]

    def notes(self, metric: str) -> list[str]:
        """Notes on the metric, as "not converged after 500 iterations (seed 0)"."""
        return notes_of_seeds(
            {run.seed: run.evaluation.notes[metric] for run in self.runs if metric in run.evaluation.notes}
        )


def read_run(folder: str | Path) -> Run:
    """Read a run folder; every file except its recipe may be missing."""
    folder = Path(folder)
    file = folder / "recipe.yaml"
    if not file.is_file():
        raise ValueError(f"{folder} holds no run: recipe.yaml is missing; pass the folder that training wrote")
    required("yaml", "train")
    from hardneg.training import yaml_files

    text, recipe = yaml_files.text_of(file), yaml_files.read_mapping(file)
    if not isinstance(seed := recipe.get("seed", 0), int) or not is_number(seed):
        raise ValueError(f"{file}: seed must be a whole number, got {str(seed)[:40]!r}")
    metrics = _lines(folder / "metrics.jsonl")
    evaluation = EvaluationResult.from_json(_mapping(folder / "evaluation.json"), folder / "evaluation.json")
    online = [line["knn"] for line in metrics if is_number(line.get("knn"))]
    if online:
        evaluation.setdefault("knn", float(online[-1]))
    return Run(folder, recipe, text, _mapping(folder / "environment.json"), metrics, evaluation)


def group_runs(runs: Sequence[Run], names: Sequence[str] | None = None) -> list[Group]:
    """Group runs that differ only in their seed; groups keep the order of the runs.

    names: one per run, or one per group; default: the settings in which the recipes differ, as "hcl" or "beta 0.5"
    """
    keys = [_identity(run) for run in runs]
    order = list(dict.fromkeys(keys))
    if names is None:
        derived = dict(zip(order, _derived([runs[keys.index(key)] for key in order]), strict=True))
        labels = [derived[key] for key in keys]
    elif len(names) == len(runs):
        labels = list(names)
    elif len(names) == len(order):
        labels = [names[order.index(key)] for key in keys]
    else:
        raise ValueError(
            f"names has {len(names)} entries for {len(runs)} runs of {len(order)} groups: give one for each"
        )
    members: dict[str, list[Run]] = {}
    identity: dict[str, str] = {}
    for run, key, name in zip(runs, keys, labels, strict=True):
        if identity.setdefault(name, key) != key:
            raise ValueError(f"names gives two different recipes the name {name!r}: give {run.folder} another one")
        for other in members.setdefault(name, []):
            # The same result counted twice would look like two seeds that agree.
            if other.seed == run.seed:
                raise ValueError(
                    f"{other.folder} and {run.folder} have the same recipe and seed {run.seed}: "
                    "leave one out, or give them different names"
                )
        members[name].append(run)
    return [Group(name, sorted(group, key=lambda run: run.seed)) for name, group in members.items()]


def _derived(runs: Sequence[Run]) -> list[str]:
    """Name each run by the settings in which they differ, or by its folder."""
    if len(runs) == 1 and (preset := runs[0].settings.get("objective.preset")):
        return [str(preset)]
    # The folder of a comparison has one folder per row, and in it one per seed.
    folders = [run.folder.parent if run.folder.name.startswith("seed-") else run.folder for run in runs]
    return row_names.row_names([run.settings for run in runs], [folder.name or str(folder) for folder in folders])


def _identity(run: Run) -> str:
    return json.dumps(run.settings, sort_keys=True, default=str)


def _mapping(file: Path) -> dict[str, Any]:
    return run_folder.read_json(file) if file.exists() else {}


def _lines(file: Path) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for text in file.read_bytes().splitlines() if file.is_file() else ():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            break  # the run was killed while it wrote this line
        if isinstance(line, dict):
            lines.append(line)
    return lines
