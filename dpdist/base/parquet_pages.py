"""Whether a Parquet file's pages hold no more than its footer counts.

A reader stops where the footer says, so that a footer edited to fewer rows drops records without a
word. Pages say for themselves how many values they hold: each begins with a header in Thrift's
compact protocol (Apache Parquet, `parquet.thrift`, struct PageHeader). Here the headers are read,
and nothing else of a page.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dpdist.base.errors import UserError

if TYPE_CHECKING:
    import pyarrow.parquet as pq

_DATA, _DATA_V2 = 0, 3  # of the enumeration PageType; 1 is an index, 2 a dictionary
_KINDS = 4
_HEADERS = {5: _DATA, 8: _DATA_V2}  # the fields of a data page's own header, by number
_INTEGERS, _STRUCT = (3, 4, 5, 6), 12  # types of the compact protocol
_DEEPEST = 8
_MAGIC = 4  # bytes at a file's beginning


class _Odd(Exception):
    """These bytes are no header of a page."""


class _Compact:
    """Reads values of Thrift's compact protocol from `at` on, and none beyond `end`."""

    def __init__(self, raw: mmap.mmap, at: int, end: int) -> None:
        self._raw, self.at, self._end = raw, at, end

    def fields(self, depth: int = 0) -> Iterator[tuple[int, int]]:
        """Yield number and type of each field of a struct, whose value is to be read before the
        next one."""
        number = 0
        if depth > _DEEPEST:
            raise _Odd
        while head := self._byte():
            step = head >> 4
            number = number + step if step else self.integer()
            yield number, head & 15

    def integer(self) -> int:
        """Read a whole number."""
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def skip(self, kind: int, depth: int = 0, inside: bool = False) -> None:
        """Read a value of this type. inside: of a list, where truth values take a byte."""
        if kind in (1, 2):
            self._move(int(inside))
        elif kind == 3:
            self._move(1)
        elif kind in _INTEGERS:
            self._varint()
        elif kind == 7:
            self._move(8)
        elif kind == 8:
            self._move(self._varint())
        elif kind in (9, 10):
            head = self._byte()
            count = self._varint() if head >> 4 == 15 else head >> 4
            for _ in range(count):
                self.skip(head & 15, depth + 1, inside=True)
        elif kind == _STRUCT:
            for _, inner in self.fields(depth + 1):
                self.skip(inner, depth + 1)
        else:
            raise _Odd

    def _byte(self) -> int:
        self._move(1)
        return self._raw[self.at - 1]

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise _Odd

    def _move(self, count: int) -> None:
        self.at += count
        if self.at > self._end:
            raise _Odd


def check_pages(path: Path, reader: pq.ParquetFile) -> None:
    """Check the pages of all columns against the footer, and that no page lies outside of them.

    Where bytes are no page, as indexes and filters are not, nothing is said of them.

    Args:
        path: the file.
        reader: the same, as `dpdist.base.table_files.open_parquet` opened it.

    Raises:
        UserError: pages hold more values than the footer counts, or belong to no row group.
    """
    about = reader.metadata
    chunks = [
        about.row_group(group).column(column)
        for group in range(about.num_row_groups)
        for column in range(about.num_columns)
    ]
    covered = []
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as raw:
        footer = len(raw) - 8 - about.serialized_size
        for chunk in chunks:
            begin = min(filter(None, (chunk.dictionary_page_offset, chunk.data_page_offset)))
            end = begin + chunk.total_compressed_size
            covered.append((begin, end))
            held = sum(values for _, values in _pages(raw, begin, min(end, footer)))
            if held > chunk.num_values:
                raise UserError(
                    f"{path}: damaged: its footer counts {chunk.num_values:,} values of column "
                    f"{chunk.path_in_schema!r}, its pages hold {held:,}; write it again"
                )
        position = _MAGIC
        for begin, end in [*sorted(covered), (footer, footer)]:
            if next(_pages(raw, position, min(begin, footer), padded=True), None):
                raise UserError(
                    f"{path}: damaged: holds values at byte {position:,} that no row group of its "
                    "footer counts; write it again"
                )
            position = max(position, end)


def _pages(
    raw: mmap.mmap, begin: int, end: int, *, padded: bool = False
) -> Iterator[tuple[int, int]]:
    """Yield kind and number of values of each data page from `begin` on, up to `end` or to what is
    no page. padded: zeros may come first."""
    while padded and begin < end and raw[begin] == 0:
        begin += 1
    while begin < end:
        try:
            kind, size, values, begin = _header(raw, begin, end)
        except _Odd:
            return
        begin += size
        if begin > end:
            return
        if kind in _HEADERS.values():
            yield kind, values


def _header(raw: mmap.mmap, at: int, end: int) -> tuple[int, int, int, int]:
    """Return a page's kind, its size in the file, its number of values, and where its header ends.

    Raises _Odd for what is no header.
    """
    reading, found, values = _Compact(raw, at, end), dict.fromkeys((1, 2, 3), -1), -1
    for number, kind in reading.fields():
        if number in found and kind in _INTEGERS:
            found[number] = reading.integer()
        elif number in _HEADERS and kind == _STRUCT:
            for inner, its in reading.fields(1):
                if inner == 1 and its in _INTEGERS:
                    values = reading.integer()
                else:
                    reading.skip(its, 1)
        else:
            reading.skip(kind)
    kind, whole, size = found.values()
    if not 0 <= kind < _KINDS or min(whole, size) < 0:
        raise _Odd
    if (kind in _HEADERS.values()) != (values >= 0):
        raise _Odd
    return kind, size, values, reading.at
