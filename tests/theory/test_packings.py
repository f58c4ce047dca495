"""Packings on the sphere against known ones."""

import numpy as np
import pytest

from hardneg.theory import packings


@pytest.mark.parametrize("classes", sorted(packings.TAMMES_3D)[:5])
def test_tammes_packings_have_their_known_distance(classes: int) -> None:
    found = packings.best_packing(classes, 3, average=False, starts=8)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1)
    assert packings.smallest_distance(found) == pytest.approx(packings.TAMMES_3D[classes], abs=1e-6)


def test_five_points_in_space_have_the_average_of_the_closed_form() -> None:
    # A pole and a square at height −h: (2 + 2h + 4·2(1 − h²))/5 is largest at h = 1/8, where it is 81/40.
    height = 1 / 8
    square = [[np.sqrt(1 - height**2) * x for x in side] + [-height] for side in ((1, 0), (0, 1), (-1, 0), (0, -1))]
    assert packings.average_nearest(np.array([[0.0, 0.0, 1.0], *square])) == pytest.approx(81 / 40, abs=1e-12)
    found = packings.best_packing(5, 3, average=True, starts=6)
    assert packings.average_nearest(found) == pytest.approx(81 / 40, abs=1e-7)


@pytest.mark.parametrize(("classes", "dim"), [(2, 2), (3, 2), (4, 3), (5, 4)])
def test_a_simplex_solves_both_problems(classes: int, dim: int) -> None:
    for average in (True, False):
        found = packings.best_packing(classes, dim, average, starts=4)
        assert packings.smallest_distance(found) == pytest.approx(2 * classes / (classes - 1), abs=1e-6)


def test_a_prior_weights_the_classes() -> None:
    vectors = np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])
    close = np.array([[1.0, 0.0], [-1.0, 0.0], [0.6, 0.8]])
    assert packings.average_nearest(close, np.array([0.0, 1.0, 0.0])) == pytest.approx(3.2)
    assert packings.average_nearest(vectors, np.array([0.5, 0.5, 0.0])) == pytest.approx(2.0)
    prior = np.array([0.05, 0.9, 0.05])  # the second class is kept far from both others, at their cost
    found = packings.best_packing(3, 2, True, 6, prior=prior)
    assert packings.average_nearest(found, prior) >= 3.0 - 1e-6
    assert packings.squared_distances(found)[1].min() > 3.1


@pytest.mark.parametrize("arguments", [(1, 3), (3, 1), (3, 3, True, 0)])
def test_bad_arguments_are_named(arguments: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"(classes|dim|starts) must be a whole number"):
        packings.best_packing(*arguments, **({"average": True} if len(arguments) == 2 else {}))  # type: ignore[arg-type]
