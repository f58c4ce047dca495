"""Scores of a paired batch on a CPU: strips of the score matrix, masked, and sums over their rows and columns.

One of two forms is used for the scores s of negatives:

- *direct*: x = e^s itself, where no sum can overflow and β is 0 or 1; all derivatives are then polynomials in x
- *by logarithms*: the scores, with log-sums relative to the row maximum, for every other temperature and tilt
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import softplus

from hardneg import checks
from hardneg.losses.kernels.anchor_losses import AnchorLosses, LabelSums, Sums, label_losses, own_positive_losses
from hardneg.losses.kernels.identities import equal_range
from hardneg.losses.kernels.interface import EXACT_SOFTPLUS, Eligibility, LossForm, Rule, safe_lengths
from hardneg.losses.kernels.strips import SAFE_EXPONENT, strip_height
from hardneg.matmul import multiply


class UnitVectors(NamedTuple):
    """Unit vectors (R, d) and the lengths (R, 1) they had."""

    vectors: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, dtype: torch.dtype, *parts: Tensor) -> "UnitVectors | None":
        """Those of the rows of all parts; None if dividing by a length would not be safe."""
        smallest = max(torch.finfo(part.dtype).tiny for part in parts)
        vectors = parts[0].detach() if len(parts) == 1 else torch.cat([part.detach() for part in parts])  # (R, d)
        vectors = vectors if vectors.dtype == dtype else vectors.to(dtype)
        lengths = safe_lengths(vectors, smallest)
        return None if lengths is None else cls(vectors / lengths, lengths)

    def backward(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient in the vectors that were divided, and ⟨unit vector, grad⟩, (R, 1). Overwrites ``grad``."""
        along = torch.linalg.vecdot(self.vectors, grad).unsqueeze(1)
        return grad.addcmul_(self.vectors, along, value=-1).div_(self.lengths), along


class Strip(NamedTuple):
    """Matrices of the anchors ``rows`` with all candidates, (R, N) each.

    negatives: e^s of the negatives and 0 elsewhere, or s of the negatives and −inf elsewhere · pairs: (R,) scores with
    the other view, if that is the only positive · same: 1 for each positive found by label, 0 elsewhere · scores: of
    all candidates, for positives by label · positives: as ``negatives``, of the positives, if they are in the
    denominator
    """

    rows: slice
    negatives: Tensor
    pairs: Tensor | None = None
    same: Tensor | None = None
    scores: Tensor | None = None
    positives: Tensor | None = None


class Result(NamedTuple):
    """Results of the forward pass. scores: (A,) of the pairs if each is the other's only positive"""

    losses: AnchorLosses
    sums: Sums
    scores: Tensor | None = None
    positives: LabelSums | None = None


class Groups:
    """Groups of rows with the same known label or of the same instance.

    numbers: (A,) of the groups, as floating numbers, which are compared several times faster; exact for 2²⁴ rows ·
    sizes: (A,) number of rows in the group of each row
    """

    def __init__(self, labels: Tensor, views: int, dtype: torch.dtype) -> None:
        if int(labels.min()) < 0:
            checks.values(labels >= -1, "labels must be ≥ −1, where −1 means unknown")
            unknown = -2 - torch.arange(len(labels))  # each unknown label is a separate group
            labels = torch.where(labels >= 0, labels, unknown)
        first, size = equal_range(labels.sort().values, labels)
        self.numbers = first.to(dtype).repeat(views)
        self.sizes = (views * size).to(dtype).repeat(views)


class PairScores:
    """The scores of one call.

    unit: unit vectors of z1, then of z2 · batch: B · given: unit vectors of the given negatives · scale: 1/temperature
    · groups: by label, None without labels

    square: anchors and candidates are the same rows · crossed: rows are the anchors of one direction, columns those of
    the other · by_columns: each column of the score matrix is that of an anchor, whose gradient is added to the row's
    """

    def __init__(
        self,
        unit: UnitVectors,
        batch: int,
        given: UnitVectors | None,
        eligibility: Eligibility,
        scale: float,
        rule: Rule,
        form: LossForm,
        groups: Groups | None,
    ) -> None:
        self.unit, self.batch, self.given, self.eligibility = unit, batch, given, eligibility
        self.scale, self.rule, self.form, self.groups = scale, rule, form, groups
        self.tilt = float(rule.tilt)
        self.crossed = eligibility.crossed
        vectors = unit.vectors
        self.square = given is None and not self.crossed and eligibility.columns == vectors.shape[0]
        self.anchors = vectors if self.square else vectors[:batch]
        self.candidates = (vectors if self.square else vectors[batch:]) if given is None else given.vectors
        self.banded = rule.lower is not None or rule.upper is not None
        # Rounding may put s_ij inside a band and s_ji outside.
        self.by_columns = self.crossed or (self.square and not self.banded)
        self.direct = self.tilt in (0.0, 1.0) and (self.tilt + 1) * scale <= SAFE_EXPONENT
        self.own_positive = form.positives == "own"
        self.count: Tensor | float | None = None  # of each anchor's negatives; None: read from the scores
        if groups is not None and form.labels_exclude and not self.banded:
            self.count = vectors.shape[0] - groups.sizes
        elif eligibility.is_plain and not self.banded:
            self.count = float(eligibility.count_per_anchor)
        # Log-sums of columns would be relative to a maximum that changes from strip to strip.
        self.is_served = self.direct or self.tilt == 0 or not self.crossed
        self.result: Result | None = None  # of the forward pass
        self._fill = 0.0 if self.direct else -math.inf

    def strips(self) -> Iterator[Strip]:
        """All strips; each overwrites the scores of the previous one."""
        rows, columns = self.anchors.shape[0], self.candidates.shape[0]
        height = strip_height(rows, columns, self.anchors.device)
        buffer = self.anchors.new_empty(height, columns)
        if height == rows:
            yield self._strip(slice(0, rows), buffer)
            return
        for view in range(0, rows, self.batch):  # no strip holds rows of two views
            for start in range(view, view + self.batch, height):
                yield self._strip(slice(start, min(start + height, view + self.batch)), buffer)

    def pair_diagonals(self, rows: slice, matrix: Tensor) -> list[tuple[slice, Tensor]]:
        """The entries of the anchors ``rows`` with the other view of their instance, as views of ``matrix`` (R, N)."""
        start, batch = rows.start, self.batch
        if self.given is not None or self.unit.vectors.shape[0] == batch:
            return []
        if not self.square:
            return [(rows, matrix.diagonal(start))]
        if matrix.shape[0] > batch:
            return [(slice(0, batch), matrix.diagonal(batch)), (slice(batch, 2 * batch), matrix.diagonal(-batch))]
        return [(rows, matrix.diagonal(start + batch if start < batch else start - batch))]

    def compute(self) -> tuple[Result, Strip | None]:
        """The losses of all anchors, and the strip that the backward pass may use again, if there is only one."""
        size = self.anchors.shape[0]
        kept: Strip | None = None
        sums: Sums | None = None
        columns: Sums | None = None  # if columns are anchors
        pairs: Tensor | None = None
        positives: LabelSums | None = None
        for strip in self.strips():
            part = self._sums(strip, 1)
            sums = placed(sums, part, strip.rows, size)
            if self.crossed:
                more = self._sums(strip, 0)
                columns = more if columns is None else columns.plus(more)
            if strip.pairs is not None:
                pairs = placed_rows(pairs, strip.pairs, strip.rows, size)
            elif strip.same is not None:
                positives = placed(positives, self._label_sums(strip, part), strip.rows, size)
            kept = strip if strip.negatives.shape[0] == size else None
        assert sums is not None
        sums = sums if columns is None else joined(sums, columns)
        if positives is not None:
            return Result(label_losses(sums, positives), sums, positives=positives), kept
        if pairs is None:
            pairs = torch.linalg.vecdot(self.anchors, self.unit.vectors[self.batch :]) * self.scale
        scores = pairs.repeat(2) if self.crossed else pairs
        return Result(own_positive_losses(sums, scores, self.scale, self.form), sums, scores), kept

    def _strip(self, rows: slice, buffer: Tensor) -> Strip:
        scores = of_strip(buffer, slice(0, rows.stop - rows.start))
        multiply(of_strip(self.anchors, rows), self.candidates, scores, 1.0 if self.banded else self.scale)
        if self.banded:  # see `reference.score_matrix`; without a band it would take up to a sixth more time
            scores.mul_(self.scale)
        diagonals = [diagonal for _, diagonal in self.pair_diagonals(rows, scores)]
        pairs = same = plain = positives = None
        if self.own_positive and diagonals:
            pairs = diagonals[0].clone() if len(diagonals) == 1 else torch.cat(diagonals)
        outside = self._outside(scores)
        if self.groups is not None:
            numbers = self.groups.numbers
            same = torch.eq(numbers[rows, None], numbers, out=torch.empty_like(scores))
            plain = None if self.own_positive else scores.clone()
        negatives = scores.exp_() if self.direct else scores
        if same is not None and self.form.positives == "in_denominator":
            positives = negatives * same if self.direct else negatives.masked_fill(same == 0, -math.inf)
            positives.diagonal(rows.start).fill_(self._fill)
        if same is not None and self.form.labels_exclude:
            outside.append(same)  # holds the anchor and its other view, too
        else:
            for diagonal in (*diagonals, negatives.diagonal(rows.start)) if self.square else diagonals:
                diagonal.fill_(self._fill)
        for marks in outside:
            if self.direct:
                negatives.addcmul_(negatives, marks, value=-1)  # x − x·1 = 0; a fifth of the time of masked_fill_
            else:
                negatives.masked_fill_(marks != 0, -math.inf)
        if self.given is not None:
            self.eligibility.mask_(negatives, rows, self._fill)
        if same is None or self.own_positive:
            return Strip(rows, negatives, pairs)
        same.diagonal(rows.start).zero_()
        return Strip(rows, negatives, None, same, plain, positives)

    def _outside(self, scores: Tensor) -> list[Tensor]:
        """For each bound of the band a matrix (R, N) that is 1 where a score is beyond it, else 0."""
        found = []
        if self.rule.lower is not None:
            found.append(torch.lt(scores, self.rule.lower, out=torch.empty_like(scores)))
        if self.rule.upper is not None:
            found.append(torch.gt(scores, self.rule.upper, out=torch.empty_like(scores)))
        return found

    def _sums(self, strip: Strip, dim: int) -> Sums:
        """The sums of a strip's rows, or of its columns if ``dim`` is 0."""
        matrix, number = strip.negatives, self.count
        if isinstance(number, Tensor):
            number = of_strip(number, strip.rows)
        elif number is None:
            number = torch.gt(matrix, self._fill, out=torch.empty_like(matrix)).sum(dim)
        if self.direct and self.tilt == 0:
            return Sums(matrix.sum(dim), None, None, number)
        if self.direct:
            return Sums(torch.linalg.vector_norm(matrix, dim=dim).square_(), matrix.sum(dim), None, number)
        row_max = matrix.amax(dim, keepdim=True)
        row_max = row_max.masked_fill_(row_max == -math.inf, 0.0)
        shifted = matrix - row_max
        weight = (shifted * self.tilt).exp_().sum(dim).log_() if self.tilt > 0 else None  # 0 · −inf is NaN
        return Sums(shifted.mul_(self.tilt + 1).exp_().sum(dim).log_(), weight, row_max.squeeze(dim), number)

    def _label_sums(self, strip: Strip, sums: Sums) -> LabelSums:
        """The sums over the positives by label of a strip's anchors."""
        assert self.groups is not None
        assert strip.same is not None
        assert strip.scores is not None
        number, log_total = of_strip(self.groups.sizes, strip.rows) - 1, sums.log_total(self.form)  # (R,)
        if strip.positives is None and not self.form.decoupled:
            gap = log_total[:, None] - strip.scores
            terms = torch.linalg.vecdot(softplus(gap, threshold=EXACT_SOFTPLUS), strip.same)
            return LabelSums(number, log_total, terms=terms, slopes=torch.linalg.vecdot(gap.sigmoid_(), strip.same))
        exponentials, total = None, torch.linalg.vecdot(strip.scores, strip.same)
        if strip.positives is not None:
            exponentials = strip.positives.sum(1) if self.direct else strip.positives.logsumexp(1)
        return LabelSums(number, log_total, total, exponentials)


def of_strip(table: Tensor, rows: slice) -> Tensor:
    """The rows of a table, (R, …); the table itself if these are all, because indexing takes several microseconds."""
    return table if rows.stop - rows.start == table.shape[0] else table[rows]


Fields = TypeVar("Fields", Sums, LabelSums)


def placed(whole: Fields | None, part: Fields, rows: slice, size: int) -> Fields:
    """The sums of all anchors, (size,) each, with those of a strip written to their rows. whole: of earlier strips"""
    if rows.stop - rows.start == size:
        return part
    each: Any = zip([None] * len(part) if whole is None else whole, part, strict=True)
    fields: Any = (placed_rows(old, new, rows, size) if isinstance(new, Tensor) else new for old, new in each)
    return type(part)._make(fields)


def placed_rows(whole: Tensor | None, part: Tensor, rows: slice, size: int) -> Tensor:
    """The same for one tensor. Small tensors that stay between freed strips would fragment the memory."""
    if part.shape[0] == size:
        return part
    whole = part.new_empty(size) if whole is None else whole
    whole[rows] = part
    return whole


def joined(rows: Sums, columns: Sums) -> Sums:
    """The sums of the anchors of rows, then of those of columns."""
    fields: Any = zip(rows, columns, strict=True)
    return Sums._make(torch.cat(field) if isinstance(field[0], Tensor) else field[0] for field in fields)
