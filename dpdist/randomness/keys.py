"""Keys, keystreams and random units: the source of every secret random bit.

A key is derived with keyed BLAKE2b from the run key and labels (purpose, fingerprints, trial,
attempt epoch, step, ...) and expanded with ChaCha20, a counter-based generator that can be entered
at any position. So a worker computes exactly the bits of its own records, and any number of workers
has the same batch and the same noise. torch.manual_seed is not used for secrets: torch's CPU
generator maps seeds that are equal modulo 2**32 to one stream.

A random unit is the noise of one canonical block, a pure function of its name: purpose, seed,
model, data, input, sigma, stage, block. The name is hashed by BLAKE2b into the key and the counter
of AES-128 in counter mode, so no two units share a stream, no bits are lost, and any worker can
recompute any block. On devices the same key opens a stream of a different generator
(`dpdist.randomness.device_generators`).
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from typing import Literal

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

# --- keys and keystreams ----------------------------------------------------------------------


KEY_BYTES = 32
_BLOCK = 64  # bytes per ChaCha20 block; one block per counter value


def new_run_key() -> bytes:
    """Return a fresh 32-byte key from the operating system's generator."""
    return secrets.token_bytes(KEY_BYTES)


def key_id(key: bytes) -> str:
    """Return a public name for a key that does not reveal it (hex, 16 characters)."""
    return hashlib.blake2b(key, digest_size=8, person=b"dpdist.keyid").hexdigest()


def derive_key(key: bytes, purpose: str, *labels: str | int) -> bytes:
    """Return a 32-byte key for one purpose; distinct label sequences give independent keys.

    Each label is length-prefixed, so that ("ab", "c") and ("a", "bc") differ.
    """
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes, got {len(key)}")
    mac = hashlib.blake2b(key=key, digest_size=KEY_BYTES, person=b"dpdist.derive")
    for label in (purpose, *labels):
        kind = b"i" if isinstance(label, int) else b"s"
        raw = str(label).encode()
        mac.update(kind + len(raw).to_bytes(8, "little") + raw)
    return mac.digest()


def stream_words(key: bytes, start: int, count: int) -> np.ndarray:
    """Return words number `start` to `start + count - 1` of the key's stream: uint64, (count,).

    Every key is used for one stream only, so the nonce is constant. A stream ends after 2**35 words
    (the cipher's 32-bit block counter); asking for more raises ValueError.
    """
    if count <= 0:
        return np.empty(0, dtype=np.uint64)
    return np.frombuffer(_stream(key, start).update(bytes(count * 8)), dtype="<u8")


class WordReader:
    """A reader of words `start` to `start + count - 1` of the key's stream, in order.

    It reads at most `max_words` at once, into one buffer.
    """

    def __init__(self, key: bytes, start: int, count: int, max_words: int) -> None:
        self._left, self._stream = count, _stream(key, start)
        self._zeros = memoryview(bytes(max_words * 8))
        self._raw = bytearray(max_words * 8 + _BLOCK)
        self._words = np.frombuffer(self._raw, dtype="<u8", count=max_words)

    def read(self) -> np.ndarray:
        """Return the next words: uint64; overwritten by the next call."""
        size = min(self._left, len(self._words))
        self._left -= size
        self._stream.update_into(self._zeros[: size * 8], self._raw)
        return self._words[:size]


def _stream(key: bytes, start: int) -> CipherContext:
    """Return the cipher at word number `start`, which encrypts zeros to words."""
    first_block, skip = divmod(start * 8, _BLOCK)
    # The 16-byte nonce begins with the initial block counter, little-endian.
    nonce = first_block.to_bytes(8, "little") + bytes(8)
    stream = Cipher(ChaCha20(key, nonce), mode=None).encryptor()
    stream.update(bytes(skip))
    return stream


# --- random units -----------------------------------------------------------------------------


SELECT, ESTIMATE, CHECK = "select", "estimate", "check"
Generator = Literal["aes", "philox"]  # of the numbers of a unit: `dpdist.certification.inference`
_PAD = 16  # the cipher writes whole blocks
_ZEROS = memoryview(bytes(1 << 16))  # encrypted at a time; it stays in the cache


@dataclass(frozen=True)
class StreamKeys:
    """Keys of the random units of one run. seed: any string, drawn after the model was frozen."""

    purpose: str
    seed: str
    model_hash: str
    data_hash: str
    noise: str
    sigma: float

    def key(self, index: int | None, stage: str, block: int) -> bytes:
        """Return 32 bytes for one block of an input; index None for all inputs."""
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


class AesWords:
    """Streams of 32-byte keys as int32 words, in a buffer that is used again."""

    def __init__(self) -> None:
        self._raw = bytearray(_PAD)

    def fill(self, key: bytes, count: int) -> np.ndarray:
        """Return `count` words, uniform on [-2^31, 2^31); the next call overwrites them."""
        size = 4 * count
        if len(self._raw) < size + _PAD:
            self._raw = bytearray(size + _PAD)
        cipher = Cipher(algorithms.AES(key[:16]), modes.CTR(key[16:32])).encryptor()
        with memoryview(self._raw) as raw:
            for start in range(0, size, len(_ZEROS)):
                cipher.update_into(_ZEROS[: size - start], raw[start:])
        return np.frombuffer(self._raw, dtype="<i4", count=count)
