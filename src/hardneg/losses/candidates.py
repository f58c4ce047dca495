"""Who meets whom: from the tensors of one call to anchors, their candidates and their positives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from hardneg import checks, distributed
from hardneg.losses.inputs import Inputs
from hardneg.losses.kernels import Eligibility, RowLayout


@dataclass(frozen=True)
class Meeting:
    """A set of anchors with the candidates and positives they meet.

    anchors: (A, d) · layout: their rows among those of all processes · candidates: blocks (N, d) or (B, N, d) ·
    eligibility: which of them an anchor may be compared with · met: gives their number before labels are looked at,
    (A,); a function, because it is rarely needed · pairs: (B, M) inner products of instances' first view with their
    positives, or None where positives are found by group in the ``pool`` (P, d) as ``friends`` says · real: (A, M)
    bool, which of the own positives are there; None for all
    """

    anchors: Tensor
    layout: RowLayout
    candidates: tuple[Tensor, ...]
    eligibility: Eligibility
    met: Callable[[], Tensor]
    pairs: Tensor | None
    real: Tensor | None
    pool: Tensor
    friends: Eligibility

    @property
    def similarity(self) -> Tensor | None:
        """Inner products of anchors with their own positives, (A, M)."""
        # Of two views each is the other's only positive.
        views = self.layout.views
        return self.pairs if self.pairs is None or views == 1 else self.pairs.repeat(views, 1)

    def detached(self, half_copies: Callable[[Tensor], Tensor] = Tensor.detach) -> "Meeting":
        """The same without the graph behind it. half_copies: gives embeddings to keep that take less memory."""
        return replace(
            self,
            anchors=half_copies(self.anchors),
            candidates=tuple(half_copies(block) for block in self.candidates),
            pairs=None if self.pairs is None else self.pairs.detach(),
            pool=half_copies(self.pool),
        )


def arrange(inputs: Inputs, *, in_batch: str | None, symmetric: bool, supervision: str, gather: bool) -> list[Meeting]:
    """The meetings of one call: one, or one for each direction if ``symmetric``."""
    count, batch, _ = inputs.views.shape
    everyone, labels, offset = inputs.views, inputs.labels, 0
    if gather and distributed.world_size() > 1:
        sizes = distributed.batch_sizes(batch, everyone.device)
        offset = sum(sizes[: torch.distributed.get_rank()])
        everyone = distributed.gather(everyone.transpose(0, 1), sizes).transpose(0, 1)
        labels = None if labels is None else distributed.gather(labels, sizes)
    crowd = _Crowd(inputs, everyone, labels, offset, supervision)
    first, rest = [0], list(range(1, count)) or [0]
    if in_batch == "both":
        return [crowd.meeting([0, 1] if inputs.paired else first, list(range(count)), in_batch=True)]
    if in_batch is None:
        return [crowd.meeting(first, rest, in_batch=False)]
    return [crowd.meeting(first, rest, in_batch=True)] + (
        [crowd.meeting(rest, first, in_batch=True)] if symmetric else []
    )


def of_pairs(batch: int, in_batch: str | None, symmetric: bool, device: torch.device) -> Eligibility:
    """Who meets whom in the batch, if its pairs are all that meet, in one problem: first views, then second ones."""
    views = 2 if in_batch == "both" or symmetric else 1
    layout = RowLayout(batch, views, 0, batch, device)
    return Eligibility(views * batch, own=layout, pool_views=views, crossed=symmetric)


def check_range(arranged: Sequence[Meeting], scale: Tensor, tilt: float | Tensor) -> None:
    """Raise if scores of unnormalised embeddings might overflow, tilted or not."""
    for meeting in arranged:
        anchor = meeting.anchors.detach().abs().amax()
        reach = torch.stack([block.detach().abs().amax() for block in (meeting.pool, *meeting.candidates)]).amax()
        largest = anchor * reach * meeting.anchors.shape[1] * scale.detach() * (tilt + 2)
        checks.values(
            largest < torch.finfo(scale.dtype).max,
            "embeddings are too large for normalize=False: scores overflow; scale them down or set normalize=True",
        )


@dataclass(frozen=True)
class _Crowd:
    """All that meet in one call. ``everyone``: (V, G, d) the views of all processes, this one's from ``offset`` on."""

    inputs: Inputs
    everyone: Tensor
    labels: Tensor | None  # (G,)
    offset: int
    supervision: str

    def meeting(self, anchor_views: Sequence[int], pool_views: Sequence[int], in_batch: bool) -> Meeting:
        """Anchors of some views against the pool of some views (if ``in_batch``) and the given negatives."""
        views, whole = self.inputs.views, self.everyone.shape[1]
        batch, repeats = views.shape[1], len(anchor_views)
        anchors = pool = _flat(views, anchor_views)  # (A, d)
        # One tensor for both where they are the same: kernels then need one product for the gradient.
        if self.everyone is not views or list(anchor_views) != list(pool_views):
            pool = _flat(self.everyone, pool_views)  # (P, d)
        layout = RowLayout(batch, repeats, self.offset, whole, views.device)
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
        met = partial(_met, layout, len(pool_views) if in_batch else 0, given, exclude, allowed, views.dtype)

        anchor_groups = candidate_groups = None
        if self.supervision in ("negatives", "full"):
            anchor_groups, candidate_groups, allowed = self._labelled(pool_views if in_batch else [], allowed)
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
        return Meeting(
            anchors=anchors,
            layout=layout,
            candidates=tuple(candidates),
            eligibility=eligibility,
            met=met,
            pairs=None if by_label else self._pairs(),
            real=self.inputs.positive_mask,
            pool=pool,
            friends=self._friends(anchor_views, pool_views, layout) if by_label else Eligibility(0),
        )

    def _labelled(self, pool_views: Sequence[int], allowed: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Labels of anchors (B,) and candidates (N,) such that only known equals are equal; and a finer mask."""
        assert self.labels is not None
        assert self.inputs.labels is not None
        mine = self.inputs.labels.masked_fill(self.inputs.labels < 0, -2)  # unknown equals nobody, unknown or not
        theirs = [self.labels.repeat(len(pool_views))]
        given = self.inputs.negative_labels
        if given is not None and given.dim() == 1:
            theirs.append(given)
        elif given is not None:  # per anchor: (B, N)
            differ = given != mine[:, None]
            allowed = differ if allowed is None else allowed & differ
            theirs.append(given.new_full((given.shape[1],), -1))
        return mine, torch.cat(theirs), allowed

    def _pairs(self) -> Tensor:
        """Inner products of the first view with the other views of the same instance, (B, M)."""
        if self.inputs.similarity is not None:
            return self.inputs.similarity[:, None]
        views = self.inputs.views
        return (views[0] * views[1:]).sum(dim=-1).T

    def _friends(self, anchor_views: Sequence[int], pool_views: Sequence[int], layout: RowLayout) -> Eligibility:
        """Positives by group: same known label or same instance, but not the anchor itself."""
        whole, anchors = layout.global_batch, layout.batch * layout.views
        instances = layout.instances(slice(0, anchors))  # (A,)
        everyone = torch.arange(whole, device=layout.device)
        assert self.labels is not None
        groups = torch.where(self.labels >= 0, self.labels, -2 - everyone)  # an unknown label is a group of its own
        itself = None
        if set(anchor_views) <= set(pool_views):
            # Views in a row, counted on the device: a list from the host would make it wait.
            starts = whole * torch.arange(
                anchor_views[0] - pool_views[0], anchor_views[-1] + 1 - pool_views[0], device=layout.device
            )
            itself = (instances + starts.repeat_interleave(layout.batch))[:, None]
        return Eligibility(
            columns=whole * len(pool_views),
            excluded=itself,
            anchor_groups=groups[instances],
            candidate_groups=groups.repeat(len(pool_views)),
            same_group=True,
        )


def _met(
    layout: RowLayout, views: int, given: int, exclude: Tensor | None, allowed: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """How many candidates each anchor meets before labels are looked at, (A,).

    views: of the pool · given: negatives given, of which ``exclude`` (B, E) are not met, or only ``allowed`` (B, n) are
    """
    met = torch.full((layout.batch,), (layout.global_batch - 1) * views, dtype=dtype, device=layout.device)
    met += given if allowed is None else allowed.sum(dim=1)
    if exclude is not None:
        ordered = exclude.sort(dim=1).values
        met -= 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(dim=1)
    return met.repeat(layout.views)


def _flat(views: Tensor, chosen: Sequence[int]) -> Tensor:
    """Some of the views (V, B, d), one view after the other, (len(chosen)·B, d)."""
    first, size = chosen[0], len(chosen)
    assert list(chosen) == list(range(first, first + size))
    return views[first : first + size].reshape(-1, views.shape[-1])
