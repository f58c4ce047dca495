"""All figures in one call, and features of whole sets, in memory or streamed."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

import hardneg as hn
from hardneg.evaluation import METRICS, judge
from hardneg.images import ImageSet, load_images
from hardneg.images.features import extract_set


def blobs(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 4
    return torch.eye(4)[labels] + 0.5 * torch.randn(count, 4, generator=chance), labels


def test_each_figure_is_that_of_its_own_function() -> None:
    sets = (*blobs(80, 0), *blobs(40, 1))
    found = judge(*sets)
    assert list(found) == list(METRICS)
    assert found["knn"] == hn.knn_accuracy(*sets)
    assert found["nearest"] == hn.knn_accuracy(*sets, k=1)
    assert found["few_1"] == hn.few_label_accuracy(*sets, per_class=1)[0]
    assert found["few_5"] == hn.few_label_accuracy(*sets, per_class=5)[0]
    assert found["linear"] == hn.linear_probe(*sets).accuracy
    with pytest.raises(ValueError, match="metrics must be among"):
        judge(*sets, metrics=["knm"])


def test_figures_that_too_few_labels_forbid_are_left_out() -> None:
    features, labels = blobs(4, 0)
    assert set(judge(features, labels, features, labels)) == {"knn", "nearest", "few_1"}
    twice = (torch.cat([features] * 2), torch.cat([labels] * 2))  # two of each: none to choose a penalty on
    assert "linear" not in judge(*twice, features, labels)
    with pytest.raises(ValueError, match="0 labelled samples to learn from"):
        judge(features[:0], labels[:0], features, labels)


def test_a_streamed_set_gives_the_features_of_one_in_memory_without_its_broken_images(tmp_path: Path) -> None:
    for number in range(150):
        folder = tmp_path / "train" / str(number % 3)
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), number).save(folder / f"{number:03}.png")
    file = tmp_path / "train" / "1" / "100.png"
    file.write_bytes(file.read_bytes()[:45])  # a sound header, and no picture
    with pytest.warns(UserWarning, match="skipped 1 of 150"):
        memory = load_images(tmp_path, "train")
    streamed = load_images(tmp_path, "train", in_memory=0)
    assert isinstance(memory, ImageSet)
    assert not isinstance(streamed, ImageSet)
    with pytest.warns(UserWarning, match="skipped 1 of 150"):
        features, labels = extract_set(nn.Flatten(), streamed, batch_size=64)
    expected, known = extract_set(nn.Flatten(), memory, batch_size=7)
    assert torch.equal(features, expected)
    assert torch.equal(labels, known)


def test_a_set_without_labels_cannot_be_judged() -> None:
    with pytest.raises(ValueError, match="has no labels"):
        extract_set(nn.Flatten(), ImageSet(torch.zeros(3, 1, 2, 2, dtype=torch.uint8)))
