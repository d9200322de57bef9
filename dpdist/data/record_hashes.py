"""Hashes that identify records.

A record is identified by a hash of its model input, without its label; a text by a hash of the
whole document. The same image stored with 8 or 16 bits, under a different label or in a different
row, is the same record; one changed pixel or letter makes it a different one, which no comparison
detects.
Data sets in Python are compared by `digests_of_input`, whatever their types, layouts and containers
(`dpdist.data.protocol.count_common`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dpdist.core.files import write_atomic

# --- hashes of records ------------------------------------------------------------------------


_CHUNK = 2**22  # values converted to floats at once
_BYTES = 16  # of a hash
HASHES_FILE = "record-hashes.bin"  # next to the records
GROUPS_FILE = "user-hashes.bin"  # next to them, if there is a user column


def to_model_inputs(rows: np.ndarray) -> np.ndarray:
    """Return stored inputs as float32: bytes are divided by 255, floats stay as they are."""
    if rows.dtype != np.uint8:
        return rows
    seen = rows.astype(np.float32)
    seen /= np.float32(255)
    return seen


def hash_inputs(inputs: np.ndarray) -> np.ndarray:
    """Return the hashes, (N,) of 16 bytes, of stored inputs (N, *shape)."""
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

    The value is a number, text, array, tensor or image, or a list, tuple or mapping of them.
    Numbers of any type are compared as float32 (large ones as float64), bytes also as fractions of
    255, images with their channels first and last, all of them flat. A mapping's values are taken
    in the order of its names.

    Raises:
        TypeError: it has parts of other types.
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
    """Return the sort key of a field: numbers by value, names by their letters."""
    return str(name).zfill(8)


def as_array(value: Any) -> np.ndarray:
    """Return numbers of any type, a tensor or an image as an array. Raises TypeError."""
    if hasattr(value, "detach"):  # a tensor, perhaps of a type that numpy lacks
        value = value.detach().cpu()
        half = value.is_floating_point() and value.element_size() < 4
        value = (value.float() if half else value).numpy()
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"a {type(value).__name__}")
    return array


def _is_numeric(values: list[Any] | tuple[Any, ...]) -> bool:
    """Return whether all values are numbers, so that they are one array."""
    return bool(values) and all(isinstance(each, int | float | np.number) for each in values)


def _is_picture(array: np.ndarray) -> bool:
    """Return whether arrays (count, ...) may be images with their channels last."""
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
    """Return the input that a map-style data set stores at a position, before transforms, or None.

    Known are torch's `Subset` and `ConcatDataset`, and the attributes of torchvision's data sets:
    `data` (arrays), `samples` and `imgs` (names of image files).

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
    """Return whether a user is missing: None, NaN or a blank text.

    All records with such a value would count as those of one person.
    """
    if isinstance(value, str | bytes):
        return not value.strip()
    return value is None or bool(value != value)  # NaN is not itself


def hash_users(values: Iterable[object]) -> bytes:
    """Return a hash of each record's user, 16 bytes each; equal values are the same user.

    Only integers and texts name a user: values of other types, and missing ones, get zeros.
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
    """Return a number in [0, 1) for each hash, uniform over different inputs: float64 (N,)."""
    words = np.frombuffer(hashes.tobytes(), dtype="<u8").reshape(-1, 2)[:, 0]
    return (words >> np.uint64(11)) * 2.0**-53


def stored_hashes(folder: Path) -> np.ndarray:
    """Return the hashes of the records in `folder`, which are computed once."""
    path = folder / HASHES_FILE
    if not path.exists():
        inputs = np.load(folder / "inputs.npy", mmap_mode="r", allow_pickle=False)
        write_hashes(folder, hash_inputs(inputs).tobytes())
    return _read_hashes(path)


def stored_user_hashes(folder: Path) -> np.ndarray | None:
    """Return the hashes of users in `folder`, (N,) of 16 bytes; None without a user column."""
    path = folder / GROUPS_FILE
    return _read_hashes(path) if path.exists() else None


def _read_hashes(path: Path) -> np.ndarray:
    return np.frombuffer(path.read_bytes(), dtype=f"S{_BYTES}")


def write_hashes(folder: Path, hashes: bytes, name: str = HASHES_FILE) -> None:
    """Write the hashes of a folder's records next to them."""
    write_atomic(folder / name, hashes)
