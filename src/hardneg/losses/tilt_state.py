"""The β of `EffectiveShare` in a loss: estimated from the scores of a call, averaged over calls and processes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from hardneg import distributed, randomness
from hardneg.losses import combine
from hardneg.losses.candidates import CandidateSet
from hardneg.losses.effective_share import LARGEST_EXPONENT, Supports
from hardneg.losses.execution import check_forward, is_eager
from hardneg.losses.hardening import Hardening
from hardneg.losses.kernels import TILED
from hardneg.losses.kernels.interface import HalfCopies, Rule, wrapped
from hardneg.losses.kernels.reference import banded, score_matrix
from hardneg.losses.settings import Settings, SourceHardening

MOST_ANCHORS, MOST_CANDIDATES = 256, 4096  # of an estimate
MASK_ENTRIES = 1 << 26  # of the mask of all candidates, from which those of an estimate are chosen
RATE = 0.1  # share of a new estimate in β
DRAW = 0x5A  # the counter of the draws that choose candidates
# Kernels multiply masked scores, −inf, by the tilt, and −inf·0 is NaN. A tilt this small changes no sum.
LEAST_TILT = 1e-20


class ComputedTilt(Hardening):
    """Weights e^{βs} with a β that is a tensor (), as it was at the time of a call."""

    def __init__(self, beta: Tensor) -> None:
        self.beta = beta

    def tilt(self) -> Tensor:
        return self.beta.clamp(min=LEAST_TILT)


class TiltState(nn.Module):
    """The part of a loss that holds the β of each `EffectiveShare`, and moves it in calls that train."""

    tilt_state: Tensor  # (K, 2), see `moved`; only if a β is an `EffectiveShare`, as the next one
    tilt_calls: Tensor  # (), the number of calls that have moved it
    _shares: tuple[str, ...] = ()  # the keys of `Settings.effective_shares`
    _calls: int | None = None  # `tilt_calls` as a number; None if it must be read

    def _configure_tilts(self, names: tuple[str, ...]) -> None:
        """Make the state of `EffectiveShare`; a name that it had before keeps its β."""
        if names == self._shares:
            return
        before = dict(zip(self._shares, self.tilt_state, strict=True)) if self._shares else {}
        self.__dict__["_shares"] = names
        if not names:
            del self.tilt_state, self.tilt_calls
            return
        with torch.inference_mode(False):  # training could not update an inference tensor
            empty = torch.zeros(2) if not before else next(iter(before.values())).new_zeros(2)
            self.register_buffer("tilt_state", torch.stack([before.get(name, empty) for name in names]))
            if not before:
                self.register_buffer("tilt_calls", torch.zeros((), dtype=torch.long))
                self.__dict__["_calls"] = 0

    def _tilted(
        self,
        settings: Settings,
        inputs: Sequence[object],
        found: Callable[[], tuple[list[list[CandidateSet]], Tensor]],
    ) -> tuple[Settings, dict[str, Tensor]]:
        """The settings of a call with each `EffectiveShare` replaced by its β, moved first if this call trains; and β.

        inputs: the tensors of the call · found: returns its candidate sets and 1/temperature
        """
        if not self._shares:
            return settings, {}
        gradients = any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
        if self.training and gradients and torch.is_grad_enabled() and is_eager():
            check_forward("EffectiveShare would move β once more")
            with torch.no_grad():
                calls = int(self.tilt_calls) if self._calls is None else self._calls
                directions, scale = found()
                if self.tilt_state.device != scale.device:  # the loss was not moved with the model
                    self.tilt_state, self.tilt_calls = (
                        self.tilt_state.to(scale.device),
                        self.tilt_calls.to(scale.device),
                    )
                self.tilt_state.copy_(moved(self.tilt_state, settings, directions, scale, calls))
                self.tilt_calls += 1
                self.__dict__["_calls"] = calls + 1
        # Copies, because the next call changes the state, maybe before this call's backward pass.
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        # β + 1 in the precision of the scores; float64 only where they are, since some accelerators have none.
        precision = torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32
        values = self.tilt_state.detach()[:, 0].to(tensors[0].device, precision, copy=True)
        betas = dict(zip(self._shares, values.unbind(), strict=True))
        return with_tilts(settings, betas), betas

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        self.__dict__["_calls"] = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        state = self._buffers.get("tilt_state")
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if state is not None and self.tilt_state.dtype != state.dtype:
            # β moves by steps that half precision would round away, and may be above its largest number.
            self.tilt_state = state.to(self.tilt_state.device)
        return self


def with_tilts(settings: Settings, betas: dict[str, Tensor]) -> Settings:
    """The settings of a call with β as given, () for each key of `Settings.effective_shares`."""
    if settings.by_source is None:
        return replace(settings, weighting=ComputedTilt(betas[""])) if betas else settings
    sources = {
        name: SourceHardening(ComputedTilt(betas[name]), part.bands) if name in betas else part
        for name, part in settings.by_source.items()
    }
    own = sources.get("batch", SourceHardening())
    return replace(settings, by_source=sources, weighting=own.weighting)


@torch.no_grad()
def moved(
    state: Tensor, settings: Settings, directions: Sequence[Sequence[CandidateSet]], scale: Tensor, calls: int
) -> Tensor:
    """The state after a call: (K, 2), β of each key, and 1 if it was estimated before, else 0.

    state: before the call · directions: the candidate sets of each · scale: (), 1/temperature · calls: number of calls
    before
    """
    estimates = _estimates(settings, directions, scale.detach(), calls).to(state.device, torch.float32)  # (K, 2)
    if distributed.gathers(settings.gather):
        estimates = distributed.total(estimates, distributed.group_of(settings.gather))
    estimate, defined = estimates[:, 0] / estimates[:, 1].clamp(min=1), estimates[:, 1] > 0  # (K,)
    beta, known = state.float().unbind(dim=1)
    rate = torch.where(known > 0, RATE, 1.0)
    after = torch.where(defined, (1 - rate) * beta + rate * estimate, beta)
    return torch.stack([after, torch.maximum(known, defined.float())], dim=1)


def _estimates(settings: Settings, directions: Sequence[Sequence[CandidateSet]], scale: Tensor, calls: int) -> Tensor:
    """An estimate of β for each key, followed by 1, or two zeros where there is none, (K, 2)."""
    shares = settings.effective_shares
    settings = with_tilts(settings, {name: torch.zeros_like(scale) for name in shares})
    sets = [[candidates.detached() for candidates in direction] for direction in directions]
    every = [candidates for direction in sets for candidates in direction]
    weights = combine.weight_rule(settings, every, scale, None)
    supports: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in shares}
    for direction in sets:
        best = None
        if settings.needs_positive:
            positives = combine.positives_of(direction[0], scale, TILED, HalfCopies(None))
            best = combine.best_positive(settings, direction[0], positives, scale)
        for candidates in direction:
            name = "" if settings.by_source is None else candidates.source
            if name in shares and candidates.eligibility.columns > 0:
                own = settings.of_source(candidates.source)
                rule = combine.banded_rule(own, weights, best, candidates.guide, scale, candidates.anchors.shape[1])
                supports[name].append(_support(candidates, rule, scale, MOST_ANCHORS // len(every) or 1, calls))
    found = []
    for name, share in shares.items():
        parts = [(scores * weights.score_factor, kept) for scores, kept in supports[name]]
        if not parts:
            found.append(torch.stack([torch.zeros_like(scale)] * 2))
            continue
        known = Supports(parts)
        largest = LARGEST_EXPONENT / _largest(settings, parts, scale)  # 0 if a score overflows, which the loss reports
        beta, defined = known.solve(share, largest), known.is_defined() & (largest > 0)
        found.append(torch.stack([torch.where(defined, beta, 0.0), defined.to(beta.dtype)]))
    return torch.stack(found)


def _largest(settings: Settings, parts: Sequence[tuple[Tensor, Tensor]], scale: Tensor) -> Tensor:
    """The largest possible |score| in the weights, (); of unnormalized embeddings the largest one found, at least 1."""
    if settings.weight_range is not None:
        return torch.full_like(scale, settings.weight_range)
    if settings.normalize:
        return scale
    found = [scores.masked_fill(~kept, 0.0).abs().amax() for scores, kept in parts]
    return torch.stack(found).amax().clamp(min=1.0)


def _support(candidates: CandidateSet, rule: Rule, scale: Tensor, most: int, calls: int) -> tuple[Tensor, Tensor]:
    """Scores (R, N) of at most ``most`` anchors with at most 4,096 candidates, and which are negatives, (R, N) bool.

    Of more anchors a block is chosen, of more candidates one from each of about 4,096 equal parts, both by ``calls``.
    """
    total, width, device = len(candidates.anchors), candidates.eligibility.columns, candidates.anchors.device
    number = min(most, total, max(1, MASK_ENTRIES // width))
    groups = -(-total // number)
    start = 0 if groups == 1 else randomness.mix(DRAW, calls) % groups * (total - number) // (groups - 1)
    rows = slice(start, start + number)
    eligible = torch.ones(number, width, dtype=torch.bool, device=device)
    candidates.eligibility.mask_(eligible, rows, False)
    blocks = []
    for block in candidates.candidates:
        blocks.append(block if block.dim() == 2 else block[wrapped(rows, len(block), device)])
    columns = None
    if width > MOST_CANDIDATES:
        chosen, first = [], 0
        for number, block in enumerate(blocks):
            size = block.shape[-2]
            picked = _picked(size, max(1, MOST_CANDIDATES * size // width), calls, number, device)
            blocks[number] = block.index_select(block.dim() - 2, picked)
            chosen.append(picked + first)
            first += size
        columns = partial(torch.index_select, dim=1, index=torch.cat(chosen))
    scores = score_matrix(candidates.anchors[rows], blocks, scale)  # (R, N)
    return scores, banded(scores, eligible if columns is None else columns(eligible), rule, rows, columns)


def _picked(size: int, number: int, calls: int, block: int, device: torch.device) -> Tensor:
    """One index from each of ``number`` equal parts of ``size`` ≥ number, (number,), chosen by the counters."""
    edges = torch.arange(number + 1, device=device) * size // number
    key = torch.stack([torch.full((), counter, device=device) for counter in (DRAW, calls)])  # without waiting
    draws = randomness.integers(key, torch.full((1,), block, device=device), number)[0]
    return edges[:-1] + draws % (edges[1:] - edges[:-1])
