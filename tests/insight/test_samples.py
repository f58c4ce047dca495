"""Samples of a report come from the data of the run: labeled or not, in memory or streamed, images or graphs."""

import base64
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from hardneg import modality as modalities
from hardneg.evaluation import extract
from hardneg.graphs import thumbnails
from hardneg.images import StreamedImages, modality
from hardneg.insight import samples
from hardneg.insight.report import write_report
from hardneg.insight.runs import Group, read_run
from hardneg.insight.samples import HUBS, EmbeddingSummary, data_uri, load_test_samples, summarize_group
from hardneg.training import recipe, run, saved_run


def fake_runs(monkeypatch: pytest.MonkeyPatch, source: str, channels: int = 1) -> None:
    """Make every folder a run on this source, with pixels as features."""
    settings = recipe.load({"data": {"source": source}})
    loaded = SimpleNamespace(settings=settings, encoder=nn.Flatten(), views=None, shape=(channels, 8, 8), division=None)
    monkeypatch.setattr(saved_run, "load_run", lambda folder, trust: loaded)


def stacked(images: samples.Images) -> torch.Tensor:
    return torch.stack([images[row] for row in range(len(images))])


def decoded(uri: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))))


def test_samples_of_a_trained_run_are_encoded_with_its_encoder(tmp_path: Path) -> None:
    brief = ["trainer.epochs=1", "trainer.accelerator=cpu", "trainer.knn_every=0", "trainer.channels_last=false"]
    trained = run.train(recipe.load({"data": {"source": "digits"}}, brief), tmp_path / "run")
    drawn, labels, classes, features, unit = load_test_samples(tmp_path / "run")
    assert unit == "images"
    images = stacked(drawn)
    assert images.shape == (500, 1, 8, 8)
    assert labels is not None
    assert len(classes) == 10
    expected = extract(trained.encoder.cpu(), images, prepare=saved_run.load_run(tmp_path / "run").prepare)
    torch.testing.assert_close(features, expected)
    page = write_report([tmp_path / "run"], tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("<img") == 6 * (1 + 6 + 3) + HUBS
    assert "cannot be read" not in page
    assert "500 images" in page
    trained_on = json.loads((tmp_path / "run" / "environment.json").read_text())["started"][:10]
    assert f"<dt>trained</dt><dd><bdi>{trained_on}</bdi></dd>" in page


def test_without_labels_samples_are_from_the_training_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (30, 6, 6, 3), dtype=np.uint8)
    np.savez(tmp_path / "mine.npz", images=images)
    fake_runs(monkeypatch, str(tmp_path / "mine.npz"), channels=3)
    found = load_test_samples(tmp_path)
    assert found.labels is None
    assert stacked(found.images).shape == (30, 3, 6, 6)


def test_every_run_gets_the_same_subset_of_many_samples(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(samples, "MAX_SAMPLES", 40)
    fake_runs(monkeypatch, "digits")
    one, two = (load_test_samples(tmp_path / name) for name in "ab")
    images = stacked(one.images)
    assert len(images) == 40
    assert torch.equal(images, stacked(two.images))
    assert torch.equal(one.features, images.flatten(1) / 255)


class Files:
    """Two hundred images, one of which cannot be read."""

    def __len__(self) -> int:
        return 200

    def place(self, index: int) -> str:
        return f"image {index}"

    def open(self, index: int) -> io.BytesIO:
        Image.new("L", (8, 8), index).save(file := io.BytesIO(), "PNG")
        return io.BytesIO(b"nothing") if index == 4 else file


def test_a_streamed_set_shows_no_image_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    streamed = StreamedImages(Files(), (1, 8, 8), labels=torch.arange(200) % 2, classes=("even", "odd"))
    monkeypatch.setattr(modality, "load_split", lambda *given, **more: streamed)
    fake_runs(monkeypatch, str(tmp_path))
    with pytest.warns(UserWarning, match="cannot be read: image 4"):
        drawn, labels, *_ = load_test_samples(tmp_path)
    images = stacked(drawn)
    assert images[:, 0, 0, 0].sort().values.tolist() == [index for index in range(200) if index != 4]
    assert labels is not None
    assert torch.equal(labels, images[:, 0, 0, 0].long() % 2)


def test_missing_weights_give_a_reason_instead_of_an_error(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(recipe.dump(recipe.load({})))
    found = summarize_group(Group("mine", [read_run(tmp_path)]))
    assert isinstance(found, str)
    assert "holds no weights yet" in found


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (3, 5, 9), (1, 40, 40)])
def test_small_images_are_stored_unchanged(shape: tuple[int, int, int]) -> None:
    image = torch.randint(0, 256, shape, dtype=torch.uint8)
    expected = image[0] if shape[0] == 1 else image.permute(1, 2, 0)
    assert np.array_equal(decoded(data_uri(image)), expected.numpy())


def test_large_images_are_reduced_and_other_channels_averaged() -> None:
    assert decoded(data_uri(torch.zeros(3, 120, 240, dtype=torch.uint8))).shape == (28, 56)  # a palette image
    many = torch.tensor([0, 100, 200, 100], dtype=torch.uint8)[:, None, None].expand(4, 6, 6)
    assert set(decoded(data_uri(many)).flatten().tolist()) == {100}


def test_a_single_image_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least 2 samples, got 1"):
        samples.summarize(
            samples.EncodedSamples(torch.zeros(1, 1, 8, 8, dtype=torch.uint8), None, (), torch.ones(1, 4))
        )


def test_the_gallery_shows_the_hardest_of_other_classes_and_of_the_same_class() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(60, 5, generator=generator, dtype=torch.float64)
    labels = torch.arange(60) % 4 - 1  # −1 is unknown
    images = torch.arange(60, dtype=torch.uint8)[:, None, None, None].expand(60, 1, 4, 4).contiguous()
    shown = samples.summarize(samples.EncodedSamples(images, labels, ["a", "b", "c"], features)).gallery
    assert len(shown) == 3
    for each in shown:
        anchor = int(decoded(each.anchor.uri)[0, 0])
        own = int(labels[anchor])
        cosine = {
            row: float(features[row] @ features[anchor] / features[row].norm() / features[anchor].norm())
            for row in range(60)
            if row != anchor and labels[row] >= 0
        }
        ranked = sorted(cosine, key=lambda row: -cosine[row])
        others, same = [row for row in ranked if labels[row] != own][:6], [r for r in ranked if labels[r] == own][:3]
        for found, expected in ((each.negatives, others), (each.same_class, same)):
            assert [int(decoded(one.uri)[0, 0]) for one in found] == expected
            assert [one.cosine for one in found] == pytest.approx([cosine[row] for row in expected])
            assert [one.label for one in found] == ["abc"[int(labels[row])] for row in expected]


def test_too_few_labels_give_no_shares_and_none_give_no_histograms() -> None:
    images, features = torch.zeros(12, 1, 4, 4, dtype=torch.uint8), torch.randn(12, 3)
    few = torch.tensor([0, 1] + [-1] * 10)
    found: EmbeddingSummary = samples.summarize(samples.EncodedSamples(images, few, ("a", "b"), features))
    assert (found.hardest_same_share, found.all_same_share) == (None, None)
    assert len(found.gallery) == 2
    none = samples.summarize(samples.EncodedSamples(images, torch.full((12,), -1), (), features))
    assert none.histograms is None
    assert len(none.gallery) == 6


def test_the_projection_equals_pca_of_scikit_learn() -> None:
    from sklearn.decomposition import PCA

    generator = torch.Generator().manual_seed(0)
    features = torch.randn(50, 6, generator=generator, dtype=torch.float64) * torch.tensor([4.0, 2, 1, 1, 1, 1])
    labels = torch.arange(50) % 3 - 1  # −1 is unknown
    images = torch.zeros(50, 1, 8, 8, dtype=torch.uint8)
    shown = samples.summarize(samples.EncodedSamples(images, labels, ["cat", "dog"], features)).projection
    unit = torch.nn.functional.normalize(features, dim=1).numpy()
    expected = PCA(2).fit(unit)
    assert shown.variance_shares == pytest.approx(tuple(expected.explained_variance_ratio_))
    found = np.array(sorted(abs(np.array(shown.points)).tolist()))
    assert found == pytest.approx(np.array(sorted(abs(expected.transform(unit)).tolist())))
    assert shown.classes == ["cat", "dog"]
    assert sorted(set(shown.styles)) == [-1, 0, 1]


@pytest.mark.parametrize("width", [1, 2])
def test_equal_features_of_any_width_are_projected_to_the_origin(width: int) -> None:
    images = torch.zeros(5, 1, 8, 8, dtype=torch.uint8)
    shown = samples.summarize(samples.EncodedSamples(images, None, [], torch.ones(5, width))).projection
    assert np.array(shown.points) == pytest.approx(np.zeros((5, 2)))
    assert shown.styles == [-1] * 5


def test_a_run_on_graphs_is_shown_with_drawings_of_its_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch_geometric", reason="graphs need torch_geometric")
    from hardneg.graphs.data import GraphSet

    cycles = [torch.stack([torch.arange(n), (torch.arange(n) + 1) % n]) for n in range(3, 15)]
    starts = torch.tensor([0, *(len(cycle[0]) for cycle in cycles)]).cumsum(0)
    edges = torch.cat([cycle + start for cycle, start in zip(cycles, starts, strict=False)], dim=1)
    made = GraphSet(torch.ones(int(starts[-1]), 1), edges, starts, torch.arange(12) % 2)
    monkeypatch.setattr("hardneg.graphs.modality.load_graphs", lambda *given: made)
    settings = recipe.load(
        recipe.find("mutag-infograph"), ["data.source=tu:CYCLES", "trainer.epochs=1", "trainer.batch_size=4"]
    )
    run.train(settings, tmp_path / "run")
    page = write_report([tmp_path / "run"], tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("<img") == 2 * (1 + 6 + 3)  # too few for hubs
    assert "cannot be read" not in page
    # Its text speaks of graphs.
    text = re.sub(r"<(style|script)[^>]*>.*?</\1>|<details>.*?</details>|<[^>]+>", " ", page, flags=re.DOTALL)
    assert "12 graphs" in text
    assert not re.search(r"\b(images?|samples?)\b", text)
    triangle, ring = (modalities.get("graphs").thumbnail(made, index) for index in (0, 11))
    assert triangle.shape == ring.shape == (3, 56, 56)
    assert not torch.equal(triangle, ring)
    assert torch.equal(thumbnails.draw(0, torch.zeros(2, 0).long()), torch.full((3, 56, 56), 255, dtype=torch.uint8))
