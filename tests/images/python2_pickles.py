"""Pickles as Python 2 wrote them, which the published CIFAR files are: bytes are strings, of protocol 2."""

import io
import pickle
import struct
from typing import Any, ClassVar


class _Pickler(pickle._Pickler):
    dispatch: ClassVar[dict[type, Any]] = dict(pickle._Pickler.dispatch)  # type: ignore[attr-defined]

    def save_bytes(self, data: bytes) -> None:
        head = b"U" + bytes([len(data)]) if len(data) < 256 else b"T" + struct.pack("<i", len(data))
        self.write(head + data)  # type: ignore[attr-defined]
        self.memoize(data)  # type: ignore[attr-defined]

    dispatch[bytes] = save_bytes


def dumps(content: Any) -> bytes:
    _Pickler(written := io.BytesIO(), protocol=2).dump(content)
    return written.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")
