"""The explorer as a section of a page: its HTML, the data that its script reads, and the script."""

import json
from collections.abc import Mapping
from typing import Any

from hardneg.insight.contents import Part
from hardneg.insight.frame import asset

ASSETS = ("explorer.css", "negatives.js", "explorer.js")
HINT = (
    "Choose an anchor in the list or on the map. Move the sliders: the table shows which candidates are its negatives, "
    "their weights, their shares of the gradient, and the rule that leaves out the others."
)


def section(data: Mapping[str, Any], title: str = "Explorer") -> Part:
    """The section. data: by `page_data`"""
    # In a script element only "<" can end the element; nothing in it is interpreted as HTML.
    block = json.dumps(dict(data), separators=(",", ":")).replace("<", "\\u003c")
    body = f'{asset("explorer.html")}<script type="application/json">{block}</script>'
    return Part("explorer", title, HINT, body, ASSETS)
