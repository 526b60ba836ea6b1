"""Groups of layers that look back equally far.

Every group has block tables of its own over one pool of ids. A layer with a window or with chunks never looks at older tokens again, so
its group gives their blocks back while the request runs; their entries become -1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from .arguments import integer, is_iterable
from .array_types import Ints


@dataclass(frozen=True)
class Group:
    """Layers that share block tables.

    Args:
        layers: their numbers in the model, for `KVCache`; a `BlockAllocator` has no use for them.
        window: they see the last `window` tokens, the query's own included; None: all.
        chunk: they see only tokens of the query's own `chunk`-sized span; None: all.

    Raises ValueError or TypeError for a number below 1 or above 2**31 - 1, or no integer.
    """

    layers: Sequence[int] = ()
    window: int | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        if not is_iterable(self.layers):
            raise TypeError(f"layers: expected a list of layer numbers, got {self.layers!r}; write [{self.layers!r}]")
        object.__setattr__(self, "layers", tuple(integer(layer, "layers", 0) for layer in self.layers))
        for name in ("window", "chunk"):
            if getattr(self, name) is not None:  # kernels take int32
                object.__setattr__(self, name, integer(getattr(self, name), name, 1, 2**31 - 1))

    @property
    def limited(self) -> bool:
        """Whether old tokens ever leave the horizon."""
        return self.window is not None or self.chunk is not None

    def horizon(self, positions: Ints) -> Ints:
        """The first token that a query at each of `positions [n]` sees; later queries see none before it."""
        return first_visible(positions, self.window, self.chunk)

    def beyond(self, token: int) -> int:
        """The shortest length whose next query sees nothing before `token`."""
        lengths = [] if self.window is None else [token + self.window - 1]
        if self.chunk is not None:
            lengths.append(-(-token // self.chunk) * self.chunk)
        return min(lengths)


def first_visible(positions: Ints, window: int | None, chunk: int | None) -> Ints:
    """The first token that a query at each of `positions [n]` sees, 0 for a position below 0."""
    first = np.zeros_like(positions)
    if window is not None:
        np.maximum(positions - (window - 1), 0, out=first)
    if chunk is not None:
        np.maximum(first, positions // chunk * chunk, out=first)
    return first


def checked(groups: Iterable[Group] | None) -> list[Group]:
    """`groups` as a list, by default one of full attention; raises TypeError and ValueError."""
    if groups is None:
        return [Group()]
    if not is_iterable(groups):
        raise TypeError(f"groups: expected a list of cupaged.Group objects, got {groups!r}; write [{groups!r}]")
    result = list(groups)
    if not result:
        raise ValueError("groups: expected at least one group, got none; leave it out for one of full attention")
    for group in result:
        if not isinstance(group, Group):
            raise TypeError(f"groups: expected cupaged.Group objects, got {group!r}")
    return result
