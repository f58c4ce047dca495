"""The columns of an anchor's scores: the batch and given rows, and which of them are negatives or positives of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from hardneg.losses.inputs import Given
from hardneg.losses.kernels.identities import Identities, related
from hardneg.losses.kernels.interface import Eligibility, RowLayout


@dataclass(frozen=True)
class LabelledRows:
    """Rows among which positives are found by label: rows (P, d) or (B, P, d), and which are positives of an anchor."""

    rows: Tensor
    eligibility: Eligibility


@dataclass(frozen=True)
class BatchIds:
    """Ids of the batch, −1 = unknown.

    own: (A, V) of the views of the anchor's instance · anchors: (A,) · pool: (P,) · pairs: (P, 2) of ids that are no
    negatives of each other
    """

    own: Tensor
    anchors: Tensor
    pool: Tensor
    pairs: Tensor | None


@dataclass(frozen=True)
class Columns:
    """What the columns of the anchors ``layout`` can be.

    pool: (P, d) rows of the batch · pool_views: its views · anchor_labels: (B,) · pool_labels: (P,) · ids: None without
    ids · labels_exclude: whether rows of the anchor's label are no negatives
    """

    layout: RowLayout
    pool: Tensor
    pool_views: int
    anchor_labels: Tensor | None
    pool_labels: Tensor | None
    ids: BatchIds | None
    labels_exclude: bool

    def negatives(
        self, in_batch: bool, given: Sequence[Given]
    ) -> tuple[tuple[Tensor, ...], Eligibility, Callable[[], Tensor]]:
        """The blocks of candidates, which are eligible, and a function for their number before labels, (A,).

        in_batch: the pool is the first block · given: the others
        """
        given = [_merged_exclusions(source) for source in given if source.rows.shape[-2] > 0]
        repeats, start = self.layout.views, len(self.pool) if in_batch else 0
        blocks = [self.pool] if in_batch else []
        excluded: list[Tensor] = []
        masks: list[Tensor | None] = []
        for source in given:
            if source.exclude is not None:
                excluded.append((start + source.exclude).repeat(repeats, 1))
            masks.append(self._mask_by_ids(source))
            blocks.append(source.rows)
            start += source.rows.shape[-2]
        before_labels = Eligibility(
            columns=start,
            own=self.layout if in_batch else None,
            pool_views=self.pool_views,
            excluded=torch.cat(excluded, dim=1) if excluded else None,
            allowed=_joined(masks, given),
            identities=self._identities(in_batch, given),
        )
        eligibility = before_labels
        if self.labels_exclude:
            assert self.anchor_labels is not None
            assert self.pool_labels is not None
            labels = _known(self.anchor_labels)  # (B,)
            groups = [self.pool_labels] if in_batch else []
            for number, source in enumerate(given):
                groups.append(_one_per_row(source.labels, source))
                if source.labels is not None and source.labels.dim() == 2:
                    masks[number] = _both(masks[number], source.labels != labels[:, None])
            eligibility = replace(
                before_labels,
                anchor_groups=labels.repeat(repeats),
                candidate_groups=torch.cat(groups) if groups else labels[:0],
                allowed=_joined(masks, given),
            )
        count = partial(_count_eligible, before_labels, self.layout, self.pool.dtype)
        if self.ids is None:  # it can be computed without a mask
            in_pool = (self.layout.global_batch - 1) * self.pool_views if in_batch else 0
            # Not the rows themselves, which the function would keep in memory with their graph.
            limits = [(source.rows.shape[-2], source.exclude, source.allowed) for source in given]
            count = partial(_count_before_labels, self.layout, in_pool, limits, self.pool.dtype)
        return tuple(blocks), eligibility, count

    def positives(self, given: Sequence[Given]) -> tuple[LabelledRows, ...]:
        """The given rows with labels, of which those with an anchor's label are its positives."""
        assert self.anchor_labels is not None
        labels, repeats = _known(self.anchor_labels), self.layout.views
        found = []
        for source in (_merged_exclusions(source) for source in given if source.rows.shape[-2] > 0):
            count, allowed = source.rows.shape[-2], source.allowed
            if source.labels is None:
                continue
            if source.labels.dim() == 2:
                same = source.labels == labels[:, None]  # (B, N)
                if source.exclude is not None:
                    same = same.scatter(1, source.exclude, False)
                eligibility = Eligibility(count, allowed=_both(allowed, same))
            else:
                eligibility = Eligibility(
                    columns=count,
                    excluded=None if source.exclude is None else source.exclude.repeat(repeats, 1),
                    anchor_groups=labels.repeat(repeats),
                    candidate_groups=source.labels,
                    same_group=True,
                    allowed=allowed,
                )
            found.append(LabelledRows(source.rows, eligibility))
        return tuple(found)

    def _mask_by_ids(self, source: Given) -> Tensor | None:
        """The mask of a source, (B, N) or (A, N), in which ids of rows per anchor are considered; None for all."""
        if self.ids is None or source.ids is None or source.ids.dim() == 1:
            return source.allowed
        repeats = self.layout.views
        other = related(self.ids.own, self.ids.anchors, source.ids.repeat(repeats, 1), self.ids.pairs)  # (A, N)
        return ~other if source.allowed is None else ~other & source.allowed.repeat(repeats, 1)

    def _identities(self, in_batch: bool, given: Sequence[Given]) -> Identities | None:
        """Which candidates of the pool and of shared rows are no negatives because of their ids."""
        if self.ids is None or not (in_batch or any(source.ids is not None for source in given)):
            return None
        columns = [self.ids.pool] if in_batch else []
        columns += [_one_per_row(source.ids, source) for source in given]
        return Identities.of(self.ids.own, self.ids.anchors, torch.cat(columns), self.ids.pairs)


# Functions of modules, not methods: those cannot be kept by a compiled graph.
def _count_before_labels(
    layout: RowLayout,
    in_pool: int,
    given: Sequence[tuple[int, Tensor | None, Tensor | None]],
    dtype: torch.dtype,
) -> Tensor:
    """The number of candidates of each anchor before labels exclude any, (A,), without ids.

    in_pool: number of candidates from the batch · given: rows, and exclusions or mask, of each source
    """
    count = torch.full((layout.batch,), in_pool, dtype=dtype, device=layout.device)
    for rows, exclude, allowed in given:
        count += rows if allowed is None else allowed.sum(dim=1)
        if exclude is not None:
            ordered = exclude.sort(dim=1).values  # the same index may occur twice
            count -= 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(dim=1)
    return count.repeat(layout.views)


def _count_eligible(eligibility: Eligibility, layout: RowLayout, dtype: torch.dtype) -> Tensor:
    return eligibility.counts(layout.batch * layout.views, dtype, layout.device)


def _merged_exclusions(source: Given) -> Given:
    """The source with its excluded rows removed from its mask, if it has one."""
    if source.exclude is None or source.allowed is None:
        return source
    return replace(source, exclude=None, allowed=source.allowed.scatter(1, source.exclude, False))


def _known(labels: Tensor) -> Tensor:
    """Labels of anchors, in which unknown ones equal no label of a candidate, not even an unknown one."""
    return labels.masked_fill(labels < 0, -2)


def _one_per_row(numbers: Tensor | None, source: Given) -> Tensor:
    """Labels or ids (N,) of shared rows; unknown for rows per anchor, whose numbers are in the mask."""
    if numbers is not None and numbers.dim() == 1:
        return numbers
    return torch.full((source.rows.shape[-2],), -1, device=source.rows.device)


def _both(one: Tensor | None, other: Tensor) -> Tensor:
    """Both masks (B, N) or (A, N) together."""
    if one is None:
        return other
    rows = max(len(one), len(other))
    return one.repeat(rows // len(one), 1) & other.repeat(rows // len(other), 1)


def _joined(masks: Sequence[Tensor | None], given: Sequence[Given]) -> Tensor | None:
    """The masks of all sources side by side, (B, n) or (A, n); None if there are none."""
    rows = 0
    for mask in masks:
        rows = rows if mask is None else max(rows, len(mask))
    if rows == 0:
        return None
    whole = []
    for mask, source in zip(masks, given, strict=True):
        if mask is None:
            mask = torch.ones(1, source.rows.shape[-2], dtype=torch.bool, device=source.rows.device)
        whole.append(mask.repeat(rows // len(mask), 1))
    return whole[0] if len(whole) == 1 else torch.cat(whole, dim=1)
