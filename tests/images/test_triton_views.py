"""The Triton kernels for views against the tensor operations, interpreted and, if there is one, on a GPU."""

import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import children
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from images import interpreter
from interpreter import compiled
from torch import Tensor
from torch.testing import assert_close

from hardneg.images.resampling import crop_boxes
from hardneg.images.views import NUMBERS, ORDERS, ImageViews, color_order, moco_views, simclr_views
from hardneg.randomness import generator

Make = Callable[..., Tensor]
PROGRAMS = "hardneg.images.triton_programs"
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is for Linux only")
NORMAL: dict[str, Any] = {"mean": (0.5, 0.4, 0.3), "std": (0.5, 0.8, 0.7)}
ALMOST = 1 - 2**-24  # the largest float32 below 1 that torch.rand returns


@pytest.fixture(scope="module")
def make() -> Iterator[Make]:
    """`triton_views.make_views`, interpreted."""
    with interpreter.process(interpret=True) as call:

        def fused(
            views: ImageViews, images: Tensor, uniform: Tensor, seed: int = 0, first: int = 0, last: bool = False
        ) -> Tensor:
            made: Tensor = call(interpreter.make_views, views, images, uniform, seed, first, last)
            return made

        yield fused


def random_images(batch: int, height: int, width: int, channels: int = 3, seed: int = 0) -> Tensor:
    """uint8 noise: adjacent pixels differ, so that a wrong index changes the result."""
    return torch.randint(0, 256, (batch, channels, height, width), dtype=torch.uint8, generator=generator("cpu", seed))


def numbers(views: int, total: int, seed: int = 0) -> Tensor:
    return torch.rand(NUMBERS, views, total, generator=generator("cpu", seed, 1))


@needs_triton
@pytest.mark.parametrize(
    ("views", "shape"),
    [
        (simclr_views(8), (2, 3, 8, 8)),
        (simclr_views(12, **NORMAL), (3, 3, 9, 14)),  # not a power of two, taller than wide and wider than tall boxes
        (ImageViews(7, **NORMAL), (2, 3, 16, 12)),  # downsampling: five pixels per side contribute to one
        (ImageViews(8, mean=(0.3,), std=(0.6,)), (2, 1, 10, 8)),
        (ImageViews(8, jitter=(0.8, 0.0, 0.4, 0.0), grey=0.5), (3, 3, 8, 8)),
        (ImageViews(34, blur=0.5, **NORMAL), (2, 3, 20, 18)),  # two tiles, the second one mostly masked
        (ImageViews(42, blur=1.0, blur_sigma=(0.5, 3.0)), (2, 1, 30, 30)),  # a blur radius of two pixels
    ],
)
def test_fused_views_equal_the_tensor_operations(make: Make, views: ImageViews, shape: tuple[int, ...]) -> None:
    images = random_images(*shape[:1], *shape[2:], channels=shape[1])
    uniform = numbers(2, shape[0] + 2)
    for same, channels_last in ((images, False), (images / 255, True)):
        found = make(views, same, uniform, 3, 1, channels_last)
        assert_close(found, views.from_uniform(same, uniform, 3, 1), atol=2e-5, rtol=0)
        assert found.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


@needs_triton
def test_color_operations_agree_in_every_order(make: Make) -> None:
    seeds = {color_order(seed): seed for seed in range(400)}
    assert len(seeds) == len(ORDERS)
    views = ImageViews(6, jitter=(0.8, 0.6, 0.9, 0.4), jitter_probability=1.0, grey=0.0)
    images, uniform = random_images(1, 6, 6), numbers(1, 1)
    found = torch.cat([make(views, images, uniform, seed) for seed in seeds.values()])
    expected = torch.cat([views.from_uniform(images, uniform, seed) for seed in seeds.values()])
    assert_close(found, expected, atol=1e-5, rtol=0)
    assert len(expected.unique(dim=0)) > 12  # most orders give different views; clipping makes some equal


@needs_triton
@settings(max_examples=25)
@given(
    drawn=st.lists(st.sampled_from([0.0, 0.5, ALMOST, 0.1, 0.7]), min_size=NUMBERS, max_size=NUMBERS),
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    size=st.integers(2, 9),
    ratio=st.sampled_from([(1.0, 1.0), (0.5, 2.0), (3.0, 4.0)]),
    scale=st.sampled_from([(0.81, 0.81), (0.05, 1.0), (1.0, 1.0)]),
)
def test_extreme_draws_and_tiny_images_agree(
    make: Make, drawn: list[float], height: int, width: int, size: int, ratio: Any, scale: Any
) -> None:
    # Boxes of one pixel, no box that fits, boxes at every edge.
    images, uniform = random_images(1, height, width), torch.tensor(drawn).view(NUMBERS, 1, 1)
    views = ImageViews(size, ratio=ratio, scale=scale, jitter=(0.4, 0.4, 0.4, 0.5))
    assert_close(make(views, images, uniform), views.from_uniform(images, uniform, 0), atol=1e-5, rtol=0)


@needs_triton
@pytest.mark.parametrize(("side", "scale"), [(5, 0.81), (7, 0.25)])  # 4.5 pixels become 4, and 3.5 too
def test_a_side_of_half_a_pixel_is_rounded_to_even(make: Make, side: int, scale: float) -> None:
    views = ImageViews(4, scale=(scale, scale), ratio=(1.0, 1.0), flip=0.0, jitter_probability=0.0, grey=0.0)
    images, uniform = random_images(1, side, side), torch.zeros(NUMBERS, 1, 1)
    assert_close(make(views, images, uniform), images[:, :, :4, :4] / 255, atol=1e-6, rtol=0)


@needs_triton
def test_a_flip_reverses_columns_and_pixels_outside_the_box_have_no_influence(make: Make) -> None:
    images, uniform = random_images(3, 12, 12).float() / 255, numbers(1, 3)
    straight, mirrored = (ImageViews(8, flip=flip, scale=(0.2, 0.4)) for flip in (0.0, 1.0))
    view = make(straight, images, uniform)
    assert_close(make(mirrored, images, uniform), view.flip(3), atol=1e-6, rtol=0)
    marked = torch.full_like(images, torch.nan)
    boxes = crop_boxes(uniform[:-9, 0], 12, 12, (0.2, 0.4), straight.ratio).int().tolist()
    for image, mark, (top, left, tall, wide) in zip(images, marked, boxes, strict=True):
        mark[:, top : top + tall, left : left + wide] = image[:, top : top + tall, left : left + wide]
    assert torch.equal(make(straight, marked, uniform), view)


@needs_triton
def test_an_empty_batch_has_no_views(make: Make) -> None:
    assert make(ImageViews(8, blur=0.5), random_images(0, 8, 8), numbers(2, 0)).shape == (0, 3, 8, 8)


@needs_triton
@pytest.mark.parametrize(("pixel", "channels"), [("u8", 3), ("fp32", 1)])
def test_kernels_compile_without_a_gpu(pixel: str, channels: int) -> None:
    # The interpreter accepts code that the compiler rejects.
    types = dict.fromkeys(["target", "source", "uniform", "settings"], "*fp32") | {"images": "*" + pixel}
    types |= dict.fromkeys(["batch", "total", "first", "stride", "before", "order"], "i32")
    shared = {"CHANNELS": channels, "SIZE": 32, "TRIES": 10, "CHANNELS_LAST": channels == 3, "BLOCK": 1024}
    crop = {"HEIGHT": 40, "WIDTH": 48, "TAPS": 3, "STANDARDIZED": True}
    with interpreter.process(interpret=False) as call:
        assert "make_view" in call(compiled, PROGRAMS, "make_view", types, shared | crop)
        for last in (False, True):
            assert "blur_tile" in call(compiled, PROGRAMS, "blur_tile", types, shared | {"RADIUS": 2, "LAST": last})


def test_views_on_a_cpu_do_not_import_triton() -> None:
    code = (
        "import sys, torch; from hardneg.randomness import generator; from hardneg.images.views import simclr_views;"
        "simclr_views(8)(torch.zeros(2, 3, 8, 8), generator('cpu', 0)); assert 'triton' not in sys.modules"
    )
    children.run([sys.executable, "-c", code], check=True)


def test_views_in_channels_last_are_the_same_views(monkeypatch: pytest.MonkeyPatch) -> None:
    images, views = random_images(6, 20, 20), moco_views(16, **NORMAL)
    expected = views(images, generator("cpu", 0), views=2)
    for cached in (1 << 20, 3 * 3 * 16**2):  # in one piece, and in several
        monkeypatch.setattr("hardneg.images.views.CACHED", cached)
        found = views(images, generator("cpu", 0), views=2, channels_last=True)
        assert found.is_contiguous(memory_format=torch.channels_last)
        assert_close(found, expected, atol=1e-6, rtol=0)


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("views", [simclr_views(32, **NORMAL), moco_views(96), simclr_views(28, scale=(0.3, 0.9))])
def test_views_on_a_gpu_equal_the_tensor_operations(views: ImageViews, channels_last: bool) -> None:
    images = random_images(64, 48, 40).cuda()
    for seed in range(4):
        draws = generator("cuda", seed)
        uniform = torch.rand(NUMBERS, 2, 70, generator=generator("cuda", seed), device="cuda")
        found = views(images, draws, views=2, first=3, total=70, channels_last=channels_last)
        expected = views.from_uniform(images, uniform, draws.initial_seed(), 3, channels_last)
        assert found.stride() == expected.stride()
        gaps = (found - expected).abs().amax(dim=(1, 2, 3))
        # A box whose side is within rounding of a half may differ by a pixel: once in 100 000 views or so.
        assert int((gaps > 1e-4).sum()) <= 1
