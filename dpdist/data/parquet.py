"""Read Parquet into memory-mapped arrays, row group by row group, and decode pictures exactly.

Three layouts are read, each with a label column: an image column (bytes, or a struct with a
`bytes` field); numeric feature columns (or one list column of numbers); a column of texts
(`dpdist.data.text`), which may do without labels. A picture is decoded exactly or not at all.
Every error names file and row.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from PIL import Image, UnidentifiedImageError
from PIL.TiffImagePlugin import PHOTOMETRIC_INTERPRETATION, TiffImageFile

from dpdist.core.errors import UserError, is_disk_full
from dpdist.core.fields import scale_to_unit
from dpdist.core.files import (
    FEATURES_KEY,
    atomic_folder,
    check_regular_file,
    data_error,
    error_text,
    make_private_folder,
    open_parquet,
    parquet_errors,
    quoted,
    read_json,
    write_json,
)
from dpdist.data.dataset import Dataset
from dpdist.data.record_hashes import (
    GROUPS_FILE,
    hash_groups,
    hash_inputs,
    names_nobody,
    write_checksums,
    write_hashes,
)  # fmt: skip
from dpdist.data.text import TextColumn

if TYPE_CHECKING:
    import pyarrow.parquet as pq


# --- pictures to pixels -----------------------------------------------------------------------


FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP")


class InexactImage(ValueError):
    """A picture whose pixels would not be what was stored."""


class UnreadableImage(ValueError):
    """Bytes that are no picture, or one of more pixels than are decoded."""


def decode_picture(
    raw: bytes, size: tuple[int, int] | None = None, most: int | None = None
) -> np.ndarray:
    """Pixels (C, H, W), C = 1 for grey and 3 for colour. size: the only (H, W) that is decoded;
    another one raises Unreadable before its pixels take room. So does one of more than `most`.

    uint8 for at most 8 bits (by their range; palettes are looked up), float32 in [0, 1] for grey
    pictures of 16 bits (v / 65535) and of floats. An alpha channel goes when it says opaque
    everywhere. An EXIF orientation is not applied: pixels lie as they are stored. Raises Inexact
    for what would lose something (transparency, several frames, colours of 16 bits, CMYK and other
    colour spaces, floats outside [0, 1]); Unreadable for bytes that are no picture of these
    formats.
    """
    try:
        return _decode_pillow(raw, size, most)
    except (InexactImage, UnreadableImage):
        raise
    except UnidentifiedImageError:  # whose words are an address in this process's memory
        raise UnreadableImage(f"no picture in {', '.join(FORMATS)}") from None
    except Exception as error:  # decoders raise whatever a damaged picture leads them to
        raise UnreadableImage(error_text(error)) from error


def _decode_pillow(raw: bytes, size: tuple[int, int] | None, most: int | None) -> np.ndarray:
    with Image.open(io.BytesIO(raw), formats=FORMATS) as picture:
        found = (picture.height, picture.width)
        if size is not None and size != found:
            raise UnreadableImage(
                f"{found[0]} x {found[1]} pixels, not the {size[0]} x {size[1]} of the model"
            )
        if most is not None and found[0] * found[1] > most:
            raise UnreadableImage(f"{found[0]} x {found[1]} pixels, more than {most:,}")
        frames = getattr(picture, "n_frames", 1)
        if frames != 1:
            raise InexactImage(f"it has {frames} frames; store the one that is meant")
        stored = _raw_mode(picture)
        picture.load()
        pixels = _pixels(picture, stored)
    return pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0)


def _raw_mode(picture: Image.Image) -> str:
    """How the decoder reads the samples; known only before they are loaded."""
    tiles = getattr(picture, "tile", [])
    arguments = tiles[0][3] if tiles else ""
    first = arguments[0] if isinstance(arguments, tuple) and arguments else arguments
    return first if isinstance(first, str) else ""


def _pixels(picture: Image.Image, stored: str) -> np.ndarray:
    """Shape (H, W) or (H, W, 3)."""
    mode = picture.mode
    if mode not in ("1", "L") and _white_is_zero(picture):  # these the decoder turns round
        raise InexactImage("its zero is white; store it with zero for black")
    if mode == "F":
        values = np.asarray(picture, dtype=np.float32)
        if not ((values >= 0) & (values <= 1)).all():
            raise InexactImage("its numbers are not all in [0, 1]; scale them")
        return values
    if mode.startswith("I;16") and stored.startswith("I;16") and "S" not in stored:
        if "transparency" in picture.info:
            raise InexactImage("it has a transparent grey; put it before a background")
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
    raise InexactImage(f"its colours ({mode}) have no exact grey or RGB values; convert it")


def _white_is_zero(picture: Image.Image) -> bool:
    return (
        isinstance(picture, TiffImageFile) and picture.tag_v2.get(PHOTOMETRIC_INTERPRETATION) == 0
    )


def _opaque(picture: Image.Image) -> np.ndarray:
    """The pixels of a picture that could be transparent and nowhere is."""
    whole = np.asarray(picture.convert("RGBA"))
    if (whole[..., 3] != 255).any():
        raise InexactImage("it is transparent in places; put it before a background")
    return whole[..., 0] if picture.mode in ("1", "L", "LA") else whole[..., :3]


# --- Parquet to arrays ------------------------------------------------------------------------


FEATURES_FILE = "features.json"  # beside features: what the network that made them saw
_CACHE_VERSION = 4  # of the cache; a new number re-reads everything


@dataclass(frozen=True)
class Columns:
    """Which columns hold the record.

    features: column names, or empty when there is an image column or a text; a pattern (mean_*)
    stands for all columns that it fits but label and group. group: whom a record belongs to; the
    size of the largest group and a hash of each record's value are kept. targets: of a record,
    "class", one of the classes; "number", a number or a list; "labels", a 0 or 1 or a list. ranges:
    of features, name, low and high, which become 0 and 1. Raises UserError when a column would be
    read twice.
    """

    image: str = "image"
    label: str = "label"
    features: tuple[str, ...] = ()
    group: str | None = None
    text: TextColumn | None = None
    targets: str = "class"
    ranges: tuple[tuple[str, float, float], ...] = ()

    @property
    def input_columns(self) -> tuple[str, ...]:
        """The columns that a model sees."""
        return self.features or ((self.image,) if self.text is None else self.text.columns)

    @property
    def has_labels(self) -> bool:
        """Whether the label column is read."""
        return self.text is None or not self.text.predicts_next_token

    def __post_init__(self) -> None:
        if self.has_labels and self.label in self.input_columns:
            raise UserError(
                f"data.columns: the label {self.label!r} is among the features: the model would "
                "read the answer; take it out"
            )
        twice = [name for name, times in Counter(self.features).items() if times > 1]
        if twice:
            raise UserError(f"data.columns.features: {twice[0]!r} is named twice; name it once")

    def expand_patterns(self, available: Sequence[str], context: str) -> Columns:
        """With a file's columns in place of patterns. Raises UserError for one that fits none."""
        found: list[str] = []
        for asked in self.features:
            if not set(asked) & set("*?["):
                found.append(asked)
                continue
            others = [name for name in available if name not in (self.label, self.group)]
            fit = [name for name in others if fnmatchcase(name, asked)]
            if not fit:
                raise UserError(
                    f"{context}: no column fits {asked!r}; it has {', '.join(available)} (name "
                    "yours under data.columns in the recipe)"
                )
            found += [name for name in fit if name not in found]
        return replace(self, features=tuple(found))


def holds_features(root: Path | None, name: str) -> bool:
    """Return whether a data set is features that papers/dplis/features.py made of other records.

    The file beside them says so, and each of their own files, wherever it was moved.
    """
    if root is None:
        return False
    folder = Path(root) / name
    return (folder / FEATURES_FILE).exists() or any(map(_is_features, folder.rglob("*.parquet")))


def _is_features(file: Path) -> bool:
    with suppress(UserError):  # what cannot be read is refused where it is read
        return FEATURES_KEY in (open_parquet(file).schema_arrow.metadata or {})
    return False


def split_files(root: Path, name: str, split: str) -> list[Path]:
    """The Parquet files of one split, in order: NAME/SPLIT.parquet, NAME/SPLIT-*.parquet,
    NAME/data/SPLIT-*.parquet or NAME/SPLIT/*.parquet under the data root.

    Raises UserError when the root or the split is not there.
    """
    if not root.is_dir():
        raise UserError(
            f"data root {root}: no such folder; give --data-root or data.root in the recipe"
        )
    base = root / name
    if not base.is_dir():
        found = ", ".join(sorted(p.name for p in root.iterdir() if p.is_dir())) or "none"
        raise UserError(f"data root {root}: no data set {name!r} there (found: {found})")
    for pattern in (
        f"{split}.parquet",
        f"{split}-*.parquet",
        f"data/{split}-*.parquet",
        f"{split}/*.parquet",
    ):
        files = sorted(base.glob(pattern))
        if files:
            return files
    others = [base / f"{split}.csv", base / f"{split}.jsonl", base / split]
    there = [path.name for path in others if path.exists()]
    raise UserError(
        f"{base}: no Parquet file of split {split!r} (looked for {split}.parquet, ...)"
        + (
            f"; run `dpdist init {base} --output NEW.yaml`, which makes it of {there[0]}"
            if there
            else ""
        )
    )


# --- what Parquet files were made of ----------------------------------------------------------


SOURCES_FILE = "dpdist-sources.json"  # beside Parquet files that `dpdist init` made
PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")


def classes_in(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    return sorted(each.name for each in folder.iterdir() if next(pictures_in(each), None))


def pictures_in(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from (p for p in sorted(folder.iterdir()) if p.suffix.lower() in PICTURES)


@dataclass(frozen=True)
class Sources:
    """The CSV or JSONL files, or folders SPLIT of pictures, that `dpdist init` made Parquet of.

    sources, files: by name of a source and of a Parquet file, its stamp (names, sizes and times)
    and the digest of its content. SPLIT.parquet was made of SPLIT.csv, SPLIT.jsonl or SPLIT.
    """

    sources: dict[str, Any]
    files: dict[str, Any]

    @staticmethod
    def read(folder: Path) -> Sources:
        """Return the record that lies beside Parquet files; an empty one where none does."""
        path = folder / SOURCES_FILE
        if not path.exists():
            return Sources({}, {})
        try:
            said = read_json(path, {"sources": dict, "files": dict})
        except UserError as error:
            raise UserError(
                f"{error}; remove it with the Parquet files that it is about, and run `dpdist init`"
            ) from None
        return Sources(said["sources"], said["files"])

    @staticmethod
    def stamps(folder: Path, names: Sequence[str]) -> dict[str, str]:
        return {name: _stamp(folder, name) for name in names}

    @staticmethod
    def write(folder: Path, stamps: dict[str, str], made: Path) -> None:
        """Record in the folder `made` what its Parquet files were made of. stamps: of the sources
        before they were read. Raises UserError for one that changed since."""
        digests = {name: [stamp, _content(folder, name)] for name, stamp in stamps.items()}
        if changed := [name for name, stamp in stamps.items() if _stamp(folder, name) != stamp]:
            raise UserError(f"{folder / changed[0]}: changed while it was read; begin again")
        files = [path.name for path in sorted(made.glob("*.parquet"))]
        of_files = {name: [_stamp(made, name), _content(made, name)] for name in files}
        write_json(made / SOURCES_FILE, {"sources": digests, "files": of_files})

    def outdated(self, folder: Path) -> Iterator[tuple[str, str]]:
        """Yield the names of sources that changed, and of the Parquet files made of them.

        A source that is not there any more says nothing.
        """
        for name, said in self.sources.items():
            made = f"{Path(name).stem}.parquet"
            changed = (folder / name).exists() and not _is_same(folder, name, said)
            if changed and self.made(folder, made):
                yield name, made

    def made(self, folder: Path, name: str) -> bool:
        """Whether `dpdist init` wrote this Parquet file as it is."""
        there = name in self.files and (folder / name).is_file()
        return there and _is_same(folder, name, self.files[name])


def check_sources(folder: Path) -> None:
    """Raise UserError where Parquet of a data set was made by `dpdist init` of what changed since.

    A record that was taken out of its source would be trained on.
    """
    kept = Sources.read(folder)
    for name, made in kept.outdated(folder):
        own = ", ".join(file for file in kept.files if kept.made(folder, file))
        raise UserError(
            f"{folder}: {made} must be as {name} is, which changed since; remove {own} and "
            f"run `dpdist init {folder} --output NEW.yaml` (or move {name} away to keep to {made})"
        )


def _is_same(folder: Path, name: str, said: Any) -> bool:
    """Whether a source is as on record. One of the same sizes and times is not read again."""
    known = isinstance(said, list) and len(said) == 2
    return known and (_stamp(folder, name) == said[0] or _content(folder, name) == said[1])


def _files_of(folder: Path, name: str) -> Iterator[tuple[bytes, Path]]:
    """Yield names and paths of a source's files: itself, or all pictures of its classes."""
    place = folder / name
    if not place.is_dir():
        yield b"", place
        return
    for kind in sorted(place.iterdir()):
        for path in pictures_in(kind):
            yield os.fsencode(path.relative_to(place)), path


def _stamp(folder: Path, name: str) -> str:
    """Return a hash of the names, sizes and times of a source's files."""
    found = hashlib.blake2b(digest_size=16, person=b"dpdist.stamp")
    for own, path in _files_of(folder, name):
        try:
            info = os.stat(path)
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error_text(error)}") from error
        found.update(struct.pack("<qqq", len(own), info.st_size, info.st_mtime_ns) + own)
    return found.hexdigest()


def _content(folder: Path, name: str) -> str:
    """Return a hash of the names and the content of a source's files."""
    found = hashlib.blake2b(digest_size=16, person=b"dpdist.source")
    for own, path in _files_of(folder, name):
        try:
            with open(check_regular_file(path), "rb") as file:
                digest = hashlib.file_digest(file, hashlib.blake2b).digest()
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error_text(error)}") from error
        found.update(struct.pack("<q", len(own)) + own + digest)
    return found.hexdigest()


# --- Parquet into the cache -------------------------------------------------------------------


def load_parquet(
    files: list[Path],
    name: str,
    classes: int,
    columns: Columns,
    cache: Path,
    class_names: tuple[str, ...] = (),
) -> Dataset:
    """The split, decoded once into `cache` (private, mode 0700) and memory-mapped from then on.

    class_names: of the classes, by number, where the label column holds these.

    Raises UserError naming file and row for wrong columns, undecodable images, images of different
    size, labels outside 0..classes-1, and non-numeric or non-finite features.
    """
    stamp = _cache_key(files, name, classes, columns, class_names)
    folder = cache / f"{name.replace('/', '-')}-{stamp}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        with atomic_folder(folder, keep_existing=True) as aside:
            _decode(files, name, (classes, class_names), columns, make_private_folder(aside))
    return Dataset.open(folder)


def _cache_key(
    files: list[Path], name: str, classes: int, columns: Columns, class_names: tuple[str, ...]
) -> str:
    digest = hashlib.blake2b(digest_size=8)
    described = [[str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns] for f in files]
    named = [class_names] if class_names else []
    grouped = ["hashes of known groups"] if columns.group is not None else []
    about = [_CACHE_VERSION, described, name, classes, _columns_to_dict(columns), *named, *grouped]
    digest.update(json.dumps(about).encode())
    return digest.hexdigest()


def _columns_to_dict(columns: Columns) -> dict[str, Any]:
    """What is read of a file, a tokenizer by its content."""
    named = asdict(columns)
    if columns.targets == "class":
        del named["targets"]
    if not columns.ranges:
        del named["ranges"]
    if columns.text is None:
        del named["text"]
    else:
        named["text"] = columns.text.content_description
    return named


def _decode(
    files: list[Path],
    name: str,
    classes: tuple[int, tuple[str, ...]],
    columns: Columns,
    out: Path,
) -> None:
    readers = [open_parquet(file) for file in files]
    columns = columns.expand_patterns(readers[0].schema_arrow.names, str(files[0]))
    wanted = [*columns.input_columns, *([columns.label] if columns.has_labels else [])]
    if columns.group is not None:
        wanted.append(columns.group)
    total = sum(reader.metadata.num_rows for reader in readers)
    if total == 0:
        raise UserError(f"{files[0]}: no records")
    numbers = columns.targets != "class"
    arrays = _ArrayWriter(out, total, classes[0] if numbers else None)
    hashes = bytearray()
    groups = _GroupReader(columns.group)
    for file, reader in zip(files, readers, strict=True):
        _check_group(reader.schema_arrow, file, columns.group)
        for first_row, table in read_rows(file, reader, wanted):
            raw = _inputs(table, file, first_row, columns)
            rows = _scaled(raw, columns)
            marks = np.zeros(len(rows), dtype=np.int64)
            if numbers:
                marks = _numbers(table, file, first_row, columns, classes[0])
            elif columns.has_labels:
                marks = _labels(table, file, first_row, columns.label, *classes)
            groups.add(table, file, first_row)
            arrays.append(rows, marks, f"{file} row {first_row}")
            if columns.text is not None:
                hashes += columns.text.hash_table(table)
            elif columns.ranges:  # what is cut may be alike, and its records are not
                hashes += hash_inputs(raw).tobytes()
    digest = arrays.finish()
    if hashes:
        write_hashes(out, bytes(hashes))
    groups.finish(out)
    meta = {
        "name": name,
        "classes": classes[0],
        "fingerprint": digest,
        "largest_group": max(groups.counts.values(), default=None),
        "read": _encoding(columns),
        "following": not columns.has_labels,
        **({"target_kind": columns.targets} if numbers else {}),
    }
    (out / "meta.json").write_text(json.dumps(meta))
    write_checksums(out)


class _GroupReader:
    """Whom each record belongs to, by a column: sizes and hashes; nothing without a column."""

    def __init__(self, column: str | None) -> None:
        self._column, self._hashes = column, bytearray()
        self._unknown: list[str] = []  # file and row of records that belong to nobody
        self._file = ""
        self._are_texts: set[bool] = set()
        self.counts: Counter[object] = Counter()

    def add(self, table: pa.Table, file: Path, first_row: int) -> None:
        """Read the column of some rows. Raises UserError where it holds numbers and texts."""
        if self._column is None:
            return
        values, self._file = _groups(table, file, first_row, self._column), str(file)
        self.counts.update(values)
        self._unknown += [f"{file} row {first_row + row}" for row in rows_of_nobody(values)]
        self._are_texts |= {isinstance(value, str) for value in values if value is not None}
        if len(self._are_texts) > 1:
            raise UserError(
                f"{file}: group column {self._column!r} must hold texts or numbers in all files "
                "alike: 7 and '7' would be two groups"
            )
        self._hashes += hash_groups(values)

    def finish(self, out: Path) -> None:
        """Keep the hashes beside the records. Raises UserError where strangers would be one group,
        or a person two."""
        if self._column is None:
            return
        if self._unknown:
            raise UserError(
                f"{self._unknown[0]}: group column {self._column!r} must be a whole number or a "
                f"text for each record, is none for {len(self._unknown):,} of "
                f"{self.counts.total():,}: drop these records, or give each a group of its own"
            )
        texts = [value for value in self.counts if isinstance(value, str)]
        if twice := len(texts) - len({text.strip() for text in texts}):
            raise UserError(
                f"{self._file}: group column {self._column!r} must name each group in one way, has "
                f"{twice:,} that differ from others in blanks around them alone; remove these"
            )
        write_hashes(out, bytes(self._hashes), GROUPS_FILE)


class _ArrayWriter:
    """Memory-mapped inputs and labels of `total` records, filled from the first to the last.

    numbers: how many floats a record's target has; None: it is a whole number."""

    def __init__(self, out: Path, total: int, numbers: int | None = None) -> None:
        self._out, self._total, self._position = out, total, 0
        kind, shape = (np.int64, ()) if numbers is None else (np.float32, (numbers,))
        self._labels = self._allocate("labels.npy", kind, (total, *shape))
        self._inputs: np.ndarray | None = None
        self._digest = hashlib.blake2b(digest_size=16, person=b"dpdist.data")

    def append(self, rows: np.ndarray, labels: np.ndarray, context: str) -> None:
        """Add records. Raises UserError for inputs of another shape than those before."""
        if self._inputs is None:
            shape = (self._total, *rows.shape[1:])
            self._inputs = self._allocate("inputs.npy", rows.dtype, shape)
        elif _shape_and_dtype(rows[0]) != _shape_and_dtype(self._inputs[0]):
            raise UserError(
                f"{context}: {_shape_and_dtype(rows[0])}, the rows before it "
                f"{_shape_and_dtype(self._inputs[0])}"
            )
        end = self._position + len(rows)
        self._inputs[self._position : end] = rows
        self._labels[self._position : end] = labels
        self._digest.update(rows.tobytes())
        self._digest.update(labels.tobytes())
        self._position = end

    def finish(self) -> str:
        """Write all to the disk; return the hex digest of the records."""
        if self._inputs is None or self._position != self._total:
            raise ValueError(f"{self._position} records of {self._total}")
        self._inputs.flush()  # type: ignore[attr-defined]
        self._labels.flush()  # type: ignore[attr-defined]
        return self._digest.hexdigest()

    def _allocate(self, name: str, kind: Any, shape: tuple[int, ...]) -> np.ndarray:
        """Raise UserError for what no file holds: a footer may count anything."""
        try:
            with np.errstate(over="ignore"):
                return np.lib.format.open_memmap(self._out / name, "w+", kind, shape)
        except (OSError, ValueError, OverflowError, MemoryError) as error:
            if is_disk_full(error):
                raise
            raise UserError(
                f"{self._total:,} records, as the files' footers count, cannot be stored: "
                f"{error_text(error)}"
            ) from error


def read_rows(
    file: Path, reader: pq.ParquetFile, columns: Sequence[str]
) -> Iterator[tuple[int, pa.Table]]:
    """Yield the columns `columns` of a Parquet file, some rows at a time.

    Args:
        file: names the file in complaints.
        reader: the file, as `open_parquet` opened it.
        columns: names of columns.

    Yields:
        the number of the first row, and a table of at least one row.

    Raises:
        UserError: a column is missing or there twice, a text is not UTF-8, or the file is damaged;
            one that holds fewer or more rows than its footer counts is, too.
    """
    present = reader.schema_arrow.names
    missing = [column for column in columns if column not in present]
    if missing:
        raise UserError(
            f"{file}: no column {', '.join(map(repr, missing))}; it has {', '.join(present)} "
            "(name yours under data.columns in the recipe)"
        )
    twice = [column for column in columns if present.count(column) > 1]
    if twice:
        raise UserError(f"{file}: has more than one column {twice[0]!r}; rename the others")
    counted, first_row = reader.metadata.num_rows, 0
    batches = reader.iter_batches(batch_size=4096, columns=list(columns))
    while batch := _next_batch(batches, file, first_row):
        if first_row + batch.num_rows > counted:
            break
        if batch.num_rows:
            yield first_row, pa.Table.from_batches([batch])
        first_row += batch.num_rows
    if batch is not None or first_row != counted:
        found = first_row if batch is None else f"more than {first_row}"
        raise UserError(
            f"{file}: damaged: its footer counts {counted:,} rows, {found} are there; "
            "write it again"
        )


def _next_batch(
    batches: Iterator[pa.RecordBatch], file: Path, first_row: int
) -> pa.RecordBatch | None:
    """Return the next rows, None after the last. Raises UserError for damaged ones."""
    batch = None
    try:
        batch = next(batches, None)
        if batch is not None:
            batch.validate(full=True)
        return batch
    except parquet_errors() as error:
        for name, row in _invalid_texts(batch):
            raise data_error(
                file, "must be UTF-8 text; write it again as UTF-8", row=first_row + row,
                column=name,
            ) from None  # fmt: skip
        raise data_error(file, f"damaged near row {first_row}", cause=error) from None


def _invalid_texts(batch: pa.RecordBatch | None) -> Iterator[tuple[str, int]]:
    """Yield column and row of every text that is not UTF-8."""
    for field, values in zip(batch.schema, batch.columns, strict=True) if batch else ():
        if pa.types.is_string(field.type) or pa.types.is_large_string(field.type):
            for row, raw in enumerate(values.cast(pa.large_binary()).to_pylist()):
                try:
                    (raw or b"").decode()
                except UnicodeDecodeError:
                    yield field.name, row


def _check_group(schema: pa.Schema, file: Path, group: str | None) -> None:
    """Raise UserError for a group column that holds several values a record."""
    if group in schema.names and pa.types.is_nested(schema.field(group).type):
        raise UserError(f"{file}: group column {group!r} must hold one value per record")


def rows_of_nobody(values: Sequence[object]) -> list[int]:
    """The positions of the records that belong to nobody."""
    return [row for row, value in enumerate(values) if names_nobody(value)]


def _groups(table: pa.Table, file: Path, first_row: int, group: str) -> list[object]:
    """Return whom each record belongs to."""
    try:
        found: list[object] = table[group].to_pylist()
    except (ValueError, OverflowError, pa.ArrowException) as error:  # a date that Python lacks
        raise data_error(
            file, "says whom a record belongs to, and must be readable near here", row=first_row,
            column=group, cause=error,
        ) from None  # fmt: skip
    return found


def _labels(
    table: pa.Table,
    file: Path,
    first_row: int,
    column: str,
    classes: int,
    class_names: tuple[str, ...],
) -> np.ndarray:
    values = table[column].combine_chunks()
    if class_names and (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
        numbers = pc.index_in(values, pa.array(class_names, values.type))
        unknown = pc.and_(numbers.is_null(), values.is_valid())
        if pc.any(unknown).as_py():
            row = pc.index(unknown, True).as_py()
            raise data_error(
                file, "must be one of data.names, got another label", row=first_row + row,
                column=column,
            )  # fmt: skip
        values = numbers
    if not pa.types.is_integer(values.type):
        hint = "" if class_names else " (text needs data.names, the classes in order)"
        raise UserError(f"{file}: label column {column!r} is {values.type}, must be integer{hint}")
    if values.null_count:
        row = first_row + int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
        raise UserError(f"{file} row {row}: no label")
    labels = values.to_numpy(zero_copy_only=False).astype(np.int64)
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        raise data_error(
            file, f"must be 0 to {classes - 1} (data.classes is {classes}), got another label",
            row=first_row + int(wrong[0]), column=column,
        )  # fmt: skip
    return labels


def _numbers(
    table: pa.Table, file: Path, first_row: int, columns: Columns, count: int
) -> np.ndarray:
    """Return targets that are no classes, float32 (rows, count)."""
    column = columns.label
    values = table[column].combine_chunks()
    lengths = np.ones(len(values), dtype=np.int64)
    if is_list(values.type):
        lengths = pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False)
        values = values.flatten()
    kind = values.type
    if not (pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        raise UserError(f"{file}: label column {column!r} is {kind}, must be numeric")
    if (lengths != count).any() or values.null_count:
        raise UserError(
            f"{file} from row {first_row}: label column {column!r} must hold {count} numbers for "
            "each record, none empty (data.classes says how many)"
        )
    with np.errstate(over="ignore"):
        found = values.to_numpy(zero_copy_only=False).astype(np.float32).reshape(-1, count)
    fits = np.isfinite(found) if columns.targets == "number" else (found == 0) | (found == 1)
    if not fits.all():
        row = first_row + int(np.flatnonzero(~fits.all(axis=1))[0])
        rule = "finite as float32" if columns.targets == "number" else "0 or 1"
        raise UserError(f"{file} row {row}: label column {column!r} must be {rule}")
    return found


def _inputs(table: pa.Table, file: Path, first_row: int, columns: Columns) -> np.ndarray:
    if columns.text is not None:
        return columns.text.tokenize_table(table, lambda row: f"{file} row {first_row + row}")
    if not columns.features:
        return _images(table[columns.image].combine_chunks(), file, first_row, columns.image)
    if len(columns.features) == 1 and is_list(table[columns.features[0]].type):
        kind = table[columns.features[0]].type.value_type
        if is_list(kind):
            raise UserError(f"{file}: feature lists must hold numbers, not lists")
        _require_numbers(kind, file, columns.features[0])
        rows = table[columns.features[0]].to_pylist()
        widths = {len(row) if row is not None else -1 for row in rows}
        if len(widths) != 1 or -1 in widths:
            raise UserError(
                f"{file} from row {first_row}: feature lists of lengths {sorted(widths)}"
            )
        with np.errstate(over="ignore"):  # refused below
            features = np.asarray(rows, dtype=np.float32)
    else:
        for column in columns.features:
            _require_numbers(table[column].type, file, column)
        with np.errstate(over="ignore"):
            arrays = [table[column].to_numpy().astype(np.float32) for column in columns.features]
        features = np.stack(arrays, axis=1)
    bad = np.flatnonzero(~np.isfinite(features).all(axis=1))
    if len(bad):
        raise UserError(
            f"{file} row {first_row + bad[0]}: a feature is missing or not finite as float32"
        )
    return features


def _scaled(features: np.ndarray, columns: Columns) -> np.ndarray:
    """Return features with their public ranges as [0, 1]."""
    if not columns.ranges:
        return features
    found = features.copy()
    for name, low, high in columns.ranges:
        own = slice(None) if len(columns.features) == 1 else columns.features.index(name)
        found[:, own] = scale_to_unit(features[:, own].astype(np.float64), low, high)
    return found


def _encoding(columns: Columns) -> str:
    """Return what inputs depend on beside the records that hashes name; "" for inputs as stored."""
    if columns.text is not None:
        return json.dumps(columns.text.content_description)
    return json.dumps({"ranges": columns.ranges}) if columns.ranges else ""


def _require_numbers(kind: pa.DataType, file: Path, column: str) -> None:
    """Neither text that reads like numbers nor truth values pass for features."""
    if not (pa.types.is_floating(kind) or pa.types.is_integer(kind)):
        raise UserError(f"{file}: feature column {column!r} is {kind}, must be numeric")


def _shape_and_dtype(record: np.ndarray) -> str:
    """What all records of a data set have in common: "shape (1, 28, 28), uint8"."""
    return f"shape {record.shape}, {record.dtype}"


def is_list(kind: pa.DataType) -> bool:
    return (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def image_bytes(values: pa.Array, file: Path, column: str) -> pa.Array:
    """The encoded pictures of an image column. Raises UserError when it is none."""
    if pa.types.is_struct(values.type) and values.type.get_field_index("bytes") >= 0:
        values = values.field("bytes")
    if not (pa.types.is_binary(values.type) or pa.types.is_large_binary(values.type)):
        raise UserError(
            f"{file}: image column {column!r} is {values.type}, must be bytes or a struct with "
            "bytes"
        )
    return values


def _picture_names(values: pa.Array) -> list[str]:
    """The name of each picture's file in brackets; "" where none is kept."""
    kept = pa.types.is_struct(values.type) and values.type.get_field_index("path") >= 0
    names = values.field("path").to_pylist() if kept else [None] * len(values)
    return [f" ({quoted(name)})" if isinstance(name, str) and name else "" for name in names]


def _images(values: pa.Array, file: Path, first_row: int, column: str) -> np.ndarray:
    names = _picture_names(values)
    values = image_bytes(values, file, column)
    images = []
    for offset, value in enumerate(values):
        raw = value.as_py()
        where = f"{file} row {first_row + offset}{names[offset]}"
        if raw is None:
            raise UserError(f"{where}: no image")
        try:
            images.append(decode_picture(raw))
        except InexactImage as error:
            raise UserError(f"{where}: the image cannot be taken as it is: {error}") from None
        except ValueError as error:
            raise UserError(f"{where}: the image cannot be decoded: {error_text(error)}") from error
        if _shape_and_dtype(images[-1]) != _shape_and_dtype(images[0]):
            raise UserError(
                f"{where}: image of {_shape_and_dtype(images[-1])}, the first one is "
                f"{_shape_and_dtype(images[0])}"
            )
    return np.stack(images)
