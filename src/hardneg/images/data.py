"""Reading images: scikit-learn's digits, .npz files, folders, parquet, arrow, tar shards, and the Hugging Face hub."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hardneg import checks, spelling
from hardneg.images import arrays, folders, tables, tar_shards
from hardneg.images.image_set import Broken, ImageSet, StreamedImages, content_id, decode_all, fit, survey
from hardneg.images.objects import from_object
from hardneg.images.split_names import Found, described, warn_if_whole

_KINDS = (
    "'digits', 'hf:NAME', an .npz, .parquet, .arrow or .tar file, an image folder, a folder of parquet or tar shards, "
    "or a saved dataset"
)
_PLACEHOLDER = "FOLDER"  # the source of a recipe that the user has to name
_MOST_PIXELS = 8192  # of a side
IN_MEMORY = 4 * 2**30  # bytes of decoded images


def load_images(
    source: Any,
    split: str = "train",
    size: int | None = None,
    labels: bool = False,
    in_memory: int = IN_MEMORY,
) -> ImageSet | StreamedImages:
    """Images of one split of a source, always in the same order.

    Args:
        source: one of

            - ``"digits"``: scikit-learn's 1,797 digits of 1x8x8, pixels 0..16 times 15; 500 are ``test``;
            - an ``.npz`` file with ``{split}_images``, ``{split}_labels`` and ``classes``, or with ``images`` and
              ``labels``: uint8 (N, H, W), (N, H, W, C) or (N, C, H, W), C being the shorter of second and last axis;
            - a folder of images, or of one folder per class, or of one such folder per split; links to files and
              folders elsewhere are followed, links back into the folder are not, and each file is read once;
            - a ``.parquet`` or ``.arrow`` file, a folder of parquet files, or what ``datasets`` saved to disk;
            - a ``.tar`` file or a folder of tar shards, in the layout of webdataset: ``KEY.jpg`` and ``KEY.cls``;
            - ``"hf:NAME"`` or ``"hf:NAME:CONFIG"``: a dataset of the Hugging Face hub;
            - an object: an `ImageSet`, a ``datasets.Dataset``, an array of images or a tuple (images, labels), a
              mapping from split to one of these, or a function of the split that returns one of these.
        split: name of the split; a source without splits is read whole, with a warning unless this is ``"train"``.
        size: resize the shorter side to this length and crop the center; needed if images differ in size.
        labels: True if labels are needed: a source without labels is then an error.
        in_memory: largest size in bytes of a set that is decoded into memory; a larger one is streamed.

    Examples:
        >>> digits = load_images("digits", split="test", labels=True)
        >>> len(digits), digits.shape, digits.labels[:5].tolist()
        (500, (1, 8, 8), [0, 4, 0, 4, 1])
    """
    if size is not None and (not isinstance(size, int) or size < 1):
        raise ValueError(f"size must be an integer ≥ 1 or None, got {size!r}")
    if size is not None and size > _MOST_PIXELS:
        raise ValueError(f"size={size} is more than {_MOST_PIXELS} pixels a side: lower it")
    checks.number("in_memory", in_memory, at_least=0)
    images = _load(source, split, size, in_memory)
    if labels and (images.labels is None or not bool((images.labels >= 0).any())):
        raise ValueError(
            f"labels=True, but {described(source)} has no labels for split={split!r}: use one folder per class, "
            "an array 'labels' in an .npz, or a column 'label' of numbers or names in parquet; "
            "or choose a method without labels"
        )
    return images


def _load(source: Any, split: str, size: int | None, in_memory: int) -> ImageSet | StreamedImages:
    found = find(source, split, in_memory)
    if isinstance(found, Found):
        return _decoded(found, split, size, in_memory)
    if isinstance(found, StreamedImages) or found.ids is not None:
        return found if isinstance(found, StreamedImages) else _resized(found, size)
    ids = torch.tensor([content_id(image) for image in found.images.numpy()])  # (N,)
    return _resized(replace(found, ids=ids), size)


def find(source: Any, split: str, in_memory: int = IN_MEMORY) -> ImageSet | StreamedImages | Found:
    """The images of a split of a source: arrays, or images still to be decoded; arguments as for `load_images`."""
    if not isinstance(source, str | Path):
        return from_object(source, split)
    if source == "digits":
        return arrays.digits(split)
    if isinstance(source, str) and source.startswith("hf:"):
        return tables.from_hub(source, split)
    path = Path(source).expanduser()
    if not path.exists():
        from hardneg.images.published import SETS

        if path.suffix == ".npz" and path.stem in SETS:
            raise FileNotFoundError(f"source={str(source)!r} does not exist: make it with hardneg data {path.stem}")
        if path.name == _PLACEHOLDER:
            raise FileNotFoundError(f"no data are named: add source={_PLACEHOLDER} with your folder")
        similar = spelling.nearest(path.name, _names_in(path.parent))
        remedy = f"did you mean {str(path.with_name(similar))!r}?" if similar else f"give {_KINDS}"
        raise FileNotFoundError(f"source={str(source)!r} does not exist: {remedy}")
    if path.is_dir():
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            return tables.from_saved(path, split)
        if parquet := _shards(path, ".parquet"):
            return tables.from_parquet(path, tables.files_of_split(path, parquet, split), split, parquet)
        # An archive next to the images that were unpacked from it is not a shard.
        if (tars := _shards(path, ".tar")) and not folders.holds_images(path):
            return tar_shards.from_shards(path, tables.files_of_split(path, tars, split), split, tars)
        return folders.from_folder(path, split)
    match checks.regular_file(path).suffix.lower():
        case ".npz":
            return arrays.from_npz(path, split, in_memory)
        case ".parquet":
            warn_if_whole(path, split)
            return tables.from_parquet(path, [path], split, [path])
        case ".arrow":
            return tables.from_arrow(path, split)
        case ".tar":
            warn_if_whole(path, split)
            return tar_shards.from_shards(path, [path], split, [path])
    raise ValueError(
        f"source={str(source)!r} is a {path.suffix or 'suffixless'} file, which cannot be read: give {_KINDS}"
    )


def _shards(folder: Path, suffix: str) -> list[Path]:
    """The files of this suffix in a folder and in the folders below it, each once."""
    files = [file for file in (*folder.glob(f"*{suffix}"), *folder.glob(f"*/*{suffix}")) if not file.is_dir()]
    return folders.each_once([checks.regular_file(file) for file in files])


def _names_in(folder: Path) -> list[str]:
    """The names of the files and folders in a folder; none if it cannot be read."""
    try:
        return [entry.name for entry in folder.iterdir()]
    except OSError:
        return []


def _decoded(found: Found, split: str, size: int | None, in_memory: int) -> ImageSet | StreamedImages:
    encoded, labels, classes, name, sample_ids = found
    if len(encoded) == 0:
        raise ValueError(f"{name} has no rows: check the source")
    broken = Broken(len(encoded), name.removesuffix(f"-{split}"))
    shape = survey(encoded, size, broken)
    if len(encoded) * int(np.prod(shape)) > in_memory:
        encoded = encoded.with_random_access() if isinstance(encoded, tables.ParquetImages) else encoded
        streamed = StreamedImages(encoded, shape, size, labels, classes, name, broken)
        streamed.sample_ids = sample_ids
        images: ImageSet | StreamedImages = streamed
    else:
        pixels, sound, ids = decode_all(encoded, shape, size, broken)  # (n, C, H, W), (n,), (n,)
        named = None if sample_ids is None else [sample_ids[row] for row in sound.tolist()]
        labels = None if labels is None else labels[sound]
        images = ImageSet(pixels, labels, classes, name, ids, sample_ids=named)
    if len(broken):
        warnings.warn(str(broken), stacklevel=4)
    return images


def _resized(images: ImageSet, size: int | None) -> ImageSet:
    if size is None or images.shape[1:] == (size, size):
        return images
    needed = len(images) * images.shape[0] * size * size
    if needed > IN_MEMORY:
        raise ValueError(
            f"with size={size} the {len(images):,} images of {images.name} need {needed / 1e9:,.1f} GB, more than the "
            f"{IN_MEMORY / 1e9:,.1f} GB that are held in memory: lower it"
        )
    pixels = torch.cat([fit(chunk, size) for chunk in torch.split(images.images, 1024)])  # (N, C, size, size)
    return replace(images, images=pixels)
