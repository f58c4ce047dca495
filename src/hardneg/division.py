"""How a source was divided into a training and a test part: recorded by every run, compared when the run is used."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import Tensor

TEST_PARTS = ("test", "testing", "val", "valid", "validation", "dev", "eval")


@dataclass(frozen=True)
class Division:
    """How a source was divided into what a run trains on and what it is tested on.

    Args:
        test: the source's name for its test part, or ``HELD_OUT``, ``NO_TEST`` (nothing has a label), ``FOLDS`` (tested
            by cross-validation over the whole set) or ``UNKNOWN``.
        images: number of samples trained on.
        fingerprint: hash of them in their order, and of their labels.
        held_out: ids of the samples that were held out of the training part, ascending.
    """

    HELD_OUT: ClassVar[str] = "held out"
    NO_TEST: ClassVar[str] = "none"
    FOLDS: ClassVar[str] = "folds"
    UNKNOWN: ClassVar[str] = "unknown"

    test: str = UNKNOWN
    images: int = 0
    fingerprint: str = ""
    held_out: tuple[int, ...] = ()


def read_division(file: Path) -> Division:
    """The division that a run wrote to a JSON file; unknown if there is no file, as with runs of older versions."""
    if not file.exists():
        return Division()
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        read = Division(**{**found, "held_out": tuple(found["held_out"])})
        names = (*TEST_PARTS, Division.HELD_OUT, Division.NO_TEST, Division.FOLDS)
        valid = read.test in names and isinstance(read.images, int)
        if not valid or not all(isinstance(number, int) and abs(number) <= 1 << 63 for number in read.held_out):
            raise ValueError("not what a run writes")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read ({error}): restore it, or train again") from error
    return read


def difference(recorded: Division, now: Division) -> str:
    """What has changed between two divisions, as the rest of a sentence; empty if nothing has."""
    if recorded.test == Division.UNKNOWN or recorded.fingerprint == now.fingerprint:
        return ""
    told = f"{recorded.images} training samples then, {now.images} now"
    if recorded.images == now.images:
        told = f"{now.images} training samples as then, but not the same, in another order, or with other labels"
    return f"has changed since the run was trained ({told})"


def fingerprint(*tensors: Tensor | None, names: str = "") -> str:
    """A hash of tensors and names, the same on every machine."""
    found = hashlib.blake2b(names.encode(errors="surrogateescape"), digest_size=16)
    for tensor in tensors:
        if tensor is not None:
            found.update(tensor.detach().cpu().numpy().tobytes())
    return found.hexdigest()
