"""Which memory a launch may touch: the arrays whose addresses `launcher.pointer` gave out and the parameters hold."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Region:
    """`[begin, end)` of an array, reached through `pointer`, which stands at byte `offset` of the parameters."""

    begin: int
    end: int
    pointer: int
    offset: int


class Regions:
    """Extents of arrays by address, as long as their owner lives."""

    def __init__(self) -> None:
        self._extents: dict[int, tuple[int, int, weakref.ref[Array]]] = {}

    def pointer(self, array: Array) -> int:
        """The address of the first element; remembers the bytes from the lowest to the highest element."""
        address = int(array.ctypes.data)
        owner = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        begin, end = byte_bounds(array) if array.size else (address, address)
        known = self._extents.get(address)
        if known is not None and known[2]() is owner:  # two views that begin together: the wider counts
            begin, end = min(begin, known[0]), max(end, known[1])
        self._extents[address] = (begin, end, weakref.ref(owner))
        if len(self._extents) > 1000:
            self._extents = {key: extent for key, extent in self._extents.items() if extent[2]() is not None}
        return address

    def of(self, fields: list[tuple[int, str]], params: bytes) -> list[Region]:
        """The regions behind the pointer `fields` (offset, name) of `params`; null pointers have none."""
        found = []
        for offset, name in fields:
            pointer = int.from_bytes(params[offset : offset + 8], "little")
            if pointer:
                begin, end = self._find(pointer, name)
                found.append(Region(begin, end, pointer, offset))
        return found

    def _find(self, pointer: int, name: str) -> tuple[int, int]:
        extent = self._extents.get(pointer)
        if extent is not None and extent[2]() is not None:
            return extent[0], extent[1]
        for begin, end, owner in self._extents.values():  # a piece of a workspace
            if begin <= pointer < end and owner() is not None:
                return begin, end
        raise LookupError(f"parameter `{name}` holds {pointer:#x}, which `pointer` did not return for a living array")


def pointer_fields(dtype: np.dtype[Any], base: int = 0, prefix: str = "") -> list[tuple[int, str]]:
    """Offset and name of every uint64 in a structure, nested ones included."""
    if dtype.subdtype is not None:
        item, shape = dtype.subdtype
        count = int(np.prod(shape))
        return [f for i in range(count) for f in pointer_fields(item, base + i * item.itemsize, f"{prefix}[{i}]")]
    if dtype.fields is None:
        return [(base, prefix)] if dtype == np.uint64 else []
    fields = []
    for name, (item, offset, *_) in dtype.fields.items():
        fields += pointer_fields(item, base + offset, f"{prefix}.{name}" if prefix else name)
    return fields
