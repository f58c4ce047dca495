"""The doctor reports what is installed and how to fix what is not; it never raises and imports no optional package."""

import importlib.metadata
import json
import os
import shutil
import sys
from pathlib import Path

import children
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hardneg import doctor
from hardneg.doctor import Finding, examine

STATUSES = {"ok", "missing", "warning", "broken"}


def by_name() -> dict[str, Finding]:
    return {finding.name: finding for finding in examine()}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HARDNEG_DATA", raising=False)


def test_every_problem_has_a_fix_and_names_are_unique() -> None:
    found = examine()
    assert len({finding.name for finding in found}) == len(found)
    for finding in found:
        assert finding.status in STATUSES
        assert finding.detail
        assert finding.status == "ok" or finding.fix or finding.name == "gpu"  # a GPU cannot be installed by a command


def test_versions_equal_the_installed_packages() -> None:
    found = by_name()
    assert found["torch"].detail == torch.__version__
    assert found["train: lightning"] == Finding("train: lightning", "ok", importlib.metadata.version("lightning"))
    assert found["cpu"].detail.endswith(f"{torch.get_num_threads()} threads of torch")


def test_every_package_of_every_extra_is_checked() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    found = by_name()
    for extra, requirements in project["optional-dependencies"].items():
        for requirement in requirements:
            package = requirement.partition(">=")[0].partition("[")[0]
            if package != "hardneg":  # dev, docs and all are for development
                assert (f"{extra}: {package}" in found) == (extra in doctor.EXTRAS), f"{extra}: {package}"


def test_missing_old_and_broken_packages_are_distinguished(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = [
        "torch>=2.5",
        'rich>=13.7; extra == "train"',
        "typer >=999.0 ; extra == 'train'",
        'no-such-package>=1; extra == "text"',
        'broken>=1.0; extra == "text"',
        'pytest>=8; extra == "dev"',
    ]
    true_version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: declared)
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "1.0" if name == "broken" else true_version(name)
    )  # a distribution whose files are gone
    found = {finding.name: finding for finding in doctor._extras()}
    assert {name: finding.status for name, finding in found.items()} == {
        "train: rich": "ok",
        "train: typer": "broken",
        "text: no-such-package": "missing",
        "text: broken": "broken",
    }
    assert found["text: no-such-package"].fix == 'pip install "hardneg[text]"'
    assert "999.0 or later is needed" in found["train: typer"].detail
    assert found["text: broken"].fix == "pip install --force-reinstall broken"


@pytest.mark.parametrize(
    ("older", "newer"), [("2.9", "2.10"), ("1.9.1rc1", "1.10"), ("0.4", "2.13.0+cpu"), ("", "1"), ("2", "2.0.1")]
)
def test_versions_are_compared_as_numbers(older: str, newer: str) -> None:
    assert doctor._numbers(older) < doctor._numbers(newer)
    assert doctor._numbers("2.0") == doctor._numbers("2")


def test_without_an_installation_the_other_checks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", gone)
    found = by_name()
    assert found["extras"].status == "warning"
    assert found["torch"].status == "ok"


def test_data_sets_are_recognized_by_format_and_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    (data / "birds" / "wren").mkdir(parents=True)
    (data / "birds" / "wren" / "1.jpg").touch()
    (data / "table").mkdir()
    (data / "table" / "train-0.parquet").touch()
    (data / "notes.txt").touch()
    pixels = np.zeros((7, 4, 5, 3), np.uint8)
    np.savez(data / "small.npz", train_images=pixels, train_labels=np.zeros(7, int), test_images=pixels[:2])
    np.savez_compressed(data / "flat.npz", images=pixels)
    (elsewhere / "other").mkdir(parents=True)
    np.savez(elsewhere / "other" / "train.npz", weights=np.zeros(3, np.uint8))
    monkeypatch.setenv("HARDNEG_DATA", str(elsewhere))
    found = {name.removeprefix("data: "): finding for name, finding in by_name().items() if name.startswith("data: ")}
    assert found["data/birds"].detail == "folder of 1 images"
    assert found["data/table"].detail == "1 parquet or arrow files"
    assert found["data/small.npz"].detail == ".npz of images: train 7 of 4x5x3, test 2 of 4x5x3"
    assert found["data/flat.npz"].detail == ".npz of images: all 7 of 4x5x3"
    other = found[str(elsewhere / "other")]
    assert (other.status, other.detail) == ("ok", "folder of 1 files without images")
    assert "data/notes.txt" not in found


def test_missing_data_and_a_wrong_data_folder_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert by_name()["data"].status == "missing"
    monkeypatch.setenv("HARDNEG_DATA", "nowhere")
    assert by_name()["$HARDNEG_DATA"] == Finding(
        "$HARDNEG_DATA", "broken", "nowhere is not a folder", "correct or unset HARDNEG_DATA"
    )


@settings(max_examples=40, deadline=None)
@given(content=st.binary(max_size=200), cut=st.integers(0, 400), suffix=st.sampled_from([".npz", ".parquet", ".arrow"]))
def test_no_file_raises_an_error(
    content: bytes, cut: int, suffix: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("odd")
    (folder / f"noise{suffix}").write_bytes(content)
    np.savez(folder / "whole.npz", images=np.zeros((2, 3, 3), np.uint8))
    (folder / "cut.npz").write_bytes((folder / "whole.npz").read_bytes()[:cut])
    for entry in folder.iterdir():
        finding = doctor._data_set(entry)
        assert finding is None or finding.status in STATUSES
    whole = doctor._data_set(folder / "whole.npz")
    assert whole is not None
    assert whole.status == "ok"


def test_files_of_a_large_folder_are_counted_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_MAX_FILES", 5)
    for number in range(8):
        (tmp_path / f"{number}.png").touch()
    assert doctor._folder(tmp_path) == "folder of 5 or more images"


def test_little_disk_space_and_a_read_only_folder_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    nearly_full = shutil.disk_usage(".")._replace(free=3 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: nearly_full)
    assert by_name()["disk"].status == "warning"
    assert by_name()["disk"].detail.startswith("3.0 MiB free")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert by_name()["disk"].status == "broken"


def test_a_missing_compiler_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert by_name()["torch.compile"].status == "missing"
    monkeypatch.setenv("CXX", "my-compiler")
    assert by_name()["torch.compile"].detail == "CXX=my-compiler is not found"


def test_devices_of_every_kind_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: ((8 - 7 * index) * 2**30, 8 * 2**30))
    found = {finding.name: finding for finding in doctor._accelerators()}
    assert found["cuda:0"] == Finding("cuda:0", "ok", "GPU 0, 8.0 GiB free of 8.0 GiB")
    assert found["cuda:1"].status == "warning"  # 1 of 8 GiB is left
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in next(doctor._accelerators()).detail


def test_an_error_in_a_check_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(index: int) -> tuple[int, int]:
        raise RuntimeError("CUDA error: unknown")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", failing)
    finding = by_name()["accelerators"]
    assert finding.status == "broken"
    assert "unknown" in finding.detail
    assert by_name()["disk"].name == "disk"


def test_no_optional_package_is_imported() -> None:
    code = """
import sys, json, torch, numpy
before = set(sys.modules)
from hardneg.doctor import examine
examine()
print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names))))
"""
    output = children.run([sys.executable, "-c", code], check=True).stdout
    # numpy imports some of its submodules on first use
    assert {name for name in json.loads(output) if not name.startswith("_sysconfigdata")} <= {"hardneg", "numpy"}
