"""Embeddings, labels and images from files, for the explorer; nothing is unpickled."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hardneg import checks
from hardneg.extras import required

SUFFIXES = (".npy", ".npz", ".safetensors", ".parquet")
IMAGE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".webp")
_FEATURES = ("embedding", "embeddings", "features", "vector", "vectors")
_NAMES = {
    "labels": ("label", "labels", "class"),
    "texts": ("text", "texts", "sentence"),
    "ids": ("id", "ids"),
    "positives": ("positives", "positive_embedding"),
    "images": ("images",),
}


class FileContents(NamedTuple):
    """The features (N, d) of a file, and what else it holds, by the names of the arguments of `write_explorer`."""

    features: Tensor
    rest: dict[str, Any]


def read_embeddings(path: Path) -> FileContents:
    """The embeddings of a .npy, .npz, .safetensors or .parquet file, with its labels, texts, ids and positives.

    In a file with names, the features are ``embedding``, ``embeddings``, ``features`` or ``vector``, or the only array.
    """
    if not path.exists():
        raise ValueError(f"there is no file {str(path)!r}: give a {', '.join(SUFFIXES)} file or the folder of a run")
    if path.is_dir():
        raise ValueError(f"{path} is a folder without recipe.yaml: give a {', '.join(SUFFIXES)} file, or a run")
    checks.choice(f"the ending of {path.name}", path.suffix, SUFFIXES)
    checks.regular_file(path)
    if path.suffix == ".npy":
        return FileContents(_floats(path, "its array", read_array(path)), {})
    named = {".npz": _npz, ".safetensors": _safetensors, ".parquet": _parquet}[path.suffix](path)
    chosen = next((name for name in _FEATURES if name in named), None)
    if chosen is None:
        if len(named) != 1:
            raise ValueError(f"{path} has no {' or '.join(map(repr, _FEATURES))}: it holds {sorted(named)}")
        chosen = next(iter(named))
    rest: dict[str, Any] = {}
    for argument, names in _NAMES.items():
        found = next((named[name] for name in names if name in named and name != chosen), None)
        if found is not None:
            rest[argument] = _floats(path, argument, found) if argument == "positives" else found
            if argument in ("texts", "ids") and not isinstance(found, list):
                rest[argument] = found.tolist()
    return FileContents(_floats(path, f"{chosen!r}", named[chosen]), rest)


def read_array(path: Path) -> NDArray[Any]:
    """The array of a .npy file."""
    if not path.exists():
        raise ValueError(f"there is no file {str(path)!r}: write it with numpy.save")
    try:
        return np.load(checks.regular_file(path), allow_pickle=False)  # type: ignore[no-any-return]
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(
            f"{path} is not a readable .npy file of numbers ({error}): write it with numpy.save"
        ) from error


def _npz(path: Path) -> Mapping[str, Any]:
    import zipfile

    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (ValueError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is not a readable .npz file of numbers and texts ({error})") from error


def _safetensors(path: Path) -> Mapping[str, Any]:
    safetensors: Any = required("safetensors.torch", "train")
    try:
        found: dict[str, Tensor] = safetensors.load_file(path)
    except Exception as error:  # the errors of safetensors are not public
        raise ValueError(f"{path} cannot be read as safetensors ({error}): write it again") from error
    return found


def _parquet(path: Path) -> Mapping[str, Any]:
    arrow, parquet = required("pyarrow", "data"), required("pyarrow.parquet", "data")
    wanted = {*_FEATURES, *(name for names in _NAMES.values() for name in names)} - {"images"}
    try:
        names = [name for name in parquet.ParquetFile(path).schema_arrow.names if name in wanted]
        table = parquet.read_table(path, columns=names)
        found: dict[str, Any] = {}
        for name in names:
            column = table.column(name).combine_chunks()
            kind = column.type
            is_list = (
                arrow.types.is_list(kind) or arrow.types.is_fixed_size_list(kind) or arrow.types.is_large_list(kind)
            )
            found[name] = _matrix(path, name, column) if is_list else column.to_pylist()
    except arrow.ArrowException as error:
        raise ValueError(f"{path} cannot be read as parquet ({error}): write it again") from error
    if not found:
        raise ValueError(f"{path} has no column {' or '.join(map(repr, _FEATURES))} of lists of numbers")
    return found


def _matrix(path: Path, name: str, column: Any) -> NDArray[Any]:
    """A list column as rows of equal length."""
    values = column.flatten().to_numpy(zero_copy_only=False)
    width = len(values) // max(1, len(column))
    lengths = {len(row) for row in column.to_pylist() or [()] if row is not None}
    if column.null_count or values.dtype.kind not in "fiu" or len(lengths) > 1 or not width:
        raise ValueError(f"column {name!r} of {path} must hold lists of equally many numbers in every row")
    return values.reshape(len(column), width)  # type: ignore[no-any-return]


def _floats(path: Path, name: str, given: Any) -> Tensor:
    if not isinstance(given, Tensor | np.ndarray):
        raise ValueError(f"{name} of {path} must hold rows of numbers, got {type(given).__name__}")
    if isinstance(given, np.ndarray) and given.dtype.kind not in "fiu":
        raise ValueError(f"{name} of {path} must hold numbers, got {given.dtype}: save them as float32")
    rows = checks.as_tensor(name, given)
    if rows.dim() != 2 or 0 in rows.shape:
        raise ValueError(f"{name} of {path} must have shape (N, d) with N, d ≥ 1, got {tuple(rows.shape)}")
    return rows if rows.is_floating_point() else rows.float()


class ImageFiles:
    """The image files below a folder in the order of their paths, read when they are needed, at most 112 pixels."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES)
        if not self.files:
            raise ValueError(f"{folder} holds no images: give a folder of {', '.join(IMAGE_SUFFIXES)} files")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Tensor:
        module: Any = required("PIL.Image", "train")
        file = checks.regular_file(self.files[index])
        try:
            with module.open(file) as opened:
                opened.draft("RGB", (224, 224))  # a JPEG is decoded at the smallest sufficient size
                image = opened.convert("RGB")
        except Exception as error:  # Pillow raises many kinds for broken files
            raise ValueError(f"{file} cannot be read as an image ({error}): replace or remove it") from error
        image.thumbnail((112, 112))
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def read_images(path: Path) -> Any:
    """Images of a .npy file, or of the files of a folder in the order of their paths."""
    if path.is_dir():
        return ImageFiles(path)
    checks.choice(f"the ending of {path.name}", path.suffix, (".npy",))
    return read_array(path)
