"""A memory bank with clusters of its rows, and the loss arguments they give: positives, negatives and masks."""

from typing import Any

import torch
from torch import Tensor, nn

from hardneg import checks, randomness
from hardneg.memory import Clusters, MemoryBank

CLOSE = ("ignored", "negatives", "positives")
MAX_CLUSTER_POSITIVES = 128  # in addition to the own row; from larger clusters this number is drawn at random
_DRAW_COUNTER = 2  # third counter of these draws, after seed and step


class ClusteredBank(nn.Module):
    """A memory bank and clusters of its rows, which are recomputed every ``cluster_every`` steps.

    Args:
        bank: embeddings of all instances
        clusters: of its rows, or None
        close: how the close neighbors, the rows in the anchor's cluster (LA), are used: as its only ``"negatives"``
            (Cave), as ``"positives"`` in addition to its own row (Ring(+C_i)), or ``"ignored"``
        cluster_after: step of the first clustering
        cluster_every: steps between clusterings
        seed: of the draw of positives from large clusters

    Examples:
        >>> import hardneg as hn
        >>> memory = ClusteredBank(MemoryBank(size=100, dim=16), Clusters(k=5), close="negatives")
        >>> z, idx = torch.randn(3, 16, requires_grad=True), torch.tensor([3, 14, 15])
        >>> memory.refresh(step=0)
        True
        >>> loss = hn.instance_discrimination()(z, **memory.loss_arguments(idx, step=0))
        >>> loss.backward()
        >>> memory.bank.update(idx, z)
    """

    def __init__(
        self,
        bank: MemoryBank,
        clusters: Clusters | None = None,
        close: str = "ignored",
        cluster_after: int = 0,
        cluster_every: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        checks.choice("close", close, CLOSE)
        if close != "ignored" and clusters is None:
            raise ValueError(f"close={close!r} needs clusters: set memory.clusters, their number, or close='ignored'")
        self.bank, self.clusters, self.close = bank, clusters, close
        self.cluster_after = checks.whole("cluster_after", cluster_after, at_least=0)
        self.cluster_every = checks.whole("cluster_every", cluster_every)
        self.seed = seed

    def refresh(self, step: int) -> bool:
        """Cluster the rows if a clustering is due at this step; return True if there are clusters."""
        if self.clusters is None or step < self.cluster_after:
            return False
        self.clusters.refresh(self.bank.rows, step, self.cluster_every)
        return True

    def loss_arguments(self, idx: Tensor, step: int) -> dict[str, Any]:
        """The arguments of `InfoNCE` except the anchors: positives and negatives of these instances at this step.

        idx: (B,) instances
        """
        arguments: dict[str, Any] = {"z2": self.bank[idx], "negatives": self.bank.rows, "exclude": idx}
        if self.clusters is None or self.clusters.fitted_at is None:
            return arguments
        if self.close == "negatives":
            arguments["negative_mask"] = self.clusters.same(idx)  # (B, N)
        elif self.close == "positives":
            chosen = self.positives(idx, step)  # (B, M)
            arguments["z2"] = self.bank[chosen.clamp(min=0)]  # (B, M, d)
            arguments["positive_mask"] = chosen >= 0
        return arguments

    def positives(self, idx: Tensor, step: int) -> Tensor:
        """Rows of these instances, then at most MAX_CLUSTER_POSITIVES of their clusters, (B, M), padded with −1."""
        assert self.clusters is not None
        members = self.clusters.members(idx)  # (B, L)
        others = (members >= 0) & (members != idx[:, None])
        # One random number per row of the bank, the same on every process: the rows with the largest are chosen.
        generator = randomness.generator(members.device, self.seed, step, _DRAW_COUNTER)
        numbers = torch.rand(self.bank.size, generator=generator, device=members.device)  # (N,)
        count = min(MAX_CLUSTER_POSITIVES, members.shape[1])
        order = numbers[members.clamp(min=0)].masked_fill(~others, -1).topk(count, dim=1).indices  # (B, count)
        chosen = members.gather(1, order).masked_fill(~others.gather(1, order), -1)
        return torch.cat([idx[:, None], chosen], dim=1)
