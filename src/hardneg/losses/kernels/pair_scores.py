"""Scores of a paired batch on a CPU: strips of the score matrix, masked, and sums over their rows and columns.

One of two forms is used for the scores s of negatives:

- *direct*: x = e^s itself, where no sum can overflow and β is 0 or 1; all derivatives are then polynomials in x
- *by logarithms*: the scores, with log-sums relative to the row maximum, for every other temperature and tilt
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

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
        smallest = 0.0
        for part in parts:
            if part.dtype == torch.float16:  # of other types it is far below the shortest safe length
                smallest = torch.finfo(torch.float16).tiny
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
    """Results of the forward pass.

    scores: (A,) of the pairs if each is the other's only positive ·
    log_total: (A,) log(Q·G), for positives by label · positives: their sums
    """

    losses: AnchorLosses
    sums: Sums
    scores: Tensor | None = None
    log_total: Tensor | None = None
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
        self.count: Tensor | float | None = float(eligibility.count_per_anchor)  # None: read from the scores
        if self.banded or eligibility.excluded is not None or eligibility.allowed is not None:
            self.count = None
        elif groups is not None and form.labels_exclude:
            self.count = vectors.shape[0] - groups.sizes
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
        fields: list[Tensor | None] = []  # of `Sums`, then of the positives: (A,) each
        columns: list[Tensor | None] = []
        kept, size = None, self.anchors.shape[0]
        for strip in self.strips():
            sums = self._sums(strip.negatives, 1)
            if self.crossed:
                columns = self._added(columns, self._sums(strip.negatives, 0))
            part = [*sums, *([strip.pairs] if self.own_positive else self._label_sums(strip, sums))]
            if strip.rows.stop - strip.rows.start == size:
                kept, fields = strip, part
            else:
                # Copied to one place: small tensors that stay between freed matrices would fragment the memory.
                fields = fields or [None if values is None else values.new_empty(size) for values in part]
                for whole, values in zip(fields, part, strict=True):
                    if whole is not None and values is not None:
                        whole[strip.rows] = values
        sums, more = fields[:4], fields[4:]
        found = _as_sums(_joined(sums, columns) if self.crossed else sums, self.count)
        if not self.own_positive:
            log_total, total, exponentials, terms, slopes = more
            assert log_total is not None
            assert self.groups is not None
            positives = LabelSums(self.groups.sizes - 1, total, exponentials, terms, slopes)
            losses = label_losses(found, positives, log_total, self.form)
            return Result(losses, found, log_total=log_total, positives=positives), kept
        scores = more[0]
        if scores is None:
            scores = torch.linalg.vecdot(self.anchors, self.unit.vectors[self.batch :]) * self.scale
        scores = scores.repeat(2) if self.crossed else scores
        return Result(own_positive_losses(found, scores, self.scale, self.form), found, scores), kept

    def _strip(self, rows: slice, buffer: Tensor) -> Strip:
        scores = of_strip(buffer, slice(0, rows.stop - rows.start))
        multiply(of_strip(self.anchors, rows), self.candidates, scores, 1.0 if self.banded else self.scale)
        if self.banded:  # see `reference.score_matrix`; without a band it would take up to a sixth more time
            scores.mul_(self.scale)
        diagonals = [diagonal for _, diagonal in self.pair_diagonals(rows, scores)]
        pairs = same = plain = positives = None
        if self.own_positive and diagonals:
            pairs = diagonals[0].clone() if len(diagonals) == 1 else torch.cat(diagonals)
        outside = self._outside(scores) if self.banded else []
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
        if self.own_positive:
            return Strip(rows, negatives, pairs)
        assert same is not None
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

    def _sums(self, matrix: Tensor, dim: int) -> list[Tensor | None]:
        """The fields of `Sums` for the rows of a strip's negatives, or for its columns if ``dim`` is 0."""
        count = None
        if self.count is None:
            count = torch.gt(matrix, self._fill, out=torch.empty_like(matrix)).sum(dim)
        if self.direct and self.tilt == 0:
            return [matrix.sum(dim), None, None, count]
        if self.direct:
            return [torch.linalg.vector_norm(matrix, dim=dim).square_(), matrix.sum(dim), None, count]
        row_max = matrix.amax(dim, keepdim=True)
        row_max = row_max.masked_fill_(row_max == -math.inf, 0.0)
        shifted = matrix - row_max
        weight = (shifted * self.tilt).exp_().sum(dim).log_() if self.tilt > 0 else None  # 0 · −inf is NaN
        return [shifted.mul_(self.tilt + 1).exp_().sum(dim).log_(), weight, row_max.squeeze(dim), count]

    def _added(self, total: list[Tensor | None], part: list[Tensor | None]) -> list[Tensor | None]:
        """Sums of columns over the strips so far and one more."""
        tilted, weight, row_max, count = part
        if tilted is not None and row_max is not None:  # β = 0, so that sums may be relative to 0
            tilted, row_max = tilted + row_max, torch.zeros_like(row_max)
        if not total:
            return [tilted, weight, row_max, count]
        add = torch.add if row_max is None else torch.logaddexp
        return [
            add(total[0], tilted),  # type: ignore[arg-type]
            None if weight is None else total[1] + weight,  # type: ignore[operator]
            row_max,
            None if count is None else total[3] + count,  # type: ignore[operator]
        ]

    def _label_sums(self, strip: Strip, sums: list[Tensor | None]) -> list[Tensor | None]:
        """log(Q·G) of a strip's anchors, and the fields of `LabelSums` after the count."""
        assert strip.scores is not None
        assert strip.same is not None
        count = self.count[strip.rows] if isinstance(self.count, Tensor) else self.count
        log_total = _as_sums(sums, count).log_total(self.form)  # (R,)
        if strip.positives is not None or self.form.decoupled:
            total = torch.linalg.vecdot(strip.scores, strip.same)
            if strip.positives is None:
                return [log_total, total, None, None, None]
            exponentials = strip.positives.sum(1) if self.direct else strip.positives.logsumexp(1)
            return [log_total, total, exponentials, None, None]
        gap = log_total[:, None] - strip.scores
        terms = torch.linalg.vecdot(softplus(gap, threshold=EXACT_SOFTPLUS), strip.same)
        return [log_total, None, None, terms, torch.linalg.vecdot(gap.sigmoid_(), strip.same)]


def of_strip(table: Tensor, rows: slice) -> Tensor:
    """The rows of a table, (R, …); the table itself if these are all, because indexing takes several microseconds."""
    return table if rows.stop - rows.start == table.shape[0] else table[rows]


def _as_sums(fields: list[Tensor | None], known: Tensor | float | None) -> Sums:
    """Sums with the counted or the known number of negatives."""
    tilted, weight, row_max, count = fields
    assert tilted is not None
    number = count if known is None else known
    assert number is not None
    return Sums(tilted, weight, row_max, number)


def _joined(one: list[Tensor | None], other: list[Tensor | None]) -> list[Tensor | None]:
    """Fields of rows, each followed by that of columns; None where there are none."""
    return [None if a is None or b is None else torch.cat([a, b]) for a, b in zip(one, other, strict=True)]
