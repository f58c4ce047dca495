"""What kernels take and return: eligibility, rules, log-sums; and how their gradients are differentiated again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import Tensor

from hardneg import distributed
from hardneg.losses.kernels.guide import GuideBand
from hardneg.losses.kernels.identities import Identities
from hardneg.losses.kernels.saved_tensors import unchanged
from hardneg.matmul import where_precise

Bound = float | Tensor | None  # a score for all anchors, one per anchor (A,), or no bound

# Above this softplus(x) is computed as x. PyTorch's default, 20, has an error of 2e-9: too much for float64.
EXACT_SOFTPLUS = 40.0

# Size of a strip of masks in which eligible candidates are counted.
STRIP_BYTES = 1 << 24


@dataclass(frozen=True)
class LogSums:
    """The log-sums of each anchor over the support S of its negatives; −inf where S is empty.

    The first log-sum is stored as its difference to the second, the log of the expected negative. A kernel computes
    that difference relative to the row maximum, where nothing cancels for any tilt.
    """

    mean: Tensor  # (A,) log E_q[e^s] = log Σ_S e^{(β+1)s} − log Σ_S e^{βs} (HCL eq. 4)
    weight: Tensor  # (A,) log Σ_S e^{βs}
    count: Tensor  # (A,) |S|

    @property
    def tilted(self) -> Tensor:
        """log Σ_S e^{(β+1)s}, (A,)."""
        return self.mean + self.weight

    def unnormalized(self) -> "LogSums":
        """The same with weights that are not divided by their sum, but by |S|: mean is log Σ_S e^{(β+1)s} − log |S|."""
        nonempty = self.count > 0
        mean = torch.where(nonempty, self.tilted, 0.0) - self.count.clamp(min=1).log()
        return LogSums(torch.where(nonempty, mean, -torch.inf), self.weight, self.count)


@dataclass(frozen=True)
class RowLayout:
    """Positions of the anchors among the instances of all processes, without an index tensor.

    batch: instances of this process; anchor i is a view of instance i modulo ``batch`` · views: views of an instance
    that are anchors · offset: position of this process's first instance among the ``global_batch`` of all processes
    """

    batch: int
    views: int
    offset: int
    global_batch: int
    device: torch.device

    def instances(self, rows: slice) -> Tensor:
        """The global instance numbers of the anchors ``rows``, (R,)."""
        return torch.arange(rows.start, rows.stop, device=self.device) % self.batch + self.offset

    def global_rows(self) -> Tensor:
        """The row of each anchor among the anchors of all processes, (A,)."""
        rows = torch.arange(self.batch * self.views, device=self.device)
        return rows % self.batch + self.offset + rows // self.batch * self.global_batch


@dataclass(frozen=True)
class Eligibility:
    """Which candidates an anchor may be compared with, in O(A + N) memory.

    columns: number of candidates N · own: if given, an anchor's own instance is excluded; its views are in each of the
    first ``pool_views`` groups of ``own.global_batch`` candidates · excluded: (A, E) further excluded candidates ·
    anchor_groups (A,), candidate_groups (N,): only candidates of another group are eligible (of the same group if
    ``same_group``) · allowed: (B, n) bool for the last n candidates; row i holds for anchors i, i + B, … · crossed:
    anchors and candidates are the same rows, and each half is compared with the other half only · identities:
    candidates that are ineligible because of their ids
    """

    columns: int
    own: RowLayout | None = None
    pool_views: int = 0
    excluded: Tensor | None = None
    anchor_groups: Tensor | None = None
    candidate_groups: Tensor | None = None
    same_group: bool = False
    allowed: Tensor | None = None
    crossed: bool = False
    identities: Identities | None = None

    def mask_(self, matrix: Tensor, rows: slice, fill: float) -> None:
        """Overwrite with ``fill`` the ineligible entries of ``matrix`` (R, N), whose rows are the anchors ``rows``."""
        if (excluded := self.excluded_columns(rows)) is not None:
            matrix.scatter_(1, excluded, fill)
        if self.anchor_groups is not None and self.candidate_groups is not None:
            equal = self.anchor_groups[rows, None] == self.candidate_groups  # (R, N)
            matrix.masked_fill_(~equal if self.same_group else equal, fill)
        if self.allowed is not None:
            given = self.allowed.shape[1]
            allowed = self.allowed[wrapped(rows, len(self.allowed), matrix.device)]  # (R, n)
            matrix[:, self.columns - given :].masked_fill_(~allowed, fill)
        if self.crossed:
            half = self.columns // 2
            first = min(max(half - rows.start, 0), len(matrix))  # number of rows in the first half
            matrix[:first, :half] = fill
            matrix[first:, half:] = fill
        if self.identities is not None:
            self.identities.mask_(matrix, rows, fill)

    def excluded_columns(self, rows: slice) -> Tensor | None:
        """The excluded candidates of the anchors ``rows``, their own instances included, (R, E)."""
        excluded = None if self.excluded is None else self.excluded[rows]
        if self.own is None:
            return excluded
        own = self.own.instances(rows)[:, None] + torch.arange(
            0, self.own.global_batch * self.pool_views, self.own.global_batch, device=self.own.device
        )  # (R, V)
        return own if excluded is None else torch.cat([own, excluded], dim=1)

    def counts(self, anchors: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The number of eligible candidates of each of ``anchors`` anchors, (A,), one strip of rows at a time."""
        height = max(1, STRIP_BYTES // max(self.columns, 1))
        found = torch.zeros(anchors, dtype=dtype, device=device)
        for start in range(0, anchors if self.columns else 0, height):
            rows = slice(start, min(start + height, anchors))
            eligible = torch.ones(rows.stop - start, self.columns, dtype=torch.bool, device=device)
            self.mask_(eligible, rows, False)
            found[rows] = count_true(eligible).to(dtype)
        return found

    @property
    def count_per_anchor(self) -> int:
        """The number of eligible candidates of every anchor, if ``is_plain``."""
        count = self.columns - (self.pool_views if self.own is not None else 0)
        return count // 2 if self.crossed else count

    @property
    def is_plain(self) -> bool:
        """True if all candidates are eligible but those of the anchor's own instance and, if crossed, of its half."""
        masks = (self.excluded, self.anchor_groups, self.allowed, self.identities)
        return all(mask is None for mask in masks)


class HalfCopies:
    """Contiguous copies of embeddings in the precision of the matrix products; each tensor is copied once.

    precision: a half precision that represents the embeddings exactly, or None to keep their dtype
    """

    def __init__(self, precision: torch.dtype | None) -> None:
        self.precision = precision
        # By id: the tensor, which must stay alive for the id to be unique, and its copy.
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, vectors: Tensor) -> Tensor:
        if self.precision is None or vectors.dtype != torch.float32:
            return vectors.detach().contiguous()
        if id(vectors) not in self._copies:
            self._copies[id(vectors)] = (vectors, vectors.detach().to(self.precision).contiguous())
        return self._copies[id(vectors)][1]

    def clear(self) -> None:
        """Drop all tensors and copies."""
        self._copies.clear()


@dataclass(frozen=True)
class Rule:
    """Which eligible candidates are negatives, and their weights.

    tilt: β of weights e^{βs} · log_weight: general weights instead · lower, upper: range of scores kept, one number for
    all anchors or (A,) · rings: ranges of ranks kept, as fractions of the eligible candidates · draws: (A, k) random
    integers that select k negatives from those kept · grad_through_weights: whether gradients flow through the weights
    · max_abs_score: upper bound of |score|, if known · learned_scale: the scale is a smaller bound, which only the
    device knows · half_copies: of embeddings, for the fused kernel's products · score_factor: by which scores are
    rescaled in the weights; ``tilt`` and ``log_weight`` contain it · guide: range of a guide model's scores kept; the
    fused kernel has none
    """

    tilt: float | Tensor = 0.0
    log_weight: Callable[[Tensor], Tensor] | None = None
    lower: Bound = None
    upper: Bound = None
    rings: tuple[tuple[float, float], ...] = ()
    draws: Tensor | None = None
    grad_through_weights: bool = True
    max_abs_score: float | None = None
    learned_scale: bool = False
    half_copies: HalfCopies = field(default_factory=lambda: HalfCopies(None))
    score_factor: float | Tensor = 1.0
    guide: GuideBand | None = None

    def log_weights(self, scores: Tensor) -> Tensor:
        """Log-weights of candidates with these scores, of the same shape."""
        weights = self.tilt * scores if self.log_weight is None else self.log_weight(scores)
        return weights if self.grad_through_weights else weights.detach()

    @property
    def is_banded(self) -> bool:
        """True if it may keep fewer than all eligible candidates."""
        return self.lower is not None or self.upper is not None or bool(self.rings) or self.guide is not None

    def ranks(self, eligible: Tensor) -> tuple[Tensor, Tensor]:
        """First and one-past-last rank kept of each row with ``eligible`` (R,) candidates."""
        exact = where_precise(eligible).double()  # float32 would round ranks beyond 2²⁴
        start, end = torch.zeros_like(eligible), eligible
        for lower, upper in self.rings:
            first = (lower * exact + 1e-9).floor().long().to(eligible.device)
            last = (upper * exact + 1e-9).floor().long().to(eligible.device)
            start, end = torch.maximum(start, first), torch.minimum(end, torch.maximum(last, first + 1))
        return start, end


@dataclass(frozen=True)
class Gathering:
    """The processes whose rows are candidates. sizes: of their batches, in order of rank · group: None for all"""

    sizes: list[int]
    group: distributed.Group

    def candidates(self, rows: Tensor) -> Tensor:
        """The rows (V·B, d) of V views of this process → those of all processes, (V·G, d), view after view."""
        own = self.sizes[distributed.rank(self.group)]
        by_instance = rows.view(-1, own, rows.shape[1]).transpose(0, 1)  # (B, V, d)
        return distributed.gathered(by_instance, self.sizes, self.group).transpose(0, 1).flatten(0, 1)

    def own_gradient(self, gradient: Tensor) -> Tensor:
        """The gradient of `candidates`, (V·G, d), summed over the processes, for the rows of this process, (V·B, d)."""
        by_instance = gradient.view(-1, sum(self.sizes), gradient.shape[1]).transpose(0, 1)  # (G, V, d)
        return distributed.scattered(by_instance, self.sizes, self.group).transpose(0, 1).flatten(0, 1)


@dataclass(frozen=True)
class LossForm:
    """How the losses of a paired batch follow from the sums of its anchors, and how they are reduced.

    log_number: log Q, or None for the size of the support · prior: logarithms of τ⁺ and 1 − τ⁺, or None ·
    decoupled: log(Q·G) − p instead of log(1 + Q·G·e^{−p}) · reduction: ``"mean"``, ``"sum"`` or ``"none"`` ·
    positives: ``"own"`` if the other view is the only positive; if they are found by label, how they are combined:
    ``"mean_of_logs"`` or ``"in_denominator"`` · labels_exclude: candidates with the anchor's label are no negatives
    """

    log_number: float | None
    prior: tuple[float, float] | None
    decoupled: bool
    reduction: str
    positives: str = "own"
    labels_exclude: bool = False


@dataclass(frozen=True)
class PairRecord:
    """Intermediate results of a kernel that computes the whole loss of a paired batch, without gradients.

    anchors: (A, d) unit vectors, the first views and then the second ones · candidates: (N, d) · similarity: (B,) of
    the pairs, None for positives by label · floored (0 or 1), count: (A,) of the anchors · groups, positive_count:
    (A,), for positives by label: rows of one group are each other's positives
    """

    eligibility: Eligibility
    rule: Rule
    anchors: Tensor
    candidates: Tensor
    similarity: Tensor | None
    floored: Tensor
    count: Tensor
    groups: Tensor | None = None
    positive_count: Tensor | None = None


@dataclass(frozen=True)
class PairSupport:
    """Which calls a kernel's ``pair_loss`` serves beyond those in float32.

    device: the only type of device, or None for any · float64: that precision · bands_per_anchor: bands that differ
    between anchors, such as those by rank · gather: candidates of all processes · weighted_denominator: positives in
    the denominator beside any negatives, not only untilted ones of all other labels
    """

    device: str | None = None
    float64: bool = False
    bands_per_anchor: bool = True
    gather: bool = False
    weighted_denominator: bool = False


def wrapped(rows: slice, size: int, device: torch.device) -> slice | Tensor:
    """The rows of a table with ``size`` rows that belong to the anchors ``rows``: anchor i uses row i modulo size."""
    if rows.stop <= size:
        return rows
    return torch.arange(rows.start, rows.stop, device=device) % size


def per_row(bound: float | Tensor, rows: slice) -> float | Tensor:
    """A bound that broadcasts to a strip (R, N): a number, or a column with one entry per row."""
    return bound[rows, None] if isinstance(bound, Tensor) else bound


def count_true(marks: Tensor) -> Tensor:
    """Number of true entries in each row of ``marks`` (R, N), (R,)."""
    return marks.sum(dim=1, dtype=torch.int32).long()  # twenty times faster on a CPU than in int64, the default


def draw(kept: Tensor, draws: Tensor) -> Tensor:
    """The candidates that the random integers ``draws`` (R, k) select uniformly from each row of ``kept`` (R, N)."""
    running = kept.cumsum(dim=1, dtype=torch.int32)  # (R, N); ten times faster than the default, int64
    choice = (draws % running[:, -1:].clamp(min=1)).int()  # (R, k) index among those kept
    # In a row that keeps nothing the search runs past the end; the caller masks its draws.
    return torch.searchsorted(running, choice + 1).clamp(max=kept.shape[1] - 1)


@lru_cache(maxsize=256)
def constant(number: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number as a tensor on a device, cached: creating it costs a launch."""
    with torch.inference_mode(False):  # training refuses inference tensors
        return torch.full((), number, dtype=dtype, device=device)  # unlike torch.tensor, without waiting for a copy


# Second derivatives. Kernels compute gradients by formulas that autograd does not see. Where a graph of the gradient is
# requested (``create_graph=True``: gradient penalties, Hessians, influence functions), the loss is recomputed by plain
# operations from the same inputs, and autograd differentiates those.


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator for the backward pass of a kernel's function, which autograd cannot differentiate again.

    Where a graph of the gradient is requested, `GuardedLoss` differentiates plain operations and passes no gradient on
    to the kernel. Any other second derivative would be wrong here and raises.
    """

    @wraps(backward)
    def guarded(ctx: Any, *grads: Tensor | None) -> Any:
        if all(grad is None for grad in grads):
            return (None,) * len(ctx.needs_input_grad)
        if torch.is_grad_enabled():
            raise RuntimeError("this kernel has no second derivative: use backend='reference'")
        return backward(ctx, *grads)

    return guarded


class GuardedLoss(torch.autograd.Function):
    """Returns a loss unchanged; its backward pass checks the inputs and serves second derivatives.

    plain: computes the loss from ``inputs`` by plain operations, used if a graph of the gradient is requested; None if
    the loss was computed that way · inputs: the tensors it was computed from, or None. If one of them is overwritten
    before the backward pass, that raises: a kernel that recomputes scores would give wrong gradients.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, plain: Callable[..., Tensor] | None, *inputs: Tensor | None) -> Tensor:
        ctx.save_for_backward(*saveable(*inputs))
        ctx.plain = plain
        return loss.clone()  # a view could not be changed in place, as in total += other

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs = unchanged(ctx)
        if ctx.plain is None or not torch.is_grad_enabled():
            return (grad, None, *(None for _ in inputs))
        return (None, None, *gradients(ctx.plain, inputs, ctx.needs_input_grad[2:], grad))


def gradients(
    function: Callable[..., Tensor], inputs: Sequence[Tensor | None], needed: Sequence[bool], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradient of ``function(*inputs)`` in the inputs ``needed``, with a graph; None for the others.

    grad: gradient of the function's value, of the same shape
    """
    with torch.enable_grad(), torch.autocast(grad.device.type, enabled=False):
        # One alias each: the same tensor given twice, as in loss(z, z), must get two gradients, not twice their sum.
        aliases = [x.view_as(x) if x is not None and need else x for x, need in zip(inputs, needed, strict=True)]
        value = function(*aliases)
        wanted = [x for x, need in zip(aliases, needed, strict=True) if need and x is not None]
        if not wanted or not value.requires_grad:
            return (None,) * len(aliases)
        found = iter(torch.autograd.grad(value, wanted, grad, create_graph=True, allow_unused=True))
    return tuple(next(found) if need and x is not None else None for x, need in zip(aliases, needed, strict=True))


def safe_lengths(vectors: Tensor, smallest: float) -> Tensor | None:
    """The lengths of vectors (…, d) on a CPU, (…, 1), if all are in the range where dividing by them is safe.

    That proves that all entries are finite, too, in a third of the time of other checks. smallest: the length below
    which a vector counts as zero
    """
    lengths: Tensor = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    shortest, longest = torch.aminmax(lengths)
    safe = shortest.item() > max(1e-15, smallest * vectors.shape[-1] ** 0.5) and longest.item() < 1e15
    return lengths if safe else None


def saveable(*tensors: Tensor | None) -> list[Tensor | None]:
    """The tensors, with inference tensors replaced by copies: autograd cannot save inference tensors."""
    if torch.is_inference_mode_enabled():  # autograd saves nothing then
        return list(tensors)
    return [x.clone() if x is not None and x.is_inference() else x for x in tensors]
