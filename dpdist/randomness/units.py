"""Random units: the noise of one canonical block is a pure function of its name.

A name lists all that the noise belongs to: purpose, seed, model, data, input, sigma, stage, block.
It is hashed by BLAKE2b into the key and the counter of AES-128 in counter mode, so no two units
share a stream, no width is lost, and any worker can make any block again. On devices the same key
opens a stream of another generator (`dpdist.randomness.philox`).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

SELECT, ESTIMATE, CHECK = "select", "estimate", "check"
Generator = Literal["aes", "philox"]  # of the numbers of a unit: `dpdist.certification.streams`
_PAD = 16  # the cipher writes whole blocks
_ZEROS = memoryview(bytes(1 << 16))  # what is enciphered at a time; it stays in the cache


@dataclass(frozen=True)
class UnitSource:
    """Names of random units of one run. seed: drawn after the model was frozen, any string."""

    purpose: str
    seed: str
    model_hash: str
    data_hash: str
    noise: str
    sigma: float

    def key(self, index: int | None, stage: str, block: int) -> bytes:
        """32 bytes for one block of one input; index None is the shared noise bank."""
        digest = hashlib.blake2b(digest_size=32, person=b"dpdist.certify.1")
        for part in (
            self.purpose,
            self.seed,
            self.model_hash,
            self.data_hash,
            self.noise,
            float(self.sigma).hex(),
            "bank" if index is None else str(index),
            stage,
            str(block),
        ):
            raw = part.encode()
            digest.update(len(raw).to_bytes(4, "little") + raw)
        return digest.digest()


class RandomWords:
    """Streams of 32-byte keys as int32 words, in a buffer that is used again."""

    def __init__(self) -> None:
        self._raw = bytearray(_PAD)

    def fill(self, key: bytes, count: int) -> np.ndarray:
        """That many words, uniform on [-2^31, 2^31); the next call overwrites them."""
        size = 4 * count
        if len(self._raw) < size + _PAD:
            self._raw = bytearray(size + _PAD)
        cipher = Cipher(algorithms.AES(key[:16]), modes.CTR(key[16:32])).encryptor()
        with memoryview(self._raw) as raw:
            for start in range(0, size, len(_ZEROS)):
                cipher.update_into(_ZEROS[: size - start], raw[start:])
        return np.frombuffer(self._raw, dtype="<i4", count=count)
