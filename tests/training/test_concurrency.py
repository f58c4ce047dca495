"""Several processes at once: no write is lost, no reader sees half a file, and every run gets a folder of its own."""

import errno
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from test_cli import process

from hardneg.training import evaluate, recipe, run, run_folder

FORK = multiprocessing.get_context("fork")


def at_once(*tasks: Callable[[], None]) -> None:
    """Run each task in a process of its own, all starting at the same time; all must succeed."""
    ready = FORK.Barrier(len(tasks))

    def begin(task: Callable[[], None]) -> None:
        ready.wait(60)
        task()

    workers = [FORK.Process(target=begin, args=(task,)) for task in tasks]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0] * len(workers)


def test_processes_that_write_one_file_never_fail_and_readers_never_see_half_of_it(tmp_path: Path) -> None:
    file, figures = tmp_path / "evaluation.json", {f"metric {number}": number for number in range(500)}
    run_folder.write_json(file, {"writer": -1, **figures})

    def write(writer: int) -> Callable[[], None]:
        def task() -> None:
            for _ in range(100):
                run_folder.write_json(file, {"writer": writer, **figures})

        return task

    def read() -> None:
        for _ in range(1000):
            assert len(json.loads(file.read_text())) == 501

    at_once(*(write(writer) for writer in range(4)), read)
    assert [left.name for left in tmp_path.iterdir()] == ["evaluation.json"]


def test_a_write_that_fails_leaves_the_file_and_nothing_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "evaluation.json"
    file.mkdir()  # a file cannot replace it
    with pytest.raises(OSError):  # noqa: PT011 (which one depends on the system)
        run_folder.write_json(file, {"knn": 1.0})
    assert [left.name for left in tmp_path.iterdir()] == ["evaluation.json"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run on digits, and other data to evaluate it on."""
    folder: Path = tmp_path_factory.mktemp("concurrency")
    run.train(recipe.load(recipe.find("digits-simclr"), ["trainer.epochs=1", "trainer.knn_every=0"]), folder / "run")
    labels = np.arange(20) % 2
    for number in range(40):
        images = np.random.default_rng(number).integers(0, 255, (20, 8, 8)).astype(np.uint8)
        np.savez(folder / f"{number}.npz", train_images=images, train_labels=labels,
                 test_images=images, test_labels=labels)  # fmt: skip
    return folder


class Windows:
    """Windows' locks on top of those of this system: ``locking`` as documented, but without waiting."""

    LK_NBLCK, LK_LOCK, LK_UNLCK = 2, 1, 0

    def __init__(self) -> None:
        import fcntl

        self.system = fcntl

    def locking(self, descriptor: int, mode: int, size: int) -> None:
        commands = {self.LK_UNLCK: self.system.LOCK_UN}
        command = commands.get(mode, self.system.LOCK_EX | self.system.LOCK_NB)
        try:
            self.system.lockf(descriptor, command, size, 0, os.SEEK_CUR)  # from where the file stands, as there
        except BlockingIOError as error:
            raise PermissionError(errno.EACCES, "locking violation") from error


@pytest.mark.parametrize("system", ["fcntl", "msvcrt"])
def test_processes_that_evaluate_one_run_on_other_data_lose_no_result(
    finished: Path, monkeypatch: pytest.MonkeyPatch, system: str
) -> None:
    if system == "msvcrt":
        monkeypatch.setitem(sys.modules, "msvcrt", Windows())  # type: ignore[arg-type]
        monkeypatch.setitem(sys.modules, "fcntl", None)  # an ImportError
    (finished / "run" / "transfer.json").unlink(missing_ok=True)

    def task(first: int) -> Callable[[], None]:
        def evaluate_each() -> None:
            for number in range(first, first + 10):
                evaluate.evaluate(finished / "run", str(finished / f"{number}.npz"), metrics=["nearest"])

        return evaluate_each

    at_once(*(task(first) for first in (0, 10, 20, 30)))
    found = json.loads((finished / "run" / "transfer.json").read_text())
    assert found == {str(finished / f"{number}.npz"): {"nearest": 1.0} for number in range(40)}


@pytest.mark.parametrize("system", ["fcntl", "msvcrt"])
def test_a_run_is_locked_by_one_process_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str
) -> None:
    if system == "msvcrt":
        monkeypatch.setitem(sys.modules, "msvcrt", Windows())  # type: ignore[arg-type]
        monkeypatch.setitem(sys.modules, "fcntl", None)
    held = FORK.Event()

    def hold() -> None:
        with run_folder.lock_run(tmp_path):
            held.set()
            time.sleep(60)

    other = FORK.Process(target=hold)
    other.start()
    assert held.wait(60)
    with pytest.raises(ValueError, match="in use by another process"), run_folder.lock_run(tmp_path):
        pass
    other.kill()  # which releases the lock
    other.join(60)
    with run_folder.lock_run(tmp_path):
        pass


def test_a_lock_file_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"run\.lock"), run_folder.lock_run(tmp_path / "run"):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_a_broken_transfer_file_is_named_and_kept(finished: Path) -> None:
    file = finished / "run" / "transfer.json"
    file.write_text('{"a": ')
    try:
        with pytest.raises(ValueError, match=r"transfer\.json is not readable JSON"):
            evaluate.evaluate(finished / "run", str(finished / "0.npz"), metrics=["nearest"])
        assert file.read_text() == '{"a": '
    finally:
        file.unlink()


@pytest.mark.slow
def test_runs_started_at_once_get_a_folder_each(tmp_path: Path) -> None:
    command = ["train", "digits-simclr", "trainer.epochs=1", "trainer.knn_every=0", "--no-evaluate", "--json"]
    started = [process(*command, cwd=tmp_path) for _ in range(3)]
    folders = []
    for run_process in started:
        out, err = run_process.communicate(timeout=300)
        assert run_process.returncode == 0, err
        folders.append(json.loads(out)["run"])
    wanted = [str(Path("runs") / f"digits-simclr-{number}") for number in (1, 2, 3)]
    assert sorted(folders) == wanted
    assert all((tmp_path / name / "encoder.safetensors").exists() for name in wanted)


def test_every_process_gets_default_folders_of_its_own(tmp_path: Path) -> None:
    def claim() -> None:
        for _ in range(25):
            with run_folder.numbered(tmp_path / "runs", "run") as folder:
                (folder / "mine").touch(exist_ok=False)

    at_once(*[claim] * 4)
    assert {folder.name for folder in (tmp_path / "runs").iterdir()} == {f"run-{number}" for number in range(1, 101)}


def test_a_default_folder_is_removed_after_an_error(tmp_path: Path) -> None:
    def fail(folder: SimpleNamespace) -> None:
        raise ValueError(folder.name)

    with pytest.raises(ValueError, match="run-1"), run_folder.numbered(tmp_path / "a" / "runs", "run") as folder:
        fail(folder)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
