"""Requests as rows of arrays: names, lengths, and block tables of each group of layers.

A row is an int, stable until its request is freed, then used again; it names the request in every group's tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from .arguments import integers, listed
from .array_types import Ints
from .groups import Group
from .tables import BlockTables, extended

T = TypeVar("T")

MAX_TOKENS = 2**31 - 1  # of a sequence: lengths go to kernels as int32


class Rows:
    """The requests of one allocator. Methods that check raise with nothing changed; the others trust their caller."""

    def __init__(self, block_size: int, groups: list[Group]) -> None:
        self.block_size = block_size
        self.row_of: dict[Hashable, int] = {}
        self.evicted: dict[Hashable, int] = {}  # rows that wait for their request: no table, and -1 for its length
        self.names: list[Hashable] = [None] * 8  # of each row, None where no request is
        self.groups = [BlockTables(block_size, 8, group) for group in groups]
        self.lengths = np.full(8, -1, np.int64)  # tokens, -1: no request
        self.known = np.zeros(8, np.int64)  # of these, committed: how many a prefix cache has been told
        self.root = np.zeros(8, np.int64)  # where the sequence begins in the prefix cache, 0: it takes no part
        self._stamp = np.zeros(8, np.int64)
        self._checked = b""  # rows known to be right
        self._vacant = list(range(7, -1, -1))  # rows without a request, the next one last

    def select(self, ids: Iterable[Hashable] | None, rows: npt.ArrayLike | None) -> Ints:
        """Rows `[n]` of requests named by ids or by rows.

        Raises TypeError unless exactly one is given, KeyError for a request that is not there, ValueError for one named twice and
        for an evicted one.
        """
        if (ids is None) == (rows is None):
            raise _neither_or_both(ids)
        if ids is not None:
            selected = self.of(ids)
        else:
            assert rows is not None
            selected = integers(rows, "rows")
            key = selected.tobytes()
            if key == self._checked:  # the rows of the last call, which a running batch names again and again
                return selected
            if len(selected):
                inside = selected.view(np.uint64).max() < len(self.lengths)  # a negative value is a huge one
                if not inside or self.lengths.take(selected).min() < 0:
                    self._refuse_rows(selected)
        if len(selected) > 1:
            order = np.arange(len(selected))
            self._stamp[selected] = order
            if np.count_nonzero(self._stamp.take(selected) == order) < len(selected):
                self._refuse_twice(selected)
        if rows is not None:
            self._checked = key
        return selected

    def select_any(self, ids: Iterable[Hashable] | None, rows: npt.ArrayLike | None) -> Ints:
        """`select` that takes evicted requests too."""
        if not self.evicted:
            return self.select(ids, rows)
        if (ids is None) == (rows is None):
            raise _neither_or_both(ids)
        if ids is not None:
            selected = self.of_any(ids)
        else:
            assert rows is not None
            selected, waiting = integers(rows, "rows"), set(self.evicted.values())
            for row in selected.tolist():
                if not (0 <= row < len(self.lengths) and (self.lengths[row] >= 0 or row in waiting)):
                    raise KeyError(f"rows: {row} is not the row of a request")
        if len(set(selected.tolist())) < len(selected):
            self._refuse_twice(selected)
        return selected

    def of(self, ids: Iterable[Hashable]) -> Ints:
        """Rows `[n]` of `ids`; raises KeyError for an unknown one, ValueError for an evicted one."""
        names = listed(ids)
        try:
            return np.fromiter(map(self.row_of.__getitem__, names), np.int64, len(names))
        except TypeError as error:
            raise TypeError(f"ids: expected hashable ids, got {names!r} ({error})") from error
        except KeyError as error:
            name = error.args[0]
        raise self._missing(name)

    def of_any(self, ids: Iterable[Hashable]) -> Ints:
        """`of` that takes evicted requests too."""
        if not self.evicted:
            return self.of(ids)
        return np.array([self.row_any(name) for name in listed(ids)], np.int64)

    def row(self, name: Hashable) -> int:
        """The row of one id; raises KeyError for an unknown one, ValueError for an evicted one."""
        try:
            row = self.row_of.get(name)
        except TypeError as error:
            raise _unhashable(name) from error
        if row is None:
            raise self._missing(name)
        return row

    def row_any(self, name: Hashable) -> int:
        """The row of one id, which may be evicted; raises KeyError."""
        try:
            row = self.evicted.get(name)
        except TypeError as error:
            raise _unhashable(name) from error
        return self.row(name) if row is None else row

    def check_new(self, names: Iterable[Hashable]) -> None:
        """Raises KeyError when one of `names` has a request, or stands there twice, and TypeError for one without a hash."""
        seen: set[Hashable] = set()
        for name in names:
            try:
                used = name in self.row_of or name in self.evicted or name in seen
            except TypeError as error:
                raise _unhashable(name) from error
            if used:
                raise KeyError(f"the id {name!r} is in use; free it first, or choose another")
            seen.add(name)

    def vacant(self, count: int) -> Ints:
        """`count` rows without a request, which `bind` then takes."""
        while len(self._vacant) < count:
            self._add_rows()
        return np.array(self._vacant[len(self._vacant) - count :][::-1], np.int64)

    def bind(self, names: Iterable[Hashable], rows: Ints) -> None:
        """Give the rows that `vacant` named to `names`."""
        for name, row in zip(names, rows.tolist(), strict=True):
            self.row_of[name] = row
            self.names[row] = name
        del self._vacant[len(self._vacant) - len(rows) :]

    def unbind(self, rows: Ints) -> None:
        """Forget the requests of `rows`, whose tables are empty by now."""
        for row in rows.tolist():
            name = self.names[row]
            del (self.row_of if name in self.row_of else self.evicted)[name]
            self.names[row] = None
        self._checked = b""
        self.lengths[rows] = -1
        self._vacant.extend(rows[::-1].tolist())

    def suspend(self, rows: Ints) -> None:
        """Note the requests of `rows`, whose tables are empty by now, as evicted: they keep names and rows."""
        for row in rows.tolist():
            self.evicted[self.names[row]] = row
            del self.row_of[self.names[row]]
        self._checked = b""
        self.lengths[rows] = -1

    def resume(self, rows: Ints, lengths: Ints) -> None:
        """Note the evicted requests of `rows` as present again."""
        for row in rows.tolist():
            self.row_of[self.names[row]] = row
            del self.evicted[self.names[row]]
        self.lengths[rows] = lengths

    def widen(self, columns: int) -> None:
        """Make room for `columns` in every table."""
        for group in self.groups:
            group.widen(columns)

    def _add_rows(self) -> None:
        old = len(self.lengths)
        new = old + max(8, old // 2)
        for group in self.groups:
            group.add_rows(new)
        self.names += [None] * (new - old)
        self.lengths = extended(self.lengths, new, -1)
        self.known, self.root = extended(self.known, new, 0), extended(self.root, new, 0)
        self._stamp = extended(self._stamp, new, 0)
        self._vacant[:0] = range(new - 1, old - 1, -1)

    def _missing(self, name: Hashable) -> Exception:
        if name in self.evicted:
            return ValueError(f"request {name!r} is evicted; restore it first, or free it")
        return KeyError(f"no request has the id {name!r}")

    def _refuse_twice(self, rows: Ints) -> None:
        row = next(row for row, count in Counter(rows.tolist()).items() if count > 1)
        raise ValueError(f"request {self.names[row]!r} is named twice; name each one once")

    def _refuse_rows(self, rows: Ints) -> None:
        dead = next(int(row) for row in rows if not 0 <= row < len(self.lengths) or self.lengths[row] < 0)
        if dead in self.evicted.values():
            raise self._missing(self.names[dead])
        raise KeyError(f"rows: {dead} is not the row of a request")


def _neither_or_both(ids: object) -> TypeError:
    return TypeError(f"ids: expected ids or rows=, one of the two, got {'neither' if ids is None else 'both'}")


def _unhashable(name: object) -> TypeError:
    return TypeError(f"id: expected a hashable value, got {name!r}")


class View(Mapping[Hashable, T], Generic[T]):
    """Requests by id, each value read when it is looked up."""

    def __init__(self, requests: Rows, read: Callable[[int], T]) -> None:
        self._requests, self._read = requests, read

    def __getitem__(self, id: Hashable) -> T:
        return self._read(self._requests.row_any(id))

    def __iter__(self) -> Iterator[Hashable]:
        return chain(self._requests.row_of, self._requests.evicted)

    def __len__(self) -> int:
        return len(self._requests.row_of) + len(self._requests.evicted)

    def __repr__(self) -> str:
        return repr(dict(self))
