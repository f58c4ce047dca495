"""Run the cells of a table of evidence that are still missing, as many as fit; or print the table.

    python benchmarks/evidence.py proximity --minutes 9 --data DIR --out DIR
    python benchmarks/evidence.py proximity --table --out DIR

A table is a file `benchmarks/evidence/NAME.yaml`: cells, each a recipe with overrides and seeds, in the order in which
they are run. All runs of a call share one process, so that a network is compiled once. A finished run is one line of
`OUT/NAME.jsonl`; lines in `results/evidence/NAME.jsonl` count as finished, too. When the minutes are nearly over, the
run under way stops at the end of an epoch and leaves its folder in `OUT/runs`: the next call goes on with it, if the
source of hardneg is the same to the byte. kNN on the test set is for reporting: nothing is chosen by it.
"""

import argparse
import gc
import hashlib
import json
import platform
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import record
import torch
import yaml
from torch import Tensor, nn

import hardneg as hn
from hardneg.data import load_split, unpack
from hardneg.evaluation import extract_set, knn_accuracy, linear_probe
from hardneg.evaluation.features import extract_all
from hardneg.methods.method import Method
from hardneg.training import files, recipe, run
from hardneg.training.recipe import Recipe
from hardneg.training.refresh import Refresh

HERE = Path(__file__).parent
TABLES, RESULTS = HERE / "evidence", HERE.parent / "results" / "evidence"
START = 60.0  # seconds before the first step of a process: data, compilation
RAW = "raw inner products"
SAFETY = 1.25  # an epoch may take so much longer than those before


class OutOfTimeError(Exception):
    """The minutes are over."""


@dataclass(frozen=True)
class Cell:
    """One run of a table. variant: "" or "raw inner products", what no recipe can say · knn_at: epochs"""

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
        """What makes it another run, whatever it is called."""
        return json.dumps([self.recipe, sorted(self.overrides), self.seed, self.epochs, self.variant])

    def settings(self, source: str) -> Recipe:
        """The whole recipe on this data."""
        own = [f"data.source={source}", f"seed={self.seed}", f"trainer.epochs={self.epochs}", "trainer.knn_every=0"]
        return recipe.load(recipe.find(self.recipe), [*self.overrides, *own])


@dataclass(frozen=True)
class Table:
    """name · about: what it asks · data: a set's name · pace: seconds an epoch, until some are measured · cells"""

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
    for cell in cells:  # bad settings are refused before the first run
        cell.settings("digits")
        if cell.variant not in ("", RAW):
            raise ValueError(f"variant={cell.variant!r} is not known: use {RAW!r}, or leave it out")
    if len({cell.key for cell in cells}) < len(cells):
        raise ValueError(f"{file} has the same run twice: change a seed or an override")
    return Table(file.stem, content["about"], content["data"], float(content["pace"]), tuple(cells))


def _overrides(content: dict[str, Any], row: dict[str, Any]) -> tuple[str, ...]:
    """Of all cells, of the sets that the row is made with, and its own; the last word on a key counts."""
    groups = [content.get("overrides", []), *(content["sets"][name] for name in row.get("with", []))]
    words = [override for group in [*groups, row.get("overrides", [])] for override in group]
    return tuple({override.partition("=")[0]: override for override in words}.values())


class Watch(L.Callback):
    """Measures a run, evaluates it at some epochs, and stops it in time.

    cell: what is run · source: its data · deadline: `time.monotonic` when the call must be over · kept: what a run that
    is resumed had measured before
    """

    def __init__(self, cell: Cell, source: str, deadline: float, kept: dict[str, Any]) -> None:
        self.cell, self.source, self.deadline = cell, source, deadline
        self.knn: dict[str, float] = kept.get("knn", {})
        self.epochs: list[dict[str, float]] = kept.get("epochs", [])
        self.encode = self.graph = 0.0  # seconds of this epoch's refreshes
        self.steps = 1  # of an epoch
        self.began: float | None = None  # this epoch
        self.visits: Tensor | None = None  # (N,) how often each sample was in a batch of this epoch
        self.sets: list[Any] = []
        self.keep: Callable[[], object] = lambda: None  # called after every epoch

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.steps = int(trainer.estimated_stepping_batches) // self.cell.epochs
        self.sets = [load_split(self.source, part, labels=True) for part in ("train", "test")]
        self.visits = torch.zeros(len(self.sets[0]), device=pl_module.device)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Refresh):
                assert isinstance(pl_module, Method)
                given = self._raw(pl_module) if self.cell.variant == RAW else callback.embeddings
                callback.embeddings = self._timed(callback, given)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, Method)
        assert self.visits is not None
        if trainer.global_step % self.steps == 0:
            self._end(trainer, pl_module)
            self._check_time()
            wait()
            self.began = time.perf_counter()
            pl_module.clock.restart()  # what was done here is no part of a step
        index = batch if isinstance(batch, Tensor) else batch[0]
        self.visits.index_add_(0, index, torch.ones_like(index, dtype=self.visits.dtype))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, Method)
        self._end(trainer, pl_module)

    def _end(self, trainer: L.Trainer, module: Method) -> None:
        """Book the epoch that is over, and evaluate."""
        if self.began is None:  # none was begun by this process
            return
        wait()
        assert self.visits is not None
        spent, self.began = time.perf_counter() - self.began, None
        row = {"seconds": spent, "encode": self.encode, "graph": self.graph}
        row["seen"] = float((self.visits > 0).double().mean())
        row["most_visits"] = float(self.visits.max())
        self.epochs.append({name: round(number, 4) for name, number in row.items()})
        self.encode = self.graph = 0.0
        self.visits.zero_()
        epoch = trainer.global_step // self.steps
        if epoch in self.cell.knn_at or epoch == self.cell.epochs:
            known, asked = self._features(trainer, module)
            self.knn[str(epoch)] = knn_accuracy(*known, *asked)
            print(f"    epoch {epoch}: kNN {100 * self.knn[str(epoch)]:.2f} %, {spent:.2f} s", flush=True)
        self.keep()

    def _features(self, trainer: L.Trainer, module: Method) -> list[tuple[Tensor, Tensor]]:
        prepare = getattr(module.views, "plain", None)
        with trainer.precision_plugin.forward_context():
            return [extract_set(module.encoder, part, prepare=prepare) for part in self.sets]

    def _check_time(self) -> None:
        pace = min((row["seconds"] for row in self.epochs), default=0.0)
        if time.monotonic() + SAFETY * pace + 5 > self.deadline:  # the rest: kNN and files
            raise OutOfTimeError

    def _raw(self, module: Method) -> Callable[[], Tensor]:
        """Embeddings as the head gives them, of any length."""

        def encode() -> Tensor:
            with module.trainer.precision_plugin.forward_context():
                network = nn.Sequential(module.encoder, module.head)
                return extract_all(network, self.sets[0], prepare=getattr(module.views, "plain", None))

        return encode

    def _timed(self, refresh: Refresh, given: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def embeddings() -> Tensor:
            wait()
            began = time.perf_counter()
            rows = given()
            wait()
            self.encode += time.perf_counter() - began
            return rows

        learn = refresh.sampler.refresh

        def timed_refresh(embeddings: Tensor) -> None:
            began = time.perf_counter()
            learn(embeddings)
            wait()
            self.graph += time.perf_counter() - began

        refresh.sampler.refresh = timed_refresh  # type: ignore[method-assign]
        return embeddings


def wait() -> None:
    """For the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@cache
def source_hash() -> str:
    """Of the library and this script: a run is never resumed with another."""
    digest = hashlib.sha256()
    root = Path(hn.__file__).parent
    for file in [*sorted(root.rglob("*.py")), *sorted(root.rglob("*.yaml")), Path(__file__)]:
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def commit(given: str) -> str:
    """The commit that was given, as of a copy of a checkout; else that of this checkout."""
    if given:
        return given
    asked = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(asked, capture_output=True, encoding="utf-8", check=False)
    except FileNotFoundError:
        return "unknown"
    return found.stdout.strip() if found.returncode == 0 else "unknown"


def lines(file: Path) -> list[dict[str, Any]]:
    """The records of a file; one that a kill cut off is left out."""
    found = []
    for text in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        try:
            found.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return found


def append(file: Path, line: dict[str, Any]) -> None:
    """Add a record, on a line of its own also after one that a kill cut off."""
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


def data_source(table: Table, folder: Path | None) -> str:
    """What `data.source` names: a file in the folder, unpacked there if need be."""
    if table.data == "digits":
        return "digits"
    if folder is None:
        raise SystemExit(f"--data is missing: name the folder that holds {table.data}.npz or {table.data}/")
    file = folder / f"{table.data}.npz"
    if not file.exists():
        try:
            unpack.unpack(folder, folder)
        except ImportError as error:  # scikit-learn's digits come last, and are not needed
            print(f"not unpacked: {error}", flush=True)
    if not file.exists():
        raise SystemExit(f"{folder} holds neither {file.name} nor {table.data}/: copy the data there")
    return str(file)


def expected(cell: Cell, table: Table, done: list[dict[str, Any]]) -> float:
    """Seconds of a run by those before it: of the same name, else of all; else by the table's word."""
    alike = [line for line in done if line["name"] == cell.name] or done
    same = [line["seconds_per_epoch"]["all"] for line in alike]
    return cell.epochs * (max(same) if same else table.pace) + 2 * len(cell.knn_at)


def pending(table: Table, out: Path) -> Iterator[Cell]:
    """The cells that no line has, in order."""
    for cell in table.cells:
        if cell.key not in recorded(table, out):
            yield cell


def run_cell(cell: Cell, source: str, folder: Path, deadline: float) -> dict[str, Any]:
    """Train one cell, from the start or from where it stopped; what was measured."""
    stamp, trained = folder / "evidence.json", folder / "run"
    kept: dict[str, Any] = json.loads(stamp.read_text(encoding="utf-8")) if stamp.exists() else {}
    # The checkpoint may be one epoch ahead of what was written down, if the process was killed.
    resume = kept.get("source") == source_hash() and len(kept["epochs"]) == len(lines(trained / "metrics.jsonl"))
    if not resume:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        kept = {}
    watch = Watch(cell, source, deadline, kept)
    began = time.perf_counter()

    def keep() -> float:
        spent: float = kept.get("spent", 0.0) + time.perf_counter() - began
        state = {"source": source_hash(), "knn": watch.knn, "epochs": watch.epochs, "spent": spent}
        files.write_json(stamp, state)
        return spent

    watch.keep = keep
    result = run.train(cell.settings(source), trained, resume=resume, callbacks=[watch])
    spent = keep()
    metrics = lines(result.folder / "metrics.jsonl")
    found = measured(cell, watch, metrics)
    if cell.linear:
        place = "cuda" if torch.cuda.is_available() else "cpu"
        encoder, prepare = result.encoder.to(place), run.load_run(result.folder).prepare
        train, test = (extract_set(encoder, part, prepare=prepare) for part in watch.sets)
        probe = linear_probe(*train, *test)
        found |= {"linear": probe.accuracy, "linear_converged": probe.converged}
    shutil.rmtree(folder)
    return {**found, "seconds": round(spent, 1), "resumed": resume}


def measured(cell: Cell, watch: Watch, metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """What a finished run showed."""
    steady = watch.epochs[2:] or watch.epochs  # in the first all is compiled
    parts = [line["seconds"] for line in metrics][2:] or [line["seconds"] for line in metrics]
    shown = {*cell.knn_at, cell.epochs}

    def mean(name: str) -> float:  # refreshes do not fall evenly on epochs
        return round(statistics.fmean(row[name] for row in steady), 4)

    training = [sum(spent for name, spent in part.items() if name != "graph") for part in parts]
    return {
        "knn": {epoch: round(accuracy, 5) for epoch, accuracy in watch.knn.items()},
        "false_negatives": {
            line["epoch"]: round(line["batches"]["false_negatives"], 5)
            for line in metrics
            if line["epoch"] in shown and "false_negatives" in line["batches"]
        },
        "mean_cosine": {
            line["epoch"]: round(line["batches"]["mean_cosine"], 5)
            for line in metrics
            if line["epoch"] in shown and "mean_cosine" in line["batches"]
        },
        "loss": {line["epoch"]: round(line["loss"], 5) for line in metrics if line["epoch"] in shown},
        "seen": {epoch: row["seen"] for epoch, row in enumerate(watch.epochs, 1) if epoch in shown},
        "most_visits": {epoch: row["most_visits"] for epoch, row in enumerate(watch.epochs, 1) if epoch in shown},
        "seconds_per_epoch": {
            "all": mean("seconds"),
            "training": round(statistics.median(training), 4),
            "encode": mean("encode"),
            "graph": mean("graph"),
        },
        "objective": metrics[-1]["objective"],
    }


def machine() -> dict[str, Any]:
    """Where this runs."""
    return {
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else record.processor(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "lightning": L.__version__,
            "hardneg": hn.__version__,
        },
    }


def work(table: Table, options: argparse.Namespace) -> None:
    """Run what is missing until the minutes are over."""
    deadline = time.monotonic() + 60 * options.minutes
    source = data_source(table, options.data)
    options.out.mkdir(parents=True, exist_ok=True)
    known = {"commit": commit(options.commit), "source": source_hash(), **machine()}
    command = "python " + " ".join(["benchmarks/evidence.py", *sys.argv[1:]])
    done: list[dict[str, Any]] = []  # of this call: the pace of another machine says little
    failures = 0
    for cell in pending(table, options.out):
        folder = options.out / "runs" / hashlib.sha256(cell.key.encode()).hexdigest()[:12]
        left = deadline - time.monotonic()
        needed = expected(cell, table, done) + (0 if done else START)
        begun = (folder / "evidence.json").exists()
        if left < (needed if options.whole and not begun else 0) or left < (15 if done else START):
            print(f"{left:.0f} s are left, and {cell.name}, seed {cell.seed}, takes about {needed:.0f} s")
            break
        print(f"{cell.name}, seed {cell.seed}: about {needed:.0f} s, {left:.0f} s are left", flush=True)
        try:
            found = run_cell(cell, source, folder, deadline)
        except OutOfTimeError:
            print(f"  stopped at an epoch's end; the next call goes on in {folder}")
            break
        except Exception as error:  # another cell may do better
            traceback.print_exc()
            told = {"key": cell.key, "name": cell.name, "error": repr(error)[:2000]}
            append(options.out / f"{table.name}.errors.jsonl", told)
            shutil.rmtree(folder, ignore_errors=True)
            failures += 1
            if failures > 2:
                raise SystemExit("three runs failed: see above") from error
            continue
        line = {
            "table": table.name,
            "name": cell.name,
            "key": cell.key,
            "recipe": cell.recipe,
            "overrides": list(cell.overrides),
            "variant": cell.variant,
            "seed": cell.seed,
            "epochs": cell.epochs,
            **found,
            "command": command,
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            **known,
        }
        append(options.out / f"{table.name}.jsonl", line)
        done.append(line)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    missing = len(list(pending(table, options.out)))
    print(f"{len(done)} runs finished, {missing} of {len(table.cells)} are missing")


def spread(numbers: list[float], digits: int = 1, scale: float = 100.0) -> str:
    """Mean and standard deviation (n − 1); the mean alone of one number."""
    shown = f"{scale * statistics.fmean(numbers):.{digits}f}"
    return f"{shown} ± {scale * statistics.stdev(numbers):.{digits}f}" if len(numbers) > 1 else shown


def markdown(table: Table, out: Path) -> str:
    """The recorded runs as tables: kNN, then what batches and time were like."""
    found = recorded(table, out)
    groups: dict[str, list[dict[str, Any]]] = {}
    for cell in table.cells:
        groups.setdefault(cell.name, [])
        if cell.key in found:
            groups[cell.name].append(found[cell.key])
    epochs = sorted({epoch for cell in table.cells for epoch in (*cell.knn_at, cell.epochs)})
    head = ["", "seeds", *(f"epoch {epoch}" for epoch in epochs)]
    knn = [head, ["---", *["---:"] * (len(head) - 1)]]
    head = ["", "false negatives, %", "samples seen in an epoch, %", "most visits", "s an epoch", "training", "encode"]
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
    told = [f"Weighted kNN (k = 200) on the test set, %, mean ± standard deviation over seeds. {table.about}"]
    told.append("Of the last epoch: what the batches were like. Seconds are means over epochs, compilation left out.")
    return "\n\n".join([told[0], parts[0], told[1], parts[1], f"{'; '.join(places)}. Commits: {', '.join(commits)}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", default="proximity", help="of a table, or its .yaml file")
    parser.add_argument("--table", action="store_true", help="print what was recorded, and run nothing")
    parser.add_argument("--minutes", type=float, default=9.0, help="after which the call is over")
    parser.add_argument("--whole", action="store_true", help="begin no run that does not fit into the minutes")
    parser.add_argument("--data", type=Path, help="the folder of the data, packed or not")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where lines and unfinished runs go")
    parser.add_argument("--commit", default="", help="of this copy of a checkout")
    options = parser.parse_args()
    table = load_table(options.name)
    if options.table:
        print(markdown(table, options.out))
    else:
        work(table, options)


if __name__ == "__main__":
    main()
