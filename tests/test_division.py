"""The recorded division of a run is read strictly, and in the format of version 0.1 as well."""

import json
from pathlib import Path

import pytest

from hardneg.division import Division, read_division


@pytest.mark.parametrize("key", ["samples", "images"])
def test_a_division_is_read_as_it_was_written(tmp_path: Path, key: str) -> None:
    file = tmp_path / "split.json"
    file.write_text(json.dumps({"test": "held out", key: 80, "fingerprint": "ab", "held_out": [-3, 7]}))
    assert read_division(file) == Division(Division.HELD_OUT, 80, "ab", (-3, 7))


def test_an_unknown_division_is_read_and_a_missing_file_is_one(tmp_path: Path) -> None:
    (tmp_path / "split.json").write_text('{"test": "unknown", "samples": 0, "fingerprint": "", "held_out": []}')
    assert read_division(tmp_path / "split.json") == read_division(tmp_path / "none.json") == Division()


@pytest.mark.parametrize("text", ["[]", "{", '{"test": "moon", "samples": 1, "held_out": []}', '{"held_out": ["a"]}'])
def test_another_format_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "split.json").write_text(text)
    with pytest.raises(ValueError, match=r"split\.json cannot be read"):
        read_division(tmp_path / "split.json")
