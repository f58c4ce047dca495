"""InfoGraph's objective: the Jensen–Shannon bound between nodes and graphs, with hard graphs (METHODS, section 5)."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus
from torch.utils.checkpoint import checkpoint

from hardneg import checks
from hardneg.losses import node_graph
from hardneg.losses.kernels.interface import EXACT_SOFTPLUS, GuardedLoss
from hardneg.losses.node_graph import Encounter, Rule
from hardneg.losses.schedules import Adaptive, Schedule, Setting, value
from hardneg.losses.settings import Adjustable

LOG_2 = 0.6931471805599453
LARGE = 1e30  # within float32, with room for what multiplies it
PUBLISHED_PRIOR = 0.5  # hard-wired in the published code


class JSD(Adjustable):
    """Tells a node's own graph from other graphs, the hard ones first: ``sp(−T) + E_q sp(T)``, sp = log(1 + e^·).

    T is the inner product of a node's and a graph's embedding, neither of unit length. Over the graphs other than its
    own, a node has q ∝ e^{beta·T}; with a class prior τ⁺ the second term is ``(E_q sp(T) − τ⁺ E_q⁺ sp(T))/(1 − τ⁺)``.
    Scores are made a tile of nodes at a time, and the gradient with them: memory does not grow with n · G.

    Args:
        beta: tilt ≥ 0, number or schedule; 0 is InfoGraph
        class_prior: τ⁺ in [0, 1), number or schedule. The corrected loss has no lower bound, as nothing floors it: the
            paper met numerical trouble there, and `diagnostics` counts the nodes concerned
        weight_range: the scores of a call's negatives are rescaled to [−weight_range, weight_range] for the weights,
            by the largest of them, held constant; None leaves them as they are
        supervision: what labels are used for: ``"none"``, ``"positives"`` (nodes agree with every graph of their
            label), ``"negatives"`` (graphs of another label only) or ``"full"``
        grad_through_weights: False treats the weights as constants
        published: as HCL's authors code it, for comparison only: the tilt has the opposite sign, τ⁺ is 0.5, its
            correction is added instead of subtracted, and the zeros of masked pairs enter means and sums
        reduction: ``"mean"`` over nodes, ``"sum"`` or ``"none"`` (one loss per node)
        tile: nodes at a time; by default as many as keep a temporary at 1 MiB on a CPU, 128 MiB elsewhere

    Examples:
        >>> import torch
        >>> nodes, graphs = torch.randn(6, 16, requires_grad=True), torch.randn(3, 16)
        >>> JSD(beta=1.0)(nodes, graphs, batch=torch.tensor([0, 0, 1, 1, 1, 2])).backward()
        >>> nodes.grad.shape
        torch.Size([6, 16])
    """

    observes_loss = False
    accuracy_schedules: tuple[Adaptive, ...] = ()

    def __init__(
        self,
        beta: Setting = 0.0,
        class_prior: Setting = 0.0,
        weight_range: float | None = 2.0,
        supervision: str = "none",
        grad_through_weights: bool = True,
        published: bool = False,
        reduction: str = "mean",
        tile: int | None = None,
    ) -> None:
        super().__init__()
        self.beta, self.class_prior, self.weight_range = beta, class_prior, weight_range
        self.supervision, self.grad_through_weights = supervision, grad_through_weights
        self.published, self.reduction, self.tile = published, reduction, tile
        self.progress = 0.0
        self._last: Encounter | None = None
        self._settle()

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
        how many equal nodes each stands for in means and sums

        A node without negatives (a batch of one graph, or of one label) contributes nothing and leaves the mean. A
        graph without nodes is a negative like any other.
        """
        given = (batch, labels, counts)
        batch, labels, counts = self._checked(nodes, graphs, batch, labels, counts)
        with torch.autocast(nodes.device.type, enabled=False):  # float32 arithmetic inside, always
            precise = torch.promote_types(torch.float32, torch.promote_types(nodes.dtype, graphs.dtype))
            nodes, graphs = nodes.to(precise), graphs.to(precise)
            encounter = Encounter(nodes, graphs, batch, labels, self.supervision, self.tile, counts)
            self._check_range(encounter)
            self._last = encounter.detached()
            loss = self._reduced(encounter)
        if loss.requires_grad and not torch.compiler.is_compiling():
            loss = GuardedLoss.apply(loss, None, *given)  # type: ignore[no-untyped-call]
        return loss

    def set_progress(self, fraction: float) -> None:
        """Move scheduled settings to the fraction of training done, in [0, 1]."""
        if not 0 <= fraction <= 1:
            raise ValueError(f"fraction must be in [0, 1], got {fraction!r}: pass steps done / steps in all")
        beta, prior = value(self.beta, fraction), value(self.class_prior, fraction)
        checks.number("beta", beta, at_least=0, at_most=1e30)
        checks.number("class_prior", prior, at_least=0, below=1)
        self.__dict__["progress"], self._beta, self._prior = float(fraction), beta, prior

    def observe(self, *, accuracy: float | None = None, loss: float | None = None) -> None:
        """No-op, for interface compatibility."""

    def diagnostics(self) -> dict[str, float]:
        """What the negatives of the last call were.

        ``anchors``: nodes · ``without_candidates``: those that contributed nothing · ``below_zero``: those whose
        corrected second term is negative, which a class prior can do · ``support``: mean number of negatives ·
        ``effective_negatives``: mean of 1/Σq² · ``positive_score``, ``negative_score``: means of T
        """
        if self._last is None:
            raise RuntimeError("diagnostics() describes the last call, and there has been none: call the loss first")
        columns, counts = self._described(self._last), self._last.counts  # (n, 5), (n,)
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

    def _settle(self) -> None:
        for name, setting in (("beta", self.beta), ("class_prior", self.class_prior)):
            if isinstance(setting, Schedule) and any(isinstance(leaf, Adaptive) for leaf in setting.leaves()):
                raise ValueError(f"{name} takes no Adaptive schedule here, as its memory is not saved: use another")
        checks.number("beta", self.beta, at_least=0, at_most=1e30)
        checks.number("class_prior", self.class_prior, at_least=0, below=1)
        if self.weight_range is not None:
            checks.number("weight_range", self.weight_range, above=0, below=float("inf"))
        checks.choice("supervision", self.supervision, ("none", "positives", "negatives", "full"))
        checks.choice("reduction", self.reduction, ("mean", "sum", "none"))
        for name, flag in (("grad_through_weights", self.grad_through_weights), ("published", self.published)):
            if not isinstance(flag, bool):
                raise ValueError(f"{name} must be True or False, got {flag!r}")
        if self.tile is not None:
            checks.whole("tile", self.tile)
        if self.published and (
            self.class_prior != 0
            or self.supervision != "none"
            or self.weight_range != 2.0
            or not self.grad_through_weights
        ):
            raise ValueError(
                "published=True has a prior, a range and gradients of its own and no labels: leave class_prior, "
                "weight_range, grad_through_weights and supervision at their defaults"
            )
        self.set_progress(self.progress)
        self._settled = True

    def get_extra_state(self) -> Tensor:
        """Progress, as a tensor, so that any checkpoint format can hold it."""
        return torch.tensor([self.progress], dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        """Take back what `get_extra_state` gave."""
        self.set_progress(float(state[0]))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": None}  # a copy describes no call yet

    def extra_repr(self) -> str:
        shown = ("beta", "class_prior", "weight_range", "supervision", "published", "reduction")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)

    def _reduced(self, encounter: Encounter) -> Tensor:
        if self.reduction == "none":
            return self._losses(encounter)
        shares = (encounter.counts * (encounter.support() > 0)).to(encounter.nodes.dtype)  # (n,)
        if self.reduction == "mean":
            shares = shares / shares.sum().clamp(min=1)
        if self.published:
            return (self._losses(encounter) * shares).sum()
        return node_graph.total(encounter, self._rule(encounter), shares)

    def _rule(self, encounter: Encounter) -> Rule:
        largest = None
        if self._beta > 0 and self.weight_range is not None:
            largest = encounter.largest()  # (), with its gradient
            # Positives may be far larger than all negatives, and negatives tiny: weights and slopes stay finite.
            least = (encounter.bound() / LARGE).clamp(min=1 / LARGE) * (self.weight_range * max(self._beta, 1.0))
            largest = torch.where(largest > 0, torch.maximum(largest, least), least.clamp(min=1.0))
            largest = largest if self.published else largest.detach()
        sign = -1 if self.published else 1
        return Rule(sign * self._beta, self._prior, self.weight_range, largest, self.grad_through_weights)

    def _losses(self, encounter: Encounter) -> Tensor:
        """Of each node, (n,)."""
        rule = self._rule(encounter)
        if not self.published:
            return node_graph.divergence(encounter, rule)
        parts = []
        for rows in encounter.blocks():
            arguments = encounter.nodes[rows], encounter.graphs, encounter.batch[rows, None], rule
            part = checkpoint(_published, *arguments, use_reentrant=False, preserve_rng_state=False)
            parts.append(torch.where(encounter.support()[rows] > 0, part, 0.0))
        return torch.cat(parts)

    @torch.no_grad()
    def _described(self, encounter: Encounter) -> Tensor:
        """Support, effective negatives, mean positive and negative score, and second term of each node, (n, 5)."""
        rule, found = self._rule(encounter), []
        for block in encounter:
            effective = 1 / node_graph.weights(block, rule).square().sum(dim=1).clamp(min=1e-30)
            real = torch.ones_like(block.positive, dtype=torch.bool) if block.real is None else block.real
            positive = block.positive.masked_fill(~real, 0).sum(dim=1) / real.sum(dim=1)
            negative = block.masked(block.scores, 0.0).sum(dim=1) / block.support.clamp(min=1)
            # Without a prior it cannot be negative.
            repulsion = node_graph.repulsion(block, rule) if rule.prior > 0 else torch.zeros_like(effective)
            columns = [block.support.to(effective), effective, positive, negative, repulsion]
            found.append(torch.stack(columns, dim=1))
        return torch.cat(found)

    def _check_range(self, encounter: Encounter) -> None:
        """Raise if scores might overflow, tilted or not."""
        tilt = max(self._beta, 1.0) if self.weight_range is None else 1.0
        # A thousandth is room for the sums over a row.
        checks.values(
            encounter.bound() * tilt < 1e-3 * torch.finfo(encounter.nodes.dtype).max / len(encounter.graphs),
            "nodes and graphs are too large: their inner products overflow; look for a diverged model, or scale down",
        )

    def _checked(
        self, nodes: Tensor, graphs: Tensor, batch: Tensor, labels: Tensor | None, counts: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        for name, tensor in (("nodes", nodes), ("graphs", graphs)):
            checks.floating(name, tensor)
            if tensor.dim() != 2 or 0 in tensor.shape:
                raise ValueError(f"{name} must have shape (n, d) with n, d ≥ 1, got {tuple(tensor.shape)}")
            checks.finite(name, tensor)
        if nodes.shape[1] != graphs.shape[1]:
            raise ValueError(f"graphs must have d = {nodes.shape[1]} columns as nodes, got {graphs.shape[1]}")
        if nodes.device != graphs.device:
            raise ValueError(f"graphs are on {graphs.device}, but nodes on {nodes.device}: move them to one device")
        batch = checks.integers("batch", batch, (len(nodes),), "the graph of each node").to(nodes.device)
        checks.in_range("batch", batch, len(graphs))
        if labels is not None and self.supervision == "none":
            raise ValueError(
                "labels were given, but supervision='none' ignores them: set supervision or leave them out"
            )
        if labels is None and self.supervision != "none":
            raise ValueError(f"supervision={self.supervision!r} needs labels: pass labels=, with −1 where unknown")
        if labels is not None:
            labels = checks.integers("labels", labels, (len(graphs),), "one per graph").to(nodes.device)
            checks.values(labels >= -1, "labels must be ≥ −1, where −1 means unknown")
        if counts is None:
            return batch, labels, torch.ones_like(batch)
        counts = checks.integers("counts", counts, (len(nodes),), "nodes that each stands for").to(nodes.device)
        checks.values(counts >= 1, "counts must be ≥ 1: leave out nodes that stand for none")
        return batch, labels, counts


def _published(nodes: Tensor, graphs: Tensor, own: Tensor, rule: Rule) -> Tensor:
    """Each node's share of the loss as published, (R,), masked pairs having the score 0 (HCL's code for graphs).

    nodes: (R, d) · graphs: (G, d) · own: (R, 1)
    """
    scores = nodes @ graphs.T  # (R, G)
    positive = scores.gather(1, own)[:, 0]
    others = max(len(graphs) - 1, 1)  # without any, the node leaves the mean
    odds = PUBLISHED_PRIOR / (1 - PUBLISHED_PRIOR)
    added = odds * softplus(positive, threshold=EXACT_SOFTPLUS)
    attraction = softplus(-positive, threshold=EXACT_SOFTPLUS) + added - LOG_2 + others * odds * LOG_2
    masked = scores.scatter(1, own, 0.0)
    costs = softplus(masked, threshold=EXACT_SOFTPLUS)  # (R, G)
    if rule.beta == 0:
        repulsion = (costs - LOG_2) / (1 - PUBLISHED_PRIOR)
    else:
        weight = rule.log_weight(masked).softmax(dim=1) * len(graphs)  # averages 1 over all G columns
        repulsion = weight * costs / (1 - PUBLISHED_PRIOR) - LOG_2
    return attraction + repulsion.sum(dim=1) / others
