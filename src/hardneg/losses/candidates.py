"""Which candidates an anchor is compared with: from the tensors of one call to anchors, candidates and positives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from hardneg import checks, distributed
from hardneg.losses.inputs import Inputs
from hardneg.losses.kernels import Eligibility, RowLayout
from hardneg.losses.settings import Settings


@dataclass(frozen=True)
class CandidateSet:
    """A set of anchors with their candidates and positives.

    anchors: (A, d) · layout: their rows among those of all processes · candidates: blocks (N, d) or (B, N, d) ·
    eligibility: which of them an anchor may be compared with · count_before_labels: returns the number of candidates of
    each anchor before labels exclude any, (A,); a function, because it is rarely needed · pair_similarity: (B, M) inner
    products of instances' first view with their own positives, or None if positives are found by label · positive_mask:
    (A, M) bool, which of the own positives exist; None for all · pool: (P, d) where positives are found by label ·
    same_label: which rows of the pool are positives of an anchor
    """

    anchors: Tensor
    layout: RowLayout
    candidates: tuple[Tensor, ...]
    eligibility: Eligibility
    count_before_labels: Callable[[], Tensor]
    pair_similarity: Tensor | None
    positive_mask: Tensor | None
    pool: Tensor
    same_label: Eligibility

    @property
    def own_similarity(self) -> Tensor | None:
        """Inner products of anchors with their own positives, (A, M)."""
        views = self.layout.views
        # With two views, each is the only positive of the other.
        return (
            self.pair_similarity
            if self.pair_similarity is None or views == 1
            else self.pair_similarity.repeat(views, 1)
        )

    def detached(self, copy: Callable[[Tensor], Tensor] = Tensor.detach) -> "CandidateSet":
        """A copy without the autograd graph. copy: returns detached embeddings, possibly in half precision."""
        return replace(
            self,
            anchors=copy(self.anchors),
            candidates=tuple([copy(block) for block in self.candidates]),
            pair_similarity=None if self.pair_similarity is None else self.pair_similarity.detach(),
            pool=copy(self.pool),
        )

    def versions(self) -> list[int | None]:
        """The version counters of the candidates' tensors; None for inference tensors, which have none."""
        return [None if block.is_inference() else block._version for block in self.candidates]


def candidate_sets(inputs: Inputs, settings: Settings) -> list[CandidateSet]:
    """The candidate sets of one call: one, or one for each direction if ``symmetric``."""
    count, batch, _ = inputs.views.shape
    views, labels, offset = inputs.views, inputs.labels, 0
    if distributed.gathers(settings.gather):
        group = distributed.group_of(settings.gather)
        sizes = distributed.batch_sizes(batch, views.device, group)
        offset = sum(sizes[: distributed.rank(group)])
        views = distributed.gather(views.transpose(0, 1), sizes, group).transpose(0, 1)
        labels = None if labels is None else distributed.gather(labels, sizes, group)
    global_batch = _GlobalBatch(inputs, views, labels, offset, settings.supervision)
    first, rest = range(1), range(1, count) if count > 1 else range(1)
    if settings.in_batch == "both":
        return [global_batch.candidate_set(range(2) if inputs.paired else first, range(count), in_batch=True)]
    if settings.in_batch is None:
        return [global_batch.candidate_set(first, rest, in_batch=False)]
    sets = [global_batch.candidate_set(first, rest, in_batch=True)]
    if settings.symmetric:
        sets.append(global_batch.candidate_set(rest, first, in_batch=True))
    return sets


def check_score_range(sets: Sequence[CandidateSet], scale: Tensor, tilt: float | Tensor) -> Tensor | None:
    """Raise if scores of unnormalized embeddings might overflow, tilted or not; see `checks.values`."""
    validities = []
    for candidates in sets:
        anchor = candidates.anchors.detach().abs().amax()
        blocks = (candidates.pool, *candidates.candidates)
        largest = torch.stack([block.detach().abs().amax() for block in blocks]).amax()
        bound = anchor * largest * candidates.anchors.shape[1] * scale.detach() * (tilt + 2)
        validity = checks.values(
            bound < torch.finfo(scale.dtype).max,
            "embeddings are too large for normalize=False: scores overflow; scale them down or set normalize=True",
        )
        validities.append(validity)
    return checks.jointly(*validities)


@dataclass(frozen=True)
class _GlobalBatch:
    """The inputs of one call, with the views (V, G, d) and labels (G,) of all processes.

    offset: position of this process's first instance among the G of all processes
    """

    inputs: Inputs
    views: Tensor
    labels: Tensor | None
    offset: int
    supervision: str

    def candidate_set(self, anchor_views: range, pool_views: range, in_batch: bool) -> CandidateSet:
        """Anchors of some views, with candidates of other views (if ``in_batch``) and the given negatives."""
        local, instances = self.inputs.views, self.views.shape[1]
        batch, repeats = local.shape[1], len(anchor_views)
        anchors = pool = _flatten_views(local, anchor_views)  # (A, d)
        # One tensor for both where they are the same: kernels then need one product for the gradient.
        if self.views is not local or anchor_views != pool_views:
            pool = _flatten_views(self.views, pool_views)  # (P, d)
        layout = RowLayout(batch, repeats, self.offset, instances, local.device)
        candidates = [pool] if in_batch else []
        columns = len(pool) if in_batch else 0
        allowed, negatives, exclude = self.inputs.negative_mask, self.inputs.negatives, self.inputs.exclude
        excluded = None
        if negatives is not None and negatives.shape[-2] > 0:
            candidates.append(negatives)
            if exclude is not None and allowed is not None:
                allowed, exclude = allowed.scatter(1, exclude, False), None
            if exclude is not None:
                excluded = (columns + exclude).repeat(repeats, 1)
            columns += negatives.shape[-2]
        else:
            allowed = exclude = None
        given = 0 if negatives is None else negatives.shape[-2]
        in_batch_views = len(pool_views) if in_batch else 0
        count = partial(_count_before_labels, layout, in_batch_views, given, exclude, allowed, local.dtype)

        anchor_groups = candidate_groups = None
        if self.supervision in ("negatives", "full"):
            anchor_groups, candidate_groups, allowed = self._label_groups(in_batch_views, allowed)
        eligibility = Eligibility(
            columns=columns,
            own=layout if in_batch else None,
            pool_views=len(pool_views),
            excluded=excluded,
            anchor_groups=None if anchor_groups is None else anchor_groups.repeat(repeats),
            candidate_groups=candidate_groups,
            allowed=allowed,
        )
        by_label = self.supervision in ("positives", "full")
        return CandidateSet(
            anchors=anchors,
            layout=layout,
            candidates=tuple(candidates),
            eligibility=eligibility,
            count_before_labels=count,
            pair_similarity=None if by_label else self._pair_similarity(),
            positive_mask=self.inputs.positive_mask,
            pool=pool,
            same_label=self._same_label(anchor_views, pool_views, layout) if by_label else Eligibility(0),
        )

    def _label_groups(self, pool_views: int, allowed: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Groups of anchors (B,) and candidates (N,), equal where both labels are known and equal; and the mask.

        Labels of negatives per anchor, (B, N), cannot be groups of candidates: they are added to the mask ``allowed``.
        """
        assert self.labels is not None
        assert self.inputs.labels is not None
        anchor_labels = self.inputs.labels.masked_fill(self.inputs.labels < 0, -2)  # unknown: equal to no label
        candidate_labels = [self.labels.repeat(pool_views)]
        given = self.inputs.negative_labels
        if given is not None and given.dim() == 1:
            candidate_labels.append(given)
        elif given is not None:
            differ = given != anchor_labels[:, None]
            allowed = differ if allowed is None else allowed & differ
            candidate_labels.append(given.new_full((given.shape[1],), -1))
        return anchor_labels, torch.cat(candidate_labels), allowed

    def _pair_similarity(self) -> Tensor:
        """Inner products of the first view with the other views of the same instance, (B, M)."""
        if self.inputs.similarity is not None:
            return self.inputs.similarity[:, None]
        views = self.inputs.views
        return (views[0] * views[1:]).sum(dim=-1).T

    def _same_label(self, anchor_views: range, pool_views: range, layout: RowLayout) -> Eligibility:
        """Positives in the pool: same known label or same instance, but not the anchor itself."""
        total, anchors = layout.global_batch, layout.batch * layout.views
        instances = layout.instances(slice(0, anchors))  # (A,)
        assert self.labels is not None
        unknown = -2 - torch.arange(total, device=layout.device)  # each unknown label is a separate group
        groups = torch.where(self.labels >= 0, self.labels, unknown)
        own_row = None
        if set(anchor_views) <= set(pool_views):
            # Computed on the device: a list from the host would synchronize.
            starts = total * torch.arange(
                anchor_views[0] - pool_views[0], anchor_views[-1] + 1 - pool_views[0], device=layout.device
            )
            own_row = (instances + starts.repeat_interleave(layout.batch))[:, None]
        return Eligibility(
            columns=total * len(pool_views),
            excluded=own_row,
            anchor_groups=groups[instances],
            candidate_groups=groups.repeat(len(pool_views)),
            same_group=True,
        )


def _count_before_labels(
    layout: RowLayout, views: int, given: int, exclude: Tensor | None, allowed: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The number of candidates of each anchor before labels exclude any, (A,).

    views: number of views of the batch that are candidates · given: number of given negatives · exclude: (B, E) those
    not counted · allowed: (B, n) bool, those counted
    """
    count = torch.full((layout.batch,), (layout.global_batch - 1) * views, dtype=dtype, device=layout.device)
    count += given if allowed is None else allowed.sum(dim=1)
    if exclude is not None:
        ordered = exclude.sort(dim=1).values  # the same index may occur twice
        count -= 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(dim=1)
    return count.repeat(layout.views)


def _flatten_views(views: Tensor, chosen: range) -> Tensor:
    """Some of the views (V, B, d), one view after the other, (len(chosen)·B, d)."""
    return views[chosen.start : chosen.stop].reshape(-1, views.shape[-1])
