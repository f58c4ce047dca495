"""Random crop boxes, resampling and Gaussian blur of a batch of images, with one box and sigma per sample."""

import math

import torch
from torch import Tensor
from torch.nn.functional import channel_shuffle, embedding_bag

from hardneg.images.color import column

TRIES = 10  # random boxes tried before the central one is taken


def crop_boxes(
    uniform: Tensor, height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float]
) -> Tensor:
    """Random boxes (B, 4) of top, left, height, width in whole pixels, distributed as in RandomResizedCrop.

    The area is uniform and the ratio log-uniform; the first of TRIES boxes that fits is placed uniformly; if none fits,
    the largest central box within the ratios is taken.

    uniform: (2·TRIES + 2, B) numbers from [0, 1) · height, width: of the images · scale, ratio: see `ImageViews`

    Examples:
        >>> crop_boxes(torch.zeros(22, 1), 40, 40, scale=(0.25, 1.0), ratio=(1.0, 1.0))
        tensor([[ 0.,  0., 20., 20.]])
    """
    areas, ratios, positions = uniform[:TRIES], uniform[TRIES:-2], uniform[-2:]
    roots = (areas * ((scale[1] - scale[0]) * height * width) + scale[0] * height * width).sqrt_()  # (TRIES, B)
    lowest, highest = (math.log(bound) / 2 for bound in ratio)
    aspects = (ratios * (highest - lowest) + lowest).exp_()  # (TRIES, B) square root of width / height
    central = column(central_box(height, width, ratio), uniform.device, 3)  # (2, 1, 1)
    last = central.expand(2, 1, uniform.shape[1])  # always fits
    sides = torch.cat([torch.stack([roots / aspects, roots * aspects]).round_(), last], dim=1)  # (2, TRIES + 1, B)
    whole = column((height, width), uniform.device, 3)  # (2, 1, 1)
    fits = ((sides >= 1) & (sides <= whole)).all(dim=0)  # (TRIES + 1, B)
    first = fits.byte().argmax(dim=0)  # (B,)
    sides = sides.gather(1, first.expand(2, 1, -1))[:, 0]  # (2, B)
    room = whole[:, 0] - sides  # (2, B)
    corners = torch.where(first < TRIES, positions * (room + 1), room / 2).floor_()  # (2, B)
    return torch.cat([corners, sides]).T


def central_box(height: int, width: int, ratio: tuple[float, float]) -> tuple[int, int]:
    """Height and width of the largest box of an image within the ratios.

    Examples:
        >>> central_box(40, 150, (3 / 4, 4 / 3))
        (40, 53)
    """
    return min(height, max(1, round(width / ratio[0]))), min(width, max(1, round(height * ratio[1])))


def taps(height: int, width: int, size: int) -> int:
    """Maximum number of pixels of a row or a column that contribute to one pixel of a view."""
    return math.ceil(2 * max(1.0, max(height, width) / size))


def crop_resize(images: Tensor, boxes: Tensor, size: int, flipped: Tensor) -> Tensor:
    """Crop a box from each image and resize it to a square: bilinear, with antialiasing.

    Pixels outside the box have no influence.

    images: (B, C, H, W) floats, or uint8 that are divided by 255 · boxes: (B, 4) top, left, height, width in pixels, at
    least one pixel high and wide · size: side of the square · flipped: (B,) bool, horizontal flip
    returns (B, C, size, size) of the boxes' dtype

    Examples:
        >>> ramp = torch.arange(4.0).expand(1, 1, 4, 4)
        >>> crop_resize(ramp, torch.tensor([[0.0, 0.0, 4.0, 4.0]]), 2, torch.tensor([True]))
        tensor([[[[2.2857, 0.7143],
                  [2.2857, 0.7143]]]])
    """
    height, width = images.shape[2:]
    return resample(images, *crop_taps(boxes, flipped, height, width, size))


def crop_taps(boxes: Tensor, flipped: Tensor, height: int, width: int, size: int) -> tuple[Tensor, Tensor]:
    """Indices of the rows and columns that contribute to each pixel, int32, and their weights: (2, B, size, taps) each.

    boxes, flipped, size: see `crop_resize` · height, width: of the images
    """
    corners, sides = boxes.T[:2, :, None], boxes.T[2:, :, None]  # (2, B, 1) each: of rows, of columns
    steps = sides / size  # (2, B, 1)
    positions = torch.arange(size, dtype=boxes.dtype, device=boxes.device) + 0.5  # (size,)
    # A flipped axis is indexed from its far end, so that flipping costs nothing.
    reverse = torch.stack([torch.zeros_like(flipped), flipped])[:, :, None]  # (2, B, 1)
    centers = torch.addcmul(corners, steps, torch.where(reverse, size - positions, positions)).sub_(0.5)  # (2, B, size)
    reach = steps.clamp(min=1)  # half the width of the triangular kernel, which antialiases as PIL does
    offsets = torch.arange(taps(height, width, size), dtype=boxes.dtype, device=boxes.device).view(-1, 1, 1, 1)
    pixels = (centers - reach).ceil_() + offsets  # (taps, 2, B, size)
    weights = (reach - (pixels - centers).abs_()).clamp_(min=0)  # (taps, 2, B, size)
    weights *= (pixels - (corners + (sides - 1) / 2)).abs_() < sides / 2  # no pixel outside the box
    weights /= weights.sum(dim=0)
    pixels[:, 0].clamp_(0, height - 1)
    pixels[:, 1].clamp_(0, width - 1)
    return pixels.int().movedim(0, 3).contiguous(), weights.movedim(0, 3).contiguous()


def resample(images: Tensor, pixels: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums of rows and columns of images (B, C, H, W); pixels, weights: as `crop_taps` returns them."""
    batch, channels, height, width = images.shape
    (rows, columns), (down, across) = pixels, weights  # (B, size, taps) each
    if images.dtype == torch.uint8:
        across = across / 255
    upright = transposed(images.reshape(batch, channels * height, width)).to(weights.dtype)  # (B, W, C·H)
    narrow = _mix_rows(upright[:, None], columns, across)[:, 0]  # (B, size, C·H)
    return _mix_rows(transposed(narrow).view(batch, channels, height, rows.shape[1]), rows, down)


def transposed(matrices: Tensor) -> Tensor:
    """Transposes matrices (B, N, M) to contiguous (B, M, N).

    Examples:
        >>> transposed(torch.arange(6).view(1, 2, 3)).tolist()
        [[[0, 3], [1, 4], [2, 5]]]
    """
    batch, rows, columns = matrices.shape
    # As channels of a pixel, the entries of a matrix are transposed by shuffling them in groups of a row: on a CPU
    # this takes a fifth of the time of .mT.contiguous().
    entries = matrices.reshape(1, batch, 1, rows * columns).permute(0, 3, 1, 2)  # (1, N·M, B, 1)
    return channel_shuffle(entries, rows).permute(0, 2, 3, 1).reshape(batch, columns, rows)


def _mix_rows(images: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums of rows of images (B, C, H, W); rows, weights: (B, R, taps); returns (B, C, R, W)."""
    batch, channels, height, width = images.shape
    starts = torch.arange(0, batch * channels * height, height, dtype=rows.dtype, device=images.device)
    # In the table of all rows of all images: (B, C, R, taps).
    indices = starts.view(batch, channels, 1, 1) + rows[:, None]
    # Measured on a CPU at 96 pixels: twice as fast as grid_sample, or as products with matrices of mostly zero weights.
    mixed = embedding_bag(
        indices.flatten(0, 2),
        images.reshape(batch * channels * height, width),
        per_sample_weights=weights[:, None].expand_as(indices).flatten(0, 2),
        mode="sum",
    )
    return mixed.view(batch, channels, rows.shape[1], width)


def gaussian_blur(images: Tensor, sigmas: Tensor, radius: int) -> Tensor:
    """Blur images (B, C, S, S) by Gaussians of the sigmas (B,), cut off at the radius; 0 leaves a sample sharp.

    The borders reflect without repeating the outermost pixel; radius: in pixels, below S.

    Examples:
        >>> point = torch.zeros(1, 1, 3, 3).index_fill(3, torch.tensor(1), 1.0)
        >>> gaussian_blur(point, torch.tensor([1.0]), radius=1)[0, 0, 0]
        tensor([0.5481, 0.4519, 0.5481])
    """
    offsets = torch.arange(-radius, radius + 1, dtype=torch.int32, device=images.device)  # (taps,)
    # With a sigma this small, all weights except the center are exactly 0.
    weights = (offsets / sigmas.clamp(min=1e-3)[:, None]).square_().mul_(-0.5).exp_()  # (B, taps)
    weights /= weights.sum(dim=1, keepdim=True)
    last = images.shape[2] - 1
    pixels = torch.arange(last + 1, dtype=torch.int32, device=images.device)[:, None] + offsets  # (S, taps)
    pixels = last - (last - pixels.abs_()).abs_()  # reflected at both ends
    shape = (2, len(images), *pixels.shape)  # the same for rows and columns
    return resample(images, pixels.expand(shape), weights[:, None].expand(shape))
