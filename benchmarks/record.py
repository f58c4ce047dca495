"""Information that every benchmark writes with its results."""

import json
import platform
from pathlib import Path
from typing import Any


def processor() -> str:
    """The processor's name."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def write(path: Path, record: dict[str, Any]) -> None:
    """Write a record as JSON and print its path."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"\nwritten to {path.parent.name}/{path.name}")
