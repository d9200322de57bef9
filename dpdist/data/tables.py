"""Read tables of records by Arrow: Parquet, CSV and JSONL files, and folders of images.

Recipes, `dpdist init`, `dpdist.as_records` and the inputs of certificates read files only by this
module. Parquet files and images are read in parts; a CSV, JSONL or Excel file is read into memory.
CSV and JSONL files may be packed by gzip or zip.

Messages name the file, the line or row, the column and the rule, and never quote a record.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as arrow_csv
import pyarrow.json as arrow_json

from dpdist.core.errors import UserError
from dpdist.core.files import (
    check_regular_file,
    check_utf8_name,
    data_error,
    open_parquet,
    parquet_errors,
    read_bytes,
)
from dpdist.core.optional_imports import import_extra
from dpdist.data.column_names import NAMED_BY_VALUES, check_names

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
MOST_PICTURE_BYTES = 2**28  # of one image
_AT_ONCE = 500  # images in memory
_MOST_AT_ONCE = 2**26  # their bytes, except for the last
_ROWS = 4096  # rows of a table read at once
# endings of files with a table, in the order in which they are searched
TABLES = (".csv", ".csv.gz", ".csv.zip", ".jsonl", ".jsonl.gz", ".jsonl.zip", ".xlsx")


# --- files of a split -------------------------------------------------------------------------


def split_files(root: Path, name: str, split: str) -> list[Path]:
    """Return the files of one split of a data set, in order.

    They are NAME/SPLIT.parquet, NAME/SPLIT-*.parquet, NAME/data/SPLIT-*.parquet,
    NAME/SPLIT/*.parquet, NAME/SPLIT.csv or another of `TABLES`, or the folder NAME/SPLIT with a
    folder of images for each class: the first of these that exists.

    Raises:
        UserError: the root, the data set or the split does not exist.
    """
    base = root / name
    for folder, what in ((root, "data root"), (base, "data set")):
        if not folder.is_dir():
            raise UserError(_no_folder(folder, what, root))
    for pattern in (
        f"{split}.parquet",
        f"{split}-*.parquet",
        f"data/{split}-*.parquet",
        f"{split}/*.parquet",
        *(f"{split}{ending}" for ending in TABLES),
    ):
        if files := sorted(path for path in base.glob(pattern) if not _is_hidden(path)):
            return files
    if classes_in(base / split):
        return [base / split]
    if any(pictures_in(base / split)):
        raise UserError(
            f"{base / split}: must have a folder of images for each class, got only images; move "
            f"them to {split}/CLASS/"
        )
    raise UserError(
        f"{base}: must have files of the split {split!r}, got none: {split}.parquet, {split}.csv, "
        f"{split}.jsonl, {split}.xlsx, or images in {split}/CLASS/"
    )


def _no_folder(folder: Path, what: str, root: Path) -> str:
    """Return the message about a missing folder."""
    if folder.exists():
        return (
            f"{what} {folder}: must be a folder with the training and test files, got a file; "
            "unpack it, and name the folder"
        )
    if folder == root:
        return f"{what} {folder}: no such folder; give data.root"
    names = ", ".join(sorted(p.name for p in root.iterdir() if p.is_dir())) or "no folder"
    return f"data root {root}: no data set {folder.name!r}; it has {names}"


def _is_hidden(path: Path) -> bool:
    """Return whether a name begins with a dot, as those that macOS adds do."""
    return path.name.startswith(".")


def classes_in(folder: Path) -> list[str]:
    """Return the names of the folders with images in a folder."""
    if not folder.is_dir():
        return []
    inside = (each for each in folder.iterdir() if each.is_dir() and not _is_hidden(each))
    return sorted(each.name for each in inside if any(map(_is_picture, each.iterdir())))


def pictures_in(folder: Path) -> Iterator[Path]:
    """Yield the images of a folder by name."""
    if folder.is_dir():
        yield from filter(_is_picture, sorted(folder.iterdir()))


def _is_picture(path: Path) -> bool:
    return path.suffix.lower() in PICTURES and not _is_hidden(path)


def others_in(folder: Path) -> Counter[str]:
    """Return how many files and folders are not images of a class, by their type."""
    kinds = [kind for kind in folder.iterdir() if kind.is_dir() and not _is_hidden(kind)]
    inside = (path for kind in kinds for path in kind.iterdir() if not _is_hidden(path))
    others = (path for path in inside if not _is_picture(path))
    found = Counter("folder" if p.is_dir() else f"file {p.suffix}".strip() for p in others)
    found["folder without images"] = sum(not any(pictures_in(kind)) for kind in kinds)
    found["image outside a class"] = sum(1 for _ in pictures_in(folder))
    return +found


# --- tables -----------------------------------------------------------------------------------


class TableFile(ABC):
    """One file, or folder of images, as a table.

    path: its path. schema: of its columns. num_rows: number of its records. missing_words: words
    that stand for a missing cell.
    """

    path: Path
    schema: pa.Schema
    num_rows: int
    missing_words: frozenset[str] = frozenset()

    def rows(self, columns: Sequence[str]) -> Iterator[tuple[int, pa.Table]]:
        """Yield tables of some rows of these columns, each after the number of its first row.

        Raises:
            UserError: a column is missing, a text is not UTF-8, or the file is damaged.
        """
        if missing := [column for column in columns if column not in self.schema.names]:
            raise UserError(
                f"{self.path}: no column {', '.join(map(repr, missing))}; it has "
                f"{', '.join(self.schema.names)} (name yours under data.columns in the recipe)"
            )
        first = 0
        for table in self._tables(list(columns)):
            if table.num_rows:
                yield first, table
            first += table.num_rows

    def read(self, columns: Sequence[str]) -> pa.Table:
        """Return all rows of some columns. Raises UserError as `rows` does."""
        found = [table for _, table in self.rows(columns)]
        return pa.concat_tables(found) if found else self.schema.empty_table().select(columns)

    def error(
        self, rule: str, row: int | None = None, column: str | None = None, cause: Any = None
    ) -> UserError:
        """Return the error about a row of this file, as `data_error` does."""
        place = {} if row is None else self._place(row)
        return data_error(place.pop("file", self.path), rule, column=column, cause=cause, **place)

    def _place(self, row: int) -> dict[str, Any]:
        """Return the arguments of `data_error` that name a row: `row`, `line` or `file`."""
        return {"row": row}

    @abstractmethod
    def _tables(self, columns: list[str]) -> Iterator[pa.Table]:
        """Yield the rows of these columns, which exist."""


def open_table(path: Path, like: pa.Schema | None = None) -> TableFile:
    """Return a file, or a folder of images, as a table.

    like: schema of the training split, whose columns of text are read as text, too.

    Raises:
        UserError: the file is not readable, or its columns have names that look like values.
    """
    check_utf8_name(path)
    kind = PictureFolder if path.is_dir() else _KINDS.get(ending_of(path), ParquetFile)
    found = kind(path, like)
    names = found.schema.names
    check_names(names, path)
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"{path}: has more than one column {twice[0]!r}; rename the others")
    return found


def ending_of(path: Path) -> str:
    """Return the ending of a file with a table, in lower case."""
    name = path.name.lower()
    return next((each for each in TABLES if name.endswith(each)), path.suffix.lower())


def is_text(kind: pa.DataType) -> bool:
    """Return whether the type is text."""
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def is_list(kind: pa.DataType) -> bool:
    """Return whether the type is a list, of fixed or variable length."""
    return (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


class ParquetFile(TableFile):
    """A Parquet file, which is read in parts."""

    def __init__(self, path: Path, like: pa.Schema | None = None) -> None:
        self._reader = open_parquet(path)
        self.path, self.schema = path, self._reader.schema_arrow
        self.num_rows = self._reader.metadata.num_rows

    def _tables(self, columns: list[str]) -> Iterator[pa.Table]:
        first = 0
        batches = self._reader.iter_batches(batch_size=_ROWS, columns=columns)
        while batch := self._next(batches, columns, first):
            first += batch.num_rows
            yield pa.Table.from_batches([batch])

    def _next(
        self, batches: Iterator[pa.RecordBatch], columns: list[str], first: int
    ) -> pa.RecordBatch | None:
        """Return the next rows, or None after the last. Raises UserError for damaged ones."""
        batch = None
        try:
            if (batch := next(batches, None)) is not None:
                batch.validate(full=True)
            return batch
        except parquet_errors() as error:
            for name, row in _invalid_texts(batch):
                rule = "must be UTF-8 text; write it again as UTF-8"
                raise self.error(rule, row=first + row, column=name) from None
            damaged = (name for name in columns if not self._is_readable(name))
            rule = f"damaged near row {first}; write it again"
            raise self.error(rule, column=next(damaged, None), cause=error) from None

    def _is_readable(self, column: str) -> bool:
        try:
            for batch in open_parquet(self.path).iter_batches(columns=[column]):
                batch.validate(full=True)
        except parquet_errors():
            return False
        return True


def _invalid_texts(batch: pa.RecordBatch | None) -> Iterator[tuple[str, int]]:
    """Yield column and row of every text that is not UTF-8."""
    for field, values in zip(batch.schema, batch.columns, strict=True) if batch else ():
        if is_text(field.type):
            for row, raw in enumerate(values.cast(pa.large_binary()).to_pylist()):
                try:
                    (raw or b"").decode()
                except UnicodeDecodeError:
                    yield field.name, row


class _TextFile(TableFile):
    """A text file with one or several lines per record, which is read into memory."""

    def __init__(self, path: Path, like: pa.Schema | None = None) -> None:
        self.path = check_regular_file(path)
        kept = [f for f in like or () if is_text(f.type) or pa.types.is_nested(f.type)]
        try:
            self._table = self._parsed(kept)
            self._table.validate(full=True)
            if any(pa.types.is_binary(kind) for kind in self._table.schema.types):
                raise UnicodeDecodeError("utf-8", b"", 0, 1, "")
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise self._encoding_error() or self._parse_error(error) from None
        self.schema, self.num_rows = self._table.schema, self._table.num_rows
        for field in like or ():
            if field.name in self.schema.names and _is_number(field.type):
                self._check_numbers(field.name)

    def _open(self) -> IO[bytes]:
        """Return the unpacked file. Raises UserError if it cannot be unpacked."""
        try:
            unpack = _UNPACK.get(self.path.suffix.lower())
            return open(self.path, "rb") if unpack is None else io.BytesIO(unpack(self.path))
        except _DAMAGED as error:
            raise data_error(self.path, "cannot be unpacked", cause=error) from None

    def _place(self, row: int) -> dict[str, Any]:
        places = enumerate(self._lines())
        line = next((line for number, (line, _) in places if number == row), None)
        return {"row": row} if line is None else {"line": line}

    def _tables(self, columns: list[str]) -> Iterator[pa.Table]:
        for first in range(0, self.num_rows, _ROWS):
            yield self._table.select(columns).slice(first, _ROWS).combine_chunks()

    def _check_numbers(self, column: str) -> None:
        """Raise UserError for a text in a column of numbers of the training split."""
        if not is_text(self.schema.field(column).type):
            return
        for row, value in enumerate(self._table[column].to_pylist()):
            try:
                float(value or 0)
            except ValueError:
                rule = "must be a number, as in the training split, got a text"
                raise self.error(rule, row, column) from None

    def _encoding_error(self) -> UserError | None:
        """Return the error about the first line that is not UTF-8, or None."""
        with self._open() as file:
            raw = file.read()
        try:
            raw.decode()
        except UnicodeDecodeError as error:
            line = len((raw[: error.start] + b".").splitlines())
            two = raw.startswith((b"\xff\xfe", b"\xfe\xff"))
            perhaps = "UTF-16" if two else "Latin-1 or Windows-1252"
            rule = f"must be UTF-8 text, got another encoding (perhaps {perhaps}); save it as UTF-8"
            return data_error(self.path, rule, line=line)
        return None

    @abstractmethod
    def _parsed(self, kept: Sequence[pa.Field]) -> pa.Table:
        """Return the file as a table. kept: fields whose types are prescribed."""

    @abstractmethod
    def _lines(self) -> Iterator[tuple[int, int]]:
        """Yield the number of each record's first line, from 1, and of its cells."""

    @abstractmethod
    def _parse_error(self, error: Exception) -> UserError:
        """Return the error about a file that cannot be parsed."""


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def _only_member(path: Path) -> bytes:
    """Return the only file of a zip archive."""
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if not name.startswith("__MACOSX/")]
        if len(names) != 1:
            raise data_error(path, f"must hold one file, got {len(names)}; pack only one")
        return archive.read(names[0])


def _sheet_as_csv(path: Path) -> bytes:
    """Return the only sheet of an Excel file as CSV, line for line."""
    book = import_extra("openpyxl", "excel", str(path)).load_workbook(path, data_only=True)
    if len(sheets := book.worksheets) != 1:
        raise data_error(path, f"must have one sheet, got {len(sheets)}; save the one to be read")
    text = io.StringIO()
    rows = sheets[0].iter_rows(values_only=True)
    csv.writer(text).writerows(row if any(cell is not None for cell in row) else () for row in rows)
    return text.getvalue().encode()


_DAMAGED = (EOFError, KeyError, ValueError, gzip.BadGzipFile, zipfile.BadZipFile, zlib.error)
_UNPACK: dict[str, Callable[[Path], bytes]] = {
    ".gz": lambda path: gzip.decompress(read_bytes(path)),
    ".zip": _only_member,
    ".xlsx": _sheet_as_csv,
}
_DECIMAL = r"^\s*[-+]?\d+(,\d+)?\s*$"
_THOUSANDS = r"^\s*[-+]?\d{1,3}(,\d{3})*\s*$"  # 1,234 matches both
_MARKED = r"^\s*[-+]?(\d{1,3}([.,]\d{3})*|\d+)([.,]\d+)?\s*$"


def _all_match(column: pa.ChunkedArray, pattern: str) -> bool:
    return bool(pc.all(pc.match_substring_regex(column, pattern), min_count=1).as_py())


def are_marked_numbers(column: pa.ChunkedArray) -> bool:
    """Return whether texts are numbers with decimal commas or thousands separators."""
    if not is_text(column.type):
        return False
    return _all_match(column.filter(pc.not_equal(pc.utf8_trim_whitespace(column), "")), _MARKED)


class CsvFile(_TextFile):
    """A CSV file with a first line of names.

    The delimiter is the most frequent of comma, semicolon, tab and bar in the first line. With
    semicolons, numbers may have decimal commas.
    """

    # next to Arrow's own, those of SAS (.), of R and of old archives (? and -), and blanks
    missing_words = frozenset(
        [*arrow_csv.ConvertOptions().null_values, ".", "?", "-", "--", "None"]
        + [" " * width for width in range(1, 9)]
    )

    def _parsed(self, kept: Sequence[pa.Field]) -> pa.Table:
        table = self._table_with(kept, ".")
        texts = [
            table[name] for name in {*table.column_names} if table.column_names.count(name) == 1
        ]
        texts = [column for column in texts if is_text(column.type)]
        if self._delimiter == ";" and any(
            _all_match(text, _DECIMAL) and not _all_match(text, _THOUSANDS) for text in texts
        ):
            table = self._table_with(kept, ",")
        for place in reversed(range(table.num_columns)):  # after a comma at the end of each line
            if not table.column_names[place] and pa.types.is_null(table.schema.field(place).type):
                table = table.remove_column(place)
        names = table.column_names
        for place, name in enumerate(names):
            same = names.count(name) == 1 and is_text(table[name].type)
            if same and pc.any(pc.equal(table[name], name)).as_py():
                raise data_error(self.path, NAMED_BY_VALUES.format(place + 1))
        return table

    def _table_with(self, kept: Sequence[pa.Field], decimal_point: str) -> pa.Table:
        with self._open() as file:
            return arrow_csv.read_csv(
                file,
                parse_options=arrow_csv.ParseOptions(
                    delimiter=self._delimiter, newlines_in_values=True
                ),
                convert_options=arrow_csv.ConvertOptions(
                    column_types={f.name: f.type for f in kept},
                    null_values=sorted(self.missing_words),
                    true_values=[*arrow_csv.ConvertOptions().true_values, "t"],
                    false_values=[*arrow_csv.ConvertOptions().false_values, "f"],
                    decimal_point=decimal_point,
                ),
            )

    @cached_property
    def _delimiter(self) -> str:
        with self._open() as file:
            start = file.read(2**16).decode(errors="replace").lstrip("\r\n")
        first = re.split(r"[\r\n]", re.sub(r'"[^"]*"', "", start), maxsplit=1)[0]
        return max(",;\t|", key=first.count)

    def _rows(self) -> Iterator[tuple[int, int]]:
        begin = 1
        with io.TextIOWrapper(self._open(), encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=self._delimiter)
            with suppress(csv.Error):
                for cells in reader:
                    if cells:
                        yield begin, len(cells)
                    begin = reader.line_num + 1

    def _lines(self) -> Iterator[tuple[int, int]]:
        rows = self._rows()
        next(rows, None)
        yield from rows

    def _parse_error(self, error: Exception) -> UserError:
        width = next(self._rows(), (1, 0))[1]
        for line, count in self._lines():
            if count != width:
                rule = f"must have {width} cells, as the first line, got {count}"
                if count == width - 1:
                    rule += " (check for a comma at the end of the first line)"
                return data_error(self.path, f"{rule}; put texts with commas in quotes", line=line)
        return data_error(self.path, "cannot be read as CSV", cause=error)


class JsonLinesFile(_TextFile):
    """A JSONL file, one object per line."""

    def _parsed(self, kept: Sequence[pa.Field]) -> pa.Table:
        with self._open() as file:
            size = min(max(2**20, file.seek(0, io.SEEK_END)), 2**30)  # a line must fit into a block
            file.seek(0)
            return arrow_json.read_json(
                file,
                arrow_json.ReadOptions(use_threads=False, block_size=size),
                arrow_json.ParseOptions(explicit_schema=pa.schema(kept) if kept else None),
            )

    def _lines(self) -> Iterator[tuple[int, int]]:
        with io.TextIOWrapper(self._open(), encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, 0

    def _parse_error(self, error: Exception) -> UserError:
        """Return an error with the row and the column that Arrow names, without its text."""
        place = re.search(r"in row (\d+)$", str(error))
        column = re.search(r"^JSON parse error: Column\(/([^/()]+)", str(error))
        rule = "must be one JSON object"
        if column is not None:
            rule = "must have the type of the values before it, or of the training split"
        if place is None:
            rule = "cannot be read as JSONL, one object per line"
            return data_error(self.path, rule, cause=error)
        return self.error(rule, row=int(place[1]), column=column and column[1])


class PictureFolder(TableFile):
    """A folder CLASS/image as a table of the columns `image` and `label`, the class's name."""

    def __init__(self, path: Path, like: pa.Schema | None = None) -> None:
        self.path = path
        self._files = [
            (picture, kind) for kind in classes_in(path) for picture in pictures_in(path / kind)
        ]
        for picture, _ in self._files:
            check_utf8_name(picture)
        self.schema, self.num_rows = _PICTURES, len(self._files)

    @property
    def files(self) -> list[Path]:
        """Return the paths of the images in order."""
        return [picture for picture, _ in self._files]

    def _place(self, row: int) -> dict[str, Any]:
        return {"file": self._files[row][0]}

    def _tables(self, columns: list[str]) -> Iterator[pa.Table]:
        some: list[dict[str, Any]] = []
        size = 0
        for picture, kind in self._files:
            raw = read_bytes(picture, MOST_PICTURE_BYTES) if "image" in columns else None
            some.append({"image": raw, "label": kind})
            size += len(raw or b"")
            if len(some) == _AT_ONCE or size > _MOST_AT_ONCE:
                yield pa.Table.from_pylist(some, _PICTURES).select(columns)
                some, size = [], 0
        if some:
            yield pa.Table.from_pylist(some, _PICTURES).select(columns)


_PICTURES = pa.schema([("image", pa.large_binary()), ("label", pa.string())])
_KINDS = {each: JsonLinesFile if each.startswith(".jsonl") else CsvFile for each in TABLES}


def picture_schema(names: list[str]) -> pa.Schema:
    """Return the schema of images as `datasets` writes them: bytes, and the class as a number."""
    about = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    fields = [("image", image), ("label", pa.int64())]
    return pa.schema(fields, {"huggingface": json.dumps(about)})
