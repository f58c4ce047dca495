"""Which rows were stored in a memory before a loss compared them with it, and so are among their own negatives.

Rows are recognized by their storage, their address and the version of their values. Nothing is read from a device.
"""

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, UntypedStorage

_KEPT = 1024  # rows of a storage; a data set in one storage would otherwise add an entry per batch


@dataclass
class _Order:
    """What happened to the rows of a memory.

    compared: {address: version} of the rows that a loss compared with it last, by storage · unseen: storage, address
    and version of the rows that were stored last, if no loss had compared them
    """

    compared: WeakKeyDictionary[UntypedStorage, dict[int, int]] = field(default_factory=WeakKeyDictionary)
    unseen: tuple[ref[UntypedStorage], int, int] | None = None


# By the storage of the memory, and not in the memory: a weak reference cannot be pickled.
_orders: WeakKeyDictionary[UntypedStorage, _Order] = WeakKeyDictionary()


def note_stored(memory: Tensor, rows: Tensor) -> None:
    """Note that rows (B, d) were stored in a memory (N, d)."""
    if (found := _identified(memory, rows)) is not None:
        order, storage, address, version = found
        seen = order.compared.get(storage, {}).get(address) == version
        order.unseen = None if seen else (ref(storage), address, version)


def stored_first(memory: Tensor, rows: Tensor | None) -> bool:
    """Whether the rows were the last that were stored in the memory, before any loss compared them; notes that one did.

    Examples:
        >>> memory, keys = torch.zeros(8, 2), torch.ones(4, 2)
        >>> note_stored(memory, keys)
        >>> stored_first(memory, keys), stored_first(memory, torch.ones(4, 2))
        (True, False)
    """
    if (found := _identified(memory, rows)) is None:
        return False
    order, storage, address, version = found
    compared = order.compared.setdefault(storage, {})
    compared.pop(address, None)  # to the end: the first is the oldest
    compared[address] = version
    if len(compared) > _KEPT:
        del compared[next(iter(compared))]
    return order.unseen is not None and order.unseen[0]() is storage and order.unseen[1:] == (address, version)


def _identified(memory: Tensor, rows: Tensor | None) -> tuple[_Order, UntypedStorage, int, int] | None:
    """The record of the memory, and storage, address and version of the rows; None where these do not exist."""
    if torch.compiler.is_compiling() or not (isinstance(memory, Tensor) and isinstance(rows, Tensor)):
        return None
    if rows.is_inference() or not rows.numel():
        return None
    try:
        place = memory.untyped_storage()
        found = rows.untyped_storage(), rows.data_ptr(), rows._version
    except (NotImplementedError, RuntimeError):  # a subclass of Tensor without a storage of its own
        return None
    if (order := _orders.get(place)) is None:
        order = _orders[place] = _Order()
    return order, *found
