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
from hardneg.losses.kernels.interface import Eligibility, Gathering, LossForm, PairRecord, RowLayout, Rule
from hardneg.losses.kernels.saved_tensors import unchanged
from hardneg.losses.kernels.triton import normalize, passes
from hardneg.losses.kernels.triton.anchor_losses import (
    BOUND,
    COEFFICIENTS,
    COUNTS,
    FLOORED,
    POSITIVE,
    POSITIVES,
    ROW_MAX,
    ROWS,
    SCALE,
    FormNumbers,
    finish_by,
    finish_labels,
    finish_pairs,
    finish_totals,
    kept_pairs,
    kept_row,
    slot_arguments,
)
from hardneg.losses.kernels.triton.backward import Coefficients
from hardneg.losses.kernels.triton.launch import compile_together
from hardneg.losses.kernels.triton.passes import BlockPass
from hardneg.losses.kernels.triton.problem import Problem, number_groups, numbered_labels


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

    @property
    def joint(self) -> bool:
        """Whether positives and negatives are summed together."""
        return self.form.positives == "in_denominator"

    def normalized(self, z1: Tensor, z2: Tensor | None, names: str) -> tuple[Tensor, Tensor]:
        """Unit vectors in the precision of the products, and inner products of pairs; see `normalize.UnitVectors`."""
        dtype = self.precision or torch.float32
        return normalize.normalized(z1, z2, self.smallest, self.precision, dtype, names)

    def over_negatives(self, given: Given, units: Tensor, negatives: Tensor) -> BlockPass:
        """The pass over the negatives; for SupCon over all rows but the own one.

        units: of the views · negatives: unit vectors of the negatives, or of all processes; empty without any
        """
        eligibility, batch = self.eligibility, given.z1.shape[0]
        rows = batch if eligibility.own is None else batch * eligibility.own.views
        if self.joint:
            eligibility = Eligibility(rows, own=RowLayout(rows, 1, 0, rows, units.device), pool_views=1)
        problem = Problem(eligibility, self.rule, by_label=self.by_label)
        if negatives.numel() > 0:
            return BlockPass(problem, given.scale, units[:rows], negatives)
        if rows < units.shape[0]:  # two towers
            return BlockPass(problem, given.scale, units[:rows], units[rows:])
        return BlockPass(problem, given.scale, units, units, self_block=True)

    def over_positives(self, given: Given, units: Tensor, level: Tensor) -> BlockPass:
        """The pass over the positives, found by label."""
        batch, rows = given.z1.shape[0], units.shape[0]
        layout = RowLayout(batch, rows // batch, 0, batch, units.device)
        same = Eligibility(rows, own=layout, anchor_groups=given.labels, candidate_groups=given.labels, same_group=True)
        problem = Problem(same, Rule(half_copies=self.rule.half_copies), level=level, by_label=True)
        return BlockPass(problem, given.scale, units, units, self_block=True)


class Saved(NamedTuple):
    """The tensors that the backward pass needs; empty where not used.

    units: of the views · negatives: their unit vectors · similarity: of the pairs · valid: number of valid anchors ·
    memory: (11, A), see `anchor_losses` · level: (A,) · edges: (4, A), see `percentile_bands.Edges`
    """

    units: Tensor
    negatives: Tensor
    similarity: Tensor
    valid: Tensor
    memory: Tensor
    level: Tensor
    edges: Tensor


def make_call(
    eligibility: Eligibility,
    rule: Rule,
    form: LossForm,
    z1: Tensor,
    z2: Tensor | None,
    negatives: Tensor | None,
    scale: Tensor,
    labels: Tensor | None,
    gathering: Gathering | None = None,
) -> tuple[Call, Given]:
    """What `PairedLoss` computes, and from which tensors. labels: (B,), of the instances"""
    groups, by_label, numbered = None, None, False
    if labels is not None:
        by_label = groups = labels if eligibility.own is None else torch.cat([labels] * eligibility.own.views)  # (A,)
        if numbered := groups.shape[0] >= passes.MIN_SYMMETRIC_ROWS:
            by_label, groups = numbered_labels(groups, labels.shape[0])
    if form.labels_exclude:
        eligibility = replace(eligibility, anchor_groups=groups, candidate_groups=groups)
    tensors = [tensor for tensor in (z1, z2, negatives) if tensor is not None]
    smallest = max(1e-30, *(torch.finfo(tensor.dtype).tiny for tensor in tensors))
    given = Given(z1, z2, negatives, scale, None if form.positives == "own" else by_label)
    return Call(eligibility, rule, form, smallest, not numbered, gathering), given


def forward_pass(call: Call, given: Given) -> tuple[Tensor, Saved]:
    """The loss, () or (A,) if not reduced."""
    form, gathering = call.form, call.gathering
    if gathering is not None and form.reduction == "mean":
        form = replace(form, reduction="sum")
    units, similarity = call.normalized(given.z1, given.z2, "z1 or z2")
    empty = units.new_empty(0, dtype=torch.float32)
    negatives, not_finite = empty, None
    if given.negatives is not None:
        negatives, not_finite = call.normalized(given.negatives, None, "negatives")
    elif gathering is not None:
        negatives = gathering.candidates(units)
    block_pass = call.over_negatives(given, units, negatives)
    problem = block_pass.problem
    if not problem.by_label:  # of many rows: faster than counting in the kernel
        counts = number_groups(problem.eligibility, problem.rule)[1]
        problem = replace(problem, counts=counts)
        block_pass = replace(block_pass, problem=problem)
    slots, edges = passes.compute_sums([block_pass])
    memory, level = units.new_empty(ROWS, block_pass.anchors.shape[0], dtype=torch.float32), empty
    if given.labels is None:
        numbers = FormNumbers(form.log_number or 0.0, *(form.prior or (0.0, 0.0)))
        arguments = slot_arguments(problem, slots, block_pass.numbers) | {
            "form": numbers, "similarity": similarity, "batch": given.z1.shape[0], "SUPPORT": form.log_number is None,
            "DEBIASED": form.prior is not None, "DECOUPLED": form.decoupled,
            "labels_": problem.eligibility.anchor_groups, "LABELLED": problem.eligibility.anchor_groups is not None,
        }  # fmt: skip
        result, valid = finish_by(finish_pairs, memory, form, problem, arguments)
    else:
        totals = finish_totals(
            problem, slots, block_pass.numbers, 1 if form.log_number is None else 2, form.log_number or 0.0
        )
        level = totals.weight
        found, _ = passes.compute_sums([call.over_positives(given, units, level)])
        arguments = {
            "slots": found, "totals": totals, "numbers": block_pass.numbers, "similarity": similarity,
            "labels_": given.labels, "batch": given.z1.shape[0], "number": found.tilted.shape[0],
            "DECOUPLED": call.joint or form.decoupled, "JOINT": call.joint,
        }  # fmt: skip
        result, valid = finish_by(finish_labels, memory, form, problem, arguments)
    if not_finite is not None:
        result = result + not_finite.sum()
    if gathering is not None and form.reduction != "none":
        result, valid = distributed.total(torch.stack([result, valid]), gathering.group).unbind()
        result = result / valid.clamp(min=1) if call.form.reduction == "mean" else result.clone()
    return result, Saved(units, negatives, similarity, valid, memory, level, empty if edges is None else edges)


def backward_pass(
    call: Call, given: Given, saved: Saved, grad: Tensor, needed: Sequence[bool]
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of z1, z2, negatives and scale; those of views always. needed: which of them are wanted."""
    block_pass = call.over_negatives(given, saved.units, saved.negatives)
    gathering, memory = call.gathering, saved.memory
    gradient_scale, weight = None, grad if call.form.reduction == "none" else None
    if weight is None:
        # All gradients are linear in that of the loss: one number is multiplied last, without a separate launch.
        gradient_scale = normalize.GradientScale(grad, saved.valid if call.form.reduction == "mean" else None)
    factor = None
    if saved.units.dtype == torch.float16:  # a sum of two is below float16's limit, 2¹⁶
        factor = 2.0**13 / kept_row(memory, BOUND, weight).abs().amax().clamp(min=1e-30)
    row_max = None if block_pass.problem.bounded else kept_row(memory, ROW_MAX)
    coefficients = Coefficients(kept_pairs(memory, COEFFICIENTS, weight).view(torch.int64), row_max, factor)
    edges = saved.edges if saved.edges.numel() > 0 else None
    _, for_z2, for_negatives, for_scale = needed
    towers = given.negatives is None and gathering is None and not block_pass.self_block
    for_candidates = for_negatives or gathering is not None or (towers and for_z2)
    d_rows, (d_candidates,), d_scale = passes.compute_gradients(
        [block_pass], edges, coefficients, for_scale, True, [for_candidates]
    )
    assert d_rows is not None
    for_similarity: Tensor | None = None
    if given.labels is not None:
        by_positives = Coefficients(kept_pairs(memory, POSITIVES, weight).view(torch.int64), saved.level, factor)
        by_label = call.over_positives(given, saved.units, saved.level)
        part, _, share = by_label.gradients(by_positives, for_scale, False)
        d_rows = d_rows.add_(part)
        d_scale = None if share is None or d_scale is None else d_scale + share
    else:
        for_similarity = kept_row(memory, POSITIVE, weight)
        d_scale = None if d_scale is None else d_scale + kept_row(memory, SCALE, weight).sum()
    if d_scale is not None and gradient_scale is not None:
        d_scale = d_scale * gradient_scale.value()
    if gathering is not None and d_candidates is not None:
        if gradient_scale is not None:  # so that DDP's average over processes is exact; see `distributed.total_loss`
            world = distributed.world_size(gathering.group)
            by_process = gradient_scale.value() * world
            d_rows, d_candidates = d_rows * by_process, d_candidates * by_process
            for_similarity = kept_row(memory, POSITIVE) * by_process
            d_scale = None if d_scale is None else d_scale * world
        d_rows, gradient_scale = d_rows + gathering.own_gradient(d_candidates), None
    back = partial(
        normalize.normalized_backward,
        smallest=call.smallest,
        precision=call.precision,
        gradient_scale=gradient_scale,
    )
    d1, d2 = back(given.z1, given.z2, d_rows, for_similarity, second=d_candidates if towers else None)
    d_negatives = None
    if d_candidates is not None and given.negatives is not None:
        d_negatives, _ = back(given.negatives, None, d_candidates, None)
    return d1, d2, d_negatives, d_scale


def _forward_pass(call: Call, given: Given, needed: Sequence[bool]) -> tuple[Tensor, Saved]:
    """The same as `forward_pass`; the first time, it compiles the kernels of the backward pass, too."""

    def both() -> None:
        result, saved = forward_pass(call, given)
        if any(needed):
            backward_pass(call, given, saved, torch.ones_like(result), needed)

    if call.gathering is not None:  # processes may not have compiled the same kernels, but communicate in between
        return forward_pass(call, given)
    return compile_together(partial(forward_pass, call, given), both)


def pair_record(call: Call, given: Given, saved: Saved) -> PairRecord:
    """The record of a call, for diagnostics."""
    block_pass = call.over_negatives(given, saved.units, saved.negatives)
    memory, labels, eligibility = saved.memory, given.labels, call.eligibility
    if eligibility.anchor_groups is not None:  # two unknown labels are not equal
        groups = eligibility.anchor_groups
        eligibility = replace(eligibility, anchor_groups=groups.masked_fill(groups < 0, -2))
    record = PairRecord(
        eligibility, call.rule, block_pass.anchors, block_pass.block, saved.similarity,
        floored=kept_row(memory, FLOORED), count=kept_row(memory, COUNTS),
    )  # fmt: skip
    if labels is None:
        return record
    instances = torch.arange(labels.shape[0], device=labels.device) % given.z1.shape[0]
    groups = torch.where(labels < 0, -2 - instances, labels)
    return replace(record, similarity=None, groups=groups, positive_count=kept_row(memory, POSITIVE))


class PairedLoss(torch.autograd.Function):
    """Loss of a batch as one autograd function: (), or (A,) if not reduced.

    plain: the same loss of z1, z2, negatives and scale by PyTorch operations, for second derivatives · watched: further
    tensors that must not be overwritten before the backward pass · seen: a list that receives the saved tensors, for
    diagnostics · differentiated: whether there may be a backward pass; `forward` cannot know
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
        differentiated: bool,
    ) -> Tensor:
        given = Given(z1, z2, negatives, scale, labels)
        result, saved = _forward_pass(call, given, ctx.needs_input_grad[:4] if differentiated else ())
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
            return *interface.gradients(ctx.plain, given[:4], needed, grad), None, None, None, None, None, None
        found = backward_pass(ctx.call, given, Saved(*tensors[5 : 5 + len(Saved._fields)]), grad, needed)
        return *found, None, None, None, None, None, None
