"""An override that replaces the encoder, the preset or the method drops what only the replaced one had."""

import warnings

import pytest

from hardneg.losses.jsd import JSD
from hardneg.training import recipe


def load(name: str, *overrides: str) -> recipe.Recipe:
    return recipe.load(recipe.find(name), overrides)


def test_another_encoder_drops_the_options_that_it_does_not_have() -> None:
    with pytest.warns(UserWarning, match=r"name=tiny: encoder\.options\.stem=imagenet of the recipe is left out"):
        settings = load("my-images", "encoder.name=tiny")
    assert settings.encoder.options == {}
    assert settings.encoder.hidden == 512


def test_another_encoder_keeps_the_options_that_it_has() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load("my-images", "encoder.name=resnet50").encoder.options == {"stem": "imagenet"}
        assert load("my-images").encoder.options == {"stem": "imagenet"}


@pytest.mark.parametrize("name", ["transformer", "gru", "my_parts:encoder"])
def test_an_encoder_that_is_not_pretrained_drops_the_pooling(name: str) -> None:
    with pytest.warns(UserWarning, match=rf"^encoder\.name={name}: encoder\.pooling=cls of the recipe is left out$"):
        settings = load("sentences-wiki-simcse-prosampler", f"encoder.name={name}")
    assert recipe.tree_of(settings)["encoder"] == {"name": name, "options": {}, "pooling": None}


def test_another_pretrained_model_keeps_the_pooling() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        settings = load("sentences-wiki-simcse-prosampler", "encoder.name=roberta-base")
        again = recipe.load(recipe.tree_of(load("sentences-simcse", "encoder.options={}")), ["encoder.name=gru"])
    assert recipe.tree_of(settings)["encoder"]["pooling"] == "cls"
    assert recipe.tree_of(again)["encoder"] == {"name": "gru", "options": {}, "pooling": None}  # nothing to drop


def test_a_pooling_that_the_user_typed_stays_and_is_an_error_where_it_has_no_meaning() -> None:
    settings = load("sentences-wiki-simcse-prosampler", "encoder.name=gru", "encoder.pooling=mean")
    with pytest.raises(ValueError, match=r"encoder\.pooling=mean is for pretrained models: leave it out for gru"):
        settings.kind.encoder(settings.encoder, (1,))


def test_options_of_a_user_defined_encoder_are_those_typed() -> None:
    with pytest.warns(UserWarning, match="left out"):
        settings = load("my-images", "encoder.name=torch.nn:Flatten", "encoder.options.start_dim=1")
    assert settings.encoder.options == {"start_dim": 1}


def test_what_the_user_typed_is_never_dropped() -> None:
    assert load("my-images", "encoder.name=tiny", "encoder.options.stem=small").encoder.options == {"stem": "small"}
    with pytest.raises(ValueError, match=r"objective\.temperature is not an argument of infograph"):
        load("my-graphs", "method=infograph", "objective.temperature=0.5")
    with (
        pytest.warns(UserWarning, match=r"simclr: memory\.momentum=0\.9, memory\.split=8 of the recipe are"),
        pytest.raises(ValueError, match=r"memory\.queue is not used by method=simclr"),
    ):
        load("digits-moco", "method=simclr", "memory.queue=64")


def test_a_method_with_another_kind_of_loss_brings_its_preset() -> None:
    with pytest.warns(UserWarning, match=r"infograph: objective\.preset=graphcl, objective\.temperature=0\.2 of the "):
        settings = load("my-graphs", "method=infograph")
    assert settings.objective == {"preset": "infograph"}
    assert isinstance(settings.make_loss(), JSD)
    with pytest.warns(UserWarning, match=r"objective\.beta=1\.0"):
        back = load("mutag-infograph-hscl", "method=graphcl", "objective.temperature=0.3")
    assert back.objective["preset"] == "graphcl"
    assert back.objective["temperature"] == 0.3


def test_another_preset_drops_the_arguments_that_it_does_not_have() -> None:
    with pytest.warns(UserWarning, match=r"moco: objective\.beta=0\.2, objective\.tau_plus=0\.0 of the recipe"):
        assert load("cifar10-moco-hcl", "objective.preset=moco").objective == {"preset": "moco", "temperature": 0.2}


def test_another_method_drops_the_settings_of_the_memory_that_it_does_not_have() -> None:
    with pytest.warns(UserWarning, match=r"memory\.queue=1024"):
        settings = load("digits-moco", "method=simclr")
    assert recipe.tree_of(settings)["memory"] == {}
    assert settings.objective["preset"] == "moco"


def test_a_method_changes_no_loss_that_fits_it() -> None:
    assert load("digits-simclr", "method=moco").objective == load("digits-simclr").objective
    assert recipe.load({}, ["method=moco"]).objective == {"preset": "simclr"}
    assert recipe.load({}, ["method=infograph", "data.source=tu:MUTAG"]).objective == {"preset": "infograph"}


def test_a_recipe_file_alone_is_taken_as_it_is_written() -> None:
    with pytest.raises(ValueError, match=r"objective\.beta is not an argument of simclr"):
        recipe.load({"objective": {"preset": "simclr", "beta": 1.0}})
