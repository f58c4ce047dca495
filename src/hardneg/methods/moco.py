"""MoCo v2: keys of a slow encoder, negatives from a queue of them. Any objective."""

from typing import Any

import torch
from torch import Tensor, nn

from hardneg import checks, randomness
from hardneg.memory import Queue
from hardneg.methods.method import Method
from hardneg.methods.momentum import follow, slow_copy
from hardneg.methods.split_norm import split_norms

SHUFFLE = 1  # the counter of the draws that shuffle keys


class MoCo(Method):
    """Trains an encoder so that a view finds its key among those of a queue (He et al. 2020; Chen et al. 2020).

    Queries come from the encoder, keys from its slow copy, without gradient. The queue takes up the keys, with labels
    and instances, when the step is done; keys of the same instance are no negatives. MoCoRing is this with
    `hardneg.ring_nce`, hard MoCo with `hardneg.hcl(in_batch=None)`.

    Args:
        encoder, head, objective, and the options of `Method`
        queue: of keys as long as the head's outputs
        momentum: m of the key encoder, in [0, 1]
        split: parts of a batch that batch-norm looks at one by one, see `SplitBatchNorm`; 1 leaves it as it is
    """

    def __init__(self, *parts: Any, queue: Queue, momentum: float = 0.999, split: int = 8, **options: Any) -> None:
        super().__init__(*parts, **options)
        if self.objective.in_batch == "both" or self.objective.symmetric:
            raise ValueError("keys are no anchors: give the objective in_batch=None, or 'other', and symmetric=False")
        checks.number("momentum", momentum, at_least=0, at_most=1)
        checks.whole("split", split)
        self.queue, self.momentum, self.split = queue, momentum, split
        if split > 1:
            self.encoder, self.head = (split_norms(network, split) for network in (self.encoder, self.head))
        self.key_encoder, self.key_head = slow_copy(self.encoder), slow_copy(self.head)
        self._fresh: tuple[Tensor, Tensor, Tensor | None] | None = None

    def loss(self, seen: Tensor, index: Tensor, labels: Tensor | None) -> Tensor:
        first, second = seen.chunk(2)
        queries, keys = self.head(self.encoder(first)), self.keys(second)  # (B, d) each
        self.note(index, queries)
        self._fresh = keys, index, labels
        loss: Tensor = self.objective(
            queries,
            keys,
            negatives=self.queue.keys,
            negative_mask=~self.queue.same_instance(index),
            **self.label_terms(labels, self.queue.labels),
        )
        return loss

    def remember(self) -> None:
        super().remember()
        if self._fresh is not None:
            keys, index, labels = self._fresh
            self._fresh = None
            self.queue.enqueue(keys, labels, index)
            follow(self.key_encoder, self.encoder, self.momentum)
            follow(self.key_head, self.head, self.momentum)

    @torch.no_grad()
    def keys(self, seen: Tensor) -> Tensor:
        """The keys of views (B, C, h, w), (B, d), computed in another order than the queries."""
        if self.split == 1:
            return self.key_head(self.key_encoder(seen))  # type: ignore[no-any-return]
        chance = randomness.generator(seen.device, self.seed, self.step, SHUFFLE)
        order = torch.randperm(len(seen), generator=chance, device=seen.device)
        return self.key_head(self.key_encoder(seen[order]))[order.argsort()]  # type: ignore[no-any-return]

    def networks(self) -> list[nn.Module]:
        return [*super().networks(), self.key_encoder, self.key_head]
