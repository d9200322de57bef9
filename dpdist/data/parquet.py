"""Read tables into memory-mapped arrays, some rows at a time, and decode images exactly.

Three layouts are read, each with a label column: an image column (bytes, or a struct with a
`bytes` field); numeric feature columns (or one list column of numbers); a column of texts
(`dpdist.data.text`), which needs no labels. Errors name the file, and the row or line
(`dpdist.data.tables`).
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from PIL import Image, UnidentifiedImageError
from PIL.TiffImagePlugin import PHOTOMETRIC_INTERPRETATION, TiffImageFile

from dpdist.core.errors import UserError
from dpdist.core.files import (
    FEATURES_KEY,
    atomic_folder,
    error_text,
    fsync_path,
    make_private_folder,
    open_parquet,
)
from dpdist.core.preprocessing import ColumnPreprocessing, range_of_label
from dpdist.data.dataset import Dataset
from dpdist.data.preprocessing import Preprocessing, numbers_of, preprocess
from dpdist.data.record_hashes import (
    GROUPS_FILE,
    hash_inputs,
    hash_users,
    names_nobody,
    write_hashes,
)
from dpdist.data.tables import PictureFolder, TableFile, is_text, open_table
from dpdist.data.text import TextColumn

# --- images to pixels -------------------------------------------------------------------------


FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP")


class InexactImage(ValueError):
    """An image whose pixels would differ from what was stored."""


class UnreadableImage(ValueError):
    """Bytes that cannot be read as an image."""


def decode_picture(raw: bytes) -> np.ndarray:
    """Return the pixels (C, H, W) of an image, C = 1 for gray and 3 for color.

    They are uint8 for at most 8 bits (scaled to the full range; palettes are applied), and float32
    in [0, 1] for gray images of 16 bits (v / 65535) and of floats. An opaque alpha channel is
    dropped. An EXIF orientation is not applied. Raises InexactImage for what would lose something
    (transparency, several frames, colors of 16 bits, CMYK and other color spaces, floats outside
    [0, 1]), and UnreadableImage for bytes in none of these formats.
    """
    try:
        return _decode_pillow(raw)
    except InexactImage:
        raise
    except UnidentifiedImageError:  # its text is an address in memory
        raise UnreadableImage(f"must be {', '.join(FORMATS)}") from None
    except Exception as error:  # decoders raise any error for a damaged image
        raise UnreadableImage(f"damaged, or too large ({type(error).__name__})") from None


def _decode_pillow(raw: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(raw), formats=FORMATS) as picture:
        frames = getattr(picture, "n_frames", 1)
        if frames != 1:
            raise InexactImage(f"it has {frames} frames; store only one")
        stored = _raw_mode(picture)
        picture.load()
        pixels = _pixels(picture, stored)
    return pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0)


def _raw_mode(picture: Image.Image) -> str:
    """Return the mode in which the decoder reads samples, known only before they are loaded."""
    tiles = getattr(picture, "tile", [])
    arguments = tiles[0][3] if tiles else ""
    first = arguments[0] if isinstance(arguments, tuple) and arguments else arguments
    return first if isinstance(first, str) else ""


def _pixels(picture: Image.Image, stored: str) -> np.ndarray:
    """Return the pixels (H, W) or (H, W, 3)."""
    mode = picture.mode
    white_is_zero = (
        isinstance(picture, TiffImageFile) and picture.tag_v2.get(PHOTOMETRIC_INTERPRETATION) == 0
    )
    if mode not in ("1", "L") and white_is_zero:  # the decoder inverts these two modes
        raise InexactImage("its zero is white; store it with zero for black")
    if mode == "F":
        values = np.asarray(picture, dtype=np.float32)
        if not ((values >= 0) & (values <= 1)).all():
            raise InexactImage("its numbers are not all in [0, 1]; scale them")
        return values
    if mode.startswith("I;16") and stored.startswith("I;16") and "S" not in stored:
        if "transparency" in picture.info:
            raise InexactImage("it has a transparent gray; put it on a background")
        return np.asarray(picture).astype(np.float32) / np.float32(65535)
    if re.search(r";1[0-6]", stored):
        raise InexactImage(
            f"its samples ({stored}) cannot be read in full; store 8 bits per channel"
        )
    if mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
        return _opaque(picture)
    if mode == "1":
        return np.asarray(picture.convert("L"))
    if mode == "P":
        return np.asarray(picture.convert("RGB"))
    if mode in ("L", "RGB"):
        return np.asarray(picture)
    raise InexactImage(f"its colors ({mode}) have no exact gray or RGB values; convert it")


def _opaque(picture: Image.Image) -> np.ndarray:
    """Return the pixels of an image whose alpha channel is opaque. Raises InexactImage."""
    whole = np.asarray(picture.convert("RGBA"))
    if (whole[..., 3] != 255).any():
        raise InexactImage("it is transparent in places; put it on a background")
    return whole[..., 0] if picture.mode in ("1", "L", "LA") else whole[..., :3]


# --- columns ----------------------------------------------------------------------------------


FEATURES_FILE = "features.json"  # next to features: the pretraining data of their network
_CACHE_VERSION = 7  # a new number re-reads everything


@dataclass(frozen=True)
class Columns:
    """Names of the columns of a record.

    features: column names, or empty if there is an image column or a text; a pattern (mean_*)
    stands for all matching columns except label and user. user: column of the user of a record; the
    size of the largest user and a hash of each record's user are kept. targets: "class", one of the
    classes; "number", a number or a list; "labels", a 0 or 1 or a list. preprocessing: rules by
    feature, and the range of a label of numbers. Raises UserError if a column would be read twice.
    """

    image: str = "image"
    label: str = "label"
    features: tuple[str, ...] = ()
    user: str | None = None
    text: TextColumn | None = None
    targets: str = "class"
    preprocessing: tuple[tuple[str, ColumnPreprocessing], ...] = ()

    @property
    def input_columns(self) -> tuple[str, ...]:
        """Return the names of the columns that a model reads."""
        return self.features or ((self.image,) if self.text is None else self.text.columns)

    @property
    def has_labels(self) -> bool:
        """Return whether the label column is read."""
        return self.text is None or not self.text.predicts_next_token

    def __post_init__(self) -> None:
        if self.has_labels and self.label in self.input_columns:
            raise UserError(
                f"data.columns: features must not include the label, got {self.label!r}; take it "
                "out"
            )
        twice = [name for name, times in Counter(self.features).items() if times > 1]
        if twice:
            raise UserError(f"data.columns.features: {twice[0]!r} is named twice; name it once")

    def expand_patterns(self, available: Sequence[str], context: str) -> Columns:
        """Return the columns with patterns replaced. Raises UserError for one without a match."""
        found: list[str] = []
        for asked in self.features:
            if not set(asked) & set("*?["):
                found.append(asked)
                continue
            left = {self.label, self.user} | {n for n, rule in self.preprocessing if rule.drop}
            others = [name for name in available if name not in left]
            fit = [name for name in others if fnmatchcase(name, asked)]
            if not fit:
                raise UserError(
                    f"{context}: no column fits {asked!r}; it has {', '.join(available)} (name "
                    "yours under data.columns in the recipe)"
                )
            found += [name for name in fit if name not in found]
        return replace(self, features=tuple(found))


def holds_features(root: Path | None, name: str) -> bool:
    """Return whether a data set is features that papers/dplis/features.py computed from records.

    A file next to them says so, and the metadata of each of their files.
    """
    if root is None:
        return False
    folder = Path(root) / name
    return (folder / FEATURES_FILE).exists() or any(map(_is_features, folder.rglob("*.parquet")))


def _is_features(file: Path) -> bool:
    with suppress(UserError):  # reading the file raises it again
        return FEATURES_KEY in (open_parquet(file).schema_arrow.metadata or {})
    return False


# --- Parquet into the cache -------------------------------------------------------------------


def load_split(
    files: list[Path],
    name: str,
    classes: int,
    columns: Columns,
    cache: Path,
    class_names: tuple[str, ...] = (),
    training_file: Path | None = None,
) -> Dataset:
    """Return a split, decoded once into `cache` (private, mode 0700) and memory-mapped afterwards.

    class_names: of the classes, by number, if the label column has names. training_file: a file of
    the training split, whose column types apply to the test split.

    Raises UserError naming file and row for wrong columns, undecodable images, images of different
    sizes, labels outside 0..classes-1, and non-numeric or non-finite features.
    """
    stamp = _cache_key(files, name, classes, columns, class_names)
    folder = cache / f"{name.replace('/', '-')}-{stamp}"
    if not folder.exists():
        like = None if training_file is None else open_table(training_file).schema
        tables = [open_table(file, like) for file in files]
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        with atomic_folder(folder, keep_existing=True) as aside:
            _decode(tables, name, (classes, class_names), columns, make_private_folder(aside))
    return Dataset.open(folder)


def _cache_key(
    files: list[Path], name: str, classes: int, columns: Columns, class_names: tuple[str, ...]
) -> str:
    every = [inner for file in files for inner in (PictureFolder(file).files or [file])]
    described = [[str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns] for f in every]
    text = None if columns.text is None else columns.text.content_description  # tokens by content
    read = asdict(replace(columns, preprocessing=())) | {"text": text}
    read["preprocessing"] = _rules(columns)
    about = [_CACHE_VERSION, described, name, classes, class_names, read]
    return hashlib.blake2b(json.dumps(about).encode(), digest_size=8).hexdigest()


def _decode(
    tables: list[TableFile],
    name: str,
    classes: tuple[int, tuple[str, ...]],
    columns: Columns,
    out: Path,
) -> None:
    first = tables[0]
    columns = columns.expand_patterns(first.schema.names, str(first.path))
    wanted = [*columns.input_columns, *([columns.label] if columns.has_labels else [])]
    if columns.user is not None:
        wanted.append(columns.user)
    total = sum(table.num_rows for table in tables)
    if total == 0:
        raise first.error(NO_RECORDS)
    numbers = columns.targets != "class"
    arrays = _ArrayWriter(out, total, classes[0] if numbers else None)
    hashes = bytearray()
    users = _UserReader(columns.user)
    for file in tables:
        for first_row, table in file.rows(wanted):
            rows, identities = _inputs(table, file, first_row, columns)
            marks = np.zeros(len(rows), dtype=np.int64)
            if numbers:
                marks = _numbers(table, file, first_row, columns, classes[0])
            elif columns.has_labels:
                marks = class_numbers(table, file, first_row, columns.label, *classes)
            users.add(table, file, first_row)
            arrays.append(rows, marks, file, first_row)
            if columns.text is not None:
                hashes += columns.text.hash_table(table)
            elif columns.preprocessing:  # different records may have equal inputs after a cut
                hashes += hash_inputs(identities).tobytes()
    digest = arrays.finish()
    if hashes:
        write_hashes(out, bytes(hashes))
    users.finish(out)
    meta = {
        "name": name,
        "classes": classes[0],
        "fingerprint": digest,
        "largest_user": max(users.counts.values(), default=None),
        "read": _encoding(columns),
        "following": not columns.has_labels,
        **({"target_kind": columns.targets} if numbers else {}),
    }
    finish_split(out, meta)


def finish_split(folder: Path, meta: Mapping[str, Any]) -> None:
    """Write the metadata of a decoded split, and sync all its files."""
    (folder / "meta.json").write_text(json.dumps(meta))
    for path in folder.iterdir():
        fsync_path(path)


def read_features(path: Path, columns: Columns) -> np.ndarray:
    """Return a model's inputs of a table's raw rows, float32 (rows, inputs).

    Raises UserError for a missing column, and for a cell that breaks a rule, by its row.
    """
    file = open_table(path)
    columns = columns.expand_patterns(file.schema.names, str(path))
    rules = dict(columns.preprocessing)
    plain = ColumnPreprocessing()
    named = {name: rules.get(name, plain) for name in columns.features}
    return Preprocessing(named).transform_file(file)


NO_RECORDS = "must have at least one record, got none"


class _UserReader:
    """Reads the column of users: sizes and hashes. Does nothing without a column."""

    def __init__(self, column: str | None) -> None:
        self._column, self._hashes = column, bytearray()
        self._unknown: list[tuple[TableFile, int]] = []  # records without a user
        self._are_texts: set[bool] = set()
        self.counts: Counter[object] = Counter()

    def add(self, table: pa.Table, file: TableFile, first_row: int) -> None:
        """Read the column of some rows. Raises UserError if it has both numbers and texts."""
        if self._column is None:
            return
        values, self._file = users_of(table, file, first_row, self._column), file
        self.counts.update(values)
        self._unknown += [(file, first_row + row) for row in rows_of_nobody(values)]
        self._are_texts |= {isinstance(value, str) for value in values if value is not None}
        if len(self._are_texts) > 1:
            rule = "must be text in all files, or numbers in all, as 7 and '7' are two users"
            raise file.error(rule, None, self._column)
        self._hashes += hash_users(values)

    def finish(self, out: Path) -> None:
        """Write the hashes next to the records.

        Raises UserError for records without a user, and for users that differ only in blanks.
        """
        if self._column is None:
            return
        if self._unknown:
            file, row = self._unknown[0]
            rule = f"must name the user, is empty for {len(self._unknown):,} of "
            raise file.error(f"{rule}{self.counts.total():,}; {NO_GROUP}", row, self._column)
        texts = [value for value in self.counts if isinstance(value, str)]
        if twice := len(texts) - len({text.strip() for text in texts}):
            rule = f"must name each user in one way, got {twice:,} that differ only in blanks"
            raise self._file.error(f"{rule}; remove the blanks", None, self._column)
        write_hashes(out, bytes(self._hashes), GROUPS_FILE)


NO_GROUP = "drop these records, or give each a separate user"


class _ArrayWriter:
    """Writes the memory-mapped inputs and labels of `total` records, in order.

    numbers: floats of a record's target; None if it is an integer.
    """

    def __init__(self, out: Path, total: int, numbers: int | None = None) -> None:
        self._out, self._total, self._position = out, total, 0
        kind, shape = (np.int64, ()) if numbers is None else (np.float32, (numbers,))
        self._labels = self._allocate("labels.npy", kind, (total, *shape))
        self._inputs: np.ndarray | None = None
        self._digest = hashlib.blake2b(digest_size=16, person=b"dpdist.data")

    def append(self, rows: np.ndarray, labels: np.ndarray, file: TableFile, first_row: int) -> None:
        """Write some records. Raises UserError for inputs of a different shape."""
        if self._inputs is None:
            shape = (self._total, *rows.shape[1:])
            self._inputs = self._allocate("inputs.npy", rows.dtype, shape)
        elif _shape_and_dtype(rows[0]) != _shape_and_dtype(self._inputs[0]):
            raise file.error(_other_kind(self._inputs, rows), first_row)
        end = self._position + len(rows)
        self._inputs[self._position : end] = rows
        self._labels[self._position : end] = labels
        self._digest.update(rows.tobytes())
        self._digest.update(labels.tobytes())
        self._position = end

    def finish(self) -> str:
        """Flush the arrays; return the hex digest of the records."""
        if self._inputs is None or self._position != self._total:
            raise ValueError(f"read {self._position} of {self._total} records")
        self._inputs.flush()  # type: ignore[attr-defined]
        self._labels.flush()  # type: ignore[attr-defined]
        return self._digest.hexdigest()

    def _allocate(self, name: str, kind: Any, shape: tuple[int, ...]) -> np.ndarray:
        return np.lib.format.open_memmap(self._out / name, "w+", kind, shape)


def rows_of_nobody(values: Sequence[object]) -> list[int]:
    """Return the positions of the records without a user."""
    return [row for row, value in enumerate(values) if names_nobody(value)]


def users_of(table: pa.Table, file: TableFile, first_row: int, user: str) -> list[object]:
    """Return the user of each record, or None. Raises UserError for lists and floats."""
    if pa.types.is_nested(table[user].type):
        raise file.error("must have one value per record", column=user)
    if pa.types.is_floating(table[user].type):
        rule = (
            "must be an integer below 2^63 or a text for each record, got floats, of which two may "
            "be rounded to one; write a letter before each"
        )
        raise file.error(rule, column=user)
    try:
        found: list[object] = table[user].to_pylist()
    except (ValueError, OverflowError, pa.ArrowException) as error:  # such as a date before year 1
        rule = "must be readable near this row"
        raise file.error(rule, row=first_row, column=user, cause=error) from None
    return [None if value in file.missing_words else value for value in found]


def class_numbers(
    table: pa.Table,
    file: TableFile,
    first_row: int,
    column: str,
    classes: int,
    class_names: tuple[str, ...],
) -> np.ndarray:
    """Return the classes of some rows, int64. Raises UserError naming the row of other labels."""
    values = table[column].combine_chunks()
    if pa.types.is_boolean(values.type) or pa.types.is_floating(values.type):
        with suppress(pa.ArrowException):  # 0.0 and 1.0, if some rows have no label
            values = values.cast(pa.int64())
    if class_names and is_text(values.type):
        names = [name.strip() for name in class_names]
        values = pc.index_in(pc.utf8_trim_whitespace(values), pa.array(names, values.type))
        rule = "must be one of data.names, got another label"
    elif not pa.types.is_integer(values.type):
        hint = "" if class_names else "; a label in words needs data.names, the classes in order"
        raise file.error(f"must be integers, got {values.type}{hint}", column=column)
    else:
        rule = f"must be 0 to {classes - 1} (data.classes is {classes}), got another label"
    outside = pc.or_(pc.less(values, 0), pc.greater_equal(values, classes))
    wrong = pc.or_kleene(values.is_null(), outside)
    if (row := pc.index(wrong, True).as_py()) >= 0:
        if not table[column][row].is_valid:
            rule = "must have a label, got none"
        raise file.error(rule, first_row + row, column)
    found: np.ndarray = values.to_numpy(zero_copy_only=False).astype(np.int64)
    return found


def _numbers(
    table: pa.Table, file: TableFile, first_row: int, columns: Columns, count: int
) -> np.ndarray:
    """Return targets that are not classes, float32 (rows, count)."""
    column = columns.label
    found = numbers_of(table[column].combine_chunks(), file, first_row, column)
    if found.shape[1] != count:
        rule = f"must have {count} numbers per record, as data.classes says"
        raise file.error(rule, row=first_row, column=column)
    low, high = range_of_label(dict(columns.preprocessing), column)
    with np.errstate(over="ignore"):
        found = ((found.astype(np.float64) - low) / (high - low)).astype(np.float32)
    fits = np.isfinite(found) if columns.targets == "number" else (found == 0) | (found == 1)
    if not fits.all():
        row = first_row + int(np.flatnonzero(~fits.all(axis=1))[0])
        rule = "finite as float32" if columns.targets == "number" else "0 or 1"
        raise file.error(f"must be {rule}", row, column)
    return found


def _inputs(
    table: pa.Table, file: TableFile, first_row: int, columns: Columns
) -> tuple[np.ndarray, np.ndarray]:
    """Return the inputs of some rows, and the values that identify their records."""
    if columns.features:
        rules = dict(columns.preprocessing)
        return preprocess(table, columns.features, rules, file, first_row)
    if columns.text is not None:
        found = columns.text.tokenize_table(table, file, first_row)
    else:
        found = _images(table[columns.image].combine_chunks(), file, first_row, columns.image)
    return found, found


def _rules(columns: Columns) -> dict[str, Any]:
    return {name: rule.model_dump(mode="json") for name, rule in columns.preprocessing}


def _encoding(columns: Columns) -> str:
    """Return what inputs depend on besides the hashed records; "" for inputs as stored."""
    if columns.text is not None:
        return json.dumps(columns.text.content_description)
    return json.dumps({"preprocessing": _rules(columns)}) if columns.preprocessing else ""


def _shape_and_dtype(record: np.ndarray) -> str:
    """Return the shape and type of a record in words: "shape (1, 28, 28), uint8"."""
    return f"shape {record.shape}, {record.dtype}"


def _other_kind(before: Any, rows: Any) -> str:
    first, other = _shape_and_dtype(before[0]), _shape_and_dtype(rows[0])
    return f"must have an input of {first}, as those before it, got {other}"


def image_bytes(values: pa.Array, file: TableFile, column: str) -> pa.Array:
    """Return the encoded images of a column. Raises UserError for other columns."""
    if pa.types.is_struct(values.type) and values.type.get_field_index("bytes") >= 0:
        values = values.field("bytes")
    if not (pa.types.is_binary(values.type) or pa.types.is_large_binary(values.type)):
        raise file.error(f"must be images as bytes, got {values.type}", None, column)
    return values


def decode_row(raw: bytes | None, file: TableFile, row: int, column: str = "image") -> np.ndarray:
    """Return the pixels of a row's image. Raises UserError naming the row."""
    if raw is None:
        raise file.error("must have an image, got none", row, column)
    try:
        return decode_picture(raw)
    except InexactImage as error:
        rule = f"the image cannot be decoded exactly: {error}"
    except ValueError as error:
        rule = f"the image cannot be decoded: {error_text(error)}"
    raise file.error(rule, row=row)


def _images(values: pa.Array, file: TableFile, first_row: int, column: str) -> np.ndarray:
    images: list[np.ndarray] = []
    for row, value in enumerate(image_bytes(values, file, column), first_row):
        images.append(decode_row(value.as_py(), file, row, column))
        if _shape_and_dtype(images[-1]) != _shape_and_dtype(images[0]):
            raise file.error(_other_kind(images, images[-1:]), row, column)
    return np.stack(images)
