"""What an encoder sees is looked up in the run's own data: labelled or not, in memory or streamed."""

import base64
import io
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from hardneg.evaluation import extract
from hardneg.graphs import thumbnails
from hardneg.images import StreamedImages, modality
from hardneg.insight import samples
from hardneg.insight.report import write_report
from hardneg.insight.runs import Group, read_run
from hardneg.insight.samples import Evidence, data_uri, gather, look_at_test_set
from hardneg.training import recipe, run, saved_run


def pretend(monkeypatch: pytest.MonkeyPatch, source: str, channels: int = 1) -> None:
    """Every folder holds a run on this source, with pixels for features."""
    settings = recipe.load({"data": {"source": source}})
    loaded = SimpleNamespace(settings=settings, encoder=nn.Flatten(), views=None, shape=(channels, 8, 8), division=None)
    monkeypatch.setattr(saved_run, "load_run", lambda folder, trust: loaded)


def stacked(found: samples.Sight) -> Tensor:
    """All images of the samples, (n, C, H, W)."""
    return torch.stack([found.images[row] for row in range(len(found.features))])


def decoded(uri: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))))


def test_a_trained_run_is_looked_at_with_its_own_encoder(tmp_path: Path) -> None:
    brief = ["trainer.epochs=1", "trainer.accelerator=cpu", "trainer.knn_every=0", "trainer.channels_last=false"]
    trained = run.train(recipe.load({"data": {"source": "digits"}}, brief), tmp_path / "run")
    found = look_at_test_set(tmp_path / "run")
    images, (_, labels, classes, features) = stacked(found), found
    assert images.shape == (500, 1, 8, 8)
    assert labels is not None
    assert len(classes) == 10
    expected = extract(trained.encoder.cpu(), images, prepare=saved_run.load_run(tmp_path / "run").prepare)
    torch.testing.assert_close(features, expected)
    page = write_report([tmp_path / "run"], tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("<img") == 6 * 9
    assert "cannot be read" not in page


def test_pictures_without_labels_are_those_of_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pictures = np.random.default_rng(0).integers(0, 256, (30, 6, 6, 3), dtype=np.uint8)
    np.savez(tmp_path / "mine.npz", images=pictures)
    pretend(monkeypatch, str(tmp_path / "mine.npz"), channels=3)
    seen = look_at_test_set(tmp_path)
    assert seen.labels is None
    assert stacked(seen).shape == (30, 3, 6, 6)


def test_of_many_pictures_the_same_ones_are_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(samples, "MOST", 40)
    pretend(monkeypatch, "digits")
    one, two = (look_at_test_set(tmp_path / name) for name in "ab")
    assert len(one.features) == 40
    assert torch.equal(stacked(one), stacked(two))
    assert torch.equal(one.features, stacked(one).flatten(1) / 255)


class Files:
    """Two hundred pictures, one of which cannot be read."""

    def __len__(self) -> int:
        return 200

    def place(self, index: int) -> str:
        return f"picture {index}"

    def open(self, index: int) -> io.BytesIO:
        Image.new("L", (8, 8), index).save(file := io.BytesIO(), "PNG")
        return io.BytesIO(b"nothing") if index == 4 else file


def test_a_streamed_set_shows_no_picture_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    streamed = StreamedImages(Files(), (1, 8, 8), labels=torch.arange(200) % 2, classes=("even", "odd"))
    monkeypatch.setattr(modality, "load_split", lambda *given, **more: streamed)
    pretend(monkeypatch, str(tmp_path))
    with pytest.warns(UserWarning, match="cannot be read: picture 4"):
        found = look_at_test_set(tmp_path)
    images, labels = stacked(found), found.labels
    assert images[:, 0, 0, 0].sort().values.tolist() == [index for index in range(200) if index != 4]
    assert labels is not None
    assert torch.equal(labels, images[:, 0, 0, 0].long() % 2)


def test_weights_that_are_missing_are_a_reason_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(recipe.dump(recipe.load({})))
    found = gather(Group("mine", [read_run(tmp_path)]))
    assert isinstance(found, str)
    assert "holds no weights yet" in found


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (3, 5, 9), (1, 40, 40)])
def test_small_pictures_are_kept_as_they_are(shape: tuple[int, int, int]) -> None:
    image = torch.randint(0, 256, shape, dtype=torch.uint8)
    expected = image[0] if shape[0] == 1 else image.permute(1, 2, 0)
    assert np.array_equal(decoded(data_uri(image)), expected.numpy())


def test_large_pictures_become_thumbnails_and_many_channels_a_mean() -> None:
    assert decoded(data_uri(torch.zeros(3, 120, 240, dtype=torch.uint8))).shape == (28, 56)  # colours by number
    many = torch.tensor([0, 100, 200, 100], dtype=torch.uint8)[:, None, None].expand(4, 6, 6)
    assert set(decoded(data_uri(many)).flatten().tolist()) == {100}


def test_one_picture_has_no_negatives() -> None:
    with pytest.raises(ValueError, match="at least 2 pictures, got 1"):
        samples.examine(samples.Sight(torch.zeros(1, 1, 8, 8, dtype=torch.uint8), None, (), torch.ones(1, 4)))


def test_labels_may_be_known_for_few_or_none() -> None:
    images, features = torch.zeros(12, 1, 4, 4, dtype=torch.uint8), torch.randn(12, 3)
    few = torch.tensor([0, 1] + [-1] * 10)
    found: Evidence = samples.examine(samples.Sight(images, few, ("a", "b"), features))
    assert (found.share, found.chance) == (None, None)
    assert len(found.gallery) == 2
    none = samples.examine(samples.Sight(images, torch.full((12,), -1), (), features))
    assert none.histograms is None
    assert len(none.gallery) == 6


def test_the_plane_is_that_of_the_principal_components() -> None:
    from sklearn.decomposition import PCA

    chance = torch.Generator().manual_seed(0)
    features = torch.randn(50, 6, generator=chance, dtype=torch.float64) * torch.tensor([4.0, 2, 1, 1, 1, 1])
    labels = torch.arange(50) % 3 - 1  # −1 is unknown
    images = torch.zeros(50, 1, 8, 8, dtype=torch.uint8)
    shown = samples.examine(samples.Sight(images, labels, ["cat", "dog"], features)).plane
    unit = torch.nn.functional.normalize(features, dim=1).numpy()
    theirs = PCA(2).fit(unit)
    assert shown.shares == pytest.approx(tuple(theirs.explained_variance_ratio_))
    mine = np.array(sorted(abs(np.array(shown.points)).tolist()))
    assert mine == pytest.approx(np.array(sorted(abs(theirs.transform(unit)).tolist())))
    assert shown.classes == ["cat", "dog"]
    assert sorted(set(shown.styles)) == [-1, 0, 1]


@pytest.mark.parametrize("width", [1, 2])
def test_features_of_one_direction_or_none_lie_in_a_plane_all_the_same(width: int) -> None:
    images = torch.zeros(5, 1, 8, 8, dtype=torch.uint8)
    shown = samples.examine(samples.Sight(images, None, [], torch.ones(5, width))).plane
    assert np.array(shown.points) == pytest.approx(np.zeros((5, 2)))
    assert shown.styles == [-1] * 5


def test_a_run_on_graphs_is_shown_with_its_graphs_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch_geometric", reason="graphs need torch_geometric")
    from hardneg.graphs.data import GraphSet
    from hardneg.graphs.modality import Graphs

    cycles = [torch.stack([torch.arange(n), (torch.arange(n) + 1) % n]) for n in range(3, 15)]
    starts = torch.tensor([0, *(len(cycle[0]) for cycle in cycles)]).cumsum(0)
    edges = torch.cat([cycle + start for cycle, start in zip(cycles, starts, strict=False)], dim=1)
    made = GraphSet(torch.ones(int(starts[-1]), 1), edges, starts, torch.arange(12) % 2)
    monkeypatch.setattr(Graphs, "load", lambda *given, **more: made)
    settings = recipe.load(
        recipe.find("mutag-infograph"), ["data.source=tu:CYCLES", "trainer.epochs=1", "trainer.batch_size=4"]
    )
    run.train(settings, tmp_path / "run")
    page = write_report([tmp_path / "run"], tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("<img") == 2 * 9
    assert "cannot be read" not in page
    triangle, ring = (Graphs().thumbnail(made, row) for row in (0, 11))
    assert triangle.shape == ring.shape == (3, 56, 56)
    assert not torch.equal(triangle, ring)
    assert torch.equal(thumbnails.draw(0, torch.zeros(2, 0).long()), torch.full((3, 56, 56), 255, dtype=torch.uint8))
