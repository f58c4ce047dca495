"""The recipes of methods with a memory say what the papers say."""

import pytest

from hardneg.training import build, recipe

# Ring, section 5: "The temperature τ is set to 0.07. … We use a ResNet-18 encoder with a output dimension of 128. … In
# pretraining, we use SGD with learning rate 0.03, momentum 0.9 and weight decay 1e-4 for 300 epochs and batch size 256
# (128 for CMC). We drop the learning rate twice by a factor of 10 on epochs 200 and 250."
RING = {"ir": 256, "la": 256, "moco": 256, "cmc": 128}


@pytest.mark.parametrize(("name", "batch"), RING.items())
def test_ring_settings_are_those_of_its_section_five(name: str, batch: int) -> None:
    settings = recipe.load(recipe.find(f"cifar10-{name}"))
    assert settings.objective["temperature"] == 0.07
    assert (settings.encoder.name, settings.encoder.hidden, settings.encoder.outputs) == ("resnet18", 0, 128)
    optimizer = settings.optimizer
    assert (optimizer.name, optimizer.lr, optimizer.momentum, optimizer.weight_decay) == ("sgd", 0.03, 0.9, 1e-4)
    assert (optimizer.schedule, optimizer.drops) == ("step", (200, 250))
    assert (settings.trainer.epochs, settings.trainer.batch_size) == (300, batch)


@pytest.mark.parametrize("name", ["ir", "moco", "cmc"])
def test_the_ring_closes_over_the_first_hundred_epochs(name: str) -> None:
    # Appendix E: "slowly reducing … from 100% to 10% in 100 epochs and maintaining it constant at 10%"
    loss = build.loss(recipe.load(recipe.find(f"cifar10-{name}"), ["objective.preset=ring_nce"]))
    for epoch, (lower, upper) in {0: (0.0, 0.9), 50: (0.45, 0.945), 100: (0.9, 0.99), 300: (0.9, 0.99)}.items():
        assert loss.hardening[0].at(epoch / 300).percentiles() == pytest.approx((lower, upper))


def test_the_lesions_of_table_two_are_one_override_each() -> None:
    ring = ["objective.preset=ring_nce"]
    still = build.loss(recipe.load(recipe.find("cifar10-ir"), [*ring, "objective.anneal=none"]))
    assert still.hardening[0].at(0.0).percentiles() == pytest.approx((0.9, 0.99))
    ball = build.loss(recipe.load(recipe.find("cifar10-ir"), [*ring, "objective.upper=1"]))
    assert ball.hardening[0].at(1.0).percentiles() == pytest.approx((0.9, 1.0))


def test_hard_moco_settings_are_those_of_hcls_appendix() -> None:
    # HCL, appendix C.1: "MoCo-v2 with standard negative memory bank size N = 65536 …. Embeddings are trained for 200
    # epochs, with batch size 128."
    settings = recipe.load(recipe.find("cifar10-moco-hcl"))
    assert settings.memory.queue == 65536
    assert (settings.trainer.epochs, settings.trainer.batch_size) == (200, 128)
    assert settings.memory.momentum == 0.999


def test_moco_v3_settings_are_those_of_prosamplers_appendix() -> None:
    # Section 4.1: "a batch size of … 4096 for MoCo v3"; appendix E.1: LARS, 0.3 × B/256, temperature 0.1
    settings = recipe.load(recipe.find("imagenet-mocov3-prosampler"))
    assert settings.trainer.batch_size == 4096
    assert (settings.optimizer.name, settings.optimizer.lr) == ("lars", pytest.approx(0.3 * 4096 / 256))
    assert settings.objective["temperature"] == 0.1
    assert build.loss(settings).in_batch == "other"
