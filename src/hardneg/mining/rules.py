"""The rules of mining: which candidates of a query may be its negatives, and the reason for each one dropped."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hardneg import checks
from hardneg.losses.hardening import Hardening
from hardneg.losses.kernels.interface import Bound, Rule

RANK_RANGE, MAX_SCORE, GUIDE, DUPLICATE = "rank_range", "max_score", "guide", "duplicate"
NOT_NEGATIVES = "not_negatives"


@dataclass(frozen=True)
class Rules:
    """Checked settings of the selection; arguments as for `hardneg.mine`, with scores instead of cosines.

    A dropped candidate is counted for the first rule that drops it, in the order of `names`.
    """

    num_negatives: int
    hardening: tuple[Hardening, ...]
    start: int
    stop: int | None
    max_score: float | None
    sample: bool
    seed: int

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the rules in the order in which they are applied: pairs, ranks, upper and lower limits, weights."""
        used = [RANK_RANGE, *(name_of(part) for part in self.hardening if part.percentiles() is not None)]
        used += [name for name, _ in self._uppers(torch.zeros(1))]
        used += [name for name, _ in self._lowers(torch.zeros(1))]
        used += [name_of(part) for part in self.hardening if part.has_general_weights]
        return tuple(dict.fromkeys([NOT_NEGATIVES, *used, GUIDE]))

    @property
    def needs_positive(self) -> bool:
        """Whether a rule compares with the score of a positive."""
        return any(part.needs_positive for part in self.hardening)

    @property
    def weighting(self) -> Hardening | None:
        """The hardening that weights candidates; None for equal weights."""
        return next((part for part in self.hardening if part.has_weights), None)

    def window(self, candidates: Tensor) -> tuple[Tensor, Tensor]:
        """First and one-past-last rank that the rank range and the rings allow, of queries with so many candidates."""
        stop = candidates if self.stop is None else candidates.clamp(max=self.stop)
        ranked = (stop - self.start).clamp(min=0)
        rings = tuple(ring for part in self.hardening if (ring := part.percentiles()) is not None)
        low, high = Rule(rings=rings).ranks(ranked)  # in ascending order of score
        return self.start + ranked - high, torch.minimum(self.start + ranked - low, candidates)

    def depth(self, candidates: Tensor, guided: bool) -> int:
        """Candidates to rank at first: where rules drop some, ten times as many as are kept, or the whole window."""
        begin, end = self.window(candidates)
        if not self.sample:
            some_dropped = guided or bool(self._uppers(torch.zeros(1)))
            enough = (10 if some_dropped else 1) * self.num_negatives
            end = torch.where(end - begin <= 2 * enough, end, begin + enough)
        return max(1, int(end.amax()))

    def limits(self, positive: Tensor) -> tuple[tuple[str, ...], Tensor]:
        """Names (U) and running minima (B, U) of the highest scores kept. positive: (B,) of the lowest positive"""
        uppers = self._uppers(positive)
        if not uppers:
            return (), torch.empty(len(positive), 0)
        bounds = torch.stack([_expanded(bound, positive) for _, bound in uppers], dim=1)
        return tuple(name for name, _ in uppers), bounds.cummin(dim=1).values

    def lowest(self, positive: Tensor) -> tuple[str, Tensor] | None:
        """Name of the rule with the lowest scores kept (B,), and these; of several rules the last is named."""
        lowers = self._lowers(positive)
        if not lowers:
            return None
        bounds = torch.stack([_expanded(bound, positive) for _, bound in lowers], dim=1)
        return lowers[-1][0], bounds.amax(dim=1)

    def _uppers(self, positive: Tensor) -> list[tuple[str, Bound]]:
        given = [(name_of(part), part.bounds(positive)[1]) for part in self.hardening]
        return [(name, bound) for name, bound in [*given, (MAX_SCORE, self.max_score)] if bound is not None]

    def _lowers(self, positive: Tensor) -> list[tuple[str, Bound]]:
        given = [(name_of(part), part.bounds(positive)[0]) for part in self.hardening]
        return [(name, bound) for name, bound in given if bound is not None]


def _expanded(bound: Bound, positive: Tensor) -> Tensor:
    return torch.as_tensor(bound, dtype=positive.dtype).expand(positive.shape)


def name_of(part: Hardening) -> str:
    """The name of a hardening as a rule."""
    return type(part).__name__


def checked_rules(
    num_negatives: object,
    hardening: object,
    rank_range: object,
    max_score: object,
    sample: object,
    seed: object,
) -> Rules:
    """Check the settings of `hardneg.mine` that choose among the ranked candidates."""
    count = checks.whole("num_negatives", num_negatives)
    start, stop = _checked_range(rank_range)
    if stop is not None and stop - start < count:
        raise ValueError(
            f"rank_range={rank_range!r} holds {stop - start} candidates, fewer than num_negatives={count}: "
            "raise its end, or ask for fewer"
        )
    cap = None if max_score is None else checks.number("max_score", max_score, at_least=-1, at_most=1)
    drawn, chosen_seed = checks.boolean("sample", sample), checks.whole("seed", seed, 0)
    if chosen_seed >= 1 << 63:
        raise ValueError(f"seed must be below 2⁶³, got {chosen_seed}")
    return Rules(count, _checked_hardening(hardening, drawn), start, stop, _plain(cap), drawn, chosen_seed)


def _checked_range(given: object) -> tuple[int, int | None]:
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise ValueError(f"rank_range must be (first, end) with end None for no end, got {given!r}")
    start = checks.whole("the start of rank_range", given[0], 0)
    return start, None if given[1] is None else checks.whole("the end of rank_range", given[1])


def _checked_hardening(given: object, sample: bool) -> tuple[Hardening, ...]:
    if isinstance(given, Mapping):
        raise ValueError("hardening by source is for losses: give hn.mine one hardening, or a tuple of them")
    parts = given if isinstance(given, tuple) else (given,)
    found = []
    for part in parts:
        if not isinstance(part, Hardening):
            raise ValueError(f"hardening must be a Hardening or a tuple of them, got {part!r}")
        if part.needs_guide:
            raise ValueError(f"{part!r} is for losses: give hn.mine guide=, which filters by the lowest positive")
        if next(part.schedules(), None) is not None:
            raise ValueError(f"hardening={part!r} has a schedule, but mining has no training steps: give numbers")
        found.append(part.in_scores(1.0))
    weighted = [part for part in found if part.has_weights]
    if len(weighted) > 1:
        raise ValueError(f"hardening takes at most one tilt (Exponential or Custom), got {parts!r}")
    if weighted and not sample:
        raise ValueError(f"{weighted[0]!r} has weights for a draw, but sample=False keeps the best: pass sample=True")
    return tuple(found)


def _plain(number: object) -> float | None:
    return None if number is None else float(number)  # type: ignore[arg-type]


def log_weights(weighting: Hardening | None, scores: Tensor) -> Tensor:
    """Logarithms of the weights of candidates with these scores in a draw."""
    if weighting is None:
        return torch.zeros_like(scores)
    if weighting.has_general_weights:
        return weighting.log_weight(scores)
    tilt = weighting.tilt()
    return scores * tilt
