"""From a run to decisions of a person and back into training, through the browser and the command line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import hardneg
from PIL import Image

from hardneg.training import build, recipe, run

SHORT = ["trainer.epochs=1", "trainer.accelerator=cpu", "trainer.knn_every=0", "trainer.batch_size=32"]


def write_images(folder: Path, count: int) -> None:
    """Gray images of three classes, each with its number in its pixels."""
    for number in range(count):
        file = folder / f"class {number % 3}" / f"{number * 7919 % 100_003}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number % 3).integers(0, 200, (8, 8), dtype=np.uint8)
        pixels[0, :2] = number // 256, number % 256
        Image.fromarray(pixels).save(file)


def number_of(image: torch.Tensor) -> int:
    return int(image[0, 0, 0]) * 256 + int(image[0, 0, 1])


def mark_two(page: Any, file: Path) -> list[tuple[Any, Any]]:
    """Mark the first and the third pair of the queue by keys, and download the file; returns the rows on the page."""
    page.focus("[data-queue]")
    for key in ("d", "k", "d"):
        page.keyboard.press(key)
    with page.expect_download() as download:
        page.click("[data-download]")
    download.value.save_as(file)
    return [tuple(page.evaluate(f"hardneg.explorers[0].data.suspects[{number}].slice(0, 2)")) for number in (0, 2)]


@pytest.mark.slow
def test_marked_pairs_of_a_run_reach_the_next_training(
    tmp_path: Path, open_page: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run.train(recipe.load(recipe.find("digits-simclr"), SHORT), tmp_path / "run")
    page_file, pairs_file = tmp_path / "explore.html", tmp_path / "marked.jsonl"
    code, _, err = hardneg(capsys, "explore", str(tmp_path / "run"), "--to", str(page_file), "--samples", "300")
    assert (code, err.count("error")) == (0, 0)
    page = open_page(page_file)
    shown = mark_two(page, pairs_file)
    ids = [json.loads(each) for each in page.evaluate("hardneg.explorers[0].data.ids")]
    marked = [json.loads(line) for line in pairs_file.read_text().splitlines()]
    assert [(each["a"], each["b"]) for each in marked] == [(ids[one], ids[other]) for one, other in shown]
    assert any(number != row for row, number in enumerate(ids))  # a sample: rows of the page are not those of the data

    changes = [*SHORT, f"data.not_negatives={pairs_file}"]
    code, out, err = hardneg(capsys, "train", "digits-simclr", *changes, "--run", str(tmp_path / "again"))
    assert code == 0
    assert "2 pairs of" in out + err
    assert (tmp_path / "again" / "encoder.safetensors").exists()
    stated = json.loads((tmp_path / "again" / "environment.json").read_text())["not_negatives"]
    assert stated["pairs"] == 2


@pytest.mark.slow
def test_marked_images_of_a_folder_are_those_that_training_leaves_out(
    tmp_path: Path, open_page: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    write_images(tmp_path / "images", 300)
    settings = recipe.load(recipe.find("digits-simclr"), [*SHORT, f"data.source={tmp_path / 'images'}"])
    run.train(settings, tmp_path / "run")
    whole = build.data(settings)
    assert len(whole) < 300  # a fifth is held out, by content
    page_file, pairs_file = tmp_path / "explore.html", tmp_path / "marked.jsonl"
    code, _, _ = hardneg(capsys, "explore", str(tmp_path / "run"), "--to", str(page_file), "--samples", "100")
    assert code == 0
    page = open_page(page_file)
    # What a person sees, decoded by the browser.
    pixels = """async (row) => {
        const image = new Image();
        image.src = hardneg.explorers[0].data.thumbnails[row];
        await image.decode();
        const canvas = new OffscreenCanvas(image.width, image.height);
        const context = canvas.getContext("2d", {willReadFrequently: true});
        context.drawImage(image, 0, 0);
        const block = image.width / 8;
        const middle = (x) => Math.floor((x + 0.5) * block);
        return [0, 1].map((x) => context.getImageData(middle(x), middle(0), 1, 1).data[0]);
    }"""
    seen = set()
    for pair in mark_two(page, pairs_file):
        values = [page.evaluate(pixels, row) for row in pair]
        seen.add(frozenset(256 * high + low for high, low in values))
    changes = [*SHORT, f"data.source={tmp_path / 'images'}", f"data.not_negatives={pairs_file}"]
    settings = recipe.load(recipe.find("digits-simclr"), changes)
    found = build.not_negatives(settings, whole)
    assert found is not None
    used = {frozenset(number_of(whole[row][1]) for row in pair) for pair in found.tolist()}
    assert used == seen
    assert len(used) == 2

    # Another image shifts the row numbers: the pairs would name other images.
    Image.fromarray(np.full((8, 8), 255, np.uint8)).save(tmp_path / "images" / "class 0" / "0.png")
    with pytest.raises(ValueError, match=r"line 1: the pair is of other samples"):
        build.not_negatives(settings, build.data(settings))
