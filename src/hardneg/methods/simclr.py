"""SimCLR: two views of each picture, one encoder, negatives from the batch. Any objective."""

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from hardneg import randomness
from hardneg.objectives.infonce import InfoNCE
from hardneg.training.clock import Clock

# (images, generator, views=2) → both views, one after the other; in several processes also first= and total= draws
View = Callable[..., Tensor]


class SimCLR(L.LightningModule):
    """Trains an encoder so that two views of a picture agree (Chen et al. 2020), with any `InfoNCE`.

    A batch is ``(index, images)`` or ``(index, images, labels)`` from any loader; the engine of `hardneg.training.run`
    hands over the index alone and keeps the pictures on the device. Both views go through the network in one pass.

    Args:
        encoder: (B, C, H, W) → (B, features)
        head: (B, features) → (B, outputs), thrown away after training
        objective: the loss
        views: makes two views of a batch of pictures, as `ImageViews` does
        optimizer: given the module, its optimiser
        rate: factor of the learning rate at a fraction of training done
        seed: of views and of all else that is drawn in a step
        channels_last: memory layout of the pictures
    """

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module,
        objective: InfoNCE,
        views: View,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        rate: Callable[[float], float] = lambda progress: 1.0,
        seed: int = 0,
        channels_last: bool = False,
    ) -> None:
        super().__init__()
        self.encoder, self.head, self.objective = encoder, head, objective
        self.views, self.seed, self.channels_last = views, seed, channels_last
        self._optimizer, self._rate = optimizer, rate
        self.clock = Clock()
        self.images: Tensor | None = None  # uint8 (N, C, H, W), if they live on the device
        self.labels: Tensor | None = None  # (N,)

    def on_fit_start(self) -> None:
        self._total_steps = self.trainer.estimated_stepping_batches
        if self.images is not None:
            self.images = self.images.to(self.device)
        if self.labels is not None:
            self.labels = self.labels.to(self.device)

    def training_step(self, batch: Tensor | tuple[Tensor, ...], batch_idx: int) -> Tensor:
        # CUDA graphs of the last step may now overwrite what they gave out.
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        index, *rest = (batch,) if isinstance(batch, Tensor) else batch
        images = rest[0] if rest else self._resident()[index]
        step = self.trainer.global_step
        self.objective.set_progress(min(step / self._total_steps, 1.0))
        both = self.pair(images, step)  # (2B, C, h, w)
        self.clock.mark("augmentation")
        z1, z2 = self.head(self.encoder(both)).chunk(2)
        if self.objective.supervision == "none":
            loss: Tensor = self.objective(z1, z2)
        else:
            labels = rest[1] if len(rest) > 1 else self.labels
            if labels is None:
                raise ValueError(f"supervision={self.objective.supervision!r} needs labels, and the data have none")
            loss = self.objective(z1, z2, labels=labels if len(rest) > 1 else labels[index])
        return loss

    def pair(self, images: Tensor, step: int) -> Tensor:
        """Two views of each picture, all first ones and then all second ones, as drawn at this step."""
        # Several processes take their part of the draws for the whole batch, so that their number changes nothing.
        processes = self.trainer.world_size if self._trainer is not None else 1
        part = {} if processes == 1 else {"first": self.global_rank * len(images), "total": processes * len(images)}
        both = self.views(images, randomness.generator(images.device, self.seed, step), views=2, **part)
        return both.to(memory_format=torch.channels_last) if self.channels_last else both

    def configure_optimizers(self) -> Any:
        optimizer = self._optimizer(self)
        total = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self._rate(min(step / total, 1.0)))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _resident(self) -> Tensor:
        if self.images is None:
            raise ValueError("the batch holds indices only: set module.images, or let the loader yield (index, images)")
        return self.images
