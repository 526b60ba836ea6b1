"""bfloat16 arrays of the host through DLPack, which NumPy itself does not exchange.

The structs are those of DLPack 0.x (`dlpack.h`, DLManagedTensor), which `__dlpack__` without a version returns.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from .arrays import numpy_dtype

_BFLOAT = 4  # kDLBfloat


class _Tensor(ctypes.Structure):  # DLTensor
    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


class _Memory:
    """Memory of a capsule that NumPy can look at. The capsule is never renamed, so its own destructor frees what it holds."""

    def __init__(self, capsule: Any, interface: dict[str, Any]) -> None:
        self.capsule = capsule
        self.__array_interface__ = interface


def bfloat16_from_dlpack(x: Any) -> np.ndarray[Any, Any] | None:
    """`x` as a read-only NumPy array over the same memory, or None where it is anything but a bfloat16 array of the host."""
    capsule = x.__dlpack__()
    address = _pointer(capsule, b"dltensor")
    tensor = _Tensor.from_address(address)
    if tensor.code != _BFLOAT or tensor.bits != 16 or tensor.lanes != 1 or tensor.device_type != 1:
        return None
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(2 * s for s in tensor.strides[: tensor.ndim]) if tensor.strides else None
    interface = {
        "version": 3, "typestr": "<u2", "shape": shape, "strides": strides,
        "data": ((tensor.data or 0) + tensor.byte_offset, True),
    }  # fmt: skip
    return np.asarray(_Memory(capsule, interface)).view(numpy_dtype("bfloat16"))
