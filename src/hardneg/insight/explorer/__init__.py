"""The explorer: a page in which a person chooses an anchor, moves the settings of a loss, and sees its negatives."""

from hardneg.insight.explorer.page import Written, write_explorer

__all__ = ["Written", "write_explorer"]
