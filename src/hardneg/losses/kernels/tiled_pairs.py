"""The whole loss of a paired batch on a CPU, with its gradient by hand: small batches are bound by Python's overhead.

The score matrix is kept for the backward pass if it fits one strip; else its strips are computed again there. Where
each row is that of an anchor and so is each column (both views of a batch, or both directions between two towers),
W = ∂L/∂s has a term of the row and one of the column, and one product with W gives the gradient.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hardneg.losses.kernels.interface import (
    Eligibility,
    LossForm,
    PairRecord,
    RowLayout,
    Rule,
    gradients,
    safe_lengths,
    saveable,
)
from hardneg.losses.kernels.pair_scores import Groups, PairScores, Result, Strip, of_strip


def pair_loss(
    z1: Tensor,
    z2: Tensor | None,
    negatives: Tensor | None,
    eligibility: Eligibility,
    scale: Tensor,
    rule: Rule,
    form: LossForm,
    plain: Callable[..., Tensor],
    labels: Tensor | None = None,
) -> tuple[Tensor, Callable[[], PairRecord]] | None:
    """The loss of pairs (B, d) against all others, of anchors z1 against negatives (N, d), or of labelled rows.

    z2: None if there is one view, with positives by label · eligibility: which candidates are eligible, apart from
    labels · form: of the losses · plain: the same loss of z1, z2, negatives and scale by PyTorch operations · labels:
    (B,), −1 = unknown

    None if a vector is zero, not finite, or extremely short or long, and for a single pair: the general path serves
    such cases, or raises.
    """
    if eligibility.count_per_anchor == 0:
        return None
    unit = _unit_vectors(scale.dtype, z1) if z2 is None else _unit_vectors(scale.dtype, z1, z2)
    given = None if negatives is None else _unit_vectors(scale.dtype, negatives)
    if unit is None or (given is None and negatives is not None):
        return None
    groups = None if labels is None else Groups(labels, 1 if z2 is None else 2, scale.dtype)
    scores = PairScores(
        unit.vectors,
        z1.shape[0],
        None if given is None else given.vectors,
        eligibility,
        scale.item(),
        rule,
        form,
        groups,
    )
    if scores.crossed and scores.tilt > 0 and not scores.direct:
        return None  # log-sums of columns, relative to a maximum that changes from strip to strip
    seen: list[Result] = []
    loss = _PairedLoss.apply(z1, z2, negatives, scale, unit, given, scores, plain, seen)  # type: ignore[no-untyped-call]
    return loss, lambda: _record(scores, seen[0])


class _Units(NamedTuple):
    """Unit vectors (R, d) and the lengths (R, 1) they had."""

    vectors: Tensor
    lengths: Tensor

    def backward(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient in the vectors that were divided, and ⟨unit vector, grad⟩, (R, 1). Overwrites ``grad``."""
        along = torch.linalg.vecdot(self.vectors, grad).unsqueeze(1)
        return grad.addcmul_(self.vectors, along, value=-1).div_(self.lengths), along


def _unit_vectors(dtype: torch.dtype, *parts: Tensor) -> _Units | None:
    """Unit vectors of the rows of all parts; None if dividing by a length would not be safe."""
    smallest = max([torch.finfo(part.dtype).tiny for part in parts])
    rows = [part.detach().to(dtype) for part in parts]
    vectors = rows[0] if len(rows) == 1 else torch.cat(rows)  # (R, d)
    lengths = safe_lengths(vectors, smallest)
    return None if lengths is None else _Units(vectors / lengths, lengths)


class _PairedLoss(torch.autograd.Function):
    """Loss of a paired batch as one autograd function: (), or (A,) if not reduced.

    unit, given: unit vectors of z1 and z2, and of the negatives · plain: the same loss of z1, z2, negatives and scale
    by PyTorch operations, for second derivatives · seen: a list that receives the result, for diagnostics
    """

    @staticmethod
    def forward(
        ctx: Any,
        z1: Tensor,
        z2: Tensor | None,
        negatives: Tensor | None,
        scale: Tensor,
        unit: _Units,
        given: _Units | None,
        scores: PairScores,
        plain: Callable[..., Tensor],
        seen: list[Result],
    ) -> Tensor:
        result, strip = scores.compute()
        values, valid, reduction = result.losses.values, result.losses.valid, scores.form.reduction
        # The original tensors: autograd then raises in the backward pass if one was overwritten.
        watched = (z1, z2, negatives, scale, scores.eligibility.excluded, scores.eligibility.allowed)
        ctx.save_for_backward(*saveable(*watched))
        ctx.unit, ctx.given, ctx.scores, ctx.plain, ctx.result = unit, given, scores, plain, result
        ctx.strip = strip
        seen.append(result)
        if reduction == "none":
            return values.clone()  # a view could not be changed in place, as in total += other
        total: Tensor = values.sum()
        if reduction == "sum":
            return total
        number = values.shape[0] if valid is None else valid.sum().clamp(min=1)
        ctx.number = number
        return total / number

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z1, z2, negatives, scale, *_watched = ctx.saved_tensors
        needed = ctx.needs_input_grad[:4]
        rest = (None,) * 5
        if torch.is_grad_enabled():  # create_graph=True
            return *gradients(ctx.plain, (z1, z2, negatives, scale), needed, grad), *rest
        if torch.is_autocast_enabled("cpu"):
            with torch.autocast("cpu", enabled=False):
                return *_backward(ctx, grad, z1, z2, negatives, needed), *rest
        return *_backward(ctx, grad, z1, z2, negatives, needed), *rest


def _backward(
    ctx: Any, grad: Tensor, z1: Tensor, z2: Tensor | None, negatives: Tensor | None, needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Gradients in z1, z2, the negatives and the scale, where ``needed``."""
    scores, result, batch = ctx.scores, ctx.result, z1.shape[0]
    weight = grad * scores.scale
    if scores.form.reduction == "mean":
        weight = weight / ctx.number
    by_unit, by_given = _unit_gradients(scores, result, ctx.strip, weight, needed[2])
    by_vectors, along = ctx.unit.backward(by_unit)  # (R, d), (R, 1)
    d1 = by_vectors[:batch].to(z1.dtype)
    d2 = None if z2 is None else by_vectors[batch:].to(z2.dtype)
    d_negatives = None
    if by_given is not None and negatives is not None:
        d_negatives = ctx.given.backward(by_given)[0].to(negatives.dtype)
    d_scale = None
    if needed[3]:
        # s = scale·⟨a, c⟩, so ∂L/∂scale = Σ W·⟨a, c⟩; in a square matrix each vector is both a and c.
        d_scale = along.sum() / 2 if scores.square else along[:batch].sum()
        if result.losses.by_floor is not None:
            d_scale = d_scale - (result.losses.by_floor * weight).sum()  # the floor of log G is −scale
        d_scale = d_scale / scores.scale
    return d1, d2, d_negatives, d_scale


def _unit_gradients(
    scores: PairScores, result: Result, kept: Strip | None, weight: Tensor, for_given: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients in the unit vectors of the views, and in those of the negatives if ``for_given``.

    kept: the only strip, None if there are several · weight: () or (A,), the gradient of each loss, times 1/temperature
    """
    unit, batch = scores.unit, scores.batch
    coefficients = _Coefficients(scores, result, weight)
    found, for_negatives = torch.zeros_like(unit), None
    by_rows, by_columns = (found, None) if scores.square else (found[:batch], found[batch:])
    if scores.given is not None:
        pair = coefficients.pair[:, None]
        found[:batch], found[batch:] = pair * unit[batch:], pair * unit[:batch]
        by_columns = for_negatives = torch.zeros_like(scores.given) if for_given else None
    elif scores.square and not scores.by_columns:
        by_columns = found
    for strip in scores.strips() if kept is None else (kept,):
        matrix = coefficients.matrix(strip)  # (R, N)
        of_strip(by_rows, strip.rows).addmm_(matrix, scores.candidates)
        if by_columns is not None:
            by_columns.addmm_(matrix.t(), of_strip(scores.anchors, strip.rows))
    return found, for_negatives


class _Coefficients:
    """W = ∂L/∂s times 1/temperature, strip by strip.

    An entry has a term of the anchor of its row and, if ``scores.by_columns``, one of the anchor of its column.
    pair: (A,) of the only positive
    """

    def __init__(self, scores: PairScores, result: Result, weight: Tensor) -> None:
        self._scores, self._result = scores, result
        losses, sums, tilt = result.losses, result.sums, scores.tilt
        through = scores.rule.grad_through_weights and tilt > 0
        by_mean = losses.by_mean * weight
        # METHODS, gradient: (β+1)·softmax_{β+1} − β·softmax_β; with detached weights 1 and 0.
        tilted, weighted = (by_mean * (tilt + 1), by_mean * -tilt) if through else (by_mean, None)
        self._log_tilted, self._log_weight, self._log_positives = sums.tilted, sums.weight, None
        positives = None if result.positives is None else result.positives.exponentials
        if scores.direct:
            # An anchor without negatives has coefficients 0 and sums 0.
            tilted = tilted / (sums.tilted if losses.valid is None else sums.tilted.masked_fill(sums.tilted == 0, 1.0))
            if weighted is not None and sums.weight is not None:
                weighted = weighted / (
                    sums.weight if losses.valid is None else sums.weight.masked_fill(sums.weight == 0, 1.0)
                )
        elif losses.valid is not None:
            empty = sums.tilted == -math.inf
            self._log_tilted = sums.tilted.masked_fill(empty, 0.0)
            self._log_weight = None if sums.weight is None else sums.weight.masked_fill(empty, 0.0)
            self._log_positives = None if positives is None else positives.masked_fill(positives == -math.inf, 0.0)
        self._tilted, self._weighted = tilted, weighted
        self._exponential = None if losses.by_exponential is None else losses.by_exponential * weight
        self.pair = losses.by_positive * weight
        self._pairs = self.pair
        if scores.own_positive and scores.by_columns:
            half = self.pair[: scores.batch] + self.pair[scores.batch :]
            self._pairs = half.repeat(2) if scores.square else half

    def matrix(self, strip: Strip) -> Tensor:
        """W of a strip, (R, N)."""
        found = self._direct(strip) if self._scores.direct else self._by_logarithms(strip)
        if self._scores.own_positive:
            for rows, diagonal in self._scores.pair_diagonals(strip.rows, found):
                diagonal.copy_(self._pairs[rows])
        else:
            self._add_positives(strip, found)
        return found

    def _rows(self, strip: Strip, values: Tensor) -> Tensor:
        return of_strip(values, strip.rows).unsqueeze(1)  # (R, 1)

    def _columns(self, values: Tensor) -> Tensor:
        return values[self._scores.batch :] if self._scores.crossed else values  # (N,)

    def _sum(self, strip: Strip, values: Tensor) -> Tensor:
        """The values of the anchors of rows and columns, added, (R, N); (R, 1) if columns have no terms."""
        rows = self._rows(strip, values)
        return rows + self._columns(values) if self._scores.by_columns else rows

    def _direct(self, strip: Strip) -> Tensor:
        if self._scores.by_columns:
            found = self._sum(strip, self._tilted).mul_(strip.negatives)
        else:
            found = strip.negatives * self._rows(strip, self._tilted)
        if self._weighted is not None:
            found.add_(self._rows(strip, self._weighted))
            if self._scores.by_columns:
                found.add_(self._columns(self._weighted))
        return found if self._scores.tilt == 0 else found.mul_(strip.negatives)  # x, or x²

    def _by_logarithms(self, strip: Strip) -> Tensor:
        found = self._softmaxes(strip, lambda values: self._rows(strip, values))
        return found.add_(self._softmaxes(strip, self._columns)) if self._scores.by_columns else found

    def _softmaxes(self, strip: Strip, of: Callable[[Tensor], Tensor]) -> Tensor:
        """The two terms of the anchors of rows, or of columns. of: their values, broadcast to (R, N)."""
        tilt, row_max = self._scores.tilt, self._result.sums.row_max
        assert row_max is not None
        shifted = strip.negatives - of(row_max)
        weight = None
        if self._weighted is not None and self._log_weight is not None:
            weight = (shifted * tilt).sub_(of(self._log_weight)).exp_().mul_(of(self._weighted))
        found = shifted.mul_(tilt + 1).sub_(of(self._log_tilted)).exp_().mul_(of(self._tilted))
        return found if weight is None else found.add_(weight)

    def _add_positives(self, strip: Strip, found: Tensor) -> None:
        """Add the terms of positives by label to ``found`` (R, N)."""
        by_columns = self._scores.by_columns
        assert strip.same is not None
        if self._exponential is not None or self._scores.form.decoupled:
            found.addcmul_(strip.same, self._sum(strip, self.pair))
            if self._exponential is None or strip.positives is None:
                return
            if self._scores.direct:
                found.addcmul_(strip.positives, self._sum(strip, self._exponential))
                return
            assert self._log_positives is not None
            for of in (lambda values: self._rows(strip, values), self._columns)[: 1 + by_columns]:
                found.addcmul_((strip.positives - of(self._log_positives)).exp_(), of(self._exponential))
            return
        assert strip.scores is not None
        assert self._result.log_total is not None
        for of in (lambda values: self._rows(strip, values), self._columns)[: 1 + by_columns]:
            slope = (of(self._result.log_total) - strip.scores).sigmoid_().mul_(of(self.pair))
            found.addcmul_(strip.same, slope)


def _record(scores: PairScores, result: Result) -> PairRecord:
    """What the diagnostics of the call need."""
    eligibility, losses, batch, unit = scores.eligibility, result.losses, scores.batch, scores.unit
    anchors = unit if scores.crossed or scores.square else scores.anchors
    groups = None if scores.groups is None else scores.groups.numbers
    if groups is not None and scores.form.labels_exclude:
        eligibility = replace(eligibility, anchor_groups=groups, candidate_groups=groups)
    count, floored = result.sums.number, losses.floored
    return PairRecord(
        eligibility=eligibility,
        rule=scores.rule,
        layout=eligibility.own or RowLayout(batch, 1, 0, batch, unit.device),
        anchors=anchors,
        candidates=unit if scores.crossed else scores.candidates,
        similarity=None if result.scores is None else result.scores[:batch] / scores.scale,
        losses=losses.values,
        floored=torch.zeros_like(losses.values) if floored is None else floored,
        count=count if isinstance(count, Tensor) else torch.full_like(losses.values, count),
        groups=None if scores.own_positive else groups,
        positive_count=None if result.positives is None else result.positives.number,
    )
