"""Hard negatives from a corpus: exact search, rules with a reason for each candidate dropped, training sets."""

from hardneg.mining.negatives import mine
from hardneg.mining.result import Mined

__all__ = ["Mined", "mine"]
