"""Train on CIFAR-10 and evaluate the encoders: weighted kNN and linear probe, several seeds of each loss.

python benchmarks/cifar10.py data/cifar10.npz --presets simclr hcl --seeds 0 1 --epochs 60 --out results/cifar10.json
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

import hardneg as hn
from hardneg.evaluation import extract, few_label_accuracy, knn_accuracy, linear_probe
from hardneg.images import ImageSet, load_images
from hardneg.training import recipe, run

RECIPE = Path(hn.__file__).parent / "recipes" / "cifar10-simclr.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data")
    parser.add_argument("--presets", nargs="+", default=["simclr", "hcl"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("results/cifar10.json"))
    options = parser.parse_args()
    sets = [load_images(options.data, split, labels=True) for split in ("train", "test")]
    rows = []
    for preset in options.presets:
        for seed in options.seeds:
            settings = recipe.load(
                RECIPE,
                [
                    f"data.source={options.data}",
                    f"objective.preset={preset}",
                    f"seed={seed}",
                    f"trainer.epochs={options.epochs}",
                    "trainer.compile=reduce-overhead",
                ],
            )
            began = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                result = run.train(settings, Path(folder) / "run")
                lines = [
                    json.loads(text)
                    for text in (result.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
                ]
            trained = time.perf_counter() - began
            encoder = result.encoder.cuda()
            features, labels = [], []
            for part in sets:
                assert isinstance(part, ImageSet)
                assert part.labels is not None
                features.append(extract(encoder, part.images))
                labels.append(part.labels.cuda())
            probe = linear_probe(features[0], labels[0], features[1], labels[1])
            row = {
                "objective": preset,
                "seed": seed,
                "knn": knn_accuracy(features[0], labels[0], features[1], labels[1]),
                "linear": probe.accuracy,
                "linear_converged": probe.converged,
                "five_labels": few_label_accuracy(features[0], labels[0], features[1], labels[1], per_class=5)[0],
                "loss": lines[-1]["loss"],
                "seconds": trained,
                "seconds_per_epoch": statistics.median(sum(line["seconds"].values()) for line in lines),
                "knn_over_training": {line["epoch"]: line["knn"] for line in lines if "knn" in line},
                "objective_at_the_end": lines[-1]["objective"],
            }
            rows.append(row)
            print(
                f"{preset:>8} seed {seed}: kNN {100 * row['knn']:.2f} %, linear {100 * row['linear']:.2f} %, "
                f"{trained:.0f} s",
                flush=True,
            )
            record = {
                "command": "python " + " ".join(["benchmarks/cifar10.py", *sys.argv[1:]]),
                "recipe": recipe.dump(settings),
                "machine": torch.cuda.get_device_name(),
                "versions": {"torch": torch.__version__, "hardneg": hn.__version__},
                "rows": rows,
            }
            options.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
