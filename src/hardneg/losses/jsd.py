"""InfoGraph's objective: the Jensen–Shannon bound between nodes and graphs, with hard graphs (METHODS, section 5)."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus
from torch.utils.checkpoint import checkpoint

from hardneg import checks, distributed
from hardneg.losses import node_graph
from hardneg.losses.execution import is_eager
from hardneg.losses.kernels.interface import EXACT_SOFTPLUS, GuardedLoss
from hardneg.losses.node_graph import NodeGraphScores, Weighting
from hardneg.losses.schedules import Setting, schedules_of, value
from hardneg.losses.settings import REDUCTION, SUPERVISION, Adjustable, Reduction, Supervision, check_no_adaptive

LOG_2 = 0.6931471805599453
LARGE = 1e30  # within float32, with room for factors
PUBLISHED_PRIOR = 0.5  # hard-wired in the published code


class JSD(Adjustable):
    """Separates a node's own graph from others, with weights on hard ones: ``sp(−T) + E_q sp(T)``, sp = log(1 + e^·).

    T is the inner product of a node's and a graph's embedding, not normalized. For each node, q ∝ e^{beta·T} over the
    other graphs; with a class prior τ⁺ the second term is ``(E_q sp(T) − τ⁺ E_q⁺ sp(T))/(1 − τ⁺)``.
    Scores and gradients are computed a tile of nodes at a time: memory does not grow with n · G.

    Args:
        beta: tilt ≥ 0, number or schedule; 0 is InfoGraph
        class_prior: τ⁺ in [0, 1), number or schedule. The corrected loss has no floor and no lower bound: the paper
            reports numerical problems there, and `diagnostics` counts the nodes concerned
        weight_range: the scores of a call's negatives are rescaled to [−weight_range, weight_range] for the weights,
            by the largest of them, held constant; None does not rescale
        supervision: what labels are used for: ``"none"``, ``"positives"`` (nodes agree with every graph of their
            label), ``"negatives"`` (graphs of another label only) or ``"full"``
        grad_through_weights: False treats the weights as constants
        published: as in HCL's published code, for comparison only: the tilt has the opposite sign, τ⁺ is 0.5, its
            correction is added instead of subtracted, and the zeros of masked pairs enter means and sums
        gather: True compares nodes with the graphs of all processes, a ``torch.distributed.ProcessGroup`` with those of
            the group; every process returns the global loss, and the average of the processes' gradients (which DDP
            computes) is its exact gradient
        reduction: ``"mean"`` over nodes, ``"sum"`` or ``"none"`` (one loss per node)
        tile: nodes at a time; by default as many as keep a temporary at 1 MiB on a CPU, 128 MiB elsewhere

    Numbers may be numpy scalars or tensors without dimensions.

    Examples:
        >>> import torch
        >>> nodes, graphs = torch.randn(6, 16, requires_grad=True), torch.randn(3, 16)
        >>> JSD(beta=1.0)(nodes, graphs, batch=torch.tensor([0, 0, 1, 1, 1, 2])).backward()
        >>> nodes.grad.shape
        torch.Size([6, 16])
    """

    beta: Setting
    class_prior: Setting
    weight_range: float | None
    supervision: Supervision
    grad_through_weights: bool
    published: bool
    gather: distributed.Gather
    reduction: Reduction
    tile: int | None
    _beta: float  # at the current progress
    _prior: float
    _last: tuple[NodeGraphScores, Weighting] | None = None  # of the last call, detached

    def __init__(
        self,
        beta: Setting = 0.0,
        class_prior: Setting = 0.0,
        *,
        weight_range: float | None = 2.0,
        supervision: Supervision = "none",
        grad_through_weights: bool = True,
        published: bool = False,
        gather: distributed.Gather = False,
        reduction: Reduction = "mean",
        tile: int | None = None,
    ) -> None:
        super().__init__()
        self._configure({name: given for name, given in locals().items() if name in self.SETTINGS})

    def forward(
        self,
        nodes: Tensor,
        graphs: Tensor,
        batch: Tensor,
        labels: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> Tensor:
        """The loss of a batch of graphs.

        nodes: (n, d) · graphs: (G, d) · batch: (n,) the graph of each node · labels: (G,), −1 = unknown · counts: (n,)
        the number of equal nodes that each represents in means and sums

        A node without negatives (a batch of one graph, or of one label) contributes nothing and is not
        averaged. A graph without nodes is a negative like any other.
        """
        given = (batch, labels, counts)
        batch, labels, counts, validity = self._checked(nodes, graphs, batch, labels, counts)
        if not self.published and is_eager():
            self._give_hints(self.gather, labels)
        with torch.autocast(nodes.device.type, enabled=False):  # float32 arithmetic inside, always
            dtype = torch.promote_types(torch.float32, torch.promote_types(nodes.dtype, graphs.dtype))
            nodes, graphs = nodes.to(dtype), graphs.to(dtype)
            if distributed.gathers(self.gather):
                group = distributed.group_of(self.gather)
                sizes = distributed.batch_sizes(len(graphs), graphs.device, group)
                batch = batch + sum(sizes[: distributed.rank(group)])
                graphs = distributed.gather(graphs, sizes, group)
                labels = None if labels is None else distributed.gather(labels, sizes, group)
            scores = NodeGraphScores(nodes, graphs, batch, labels, self.supervision, self.tile, counts)
            validity = checks.jointly(validity, self._check_range(scores))
            weighting = self._weighting(scores)
            self._last = scores.detached(), weighting.detached()
            loss = self._reduced(scores, weighting, validity)
        if is_eager():
            self._count_call(loss)
        if loss.requires_grad and not torch.compiler.is_compiling():
            loss = GuardedLoss.apply(loss, None, *given)  # type: ignore[no-untyped-call]
        return loss

    def diagnostics(self) -> dict[str, float]:
        """Statistics of the negatives of the last call.

        ``anchors``: nodes · ``without_candidates``: those that contributed nothing · ``below_zero``: those whose
        corrected second term is negative, which a class prior can do · ``support``: mean number of negatives ·
        ``effective_negatives``: mean of 1/Σq² · ``positive_score``, ``negative_score``: means of T
        """
        if self._last is None:
            raise RuntimeError("diagnostics() describes the last call, and there has been none: call the loss first")
        columns, counts = self._statistics(*self._last), self._last[0].counts  # (n, 5), (n,)
        some = columns[:, 0] > 0
        means = (columns[some].T @ counts[some].to(columns) / counts[some].sum().clamp(min=1)).tolist()
        return {
            "anchors": int(counts.sum()),
            "without_candidates": int(counts[~some].sum()),
            "below_zero": int(counts[some & (columns[:, 4] < 0)].sum()),
            "support": means[0],
            "effective_negatives": means[1],
            "positive_score": float(columns[:, 2] @ counts.to(columns) / counts.sum()),
            "negative_score": means[3],
        }

    def extra_repr(self) -> str:
        shown = ("beta", "class_prior", "weight_range", "supervision", "published", "reduction")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)

    def _configure(self, given: dict[str, Any]) -> None:
        given = dict(given)
        for name in ("beta", "class_prior"):
            check_no_adaptive(name, given[name])
        given["beta"] = checks.number("beta", given["beta"], at_least=0, at_most=LARGE)
        given["class_prior"] = checks.number("class_prior", given["class_prior"], at_least=0, below=1)
        if given["weight_range"] is not None:
            given["weight_range"] = checks.number("weight_range", given["weight_range"], above=0, below=math.inf)
        checks.choice("supervision", given["supervision"], SUPERVISION)
        checks.choice("reduction", given["reduction"], REDUCTION)
        for name in ("grad_through_weights", "published"):
            given[name] = checks.boolean(name, given[name])
        given["gather"] = distributed.checked("gather", given["gather"])
        if given["tile"] is not None:
            given["tile"] = checks.whole("tile", given["tile"])
        if given["published"] and (
            given["class_prior"] != 0
            or given["supervision"] != "none"
            or given["weight_range"] != 2.0
            or not given["grad_through_weights"]
            or given["gather"] is not False
        ):
            raise ValueError(
                "published=True fixes the prior, the range and the gradients and uses no labels: leave class_prior, "
                "weight_range, grad_through_weights, supervision and gather at their defaults"
            )
        numbers = self._numbers(given["beta"], given["class_prior"], self.progress)
        scheduled = schedules_of(given)
        self.__dict__.update(given, _beta=numbers[0], _prior=numbers[1], _scheduled=scheduled)

    def _move_schedules(self, progress: float) -> None:
        self._beta, self._prior = self._numbers(self.beta, self.class_prior, progress)

    @staticmethod
    def _numbers(beta: Setting, class_prior: Setting, progress: float) -> tuple[float, float]:
        """The tilt and the class prior at this progress."""
        return (
            checks.number("beta", value(beta, progress), at_least=0, at_most=LARGE),
            checks.number("class_prior", value(class_prior, progress), at_least=0, below=1),
        )

    def _reduced(self, scores: NodeGraphScores, weighting: Weighting, validity: Tensor | None) -> Tensor:
        if self.reduction == "none":
            return checks.poisoned(self._losses(scores, weighting), validity)
        gathers, group = distributed.gathers(self.gather), distributed.group_of(self.gather)
        shares = (scores.counts * (scores.support() > 0)).to(scores.nodes.dtype)  # (n,)
        if self.reduction == "mean":
            number = distributed.total(shares.sum(), group) if gathers else shares.sum()
            shares = shares / number.clamp(min=1)
        if self.published:
            return checks.poisoned((self._losses(scores, weighting) * shares).sum(), validity)
        loss = checks.poisoned(node_graph.weighted_total(scores, weighting, shares), validity)
        return distributed.total_loss(loss, group) if gathers else loss

    def _weighting(self, scores: NodeGraphScores) -> Weighting:
        largest = None
        if self._beta > 0 and self.weight_range is not None:
            largest, bound = scores.largest_negative(), scores.bound()  # () each, the first with its gradient
            if distributed.gathers(self.gather):
                group = distributed.group_of(self.gather)
                largest, bound = distributed.maximum(largest, group), distributed.maximum(bound, group)
            # Positives may be far larger than all negatives, and negatives tiny: weights and gradients stay finite.
            least = (bound / LARGE).clamp(min=1 / LARGE) * (self.weight_range * max(self._beta, 1.0))
            largest = torch.where(largest > 0, torch.maximum(largest, least), least.clamp(min=1.0))
            largest = largest if self.published else largest.detach()
        sign = -1 if self.published else 1
        return Weighting(sign * self._beta, self._prior, self.weight_range, largest, self.grad_through_weights)

    def _losses(self, scores: NodeGraphScores, weighting: Weighting) -> Tensor:
        """The loss of each node, (n,)."""
        if not self.published:
            return node_graph.divergence(scores, weighting)
        parts = []
        for rows in scores.row_blocks():
            arguments = scores.nodes[rows], scores.graphs, scores.batch[rows, None], weighting
            part = checkpoint(_published_losses, *arguments, use_reentrant=False, preserve_rng_state=False)
            parts.append(torch.where(scores.support()[rows] > 0, part, 0.0))
        return torch.cat(parts)

    @torch.no_grad()
    def _statistics(self, scores: NodeGraphScores, weighting: Weighting) -> Tensor:
        """Support, effective negatives, mean positive and negative score, and second term of each node, (n, 5)."""
        found = []
        for block in scores:
            effective = 1 / node_graph.weights(block, weighting).square().sum(dim=1).clamp(min=1e-30)
            mask = torch.ones_like(block.positive, dtype=torch.bool)
            mask = mask if block.positive_mask is None else block.positive_mask
            positive = block.positive.masked_fill(~mask, 0).sum(dim=1) / mask.sum(dim=1)
            negative = block.masked(block.scores, 0.0).sum(dim=1) / block.support.clamp(min=1)
            # Without a prior it cannot be negative.
            repulsion = torch.zeros_like(effective)
            if weighting.prior > 0:
                repulsion = node_graph.repulsion(block, weighting)
            columns = [block.support.to(effective), effective, positive, negative, repulsion]
            found.append(torch.stack(columns, dim=1))
        return torch.cat(found)

    def _check_range(self, scores: NodeGraphScores) -> Tensor | None:
        """Raise if scores might overflow, tilted or not; see `checks.values`."""
        tilt = max(self._beta, 1.0) if self.weight_range is None else 1.0
        # The factor of a thousandth leaves room for the sums over a row.
        return checks.values(
            scores.bound() * tilt < 1e-3 * torch.finfo(scores.nodes.dtype).max / len(scores.graphs),
            "nodes and graphs are too large: their inner products overflow; look for a diverged model, or scale down",
        )

    def _checked(
        self, nodes: Tensor, graphs: Tensor, batch: Tensor, labels: Tensor | None, counts: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """The graphs of nodes, labels and counts on the device of the nodes, and the validity of all values."""
        validities = []
        for name, tensor in (("nodes", nodes), ("graphs", graphs)):
            checks.floating(name, tensor)
            if tensor.dim() != 2 or 0 in tensor.shape:
                raise ValueError(f"{name} must have shape (n, d) with n, d ≥ 1, got {tuple(tensor.shape)}")
            validities.append(checks.finite(name, tensor))
        if nodes.shape[1] != graphs.shape[1]:
            raise ValueError(f"graphs must have d = {nodes.shape[1]} columns as nodes, got {graphs.shape[1]}")
        if nodes.device != graphs.device:
            raise ValueError(f"graphs are on {graphs.device}, but nodes on {nodes.device}: move them to one device")
        batch = checks.integers("batch", batch, (len(nodes),), "the graph of each node").to(nodes.device)
        batch, validity = checks.in_range("batch", batch, len(graphs))
        validities.append(validity)
        if labels is not None and self.supervision == "none":
            raise ValueError(
                "labels were given, but supervision='none' ignores them: set supervision or leave them out"
            )
        if labels is None and self.supervision != "none":
            raise ValueError(f"supervision={self.supervision!r} needs labels: pass labels=, with −1 where unknown")
        if labels is not None:
            labels = checks.integers("labels", labels, (len(graphs),), "one per graph").to(nodes.device)
            validities.append(checks.values(labels >= -1, "labels must be ≥ −1, where −1 means unknown"))
        if counts is None:
            return batch, labels, torch.ones_like(batch), checks.jointly(*validities)
        counts = checks.integers("counts", counts, (len(nodes),), "nodes that each represents").to(nodes.device)
        validities.append(checks.values(counts >= 1, "counts must be ≥ 1: leave out nodes that represent none"))
        return batch, labels, counts, checks.jointly(*validities)


def _published_losses(nodes: Tensor, graphs: Tensor, own: Tensor, weighting: Weighting) -> Tensor:
    """Each node's loss as published, (R,), where masked pairs have the score 0 (HCL's code for graphs).

    nodes: (R, d) · graphs: (G, d) · own: (R, 1)
    """
    scores = nodes @ graphs.T  # (R, G)
    positive = scores.gather(1, own)[:, 0]
    others = max(len(graphs) - 1, 1)  # the loss of a node without other graphs is not used
    odds = PUBLISHED_PRIOR / (1 - PUBLISHED_PRIOR)
    added = odds * softplus(positive, threshold=EXACT_SOFTPLUS)
    attraction = softplus(-positive, threshold=EXACT_SOFTPLUS) + added - LOG_2 + others * odds * LOG_2
    masked = scores.scatter(1, own, 0.0)
    costs = softplus(masked, threshold=EXACT_SOFTPLUS)  # (R, G)
    if weighting.beta == 0:
        repulsion = (costs - LOG_2) / (1 - PUBLISHED_PRIOR)
    else:
        weight = weighting.log_weight(masked).softmax(dim=1) * len(graphs)  # averages 1 over all G columns
        repulsion = weight * costs / (1 - PUBLISHED_PRIOR) - LOG_2
    return attraction + repulsion.sum(dim=1) / others
