"""The steps of docs/tutorial-retrieval.md on pairs of STS and SICK: nDCG@10 with and without mined negatives.

    python benchmarks/retrieval_guide.py --data PATH/sts.tsv.xz [--seeds 3]

Pairs with a score of 4 or more are a query and its positive. Those of the test and validation parts of STS-B and
SICK-R are held out, and no training pair shares a sentence with them. Documents are all their sentences, of pairs of
any score, that are not queries. These judgements are built from STS and SICK, and are not those of a retrieval set.
"""

import argparse
import contextlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import mined_negatives
import record
import torch

import hardneg

PAGE = Path(__file__).parents[1] / "docs" / "tutorial-retrieval.md"
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def write_pairs(data: Path, folder: Path) -> dict[str, int]:
    """Write the three files of the guide; returns their numbers of rows."""
    pairs, held_out, texts = mined_negatives.read(data)
    queries = {one for one, _ in held_out}
    documents = [text for text in texts if text not in queries]
    kept = [(one, other) for one, other in held_out if other not in queries]
    rows: dict[str, list[dict[str, str]]] = {
        "pairs.jsonl": [{"query": one, "positive": other} for one, other in pairs],
        "held_out.jsonl": [{"query": one, "positive": other} for one, other in kept],
        "documents.jsonl": [{"text": text} for text in documents],
    }
    for name, some in rows.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in some), encoding="utf-8")
    return {name: len(some) for name, some in rows.items()}


def follow(seed: int) -> dict[str, float]:
    """Run the blocks of the page in the current folder; returns its results."""
    names: dict[str, Any] = {"__name__": "guide"}
    for kind, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        if kind == "python":
            torch.manual_seed(seed)
            exec(compile(text.replace("seed = 0\n", f"seed = {seed}\n"), PAGE.name, "exec"), names)
        elif text.startswith("hardneg"):
            subprocess.run([sys.executable, "-m", *text.split()], check=True)
    found: dict[str, float] = names["results"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--to", type=Path, default=mined_negatives.RESULTS / "retrieval_guide.json")
    given = parser.parse_args()
    data, target, commit = given.data.resolve(), given.to.resolve(), record.commit()
    values: dict[str, list[float]] = {}
    for seed in range(given.seeds):
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            sizes = write_pairs(data, Path())
            for name, value in follow(seed).items():
                values.setdefault(name, []).append(value)
    rows = mined_negatives.spreads(values)
    made = {"command": f"python benchmarks/retrieval_guide.py --data sts.tsv.xz --seeds {given.seeds}", "rows": rows,
            "sizes": sizes, "commit": commit, "processor": record.processor(), "threads": torch.get_num_threads(),
            "torch": torch.__version__, "python": platform.python_version(),
            "hardneg": hardneg.__version__}  # fmt: skip
    record.write(target, made)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
