"""What callers may pass: numbers and names, and for the control plane ids and arrays of ints. Messages name the argument, what was
expected and what came.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt

from .array_types import Ints, Tokens

_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
_INT32_MOST = 2**31 - 1
_MOST = 2**40  # no pool could hold so many tokens, and sums of them are exact
_NEW_REQUEST = {"n", "token_ids", "extra_key"}  # arguments of `add_request` beside the id


def integer(value: Any, name: str, low: int, high: int | None = None) -> int:
    """`value` as an int of at least `low` and at most `high`; raises ValueError, or TypeError when it is no integer."""
    if type(value) is int and value >= low and high is None:
        return value
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name}: expected an integer, got {value!r}")
    if value < low or (high is not None and value > high):
        limits = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name}: expected an integer {limits}, got {value}")
    return int(value)


def number(value: Any, name: str, low: float, high: float = math.inf) -> Any:
    """`value`, a number from `low` to `high`; raises ValueError, or TypeError when it is no number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected a number, got {value!r}")
    compared: Any = value  # as it is: an int may be too large for a float
    if not low <= compared <= high:
        raise ValueError(f"{name}: expected a number from {low} to {high}, got {value}")
    return value


def finite(value: Any, name: str, wanted: str = "a finite number", above: float = -math.inf) -> float:
    """`value`, a finite number above `above`, as a float; `wanted` says what is. Raises ValueError, or TypeError when it is no number.

    It must still be one as float32, which is what kernels compute in.
    """
    if type(value) is not float:
        array = host_array(value, name)
        if array.ndim or not is_real(array.dtype):
            raise TypeError(f"{name}: expected {wanted}, got {value!r}")
        value = float(array)
    with np.errstate(over="ignore", under="ignore"):
        stored = np.float32(value)
    if not (stored > above and np.isfinite(stored)):
        raise ValueError(f"{name}: expected {wanted}, in float32, got {value!r}")
    return float(value)


def is_real(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is one of numbers, not complex, ours of `ml_dtypes` included; bool is none."""
    return dtype.kind in "fiu" or (dtype.kind == "V" and np.can_cast(dtype, np.float64))


def count(value: Any, name: str, *, optional: bool = False) -> None:
    """Raise ValueError unless `value` is an integer from 1 to what int32 holds, as kernels take it; or None, where that is `optional`."""
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{name}: expected {'None or ' * optional}an integer of at least 1, got {value!r}")
    if value > _INT32_MOST:
        raise ValueError(f"{name}: expected {'None or ' * optional}an integer of at most 2**31 - 1, got {value}")


def flag(value: Any, name: str) -> bool:
    """`value` as a bool; raises TypeError for all else, since "no" and an array of bools are true as well."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise TypeError(f"{name}: expected True or False, got {value!r}")


def choice(value: Any, name: str, choices: Sequence[str | None]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if not (value is None or isinstance(value, str)) or value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(str(each) for each in choices)}, got {value!r}")


def host_array(values: Any, name: str, wanted: str = "an array of numbers on the host") -> npt.NDArray[Any]:
    """`values` as an array on the host; raises ValueError or TypeError for what NumPy makes none of."""
    try:
        return np.asarray(values)
    except (TypeError, ValueError) as error:  # a list of lists of several lengths, an array on a device
        raise type(error)(f"{name}: expected {wanted}, got {values!r} ({error})") from error


def integers(values: npt.ArrayLike, name: str) -> Ints:
    """`values` as an `[n] int64` array; raises TypeError for other dtypes and ValueError for other shapes."""
    array = host_array(values, name, "a flat list of integers")
    if array.dtype == _INT64 and array.ndim == 1:
        return array
    if array.dtype == _INT32 and array.ndim == 1:
        return array.astype(np.int64)
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected integers, got dtype {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"{name}: expected one dimension, got shape {array.shape}")
    if array.dtype == np.uint64 and array.size and array.max() >= 2**63:
        raise ValueError(f"{name}: expected values that fit int64, got {array.max()}")
    return array.astype(np.int64)


def listed(ids: Iterable[Hashable], name: str = "ids") -> Sequence[Hashable]:
    """`ids` as a list or tuple; raises TypeError for a single id."""
    if isinstance(ids, (list, tuple)):
        return ids
    if isinstance(ids, (str, bytes)) or not is_iterable(ids):
        raise TypeError(f"{name}: expected a list of ids, got {ids!r}; write [{ids!r}]")
    return list(ids)


def is_iterable(values: Any) -> bool:
    """Whether `values` can be iterated over, which an array of no dimension only pretends."""
    return isinstance(values, Iterable) and getattr(values, "ndim", 1) > 0


def counts_of(n: int | npt.ArrayLike, size: int, name: str = "n") -> Ints:
    """`n` as `[size] int64`, none negative; what no pool could hold is cut to 2**40."""
    if isinstance(n, (int, np.integer)):
        return np.full(size, min(integer(n, name, 0), _MOST))
    counts = integers(n, name)
    if len(counts) != size:
        raise ValueError(f"{name}: expected one for each of {size} requests, got {len(counts)}")
    if size and counts.min() < 0:
        raise ValueError(f"{name}: expected integers of at least 0, got {counts.min()}")
    return np.minimum(counts, _MOST)


def new_tokens(n: int | None, token_ids: npt.ArrayLike | None) -> tuple[int, Tokens | None]:
    """How many tokens of a new request get slots at most, and its tokens when they are given."""
    if token_ids is None:
        if n is None:
            raise TypeError("n: expected a number of tokens, or token_ids, got neither")
        return int(counts_of(n, 1)[0]), None
    tokens = tokens_of(token_ids)
    return len(tokens) if n is None else min(integer(n, "n", 0), len(tokens)), tokens


def new_requests(new: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """`new` as a list of arguments of `add_request`, each without an id."""
    calls: list[Any] = [new] if isinstance(new, Mapping) or not is_iterable(new) else list(new)
    for arguments in calls:
        if calls[0] is new or not isinstance(arguments, Mapping) or not _NEW_REQUEST.issuperset(arguments):
            raise TypeError(
                f'new: expected a list of arguments of add_request (n, token_ids, extra_key), as in [{{"n": 5}}], got {new!r}'
            )
    return calls


def tokens_of(values: npt.ArrayLike) -> Tokens:
    """`values` as `[n] int32`."""
    if isinstance(values, np.ndarray) and values.dtype == _INT32 and values.ndim == 1:
        return np.ascontiguousarray(values)
    wide = integers(values, "token_ids")
    if len(wide) and (wide.min() < -(2**31) or wide.max() >= 2**31):
        raise ValueError(f"token_ids: expected values of int32, got {wide.min()} to {wide.max()}")
    return wide.astype(np.int32)


def split_tokens(token_ids: npt.ArrayLike | Sequence[npt.ArrayLike], open_: Ints) -> tuple[Ints, Tokens]:
    """How many tokens are meant for each request, and all of them; `open_ [n]` tokens are not committed yet."""
    if isinstance(token_ids, np.ndarray) and token_ids.ndim == 2:
        token_ids = list(token_ids)
    if isinstance(token_ids, (list, tuple)) and len(token_ids) and np.ndim(token_ids[0]) == 1:
        parts = [tokens_of(part) for part in token_ids]
        if len(parts) != len(open_):
            raise ValueError(f"token_ids: expected a list for each of {len(open_)} requests, got {len(parts)}")
        return np.array([len(part) for part in parts]), np.concatenate(parts)
    tokens = tokens_of(token_ids)  # type: ignore[arg-type]
    if len(tokens) != np.add.reduce(open_):
        raise ValueError(
            f"token_ids: expected the {open_.sum()} tokens that are not committed, got {len(tokens)}; a list with the tokens of each "
            "request may have fewer"
        )
    return open_, tokens
