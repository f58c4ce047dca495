"""Run the missing cells of tables of results within a time limit, or print the tables.

    python benchmarks/evidence.py --list
    python benchmarks/evidence.py images selection --minutes 9 --data DIR --out DIR
    python benchmarks/evidence.py proximity --table --out DIR
    python benchmarks/evidence.py proximity --table --plots DIR

A table is a file `benchmarks/evidence/NAME.yaml`: cells, each a recipe with overrides and seeds, in the order in which
they are run. All runs of a call share one process, so that a network is compiled once. A finished run is one line of
`OUT/NAME.jsonl`; lines in `results/evidence/NAME.jsonl` count as finished, too. Shortly before the time limit, the
current run stops at the end of an epoch and leaves its folder in `OUT/runs`. The next call resumes it if the source of
hardneg is the same to the byte. kNN on the test set is only reported; nothing is selected by it.

Several processes may work on one table: each takes the next run that no other has; see `evidence_workers.py`.
"""

import argparse
import gc
import hashlib
import json
import os
import platform
import shutil
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import record
import torch
from evidence_plots import plots
from evidence_tables import (
    HERE,
    RESULTS,
    TABLES,
    TU,
    UNTRAINED,
    Cell,
    Table,
    append,
    lines,
    load_table,
    markdown,
    overview,
    pending,
    recorded,
)
from evidence_watch import OutOfTimeError, Watch

import hardneg as hn
from hardneg.evaluation import linear_probe
from hardneg.evaluation.features import random_ranks
from hardneg.images.features import extract_set
from hardneg.images.published import save
from hardneg.training import run, run_folder
from hardneg.training.evaluate import evaluate, untrained
from hardneg.training.saved_run import load_run

sys.path.append(str(Path(__file__).parents[1] / "scripts"))
from unpack_data import unpack

__all__ = ["TABLES", "OutOfTimeError", "Watch", "load_table", "main", "run_cell"]
START = 60.0  # seconds before the first step of a process: data, compilation
BUILT_IN = ("digits", "python-docs")  # sources that need no file
VALIDATION = "-validation"  # in the name of a set: see `hold_out`


@cache
def source_hash() -> str:
    """Hash of the library and these scripts: a run is resumed only with the same."""
    digest = hashlib.sha256()
    root = Path(hn.__file__).parent
    for file in [*sorted(root.rglob("*.py")), *sorted(root.rglob("*.yaml")), *sorted(HERE.glob("evidence*.py"))]:
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def data_source(table: Table, folder: Path | None) -> str:
    """What `data.source` names: a file in the folder, unpacked there if needed."""
    if table.data in BUILT_IN or table.data.startswith(TU):
        return table.data
    if folder is None:
        raise SystemExit(f"--data is missing: name the folder that holds {table.data}, {table.data}.npz or its parts")
    if (folder / table.data).is_file():
        return str(folder / table.data)
    whole = table.data.removesuffix(VALIDATION)
    file = folder / f"{whole}.npz"
    if not file.exists():
        try:
            unpack(folder, folder)
        except ImportError as error:  # scikit-learn's digits come last, and are not needed
            print(f"not unpacked: {error}", flush=True)
    if not file.exists():
        raise SystemExit(f"{folder} holds neither {file.name} nor {whole}/: copy the data there")
    return str(hold_out(file) if table.data != whole else file)


def hold_out(file: Path) -> Path:
    """A copy of a set whose test images are a tenth of each class of its training images; the test set is left out.

    Whatever is chosen (β, a combination) is chosen on it.
    """
    target = file.with_name(f"{file.stem}{VALIDATION}.npz")
    if target.exists():
        return target
    with np.load(file, allow_pickle=False) as arrays:
        images, labels, classes = arrays["train_images"], arrays["train_labels"], arrays["classes"]
    targets = torch.from_numpy(labels).long()
    held = (random_ranks(targets, 0) < (targets.bincount() // 10)[targets]).numpy()  # (N,)
    parts = {"train": ~held, "test": held}
    chosen = {f"{split}_images": images[rows] for split, rows in parts.items()}
    chosen |= {f"{split}_labels": labels[rows] for split, rows in parts.items()}
    save(target, {**chosen, "classes": classes})
    return target


def expected(cell: Cell, table: Table, done: list[dict[str, Any]]) -> float:
    """Estimated seconds of a run: from earlier runs of the same name, else from all, else from the table."""
    alike = [line for line in done if line["name"] == cell.name] or done
    same = [line["seconds_per_epoch"]["all"] for line in alike]
    return cell.epochs * (max(same) if same else table.pace) + 2 * len(cell.knn_at)


def run_cell(cell: Cell, source: str, folder: Path, deadline: float, data_folder: Path | None = None) -> dict[str, Any]:
    """Train one cell, from the start or resumed; returns the measurements."""
    stamp, trained = folder / "evidence.json", folder / "run"
    kept: dict[str, Any] = json.loads(stamp.read_text(encoding="utf-8")) if stamp.exists() else {}
    # The checkpoint may be one epoch ahead of the record if the process was killed.
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
        state |= {"orderings": watch.orderings}
        run_folder.write_json(stamp, state)
        return spent

    watch.keep = keep
    result = run.train(cell.settings(source, data_folder), trained, resume=resume, callbacks=[watch])
    spent = keep()
    metrics = lines(result.folder / "metrics.jsonl")
    found = measured(cell, watch, metrics)
    if cell.linear:
        place = "cuda" if torch.cuda.is_available() else "cpu"
        encoder, prepare = result.encoder.to(place), load_run(result.folder).prepare
        train, test = (extract_set(encoder, part, prepare=prepare) for part in watch.sets)
        probe = linear_probe(*train, *test)
        found |= {"linear": probe.accuracy, "linear_converged": probe.converged}
    if cell.metrics:
        evaluated = evaluate(trained, metrics=cell.metrics)
        found |= {"metrics": dict(evaluated), "notes": evaluated.notes}
    shutil.rmtree(folder)
    return {**found, "seconds": round(spent, 1), "resumed": resume}


def untrained_cell(cell: Cell, source: str, data_folder: Path | None = None) -> dict[str, Any]:
    """The measurements of the encoder before its first step, in the columns of the last epoch."""
    began = time.perf_counter()
    named = cell.metrics and not cell.knn_at and not cell.linear
    evaluated = untrained(cell.settings(source, data_folder), cell.metrics if named else None)
    found: dict[str, Any] = {"metrics": {name: evaluated[name] for name in cell.metrics}, "notes": evaluated.notes}
    if cell.knn_at:
        found["knn"] = {str(cell.epochs): evaluated["knn"]}
    if cell.linear:
        found |= {"linear": evaluated["linear"], "linear_converged": "linear" not in evaluated.notes}
    nothing = dict.fromkeys(("all", "training", "encode", "graph"), 0.0)
    return {**found, "seconds_per_epoch": nothing, "seconds": round(time.perf_counter() - began, 1), "resumed": False}


def measured(cell: Cell, watch: Watch, metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """The record of a finished run."""
    steady = watch.epochs[2:] or watch.epochs  # the first epochs compile
    parts = [line["seconds"] for line in metrics][2:] or [line["seconds"] for line in metrics]
    shown = {*cell.knn_at, cell.epochs}

    def mean(name: str) -> float:  # refreshes are not spread evenly over epochs
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
        "insight": {
            line["epoch"]: {
                name: round(number, 5) for name, number in line["insight"].items() if isinstance(number, float)
            }
            for line in metrics
            if line["epoch"] in shown and "insight" in line
        },
        **({"orderings": watch.orderings, "pairs": watch.pairs} if cell.details else {}),
    }


def machine() -> dict[str, Any]:
    """Machine and versions."""
    return {
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else record.processor(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "lightning": L.__version__,
            "hardneg": hn.__version__,
        },
    }


@contextmanager
def claimed(folder: Path) -> Iterator[bool]:
    """Lock the folder of a run for this process; False if another process has it. A killed process loses its lock."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = folder.with_suffix(".lock")
    with ExitStack() as held:
        try:
            held.enter_context(run_folder.locked(lock, patience=0.0))
        except TimeoutError:
            yield False
            return
        held.callback(lock.unlink)  # before the lock is released
        yield True


def work(table: Table, options: argparse.Namespace, deadline: float) -> None:
    """Run missing cells until the deadline."""
    source = data_source(table, options.data)
    if options.data is not None:  # where the metrics of sentences find their files
        os.environ.setdefault("HARDNEG_DATA", str(options.data))
    options.out.mkdir(parents=True, exist_ok=True)
    known = {"workers": options.workers, "commit": options.commit or record.commit(), "source": source_hash()}
    known |= machine()
    command = "python " + " ".join(["benchmarks/evidence.py", *sys.argv[1:]])
    done: list[dict[str, Any]] = []  # of this call, because another machine may be slower
    failures = 0
    for cell in pending(table, options.out):
        folder = options.out / "runs" / hashlib.sha256(cell.key.encode()).hexdigest()[:12]
        with claimed(folder) as free:
            if not free or cell.key in recorded(table, options.out):  # by another process
                continue
            left = deadline - time.monotonic()
            needed = expected(cell, table, done) + (0 if done else START)
            begun = (folder / "evidence.json").exists()
            if left < (needed if options.whole and not begun else 0) or left < (15 if done else START):
                print(f"{left:.0f} s are left, and {cell.name}, seed {cell.seed}, takes about {needed:.0f} s")
                break
            print(f"{cell.name}, seed {cell.seed}: about {needed:.0f} s, {left:.0f} s are left", flush=True)
            try:
                if cell.variant == UNTRAINED:
                    found = untrained_cell(cell, source, options.data)
                else:
                    found = run_cell(cell, source, folder, deadline, options.data)
            except OutOfTimeError:
                print(f"  stopped at the end of an epoch; the next call resumes {folder}")
                break
            except Exception as error:  # other cells may succeed
                traceback.print_exc()
                failure = {"key": cell.key, "name": cell.name, "error": repr(error)[:2000]}
                append(options.out / f"{table.name}.errors.jsonl", failure)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="TABLE", help="name of a table, or its .yaml file")
    parser.add_argument("--list", action="store_true", help="print what is recorded and missing of all tables")
    parser.add_argument("--table", action="store_true", help="print what was recorded, and run nothing")
    parser.add_argument("--plots", type=Path, help="with --table, the folder in which to write plots as SVG files")
    parser.add_argument("--minutes", type=float, default=9.0, help="after which the call is over")
    parser.add_argument("--whole", action="store_true", help="begin no run that does not fit into the minutes")
    parser.add_argument("--data", type=Path, help="the folder of the data, packed or not")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where lines and unfinished runs go")
    parser.add_argument("--commit", default="", help="of this copy of a checkout")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the machine, for the record")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    if options.list:
        print(overview(options.out))
    elif not options.names:
        parser.error("name one or more tables, or --list to see them")
    for table in map(load_table, options.names):
        if not options.table:
            work(table, options, deadline)
            continue
        print(markdown(table, options.out))
        for name, text in plots(table, options.out).items() if options.plots else ():
            options.plots.mkdir(parents=True, exist_ok=True)
            (options.plots / name).write_text(text, encoding="utf-8")
            print(f"wrote {options.plots / name}")


if __name__ == "__main__":
    main()
