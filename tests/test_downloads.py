"""A download arrives whole, or leaves nothing."""

import hashlib
import random
from pathlib import Path

import local_site
import pytest

from hardneg.downloads import download

CONTENT = random.Random(0).randbytes(3_000_000)  # several chunks


def test_a_file_arrives_as_it_is_and_replaces_an_older_one(tmp_path: Path) -> None:
    file = tmp_path / "new" / "set.zip"
    with local_site.serve({"/set.zip": CONTENT}) as (site, asked):
        for _ in range(2):
            assert download(f"{site}/set.zip", file, hashlib.md5(CONTENT).hexdigest()) == file
            assert file.read_bytes() == CONTENT
            file.write_bytes(b"old")
    assert asked == ["/set.zip"] * 2
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize(
    ("name", "announced", "md5", "message"),
    [
        ("other.zip", 0, None, "HTTP Error 404: Not Found"),
        ("set.zip", 5, None, "3,000,000 of 3,000,005 bytes arrived"),
        ("set.zip", 0, "0" * 32, f"its MD5 is {hashlib.md5(CONTENT).hexdigest()}, not 0000"),
    ],
)
def test_a_failed_download_is_one_line_and_leaves_nothing(
    name: str, announced: int, md5: str | None, message: str, tmp_path: Path
) -> None:
    with (
        local_site.serve({"/set.zip": CONTENT}, announced) as (site, _),
        pytest.raises(ValueError, match="could not be") as raised,
    ):
        download(f"{site}/{name}", tmp_path / name, md5)
    assert message in str(raised.value)
    assert str(raised.value).endswith(f"try again, or put {name} into {tmp_path} yourself")
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_a_site_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with local_site.serve({}) as (site, _):
        pass
    with pytest.raises(ValueError, match=r"set.zip could not be downloaded \(.*refused.*\): try again"):
        download(f"{site}/set.zip", tmp_path / "new" / "set.zip")
    assert list(tmp_path.iterdir()) == []
