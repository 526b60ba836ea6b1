"""Which calls of one layer of a `KVCache` the CPU backend repeats without checking them again (see `cpu_repeat`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class RepeatedLayer:
    """What an attention and a write of the layer left to be repeated.

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
        """Whether `how` are the options of the attention: the same objects, since 1 == True."""
        earlier = self.options
        return len(how) == len(earlier) and all(earlier.get(name, how) is x for name, x in how.items())

    def _combine(self) -> None:
        unscaled = "k_scale" not in self.options and "v_scale" not in self.options
        self.written = self.write.__self__.where if self.write is not None and unscaled else 0


def _shared(made: Any, others: Iterable[Any]) -> Any:
    """The method `made`, or that of an equal object among the others: what all layers use stays in the caches."""
    return next((x for x in others if x is not None and x.__self__.same(made.__self__)), made)
