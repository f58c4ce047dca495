"""The lines that describe a run."""

import pytest

from hardneg.samplers import UniformBatchSampler
from hardneg.training import recipe
from hardneg.training.batches import Batches
from hardneg.training.callbacks.progress_lines import steps_of

PLANS = {
    (400, 256): "400 images, batch size 256: 1 step per epoch, 144 left out of each "
    "(trainer.batch_size=64: 6 steps, 16 left out)",
    (400, 64): "400 images, batch size 64: 6 steps per epoch, 16 left out of each",
    (512, 256): "512 images, batch size 256: 2 steps per epoch",
    (3, 2): "3 images, batch size 2: 1 step per epoch, 1 left out of each",
    (50_000, 256): "50,000 images, batch size 256: 195 steps per epoch, 80 left out of each",
}


@pytest.mark.parametrize(("size", "batch_size"), PLANS)
def test_the_plan_counts_the_samples_that_an_epoch_leaves_out(size: int, batch_size: int) -> None:
    batches = Batches(UniformBatchSampler(size, batch_size))
    text = steps_of(recipe.load({}, [f"trainer.batch_size={batch_size}"]), batches)
    assert text == PLANS[size, batch_size]
    epoch = [index for batch in batches for index in batch.tolist()]
    left = size - len(set(epoch))  # counted from the batches themselves
    assert (f"{left} left out of each" in text) == (left > 0)


def test_nothing_is_left_out_without_drop_last() -> None:
    settings = recipe.load({}, ["batches.drop_last=false"])
    batches = Batches(UniformBatchSampler(400, 256, drop_last=False))
    assert steps_of(settings, batches) == "400 images, batch size 256: 2 steps per epoch"
