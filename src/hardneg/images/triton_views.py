"""Random views on a GPU with Triton: crop, flip, colors, grayscale and standardization of a whole batch in one launch.

For a batch of small images, launching the operations of `ImageViews.from_uniform` one by one takes many times longer
than running them. Here one program computes one view, tile by tile, from the same random numbers. Results agree up to
rounding; a box whose side is within rounding of a half may differ by a pixel. Contrast needs the mean of the whole
view: a first pass over the tiles sums the luma and a second one computes the crop again, because reading a pixel twice
costs less than storing it. Blur takes two more launches, along rows and along columns.
"""

import math
from contextlib import nullcontext
from functools import lru_cache

import torch
import triton
from torch import Tensor

from hardneg.images import triton_programs
from hardneg.images.color import column
from hardneg.images.resampling import TRIES, central_box, taps
from hardneg.images.views import ImageViews, color_order

BLOCK = 1024  # maximum number of pixels of a tile
CONTRAST, NO_OPERATION = 1, 7  # codes of color operations, three bits each


def make_views(
    views: ImageViews, images: Tensor, uniform: Tensor, seed: int, first: int = 0, channels_last: bool = False
) -> Tensor:
    """The views of given random numbers, (views·B, C, size, size) float32: the same as `ImageViews.from_uniform`.

    views: the settings · images: (B, C, H, W) on a GPU · uniform: (NUMBERS, views, total) on the same
    device · seed, first, channels_last: see `ImageViews.from_uniform`
    """
    batch, channels, height, width = images.shape
    size, (_, copies, total) = views.size, uniform.shape
    shape = (copies * batch, channels, size, size)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    made = torch.empty(shape, dtype=torch.float32, device=images.device, memory_format=layout)
    if batch == 0:
        return made
    settings = column(_settings(views, channels, height, width, images.dtype == torch.uint8), images.device)
    before, order = _codes(tuple(which for which in color_order(seed) if views.adjusts(which, channels)))
    block = min(BLOCK, triton.next_power_of_2(size**2))
    blurs = views.blur > 0
    unblurred = torch.empty(shape, dtype=torch.float32, device=images.device) if blurs else made
    # Without fused multiply-add, boxes are rounded as by the tensor operations.
    options = {"BLOCK": block, "num_warps": max(1, block // 256), "enable_fp_fusion": False}
    with torch.cuda.device(images.device) if images.is_cuda else nullcontext():
        triton_programs.make_view[(copies * batch,)](
            *(images.contiguous(), unblurred, uniform, settings, batch, total, first, copies * total, before, order),
            CHANNELS=channels,
            HEIGHT=height,
            WIDTH=width,
            SIZE=size,
            TAPS=taps(height, width, size),
            TRIES=TRIES,
            CHANNELS_LAST=channels_last and not blurs,
            STANDARDIZED=not blurs,
            **options,
        )
        if blurs:
            intermediate = torch.empty_like(unblurred)
            grid = (copies * batch * channels, triton.cdiv(size**2, block))
            for source, target, last in ((unblurred, intermediate, False), (intermediate, made, True)):
                triton_programs.blur_tile[grid](
                    *(source, target, uniform, settings, batch, total, first, copies * total),
                    CHANNELS=channels,
                    SIZE=size,
                    RADIUS=views.blur_radius,
                    TRIES=TRIES,
                    CHANNELS_LAST=channels_last and last,
                    LAST=last,
                    **options,
                )
    return made


def _settings(views: ImageViews, channels: int, height: int, width: int, bytes_: bool) -> tuple[float, ...]:
    """The parameters that the kernels read by index: one tensor is faster to pass than 27 numbers."""
    area = height * width
    shortest, longest = (math.log(bound) / 2 for bound in views.ratio)
    lowest, spans = views.color_range()
    return (
        *(views.scale[0] * area, (views.scale[1] - views.scale[0]) * height * width),  # 0, 1
        *(shortest, longest - shortest, *central_box(height, width, views.ratio)),  # 2 … 5
        *(views.flip, views.jitter_probability, views.grey if channels == 3 else 0.0, views.blur),  # 6 … 9
        *(*lowest, *spans),  # 10 … 13 and 14 … 17
        *(views.blur_sigma[0], views.blur_sigma[1] - views.blur_sigma[0]),  # 18, 19
        1 / 255 if bytes_ else 1.0,  # 20
        *(views.mean or (0.0,) * channels),  # 21 …
        *(views.std or (1.0,) * channels),  # 21 + channels …
    )


@lru_cache(maxsize=64)  # 24 orders of four operations, and the shorter ones of a single channel
def _codes(order: tuple[int, ...]) -> tuple[int, int]:
    """Codes of the color operations before contrast (−1 without contrast) and of all of them: four times three bits."""

    def code(operations: tuple[int, ...]) -> int:
        return sum(
            which << 3 * step for step, which in enumerate((*operations, *[NO_OPERATION] * (4 - len(operations))))
        )

    return code(order[: order.index(CONTRAST)]) if CONTRAST in order else -1, code(order)
