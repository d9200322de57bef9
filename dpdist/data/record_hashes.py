"""Hashes that identify records.

A record is identified by a hash of its input as a model sees it, without its label; a text by a
hash of the whole document, whatever reads it. The same picture stored as 8 or as 16 bits, under
another label or in another row is the same record; one changed pixel or letter makes another one,
which no comparison finds. Data sets in Python are compared by `digests_of_input`, which also sees
through types, layouts and containers; `dpdist.data.overlap` is the one comparison.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dpdist.core.files import write_atomic

# --- hashes of records ------------------------------------------------------------------------


_CHUNK = 2**22  # values turned into floats at once
_BYTES = 16  # of a hash
HASHES_FILE = "record-hashes.bin"  # beside the records
GROUPS_FILE = "user-hashes.bin"  # beside them, where a user column was named


def to_model_inputs(rows: np.ndarray) -> np.ndarray:
    """Stored inputs as float32: bytes are divided by 255 into [0, 1], floats stay as they are."""
    if rows.dtype != np.uint8:
        return rows
    seen = rows.astype(np.float32)
    seen /= np.float32(255)
    return seen


def hash_inputs(inputs: np.ndarray) -> np.ndarray:
    """Hashes of stored inputs (N, *shape), each of its own input alone: (N,) of 16 bytes."""
    found = bytearray()
    rows = max(1, _CHUNK // max(1, inputs[0].size))
    for start in range(0, len(inputs), rows):
        seen = to_model_inputs(np.ascontiguousarray(inputs[start : start + rows]))
        for row in seen + np.float32(0):  # -0.0 becomes 0.0
            found += hashlib.blake2b(
                row.tobytes(), digest_size=16, person=b"dpdist.record"
            ).digest()
    return np.frombuffer(bytes(found), dtype="S16")


# --- inputs in any form -----------------------------------------------------------------------


_WHOLE = 2**24  # beyond, float32 does not hold every whole number
_COLORS = (3, 4)  # channels of a picture


def digests_of_input(key: bytes, value: Any) -> set[bytes]:
    """Return keyed digests of a record's input; two forms of one input share one of them.

    The value is a number, text, array, tensor or picture, or a list, tuple or mapping of them.
    Numbers of any type are compared as float32 (large ones as float64), bytes also as fractions of
    255, pictures with their channels first and last, all of them flat. A mapping's values are taken
    in the order of its names.

    Raises:
        TypeError: it holds something else.
    """
    parts = (part if isinstance(part, bytes) else part[None] for part in _leaves(value))
    return digests_of_rows(key, list(parts), 1)[0]


def digests_of_rows(key: bytes, parts: list[np.ndarray | bytes], count: int) -> list[set[bytes]]:
    """Return the digests of several inputs, as `digests_of_input` does.

    parts: arrays (count, ...), one for each field in its order, or a text of all inputs.
    """
    arrays = [part for part in parts if not isinstance(part, bytes)]
    scaled = (False, True) if any(each.dtype == np.uint8 for each in arrays) else (False,)
    moved = (False, True) if any(map(_is_picture, arrays)) else (False,)
    empty = hashlib.blake2b(key=key, digest_size=16, person=b"dpdist.input")
    found: list[set[bytes]] = [set() for _ in range(count)]
    for fractions in scaled:
        for channels in moved:
            rows = [
                [part] * count if isinstance(part, bytes) else _canonical(part, fractions, channels)
                for part in parts
            ]
            for place, fields in enumerate(zip(*rows, strict=True)):
                digest = empty.copy()
                for field in fields:
                    digest.update(field)
                found[place].add(digest.digest())
    return found


def _leaves(value: Any) -> Iterator[np.ndarray | bytes]:
    """Yield texts as bytes, and arrays. Raises TypeError."""
    if value is None:
        return
    if isinstance(value, str | bytes):
        yield value.encode() if isinstance(value, str) else value
    elif isinstance(value, Mapping):
        for name in sorted(value, key=place_of_name):
            yield from _leaves(value[name])
    elif isinstance(value, list | tuple) and not _is_numeric(value):
        for part in value:
            yield from _leaves(part)
    else:
        yield as_array(value)


def place_of_name(name: Any) -> str:
    """Return what fields are ordered by: numbers by value, names by their letters."""
    return str(name).zfill(8)


def as_array(value: Any) -> np.ndarray:
    """Return numbers of any kind, a tensor or a picture as an array. Raises TypeError."""
    if hasattr(value, "detach"):  # a tensor, of a type that numpy may not have
        value = value.detach().cpu()
        half = value.is_floating_point() and value.element_size() < 4
        value = (value.float() if half else value).numpy()
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"a {type(value).__name__}")
    return array


def _is_numeric(values: list[Any] | tuple[Any, ...]) -> bool:
    """Return whether all of them are numbers, so that they are one array."""
    return bool(values) and all(isinstance(each, int | float | np.number) for each in values)


def _is_picture(array: np.ndarray) -> bool:
    """Return whether arrays (count, ...) may be pictures with their channels last."""
    return array.ndim == 4 and array.shape[-1] in _COLORS


def _canonical(array: np.ndarray, scaled: bool, moved: bool) -> list[Any]:
    """Return each row (count, ...) as bytes.

    scaled: bytes as fractions. moved: channels of the last axis first.
    """
    if moved and _is_picture(array):
        array = np.moveaxis(array, -1, 1)
    if scaled:
        array = to_model_inputs(array)
    flat = np.ascontiguousarray(array.reshape(len(array), -1))
    rows: list[Any] = list(flat.astype(np.float32) + np.float32(0))  # -0.0 becomes 0.0
    if flat.dtype.itemsize > 2:
        for place in np.flatnonzero((np.abs(flat) > _WHOLE).any(1)):
            rows[place] = flat[place].astype(np.float64) + 0.0
    return rows


def stored_input(source: Any, index: int, files: bool) -> Any:
    """Return the input that a map-style data set keeps at a position, before it transforms it.

    Known are torch's `Subset` and `ConcatDataset`, and the places where torchvision's data sets
    keep theirs: `data` (arrays), `samples` and `imgs` (names of picture files). None for others.

    files: whether to read files, which takes time.
    """
    while True:
        if hasattr(source, "indices") and hasattr(source, "dataset"):
            source, index = source.dataset, int(source.indices[index])
        elif hasattr(source, "datasets") and hasattr(source, "cumulative_sizes"):
            part = int(np.searchsorted(source.cumulative_sizes, index, side="right"))
            index -= source.cumulative_sizes[part - 1] if part else 0
            source = source.datasets[part]
        else:
            break
    rows: Any = getattr(source, "data", None)
    if hasattr(rows, "__getitem__") and hasattr(rows, "__len__") and len(rows) == len(source):
        return rows[index]
    for name in ("samples", "imgs") if files else ():
        rows = getattr(source, name, None)
        if isinstance(rows, list) and len(rows) == len(source):
            from PIL import Image

            with Image.open(rows[index][0]) as picture:
                return np.asarray(picture.convert("RGB"))
    return None


def names_nobody(value: Any) -> bool:
    """Whether the value of a user says of nobody whose a record is: none, NaN or an empty text.

    Records of strangers that share one would count as those of one person.
    """
    if isinstance(value, str | bytes):
        return not value.strip()
    return value is None or bool(value != value)  # NaN is not itself


def hash_users(values: Iterable[object]) -> bytes:
    """Hash the value of each record's user, 16 bytes each: equal ones are the same user.

    Whole numbers and texts alone name a user: those of another type, and empty ones, get zeros.
    """
    found = bytearray()
    for value in values:
        if type(value) not in (int, str) or names_nobody(value):
            found += bytes(_BYTES)
            continue
        raw = f"{type(value).__name__} {value}".encode()
        found += hashlib.blake2b(raw, digest_size=_BYTES, person=b"dpdist.unit").digest()
    return bytes(found)


def hash_positions(hashes: np.ndarray) -> np.ndarray:
    """A number in [0, 1) for each hash, uniform over different inputs: float64 (N,)."""
    words = np.frombuffer(hashes.tobytes(), dtype="<u8").reshape(-1, 2)[:, 0]
    return (words >> np.uint64(11)) * 2.0**-53


def stored_hashes(folder: Path) -> np.ndarray:
    """Hashes of the records stored in `folder`: those kept beside them, or computed once of their
    inputs."""
    path = folder / HASHES_FILE
    if not path.exists():
        inputs = np.load(folder / "inputs.npy", mmap_mode="r", allow_pickle=False)
        write_hashes(folder, hash_inputs(inputs).tobytes())
    return _read_hashes(path)


def stored_user_hashes(folder: Path) -> np.ndarray | None:
    """Hashes of the users of the records stored in `folder`, (N,) of 16 bytes; None where no user
    column was named."""
    path = folder / GROUPS_FILE
    return _read_hashes(path) if path.exists() else None


def _read_hashes(path: Path) -> np.ndarray:
    return np.frombuffer(path.read_bytes(), dtype=f"S{_BYTES}")


def write_hashes(folder: Path, hashes: bytes, name: str = HASHES_FILE) -> None:
    """Keep the hashes of a folder's records beside them."""
    write_atomic(folder / name, hashes)
