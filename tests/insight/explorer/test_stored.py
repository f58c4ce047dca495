"""What the page stores: packed features, thumbnails and texts within their size, and the map."""

import json

import numpy as np
import pytest
import torch

from hardneg.insight.explorer.embedded import GivenSamples
from hardneg.insight.explorer.stored import pack, page_data, principal_map, unpack

SETTINGS = [{"temperature": 0.5}, {"temperature": 0.5}]


def cosines(rows: torch.Tensor) -> torch.Tensor:
    unit = torch.nn.functional.normalize(rows.double(), dim=1)
    return unit @ unit.T


@pytest.mark.parametrize(
    ("allowed", "dtype", "dim", "tolerance"),
    [(10**6, "float32", 24, 1e-6), (8000, "float16", 24, 2e-3), (3300, "float16", 12, 0.03)],
)
def test_packed_features_have_the_given_cosines_and_fit(allowed: int, dtype: str, dim: int, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(100, 24, generator=generator) * torch.tensor([3.0, 0.1]).repeat_interleave(12)
    packed = pack([features], allowed)
    assert (packed.dtype, packed.dim) == (dtype, dim)
    assert len(packed.texts[0]) <= allowed + 4
    rows = unpack(packed.texts[0], packed.dtype, packed.dim)
    change = float((cosines(rows) - cosines(features)).abs().max())
    assert change < tolerance
    assert bool(packed.note) == (dtype == "float16")


def test_fewer_dimensions_keep_the_cosines_of_features_of_low_rank() -> None:
    generator = torch.Generator().manual_seed(0)
    for width in (64, 700):  # exact, and by subspace iteration
        features = torch.randn(120, 6, generator=generator) @ torch.randn(6, width, generator=generator)
        packed = pack([features], 120 * 2 * 10 * 4 // 3)
        assert packed.dim == 10
        rows = unpack(packed.texts[0], packed.dtype, packed.dim)
        assert float((cosines(rows) - cosines(features)).abs().max()) < 3e-3


def test_a_second_view_and_checkpoints_of_other_widths_are_stored_alike() -> None:
    generator = torch.Generator().manual_seed(0)
    features, second = torch.randn(2, 30, 8, generator=generator).unbind()
    other = torch.randn(30, 16, generator=generator)
    samples = GivenSamples(features, positives=second, checkpoints={"given": other}).checked()
    data = page_data(samples, SETTINGS, 0.9, 10, 10**6)
    stored = [unpack(each["features"], data["dtype"], data["dim"]) for each in data["checkpoints"]]
    assert data["dim"] == 16
    assert len(stored) == 2
    expected = torch.nn.functional.cosine_similarity(features, second)
    np.testing.assert_allclose(data["checkpoints"][0]["positives"], expected, atol=1e-6)
    assert data["checkpoints"][1]["positives"] is None
    torch.testing.assert_close(cosines(stored[1]), cosines(other), rtol=0, atol=1e-6)


def test_the_map_is_that_of_a_singular_value_decomposition() -> None:
    generator = torch.Generator().manual_seed(0)
    # Exact by the smaller side; of a large matrix by iteration, with a gap after the second component.
    for rows, width in ((50, 5), (50, 1100), (1100, 1050)):
        scales = torch.ones(width)
        scales[:2] = torch.tensor([9.0, 5.0])
        features = torch.randn(rows, width, generator=generator) * scales
        points, shares = principal_map(features)
        unit = torch.nn.functional.normalize(features.double(), dim=1)
        left, values, _ = torch.linalg.svd(unit - unit.mean(dim=0), full_matrices=False)
        expected = left[:, :2] * values[:2]
        tolerance = 1e-9 if rows == 50 else 1e-4
        np.testing.assert_allclose(points.abs(), expected.abs(), atol=tolerance)
        np.testing.assert_allclose(shares, values[:2] ** 2 / (values**2).sum(), atol=tolerance)
    points, shares = principal_map(torch.ones(4, 1))
    assert points.shape == (4, 2)
    assert shares == [0.0, 0.0]


def test_thumbnails_and_texts_shrink_to_their_share() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (60, 64, 64, 3), dtype=torch.uint8, generator=generator)  # noise: the largest files
    texts = ["\u00e4" * 400] * 60
    samples = GivenSamples(torch.randn(60, 4, generator=generator), images=images, texts=texts).checked()
    sizes = {}
    for allowed in (10**6, 200_000):
        data = page_data(samples, SETTINGS, 0.9, 10, allowed)
        sizes[allowed] = (len(json.dumps(data["thumbnails"])), len(data["texts"][0]))
        assert sizes[allowed][0] <= 0.46 * allowed
    assert sizes[10**6][1] == 301
    assert sizes[200_000][1] == 151
    assert sizes[200_000][0] < sizes[10**6][0] / 2


def test_suspects_hold_pairs_of_one_label_and_of_two() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(60) % 3
    features = torch.eye(5)[labels] + 0.5 * torch.randn(60, 5, generator=generator)
    pairs = page_data(GivenSamples(features, labels=labels).checked(), SETTINGS, 0.9, 40, 10**6)["suspects"]
    same = [bool(labels[one] == labels[other]) for one, other, _, _ in pairs]
    assert same.count(False) >= 20
    assert same.count(True) >= 10
    scores = [score for _, _, score, _ in pairs]
    assert scores == sorted(scores, reverse=True)


def test_long_names_of_classes_leave_room_for_the_samples() -> None:
    samples = GivenSamples(torch.randn(50, 4), labels=[f"{row} {'x' * 10**5}" for row in range(50)]).checked()
    found = page_data(samples, SETTINGS, 0.9, 10, 10**6)
    assert len(json.dumps(found)) < 10**6
    assert len(set(found["classes"])) == 50


def test_images_of_another_type_are_an_error_that_names_it() -> None:
    samples = GivenSamples(torch.randn(3, 4), images=[torch.rand(3, 8, 8)] * 3).checked()
    with pytest.raises(ValueError, match=r"images must hold uint8 of shape \(C, H, W\), got torch.float32"):
        page_data(samples, SETTINGS, 0.9, 10, 10**6)
