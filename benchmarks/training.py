"""What training costs beyond the network itself: an epoch of the engine against the bare forward, backward and step.

    python benchmarks/training.py data/cifar10.npz [--epochs 4] [--out results/training.json]

Both run ResNet-18 with the 32-pixel stem on the same number of pictures per step, in bfloat16, channels last, with
fused Adam and the same compile mode. The engine adds data, two augmented views, the loss (HCL) and logging.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import hardneg as hn
from hardneg.data import load_images
from hardneg.training import build, recipe, run

ENGINE = Path(hn.__file__).parent / "recipes" / "cifar10-simclr.yaml"


def network_alone(settings: recipe.Recipe, train_set: Any, epochs: int) -> list[float]:
    """Seconds of each epoch of forward, backward and step on pictures that are there already."""
    module = build.method(settings, train_set).cuda()
    optimizer = module._optimizer(module)
    batch = settings.trainer.batch_size
    images = torch.rand(2 * batch, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    found = []
    for _ in range(epochs):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(len(train_set) // batch):
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            with torch.autocast("cuda", torch.bfloat16):
                loss = module.head(module.encoder(images)).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return found


def engine(settings: recipe.Recipe) -> list[dict[str, float]]:
    """Seconds of each epoch of the whole, split into data, augmentation and network."""
    with tempfile.TemporaryDirectory() as folder:
        run.train(settings, Path(folder) / "run")
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["seconds"] for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--modes", nargs="+", default=["null", "default", "reduce-overhead"], help="of torch.compile")
    parser.add_argument("--out", type=Path, default=Path("results/training.json"))
    options = parser.parse_args()
    train_set = load_images(options.data, "train")
    rows = []
    print(
        f"{'B':>5} {'compiled':>15} {'network s':>10} {'engine s':>10} {'ratio':>6}   data  augmentation  network+loss"
    )
    for compiled in options.modes:
        for batch in (256, 512):
            overrides = [
                f"data.source={options.data}",
                "objective.preset=hcl",
                f"trainer.batch_size={batch}",
                f"trainer.compile={compiled}",
                f"trainer.epochs={options.epochs + 1}",
                "trainer.knn_every=0",
            ]
            settings = recipe.load(ENGINE, overrides)
            alone = network_alone(settings, train_set, options.epochs + 1)[1:]  # the first epoch warms up
            whole = engine(settings)[1:]
            totals = [sum(epoch.values()) for epoch in whole]
            ratio = statistics.median(totals) / statistics.median(alone)
            parts = {name: statistics.median(epoch[name] for epoch in whole) for name in whole[0]}
            rows.append(
                {
                    "batch": batch,
                    "compiled": compiled,
                    "network_s": alone,
                    "engine_s": totals,
                    "ratio": ratio,
                    "parts_s": parts,
                }
            )
            bare, full = statistics.median(alone), statistics.median(totals)
            print(
                f"{batch:>5} {compiled:>15} {bare:>10.3f} {full:>10.3f} {ratio:>6.2f}"
                f"  {parts['data']:>5.3f} {parts['augmentation']:>13.3f} {parts['network']:>13.3f}",
                flush=True,
            )
    record = {
        "command": "python " + " ".join(["benchmarks/training.py", *sys.argv[1:]]),
        "machine": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "hardneg": hn.__version__},
        "rows": rows,
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
