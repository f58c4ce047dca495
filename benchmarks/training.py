"""Overhead of training: an epoch of the engine compared with forward, backward and optimizer step of the network alone.

    python benchmarks/training.py [--data data/cifar10.npz] [--epochs 3] [--out results/training.json] [key=value …]

Both run ResNet-18 with the 32-pixel stem on the same number of images per step, in bfloat16, channels last, with fused
Adam and the same compile mode. The engine adds data, two augmented views, the loss (HCL) and logging; the checkpoint at
the end of an epoch is measured separately. The network is measured before and after the engine, because the speed of a
machine varies. Without ``--data``, random images of CIFAR-10's shape are used: the time is the same, and nothing is
learned. Further settings of the recipe may follow, such as ``encoder.name=resnet50``.
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import record
import torch
from stopwatch import Stopwatch

import hardneg as hn
from hardneg.images import ImageSet, load_images
from hardneg.training import build, recipe, run

ENGINE = Path(hn.__file__).parent / "recipes" / "cifar10-simclr.yaml"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WATCH = Stopwatch(DEVICE)
WARM = 2  # epochs that are not timed: the first compiles, the second warms up the host
STEPS = 20  # of the network alone, for the time of the host


class Network:
    """Forward, backward and optimizer step on given views.

    settings: the recipe · train_set: what it trains on · after `prepare`, `epoch` gives seconds
    """

    def __init__(self, settings: recipe.Recipe, train_set: ImageSet) -> None:
        self.module = build.method(settings, train_set).to(DEVICE)
        self.optimizer = self.module._optimizer(self.module)
        self.steps = len(train_set) // settings.trainer.batch_size
        self.mixed = settings.trainer.precision == "bf16-mixed"
        layout = torch.channels_last if getattr(settings.trainer, "channels_last", False) else torch.contiguous_format
        views = torch.rand(2 * settings.trainer.batch_size, *train_set.shape, device=DEVICE)
        self.views = views.to(memory_format=layout)

    def step(self) -> None:
        if DEVICE.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=self.mixed):
            loss = self.module.head(self.module.encoder(self.views)).float().square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def prepare(self) -> float:
        """Compile and warm up; milliseconds that the host takes to queue a step."""
        for _ in range(5):
            self.step()
        found = []
        for _ in range(STEPS):
            WATCH.wait()  # otherwise the queue may be full, and the host would wait for the device
            began = time.perf_counter()
            self.step()
            found.append(1000 * (time.perf_counter() - began))
        return statistics.median(found)

    def epoch(self) -> float:
        return WATCH.loop(self.step, self.steps) * self.steps / 1000


@dataclass
class Epochs(L.Callback):
    """Seconds of every epoch of a run up to its checkpoint, of every checkpoint, and of the host in a step.

    The host is timed in the second epoch, where the device is waited for between steps.
    """

    steps: int
    seconds: list[float] = field(default_factory=list)
    saving: list[float] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)
    left: float = 0.0

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx:
            return
        WATCH.wait()
        now = time.perf_counter()
        if trainer.current_epoch:
            self.saving.append(now - self.left)
        self.left = now

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 1 and not trainer.is_last_batch:
            if batch_idx:
                self.host_ms.append(1000 * (time.perf_counter() - self.left))
            WATCH.wait()
            self.left = time.perf_counter()

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self.left)
        self.left = now


def engine(settings: recipe.Recipe, steps: int) -> tuple[Epochs, dict[str, float]]:
    """The times of all epochs, and the median seconds of the parts of the timed ones: data, augmentation, network."""
    epochs = Epochs(steps)
    with tempfile.TemporaryDirectory() as folder:
        run.train(settings, Path(folder) / "run", callbacks=[epochs])
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    parts = [json.loads(line)["seconds"] for line in lines][WARM:]
    return epochs, {name: statistics.median(part[name] for part in parts) for name in parts[0]}


def compared(settings: recipe.Recipe, train_set: ImageSet) -> dict[str, Any]:
    """One row of the table."""
    torch.compiler.reset()  # otherwise a second batch size would be compiled with dynamic shapes
    network = Network(settings, train_set)
    host = network.prepare()
    before = [network.epoch() for _ in range(2)]
    epochs, parts = engine(settings, network.steps)
    after = [network.epoch() for _ in range(2)]
    alone, whole = before + after, epochs.seconds[WARM:]
    return {
        "batch": settings.trainer.batch_size,
        "compiled": getattr(settings.trainer, "compile", None),
        "steps": network.steps,
        "network_before_s": before,
        "network_after_s": after,
        "engine_s": whole,
        "ratio": statistics.median(whole) / statistics.median(alone),
        "ratio_range": [min(whole) / max(alone), max(whole) / min(alone)],
        "parts_s": parts,
        "checkpoint_s": statistics.median(epochs.saving[WARM - 1 :]),
        "host_ms_per_step": {"network": host, "engine": statistics.median(epochs.host_ms)},
    }


HEAD = (
    "    B        compiled  network s  engine s  ratio (range)        data  augment.  network+loss"
    "  host ms a step: network  engine  checkpoint s"
)


def shown(row: dict[str, Any]) -> str:
    """The row as a line."""
    alone, parts, host = row["network_before_s"] + row["network_after_s"], row["parts_s"], row["host_ms_per_step"]
    low, high = row["ratio_range"]
    return (
        f"{row['batch']:>5} {row['compiled'] or 'no':>15} {statistics.median(alone):>10.3f}"
        f" {statistics.median(row['engine_s']):>9.3f} {row['ratio']:>6.2f} ({low:.2f}–{high:.2f})"
        f" {parts['data']:>10.3f} {parts['augmentation']:>9.3f} {parts['network']:>13.3f}"
        f" {host['network']:>24.2f} {host['engine']:>7.2f} {row['checkpoint_s']:>13.3f}"
    )


def random_images(folder: str, number: int) -> str:
    """The path of a file of images with CIFAR-10's shape."""
    random = np.random.default_rng(0)
    path = Path(folder) / "random.npz"
    parts = {"train": number, "test": 100}
    arrays: dict[str, Any] = {}
    for part, size in parts.items():
        arrays[f"{part}_images"] = random.integers(0, 256, (size, 32, 32, 3), np.uint8)
        arrays[f"{part}_labels"] = random.integers(0, 10, size)
    np.savez(path, **arrays)
    return str(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="further settings of the recipe")
    parser.add_argument("--data", help="CIFAR-10 as an .npz file; random images by default")
    parser.add_argument("--pictures", type=int, default=50_000, help="number of random images")
    parser.add_argument("--epochs", type=int, default=3, help="that are timed, after two that are not")
    parser.add_argument("--batches", nargs="+", type=int, default=[256, 512])
    parser.add_argument("--modes", nargs="+", default=["reduce-overhead", "null"], help="of torch.compile")
    parser.add_argument("--out", type=Path, default=Path("results/training.json"))
    options = parser.parse_intermixed_args()
    found: dict[str, Any] = {
        "command": "python " + " ".join(["benchmarks/training.py", *sys.argv[1:]]),
        "machine": torch.cuda.get_device_name() if DEVICE.type == "cuda" else record.processor(),
        "processor": record.processor(),
        "versions": {"torch": torch.__version__, "lightning": L.__version__, "hardneg": hn.__version__},
        "data": options.data or f"{options.pictures} random pictures in the shape of CIFAR-10's: for timing only",
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        source = options.data or random_images(folder, options.pictures)
        train_set = load_images(source, "train")
        assert isinstance(train_set, ImageSet)
        print(HEAD)
        for mode in options.modes:
            for batch in options.batches:
                overrides = [f"data.source={source}", "objective.preset=hcl", f"trainer.batch_size={batch}"]
                overrides += [f"trainer.compile={mode}", f"trainer.epochs={WARM + options.epochs}"]
                settings = recipe.load(ENGINE, [*overrides, "trainer.knn_every=0", *options.overrides])
                found["rows"].append(compared(settings, train_set))
                print(shown(found["rows"][-1]), flush=True)
                options.out.write_text(
                    json.dumps(found, indent=1) + "\n", encoding="utf-8"
                )  # after each row, in case the time limit is reached
                gc.collect()
    record.write(options.out, found)


if __name__ == "__main__":
    main()
