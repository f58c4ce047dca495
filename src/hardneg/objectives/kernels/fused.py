"""The same answers at the speed of the matrix products: tiles of scores that never leave the chip, in Triton.

Forward keeps a few numbers per anchor, backward makes the tiles again: memory grows with A + N, not with A·N, and what
is beside the products costs little more than one exponential per pair. Matrix products are in the precision of the
embeddings given (bfloat16 and float16 on tensor cores; float32 exactly, or as tf32 where
``torch.set_float32_matmul_precision`` allows it); everything else is float32. Nothing is added by atomics, so the same
input gives the same bits.

What it cannot run it hands to the tiled kernel: float64, candidates per anchor, draws (``num_negatives``).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hardneg.objectives.kernels import programs, rowwise, selection, tiled, tuning
from hardneg.objectives.kernels.problem import Eligibility, LogSums, Lowered, PairRecord, Places, Rule, constant

# Widest rows whose gradient is summed on the chip; for wider ones the derivatives of scores are written out in strips.
WIDEST = 256

# Up to so many pairs another launch, to add what was found apart, takes longer than finding it in one piece.
SMALL = 1 << 19

# Bytes of such a strip, beyond as many as a half-precision copy of the rows takes.
STRIP = 48 << 20

# As in the tiled kernel: up to here e^{±x} and sums of millions of them are ordinary float32 numbers.
SAFE_EXPONENT = tiled.SAFE_EXPONENT

# No smaller tilt changes any sum, and float32 might take it for 0, which −inf must not be multiplied with.
LEAST_TILT = 1e-30

NONE, ANY = int(programs.NONE.value), int(programs.ANY.value)
KINDS = {1.0: int(programs.ONE.value), 2.0: int(programs.TWO.value), 0.5: int(programs.HALF.value)}


def available(device: torch.device) -> bool:
    """Can programs run on this device? On a CPU only in Triton's interpreter, for tests."""
    return device.type == "cuda" or (device.type == "cpu" and programs.INTERPRETED)


def suits(anchors: Tensor, candidates: Sequence[Tensor], rule: Rule) -> bool:
    """Can it run this?"""
    shared = all(block.dim() == 2 for block in candidates)
    return shared and anchors.dtype == torch.float32 and rule.draws is None and rule.log_weight is None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def uncompiled(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Calls a function outside of compiled graphs, which cannot hold these programs."""
    return function(*given, **named)


def log_sums(anchors: Tensor, candidates: Sequence[Tensor], scale: Tensor, who: Eligibility, rule: Rule) -> LogSums:
    """As `reference.log_sums`, for every rule but general weights."""
    if not suits(anchors, candidates, rule):
        return tiled.log_sums(anchors, candidates, scale, who, rule)
    if rule.rings and len(candidates) > 1:
        candidates = [torch.cat(list(candidates))]  # ranks are among all of them
        # In one block with the pool, what was given must not be taken for instances of the batch.
        who = replace(who, own=None, excluded=who.banned(slice(0, len(anchors))))
    who, counts = _numbered(who, rule) if len(anchors) * who.columns > SMALL else (who, None)
    return LogSums(*_run(Negatives(who, rule, counts), anchors, candidates, scale))


def positive_sums(
    anchors: Tensor, pool: Tensor, scale: Tensor, who: Eligibility, offset: Tensor, lowered: Lowered
) -> tuple[Tensor, Tensor]:
    """As `reference.positive_sums`."""
    if not suits(anchors, [pool], Rule()):
        return tiled.positive_sums(anchors, pool, scale, who, offset, lowered)
    who = _numbered(who, Rule())[0] if len(anchors) * who.columns > SMALL else who
    question = Positives(who, offset.detach().contiguous(), Rule(lowered=lowered))
    terms, total, slope = _run(question, anchors, [pool], scale)
    # ∂terms/∂offset is the sum of the slopes, so the offset's gradient needs no pass of its own.
    return terms + slope * (offset - offset.detach()), total


@dataclass(frozen=True)
class Negatives:
    """The two log-sums and the count of `LogSums`."""

    who: Eligibility
    rule: Rule
    counts: Tensor | None = None  # (A,) where they are known beforehand

    @property
    def kind(self) -> int:
        tilt = self.rule.tilt
        if isinstance(tilt, Tensor):
            return ANY
        return KINDS.get(tilt, ANY) if tilt > LEAST_TILT else NONE

    @property
    def bounded(self) -> bool:
        """Can no exponential leave the range of float32, so that no row needs its maximum?"""
        tilt, largest = self.rule.tilt, self.rule.largest
        return largest is not None and not isinstance(tilt, Tensor) and (tilt + 1) * largest <= SAFE_EXPONENT

    @property
    def counted(self) -> bool:
        """Must negatives be counted, because their number is not known beforehand?"""
        return self.counts is None and (self.rule.is_banded or not self.who.is_plain or self.who.excluded is not None)

    @property
    def mirrors(self) -> bool:
        """Is ∂L/∂s_ji found in the tile of s_ij, if scores are symmetric?"""
        rule = self.rule
        one_for_all = not isinstance(rule.lower, Tensor) and not isinstance(rule.upper, Tensor)
        return one_for_all and not rule.rings and self.who.allowed is None

    def known_count(self) -> int:
        own = self.who.own
        return self.who.columns - (self.who.pool_views if own is not None else 0)


@dataclass(frozen=True)
class Positives:
    """Σ softplus(level − p), Σ p, and the derivative of the first in the level, over each anchor's positives."""

    who: Eligibility
    level: Tensor  # (A,)
    rule: Rule

    kind = programs.POSITIVES.value
    bounded = counted = mirrors = True


def _numbered(who: Eligibility, rule: Rule) -> tuple[Eligibility, Tensor | None]:
    """The same with groups numbered in 32 bits, and the counts (A,) where groups alone decide them."""
    if who.anchor_groups is None or who.candidate_groups is None:
        return who, None
    ordered = who.candidate_groups.sort().values
    first = torch.searchsorted(ordered, who.anchor_groups)
    last = torch.searchsorted(ordered, who.anchor_groups, right=True)
    found = last > first
    numbered = replace(
        who,
        anchor_groups=torch.where(found, first, -1).int(),
        candidate_groups=torch.searchsorted(ordered, who.candidate_groups, out_int32=True),
    )
    if who.same or rule.is_banded or who.allowed is not None or who.excluded is not None:
        return numbered, None
    # An anchor's own instance is of its group, unless that is unknown.
    alone = 0 if who.own is None else who.pool_views
    return numbered, (who.columns - torch.where(found, last - first, alone)).float()


def _run(
    question: Negatives | Positives, anchors: Tensor, candidates: Sequence[Tensor], scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    blocks = [None if block is anchors else block for block in candidates]
    results: tuple[Tensor, Tensor, Tensor] = _Fused.apply(question, scale, anchors, *blocks)  # type: ignore[no-untyped-call]
    return results


class _Fused(torch.autograd.Function):
    """Sums over tiles, made again in backward. A block of None is the anchors."""

    @staticmethod
    def forward(
        ctx: Any, question: Negatives | Positives, scale: Tensor, anchors: Tensor, *blocks: Tensor | None
    ) -> tuple[Tensor, ...]:
        mine = [block is None for block in blocks]
        lowered = question.rule.lowered
        low = lowered(anchors)
        others = [low if block is None else lowered(block) for block in blocks]
        scale = scale.float()
        edges = band(question, low, others, scale)
        results, kept = _forward(question, scale, low, others, edges)
        ctx.question, ctx.mine, ctx.band = question, mine, edges
        # Saved, not merely kept: autograd then refuses a backward pass over what was overwritten meanwhile.
        watched = [] if question.who.allowed is None else [question.who.allowed]
        given = [block for block, own in zip(others, mine, strict=True) if not own]
        ctx.save_for_backward(scale, low, *kept, *watched, *given)
        ctx.mark_non_differentiable(results[2])
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    @rowwise.differentiable_once
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        question, mine = ctx.question, ctx.mine
        scale, low, *saved = ctx.saved_tensors
        given = iter(saved[len(saved) - mine.count(False) :])
        blocks = [low if own else next(given) for own in mine]
        for_scale, for_anchors, *for_blocks = ctx.needs_input_grad[1:]
        with torch.autocast(low.device.type, enabled=False):
            pulls = _pulls(question, grads, saved[:KEPT], low.dtype == torch.float16)
            d_anchors: Tensor | None = None
            d_scale: Tensor | None = None
            d_blocks: list[Tensor | None] = []
            column = 0
            for block, own, needed in zip(blocks, mine, for_blocks, strict=True):
                walk = _Walk(question, scale, low, block, column, ctx.band, own)
                column += len(block)
                if for_anchors or for_scale:
                    part, share = walk.anchors_gradient(pulls, for_scale)
                    d_anchors = part if d_anchors is None else d_anchors.add_(part)
                    d_scale = share if d_scale is None or share is None else d_scale + share
                d_blocks.append(walk.gradient(pulls, outer=False, inner=True) if needed and not own else None)
        return None, d_scale, d_anchors if for_anchors else None, *d_blocks


KEPT = 4  # tensors that `_forward` keeps for the backward pass


class Pulls(NamedTuple):
    """What each anchor multiplies its exponentials with in ∂L/∂s, (A,) each, as `programs.slopes` makes it.

    level: what scores are compared with first · largest: no |∂L/∂s| exceeds it, ()
    """

    steep: Tensor
    flat: Tensor
    level: Tensor | None
    largest: Tensor | None


@dataclass(frozen=True)
class Band:
    """Bounds of the scores kept, each a number, one per anchor (A,) in base 2, or None; ring: are they a ring's edges?

    first, last: (A,) the indices that break ties at the edges of a ring
    """

    lower: float | Tensor | None = None
    upper: float | Tensor | None = None
    first: Tensor | None = None
    last: Tensor | None = None

    def flags(self) -> dict[str, Any]:
        """As programs take them."""
        return {
            "lower_": self.lower,
            "upper_": self.upper,
            "first_": self.first,
            "last_": self.last,
            "LOWER": _form(self.lower),
            "UPPER": _form(self.upper),
            "RING": self.first is not None,
        }


def _form(bound: float | Tensor | None) -> int:
    return 0 if bound is None else 2 if isinstance(bound, Tensor) else 1


def band(question: Negatives | Positives, anchors: Tensor, blocks: Sequence[Tensor], scale: Tensor) -> Band:
    """The bands of a question."""
    rule = question.rule
    lower, upper = (
        (bound * programs.LOG2E.value).contiguous() if isinstance(bound, Tensor) else bound
        for bound in (rule.lower, rule.upper)
    )
    if not rule.rings:
        return Band(lower, upper)
    low, first, high, last = selection.edges(_Walk(question, scale, anchors, blocks[0], 0, Band(), False), rule)
    # Where another bound is tighter than the ring's edge, no index matters.
    if lower is not None:
        lower = lower * programs.LOG2E.value if isinstance(lower, float) else lower
        first = torch.where(low < lower, -1, first)
        low = torch.maximum(low, torch.as_tensor(lower, device=low.device, dtype=low.dtype))
    if upper is not None:
        upper = upper * programs.LOG2E.value if isinstance(upper, float) else upper
        last = torch.where(high > upper, question.who.columns, last)
        high = torch.minimum(high, torch.as_tensor(upper, device=high.device, dtype=high.dtype))
    return Band(low, high, first, last)


def partial_sums(
    question: Negatives | Positives, scale: Tensor, anchors: Tensor, blocks: Sequence[Tensor], edges: Band
) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """What was summed slot by slot, (slots, A) each, and the number of slots."""
    walks, column = [], 0
    for block in blocks:
        walks.append(_Walk(question, scale, anchors, block, column, edges, False))
        column += len(block)
    stretches = [walk.stretches(outer=True) for walk in walks]
    slots = sum(count for count, _ in stretches)
    heavy, light, count, peak = anchors.new_empty(4, slots, len(anchors), dtype=torch.float32).unbind()
    if isinstance(question, Negatives) and question.counts is not None:
        count.zero_()[0] = question.counts
    slot = 0
    for walk, (parts, span) in zip(walks, stretches, strict=True):
        walk.sums(heavy, light, count, peak, slot, parts, span)
        slot += parts
    return heavy, light, count, peak, slots


def _forward(
    question: Negatives | Positives, scale: Tensor, anchors: Tensor, blocks: Sequence[Tensor], edges: Band
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The three results of each anchor, and what the backward pass needs of them."""
    heavy, light, count, peak, slots = partial_sums(question, scale, anchors, blocks, edges)
    if isinstance(question, Positives):
        found = tuple(part[0] if slots == 1 else part.sum(dim=0) for part in (heavy, light, count))
        return found, (found[0],) * KEPT
    rows, block_size = len(anchors), 128
    mean, weight, number, heavy_sum, light_sum, top = heavy.new_empty(6, rows).unbind()
    programs.finish[(math.ceil(rows / block_size),)](
        heavy, light, count, peak, tilt(question.rule, heavy.device), mean, weight, number, heavy_sum, light_sum, top,
        rows, slots, float(question.known_count()),
        BLOCK=block_size, KIND=question.kind, BOUNDED=question.bounded,
        COUNTED=question.counted or question.counts is not None,
    )  # fmt: skip
    return (mean, weight, number), (heavy_sum, light_sum, top, number)


def own_gradient(
    question: Negatives, scale: Tensor, anchors: Tensor, edges: Band, pulls: Pulls, for_scale: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradient of anchors that are their own candidates, and of the scale if asked for."""
    return _Walk(question, scale, anchors, anchors, 0, edges, True).anchors_gradient(pulls, for_scale)


def _pulls(
    question: Negatives | Positives, grads: Sequence[Tensor | None], kept: Sequence[Tensor], narrow: bool
) -> Pulls:
    """How scores pull, given the gradients of the results. narrow: must their range be known, for float16?"""
    heavy_sum, light_sum, top, number = kept
    first = torch.zeros_like(number) if grads[0] is None else grads[0].contiguous()
    second = None if grads[1] is None else grads[1].contiguous()
    largest = None
    if narrow:  # a softmax is at most 1
        beta = question.rule.tilt
        largest = first.abs().amax() * (2 * beta + 1) + (0.0 if second is None else second.abs().amax() * (beta + 1))
    if isinstance(question, Positives):
        return Pulls(first, torch.zeros_like(first) if second is None else second, question.level, largest)
    rows, block_size = len(first), 128
    steep, flat = first.new_empty(2, rows).unbind()
    programs.slopes[(math.ceil(rows / block_size),)](
        first, second, heavy_sum, light_sum, number, tilt(question.rule, first.device), steep, flat, rows,
        BLOCK=block_size, THROUGH=question.rule.grad_through_weights, WEIGHED=second is not None,
    )  # fmt: skip
    return Pulls(steep, flat, None if question.bounded else top, largest)


@dataclass(frozen=True)
class _Walk:
    """One block of candidates, from this column on, met by the anchors; ``mine``: the block is the anchors."""

    question: Negatives | Positives
    scale: Tensor
    anchors: Tensor
    block: Tensor
    column: int
    band: Band
    mine: bool

    @property
    def whole(self) -> bool:
        """Does a row fit on the chip, with its gradient?"""
        return self.anchors.shape[1] <= WIDEST

    def stretches(self, outer: bool) -> tuple[int, int]:
        """Into how many stretches the inner rows are cut, and how long each is."""
        rows, others = (self.anchors, self.block) if outer else (self.block, self.anchors)
        return _stretches(len(rows), len(others), rows.device)

    def eligibility(self) -> dict[str, Any]:
        """Who may be met, as programs take it."""
        who = self.question.who
        # Only the pool, which comes first, holds instances of the anchors.
        own = who.own if self.column == 0 else None
        places = own or Places(1, 1, 0, 1, self.anchors.device)
        allowed = who.allowed
        groups = who.anchor_groups is not None
        return {
            "excluded": None if who.excluded is None else who.excluded.contiguous(),
            "allowed": None if allowed is None else allowed.contiguous().view(torch.uint8),
            "column": self.column,
            "columns": who.columns,
            "batch": places.batch,
            "offset": places.offset,
            "whole": places.whole,
            "named": 0 if who.excluded is None else who.excluded.shape[1],
            "allowed_rows": 1 if allowed is None else allowed.shape[0],
            "allowed_columns": 1 if allowed is None else allowed.shape[1],
            "OWN": own is not None,
            "EXCLUDED": who.excluded is not None,
            "GROUPS": (2 if who.same else 1) if groups else 0,
            "ALLOWED": allowed is not None,
        }

    def groups(self) -> tuple[Tensor | None, Tensor | None]:
        """Groups of the anchors and of the candidates of this block."""
        who = self.question.who
        if who.anchor_groups is None or who.candidate_groups is None:
            return None, None
        return who.anchor_groups, who.candidate_groups[self.column : self.column + len(self.block)]

    def common(self) -> dict[str, Any]:
        """What all programs take."""
        question = self.question
        # Where products run beside the tensor cores there is time for exponentials as exact as float32 allows.
        exact = self.anchors.dtype == torch.float32 and _precision(torch.float32) == "ieee"
        return {
            "scale_": self.scale,
            "tilt_": tilt(question.rule, self.scale.device),
            "level_": question.level if isinstance(question, Positives) else None,
            "PRECISION": _precision(self.anchors.dtype),
            # A power of an exponential multiplies its error: exactly, each is made by itself.
            "KIND": ANY if exact and question.kind in KINDS.values() and question.kind != NONE else question.kind,
            "BOUNDED": question.bounded,
            "EXACT": exact,
            **self.band.flags(),
            **self.eligibility(),
        }

    def sums(self, heavy: Tensor, light: Tensor, count: Tensor, peak: Tensor, slot: int, parts: int, span: int) -> None:
        """Fill this block's slots, (slots, A) each."""
        rows, width = self.anchors.shape
        anchor_groups, candidate_groups = self.groups()
        arguments = {
            **self.common(),
            "anchors_": self.anchors, "candidates_": self.block,
            "anchor_groups": anchor_groups, "candidate_groups": candidate_groups,
            "heavy_": heavy, "light_": light, "count_": count, "peak_": peak,
            "anchors": rows, "candidates": len(self.block), "width": width,
            "anchor_stride": self.anchors.stride(0), "candidate_stride": self.block.stride(0),
            "slot": slot, "span": span, "COUNTED": self.question.counted,
        }  # fmt: skip
        tuning.launch(programs.sums, arguments, rows, parts, width, self.whole, "sums")

    def scores(self) -> Tensor:
        """Scores in base 2 of all anchors with the block, −inf where they may not meet, (A, N)."""
        (rows, width), columns = self.anchors.shape, len(self.block)
        anchor_groups, candidate_groups = self.groups()
        result = self.anchors.new_empty(rows, columns, dtype=torch.float32)
        arguments = {
            **self.eligibility(),
            "anchors_": self.anchors, "candidates_": self.block, "scale_": self.scale,
            "anchor_groups": anchor_groups, "candidate_groups": candidate_groups, "result": result,
            "anchors": rows, "candidates": columns, "width": width,
            "anchor_stride": self.anchors.stride(0), "candidate_stride": self.block.stride(0),
            "result_stride": columns, "span": tuning.UNIT, "PRECISION": _precision(self.anchors.dtype),
        }  # fmt: skip
        tuning.launch(programs.scores, arguments, rows, math.ceil(columns / tuning.UNIT), width, self.whole, "scores")
        return result

    def anchors_gradient(self, pulls: Pulls, for_scale: bool) -> tuple[Tensor, Tensor | None]:
        """The gradient of the anchors, also as candidates if the block is ``mine``; and of the scale if asked for."""
        both = self.mine and self.question.mirrors
        part, share = self.gradient(pulls, outer=True, inner=both), None
        if for_scale:
            # s = scale·⟨a, c⟩; with both halves each pair was counted twice.
            share = (self.anchors * part).sum() / self.scale * (0.5 if both else 1.0)
        if self.mine and not both:
            part += self.gradient(pulls, outer=False, inner=True)
        return part, share

    def gradient(self, pulls: Pulls, outer: bool, inner: bool) -> Tensor:
        """The gradient of the anchors (``outer``: in their role as anchors) or, if not, of the block's rows."""
        mine, others = (self.anchors, self.block) if outer else (self.block, self.anchors)
        anchor_groups, candidate_groups = self.groups()
        rows, width = mine.shape
        parts, span = self.stretches(outer)
        factor = None
        if pulls.largest is not None:
            factor = 2.0**13 / pulls.largest.clamp(min=1e-30)  # float16 ends at 2¹⁶, and two may be added
        arguments = {
            **self.common(),
            "outer": mine, "inner": others, "factor_": factor, "SCALED": factor is not None,
            "steep_": pulls.steep, "flat_": pulls.flat, "level_": pulls.level,
            "outer_groups": anchor_groups if outer else candidate_groups,
            "inner_groups": candidate_groups if outer else anchor_groups,
            "outer_rows": rows, "inner_rows": len(others), "width": width,
            "outer_stride": mine.stride(0), "inner_stride": others.stride(0),
            "OUTER": outer, "INNER": inner,
        }  # fmt: skip
        if self.whole:
            result = mine.new_empty(parts, rows, width, dtype=torch.float32)
            arguments |= {"result": result, "base": 0, "skip": 0, "result_stride": width, "span": span}
            tuning.launch(programs.gradient, arguments, rows, parts, width, True, "gradient")
            return result[0] if parts == 1 else result.sum(dim=0)
        return self._by_strips(arguments, mine, others, factor, inner and outer)

    def _by_strips(
        self, arguments: dict[str, Any], mine: Tensor, others: Tensor, factor: Tensor | None, both: bool
    ) -> Tensor:
        """As `gradient`, for wide rows: derivatives of scores strip by strip, each followed by products.

        both: they are symmetric, so what a strip holds right of the diagonal serves the rows below it too
        """
        rows, width = mine.shape
        stride = math.ceil(len(others) / 16) * 16  # rows of a strip begin where tensor cores can read them
        room = min(STRIP + 2 * rows * width, 1 << 31)
        height = max(1, room // (stride * mine.element_size()))
        height -= height % tuning.UNIT if height > tuning.UNIT else 0
        strip = mine.new_empty(min(height, rows), stride)
        result = mine.new_zeros(rows, width, dtype=torch.float32)
        for base in range(0, rows, height):
            end, skip = min(base + height, rows), base if both else 0
            parts, span = _stretches(end - base, len(others) - skip, mine.device)
            arguments |= {
                "result": strip, "base": base, "skip": skip, "result_stride": stride, "span": span, "outer_rows": end,
            }  # fmt: skip
            tuning.launch(programs.gradient, arguments, end - base, parts, width, False, "strip")
            weights = strip[: end - base, : len(others) - skip]  # (R, N − skip)
            _add_product(result[base:end], weights, others[skip:])
            if both and end < rows:
                _add_product(result[end:], weights[:, end - base :].T, mine[base:end])
        scale = self.scale if factor is None else self.scale / factor
        return result.mul_(scale)


def _stretches(rows: int, others: int, device: torch.device) -> tuple[int, int]:
    """Into how many stretches inner rows are cut, so that every multiprocessor has programs to run; their length.

    What each stretch finds is kept apart.
    """
    if rows * others <= SMALL:
        return 1, math.ceil(others / tuning.UNIT) * tuning.UNIT
    blocks, units = math.ceil(rows / tuning.BLOCK), math.ceil(others / tuning.UNIT)
    wanted = max(1, min(units, tuning.programs_wanted(device) // blocks))
    each = math.ceil(units / wanted)
    return math.ceil(units / each), each * tuning.UNIT


def _add_product(result: Tensor, left: Tensor, right: Tensor) -> None:
    """result += left · right in float32, of matrices of any precision."""
    if left.dtype == torch.float32:
        result.addmm_(left, right)
    elif left.is_cuda and tuning.ADDS_IN_FLOAT32:
        torch.addmm(result, left, right, out_dtype=torch.float32, out=result)
    else:
        result += left.float() @ right.float()


def _precision(dtype: torch.dtype) -> str:
    """How float32 numbers are multiplied: exactly, or as tf32 where PyTorch's own products may be."""
    if dtype != torch.float32:
        return "ieee"
    # Since PyTorch 2.9 the older question is an error where the newer setting was used.
    chosen = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    allowed = torch.get_float32_matmul_precision() != "highest" if chosen is None else chosen == "tf32"
    return "tf32" if allowed else "ieee"


def tilt(rule: Rule, device: torch.device) -> Tensor:
    """The β of a rule as programs read it, ()."""
    return rule.tilt.float() if isinstance(rule.tilt, Tensor) else constant(float(rule.tilt), torch.float32, device)


def losses(
    negatives: LogSums,
    similarity: Tensor,
    scale: Tensor,
    log_number: float | None,
    prior: tuple[float, float] | None,
    log_least: float | None,
    decoupled: bool,
) -> tuple[Tensor, Tensor]:
    """Losses of anchors that have one positive each, and which are floored, (A,) each; see `rowwise.Losses`."""
    found, floored = rowwise.Losses.apply(  # type: ignore[no-untyped-call]
        negatives.mean, similarity, scale, negatives.count, log_number, prior, log_least, decoupled
    )
    return found, floored.bool()


def units(
    z1: Tensor, z2: Tensor | None, smallest: float, precision: torch.dtype | None, names: str
) -> tuple[Tensor, Tensor]:
    """Unit vectors of the rows of z1 and z2, and inner products of their pairs; see `rowwise.Units`."""
    found: tuple[Tensor, Tensor] = rowwise.Units.apply(z1, z2, smallest, precision, names)  # type: ignore[no-untyped-call]
    return found


def pair_loss(
    z1: Tensor,
    z2: Tensor,
    scale: Tensor,
    rule: Rule,
    log_number: float | None,
    prior: tuple[float, float] | None,
    decoupled: bool,
    reduction: str,
) -> tuple[Tensor, PairRecord]:
    """The loss of two views (B, d) whose candidates are both views of all others, in seven launches.

    log_number, prior, decoupled: see `losses`
    """
    from hardneg.objectives.kernels import pairs

    batch = len(z1)
    smallest = max(1e-30, torch.finfo(z1.dtype).tiny, torch.finfo(z2.dtype).tiny)
    who = Eligibility(2 * batch, own=Places(batch, 2, 0, batch, z1.device), pool_views=2)
    form = pairs.Form(log_number, prior, decoupled, reduction == "mean")
    loss, *seen = pairs.Whole.apply(  # type: ignore[no-untyped-call]
        z1, z2, scale, Negatives(who, rule), form, smallest, rule.lowered.precision, reduction != "none"
    )
    return loss, PairRecord(who, rule, *seen)
