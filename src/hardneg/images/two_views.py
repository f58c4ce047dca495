"""Encoders of the two views that an image is split into: CMC's lightness and color, or coarse image and detail."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

from hardneg import checks
from hardneg.images.views import lab_split


def detail_split(images: Tensor) -> tuple[Tensor, Tensor]:
    """The image averaged over squares of 2×2 pixels, and the rest; both as large as the image.

    For images of one channel. It is not a published split: it replaces CMC's for images without color.

    images: (B, 1, H, W) in [0, 1] · returns (B, 1, H, W) in [−1, 1] each

    Examples:
        >>> coarse, detail = detail_split(torch.tensor([[[[1.0, 0.0], [0.0, 0.0]]]]))
        >>> coarse.flatten().tolist(), detail.flatten().tolist()
        ([-0.5, -0.5, -0.5, -0.5], [0.75, -0.25, -0.25, -0.25])
    """
    small = avg_pool2d(images, 2, ceil_mode=True)
    coarse = small.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
    coarse = coarse[:, :, : images.shape[2], : images.shape[3]]  # if a side is odd, its last squares are halves
    return 2 * coarse - 1, images - coarse


SPLITS: dict[str, tuple[Callable[[Tensor], tuple[Tensor, Tensor]], tuple[int, int]]] = {
    "lab": (lab_split, (1, 2)),
    "detail": (detail_split, (1, 1)),
}


class TwoViews(nn.Module):
    """Two encoders, one for each view of an image; the features of both are concatenated.

    It splits the images itself, so that it can be used as any other encoder.

    Args:
        first, second: encoders (B, c, H, W) → (B, features), with the numbers of channels c of `channels_of`
        split: ``"lab"`` (L, and ab; for color images) or ``"detail"`` (coarse image, and detail; for one channel)

    Takes images in [0, 1] (views made with mean=None), returns (B, features of both).

    Examples:
        >>> from hardneg.images.encoders import Tiny
        >>> TwoViews(Tiny(size=8), Tiny(size=8), split="detail")(torch.rand(4, 1, 8, 8)).shape
        torch.Size([4, 256])
    """

    def __init__(self, first: nn.Module, second: nn.Module, split: str = "lab") -> None:
        super().__init__()
        checks.choice("split", split, tuple(SPLITS))
        self.first, self.second, self.split = first, second, split
        sizes = [getattr(encoder, "features", None) for encoder in (first, second)]
        if isinstance(sizes[0], int) and isinstance(sizes[1], int):
            self.features = sizes[0] + sizes[1]

    def both(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The features of each view, (B, features) and (B, features); images: (B, C, H, W) in [0, 1]."""
        # In half precision the exponents of Lab would lose dark colors.
        with torch.autocast(images.device.type, enabled=False):
            one, other = SPLITS[self.split][0](images.float())
        return self.first(one), self.second(other)

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat(self.both(images), dim=1)

    def extra_repr(self) -> str:
        return f"split={self.split!r}"


class TwoHeads(nn.Module):
    """The projection heads on a `TwoViews`: (B, features of both) → (B, outputs of both).

    Args:
        first, second: of the features of each view
        widths: number of features of each view

    Examples:
        >>> TwoHeads(nn.Linear(3, 2), nn.Linear(5, 2), widths=(3, 5))(torch.zeros(1, 8)).shape
        torch.Size([1, 4])
    """

    def __init__(self, first: nn.Module, second: nn.Module, widths: tuple[int, int]) -> None:
        super().__init__()
        self.first, self.second, self.widths = first, second, widths

    def both(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """The embeddings of each view from its features."""
        return self.first(first), self.second(second)

    def forward(self, features: Tensor) -> Tensor:
        first, second = torch.split(features, list(self.widths), dim=1)
        return torch.cat(self.both(first, second), dim=1)


def split_of(channels: int) -> str:
    """The split for images with this number of channels."""
    if channels not in (1, 3):
        raise ValueError(f"images must have 1 or 3 channels to be split into two views, got {channels}")
    return "lab" if channels == 3 else "detail"


def channels_of(split: str) -> tuple[int, int]:
    """The channels of the two views of a split.

    Examples:
        >>> channels_of("lab")
        (1, 2)
    """
    checks.choice("split", split, tuple(SPLITS))
    return SPLITS[split][1]
