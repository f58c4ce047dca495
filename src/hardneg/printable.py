"""Text from elsewhere, such as names of files and classes, made harmless for a terminal or a page."""

import re

# Control characters but newline and tab, marks that change the direction of text, further line ends, and what stands
# for the bytes of a file name that is not UTF-8.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""The text with what cannot be seen, but acts on what can, written as an escape sequence.

    Examples:
        >>> print(printable("photo\u202egnp.exe \x1b[31m"))
        photo\u202egnp.exe \x1b[31m
    """
    return _HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)
