"""Run the quick tests with the lowest version of every dependency that pyproject.toml allows.

    python scripts/lowest.py                   # the tests in QUICK
    python scripts/lowest.py tests/memory -x   # other tests or options of pytest

Makes a virtual environment in a temporary folder and removes it afterwards. Packages that constraints.txt pins (torch
and triton) are installed as pinned: another torch may install gigabytes of CUDA packages. Indirect dependencies are the
newest that fit.
"""

import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("train", "data", "text", "graph", "mine", "export", "dev")
# Every module that calls a dependency other than torch. The kernels' own tests need torch alone and take much longer.
QUICK = (
    "tests/images",
    "tests/graphs",
    "tests/evaluation",
    "tests/insight",
    "tests/integrations",
    "tests/memory",
    "tests/methods/test_graphs.py",
    "tests/training",
    "tests/test_cli.py",
    "tests/test_doctor.py",
    "tests/test_export.py",
    "tests/test_translations.py",
)
_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(?:\[[^]]*])?>=(?P<version>[0-9.]+)(?:;.*)?")


def lowest(root: Path = ROOT) -> list[str]:
    """The lowest allowed version of each dependency, as ``name==version``; pinned packages are left out."""
    pins = [line for line in (root / "constraints.txt").read_text(encoding="utf-8").splitlines() if "==" in line]
    pinned = {line.split("==")[0] for line in pins}
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = [*project["dependencies"]]
    for extra in EXTRAS:
        declared += project["optional-dependencies"][extra]
    found: dict[str, str] = {}
    for requirement in declared:
        if requirement.startswith("hardneg["):
            continue
        match = _REQUIREMENT.fullmatch(requirement)
        if match is None:
            raise ValueError(f"pyproject.toml declares {requirement!r}: write it as name>=version")
        name, version = match["name"].lower(), match["version"]
        if name in pinned:
            continue
        if found.setdefault(name, version) != version:
            raise ValueError(f"pyproject.toml gives {name} two lower bounds, {found[name]} and {version}: give it one")
    return pins + [f"{name}=={version}" for name, version in found.items()]


def main() -> int:
    """Install, run, and return pytest's exit code."""
    chosen = sys.argv[1:] or list(QUICK)
    if all(argument.startswith("-") for argument in chosen):
        chosen += QUICK
    with tempfile.TemporaryDirectory(prefix="hardneg-lowest-") as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        wanted = lowest()
        print("\n".join(wanted), flush=True)
        subprocess.run([*install, *wanted], check=True)
        subprocess.run([*install, "--no-deps", "--editable", str(ROOT)], check=True)
        # Old versions issue warnings that are not our concern.
        command = [str(python), "-m", "pytest", "-q", "-W", "default", *chosen]
        return subprocess.run(command, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
