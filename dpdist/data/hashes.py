"""What a record is recognised by: a hash of its input as a model sees it, without its label; of a
text (`text.py`), of the whole document, whatever reads it.

The same picture stored as 8 or as 16 bits, under another label or in another row is the same
record; one changed pixel or letter makes another one, which no comparison finds.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from dpdist.base.storage import write_atomic
from dpdist.data.sealed import damaged

_CHUNK = 2**22  # values turned into floats at once
_BYTES = 16  # of a hash
STORED = "record-hashes.npy"  # beside the records


def as_model_sees(rows: np.ndarray) -> np.ndarray:
    """Stored inputs as float32: bytes are divided by 255 into [0, 1], floats stay as they are."""
    if rows.dtype != np.uint8:
        return rows
    seen = rows.astype(np.float32)
    seen /= np.float32(255)
    return seen


def hashes_of(inputs: np.ndarray) -> np.ndarray:
    """Hashes of stored inputs (N, *shape), each of its own input alone: (N,) of 16 bytes."""
    found = bytearray()
    rows = max(1, _CHUNK // max(1, inputs[0].size))
    for start in range(0, len(inputs), rows):
        seen = as_model_sees(np.ascontiguousarray(inputs[start : start + rows]))
        for row in seen + np.float32(0):  # -0.0 becomes 0.0
            found += hashlib.blake2b(
                row.tobytes(), digest_size=16, person=b"dpdist.record"
            ).digest()
    return np.frombuffer(bytes(found), dtype="S16")


def positions(hashes: np.ndarray) -> np.ndarray:
    """A number in [0, 1) for each hash, uniform over different inputs: float64 (N,)."""
    words = np.frombuffer(hashes.tobytes(), dtype="<u8").reshape(-1, 2)[:, 0]
    return (words >> np.uint64(11)) * 2.0**-53


def stored_hashes(folder: Path) -> np.ndarray:
    """Hashes of the records stored in `folder`: those kept beside them, or computed once of their
    inputs."""
    path = folder / STORED
    if not path.exists():
        inputs = np.load(folder / "inputs.npy", mmap_mode="r", allow_pickle=False)
        write_hashes(folder, hashes_of(inputs).tobytes())
    raw = path.read_bytes()
    if not raw or raw[-_BYTES:] != _sum(raw[:-_BYTES]):
        raise damaged(path)
    return np.frombuffer(raw[:-_BYTES], dtype=f"S{_BYTES}")


def write_hashes(folder: Path, hashes: bytes) -> None:
    """Keep the hashes of a folder's records beside them, and behind them their own."""
    write_atomic(folder / STORED, hashes + _sum(hashes))


def _sum(hashes: bytes) -> bytes:
    return hashlib.blake2b(hashes, digest_size=_BYTES, person=b"dpdist.hashes").digest()
