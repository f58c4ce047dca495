"""The base of all methods: a LightningModule that makes views of a batch, computes its loss and updates its memory."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import lightning as L
import torch
from torch import Tensor, nn

from hardneg import distributed, heads, randomness
from hardneg.losses.infonce import InfoNCE
from hardneg.losses.jsd import JSD
from hardneg.memory import MemoryBank
from hardneg.methods.batch_pairs import BatchPairs
from hardneg.methods.step_timer import StepTimer
from hardneg.modality import EncoderSection, Modality, ProjectedEncoderSection, ResidentSamples, make_encoder
from hardneg.recipe_section import Section

# (samples, generator, views=2) → all first views, then all second views; with several processes also first= and total=,
# and channels_last=True if the network uses that layout
Views = Callable[..., Any]
NEGATIVES = 3  # counter of the draws of negatives


@dataclass(frozen=True)
class Plan:
    """The arguments of `Method.build`.

    modality, shape, count: kind, size and number of the training samples · encoder: its section of the recipe ·
    settings: the section of the method · make_loss: makes the loss ·
    make_views: creates the augmentation of a batch · optimizer, rate, seed, channels_last: as for `Method` ·
    batch_size, processes, drop_last: of the run · given_encoder: a module to use instead of the section's
    """

    modality: Modality
    shape: tuple[int, ...]
    count: int
    encoder: Any
    settings: Any
    make_loss: Callable[[], InfoNCE | JSD]
    make_views: Callable[[], Any]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    rate: Callable[[float], float]
    seed: int = 0
    batch_size: int = 256
    processes: int = 1
    drop_last: bool = True
    channels_last: bool = False
    given_encoder: nn.Module | None = None

    def make_head(self, encoder: nn.Module, shape: tuple[int, ...] | None = None) -> nn.Module:
        """The projection head that the encoder's section describes."""
        if not isinstance(self.encoder, ProjectedEncoderSection):
            raise ValueError(f"method needs a projection head, which encoders of {self.modality.name} do not have")
        width = self.modality.feature_size(encoder, self.shape if shape is None else shape)
        return heads.head(width, self.encoder.hidden, self.encoder.outputs, self.encoder.norm)

    def make_infonce(self) -> InfoNCE:
        """The loss, which must be an `InfoNCE`."""
        made = self.make_loss()
        if not isinstance(made, InfoNCE):
            raise ValueError("objective.preset=infograph compares nodes with graphs: use it with method=infograph")
        return made


class Method(L.LightningModule, ABC):
    """Base class of all methods. A subclass defines the loss of a batch of views and the update of its memory.

    A batch is ``(index, samples)`` or ``(index, samples, labels)`` from any loader. The engine of `hardneg.training`
    passes the index alone and keeps the samples on the device. All views go through the network in one pass.

    Args:
        encoder: a batch of views → (B, features); what is kept after training
        head: (B, features) → (B, outputs), discarded after training
        objective: the loss
        views: makes views of a batch of samples, as `ImageViews` does; None if the method makes none
        optimizer: given the module, its optimizer
        rate: factor of the learning rate at a fraction of training
        seed: of views and of everything else that is drawn in a step
        channels_last: memory layout of image batches
    """

    Settings: ClassVar[type[Section]] = Section
    """The settings that only this method has: the section ``memory`` of a recipe."""
    modalities: ClassVar[tuple[str, ...]] = ("images",)
    views_per_sample: ClassVar[int] = 2
    uses_views: ClassVar[bool] = True
    takes_not_negatives: ClassVar[bool] = True
    """Whether pairs of samples can be left out of its negatives."""

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module,
        objective: InfoNCE,
        views: Views | None,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        rate: Callable[[float], float] = lambda progress: 1.0,
        seed: int = 0,
        channels_last: bool = False,
    ) -> None:
        super().__init__()
        self.encoder, self.head, self.objective = encoder, head, objective
        self.views, self.seed, self.channels_last = views, seed, channels_last
        self._view_keywords = frozenset[str]() if views is None else _keywords(views)
        self._optimizer, self._rate = optimizer, rate
        self.clock = StepTimer()
        self.samples: ResidentSamples | None = None  # if the training set is held on the device
        self.labels: Tensor | None = None  # (N,)
        self.not_negatives: BatchPairs | None = None  # pairs of `ids_of` that are not negatives of each other
        self.recent: MemoryBank | None = None  # the last embedding of every sample, if a batch sampler needs it
        self.noted: tuple[Tensor, Tensor] | None = None  # indices (B,) and embeddings (B, d) of the last batch
        self.noted_positives: Tensor | None = None  # (B, d), of the last batch

    @classmethod
    def build(cls, plan: Plan) -> Self:
        """The method with fresh weights, as a recipe describes it."""
        encoder = plan.given_encoder or cls.make_encoder(plan.modality, plan.encoder, plan.shape)
        parts = cls.parts(plan, encoder)
        return cls(
            encoder,
            *parts,
            plan.optimizer,
            plan.rate,
            plan.seed,
            plan.channels_last,
            **cls.memory_arguments(plan),
        )

    @classmethod
    def make_encoder(cls, modality: Modality, section: EncoderSection, shape: tuple[int, ...]) -> nn.Module:
        """A fresh encoder for samples of this shape."""
        return make_encoder(modality, section, shape)

    @classmethod
    def parts(cls, plan: Plan, encoder: nn.Module) -> tuple[nn.Module, InfoNCE, Views | None]:
        """Head, loss and views; drawn from the generator in this order."""
        return plan.make_head(encoder), plan.make_infonce(), plan.make_views()

    @classmethod
    def loss_defaults(cls, settings: Any) -> dict[str, Any]:
        """Default arguments of the loss for this method with these settings; a recipe can replace them."""
        return {}

    @classmethod
    def memory_arguments(cls, plan: Plan) -> dict[str, Any]:
        """Arguments of the constructor that only this method has."""
        return {}

    @abstractmethod
    def loss(self, views: Any, index: Tensor, labels: Tensor | None) -> Tensor:
        """The loss of a batch.

        views: all first views, then all second views, as the encoder takes them · index: (B,) rows of the samples in
        the training set · labels: (B,) if the objective uses them
        """

    def record_embeddings(self, index: Tensor, embeddings: Tensor, positives: Tensor | None = None) -> None:
        """Keep the embeddings (B, d) of a batch for the memory update and the metrics.

        positives: (B, d), if each embedding has one
        """
        self.noted = (index, embeddings.detach())
        self.noted_positives = None if positives is None else positives.detach()

    def update_memory(self) -> None:
        """Update the memory from the last batch. Called after its backward pass; a second call changes nothing."""
        if self.recent is not None and self.noted is not None:
            self.recent.update(*self.noted)
        self.noted = self.noted_positives = None

    def diagnostics(self) -> dict[str, float]:
        """Diagnostics of the negatives of the last batch; called before `update_memory`."""
        return self.objective.diagnostics()

    def networks(self) -> list[nn.Module]:
        """The networks of a training step, which are compiled one by one."""
        return [self.encoder, self.head]

    def embedding_network(self) -> nn.Module:
        """The network whose outputs a batch sampler compares."""
        return nn.Sequential(self.encoder, self.head)

    @property
    def smallest_batch(self) -> int:
        """Number of samples that a forward pass needs at least."""
        return 2

    def known_labels(self) -> Tensor:
        """The labels of all samples, (N,)."""
        if self.labels is None:
            raise ValueError(f"supervision={self.objective.supervision!r} needs labels, and the data have none")
        return self.labels

    def label_arguments(self, labels: Tensor | None, negative_labels: Tensor | None = None) -> dict[str, Tensor]:
        """The label arguments of the objective, as far as it uses them.

        labels: (B,) · negative_labels: (N,) of the negatives given to it, if any
        """
        if labels is None:
            return {}
        if negative_labels is None:
            return {"labels": labels}
        return {"labels": labels, "negative_labels": negative_labels.to(labels.device)}

    def ids_of(self, rows: Tensor) -> Tensor:
        """The ids of these rows of the training set; rows of the same id are never negatives of each other."""
        return rows

    def leave_out(self, pairs: Tensor) -> None:
        """Never compare these pairs (P, 2) of rows of the training set as negatives."""
        self.not_negatives = BatchPairs(self.ids_of(pairs.flatten()).view(-1, 2))

    def id_arguments(self, index: Tensor, memory: bool = False) -> dict[str, Tensor]:
        """The id arguments of the objective, if samples of the batch are listed as not negatives of others.

        index: (B,) · memory: candidates are also a queue's or a bank's, whose ids the caller passes

        A batch without such pairs, which is nearly every batch of a short list, has no ids: the loss then takes its
        short path. With several processes there are always ids, because the loss gathers them.
        """
        if self.not_negatives is None:
            return {}
        gathers = bool(self.objective.gather) and distributed.world_size() > 1
        ids = self.ids_of(index)
        pairs = self.not_negatives.of(ids, within=not (memory or gathers))
        return {"ids": ids, "not_negatives": pairs} if gathers or len(pairs) else {}

    def on_fit_start(self) -> None:
        self.total_steps = int(self.trainer.estimated_stepping_batches)
        if self.samples is not None:
            self.samples = self.samples.to(self.device)
        if self.labels is not None:
            self.labels = self.labels.to(self.device)
        if self.not_negatives is not None:
            self.not_negatives = self.not_negatives.to(self.device)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.device.type == "cuda":  # elsewhere this would only import the compiler, which takes seconds
            # CUDA graphs of the last step may now overwrite their outputs.
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        index, samples, labels = self.unpack(batch)
        objective, step = self.objective, self.step
        objective.set_progress(self.progress)
        if getattr(objective, "num_negatives", None) is not None:
            # The same generator in every process: each uses the part of the draws that belongs to its anchors.
            objective.generator = randomness.generator(index.device, self.seed, step, NEGATIVES)
        views = self.make_views(samples, len(index), index.device, step)
        self.clock.mark("augmentation")
        return self.loss(views, index, labels)

    def unpack(self, batch: Any) -> tuple[Tensor, Any, Tensor | None]:
        """Index (B,), samples and, if the objective uses them, labels (B,) of a batch."""
        index, *rest = (batch,) if isinstance(batch, Tensor) else batch
        samples = rest[0] if rest else self.look_up(index)
        labels = None
        if self.objective.supervision != "none":
            labels = rest[1] if len(rest) > 1 else self.known_labels()[index.to(self.known_labels().device)]
        return index, samples, labels

    def look_up(self, index: Tensor) -> Any:
        """The samples of these rows of the training set."""
        return self.resident().batch(index)

    def resident(self) -> ResidentSamples:
        """The training set on the device."""
        if self.samples is None:
            raise ValueError(
                "the batch holds indices only: set module.samples, or let the loader yield (index, samples)"
            )
        return self.samples

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.update_memory()

    @property
    def step(self) -> int:
        """Number of finished batches, from which all draws are computed."""
        return self.trainer.fit_loop.total_batch_idx if self._trainer is not None else 0

    @property
    def progress(self) -> float:
        """The finished fraction of training."""
        return min(self.trainer.global_step / self.total_steps, 1.0) if self._trainer is not None else 0.0

    def make_views(self, samples: Any, count: int, device: torch.device, step: int) -> Any:
        """Views of ``count`` samples as drawn at this step: all first views, then all second views."""
        if self.views is None:
            return samples
        accepted = self._view_keywords
        options: dict[str, Any] = {"channels_last": True} if self.channels_last and "channels_last" in accepted else {}
        processes = self.trainer.world_size if self._trainer is not None else 1
        counters = [self.seed, step]
        if processes > 1 and "total" in accepted:
            # Each process uses its part of the draws for the whole batch: views do not depend on their number.
            options |= {"first": self.global_rank * count, "total": processes * count}
        elif processes > 1:
            counters.append(self.global_rank)
        views = self.views(samples, randomness.generator(device, *counters), views=self.views_per_sample, **options)
        if self.channels_last and "channels_last" not in accepted:
            views = views.contiguous(memory_format=torch.channels_last)
        return views

    @torch.no_grad()
    def dry_run(self, samples: Any, index: Tensor, labels: Tensor | None) -> int:
        """Run one forward pass of a few samples in evaluation mode, which changes no state; return the embedding dim.

        Networks and views that do not fit raise here, before anything is written.
        """
        modes = [(module, module.training) for module in self.modules()]
        self.eval()
        try:
            views = self.make_views(samples, len(index), index.device, 0)
            self.loss(views, index, labels)
            assert self.noted is not None
            return self.noted[1].shape[1]
        finally:
            self.noted = self.noted_positives = None
            self.clock = StepTimer()
            for module, mode in modes:
                module.training = mode

    def configure_optimizers(self) -> Any:
        optimizer = self._optimizer(self)
        total = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self._rate(min(step / total, 1.0)))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_gradient_clipping(self, optimizer: Any, *limits: Any, **named: Any) -> None:
        # Lightning would look for a limit in every step.
        if any(limit is not None for limit in (*limits, *named.values())):
            super().configure_gradient_clipping(optimizer, *limits, **named)

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning stores the name of each hook here, fifty times a step, and nn.Module would check each time whether
        # the value is a parameter.
        if name == "_current_fx_name":
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)


def _keywords(views: Views) -> frozenset[str]:
    """The optional arguments ``first``, ``total`` and ``channels_last`` that a function accepts."""
    parameters = inspect.signature(views).parameters
    optional = {"first", "total", "channels_last"}
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return frozenset(optional)
    return frozenset(optional & parameters.keys())
