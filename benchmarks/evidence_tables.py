"""Tables of results: their cells, the recorded runs, and the Markdown of both."""

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from hardneg.insight.significance import Difference, difference
from hardneg.training import recipe, run_folder
from hardneg.training.recipe import Recipe

HERE = Path(__file__).parent
TABLES, RESULTS = HERE / "evidence", HERE.parent / "results" / "evidence"
RAW, UNTRAINED = "raw inner products", "untrained"
SMOKE = "smoke"  # a table for tests
TU = "tu:"  # of a set of graphs, which is found by its name


@dataclass(frozen=True)
class Cell:
    """One run of a table.

    variant: "", or what no recipe can set, "raw inner products" or "untrained" · knn_at: epochs with kNN accuracy, of
    images only · linear: whether a linear probe is fitted at the end · metrics: computed at the end by `hardneg
    evaluate` · data: of this run alone, "" for the table's · details: whether the cosines of pairs and the losses of
    H-SCL are recorded
    """

    name: str
    recipe: str
    overrides: tuple[str, ...]
    seed: int
    epochs: int
    knn_at: tuple[int, ...]
    variant: str = ""
    linear: bool = False
    metrics: tuple[str, ...] = ()
    data: str = ""
    details: bool = False

    @property
    def key(self) -> str:
        """The settings that identify the run, without its name."""
        own = [self.data] if self.data else []
        return json.dumps([self.recipe, sorted(self.overrides), self.seed, self.epochs, self.variant, *own])

    def settings(self, source: str, folder: Path | None = None) -> Recipe:
        """The whole recipe on this data; ``{data}`` in an override is the folder of the data."""
        own = [
            f"data.source={self.data or source}",
            f"seed={self.seed}",
            f"trainer.epochs={self.epochs}",
            "trainer.knn_every=0",
        ]
        placed = [override.replace("{data}", str(folder or ".")) for override in self.overrides]
        return recipe.load(recipe.find(self.recipe), [*placed, *own])


@dataclass(frozen=True)
class Table:
    """The runs of a table, and which of its rows are compared.

    name · about: its settings · data: name of a set · pace: seconds per epoch until some are measured · cells ·
    against: the baseline of a row, both by name · curves: the rows that are plotted by epoch · machine: of the pace
    """

    name: str
    about: str
    data: str
    pace: float
    cells: tuple[Cell, ...]
    against: dict[str, str] = field(default_factory=dict)
    curves: tuple[str, ...] = ()
    machine: str = ""


def load_table(name: str) -> Table:
    """The table of this name, or in this file."""
    file = Path(name) if name.endswith(".yaml") else TABLES / f"{name}.yaml"
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    cells = [
        Cell(
            name=row["name"],
            recipe=row.get("recipe", content["recipe"]),
            overrides=_overrides(content, row),
            seed=seed,
            epochs=row.get("epochs", content["epochs"]),
            knn_at=tuple(content.get("knn_at", ())),
            variant=row.get("variant", ""),
            linear=content.get("linear", False),
            metrics=tuple(content.get("metrics", ())),
            data=row.get("data", ""),
            details=row.get("details", False),
        )
        for seeds in content.get("rounds", [[]])  # of rows without seeds of their own
        for row in content["cells"]
        for seed in row.get("seeds", seeds)
    ]
    data: str = content["data"]
    stand_in = data if data.startswith(TU) else "python-docs" if data.startswith("text/") else "digits"
    settings = {(cell.recipe, cell.overrides, cell.data, cell.variant): cell for cell in cells}  # without seeds
    for cell in settings.values():  # invalid settings raise before the first run
        cell.settings(stand_in)
        if cell.variant not in ("", RAW, UNTRAINED):
            raise ValueError(f"variant={cell.variant!r} is not known: use {RAW!r}, {UNTRAINED!r}, or leave it out")
    if len({cell.key for cell in cells}) < len(cells):
        raise ValueError(f"{file} has the same run twice: change a seed or an override")
    against = {row["name"]: row["against"] for row in content["cells"] if "against" in row}
    curves = tuple(content.get("curves", ()))
    if unknown := {*against.values(), *curves} - {cell.name for cell in cells}:
        raise ValueError(f"{file} compares or plots {', '.join(sorted(unknown))}, which it does not have")
    pace, machine = float(content["pace"]), content.get("machine", "")
    return Table(file.stem, content["about"], data, pace, tuple(cells), against, curves, machine)


def _overrides(content: dict[str, Any], row: dict[str, Any]) -> tuple[str, ...]:
    """Overrides of all cells, of the sets of the row, and its own; the last value of a key is used."""
    groups = [content.get("overrides", []), *(content["sets"][name] for name in row.get("with", []))]
    words = [override for group in [*groups, row.get("overrides", [])] for override in group]
    return tuple({override.partition("=")[0]: override for override in words}.values())


def lines(file: Path) -> list[dict[str, Any]]:
    """The records of a file; an incomplete last line is left out."""
    found = []
    for text in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        try:
            found.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return found


def append(file: Path, line: dict[str, Any]) -> None:
    """Add a record on a new line, also after an incomplete one; other processes may do so, too."""
    with run_folder.locked(file), file.open("a+b") as out:
        if out.tell() > 0:
            out.seek(-1, 2)
            if out.read(1) != b"\n":
                out.write(b"\n")
        out.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")


def recorded(table: Table, out: Path) -> dict[str, dict[str, Any]]:
    """The finished runs of a table by their key, those of this call's folder first."""
    found: dict[str, dict[str, Any]] = {}
    for folder in (out, RESULTS):
        for line in lines(folder / f"{table.name}.jsonl"):
            found.setdefault(line["key"], line)
    return found


def pending(table: Table, out: Path) -> Iterator[Cell]:
    """The cells without a record, in order."""
    for cell in table.cells:
        if cell.key not in recorded(table, out):
            yield cell


def spread(numbers: list[float], digits: int = 1, scale: float = 100.0) -> str:
    """Mean and standard deviation (n − 1); the mean alone of one number."""
    shown = f"{scale * statistics.fmean(numbers):.{digits}f}"
    return f"{shown} ± {scale * statistics.stdev(numbers):.{digits}f}" if len(numbers) > 1 else shown


def rows_of(table: Table, out: Path) -> dict[str, list[dict[str, Any]]]:
    """The recorded runs of each row, by its name; empty lists for rows without any."""
    found = recorded(table, out)
    groups: dict[str, list[dict[str, Any]]] = {}
    for cell in table.cells:
        groups.setdefault(cell.name, [])
        if cell.key in found:
            groups[cell.name].append(found[cell.key])
    return groups


def columns_of(table: Table) -> dict[str, "Reading"]:
    """How each accuracy is read from a recorded run, by its heading."""
    epochs = sorted({epoch for cell in table.cells if cell.knn_at for epoch in (*cell.knn_at, cell.epochs)})
    columns: dict[str, Reading] = {f"kNN, epoch {epoch}": partial(_nested, "knn", str(epoch)) for epoch in epochs}
    if any(cell.linear for cell in table.cells):
        columns["linear probe"] = lambda line: line.get("linear")
    return columns | {name: partial(_nested, "metrics", name) for name in table.cells[0].metrics}


def final_columns(table: Table) -> dict[str, "Reading"]:
    """The columns of the trained encoder: kNN after the last epoch, the linear probe, metrics."""
    columns = columns_of(table)
    earlier = [heading for heading in columns if heading.startswith("kNN")][:-1]
    return {heading: read for heading, read in columns.items() if heading not in earlier}


def compared(
    runs: list[dict[str, Any]], baseline: list[dict[str, Any]], read: "Reading"
) -> tuple[Difference, int] | None:
    """The difference of two rows by Welch's t-test, and the smaller number of seeds; None if one has no run."""
    values, others = ([number for line in group if (number := read(line)) is not None] for group in (runs, baseline))
    return (difference(values, others), min(len(values), len(others))) if values and others else None


def signed(found: Difference, digits: int = 1) -> str:
    """A difference in points with its standard error; a star if it is significant at the 0.05 level."""
    shown = f"{100 * found.mean:+.{digits}f}".replace("-", "−")
    error = "" if found.error is None else f" ± {100 * found.error:.{digits}f}"
    return shown + error + (" \\*" if found.significant else "")


def accuracies(table: Table, out: Path) -> str:
    """The table of accuracies; rows with a baseline have the differences from it."""
    groups, columns = rows_of(table, out), columns_of(table)
    shown: dict[str, Column] = {"seeds": lambda name: len(groups[name])}
    for heading, read in columns.items():
        shown[heading] = partial(_summary_of, groups, read)
    if table.against:
        shown["against"] = lambda name: table.against.get(name, "")
        for heading, read in final_columns(table).items():
            shown[f"Δ {heading.partition(',')[0]}"] = partial(_difference_of, table, groups, read)
    return _rows(groups, shown)


def batch_statistics(table: Table, out: Path) -> str:
    """The table of what batches held in the last epoch, and of seconds."""
    groups = rows_of(table, out)
    costs: dict[str, Reading] = {
        "false negatives, %": partial(_last, "false_negatives"),
        "samples drawn in an epoch, %": partial(_last, "seen"),
    }
    seconds = {part: partial(_nested, "seconds_per_epoch", part) for part in ("all", "training", "encode", "graph")}
    shown: dict[str, Column] = {name: partial(_summary_of, groups, read) for name, read in costs.items()}
    most = partial(_last, "most_visits")
    shown["most draws of a sample"] = partial(_summary_of, groups, most, digits=0, scale=1.0)
    shown |= {f"s per epoch, {part}": partial(_mean_of, groups, read) for part, read in seconds.items()}
    return _rows(groups, shown)


def markdown(table: Table, out: Path) -> str:
    """The recorded runs as tables: accuracies, then statistics of batches and times."""
    found = recorded(table, out)
    places = sorted({f"{line['machine']}, torch {line['versions']['torch']}" for line in found.values()})
    commits = sorted({line["commit"] for line in found.values()})
    notes = sorted({f"{name}: {note}" for line in found.values() for name, note in line.get("notes", {}).items()})
    if any(line.get("linear_converged") is False for line in found.values()):
        notes.append("some linear probes had not converged after 500 iterations")
    nearest = "kNN is weighted (k = 200), on the test set. " if any(cell.knn_at for cell in table.cells) else ""
    about = f"Mean ± standard deviation over seeds, %. {nearest}{table.about}"
    if table.against:
        about += ' Δ is the difference from the row under "against" with its standard error; \\* p < 0.05 (Welch).'
    cost = "Statistics of the batches of the last epoch. Seconds are means over epochs, without compilation."
    if (workers := max((line.get("workers", 1) for line in found.values()), default=1)) > 1:
        cost = cost.removesuffix(".") + f", with up to {workers} runs at a time on the machine."
    origin = f"{'; '.join(places)}. Commits: {', '.join(commits)}."
    parts = [about, accuracies(table, out), *(f"Note: {note}." for note in notes), cost]
    return "\n\n".join([*parts, batch_statistics(table, out), origin])


def overview(out: Path) -> str:
    """All tables in Markdown: how many runs are recorded, on which machine, and the minutes of the missing ones.

    A missing run is expected to take as long as those of its row, else of the table, else as the table says.
    """

    def seconds(cell: Cell, table: Table, done: list[dict[str, Any]]) -> float:
        alike = [line for line in done if line["name"] == cell.name] or done
        return statistics.fmean(line["seconds"] for line in alike) if alike else cell.epochs * table.pace

    def row(table: Table) -> list[str]:
        found, missing = recorded(table, out), list(pending(table, out))
        done = [found[cell.key] for cell in table.cells if cell.key in found]
        machine = ", ".join(sorted({line["machine"] for line in done})) or f"{table.machine} (estimated)"
        minutes = sum(seconds(cell, table, done) for cell in missing) / 60
        return [table.name, table.data, str(len(done)), str(len(missing)), machine, f"{minutes:,.0f}"]

    headings = ["table", "data", "recorded", "missing", "machine", "minutes of the missing runs"]
    tables = [load_table(file.stem) for file in sorted(TABLES.glob("*.yaml")) if file.stem != SMOKE]
    return in_markdown([headings, *map(row, tables)], texts=("table", "data", "machine"))


Reading = Callable[[dict[str, Any]], float | None]  # a number of a recorded run, if it has it
Column = Callable[[str], object]  # what a row shows, by its name


def _nested(part: str, name: str, line: dict[str, Any]) -> float | None:
    number: float | None = line.get(part, {}).get(name)
    return number


def _last(part: str, line: dict[str, Any]) -> float | None:
    """The value of the last epoch."""
    values = line.get(part, {})
    return values[max(values, key=int)] if values else None


def _summary_of(
    groups: dict[str, list[dict[str, Any]]], read: Reading, name: str, digits: int = 1, scale: float = 100.0
) -> str:
    numbers = [number for line in groups[name] if (number := read(line)) is not None]
    return spread(numbers, digits, scale) if numbers else "–"


def _difference_of(table: Table, groups: dict[str, list[dict[str, Any]]], read: Reading, name: str) -> str:
    if name not in table.against:
        return ""
    found = compared(groups[name], groups[table.against[name]], read)
    return signed(found[0]) if found else "–"


def _mean_of(groups: dict[str, list[dict[str, Any]]], read: Reading, name: str) -> str:
    group = groups[name]
    return f"{statistics.fmean(read(line) or 0.0 for line in group):.2f}" if group else "–"


def _rows(groups: Mapping[str, object], columns: Mapping[str, Column]) -> str:
    """A table in Markdown with one row per group."""
    rows = [[name, *(str(column(name)) for column in columns.values())] for name in groups]
    return in_markdown([["", *columns], *rows], texts=("", "against"))


def in_markdown(rows: list[list[str]], texts: Sequence[str]) -> str:
    """A table in Markdown. rows: the headings first · texts: headings of the columns that are not numbers"""
    heading, *others = rows
    line = ["---" if name in texts else "---:" for name in heading]
    return "\n".join("| " + " | ".join(row) + " |" for row in [heading, line, *others])
