"""Train one run of a table of results twice, and a third time killed within an epoch and resumed; compare the curves.

    python benchmarks/repeat.py --data DIR
    python benchmarks/repeat.py --table digits --row "HCL, β = 1" --seed 3

Each run is a process of `evidence.py`. Writes `results/repeat.json`, where a difference is the largest one from the
first run. "recorded" is the run of the table in `results/evidence/`, if there is one, of its own commit and machine.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import record
import yaml
from evidence_tables import HERE, RESULTS, TABLES, lines, load_table, recorded

CURVES = ("knn", "loss", "false_negatives")


def one_run(table: str, row: str, seed: int, folder: Path) -> Path:
    """A table of this run alone."""
    content = yaml.safe_load((TABLES / f"{table}.yaml").read_text(encoding="utf-8"))
    rows = [{**cell, "seeds": [seed]} for cell in content["cells"] if cell["name"] == row]
    if not rows:
        raise SystemExit(
            f"{table} has no row {row!r}: use one of {', '.join(cell['name'] for cell in content['cells'])}"
        )
    rows[0].pop("against", None)
    file = folder / f"{table}-repeat.yaml"
    content = {**content, "cells": rows, "rounds": [[]], "curves": []}
    file.write_text(yaml.safe_dump(content, allow_unicode=True), encoding="utf-8")
    return file


def train(table: Path, data: Path | None, out: Path, kill_after: tuple[str, float] | None = None) -> dict[str, Any]:
    """The record of the run. kill_after: a word that it prints, and the seconds until it is killed after that."""
    command = [sys.executable, str(HERE / "evidence.py"), str(table), "--minutes", "600", "--out", str(out)]
    command += [] if data is None else ["--data", str(data)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8", env=environment) as process:
        assert process.stdout is not None
        for text in process.stdout:
            print(f"  {text.rstrip()}", flush=True)
            if kill_after is not None and kill_after[0] in text:
                time.sleep(kill_after[1])
                process.send_signal(signal.SIGKILL)
                break
    if kill_after is not None:
        if process.returncode != -signal.SIGKILL or lines(out / f"{table.stem}.jsonl"):
            raise SystemExit(f"the run was over before it was killed {kill_after[1]:g} s after {kill_after[0]!r}")
        return train(table, data, out)
    if process.returncode:
        raise SystemExit(f"the run failed with exit code {process.returncode}")
    return lines(out / f"{table.stem}.jsonl")[0]


def difference(first: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """The largest absolute difference of each curve."""
    return {
        name: max(abs(first[name][epoch] - other[name][epoch]) for epoch in first[name])
        for name in CURVES
        if first.get(name) and first[name].keys() == other.get(name, {}).keys()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", default="images-cpu", help="of benchmarks/evidence/")
    parser.add_argument("--row", default="t = 0.5: HCL, β = 1, τ⁺ = 0.1 (paper)", help="the name of a row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, help="the folder of the data, packed or not")
    parser.add_argument("--kill-after", type=float, default=10.0, help="seconds of the epoch that is cut off")
    options = parser.parse_args()
    whole = load_table(options.table)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        table = one_run(options.table, options.row, options.seed, folder)
        cell = load_table(str(table)).cells[0]
        found = {}
        print("first run", flush=True)
        found["first"] = train(table, options.data, folder / "first")
        print("again", flush=True)
        found["again"] = train(table, options.data, folder / "again")
        epoch = cell.knn_at[1]
        print(f"killed {options.kill_after:g} s after epoch {epoch}, and resumed", flush=True)
        found["killed and resumed"] = train(
            table, options.data, folder / "killed", (f"epoch {epoch}:", options.kill_after)
        )
    if not found["killed and resumed"]["resumed"]:
        raise SystemExit("the killed run began again instead of being resumed")
    earlier = recorded(whole, RESULTS).get(cell.key)
    if earlier is not None:
        found["recorded"] = earlier
    kept = ("commit", "machine", "versions", "date", *CURVES)
    runs = {name: {key: line[key] for key in kept if key in line} for name, line in found.items()}
    for name, line in list(found.items())[1:]:
        runs[name]["difference"] = difference(found["first"], line)
        print(f"{name}: {runs[name]['difference']}")
    result = {
        "command": " ".join(["python benchmarks/repeat.py", *sys.argv[1:]]),
        "table": options.table,
        "row": options.row,
        "seed": options.seed,
        "commit": record.commit(),
        "machine": record.processor(),
        "threads": os.environ.get("OMP_NUM_THREADS", str(os.cpu_count())),
        "runs": runs,
    }
    record.write(HERE.parent / "results" / "repeat.json", result)


if __name__ == "__main__":
    main()
