"""The tutorials run as they are written: files are saved, commands and code run in order, with fewer epochs."""

import json
import random
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import hardneg

from hardneg.evaluation import linear_probe, metrics

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r'^```(bash|python|yaml)(?: title="(.+?)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
# What makes a tutorial long, or depends on the process.
SMALLER = {
    "data.source=photos": "data.source=photos trainer.epochs=2 data.size=16 encoder.name=tiny encoder.options={}",
    "epochs: 100": "epochs: 2", "trainer.epochs=120": "trainer.epochs=3", "trainer.epochs=20": "trainer.epochs=1",
    "simclr,debiased,hcl --seeds 2": "simclr,hcl --seeds 1", "resnet18": "tiny", "size: 64": "size: 16",
    "size=64": "size=16", "batch_size: 16": "batch_size: 8",
    "train(model, pairs, 5, seed)": "train(model, pairs, 1, seed)",
    # Another test of this process may have registered a device type without pinned memory.
    'save_strategy="no"': 'save_strategy="no", dataloader_pin_memory=False',
}  # fmt: skip


@pytest.fixture(autouse=True)
def _modules(empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(empty_folder)
    yield
    sys.modules.pop("my_graphs", None)


def smaller(text: str) -> str:
    for long, short in SMALLER.items():
        text = text.replace(long, short)
    return text


def follow(name: str, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], list[str]]:
    """Run the blocks of a tutorial; returns the names that its code defines, and what its commands print."""
    names: dict[str, Any] = {"__name__": name}
    printed = []
    blocks = BLOCK.findall((DOCS / f"{name}.md").read_text(encoding="utf-8"))
    # A file may be shown after the command that reads it.
    for _, title, text in blocks:
        if title:
            Path(title).write_text(smaller(text), encoding="utf-8")
    for kind, title, text in blocks:
        if kind == "python" and not title:
            exec(compile(smaller(text), f"{name}.md", "exec"), names)
        elif kind == "bash":
            for line in smaller(text).splitlines():
                program, *arguments = line.split()
                if program == "hardneg":
                    code, out, err = hardneg(capsys, *arguments)
                    assert code == 0, f"{line}\n{err}"
                    printed.append(out + err)
    return names, printed


def make_photos() -> None:
    """Digits as PNG files of three classes, 40 each."""
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    for label in range(3):
        folder = Path("photos") / f"digit {label}"
        folder.mkdir(parents=True)
        for number, pixels in enumerate(digits.images[digits.target == label][:40]):
            Image.fromarray((pixels * 15).astype("uint8")).resize((24, 20)).save(folder / f"{number}.png")


def test_own_images(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "linear_probe", partial(linear_probe, steps=3))
    make_photos()
    names, printed = follow("tutorial-images", capsys)
    assert Path("runs/losses/report.html").exists()
    assert Path("runs/photos/exported.safetensors").exists()
    assert "after epoch 2" in printed[0]
    assert "after epoch 3" in printed[1]
    assert names["features"].shape == (120, 128)  # of the small encoder
    assert int(names["similar"][0]) == 0
    accuracy = float(re.search(r"kNN ([\d.]+) %", printed[1]).group(1))  # type: ignore[union-attr]
    assert accuracy > 80  # chance is 33


def test_an_existing_training_loop(capsys: pytest.CaptureFixture[str]) -> None:
    names, _ = follow("tutorial-loop", capsys)
    assert names["values"][-1] < names["values"][0] - 0.3
    assert names["accuracy"] > 0.9  # chance is 0.1
    assert len(names["queue"]) == 1000
    assert names["clip"].temperature.log_value.grad != 0
    assert names["annealed"].progress == 0.99


def test_graphs_of_pyg(capsys: pytest.CaptureFixture[str]) -> None:
    names, printed = follow("tutorial-graphs", capsys)
    assert "SVM, 10 folds 100.0 %" in printed[0]
    assert names["step"] == 15
    assert names["features"].shape == (80, 32)
    assert torch.isfinite(names["value"])
    assert Path("runs/own-encoder/encoder.safetensors").exists()


def test_from_metric_learning(capsys: pytest.CaptureFixture[str]) -> None:
    names, _ = follow("tutorial-metric-learning", capsys)
    assert names["after"].item() == pytest.approx(names["before"].item(), rel=1e-5)
    assert names["precision"] > 0.8  # chance is 0.08
    assert len(names["queue"]) == 512
    effective = [loss.diagnostics()["effective_negatives"] for loss in names["losses"].values()]
    assert effective[0] > max(effective[1:])


def make_pairs() -> None:
    """Queries of three words, and texts with a synonym of each; some of both are held out."""
    draw = random.Random(0)
    found = sorted({tuple(sorted(draw.sample(range(120), 3))) for _ in range(700)})
    draw.shuffle(found)
    pairs = [
        {"query": " ".join(f"w{word}" for word in words), "positive": " ".join(f"s{word}" for word in words)}
        for words in found
    ]
    documents = [{"text": pair["positive"]} for pair in pairs[500:]]
    for name, rows in (("pairs", pairs[:500]), ("held_out", pairs[500:]), ("documents", documents)):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_a_retrieval_model(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("sentence_transformers", "datasets", "accelerate"):
        pytest.importorskip(name)
    make_pairs()
    names, printed = follow("tutorial-retrieval", capsys)
    assert "2500 negatives" in printed[0].replace(",", "")
    assert "recall" not in printed[0]
    assert Path("mined.html").exists()
    results = names["results"]
    assert results["before"] > 0.2  # chance is 0.02
    assert min(results["negatives of the batch"], results["mined negatives, too"]) > results["before"]
