"""The keeper of a run's books: random state, metrics, online kNN and checkpoints."""

import json
import math
import os
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from hardneg import checks, randomness
from hardneg.evaluation import knn_accuracy
from hardneg.matmul import precise_dtype
from hardneg.methods.method import Method
from hardneg.samplers import cosine_histogram, false_negative_share, mean_cosine
from hardneg.training import run_folder
from hardneg.training.batches import Batches
from hardneg.training.callbacks.sampler_refresh import Refresh
from hardneg.training.recipe import Recipe, tree_of


class Keeper(L.Callback):
    """Keeps the books of a run in its folder.

    Args:
        settings: the recipe
        folder: of the run
        batches: that the run goes through
        train_set: what online kNN knows
        validation: what adaptive schedules observe the accuracy on, if the objective has any
        refresh: of the batch sampler, if it has one
    """

    def __init__(
        self,
        settings: Recipe,
        folder: Path,
        batches: Batches,
        train_set: Any,
        refresh: Refresh | None = None,
        validation: Any = None,
        given: Any = None,
    ) -> None:
        self.settings, self.folder, self.batches, self.train_set = settings, folder, batches, train_set
        self.refresh, self.validation, self.given = refresh, validation, given
        self.test_set: Any = None
        self.last: dict[str, Any] = {}
        self.last_knn: float | None = None
        self.losses: Tensor | None = None  # (): sum of this epoch's losses
        self.number = 0  # of this epoch's losses
        self.resumed_at = 0  # how many of them were before this process
        self.epoch = 0
        self.observes_loss = False
        self.false_negatives = 0.0  # the sum of the shares in the batches before this process
        self.run: str | None = None  # the name of the run

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, Method)
        pl_module.clock.on_gpu = pl_module.device.type == "cuda"
        self.observes_loss = pl_module.objective.observes_loss
        if self.settings.kind.resident(self.train_set) is not None:  # a loader's workers need indices on the host
            self.batches.device = pl_module.device
        if trainer.is_global_zero:
            self.run = run_folder.read_json(self.folder / run_folder.ENVIRONMENT).get("run")
            if (self.folder / run_folder.METRICS).exists():
                self._restore_metrics(self.batches.start)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, Method)
        # Dropout and the like draw from the global state, which thereby becomes a function of (seed, step, rank).
        _seed(randomness.mix(self.settings.seed, trainer.global_step, trainer.global_rank), pl_module.device)
        pl_module.clock.mark("data")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, Method)
        self.number += 1
        step = trainer.global_step
        self.epoch, rest = divmod(step - 1, self.batches.steps_per_epoch)
        last = rest == self.batches.steps_per_epoch - 1
        facts = self._facts(pl_module) if last else {}  # while negatives and embeddings are still there
        pl_module.remember()  # before a checkpoint is written: Lightning asks the module only after its callbacks
        pl_module.clock.mark("network")
        loss = outputs["loss"].detach()
        if self.observes_loss:
            pl_module.objective.observe(loss=float(loss))
        self.losses = running_sum(self.losses, loss)
        if last:
            self._end_epoch(trainer, pl_module, self.epoch + 1, facts)
        elif (every := self.settings.trainer.save_every) and step % every == 0:
            self._save(trainer)
        else:
            return
        pl_module.clock.restart()  # what the books took belongs to no step

    def state_dict(self) -> dict[str, Any]:
        return {
            "losses": 0.0 if self.losses is None else float(self.losses),
            "number": self.number,
            "false_negatives": self._false_negatives() if self.number else 0.0,
            "last": self.last,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.losses = torch.tensor(state_dict["losses"], dtype=torch.float64)
        self.number = self.resumed_at = state_dict["number"]
        self.false_negatives = state_dict["false_negatives"]
        self.last = state_dict["last"]

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["batches"] = self.batches.place(trainer.global_step)
        checkpoint["run"] = self.run
        checkpoint["recipe"] = json.dumps(tree_of(self.settings))

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self.batches.go_on_from(checkpoint["batches"])

    def _end_epoch(self, trainer: L.Trainer, module: Method, epoch: int, facts: dict[str, float]) -> None:
        assert self.losses is not None
        total, number, measured = float(self.losses), self.number, self.number - self.resumed_at
        self.losses, self.number, self.resumed_at, self.false_negatives = None, 0, 0, 0.0
        seconds = module.clock.read()
        every, epochs = self.settings.trainer.knn_every, self.settings.trainer.epochs
        line: dict[str, Any] = {
            "epoch": epoch,
            "step": trainer.global_step,
            "loss": total / number,
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
            **facts,
            "seconds": {name: round(spent, 6) for name, spent in seconds.items()},
            "images_per_second": round(
                measured * self.settings.trainer.batch_size / max(sum(seconds.values()), 1e-9), 1
            ),
        }
        if every and (epoch % every == 0 or epoch == epochs):
            line["knn"] = self.last_knn = self._knn(module, self._test_set())
            if self.validation is not None:
                line["validation_knn"] = accuracy = self._knn(module, self.validation)
                module.objective.observe(accuracy=accuracy)
        self.last = line
        self._save(trainer)
        if trainer.is_global_zero:
            with (self.folder / run_folder.METRICS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def _facts(self, module: Method) -> dict[str, Any]:
        """What the objective of the last step and the batches of this epoch were like."""
        batches: dict[str, Any] = {"sampling_seconds": round(self.batches.seconds, 6)}
        self.batches.seconds = 0.0
        if self.refresh is not None:
            batches["graph_seconds"], self.refresh.seconds = round(self.refresh.seconds, 6), 0.0
        if self.train_set.labels is not None:
            batches["false_negatives"] = self._false_negatives() / self.number
        if module.noted is not None and len(module.noted[1]) > 1:
            embeddings = module.noted[1].float()
            batches["mean_cosine"] = mean_cosine(embeddings)
            batches["cosines"] = cosine_histogram(embeddings, bins=20)[0].tolist()
        return {"objective": module.diagnostics(), "batches": batches}

    def _false_negatives(self) -> float:
        """The sum of the shares of false negatives in the batches of this epoch so far."""
        labels = self.train_set.labels
        if labels is None:
            return 0.0
        used = self.batches.drawn.get(self.epoch, [])[: self.number - self.resumed_at]  # the rest was drawn ahead
        shares = [false_negative_share(labels[batch]) for batch in used]
        return self.false_negatives + sum(share for share in shares if not math.isnan(share))

    def _test_set(self) -> Any:
        """What the metrics report the accuracy on, if there are labels."""
        kind = self.settings.kind
        if self.train_set.labels is None or not kind.has_test_set:
            return None
        if self.test_set is None:
            try:
                self.test_set = kind.load_test(self.settings.data, self.train_set, given=self.given)
            except (ValueError, FileNotFoundError) as error:
                warnings.warn(f"no online kNN: {error}", stacklevel=2)
        return self.test_set

    def _knn(self, module: Method, test_set: Any) -> float | None:
        """Weighted kNN accuracy on a set, with the labels of the training set."""
        if test_set is None:
            return None
        kind, workers = self.settings.kind, getattr(self.settings.data, "workers", 0)
        with torch.autocast(module.device.type, torch.bfloat16, enabled="bf16" in self.settings.trainer.precision):
            train, test = (
                kind.labelled(kind.embed(module.encoder, part, module.views, workers), part)
                for part in (self.train_set, test_set)
            )
        return knn_accuracy(*train, *test) if len(train[1]) and len(test[1]) else None

    def _save(self, trainer: L.Trainer) -> None:
        """Write the checkpoint beside the old one, then put it in its place: a half-written one is never seen."""
        assert isinstance(trainer.lightning_module, Method)
        if not _is_finite(trainer.lightning_module):  # the last checkpoint is worth more than this one
            raise checks.NonFiniteError(f"weights hold NaN or inf after step {trainer.global_step}")
        fresh = self.folder / run_folder.NEXT
        trainer.save_checkpoint(fresh, weights_only=False)  # Lightning's word for: with the optimiser's state
        if trainer.is_global_zero:
            os.replace(fresh, self.folder / run_folder.CHECKPOINT)
            # From now on a checkpoint that is missing was lost.
            (self.folder / run_folder.METRICS).touch()

    def _restore_metrics(self, step: int) -> None:
        """Forget lines written after the checkpoint that is being resumed; add its own if a kill came before it."""
        kept = [line for line in run_folder.metrics(self.folder) if line["step"] <= step]
        if self.last and (not kept or kept[-1]["step"] < self.last["step"]):
            kept.append(self.last)
        run_folder.write(self.folder / run_folder.METRICS, "".join(json.dumps(line) + "\n" for line in kept))


def _is_finite(module: Method) -> bool:
    """Whether no weight and no running statistic of the networks is NaN or inf."""
    tensors = (*module.parameters(), *(buffer for network in module.networks() for buffer in network.buffers()))
    sound = [tensor.detach().isfinite().all() for tensor in tensors if tensor.is_floating_point()]
    return bool(torch.stack(sound).all()) if sound else True


def running_sum(total: Tensor | None, loss: Tensor) -> Tensor:
    """The sum of losses so far, () on the device of the losses; ``total`` is the host's after a checkpoint was read."""
    if total is None or total.device != loss.device:
        before = 0.0 if total is None else float(total)
        total = torch.tensor(before, dtype=precise_dtype(loss.device), device=loss.device)
    return total.add_(loss)


def _seed(seed: int, device: torch.device) -> None:
    """Seed the global states that a step on this device may draw from."""
    # torch.manual_seed would seed every kind of device there may be, and for each that was never used it keeps the
    # call with a stack trace: half a millisecond of every step, and memory that nobody frees.
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)  # of the current one, which Lightning has set
