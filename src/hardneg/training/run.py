"""Runs: a folder with a recipe, its metrics and checkpoints, that can be killed at any moment and goes on exactly.

Every draw is a function of (seed, step), so a checkpoint needs no random state: weights, optimiser and the number of
steps done say it all. To Lightning a run is one long epoch whose loader begins at the step where the checkpoint was
taken; our epochs are counted from the steps.
"""

import json
import logging
import os
import platform
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import hardneg
from hardneg import encoders, randomness
from hardneg.data import ImageSet, StreamedImages, load_images
from hardneg.evaluation import extract, knn_accuracy
from hardneg.methods.simclr import SimCLR
from hardneg.training import optimizers, recipe
from hardneg.training.batches import Batches
from hardneg.training.recipe import Recipe
from hardneg.views import images as image_views


@dataclass(frozen=True)
class Result:
    """A finished run: its folder, its trained encoder and the last line of its metrics."""

    folder: Path
    encoder: nn.Module
    metrics: dict[str, Any]


def train(settings: Recipe, folder: str | Path, resume: bool = False, progress: bool = False) -> Result:
    """Run a recipe in a folder, or take up again what was begun there.

    Args:
        settings: the recipe; ignored when there is something to resume
        folder: of the run; nothing is written elsewhere
        resume: go on from the folder's last checkpoint
        progress: show Lightning's progress bar
    """
    folder = Path(folder)
    begun = (folder / "recipe.yaml").exists()
    if resume and not begun:
        raise ValueError(f"{folder} holds no run to resume: recipe.yaml is missing")
    if resume:
        settings = recipe.load(folder / "recipe.yaml")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.WARNING)
    trainer = L.Trainer(
        accelerator=settings.trainer.accelerator,
        devices=settings.trainer.devices,
        strategy="ddp" if settings.trainer.devices > 1 else "auto",
        precision=settings.trainer.precision,  # type: ignore[arg-type]
        gradient_clip_val=settings.optimizer.clip,
        max_epochs=1,  # ours are counted from the steps
        callbacks=[keeper := Keeper(settings, folder)],
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=progress,
        logger=False,
        num_sanity_val_steps=0,
        deterministic="warn" if settings.trainer.accelerator == "cpu" else None,
    )
    if trainer.is_global_zero:  # the other processes find what the first one wrote
        if begun and not resume:
            raise ValueError(f"{folder} holds a run already: resume it, or choose another folder")
        keeper.begin(trainer)
    train_set = load_images(settings.data.source, "train", settings.data.size, labels=_needs_labels(settings))
    module = build(settings, train_set, trainer.world_size)
    batches = Batches(
        len(train_set),
        settings.trainer.batch_size,
        settings.trainer.epochs,
        settings.seed,
        trainer.global_rank,
        trainer.world_size,
    )
    keeper.batches, keeper.train_set = batches, train_set
    last = folder / "last.ckpt"
    checkpoint = str(last) if resume and last.exists() else None
    with warnings.catch_warnings():
        # Our loader begins where the checkpoint was taken, which Lightning cannot see.
        warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
        warnings.filterwarnings("ignore", ".*LeafSpec.*")
        trainer.fit(module, _loader(batches, train_set, settings), ckpt_path=checkpoint, weights_only=True)
    if trainer.interrupted:
        raise KeyboardInterrupt(f"stopped at step {trainer.global_step}; resume the run in {folder}")
    return Result(folder, module.encoder, keeper.last)


def build(settings: Recipe, train_set: ImageSet | StreamedImages, processes: int = 1) -> SimCLR:
    """The method that the recipe describes, with fresh weights drawn from its seed."""
    if settings.method != "simclr":
        raise ValueError(f"method={settings.method!r} is not known: use 'simclr'")
    channels, side = train_set.shape[0], train_set.shape[-1]
    torch.manual_seed(randomness.mix(settings.seed))
    options = {"channels": channels, **settings.encoder.options}
    if settings.encoder.name == "tiny":
        options.setdefault("size", side)
    encoder = encoders.build(
        settings.encoder.name, **(options if ":" not in settings.encoder.name else settings.encoder.options)
    )
    width = encoders.feature_size(encoder, (channels, side, side))
    head = encoders.projection(width, settings.encoder.hidden, settings.encoder.outputs, settings.encoder.norm)
    presets = {"simclr": image_views.simclr_views, "moco": image_views.moco_views}
    if settings.views.preset not in presets:
        raise ValueError(f"views.preset={settings.views.preset!r} is not known: use one of {', '.join(presets)}")
    chosen, epochs = settings.optimizer, settings.trainer.epochs
    module = SimCLR(
        encoder,
        head,
        recipe.objective(settings, gather=processes > 1),
        presets[settings.views.preset](**{"size": side, **settings.views.options}),
        lambda module: optimizers.build(chosen.name, [module], chosen.lr, chosen.weight_decay, chosen.momentum),
        optimizers.learning_rate(
            chosen.schedule, chosen.warmup / epochs, tuple(drop / epochs for drop in chosen.drops)
        ),
        settings.seed,
        settings.trainer.channels_last,
    )
    if settings.trainer.channels_last:
        module.encoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if settings.trainer.compile is not None:
        module.encoder.compile(mode=settings.trainer.compile)
        module.head.compile(mode=settings.trainer.compile)
        # Its diagnostics outlive the step, so its tensors must not lie in a graph's reused memory.
        module.objective.compile()
    if isinstance(train_set, ImageSet):
        module.images = train_set.images
    module.labels = train_set.labels
    return module


class Keeper(L.Callback):
    """Keeps the books of a run: random state, metrics, kNN and checkpoints."""

    def __init__(self, settings: Recipe, folder: Path) -> None:
        self.settings, self.folder = settings, folder
        self.batches: Batches | None = None
        self.train_set: ImageSet | StreamedImages | None = None
        self.last: dict[str, Any] = {}
        self.losses: Tensor | None = None  # () float64: sum of this epoch's losses
        self.number = 0  # of this epoch's losses
        self.began = time.perf_counter()

    def begin(self, trainer: L.Trainer) -> None:
        """Write the recipe and the environment."""
        self.folder.mkdir(parents=True, exist_ok=True)
        _write(self.folder / "recipe.yaml", recipe.dump(self.settings))
        environment = {
            "command": sys.argv,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "lightning": L.__version__,
            "hardneg": hardneg.__version__,
            "platform": platform.platform(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu",
            "processes": trainer.world_size,
        }
        _write(self.folder / "environment.json", json.dumps(environment, indent=1) + "\n")

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, SimCLR)
        pl_module.clock.on_gpu = pl_module.device.type == "cuda"
        if trainer.is_global_zero:
            self._drop_metrics_after(self.batches.start if self.batches is not None else 0)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, SimCLR)
        # Dropout and the like draw from the global state, which thereby becomes a function of (seed, step, rank).
        torch.manual_seed(randomness.mix(self.settings.seed, trainer.global_step, trainer.global_rank))
        pl_module.clock.mark("data")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, SimCLR)
        assert self.batches is not None
        pl_module.clock.mark("network")
        loss = outputs["loss"].detach()
        if self.losses is None or self.losses.device != loss.device:
            self.losses = torch.zeros((), dtype=torch.float64, device=loss.device) + (self.losses or 0.0)
        self.losses += loss
        self.number += 1
        epoch, rest = divmod(trainer.global_step, self.batches.steps_per_epoch)
        if rest == 0:
            self._end_epoch(trainer, pl_module, epoch)
        elif self.settings.trainer.save_every and trainer.global_step % self.settings.trainer.save_every == 0:
            self._save(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {"losses": 0.0 if self.losses is None else float(self.losses), "number": self.number}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.losses = torch.tensor(state_dict["losses"], dtype=torch.float64)
        self.number = state_dict["number"]

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        assert self.batches is not None
        self.batches.start = checkpoint["global_step"]

    def _end_epoch(self, trainer: L.Trainer, module: SimCLR, epoch: int) -> None:
        assert self.losses is not None
        assert self.batches is not None
        total, number = float(self.losses), self.number
        self.losses, self.number = None, 0
        seconds = module.clock.read()
        every, epochs = self.settings.trainer.knn_every, self.settings.trainer.epochs
        line: dict[str, Any] = {
            "epoch": epoch,
            "step": trainer.global_step,
            "loss": total / number,
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
            "objective": module.objective.diagnostics(),
            "seconds": {name: round(spent, 6) for name, spent in seconds.items()},
            "images_per_second": round(number * self.settings.trainer.batch_size / max(sum(seconds.values()), 1e-9), 1),
        }
        if every and (epoch % every == 0 or epoch == epochs):
            line["knn"] = self._knn(module)
            module.clock.read()  # what kNN took belongs to no step
            module.clock.mark("pause")
        self.last = line
        if trainer.is_global_zero:
            with (self.folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
        self._save(trainer)

    def _knn(self, module: SimCLR) -> float | None:
        """Weighted kNN accuracy on the test set, if there are labels."""
        known = self.train_set
        try:
            asked = load_images(self.settings.data.source, "test", self.settings.data.size, labels=True)
        except (ValueError, FileNotFoundError):
            return None
        if not isinstance(known, ImageSet) or not isinstance(asked, ImageSet) or known.labels is None:
            return None
        prepare = getattr(module.views, "plain", None)
        with torch.autocast(module.device.type, torch.bfloat16, enabled="bf16" in self.settings.trainer.precision):
            features = [extract(module.encoder, part.images, prepare=prepare) for part in (known, asked)]
        assert asked.labels is not None
        labels = [part.to(module.device) for part in (known.labels, asked.labels)]
        return knn_accuracy(features[0], labels[0], features[1], labels[1])

    def _save(self, trainer: L.Trainer) -> None:
        """Write the checkpoint beside the old one, then put it in its place: a half-written one is never seen."""
        fresh = self.folder / "next.ckpt"
        trainer.save_checkpoint(fresh, weights_only=False)  # with the optimiser
        if trainer.is_global_zero:
            os.replace(fresh, self.folder / "last.ckpt")

    def _drop_metrics_after(self, step: int) -> None:
        """Forget lines written after the checkpoint that is being resumed."""
        file = self.folder / "metrics.jsonl"
        if file.exists():
            kept = []
            for text in file.read_text().splitlines():
                try:
                    line = json.loads(text)
                except json.JSONDecodeError:
                    break  # a line cut off by the kill
                if line["step"] > step:
                    break
                kept.append(text + "\n")
                self.last = line
            _write(file, "".join(kept))


def _needs_labels(settings: Recipe) -> bool:
    return recipe.objective(settings).supervision != "none"


def _loader(batches: Batches, train_set: ImageSet | StreamedImages, settings: Recipe) -> Any:
    if isinstance(train_set, ImageSet):
        return batches
    workers = settings.data.workers
    return DataLoader(
        train_set, batch_sampler=_Lists(batches), num_workers=workers, pin_memory=True, persistent_workers=workers > 0
    )


class _Lists:
    """Batches of indices as lists, for a DataLoader."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        for index in self.batches:
            yield index.tolist()


def _write(file: Path, text: str) -> None:
    fresh = file.with_name(file.name + ".new")
    fresh.write_text(text)
    os.replace(fresh, file)
