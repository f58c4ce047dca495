"""The files of a run: replaced atomically, by one process at a time."""

import itertools
import json
import os
import platform
import re
import shutil
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import torch

import hardneg

RECIPE, ENVIRONMENT, METRICS, EVALUATION = "recipe.yaml", "environment.json", "metrics.jsonl", "evaluation.json"
CHECKPOINT, ENCODER, LOCK = "last.ckpt", "encoder.safetensors", "run.lock"
SPLIT = "split.json"  # what the run was trained on, and which images were held out
COMPARISON = "comparison.json"  # of a comparison: the names of its rows, and which one is the baseline
RECORDED = "training_set"  # the key of ENVIRONMENT with what `Modality.recorded` returns
FAILED = "failed.json"  # of a comparison: the errors of its failed runs by name
LOGS = "logs"  # the folder of Lightning's loggers
NEXT = "next.ckpt"  # a checkpoint while it is being written
_FRESH = re.compile(
    rf"({'|'.join(map(re.escape, (ENVIRONMENT, SPLIT, RECIPE)))})\.[0-9a-f]{{32}}\.new"
)  # see `write_bytes`
PATIENCE = 60.0  # seconds to wait for a lock that other processes hold briefly


def write(file: Path, text: str) -> None:
    """Write a text to a new file and rename it, so that no process reads a partly written file."""
    write_bytes(file, text.encode())


def write_bytes(file: Path, content: bytes) -> None:
    """As `write`, for bytes."""
    fresh = file.with_name(f"{file.name}.{uuid.uuid4().hex}.new")  # unique to this call
    try:
        with fresh.open("xb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())  # a power cut must not leave an empty file
        os.replace(fresh, file)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def is_run(folder: Path) -> bool:
    """Whether a run was begun in this folder."""
    return (folder / RECIPE).exists() and (folder / ENVIRONMENT).exists()


def run_near(folder: Path) -> str:
    """What to give instead of a folder that is not a run: a run above it or below it, if there is one."""
    if (folder.parent / RECIPE).exists() and not folder.is_dir():
        return f"give the folder {folder.parent}"
    if not folder.exists():
        return "the folder does not exist"
    below = [*folder.glob(f"*/{RECIPE}"), *folder.glob(f"*/*/{RECIPE}")]
    if below:
        return f"give one of the {len(below)} runs in it, such as {min(below).parent}"
    return f"{RECIPE} is missing"


def check_links(folder: Path) -> None:
    """Raise if a file that a run writes is a link, which could point outside the folder."""
    logs = folder / LOGS
    inside = [] if logs.is_symlink() or not logs.is_dir() else list(logs.iterdir())
    for file in (*folder.iterdir(), *inside):
        written = file.suffix == ".new" or file.name in (METRICS, LOCK, NEXT) or LOGS in (file.name, file.parent.name)
        if file.is_symlink() and written:
            raise ValueError(f"{file} is a link, and nothing is written outside a run's folder: remove it")


def check_regular(folder: Path) -> None:
    """Raise if a file of a run is a pipe, a device or a folder: reading it could block forever."""
    for name in (RECIPE, ENVIRONMENT, METRICS, SPLIT, ENCODER, EVALUATION):
        _check_regular(folder / name)


def _check_regular(file: Path) -> None:
    if file.exists() and not file.is_file():
        raise ValueError(f"{file} is not a regular file: restore the file of the run, or remove it")


def is_free(folder: Path) -> bool:
    """Whether a run may be begun in this folder: it does not exist, or no checkpoint was written in it."""
    if not folder.exists():
        return True
    return folder.is_dir() and all(_is_left_over(file) for file in folder.iterdir())


def _is_left_over(file: Path) -> bool:
    """Whether a run that ended before its first checkpoint wrote this file; the name alone is not enough."""
    if file.is_symlink():
        return False
    if file.name == LOGS:
        return file.is_dir() and _run_id(file.parent) is not None
    if not file.is_file():
        return False
    if file.name == LOCK:
        return file.stat().st_size == 0
    if file.suffix == ".new":
        return _FRESH.fullmatch(file.name) is not None
    # A run writes its environment first: without it, the other files are the user's.
    return file.name in (ENVIRONMENT, SPLIT, RECIPE, NEXT) and _run_id(file.parent) is not None


def _run_id(folder: Path) -> str | None:
    """The id that a run wrote to its environment file; None if the file is missing or not of a run."""
    file = folder / ENVIRONMENT
    try:
        found = read_json(file).get("run") if file.is_file() else None
    except ValueError:
        return None
    return found if isinstance(found, str) and re.fullmatch("[0-9a-f]{32}", found) else None


def discard(folder: Path) -> None:
    """Remove the files that this run wrote before its first checkpoint; a folder with other files is not changed."""
    if is_free(folder):
        if (folder / LOGS).exists():
            shutil.rmtree(folder / LOGS)
        for name in (NEXT, RECIPE, SPLIT, ENVIRONMENT, LOCK):
            with suppress(OSError):  # Windows does not remove a lock file that is held
                (folder / name).unlink(missing_ok=True)


@contextmanager
def create_folder(folder: Path) -> Iterator[None]:
    """Create a folder; if an error leaves it empty, remove it and the parents that were created for it."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with suppress(OSError):  # not empty
            for path in missing:
                path.rmdir()
        raise


@contextmanager
def numbered(root: Path, stem: str) -> Iterator[Path]:
    """Create the first folder ``root/stem-1``, ``-2``, … that does not exist, for this process; see `create_folder`."""
    with create_folder(root):
        for number in itertools.count(1):
            folder = root / f"{stem}-{number}"
            try:
                folder.mkdir(parents=True)  # succeeds in one process only
                break
            except FileExistsError:
                continue
        try:
            yield folder
        except BaseException:
            with suppress(OSError):
                folder.rmdir()
            raise


def checkpoint(folder: Path) -> dict[str, Any]:
    """The last checkpoint of a run, its tensors mapped from the file; a broken one is a ValueError with the fix."""
    file = folder / CHECKPOINT
    if not file.exists():
        raise ValueError(f"{file} is missing: {remedy(folder)}")
    if not file.is_file():  # reading a pipe or a device could block forever
        raise ValueError(f"{file} is not a regular file: {remedy(folder)}")
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # bytes that are not a checkpoint raise nearly anything
        reason = str(error).partition(". ")[0].partition("\n")[0][:200] or type(error).__name__
        raise ValueError(f"{file} cannot be read as a checkpoint ({reason}): {remedy(folder)}") from error
    if not isinstance(saved, dict) or not isinstance(saved.get("state_dict"), dict) or "batches" not in saved:
        raise ValueError(f"{file} is not a checkpoint of a run: {remedy(folder)}")
    return saved


def remedy(folder: Path) -> str:
    """The advice in errors about a checkpoint that cannot be used."""
    return f"replace it by a good copy, or start again with hardneg train {folder / RECIPE} --run ANOTHER_FOLDER"


def write_json(file: Path, content: Any) -> None:
    """As `write`, for anything that JSON can hold."""
    write(file, json.dumps(content, indent=1) + "\n")


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; anything else is a ValueError that names the file."""
    _check_regular(file)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not readable JSON ({error}): restore it, or remove it") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold an object, got {type(content).__name__}: restore it, or remove it")
    return content


def environment(**more: Any) -> dict[str, Any]:
    """Command, time, versions, platform, threads and device of this process."""
    import lightning

    return {
        "command": sys.argv,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
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
    """The complete lines of a run's metrics; one that is not of a run is a ValueError that names the file."""
    file = folder / METRICS
    if not file.exists():
        return []
    _check_regular(file)
    *whole, cut_off = file.read_bytes().split(b"\n")
    lines = []
    for number, text in enumerate([*whole, cut_off] if cut_off else whole, 1):
        try:
            line = json.loads(text)
            if not isinstance(line, dict) or type(line.get("step")) is not int:
                raise ValueError("not an object with a step")
        except (ValueError, RecursionError) as error:
            if number > len(whole):
                break  # cut off when the process was killed
            raise ValueError(f"{file}: line {number} is not of a run ({error}): restore it, or remove it") from error
        lines.append(line)
    return lines


def check_space(folder: Path, needed: int) -> None:
    """Raise if the disk of a folder, which need not exist yet, has fewer than ``needed`` bytes free."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise ValueError(
            f"{folder} has {free / 1e6:,.0f} MB free, and the run needs {needed / 1e6:,.0f} MB: "
            "make room or choose another folder"
        )


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Lock the run for this process; raise if another process holds the lock. A killed process loses its lock."""
    with ExitStack() as held:
        try:
            held.enter_context(locked(folder / LOCK, patience=0))
        except TimeoutError as error:
            raise ValueError(f"{folder} is in use by another process: wait for it, or choose another folder") from error
        yield


@contextmanager
def locked(file: Path, patience: float = PATIENCE) -> Iterator[None]:
    """Lock a file for this process, waiting up to ``patience`` seconds for other processes; else TimeoutError."""
    end = time.monotonic() + patience
    while True:
        # Opened to append, so that trying to lock changes nothing; closing releases the lock.
        with open(file, "a+b", opener=_without_links) as held:
            # A lock on a file that its last holder removed has no effect.
            if _try_lock(held) and file.exists() and os.path.samestat(os.fstat(held.fileno()), file.stat()):
                yield
                return
        if time.monotonic() >= end:
            raise TimeoutError(f"{file} is held by another process: wait for it")
        time.sleep(0.02)


def _without_links(path: str, flags: int) -> int:
    """Open a file, but not a link, which could point outside the run's folder."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def _try_lock(file: IO[bytes]) -> bool:
    """Lock an open file unless another process has locked it; returns whether it did."""
    try:
        import fcntl
    except ImportError:
        import msvcrt  # Windows

        file.seek(0)  # one byte from here is locked
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined, unused-ignore]
        except PermissionError:
            return False
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
