"""Parquet files whose footer says something else than the file holds."""

from __future__ import annotations

from pathlib import Path


def _varint(number: int) -> bytes:
    """A number as Thrift's compact protocol writes it, behind the byte of an i64 field."""
    left, written = (number << 1) ^ (number >> 63), b""
    while left > 127:
        written, left = written + bytes([left & 127 | 128]), left >> 7
    return b"\x16" + written + bytes([left])


def rewrite_row_count(path: Path, found: int, stated: int, *, only_in_all: bool = False) -> None:
    """Let a footer state `stated` rows in place of `found`, which must be no other number in it.

    only_in_all: of the whole file alone, whose row groups and columns then count `found` as before.
    """
    raw = path.read_bytes()
    length = int.from_bytes(raw[-8:-4], "little")
    body, footer = raw[: -8 - length], raw[-8 - length : -8]
    assert _varint(found) in footer
    footer = footer.replace(_varint(found), _varint(stated), 1 if only_in_all else -1)
    path.write_bytes(body + footer + len(footer).to_bytes(4, "little") + b"PAR1")
