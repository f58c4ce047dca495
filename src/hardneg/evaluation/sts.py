"""Semantic textual similarity: Spearman's correlation of cosines with the scores that people gave."""

import lzma
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from hardneg import checks
from hardneg.checks import TensorLike
from hardneg.evaluation.alignment import alignment, uniformity
from hardneg.extras import required

Encode = Callable[[Sequence[str]], Tensor]  # texts to features (N, d)
TASKS = ("STS12", "STS13", "STS14", "STS15", "STS16", "STSB", "SICKR")
FILE = "sts.tsv"  # columns task, split, subset, score, s1, s2
SIMILAR = 4.0  # of 5: the score above which SimCSE calls a pair of STS-B positive


class Pairs(NamedTuple):
    """Pairs of texts and the similarity that people gave them, (P,) float64."""

    first: list[str]
    second: list[str]
    scores: Tensor


def spearman(first: TensorLike, second: TensorLike, scores: TensorLike) -> tuple[float, str]:
    """Spearman's rank correlation of the cosines of pairs with their scores, over all pairs together; and a note.

    first, second: (P, d) features of the texts of each pair · scores: (P,). If all cosines or all scores are equal, the
    correlation is not defined: it is 0, and the note says so.

    Examples:
        >>> spearman(torch.eye(3), torch.tensor([[1.0, 0, 0], [0, 1, 1], [1, 0, 0]]), [5.0, 3.0, 1.0])
        (1.0..., '')
    """
    left, right = (checks.floating(n, checks.as_tensor(n, g)) for n, g in (("first", first), ("second", second)))
    wanted = checks.as_tensor("scores", scores)
    if left.dim() != 2 or left.shape != right.shape or wanted.shape != left.shape[:1] or len(left) < 2:
        shapes = ", ".join(str(tuple(each.shape)) for each in (left, right, wanted))
        raise ValueError(f"first, second and scores must have shapes (P, d), (P, d) and (P,) with P ≥ 2, got {shapes}")
    for name, tensor in (("first", left), ("second", right)):
        checks.require_finite(name, tensor)
    cosines = cosine_similarity(left.double().cpu(), right.double().cpu())  # (P,)
    if float(cosines.max() - cosines.min()) == 0 or len(torch.unique(wanted)) < 2:
        return 0.0, "all cosines or all scores are equal"
    return float(required("scipy.stats", "train").spearmanr(cosines.numpy(), wanted.cpu().numpy()).statistic), ""


def sts_spearman(encode: Encode, task: str, split: str = "test") -> tuple[float, str]:
    """`spearman` on a task of ``TASKS``; all subsets of a task are ranked together (aggregation "all" of SentEval)."""
    pairs = read_sts(task, split)
    return spearman(encode(pairs.first), encode(pairs.second), pairs.scores)


def sts_alignment(encode: Encode) -> float:
    """Alignment of the pairs of STS-B with a score above 4: mean squared distance of unit vectors (SimCSE, fig. 3)."""
    pairs = read_sts("STSB", "test")
    rows = (pairs.scores > SIMILAR).nonzero()[:, 0].tolist()
    return alignment(*(encode([side[row] for row in rows]) for side in (pairs.first, pairs.second)))


def sts_uniformity(encode: Encode) -> float:
    """Uniformity of all sentences of STS-B: log mean e^{−2‖x − y‖²} over pairs of unit vectors (SimCSE, fig. 3)."""
    pairs = read_sts("STSB", "test")
    return uniformity(encode(list(dict.fromkeys([*pairs.first, *pairs.second]))))


def read_sts(task: str, split: str = "test") -> Pairs:
    """The pairs of a task of ``TASKS``, from ``sts.tsv`` or ``sts.tsv.xz``; see `find_file`."""
    checks.choice("task", task, TASKS)
    file = find_file(FILE)
    rows = [row[3:] for row in table(file, 6) if row[0] == task and row[1] == split]
    if len(rows) < 2:
        raise ValueError(f"{file} has no pairs of {task}, split {split!r}: unpack the data again")
    try:
        scores = torch.tensor([float(row[0]) for row in rows], dtype=torch.float64)
    except ValueError as error:
        raise ValueError(f"{file}: a score of {task} is not a number ({error}): unpack the data again") from error
    return Pairs([row[1] for row in rows], [row[2] for row in rows], scores)


def find_file(name: str) -> Path:
    """A file of ``$HARDNEG_DATA/text`` or ``data/text``, plain or compressed with xz."""
    home = os.environ.get("HARDNEG_DATA")
    folders = [Path(folder) / "text" for folder in (home, "data") if folder]
    for folder in folders:
        for file in (folder / name, folder / f"{name}.xz"):
            if file.is_file():
                return file
    raise FileNotFoundError(
        f"{name} is not in {' or '.join(map(str, folders))}: set HARDNEG_DATA to the folder of text/{name}"
    )


def table(file: Path, columns: int) -> Iterator[list[str]]:
    """The rows of a file of tab-separated columns below its header; a row of another length is an error."""
    checks.regular_file(file)
    open_text = lzma.open if file.suffix == ".xz" else open
    try:
        with open_text(file, "rt", encoding="utf-8", newline="\n") as lines:
            for number, line in enumerate(lines, start=1):
                row = line.rstrip("\r\n").split("\t")
                if len(row) != columns:
                    raise ValueError(f"line {number} has {len(row)} columns instead of {columns}")
                if number > 1:
                    yield row
    except (ValueError, OSError, EOFError, lzma.LZMAError) as error:
        raise ValueError(f"{file} cannot be read ({error}): copy it again") from error
