"""Embeddings of the past: a queue of keys, a bank with one row per instance, and clusters of its rows."""

from hardneg.memory.bank import MemoryBank
from hardneg.memory.clusters import Clusters
from hardneg.memory.queue import Queue

__all__ = ["Clusters", "MemoryBank", "Queue"]
