"""Which calls the CPU backend repeats without checking them again (see `cpu_repeat`): the same options, on other arrays of the same forms.

Options are the same when they are the same objects, since 1 == True, and of kinds that nobody can change in place. Compiled code compares
the arrays.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .arrays import Array

_CONSTANT = (type(None), bool, int, float, str)


class RepeatedCall:
    """A call of `paged_attention` with a plan: compiled code compares the rows of `q` with those that the plan has now."""

    __slots__ = ("options", "over", "step", "where")

    def __init__(self, attention: Any, step: Any, *options: Any) -> None:
        self.over, self.step, self.where, self.options = attention.over, step, step.where, options

    def repeat(
        self, q: Any, k_cache: Any, v_cache: Any, out: Any, layout: Any, kv_dtype: Any, scale: Any, causal: Any, window: Any,
        chunk: Any, softcap: Any, num_splits: Any, share_prefix: Any, k_scale: Any, v_scale: Any,
    ) -> Array | None:  # fmt: skip
        """The result, or None for a call that must be checked."""
        a, b, c, d, e, f, g, h, i, j, k = self.options
        if (
            layout is a and kv_dtype is b and scale is c and causal is d and window is e and chunk is f and softcap is g
            and num_splits is h and share_prefix is i and k_scale is j and v_scale is k
        ):  # fmt: skip
            result: Array | None = self.over(q, k_cache, v_cache, self.where, out)
            return result
        return None


class RepeatedLayer:
    """A layer of a `KVCache`: what an attention and a write of it left to be repeated.

    Attributes:
        group: of the layer.
        pages: where the addresses of the layer's pages stand.
        attend, write: methods of `RepeatedAttention` and `RepeatedWrite`; None: nothing to repeat yet.
        options: with which the attention was called.
        written: address of the write's record where that can be done before the attention in the same call, else 0.
    """

    __slots__ = ("attend", "group", "options", "pages", "write", "written")

    def __init__(self, group: int, pages: int) -> None:
        self.group, self.pages = group, pages
        self.options: dict[str, Any] = {}
        self.attend: Any = None
        self.write: Any = None
        self.written = 0

    def repeat_attention(self, made: Any, options: dict[str, Any], others: Iterable[RepeatedLayer]) -> None:
        """Repeat `made`, a `RepeatedAttention`, for calls with these options; `others` are the layers of the cache."""
        self.attend, self.options = _shared(made.attend, (x.attend for x in others)), options
        self._combine()

    def repeat_write(self, made: Any, others: Iterable[RepeatedLayer]) -> None:
        """Repeat `made`, a `RepeatedWrite`."""
        self.write = _shared(made.write, (x.write for x in others))
        self._combine()

    def same_options(self, how: dict[str, Any]) -> bool:
        """Whether `how` are the options of the attention."""
        earlier = self.options
        return len(how) == len(earlier) and all(earlier.get(name, how) is x for name, x in how.items())

    def _combine(self) -> None:
        unscaled = "k_scale" not in self.options and "v_scale" not in self.options
        self.written = self.write.__self__.where if self.write is not None and unscaled else 0


def _shared(made: Any, others: Iterable[Any]) -> Any:
    """The method `made`, or that of an equal object among the others: what all layers use stays in the caches."""
    return next((x for x in others if x is not None and x.__self__.same(made.__self__)), made)


def cannot_change(*options: Any) -> bool:
    """Whether options are of kinds that nobody can change in place."""
    return all(type(x) in _CONSTANT for x in options)
