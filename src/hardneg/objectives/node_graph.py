"""Nodes against graphs: the Jensen–Shannon loss of each node and its gradient, made tile by tile and kept nowhere."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import softplus

from hardneg.objectives.kernels.problem import EXACT_SOFTPLUS
from hardneg.products import TILE, row_blocks

CACHED = 1 << 18  # scores at a time on a CPU: fresh memory for all of them costs more than the arithmetic


@dataclass(frozen=True)
class Rule:
    """How negatives are weighed, and corrected for the class prior."""

    beta: float
    prior: float
    reach: float | None  # of the rescaled scores
    largest: Tensor | None  # () > 0, magnitude among the negatives' scores
    grad_through_weights: bool

    def log_weight(self, scores: Tensor) -> Tensor:
        """Of any shape; without normalisation."""
        return self.beta * self.stretched(scores)

    def stretched(self, scores: Tensor) -> Tensor:
        """Brought to the range, if there is one."""
        if self.largest is None or self.reach is None:
            return scores
        # Divided first: where all scores are tiny, reach/largest would overflow.
        return scores / self.largest * self.reach


@dataclass(frozen=True)
class Encounter:
    """Nodes that meet graphs.

    nodes: (n, d) · graphs: (G, d) · batch: (n,) · labels: (G,), and what they are for · counts: (n,) nodes that each
    stands for
    """

    nodes: Tensor
    graphs: Tensor
    batch: Tensor
    labels: Tensor | None
    supervision: str
    tile: int | None  # nodes at a time
    counts: Tensor

    def blocks(self) -> list[slice]:
        """Rows of nodes, a tile at a time."""
        fitting = (CACHED if self.nodes.device.type == "cpu" else TILE) // len(self.graphs)
        return row_blocks(len(self.nodes), len(self.graphs), self.tile or max(1, fitting))

    def __iter__(self) -> Iterator["Block"]:
        support = self.support()
        for rows in self.blocks():
            own = self.batch[rows, None]  # (R, 1)
            scores = self.nodes[rows] @ self.graphs.T  # (R, G)
            positive, real, same = scores.gather(1, own), None, None
            if self.labels is not None:
                mine = self.labels[own]  # (R, 1)
                same = ((mine == self.labels) & (mine >= 0)).scatter_(1, own, True)  # (R, G); unknown is nobody's label
                if self.supervision != "negatives":
                    positive, real = scores, same
                same = None if self.supervision == "positives" else same
            yield Block(rows, own, scores, same, positive, real, support[rows])

    def support(self) -> Tensor:
        """Negatives of each node, (n,); known without any score."""
        if self.labels is None or self.supervision == "positives":
            return torch.full_like(self.batch, len(self.graphs) - 1)
        same = (self.labels[:, None] == self.labels) & (self.labels >= 0)  # (G, G)
        return len(self.graphs) - same.sum(dim=1).clamp(min=1)[self.batch]  # its own graph counts as the same

    def largest(self) -> Tensor:
        """The largest magnitude among the negatives' scores, (), and 0 without negatives."""
        best = self.nodes.new_zeros(())
        where = torch.zeros(2, dtype=torch.int64, device=best.device)
        with torch.no_grad():
            for block in self:
                sizes = block.masked(block.scores.abs(), 0.0)
                place = sizes.argmax()
                found = torch.stack([block.rows.start + place // len(self.graphs), place % len(self.graphs)])
                reached = sizes.flatten()[place]
                where, best = torch.where(reached > best, found, where), torch.maximum(best, reached)
        # Computed anew at one place, so that a gradient costs one product. Without negatives the place means nothing.
        score = (self.nodes[where[0]] * self.graphs[where[1]]).sum().abs()
        return torch.where(best > 0, score, 0.0)

    def bound(self) -> Tensor:
        """No score is larger than this, ()."""
        reach: Tensor = self.nodes.detach().abs().amax() * self.graphs.detach().abs().amax() * self.nodes.shape[1]
        return reach

    def detached(self) -> "Encounter":
        """The same without the graph behind it."""
        return replace(self, nodes=self.nodes.detach(), graphs=self.graphs.detach())


@dataclass(frozen=True)
class Block:
    """The scores of some nodes."""

    rows: slice
    own: Tensor  # (R, 1) the graph of each node
    scores: Tensor  # (R, G)
    same: Tensor | None  # (R, G) graphs that are no negatives; None means the own one alone
    positive: Tensor  # (R, P) scores
    real: Tensor | None  # (R, P) which of them are positives; None means all
    support: Tensor  # (R,)

    def masked(self, values: Tensor, by: float) -> Tensor:
        """Values (R, G) with this instead where a graph is no negative."""
        return values.scatter(1, self.own, by) if self.same is None else values.masked_fill(self.same, by)

    def negatives(self) -> Tensor:
        """Scores (R, G), −inf where a graph is no negative; where a node has none at all, 0, which then leaves."""
        scores = self.masked(self.scores, -torch.inf)
        return scores if self.same is None and self.scores.shape[1] > 1 else self._or_zero(scores)

    def positives(self) -> Tensor:
        """Scores (R, P), −inf where a graph is no positive; each node has its own."""
        return self.positive if self.real is None else self.positive.masked_fill(~self.real, -torch.inf)

    def _or_zero(self, scores: Tensor) -> Tensor:
        return torch.where(self.support[:, None] > 0, scores, 0.0)


def divergence(encounter: Encounter, rule: Rule) -> Tensor:
    """Each node's ``E sp(−T) + (E_q sp(T) − τ⁺ E_q⁺ sp(T))/(1 − τ⁺)``, (n,); 0 for a node without negatives."""
    losses: Tensor = _Divergence.apply(  # type: ignore[no-untyped-call]
        encounter.nodes, encounter.graphs, encounter.detached(), rule
    )
    return losses


class _Divergence(torch.autograd.Function):
    """The backward pass makes the scores anew."""

    @staticmethod
    def forward(ctx: Any, nodes: Tensor, graphs: Tensor, encounter: Encounter, rule: Rule) -> Tensor:
        ctx.save_for_backward(nodes, graphs)  # so that overwriting them raises
        ctx.encounter, ctx.rule = encounter, rule
        return torch.cat([torch.where(block.support > 0, _losses(block, rule), 0.0) for block in encounter])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        nodes, graphs = ctx.saved_tensors
        grad_nodes, grad_graphs = torch.empty_like(nodes), torch.zeros_like(graphs)
        with torch.autocast(nodes.device.type, enabled=False):
            for block in ctx.encounter:
                upstream = torch.where(block.support > 0, grad[block.rows], 0.0)
                slopes = _slopes(block, ctx.rule).mul_(upstream[:, None])  # (R, G)
                grad_nodes[block.rows] = slopes @ graphs
                grad_graphs.addmm_(slopes.T, nodes[block.rows])
        return grad_nodes, grad_graphs, None, None


def _losses(block: Block, rule: Rule) -> Tensor:
    """(R,)."""
    positive = block.positives()
    costs = softplus(-positive, threshold=EXACT_SOFTPLUS)
    if block.real is not None:
        costs.masked_fill_(~block.real, 0)
    return costs.sum(dim=1) / _counts(block) + repulsion(block, rule)


def repulsion(block: Block, rule: Rule) -> Tensor:
    """The expectation over negatives, corrected for the class prior, (R,)."""
    expected, _ = _expected(block.negatives(), block.support, rule)
    if rule.prior > 0:
        expected = (expected - rule.prior * _expected(block.positives(), _counts(block), rule)[0]) / (1 - rule.prior)
    return expected


def _slopes(block: Block, rule: Rule) -> Tensor:
    """The derivative of each node's loss in its scores, (R, G)."""
    slopes = _expected_slopes(block.negatives(), block.support, rule)
    positive, counts = block.positives(), _counts(block)
    attraction = torch.sigmoid(-positive).div_(-counts[:, None])
    if block.real is not None:
        attraction.masked_fill_(~block.real, 0)
    if rule.prior > 0:
        slopes.div_(1 - rule.prior)
        attraction -= _expected_slopes(positive, counts, rule) * (rule.prior / (1 - rule.prior))
    return slopes.scatter_add_(1, block.own, attraction) if block.real is None else slopes.add_(attraction)


def _expected(scores: Tensor, counts: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """E_q sp(T) of each row, (R,), and q, (R, K) or, uniform, (R, 1); scores are −inf where q is nothing."""
    costs = softplus(scores, threshold=EXACT_SOFTPLUS)
    if rule.beta == 0:
        share = (1 / counts.clamp(min=1)).to(scores)[:, None]
        return costs.sum(dim=1) * share[:, 0], share
    weights = rule.log_weight(scores).softmax(dim=1)
    return costs.mul_(weights).sum(dim=1), weights


def _expected_slopes(scores: Tensor, counts: Tensor, rule: Rule) -> Tensor:
    """The derivative of E_q sp(T) in the scores, (R, K): q·(σ(T) + β·(sp(T) − E_q sp(T))·d(stretched)/dT)."""
    if rule.beta == 0 or not rule.grad_through_weights:
        weights = _expected(scores, counts, rule)[1] if rule.beta else (1 / counts.clamp(min=1)).to(scores)[:, None]
        return torch.sigmoid(scores).mul_(weights)
    expected, weights = _expected(scores, counts, rule)
    excess = softplus(scores, threshold=EXACT_SOFTPLUS).sub_(expected[:, None]).mul_(weights)
    return rule.log_weight(excess).add_(torch.sigmoid(scores).mul_(weights))


def weights(block: Block, rule: Rule) -> Tensor:
    """q of each node over its negatives, (R, G)."""
    if rule.beta == 0:
        return block.masked(torch.ones_like(block.scores), 0.0) / block.support.clamp(min=1)[:, None]
    # The lowest number rather than −inf: the softmax of a row of those is not NaN.
    lowest = torch.finfo(block.scores.dtype).min
    return block.masked(block.masked(rule.log_weight(block.scores), lowest).softmax(dim=1), 0.0)


def _counts(block: Block) -> Tensor:
    """Positives of each node, (R,)."""
    return torch.ones_like(block.support) if block.real is None else block.real.sum(dim=1)
