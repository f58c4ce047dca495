"""The division of a data source into a training and a test part, recorded by a run and compared when it is loaded."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import Tensor

TEST_PARTS = ("test", "testing", "val", "valid", "validation", "dev", "eval")


@dataclass(frozen=True)
class Division:
    """The division of a data source into the samples a run trains on and those it is tested on.

    Args:
        test: the source's name for its test part, or ``HELD_OUT``, ``NO_TEST`` (nothing has a label), ``FOLDS`` (tested
            by cross-validation over the whole set) or ``UNKNOWN``.
        samples: number of samples trained on.
        fingerprint: hash of these samples in their order, and of their labels.
        held_out: ids of the samples held out of the training part, ascending.
    """

    HELD_OUT: ClassVar[str] = "held out"
    NO_TEST: ClassVar[str] = "none"
    FOLDS: ClassVar[str] = "folds"
    UNKNOWN: ClassVar[str] = "unknown"

    test: str = UNKNOWN
    samples: int = 0
    fingerprint: str = ""
    held_out: tuple[int, ...] = ()


def read_division(file: Path) -> Division:
    """Read the division of a run from a JSON file; unknown if there is no file, as for runs of older versions."""
    if not file.exists():
        return Division()
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if "images" in found:  # its name in version 0.1
            found["samples"] = found.pop("images")
        read = Division(**{**found, "held_out": tuple(found["held_out"])})
        names = (*TEST_PARTS, Division.HELD_OUT, Division.NO_TEST, Division.FOLDS, Division.UNKNOWN)
        valid = read.test in names and isinstance(read.samples, int)
        if not valid or not all(isinstance(number, int) and abs(number) <= 1 << 63 for number in read.held_out):
            raise ValueError("not the format that a run writes")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read ({error}): restore it, or train again") from error
    return read


def difference(recorded: Division, now: Division) -> str:
    """A description of the change between two divisions, as the end of a sentence; empty if they are equal."""
    if recorded.test == Division.UNKNOWN or recorded.fingerprint == now.fingerprint:
        return ""
    change = f"{recorded.samples} training samples then, {now.samples} now"
    if recorded.samples == now.samples:
        change = f"{now.samples} training samples as before, but other samples, another order or other labels"
    return f"has changed since the run was trained ({change})"


def fingerprint(*tensors: Tensor | None, names: str = "") -> str:
    """A hash of tensors and names, the same on every machine."""
    found = hashlib.blake2b(names.encode(errors="surrogateescape"), digest_size=16)
    for tensor in tensors:
        if tensor is not None:
            found.update(tensor.detach().cpu().numpy().tobytes())
    return found.hexdigest()
