"""Who meets whom: from the tensors of one call to anchors, their candidates and their positives."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hardneg import checks, distributed
from hardneg.objectives.kernels import Eligibility


@dataclass(frozen=True)
class Inputs:
    """The arguments of one call, checked and in one floating dtype.

    views: (B, V, d), the anchors' view first · paired: two views of equal standing, each the other's positive ·
    labels: (B,) · negatives: (N, d) or (B, N, d) · exclude: (B, E) · negative_labels: (N,) or (B, N) ·
    negative_mask: (B, N) bool
    """

    views: Tensor
    paired: bool
    labels: Tensor | None = None
    negatives: Tensor | None = None
    exclude: Tensor | None = None
    negative_labels: Tensor | None = None
    negative_mask: Tensor | None = None


@dataclass(frozen=True)
class Meeting:
    """A set of anchors with the candidates and positives they meet.

    anchors: (A, d) · candidates: blocks (N, d) or (B, N, d) · who: which of them an anchor may meet ·
    met: (A,) their number before labels are looked at · order: (A,) place of each anchor among the ``total_anchors`` of
    all processes · similarity: (A, M) of anchors with their own positives, or
    None where positives are found by group in the ``pool`` (P, d) as ``friends`` says
    """

    anchors: Tensor
    candidates: tuple[Tensor, ...]
    who: Eligibility
    met: Tensor
    order: Tensor
    total_anchors: int
    similarity: Tensor | None
    pool: Tensor
    friends: Eligibility

    def detached(self) -> "Meeting":
        """The same without the graph behind it."""
        return replace(
            self,
            anchors=self.anchors.detach(),
            candidates=tuple(block.detach() for block in self.candidates),
            similarity=None if self.similarity is None else self.similarity.detach(),
            pool=self.pool.detach(),
        )


def read(
    z1: Tensor,
    z2: Tensor | None,
    labels: Tensor | None,
    negatives: Tensor | None,
    exclude: Tensor | None,
    negative_labels: Tensor | None,
    negative_mask: Tensor | None,
) -> Inputs:
    """Check shapes, dtypes and values, and bring all embeddings to one dtype of at least 32 bits."""
    checks.floating("z1", z1)
    if z1.dim() != 2 or 0 in z1.shape:
        raise ValueError(f"z1 must have shape (B, d) with B, d ≥ 1, got {tuple(z1.shape)}")
    batch, dim = z1.shape
    embeddings = {"z1": z1}
    if z2 is not None:
        checks.floating("z2", z2)
        if z2.dim() not in (2, 3) or (z2.shape[0], z2.shape[-1]) != (batch, dim) or 0 in z2.shape:
            raise ValueError(
                f"z2 must have shape (B, d) or (B, M, d) with (B, d) = {batch, dim}, got {tuple(z2.shape)}"
            )
        embeddings["z2"] = z2
    if labels is not None:
        labels = checks.integers("labels", labels, (batch,), "one per row of z1")
        checks.values(labels >= -1, "labels must be ≥ −1, where −1 means unknown")

    if negatives is None:
        for name, given in (
            ("exclude", exclude),
            ("negative_labels", negative_labels),
            ("negative_mask", negative_mask),
        ):
            if given is not None:
                raise ValueError(f"{name} was given without negatives: pass negatives= or leave it out")
    else:
        checks.floating("negatives", negatives)
        shape = tuple(negatives.shape)
        if not (len(shape) == 2 or (len(shape) == 3 and shape[0] == batch)) or shape[-1] != dim:
            raise ValueError(f"negatives must have shape (N, d) or (B, N, d) with (B, d) = {batch, dim}, got {shape}")
        embeddings["negatives"] = negatives
        if exclude is not None:
            columns = exclude.shape[1] if isinstance(exclude, Tensor) and exclude.dim() == 2 else None
            expected = (batch,) if columns is None else (batch, columns)
            exclude = checks.integers("exclude", exclude, expected, "indices into negatives for each row of z1")
            checks.in_range("exclude", exclude, shape[-2])
            exclude = exclude.reshape(batch, -1)  # (B, E)
        if negative_labels is not None:
            negative_labels = checks.integers("negative_labels", negative_labels, shape[:-1], "one per negative")
            checks.values(negative_labels >= -1, "negative_labels must be ≥ −1, where −1 means unknown")
        if negative_mask is not None:
            expected = (batch, shape[-2])
            if not isinstance(negative_mask, Tensor) or negative_mask.dtype != torch.bool:
                got = negative_mask.dtype if isinstance(negative_mask, Tensor) else type(negative_mask).__name__
                raise ValueError(f"negative_mask must be a bool tensor (True = may be a negative), got {got}")
            if tuple(negative_mask.shape) != expected:
                raise ValueError(f"negative_mask must have shape {expected} (B, N), got {tuple(negative_mask.shape)}")

    others = (labels, exclude, negative_labels, negative_mask)
    for name, tensor in (*embeddings.items(), *((f"tensor {i}", t) for i, t in enumerate(others) if t is not None)):
        if tensor.device != z1.device:
            raise ValueError(f"{name} is on {tensor.device}, but z1 on {z1.device}: move all inputs to one device")
    for name, tensor in embeddings.items():
        checks.finite(name, tensor)
    dtype = torch.float32
    for tensor in embeddings.values():
        dtype = torch.promote_types(dtype, tensor.dtype)
    first = z1.to(dtype)[:, None]  # (B, 1, d)
    second = [] if z2 is None else [z2.to(dtype).reshape(batch, -1, dim)]  # (B, M, d)
    return Inputs(
        views=torch.cat([first, *second], dim=1),
        paired=z2 is not None and z2.dim() == 2,
        labels=labels,
        negatives=None if negatives is None else negatives.to(dtype),
        exclude=exclude,
        negative_labels=negative_labels,
        negative_mask=negative_mask,
    )


def with_unit_length(inputs: Inputs) -> Inputs:
    """The same inputs with all embeddings brought to unit length."""
    negatives = inputs.negatives
    return replace(
        inputs, views=normalized(inputs.views), negatives=None if negatives is None else normalized(negatives)
    )


def normalized(vectors: Tensor, smallest: float = 1e-30) -> Tensor:
    """Unit vectors along the last dimension; what is shorter than ``smallest`` becomes zero, with zero gradient.

    Dividing by the largest entry first keeps the squares from overflowing or vanishing.
    """
    largest = vectors.detach().abs().amax(dim=-1, keepdim=True)
    zero = largest < smallest
    moderate = vectors / largest.masked_fill(zero, 1)
    length: Tensor = torch.linalg.vector_norm(moderate, dim=-1, keepdim=True)
    return (moderate / length.masked_fill(zero, 1)).masked_fill(zero, 0)


def arrange(inputs: Inputs, *, in_batch: str | None, symmetric: bool, supervision: str, gather: bool) -> list[Meeting]:
    """The meetings of one call: one, or one for each direction if ``symmetric``."""
    batch, count, _ = inputs.views.shape
    everyone, labels, offset = inputs.views, inputs.labels, 0
    if gather and distributed.world_size() > 1:
        sizes = distributed.batch_sizes(batch, everyone.device)
        offset = sum(sizes[: torch.distributed.get_rank()])
        everyone = distributed.gather(everyone, sizes)
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


def check_range(arranged: Sequence[Meeting], scale: Tensor, tilt: float | Tensor) -> None:
    """Raise if scores of unnormalised embeddings might overflow, tilted or not."""
    for meeting in arranged:
        anchor = meeting.anchors.detach().abs().amax()
        reach = torch.stack([block.detach().abs().amax() for block in meeting.candidates if block.numel()]).amax()
        largest = anchor * reach * meeting.anchors.shape[1] * scale.detach() * (tilt + 2)
        checks.values(
            largest < torch.finfo(scale.dtype).max,
            "embeddings are too large for normalize=False: scores overflow; scale them down or set normalize=True",
        )


@dataclass(frozen=True)
class _Crowd:
    """All that meet in one call. ``everyone``: (G, V, d) the views of all processes, this one's from ``offset`` on."""

    inputs: Inputs
    everyone: Tensor
    labels: Tensor | None  # (G,)
    offset: int
    supervision: str

    def meeting(self, anchor_views: Sequence[int], pool_views: Sequence[int], in_batch: bool) -> Meeting:
        """Anchors of some views against the pool of some views (if ``in_batch``) and the given negatives."""
        views, whole = self.inputs.views, len(self.everyone)
        repeats = len(anchor_views)
        anchors = _flat(views, anchor_views)  # (A, d)
        # One tensor for both where they are the same, so that nothing is copied or gathered twice.
        alone = self.everyone is views
        pool = (
            anchors if alone and list(anchor_views) == list(pool_views) else _flat(self.everyone, pool_views)
        )  # (P, d)
        instance = self.offset + torch.arange(len(views), device=views.device)  # (B,)
        blocks = whole * torch.arange(len(pool_views), device=views.device)  # (V,) where each view begins in the pool

        candidates, excluded, columns = [], [], 0
        met = torch.zeros(len(views), device=views.device, dtype=views.dtype)  # (B,)
        if in_batch:
            candidates, excluded, columns = [pool], [instance[:, None] + blocks], len(pool)
            met += (whole - 1) * len(pool_views)
        allowed, negatives = self.inputs.negative_mask, self.inputs.negatives
        if negatives is not None:
            candidates.append(negatives)
            exclude = self.inputs.exclude
            if exclude is not None and allowed is not None:
                allowed, exclude = allowed.scatter(1, exclude, False), None
            if exclude is not None:
                excluded.append(columns + exclude)
                ordered = exclude.sort(dim=1).values
                met -= 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(dim=1)
            columns += negatives.shape[-2]
            met += negatives.shape[-2] if allowed is None else allowed.sum(dim=1)

        anchor_groups = candidate_groups = None
        if self.supervision in ("negatives", "full"):
            anchor_groups, candidate_groups, allowed = self._labelled(pool_views if in_batch else [], allowed)
        who = Eligibility(
            columns=columns,
            excluded=torch.cat(excluded, dim=1).repeat(repeats, 1) if excluded else None,
            anchor_groups=None if anchor_groups is None else anchor_groups.repeat(repeats),
            candidate_groups=candidate_groups,
            allowed=allowed,
        )
        similarity = None if self.supervision in ("positives", "full") else self._similarity(anchor_views)
        friends = self._friends(anchor_views, pool_views, instance)
        return Meeting(
            anchors=anchors,
            candidates=tuple(candidates),
            who=who,
            met=met.repeat(repeats),
            order=torch.cat([instance + whole * position for position in range(repeats)]),
            total_anchors=whole * repeats,
            similarity=similarity,
            pool=pool,
            friends=friends,
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

    def _similarity(self, anchor_views: Sequence[int]) -> Tensor:
        """Inner products of anchors with the other views of the same instance, (A, M)."""
        views = self.inputs.views
        if list(anchor_views) == [0]:
            return (views[:, :1] * views[:, 1:]).sum(dim=-1)
        # Two views: each is the other's only positive.
        return (views[:, 0] * views[:, 1]).sum(dim=-1).repeat(len(anchor_views))[:, None]

    def _friends(self, anchor_views: Sequence[int], pool_views: Sequence[int], instance: Tensor) -> Eligibility:
        """Positives by group: same known label or same instance, but not the anchor itself."""
        whole = len(self.everyone)
        everyone = torch.arange(whole, device=instance.device)
        groups = -2 - everyone  # an unknown label is a group of its own
        if self.labels is not None and self.supervision in ("positives", "full"):
            groups = torch.where(self.labels >= 0, self.labels, groups)
        itself = None
        if set(anchor_views) <= set(pool_views):
            itself = torch.cat([instance + whole * list(pool_views).index(view) for view in anchor_views])[:, None]
        return Eligibility(
            columns=whole * len(pool_views),
            excluded=itself,
            anchor_groups=groups[instance].repeat(len(anchor_views)),
            candidate_groups=groups.repeat(len(pool_views)),
            same=True,
        )


def _flat(views: Tensor, chosen: Sequence[int]) -> Tensor:
    """Some of the views (B, V, d), one view after the other, (len(chosen)·B, d)."""
    return torch.cat([views[:, view] for view in chosen])
