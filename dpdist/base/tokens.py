"""Numbers of tokens: what recipes and texts agree on."""

from __future__ import annotations

BEGIN, END, FIRST_BYTE = 0, 1, 2  # byte b is b + 2
UNKNOWN, FIRST_WORD = 2, 3  # of a list of words, the first is 3
BYTES = 256 + FIRST_BYTE
PADDING = -1  # is no token, whatever the tokenizer


def vocabulary_of(words: int | None) -> int:
    """How many tokens there are: begin, end, unknown and so many words; None: bytes."""
    return BYTES if words is None else words + FIRST_WORD
