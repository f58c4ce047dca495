"""Features of whole sets of images."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hardneg.evaluation.features import extract
from hardneg.images.image_set import ImageSet, StreamedImages


def extract_set(
    encoder: nn.Module,
    images: ImageSet | StreamedImages,
    batch_size: int = 512,
    prepare: Callable[[Tensor], Tensor] | None = None,
    workers: int = 0,
) -> tuple[Tensor, Tensor]:
    """Features and labels of a whole set, in memory or streamed; broken and unlabeled images are left out.

    encoder, batch_size, prepare: as for `extract` · workers: processes that decode a streamed set · returns (n, d)
    float32 and (n,) int64, on the device of the encoder

    Examples:
        >>> pixels = torch.zeros(3, 1, 2, 2, dtype=torch.uint8)
        >>> features, labels = extract_set(nn.Flatten(), ImageSet(pixels, torch.tensor([0, -1, 1]), ("cat", "dog")))
        >>> features.shape, labels
        (torch.Size([2, 4]), tensor([0, 1]))
    """
    _check_labels(images)
    return labeled(extract_all(encoder, images, batch_size, prepare, workers), images)


def labeled(features: Tensor, images: ImageSet | StreamedImages) -> tuple[Tensor, Tensor]:
    """The features (N, d) of the images that have a label and are not broken, and their labels."""
    labels = _check_labels(images).to(features.device)
    kept = labels >= 0
    if isinstance(images, StreamedImages):
        kept &= ~images.broken.flags.to(kept.device)
    return (features, labels) if bool(kept.all()) else (features[kept], labels[kept])


def extract_all(
    encoder: nn.Module,
    images: ImageSet | StreamedImages,
    batch_size: int = 512,
    prepare: Callable[[Tensor], Tensor] | None = None,
    workers: int = 0,
) -> Tensor:
    """Features (N, d) of every image of a set; a broken one has those of the image that replaces it.

    Arguments as for `extract_set`.
    """
    if isinstance(images, ImageSet):
        return extract(encoder, images.images, batch_size, prepare=prepare)
    loader = DataLoader(images, batch_size=batch_size, num_workers=workers)
    return torch.cat([extract(encoder, batch, batch_size, prepare=prepare) for _, batch in loader])


def _check_labels(images: ImageSet | StreamedImages) -> Tensor:
    if images.labels is None:
        raise ValueError(f"{images.name} has no labels, and an evaluation needs them: give labels with the images")
    return images.labels
