"""MoCo v2: keys of a momentum encoder, negatives from a queue of them."""

from typing import Any

import torch
from torch import Tensor, nn

from hardneg import checks, randomness
from hardneg.memory import Queue
from hardneg.methods.method import Method, Plan
from hardneg.methods.momentum import follow, momentum_copy
from hardneg.methods.split_norm import split_norms
from hardneg.recipe_section import Count, Fraction, Section

SHUFFLE = 1  # counter of the draws that shuffle keys


class MoCoSettings(Section):
    """Settings of MoCo v2."""

    queue: Count = 65536
    """K, the number of keys in the queue."""
    momentum: Fraction = 0.999
    """m of the key encoder."""
    split: Count = 8
    """Number of parts of a batch that batch-norm normalizes separately; 1 is plain batch-norm."""


class MoCo(Method):
    """Trains an encoder so that a view finds its key among those of a queue (He et al. 2020; Chen et al. 2020).

    Queries come from the encoder, keys from its momentum copy, without gradient. After the step the keys are enqueued
    with labels and instance ids; keys of the same instance are not negatives, nor are those of pairs given to
    `leave_out`. MoCoRing uses `hardneg.ring_nce`, hard MoCo `hardneg.hcl(in_batch=None)`.

    Args:
        encoder, head, objective, and the options of `Method`
        queue: its ``dim`` is that of the head's outputs
        momentum: m of the key encoder, in [0, 1]
        split: parts of a batch that batch-norm normalizes separately, see `SplitBatchNorm`; 1 is plain batch-norm
    """

    Settings = MoCoSettings

    def __init__(self, *parts: Any, queue: Queue, momentum: float = 0.999, split: int = 8, **options: Any) -> None:
        super().__init__(*parts, **options)
        if self.objective.in_batch == "both" or self.objective.symmetric:
            raise ValueError("keys are not anchors: give the objective in_batch=None, or 'other', and symmetric=False")
        checks.number("momentum", momentum, at_least=0, at_most=1)
        checks.whole("split", split)
        self.queue, self.momentum, self.split = queue, momentum, split
        if split > 1:
            self.encoder, self.head = (split_norms(network, split) for network in (self.encoder, self.head))
        self.key_encoder, self.key_head = momentum_copy(self.encoder), momentum_copy(self.head)
        self._new_keys: tuple[Tensor, Tensor, Tensor | None] | None = None

    @classmethod
    def loss_defaults(cls, settings: Any) -> dict[str, Any]:
        return {"in_batch": None}

    @classmethod
    def memory_arguments(cls, plan: Plan) -> dict[str, Any]:
        settings: MoCoSettings = plan.settings
        share = plan.batch_size // plan.processes
        last = plan.count % plan.batch_size // plan.processes if not plan.drop_last else 0
        for size in (share, last):
            if size % settings.split:
                raise ValueError(
                    f"memory.split={settings.split} does not divide a batch of {size} samples in a process: choose a "
                    "divisor, or 1 for plain batch-norm" + "; or set batches.drop_last=true" * (size == last)
                )
        queue = Queue(settings.queue, plan.encoder.outputs, gather=plan.processes > 1)
        return {"queue": queue, "momentum": settings.momentum, "split": settings.split}

    def loss(self, views: Tensor, index: Tensor, labels: Tensor | None) -> Tensor:
        first, second = views.chunk(2)
        queries, keys = self.head(self.encoder(first)), self.keys(second)  # (B, d) each
        self.record_embeddings(index, queries, keys)
        self._new_keys = keys, index, labels
        own: dict[str, Tensor] = self.id_arguments(index, memory=True)
        if own:
            own["negative_ids"] = self.queue.ids
        else:
            own["negative_mask"] = ~self.queue.same_instance(index)
        loss: Tensor = self.objective(
            queries, keys, negatives=self.queue.keys, **own, **self.label_arguments(labels, self.queue.labels)
        )
        return loss

    def update_memory(self) -> None:
        super().update_memory()
        if self._new_keys is not None:
            keys, index, labels = self._new_keys
            self._new_keys = None
            self.queue.enqueue(keys, labels, index)
            follow(self.key_encoder, self.encoder, self.momentum)
            follow(self.key_head, self.head, self.momentum)

    @property
    def smallest_batch(self) -> int:
        return max(2, self.split)

    @torch.no_grad()
    def keys(self, views: Tensor) -> Tensor:
        """The keys (B, d) of views (B, C, h, w), computed in a random order if batch-norm is split."""
        if self.split == 1:
            return self.key_head(self.key_encoder(views))  # type: ignore[no-any-return]
        generator = randomness.generator(views.device, self.seed, self.step, SHUFFLE)
        order = torch.randperm(len(views), generator=generator, device=views.device)
        return self.key_head(self.key_encoder(views[order]))[order.argsort()]  # type: ignore[no-any-return]

    def networks(self) -> list[nn.Module]:
        return [*super().networks(), self.key_encoder, self.key_head]
