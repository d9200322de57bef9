"""Text in, rows of token numbers out: one document, of at most so many tokens, is one record.

Rows are as long as each other: float32 (length,), of whole numbers, and `PADDING` behind the end of
a document. Tokens are the text's bytes, the words of a list, or what a tokenizer's file says.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dpdist.base.errors import UserError
from dpdist.base.extras import library
from dpdist.base.reading import read_bytes, read_text, reason
from dpdist.base.tokens import (
    BEGIN,
    END,
    FIRST_BYTE,
    FIRST_WORD,
    PADDING,
    UNKNOWN,
    vocabulary_of,
)

WORDS = "words.txt"  # beside the Parquet files: a word a line
_WORD = re.compile(r"\w+|[^\w\s]")
_MOST_BYTES = 256 * 2**20  # of a tokenizer's file, or a list of words
_KEY = "data.text.tokenizer"


def words_of(text: str) -> list[str]:
    """Letters, digits and underscores in a row are a word, of small letters; so is each other sign
    that is no space."""
    return _WORD.findall(text.lower())


@dataclass(frozen=True)
class Words:
    """The first `count` lines of a file, one word each."""

    file: Path
    count: int

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Token numbers by word. Raises UserError for a file without so many different words."""
        lines = read_text(self.file, _MOST_BYTES).splitlines()
        numbers = {word: place + FIRST_WORD for place, word in enumerate(lines[: self.count])}
        if len(numbers) < self.count:
            raise UserError(
                f"data.text.words: must be <= the {len(numbers):,} different words of {self.file}, "
                f"got {self.count:,}"
            )
        return numbers

    @property
    def digest(self) -> str:
        """Hex digest of the words."""
        return hashlib.blake2b("\n".join(self.numbers).encode()).hexdigest()

    def tokens(self, text: str, length: int) -> np.ndarray:
        """Begin, the words that fit, end."""
        found = [self.numbers.get(word, UNKNOWN) for word in words_of(text)[: length - 2]]
        return np.array([BEGIN, *found, END])

    def __getstate__(self) -> dict[str, Any]:
        return {"file": self.file, "count": self.count}


@dataclass(frozen=True)
class TextColumn:
    """A column of texts. length: tokens kept of each, from its beginning. tokenizer: a
    tokenizer.json, as the tokenizers library writes it. words: a list of them. Bytes without
    either. following: what a model learns of a document is, after each of its tokens, the next one;
    there is no label column then."""

    column: str = "text"
    length: int = 128
    tokenizer: Path | None = None
    words: Words | None = None
    following: bool = False

    @property
    def described(self) -> list[Any]:
        """All that its rows, targets and hashes depend on, tokenizer and words by content."""
        tokens = "bytes"
        if self.words is not None:
            tokens = f"words {self.words.digest}"
        elif self.tokenizer is not None:
            tokens = hashlib.blake2b(self._file).hexdigest()
        about = [self.column, self.length, tokens, "documents"]
        return [*about, "following"] if self.following else about

    @property
    def vocabulary(self) -> int:
        """How many tokens there are."""
        if self.tokenizer is not None:
            return self._tokenizer.get_vocab_size()
        return vocabulary_of(None if self.words is None else self.words.count)

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
        if self.words is not None:
            return [self.words.tokens(text, self.length) for text in texts]
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
        return {field.name: getattr(self, field.name) for field in fields(self)}


def _bytes(text: str, length: int) -> np.ndarray:
    """Begin, the bytes that fit, end."""
    raw = np.frombuffer(text.encode()[: length - 2], np.uint8).astype(np.int64)
    return np.concatenate([[BEGIN], raw + FIRST_BYTE, [END]])


def following(rows: np.ndarray) -> np.ndarray:
    """What comes after each token: int64 of the rows' shape (B, length), below 0 where nothing
    does."""
    after = np.full(rows.shape, PADDING, dtype=np.int64)
    after[:, :-1] = rows[:, 1:]
    return after
