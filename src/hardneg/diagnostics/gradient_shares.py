"""Gradient share by negative: which negatives of an anchor its gradient comes from."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hardneg import checks
from hardneg.checks import TensorLike
from hardneg.diagnostics.estimates import Estimate, mean_estimate
from hardneg.losses.infonce import InfoNCE
from hardneg.losses.schedules import value


class GradientShares(NamedTuple):
    """The derivatives ∂L_i/∂s_ij of some anchors' losses in the scores of their candidates.

    signed: (n, N), one row per anchor, divided by the sum of absolute values: rows sum to 1 in absolute value, or are 0
    where an anchor has no gradient from negatives (no candidates, no positives, or floored). A tilt with gradients
    through its weights makes some derivatives negative: the loss pulls these candidates closer · anchors: (n,)
    """

    signed: Tensor
    anchors: Tensor

    @property
    def shares(self) -> Tensor:
        """|∂L_i/∂s_ij| / Σ_j |∂L_i/∂s_ij|, (n, N)."""
        return self.signed.abs()

    @property
    def active(self) -> Tensor:
        """Whether an anchor has a gradient from its negatives, (n,) bool."""
        return self.shares.sum(dim=1) > 0

    def of_largest(self, k: int) -> Estimate | None:
        """Share of the k candidates with the largest gradients, mean over active anchors; None without any.

        The interval is Student's t over anchors.
        """
        k = min(checks.whole("k", k), self.signed.shape[1])
        return self._mean(self.shares.topk(k, dim=1).values.sum(dim=1))

    def of(self, chosen: Tensor) -> Estimate | None:
        """Share of the chosen candidates, (n, N) bool, such as those of the anchor's class; as `of_largest`."""
        if chosen.shape != self.signed.shape or chosen.dtype != torch.bool:
            raise ValueError(
                f"chosen must be bool of shape {tuple(self.signed.shape)}, got {chosen.dtype} {tuple(chosen.shape)}"
            )
        return self._mean(self.shares.masked_fill(~chosen.to(self.signed.device), 0).sum(dim=1))

    def _mean(self, values: Tensor) -> Estimate | None:
        return mean_estimate(values[self.active]) if bool(self.active.any()) else None


def gradient_shares(
    loss: InfoNCE, z1: Tensor, z2: Tensor | None = None, anchors: TensorLike | None = None, **arguments: Any
) -> GradientShares:
    """Shares of the gradient |∂L_i/∂s_ij| by candidate for chosen anchors, by autograd through the reference kernel.

    loss: an `InfoNCE` with one hardening, any other setting except ``debias="exact"`` with a class prior · z1, z2:
    as for the loss · anchors: (n,) rows of the loss's anchors: 0 … B − 1 are those of z1, B … 2B − 1 those of z2 where
    it has anchors (default: all) · arguments: further ones of the loss, such as ``labels``. Candidates are in the
    order of the loss: the rows of z1, then z2 (with ``in_batch="other"`` z2 only), then given negatives

    Examples:
        >>> import hardneg as hn
        >>> z1, z2 = torch.randn(8, 4), torch.randn(8, 4)
        >>> found = gradient_shares(hn.hcl(tau_plus=0.0), z1, z2, anchors=[0, 5])
        >>> found.shares.shape, found.shares.sum(dim=1).round(decimals=4)
        (torch.Size([2, 16]), tensor([1., 1.]))
    """
    if not isinstance(loss, InfoNCE):
        raise ValueError(f"loss must be an InfoNCE, got {type(loss).__name__}: its gradients have another form")
    check_form(loss)
    draws = loss.draw_state.clone() if loss.num_negatives is not None else None
    with torch.no_grad():
        loss(z1, z2, **arguments)
        if draws is not None:
            loss.draw_state.copy_(draws)  # a diagnostic must not change the next draw
    return shares_of_last_call(loss, anchors)


def shares_of_last_call(loss: InfoNCE, anchors: TensorLike | None = None) -> GradientShares:
    """`gradient_shares` of the last call of the loss, whose embeddings must not have changed since."""
    check_form(loss)
    call = loss.last_call()
    number = call.number_of_anchors
    rows = torch.arange(number) if anchors is None else checks.as_tensor("anchors", anchors)
    rows = checks.integers("anchors", rows, (rows.numel(),), "one row per anchor")
    if rows.numel() == 0:
        raise ValueError("anchors is empty: choose at least one row")
    checks.require_in_range("anchors", rows, number)
    slopes = call.slopes(rows, loss.normalize_weights)  # (n, N)
    total = slopes.abs().sum(dim=1, keepdim=True)
    return GradientShares(slopes / total.masked_fill(total == 0, 1), rows)


def check_form(loss: InfoNCE) -> None:
    """Raise unless ∂L_i/∂s_ij is a multiple of ∂log R_i/∂s_ij, with one R for each anchor."""
    if isinstance(loss.hardening, Mapping):
        raise ValueError("hardening by source gives each source a distribution of its own: pass one hardening")
    if isinstance(loss.in_batch, tuple):
        raise ValueError(f"in_batch={loss.in_batch!r} adds up several directions: use 'both' or 'other'")
    if loss.debias == "exact" and value(loss.class_prior, loss.progress) != 0:
        raise ValueError("debias='exact' with a class prior weighs candidates in a second place: use debias='hcl'")
