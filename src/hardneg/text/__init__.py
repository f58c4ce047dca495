"""Sentences to train on, from plain lines, JSON lines, CSV, parquet, arrow or the Hugging Face hub."""

from hardneg.text.data import load_texts
from hardneg.text.text_set import TextSet

__all__ = ["TextSet", "load_texts"]
