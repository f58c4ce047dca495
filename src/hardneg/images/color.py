"""Color operations on a batch of images, with one parameter per sample: brightness, contrast, saturation, hue, Lab."""

from functools import lru_cache

import torch
from torch import Tensor

LUMA = (0.299, 0.587, 0.114)  # ITU-R 601, as PIL
XYZ = ((0.412453, 0.357580, 0.180423), (0.212671, 0.715160, 0.072169), (0.019334, 0.119193, 0.950227))  # of linear sRGB
SIXTH = 0.16666665  # just below 1/6, so that no color is rounded to more than 1
LAB_CENTER, LAB_HALF_RANGE = (50.0, 6.025, -6.6895), (50.0, 92.208, 101.1675)  # of all sRGB colors, as in CMC


def luma(images: Tensor) -> Tensor:
    """Luma (B, 1, H, W) of images (B, 3, H, W), by ITU-R 601; a single channel is returned unchanged.

    Examples:
        >>> luma(torch.tensor([1.0, 0.0, 1.0]).view(1, 3, 1, 1)).item()
        0.41299...
    """
    if images.shape[1] == 1:
        return images
    red, green, blue = images[:, :1], images[:, 1:2], images[:, 2:]  # (B, 1, H, W) each
    return (red * LUMA[0]).add_(green, alpha=LUMA[1]).add_(blue, alpha=LUMA[2])


def adjust_brightness(images: Tensor, factors: Tensor) -> Tensor:
    """Multiply images (B, C, H, W) in place by the factors (B,): 0 is black, 1 changes nothing."""
    return images.mul_(factors.view(-1, 1, 1, 1)).clamp_(0, 1)


def adjust_contrast(images: Tensor, factors: Tensor) -> Tensor:
    """Move images (B, C, H, W) in place from their mean luma by the factors (B,): 0 is one gray, 1 changes nothing."""
    factors = factors.view(-1, 1, 1, 1)
    gray = luma(images.mean(dim=(2, 3), keepdim=True))  # (B, 1, 1, 1)
    return images.mul_(factors).add_(gray * (1 - factors)).clamp_(0, 1)


def adjust_saturation(images: Tensor, factors: Tensor) -> Tensor:
    """Move images (B, 3, H, W) in place away from their luma by the factors (B,): 0 is grayscale, 1 changes nothing."""
    factors = factors.view(-1, 1, 1, 1)
    gray = luma(images).mul_(1 - factors)  # (B, 1, H, W)
    return images.mul_(factors).add_(gray).clamp_(0, 1)


def adjust_hue(images: Tensor, shifts: Tensor) -> Tensor:
    """Shift the hue of images (B, 3, H, W) in [0, 1] in place by the shifts (B,) in turns; saturation and value stay.

    Examples:
        >>> red = torch.tensor([1.0, 0.0, 0.0]).view(1, 3, 1, 1)
        >>> adjust_hue(red, torch.tensor([1 / 3])).flatten().round()
        tensor([0., 1., 0.])
    """
    red, green, blue = images.unbind(dim=1)  # (B, H, W) each
    lowest = torch.minimum(red, green)
    lowest = torch.minimum(lowest, blue, out=lowest)
    chroma = torch.maximum(red, green)
    chroma = torch.maximum(chroma, blue, out=chroma).sub_(lowest).clamp_(min=1e-12)
    # In turns the hue is ±(1 + (green + blue − red − lowest) / chroma) / 6, + where green ≥ blue: the three cases of
    # the usual formula in one, without masks. For gray the numerator is 0, so any divisor is correct.
    hues = (green + blue).sub_(red).sub_(lowest)
    hues = torch.addcdiv(column((1 / 6,), images.device, 1), hues, chroma, value=1 / 6, out=hues)
    hues.copysign_(torch.sub(green, blue, out=blue)).add_(shifts.view(-1, 1, 1) + 1).frac_()  # from 0 to 1
    # At a distance of one to two sixths from cyan (1/2) red increases; at that distance from their own hues (1/3 and
    # 2/3) green and blue decrease.
    torch.sub(hues[:, None], column((1 / 2, 1 / 3, 2 / 3), images.device, 3), out=images).abs_()
    rising, falling = images[:, :1], images[:, 1:]
    rising.sub_(1 / 6).clamp_(0, SIXTH)
    falling.sub_(1 / 3).clamp_(-SIXTH, 0)
    torch.addcmul(lowest[:, None], chroma[:, None], rising, value=6, out=rising)
    torch.addcmul(lowest[:, None], chroma[:, None], falling, value=-6, out=falling)
    return images


ADJUSTMENTS = (adjust_brightness, adjust_contrast, adjust_saturation, adjust_hue)


def rgb_to_lab(images: Tensor) -> Tensor:
    """CIE L*a*b* (white point D65) of sRGB images (B, 3, H, W) in [0, 1]: L from 0 to 100, a and b about ±100.

    Examples:
        >>> rgb_to_lab(torch.ones(1, 3, 1, 1)).flatten().round().abs()
        tensor([100.,   0.,   0.])
    """
    linear = torch.where(images > 0.04045, ((images.clamp(min=0) + 0.055) / 1.055) ** 2.4, images / 12.92)
    # Each row divided by its sum, the white point, so that every gray has a = b = 0.
    relative = torch.stack([column(row, images.device, 3).to(images.dtype) / sum(row) for row in XYZ])  # (3, 3, 1, 1)
    xyz = (linear[:, None] * relative).sum(dim=2)  # (B, 3, H, W)
    edge = 6 / 29
    response = torch.where(xyz > edge**3, xyz.clamp(min=edge**3) ** (1 / 3), xyz / (3 * edge**2) + 4 / 29)
    x, y, z = response.unbind(dim=1)
    return torch.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], dim=1)


def lab_split(images: Tensor) -> tuple[Tensor, Tensor]:
    """CMC's two views (Tian et al. 2020): L (B, 1, H, W) and ab (B, 2, H, W), each channel scaled to [−1, 1].

    images: (B, 3, H, W) in [0, 1], so views for it are made with mean=None

    Examples:
        >>> lightness, color = lab_split(torch.rand(2, 3, 8, 8))
        >>> lightness.shape, color.shape
        (torch.Size([2, 1, 8, 8]), torch.Size([2, 2, 8, 8]))
    """
    center, half_range = (column(numbers, images.device, 3) for numbers in (LAB_CENTER, LAB_HALF_RANGE))
    scaled = (rgb_to_lab(images) - center) / half_range
    return scaled[:, :1], scaled[:, 1:]


@lru_cache(maxsize=256)
def column(numbers: tuple[float, ...], device: torch.device, ndim: int = 2) -> Tensor:
    """Numbers as a float32 tensor (N, 1, …) of ndim dimensions, cached per device."""
    # Cached because each copy to the device synchronizes; not an inference tensor, because autograd rejects those.
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=torch.float32, device=device).view(-1, *[1] * (ndim - 1))
