"""Nodes against graphs: the Jensen–Shannon loss of each node and its gradient, made tile by tile and kept nowhere."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from hardneg.losses.kernels import interface
from hardneg.losses.kernels.interface import EXACT_SOFTPLUS
from hardneg.matmul import TILE, row_blocks

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


def total(encounter: Encounter, rule: Rule, shares: Tensor) -> Tensor:
    """The sum of ``shares`` (n,) times `divergence`, (), whose gradient is made with it: scores are needed once."""
    summed: Tensor = _Total.apply(  # type: ignore[no-untyped-call]
        encounter.nodes, encounter.graphs, encounter.detached(), rule, shares
    )
    return summed


def _plain(encounter: Encounter, rule: Rule, nodes: Tensor, graphs: Tensor) -> Tensor:
    """As `divergence`, by operations that autograd can differentiate any number of times."""
    encounter = replace(encounter, nodes=nodes, graphs=graphs)
    return torch.cat([_Terms(block, rule).losses() for block in encounter])


class _Divergence(torch.autograd.Function):
    """The backward pass makes the scores anew, as how much each node's loss is worth is known only then."""

    @staticmethod
    def forward(ctx: Any, nodes: Tensor, graphs: Tensor, encounter: Encounter, rule: Rule) -> Tensor:
        ctx.save_for_backward(nodes, graphs)  # so that overwriting them raises
        ctx.encounter, ctx.rule = encounter, rule
        return torch.cat([_Terms(block, rule).losses() for block in encounter])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # a graph of the gradient is asked for
            plain = partial(_plain, ctx.encounter, ctx.rule)
            return *interface.gradients(plain, ctx.saved_tensors, ctx.needs_input_grad[:2], grad), None, None
        slope = _Gradient(*ctx.saved_tensors)
        with torch.autocast(grad.device.type, enabled=False):
            for block in ctx.encounter:
                slope.add(block, _Terms(block, ctx.rule).slopes(), grad)
        return slope.of_nodes, slope.of_graphs, None, None


class _Total(torch.autograd.Function):
    """One pass over the scores for the sum and its gradient."""

    @staticmethod
    def forward(ctx: Any, nodes: Tensor, graphs: Tensor, encounter: Encounter, rule: Rule, shares: Tensor) -> Tensor:
        slope = _Gradient(nodes, graphs) if any(ctx.needs_input_grad) else None
        losses = []
        for block in encounter:
            terms = _Terms(block, rule)
            losses.append(terms.losses())
            if slope is not None:
                slope.add(block, terms.slopes(), shares)
        ctx.save_for_backward(nodes, graphs)  # so that overwriting them raises here too
        ctx.slope, ctx.encounter, ctx.rule, ctx.shares = slope, encounter, rule, shares
        return (torch.cat(losses) * shares).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        if torch.is_grad_enabled():
            plain, needed = partial(_plain, ctx.encounter, ctx.rule), ctx.needs_input_grad[:2]
            return *interface.gradients(plain, inputs, needed, grad * ctx.shares), None, None, None
        return ctx.slope.of_nodes * grad, ctx.slope.of_graphs * grad, None, None, None


class _Gradient:
    """Slopes of scores, gathered to the gradient in nodes (n, d) and graphs (G, d)."""

    def __init__(self, nodes: Tensor, graphs: Tensor) -> None:
        self.nodes, self.graphs = nodes.detach(), graphs.detach()
        self.of_nodes, self.of_graphs = torch.empty_like(self.nodes), torch.zeros_like(self.graphs)

    def add(self, block: Block, slopes: Tensor, upstream: Tensor) -> None:
        """slopes: (R, G), overwritten · upstream: (n,) the worth of each node's loss."""
        slopes.mul_(torch.where(block.support > 0, upstream[block.rows], 0.0)[:, None])
        torch.mm(slopes, self.graphs, out=self.of_nodes[block.rows])
        self.of_graphs.addmm_(slopes.T, self.nodes[block.rows])


class _Terms:
    """What the losses of some nodes and their slopes have in common."""

    def __init__(self, block: Block, rule: Rule) -> None:
        self.block, self.prior = block, rule.prior
        self.positive = block.positives()
        self.counts = torch.ones_like(block.support) if block.real is None else block.real.sum(dim=1)  # (R,)
        self.negatives = _Expectation(block.negatives(), block.support, rule)
        self.false = _Expectation(self.positive, self.counts, rule) if rule.prior > 0 else None

    def losses(self) -> Tensor:
        """(R,); 0 for a node without negatives."""
        costs = softplus(-self.positive, threshold=EXACT_SOFTPLUS)
        if self.block.real is not None:
            costs.masked_fill_(~self.block.real, 0)
        return torch.where(self.block.support > 0, costs.sum(dim=1) / self.counts + self.repulsion(), 0.0)

    def repulsion(self) -> Tensor:
        """The expectation over negatives, corrected for the class prior, (R,)."""
        if self.false is None:
            return self.negatives.value
        return (self.negatives.value - self.prior * self.false.value) / (1 - self.prior)

    def slopes(self) -> Tensor:
        """The derivative of each node's loss in its scores, (R, G)."""
        slopes = self.negatives.slopes()
        attraction = torch.sigmoid(-self.positive).div_(-self.counts[:, None])
        if self.block.real is not None:
            attraction.masked_fill_(~self.block.real, 0)
        if self.false is not None:
            slopes.div_(1 - self.prior)
            attraction -= self.false.slopes() * (self.prior / (1 - self.prior))
        if self.block.real is None:
            return slopes.scatter_add_(1, self.block.own, attraction)
        return slopes.add_(attraction)


class _Expectation:
    """E_q sp(T) of each row of scores (R, K), which are −inf where q is nothing; counts: (R,) where it is something."""

    def __init__(self, scores: Tensor, counts: Tensor, rule: Rule) -> None:
        self.scores, self.rule = scores, rule
        self.costs = softplus(scores, threshold=EXACT_SOFTPLUS)
        if rule.beta == 0:
            self.weights = (1 / counts.clamp(min=1)).to(scores)[:, None]  # (R, 1)
            self.value = self.costs.sum(dim=1) * self.weights[:, 0]  # (R,)
        else:
            self.weights = rule.log_weight(scores).softmax(dim=1)  # (R, K)
            self.weights = self.weights if rule.grad_through_weights else self.weights.detach()
            self.value = torch.linalg.vecdot(self.costs, self.weights)

    def slopes(self) -> Tensor:
        """The derivative in the scores, (R, K): q·(σ(T) + β·(sp(T) − E_q sp(T))·d(stretched)/dT)."""
        direct = torch.sigmoid(self.scores).mul_(self.weights)
        if self.rule.beta == 0 or not self.rule.grad_through_weights:
            return direct
        # Times q before β: either may be as large as floats go, where the other is 0.
        return self.rule.log_weight((self.costs - self.value[:, None]).mul_(self.weights)).add_(direct)


def repulsion(block: Block, rule: Rule) -> Tensor:
    """The expectation over negatives, corrected for the class prior, (R,)."""
    return _Terms(block, rule).repulsion()


def weights(block: Block, rule: Rule) -> Tensor:
    """q of each node over its negatives, (R, G)."""
    if rule.beta == 0:
        return block.masked(torch.ones_like(block.scores), 0.0) / block.support.clamp(min=1)[:, None]
    # The lowest number rather than −inf: the softmax of a row of those is not NaN.
    lowest = torch.finfo(block.scores.dtype).min
    return block.masked(block.masked(rule.log_weight(block.scores), lowest).softmax(dim=1), 0.0)
