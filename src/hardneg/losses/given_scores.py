"""The candidate set of scores that were computed elsewhere."""

from dataclasses import replace

import torch
from torch import Tensor

from hardneg import checks, distributed
from hardneg.losses.candidates import CandidateSet
from hardneg.losses.kernels.interface import Eligibility, RowLayout
from hardneg.losses.settings import Settings
from hardneg.losses.sources import GIVEN


def score_set(
    settings: Settings, positive: Tensor, candidates: Tensor, mask: Tensor | None
) -> tuple[CandidateSet, Settings, Tensor | None]:
    """The candidate set with these scores, the settings for them, and their validity; see `checks.values`.

    Every anchor is the vector (1) of one dimension, and its candidates are the scores as such vectors: then each inner
    product is a score.

    positive: (B, M) · candidates: (B, N) · mask: (B, N) bool, True = may be a negative
    """
    if settings.supervision != "none":
        raise ValueError(
            f"supervision={settings.supervision!r} needs labels, which from_scores does not take: set "
            "supervision='none', and pass the scores of all positives"
        )
    if settings.needs_guide:
        raise ValueError("from_scores takes no guide: pass the mask of its scores instead of hn.Guided")
    if settings.symmetric:
        raise ValueError("from_scores has one direction, and symmetric=True needs two: call it for each of them")
    for name, shape, scores in (("positive", "(B, M)", positive), ("candidates", "(B, N)", candidates)):
        checks.floating(name, scores)
        if scores.dim() != 2:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(scores.shape)}")
    if 0 in positive.shape:
        raise ValueError(f"positive must have shape (B, M) with B, M ≥ 1, got {tuple(positive.shape)}")
    batch, columns = len(positive), candidates.shape[1]
    if len(candidates) != batch:
        raise ValueError(f"candidates must have {batch} rows, as many as positive, got {len(candidates)}")
    if mask is not None and (mask.dtype != torch.bool or mask.shape != candidates.shape):
        raise ValueError(
            f"mask must be a bool tensor of shape {tuple(candidates.shape)}, got {mask.dtype}, {tuple(mask.shape)}"
        )
    for name, tensor in (("candidates", candidates), ("mask", mask)):
        if tensor is not None and tensor.device != positive.device:
            raise ValueError(
                f"{name} is on {tensor.device}, but positive on {positive.device}: move them to one device"
            )
    dtype = torch.promote_types(torch.promote_types(torch.float32, positive.dtype), candidates.dtype)
    positive, candidates = positive.to(dtype), candidates.to(dtype)
    allowed = None if mask is None or columns == 0 else mask
    validity = checks.jointly(checks.finite("positive", positive), checks.finite("candidates", candidates))

    def count() -> Tensor:
        if allowed is None:
            return torch.full((batch,), float(columns), dtype=dtype, device=positive.device)
        return allowed.sum(dim=1, dtype=dtype)

    layout = RowLayout(batch, 1, 0, batch, positive.device)
    if settings.num_negatives is not None and distributed.gathers(settings.gather):
        group = distributed.group_of(settings.gather)
        sizes = distributed.batch_sizes(batch, positive.device, group)  # draws depend on the row among all processes
        layout = replace(layout, offset=sum(sizes[: distributed.rank(group)]), global_batch=sum(sizes))
    found = CandidateSet(
        anchors=torch.ones(batch, 1, dtype=dtype, device=positive.device),
        layout=layout,
        candidates=(candidates[:, :, None],) if columns else (),
        eligibility=Eligibility(columns, allowed=allowed),
        count_before_labels=count,
        pair_similarity=positive,
        positive_mask=None,
        pool=positive.detach().reshape(-1, 1),
        same_label=Eligibility(0),
        source=GIVEN,
    )
    return found, replace(settings, normalize=False, max_abs_score=None, in_batch=None), validity
