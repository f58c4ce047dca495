"""Escape invisible characters of untrusted text, such as names of files and classes, for terminals and HTML."""

import re

# Control characters except newline and tab, marks of writing direction, Unicode line separators, and the surrogates
# that represent bytes of a file name that is not UTF-8.
_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Replace invisible characters that change how text is displayed by escape sequences.

    Examples:
        >>> print(printable("photo\u202egnp.exe \x1b[31m"))
        photo\u202egnp.exe \x1b[31m
    """
    return _INVISIBLE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)
