"""What every method shares: pictures in, views made, a loss out, memory refreshed after the step."""

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from hardneg import randomness
from hardneg.losses.infonce import InfoNCE
from hardneg.memory import Clusters, MemoryBank, Queue
from hardneg.methods.step_timer import StepTimer

# (images, generator, views=2) → all first views and then all second ones; in several processes also first= and total=,
# and channels_last=True where the network wants that layout
View = Callable[..., Tensor]
NEGATIVES = 3  # the counter of the draws of negatives


class Method(L.LightningModule):
    """A way of training an encoder; a subclass says what the loss of some views is, and what it remembers of them.

    A batch is ``(index, images)`` or ``(index, images, labels)`` from any loader; the engine of `hardneg.training.run`
    hands over the index alone and keeps the pictures on the device. All views go through the network in one pass.

    Args:
        encoder: (B, C, H, W) → (B, features); what is kept after training
        head: (B, features) → (B, outputs), thrown away after training
        objective: the loss
        views: makes views of a batch of pictures, as `ImageViews` does; None where a method makes none
        optimizer: given the module, its optimiser
        rate: factor of the learning rate at a fraction of training done
        seed: of views and of all else that is drawn in a step
        channels_last: memory layout of the pictures
    """

    views_per_image = 2

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module,
        objective: InfoNCE,
        views: View | None,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        rate: Callable[[float], float] = lambda progress: 1.0,
        seed: int = 0,
        channels_last: bool = False,
    ) -> None:
        super().__init__()
        self.encoder, self.head, self.objective = encoder, head, objective
        self.views, self.seed, self.channels_last = views, seed, channels_last
        self._optimizer, self._rate = optimizer, rate
        self.clock = StepTimer()
        self.images: Tensor | None = None  # uint8 (N, C, H, W), if they live on the device
        self.labels: Tensor | None = None  # (N,)
        self.recent: MemoryBank | None = None  # the last embedding of every sample, where a batch sampler wants it
        self.noted: tuple[Tensor, Tensor] | None = None

    def loss(self, seen: Tensor, index: Tensor, labels: Tensor | None) -> Tensor:
        """The loss of a batch.

        seen: (views · B, C, h, w), all first views and then all second ones · index: (B,) which pictures they are ·
        labels: (B,) if the objective uses them
        """
        raise NotImplementedError

    def note(self, index: Tensor, embeddings: Tensor) -> None:
        """Keep in mind what was seen of a batch, (B, d), for `remember` and for the books."""
        self.noted = (index, embeddings.detach())

    def remember(self) -> None:
        """Take up into memory what the last batch showed. Called when its backward pass is done, maybe twice."""
        if self.recent is not None and self.noted is not None:
            self.recent.update(*self.noted)
        self.noted = None

    def diagnostics(self) -> dict[str, float]:
        """What the negatives of the last batch were; asked before `remember`."""
        return self.objective.diagnostics()

    def networks(self) -> list[nn.Module]:
        """The networks that a step runs through, which may be compiled one by one."""
        return [self.encoder, self.head]

    def known_labels(self) -> Tensor:
        """The labels of all pictures, (N,)."""
        if self.labels is None:
            raise ValueError(f"supervision={self.objective.supervision!r} needs labels, and the data have none")
        return self.labels

    def label_terms(self, labels: Tensor | None, negative_labels: Tensor | None = None) -> dict[str, Tensor]:
        """The arguments by which the objective learns of labels, as far as it uses them.

        labels: (B,) · negative_labels: (N,) of the negatives given to it, if any
        """
        if labels is None:
            return {}
        if negative_labels is None or self.objective.supervision == "positives":
            return {"labels": labels}
        return {"labels": labels, "negative_labels": negative_labels.to(labels.device)}

    def on_fit_start(self) -> None:
        self.total_steps = int(self.trainer.estimated_stepping_batches)
        if self.images is not None:
            self.images = self.images.to(self.device)
        if self.labels is not None:
            self.labels = self.labels.to(self.device)

    def training_step(self, batch: Tensor | tuple[Tensor, ...], batch_idx: int) -> Tensor:
        if self.device.type == "cuda":  # elsewhere this would only import the compiler, which takes seconds
            # CUDA graphs of the last step may now overwrite what they gave out.
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        index, *rest = (batch,) if isinstance(batch, Tensor) else batch
        images = rest[0] if rest else self._resident()[index]
        objective, step, labels = self.objective, self.step, None
        if objective.supervision != "none":
            labels = rest[1] if len(rest) > 1 else self.known_labels()[index.to(self.known_labels().device)]
        objective.set_progress(self.progress)
        if objective.num_negatives is not None:
            # The same for every process: each takes its anchors' part of the draws for all.
            objective.generator = randomness.generator(images.device, self.seed, step, NEGATIVES)
        seen = self.look(images, step)  # (views · B, C, h, w)
        self.clock.mark("augmentation")
        return self.loss(seen, index, labels)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.remember()

    @property
    def step(self) -> int:
        """Batches done, which all draws are a function of."""
        return self.trainer.fit_loop.total_batch_idx

    @property
    def progress(self) -> float:
        """The fraction of training done."""
        return min(self.trainer.global_step / self.total_steps, 1.0)

    def look(self, images: Tensor, step: int) -> Tensor:
        """Views of each picture, all first ones and then all second ones, as drawn at this step."""
        # Several processes take their part of the draws for the whole batch, so that their number changes nothing.
        processes = self.trainer.world_size if self._trainer is not None else 1
        part = {} if processes == 1 else {"first": self.global_rank * len(images), "total": processes * len(images)}
        layout = {"channels_last": True} if self.channels_last else {}
        assert self.views is not None
        chance = randomness.generator(images.device, self.seed, step)
        return self.views(images, chance, views=self.views_per_image, **part, **layout)

    def configure_optimizers(self) -> Any:
        optimizer = self._optimizer(self)
        total = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self._rate(min(step / total, 1.0)))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_gradient_clipping(self, optimizer: Any, *limits: Any, **named: Any) -> None:
        # Lightning would ask anew in every step whether anyone wants it.
        if any(limit is not None for limit in (*limits, *named.values())):
            super().configure_gradient_clipping(optimizer, *limits, **named)

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning notes here which hook it calls, fifty times a step, and nn.Module would ask each time whether the
        # name is a weight.
        if name == "_current_fx_name":
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def _resident(self) -> Tensor:
        if self.images is None:
            raise ValueError("the batch holds indices only: set module.images, or let the loader yield (index, images)")
        return self.images

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        # Asked by DDP. Memory is the same on all processes by its own gathering: sending it anew before every step
        # would cost more than the step, and rows on the host cannot be sent between GPUs.
        return [
            f"{name}.{buffer}"
            for name, module in self.named_modules()
            if isinstance(module, Queue | MemoryBank | Clusters)
            for buffer, _ in module.named_buffers(recurse=False)
        ]
