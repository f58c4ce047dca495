"""The package as a user meets it: light to import, whole when built, installed and imported elsewhere."""

import json
import runpy
import sys
import tomllib
import venv
from pathlib import Path

import children

ROOT = Path(__file__).parents[1]


def test_import_needs_torch_and_numpy_only() -> None:
    # A finder that refuses everything outside the standard library, torch, numpy and what torch itself needs.
    code = """
import sys, json
import torch, numpy
before = set(sys.modules)
import hardneg
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps(sorted(new - set(sys.stdlib_module_names))))
"""
    output = children.run([sys.executable, "-c", code], check=True).stdout
    assert set(json.loads(output)) <= {"hardneg", "numpy"}


def test_every_public_name_exists_and_is_documented() -> None:
    import hardneg

    for name in hardneg.__all__:
        assert getattr(hardneg, name).__doc__, name


def test_the_wheel_installs_elsewhere_and_carries_its_types(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    children.run(build, check=True)
    (wheel,) = tmp_path.glob("hardneg-*.whl")
    # torch and numpy are borrowed from this environment: what is tested is the wheel, not their download.
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(site), str(wheel)]
    children.run(install, check=True)
    borrowed = next(path for path in sys.path if path.endswith("site-packages"))
    code = f"""
import sys
sys.path.append({borrowed!r})
import torch, hardneg, importlib.resources
assert hardneg.__file__.startswith({str(site)!r}), hardneg.__file__
assert importlib.resources.files("hardneg").joinpath("py.typed").is_file()
print(float(hardneg.hcl()(torch.eye(4), torch.eye(4))))
"""
    python = tmp_path / "venv" / "bin" / "python"
    output = children.run([python, "-I", "-c", code], check=True, cwd=tmp_path).stdout
    assert float(output) > 0


def test_every_dependency_has_one_lower_bound_and_the_pins_keep_it() -> None:
    """As `make lowest` installs them."""
    found = dict(line.split("==") for line in runpy.run_path(str(ROOT / "scripts" / "lowest.py"))["lowest"]())
    assert found["lightning"] == "2.6"  # `weights_only` of `Trainer.fit`
    assert {"numpy", "typer", "torch-geometric", "faiss-cpu", "onnx", "sentence-transformers", "pytest"} <= set(found)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (bound,) = [line.partition(">=")[2] for line in project["dependencies"] if line.startswith("torch>=")]
    assert [*map(int, found["torch"].split("."))] >= [*map(int, bound.split("."))]
