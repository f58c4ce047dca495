"""CIFAR-10 and CIFAR-100 from their published files: the binary version, or the Python version without unpickling."""

import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from hardneg.images.archive_files import contents

Arrays = dict[str, npt.NDArray[Any]]
_PIXELS = 3 * 32 * 32
_LARGEST = 512 * 2**20  # bytes; the largest published file has 155 MB


@dataclass(frozen=True)
class Files:
    """The files of one version of a set.

    splits: names of the batches of each split · names: file of the class names · label: key of the labels, or the
    number of their byte in a record · names_key: key of the class names
    """

    splits: dict[str, tuple[str, ...]]
    names: str
    label: str | int
    names_key: str = ""


def _batches(suffix: str) -> dict[str, tuple[str, ...]]:
    train = tuple(f"data_batch_{number}{suffix}" for number in range(1, 6))
    return {"train": train, "test": (f"test_batch{suffix}",)}


CIFAR10 = (
    Files(_batches(""), "batches.meta", "labels", "label_names"),
    Files(_batches(".bin"), "batches.meta.txt", 0),
)
CIFAR100 = (
    Files({"train": ("train",), "test": ("test",)}, "meta", "fine_labels", "fine_label_names"),
    Files({"train": ("train.bin",), "test": ("test.bin",)}, "fine_label_names.txt", 1),
)


def read(path: Path, versions: tuple[Files, ...]) -> Arrays:
    """The images (N, 3, 32, 32) and labels (N,) of both splits, from an archive or the folder it was unpacked to."""
    every = {name for files in versions for split in files.splits.values() for name in (*split, files.names)}
    found = contents(path, every, _LARGEST)
    files = max(versions, key=lambda files: sum(name in found for split in files.splits.values() for name in split))
    wanted = [name for split in files.splits.values() for name in split] + [files.names]
    if missing := [name for name in wanted if name not in found]:
        raise ValueError(f"{path} lacks {', '.join(missing)}: download the archive again")
    arrays: Arrays = {}
    for split, names in files.splits.items():
        parts = [_batch(found.pop(name), files, path / name) for name in names]
        arrays[f"{split}_images"] = np.concatenate([images for images, _ in parts])
        arrays[f"{split}_labels"] = np.concatenate([labels for _, labels in parts])
    classes = _class_names(found[files.names], files, path / files.names)
    highest = max(int(arrays[f"{split}_labels"].max()) for split in files.splits)
    if highest >= len(classes):
        raise ValueError(f"{path} has labels up to {highest}, but names {len(classes)} classes: download it again")
    return arrays | {"classes": np.array(classes)}


def _batch(data: bytes, files: Files, place: Path) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    if isinstance(files.label, int):
        width = files.label + 1 + _PIXELS
        if len(data) == 0 or len(data) % width:
            raise ValueError(f"{place} has {len(data):,} bytes, no multiple of {width:,}: download it again")
        records = np.frombuffer(data, np.uint8).reshape(-1, width)
        pixels, labels = records[:, files.label + 1 :], records[:, files.label].astype(np.int64)
    else:
        batch = _unpickled(data, place)
        pixels, labels = _pixels(batch.get(b"data"), place), _labels(batch.get(files.label.encode()), place)
        if len(pixels) != len(labels):
            raise ValueError(f"{place} has {len(pixels)} images and {len(labels)} labels: download it again")
    return pixels.reshape(-1, 3, 32, 32), labels


def _class_names(data: bytes, files: Files, place: Path) -> list[str]:
    names: Any = data.decode("utf-8", "replace").split()
    if files.names_key:
        names = _unpickled(data, place).get(files.names_key.encode())
        if not isinstance(names, list) or not all(isinstance(name, bytes) for name in names):
            raise ValueError(f"{place} names no classes: download it again")
        names = [name.decode("utf-8", "replace") for name in names]
    return list(names)


# --- the Python version: pickles of dicts, lists, bytes, numbers and one numpy array ---


class _Array:
    """Holds the state of a pickled numpy array, without creating one."""

    def __init__(self, *arguments: object) -> None:
        self.state: Any = None

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Dtype:
    """Holds the name of a pickled numpy dtype, without creating one."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __setstate__(self, state: object) -> None:
        pass


# What pickles of such objects consist of, in the protocols 2 to 4. Sets and further opcodes are refused.
_OPCODES = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.SHORT_BINSTRING, pickle.BINSTRING),
    *(pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINBYTES, pickle.SHORT_BINBYTES),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.EMPTY_LIST),
    *(pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
    *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET, pickle.MEMOIZE),
    *(pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.REDUCE, pickle.BUILD),
)


class _Inert(pickle._Unpickler):
    """Reads a pickle whose objects are replaced by inert ones: nothing that the file names is imported or called.

    The implementation in Python is used because that in C allocates as much memory as a file asks for.
    """

    dispatch: ClassVar[dict[int, Any]] = {code[0]: pickle._Unpickler.dispatch[code[0]] for code in _OPCODES}

    def load_setitem(self) -> None:
        self._check_keys(self.stack[-2:-1])  # type: ignore[attr-defined]
        super().load_setitem()  # type: ignore[misc]

    def load_setitems(self) -> None:
        self._check_keys(self.stack[::2])  # type: ignore[attr-defined]
        super().load_setitems()  # type: ignore[misc]

    dispatch |= {pickle.SETITEM[0]: load_setitem, pickle.SETITEMS[0]: load_setitems}

    def _check_keys(self, keys: list[Any]) -> None:
        # The hash of nested tuples that share their parts takes exponential time.
        if not all(isinstance(key, bytes | str) for key in keys):
            raise pickle.UnpicklingError("it has keys that are not text")

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("numpy", "dtype"):
            return _Dtype
        arrays = {f"numpy.{core}.multiarray" for core in ("core", "_core")}
        if (module, name) == ("numpy", "ndarray") or (module in arrays and name == "_reconstruct"):
            return _Array
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which the published file does not")


def _unpickled(data: bytes, place: Path) -> dict[Any, Any]:
    try:
        found = _Inert(io.BytesIO(data), encoding="bytes").load()
    except KeyError as error:
        raise ValueError(f"{place} is not the published file (opcode {error} of pickle): download it again") from error
    except Exception as error:  # bytes of a stranger can raise anything
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(f"{place} is not the published file ({reason}): download it again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{place} holds a {type(found).__name__}, not a dict: download it again")
    return found


def _pixels(array: object, place: Path) -> npt.NDArray[np.uint8]:
    """The pixels (N, 3072) of a pickled array, from its raw bytes."""
    state = array.state if isinstance(array, _Array) else None
    match state:
        case (int(), (int(count), int(width)), _Dtype(arguments=(b"u1" | "u1", *_)), False | 0, bytes(raw)):
            if width == _PIXELS and count > 0 and len(raw) == count * width:
                return np.frombuffer(raw, np.uint8).reshape(count, width)
    raise ValueError(f"{place} has no array 'data' of uint8 pixels (N, {_PIXELS}): download it again")


def _labels(numbers: object, place: Path) -> npt.NDArray[np.int64]:
    if not isinstance(numbers, list) or not all(type(label) is int and 0 <= label < 256 for label in numbers):
        raise ValueError(f"{place} has no list of labels: download it again")
    return np.array(numbers, dtype=np.int64)
