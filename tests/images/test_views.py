"""Views against PIL, colorsys, explicit loops and torchvision's algorithm of crops, written out."""

import colorsys
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from scipy import stats
from torch import Tensor
from torch.testing import assert_close

from hardneg.images.color import adjust_brightness, adjust_contrast, adjust_hue, adjust_saturation
from hardneg.images.resampling import transposed
from hardneg.images.views import (
    ADJUSTMENTS,
    ORDERS,
    TRIES,
    ImageViews,
    crop_boxes,
    crop_resize,
    gaussian_blur,
    lab_split,
    luma,
    moco_views,
    rgb_to_lab,
    simclr_views,
)
from hardneg.randomness import generator

LEVEL = 1 / 255
PLAIN: dict[str, Any] = {"flip": 0.0, "jitter_probability": 0.0, "grey": 0.0, "scale": (1.0, 1.0), "ratio": (1.0, 1.0)}


def photographs(batch: int, height: int, width: int, channels: int = 3, seed: int = 0) -> Tensor:
    """Smooth colours with noise, uint8: unlike pure noise, they leave room between clipped and unclipped."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[0:height, 0:width] / max(height, width)
    waves = rng.uniform(1, 9, (batch, channels, 2))
    phase = waves[..., :1, None] * rows + waves[..., 1:, None] * columns + rng.uniform(0, 6, (batch, channels, 1, 1))
    values = 128 + 110 * np.sin(phase) + rng.normal(0, 20, phase.shape)
    return torch.from_numpy(values.clip(0, 255).astype(np.uint8))


def to_pil(image: Tensor) -> Image.Image:
    """A picture of a uint8 tensor (3, H, W)."""
    return Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())


def from_pil(picture: Image.Image) -> Tensor:
    """Floats (C, H, W) in [0, 1]."""
    array = np.asarray(picture, dtype=np.float32) / 255
    return torch.from_numpy(array if array.ndim == 3 else array[..., None]).permute(2, 0, 1)


# Crops


@pytest.mark.parametrize("size", [32, 24, 7])  # enlarging some boxes, shrinking others
def test_crop_resize_equals_pils_crop_and_bilinear_resize(size: int) -> None:
    images = photographs(6, 40, 56)
    boxes = torch.tensor(
        [[0, 0, 40, 56], [3, 5, 32, 32], [10, 20, 9, 13], [39, 55, 1, 1], [0, 16, 40, 40], [8, 0, 17, 50]]
    )
    flipped = torch.tensor([False, True, False, True, True, False])
    views = crop_resize(images / 255, boxes.float(), size, flipped)
    for image, (top, left, height, width), mirror, view in zip(images, boxes.tolist(), flipped, views, strict=True):
        cut = to_pil(image).crop((left, top, left + width, top + height))
        expected = from_pil(cut.resize((size, size), Image.Resampling.BILINEAR))
        assert_close(view, expected.flip(2) if mirror else expected, atol=1.01 * LEVEL, rtol=0)  # PIL rounds each pass


def test_crop_of_the_whole_image_at_its_size_changes_nothing() -> None:
    images = torch.rand(3, 3, 20, 20)
    whole = torch.tensor([[0.0, 0.0, 20.0, 20.0]]).expand(3, 4)
    assert_close(crop_resize(images, whole, 20, torch.zeros(3, dtype=torch.bool)), images)


def test_pixels_outside_the_box_have_no_influence() -> None:
    images = torch.rand(1, 3, 16, 16)
    boxes, flipped = torch.tensor([[4.0, 5.0, 6.0, 7.0]]), torch.tensor([False])
    marked = torch.full_like(images, 1e6)
    marked[:, :, 4:10, 5:12] = images[:, :, 4:10, 5:12]
    assert_close(crop_resize(marked, boxes, 12, flipped), crop_resize(images, boxes, 12, flipped))


@pytest.mark.parametrize("shape", [(1, 5, 3), (4, 1, 6), (3, 96, 33)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_transposed_matrices_are_those_of_numpy(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    matrices = torch.arange(math.prod(shape)).view(shape).to(dtype)
    for given in (matrices, matrices[:, :, 1:], matrices[0].expand(2, -1, -1)):
        assert np.array_equal(transposed(given).numpy(), given.numpy().swapaxes(1, 2))


def torchvision_box(
    rng: random.Random, height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[int, int, int, int]:
    """RandomResizedCrop.get_params, written out for one image."""
    for _ in range(10):
        target = height * width * rng.uniform(*scale)
        aspect = math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))
        w, h = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            return rng.randint(0, height - h), rng.randint(0, width - w), h, w
    if width / height < min(ratio):
        w, h = width, round(width / min(ratio))
    elif width / height > max(ratio):
        w, h = round(height * max(ratio)), height
    else:
        w, h = width, height
    return (height - h) // 2, (width - w) // 2, h, w


@pytest.mark.parametrize(
    ("height", "width", "scale", "ratio"),
    [
        (32, 32, (0.08, 1.0), (3 / 4, 4 / 3)),
        (96, 96, (0.2, 1.0), (3 / 4, 4 / 3)),
        (200, 120, (0.2, 1.0), (3 / 4, 4 / 3)),
        (40, 150, (0.5, 1.0), (3 / 4, 4 / 3)),  # the central box is often needed
        (150, 40, (0.5, 1.0), (3 / 4, 4 / 3)),
        (64, 64, (0.9, 1.0), (0.5, 2.0)),
    ],
)
def test_boxes_follow_torchvisions_law(
    height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float]
) -> None:
    count = 8000
    uniform = torch.rand(2 * TRIES + 2, count, generator=generator("cpu", 1))
    found = crop_boxes(uniform, height, width, scale, ratio).double().numpy()
    rng = random.Random(2)
    expected = np.array([torchvision_box(rng, height, width, scale, ratio) for _ in range(count)], dtype=float)
    assert (found == found.round()).all()
    assert (found[:, :2] >= 0).all()
    assert (found[:, 2:] >= 1).all()
    assert (found[:, :2] + found[:, 2:] <= (height, width)).all()
    for quantity in (
        lambda boxes: boxes[:, 2] * boxes[:, 3],
        lambda boxes: boxes[:, 3] / boxes[:, 2],
        lambda boxes: boxes[:, 0],
        lambda boxes: boxes[:, 1],
        lambda boxes: boxes[:, 0] / (height - boxes[:, 2] + 1),
    ):
        assert stats.ks_2samp(quantity(found), quantity(expected)).pvalue > 1e-3


def test_the_area_of_boxes_that_always_fit_is_uniform_and_their_ratio_log_uniform() -> None:
    uniform = torch.rand(2 * TRIES + 2, 20_000, generator=generator("cpu", 3))
    boxes = crop_boxes(uniform, 4000, 4000, (0.1, 0.5), (3 / 4, 4 / 3)).double().numpy()
    area = boxes[:, 2] * boxes[:, 3] / 4000**2
    log_ratio = np.log(boxes[:, 3] / boxes[:, 2])
    assert stats.kstest(area, stats.uniform(0.1, 0.4).cdf).pvalue > 1e-3
    edge = math.log(4 / 3)
    assert stats.kstest(log_ratio, stats.uniform(-edge, 2 * edge).cdf).pvalue > 1e-3


@pytest.mark.parametrize(("height", "width"), [(10, 100), (100, 10), (7, 3)])
def test_the_central_box_is_taken_when_nothing_fits(height: int, width: int) -> None:
    # The whole area at a ratio it does not have never fits.
    uniform = torch.rand(2 * TRIES + 2, 50, generator=generator("cpu", 0))
    ratio = (1.0, 1.0)
    expected = torchvision_box(random.Random(0), height, width, (1.0, 1.0), ratio)
    assert crop_boxes(uniform, height, width, (1.0, 1.0), ratio).unique(dim=0).tolist() == [list(expected)]


# Colours

FACTORS = [0.0, 0.6, 1.0, 1.4]


@pytest.mark.parametrize(
    ("adjust", "enhancer"),
    [
        (adjust_brightness, ImageEnhance.Brightness),
        (adjust_contrast, ImageEnhance.Contrast),
        (adjust_saturation, ImageEnhance.Color),
    ],
)
def test_colours_equal_pils_enhancers(adjust: Any, enhancer: Any) -> None:
    images = photographs(len(FACTORS), 20, 30)
    views = adjust(images / 255, torch.tensor(FACTORS))
    for image, factor, view in zip(images, FACTORS, views, strict=True):
        # PIL rounds the grey value (contrast's to a whole level) and the result.
        assert_close(view, from_pil(enhancer(to_pil(image)).enhance(factor)), atol=1.5 * LEVEL, rtol=0)


def test_luma_equals_pils_greyscale() -> None:
    images = photographs(2, 20, 30)
    for image, grey in zip(images, luma(images / 255), strict=True):
        assert_close(grey, from_pil(ImageOps.grayscale(to_pil(image))), atol=0.51 * LEVEL, rtol=0)


def test_hue_equals_colorsys() -> None:
    rng = np.random.default_rng(0)
    colours = np.concatenate(
        [
            rng.uniform(0, 1, (200, 3)),
            rng.integers(0, 3, (100, 3)) / 2,  # ties between channels, pure colours, black and white
            np.repeat(rng.uniform(0, 1, (20, 1)), 3, axis=1),  # greys
        ]
    )
    shifts = np.array([-0.5, -0.13, 0.0, 0.1, 0.37, 0.5])
    images = torch.from_numpy(colours.T).float().view(1, 3, -1, 1).repeat(len(shifts), 1, 1, 1)
    views = adjust_hue(images, torch.from_numpy(shifts).float())
    for shift, view in zip(shifts, views, strict=True):
        for colour, found in zip(colours, view[:, :, 0].T, strict=True):
            hue, saturation, value = colorsys.rgb_to_hsv(*colour)
            expected = colorsys.hsv_to_rgb((hue + shift) % 1, saturation, value)
            assert_close(found, torch.tensor(expected, dtype=torch.float32), atol=3e-6, rtol=0)


@pytest.mark.parametrize("adjust", ADJUSTMENTS)
def test_neutral_factors_change_nothing(adjust: Any) -> None:
    images = torch.rand(2, 3, 9, 9)
    neutral = torch.zeros(2) if adjust is adjust_hue else torch.ones(2)
    assert_close(adjust(images.clone(), neutral), images, atol=1e-6, rtol=0)


def test_jitter_probability_and_strengths_have_torchvisions_law() -> None:
    views = ImageViews(8, jitter=(0.4, 1.5, 0.2, 0.1), jitter_probability=0.75, grey=0.3, flip=0.4, blur=0.6)
    count = 20_000
    draws = views.draws(torch.rand(2 * TRIES + 11, count, generator=generator("cpu", 4)), 8, 8, seed=0)
    jittered = draws.colors[3] != 0
    for share, probability in (
        (jittered, 0.75),
        (draws.grayscaled, 0.3),
        (draws.flipped, 0.4),
        (draws.sigmas > 0, 0.6),
    ):
        assert stats.binomtest(int(share.sum()), count, probability).pvalue > 1e-3
    unchanged = draws.colors[:, ~jittered]
    assert (unchanged == torch.tensor([[1.0], [1.0], [1.0], [0.0]])).all()
    for factors, (low, high) in zip(
        draws.colors[:, jittered].numpy(), [(0.6, 1.4), (0.0, 2.5), (0.8, 1.2), (-0.1, 0.1)], strict=True
    ):
        assert stats.kstest(factors, stats.uniform(low, high - low).cdf).pvalue > 1e-3
    sigmas = draws.sigmas[draws.sigmas > 0].numpy()
    assert stats.kstest(sigmas, stats.uniform(0.1, 1.9).cdf).pvalue > 1e-3


def test_orders_of_the_colour_operations_are_uniform_over_seeds() -> None:
    views = ImageViews(8)
    uniform = torch.rand(2 * TRIES + 11, 1)
    orders = [views.draws(uniform, 8, 8, generator("cpu", 0, step).initial_seed()).order for step in range(4800)]
    assert stats.chisquare([orders.count(order) for order in ORDERS]).pvalue > 1e-3


def test_a_view_is_the_operations_in_the_drawn_order() -> None:
    images = photographs(5, 16, 16)
    views = ImageViews(16, jitter=(0.4, 0.4, 0.4, 0.2), jitter_probability=1.0, grey=0.5, blur=0.5)
    draws = views.draws(torch.rand(2 * TRIES + 11, 5, generator=generator("cpu", 6)), 16, 16, seed=1)
    expected = crop_resize(images / 255, draws.boxes, 16, draws.flipped)
    for which in draws.order:
        ADJUSTMENTS[which](expected, draws.colors[which])
    expected = torch.where(draws.grayscaled.bool()[:, None, None, None], luma(expected), expected)
    expected = gaussian_blur(expected, draws.sigmas, radius=1)
    assert_close(views.render(images, draws), expected, atol=1e-6, rtol=0)


# Blur


@pytest.mark.parametrize(("side", "radius"), [(9, 1), (12, 4), (5, 4)])
def test_blur_equals_a_loop_over_pixels(side: int, radius: int) -> None:
    sigmas = [0.1, 0.7, 2.0, 0.0]
    images = torch.rand(len(sigmas), 2, side, side, dtype=torch.float64)
    blurred = gaussian_blur(images, torch.tensor(sigmas, dtype=torch.float64), radius)
    for image, sigma, found in zip(images.numpy(), sigmas, blurred, strict=True):
        offsets = range(-radius, radius + 1)
        kernel = [math.exp(-(k**2) / (2 * sigma**2)) if sigma else float(k == 0) for k in offsets]
        padded = np.pad(image, ((0, 0), (radius, radius), (radius, radius)), mode="reflect")
        expected = np.zeros_like(image)
        for row in range(side):
            for column in range(side):
                for i, down in enumerate(kernel):
                    for j, right in enumerate(kernel):
                        expected[:, row, column] += down * right * padded[:, row + i, column + j] / sum(kernel) ** 2
        assert_close(found, torch.from_numpy(expected))


# Lab


@pytest.mark.parametrize(
    ("rgb", "lab"),
    [
        ((1, 1, 1), (100, 0, 0)),
        ((0, 0, 0), (0, 0, 0)),
        ((0.5, 0.5, 0.5), (53.389, 0, 0)),
        ((1, 0, 0), (53.24, 80.09, 67.20)),
        ((0, 1, 0), (87.74, -86.18, 83.18)),
        ((0, 0, 1), (32.30, 79.19, -107.86)),
    ],
)
def test_lab_of_known_colours(rgb: tuple[float, ...], lab: tuple[float, ...]) -> None:
    found = rgb_to_lab(torch.tensor(rgb, dtype=torch.float64).view(1, 3, 1, 1)).flatten()
    assert_close(found, torch.tensor(lab, dtype=torch.float64), atol=0.03, rtol=0)


def test_lab_split_fills_minus_one_to_one_and_keeps_lightness_apart() -> None:
    steps = torch.linspace(0, 1, 17)
    colours = torch.stack(torch.meshgrid(steps, steps, steps, indexing="ij")).view(1, 3, 17, -1)
    lightness, colour = lab_split(colours)
    assert lightness.shape == (1, 1, 17, 289)
    assert colour.shape == (1, 2, 17, 289)
    for channel in (lightness[0, 0], colour[0, 0], colour[0, 1]):
        assert_close(torch.stack(torch.aminmax(channel)), torch.tensor([-1.0, 1.0]), atol=2e-3, rtol=0)
    greys = lab_split(steps.view(1, 1, 1, -1).expand(1, 3, 1, -1))[1]
    assert_close(greys, greys[..., :1].expand_as(greys), atol=1e-5, rtol=0)


# Views


@pytest.mark.parametrize("views", [simclr_views(24), moco_views(40), ImageViews(17, blur=0.3)])
def test_the_same_seed_draws_the_same_views_and_another_seed_others(views: ImageViews) -> None:
    images = photographs(8, 32, 36)
    first, again, other = (views(images, generator("cpu", 0, step, 1)) for step in (5, 5, 6))
    assert first.shape == (8, 3, views.size, views.size)
    assert first.dtype == torch.float32
    assert torch.equal(first, again)
    assert (first - other).abs().amax(dim=(1, 2, 3)).min() > 0.01


def test_samples_are_drawn_apart_from_each_other() -> None:
    same = photographs(1, 32, 32).expand(16, -1, -1, -1)
    views = simclr_views(32)(same, generator("cpu", 0))
    gaps = (views[:, None] - views[None]).abs().amax(dim=(2, 3, 4)) + torch.eye(16)
    assert gaps.min() > 0.01


def test_a_view_does_not_depend_on_the_other_images() -> None:
    images = photographs(8, 32, 32)
    others = images.clone()
    others[1:] = photographs(7, 32, 32, seed=9)
    views = moco_views(40)
    first, second = (views(batch, generator("cpu", 3)) for batch in (images, others))
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])


def test_flip_mirrors_the_view() -> None:
    images = photographs(64, 16, 16)
    views = ImageViews(16, **{**PLAIN, "flip": 0.5})(images, generator("cpu", 0))
    straight = (views - images / 255).abs().amax(dim=(1, 2, 3)) < 1e-5
    mirrored = (views - images.flip(3) / 255).abs().amax(dim=(1, 2, 3)) < 1e-5
    assert (straight ^ mirrored).all()
    assert 0 < mirrored.sum() < 64


def test_without_randomness_a_view_is_the_image_normalised() -> None:
    images = photographs(4, 16, 16)
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
    views = ImageViews(16, **PLAIN, mean=mean, std=std)(images, generator("cpu", 0))
    expected = (images / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    assert_close(views, expected, atol=1e-5, rtol=0)


def test_uint8_floats_and_channels_last_give_the_same_views() -> None:
    images = photographs(4, 20, 20)
    views = simclr_views(16)
    expected = views(images, generator("cpu", 0))
    for same in (images / 255, images.double() / 255, images.to(memory_format=torch.channels_last)):
        before = same.clone()
        assert_close(views(same, generator("cpu", 0)), expected, atol=1e-5, rtol=0)
        assert torch.equal(same, before)


def test_one_channel_keeps_the_drawn_geometry_and_skips_colours() -> None:
    digits = photographs(32, 28, 28, channels=1)
    settings: dict[str, Any] = {"jitter": (0.4, 0.4, 0.0, 0.0), "blur": 0.5}
    found = ImageViews(28, **settings)(digits, generator("cpu", 0))
    assert found.shape == (32, 1, 28, 28)
    colour = ImageViews(28, grey=0.0, **settings)(digits.expand(-1, 3, -1, -1), generator("cpu", 0))
    assert_close(found.expand(-1, 3, -1, -1), colour, atol=1e-5, rtol=0)
    saturated = ImageViews(28, jitter=(0.4, 0.4, 0.4, 0.1), blur=0.5)(digits, generator("cpu", 0))
    assert_close(found, saturated)


def test_a_batch_too_large_for_the_cache_gives_the_same_views(monkeypatch: pytest.MonkeyPatch) -> None:
    images, views = photographs(10, 32, 32), moco_views(40)
    expected = views(images, generator("cpu", 0))
    monkeypatch.setattr("hardneg.images.views.CACHED", 3 * 3 * 40**2)
    assert_close(views(images, generator("cpu", 0)), expected, atol=1e-6, rtol=0)


def test_processes_that_share_a_batch_draw_what_one_process_draws() -> None:
    images, views = photographs(7, 32, 32), moco_views(40)
    whole = views(images, generator("cpu", 0), views=2).view(2, 7, 3, 40, 40)
    parts = [views(images[i : i + 3], generator("cpu", 0), views=2, first=i, total=7) for i in (0, 3, 6)]
    assert_close(torch.cat([part.view(2, -1, 3, 40, 40) for part in parts], dim=1), whole, atol=1e-6, rtol=0)


def test_two_views_of_a_batch_come_one_after_the_other_and_differ() -> None:
    images = photographs(6, 16, 16)
    unchanged = ImageViews(16, **PLAIN)(images, generator("cpu", 0), views=2)
    assert_close(unchanged, torch.cat([images, images]) / 255, atol=1e-6, rtol=0)
    first, second = simclr_views(16)(images, generator("cpu", 0), views=2).chunk(2)
    assert (first - second).abs().amax(dim=(1, 2, 3)).min() > 0.01


def test_plain_images_are_standardised_and_left_as_they_were() -> None:
    images = photographs(2, 9, 9)
    views = ImageViews(9, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
    expected = (images / 255 - torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1)) / torch.tensor([0.2, 0.3, 0.4]).view(
        3, 1, 1
    )
    for same in (images, images / 255):
        before = same.clone()
        assert_close(views.plain(same), expected, atol=1e-5, rtol=0)
        assert torch.equal(same, before)


def test_an_empty_batch_gives_an_empty_batch() -> None:
    assert moco_views(40)(torch.zeros(0, 3, 8, 8), generator("cpu", 0)).shape == (0, 3, 40, 40)


def test_autocast_does_not_coarsen_the_views() -> None:
    images, views = photographs(4, 32, 32), moco_views(40)
    expected = views(images, generator("cpu", 0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(views(images, generator("cpu", 0)), expected)


def test_no_step_reads_a_value_back_from_the_device() -> None:
    # A tensor without storage raises as soon as the host asks for a value of it.
    views = ImageViews(40, blur=0.5, mean=(0.5,) * 3, std=(0.2,) * 3)
    images = torch.empty(4, 3, 32, 36, dtype=torch.uint8, device="meta")
    draws = views.draws(torch.empty(2 * TRIES + 11, 4, device="meta"), 32, 36, seed=0)
    assert views.render(images, draws).shape == (4, 3, 40, 40)
    assert lab_split(torch.empty(4, 3, 8, 8, device="meta"))[1].shape == (4, 2, 8, 8)


def test_presets_are_the_papers() -> None:
    assert simclr_views(224).jitter == (0.8, 0.8, 0.8, 0.2)
    assert simclr_views(32) == ImageViews(32, scale=(0.08, 1.0))
    assert simclr_views(96, strength=0.5, blur=0.0).jitter == (0.4, 0.4, 0.4, 0.1)
    assert moco_views(224) == ImageViews(224, blur=0.5)


# Errors


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 0}, r"size must be an integer ≥ 2 .*got 0"),
        ({"size": 32.0}, r"size must be an integer ≥ 2 .*got 32.0"),
        ({"scale": (0.0, 1.0)}, r"scale must be > 0 and ≤ 1, got 0"),
        ({"scale": (0.2, 1.5)}, r"scale must be > 0 and ≤ 1, got 1.5"),
        ({"scale": (1.0, 0.2)}, r"scale must hold the smaller value first, got \(1.0, 0.2\): swap them"),
        ({"scale": 0.2}, r"scale must hold 2 numbers, got 0.2"),
        ({"ratio": (0.0, 1.0)}, r"ratio must be > 0"),
        ({"ratio": (1.0, math.inf)}, r"ratio must be > 0 and ≤ 1e\+06, got inf"),
        ({"flip": 1.5}, r"flip \(a probability\) must be ≥ 0 and ≤ 1, got 1.5"),
        ({"grey": math.nan}, r"grey .*got nan"),
        ({"blur": -0.1}, r"blur .*got -0.1"),
        ({"jitter_probability": "often"}, r"jitter_probability .*got 'often'"),
        ({"jitter": (0.4, 0.4, 0.4)}, r"jitter must hold 4 numbers"),
        ({"jitter": (-0.4, 0.4, 0.4, 0.1)}, r"jitter must be ≥ 0.*got -0.4"),
        ({"jitter": (0.4, 0.4, 0.4, 0.6)}, r"jitter's hue, in turns, must be ≤ 0.5, got 0.6"),
        ({"blur_sigma": (0.0, 2.0)}, r"blur_sigma must be > 0"),
        ({"mean": (0.5, 0.5, 0.5)}, r"std must hold 3 numbers, got None"),
        ({"std": (0.5, 0.5, 0.5)}, r"mean must hold 3 numbers, got None"),
        ({"mean": (0.5,), "std": (0.2, 0.2, 0.2)}, r"std must hold 1 numbers"),
        ({"mean": (0.5,) * 3, "std": (0.2, 0.0, 0.2)}, r"std must be > 0, got 0"),
    ],
)
def test_bad_settings_are_refused_at_construction(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImageViews(**{"size": 32, **settings})


@pytest.mark.parametrize(("first", "total"), [(-1, 4), (3, 4), (0, 1)])
def test_a_part_beyond_the_whole_batch_is_refused(first: int, total: int) -> None:
    with pytest.raises(ValueError, match=rf"first must be from 0 to total − 2, got {first} of {total}"):
        ImageViews(8)(torch.zeros(2, 3, 8, 8), generator("cpu", 0), first=first, total=total)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.zeros((2, 3, 8, 8)), r"images must be a tensor .*got ndarray"),
        (torch.zeros(3, 8, 8), r"images must be a tensor \(B, C, H, W\).*got \(3, 8, 8\)"),
        (torch.zeros(2, 8, 8, 3), r"C = 1 or 3, got \(2, 8, 8, 3\): permute or slice it"),
        (torch.zeros(2, 3, 0, 8), r"got \(2, 3, 0, 8\)"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.int64), r"images must be uint8.*got torch.int64: convert"),
        (torch.zeros(2, 1, 8, 8), r"mean and std hold 3 numbers, images 1 channels"),
        (torch.zeros(2, 3, 8, 8, device="meta"), r"generator must be on the images' device meta, got one on cpu"),
    ],
)
def test_bad_images_are_refused(images: Any, message: str) -> None:
    views = ImageViews(8, mean=(0.5,) * 3, std=(0.2,) * 3)
    with pytest.raises(ValueError, match=message):
        views(images, generator("cpu", 0))
