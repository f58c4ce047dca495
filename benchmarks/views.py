"""Time of random views of a batch, compared with kornia in the same run: one of each image on a CPU, two on a GPU.

    python benchmarks/views.py [--quick] [--threads 1]
    python benchmarks/views.py --device cuda     first asserts that fused views equal those of the tensor operations;
                                                 also counts launches, and times the host without synchronization

Peers, all given the same batch of uint8 images, all drawing for each sample a resized crop, a flip, color jitter and
grayscale with the same settings, and returning floats in [0, 1]:
  hardneg            ImageViews; on a GPU in one Triton kernel
  hardneg unfused    on a GPU: the same by tensor operations
  kornia             kornia.augmentation with its defaults: it crops in a loop
  kornia resample    the same with cropping_mode="resample": crops by one grid_sample

Times are medians over interleaved repetitions, so that a slow phase of the machine affects all peers.
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
from hardneg.images.views import NUMBERS, ImageViews, moco_views, simclr_views
from hardneg.randomness import generator

Peer = Callable[[Tensor], Tensor]
SCALE, RATIO, JITTER = (0.2, 1.0), (3 / 4, 4 / 3), (0.4, 0.4, 0.4, 0.1)
FLIP, JITTERED, GREY = 0.5, 0.8, 0.2
KORNIA = {"": "slice", " resample": "resample"}  # cropping modes
RESULTS = Path(__file__).parents[1] / "results"


def ours(size: int, device: torch.device, copies: int) -> Peer:
    """The library's views; with a new generator in each step, as in training."""
    views = ImageViews(size, SCALE, RATIO, FLIP, JITTER, JITTERED, GREY)
    steps = iter(range(1 << 62))
    return lambda images: views(images, generator(device, 0, next(steps)), copies, channels_last=images.is_cuda)


def unfused(size: int, device: torch.device, copies: int) -> Peer:
    """The library's views by tensor operations, on any device."""
    views = ImageViews(size, SCALE, RATIO, FLIP, JITTER, JITTERED, GREY)
    steps = iter(range(1 << 62))

    def make(images: Tensor) -> Tensor:
        chance = generator(device, 0, next(steps))
        uniform = torch.rand(NUMBERS, copies, len(images), generator=chance, device=device)
        return views.from_uniform(images, uniform, chance.initial_seed(), channels_last=images.is_cuda)

    return torch.no_grad()(make)


def check_fused() -> None:
    """Raise unless fused views on a GPU equal those of the tensor operations."""
    standard: dict[str, Any] = {"mean": (0.49, 0.48, 0.45), "std": (0.25, 0.24, 0.26)}
    cases = [
        (simclr_views(32, **standard), (256, 3, 32, 32)),
        (ImageViews(28, mean=(0.13,), std=(0.31,)), (256, 1, 28, 28)),
        (simclr_views(64, **standard), (64, 3, 96, 80)),  # several tiles, blurred, shrunk
        (moco_views(224), (16, 3, 256, 300)),
    ]
    for views, shape in cases:
        images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator("cpu", 1)).cuda()
        gaps = []
        for seed in range(8):
            for given, channels_last in ((images, True), (images / 255, False)):
                chance, total = generator("cuda", seed), shape[0] + 5
                uniform = torch.rand(NUMBERS, 2, total, generator=generator("cuda", seed), device="cuda")
                found = views(given, chance, 2, 3, total, channels_last)
                expected = views.from_uniform(given, uniform, chance.initial_seed(), 3, channels_last)
                layout = torch.channels_last if channels_last else torch.contiguous_format
                assert found.is_contiguous(memory_format=layout), found.stride()
                gaps.append((found - expected).abs().amax(dim=(1, 2, 3)))
        each = torch.cat(gaps)
        same = each < 1e-3
        print(f"{shape} to {views.size}: largest gap {each[same].max():.1e}; {int((~same).sum())} of {len(each)} off")
        # A box whose side is within rounding of a half may differ by a pixel.
        assert (~same).float().mean() < 1e-3, "fused views are not those of the tensor operations"


def kornia(size: int, cropping_mode: str, copies: int) -> Peer:
    """The same augmentations by kornia."""
    from kornia import augmentation  # type: ignore[import-not-found,unused-ignore]

    sequence = torch.nn.Sequential(
        augmentation.RandomResizedCrop((size, size), scale=SCALE, ratio=RATIO, cropping_mode=cropping_mode),
        augmentation.RandomHorizontalFlip(p=FLIP),
        augmentation.ColorJitter(*JITTER, p=JITTERED),
        augmentation.RandomGrayscale(p=GREY),
    )

    def views(images: Tensor) -> Tensor:
        made: Tensor = sequence(images.float().repeat(copies, 1, 1, 1) / 255)
        return made

    return views


def peers(size: int, device: torch.device, copies: int) -> dict[str, Peer]:
    """All peers, without kornia if it is not installed."""
    found = {"hardneg": ours(size, device, copies)}
    if device.type == "cuda":
        found["hardneg unfused"] = unfused(size, device, copies)
    try:
        found |= {f"kornia{name}": kornia(size, mode, copies) for name, mode in KORNIA.items()}
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
            assert views(images).shape[1:] == images.shape[1:]
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
    """Median milliseconds of the host alone; raises if anything synchronizes with the GPU."""
    found = []
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(repetitions):
        begin = time.perf_counter()
        views(images)
        found.append(1000 * (time.perf_counter() - begin))
    torch.cuda.set_sync_debug_mode("default")
    return statistics.median(found)


def launches(views: Peer, images: Tensor) -> int:
    """Kernels and copies on the GPU for one batch."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        views(images)
        torch.cuda.synchronize()
    return sum(event.device_type.name == "CUDA" for event in profile.events() or [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two seconds per size, nothing written")
    parser.add_argument("--device", default="cpu", help="where the images are (default: cpu)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of a CPU (default: one per core)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", category=FutureWarning)  # kornia's
    device = torch.device(options.device)
    gpu = device.type == "cuda"
    copies = 2 if gpu else 1
    if gpu:
        check_fused()
    rows: list[dict[str, Any]] = []
    header = f"{'B':>5} {'side':>5}  {'peer':<16} {'ms':>9} {'quartiles':>16} {'× hardneg':>10}"
    print(header + "\n" + "-" * len(header))
    for batch, size in [(256, 32), (256, 96), *([(512, 32)] if gpu else [])]:
        images = torch.randint(0, 256, (batch, 3, size, size), dtype=torch.uint8, generator=generator("cpu", size))
        images = images.to(device)
        compared = peers(size, device, copies)
        measured = times(compared, images, seconds=2.0 if options.quick else 10.0 if gpu else 30.0)
        base = statistics.median(measured["hardneg"])
        for name, found in measured.items():
            median, quartiles = statistics.median(found), statistics.quantiles(found, n=4)
            row = {
                "batch": batch,
                "size": size,
                "views": copies,
                "peer": name,
                "ms": median,
                "ms_quartiles": [quartiles[0], quartiles[2]],
                "repetitions": len(found),
                "times_hardneg": median / base,
            }
            spread = f"{quartiles[0]:.2f}–{quartiles[2]:.2f}"
            print(f"{batch:>5} {size:>5}  {name:<16} {median:>9.2f} {spread:>16} {median / base:>10.2f}")
            if gpu and name.startswith("hardneg"):
                row["launch_ms"] = launch_time(compared[name], images)
                row["launches"] = launches(compared[name], images)
                said = f"{row['launches']} launches in {row['launch_ms']:.3f} ms, without waiting for the GPU"
                print(f"{'':>12} the host makes {said}")
            rows.append(row)
    if options.quick:
        return
    everything = {
        "command": "python " + " ".join(["benchmarks/views.py", *sys.argv[1:]]),
        "machine": {
            "processor": torch.cuda.get_device_name(device) if gpu else record.processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "load_average": os.getloadavg(),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": getattr(sys.modules.get("triton"), "__version__", None),
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
    record.write(RESULTS / ("views_gpu.json" if gpu else "views.json"), everything)


if __name__ == "__main__":
    main()
