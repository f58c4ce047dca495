"""Which candidates an anchor is compared with: from the tensors of one call to anchors, candidates and positives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from hardneg import checks, distributed
from hardneg.losses.columns import BatchIds, Columns, LabelledRows
from hardneg.losses.inputs import Given, Inputs
from hardneg.losses.kernels import tiled
from hardneg.losses.kernels.guide import GuideRows
from hardneg.losses.kernels.interface import Eligibility, RowLayout
from hardneg.losses.settings import Settings
from hardneg.losses.sources import BATCH


@dataclass(frozen=True)
class CandidateSet:
    """A set of anchors with their candidates and positives.

    anchors: (A, d) · layout: their rows among those of all processes · candidates: blocks (N, d) or (B, N, d) ·
    eligibility: which of them an anchor may be compared with · count_before_labels: returns the number of candidates of
    each anchor before labels exclude any, (A,); a function, because it is rarely needed · pair_similarity: (B, M) inner
    products of instances' first view with their own positives, or None if positives are found by label · positive_mask:
    (A, M) bool, which of the own positives exist; None for all · pool: (P, d) where positives are found by label ·
    same_label: which rows of the pool are positives of an anchor · given_positives: given rows with labels, of which
    some are positives too · source: whose candidates these are, where each source has a distribution of its own ·
    guide: a guide model's vectors of anchors and candidates, if they are chosen by its scores
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
    given_positives: tuple[LabelledRows, ...] = ()
    source: str = BATCH
    guide: GuideRows | None = None

    @property
    def labelled_rows(self) -> tuple[LabelledRows, ...]:
        """All rows among which positives are found by label."""
        return LabelledRows(self.pool, self.same_label), *self.given_positives

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

    @torch.no_grad()
    def longest_positive(self) -> Tensor:
        """The largest norm of an anchor's positives, (A,); 0 without any."""
        rows: Tensor = torch.linalg.vector_norm(self.pool, dim=1)  # (P,)
        layout = self.layout
        if self.pair_similarity is not None:
            own = rows.view(-1, layout.global_batch)[:, layout.offset : layout.offset + layout.batch]  # (V, B)
            if layout.views == 2:  # each view is the positive of the other
                return own.flip(0).flatten()
            own = own[-self.pair_similarity.shape[1] :]  # (M, B): the pool may begin with the anchors' own view
            return (own if self.positive_mask is None else own.masked_fill(~self.positive_mask.T, 0)).amax(dim=0)
        found = []
        for part in self.labelled_rows:
            lengths = torch.linalg.vector_norm(part.rows, dim=-1, keepdim=True)
            anchors, scale = rows.new_ones(len(self.anchors), 1), rows.new_ones(())
            found.append(tiled.row_maximum(anchors, [lengths], scale, part.eligibility))
        return torch.stack(found).amax(dim=0).clamp(min=0)  # −inf without positives

    def detached(self, copy: Callable[[Tensor], Tensor] = Tensor.detach) -> "CandidateSet":
        """A copy without the autograd graph. copy: returns detached embeddings, possibly in half precision."""
        return replace(
            self,
            anchors=copy(self.anchors),
            candidates=tuple([copy(block) for block in self.candidates]),
            pair_similarity=None if self.pair_similarity is None else self.pair_similarity.detach(),
            pool=copy(self.pool),
            given_positives=tuple([LabelledRows(copy(part.rows), part.eligibility) for part in self.given_positives]),
        )

    def versions(self) -> list[int | None]:
        """The version counters of the candidates' tensors; None for inference tensors, which have none."""
        return [None if block.is_inference() else block._version for block in self.candidates]


def candidate_sets(inputs: Inputs, settings: Settings) -> list[list[CandidateSet]]:
    """The candidate sets of one call: for one direction, or for both if ``symmetric``.

    Each direction has one set; or, where sources have distributions of their own, one set per source, which differ in
    the candidates only. If ``in_batch`` names directions, their sets are added up for the anchors of the first.
    """
    count, batch, _ = inputs.views.shape
    local = (inputs.views, inputs.labels, inputs.ids, inputs.not_negatives, inputs.guide)
    global_batch = _GlobalBatch(inputs, *local, 0, settings)
    if distributed.gathers(settings.gather):
        global_batch = _gathered(inputs, settings, batch)
    first, rest = range(1), range(1, count) if count > 1 else range(1)
    if settings.in_batch == "both":
        return [global_batch.candidate_sets(range(2) if inputs.paired else first, range(count), in_batch=True)]
    if settings.in_batch is None:
        return [global_batch.candidate_sets(first, rest, in_batch=False)]
    sets = [global_batch.candidate_sets(first, rest, in_batch=True)]
    if isinstance(settings.in_batch, tuple):
        without_given = replace(global_batch, inputs=replace(global_batch.inputs, given=()))
        for direction in settings.in_batch:
            if direction != "query_to_doc":
                anchors, pool = _VIEWS[direction]
                sets[0] += without_given.candidate_sets(anchors, pool, in_batch=True)
    if settings.symmetric:
        sets.append(global_batch.candidate_sets(rest, first, in_batch=True))
    return sets


_VIEWS = {  # of the anchors and of the candidates
    "query_to_query": (range(1), range(1)),
    "doc_to_query": (range(1, 2), range(1)),
    "doc_to_doc": (range(1, 2), range(1, 2)),
}


def _gathered(inputs: Inputs, settings: Settings, batch: int) -> "_GlobalBatch":
    """The batch of all processes, and their shared given candidates."""
    views, labels, ids, pairs = inputs.views, inputs.labels, inputs.ids, inputs.not_negatives
    group = distributed.group_of(settings.gather)
    sizes = distributed.batch_sizes(batch, views.device, group)
    if ids is not None:
        ids = distributed.gather(ids.contiguous(), sizes, group)
        pairs = ids.new_empty(0, 2) if pairs is None else pairs
        pairs = distributed.gather(pairs, distributed.batch_sizes(len(pairs), views.device, group), group)
    return _GlobalBatch(
        inputs=replace(inputs, given=tuple([_gathered_rows(given, group) for given in inputs.given])),
        views=_gathered_views(views, sizes, group),
        labels=None if labels is None else distributed.gather(labels, sizes, group),
        ids=ids,
        not_negatives=pairs,
        guide=None if inputs.guide is None else _gathered_views(inputs.guide, sizes, group),
        offset=sum(sizes[: distributed.rank(group)]),
        settings=settings,
    )


def _gathered_views(views: Tensor, sizes: list[int], group: distributed.Group) -> Tensor:
    """Views (V, B, d) of all processes, (V, G, d)."""
    return distributed.gather(views.transpose(0, 1), sizes, group).transpose(0, 1)


def _gathered_rows(given: Given, group: distributed.Group) -> Given:
    """The shared rows of all processes. Rows that are the same on all of them, as in a gathered queue, count once."""
    if not given.shared or distributed.identical(given.rows, given.labels, given.ids, group=group):
        return given
    sizes = distributed.batch_sizes(len(given.rows), given.rows.device, group)
    before, total = sum(sizes[: distributed.rank(group)]), sum(sizes)
    after = total - before - len(given.rows)
    allowed = given.allowed
    return replace(
        given,
        rows=distributed.gather(given.rows, sizes, group),
        exclude=None if given.exclude is None else given.exclude + before,
        labels=None if given.labels is None else distributed.gather(given.labels, sizes, group),
        allowed=None if allowed is None else torch.nn.functional.pad(allowed, (before, after), value=True),
        ids=None if given.ids is None else distributed.gather(given.ids, sizes, group),
        guide=None if given.guide is None else distributed.gather(given.guide, sizes, group),
    )


def check_score_range(sets: Sequence[CandidateSet], scale: Tensor, tilt: float | Tensor) -> Tensor | None:
    """Raise if scores of unnormalized embeddings might overflow, tilted or not; see `checks.values`."""
    validities = []
    for candidates in sets:
        anchor = candidates.anchors.detach().abs().amax()
        given = [part.rows for part in candidates.given_positives]
        blocks = (candidates.pool, *candidates.candidates, *given)
        largest = torch.stack([block.detach().abs().amax() for block in blocks]).amax()
        bound = anchor * largest * candidates.anchors.shape[1] * scale.detach() * (tilt + 2)
        validity = checks.values(
            bound < torch.finfo(scale.dtype).max,
            "embeddings are too large for normalize=False: scores overflow; scale them down (or the scores, with "
            "from_scores), or set normalize=True",
        )
        validities.append(validity)
    return checks.jointly(*validities)


@dataclass(frozen=True)
class _GlobalBatch:
    """The inputs of one call; views (V, G, d), labels (G,), ids (G, V), pairs of ids (P, 2) and guide (V, G, e) of all
    processes.

    offset: position of this process's first instance among the G of all processes
    """

    inputs: Inputs
    views: Tensor
    labels: Tensor | None
    ids: Tensor | None
    not_negatives: Tensor | None
    guide: Tensor | None
    offset: int
    settings: Settings

    def candidate_sets(self, anchor_views: range, pool_views: range, in_batch: bool) -> list[CandidateSet]:
        """Anchors of some views, with candidates of other views (if ``in_batch``) and the given negatives.

        One set with all of them; or one per source, if sources have distributions of their own.
        """
        local, instances = self.inputs.views, self.views.shape[1]
        batch, repeats = local.shape[1], len(anchor_views)
        anchors = pool = _flatten_views(local, anchor_views)  # (A, d)
        # One tensor for both where they are the same: kernels then need one product for the gradient.
        if self.views is not local or anchor_views != pool_views:
            pool = _flatten_views(self.views, pool_views)  # (P, d)
        layout = RowLayout(batch, repeats, self.offset, instances, local.device)
        by_label = self.settings.supervision in ("positives", "full")
        columns = Columns(
            layout=layout,
            pool=pool,
            pool_views=len(pool_views) if in_batch else 0,
            anchor_labels=self.inputs.labels,
            pool_labels=None if self.labels is None else self.labels.repeat(len(pool_views)),
            ids=None if self.ids is None else self._ids(anchor_views, pool_views),
            labels_exclude=self.settings.supervision in ("negatives", "full"),
        )
        whole = CandidateSet(
            anchors=anchors,
            layout=layout,
            candidates=(),
            eligibility=Eligibility(0),
            count_before_labels=partial(anchors.new_zeros, len(anchors)),
            pair_similarity=None if by_label else self._pair_similarity(),
            positive_mask=self.inputs.positive_mask,
            pool=pool,
            same_label=self._same_label(anchor_views, pool_views, layout) if by_label else Eligibility(0),
            given_positives=columns.positives(self.inputs.given) if by_label else (),
        )

        best = self._best_by_guide(whole, anchor_views, pool_views, columns)

        def of_source(name: str, in_batch: bool, given: Sequence[Given]) -> CandidateSet:
            blocks, eligibility, count = columns.negatives(in_batch, given)
            guide = None
            if best is not None and self.settings.is_guided(name):
                guide = self._guide_rows(anchor_views, pool_views if in_batch else None, given, best)
            return replace(
                whole, candidates=blocks, eligibility=eligibility, count_before_labels=count, source=name, guide=guide
            )

        if self.settings.by_source is None:
            return [of_source(BATCH, in_batch, self.inputs.given)]
        sets = [of_source(BATCH, True, ())] if in_batch else []
        return sets + [of_source(given.name, False, (given,)) for given in self.inputs.given]

    def _guide_rows(
        self, anchor_views: range, pool_views: range | None, given: Sequence[Given], best: Tensor
    ) -> GuideRows:
        """The guide's rows of the anchors, of the pool, and of given sources. best: (A,), as in `GuideRows`"""
        assert self.inputs.guide is not None
        assert self.guide is not None
        blocks = [] if pool_views is None else [_flatten_views(self.guide, pool_views)]
        for source in given:
            if source.rows.shape[-2] > 0:
                assert source.guide is not None
                blocks.append(source.guide.to(self.guide.dtype))
        return GuideRows(_flatten_views(self.inputs.guide, anchor_views), tuple(blocks), best)

    def _best_by_guide(
        self, whole: CandidateSet, anchor_views: range, pool_views: range, columns: Columns
    ) -> Tensor | None:
        """The guide's score of each anchor's best positive, (A,); None without a guide."""
        guide = self.inputs.guide
        if guide is None or self.guide is None:
            return None
        if whole.pair_similarity is not None:
            scores = (guide[0] * guide[1:]).sum(dim=-1).T  # (B, M)
            mask = self.inputs.positive_mask
            scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
            return scores.amax(dim=1).repeat(len(anchor_views))
        given = [replace(source, rows=source.guide) for source in self.inputs.given if source.guide is not None]
        anchors, scale = _flatten_views(guide, anchor_views), guide.new_ones(())
        parts = LabelledRows(_flatten_views(self.guide, pool_views), whole.same_label), *columns.positives(given)
        found = [tiled.row_maximum(anchors, [part.rows], scale, part.eligibility) for part in parts]
        return torch.stack(found).amax(dim=0)

    def _ids(self, anchor_views: range, pool_views: range) -> BatchIds:
        local = self.inputs.ids
        assert local is not None
        assert self.ids is not None
        own = local if local.stride(1) != 0 else local[:, :1]  # one id for all views
        return BatchIds(
            own=own.repeat(len(anchor_views), 1),
            anchors=torch.cat([local[:, view] for view in anchor_views]),
            pool=torch.cat([self.ids[:, view] for view in pool_views]),
            pairs=self.not_negatives,
        )

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


def _flatten_views(views: Tensor, chosen: range) -> Tensor:
    """Some of the views (V, B, d), one view after the other, (len(chosen)·B, d)."""
    return views[chosen.start : chosen.stop].reshape(-1, views.shape[-1])
