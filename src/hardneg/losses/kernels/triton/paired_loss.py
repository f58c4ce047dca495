"""The whole loss of a batch in a few launches, because small batches are bound by the host.

It covers the most common cases: NT-Xent, DCL and HCL over both views of the batch, between two towers in one direction
or in both, over a queue or bank, and with labels, with bands, schedules and a learnable temperature. Everything else
goes through `hardneg.losses.candidates` and the separate functions of the kernel.
"""

# Arguments of Triton kernels have no types that mypy knows.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hardneg import distributed
from hardneg.losses.kernels import interface
from hardneg.losses.kernels.interface import Eligibility, Gathering, LossForm, RowLayout, Rule
from hardneg.losses.kernels.saved_tensors import unchanged
from hardneg.losses.kernels.triton import normalize, passes, percentile_bands
from hardneg.losses.kernels.triton.anchor_losses import (
    FormNumbers,
    Kept,
    finish_by,
    finish_labels,
    finish_pairs,
    finish_totals,
    slot_arguments,
)
from hardneg.losses.kernels.triton.backward import Coefficients
from hardneg.losses.kernels.triton.passes import BlockPass, Problem


class Given(NamedTuple):
    """The tensors of a call: z1, z2: (B, d) · negatives: (N, d) · scale: () · labels: (A,), for positives by label."""

    z1: Tensor
    z2: Tensor | None
    negatives: Tensor | None
    scale: Tensor
    labels: Tensor | None


@dataclass(frozen=True)
class Call:
    """What is computed. smallest: see `normalize.UnitVectors` · by_label: see `Problem`; else groups were numbered

    Candidates are both views of all other instances, or only the other view (A = 2B); for anchors z1 alone (A = B) all
    z2 except their own, or negatives.
    """

    eligibility: Eligibility
    rule: Rule
    form: LossForm
    smallest: float
    by_label: bool = True
    gathering: Gathering | None = None  # candidates are both views of all processes

    @property
    def precision(self) -> torch.dtype | None:
        return self.rule.half_copies.precision

    def problem(self, given: Given) -> Problem:
        """The sums over the negatives; for SupCon over all rows but the own one."""
        eligibility, own = self.eligibility, self.eligibility.own
        if self.joint(given) and own is not None:
            rows = own.batch * own.views
            eligibility = Eligibility(rows, own=RowLayout(rows, 1, 0, rows, own.device), pool_views=1)
        return Problem(eligibility, self.rule, by_label=self.by_label)

    def joint(self, given: Given) -> bool:
        """Whether positives and negatives are summed together."""
        return given.labels is not None and self.form.positives == "in_denominator"

    def positives(self, given: Given, level: Tensor) -> Problem:
        """The sums over the positives, found by label."""
        batch, labels = given.z1.shape[0], given.labels
        rows = batch if given.z2 is None else 2 * batch
        layout = RowLayout(batch, rows // batch, 0, batch, given.z1.device)
        same = Eligibility(rows, own=layout, anchor_groups=labels, candidate_groups=labels, same_group=True)
        return Problem(same, Rule(half_copies=self.rule.half_copies), level=level, by_label=True)

    def towers(self, given: Given) -> bool:
        """Whether anchors z1 are compared with candidates z2."""
        return given.negatives is None and given.z2 is not None and self.eligibility.columns == given.z1.shape[0]

    def split(self, given: Given, rows: Tensor, negatives: Tensor) -> tuple[Tensor, Tensor, bool]:
        """Anchors and candidates, from the unit vectors of views and of negatives; and whether they are the same."""
        batch = given.z1.shape[0]
        if self.gathering is not None:
            return rows, negatives, False
        if given.negatives is not None:
            return rows[:batch], negatives, False
        return (rows[:batch], rows[batch:], False) if self.towers(given) else (rows, rows, True)


class Saved(NamedTuple):
    """The tensors that the backward pass needs; empty where not used.

    units: of the views · negatives: their unit vectors · similarity: of the pairs · valid: number of valid anchors ·
    memory: (9, A), see `Kept` · positives: (A, 2) coefficients · level: (A,) · low, first, high, last: of `Edges`
    """

    units: Tensor
    negatives: Tensor
    similarity: Tensor
    valid: Tensor
    memory: Tensor
    positives: Tensor
    level: Tensor
    low: Tensor
    first: Tensor
    high: Tensor
    last: Tensor


def forward_pass(call: Call, given: Given) -> tuple[Tensor, Saved]:
    """The loss, () or (A,) if not reduced."""
    z1, z2 = normalize.row_contiguous(given.z1), None if given.z2 is None else normalize.row_contiguous(given.z2)
    form, dtype = call.form, call.precision or torch.float32
    if call.gathering is not None and form.reduction == "mean":
        form = replace(form, reduction="sum")
    units, similarity = normalize.normalized(z1, z2, call.smallest, call.precision, dtype, "z1 or z2")
    empty = units.new_empty(0, dtype=torch.float32)
    negatives, not_finite = empty, None
    if given.negatives is not None:
        rows = normalize.row_contiguous(given.negatives)
        negatives, not_finite = normalize.normalized(rows, None, call.smallest, call.precision, dtype, "negatives")
    if call.gathering is not None:
        negatives = call.gathering.candidates(units)
    anchors, candidates, same = call.split(given, units, negatives)
    problem, joint = passes.with_counts(call.problem(given)), call.joint(given)
    block_pass = BlockPass(problem, given.scale, anchors, candidates, self_block=same)
    slots, edges = passes.compute_sums([block_pass])
    memory = units.new_empty(9, anchors.shape[0], dtype=torch.float32)
    positives, level, kept = empty, empty, Kept.of(memory)
    if given.labels is None:
        numbers = FormNumbers(form.log_number or 0.0, *(form.prior or (0.0, 0.0)))
        arguments = slot_arguments(problem, slots, block_pass.numbers) | {
            "form": numbers, "similarity": similarity, "batch": z1.shape[0], "SUPPORT": form.log_number is None,
            "DEBIASED": form.prior is not None, "DECOUPLED": form.decoupled,
            "labels_": problem.eligibility.anchor_groups, "LABELLED": problem.eligibility.anchor_groups is not None,
        }  # fmt: skip
        result, valid = finish_by(finish_pairs, kept, form, problem, arguments)
    else:
        totals = finish_totals(
            problem, slots, block_pass.numbers, 1 if form.log_number is None else 2, form.log_number or 0.0
        )
        level, positives = totals.weight, units.new_empty(anchors.shape[0], 2, dtype=torch.float32)
        by_label = BlockPass(call.positives(given, level), given.scale, anchors, anchors, self_block=True)
        found, _ = passes.compute_sums([by_label])
        arguments = {
            "slots": found, "totals": totals, "numbers": block_pass.numbers, "similarity": similarity,
            "labels_": given.labels, "batch": z1.shape[0], "positives": positives,
            "number": found.tilted.shape[0], "DECOUPLED": joint or form.decoupled, "JOINT": joint,
        }  # fmt: skip
        result, valid = finish_by(finish_labels, kept, form, problem, arguments)
    if not_finite is not None:
        result = result + not_finite.sum()
    if call.gathering is not None and form.reduction != "none":
        result, valid = distributed.total(torch.stack([result, valid]), call.gathering.group).unbind()
        result = result / valid.clamp(min=1) if call.form.reduction == "mean" else result.clone()
    found_edges = (empty,) * 4 if edges is None else edges
    return result, Saved(units, negatives, similarity, valid, memory, positives, level, *found_edges)


def backward_pass(
    call: Call, given: Given, saved: Saved, grad: Tensor, needed: Sequence[bool]
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of z1, z2, negatives and scale; those of views always. needed: which of them are wanted."""
    z1, z2 = normalize.row_contiguous(given.z1), None if given.z2 is None else normalize.row_contiguous(given.z2)
    anchors, candidates, same = call.split(given, saved.units, saved.negatives)
    problem, form, kept, scale = call.problem(given), call.form, Kept.of(saved.memory), given.scale
    mean, reduced, towers = form.reduction == "mean", form.reduction != "none", call.towers(given)
    _, for_z2, for_negatives, for_scale = needed
    # All gradients are linear in that of the loss: a single number is multiplied last, without a separate launch.
    gradient_scale = normalize.GradientScale(grad, saved.valid if mean else None) if reduced else None
    by_anchor = 1.0 if reduced else grad
    values = kept.coefficients if reduced else kept.coefficients * grad[:, None]
    factor = None
    if anchors.dtype == torch.float16:  # a sum of two is below float16's limit, 2¹⁶
        factor = 2.0**13 / (kept.bound * by_anchor).abs().amax().clamp(min=1e-30)
    coefficients = Coefficients(values.view(torch.int64), None if problem.bounded else kept.row_max, factor)
    block_pass = BlockPass(problem, scale, anchors, candidates, self_block=same)
    edges = None
    if problem.rule.rings:
        edges = percentile_bands.Edges(saved.low, saved.first, saved.high, saved.last)
    for_candidates = for_negatives or (towers and for_z2) or call.gathering is not None
    d_rows, (d_candidates,), d_scale = passes.compute_gradients(
        [block_pass], edges, coefficients, for_scale, True, [for_candidates]
    )
    assert d_rows is not None
    for_similarity = None
    if given.labels is None:
        for_similarity = kept.positive if reduced else kept.positive * grad
    else:
        by_label = BlockPass(call.positives(given, saved.level), scale, anchors, anchors, self_block=True)
        values = saved.positives if reduced else saved.positives * grad[:, None]
        by_positives = Coefficients(values.view(torch.int64), saved.level, factor)
        part, _, share = by_label.gradients(by_positives, for_scale, False)
        d_rows += part
        d_scale = None if share is None or d_scale is None else d_scale + share
    if call.gathering is not None and d_candidates is not None:
        if reduced:  # so that DDP's average over processes is exact; see `distributed.total_loss`
            by_process = grad * distributed.world_size(call.gathering.group)
            by_process = by_process / saved.valid.clamp(min=1) if mean else by_process
            d_rows, d_candidates = d_rows * by_process, d_candidates * by_process
            for_similarity = None if for_similarity is None else for_similarity * by_process
        d_rows, gradient_scale = d_rows + call.gathering.own_gradient(d_candidates), None
    back = partial(
        normalize.normalized_backward,
        smallest=call.smallest,
        precision=call.precision,
        gradient_scale=gradient_scale,
    )
    d1, d2 = back(z1, z2, d_rows, for_similarity, second=d_candidates if towers else None)
    d_negatives = None
    if d_candidates is not None and given.negatives is not None:
        d_negatives, _ = back(normalize.row_contiguous(given.negatives), None, d_candidates, None)
    if d_scale is not None:
        if given.labels is None:
            d_scale = d_scale + (kept.scale * by_anchor).sum()
        if reduced:
            d_scale = d_scale * (grad / saved.valid.clamp(min=1) if mean else grad)
            d_scale = d_scale if call.gathering is None else d_scale * distributed.world_size(call.gathering.group)
    return d1, d2, d_negatives, d_scale


class PairedLoss(torch.autograd.Function):
    """Loss of a batch as one autograd function: (), or (A,) if not reduced.

    plain: the same loss of z1, z2, negatives and scale by PyTorch operations, for second derivatives · watched: further
    tensors that must not be overwritten before the backward pass · seen: a list that receives the saved tensors, for
    diagnostics
    """

    @staticmethod
    def forward(
        ctx: Any,
        z1: Tensor,
        z2: Tensor | None,
        negatives: Tensor | None,
        scale: Tensor,
        labels: Tensor | None,
        call: Call,
        plain: Callable[..., Tensor],
        watched: tuple[Tensor | None, ...],
        seen: list[Saved],
    ) -> Tensor:
        given = Given(z1, z2, negatives, scale, labels)
        result, saved = forward_pass(call, given)
        # The original tensors: autograd then raises in the backward pass if one was overwritten.
        ctx.save_for_backward(*interface.saveable(*given), *saved, *interface.saveable(*watched))
        ctx.call, ctx.plain = call, plain
        seen.append(saved)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors = unchanged(ctx)
        given, needed = Given(*tensors[:5]), ctx.needs_input_grad[:4]
        if torch.is_grad_enabled():  # create_graph=True
            return *interface.gradients(ctx.plain, given[:4], needed, grad), None, None, None, None, None
        found = backward_pass(ctx.call, given, Saved(*tensors[5 : 5 + len(Saved._fields)]), grad, needed)
        return *found, None, None, None, None, None
