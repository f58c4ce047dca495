"""Views on a GPU, by Triton: draws, crop, flip, colours, grey and standardising of a whole batch in one launch.

A batch of small pictures is so little work that launching the operations of `ImageViews.from_uniform` one by one takes
many times longer than doing them. Here one program makes one view, tile after tile of its pixels, from the same uniform
numbers by the same arithmetic, to rounding: a box whose side falls within rounding of a half may differ by a pixel.
Contrast needs the mean of the whole view, so a first walk over the tiles adds up lumas, and the second crops anew: to
read a pixel twice costs less than to keep it. Blur is two launches more, along rows and along columns.
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
from hardneg.images.views import ImageViews, colour_order

BLOCK = 1024  # pixels of a tile, at most
CONTRAST, NOTHING = 1, 7  # of the codes of colour operations, three bits each


def make_views(
    views: ImageViews, images: Tensor, uniform: Tensor, seed: int, first: int = 0, channels_last: bool = False
) -> Tensor:
    """The views that these numbers draw, (views·B, C, size, size) float32: what `ImageViews.from_uniform` makes.

    views: the settings · images: (B, C, H, W) on a GPU · uniform: (NUMBERS, views, total) beside them ·
    seed, first, channels_last: see there
    """
    batch, channels, height, width = images.shape
    size, (_, copies, total) = views.size, uniform.shape
    shape = (copies * batch, channels, size, size)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    made = torch.empty(shape, dtype=torch.float32, device=images.device, memory_format=layout)
    if batch == 0:
        return made
    settings = column(_settings(views, channels, height, width, images.dtype == torch.uint8), images.device)
    before, order = _codes(tuple(which for which in colour_order(seed) if views.adjusts(which, channels)))
    block = min(BLOCK, triton.next_power_of_2(size**2))
    blurs = views.blur > 0
    sharp = torch.empty(shape, dtype=torch.float32, device=images.device) if blurs else made
    # Without fusion of products and sums, boxes are rounded as the tensor operations round them.
    options = {"BLOCK": block, "num_warps": max(1, block // 256), "enable_fp_fusion": False}
    with torch.cuda.device(images.device) if images.is_cuda else nullcontext():
        triton_programs.make_view[(copies * batch,)](
            *(images.contiguous(), sharp, uniform, settings, batch, total, first, copies * total, before, order),
            CHANNELS=channels,
            HEIGHT=height,
            WIDTH=width,
            SIZE=size,
            TAPS=taps(height, width, size),
            TRIES=TRIES,
            CHANNELS_LAST=channels_last and not blurs,
            STANDARDISED=not blurs,
            **options,
        )
        if blurs:
            half = torch.empty_like(sharp)
            grid = (copies * batch * channels, triton.cdiv(size**2, block))
            for source, target, last in ((sharp, half, False), (half, made, True)):
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
    """All that the kernels read, in the order in which they count: one tensor is launched faster than 27 numbers."""
    area = height * width
    shortest, longest = (math.log(bound) / 2 for bound in views.ratio)
    lowest, spans = views.colour_range()
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


@lru_cache(maxsize=64)  # of 24 orders of four, and the shorter ones of one channel
def _codes(order: tuple[int, ...]) -> tuple[int, int]:
    """The colour operations before contrast, −1 if there is none, and all of them: three bits each, four of them."""

    def code(some: tuple[int, ...]) -> int:
        return sum(which << 3 * step for step, which in enumerate((*some, *[NOTHING] * (4 - len(some)))))

    return code(order[: order.index(CONTRAST)]) if CONTRAST in order else -1, code(order)
