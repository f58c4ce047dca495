"""Tables of results: their cells, the recorded runs, and the Markdown of both."""

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
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
    """One run of a table. variant: "" or "raw inner products", which no recipe can set · knn_at: epochs"""

    name: str
    recipe: str
    overrides: tuple[str, ...]
    seed: int
    epochs: int
    knn_at: tuple[int, ...]
    variant: str = ""
    linear: bool = False

    @property
    def key(self) -> str:
        """The settings that identify the run, without its name."""
        return json.dumps([self.recipe, sorted(self.overrides), self.seed, self.epochs, self.variant])

    def settings(self, source: str) -> Recipe:
        """The whole recipe on this data."""
        own = [f"data.source={source}", f"seed={self.seed}", f"trainer.epochs={self.epochs}", "trainer.knn_every=0"]
        return recipe.load(recipe.find(self.recipe), [*self.overrides, *own])


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
            knn_at=tuple(content["knn_at"]),
            variant=row.get("variant", ""),
            linear=content.get("linear", False),
        )
        for row in content["cells"]
        for seed in row["seeds"]
    ]
    for cell in cells:  # invalid settings raise before the first run
        cell.settings("digits")
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
    """The recorded runs as tables: kNN accuracy, then statistics of batches and times."""
    found = recorded(table, out)
    groups: dict[str, list[dict[str, Any]]] = {}
    for cell in table.cells:
        groups.setdefault(cell.name, [])
        if cell.key in found:
            groups[cell.name].append(found[cell.key])
    epochs = sorted({epoch for cell in table.cells for epoch in (*cell.knn_at, cell.epochs)})
    head = ["", "seeds", *(f"epoch {epoch}" for epoch in epochs)]
    knn = [head, ["---", *["---:"] * (len(head) - 1)]]
    head = ["", "false negatives, %", "samples drawn in an epoch, %", "most draws of a sample", "s per epoch"]
    head += ["training", "encode"]
    cost = [[*head, "graph"], ["---", *["---:"] * len(head)]]
    for name, group in groups.items():
        cells = []
        for epoch in epochs:
            numbers = [line["knn"][str(epoch)] for line in group if str(epoch) in line["knn"]]
            cells.append(spread(numbers) if numbers else "–")
        knn.append([name, str(len(group)), *cells])
        if not group:
            cost.append([name, *["–"] * len(head)])
            continue
        last = [str(max(map(int, line["seen"]))) for line in group]
        pairs = list(zip(group, last, strict=True))
        cost.append(
            [
                name,
                spread([line["false_negatives"][at] for line, at in pairs if at in line["false_negatives"]] or [0.0]),
                spread([line["seen"][at] for line, at in pairs]),
                spread([line["most_visits"][at] for line, at in pairs], 0, 1.0),
                *(
                    f"{statistics.fmean(line['seconds_per_epoch'][part] for line in group):.2f}"
                    for part in ("all", "training", "encode", "graph")
                ),
            ]
        )
    parts = ["\n".join("| " + " | ".join(row) + " |" for row in rows) for rows in (knn, cost)]
    places = sorted({f"{line['machine']}, torch {line['versions']['torch']}" for line in found.values()})
    commits = sorted({line["commit"] for line in found.values()})
    accuracy = f"Weighted kNN (k = 200) on the test set, %, mean ± standard deviation over seeds. {table.about}"
    statistic = "Statistics of the batches of the last epoch. Seconds are means over epochs, without compilation."
    origin = f"{'; '.join(places)}. Commits: {', '.join(commits)}."
    return "\n\n".join([accuracy, parts[0], statistic, parts[1], origin])
