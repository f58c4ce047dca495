"""`hardneg.load_encoder`: raw samples get the features that the evaluation of the run computes."""

import copy
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import hardneg
from hardneg.images import load_images
from hardneg.training import recipe, run, run_folder, saved_run

SHORT = ["trainer.epochs=1", "trainer.batch_size=16", "trainer.accelerator=cpu", "trainer.knn_every=0"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 32 color images of different sizes, PNG and JPEG."""
    folder: Path = tmp_path_factory.mktemp("data") / "photos"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(32):
        pixels = rng.integers(0, 256, (20 + number % 5, 50 - number, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:02}.{'png' if number % 2 else 'jpg'}")
    return folder


@pytest.fixture(scope="module", params=["simclr", "cmc"])
def trained(request: pytest.FixtureRequest, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("runs") / "run"
    own = [f"data.source={photos}", "data.size=12"]
    if request.param == "simclr":
        own.append("views.options={mean: [0.5, 0.4, 0.3], std: [0.2, 0.3, 0.4]}")
    run.train(recipe.load(recipe.find(f"digits-{request.param}"), [*SHORT, *own]), folder)
    return folder


def test_files_get_the_features_of_the_evaluation(trained: Path, photos: Path) -> None:
    encoder = hardneg.load_encoder(trained)
    loaded = saved_run.load_run(trained)
    expected = loaded.settings.kind.embed(loaded.encoder, load_images(photos, size=12), loaded.views)  # (32, d)
    files = sorted(photos.iterdir())
    found = encoder(files, batch_size=5)
    assert not encoder.module.training
    assert not found.requires_grad
    assert expected.std() > 0
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(encoder(str(files[3])), expected[3])
    torch.testing.assert_close(encoder.module(encoder.transform(files[3])[None])[0], expected[3])


def test_images_and_arrays_in_any_layout_get_the_same_features(trained: Path, photos: Path) -> None:
    encoder = hardneg.load_encoder(trained)
    file = photos / "01.png"
    expected = encoder(file)
    image = Image.open(file)
    array = np.array(image)  # (H, W, 3)
    for same in (image, image.convert("RGBA"), array, torch.tensor(array).permute(2, 0, 1), [image][0].copy()):
        torch.testing.assert_close(encoder(same), expected)
    gray = array[..., 0]
    torch.testing.assert_close(encoder(gray), encoder(np.stack([gray] * 3, axis=2)))


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (np.zeros((12, 12, 3)), "must be uint8"),
        (np.zeros((2, 12, 12, 3), np.uint8), "pass several images as a list"),
        (np.zeros((12, 12, 7), np.uint8), "must be a path, a PIL image, or a uint8 array"),
        (3, "got one int"),
        ([], "samples is empty"),
        ("nowhere.png", "there is no file 'nowhere.png'"),
        (".", "is a folder: pass the paths"),
        (__file__, "cannot be read as an image"),
    ],
)
def test_what_is_no_image_is_refused(trained: Path, sample: Any, message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        hardneg.load_encoder(trained)(sample)


def test_images_of_another_shape_than_a_rectangle_are_not_resized(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (32, 10, 14, 3), dtype=np.uint8)
    settings = recipe.load({}, [*SHORT, "encoder={name: resnet18, hidden: 8, outputs: 8}", "views.options={size: 10}"])
    run.train(settings, tmp_path / "run", data=pixels)
    encoder = hardneg.load_encoder(tmp_path / "run", data=pixels)
    assert encoder([*pixels[:3]]).shape == (3, 512)
    with pytest.raises(ValueError, match=r"image is 14x10, and the encoder was trained on images of 10x14 \(HxW\)"):
        encoder(pixels[0].transpose(1, 0, 2))


def test_an_unfinished_run_gives_the_encoder_of_its_checkpoint_with_a_warning(trained: Path, tmp_path: Path) -> None:
    expected = hardneg.load_encoder(trained).module.state_dict()
    (tmp_path / "run").mkdir()
    for file in trained.iterdir():
        if file.name != run_folder.ENCODER:
            (tmp_path / "run" / file.name).write_bytes(file.read_bytes())
    with pytest.warns(UserWarning, match="is unfinished: this is the encoder of its last checkpoint"):
        found = hardneg.load_encoder(tmp_path / "run").module.state_dict()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_code_that_a_folder_names_needs_trust(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (32, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "mine.npz", images=pixels)
    named = ["encoder.name=torch.nn:Flatten", f"data.source={tmp_path / 'mine.npz'}"]
    run.train(recipe.load({}, [*SHORT, *named]), tmp_path / "run")
    with pytest.raises(ValueError, match="trust=True"):
        hardneg.load_encoder(tmp_path / "run")
    encoder = hardneg.load_encoder(tmp_path / "run", trust=True)
    torch.testing.assert_close(encoder(pixels[5]), torch.tensor(pixels[5].reshape(-1) / 255, dtype=torch.float32))


def test_loading_needs_only_what_train_installs_and_says_so() -> None:
    code = "import sys; sys.modules['lightning'] = None\nimport hardneg\nhardneg.load_encoder('run')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert 'pip install "hardneg[train]"' in done.stderr.splitlines()[-1]


FEATURES = {"degree": None, "auto": None, "constant": None, "own": 4}


@pytest.mark.parametrize("features", FEATURES)
def test_graphs_get_the_features_of_the_evaluation(tmp_path: Path, features: str) -> None:
    data = pytest.importorskip("torch_geometric.data", reason="graphs need torch_geometric")
    generator = torch.Generator().manual_seed(0)
    graphs = []
    for number in range(32):
        size = 5 + number % 4
        hub = torch.stack([torch.zeros(size - 1, dtype=torch.int64), torch.arange(1, size)])
        x = torch.rand(size, 4, generator=generator) if FEATURES[features] else None
        graphs.append(data.Data(x=x, edge_index=torch.cat([hub, hub.flip(0)], dim=1), num_nodes=size, y=number % 2))
    short = [*SHORT, f"data.features={features}"]
    run.train(recipe.load(recipe.find("mutag-infograph"), short), tmp_path / "run", data=graphs)
    loaded = saved_run.load_run(tmp_path / "run", data=graphs)
    samples = loaded.settings.kind.load(loaded.settings.data, given=graphs)
    expected = loaded.settings.kind.embed(loaded.encoder, samples)  # (32, d)
    encoder = hardneg.load_encoder(tmp_path / "run", data=graphs)
    torch.testing.assert_close(encoder(graphs, batch_size=5), expected)
    torch.testing.assert_close(encoder(graphs[7]), expected[7])
    assert graphs[7].y == 1  # the user's graph is not changed
    assert (graphs[7].x is None) == (FEATURES[features] is None)
    large = torch.stack([torch.zeros(20, dtype=torch.int64), torch.arange(1, 21)])
    if features != "constant":
        with pytest.raises(ValueError, match=r"degree 20, and the encoder was trained on degrees up to 7|graph.x must"):
            encoder(data.Data(edge_index=large, num_nodes=21))
    with pytest.raises(ValueError, match=r"graph must be a torch_geometric\.data\.Data, got Tensor"):
        encoder(large)


@pytest.mark.parametrize(("made", "recorded"), [("degree", "degree"), ("constant", "constant"), ("own", "own")])
def test_the_features_of_a_given_set_are_recorded_whatever_the_recipe_says(
    tmp_path: Path, made: str, recorded: str
) -> None:
    data = pytest.importorskip("torch_geometric.data", reason="graphs need torch_geometric")
    from hardneg.graphs.data import GraphSet
    from hardneg.graphs.features import extract_graphs
    from hardneg.graphs.gin import GIN

    graphs = []
    for size in [5, 6, 7, 8] * 4:
        ends = torch.arange(size - 1)
        edges = torch.stack([torch.cat([ends, ends + 1]), torch.cat([ends + 1, ends])])
        x = torch.arange(3.0 * size).view(size, 3) if made == "own" else None
        graphs.append(data.Data(x=x, edge_index=edges, num_nodes=size))
    whole = GraphSet.of(graphs, made)
    settings = recipe.load(recipe.find("imdb-binary-graphcl"), SHORT)
    assert recipe.tree_of(settings)["data"]["features"] == "constant"
    trained = run.train(settings, tmp_path / "run", data=whole, encoder=GIN(whole.node_features))
    loaded = hardneg.load_encoder(tmp_path / "run", encoder=GIN(whole.node_features))
    assert loaded.transform.described == {"node_features": recorded}  # type: ignore[attr-defined]
    torch.testing.assert_close(loaded(graphs), extract_graphs(trained.encoder.cpu(), whole))
    if made == "degree":
        hub = torch.tensor([[0, 0, 0], [1, 2, 3]])
        with pytest.raises(
            ValueError, match=r"^samples\[1\]: graph has a node of degree 3, .*data\.features=constant$"
        ):
            loaded([graphs[0], data.Data(edge_index=hub, num_nodes=4)])


def test_large_degrees_are_standardized_as_in_the_training_set() -> None:
    data = pytest.importorskip("torch_geometric.data", reason="graphs need torch_geometric")
    from hardneg.graphs.data import MOST_DEGREES, GraphSet
    from hardneg.graphs.transform import GraphTransform, describe

    graphs = []
    for size in (3, MOST_DEGREES + 5):
        hub = torch.stack([torch.zeros(size - 1, dtype=torch.int64), torch.arange(1, size)])
        graphs.append(data.Data(edge_index=torch.cat([hub, hub.flip(0)], dim=1), num_nodes=size))
    whole = GraphSet.of(graphs)
    transform = GraphTransform(whole.node_features, describe(whole))
    torch.testing.assert_close(torch.cat([transform(graph).x for graph in graphs]), whole.x)


def test_its_text_names_data_network_and_transform(trained: Path, photos: Path) -> None:
    lines = repr(hardneg.load_encoder(trained)).split("\n")
    assert len(lines) == 3
    assert lines[0].startswith(f"TrainedEncoder({str(trained)!r}: ")
    assert str(photos) in lines[0]
    assert "'tiny'" in lines[1]
    assert lines[2].strip() == "transform: ImageTransform to (3, 12, 12))"


@pytest.mark.parametrize("name", ["eval", "train", "parameters"])
def test_attributes_of_a_network_are_said_to_be_those_of_the_module(trained: Path, name: str) -> None:
    encoder = hardneg.load_encoder(trained)
    with pytest.raises(AttributeError, match=f"has no attribute '{name}': use encoder.module.{name}"):
        getattr(encoder, name)
    with pytest.raises(AttributeError, match=r"has no attribute 'evil'$"):
        encoder.evil  # noqa: B018
    assert copy.deepcopy(encoder).settings == encoder.settings


def test_the_folder_of_the_run_is_named_if_another_path_is_given(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"is not a run: give the folder {re.escape(str(trained))}$"):
        hardneg.load_encoder(trained / "encoder.safetensors")
    shutil.copytree(trained, tmp_path / "comparison" / "hcl" / "seed-0")
    shutil.copytree(trained, tmp_path / "comparison" / "hcl" / "seed-1")
    with pytest.raises(ValueError, match=r"give one of the 2 runs in it, such as .*seed-0$"):
        hardneg.load_encoder(tmp_path / "comparison")
