"""What a kernel is asked: who may be compared with whom, which of them count, and how much."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import Tensor

from hardneg.losses.hardening import Bound
from hardneg.matmul import where_precise

# Above it softplus(x) is taken to be x. PyTorch's own choice, 20, is wrong by 2e-9: too much for float64.
EXACT_SOFTPLUS = 40.0


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """For the backward pass of a kernel's function, which autograd cannot differentiate again.

    Where a graph of the gradient is asked for, the loss answers by plain operations (`second_order.Traced`) and passes
    no gradient on to here. Anything else that gets here would get a wrong second derivative, and is refused.
    """

    @wraps(backward)
    def guarded(ctx: Any, *grads: Tensor | None) -> Any:
        if all(grad is None for grad in grads):
            return (None,) * len(ctx.needs_input_grad)
        if torch.is_grad_enabled():
            raise RuntimeError("this kernel has no second derivative of its own: use backend='reference'")
        return backward(ctx, *grads)

    return guarded


@dataclass(frozen=True)
class LogSums:
    """What a kernel answers for each anchor, over the support S of its negatives; −inf where S is empty.

    The first of the two log-sums comes as its difference to the second, the expected negative: a kernel can take that
    difference relative to the row's peak, where nothing cancels, however steep the tilt.
    """

    mean: Tensor  # (A,) log E_q[e^s] = log Σ_S e^{(β+1)s} − log Σ_S e^{βs} (HCL eq. 4)
    weight: Tensor  # (A,) log Σ_S e^{βs}
    count: Tensor  # (A,) |S|

    @property
    def tilted(self) -> Tensor:
        """log Σ_S e^{(β+1)s}, (A,)."""
        return self.mean + self.weight


@dataclass(frozen=True)
class RowLayout:
    """Where anchors stand among the instances of all processes, without a tensor that would say it.

    batch: instances of this process; anchor i is a view of the i-th modulo ``batch`` · views: of an instance that are
    anchors · offset: of the first instance among the ``whole`` of all processes
    """

    batch: int
    views: int
    offset: int
    whole: int
    device: torch.device

    def instances(self, rows: slice) -> Tensor:
        """The instances of the anchors ``rows``, (R,)."""
        return torch.arange(rows.start, rows.stop, device=self.device) % self.batch + self.offset

    def order(self) -> Tensor:
        """The place of each anchor among the anchors of all processes, (A,)."""
        every = torch.arange(self.batch * self.views, device=self.device)
        return every % self.batch + self.offset + every // self.batch * self.whole


@dataclass(frozen=True)
class Eligibility:
    """Which candidate may stand against which anchor, in O(A + N) memory.

    columns: number of candidates N · own: an anchor never meets its own instance, whose views are found in each of the
    ``pool_views`` stretches of ``own.whole`` candidates that come first · excluded: (A, E) further candidates an anchor
    never meets · anchor_groups (A,), candidate_groups (N,): only members of different groups meet (of the same group if
    ``same``) · allowed: (B, n) bool for the last n candidates; row i speaks for anchors i, i + B, … · crossed: anchors
    and candidates are the same rows, and each half of them meets only the other
    """

    columns: int
    own: RowLayout | None = None
    pool_views: int = 0
    excluded: Tensor | None = None
    anchor_groups: Tensor | None = None
    candidate_groups: Tensor | None = None
    same: bool = False
    allowed: Tensor | None = None
    crossed: bool = False

    def mask_(self, matrix: Tensor, rows: slice, fill: float) -> None:
        """Overwrite with ``fill`` the entries of ``matrix`` (R, N), anchors ``rows``, that may not meet."""
        if (excluded := self.excluded_columns(rows)) is not None:
            matrix.scatter_(1, excluded, fill)
        if self.anchor_groups is not None and self.candidate_groups is not None:
            alike = self.anchor_groups[rows, None] == self.candidate_groups  # (R, N)
            matrix.masked_fill_(~alike if self.same else alike, fill)
        if self.allowed is not None:
            given = self.allowed.shape[1]
            allowed = self.allowed[wrapped(rows, len(self.allowed), matrix.device)]  # (R, n)
            matrix[:, self.columns - given :].masked_fill_(~allowed, fill)
        if self.crossed:
            half = self.columns // 2
            first = min(max(half - rows.start, 0), len(matrix))  # so many rows are of the first half
            matrix[:first, :half] = fill
            matrix[first:, half:] = fill

    def excluded_columns(self, rows: slice) -> Tensor | None:
        """The candidates that the anchors ``rows`` never meet, their own instances among them, (R, E)."""
        excluded = None if self.excluded is None else self.excluded[rows]
        if self.own is None:
            return excluded
        own = self.own.instances(rows)[:, None] + torch.arange(
            0, self.own.whole * self.pool_views, self.own.whole, device=self.own.device
        )  # (R, V)
        return own if excluded is None else torch.cat([own, excluded], dim=1)

    @property
    def number(self) -> int:
        """The number of candidates that every anchor may meet, if all may meet as many."""
        met = self.columns - (self.pool_views if self.own is not None else 0)
        return met // 2 if self.crossed else met

    @property
    def is_plain(self) -> bool:
        """Are the only ineligible candidates the excluded ones?"""
        return self.anchor_groups is None and self.allowed is None


class HalfCopies:
    """Embeddings in the precision of the matrix products, rows one after the other; each tensor is copied once.

    precision: a half precision that holds their numbers exactly, or None to leave them as they are
    """

    def __init__(self, precision: torch.dtype | None) -> None:
        self.precision = precision
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # by identity: the tensor, which must live on, and its copy

    def __call__(self, vectors: Tensor) -> Tensor:
        if self.precision is None or vectors.dtype != torch.float32:
            return vectors.detach().contiguous()
        if id(vectors) not in self._copies:
            self._copies[id(vectors)] = (vectors, vectors.detach().to(self.precision).contiguous())
        return self._copies[id(vectors)][1]

    def forget(self) -> None:
        """Let go of the tensors."""
        self._copies.clear()


@dataclass(frozen=True)
class Rule:
    """Which eligible candidates are negatives, and their weights.

    tilt: β of weights e^{βs} · log_weight: general weights instead · lower, upper: scores kept, one for all or (A,) ·
    rings: ranges of ranks kept, as fractions of the eligible · draws: (A, k) random integers; k negatives are drawn
    by them from what is kept · grad_through_weights: do gradients flow through the weights? ·
    largest: no |score| exceeds it, if known · half_copies: of embeddings, for the fused kernel's products
    """

    tilt: float | Tensor = 0.0
    log_weight: Callable[[Tensor], Tensor] | None = None
    lower: Bound = None
    upper: Bound = None
    rings: tuple[tuple[float, float], ...] = ()
    draws: Tensor | None = None
    grad_through_weights: bool = True
    largest: float | None = None
    half_copies: HalfCopies = field(default_factory=lambda: HalfCopies(None))

    def log_weights(self, scores: Tensor) -> Tensor:
        """Logarithms of the weights of candidates with these scores."""
        weights = self.tilt * scores if self.log_weight is None else self.log_weight(scores)
        return weights if self.grad_through_weights else weights.detach()

    @property
    def is_banded(self) -> bool:
        """Does it keep fewer than all eligible candidates?"""
        return self.lower is not None or self.upper is not None or bool(self.rings)

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
class PairRecord:
    """What a kernel that makes the whole loss of pairs lets one see of it, without gradients.

    anchors: (A, d) unit vectors, the first views and then the second ones · layout: where they stand · candidates:
    (N, d) · similarity: (B,) of the pairs · losses, floored (0 or 1), count: (A,) of the anchors
    """

    eligibility: Eligibility
    rule: Rule
    layout: RowLayout
    anchors: Tensor
    candidates: Tensor
    similarity: Tensor
    losses: Tensor
    floored: Tensor
    count: Tensor


def wrapped(rows: slice, size: int, device: torch.device) -> slice | Tensor:
    """The rows of a table of ``size`` that serve the anchors ``rows``: anchor i reads row i modulo size."""
    if rows.stop <= size:
        return rows
    return torch.arange(rows.start, rows.stop, device=device) % size


def per_row(bound: float | Tensor, rows: slice) -> float | Tensor:
    """A bound as it compares with a strip (R, N): a number, or a column of the strip's rows."""
    return bound[rows, None] if isinstance(bound, Tensor) else bound


def count_true(marks: Tensor) -> Tensor:
    """How many of each row of ``marks`` (R, N) are true, (R,)."""
    return marks.sum(dim=1, dtype=torch.int32).long()  # twenty times faster on a CPU than in int64, the default


def draw(kept: Tensor, draws: Tensor) -> Tensor:
    """The candidates that the random integers ``draws`` (R, k) pick uniformly from each row of ``kept`` (R, N)."""
    so_far = kept.cumsum(dim=1, dtype=torch.int32)  # (R, N); ten times faster than the default, int64
    choice = (draws % so_far[:, -1:].clamp(min=1)).int()  # (R, k) the how-many-th of those kept
    # In a row that keeps nothing the search runs off the end; its draws are masked by the caller.
    return torch.searchsorted(so_far, choice + 1).clamp(max=kept.shape[1] - 1)


@lru_cache(maxsize=256)
def constant(number: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number on a device, kept there: to make it anew costs a launch."""
    with torch.inference_mode(False):  # training refuses inference tensors
        return torch.tensor(number, dtype=dtype, device=device)
