"""Information that every benchmark writes with its results."""

import json
import platform
import subprocess
from pathlib import Path
from typing import Any


def processor() -> str:
    """The processor's name."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def commit() -> str:
    """The commit of this checkout, with "-dirty" if files other than results differ from it."""
    git = ["git", "-C", str(Path(__file__).parents[1])]
    try:
        head, changed = (
            subprocess.run([*git, *command], capture_output=True, encoding="utf-8", check=True).stdout.strip()
            for command in (["rev-parse", "HEAD"], ["status", "--porcelain", "-uno", "--", ".", ":!results"])
        )
    except (FileNotFoundError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("-dirty" if changed else "")


def write(path: Path, record: dict[str, Any]) -> None:
    """Write a record as JSON and print its path."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"\nwritten to {path.parent.name}/{path.name}")
