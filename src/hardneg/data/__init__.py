"""Images to train on, from arrays, folders, parquet, arrow or the Hugging Face hub."""

from hardneg.data.files import load_images
from hardneg.data.images import ImageSet, StreamedImages
from hardneg.data.sources import UndividedWarning
from hardneg.data.splits import load_split

__all__ = ["ImageSet", "StreamedImages", "UndividedWarning", "load_images", "load_split"]
