"""Requests as rows of arrays: names, block tables, lengths, and what changed since the last step.

A row is an int, stable until its request is freed, then used again. Tables are one `[rows, columns] int32` array, -1 where no
block is mapped; rows and columns grow by half when they run out, so that no step pays for it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from .block_pool import Ints, integers
from .free_queues import Blocks

UNCHANGED = np.iinfo(np.int32).max


class Rows:
    """The requests of one allocator. Methods that check raise with nothing changed; the others trust their caller."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.row_of: dict[Hashable, int] = {}
        self.names: list[Hashable] = [None] * 8  # of each row, None where no request is
        self.tables = np.full((8, 8), -1, np.int32)  # [rows, columns]
        self.flat = self.tables.reshape(-1)  # the same memory
        self.lengths = np.full(8, -1, np.int64)  # tokens, -1: no request
        self.known = np.zeros(8, np.int64)  # of these, committed: how many a prefix cache has been told
        self.root = np.zeros(8, np.int64)  # where the sequence begins in the prefix cache, 0: it takes no part
        self.changed = np.full(8, UNCHANGED, np.int32)  # first column that may differ from what the last step reported
        self.any_changed = False
        self._stamp = np.zeros(8, np.int64)
        self._checked = b""  # rows known to be right
        self._window: npt.NDArray[Any] = self.tables[:, 0]  # see `window`
        self._window_columns = 0
        self._vacant = list(range(7, -1, -1))  # rows without a request, the next one last

    # ---- names ----

    def select(self, ids: Iterable[Hashable] | None, rows: npt.ArrayLike | None) -> Ints:
        """Rows `[n]` of requests named by ids or by rows.

        Raises TypeError unless exactly one is given, KeyError for a request that is not there, ValueError for one named twice.
        """
        if (ids is None) == (rows is None):
            raise TypeError("expected ids or rows=, one of the two")
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
                    raise KeyError(f"rows: {self._dead(selected)} is not the row of a request")
        if len(selected) > 1:
            order = np.arange(len(selected))
            self._stamp[selected] = order
            if np.count_nonzero(self._stamp.take(selected) == order) < len(selected):
                raise ValueError("a request is named twice; name each one once")
        if rows is not None:
            self._checked = key
        return selected

    def of(self, ids: Iterable[Hashable]) -> Ints:
        """Rows `[n]` of `ids`; raises KeyError for an unknown one."""
        if isinstance(ids, (str, bytes)):
            raise TypeError(f"ids: expected a list of ids, got {ids!r}; write [{ids!r}]")
        names = ids if isinstance(ids, (list, tuple)) else list(ids)
        try:
            return np.fromiter(map(self.row_of.__getitem__, names), np.int64, len(names))
        except KeyError as error:
            raise KeyError(f"no request has the id {error.args[0]!r}") from None

    def row(self, name: Hashable) -> int:
        """The row of one id; raises KeyError."""
        row = self.row_of.get(name)
        if row is None:
            raise KeyError(f"no request has the id {name!r}")
        return row

    def check_new(self, names: Iterable[Hashable]) -> None:
        """Raises KeyError when one of `names` has a request, or stands there twice."""
        seen = set()
        for name in names:
            if name in self.row_of or name in seen:
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
            del self.row_of[self.names[row]]
            self.names[row] = None
        self._checked = b""
        self.lengths[rows] = -1
        self._vacant.extend(rows[::-1].tolist())

    # ---- tables ----

    def columns(self, lengths: Ints) -> Ints:
        """Table columns that `lengths [n]` tokens need."""
        result: Ints = (lengths + (self.block_size - 1)) // self.block_size
        return result

    def widen(self, columns: int) -> None:
        """Make room for `columns` in every table."""
        rows, width = self.tables.shape
        if columns > width:
            wide = np.full((rows, max(columns, width + width // 2)), -1, np.int32)
            wide[:, :width] = self.tables
            self.tables, self.flat = wide, wide.reshape(-1)

    def at(self, rows: Ints, columns: Ints) -> Blocks:
        """Block ids `[n]` at `(rows[i], columns[i])`."""
        return self.flat.take(rows * self.tables.shape[1] + columns)

    def map(self, rows: Ints, columns: Ints, blocks: Blocks) -> None:
        """Set the entries at `(rows[i], columns[i])`."""
        self.flat[rows * self.tables.shape[1] + columns] = blocks

    def entries(self, rows: Ints, first: Ints, stop: Ints) -> Ints:
        """Indices into `flat` of columns `[first[i], stop[i])` of `rows[i]`, row after row."""
        return ranges(rows * self.tables.shape[1] + first, stop - first)

    def snapshot(self, rows: Ints, columns: int, extra: int) -> Blocks:
        """The first `columns` columns of `rows`, row after row, then room for `extra` more values: one contiguous piece.

        A row is read as one element of `columns * 4` bytes, in a single gather that needs no index per entry.
        """
        padded = np.zeros(len(rows) + -(-extra // columns), np.int64)
        padded[: len(rows)] = rows
        return self.window(columns)[padded].view(np.int32)

    def window(self, columns: int) -> npt.NDArray[np.void]:
        """The first `columns` columns of every row, each row one element: a view `[rows]`."""
        if columns != self._window_columns or self._window.base is not self.tables:
            kind = np.dtype((np.void, columns * 4))
            self._window = np.ndarray(len(self.tables), kind, self.tables, strides=self.tables.strides[:1])
            self._window_columns = columns
        return self._window

    def mark(self, rows: Ints, columns: Ints | int) -> None:
        """Note that `rows` may differ from `columns` on, for the next step's delta."""
        self.changed[rows] = np.minimum(self.changed.take(rows), columns)
        self.any_changed = True

    def _add_rows(self) -> None:
        old, width = self.tables.shape
        new = old + max(8, old // 2)
        tables = np.full((new, width), -1, np.int32)
        tables[:old] = self.tables
        self.tables, self.flat = tables, tables.reshape(-1)
        self.names += [None] * (new - old)
        self.lengths = _extended(self.lengths, new, -1)
        self.known, self.root = _extended(self.known, new, 0), _extended(self.root, new, 0)
        self.changed = _extended(self.changed, new, UNCHANGED)
        self._stamp = _extended(self._stamp, new, 0)
        self._vacant[:0] = range(new - 1, old - 1, -1)

    def _dead(self, rows: Ints) -> int:
        return next(int(row) for row in rows if not 0 <= row < len(self.lengths) or self.lengths[row] < 0)


def ranges(starts: Ints, counts: Ints) -> Ints:
    """`starts[0], starts[0] + 1, ...` with `counts[0]` values, then those of `starts[1]`, and so on."""
    ends = counts.cumsum()
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - ends + counts, counts) + np.arange(total)


def _extended(array: npt.NDArray[Any], size: int, fill: int) -> npt.NDArray[Any]:
    result = np.full(size, fill, array.dtype)
    result[: len(array)] = array
    return result
