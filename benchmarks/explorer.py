"""Time to build the explorer's page, and time of an interaction in a browser.

    python benchmarks/explorer.py [--quick] [--threads 2]

Built by the command `hardneg explore` from 50,000 embeddings of 128 dimensions with labels, in a process of its own, so
that its start is included. The page shows 5,000 of them. An interaction moves the slider of β by one step: from the
event to the end of the layout, by performance.now() in the page; an anchor is chosen by a click on a sample. There is
no peer: other viewers of embeddings have no settings of a loss. The limits are 60 s, 20 MB and 100 ms.
"""

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import record
import torch

import hardneg as hn

RESULTS = Path(__file__).parents[1] / "results"
LIMITS = {"build_seconds": 60, "page_bytes": 20_000_000, "interaction_ms": 100}
MEASURE = """(repeats) => {
    const timed = (action) => {
        const begun = performance.now();
        action();
        document.body.getBoundingClientRect();  // the layout is part of it
        return performance.now() - begun;
    };
    const slider = document.querySelector("#x-A-beta");
    const found = {slider: [], anchor: []};
    for (let step = 1; step <= repeats; step++) {
        slider.value = String((step % 90) / 10);
        found.slider.push(timed(() => slider.dispatchEvent(new Event("input", {bubbles: true}))));
        const buttons = document.querySelectorAll("[data-samples] button");
        found.anchor.push(timed(() => buttons[step % buttons.length].click()));
    }
    return found;
}"""


def build(count: int, dim: int, folder: Path, threads: int) -> tuple[float, Path]:
    """Seconds of the command, and its page."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(100, (count,), generator=generator)
    features = torch.randn(100, dim, generator=generator)[labels] + torch.randn(count, dim, generator=generator)
    np.save(folder / "features.npy", features.numpy())
    np.save(folder / "labels.npy", labels.numpy())
    page = folder / "explore.html"
    command = [sys.executable, "-m", "hardneg", "explore", "features.npy", "--labels", "labels.npy", "--to", str(page)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    begun = time.perf_counter()
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    return time.perf_counter() - begun, page


def interact(page: Path, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each interaction, by kind."""
    from playwright.sync_api import sync_playwright

    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    if browser_path is None:
        raise SystemExit("chromium is not on the path: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"])
        window = browser.new_page(viewport={"width": 1280, "height": 900})
        window.goto(page.as_uri())
        window.evaluate(MEASURE, 5)  # until the code is compiled
        found: dict[str, list[float]] = window.evaluate(MEASURE, repeats)
        browser.close()
    return found


def main() -> None:
    """Run the benchmark and write its record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="5,000 embeddings, nothing is written")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    count = 5000 if options.quick else 50_000
    load = os.getloadavg()
    with tempfile.TemporaryDirectory() as folder:
        seconds, page = build(count, 128, Path(folder), options.threads)
        size = page.stat().st_size
        times = interact(page, 20 if options.quick else 100)
    print(f"{count:,} embeddings of 128 dimensions: {seconds:.1f} s, {size / 1e6:.1f} MB")
    kinds: dict[str, Any] = {}
    for kind, found in times.items():
        kinds[kind] = {"median_ms": statistics.median(found), "worst_ms": max(found), "repeats": len(found)}
        print(f"{kind:8} median {statistics.median(found):.1f} ms, worst {max(found):.1f} ms")
    if options.quick:
        return
    record.write(
        RESULTS / "explorer.json",
        {
            "command": "python benchmarks/explorer.py",
            "machine": {"processor": record.processor(), "cores": os.cpu_count(), "load_average": list(load)},
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "hardneg": hn.__version__},
            "settings": {"embeddings": count, "dim": 128, "shown": 5000, "threads": options.threads},
            "limits": LIMITS,
            "build_seconds": seconds,
            "page_bytes": size,
            "interactions": kinds,
        },
    )


if __name__ == "__main__":
    main()
