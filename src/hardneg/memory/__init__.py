"""Embeddings of earlier steps as candidates: a queue of keys, a bank with a row per instance, clusters of its rows."""

from hardneg.memory.bank import MemoryBank
from hardneg.memory.clusters import Clusters
from hardneg.memory.queue import Queue

__all__ = ["Clusters", "MemoryBank", "Queue"]
