"""Where chains of identities begin: one root for each `extra_key`, so that the key is part of everything after it.

A root is a number. A key that no request and no cached block needs any more is forgotten when as many again have come, so that a key
for every request (a salt, say) costs no memory for good; should it come again, it gets a new number.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

_FEW = 1024  # so many keys are kept without a look at who needs them


class Roots:
    """Numbers of keys, and keys of numbers."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._keys: dict[int, Any] = {}  # extra_key of each root
        self._most = _FEW  # so many may be there before the next look

    def find(self, extra_key: Hashable | Mapping[str, Hashable]) -> int:
        """Number of the root of `extra_key`, 0: there is none. Raises TypeError for a key that has no hash."""
        try:
            return self._numbers.get(_frozen(extra_key), 0)
        except TypeError as error:
            raise TypeError(
                f"extra_key: expected hashable values, got {extra_key!r} ({error}); write tuples in place of lists"
            ) from error

    def add(self, extra_key: Hashable | Mapping[str, Hashable], number: int) -> None:
        """Make `number` the root of a key that has none."""
        self._numbers[_frozen(extra_key)] = number
        self._keys[number] = dict(extra_key) if isinstance(extra_key, Mapping) else extra_key

    @property
    def many(self) -> bool:
        """Whether it is time for `keep`."""
        return len(self._numbers) >= self._most

    def keep(self, needed: Iterable[int]) -> None:
        """Forget all roots but those whose numbers are `needed`."""
        needed = set(needed)
        self._numbers = {key: number for key, number in self._numbers.items() if number in needed}
        self._keys = {number: self._keys[number] for number in self._numbers.values()}
        self._most = max(2 * len(self._numbers), _FEW)

    def keys_of(self, numbers: Iterable[int]) -> dict[int, Any]:
        """The keys of those of `numbers` that are roots."""
        return {number: self._keys[number] for number in numbers if number in self._keys}

    def clear(self) -> None:
        """Forget all roots."""
        self._numbers.clear()
        self._keys.clear()


def _frozen(key: Hashable | Mapping[str, Hashable]) -> Hashable:
    """`key` so that different kinds and types are never equal: {"salt": "x"} is not {"adapter": "x"}, (1,) is not (True,)."""
    if isinstance(key, Mapping):
        return "parts", frozenset((kind, _frozen(part)) for kind, part in key.items())
    if isinstance(key, tuple):
        return type(key), tuple(_frozen(part) for part in key)
    return "whole", type(key), key
