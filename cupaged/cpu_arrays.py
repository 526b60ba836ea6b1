"""What compiled code reads of NumPy's array objects: where their data lie, and whether they have the form of earlier ones.

Asking NumPy for an address costs a microsecond an array, and comparing shapes and strides in Python several. An array object begins
with CPython's head, whose last word is the type; then come the data pointer, the number of axes, pointers to shape and strides, base,
dtype and flags (NumPy C-API, PyArrayObject). That is checked when this module is imported.

A form is FORM_WORDS int64: type, dtype and number of axes, then the shape, then the strides.
"""

from __future__ import annotations

import ctypes

import numpy as np

from .arrays import Array
from .cpu_vector import compiled, peek_int, peek_long, poke_long

_MOST_AXES = 4
FORM_WORDS = 3 + 2 * _MOST_AXES
_DATA = object.__basicsize__
_TYPE, _AXES, _SHAPE, _STRIDES, _DTYPE, _FLAGS = (_DATA + offset for offset in (-8, 8, 16, 24, 40, 48))
_WRITEABLE = 0x0400


def form_of(x: Array) -> list[int]:
    """The form of an array with at most four axes. Whoever keeps it keeps the dtype alive."""
    unused = [0] * (_MOST_AXES - x.ndim)
    return [id(type(x)), id(x.dtype), x.ndim, *x.shape, *unused, *x.strides, *unused]


def _check_layout() -> None:
    x = np.zeros((3, 5, 7), np.float32)[1:, ::2, ::-1]
    read = ctypes.c_int64.from_address

    def numbers(at: int) -> tuple[int, ...]:
        return tuple((ctypes.c_int64 * x.ndim).from_address(read(id(x) + at).value))

    for frozen in (False, True):
        x.flags.writeable = not frozen
        axes, flags = (ctypes.c_int32.from_address(id(x) + at).value for at in (_AXES, _FLAGS))
        found = (
            read(id(x) + _DATA).value,
            read(id(x) + _TYPE).value,
            read(id(x) + _DTYPE).value,
            axes,
            flags & _WRITEABLE == 0,
        )
        if found != (x.ctypes.data, id(type(x)), id(x.dtype), x.ndim, frozen) or (
            (numbers(_SHAPE), numbers(_STRIDES)) != (x.shape, x.strides)
        ):
            raise ImportError(
                "this Python does not lay out NumPy arrays as NumPy's C interface says, which the CPU backend relies on"
            )


_check_layout()


@compiled
def data_of(x: int) -> int:
    """The address of the data of the array whose id is `x`."""
    return int(peek_long(x + _DATA))


@compiled
def rows_of(x: int) -> int:
    """The length of an array's first axis."""
    return int(peek_long(peek_long(x + _SHAPE)))


@compiled
def can_be_written(x: int) -> bool:
    return bool(peek_int(x + _FLAGS) & _WRITEABLE)


@compiled
def has_form(x: int, form: int, first: int) -> bool:
    """Whether the object whose id is `x` is an array of this form; axes before `first` may have any length."""
    if peek_long(x + _TYPE) != peek_long(form):
        return False
    axes = peek_long(form + 16)
    if peek_long(x + _DTYPE) != peek_long(form + 8) or peek_int(x + _AXES) != axes:
        return False
    shape, strides = peek_long(x + _SHAPE), peek_long(x + _STRIDES)
    for n in range(axes):
        if n >= first and peek_long(shape + 8 * n) != peek_long(form + 24 + 8 * n):
            return False
        if peek_long(strides + 8 * n) != peek_long(form + 24 + 8 * (_MOST_AXES + n)):
            return False
    return True


@compiled
def extent(x: int) -> tuple[int, int]:
    """The addresses between which all of an array lies that has elements and a contiguous last axis."""
    begin, axes = data_of(x), peek_int(x + _AXES)
    end = begin
    for n in range(axes):
        stride = peek_long(peek_long(x + _STRIDES) + 8 * n)
        length = stride * (peek_long(peek_long(x + _SHAPE) + 8 * n) - 1)
        begin, end = begin + min(length, 0), end + max(length, 0)
        if n == axes - 1:
            end += stride
    return begin, end


@compiled
def lie_across(x: int, y: int) -> bool:
    """Whether one of two such arrays begins before the other ends."""
    x_begin, x_end = extent(x)
    y_begin, y_end = extent(y)
    return x_begin < y_end and y_begin < x_end


@compiled
def resolve(params: int, count: int) -> None:
    """Turn the first `count` fields from ids of arrays into addresses of their data; 0 stays 0."""
    for at in range(params, params + 8 * count, 8):
        x = peek_long(at)
        poke_long(at, data_of(x) if x else 0)
