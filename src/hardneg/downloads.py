"""Downloads of data sets: only when the user asks, checked, and never half-written."""

import hashlib
import http.client
import os
import urllib.request
from contextlib import ExitStack
from pathlib import Path

from hardneg.progress import progress

_TIMEOUT = 30  # seconds without an answer
_CHUNK = 1 << 20  # bytes


def download(url: str, file: Path, md5: str | None = None) -> Path:
    """Write what a URL holds to a file, whose folder is created; on any error nothing is written.

    md5: of the content, in hexadecimal; the download fails if it differs
    """
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        found = _fetch(url, part, file.name)
        if md5 is not None and found != md5:
            raise ValueError(f"its MD5 is {found}, not {md5}")
        part.replace(file)  # atomic
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"{url} could not be downloaded ({reason}): try again, or put {file.name} into {file.parent} yourself"
        ) from error
    finally:
        part.unlink(missing_ok=True)
    return file


def _fetch(url: str, part: Path, name: str) -> str:
    """Copy a URL to a file; returns the MD5."""
    digest = hashlib.md5(usedforsecurity=False)
    with ExitStack() as stack:
        response = stack.enter_context(urllib.request.urlopen(url, timeout=_TIMEOUT))
        part.parent.mkdir(parents=True, exist_ok=True)
        written = stack.enter_context(part.open("wb"))
        announced = int(response.headers.get("Content-Length") or 0)
        for _ in progress(range(max(1, -(-announced // _CHUNK))), f"downloading {name}"):
            while data := response.read(_CHUNK):
                digest.update(data)
                written.write(data)
                if announced:
                    break  # one step of the bar
        received = written.tell()
    if announced and received != announced:
        raise ValueError(f"{received:,} of {announced:,} bytes arrived")
    return digest.hexdigest()
