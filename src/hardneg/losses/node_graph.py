"""Scores of nodes and graphs: the Jensen–Shannon loss of each node and its gradient, computed tile by tile."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from hardneg.losses.kernels.interface import EXACT_SOFTPLUS, gradients
from hardneg.matmul import TILE, row_blocks

# Scores at a time on a CPU: allocating memory for all of them costs more than the arithmetic.
CPU_TILE = 1 << 18


@dataclass(frozen=True)
class Weighting:
    """Weights of the negatives, and the correction for the class prior.

    weight_range: of the rescaled scores · largest: () > 0, largest magnitude of the negatives' scores
    """

    beta: float
    prior: float
    weight_range: float | None
    largest: Tensor | None
    grad_through_weights: bool

    def detached(self) -> "Weighting":
        """A copy without the autograd graph."""
        return replace(self, largest=None if self.largest is None else self.largest.detach())

    def log_weight(self, scores: Tensor) -> Tensor:
        """Log-weights of scores of any shape, not normalized."""
        return self.beta * self.rescaled(scores)

    def rescaled(self, scores: Tensor) -> Tensor:
        """The scores rescaled to the range, if there is one."""
        if self.largest is None or self.weight_range is None:
            return scores
        # Divided first: where all scores are tiny, weight_range/largest would overflow.
        return scores / self.largest * self.weight_range


@dataclass(frozen=True)
class NodeGraphScores:
    """The inner products of nodes and graphs, computed block by block when iterated over.

    nodes: (n, d) · graphs: (G, d) · batch: (n,) the graph of each node · labels: (G,), used as in ``supervision`` ·
    tile: nodes at a time · counts: (n,) the number of equal nodes that each represents
    """

    nodes: Tensor
    graphs: Tensor
    batch: Tensor
    labels: Tensor | None
    supervision: str
    tile: int | None
    counts: Tensor

    def row_blocks(self) -> list[slice]:
        """Rows of nodes, a tile at a time."""
        rows = (CPU_TILE if self.nodes.device.type == "cpu" else TILE) // len(self.graphs)
        return row_blocks(len(self.nodes), len(self.graphs), self.tile or max(1, rows))

    def __iter__(self) -> Iterator["ScoreBlock"]:
        support = self.support()
        for rows in self.row_blocks():
            own = self.batch[rows, None]  # (R, 1)
            scores = self.nodes[rows] @ self.graphs.T  # (R, G)
            positive, positive_mask, excluded = scores.gather(1, own), None, None
            if self.labels is not None:
                labels = self.labels[own]  # (R, 1)
                # (R, G); an unknown label equals no other
                same = ((labels == self.labels) & (labels >= 0)).scatter_(1, own, True)
                if self.supervision != "negatives":
                    positive, positive_mask = scores, same
                excluded = None if self.supervision == "positives" else same
            yield ScoreBlock(rows, own, scores, excluded, positive, positive_mask, support[rows])

    def support(self) -> Tensor:
        """The number of negatives of each node, (n,), without computing scores."""
        if self.labels is None or self.supervision == "positives":
            return torch.full_like(self.batch, len(self.graphs) - 1)
        same = (self.labels[:, None] == self.labels) & (self.labels >= 0)  # (G, G)
        return len(self.graphs) - same.sum(dim=1).clamp(min=1)[self.batch]  # its own graph is excluded in any case

    def largest_negative(self) -> Tensor:
        """The largest magnitude of the negatives' scores, (), and 0 without negatives."""
        largest = self.nodes.new_zeros(())
        position = torch.zeros(2, dtype=torch.int64, device=largest.device)
        with torch.no_grad():
            for block in self:
                magnitudes = block.masked(block.scores.abs(), 0.0)
                index = magnitudes.argmax()
                found = torch.stack([block.rows.start + index // len(self.graphs), index % len(self.graphs)])
                magnitude = magnitudes.flatten()[index]
                position = torch.where(magnitude > largest, found, position)
                largest = torch.maximum(largest, magnitude)
        # Recomputed at one position, so that a gradient costs one product. Without negatives the position is unused.
        score = (self.nodes[position[0]] * self.graphs[position[1]]).sum().abs()
        return torch.where(largest > 0, score, 0.0)

    def bound(self) -> Tensor:
        """An upper bound of all scores' magnitudes, ()."""
        bound: Tensor = self.nodes.detach().abs().amax() * self.graphs.detach().abs().amax() * self.nodes.shape[1]
        return bound

    def detached(self) -> "NodeGraphScores":
        """A copy without the autograd graph."""
        return replace(self, nodes=self.nodes.detach(), graphs=self.graphs.detach())


@dataclass(frozen=True)
class ScoreBlock:
    """The scores of some nodes."""

    rows: slice
    own: Tensor  # (R, 1) the graph of each node
    scores: Tensor  # (R, G)
    excluded: Tensor | None  # (R, G) graphs that are not negatives; None means only the own one
    positive: Tensor  # (R, P) scores
    positive_mask: Tensor | None  # (R, P) which of them are positives; None means all
    support: Tensor  # (R,)

    def masked(self, values: Tensor, fill: float) -> Tensor:
        """Values (R, G), replaced by ``fill`` where a graph is not a negative."""
        return values.scatter(1, self.own, fill) if self.excluded is None else values.masked_fill(self.excluded, fill)

    def negatives(self) -> Tensor:
        """Scores (R, G), −inf where a graph is not a negative; 0 throughout for a node without negatives."""
        scores = self.masked(self.scores, -torch.inf)
        if self.excluded is None and self.scores.shape[1] > 1:
            return scores
        return torch.where(self.support[:, None] > 0, scores, 0.0)

    def positives(self) -> Tensor:
        """Scores (R, P), −inf where a graph is not a positive; each node has at least its own graph."""
        if self.positive_mask is None:
            return self.positive
        return self.positive.masked_fill(~self.positive_mask, -torch.inf)


def divergence(scores: NodeGraphScores, weighting: Weighting) -> Tensor:
    """Each node's ``E sp(−T) + (E_q sp(T) − τ⁺ E_q⁺ sp(T))/(1 − τ⁺)``, (n,); 0 for a node without negatives."""
    losses: Tensor = _Divergence.apply(  # type: ignore[no-untyped-call]
        scores.nodes, scores.graphs, scores.detached(), weighting
    )
    return losses


def weighted_total(scores: NodeGraphScores, weighting: Weighting, shares: Tensor) -> Tensor:
    """The sum of ``shares`` (n,) times `divergence`, (). Its gradient is computed with it, from the same scores."""
    total: Tensor = _WeightedTotal.apply(  # type: ignore[no-untyped-call]
        scores.nodes, scores.graphs, scores.detached(), weighting, shares
    )
    return total


def repulsion(block: ScoreBlock, weighting: Weighting) -> Tensor:
    """The expectation over negatives, corrected for the class prior, (R,)."""
    return _LossTerms(block, weighting).repulsion()


def weights(block: ScoreBlock, weighting: Weighting) -> Tensor:
    """q of each node over its negatives, (R, G)."""
    if weighting.beta == 0:
        return block.masked(torch.ones_like(block.scores), 0.0) / block.support.clamp(min=1)[:, None]
    # The lowest number instead of −inf: the softmax of a row of those is not NaN.
    lowest = torch.finfo(block.scores.dtype).min
    return block.masked(block.masked(weighting.log_weight(block.scores), lowest).softmax(dim=1), 0.0)


def _plain_divergence(scores: NodeGraphScores, weighting: Weighting, nodes: Tensor, graphs: Tensor) -> Tensor:
    """As `divergence`, by operations that autograd can differentiate any number of times."""
    scores = replace(scores, nodes=nodes, graphs=graphs)
    return torch.cat([_LossTerms(block, weighting).losses() for block in scores])


class _Divergence(torch.autograd.Function):
    """The losses of the nodes; the backward pass recomputes the scores, because it needs the upstream gradient."""

    @staticmethod
    def forward(ctx: Any, nodes: Tensor, graphs: Tensor, scores: NodeGraphScores, weighting: Weighting) -> Tensor:
        ctx.save_for_backward(nodes, graphs)  # so that overwriting them raises
        ctx.scores, ctx.weighting = scores, weighting
        return torch.cat([_LossTerms(block, weighting).losses() for block in scores])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # a graph of the gradient is requested
            plain = partial(_plain_divergence, ctx.scores, ctx.weighting)
            return *gradients(plain, ctx.saved_tensors, ctx.needs_input_grad[:2], grad), None, None
        gradient = _Gradient(*ctx.saved_tensors)
        with torch.autocast(grad.device.type, enabled=False):
            for block in ctx.scores:
                gradient.add(block, _LossTerms(block, ctx.weighting).derivatives(), grad)
        return gradient.of_nodes, gradient.of_graphs, None, None


class _WeightedTotal(torch.autograd.Function):
    """The weighted sum of the losses and its gradient in one pass over the scores."""

    @staticmethod
    def forward(
        ctx: Any, nodes: Tensor, graphs: Tensor, scores: NodeGraphScores, weighting: Weighting, shares: Tensor
    ) -> Tensor:
        gradient = _Gradient(nodes, graphs) if any(ctx.needs_input_grad) else None
        losses = []
        for block in scores:
            terms = _LossTerms(block, weighting)
            losses.append(terms.losses())
            if gradient is not None:
                gradient.add(block, terms.derivatives(), shares)
        ctx.save_for_backward(nodes, graphs)  # so that overwriting them raises
        ctx.gradient, ctx.scores, ctx.weighting, ctx.shares = gradient, scores, weighting, shares
        return (torch.cat(losses) * shares).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        if torch.is_grad_enabled():
            plain, needed = partial(_plain_divergence, ctx.scores, ctx.weighting), ctx.needs_input_grad[:2]
            return *gradients(plain, inputs, needed, grad * ctx.shares), None, None, None
        return ctx.gradient.of_nodes * grad, ctx.gradient.of_graphs * grad, None, None, None


class _Gradient:
    """The gradient in nodes (n, d) and graphs (G, d), accumulated from derivatives in the scores."""

    def __init__(self, nodes: Tensor, graphs: Tensor) -> None:
        self.nodes, self.graphs = nodes.detach(), graphs.detach()
        self.of_nodes, self.of_graphs = torch.empty_like(self.nodes), torch.zeros_like(self.graphs)

    def add(self, block: ScoreBlock, derivatives: Tensor, upstream: Tensor) -> None:
        """derivatives: (R, G), overwritten · upstream: (n,) the gradient of each node's loss."""
        derivatives.mul_(torch.where(block.support > 0, upstream[block.rows], 0.0)[:, None])
        torch.mm(derivatives, self.graphs, out=self.of_nodes[block.rows])
        self.of_graphs.addmm_(derivatives.T, self.nodes[block.rows])


class _LossTerms:
    """Terms shared by the losses of some nodes and their derivatives."""

    def __init__(self, block: ScoreBlock, weighting: Weighting) -> None:
        self.block, self.prior = block, weighting.prior
        self.positive = block.positives()
        mask = block.positive_mask
        self.counts = torch.ones_like(block.support) if mask is None else mask.sum(dim=1)  # (R,)
        self.over_negatives = _Expectation(block.negatives(), block.support, weighting)
        # What the class prior subtracts: the positives as false negatives.
        self.over_positives = None
        if weighting.prior > 0:
            self.over_positives = _Expectation(self.positive, self.counts, weighting)

    def losses(self) -> Tensor:
        """(R,); 0 for a node without negatives."""
        costs = softplus(-self.positive, threshold=EXACT_SOFTPLUS)
        if self.block.positive_mask is not None:
            costs.masked_fill_(~self.block.positive_mask, 0)
        return torch.where(self.block.support > 0, costs.sum(dim=1) / self.counts + self.repulsion(), 0.0)

    def repulsion(self) -> Tensor:
        """The expectation over negatives, corrected for the class prior, (R,)."""
        if self.over_positives is None:
            return self.over_negatives.value
        return (self.over_negatives.value - self.prior * self.over_positives.value) / (1 - self.prior)

    def derivatives(self) -> Tensor:
        """The derivative of each node's loss in its scores, (R, G)."""
        derivatives = self.over_negatives.derivatives()
        attraction = torch.sigmoid(-self.positive).div_(-self.counts[:, None])
        if self.block.positive_mask is not None:
            attraction.masked_fill_(~self.block.positive_mask, 0)
        if self.over_positives is not None:
            derivatives.div_(1 - self.prior)
            attraction -= self.over_positives.derivatives() * (self.prior / (1 - self.prior))
        if self.block.positive_mask is None:
            return derivatives.scatter_add_(1, self.block.own, attraction)
        return derivatives.add_(attraction)


class _Expectation:
    """E_q sp(T) of each row of scores (R, K), which are −inf where q is 0. counts: (R,) scores where q is not 0."""

    def __init__(self, scores: Tensor, counts: Tensor, weighting: Weighting) -> None:
        self.scores, self.weighting = scores, weighting
        self.costs = softplus(scores, threshold=EXACT_SOFTPLUS)
        if weighting.beta == 0:
            self.weights = (1 / counts.clamp(min=1)).to(scores)[:, None]  # (R, 1)
            self.value = self.costs.sum(dim=1) * self.weights[:, 0]  # (R,)
        else:
            self.weights = weighting.log_weight(scores).softmax(dim=1)  # (R, K)
            self.weights = self.weights if weighting.grad_through_weights else self.weights.detach()
            self.value = torch.linalg.vecdot(self.costs, self.weights)

    def derivatives(self) -> Tensor:
        """The derivative in the scores, (R, K): q·(σ(T) + β·(sp(T) − E_q sp(T))·d(rescaled)/dT)."""
        direct = torch.sigmoid(self.scores).mul_(self.weights)
        if self.weighting.beta == 0 or not self.weighting.grad_through_weights:
            return direct
        # Multiplied by q before β: one may be near the largest float where the other is 0.
        return self.weighting.log_weight((self.costs - self.value[:, None]).mul_(self.weights)).add_(direct)
