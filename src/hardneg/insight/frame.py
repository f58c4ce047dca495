"""A self-contained HTML page of sections: it loads nothing, and runs its own script only."""

import base64
import hashlib
import os
import secrets
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from hardneg import checks
from hardneg.insight.contents import Part, visible


def framed(title: str, heading: str, counts: str, facts_html: str, parts: Sequence[Part]) -> str:
    """A page of sections that loads nothing; ``title`` is escaped here, the other texts are HTML."""
    assets = [*dict.fromkeys(name for part in parts for name in part.assets)]
    script = "\n".join(asset(name) for name in ("page.js", *assets) if name.endswith(".js"))
    # The content security policy allows this script only, and no requests.
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Template(asset("page.html")).substitute(
        title=visible(title),
        sources=heading,
        counts=counts,
        facts=facts_html,
        navigation="".join(f'<li><a href="#{part.key}">{escape(part.title)}</a></li>' for part in parts),
        parts="".join(part.html() for part in parts),
        style="\n".join(asset(name) for name in ("page.css", *assets) if name.endswith(".css")),
        script=script,
        script_hash=allowed,
    )


def asset(name: str) -> str:
    """The text of a file of the folder ``page``."""
    return resources.files("hardneg.insight").joinpath("page", name).read_text(encoding="utf-8")


def checked_target(to: str | Path, example: str) -> Path:
    """The path of a page to write; raises if it is a folder, or if its folder does not exist."""
    path = Path(to)
    if path.is_dir():
        raise ValueError(f"to={str(path)!r} is a folder: name a file in it, such as {path / example}")
    checks.has_folder(path)
    return path


def write_page(to: Path, html: str) -> Path:
    """Write a page, replacing an older one at once; returns its path."""
    # The name cannot be guessed, so that no link can be placed there in advance.
    fresh = to.with_name(f".{secrets.token_hex(8)}-{to.name}")
    try:
        # A name in the page may come from a file name that is not UTF-8.
        fresh.write_text(html, encoding="utf-8", errors="backslashreplace")
        os.replace(fresh, to)
    finally:
        fresh.unlink(missing_ok=True)
    return to
