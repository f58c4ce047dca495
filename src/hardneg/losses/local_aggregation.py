"""Local aggregation: attracts a sample to its close neighbors, relative to its background (METHODS, section 3)."""

import math
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor, nn

from hardneg import checks
from hardneg.losses.execution import is_eager
from hardneg.losses.inputs import normalized
from hardneg.losses.kernels.interface import gradients
from hardneg.losses.kernels.saved_tensors import unchanged
from hardneg.losses.schedules import Setting, schedules_of, value
from hardneg.losses.settings import REDUCTION, Adjustable, Reduction, check_no_adaptive
from hardneg.losses.temperature import Learnable, check_no_gradient
from hardneg.matmul import largest_columns, row_blocks

Form = Literal["paper", "published"]


@runtime_checkable
class CloseSets(Protocol):
    """Clusters of N rows, such as `hardneg.Clusters`; the close set of a row is the union of its clusters."""

    assignments: Tensor  # (repeats, N)

    def members(self, idx: Tensor) -> Tensor:
        """The close sets of the rows ``idx`` (B,): (B, L) indices, shorter ones filled up with −1."""

    def same(self, idx: Tensor, among: Tensor) -> Tensor:
        """Whether the rows ``among`` (B, M) are in the close sets of the rows ``idx`` (B,), (B, M) bool."""


class LocalAggregation(Adjustable):
    """−log of the mean e^{cos/temperature} over the close set C_i, divided by that over the background set B_i.

    B_i holds the anchor's own row and its nearest rows (ties by index), C_i the rows that share a cluster with it, its
    own included. The choice of rows has no gradient; the gradient of the loss flows to ``z``. Bank
    rows are read once per call, a tile at a time; memory is O(B · (background + members + d)).

    Args:
        temperature: number > 0, schedule (moved by `set_progress`), or `Learnable`
        background: rows in B_i; all rows if the bank has fewer
        form: ``"paper"`` (seed 002, eq. 5), or ``"published"``, as in LA's code: the sum over C_i ∩ B_i divided
            by the sum over B_i
        reduction: ``"mean"``, ``"sum"`` or ``"none"`` (one loss per anchor)

    Examples:
        >>> from hardneg.memory import Clusters, MemoryBank
        >>> bank, idx = MemoryBank(size=200, dim=16), torch.tensor([3, 14, 15])
        >>> clusters = Clusters(k=10, repeats=2).fit(bank.rows)
        >>> z = torch.randn(3, 16, requires_grad=True)
        >>> LocalAggregation(background=50)(z, bank.rows, idx, clusters).backward()
        >>> bank.update(idx, z)
    """

    temperature: Setting | Learnable
    background: int
    form: Form
    reduction: Reduction

    def __init__(
        self,
        temperature: Setting | Learnable = 0.07,
        background: int = 4096,
        *,
        form: Form = "paper",
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__()
        self._configure({name: given for name, given in locals().items() if name in self.SETTINGS})

    def forward(self, z: Tensor, rows: Tensor, idx: Tensor, clusters: CloseSets) -> Tensor:
        """The loss of a batch.

        z: (B, d), of any norm · rows: (N, d), the bank's, also in half precision or on the host · idx: (B,) the
        anchors' own rows · clusters: of these rows
        """
        validity = self._check(z, rows, clusters)
        idx = checks.integers("idx", idx, (len(z),), "one row of the bank per row of z").to(z.device)
        idx, in_range = checks.in_range("idx", idx, len(rows))
        with torch.autocast(z.device.type, enabled=False):  # float32 arithmetic inside, always
            dtype = torch.promote_types(torch.float32, torch.promote_types(z.dtype, rows.dtype))
            unit = normalized(z.to(dtype), max(1e-30, torch.finfo(z.dtype).tiny))
            scale = self._scale(unit)
            with torch.no_grad():
                losses, derivative, sets, finite_rows = self._losses(unit, scale, rows, idx, clusters)
            if unit.requires_grad or scale.requires_grad:
                losses = _AttachGradient.apply(losses, derivative, sets, unit, scale, rows)  # type: ignore[no-untyped-call]
        losses = checks.poisoned(losses, validity, in_range, finite_rows)
        if is_eager():
            self._count_call(losses)
        if self.reduction == "none":
            return losses
        return losses.mean() if self.reduction == "mean" else losses.sum()

    def extra_repr(self) -> str:
        first = "" if isinstance(self.temperature, Learnable) else f"temperature={self.temperature!r}, "
        return f"{first}background={self.background}, form={self.form!r}, reduction={self.reduction!r}"

    def _configure(self, given: dict[str, Any]) -> None:
        given, temperature = dict(given), given["temperature"]
        check_no_gradient("temperature", temperature)
        if not isinstance(temperature, Learnable):
            given["temperature"] = checks.number("temperature", temperature, above=0, below=math.inf)
            check_no_adaptive("temperature", temperature)
        given["background"] = checks.whole("background", given["background"])
        checks.choice("form", given["form"], get_args(Form))
        checks.choice("reduction", given["reduction"], REDUCTION)
        self._modules.pop("temperature", None)
        self.__dict__.update(given, _scheduled=schedules_of(given))
        if isinstance(temperature, Learnable):
            del self.__dict__["temperature"]
            self.add_module("temperature", temperature)

    def _move_schedules(self, progress: float) -> None:
        if not isinstance(self.temperature, Learnable):
            checks.number("temperature", value(self.temperature, progress), above=0, below=math.inf)

    def _losses(
        self, unit: Tensor, scale: Tensor, rows: Tensor, idx: Tensor, clusters: CloseSets
    ) -> tuple[Tensor, Tensor, "_RowSets", Tensor | None]:
        """Each anchor's loss, (B,), its derivative in scale·unit, (B, d), the two sets of rows, and their validity."""
        close = clusters.members(idx).to(unit.device) if self.form == "paper" else idx[:, None]  # (B, L)
        near, near_cosines, close_cosines, inverse, validity = _search(unit, rows, idx, self.background, close)
        scores = near_cosines * scale  # (B, K)
        background = torch.logsumexp(scores, dim=1)
        share = scores.softmax(dim=1)
        if self.form == "published":
            inside = clusters.same(idx, near).to(unit.device)  # (B, K); never empty: the own row is in both
            scores = scores.masked_fill(~inside, -torch.inf)
            share -= scores.softmax(dim=1)
            losses = background - torch.logsumexp(scores, dim=1)
            derivative = _weighted_rows(share * inverse[near], near, rows)
            return losses, derivative, _RowSets(near, near, inside, 0.0, inverse), validity
        close_mask = close >= 0
        close = close.clamp(min=0)
        scores = (close_cosines * scale).masked_fill(~close_mask, -torch.inf)  # (B, L)
        log_ratio = (close_mask.sum(dim=1) / near.shape[1]).log()
        losses = background - torch.logsumexp(scores, dim=1) + log_ratio
        derivative = _weighted_rows(share * inverse[near], near, rows)
        derivative -= _weighted_rows(scores.softmax(dim=1) * inverse[close], close, rows)
        return losses, derivative, _RowSets(near, close, close_mask, log_ratio, inverse), validity

    def _scale(self, unit: Tensor) -> Tensor:
        """1/temperature, ()."""
        if isinstance(self.temperature, Learnable):
            temperature: Tensor = self.temperature()
            return 1 / temperature.to(unit)
        return unit.new_full((), 1 / value(self.temperature, self.progress))

    def _check(self, z: Tensor, rows: Tensor, clusters: CloseSets) -> Tensor | None:
        checks.floating("z", z)
        checks.floating("rows", rows)
        if z.dim() != 2 or 0 in z.shape:
            raise ValueError(f"z must have shape (B, d) with B, d ≥ 1, got {tuple(z.shape)}")
        if rows.dim() != 2 or rows.shape[1] != z.shape[1]:
            raise ValueError(f"rows must have shape (N, {z.shape[1]}), got {tuple(rows.shape)}")
        if rows.device != z.device and rows.device.type != "cpu":
            raise ValueError(f"rows are on {rows.device}, but z on {z.device}: move them to one device")
        if not isinstance(clusters, CloseSets):
            raise ValueError(f"clusters must be a Clusters, got {type(clusters).__name__}")
        if clusters.assignments.shape[1] != len(rows):
            raise ValueError(
                f"clusters are of {clusters.assignments.shape[1]} rows, but there are {len(rows)}: call fit(rows) first"
            )
        if rows.requires_grad:
            raise ValueError("rows get no gradient, but require one: pass rows.detach()")
        return checks.finite("z", z)


def _search(
    unit: Tensor, rows: Tensor, idx: Tensor, count: int, close: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """The own and the nearest rows of each anchor, with cosines, in one pass over the rows.

    unit: (B, d) · rows: (N, d) · idx: (B,) own rows · close: (B, L) rows whose cosines are computed too, −1 = none
    returns (B, K) indices and cosines of the nearest, (B, L) cosines of the close ones, (N,) one over each row's norm,
    and the validity of the rows
    """
    close_cosines = unit.new_zeros(close.shape)
    own_cosines = unit.new_zeros(len(unit), 1)
    inverse = unit.new_zeros(len(rows))
    validity: Tensor | None = None
    near = idx.new_zeros(len(unit), 0)
    near_cosines = unit.new_zeros(len(unit), 0)
    for block in row_blocks(len(rows), len(unit)):
        part = rows[block].to(unit, non_blocking=True)  # (C, d)
        length = torch.linalg.vector_norm(part, dim=1)
        validity = checks.jointly(validity, checks.finite("rows", length))
        inverse[block] = torch.where(length > 1e-30, 1 / length, 0.0)
        cosines = (unit @ part.T).mul_(inverse[block])  # (B, C)
        _gather_found(close_cosines, cosines, close - block.start)
        own = idx[:, None] - block.start
        _gather_found(own_cosines, cosines, own)
        # The own row is always in the background.
        in_block, column = (own >= 0) & (own < len(part)), own.clamp(0, len(part) - 1)
        cosines.scatter_(1, column, torch.where(in_block, torch.inf, cosines.gather(1, column)))

        kept = near.shape[1]
        cosines = torch.cat([near_cosines, cosines], dim=1)  # (B, kept + C), in order of row
        columns = largest_columns(cosines, min(count, cosines.shape[1])).sort(dim=1).values
        near_cosines = cosines.gather(1, columns)
        found = columns - kept + block.start
        if kept:
            found = torch.where(columns < kept, near.gather(1, columns.clamp(max=kept - 1)), found)
        near = found
    near_cosines = torch.where(near == idx[:, None], own_cosines, near_cosines)
    return near, near_cosines, close_cosines, inverse, validity


def _gather_found(result: Tensor, cosines: Tensor, columns: Tensor) -> None:
    """Copy into ``result`` (B, L) the cosines (B, C) at ``columns`` (B, L), where they are in range."""
    found = cosines.gather(1, columns.clamp(0, cosines.shape[1] - 1))
    result.copy_(torch.where((columns >= 0) & (columns < cosines.shape[1]), found, result))


def _weighted_rows(weights: Tensor, chosen: Tensor, rows: Tensor) -> Tensor:
    """Σ_k weights_bk · rows[chosen_bk], (B, d); weights, chosen: (B, K)."""
    if rows.dtype == weights.dtype and rows.device == weights.device:
        # Sums rows without a copy of them: copying, (B, K, d), took 12 to 27 times as long on 2 CPU cores.
        return nn.functional.embedding_bag(chosen, rows.detach(), mode="sum", per_sample_weights=weights)
    total = weights.new_empty(len(weights), rows.shape[1])
    for block in row_blocks(len(weights), chosen.shape[1] * rows.shape[1]):
        gathered = rows[chosen[block].to(rows.device)].to(weights)  # (R, K, d)
        total[block] = torch.bmm(weights[block, None, :], gathered)[:, 0]
    return total


class _RowSets(NamedTuple):
    """The rows an anchor is compared with, as indices and masks.

    near: (B, K) background · close: (B, L) rows; those in ``close_mask`` (B, L) are the close set · log_ratio: (B,) log
    of the ratio of the sets' sizes, or 0 · inverse: (N,) one over each row's norm
    """

    near: Tensor
    close: Tensor
    close_mask: Tensor
    log_ratio: Tensor | float
    inverse: Tensor

    def losses(self, rows: Tensor, unit: Tensor, scale: Tensor) -> Tensor:
        """Each anchor's loss, (B,), by plain operations. rows: (N, d) · unit: (B, d) · scale: ()."""
        scores = unit @ (rows.to(unit) * self.inverse[:, None]).T * scale  # (B, N)
        close = scores.gather(1, self.close).masked_fill(~self.close_mask, -torch.inf)  # (B, L)
        return scores.gather(1, self.near).logsumexp(dim=1) - close.logsumexp(dim=1) + self.log_ratio


class _AttachGradient(torch.autograd.Function):
    """Attaches their precomputed derivative to the losses; backward raises if the rows were overwritten before it."""

    @staticmethod
    def forward(
        ctx: Any, losses: Tensor, derivative: Tensor, sets: _RowSets, unit: Tensor, scale: Tensor, rows: Tensor
    ) -> Tensor:
        ctx.save_for_backward(derivative, unit, scale, rows)
        ctx.sets = sets
        return losses.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        derivative, unit, scale, rows = unchanged(ctx)
        if torch.is_grad_enabled():  # a graph of the gradient is requested
            plain = partial(ctx.sets.losses, rows.detach())
            return None, None, None, *gradients(plain, (unit, scale), ctx.needs_input_grad[3:5], grad), None
        along = (unit * derivative).sum(dim=1)  # (B,)
        return None, None, None, grad[:, None] * scale * derivative, (grad * along).sum(), None
