"""Directions of import: losses use nothing of the packages built on top of them."""

import re
from pathlib import Path

import pytest

import hardneg

LOSSES = Path(hardneg.__file__).parent / "losses"
FILES = [path for path in LOSSES.rglob("*.py") if "__pycache__" not in path.parts]


@pytest.mark.parametrize(
    "package", ["evaluation", "memory", "samplers", "images", "graphs", "methods", "training", "insight", "cli"]
)
def test_losses_do_not_import(package: str) -> None:
    assert len(FILES) > 20
    pattern = re.compile(rf"^\s*(from|import) hardneg(\.{package}\b| import .*\b{package}\b)", re.MULTILINE)
    assert [path.name for path in FILES if pattern.search(path.read_text(encoding="utf-8"))] == []
