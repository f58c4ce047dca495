"""The selection of one block of queries: candidates arrive in order of rank, page by page, until each has enough."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hardneg import randomness
from hardneg.mining.rules import GUIDE, NOT_NEGATIVES, RANK_RANGE, Rules, log_weights, name_of

MOST_LISTED = 100  # dropped candidates that are listed for a query; all of them are counted
Allowed = Callable[[Tensor, Tensor], Tensor]  # queries of the block and documents (P,) each → bool (P,)


@dataclass(frozen=True)
class Dropped:
    """Dropped candidates: (D,) query, document, score and rule (its number in the names of the rules) of each."""

    query: Tensor
    document: Tensor
    score: Tensor
    rule: Tensor

    @staticmethod
    def joined(parts: list["Dropped"]) -> "Dropped":
        """All of them, in the order of the queries; up to MOST_LISTED of each, the highest scores first."""
        if not parts:
            none = torch.empty(0, dtype=torch.int64)
            return Dropped(none, none, torch.empty(0), none.to(torch.uint8))
        query, document, score, rule = (
            torch.cat([getattr(part, name) for part in parts]) for name in ("query", "document", "score", "rule")
        )
        order = score.argsort(descending=True, stable=True)
        order = order[query[order].argsort(stable=True)]
        ordered = query[order].contiguous()
        order = order[torch.arange(len(ordered)) - torch.searchsorted(ordered, ordered) < MOST_LISTED]
        return Dropped(query[order], document[order], score[order], rule[order])


@dataclass
class Selection:
    """State of the queries of one block.

    rules: as given · first: number of the block's first query · lowest_positive: (B,) · candidates: (B,) documents that
    are neither positives, nor duplicates, nor left out by the user · allowed: the guide's filter
    """

    rules: Rules
    first: int
    lowest_positive: Tensor
    candidates: Tensor
    allowed: Allowed | None = None
    dropped: list[Dropped] = field(default_factory=list)

    def __post_init__(self) -> None:
        rows, count = len(self.candidates), self.rules.num_negatives
        self.names = self.rules.names
        self.begin, self.end = self.rules.window(self.candidates)  # ranks, (B,) each
        self.limit_names, self.limits = self.rules.limits(self.lowest_positive)
        self.lowest = self.rules.lowest(self.lowest_positive)
        self.indices = torch.full((rows, count), -1)
        self.scores = torch.full((rows, count), -torch.inf)
        self.kept = torch.zeros(rows, dtype=torch.int64)
        self.rank = torch.zeros(rows, dtype=torch.int64)  # of the next candidate
        self.listed = torch.zeros(rows, dtype=torch.int64)
        self.counts = torch.zeros(len(self.names), dtype=torch.int64)

    def open_rows(self) -> Tensor:
        """The queries (R,) that have too few negatives and candidates left."""
        return ((self.kept < self.rules.num_negatives) & (self.rank < self.end)).nonzero()[:, 0]

    def leave_out(self, rows: Tensor, documents: Tensor, scores: Tensor) -> None:
        """Count and list documents (P,) of queries (P,) that are no candidates because the user says so."""
        number = self.names.index(NOT_NEGATIVES)
        self.counts[number] += len(rows)
        rule = torch.full((len(rows),), number, dtype=torch.uint8)
        self.dropped.append(Dropped(rows + self.first, documents, scores, rule))

    def skip(self, rows: Tensor, above: Tensor) -> None:
        """Count the next candidates of some queries as dropped by the limits. above: (R, U) number above each limit"""
        above = torch.minimum(above, (self.end - self.rank)[rows, None])
        for name, number in zip(
            self.limit_names, above.diff(dim=1, prepend=above.new_zeros(len(rows), 1)).T, strict=True
        ):
            self.counts[self.names.index(name)] += number.sum()
        if self.limit_names:
            self.rank[rows] += above[:, -1]

    def end_at_last(self, rows: Tensor) -> None:
        """End the ranks of some queries with the last candidate."""
        self.end[rows] = torch.minimum(self.end[rows], self.rank[rows])

    def add(self, rows: Tensor, scores: Tensor, documents: Tensor) -> None:
        """Select from the next candidates of some queries. scores, documents: (R, D) in order of rank, −1 at the end"""
        rank = self.rank[rows, None] + torch.arange(scores.shape[1])
        valid = (documents >= 0) & (rank < self.end[rows, None])
        rule = self._rules_that_drop(rows, rank, scores)
        survivors = valid & (rule < 0)
        if self.rules.sample:
            chosen = self._drawn(rows, scores, documents, survivors, rule)
            looked_at = valid
        else:
            chosen = self._first(rows, scores, documents, survivors, rule)
            enough = (chosen.sum(dim=1) + self.kept[rows]) == self.rules.num_negatives
            last = torch.where(enough, _last_column(chosen), scores.shape[1] - 1)
            looked_at = valid & (torch.arange(scores.shape[1]) <= last[:, None])
        self._keep(rows, scores, documents, chosen)
        self._drop(rows, scores, documents, looked_at & (rule >= 0), rule)
        self.rank[rows] += valid.sum(dim=1)
        self._end_below_lowest(rows, scores, valid, looked_at)

    def _rules_that_drop(self, rows: Tensor, rank: Tensor, scores: Tensor) -> Tensor:
        """Number of the first rule that drops each candidate (R, D), −1 for none."""
        rule = torch.full(scores.shape, -1, dtype=torch.int8)
        if (weighting := self.rules.weighting) is not None and weighting.has_general_weights:
            rule[log_weights(weighting, scores) == -torch.inf] = self.names.index(name_of(weighting))
        if self.lowest is not None:
            rule[scores < self.lowest[1][rows, None]] = self.names.index(self.lowest[0])
        for number in reversed(range(len(self.limit_names))):
            rule[scores > self.limits[rows, number, None]] = self.names.index(self.limit_names[number])
        rings = [name_of(part) for part in self.rules.hardening if part.percentiles() is not None]
        if rings:
            rule[rank < self.begin[rows, None]] = self.names.index(rings[0])
        rule[rank < self.rules.start] = self.names.index(RANK_RANGE)
        return rule

    def _first(self, rows: Tensor, scores: Tensor, documents: Tensor, survivors: Tensor, rule: Tensor) -> Tensor:
        """The first survivors (R, D) as far as negatives are missing, filtered by the guide; updates the rules."""
        missing = (self.rules.num_negatives - self.kept[rows])[:, None]
        asked = torch.zeros_like(survivors)
        while True:
            chosen = survivors & (survivors.cumsum(dim=1) <= missing)
            new = chosen & ~asked
            if self.allowed is None or not bool(new.any()):
                return chosen
            self._ask_guide(rows, documents, new, survivors, rule)
            asked |= new

    def _drawn(self, rows: Tensor, scores: Tensor, documents: Tensor, survivors: Tensor, rule: Tensor) -> Tensor:
        """Survivors (R, D) drawn without replacement, in proportion to their weights: the largest of log w + Gumbel."""
        if self.allowed is not None:
            self._ask_guide(rows, documents, survivors.clone(), survivors, rule)
        draws = randomness.integers(torch.tensor([self.rules.seed, 0]), self.first + rows, scores.shape[1])
        uniform = ((draws.double() + 0.5) / 2.0**62).clamp(max=1 - 2.0**-53)
        noisy = log_weights(self.rules.weighting, scores).double() - (-uniform.log()).log()
        noisy.masked_fill_(~survivors, -torch.inf)
        columns = noisy.topk(min(self.rules.num_negatives, scores.shape[1]), dim=1).indices
        return torch.zeros_like(survivors).scatter_(1, columns, True) & survivors

    def _ask_guide(self, rows: Tensor, documents: Tensor, asked: Tensor, survivors: Tensor, rule: Tensor) -> None:
        """Drop the candidates that the guide does not allow, of those asked for (R, D)."""
        assert self.allowed is not None
        row, column = asked.nonzero(as_tuple=True)
        refused = ~self.allowed(rows[row], documents[row, column])
        row, column = row[refused], column[refused]
        survivors[row, column] = False
        rule[row, column] = self.names.index(GUIDE)

    def _keep(self, rows: Tensor, scores: Tensor, documents: Tensor, chosen: Tensor) -> None:
        row, column = chosen.nonzero(as_tuple=True)
        place = self.kept[rows[row]] + (chosen.cumsum(dim=1) - 1)[row, column]
        # By numpy, in one thread: PyTorch starts threads for any number of indices.
        self.indices.numpy()[rows[row], place] = documents[row, column]
        self.scores.numpy()[rows[row], place] = scores[row, column]
        self.kept[rows] += chosen.sum(dim=1)

    def _drop(self, rows: Tensor, scores: Tensor, documents: Tensor, dropped: Tensor, rule: Tensor) -> None:
        """Count the dropped candidates (R, D), and list the best-ranked of each query."""
        self.counts += rule[dropped].long().bincount(minlength=len(self.names))
        listed = dropped & (dropped.cumsum(dim=1) <= (MOST_LISTED - self.listed[rows])[:, None])
        self.listed[rows] += listed.sum(dim=1)
        row, column = listed.nonzero(as_tuple=True)
        self.dropped.append(
            Dropped(
                rows[row] + self.first, documents[row, column], scores[row, column], rule[row, column].to(torch.uint8)
            )
        )

    def _end_below_lowest(self, rows: Tensor, scores: Tensor, valid: Tensor, looked_at: Tensor) -> None:
        """Count all further candidates as dropped by the lower limit once one is below it: scores only descend.

        Not if that one is above an upper limit, which is the first rule to drop it, and maybe the next ones.
        """
        if self.lowest is None:
            return
        bound = torch.cat([self.lowest[1][rows, None], self.limits[rows]], dim=1)
        below = (looked_at & (scores < bound[:, :1]) & (scores <= bound.amin(dim=1, keepdim=True))).any(dim=1)
        ended = rows[below & (self.kept[rows] < self.rules.num_negatives)]
        self.counts[self.names.index(self.lowest[0])] += (self.end[ended] - self.rank[ended]).sum()
        self.rank[ended] = self.end[ended]


def _last_column(chosen: Tensor) -> Tensor:
    """The last true column of each row (R, D); −1 if there is none."""
    columns = torch.arange(1, chosen.shape[1] + 1)
    return (chosen * columns).amax(dim=1) - 1
