"""Files that appear complete or not at all, and JSON in them."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """A new file for writing that takes the place of ``path`` when it is complete; after an error nothing is left."""
    fresh = path.with_name(f".{path.name}.{uuid.uuid4().hex}.new")  # unique to this call
    try:
        with fresh.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # a power cut must not leave an empty file
        os.replace(fresh, path)
    except OSError as error:
        if error.errno is not None and error.filename is None:  # as of a full disk: name the file
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        fresh.unlink(missing_ok=True)
