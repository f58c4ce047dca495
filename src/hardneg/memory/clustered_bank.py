"""What a method with a bank offers its objective: the own row, the others, and what shares a cluster with it."""

from typing import Any

import torch
from torch import Tensor, nn

from hardneg import checks, randomness
from hardneg.memory import Clusters, MemoryBank

CLOSE = ("ignored", "negatives", "positives")
MOST = 128  # close rows that are positives of one anchor, beside its own; of more, so many are drawn
DRAWS = 2  # the counter of these draws


class Past(nn.Module):
    """A bank, and clusters of its rows that are made anew from time to time.

    Args:
        bank: of the embeddings of all instances
        clusters: of its rows, if any
        close: what rows of the same cluster are: ``"negatives"``, and the only ones (Cave), further ``"positives"``
            (Ring(+C_i)), or ``"ignored"``
        after: steps before the first clusters
        every: steps from clusters to clusters
        seed: of the close rows drawn as positives

    Examples:
        >>> import hardneg as hn
        >>> past = Past(MemoryBank(size=100, dim=16), Clusters(k=5), close="negatives")
        >>> z, idx = torch.randn(3, 16, requires_grad=True), torch.tensor([3, 14, 15])
        >>> past.refresh(step=0)
        True
        >>> loss = hn.instance_discrimination()(z, **past.terms(idx, step=0))
        >>> loss.backward()
        >>> past.bank.update(idx, z)
    """

    def __init__(
        self,
        bank: MemoryBank,
        clusters: Clusters | None = None,
        close: str = "ignored",
        after: int = 0,
        every: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        checks.choice("close", close, CLOSE)
        if close != "ignored" and clusters is None:
            raise ValueError(f"close={close!r} needs clusters: set memory.clusters, their number, or close='ignored'")
        checks.whole("after", after, at_least=0)
        checks.whole("every", every)
        self.bank, self.clusters, self.close = bank, clusters, close
        self.after, self.every, self.seed = after, every, seed

    def refresh(self, step: int) -> bool:
        """Cluster the rows if that is due at this step; returns whether there are clusters."""
        if self.clusters is None or step < self.after:
            return False
        self.clusters.refresh(self.bank.rows, step, self.every)
        return True

    def terms(self, idx: Tensor, step: int) -> dict[str, Any]:
        """The arguments of `InfoNCE` beside the anchors: positives and negatives of these instances at this step.

        idx: (B,) instances
        """
        terms: dict[str, Any] = {"z2": self.bank[idx], "negatives": self.bank.rows, "exclude": idx}
        if self.clusters is None or self.clusters.fitted_at is None:
            return terms
        if self.close == "negatives":
            terms["negative_mask"] = self.clusters.same(idx)  # (B, N)
        elif self.close == "positives":
            chosen = self.positives(idx, step)  # (B, M)
            terms["z2"] = self.bank[chosen.clamp(min=0)]  # (B, M, d)
            terms["positive_mask"] = chosen >= 0
        return terms

    def positives(self, idx: Tensor, step: int) -> Tensor:
        """The own row of these instances, then their close rows or MOST of them, (B, M); the rest is −1."""
        assert self.clusters is not None
        members = self.clusters.members(idx)  # (B, L)
        others = (members >= 0) & (members != idx[:, None])
        # One number for each row of the bank, whichever process asks: those with the largest are taken.
        chance = randomness.generator(members.device, self.seed, step, DRAWS)
        luck = torch.rand(self.bank.size, generator=chance, device=members.device)[members.clamp(min=0)]  # (B, L)
        count = min(MOST, members.shape[1])
        order = luck.masked_fill(~others, -1).topk(count, dim=1).indices  # (B, count)
        taken = members.gather(1, order).masked_fill(~others.gather(1, order), -1)
        return torch.cat([idx[:, None], taken], dim=1)
