"""Files inside the archives of published data sets: a tar, a zip, or the folder that one was unpacked to."""

import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from hardneg import checks

# What the decompression of broken or foreign bytes can raise; a broken gzip is an OSError.
_ERRORS = (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, RuntimeError)
_LARGEST = 64 * 2**20  # bytes of a file in a zip


def contents(path: Path, wanted: Collection[str], at_most: int) -> dict[str, bytes]:
    """The content of the wanted files by their name without folders, read in one pass; absent ones are left out.

    at_most: bytes of a file; a larger one is an error
    """
    if path.is_dir():
        files = {name: path / name for name in wanted if (path / name).is_file()}
        return {name: _read(checks.regular_file(file).open("rb"), file, at_most) for name, file in files.items()}
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(checks.regular_file(path)) as archive:
            for member in archive:
                name = PurePosixPath(member.name).name
                opened = archive.extractfile(member) if name in wanted and member.isreg() else None
                if opened is not None:
                    found[name] = _read(opened, path / member.name, at_most)  # type: ignore[arg-type]
    except _ERRORS as error:
        raise _unreadable(path, error) from error
    return found


def _unreadable(path: Path, error: Exception) -> ValueError:
    reason = next(iter(str(error).splitlines()), type(error).__name__).rstrip(":")
    return ValueError(f"{path} cannot be read ({reason}): download it again")


def _read(file: BinaryIO, place: Path, at_most: int) -> bytes:
    with file:
        data = file.read(at_most + 1)
    if len(data) > at_most:
        raise ValueError(f"{place} has more than {at_most:,} bytes: it is not the published file, download it again")
    return data


class ZipImages:
    """Image files by their name in a zip."""

    def __init__(self, path: Path, names: list[str]) -> None:
        self.path, self.names, self.archive = path, names, zipfile.ZipFile(path)

    def __len__(self) -> int:
        return len(self.names)

    def open(self, index: int) -> BinaryIO:
        if (size := self.archive.getinfo(self.names[index]).file_size) > _LARGEST:
            raise ValueError(f"{self.place(index)} has {size:,} bytes: it is not a published file")
        return self.archive.open(self.names[index])  # type: ignore[return-value]

    def place(self, index: int) -> str:
        return str(self.path / self.names[index])


def zip_names(path: Path) -> list[str]:
    """The names of the files in a zip."""
    try:
        with zipfile.ZipFile(checks.regular_file(path)) as archive:
            return [entry.filename for entry in archive.infolist() if not entry.is_dir()]
    except _ERRORS as error:
        raise _unreadable(path, error) from error
