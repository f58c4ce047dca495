"""Local aggregation: draw a sample to its close neighbours, compared with its background (METHODS, section 3)."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hardneg import checks
from hardneg.checks import whole
from hardneg.evaluation.knn import _nearest
from hardneg.losses.inputs import normalized
from hardneg.losses.kernels import interface
from hardneg.losses.schedules import Adaptive, Schedule, Setting, value
from hardneg.losses.settings import Adjustable
from hardneg.losses.temperature import Learnable
from hardneg.matmul import row_blocks
from hardneg.memory.clusters import Clusters


class LocalAggregation(Adjustable):
    """−log of the mean e^{cos/temperature} over the close set C_i, divided by that over the background set B_i.

    B_i holds the own row and the rows nearest to the anchor (of equally near ones, the first), C_i the rows that share
    a cluster with it, its own included. Which rows these are carries no gradient; the loss's gradient goes to ``z``.
    Bank rows are read once per call, a tile at a time; what is kept is O(B · (background + members + d)).

    Args:
        temperature: number > 0, schedule (moved by `set_progress`), or `Learnable`
        background: rows in B_i; all rows if the bank has fewer
        form: ``"paper"`` (seed 002, eq. 5), or ``"published"``, as LA's authors code it: the sum over C_i ∩ B_i divided
            by the sum over B_i
        reduction: ``"mean"``, ``"sum"`` or ``"none"`` (one loss per anchor)

    Examples:
        >>> from hardneg.memory import MemoryBank
        >>> bank, idx = MemoryBank(size=200, dim=16), torch.tensor([3, 14, 15])
        >>> clusters = Clusters(k=10, repeats=2).fit(bank.rows)
        >>> z = torch.randn(3, 16, requires_grad=True)
        >>> LocalAggregation(background=50)(z, bank.rows, idx, clusters).backward()
        >>> bank.update(idx, z)
    """

    def __init__(
        self,
        temperature: Setting | Learnable = 0.07,
        background: int = 4096,
        form: str = "paper",
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        self.temperature, self.background, self.form, self.reduction = temperature, background, form, reduction
        self.progress = 0.0
        self._settle()

    def forward(self, z: Tensor, rows: Tensor, idx: Tensor, clusters: Clusters) -> Tensor:
        """The loss of a batch.

        z: (B, d), of any length · rows: (N, d), the bank's, also in half precision or on the host · idx: (B,) the
        anchors' own rows · clusters: of these rows
        """
        self._check(z, rows, clusters)
        idx = checks.integers("idx", idx, (len(z),), "one row of the bank per row of z").to(z.device)
        checks.in_range("idx", idx, len(rows))
        with torch.autocast(z.device.type, enabled=False):  # float32 arithmetic inside, always
            precise = torch.promote_types(torch.float32, torch.promote_types(z.dtype, rows.dtype))
            unit = normalized(z.to(precise), max(1e-30, torch.finfo(z.dtype).tiny))
            scale = self._scale(unit)
            with torch.no_grad():
                losses, pull, sets = self._losses(unit, scale, rows, idx, clusters)
            if unit.requires_grad or scale.requires_grad:
                losses = _Attach.apply(losses, pull, sets, unit, scale, rows)  # type: ignore[no-untyped-call]
        if self.reduction == "none":
            return losses
        return losses.mean() if self.reduction == "mean" else losses.sum()

    def set_progress(self, fraction: float) -> None:
        """Move a scheduled temperature to the fraction of training done, in [0, 1]."""
        if not 0 <= fraction <= 1:
            raise ValueError(f"fraction must be in [0, 1], got {fraction!r}: pass steps done / steps in all")
        self.__dict__["progress"] = float(fraction)

    def get_extra_state(self) -> Tensor:
        """Progress, as a tensor, so that any checkpoint format can hold it."""
        return torch.tensor([self.progress], dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        """Take back what `get_extra_state` gave."""
        self.set_progress(float(state[0]))

    def extra_repr(self) -> str:
        first = "" if isinstance(self.temperature, Learnable) else f"temperature={self.temperature!r}, "
        return f"{first}background={self.background}, form={self.form!r}, reduction={self.reduction!r}"

    def _settle(self) -> None:
        if not isinstance(self.temperature, Learnable):
            checks.number("temperature", self.temperature, above=0, below=float("inf"))
            schedule = self.temperature if isinstance(self.temperature, Schedule) else None
            if schedule is not None and any(isinstance(leaf, Adaptive) for leaf in schedule.leaves()):
                raise ValueError("temperature takes no Adaptive schedule here, as its memory is not saved: use another")
        whole("background", self.background)
        checks.choice("form", self.form, ("paper", "published"))
        checks.choice("reduction", self.reduction, ("mean", "sum", "none"))
        self._settled = True

    def _losses(
        self, unit: Tensor, scale: Tensor, rows: Tensor, idx: Tensor, clusters: Clusters
    ) -> tuple[Tensor, Tensor, "_Sets"]:
        """Each anchor's loss, (B,), its derivative in scale·unit, (B, d), and the two sets of rows."""
        close = clusters.members(idx).to(unit.device) if self.form == "paper" else idx[:, None]  # (B, L)
        near, near_cosines, close_cosines, inverse = _search(unit, rows, idx, self.background, close)
        scores = near_cosines * scale  # (B, K)
        background = torch.logsumexp(scores, dim=1)
        share = scores.softmax(dim=1)
        if self.form == "published":
            inside = clusters.same(idx, near).to(unit.device)  # (B, K); never empty, as the own row is in both
            scores = scores.masked_fill(~inside, -torch.inf)
            share -= scores.softmax(dim=1)
            losses = background - torch.logsumexp(scores, dim=1)
            return losses, _weighted_rows(share * inverse[near], near, rows), _Sets(near, near, inside, 0.0, inverse)
        there = close >= 0
        close = close.clamp(min=0)
        scores = (close_cosines * scale).masked_fill(~there, -torch.inf)  # (B, L)
        log_sizes = (there.sum(dim=1) / near.shape[1]).log()
        losses = background - torch.logsumexp(scores, dim=1) + log_sizes
        pull = _weighted_rows(share * inverse[near], near, rows)
        pull -= _weighted_rows(scores.softmax(dim=1) * inverse[close], close, rows)
        return losses, pull, _Sets(near, close, there, log_sizes, inverse)

    def _scale(self, unit: Tensor) -> Tensor:
        """1/temperature, ()."""
        if isinstance(self.temperature, Learnable):
            temperature: Tensor = self.temperature()
            return 1 / temperature.to(unit)
        return unit.new_full((), 1 / value(self.temperature, self.progress))

    def _check(self, z: Tensor, rows: Tensor, clusters: Clusters) -> None:
        checks.floating("z", z)
        checks.floating("rows", rows)
        if z.dim() != 2 or 0 in z.shape:
            raise ValueError(f"z must have shape (B, d) with B, d ≥ 1, got {tuple(z.shape)}")
        if rows.dim() != 2 or rows.shape[1] != z.shape[1]:
            raise ValueError(f"rows must have shape (N, {z.shape[1]}), got {tuple(rows.shape)}")
        if rows.device != z.device and rows.device.type != "cpu":
            raise ValueError(f"rows are on {rows.device}, but z on {z.device}: move them to one device")
        if not isinstance(clusters, Clusters):
            raise ValueError(f"clusters must be a Clusters, got {type(clusters).__name__}")
        if clusters.assignments.shape[1] != len(rows):
            raise ValueError(
                f"clusters are of {clusters.assignments.shape[1]} rows, but there are {len(rows)}: call fit(rows) first"
            )
        if rows.requires_grad:
            raise ValueError("rows get no gradient, but require one: pass rows.detach()")
        checks.finite("z", z)


def _search(
    unit: Tensor, rows: Tensor, idx: Tensor, count: int, close: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The own and the nearest rows of each anchor, with cosines, in one pass over the rows.

    unit: (B, d) · rows: (N, d) · idx: (B,) own rows · close: (B, L) rows whose cosines are wanted, −1 = none
    returns (B, K) indices and cosines of the nearest, (B, L) cosines of the close ones, (N,) one over each row's length
    """
    close_cosines = unit.new_zeros(close.shape)
    own_cosines = unit.new_zeros(len(unit), 1)
    inverse = unit.new_zeros(len(rows))
    near = idx.new_zeros(len(unit), 0)
    near_cosines = unit.new_zeros(len(unit), 0)
    for block in row_blocks(len(rows), len(unit)):
        part = rows[block].to(unit, non_blocking=True)  # (C, d)
        length = torch.linalg.vector_norm(part, dim=1)
        checks.finite("rows", length)
        inverse[block] = torch.where(length > 1e-30, 1 / length, 0.0)
        cosines = (unit @ part.T).mul_(inverse[block])  # (B, C)
        _take(close_cosines, cosines, close - block.start)
        own = idx[:, None] - block.start
        _take(own_cosines, cosines, own)
        # The own row comes before all others.
        here, place = (own >= 0) & (own < len(part)), own.clamp(0, len(part) - 1)
        cosines.scatter_(1, place, torch.where(here, torch.inf, cosines.gather(1, place)))

        kept = near.shape[1]
        cosines = torch.cat([near_cosines, cosines], dim=1)  # (B, kept + C), in order of row
        columns = _nearest(cosines, min(count, cosines.shape[1])).sort(dim=1).values
        near_cosines = cosines.gather(1, columns)
        found = columns - kept + block.start
        if kept:
            found = torch.where(columns < kept, near.gather(1, columns.clamp(max=kept - 1)), found)
        near = found
    near_cosines = torch.where(near == idx[:, None], own_cosines, near_cosines)
    return near, near_cosines, close_cosines, inverse


def _take(wanted: Tensor, cosines: Tensor, columns: Tensor) -> None:
    """Copy into ``wanted`` (B, L) the cosines (B, C) at those of its ``columns`` (B, L) that exist."""
    found = cosines.gather(1, columns.clamp(0, cosines.shape[1] - 1))
    wanted.copy_(torch.where((columns >= 0) & (columns < cosines.shape[1]), found, wanted))


def _weighted_rows(weights: Tensor, chosen: Tensor, rows: Tensor) -> Tensor:
    """Σ_k weights_bk · rows[chosen_bk], (B, d); weights, chosen: (B, K)."""
    if rows.dtype == weights.dtype and rows.device == weights.device:
        # Adds up rows where they lie: copying them, (B, K, d), took 12 to 27 times as long on 2 CPU cores.
        return nn.functional.embedding_bag(chosen, rows.detach(), mode="sum", per_sample_weights=weights)
    total = weights.new_empty(len(weights), rows.shape[1])
    for block in row_blocks(len(weights), chosen.shape[1] * rows.shape[1]):
        gathered = rows[chosen[block].to(rows.device)].to(weights)  # (R, K, d)
        total[block] = torch.bmm(weights[block, None, :], gathered)[:, 0]
    return total


class _Sets(NamedTuple):
    """Which rows an anchor is compared with: all that the loss needs besides their cosines.

    near: (B, K) background · close: (B, L), of which those ``there`` (B, L) are the close set · log_sizes: (B,) log of
    the sizes' quotient, or 0 · inverse: (N,) one over each row's length
    """

    near: Tensor
    close: Tensor
    there: Tensor
    log_sizes: Tensor | float
    inverse: Tensor

    def losses(self, rows: Tensor, unit: Tensor, scale: Tensor) -> Tensor:
        """Each anchor's loss, (B,), by plain operations. rows: (N, d) · unit: (B, d) · scale: ()."""
        scores = unit @ (rows.to(unit) * self.inverse[:, None]).T * scale  # (B, N)
        close = scores.gather(1, self.close).masked_fill(~self.there, -torch.inf)  # (B, L)
        return scores.gather(1, self.near).logsumexp(dim=1) - close.logsumexp(dim=1) + self.log_sizes


class _Attach(torch.autograd.Function):
    """Losses with the derivative that was found with them; refuses backward if the rows were overwritten meanwhile."""

    @staticmethod
    def forward(
        ctx: Any, losses: Tensor, pull: Tensor, sets: _Sets, unit: Tensor, scale: Tensor, rows: Tensor
    ) -> Tensor:
        ctx.save_for_backward(pull, unit, scale, rows)
        ctx.sets = sets
        return losses.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        pull, unit, scale, rows = ctx.saved_tensors  # unpacking compares the versions
        if torch.is_grad_enabled():  # a graph of the gradient is asked for
            plain = partial(ctx.sets.losses, rows.detach())
            found = interface.gradients(plain, (unit, scale), ctx.needs_input_grad[3:5], grad)
            return None, None, None, *found, None
        along = (unit * pull).sum(dim=1)  # (B,)
        return None, None, None, grad[:, None] * scale * pull, (grad * along).sum(), None
