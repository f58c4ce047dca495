"""Tables of results: their cells, the recorded runs, and the Markdown of both."""

import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from hardneg.training import recipe
from hardneg.training.recipe import Recipe

HERE = Path(__file__).parent
TABLES, RESULTS = HERE / "evidence", HERE.parent / "results" / "evidence"
RAW = "raw inner products"


@dataclass(frozen=True)
class Cell:
    """One run of a table.

    variant: "" or "raw inner products", which no recipe can set · knn_at: epochs with kNN accuracy, of images only ·
    linear: whether a linear probe is fitted at the end · metrics: computed at the end by `hardneg evaluate`
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

    @property
    def key(self) -> str:
        """The settings that identify the run, without its name."""
        return json.dumps([self.recipe, sorted(self.overrides), self.seed, self.epochs, self.variant])

    def settings(self, source: str, folder: Path | None = None) -> Recipe:
        """The whole recipe on this data; ``{data}`` in an override is the folder of the data."""
        own = [f"data.source={source}", f"seed={self.seed}", f"trainer.epochs={self.epochs}", "trainer.knn_every=0"]
        placed = [override.replace("{data}", str(folder or ".")) for override in self.overrides]
        return recipe.load(recipe.find(self.recipe), [*placed, *own])


@dataclass(frozen=True)
class Table:
    """name · about: its settings · data: name of a set · pace: seconds per epoch until some are measured · cells"""

    name: str
    about: str
    data: str
    pace: float
    cells: tuple[Cell, ...]


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
        )
        for row in content["cells"]
        for seed in row["seeds"]
    ]
    for cell in cells:  # invalid settings raise before the first run
        cell.settings("python-docs" if content["data"].startswith("text/") else "digits")
        if cell.variant not in ("", RAW):
            raise ValueError(f"variant={cell.variant!r} is not known: use {RAW!r}, or leave it out")
    if len({cell.key for cell in cells}) < len(cells):
        raise ValueError(f"{file} has the same run twice: change a seed or an override")
    return Table(file.stem, content["about"], content["data"], float(content["pace"]), tuple(cells))


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
    """Add a record on a new line, also after an incomplete one."""
    with file.open("a+b") as out:
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


def markdown(table: Table, out: Path) -> str:
    """The recorded runs as tables: accuracies, then statistics of batches and times."""
    found = recorded(table, out)
    groups: dict[str, list[dict[str, Any]]] = {}
    for cell in table.cells:
        groups.setdefault(cell.name, [])
        if cell.key in found:
            groups[cell.name].append(found[cell.key])
    epochs = sorted({epoch for cell in table.cells if cell.knn_at for epoch in (*cell.knn_at, cell.epochs)})
    columns: dict[str, Reading] = {f"kNN, epoch {epoch}": partial(_nested, "knn", str(epoch)) for epoch in epochs}
    if any(cell.linear for cell in table.cells):
        columns["linear probe"] = lambda line: line.get("linear")
    columns |= {name: partial(_nested, "metrics", name) for name in table.cells[0].metrics}
    costs: dict[str, Reading] = {
        "false negatives, %": partial(_last, "false_negatives"),
        "samples drawn in an epoch, %": partial(_last, "seen"),
    }
    seconds = {part: partial(_nested, "seconds_per_epoch", part) for part in ("all", "training", "encode", "graph")}
    accuracy = _rows(groups, {"seeds": len, **{name: _summary(read) for name, read in columns.items()}})
    statistic = _rows(
        groups,
        {
            **{name: _summary(read) for name, read in costs.items()},
            "most draws of a sample": _summary(partial(_last, "most_visits"), 0, 1.0),
            **{f"s per epoch, {part}": _mean(read) for part, read in seconds.items()},
        },
    )
    places = sorted({f"{line['machine']}, torch {line['versions']['torch']}" for line in found.values()})
    commits = sorted({line["commit"] for line in found.values()})
    notes = sorted({f"{name}: {note}" for line in found.values() for name, note in line.get("notes", {}).items()})
    if any(line.get("linear_converged") is False for line in found.values()):
        notes.append("some linear probes had not converged after 500 iterations")
    about = f"Mean ± standard deviation over seeds, %. kNN is weighted (k = 200), on the test set. {table.about}"
    cost = "Statistics of the batches of the last epoch. Seconds are means over epochs, without compilation."
    origin = f"{'; '.join(places)}. Commits: {', '.join(commits)}."
    return "\n\n".join([about, accuracy, *(f"Note: {note}." for note in notes), cost, statistic, origin])


Reading = Callable[[dict[str, Any]], float | None]  # a number of a recorded run, if it has it


def _nested(part: str, name: str, line: dict[str, Any]) -> float | None:
    number: float | None = line.get(part, {}).get(name)
    return number


def _last(part: str, line: dict[str, Any]) -> float | None:
    """The value of the last epoch."""
    values = line.get(part, {})
    return values[max(values, key=int)] if values else None


def _summary(read: Reading, digits: int = 1, scale: float = 100.0) -> Callable[[list[dict[str, Any]]], str]:
    def summary(group: list[dict[str, Any]]) -> str:
        numbers = [number for line in group if (number := read(line)) is not None]
        return spread(numbers, digits, scale) if numbers else "–"

    return summary


def _mean(read: Reading) -> Callable[[list[dict[str, Any]]], str]:
    def mean(group: list[dict[str, Any]]) -> str:
        return f"{statistics.fmean(read(line) or 0.0 for line in group):.2f}" if group else "–"

    return mean


def _rows(
    groups: dict[str, list[dict[str, Any]]], columns: Mapping[str, Callable[[list[dict[str, Any]]], object]]
) -> str:
    """A table in Markdown with one row per group."""
    rows = [["", *columns], ["---", *["---:"] * len(columns)]]
    rows += [[name, *(str(column(group)) for column in columns.values())] for name, group in groups.items()]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
