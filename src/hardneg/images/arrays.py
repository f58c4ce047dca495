"""Images as arrays: scikit-learn's digits and .npz files."""

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hardneg import checks
from hardneg.extras import required
from hardneg.images.image_set import ImageSet
from hardneg.images.split_names import called_name, number_names, unknown_split, warn_if_whole


def digits(split: str) -> ImageSet:
    """scikit-learn's digits; 500 of them, always the same, are the test split."""
    checks.choice("split", split, ("train", "test"))
    data = required("sklearn.datasets", "train").load_digits()
    order = torch.randperm(len(data.images), generator=torch.Generator().manual_seed(0))
    rows = (order[:500] if split == "test" else order[500:]).sort().values
    images = torch.from_numpy((15 * data.images).astype(np.uint8))[rows, None]  # (n, 1, 8, 8)
    labels = torch.from_numpy(data.target.astype(np.int64))[rows]  # (n,)
    return ImageSet(images.contiguous(), labels, tuple(str(digit) for digit in range(10)), f"digits-{split}")


def from_npz(path: Path, split: str, in_memory: int) -> ImageSet:
    """The arrays of one split; in_memory: largest size in bytes."""
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is not an .npz file, or only a part of one: write it with numpy.savez")
    with np.load(path, allow_pickle=False) as arrays:
        splits = [key.removesuffix("_images") for key in arrays.files if key.endswith("_images")]
        called = called_name(split, splits, path)
        if splits and called is None:
            raise unknown_split(path, split, splits)
        prefix = f"{called}_" if splits else ""
        if f"{prefix}images" not in arrays.files:
            raise ValueError(f"{path} needs 'images' or '{split}_images', got {', '.join(arrays.files)}")
        if not splits:
            warn_if_whole(path, split)
        size_in_bytes = arrays.zip.getinfo(f"{prefix}images.npy").file_size
        if size_in_bytes > in_memory:
            raise ValueError(
                f"{path} holds {size_in_bytes:,} bytes of images, above in_memory={in_memory:,}, and .npz cannot be "
                "streamed: raise in_memory or store the images as a folder or as parquet"
            )
        # The labels of all splits, so that they agree on the classes.
        wanted = [f"{prefix}images", "classes", *(key for key in arrays.files if key.endswith("labels"))]
        try:
            read = {key: arrays[key] for key in wanted if key in arrays.files}
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read ({error}): write plain arrays with numpy.savez") from error

    images = channels_first(read[f"{prefix}images"], path)  # (N, C, H, W)
    name = f"{path.stem}-{split}"
    if f"{prefix}labels" not in read:
        for key in read.keys() - {f"{name}_labels" for name in splits}:
            if key.endswith("labels"):
                raise ValueError(f"{key!r} of {path} are not labels for {split=}: name them '{prefix}labels'")
        return ImageSet(images, name=name)
    labels = read[f"{prefix}labels"]
    if labels.dtype.kind not in "iu" or labels.shape not in ((len(images),), (len(images), 1)):
        given = f"{labels.dtype} of shape {labels.shape}"
        raise ValueError(f"labels of {path} must be {len(images)} integers, got {given}: names belong in 'classes'")
    numbered = [part for key, part in read.items() if key.endswith("labels") and part.dtype.kind in "iu" and part.size]
    highest = max(int(part.max()) for part in numbered)
    classes = tuple(str(name) for name in read["classes"]) if "classes" in read else number_names(highest)
    return ImageSet(images, torch.from_numpy(labels.astype(np.int64).reshape(-1)), classes, name)


def channels_first(pixels: npt.NDArray[Any], path: Path | str) -> Tensor:
    """Images (N, C, H, W) from an array of one of three layouts; C is the shorter of second and last axis."""
    if pixels.dtype != np.uint8 or pixels.ndim not in (3, 4) or pixels.size == 0:
        given = f"{pixels.dtype} of shape {pixels.shape}"
        raise ValueError(
            f"images of {path} must be uint8 of shape (N, H, W), (N, H, W, C) or (N, C, H, W) and not empty, got "
            f"{given}: convert pixels in 0..1 with (255 * images).round().astype(numpy.uint8)"
        )
    images = checks.as_tensor("images", pixels)
    if images.dim() == 3:
        return images[:, None]  # (N, 1, H, W)
    if images.shape[3] <= images.shape[1]:
        images = images.permute(0, 3, 1, 2)  # (N, C, H, W)
    return images.contiguous()
