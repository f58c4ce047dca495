"""`hardneg recipes`, `hardneg doctor` and `hardneg --version`."""

import subprocess
import sys

import pytest
from commands import hardneg

import hardneg as package


def test_version_prints_the_version_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert hardneg(capsys, "--version") == (0, f"hardneg {package.__version__}\n", "")


@pytest.mark.parametrize("arguments", [["recipes"], ["recipes", "digits-simclr"], ["--version"], ["train", "--help"],
                                       ["theory"]])  # fmt: skip
def test_commands_that_compute_nothing_do_not_import_torch(arguments: list[str]) -> None:
    # Importing torch takes most of two seconds.
    code = (
        "import sys\nfrom hardneg import cli\n"
        f"sys.argv = ['hardneg', *{arguments!r}]\n"
        "try:\n    cli.main()\n"
        "except SystemExit as stop:\n    print(stop.code, 'torch' in sys.modules, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout
    assert done.stderr.split() == ["0", "False"]
