"""Turn texts into rows of token numbers, and make a set of texts from installed docstrings.

One document, of at most so many tokens, is one record. Rows are float32 (length,) of whole
numbers, with `PADDING` behind the end of a document. Tokens are the text's bytes, the words of a
list, or those of a tokenizer's file.

A document may have parts that are read and not learned. Its text is then what the tokenizer's own
chat template makes of its messages, or, where it has none, prompt and answer behind one another. It
is cut into tokens once, as a whole; learned are the tokens that lie within an answer. The template
is a Jinja text of the tokenizer's folder, which `transformers` renders in a sandbox: no code of a
folder is run.

The docstrings set needs no download. Public are the paragraphs of Python's own help topics
(`pydoc_data.topics`), and the vocabulary is made of these alone. Private are the docstrings of
Python's library and of the packages listed below, read from their source: nothing is imported. The
same installation gives the same files.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dpdist.core.errors import UserError
from dpdist.core.fields import (
    BEGIN,
    END,
    FIRST_BYTE,
    FIRST_WORD,
    PADDING,
    PROMPT,
    UNKNOWN,
    vocabulary_size,
)
from dpdist.core.files import atomic_replacement, error_text, read_bytes, read_text, write_json
from dpdist.core.optional_imports import import_extra

if TYPE_CHECKING:
    from dpdist.data.tables import TableFile

# --- texts to tokens --------------------------------------------------------------------------


WORDS_FILE = "words.txt"  # beside the Parquet files: a word a line
_WORD = re.compile(r"\w+|[^\w\s]")
_MOST_BYTES = 256 * 2**20  # of a tokenizer's file, or a list of words
_MOST_TOKENS = 2**20  # of a text that is continued, before it is refused
_KEY = "data.text.tokenizer"


def split_words(text: str) -> list[str]:
    """Letters, digits and underscores in a row are a word, of small letters; so is each other sign
    that is no space."""
    return _WORD.findall(text.lower())


@dataclass(frozen=True)
class WordList:
    """The first `count` lines of a file, one word each."""

    file: Path
    count: int

    @cached_property
    def token_ids(self) -> dict[str, int]:
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
        return hashlib.blake2b("\n".join(self.token_ids).encode()).hexdigest()

    def tokenize(self, text: str, length: int) -> np.ndarray:
        """Begin, the words that fit, end."""
        found = [self.token_ids.get(word, UNKNOWN) for word in split_words(text)[: length - 2]]
        return np.array([BEGIN, *found, END])

    @property
    def text(self) -> str:
        """The words, one a line: the part of the file that tokens are made by."""
        return "".join(f"{word}\n" for word in self.token_ids)

    def __getstate__(self) -> dict[str, Any]:
        return {"file": self.file, "count": self.count}


# --- prompts and chats ------------------------------------------------------------------------


Message = Mapping[str, Any]
ASSISTANT = "assistant"
_USER = "user"
_ANSWER = "dpdist-answer"  # a message whose end is looked for
TOKENIZER_FILE, SETTINGS_FILE = "tokenizer.json", "tokenizer_config.json"
_FILES = (TOKENIZER_FILE, SETTINGS_FILE, "special_tokens_map.json", "chat_template.jinja")


@dataclass(frozen=True)
class Tokens:
    """Tokens of a document, and which of them are learned."""

    ids: list[int]
    learned: list[bool]


def _no_tokenizer(key: str, place: Path) -> UserError:
    """Return the complaint about a place without a tokenizer, such as the name of a hub's."""
    return UserError(
        f"{key}: must be the folder of a tokenizer on this machine (with {TOKENIZER_FILE}), got "
        f"{place}; nothing is downloaded: transformers.AutoTokenizer.from_pretrained(NAME)"
        ".save_pretrained(FOLDER) makes one"
    )


class ConversationTokenizer:
    """Cut conversations into tokens by a fast tokenizer of `transformers`.

    tokenizer: the object. key: what it is called in complaints. Raises UserError for a tokenizer
    that does not say where its tokens stand in a text.
    """

    def __init__(self, tokenizer: Any, key: str = "tokenizer") -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise UserError(
                f"{key}: must be a fast tokenizer (tokenizer.json), which says where its tokens "
                f"stand in a text, got {type(tokenizer).__name__}: AutoTokenizer.from_pretrained("
                "folder) gives one"
            )
        self._tokenizer, self._key = tokenizer, key

    @classmethod
    def from_folder(cls, folder: Path, key: str) -> ConversationTokenizer:
        """Read the tokenizer of a folder as `save_pretrained` writes it. Raises UserError."""
        if not (folder / TOKENIZER_FILE).exists():
            raise _no_tokenizer(key, folder)
        transformers = import_extra("transformers", "hf", key)
        try:
            made = transformers.PreTrainedTokenizerFast.from_pretrained(
                str(folder), local_files_only=True
            )
        except Exception as error:  # whatever is not a tokenizer's folder
            raise UserError(f"{key}: {folder}: no tokenizer: {error_text(error)}") from error
        return cls(made, key)

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return bool(getattr(self._tokenizer, "chat_template", None))

    @property
    def vocabulary_size(self) -> int:
        """How many tokens there are, added ones too."""
        return len(self._tokenizer)

    @property
    def marks(self) -> tuple[str | None, str | None]:
        """Return the tokens that begin and end a text, by name; None where it names none."""
        return self._tokenizer.bos_token, self._tokenizer.eos_token

    @property
    def files(self) -> dict[str, str]:
        """Return the tokenizer as files by name, without a path: tokens, and `settings`."""
        return {
            TOKENIZER_FILE: self._tokenizer.backend_tokenizer.to_str(),
            SETTINGS_FILE: self.settings,
        }

    @property
    def settings(self) -> str:
        """Return the content of a tokenizer_config.json: special tokens and chat template alone."""
        found = {"tokenizer_class": "PreTrainedTokenizerFast", **self._tokenizer.special_tokens_map}
        if self.has_template:
            found["chat_template"] = self._tokenizer.get_chat_template()
        plain = {name: each if isinstance(each, str) else list(map(str, each))
                 for name, each in found.items()}  # fmt: skip
        return json.dumps(plain, indent=2, ensure_ascii=False) + "\n"

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a conversation that the assistant goes on with. Raises UserError."""
        self._require_template()
        text = self._rendered(messages, True)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    @property
    def ends(self) -> frozenset[int]:
        """Return the tokens that end a text: the tokenizer's own, and the template's of an answer.

        The latter is what stands right behind an assistant's message, where it is no plain text.
        """
        found = {self._tokenizer.eos_token_id} - {None}
        if self.has_template:
            said = [{"role": _USER, "content": "a"}, {"role": ASSISTANT, "content": _ANSWER}]
            _, _, behind = self._rendered(said).rpartition(_ANSWER)
            ids = self._tokenizer(behind, add_special_tokens=False)["input_ids"][:1]
            found |= {*ids} & {*self._tokenizer.all_special_ids,
                               *self._tokenizer.get_added_vocab().values()}  # fmt: skip
        return frozenset(found)

    def text(self, text: str, length: int, bos_eos: bool = False) -> Tokens:
        """Return the tokens of a text without parts, which are all learned.

        They are those that the tokenizer makes of a text, with what it puts around one; with
        `bos_eos` its begin and end stand there in any case. Raises UserError where it names none.
        """
        encoded = self._tokenizer(text, return_special_tokens_mask=bos_eos)
        ids = encoded["input_ids"]
        if bos_eos:
            marks = self._tokenizer.bos_token_id, self._tokenizer.eos_token_id
            if marks == (None, None):
                raise UserError(
                    "bos_eos: must be False, as the tokenizer names no token that begins or ends "
                    "a text; leave it out"
                )
            ids = _with_marks(ids, encoded["special_tokens_mask"], marks)
        return Tokens(ids[:length], [True] * len(ids[:length]))

    def answer(self, prompt: str, answer: str, length: int) -> Tokens:
        """Return the tokens of a prompt and its answer; the answer's are learned.

        Without a chat template they stand behind one another, and the tokenizer's end of a text
        behind both, which is learned.
        """
        if self.has_template:
            said = [{"role": _USER, "content": prompt}, {"role": ASSISTANT, "content": answer}]
            return self.conversation(said, length)
        found = self._spans(prompt + answer, [(len(prompt), len(prompt) + len(answer))], True)
        end = self._tokenizer.eos_token_id
        if end is not None and found.ids[-1:] != [end]:
            found = Tokens([*found.ids, end], [*found.learned, True])
        return Tokens(found.ids[:length], found.learned[:length])

    def conversation(self, messages: Sequence[Message], length: int, first: int = 0) -> Tokens:
        """Return the tokens of a conversation; those of the assistant's messages are learned.

        first: messages before this one are a prompt, and only read.

        Raises UserError without a chat template, for a conversation without an assistant, and for
        one of which the template shows an earlier message otherwise once others follow.
        """
        self._require_template()
        if not any(message.get("role") == ASSISTANT for message in messages[first:]):
            raise UserError("messages: must have one of the role assistant, which is learned")
        whole, spans = self._rendered(messages), []
        for place, message in enumerate(messages):
            if place < first or message.get("role") != ASSISTANT:
                continue
            before = self._rendered(messages[:place], True)
            with_it = self._rendered(messages[: place + 1])
            if not (whole.startswith(with_it) and with_it.startswith(before)):
                raise UserError(
                    f"{self._key}: must show a message in the same way whatever follows; its chat "
                    "template does not: give each conversation one answer, the last message"
                )
            spans.append((len(before), len(with_it)))
        found = self._spans(whole, spans, False)
        return Tokens(found.ids[:length], found.learned[:length])

    def document(
        self, row: Mapping[str, Any], fields: Mapping[str, str | None], length: int,
        bos_eos: bool = False,
    ) -> Tokens:  # fmt: skip
        """Return the tokens of a row: of its messages, its prompt and answer, or its text.

        fields: names of the row's fields messages, prompt, answer and text; None for what it cannot
        have. Raises UserError for a row without fields that are known, or without a token.
        """
        held = {kind: row.get(name) if name else None for kind, name in fields.items()}
        if bos_eos:
            held = {"text": held["text"]}
            if held["text"] is None:
                raise UserError(
                    "must be a text with bos_eos=True: prompts and messages have own marks"
                )
        text, prompt, answer = (held.get(kind) for kind in ("text", "prompt", "answer"))
        if held.get("messages") is not None:
            found = self.conversation(messages_of(held["messages"]), length)
        elif isinstance(answer, str) and isinstance(prompt, str):
            found = self.answer(prompt, answer, length)
        elif isinstance(text, str):
            found = self.text(text, length, bos_eos)
        else:
            pair = " and ".join(filter(None, (fields.get("prompt"), fields.get("answer"))))
            wanted = ", or ".join(filter(None, (fields.get("messages"), pair, fields.get("text"))))
            raise UserError(f"must have {wanted}: texts, or messages of a role and a content")
        if not found.ids:
            raise UserError("must have a token at least, has none: drop it")
        return found

    def _require_template(self) -> None:
        if not self.has_template:
            raise UserError(
                f"{self._key}: must have a chat template for messages, has none: take the "
                "tokenizer of a model that was made for chats, or columns of prompts and answers"
            )

    def _rendered(self, messages: Sequence[Message], asks: bool = False) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=asks
            )
        except Exception as error:  # whatever a template does; its text may hold a message
            kind = type(error).__name__
        else:
            return text
        raise UserError(
            f"{self._key}: its chat template cannot show a conversation ({kind}): are roles in the "
            "order that it knows?"
        ) from None

    def _spans(self, text: str, spans: list[tuple[int, int]], special: bool) -> Tokens:
        """Return the tokens of a text; those that lie within a span are learned."""
        encoded = self._tokenizer(
            text, add_special_tokens=special, return_offsets_mapping=True, truncation=False
        )
        places = encoded["offset_mapping"]
        learned = [
            any(first <= start and start < stop <= last for first, last in spans)
            for start, stop in places
        ]
        return Tokens(list(encoded["input_ids"]), learned)


_SPEAKERS = {"human": _USER, "gpt": ASSISTANT}  # of ShareGPT; other roles keep their names


def messages_of(value: Any) -> list[Message]:
    """Return a conversation. Raises UserError for anything but messages of a role and a content.

    Messages of ShareGPT, with `from` and `value`, are taken too: human is user, gpt assistant.
    """
    good = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    found: list[Message] = (
        [_message(each) for each in value if isinstance(each, Mapping)] if good else []
    )
    if not (good and len(found) == len(value) and all(isinstance(m.get("role"), str)
                                and isinstance(m.get("content"), str) for m in found)):  # fmt: skip
        raise UserError("messages: must be a list of messages, each with a role and a content")
    return found


def _message(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message by the names of its fields that templates know."""
    if "role" in given or "from" not in given:
        return dict(given)
    said = {name: each for name, each in given.items() if name not in ("from", "value")}
    role = given["from"]
    said["role"] = _SPEAKERS.get(role, role) if isinstance(role, str) else role
    return {**said, "content": given.get("value")}


def _with_marks(
    ids: Sequence[int], special: Sequence[int], marks: tuple[int | None, int | None]
) -> list[int]:
    """Return the tokens of a text with a begin and an end, each once.

    ids: as the tokenizer makes them of a text. special: 1 for each token that it put there by
    itself. marks: begin and end; None for one that is not put there.
    """
    begin, end = marks
    begun = [*ids[:1]] == [begin] and special[0] == 1
    ended = [*ids[begun:][-1:]] == [end] and special[-1] == 1
    before = [] if begin is None or begun else [begin]
    behind = [] if end is None or ended else [end]
    return [*before, *ids, *behind]


# --- columns of texts -------------------------------------------------------------------------


@dataclass(frozen=True)
class TextColumn:
    """A column of texts. length: tokens kept of each, from its beginning. tokenizer: a
    tokenizer.json, as the tokenizers library writes it. words: a list of them. Bytes without
    either. predicts_next_token: what a model learns of a document is, after each of its tokens, the
    next one; there is no label column then. prompt and answer, or messages: columns of prompts with
    answers, or of lists of messages, in place of `column`; the tokenizer's folder says how they are
    shown. bos_eos: the tokenizer's begin and end stand around a text."""

    column: str = "text"
    length: int = 128
    tokenizer: Path | None = None
    words: WordList | None = None
    predicts_next_token: bool = False
    bos_eos: bool = False
    prompt: str | None = None
    answer: str | None = None
    messages: str | None = None

    @property
    def has_prompts(self) -> bool:
        """Whether rows have parts that are read and not learned."""
        return self.prompt is not None or self.messages is not None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are read."""
        if not self.has_prompts:
            return (self.column,)
        return tuple(filter(None, (self.prompt, self.answer, self.messages)))

    @property
    def content_description(self) -> list[Any]:
        """All that its rows, targets and hashes depend on, tokenizer and words by content."""
        tokens = "bytes"
        if self.words is not None:
            tokens = f"words {self.words.digest}"
        elif self.tokenizer is not None:
            tokens = hashlib.blake2b(self._file).hexdigest()
        about = [self.column, self.length, tokens, "documents"]
        if self.has_prompts:
            about += [list(self.columns), self._chat_digest]
        if self.bos_eos:
            about.append(f"marks {self._marks}")
        return [*about, "following"] if self.predicts_next_token else about

    @property
    def _chat_digest(self) -> str:
        """Hex digest of the tokenizer's files, its chat template among them."""
        assert self.tokenizer is not None
        digest = hashlib.blake2b(digest_size=16, person=b"dpdist.chat")
        for name in _FILES:
            path = self.tokenizer.parent / name
            raw = read_bytes(path, _MOST_BYTES) if path.exists() else b""
            digest.update(len(raw).to_bytes(8, "little") + raw)
        return digest.hexdigest()

    @property
    def vocabulary_size(self) -> int:
        """How many tokens there are."""
        if self.tokenizer is not None:
            return self._tokenizer.get_vocab_size()
        return vocabulary_size(None if self.words is None else self.words.count)

    def tokenize_one(self, text: str) -> np.ndarray:
        """Return the tokens of a text, float32 (1, length), as a document of a data set is read.

        What does not fit is left out at its end.
        """
        found = np.full((1, self.length), PADDING, dtype=np.float32)
        (tokens,) = self._tokens([text])
        found[0, : len(tokens)] = tokens
        return found

    def tokenize_beginning(self, text: str, room: int = 0) -> np.ndarray:
        """Return the tokens of a text that goes on, int64 (tokens,): without those of an end.

        room: for so many tokens behind it. Raises UserError for a text that does not fit, or that
        has no token.
        """
        whole = replace(self, length=_MOST_TOKENS)
        if self.tokenizer is None:
            tokens = np.asarray(whole._tokens([text])[0], dtype=np.int64)[:-1]
        else:
            encoded = whole._tokenizer.encode(text)
            last = len(encoded.ids)
            while last > self._own_begin and encoded.special_tokens_mask[last - 1]:
                last -= 1
            ids = encoded.ids[:last]
            if self.bos_eos:
                ids = _with_marks(ids, encoded.special_tokens_mask, (self._marks[0], None))
            tokens = np.asarray(ids, dtype=np.int64)
        return self._fitting(tokens, room)

    @cached_property
    def _own_begin(self) -> int:
        """How many tokens the tokenizer by itself puts before a text."""
        mask = self._tokenizer.encode("a").special_tokens_mask
        return mask.index(0) if 0 in mask else 0

    @cached_property
    def _marks(self) -> tuple[int | None, int | None]:
        """The tokens that begin and end a text. Raises UserError where the tokenizer names none."""
        names = self._own_tokenizer.marks if self._own_tokenizer else (None, None)
        begin, end = (None if n is None else self._tokenizer.token_to_id(n) for n in names)
        if begin is None and end is None:
            raise UserError(
                f"data.text.bos_eos: must be false, as {self.tokenizer} and the {SETTINGS_FILE} "
                "beside it name no token that begins or ends a text; give the folder that "
                "save_pretrained wrote, or leave it out",
                see="how-to/text.md#the-next-word",
            )
        return begin, end

    def _marked(self, encoded: Any) -> list[int]:
        """Return the tokens of a text with a begin and an end; of what is cut, without an end."""
        return _with_marks(encoded.ids, encoded.special_tokens_mask, self._marks)[: self.length]

    @cached_property
    def _uncut(self) -> TextColumn:
        return replace(self, length=_MOST_TOKENS)

    @cached_property
    def _own_tokenizer(self) -> ConversationTokenizer | None:
        """The tokenizer with its special tokens and template; None where its folder has none."""
        if self.tokenizer is None or self.tokenizer.name != TOKENIZER_FILE:
            return None
        if not (self.tokenizer.parent / SETTINGS_FILE).exists():
            return None
        return ConversationTokenizer.from_folder(self.tokenizer.parent, _KEY)

    @cached_property
    def _chat_tokenizer(self) -> ConversationTokenizer:
        """The tokenizer of prompts. Raises UserError for a folder without one."""
        assert self.tokenizer is not None
        return ConversationTokenizer.from_folder(self.tokenizer.parent, _KEY)

    @property
    def settings(self) -> str | None:
        """Return what tokenizer_config.json says of special tokens and the template, if it does."""
        return None if self._own_tokenizer is None else self._own_tokenizer.settings

    @property
    def shows_chats(self) -> bool:
        """Whether documents are prompts and answers that a chat template shows."""
        own = self._own_tokenizer if self.has_prompts else None
        return own is not None and own.has_template

    @property
    def ends(self) -> frozenset[int]:
        """Return the tokens that end a document, as far as the tokenizer says."""
        if self.tokenizer is None:
            return frozenset({END})
        encoded = self._tokenizer.encode("a")
        last = encoded.ids[-1:] if encoded.special_tokens_mask[-1:] == [1] else []
        return frozenset(last) | (self._own_tokenizer.ends if self._own_tokenizer else frozenset())

    def tokenize_chat(self, messages: Sequence[Message], room: int = 0) -> np.ndarray:
        """Return the tokens of a conversation that goes on, int64 (tokens,), by the chat template.

        room: as of `tokenize_beginning`. Raises UserError without a template, or for a conversation
        that does not fit.
        """
        if self._own_tokenizer is None:
            raise UserError(
                "messages: must have a tokenizer with a chat template, this one has none; give the "
                "prompt as a text"
            )
        found = np.asarray(self._own_tokenizer.prompt(messages), dtype=np.int64)
        return self._fitting(found, room)

    def _fitting(self, tokens: np.ndarray, room: int) -> np.ndarray:
        """Return tokens that are continued. Raises UserError where they do not fit."""
        most = self.length - room
        if not 0 < len(tokens) <= most:
            why = "" if len(tokens) else ": this tokenizer puts no begin before a text (bos_eos)"
            raise UserError(
                f"text: must have 1 to {most} tokens to be continued, got {len(tokens):,}{why}"
            )
        return tokens

    def token_name(self, token: int) -> str:
        """Return a token as text; the begin, the end and unknown words in angle brackets.

        A tokenizer's token is shown as it stands within a text, with its space before it; one that
        is no whole character, or no token of the tokenizer, by its number.
        """
        if self.tokenizer is not None:
            return self._decoded(token) or f"<token {token}>"
        special = {BEGIN: "<begin>", END: "<end>"}
        if self.words is not None:
            words = list(self.words.token_ids)
            return {**special, UNKNOWN: "<unknown>"}.get(token) or words[token - FIRST_WORD]
        return special.get(token) or ascii(chr(token - FIRST_BYTE))[1:-1]

    def _decoded(self, token: int) -> str:
        """Return what a token adds to the text before it; "" where that is no text."""
        cutter = self._tokenizer
        if cutter.decoder is None:
            return cutter.id_to_token(token) or ""
        # Decoders drop the space before a text's first token, so that of a second one is looked at.
        alone, twice = (
            str(cutter.decode([token] * count, skip_special_tokens=False)) for count in (1, 2)
        )
        found = twice[len(alone) :] if twice.startswith(alone) else alone
        return "" if "\N{REPLACEMENT CHARACTER}" in found else found

    def tokenize_table(self, table: pa.Table, file: TableFile, first_row: int) -> np.ndarray:
        """Return the rows of a table as tokens, float32 (N, length).

        A token t of a prompt stands there as `PROMPT` - t: it is read, and nobody learns to say it.
        Raises UserError for what is no text, by its row in the file.
        """
        found = np.full((table.num_rows, self.length), PADDING, dtype=np.float32)
        if not self.has_prompts:
            texts = table[self.column]
            if not (pa.types.is_string(texts.type) or pa.types.is_large_string(texts.type)):
                raise file.error(f"must be text, got {texts.type}", column=self.column)
            if (row := pc.index(texts.is_null(), True).as_py()) >= 0:
                raise file.error("must have a text", first_row + row, self.column)
            for place, tokens in enumerate(self._tokens(texts.to_pylist())):
                found[place, : len(tokens)] = tokens
            return found
        fields = {"messages": self.messages, "prompt": self.prompt, "answer": self.answer}
        for place, row in enumerate(table.select(self.columns).to_pylist()):
            try:
                tokens = self._chat_tokenizer.document(row, fields, self.length)
            except UserError as error:
                raise file.error(str(error), row=first_row + place) from None
            ids = np.asarray(tokens.ids, dtype=np.float32)
            found[place, : len(ids)] = np.where(tokens.learned, ids, PROMPT - ids)
        return found

    def hash_table(self, table: pa.Table) -> bytes:
        """Return 16 bytes for each row: a document is recognized by all that its columns say,
        whatever reads how much of it."""
        if not self.has_prompts:
            return self._hashes(table[self.column].to_pylist())
        rows = table.select(self.columns).to_pylist()
        return self._hashes(json.dumps(list(row.values()), sort_keys=True) for row in rows)

    @staticmethod
    def _hashes(texts: Iterable[str]) -> bytes:
        return b"".join(
            hashlib.blake2b(text.encode(), digest_size=16, person=b"dpdist.document").digest()
            for text in texts
        )

    def _tokens(self, texts: list[str]) -> list[Any]:
        if self.words is not None:
            return [self.words.tokenize(text, self.length) for text in texts]
        if self.tokenizer is None:
            return [_bytes(text, self.length) for text in texts]
        if self.bos_eos:
            return [self._marked(each) for each in self._uncut._tokenizer.encode_batch(texts)]
        return [each.ids for each in self._tokenizer.encode_batch(texts)]

    @property
    def token_file(self) -> str | bytes | None:
        """Return the content of the file that tokens are made by, None of bytes.

        Raises UserError where it is not there any more.
        """
        if self.words is not None:
            return self.words.text
        return None if self.tokenizer is None else self._file

    @cached_property
    def _file(self) -> bytes:
        assert self.tokenizer is not None
        if not self.tokenizer.exists():
            raise _no_tokenizer(_KEY, self.tokenizer)
        return read_bytes(self.tokenizer, _MOST_BYTES)

    @cached_property
    def _tokenizer(self) -> Any:
        tokenizers = import_extra("tokenizers", "hf", _KEY)
        try:
            made = tokenizers.Tokenizer.from_str(self._file.decode())
            made.no_padding()
            made.enable_truncation(self.length)
        except Exception as error:  # whatever is not a tokenizer's file
            raise UserError(
                f"{_KEY}: {self.tokenizer}: no tokenizer: {error_text(error)}",
                see="how-to/adapters.md#texts",
            ) from error
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def _bytes(text: str, length: int) -> np.ndarray:
    """Begin, the bytes that fit, end."""
    raw = np.frombuffer(text.encode()[: length - 2], np.uint8).astype(np.int64)
    return np.concatenate([[BEGIN], raw + FIRST_BYTE, [END]])


def next_tokens(rows: np.ndarray) -> np.ndarray:
    """What comes after each token: int64 of the rows' shape (B, length), below 0 where nothing
    does."""
    after = np.full(rows.shape, PADDING, dtype=np.int64)
    after[:, :-1] = np.maximum(rows[:, 1:], PADDING)  # what is not learned is below
    return after


# --- docstrings as a data set -----------------------------------------------------------------


DATASET_NAME = "docstrings"
# By the name they are imported by; those that are not installed are left out, and said.
SOURCE_PACKAGES = (
    "dp_accounting", "jinja2", "matplotlib", "numpy", "pyarrow", "pydantic", "ray", "rich",
    "safetensors", "scipy", "sklearn", "torch", "torchvision", "typer", "yaml",
)  # fmt: skip
# Below these lie tests, examples, copies of others' packages, and what is public here.
_EXCLUDED_FOLDERS = {
    "site-packages", "dist-packages", "test", "tests", "idle_test", "testing", "_vendor",
    "thirdparty_files", "pydoc_data", "__pycache__", "node_modules",
}  # fmt: skip
_MIN_WORDS = 8  # words of a document
_MIN_WORD_COUNT = 2  # times that a word of the vocabulary stands in the public part
_TEST_FRACTION = 0.1  # share of the documents, by hash


class _Document(NamedTuple):
    word_hash: bytes  # hash of its words: what differs in spaces or capitals alone is the same
    text: str


def make_docstrings(root: Path, log: Callable[[str], None] = lambda line: None) -> Path:
    """Write root/docstrings: train, test and public.parquet (a column text), words.txt, about.json.

    Every text stands there once, the public ones not among the others; which split a document is in
    follows from its words alone. Raises UserError for a folder that is there, or a Python without
    its sources.
    """
    target = root / DATASET_NAME
    if target.exists():
        raise UserError(f"{target}: exists already; remove it to make it again")
    public = _deduplicate(_paragraphs())
    known = {document.word_hash for document in public}
    found, read = [], {}
    for name, version, folder in _sources(log):
        texts = [text for _, text in _docstrings(folder)]
        log(f"{name} {version}: {len(texts):,} docstrings")
        read[name] = {"version": version, "docstrings": len(texts)}
        found += texts
    private = [document for document in _deduplicate(found) if document.word_hash not in known]
    if not private:
        raise UserError("data fetch: no docstring found: this Python has no sources")
    test = [document for document in private if _hash_position(document) < _TEST_FRACTION]
    train = [document for document in private if _hash_position(document) >= _TEST_FRACTION]
    vocabulary = _vocabulary(public)
    target.mkdir(parents=True)
    for split, documents in (("train", train), ("test", test), ("public", public)):
        with atomic_replacement(target / f"{split}.parquet") as aside:
            pq.write_table(pa.table({"text": [document.text for document in documents]}), aside)
        log(f"{target / split}.parquet: {len(documents):,} documents")
    with atomic_replacement(target / WORDS_FILE) as aside:
        aside.write_text("".join(f"{word}\n" for word in vocabulary), encoding="utf-8")
    log(f"{target / WORDS_FILE}: {len(vocabulary):,} words of the public part")
    counts = {"train": len(train), "test": len(test), "public": len(public)}
    write_json(target / "about.json", {"read": read, **counts, "words": len(vocabulary)})
    return target


def _paragraphs() -> list[str]:
    from pydoc_data.topics import topics

    return [part.strip() for name in sorted(topics) for part in topics[name].split("\n\n")]


def _deduplicate(texts: list[str]) -> list[_Document]:
    """Each text that has words enough, once, in the order of their hashes: whatever the order in
    which they were found, the files are the same."""
    documents: dict[bytes, str] = {}
    for text in texts:
        words = split_words(text)
        if len(words) >= _MIN_WORDS:
            key = hashlib.blake2b("\0".join(words).encode(), digest_size=16).digest()
            documents[key] = min(text, documents.get(key, text))
    return [_Document(*item) for item in sorted(documents.items())]


def _hash_position(document: _Document) -> float:
    return int.from_bytes(document.word_hash[:8], "little") / 2**64


def _vocabulary(public: list[_Document]) -> list[str]:
    """The frequent words first; of equals, by the alphabet."""
    counts = Counter(word for document in public for word in split_words(document.text))
    common = [word for word, count in counts.items() if count >= _MIN_WORD_COUNT]
    return sorted(common, key=lambda word: (-counts[word], word))


def _sources(log: Callable[[str], None]) -> Iterator[tuple[str, str, Path]]:
    """Name, version and folder of all that is read."""
    yield "python", platform.python_version(), Path(sysconfig.get_path("stdlib"))
    distributions = importlib.metadata.packages_distributions()
    for name in SOURCE_PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            log(f"{name}: not installed, left out")
            continue
        own = distributions.get(name, [name])[0]
        yield name, importlib.metadata.version(own), Path(spec.submodule_search_locations[0])


def _docstrings(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield source file and docstring of the modules, classes and functions in a folder."""
    for path in sorted(folder.rglob("*.py")):
        if _EXCLUDED_FOLDERS & set(path.relative_to(folder).parts):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of others' escapes
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError, RecursionError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield path, ast.get_docstring(node) or ""
