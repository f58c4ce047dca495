"""Time of one random view of each image of a batch, against kornia in the same run.

    python benchmarks/views.py [--quick]
    python benchmarks/views.py --device cuda     also the host's time to launch a batch, with waiting forbidden

Peers, all given the same batch of uint8 images, all drawing for each sample a resized crop, a flip, colour jitter and
greyscale with the same settings, and returning floats in [0, 1]:
  hardneg            ImageViews
  kornia             kornia.augmentation as it comes: it cuts each crop out in a loop
  kornia resample    the same with cropping_mode="resample": crops by one grid_sample

Times are medians over interleaved repetitions, so that a slow moment of the machine hits all peers alike.
"""

import argparse
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import record
import torch
from torch import Tensor

import hardneg as hn
from hardneg.randomness import generator
from hardneg.views.images import ImageViews

Peer = Callable[[Tensor], Tensor]
SCALE, RATIO, JITTER = (0.2, 1.0), (3 / 4, 4 / 3), (0.4, 0.4, 0.4, 0.1)
FLIP, JITTERED, GREY = 0.5, 0.8, 0.2
RESULTS = Path(__file__).parents[1] / "results"


def ours(size: int, device: torch.device) -> Peer:
    """The library's views; the generator is made anew at each step, as in training."""
    views = ImageViews(size, SCALE, RATIO, FLIP, JITTER, JITTERED, GREY)
    steps = iter(range(1 << 62))
    return lambda images: views(images, generator(device, 0, next(steps)))


def kornia(size: int, cropping_mode: str) -> Peer:
    """The same augmentations by kornia."""
    from kornia import augmentation  # type: ignore[import-not-found,unused-ignore]

    sequence = torch.nn.Sequential(
        augmentation.RandomResizedCrop((size, size), scale=SCALE, ratio=RATIO, cropping_mode=cropping_mode),
        augmentation.RandomHorizontalFlip(p=FLIP),
        augmentation.ColorJitter(*JITTER, p=JITTERED),
        augmentation.RandomGrayscale(p=GREY),
    )

    def views(images: Tensor) -> Tensor:
        made: Tensor = sequence(images.float() / 255)
        return made

    return views


def peers(size: int, device: torch.device) -> dict[str, Peer]:
    """All peers, without kornia where it is not installed."""
    found = {"hardneg": ours(size, device)}
    try:
        found |= {"kornia": kornia(size, "slice"), "kornia resample": kornia(size, "resample")}
    except ImportError:
        print("kornia is not installed: pip install -c constraints.txt kornia", file=sys.stderr)
    return found


def times(given: dict[str, Peer], images: Tensor, seconds: float) -> dict[str, list[float]]:
    """Milliseconds of each peer's repetitions, interleaved for about this long."""

    def wait() -> None:
        if images.is_cuda:
            torch.cuda.synchronize()

    for views in given.values():
        for _ in range(3):
            assert views(images).shape == images.shape
    found: dict[str, list[float]] = {name: [] for name in given}
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends or len(found["hardneg"]) < 5:
        for name, views in given.items():
            wait()
            begin = time.perf_counter()
            views(images)
            wait()
            found[name].append(1000 * (time.perf_counter() - begin))
    return found


def launch_time(views: Peer, images: Tensor, repetitions: int = 50) -> float:
    """Median milliseconds of the host alone; raises if anything makes it wait for the GPU."""
    found = []
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(repetitions):
        begin = time.perf_counter()
        views(images)
        found.append(1000 * (time.perf_counter() - begin))
    torch.cuda.set_sync_debug_mode("default")
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two seconds per size, nothing written")
    parser.add_argument("--device", default="cpu", help="where the images are (default: cpu)")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)  # kornia's
    device = torch.device(options.device)
    rows: list[dict[str, Any]] = []
    header = f"{'B':>5} {'side':>5}  {'peer':<16} {'ms':>9} {'quartiles':>16} {'× hardneg':>10}"
    print(header + "\n" + "-" * len(header))
    for batch, size in [(256, 32), (256, 96), *([(512, 32)] if device.type == "cuda" else [])]:
        images = torch.randint(0, 256, (batch, 3, size, size), dtype=torch.uint8, generator=generator("cpu", size))
        images = images.to(device)
        compared = peers(size, device)
        measured = times(compared, images, seconds=2.0 if options.quick else 30.0)
        base = statistics.median(measured["hardneg"])
        for name, found in measured.items():
            median, quartiles = statistics.median(found), statistics.quantiles(found, n=4)
            row = {
                "batch": batch,
                "size": size,
                "peer": name,
                "ms": median,
                "ms_quartiles": [quartiles[0], quartiles[2]],
                "repetitions": len(found),
                "times_hardneg": median / base,
            }
            spread = f"{quartiles[0]:.2f}–{quartiles[2]:.2f}"
            print(f"{batch:>5} {size:>5}  {name:<16} {median:>9.2f} {spread:>16} {median / base:>10.2f}")
            if device.type == "cuda" and name == "hardneg":
                row["launch_ms"] = launch_time(compared[name], images)
                print(f"{'':>12} launched by the host in {row['launch_ms']:.2f} ms, without waiting for the GPU")
            rows.append(row)
    if options.quick:
        return
    everything = {
        "command": "python " + " ".join(["benchmarks/views.py", *sys.argv[1:]]),
        "machine": {
            "processor": torch.cuda.get_device_name(device) if device.type == "cuda" else record.processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "load_average": os.getloadavg(),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "kornia": getattr(sys.modules.get("kornia"), "__version__", None),
            "hardneg": hn.__version__,
        },
        "settings": {
            "scale": SCALE,
            "ratio": RATIO,
            "flip": FLIP,
            "jitter": JITTER,
            "jitter_probability": JITTERED,
            "grey": GREY,
            "seed": 0,
        },
        "rows": rows,
    }
    path = RESULTS / ("views.json" if device.type == "cpu" else f"views_{device.type}.json")
    record.write(path, everything)


if __name__ == "__main__":
    main()
