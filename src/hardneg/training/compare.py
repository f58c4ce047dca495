"""Comparisons: recipes × overrides × seeds, one folder per run; an interrupted comparison resumes."""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import lightning as L

from hardneg.division import Division
from hardneg.evaluation import EvaluationResult, MetricFormat
from hardneg.evaluation.results import merged_formats, notes_of_seeds
from hardneg.training import build, evaluate, recipe, row_names, run, run_folder
from hardneg.training.recipe import Recipe


@dataclass(frozen=True)
class Cell:
    """One row of a comparison.

    name: as shown · settings: its recipe without the seed · typed: its recipe and overrides as the user typed them, for
    its folder, which does not depend on the other rows; by default the name
    """

    name: str
    settings: Recipe
    typed: str = ""

    @property
    def folder_name(self) -> str:
        """The name of the folder of its runs."""
        return re.sub(r"[^\w.=+-]+", "_", self.typed or self.name)

    def folder(self, root: Path, seed: int) -> Path:
        """The folder of the run with this seed."""
        return root / self.folder_name / f"seed-{seed}"


@dataclass(frozen=True)
class Rows:
    """How a comparison is shown. heading: of the column of names · baseline: a name · names: by name of the folder."""

    heading: str
    baseline: str
    names: Mapping[str, str]


@dataclass(frozen=True)
class Run:
    """One run of a comparison."""

    cell: Cell
    seed: int
    folder: Path

    @property
    def settings(self) -> Recipe:
        """The recipe with its seed."""
        return self.cell.settings.model_copy(update={"seed": self.seed})

    @property
    def finished(self) -> bool:
        """Whether the run is trained and evaluated."""
        return all((self.folder / name).exists() for name in (run_folder.ENCODER, run_folder.EVALUATION))


def grid(recipes: Sequence[str], overrides: Sequence[str] = (), over: Sequence[str] = ()) -> list[Cell]:
    """Combine every recipe with every combination of values.

    recipes: names or files · overrides: ``key=value``, for all rows · over: ``key=value,value…``, one per dimension

    Examples:
        >>> [cell.name for cell in grid(["digits-simclr"], over=["objective.preset=simclr,hcl", "trainer.epochs=5,9"])]
        ['simclr (epochs 5)', 'simclr (epochs 9)', 'hcl (epochs 5)', 'hcl (epochs 9)']
    """
    for entry in (*overrides, *over):
        if entry.partition("=")[0] == "seed":
            raise ValueError(f"{entry}: the seeds of a comparison count from 0; set their number with --seeds")
    recipe.check_once([*overrides, *over])
    dimensions = []
    for entry in over:
        key, separator, values = entry.partition("=")
        if not separator or not key or not values:
            raise ValueError(f"over must be key=value,value…, got {entry!r}")
        dimensions.append([f"{key}={value}" for value in _values(values)])
    cells = []
    for source in recipes:
        for chosen in itertools.product(*dimensions):
            typed = " ".join([Path(source).stem] * (len(recipes) > 1 or not chosen) + list(chosen))
            cells.append(Cell(typed, recipe.load(recipe.find(source), [*overrides, *chosen]), typed))
    if not cells:
        raise ValueError("there is nothing to compare: name at least one recipe")
    for cell in cells:
        for name in ("devices", "nodes"):
            if (number := getattr(cell.settings.trainer, name)) > 1:
                # Further processes would be started with this command line and repeat the comparison.
                raise ValueError(
                    f"trainer.{name}={number}: a comparison trains on one device; use hardneg train for several devices"
                )
    folders = [cell.folder(Path(), 0) for cell in cells]
    for cell, folder in zip(cells, folders, strict=True):
        if folders.count(folder) > 1:
            raise ValueError(f"{cell.name!r} occurs twice in the comparison: leave one out")
    for one, other in itertools.combinations(cells, 2):
        if one.settings.model_copy(update={"about": ""}) == other.settings.model_copy(update={"about": ""}):
            raise ValueError(f"{one.name!r} and {other.name!r} are the same recipe: leave one out")
    return _named(cells, [Path(source).stem for source in recipes])


def _named(cells: Sequence[Cell], recipes: Sequence[str]) -> list[Cell]:
    """Name the cells, those of the first recipe first, by their recipe if there are several and by what differs."""
    named, number = [], len(cells) // len(recipes)
    for start, source in zip(range(0, len(cells), number), recipes, strict=True):
        part = cells[start : start + number]
        settings = [row_names.flat(recipe.tree_of(cell.settings)) for cell in part]
        names = row_names.row_names(settings, [cell.typed for cell in part])
        if len(recipes) > 1:
            names = [source] if number == 1 else [f"{source}, {name}" for name in names]
        named += [replace(cell, name=name) for cell, name in zip(part, names, strict=True)]
    return named


def rows(cells: Sequence[Cell], baseline: str | None = None, heading: str | None = None) -> Rows:
    """How a comparison of these cells is shown.

    baseline: a name, or what the user typed for it; by default the first · heading: of the column of names; by default
    what the cells differ in

    Examples:
        >>> rows(grid(["digits-simclr"], over=["objective.temperature=0.1,0.2"]), "objective.temperature=0.2")
        Rows(heading='temperature', baseline='temperature 0.2', names={...})
    """
    found = [cell.name for cell in cells if baseline in (None, cell.name, cell.typed)]
    if not found:
        names = ", ".join(repr(cell.name) for cell in cells)
        raise ValueError(f"baseline={baseline!r} is not a row of this comparison: choose one of {names}")
    heading = heading or row_names.heading([row_names.flat(recipe.tree_of(cell.settings)) for cell in cells])
    return Rows(heading, found[0], {cell.folder_name: cell.name for cell in cells})


def plan(cells: Sequence[Cell], root: str | Path, seeds: Sequence[int]) -> list[Run]:
    """List the runs of a comparison by seed; raise if a folder holds a run of another recipe."""
    runs = []
    for seed in seeds:
        for cell in cells:
            planned = Run(cell, seed, cell.folder(Path(root), seed))
            file = planned.folder / run_folder.RECIPE
            started = not run_folder.is_free(planned.folder) and file.exists()
            if started:
                stored = recipe.load(file)
                wanted = build.resolved(planned.settings).with_batch_size(stored.trainer.batch_size)
                if build.resolved(stored) != wanted:
                    raise ValueError(
                        f"{planned.folder} holds a run of another recipe: choose another folder for this comparison"
                    )
            runs.append(planned)
    return runs


def check_data(runs: Sequence[Run]) -> None:
    """Raise, before training, if the data have no test labels or if a run was started on other data."""
    for kind, data in {str(each.settings.data): (each.settings.kind, each.settings.data) for each in runs}.values():
        kind.load_test(data, kind.load(data))
    divisions: dict[str, Division] = {}
    for planned in runs:
        if run_folder.is_free(planned.folder) or not (
            planned.finished or (planned.folder / run_folder.RECIPE).exists()
        ):
            continue
        settings = planned.settings
        supervision = settings.make_loss().supervision
        key = str((settings.data, supervision))  # what `build.data` depends on
        if key not in divisions:
            divisions[key] = build.data(settings).division or Division()
        run.check_division(settings, planned.folder, divisions[key], "choose another folder for this comparison")


def carry_out(
    runs: Sequence[Run], callbacks: Callable[[Run], Sequence[L.Callback]] = lambda run: ()
) -> Iterator[tuple[Run, Exception | None]]:
    """Train and evaluate each run that is not finished; a run that was interrupted is resumed.

    Yields each run when it is done, with its error if it failed; the other runs continue.
    """
    for planned in runs:
        error: Exception | None = None
        if not planned.finished:
            try:
                # `plan` has checked that the folder holds the given recipe, which is trusted.
                if not (planned.folder / run_folder.ENCODER).exists():
                    resume = run_folder.is_run(planned.folder) and not run_folder.is_free(planned.folder)
                    run.train(planned.settings, planned.folder, resume, callbacks(planned), trust=True)
                evaluate.evaluate(planned.folder, trust=True)
            except (ValueError, RuntimeError, OSError) as failure:
                error = failure
        yield planned, error


def write_failures(root: Path, failed: Mapping[str, str]) -> None:
    """Write the error of each failed run to the folder of the comparison, for its report; remove the file if none."""
    file = root / run_folder.FAILED
    if failed and root.is_dir():
        run_folder.write_json(file, dict(failed))
    else:
        file.unlink(missing_ok=True)


def read_failures(root: Path) -> dict[str, str]:
    """The errors of the failed runs of a comparison by name; empty for the folder of a run."""
    file = root / run_folder.FAILED
    if not file.exists():
        return {}
    return {name: error for name, error in run_folder.read_json(file).items() if isinstance(error, str)}


def write_rows(root: Path, shown: Rows) -> None:
    """Write the names, heading and baseline of a comparison to its folder, for its report."""
    if root.is_dir():
        run_folder.write_json(root / run_folder.COMPARISON, asdict(shown))


def read_rows(root: Path, runs: Sequence[Path]) -> Rows | None:
    """What `write_rows` wrote; None if nothing was, or if the folder also holds runs that were not part of it."""
    file = root / run_folder.COMPARISON
    if not file.exists():
        return None
    content = run_folder.read_json(file)
    heading, baseline, names = (content.get(key) for key in ("heading", "baseline", "names"))
    names = names if isinstance(names, dict) else {}
    distinct = len({name for name in names.values() if isinstance(name, str)}) == len(names) > 0
    if not distinct or not isinstance(heading, str) or not isinstance(baseline, str):
        raise ValueError(
            f"{file}: must hold heading, baseline and different names: run hardneg compare again, or remove it"
        )
    rows = Rows(heading, baseline, names)
    # Other runs may differ in other settings, which these names do not show.
    return rows if all(run.parent.name in rows.names for run in runs) else None


def results(runs: Sequence[Run]) -> dict[str, dict[str, list[float]]]:
    """Values by cell and metric of all finished runs, in the order of their seeds."""
    values: dict[str, dict[str, list[float]]] = {}
    for done in sorted(runs, key=lambda r: r.seed):
        if done.finished:
            row = values.setdefault(done.cell.name, {})
            for metric, value in _evaluation(done).items():
                row.setdefault(metric, []).append(value)
    return {cell: values[cell] for cell in dict.fromkeys(r.cell.name for r in runs) if cell in values}


def notes(runs: Sequence[Run]) -> dict[str, dict[str, list[str]]]:
    """Notes by cell and metric on finished runs, with their seeds, as "not converged after … (seed 0)"."""
    found: dict[str, dict[str, dict[int, str]]] = {}
    for done in sorted(runs, key=lambda r: r.seed):
        if done.finished:
            for metric, note in _evaluation(done).notes.items():
                found.setdefault(done.cell.name, {}).setdefault(metric, {})[done.seed] = note
    return {cell: {metric: notes_of_seeds(by_seed) for metric, by_seed in row.items()} for cell, row in found.items()}


def formats(runs: Sequence[Run]) -> dict[str, MetricFormat]:
    """The formats of metrics that are not built in, from the finished runs."""
    return merged_formats(_evaluation(done) for done in runs if done.finished)


def _evaluation(done: Run) -> EvaluationResult:
    file = done.folder / run_folder.EVALUATION
    return EvaluationResult.from_json(run_folder.read_json(file), file)


def _values(text: str) -> list[str]:
    """Split at commas that are not inside brackets.

    Examples:
        >>> _values("1,{a: 2, b: 3},[4, 5]")
        ['1', '{a: 2, b: 3}', '[4, 5]']
    """
    values, depth = [""], 0
    for letter in text:
        depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and depth == 0:
            values.append("")
        else:
            values[-1] += letter
    return [value.strip() for value in values]
