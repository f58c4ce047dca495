"""The measurements of a run for `evidence.py`."""

import time
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from evidence_tables import RAW, Cell
from torch import Tensor, nn

from hardneg.checks import TensorLike
from hardneg.diagnostics.loss_ordering import loss_ordering
from hardneg.evaluation import knn_accuracy
from hardneg.images import load_split
from hardneg.images.features import extract_all, extract_set
from hardneg.insight import cosine_histograms
from hardneg.losses.hardening import Exponential, Hardening, Threshold
from hardneg.losses.infonce import InfoNCE
from hardneg.methods.method import Method
from hardneg.training.callbacks.diagnostics import Diagnostics
from hardneg.training.callbacks.sampler_refresh import Refresh

SAFETY = 1.25  # an epoch may take this much longer than earlier ones
# Those of H-SCL's figures 4 and 5; τ is a threshold on e^s.
HARDENINGS: dict[str, Hardening] = {
    "β = 1": Exponential(1.0),
    "β = 2": Exponential(2.0),
    "τ = e^−0.5": Threshold(score=-0.5),
    "τ = e^−0.1": Threshold(score=-0.1),
}


class OutOfTimeError(Exception):
    """The time limit is reached."""


class Watch(L.Callback):
    """Measures a run, evaluates it at some epochs, and stops it in time.

    cell: what is run · source: its data · deadline: `time.monotonic` when the call must be over · kept: what a run that
    is resumed had measured before
    """

    def __init__(self, cell: Cell, source: str, deadline: float, kept: dict[str, Any]) -> None:
        self.cell, self.source, self.deadline = cell, source, deadline
        self.knn: dict[str, float] = kept.get("knn", {})
        self.epochs: list[dict[str, float]] = kept.get("epochs", [])
        self.orderings: dict[str, Any] = kept.get("orderings", {})  # by epoch and hardening
        self.pairs: dict[str, float] = {}  # cosines of the head's outputs for test images
        self.labels: Tensor | None = None  # (N,) of the training set
        self.encode = self.graph = 0.0  # seconds of this epoch's refreshes
        self.steps = 1  # of an epoch
        self.began: float | None = None  # this epoch
        self.visits: Tensor | None = None  # (N,) how often each sample was in a batch of this epoch
        self.sets: list[Any] = []
        self.keep: Callable[[], object] = lambda: None  # called after every epoch

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.steps = int(trainer.estimated_stepping_batches) // self.cell.epochs
        if self.cell.knn_at or self.cell.linear or self.cell.variant == RAW:
            self.sets = [load_split(self.source, part, labels=True) for part in ("train", "test")]
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Diagnostics):
                self.visits = torch.zeros(len(callback.train_set), device=pl_module.device)
                self.labels = callback.train_set.labels
            if isinstance(callback, Refresh):
                assert isinstance(pl_module, Method)
                given = self._raw(pl_module) if self.cell.variant == RAW else callback.embeddings
                callback.embeddings = self._timed(callback, given)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, Method)
        assert self.visits is not None
        if trainer.global_step % self.steps == 0:
            self._end(trainer, pl_module)
            self._check_time()
            wait()
            self.began = time.perf_counter()
            pl_module.clock.restart()  # the evaluation is not part of a step
        index = batch if isinstance(batch, Tensor) else batch[0]
        self.visits.index_add_(0, index, torch.ones_like(index, dtype=self.visits.dtype))

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        done = trainer.global_step + 1
        if self.cell.details and done % self.steps == 0:
            assert isinstance(pl_module, Method)
            self.orderings[str(done // self.steps)] = self._orderings(pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, Method)
        self._end(trainer, pl_module)
        if self.cell.details:
            self.pairs = self._pairs(trainer, pl_module)

    @torch.no_grad()
    def _orderings(self, module: Method) -> dict[str, dict[str, float]]:
        """The four losses of the last batch and the share of anchors with Assumption 1, by hardening."""
        assert module.noted is not None
        assert module.noted_positives is not None
        assert self.labels is not None
        (index, z1), z2 = module.noted, module.noted_positives
        assert isinstance(module.objective, InfoNCE)
        temperature = module.objective.last_call().temperature
        found = {}
        for name, hardening in HARDENINGS.items():
            each = loss_ordering(z1, z2, self.labels[index.cpu()], temperature=temperature, hardening=hardening)
            assert each is not None
            losses = {part: getattr(each, part).value for part in ("ucl", "h_ucl", "scl", "h_scl")}
            share = {} if each.assumption_1 is None else {"assumption_1": each.assumption_1.value}
            found[name] = {part: round(number, 5) for part, number in {**losses, **share}.items()}
        return found

    def _pairs(self, trainer: L.Trainer, module: Method) -> dict[str, float]:
        """Mean cosines of pairs of the same and of different classes, and the common area of their histograms."""
        network = nn.Sequential(module.encoder, module.head)
        with trainer.precision_plugin.forward_context():
            test = extract_set(network, self.sets[1], prepare=getattr(module.views, "plain", None))
        found = cosine_histograms(*test)
        same, different = (counts / counts.sum() for counts in (found.same, found.different))
        overlap = float(torch.minimum(same, different).sum())
        numbers = {"same": found.same_mean, "different": found.different_mean, "overlap": overlap}
        return {name: round(number, 5) for name, number in numbers.items()}

    def _end(self, trainer: L.Trainer, module: Method) -> None:
        """Record the finished epoch, and evaluate."""
        if self.began is None:  # this process has started none
            return
        wait()
        assert self.visits is not None
        spent, self.began = time.perf_counter() - self.began, None
        row = {"seconds": spent, "encode": self.encode, "graph": self.graph}
        row["seen"] = float((self.visits > 0).double().mean())
        row["most_visits"] = float(self.visits.max())
        self.epochs.append({name: round(number, 4) for name, number in row.items()})
        self.encode = self.graph = 0.0
        self.visits.zero_()
        epoch = trainer.global_step // self.steps
        if self.cell.knn_at and epoch in (*self.cell.knn_at, self.cell.epochs):
            train, test = self._features(trainer, module)
            self.knn[str(epoch)] = knn_accuracy(*train, *test)
            print(f"    epoch {epoch}: kNN {100 * self.knn[str(epoch)]:.2f} %, {spent:.2f} s", flush=True)
        self.keep()

    def _features(self, trainer: L.Trainer, module: Method) -> list[tuple[Tensor, Tensor]]:
        prepare = getattr(module.views, "plain", None)
        with trainer.precision_plugin.forward_context():
            return [extract_set(module.encoder, part, prepare=prepare) for part in self.sets]

    def _check_time(self) -> None:
        pace = min((row["seconds"] for row in self.epochs), default=0.0)
        if time.monotonic() + SAFETY * pace + 5 > self.deadline:  # the rest: kNN and files
            raise OutOfTimeError

    def _raw(self, module: Method) -> Callable[[], Tensor]:
        """Embeddings of the head, not normalized."""

        def encode() -> Tensor:
            with module.trainer.precision_plugin.forward_context():
                network = nn.Sequential(module.encoder, module.head)
                return extract_all(network, self.sets[0], prepare=getattr(module.views, "plain", None))

        return encode

    def _timed(self, refresh: Refresh, given: Callable[[], Tensor | None]) -> Callable[[], Tensor | None]:
        def embeddings() -> Tensor | None:
            wait()
            began = time.perf_counter()
            rows = given()
            wait()
            self.encode += time.perf_counter() - began
            return rows

        learn = refresh.sampler.refresh

        def timed_refresh(embeddings: TensorLike) -> None:
            began = time.perf_counter()
            learn(embeddings)
            wait()
            self.graph += time.perf_counter() - began

        refresh.sampler.refresh = timed_refresh  # type: ignore[method-assign]
        return embeddings


def wait() -> None:
    """For the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
