"""Colours of a batch of pictures: brightness, contrast, saturation, hue, greyscale and CIE Lab, sample by sample."""

from functools import lru_cache

import torch
from torch import Tensor

LUMA = (0.299, 0.587, 0.114)  # ITU-R 601, as PIL
XYZ = ((0.412453, 0.357580, 0.180423), (0.212671, 0.715160, 0.072169), (0.019334, 0.119193, 0.950227))  # of linear sRGB
LAB_CENTRE, LAB_REACH = (50.0, 6.025, -6.6895), (50.0, 92.208, 101.1675)  # of all sRGB colours, as CMC has them


def luma(images: Tensor) -> Tensor:
    """Brightness (B, 1, H, W) of images (B, 3, H, W), by ITU-R 601; one channel is its own.

    Examples:
        >>> luma(torch.tensor([1.0, 0.0, 1.0]).view(1, 3, 1, 1)).item()
        0.41299...
    """
    if images.shape[1] == 1:
        return images
    red, green, blue = images[:, :1], images[:, 1:2], images[:, 2:]  # (B, 1, H, W) each
    return (red * LUMA[0]).add_(green, alpha=LUMA[1]).add_(blue, alpha=LUMA[2])


def _blend(images: Tensor, other: Tensor, share: Tensor) -> Tensor:
    """share · images + (1 − share) · other, within [0, 1]; share: (B,), may exceed 1."""
    share = share.view(-1, 1, 1, 1)
    return (images * share).add_(other * (1 - share)).clamp_(0, 1)


def adjust_brightness(images: Tensor, factors: Tensor) -> Tensor:
    """Images (B, C, H, W) times the factors (B,): 0 is black, 1 changes nothing."""
    return (images * factors.view(-1, 1, 1, 1)).clamp_(0, 1)


def adjust_contrast(images: Tensor, factors: Tensor) -> Tensor:
    """Images (B, C, H, W) away from their mean luma by the factors (B,): 0 is plain grey, 1 changes nothing."""
    return _blend(images, luma(images.mean(dim=(2, 3), keepdim=True)), factors)


def adjust_saturation(images: Tensor, factors: Tensor) -> Tensor:
    """Images (B, 3, H, W) away from their greyscale by the factors (B,): 0 is greyscale, 1 changes nothing."""
    return _blend(images, luma(images), factors)


def adjust_hue(images: Tensor, shifts: Tensor) -> Tensor:
    """Turn the hue of images (B, 3, H, W) in [0, 1] by the shifts (B,) in turns; HSV's saturation and value stay.

    Examples:
        >>> red = torch.tensor([1.0, 0.0, 0.0]).view(1, 3, 1, 1)
        >>> adjust_hue(red, torch.tensor([1 / 3])).flatten()
        tensor([0., 1., 0.])
    """
    red, green, blue = images.unbind(dim=1)  # (B, H, W) each
    value = torch.maximum(torch.maximum(red, green), blue)
    lowest = torch.minimum(torch.minimum(red, green), blue)
    chroma = value - lowest
    # In sixths of a turn the hue is ±(1 + (green + blue − red − lowest) / chroma), + where green ≥ blue: the textbook's
    # three cases in one, without masks. A grey has the numerator 0, so any divisor serves.
    sixths = (green + blue).sub_(red).sub_(lowest).div_(chroma.clamp(min=1e-12)).add_(1).copysign_(green - blue)
    sixths += 6 * shifts.view(-1, 1, 1)
    sixths.sub_((sixths / 6).floor_(), alpha=6)  # from 0 to 6
    # One to two sixths away from cyan, at 3, red rises; as far from their own hues, 2 and 4, green and blue fall.
    moved = (sixths[:, None] - column((3.0, 2.0, 4.0), images.device, 3)).abs_().sub_(1).clamp_(0, 1)  # (B, 3, H, W)
    moved[:, 0].mul_(chroma).add_(lowest)
    moved[:, 1:].mul_(-chroma[:, None]).add_(value[:, None])
    return moved


ADJUSTMENTS = (adjust_brightness, adjust_contrast, adjust_saturation, adjust_hue)


def rgb_to_lab(images: Tensor) -> Tensor:
    """CIE L*a*b* (white point D65) of sRGB images (B, 3, H, W) in [0, 1]: L from 0 to 100, a and b about ±100.

    Examples:
        >>> rgb_to_lab(torch.ones(1, 3, 1, 1)).flatten().round().abs()
        tensor([100.,   0.,   0.])
    """
    linear = torch.where(images > 0.04045, ((images.clamp(min=0) + 0.055) / 1.055) ** 2.4, images / 12.92)
    # Each row divided by its sum, the white point, so that every grey has a = b = 0.
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
        >>> lightness, colour = lab_split(torch.rand(2, 3, 8, 8))
        >>> lightness.shape, colour.shape
        (torch.Size([2, 1, 8, 8]), torch.Size([2, 2, 8, 8]))
    """
    centre, reach = (column(numbers, images.device, 3) for numbers in (LAB_CENTRE, LAB_REACH))
    scaled = (rgb_to_lab(images) - centre) / reach
    return scaled[:, :1], scaled[:, 1:]


@lru_cache(maxsize=256)
def column(numbers: tuple[float, ...], device: torch.device, ndim: int = 2) -> Tensor:
    """Numbers as a float32 tensor (N, 1, …) of ndim dimensions."""
    # Kept on the device, because the host waits at every copy; not as an inference tensor, which training refuses.
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=torch.float32, device=device).view(-1, *[1] * (ndim - 1))
