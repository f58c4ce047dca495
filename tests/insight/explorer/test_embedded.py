"""Samples of the explorer: labels of every kind, subsets, and one clear error for each mistake."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hardneg.insight.explorer.embedded import GivenSamples, class_numbers, image_tensor


@pytest.mark.parametrize(
    ("labels", "numbers", "names"),
    [
        ([2, 0, -1, 2], [1, 0, -1, 1], ["0", "2"]),
        (np.array([2.0, np.nan, 5.0]), [0, -1, 1], ["2", "5"]),
        (["b", None, "", "a"], [1, -1, -1, 0], ["a", "b"]),
        (["10", "9", "-1"], [1, 0, -1], ["9", "10"]),  # texts of numbers, as a file of lines has them
        (["007", "7", "-1"], [1, 2, 0], ["-1", "007", "7"]),  # as numbers, two of them would be one class
        (["--5", "5"], [0, 1], ["--5", "5"]),
        (["9" * 5000, "1"], [1, 0], ["1", "9" * 5000]),
        ([2**80, 1], [1, 0], ["1", str(2**80)]),
        (torch.tensor([-1, -1]), [-1, -1], []),
    ],
)
def test_labels_are_numbered_and_unknown_ones_are_minus_1(labels: object, numbers: list[int], names: list[str]) -> None:
    found, classes = class_numbers(labels)  # type: ignore[arg-type]
    assert found.tolist() == numbers
    assert classes == names


@given(st.lists(st.one_of(st.none(), st.integers(-3, 5)), min_size=1), st.integers(0, 3))
@settings(max_examples=50, deadline=None)
def test_equal_labels_and_only_these_have_one_number(labels: list[int | None], named: int) -> None:
    numbers, names = class_numbers(labels, ["zero", "one", "two"][:named])
    for one, first in zip(labels, numbers.tolist(), strict=True):
        assert (first < 0) == (one is None or one < 0)
        for other, second in zip(labels, numbers.tolist(), strict=True):
            if first >= 0 and second >= 0:
                assert (one == other) == (first == second)
    assert len(set(names)) == len(names) == len({number for number in numbers.tolist() if number >= 0})


def test_a_subset_keeps_everything_of_its_samples_together() -> None:
    rows = torch.arange(1, 51, dtype=torch.float32)
    samples = GivenSamples(
        rows[:, None].repeat(1, 3), labels=rows.long(), texts=[f"text {row:.0f}" for row in rows],
        images=rows.to(torch.uint8)[:, None, None].repeat(1, 2, 2), ids=[f"id {row:.0f}" for row in rows],
        positives=rows[:, None].repeat(1, 3), checkpoints={"x": rows[:, None]}, guide=rows[:, None],
    ).checked()  # fmt: skip
    part = samples.subset(20, seed=1)
    assert (len(part), part.total) == (20, 50)
    assert part.labels is not None
    assert part.images is not None
    assert part.positives is not None
    assert part.guide is not None
    assert part.texts is not None
    for row in range(20):
        number = int(part.features[row, 0])
        assert part.classes[int(part.labels[row])] == str(number)
        assert (part.texts[row], part.ids[row]) == (f"text {number}", f"id {number}")
        assert int(part.images[row].max()) == number  # type: ignore[union-attr]
        values = (part.positives[row, 0], part.checkpoints["x"][row, 0], part.guide[row, 0])
        assert [int(value) for value in values] == [number] * 3
    assert samples.subset(20, seed=1).ids == part.ids
    assert samples.subset(20, seed=2).ids != part.ids
    assert part.subset(10).total == 50


@pytest.mark.parametrize("shape", [(2, 5, 7), (2, 5, 7, 3), (2, 3, 5, 7), (2, 5, 7, 1), (2, 1, 5, 7)])
def test_images_of_any_layout_become_channels_first(shape: tuple[int, ...]) -> None:
    found = image_tensor(np.zeros(shape, np.uint8))
    assert found.shape[1] in (1, 3)
    assert found.shape[2:] == (5, 7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": [0, 1]}, "labels has 2 entries, but features 3 rows"),
        ({"labels": [0, 1, 0.5]}, r"labels\[2\] must be a whole number or a text, got 0.5"),
        ({"labels": [0, "a", 1]}, "mixes numbers and texts"),
        ({"labels": [True, False, True]}, "must be a whole number"),
        ({"labels": [0.0, 1.0, float("inf")]}, r"labels\[2\] must be a whole number or a text, got inf"),
        ({"texts": ["a", "b"]}, "texts has 2 entries"),
        ({"texts": ["a", "b", 3]}, r"texts\[2\] must be a text, got int"),
        ({"ids": [1, 1, 2]}, "ids holds 1 twice"),
        ({"ids": [1, "1", 2]}, "ids holds 1 twice"),  # the same id in a file of pairs
        ({"ids": [1.5, 1, 2]}, "ids must hold whole numbers or texts, got 1.5"),
        ({"positives": torch.ones(3, 2)}, r"positives must have the shape \(3, 4\)"),
        ({"positives": torch.ones(2, 4)}, "positives has 2 rows"),
        ({"checkpoints": {"a": torch.ones(2, 4)}}, r"checkpoints\['a'\] has 2 rows"),
        ({"guide": torch.full((3, 4), torch.nan)}, "guide holds NaN or inf"),
        ({"images": torch.ones(3, 4)}, "images must be uint8"),
        ({"images": torch.ones(2, 4, 4, dtype=torch.uint8)}, "images has 2 entries"),
    ],
)
def test_a_mistake_is_an_error_that_names_the_argument(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GivenSamples(torch.ones(3, 4), **options).checked()  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 2 samples"):
        GivenSamples(torch.ones(1, 4)).checked()
