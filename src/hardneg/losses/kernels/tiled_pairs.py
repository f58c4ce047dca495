"""The whole loss of a paired batch on a CPU, with its gradient by hand: small batches are bound by Python's overhead.

The score matrix is kept for the backward pass if it fits one strip; else its strips are computed again there. Where
each row is that of an anchor and so is each column (both views of a batch, or both directions between two towers),
W = ∂L/∂s has a term of the row and one of the column, and one product with W gives the gradient.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hardneg.losses.kernels.anchor_losses import LabelSums
from hardneg.losses.kernels.interface import Eligibility, LossForm, PairRecord, Rule, gradients, saveable
from hardneg.losses.kernels.pair_scores import Groups, PairScores, Strip, UnitVectors, of_strip
from hardneg.losses.kernels.saved_tensors import unchanged
from hardneg.matmul import multiply

MATRICES = len(Strip._fields) - 1  # of a strip


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
    watched: tuple[Tensor | None, ...] = (),
) -> tuple[Tensor, Callable[[], PairRecord]] | None:
    """The loss of pairs (B, d) against all others, of anchors z1 against negatives (N, d), or of labelled rows.

    z2: None if there is one view, with positives by label · eligibility: which candidates are eligible, apart from
    labels · form: of the losses · plain: the same loss of z1, z2, negatives and scale by PyTorch operations · labels:
    (B,), −1 = unknown · watched: further tensors that must not be overwritten before the backward pass

    None if a vector is zero, not finite, or extremely short or long, and for a single pair: the general path serves
    such cases, or raises.
    """
    dtype = scale.dtype
    unit = UnitVectors.of(dtype, z1) if z2 is None else UnitVectors.of(dtype, z1, z2)
    given = None if negatives is None else UnitVectors.of(dtype, negatives)
    if unit is None or (given is None and negatives is not None):
        return None
    groups = None if labels is None else Groups(labels, 1 if z2 is None else 2, dtype)
    make = partial(
        PairScores, batch=z1.shape[0], eligibility=eligibility, scale=scale.item(), rule=rule, form=form, groups=groups
    )
    scores = make(unit=unit, given=given)
    if (isinstance(scores.count, float) and scores.count == 0) or not scores.is_served:
        return None
    loss = _PairedLoss.apply(z1, z2, negatives, scale, scores, make, plain, watched)  # type: ignore[no-untyped-call]
    return loss, lambda: _record(scores)


class _PairedLoss(torch.autograd.Function):
    """Loss of a paired batch as one autograd function: (), or (A,) if not reduced.

    make: builds the `PairScores` of given unit vectors · plain: the same loss of z1, z2, negatives and scale by PyTorch
    operations, for second derivatives
    """

    @staticmethod
    def forward(
        ctx: Any,
        z1: Tensor,
        z2: Tensor | None,
        negatives: Tensor | None,
        scale: Tensor,
        scores: PairScores,
        make: Callable[..., PairScores],
        plain: Callable[..., Tensor],
        watched: tuple[Tensor | None, ...],
    ) -> Tensor:
        scores.result, strip = scores.compute()
        losses, reduction = scores.result.losses, scores.form.reduction
        # Attributes of ctx live as long as the loss, saved tensors until the backward pass: what is large is saved. Of
        # inputs the original tensors, so that autograd raises in the backward pass if one was overwritten.
        inputs, others = saveable(z1, z2, negatives, scale), saveable(*watched)
        given = scores.given or (None, None)
        matrices = [None] * MATRICES if strip is None else strip[1:]
        ctx.save_for_backward(*inputs, *scores.unit, *given, *matrices, *others)
        ctx.rows = None if strip is None else strip.rows
        ctx.make, ctx.result, ctx.plain, ctx.number = make, scores.result, plain, 1
        if reduction == "none":
            return losses.values.clone()  # a view could not be changed in place, as in total += other
        if reduction == "mean":
            if losses.valid is None:
                ctx.number = losses.values.shape[0]
                return losses.values.mean()
            ctx.number = losses.valid.sum().clamp(min=1)
        return losses.values.sum() / ctx.number  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z1, z2, negatives, scale, unit, lengths, given, given_lengths, *rest = unchanged(ctx)
        inputs = (z1, z2, negatives, scale)
        if torch.is_grad_enabled():  # create_graph=True
            return *gradients(ctx.plain, inputs, ctx.needs_input_grad[:4], grad), None, None, None, None
        other = None if given is None else UnitVectors(given, given_lengths)
        scores = ctx.make(unit=UnitVectors(unit, lengths), given=other)
        scores.result = ctx.result
        strip = None if ctx.rows is None else Strip(ctx.rows, *rest[:MATRICES])
        with torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext():
            return *_backward(ctx, grad, scores, strip, *inputs), None, None, None, None


def _backward(
    ctx: Any,
    grad: Tensor,
    scores: PairScores,
    strip: Strip | None,
    z1: Tensor,
    z2: Tensor | None,
    negatives: Tensor | None,
    scale: Tensor,
) -> tuple[Tensor | None, ...]:
    """Gradients in z1, z2, the negatives and the scale. strip: the only one, None if there are several"""
    batch = z1.shape[0]
    weight = grad * scores.scale / ctx.number
    by_unit, by_given = _unit_gradients(scores, strip, weight, ctx.needs_input_grad[2])
    by_vectors, along = scores.unit.backward(by_unit)  # (R, d), (R, 1)
    if z2 is None:
        d1, d2 = by_vectors.to(z1.dtype), None
    else:
        d1, d2 = by_vectors[:batch].to(z1.dtype), by_vectors[batch:].to(z2.dtype)
    d_negatives = None
    if by_given is not None and negatives is not None:
        assert scores.given is not None
        d_negatives = scores.given.backward(by_given)[0].to(negatives.dtype)
    d_scale = None
    if ctx.needs_input_grad[3]:
        # s = scale·⟨a, c⟩, so ∂L/∂scale = Σ W·⟨a, c⟩; in a square matrix each vector is both a and c.
        d_scale = along.sum() / 2 if scores.square else along[:batch].sum()
        by_floor = ctx.result.losses.by_floor
        if by_floor is not None:
            d_scale = d_scale - (by_floor * weight).sum()  # the floor of log G is −scale
        d_scale = d_scale / scale
    return d1, d2, d_negatives, d_scale


def _unit_gradients(
    scores: PairScores, kept: Strip | None, weight: Tensor, for_given: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients in the unit vectors of the views, and in those of the negatives if ``for_given``.

    kept: the only strip, None if there are several · weight: () or (A,), the gradient of each loss, times 1/temperature
    """
    unit, batch, anchors, candidates = scores.unit.vectors, scores.batch, scores.anchors, scores.candidates
    coefficients, found = _Coefficients(scores, weight), torch.empty_like(unit)
    by_rows = of_strip(found, slice(0, anchors.shape[0]))
    by_columns: Tensor | None = None
    if scores.given is None and not scores.square:
        by_columns = found[batch:]
    elif (scores.square and not scores.by_columns) or (scores.given is not None and for_given):
        by_columns = torch.empty_like(candidates)
    for strip in scores.strips() if kept is None else (kept,):
        matrix = coefficients.matrix(strip)  # (R, N)
        multiply(matrix, candidates.t(), of_strip(by_rows, strip.rows))
        if by_columns is not None:
            multiply(matrix.t(), of_strip(anchors, strip.rows).t(), by_columns, add=strip.rows.start > 0)
    if scores.given is not None:
        pair = coefficients.pair[:, None]
        torch.mul(pair, unit[:batch], out=found[batch:])
        by_rows.addcmul_(pair, unit[batch:])
        return found, by_columns
    return (found if by_columns is None or not scores.square else found.add_(by_columns)), None


class _Coefficients:
    """W = ∂L/∂s times 1/temperature, strip by strip.

    An entry has a term of the anchor of its row and, if ``scores.by_columns``, one of the anchor of its column.
    pair: (A,) of the only positive
    """

    def __init__(self, scores: PairScores, weight: Tensor) -> None:
        result = scores.result
        assert result is not None
        losses, tilt = result.losses, scores.tilt
        sums = result.sums if losses.valid is None else result.sums.nonzero()
        through = scores.rule.grad_through_weights and tilt > 0
        by_mean = losses.by_mean * weight
        # METHODS, gradient: (β+1)·softmax_{β+1} − β·softmax_β; with detached weights 1 and 0.
        tilted, weighted = (by_mean * (tilt + 1), by_mean * -tilt) if through else (by_mean, None)
        if scores.direct:
            tilted = tilted / sums.tilted
            weighted = None if weighted is None or sums.weight is None else weighted / sums.weight
        self._scores, self._sums, self._positives = scores, sums, result.positives
        self._tilted, self._weighted = tilted, weighted
        self._exponential = None if losses.by_exponential is None else losses.by_exponential * weight
        self.pair = -by_mean if losses.by_positive is None else losses.by_positive * weight
        self._pairs = self.pair
        if scores.own_positive and scores.by_columns:
            half = self.pair[: scores.batch] + self.pair[scores.batch :]
            self._pairs = torch.cat([half, half]) if scores.square else half

    def matrix(self, strip: Strip) -> Tensor:
        """W of a strip, (R, N)."""
        found = self._direct(strip) if self._scores.direct else self._by_logarithms(strip)
        if self._positives is not None:
            self._add_positives(strip, self._positives, found)
            return found
        for rows, diagonal in self._scores.pair_diagonals(strip.rows, found):
            diagonal.copy_(of_strip(self._pairs, rows))
        return found

    def _rows(self, strip: Strip, values: Tensor) -> Tensor:
        return of_strip(values, strip.rows).unsqueeze(1)  # (R, 1)

    def _columns(self, values: Tensor) -> Tensor:
        return values[self._scores.batch :] if self._scores.crossed else values  # (N,)

    def _sides(self, strip: Strip) -> list[Callable[[Tensor], Tensor]]:
        """Functions that broadcast values of anchors to (R, N): of the rows and, if they have terms, of the columns."""
        rows = partial(self._rows, strip)
        return [rows, self._columns] if self._scores.by_columns else [rows]

    def _sum(self, strip: Strip, values: Tensor) -> Tensor:
        """The values of the anchors of rows and columns, added, (R, N); (R, 1) if columns have no terms."""
        rows = self._rows(strip, values)
        return rows + self._columns(values) if self._scores.by_columns else rows

    def _direct(self, strip: Strip) -> Tensor:
        tilted = self._sum(strip, self._tilted)
        found = tilted.mul_(strip.negatives) if self._scores.by_columns else strip.negatives * tilted
        if self._weighted is not None:
            for of in self._sides(strip):
                found.add_(of(self._weighted))
        return found if self._scores.tilt == 0 else found.mul_(strip.negatives)  # x, or x²

    def _by_logarithms(self, strip: Strip) -> Tensor:
        found, *columns = (self._softmaxes(strip, of) for of in self._sides(strip))
        return found.add_(columns[0]) if columns else found

    def _softmaxes(self, strip: Strip, of: Callable[[Tensor], Tensor]) -> Tensor:
        """The two terms of the anchors of rows, or of columns. of: their values, broadcast to (R, N)."""
        tilt, sums = self._scores.tilt, self._sums
        assert sums.row_max is not None
        shifted = strip.negatives - of(sums.row_max)
        weight = None
        if self._weighted is not None and sums.weight is not None:
            weight = (shifted * tilt).sub_(of(sums.weight)).exp_().mul_(of(self._weighted))
        found = shifted.mul_(tilt + 1).sub_(of(sums.tilted)).exp_().mul_(of(self._tilted))
        return found if weight is None else found.add_(weight)

    def _add_positives(self, strip: Strip, positives: LabelSums, found: Tensor) -> None:
        """Add the terms of positives by label to ``found`` (R, N)."""
        assert strip.same is not None
        assert strip.scores is not None
        if positives.slopes is not None:
            for of in self._sides(strip):
                slope = (of(positives.log_total) - strip.scores).sigmoid_().mul_(of(self.pair))
                found.addcmul_(strip.same, slope)
            return
        found.addcmul_(strip.same, self._sum(strip, self.pair))
        if strip.positives is None or self._exponential is None:
            return
        if self._scores.direct:
            found.addcmul_(strip.positives, self._sum(strip, self._exponential))
            return
        assert positives.exponentials is not None
        logs = positives.exponentials.clamp(min=torch.finfo(found.dtype).min)  # finite without positives, too
        for of in self._sides(strip):
            found.addcmul_((strip.positives - of(logs)).exp_(), of(self._exponential))


def _record(scores: PairScores) -> PairRecord:
    """What the diagnostics of the call need."""
    result = scores.result
    assert result is not None
    eligibility, losses, unit = scores.eligibility, result.losses, scores.unit.vectors
    anchors = unit if scores.crossed or scores.square else scores.anchors
    groups = None if scores.groups is None else scores.groups.numbers
    if groups is not None and scores.form.labels_exclude:
        eligibility = replace(eligibility, anchor_groups=groups, candidate_groups=groups)
    count, floored = result.sums.number, losses.floored
    return PairRecord(
        eligibility=eligibility,
        rule=scores.rule,
        anchors=anchors,
        candidates=unit if scores.crossed else scores.candidates,
        similarity=None if result.scores is None else result.scores[: scores.batch] / scores.scale,
        floored=torch.zeros_like(losses.values) if floored is None else floored,
        count=count if isinstance(count, Tensor) else torch.full_like(losses.values, count),
        groups=None if scores.own_positive else groups,
        positive_count=None if result.positives is None else result.positives.number,
    )
