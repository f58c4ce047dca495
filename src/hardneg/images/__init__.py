"""Images to train on, from arrays, folders, parquet, arrow or the Hugging Face hub."""

from hardneg.images.data import load_images
from hardneg.images.image_set import ImageSet, StreamedImages
from hardneg.images.split_names import UndividedWarning
from hardneg.images.splits import load_split

__all__ = ["ImageSet", "StreamedImages", "UndividedWarning", "load_images", "load_split"]
