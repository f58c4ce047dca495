"""The name that a misspelled one was meant to be. Does not import torch, so that the command line starts fast."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(given: str, names: Iterable[str]) -> str | None:
    """The name that is most like the given one, upper and lower case aside; None if none is like it.

    A name of one or two letters is suggested for a short text only: it is a part of too many words.

    Examples:
        >>> nearest("simCLR", ["simclr", "simcse"]), nearest("lerning_rate", ["learning_rate", "lr"])
        ('simclr', 'learning_rate')
        >>> nearest("nope", ["no", "yes"]), nearest("foo", ["nodes", "epochs"])
        (None, None)
    """
    lower = {name.lower(): name for name in names if len(name) > 2 or len(given) <= 3}
    near = get_close_matches(given.lower(), lower, n=1)
    return lower[near[0]] if near else None
