"""Data, views and encoders of the user's own, by name and as objects; what does not fit is refused before training."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from training import own_parts

from hardneg.images import ImageSet
from hardneg.modality import GIVEN
from hardneg.training import build, evaluate, recipe, run, saved_run

BRIEF = ["trainer.epochs=2", "trainer.batch_size=8", "trainer.accelerator=cpu"]
KINDS = {
    "images": (
        ["encoder.hidden=16", "encoder.outputs=8", "trainer.knn_every=1"],
        {"data": "images", "views": "BrightnessViews", "encoder": "image_encoder"},
        "nearest",
    ),
    "graphs": (
        ["method=graphcl", "objective.preset=graphcl"],
        {"data": "graphs", "views": "NoisyFeatures", "encoder": "DegreeEncoder"},
        "svm",
    ),
}
KEYS = {"data": "data.source", "views": "views.preset", "encoder": "encoder.name"}


def needs(kind: str) -> None:
    if kind == "graphs":
        pytest.importorskip("torch_geometric", reason="graphs need torch_geometric")


def named(kind: str, *overrides: str) -> recipe.Recipe:
    """A recipe whose data, views and encoder are callables."""
    settings, parts, _ = KINDS[kind]
    names = [f"{KEYS[part]}=training.own_parts:{name}" for part, name in parts.items()]
    return recipe.load({}, [*settings, *BRIEF, *names, "encoder.options={width: 12}", *overrides])


def objects(kind: str) -> dict[str, Any]:
    """The same parts as objects, with an encoder of its own weights."""
    _, parts, _ = KINDS[kind]
    torch.manual_seed(0)
    made = {part: getattr(own_parts, name) for part, name in parts.items()}
    return {"data": made["data"], "views": made["views"](), "encoder": made["encoder"](width=12)}


def plain(kind: str) -> recipe.Recipe:
    """The recipe for parts that are passed as objects."""
    return recipe.load({}, [*KINDS[kind][0], *BRIEF])


@pytest.mark.parametrize("kind", KINDS)
def test_parts_named_in_a_recipe_are_trained_evaluated_and_resumed(tmp_path: Path, kind: str) -> None:
    needs(kind)
    trained = run.train(named(kind), tmp_path / "run")
    figures = evaluate.evaluate(tmp_path / "run", trust=True)
    assert figures[KINDS[kind][2]] > 0.9  # brightness and degrees tell the classes
    loaded = saved_run.load_run(tmp_path / "run", trust=True)
    for name, weight in trained.encoder.state_dict().items():
        assert torch.equal(loaded.encoder.state_dict()[name], weight)
    for read in (evaluate.evaluate, saved_run.load_run):
        with pytest.raises(ValueError, match=r"own_parts:\w+' is code that the folder asks to run: .*--trust"):
            read(tmp_path / "run")
    run.train(named(kind), tmp_path / "run", resume=True, trust=True)
    with pytest.raises(ValueError, match="--trust"):
        run.train(named(kind), tmp_path / "run", resume=True)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_passed_as_objects_are_trained_evaluated_and_resumed(tmp_path: Path, kind: str) -> None:
    needs(kind)
    given = objects(kind)
    before = {name: weight.clone() for name, weight in given["encoder"].state_dict().items()}
    trained = run.train(plain(kind), tmp_path / "run", **given)
    assert trained.encoder is given["encoder"]
    assert any(not torch.equal(weight, before[name]) for name, weight in trained.encoder.state_dict().items())
    written = recipe.load(tmp_path / "run" / "recipe.yaml")
    assert written.data.source == written.views.preset == written.encoder.name == GIVEN  # type: ignore[attr-defined]

    again = objects(kind)
    figures = evaluate.evaluate(tmp_path / "run", **again)
    assert figures[KINDS[kind][2]] > 0.9
    for name, weight in trained.encoder.state_dict().items():  # the weights of the run, not those of the object
        assert torch.equal(again["encoder"].state_dict()[name].cpu(), weight.cpu())
    run.train(None, tmp_path / "run", resume=True, **objects(kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", KEYS)
def test_a_missing_object_is_named(tmp_path: Path, kind: str, part: str) -> None:
    needs(kind)
    run.train(plain(kind), tmp_path / "run", **objects(kind))
    files = {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()}
    others = {name: given for name, given in objects(kind).items() if name != part}
    message = f"the {part} of this run (was|were) given in Python: pass {part}="
    with pytest.raises(ValueError, match=message):
        evaluate.evaluate(tmp_path / "run", **others)
    with pytest.raises(ValueError, match=message):
        run.train(None, tmp_path / "run", resume=True, **others)
    if part != "data":  # a finished run is loaded without its data
        with pytest.raises(ValueError, match=message):
            saved_run.load_run(tmp_path / "run", **others)
    assert {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()} == files


def test_other_data_are_evaluated_although_the_own_data_are_passed(tmp_path: Path) -> None:
    given = objects("images")
    run.train(plain("images"), tmp_path / "run", **given)
    figures = evaluate.evaluate(tmp_path / "run", "digits", **given)
    assert figures == evaluate.evaluate(tmp_path / "run", "digits", views=given["views"], encoder=given["encoder"])
    assert figures != evaluate.evaluate(tmp_path / "run", **given)


def test_an_image_set_and_a_mapping_train_to_the_same_weights_as_a_function(tmp_path: Path) -> None:
    train, test = (own_parts.images(split) for split in ("train", "test"))
    assert train is not None
    assert test is not None
    as_sets = {
        split: ImageSet(torch.from_numpy(pixels)[:, None], torch.from_numpy(labels), ("0", "1"))
        for split, (pixels, labels) in (("train", train), ("test", test))
    }
    states = []
    for number, data in enumerate((own_parts.images, {"train": train, "test": test}, as_sets)):
        result = run.train(plain("images"), tmp_path / str(number), data=data)
        states.append(result.encoder.state_dict())
        assert result.metrics["knn"] > 0.5
    for state in states[1:]:
        assert all(torch.equal(weight, state[name]) for name, weight in states[0].items())


REFUSED: dict[str, tuple[list[str], dict[str, Any], str]] = {
    "an encoder of other images": ([], {"encoder": nn.Linear(3, 3)}, "the encoder does not take an image"),
    "views of another shape": (
        [],
        {"views": lambda images, generator, views=2, **layout: images.float()[:, :, :4].repeat(views, 1, 1, 1)},
        "a forward pass of 2 samples failed",
    ),
    "views that return nothing": ([], {"views": lambda *given, **more: None}, "a forward pass of 2 samples failed"),
    "a plain encoder for two views": (
        ["method=cmc", "objective.preset=instance_discrimination"],
        {"encoder": own_parts.image_encoder()},
        "method=cmc needs an encoder of two views",
    ),
    "data that are no images": ([], {"data": [1, 2]}, "data of type list cannot be read as images"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_objects_that_do_not_fit_are_refused_before_anything_is_written(tmp_path: Path, case: str) -> None:
    overrides, given, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        run.train(recipe.load({}, [*BRIEF, *overrides]), tmp_path / "run", **given)
    assert list(tmp_path.iterdir()) == []


def test_graph_objects_that_do_not_fit_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    needs("graphs")
    settings = recipe.load({}, [*BRIEF, "method=infograph", "objective.preset=infograph"])
    for given, message in (
        ({"views": own_parts.NoisyFeatures()}, "method=infograph makes no views: leave out views="),
        ({"encoder": nn.Linear(1, 4)}, "a graph encoder must have an attribute features"),
        ({"data": 3}, "data of type int cannot be read as graphs"),
    ):
        with pytest.raises(ValueError, match=message):
            run.train(settings, tmp_path / "run", **{"data": own_parts.graphs, **given})  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_the_dry_run_changes_no_weight_no_memory_and_no_draw() -> None:
    settings = recipe.load(recipe.find("digits-moco"), ["trainer.batch_size=16", "memory.queue=64"])
    train_set = build.data(settings)
    module = build.method(settings, train_set)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    drawn = torch.get_rng_state()
    assert build.dry_run(settings, module, train_set) == settings.encoder.outputs  # type: ignore[attr-defined]
    assert torch.equal(torch.get_rng_state(), drawn)
    assert module.training
    assert module.noted is None
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_an_automatic_batch_size_is_a_power_of_two_with_four_steps_per_epoch() -> None:
    for samples in range(8, 2000):
        size = build.auto_batch_size(samples)
        assert size & (size - 1) == 0
        assert samples // size >= 4
        assert size == 256 or samples // (2 * size) < 4  # the largest


def test_automatic_settings_are_written_and_read_as_auto() -> None:
    settings = recipe.load({}, ["trainer.batch_size=auto", "trainer.precision=auto"])
    assert recipe.load(yaml.safe_load(recipe.dump(settings))) == settings
    assert "batch_size: auto" in recipe.dump(settings)
    assert settings.with_batch_size(64).trainer.batch_size == 64
    assert recipe.load({}).with_batch_size(64).trainer.batch_size == 256
    expected = "bf16-mixed" if torch.cuda.is_available() else "32-true"
    assert build.resolved(settings).trainer.precision == expected
    for wrong in ("0", "automatic", "1.5"):
        with pytest.raises(ValueError, match=r"trainer\.batch_size must be"):
            recipe.load({}, [f"trainer.batch_size={wrong}"])


def test_processes_that_do_not_gather_are_refused_and_not_ignored() -> None:
    settings = recipe.load({"objective": {"preset": "simclr", "gather": False}})
    assert build.loss(settings).gather is False
    with pytest.raises(ValueError, match=r"objective\.gather=false is not used by recipes: the 2 processes"):
        build.loss(settings, processes=2)
    for gather in ({}, {"gather": True}):
        assert build.loss(recipe.load({"objective": {"preset": "simclr", **gather}}), processes=2).gather is True
