"""No test can hang, and none leaves a process behind."""

import os
import subprocess
import sys
import time
from pathlib import Path

import children
import psutil
import pytest

# A process that starts another one in a session of its own, as torchrun does, and waits for ever.
WAITING = """
import subprocess, sys, time
below = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(below.pid, flush=True)
open({file!r}, "w").write(str(below.pid))
time.sleep(600)
"""


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_a_process_that_takes_too_long_is_killed_with_what_it_started(tmp_path: Path) -> None:
    code = WAITING.format(file=str(tmp_path / "pid"))
    with pytest.raises(AssertionError, match="took more than 5 s"):
        children.run([sys.executable, "-c", code], limit=5)
    assert gone(int((tmp_path / "pid").read_text(encoding="utf-8")))


def test_spawned_processes_that_take_too_long_are_killed() -> None:
    before = set(children.tree(os.getpid()))
    with pytest.raises(AssertionError, match=r"2 processes of .*wait took over 3 s"):
        children.spawn(children.wait, (), 2, limit=3)
    left = [process for process in children.tree(os.getpid()) if process not in before]
    assert [process for process in left if "spawn_main" in " ".join(process.cmdline())] == []


@pytest.mark.slow
def test_a_test_that_hangs_fails_in_time_and_its_processes_end(tmp_path: Path) -> None:
    pytest.importorskip("pytest_timeout")
    (tmp_path / "test_it.py").write_text(
        "import subprocess, sys\n"
        "def test_it():\n"
        f"    subprocess.run([sys.executable, '-c', {WAITING.format(file=str(tmp_path / 'pid'))!r}])\n",
        encoding="utf-8",
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "conftest",
        "-p",
        "no:cacheprovider",
        "--timeout",
        "5",
        "test_it.py",
    ]
    done = children.run(command, 120, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)})
    assert done.returncode == 1
    assert "Timeout" in done.stdout
    assert gone(int((tmp_path / "pid").read_text(encoding="utf-8")))


def test_the_whole_suite_has_a_limit_for_each_test(request: pytest.FixtureRequest) -> None:
    pytest.importorskip("pytest_timeout")
    assert 0 < float(request.config.getini("timeout")) <= 900


def test_output_of_a_process_is_given_as_text() -> None:
    done = children.run(
        [sys.executable, "-c", "import sys; print('β'); sys.exit(3)"], env={**os.environ, "PYTHONUTF8": "1"}
    )
    assert (done.returncode, done.stdout.strip()) == (3, "β")
    assert isinstance(done, subprocess.CompletedProcess)
