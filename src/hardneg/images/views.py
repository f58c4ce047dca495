"""Random views of a batch of images: SimCLR's and MoCo's augmentations, and CMC's Lab split.

Every sample has its own crop, flip, colors and blur. No step loops over samples, indexes by a mask or reads a value
back from the device: a sample that an operation does not change gets the factor of the identity. On CUDA, where
launching the operations takes longer than running them, one kernel computes the views (see
`hardneg.images.triton_views`).

The distributions are torchvision's (RandomResizedCrop in whole pixels, ColorJitter, RandomGrayscale, GaussianBlur) with
one difference: the order of the four color operations is drawn once per batch, from the seed of the generator.
"""

import itertools
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from hardneg import checks
from hardneg.images.color import ADJUSTMENTS, column, lab_split, luma, rgb_to_lab
from hardneg.images.resampling import TRIES, crop_boxes, crop_resize, crop_taps, gaussian_blur, resample
from hardneg.randomness import mix

CACHED = 3 << 18  # elements of the views that a CPU computes at a time: 256 color views of 32 × 32 pixels
NUMBERS = 2 * TRIES + 11  # uniform draws of a view: areas, ratios, 2 positions, 4 gates, 4 colors, a sigma
ORDERS = list(itertools.permutations(range(4)))  # of brightness, contrast, saturation, hue
UNCHANGED = (1.0, 1.0, 1.0, 0.0)  # factors of the identity


@dataclass(frozen=True)
class Draws:
    """The random parameters of each sample of a batch."""

    boxes: Tensor  # (B, 4) top, left, height, width in pixels
    flipped: Tensor  # (B,) bool
    colors: Tensor  # (4, B) factors of brightness, contrast and saturation; shift of hue in turns
    order: tuple[int, ...]  # of the rows of colors, for the whole batch
    grayscaled: Tensor  # (B,) 1.0 or 0.0
    sigmas: Tensor  # (B,) in pixels of the view, 0 for no blur

    def __getitem__(self, part: slice) -> "Draws":
        colors, grayscaled, sigmas = self.colors[:, part], self.grayscaled[part], self.sigmas[part]
        return Draws(self.boxes[part], self.flipped[part], colors, self.order, grayscaled, sigmas)


@dataclass(frozen=True)
class ImageViews:
    """Computes random views of each image of a batch.

    Args:
        size: side of a view in pixels.
        scale: smallest and largest area of a crop, as fractions of the image's area.
        ratio: smallest and largest width / height of a crop.
        flip: probability of a horizontal flip.
        jitter: strengths of brightness, contrast, saturation and hue: the first three multiply by a factor from
            [max(0, 1 − strength), 1 + strength], the last shifts the hue by up to ± strength ≤ 0.5 turns.
        jitter_probability: probability that a sample's colors are jittered.
        grey: probability of conversion to grayscale.
        blur: probability of a Gaussian blur, reflected at the borders, over about a tenth of the side.
        blur_sigma: smallest and largest standard deviation of that blur, in pixels of the view.
        mean: per channel, subtracted at the end; None leaves views in [0, 1].
        std: per channel, by which the difference is divided.

    Called with images (B, C, H, W), C = 1 or 3, uint8 or floats in [0, 1], and a generator on their device (see
    `hardneg.randomness.generator`), it returns float32 (B, C, size, size) without gradient. One channel skips
    saturation, hue and grayscale.

    Examples:
        >>> from hardneg.randomness import generator
        >>> images = torch.randint(0, 256, (4, 3, 40, 48), dtype=torch.uint8)
        >>> views = ImageViews(size=32)
        >>> first, second = (views(images, generator("cpu", 0, 5, view)) for view in range(2))
        >>> first.shape, bool((first == second).all())
        (torch.Size([4, 3, 32, 32]), False)
    """

    size: int
    scale: tuple[float, float] = (0.2, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    jitter: tuple[float, float, float, float] = (0.4, 0.4, 0.4, 0.1)
    jitter_probability: float = 0.8
    grey: float = 0.2
    blur: float = 0.0
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or self.size < 2:
            raise ValueError(f"size must be an integer ≥ 2 (pixels of a side), got {self.size!r}")
        for name, at_most in (("scale", 1.0), ("ratio", 1e6), ("blur_sigma", 1e6)):
            lowest, highest = _checked(name, getattr(self, name), 2, above=0, at_most=at_most)
            if lowest > highest:
                raise ValueError(f"{name} must hold the smaller value first, got {(lowest, highest)}: swap them")
        for name in ("flip", "jitter_probability", "grey", "blur"):
            checks.number(f"{name} (a probability)", getattr(self, name), at_least=0, at_most=1)
        *_, hue = _checked("jitter", self.jitter, 4, at_least=0, at_most=1e6)
        checks.number("jitter's hue, in turns,", hue, at_most=0.5)
        if self.mean is not None or self.std is not None:
            channels = 1 if isinstance(self.mean, Sequence) and len(self.mean) == 1 else 3
            _checked("mean", self.mean, channels)
            _checked("std", self.std, channels, above=0)

    @torch.no_grad()
    def __call__(
        self,
        images: Tensor,
        generator: torch.Generator,
        views: int = 1,
        first: int = 0,
        total: int | None = None,
        channels_last: bool = False,
    ) -> Tensor:
        """``views`` views of each image, first all first ones, then all second ones, (views·B, C, size, size).

        first, total: these images are the ones from index ``first`` on of the ``total`` images of all processes, and
        get the random numbers of these indices · channels_last: memory format of the result
        """
        _check_images(images, generator, self.mean)
        count = len(images) if total is None else total
        if not 0 <= first <= count - len(images):
            raise ValueError(f"first must be from 0 to total − {len(images)}, got {first} of {count}: count all images")
        shape = (NUMBERS, views, count)
        uniform = torch.rand(shape, generator=generator, dtype=torch.float32, device=images.device)
        if images.is_cuda and _has_triton():
            from hardneg.images import triton_views

            return triton_views.make_views(self, images, uniform, generator.initial_seed(), first, channels_last)
        return self.from_uniform(images, uniform, generator.initial_seed(), first, channels_last)

    def from_uniform(
        self, images: Tensor, uniform: Tensor, seed: int, first: int = 0, channels_last: bool = False
    ) -> Tensor:
        """The views of given random numbers, by tensor operations on any device.

        uniform: (NUMBERS, views, total) from [0, 1) · seed, first: see `draws` and `__call__`
        """
        views = uniform.shape[1]
        uniform = uniform[:, :, first : first + len(images)].flatten(1)  # (NUMBERS, views·B)
        if views > 1:
            images = images.repeat(views, 1, 1, 1)
        draws = self.draws(uniform, images.shape[2], images.shape[3], seed)
        layout = torch.channels_last if channels_last else torch.contiguous_format
        if images.is_cpu:
            _keep_freed_memory()
        return self.render(images, draws, layout)

    def plain(self, images: Tensor) -> Tensor:
        """The images without augmentation, for evaluation: scaled and standardized only."""
        views = images.to(torch.float32, copy=True)
        if images.dtype == torch.uint8:
            views = views.mul_(1 / 255)
        return self._standardized(views)

    def draws(self, uniform: Tensor, height: int, width: int, seed: int) -> Draws:
        """The random parameters of images of this height and width.

        uniform: (NUMBERS, B) numbers from [0, 1) · seed: determines the order of the color operations
        """
        gates, colors = uniform[-9:-5], uniform[-5:-1]  # (4, B) each
        probabilities = (self.flip, self.jitter_probability, self.grey, self.blur)
        flipped, jittered, grayscaled, blurred = (gates < column(probabilities, uniform.device)).unbind()  # (B,) each
        lowest, spans = self.color_range()
        colors = torch.addcmul(column(lowest, uniform.device), colors, column(spans, uniform.device))  # (4, B)
        least, most = self.blur_sigma
        return Draws(
            boxes=crop_boxes(uniform[:-9], height, width, self.scale, self.ratio),
            flipped=flipped,
            colors=torch.where(jittered, colors, column(UNCHANGED, uniform.device)),
            order=color_order(seed),
            grayscaled=grayscaled.float(),
            sigmas=(uniform[-1] * (most - least) + least) * blurred,
        )

    def color_range(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The smallest factors of brightness, contrast, saturation and shift of hue, and the length of each range."""
        lowest = (*(max(0.0, 1 - strength) for strength in self.jitter[:3]), -self.jitter[3])
        highest = (same + strength for same, strength in zip(UNCHANGED, self.jitter, strict=True))
        return lowest, tuple(most - least for most, least in zip(highest, lowest, strict=True))

    def adjusts(self, which: int, channels: int) -> bool:
        """Whether this color operation changes any image with this number of channels."""
        return self.jitter[which] > 0 and self.jitter_probability > 0 and (which < 2 or channels == 3)

    def render(self, images: Tensor, draws: Draws, layout: torch.memory_format = torch.contiguous_format) -> Tensor:
        """The views of images (B, C, H, W) with these random parameters, in this memory format."""
        batch, channels, height, width = images.shape
        pixels, weights = crop_taps(draws.boxes, draws.flipped, height, width, self.size)
        # At 96 pixels a CPU is twice as fast if the data of a block fits in its cache.
        block = max(1, CACHED // (channels * self.size**2)) if images.is_cpu else batch
        if batch <= block:
            return self._finish(resample(images, pixels, weights), draws).contiguous(memory_format=layout)
        made = torch.empty(batch, channels, self.size, self.size, device=images.device, memory_format=layout)
        for part in (slice(start, start + block) for start in range(0, batch, block)):
            made[part] = self._finish(resample(images[part], pixels[:, part], weights[:, part]), draws[part])
        return made

    def _finish(self, crops: Tensor, draws: Draws) -> Tensor:
        """Views of crops (B, C, size, size), changed in place: colors, grayscale, blur and standardization."""
        for which in draws.order:
            if self.adjusts(which, crops.shape[1]):
                ADJUSTMENTS[which](crops, draws.colors[which])
        if self.grey > 0 and crops.shape[1] == 3:
            crops.lerp_(luma(crops), draws.grayscaled.view(-1, 1, 1, 1))
        if self.blur > 0:
            crops = gaussian_blur(crops, draws.sigmas, self.blur_radius)
        return self._standardized(crops)

    @property
    def blur_radius(self) -> int:
        """Pixels on each side that a blur averages over."""
        return max(1, self.size // 20)

    def _standardized(self, views: Tensor) -> Tensor:
        if self.mean is None or self.std is None:
            return views
        mean, std = (column(tuple(numbers), views.device, 3) for numbers in (self.mean, self.std))  # (C, 1, 1) each
        return views.sub_(mean).div_(std)


def simclr_views(size: int, strength: float | None = None, **options: Any) -> ImageViews:
    """SimCLR's augmentations (Chen et al. 2020, appendix A; for sides up to 32 pixels its settings for CIFAR-10).

    size: side of a view; blur, with probability 0.5, above 32 pixels only · strength: of the color jitter, by default
    0.5 up to 32 pixels and 1 above · options: any argument of `ImageViews`, which takes precedence

    Examples:
        >>> simclr_views(32).jitter, simclr_views(32).blur, simclr_views(96).blur
        ((0.4, 0.4, 0.4, 0.1), 0.0, 0.5)
    """
    if strength is None:
        strength = 0.5 if size <= 32 else 1.0
    jitter = (0.8 * strength, 0.8 * strength, 0.8 * strength, 0.2 * strength)
    return ImageViews(size, **{"scale": (0.08, 1.0), "jitter": jitter, "blur": 0.5 if size > 32 else 0.0, **options})


def moco_views(size: int, **options: Any) -> ImageViews:
    """MoCo v2's augmentations (Chen et al. 2020); size: side of a view · options: as in `simclr_views`.

    Examples:
        >>> moco_views(224).scale
        (0.2, 1.0)
    """
    return ImageViews(size, **{"blur": 0.5, **options})


def color_order(seed: int) -> tuple[int, ...]:
    """The order of brightness (0), contrast (1), saturation (2) and hue (3) that this seed determines."""
    return ORDERS[mix(seed) % len(ORDERS)]


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    # Triton compiles the launcher of a kernel with the machine's C compiler.
    compilers = (os.environ.get("CC", ""), "gcc", "clang")
    return find_spec("triton") is not None and any(shutil.which(name) for name in compilers)


@lru_cache(maxsize=1)
def _keep_freed_memory() -> None:
    # Freeing a tensor of this size raises glibc's threshold for returning memory to the system; without that each
    # smaller tensor faults its pages in again: 15 ms instead of 5 for 256 views of 32 pixels. The memory itself is
    # never touched.
    torch.empty(31 << 18)


def _checked(name: str, given: object, count: int, **limits: float) -> Sequence[float]:
    if not isinstance(given, Sequence) or len(given) != count:
        raise ValueError(f"{name} must hold {count} numbers, got {given!r}")
    for entry in given:
        checks.number(name, entry, **limits)
    return given


def _check_images(images: Tensor, generator: torch.Generator, mean: Sequence[float] | None) -> None:
    if not isinstance(images, Tensor) or images.ndim != 4 or images.shape[1] not in (1, 3) or 0 in images.shape[2:]:
        given = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise ValueError(f"images must be a tensor (B, C, H, W) with C = 1 or 3, got {given}: permute or slice it")
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise ValueError(
            f"images must be uint8, or floats in [0, 1], got {images.dtype}: convert with .to(torch.uint8)"
        )
    if mean is not None and len(mean) != images.shape[1]:
        raise ValueError(f"mean and std hold {len(mean)} numbers, images {images.shape[1]} channels: give one for each")
    if generator.device.type != images.device.type:
        raise ValueError(
            f"generator must be on the images' device {images.device}, got one on {generator.device}: "
            "make it with hardneg.randomness.generator(images.device, …)"
        )


__all__ = [
    "Draws",
    "ImageViews",
    "crop_boxes",
    "crop_resize",
    "gaussian_blur",
    "lab_split",
    "luma",
    "moco_views",
    "rgb_to_lab",
    "simclr_views",
]
