"""Triton kernels that compute random views of images: crop, flip, color jitter and grayscale in one, blur in another.

Parameters are read from one tensor; `triton_views._settings` lists its entries. Red, green and blue of a tile are three
tensors of its pixels (BLOCK,). The arithmetic is that of the modules `views`, `resampling` and `color`.
"""

# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl

from hardneg.images.color import LUMA

RED, GREEN, BLUE = (tl.constexpr(share) for share in LUMA)
# Arguments that change during training: specialization, for instance for multiples of 16, would recompile the kernel.
VARYING = ["batch", "total", "first", "stride", "before", "order"]


@triton.jit(do_not_specialize=VARYING)
def make_view(
    images: tl.tensor,  # (B, C, H, W)
    target: tl.tensor,  # (views·B, C, size, size)
    uniform: tl.tensor,  # (NUMBERS, views, total)
    settings: tl.tensor,
    batch: tl.tensor,
    total: tl.tensor,
    first: tl.tensor,
    stride: tl.tensor,  # views·total: from one row of uniform to the next
    before: tl.tensor,
    order: tl.tensor,
    CHANNELS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    TAPS: tl.constexpr,
    TRIES: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    STANDARDIZED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Computes one view of one image."""
    view = tl.program_id(0)
    image = images + (view % batch).to(tl.int64) * (CHANNELS * HEIGHT * WIDTH)
    target += view.to(tl.int64) * (CHANNELS * SIZE * SIZE)
    uniform += view // batch * total + first + view % batch

    top, left, box_height, box_width = _crop_box(uniform, stride, settings, HEIGHT, WIDTH, TRIES)
    gates = uniform + (2 * TRIES + 2) * stride
    flipped = tl.load(gates) < tl.load(settings + 6)
    jittered = tl.load(gates + stride) < tl.load(settings + 7)
    grayscaled = tl.load(gates + 2 * stride) < tl.load(settings + 8)
    colors = uniform + (2 * TRIES + 6) * stride
    brightness = _factor(colors, settings + 10, jittered, 1.0)
    contrast = _factor(colors + stride, settings + 11, jittered, 1.0)
    saturation = _factor(colors + 2 * stride, settings + 12, jittered, 1.0)
    hue = _factor(colors + 3 * stride, settings + 13, jittered, 0.0)
    scale = tl.load(settings + 20)

    mean = brightness * 0
    if before >= 0:
        for start in range(0, SIZE * SIZE, BLOCK):
            pixels = start + tl.arange(0, BLOCK)
            red, green, blue = _crop(
                image, pixels, top, left, box_height, box_width, flipped, scale, CHANNELS, HEIGHT, WIDTH, SIZE, TAPS
            )
            red, green, blue = _adjust_colors(red, green, blue, before, brightness, contrast, saturation, hue, mean)
            mean += tl.sum(tl.where(pixels < SIZE * SIZE, _luma(red, green, blue), 0.0), axis=0)
        mean /= SIZE * SIZE

    for start in range(0, SIZE * SIZE, BLOCK):
        pixels = start + tl.arange(0, BLOCK)
        red, green, blue = _crop(
            image, pixels, top, left, box_height, box_width, flipped, scale, CHANNELS, HEIGHT, WIDTH, SIZE, TAPS
        )
        red, green, blue = _adjust_colors(red, green, blue, order, brightness, contrast, saturation, hue, mean)
        if grayscaled:
            red = _luma(red, green, blue)
            green = red
            blue = red
        _store(target, red, pixels, settings, 0, CHANNELS, SIZE, CHANNELS_LAST, STANDARDIZED)
        if CHANNELS == 3:
            _store(target, green, pixels, settings, 1, CHANNELS, SIZE, CHANNELS_LAST, STANDARDIZED)
            _store(target, blue, pixels, settings, 2, CHANNELS, SIZE, CHANNELS_LAST, STANDARDIZED)


@triton.jit
def _crop_box(
    uniform: tl.tensor,
    stride: tl.tensor,
    settings: tl.tensor,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    TRIES: tl.constexpr,
) -> tl.tensor:
    """Top, left, height and width of one box, computed as in `crop_boxes`."""
    tries = tl.arange(0, 16)  # a power of two; the entries beyond TRIES are masked
    areas = tl.load(uniform + tries * stride, mask=tries < TRIES, other=0.0)
    ratios = tl.load(uniform + (TRIES + tries) * stride, mask=tries < TRIES, other=0.0)
    roots = tl.sqrt_rn(areas * tl.load(settings + 1) + tl.load(settings))
    aspects = ratios * tl.load(settings + 3) + tl.load(settings + 2)
    # The single-precision exponential of a GPU is accurate to 21 bits only.
    aspects = tl.exp(aspects.to(tl.float64)).to(tl.float32)
    heights = _round_half_even(tl.div_rn(roots, aspects))
    widths = _round_half_even(roots * aspects)
    fits = (tries < TRIES) & (heights >= 1) & (heights <= HEIGHT) & (widths >= 1) & (widths <= WIDTH)
    chosen = tl.min(tl.where(fits, tries, TRIES), axis=0)
    found = chosen < TRIES
    box_height = tl.sum(tl.where(tries == chosen, heights, 0.0), axis=0)
    box_width = tl.sum(tl.where(tries == chosen, widths, 0.0), axis=0)
    box_height = tl.where(found, box_height, tl.load(settings + 4))
    box_width = tl.where(found, box_width, tl.load(settings + 5))
    down = tl.where(found, tl.load(uniform + 2 * TRIES * stride) * (HEIGHT - box_height + 1), (HEIGHT - box_height) / 2)
    across = tl.where(
        found, tl.load(uniform + (2 * TRIES + 1) * stride) * (WIDTH - box_width + 1), (WIDTH - box_width) / 2
    )
    return tl.floor(down), tl.floor(across), box_height, box_width


@triton.jit
def _round_half_even(numbers: tl.tensor) -> tl.tensor:
    """Rounds to the nearest integer, half to even, as torch.round does."""
    whole = tl.floor(numbers)
    over = numbers - whole
    odd = whole - 2 * tl.floor(whole / 2) == 1
    return tl.where((over > 0.5) | ((over == 0.5) & odd), whole + 1, whole)


@triton.jit
def _factor(number: tl.tensor, lowest: tl.tensor, jittered: tl.tensor, unchanged: tl.tensor) -> tl.tensor:
    """The factor of a color operation; the length of its range is stored four entries after its lowest value."""
    return tl.where(jittered, tl.load(lowest) + tl.load(number) * tl.load(lowest + 4), unchanged)


@triton.jit
def _crop(
    image: tl.tensor,
    pixels: tl.tensor,  # (BLOCK,) positions in the view, row-major
    top: tl.tensor,
    left: tl.tensor,
    box_height: tl.tensor,
    box_width: tl.tensor,
    flipped: tl.tensor,
    scale: tl.tensor,
    CHANNELS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    TAPS: tl.constexpr,
) -> tl.tensor:
    """Red, green and blue (BLOCK,) of the box, resampled as in `crop_resize`; a single channel is repeated."""
    rows = pixels // SIZE
    columns = pixels - rows * SIZE
    columns = tl.where(flipped, SIZE - 1 - columns, columns)
    across = tl.div_rn(box_width, SIZE * 1.0)
    down = tl.div_rn(box_height, SIZE * 1.0)
    y_reach = tl.maximum(down, 1.0)  # half the width of the triangular kernel
    x_reach = tl.maximum(across, 1.0)
    y_center = top + down * (rows + 0.5) - 0.5
    x_center = left + across * (columns + 0.5) - 0.5
    y_first = tl.ceil(y_center - y_reach)
    x_first = tl.ceil(x_center - x_reach)

    inside = pixels < SIZE * SIZE
    total = y_center * 0
    red = total
    green = total
    blue = total
    for i in range(TAPS):
        y = y_first + i
        y_weight = tl.where((y >= top) & (y < top + box_height), y_reach - tl.abs(y - y_center), 0.0)
        for j in range(TAPS):
            x = x_first + j
            x_weight = tl.where((x >= left) & (x < left + box_width), x_reach - tl.abs(x - x_center), 0.0)
            weight = tl.maximum(y_weight, 0.0) * tl.maximum(x_weight, 0.0)
            # A pixel with a positive weight is inside the box and so inside the image.
            read = inside & (weight > 0)
            pointer = image + (y.to(tl.int32) * WIDTH + x.to(tl.int32))
            total += weight
            red += weight * tl.load(pointer, mask=read, other=0).to(tl.float32)
            if CHANNELS == 3:
                green += weight * tl.load(pointer + HEIGHT * WIDTH, mask=read, other=0).to(tl.float32)
                blue += weight * tl.load(pointer + 2 * HEIGHT * WIDTH, mask=read, other=0).to(tl.float32)
    share = scale / tl.where(inside, total, 1.0)
    if CHANNELS == 3:
        return red * share, green * share, blue * share
    return red * share, red * share, red * share


@triton.jit
def _adjust_colors(
    red: tl.tensor,
    green: tl.tensor,
    blue: tl.tensor,
    order: tl.tensor,
    brightness: tl.tensor,
    contrast: tl.tensor,
    saturation: tl.tensor,
    hue: tl.tensor,
    mean: tl.tensor,  # luma of the whole view before the contrast operation
) -> tl.tensor:
    """Applies the color operations in the given order; the arithmetic is that of `hardneg.images.color`."""
    for step in range(4):
        which = (order >> (3 * step)) & 7
        if which == 0:
            red = _blend(red, 0.0, brightness)
            green = _blend(green, 0.0, brightness)
            blue = _blend(blue, 0.0, brightness)
        if which == 1:
            red = _blend(red, mean, contrast)
            green = _blend(green, mean, contrast)
            blue = _blend(blue, mean, contrast)
        if which == 2:
            gray = _luma(red, green, blue)
            red = _blend(red, gray, saturation)
            green = _blend(green, gray, saturation)
            blue = _blend(blue, gray, saturation)
        if which == 3:
            red, green, blue = _shift_hue(red, green, blue, hue)
    return red, green, blue


@triton.jit
def _luma(red: tl.tensor, green: tl.tensor, blue: tl.tensor) -> tl.tensor:
    return red * RED + green * GREEN + blue * BLUE


@triton.jit
def _clamp(numbers: tl.tensor) -> tl.tensor:
    return tl.minimum(tl.maximum(numbers, 0.0), 1.0)


@triton.jit
def _blend(color: tl.tensor, other: tl.tensor, share: tl.tensor) -> tl.tensor:
    return _clamp(color * share + other * (1 - share))


@triton.jit
def _shift_hue(red: tl.tensor, green: tl.tensor, blue: tl.tensor, shift: tl.tensor) -> tl.tensor:
    """Shifts the hue by ``shift`` turns; see `adjust_hue`."""
    value = tl.maximum(tl.maximum(red, green), blue)
    lowest = tl.minimum(tl.minimum(red, green), blue)
    chroma = value - lowest
    sixths = (green + blue - red - lowest) / tl.maximum(chroma, 1e-12) + 1
    sixths = tl.where(green >= blue, sixths, -sixths) + 6 * shift
    sixths = sixths - 6 * tl.floor(sixths / 6)
    return (
        lowest + chroma * _clamp(tl.abs(sixths - 3) - 1),
        value - chroma * _clamp(tl.abs(sixths - 2) - 1),
        value - chroma * _clamp(tl.abs(sixths - 4) - 1),
    )


@triton.jit
def _store(
    target: tl.tensor,
    values: tl.tensor,
    pixels: tl.tensor,
    settings: tl.tensor,
    channel: tl.tensor,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    STANDARDIZED: tl.constexpr,
) -> None:
    if STANDARDIZED:
        values = (values - tl.load(settings + 21 + channel)) / tl.load(settings + 21 + CHANNELS + channel)
    offsets = pixels * CHANNELS + channel if CHANNELS_LAST else channel * (SIZE * SIZE) + pixels
    tl.store(target + offsets, values, mask=pixels < SIZE * SIZE)


@triton.jit(do_not_specialize=VARYING[:4])
def blur_tile(
    source: tl.tensor,  # (views·B, C, size, size), contiguous
    target: tl.tensor,
    uniform: tl.tensor,
    settings: tl.tensor,
    batch: tl.tensor,
    total: tl.tensor,
    first: tl.tensor,
    stride: tl.tensor,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    RADIUS: tl.constexpr,
    TRIES: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    LAST: tl.constexpr,  # second pass: along columns, with standardization
    BLOCK: tl.constexpr,
) -> None:
    """Blurs a tile of one channel of one view along one axis, as in `gaussian_blur`."""
    view = tl.program_id(0) // CHANNELS
    channel = tl.program_id(0) % CHANNELS
    source += tl.program_id(0).to(tl.int64) * (SIZE * SIZE)
    target += view.to(tl.int64) * (CHANNELS * SIZE * SIZE)
    uniform += view // batch * total + first + view % batch

    blurred = tl.load(uniform + (2 * TRIES + 5) * stride) < tl.load(settings + 9)
    sigma = tl.load(uniform + (2 * TRIES + 10) * stride) * tl.load(settings + 19) + tl.load(settings + 18)
    sigma = tl.maximum(sigma, 1e-3)
    pixels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = pixels < SIZE * SIZE
    rows = pixels // SIZE
    columns = pixels - rows * SIZE
    sums = tl.load(source + pixels, mask=inside, other=0.0)
    weights = sigma * 0 + 1
    if blurred:
        for offset in range(1, RADIUS + 1):
            steps = offset / sigma
            weight = tl.exp(-0.5 * steps * steps)
            if LAST:
                one = _reflect(rows - offset, SIZE) * SIZE + columns
                other = _reflect(rows + offset, SIZE) * SIZE + columns
            else:
                one = rows * SIZE + _reflect(columns - offset, SIZE)
                other = rows * SIZE + _reflect(columns + offset, SIZE)
            pair = tl.load(source + one, mask=inside, other=0.0) + tl.load(source + other, mask=inside, other=0.0)
            sums += weight * pair
            weights += 2 * weight
    _store(target, sums / weights, pixels, settings, channel, CHANNELS, SIZE, CHANNELS_LAST, LAST)


@triton.jit
def _reflect(offsets: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """Reflects indices beyond the ends of a line, without repeating the last pixel."""
    return SIZE - 1 - tl.abs(SIZE - 1 - tl.abs(offsets))
