"""From an image file, a PIL image or an array to the input of a trained encoder."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from hardneg import checks
from hardneg.extras import required
from hardneg.images.arrays import channels_first
from hardneg.images.image_set import decode, fit, pixels_of


@dataclass(frozen=True)
class ImageTransform:
    """Turns one image into the input (C, H, W) of an encoder, as its evaluation does.

    Args:
        shape: (C, H, W) of the images that the encoder was trained on. Images are converted to gray or RGB, and to
            this size if H = W: the shorter side is resized and the center cropped.
        size: ``data.size`` of the recipe; None if the images were not resized.
        prepare: scales and standardizes a batch of uint8 images; None to scale to [0, 1] only.

    It takes the path of an image file, a PIL image, or a uint8 array or tensor (H, W), (H, W, C) or (C, H, W).

    Examples:
        >>> ImageTransform((3, 8, 8), 8, None)(np.zeros((20, 30), dtype=np.uint8)).shape
        torch.Size([3, 8, 8])
    """

    shape: tuple[int, int, int]
    size: int | None
    prepare: Callable[[Tensor], Tensor] | None

    def __call__(self, image: Any) -> Tensor:
        pixels = self._sized(self._pixels(image))  # (C, H, W) uint8
        if self.prepare is None:
            return pixels.float() / 255
        return self.prepare(pixels[None])[0]

    def _pixels(self, image: Any) -> Tensor:
        image_module = required("PIL.Image", "train")
        if isinstance(image, str | Path):
            return self._read(Path(image).expanduser())
        if isinstance(image, image_module.Image):
            return pixels_of(image, self.shape[0])
        if isinstance(image, Tensor | np.ndarray) and image.ndim in (2, 3):
            array = image.detach().cpu().numpy() if isinstance(image, Tensor) else image
            first = channels_first(array[None], "the given array")[0]  # (C, H, W)
            if first.shape[0] in (1, 3, 4):
                layers = first[0] if first.shape[0] == 1 else first.permute(1, 2, 0)  # (H, W) or (H, W, C)
                return pixels_of(image_module.fromarray(layers.numpy()), self.shape[0])
        given = f"of shape {tuple(image.shape)}" if isinstance(image, Tensor | np.ndarray) else type(image).__name__
        raise ValueError(
            f"image must be a path, a PIL image, or a uint8 array (H, W), (H, W, C) or (C, H, W), got one {given}: "
            "pass several images as a list"
        )

    def _read(self, path: Path) -> Tensor:
        if path.is_dir():
            raise ValueError(f"{path} is a folder: pass the paths of its images as a list")
        if not path.exists():
            raise FileNotFoundError(f"there is no file {str(path)!r}: give the path of an image")
        try:
            if self.size is not None:
                return decode(checks.regular_file(path).open("rb"), self.shape, self.size)
            with required("PIL.Image", "train").open(checks.regular_file(path)) as image:
                return pixels_of(image, self.shape[0])
        except Exception as error:  # decoders raise OSError, SyntaxError, ValueError, struct.error and more
            raise ValueError(f"{path} cannot be read as an image ({error}): give another file") from None

    def _sized(self, pixels: Tensor) -> Tensor:
        """The pixels (C, H, W) in the size that the encoder was trained on."""
        height, width = self.shape[1:]
        if tuple(pixels.shape[1:]) == (height, width):
            return pixels.contiguous()
        if height != width:
            given = "x".join(map(str, pixels.shape[1:]))
            raise ValueError(
                f"image is {given}, and the encoder was trained on images of {height}x{width} (HxW): resize it"
            )
        return fit(pixels[None], height)[0]
