"""The views by Triton, to be called in a process of `interpreter.process`."""

from interpreter import process
from torch import Tensor

from hardneg.images.views import ImageViews

__all__ = ["make_views", "process"]


def make_views(
    views: ImageViews, images: Tensor, uniform: Tensor, seed: int, first: int, channels_last: bool
) -> Tensor:
    """The views, computed by Triton."""
    from hardneg.images import triton_views

    return triton_views.make_views(views, images, uniform, seed, first, channels_last)
