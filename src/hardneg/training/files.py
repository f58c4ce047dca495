"""The files of a run: written whole or not at all, by one process at a time."""

import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import hardneg

RECIPE, ENVIRONMENT, METRICS, EVALUATION = "recipe.yaml", "environment.json", "metrics.jsonl", "evaluation.json"
CHECKPOINT, ENCODER, LOCK = "last.ckpt", "encoder.safetensors", "run.lock"


def write(file: Path, text: str) -> None:
    """Write a text beside its place and then put it there, so that no one ever sees half of it."""
    write_bytes(file, text.encode())


def write_bytes(file: Path, content: bytes) -> None:
    """As `write`, for bytes."""
    fresh = file.with_name(file.name + ".new")
    with fresh.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())  # a power cut must not leave an empty file in its place
    os.replace(fresh, file)


def is_run(folder: Path) -> bool:
    """Whether a run was begun in this folder."""
    return (folder / RECIPE).exists() and (folder / ENVIRONMENT).exists()


def is_free(folder: Path) -> bool:
    """Whether a run may be begun in this folder: it is not there, or holds only what a killed beginning left."""
    if not folder.exists():
        return True
    left = (LOCK, ENVIRONMENT)
    return folder.is_dir() and all(file.name in left or file.suffix == ".new" for file in folder.iterdir())


def write_json(file: Path, content: Any) -> None:
    """As `write`, for anything that JSON can hold."""
    write(file, json.dumps(content, indent=1) + "\n")


def environment(**more: Any) -> dict[str, Any]:
    """Where and how this process runs."""
    import lightning

    return {
        "command": sys.argv,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "hardneg": hardneg.__version__,
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu",
        **more,
    }


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics that were written whole."""
    lines = []
    if (folder / METRICS).exists():
        for text in (folder / METRICS).read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(text))
            except json.JSONDecodeError:
                break  # cut off by a kill
    return lines


def check_space(folder: Path, needed: int) -> None:
    """Raise if the disk of a folder, which need not exist yet, has less than this many bytes free."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(there).free
    if free < needed:
        raise ValueError(
            f"{folder} has {free / 1e6:,.0f} MB free, and the run needs {needed / 1e6:,.0f} MB: "
            "make room or choose another folder"
        )


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the run for this process; another one that holds it is an error. The system lets go if we are killed."""
    try:
        import fcntl
    except ImportError:  # no such locks on Windows
        yield
        return
    # Opened to append, so that asking for the lock changes nothing.
    with (folder / LOCK).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"{folder} is in use by another process: wait for it, or choose another folder") from error
        yield
