"""Text in, rows of token numbers out: one document, of at most so many tokens, is one record.

Rows are as long as each other: float32 (length,), of whole numbers, and `PADDING` behind the end of
a document. Without a tokenizer's file the tokens are the text's bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dpdist.base.errors import UserError
from dpdist.base.extras import library
from dpdist.base.reading import read_bytes, reason

PADDING = -1  # is no token, whatever the tokenizer
_BEGIN, _END, _FIRST_BYTE = 0, 1, 2
BYTES = 256 + _FIRST_BYTE  # the vocabulary of bytes: begin, end, and byte b as b + 2
_MOST_BYTES = 256 * 2**20  # of a tokenizer's file
_KEY = "data.text.tokenizer"


@dataclass(frozen=True)
class TextColumn:
    """A column of texts. length: tokens kept of each, from its beginning. tokenizer: a
    tokenizer.json, as the tokenizers library writes it; None for bytes."""

    column: str = "text"
    length: int = 128
    tokenizer: Path | None = None

    @property
    def described(self) -> list[Any]:
        """All that its rows and hashes depend on, the tokenizer by content."""
        tokens = "bytes" if self.tokenizer is None else hashlib.blake2b(self._file).hexdigest()
        return [self.column, self.length, tokens, "documents"]

    @property
    def vocabulary(self) -> int:
        """How many tokens there are."""
        return BYTES if self.tokenizer is None else self._tokenizer.get_vocab_size()

    def rows(self, texts: pa.Array, where: Callable[[int], str]) -> np.ndarray:
        """float32 (N, length). where: file and row of a text, for complaints. Raises UserError for
        what is no text."""
        if not (pa.types.is_string(texts.type) or pa.types.is_large_string(texts.type)):
            raise UserError(
                f"{where(0)}: text column {self.column!r} is {texts.type}, must be text"
            )
        if texts.null_count:
            missing = np.flatnonzero(texts.is_null().to_numpy(zero_copy_only=False))
            raise UserError(f"{where(int(missing[0]))}: no text")
        found = np.full((len(texts), self.length), PADDING, dtype=np.float32)
        for row, tokens in zip(found, self._tokens(texts.to_pylist()), strict=True):
            row[: len(tokens)] = tokens
        return found

    def hashes(self, texts: pa.ChunkedArray) -> bytes:
        """16 bytes for each: a document is recognised by all of its text, whatever reads how
        much of it."""
        return b"".join(
            hashlib.blake2b(text.encode(), digest_size=16, person=b"dpdist.document").digest()
            for text in texts.to_pylist()
        )

    def _tokens(self, texts: list[str]) -> list[Any]:
        if self.tokenizer is None:
            return [_bytes(text, self.length) for text in texts]
        return [each.ids for each in self._tokenizer.encode_batch(texts)]

    @cached_property
    def _file(self) -> bytes:
        assert self.tokenizer is not None
        return read_bytes(self.tokenizer, _MOST_BYTES)

    @cached_property
    def _tokenizer(self) -> Any:
        tokenizers = library("tokenizers", "hf", _KEY)
        try:
            made = tokenizers.Tokenizer.from_str(self._file.decode())
            made.no_padding()
            made.enable_truncation(self.length)
        except Exception as error:  # whatever is not a tokenizer's file
            raise UserError(f"{_KEY}: {self.tokenizer}: no tokenizer: {reason(error)}") from error
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {"column": self.column, "length": self.length, "tokenizer": self.tokenizer}


def _bytes(text: str, length: int) -> np.ndarray:
    """Begin, the bytes that fit, end."""
    raw = np.frombuffer(text.encode()[: length - 2], np.uint8).astype(np.int64)
    return np.concatenate([[_BEGIN], raw + _FIRST_BYTE, [_END]])
