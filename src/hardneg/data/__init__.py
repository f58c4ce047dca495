"""Images to train on, from arrays, folders, parquet, arrow or the Hugging Face hub."""

from hardneg.data.files import load_images
from hardneg.data.images import ImageSet, StreamedImages

__all__ = ["ImageSet", "StreamedImages", "load_images"]
