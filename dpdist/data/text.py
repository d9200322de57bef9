"""Convert texts to rows of tokens, and build a data set of texts from installed docstrings.

One document, cut at a fixed number of tokens, is one record. Rows are float32 (length,), with
`PADDING` after the end of a document. Tokens are the text's bytes, the words of a list, or those
of a tokenizer's file.

A document may have parts that are read and not learned. Its text is then its messages, rendered by
the tokenizer's chat template, or, without a template, the prompt followed by the answer. The text
is tokenized once, as a whole; tokens within an answer are learned. The template is a Jinja text of
the tokenizer's folder, which `transformers` renders in a sandbox: no code of a folder is run.

The docstrings data set needs no download. Its public part is the paragraphs of Python's help topics
(`pydoc_data.topics`), which alone give the vocabulary. Its private part is the docstrings of
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
from typing import TYPE_CHECKING, Any

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
from dpdist.core.files import (
    atomic_replacement,
    error_text,
    read_bytes,
    read_text,
    write_atomic,
    write_json,
)
from dpdist.core.optional_imports import import_extra

if TYPE_CHECKING:
    from dpdist.data.tables import TableFile

# --- texts to tokens --------------------------------------------------------------------------


WORDS_FILE = "words.txt"  # next to the Parquet files, one word per line
_WORD = re.compile(r"\w+|[^\w\s]")
_MOST_BYTES = 256 * 2**20  # of a tokenizer's file, or a list of words
_MOST_TOKENS = 2**20  # of a text before it is cut
_KEY = "data.text.tokenizer"


def split_words(text: str) -> list[str]:
    """Return the lower-case words of a text; every other sign except white space is a word, too."""
    return _WORD.findall(text.lower())


@dataclass(frozen=True)
class WordList:
    """The first `count` lines of a file, one word each."""

    file: Path
    count: int

    @cached_property
    def token_ids(self) -> dict[str, int]:
        """Return the tokens by word. Raises UserError if the file has too few different words."""
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
        """Return a hex digest of the words."""
        return hashlib.blake2b("\n".join(self.token_ids).encode()).hexdigest()

    def tokenize(self, text: str, length: int) -> np.ndarray:
        """Return the tokens int64 of a text: begin, the words that fit, end."""
        found = [self.token_ids.get(word, UNKNOWN) for word in split_words(text)[: length - 2]]
        return np.array([BEGIN, *found, END])

    @property
    def text(self) -> str:
        """Return the words, one per line: the part of the file that defines the tokens."""
        return "".join(f"{word}\n" for word in self.token_ids)

    def __getstate__(self) -> dict[str, Any]:
        return {"file": self.file, "count": self.count}


# --- prompts and chats ------------------------------------------------------------------------


Message = Mapping[str, Any]
ASSISTANT = "assistant"
_USER = "user"
_ANSWER = "dpdist-answer"  # a message after which the template's end token is searched
TOKENIZER_FILE, SETTINGS_FILE = "tokenizer.json", "tokenizer_config.json"
_FILES = (TOKENIZER_FILE, SETTINGS_FILE, "special_tokens_map.json", "chat_template.jinja")


@dataclass(frozen=True)
class Tokens:
    """Tokens of a document, and whether each is learned."""

    ids: list[int]
    learned: list[bool]


def _no_tokenizer(key: str, path: Path) -> UserError:
    """Return the error of a path without a tokenizer, such as a name of the Hugging Face hub."""
    return UserError(
        f"{key}: must be a local folder of a tokenizer (with {TOKENIZER_FILE}), got {path}; write "
        "one by transformers.AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)"
    )


class ConversationTokenizer:
    """Convert texts and conversations to tokens by a fast tokenizer of `transformers`.

    tokenizer: the object. key: its name in error messages. Raises UserError for a slow tokenizer,
    which has no offsets of tokens in a text.
    """

    def __init__(self, tokenizer: Any, key: str = "tokenizer") -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise UserError(
                f"{key}: must be a fast tokenizer (tokenizer.json), which has offsets, got "
                f"{type(tokenizer).__name__}; take AutoTokenizer.from_pretrained(FOLDER)"
            )
        self._tokenizer, self._key = tokenizer, key

    @classmethod
    def from_folder(cls, folder: Path, key: str) -> ConversationTokenizer:
        """Return the tokenizer of a folder that `save_pretrained` wrote. Raises UserError."""
        if not (folder / TOKENIZER_FILE).exists():
            raise _no_tokenizer(key, folder)
        transformers = import_extra("transformers", "hf", key)
        try:
            made = transformers.PreTrainedTokenizerFast.from_pretrained(
                str(folder), local_files_only=True
            )
        except Exception as error:  # any damaged folder
            raise UserError(
                f"{key}: {folder}: cannot be read as a tokenizer: {error_text(error)}"
            ) from error
        return cls(made, key)

    @property
    def has_template(self) -> bool:
        """Return whether the tokenizer has a chat template."""
        return bool(getattr(self._tokenizer, "chat_template", None))

    @property
    def vocabulary_size(self) -> int:
        """Return the number of tokens, including added ones."""
        return len(self._tokenizer)

    @property
    def marks(self) -> tuple[str | None, str | None]:
        """Return the names of the begin and end tokens, each None if there is none."""
        return self._tokenizer.bos_token, self._tokenizer.eos_token

    @property
    def files(self) -> dict[str, str]:
        """Return the content of the tokenizer's files by name: tokens, and `settings`."""
        return {
            TOKENIZER_FILE: self._tokenizer.backend_tokenizer.to_str(),
            SETTINGS_FILE: self.settings,
        }

    @property
    def settings(self) -> str:
        """Return a tokenizer_config.json with only the special tokens and the chat template."""
        found = {"tokenizer_class": "PreTrainedTokenizerFast", **self._tokenizer.special_tokens_map}
        if self.has_template:
            found["chat_template"] = self._tokenizer.get_chat_template()
        plain = {
            n: each if isinstance(each, str) else [*map(str, each)] for n, each in found.items()
        }
        return json.dumps(plain, indent=2, ensure_ascii=False) + "\n"

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a conversation that the assistant continues. Raises UserError."""
        self._require_template()
        text = self._rendered(messages, True)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    @property
    def ends(self) -> frozenset[int]:
        """Return the tokens that end a text: the tokenizer's own, and the template's of an answer.

        The latter is the special or added token right after an assistant's message.
        """
        cutter = self._tokenizer
        found = {cutter.eos_token_id} - {None}
        if self.has_template:
            chat = [{"role": _USER, "content": "a"}, {"role": ASSISTANT, "content": _ANSWER}]
            _, _, after = self._rendered(chat).rpartition(_ANSWER)
            ids = cutter(after, add_special_tokens=False)["input_ids"][:1]
            found |= {*ids} & {*cutter.all_special_ids, *cutter.get_added_vocab().values()}
        return frozenset(found)

    def text(self, text: str, length: int, bos_eos: bool = False) -> Tokens:
        """Return the tokens of a text without parts, which are all learned.

        bos_eos: add the tokenizer's begin and end tokens if they are missing. Raises UserError if
        it has neither.
        """
        encoded = self._tokenizer(text, return_special_tokens_mask=bos_eos)
        ids = encoded["input_ids"]
        if bos_eos:
            marks = self._tokenizer.bos_token_id, self._tokenizer.eos_token_id
            if marks == (None, None):
                raise UserError(
                    "bos_eos: must be False, as the tokenizer has no begin and no end token; leave "
                    "it out"
                )
            ids = _with_marks(ids, encoded["special_tokens_mask"], marks)
        return Tokens(ids[:length], [True] * len(ids[:length]))

    def answer(self, prompt: str, answer: str, length: int) -> Tokens:
        """Return the tokens of a prompt and its answer, of which the answer's are learned.

        Without a chat template the answer follows the prompt, and the tokenizer's end token, which
        is learned, follows both.
        """
        if self.has_template:
            chat = [{"role": _USER, "content": prompt}, {"role": ASSISTANT, "content": answer}]
            return self.conversation(chat, length)
        found = self._spans(prompt + answer, [(len(prompt), len(prompt) + len(answer))], True)
        end = self._tokenizer.eos_token_id
        if end is not None and found.ids[-1:] != [end]:
            found = Tokens([*found.ids, end], [*found.learned, True])
        return Tokens(found.ids[:length], found.learned[:length])

    def conversation(self, messages: Sequence[Message], length: int, first: int = 0) -> Tokens:
        """Return the tokens of a conversation, of which those of the assistant are learned.

        first: messages before this one are a prompt, and only read.

        Raises UserError without a chat template, for a conversation without an assistant, and if
        the template renders a message differently when others follow.
        """
        self._require_template()
        if not any(message.get("role") == ASSISTANT for message in messages[first:]):
            raise UserError("messages: must include one with the role assistant, which is learned")
        whole, spans = self._rendered(messages), []
        for place, message in enumerate(messages):
            if place < first or message.get("role") != ASSISTANT:
                continue
            before = self._rendered(messages[:place], True)
            with_it = self._rendered(messages[: place + 1])
            if not (whole.startswith(with_it) and with_it.startswith(before)):
                raise UserError(
                    f"{self._key}: must render a message in the same way whatever follows, which "
                    "its chat template does not; give each conversation one answer, at the end"
                )
            spans.append((len(before), len(with_it)))
        found = self._spans(whole, spans, False)
        return Tokens(found.ids[:length], found.learned[:length])

    def document(
        self,
        row: Mapping[str, Any],
        fields: Mapping[str, str | None],
        length: int,
        bos_eos: bool = False,
    ) -> Tokens:
        """Return the tokens of a row: of its messages, its prompt and answer, or its text.

        fields: names of the row's fields messages, prompt, answer and text, or None. Raises
        UserError for a row without one of these, or without a token.
        """
        cells = {kind: row.get(name) if name else None for kind, name in fields.items()}
        if bos_eos:
            cells = {"text": cells["text"]}
            if cells["text"] is None:
                raise UserError(
                    "must be a text with bos_eos=True: prompts and messages have their own marks"
                )
        text, prompt, answer = (cells.get(kind) for kind in ("text", "prompt", "answer"))
        if cells.get("messages") is not None:
            found = self.conversation(messages_of(cells["messages"]), length)
        elif isinstance(answer, str) and isinstance(prompt, str):
            found = self.answer(prompt, answer, length)
        elif isinstance(text, str):
            found = self.text(text, length, bos_eos)
        else:
            pair = " and ".join(filter(None, (fields.get("prompt"), fields.get("answer"))))
            wanted = ", or ".join(filter(None, (fields.get("messages"), pair, fields.get("text"))))
            raise UserError(f"must have {wanted}: texts, or messages of a role and a content")
        if not found.ids:
            raise UserError("must have at least one token, got none; drop it")
        return found

    def _require_template(self) -> None:
        if not self.has_template:
            raise UserError(
                f"{self._key}: must have a chat template for messages, got none; take the "
                "tokenizer of a chat model, or columns of prompts and answers"
            )

    def _rendered(self, messages: Sequence[Message], asks: bool = False) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=asks
            )
        except Exception as error:  # any error of a template; its text may quote a message
            kind = type(error).__name__
        else:
            return text
        raise UserError(
            f"{self._key}: the chat template cannot render a conversation ({kind}); check the "
            "order of the roles"
        ) from None

    def _spans(self, text: str, spans: list[tuple[int, int]], special: bool) -> Tokens:
        """Return the tokens of a text, of which those within a span are learned."""
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
    """Return a conversation as messages with a role and a content. Raises UserError for others.

    ShareGPT's `from` and `value` are accepted for these: human is user, gpt assistant.
    """
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    found = [_message(each) for each in value] if listed else []
    if not found or None in found:
        raise UserError("messages: must be a list of messages, each with a role and a content")
    return [each for each in found if each is not None]


def _message(given: Any) -> Message | None:
    """Return a message with a role and a content; None for any other value."""
    if not isinstance(given, Mapping):
        return None
    found = dict(given)
    if "role" not in found and "from" in found:
        role = found.pop("from")
        found["role"] = _SPEAKERS.get(role, role) if isinstance(role, str) else role
        found["content"] = found.pop("value", None)
    good = isinstance(found.get("role"), str) and isinstance(found.get("content"), str)
    return found if good else None


def _with_marks(
    ids: Sequence[int], special: Sequence[int], marks: tuple[int | None, int | None]
) -> list[int]:
    """Return the tokens of a text with a begin and an end, each once.

    ids: tokens of the text. special: 1 for each token that the tokenizer added. marks: begin and
    end, each None if it is not added.
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
    """A column of texts and its tokens.

    length: tokens of each text that are read, from its beginning. tokenizer: a tokenizer.json.
    words: a list of words; without either, tokens are bytes. predicts_next_token: a model learns
    the next token after each one, and there is no label column. prompt and answer, or messages:
    columns of prompts with answers, or of lists of messages, instead of `column`, rendered by the
    tokenizer's template. bos_eos: put the tokenizer's begin and end tokens around a text.
    """

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
        """Return whether rows have parts that are read and not learned."""
        return self.prompt is not None or self.messages is not None

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the names of the columns that are read."""
        if not self.has_prompts:
            return (self.column,)
        return tuple(filter(None, (self.prompt, self.answer, self.messages)))

    @property
    def content_description(self) -> list[Any]:
        """Return what rows, targets and hashes depend on, tokenizer and words by content."""
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
        """Return a hex digest of the tokenizer's files, including its chat template."""
        assert self.tokenizer is not None
        digest = hashlib.blake2b(digest_size=16, person=b"dpdist.chat")
        for name in _FILES:
            path = self.tokenizer.parent / name
            raw = read_bytes(path, _MOST_BYTES) if path.exists() else b""
            digest.update(len(raw).to_bytes(8, "little") + raw)
        return digest.hexdigest()

    @property
    def vocabulary_size(self) -> int:
        """Return the number of tokens."""
        if self.tokenizer is not None:
            return self._tokenizer.get_vocab_size()
        return vocabulary_size(None if self.words is None else self.words.count)

    def tokenize_one(self, text: str) -> np.ndarray:
        """Return the tokens of a text, float32 (1, length), cut as a document of a data set."""
        found = np.full((1, self.length), PADDING, dtype=np.float32)
        (tokens,) = self._tokens([text])
        found[0, : len(tokens)] = tokens
        return found

    def tokenize_beginning(self, text: str, room: int = 0) -> np.ndarray:
        """Return the tokens of a text to be continued, int64 (tokens,), without an end token.

        room: number of tokens that follow. Raises UserError for a text that is too long or has no
        token.
        """
        if self.tokenizer is None:
            tokens = np.asarray(self._uncut._tokens([text])[0], dtype=np.int64)[:-1]
        else:
            encoded = self._uncut._tokenizer.encode(text)
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
        """Return the number of tokens that the tokenizer itself puts before a text."""
        mask = self._tokenizer.encode("a").special_tokens_mask
        return mask.index(0) if 0 in mask else 0

    @cached_property
    def _marks(self) -> tuple[int | None, int | None]:
        """Return the begin and end tokens. Raises UserError if the tokenizer has neither."""
        names = self._own_tokenizer.marks if self._own_tokenizer else (None, None)
        begin, end = (None if n is None else self._tokenizer.token_to_id(n) for n in names)
        if begin is None and end is None:
            raise UserError(
                f"data.text.bos_eos: must be false, as {self.tokenizer} and its {SETTINGS_FILE} "
                "name no begin and no end token; give the folder that save_pretrained wrote, or "
                "leave it out",
                see="how-to/text.md#the-next-word",
            )
        return begin, end

    @cached_property
    def _uncut(self) -> TextColumn:
        return replace(self, length=_MOST_TOKENS)

    @cached_property
    def _own_tokenizer(self) -> ConversationTokenizer | None:
        """Return the tokenizer with its special tokens and template; None without their file."""
        if self.tokenizer is None or self.tokenizer.name != TOKENIZER_FILE:
            return None
        if not (self.tokenizer.parent / SETTINGS_FILE).exists():
            return None
        return ConversationTokenizer.from_folder(self.tokenizer.parent, _KEY)

    @cached_property
    def _chat_tokenizer(self) -> ConversationTokenizer:
        """Return the tokenizer of prompts. Raises UserError for a folder without one."""
        assert self.tokenizer is not None
        return ConversationTokenizer.from_folder(self.tokenizer.parent, _KEY)

    @property
    def settings(self) -> str | None:
        """Return a tokenizer_config.json of special tokens and template; None without one."""
        return None if self._own_tokenizer is None else self._own_tokenizer.settings

    @property
    def shows_chats(self) -> bool:
        """Return whether documents are prompts and answers rendered by a chat template."""
        own = self._own_tokenizer if self.has_prompts else None
        return own is not None and own.has_template

    @property
    def ends(self) -> frozenset[int]:
        """Return the tokens that end a document, as far as the tokenizer names them."""
        if self.tokenizer is None:
            return frozenset({END})
        encoded = self._tokenizer.encode("a")
        last = encoded.ids[-1:] if encoded.special_tokens_mask[-1:] == [1] else []
        return frozenset(last) | (self._own_tokenizer.ends if self._own_tokenizer else frozenset())

    def tokenize_chat(self, messages: Sequence[Message], room: int = 0) -> np.ndarray:
        """Return the tokens of a conversation to be continued, int64 (tokens,), by the template.

        room: number of tokens that follow. Raises UserError without a template, or for a
        conversation that is too long.
        """
        if self._own_tokenizer is None:
            raise UserError(
                "messages: need a tokenizer with a chat template, got one without; give the prompt "
                "as a text"
            )
        found = np.asarray(self._own_tokenizer.prompt(messages), dtype=np.int64)
        return self._fitting(found, room)

    def _fitting(self, tokens: np.ndarray, room: int) -> np.ndarray:
        """Return tokens to be continued. Raises UserError if they leave no room."""
        most = self.length - room
        if not 0 < len(tokens) <= most:
            why = "" if len(tokens) else ": this tokenizer adds no begin token (bos_eos)"
            raise UserError(
                f"text: must have 1 to {most} tokens to be continued, got {len(tokens):,}{why}"
            )
        return tokens

    def token_name(self, token: int) -> str:
        """Return a token as text; the begin, the end and unknown words in angle brackets.

        A tokenizer's token has the space before it, as within a text. A part of a character, or an
        unknown token, is shown by its number.
        """
        if self.tokenizer is not None:
            return self._decoded(token) or f"<token {token}>"
        special = {BEGIN: "<begin>", END: "<end>"}
        if self.words is not None:
            words = list(self.words.token_ids)
            return {**special, UNKNOWN: "<unknown>"}.get(token) or words[token - FIRST_WORD]
        return special.get(token) or ascii(chr(token - FIRST_BYTE))[1:-1]

    def _decoded(self, token: int) -> str:
        """Return what a token adds to the text before it; "" if that is not text."""
        cutter = self._tokenizer
        if cutter.decoder is None:
            return cutter.id_to_token(token) or ""
        # Decoders drop the space before the first token of a text, so decode it as the second.
        alone, twice = (
            str(cutter.decode([token] * count, skip_special_tokens=False)) for count in (1, 2)
        )
        found = twice[len(alone) :] if twice.startswith(alone) else alone
        return "" if "\N{REPLACEMENT CHARACTER}" in found else found

    def tokenize_table(self, table: pa.Table, file: TableFile, first_row: int) -> np.ndarray:
        """Return the rows of a table as tokens, float32 (N, length).

        A token t of a prompt, which is read and not learned, is stored as `PROMPT` - t. Raises
        UserError, naming the row, for a cell that is not a text.
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
        """Return 16 bytes for each row: a hash of the whole document, however much is read."""
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
            return [
                _with_marks(each.ids, each.special_tokens_mask, self._marks)[: self.length]
                for each in self._uncut._tokenizer.encode_batch(texts)
            ]
        return [each.ids for each in self._tokenizer.encode_batch(texts)]

    @property
    def token_file(self) -> str | bytes | None:
        """Return the content of the file that defines the tokens; None if they are bytes.

        Raises UserError if the file is missing.
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
        except Exception as error:  # any damaged file
            raise UserError(
                f"{_KEY}: {self.tokenizer}: cannot be read as a tokenizer: {error_text(error)}",
                see="how-to/adapters.md#texts",
            ) from error
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def _bytes(text: str, length: int) -> np.ndarray:
    """Return the tokens int64 of a text: begin, the bytes that fit, end."""
    raw = np.frombuffer(text.encode()[: length - 2], np.uint8).astype(np.int64)
    return np.concatenate([[BEGIN], raw + FIRST_BYTE, [END]])


def next_tokens(rows: np.ndarray) -> np.ndarray:
    """Return the token after each one: int64 of the rows' shape (B, length), -1 if none follows."""
    after = np.full(rows.shape, PADDING, dtype=np.int64)
    after[:, :-1] = np.maximum(rows[:, 1:], PADDING)  # tokens that are not learned are below -1
    return after


# --- docstrings as a data set -----------------------------------------------------------------


DATASET_NAME = "docstrings"
# Names of modules; those that are not installed are left out, with a message.
SOURCE_PACKAGES = (
    "dp_accounting", "jinja2", "matplotlib", "numpy", "pyarrow", "pydantic", "ray", "rich",
    "safetensors", "scipy", "sklearn", "torch", "torchvision", "typer", "yaml",
)  # fmt: skip
# Folders of tests, examples, vendored packages, and the public part.
_EXCLUDED_FOLDERS = {
    "site-packages", "dist-packages", "test", "tests", "idle_test", "testing", "_vendor",
    "thirdparty_files", "pydoc_data", "__pycache__", "node_modules",
}  # fmt: skip
_MIN_WORDS = 8  # words of a document
_MIN_WORD_COUNT = 2  # occurrences of a word of the vocabulary in the public part
_TEST_FRACTION = 0.1  # fraction of the documents, by hash


def make_docstrings(root: Path, log: Callable[[str], None] = lambda line: None) -> Path:
    """Write root/docstrings and return its path.

    The folder has train, test and public.parquet (a column text), words.txt and about.json. Every
    text is there once, and public ones are not among the others. The split of a document depends
    only on its words. Raises UserError if the folder exists, or if Python has no sources.
    """
    target = root / DATASET_NAME
    if target.exists():
        raise UserError(f"{target}: exists already; remove it first")
    public = _deduplicate(_paragraphs())
    found, read = [], {}
    for name, version, folder in _sources(log):
        texts = list(_docstrings(folder))
        log(f"{name} {version}: {len(texts):,} docstrings")
        read[name] = {"version": version, "docstrings": len(texts)}
        found += texts
    splits: dict[str, list[str]] = {"train": [], "test": [], "public": [*public.values()]}
    for key, text in _deduplicate(found).items():
        if key not in public:
            position = int.from_bytes(key[:8], "little") / 2**64
            splits["test" if position < _TEST_FRACTION else "train"].append(text)
    if not (splits["train"] or splits["test"]):
        raise UserError("data fetch: this Python has no sources to read docstrings from")
    vocabulary = _vocabulary(splits["public"])
    target.mkdir(parents=True)
    for split, texts in splits.items():
        with atomic_replacement(target / f"{split}.parquet") as aside:
            pq.write_table(pa.table({"text": texts}), aside)
        log(f"{target / split}.parquet: {len(texts):,} documents")
    write_atomic(target / WORDS_FILE, "".join(f"{word}\n" for word in vocabulary))
    log(f"{target / WORDS_FILE}: {len(vocabulary):,} words of the public part")
    counts = {split: len(texts) for split, texts in splits.items()}
    write_json(target / "about.json", {"read": read, **counts, "words": len(vocabulary)})
    return target


def _paragraphs() -> list[str]:
    from pydoc_data.topics import topics

    return [part.strip() for name in sorted(topics) for part in topics[name].split("\n\n")]


def _deduplicate(texts: list[str]) -> dict[bytes, str]:
    """Return the texts with at least `_MIN_WORDS` words, by the hash of their words, in its order.

    Texts that differ only in white space or capitals are one.
    """
    documents: dict[bytes, str] = {}
    for text in texts:
        words = split_words(text)
        if len(words) >= _MIN_WORDS:
            key = hashlib.blake2b("\0".join(words).encode(), digest_size=16).digest()
            documents[key] = min(text, documents.get(key, text))
    return dict(sorted(documents.items()))


def _vocabulary(texts: list[str]) -> list[str]:
    """Return the words that occur twice or more, the most frequent first, then by the alphabet."""
    counts = Counter(word for text in texts for word in split_words(text))
    common = [word for word, count in counts.items() if count >= _MIN_WORD_COUNT]
    return sorted(common, key=lambda word: (-counts[word], word))


def _sources(log: Callable[[str], None]) -> Iterator[tuple[str, str, Path]]:
    """Yield name, version and folder of Python and of each installed package."""
    yield "python", platform.python_version(), Path(sysconfig.get_path("stdlib"))
    distributions = importlib.metadata.packages_distributions()
    for name in SOURCE_PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            log(f"{name}: not installed, left out")
            continue
        own = distributions.get(name, [name])[0]
        yield name, importlib.metadata.version(own), Path(spec.submodule_search_locations[0])


def _docstrings(folder: Path) -> Iterator[str]:
    """Yield the docstrings of the modules, classes and functions in a folder."""
    for path in sorted(folder.rglob("*.py")):
        if _EXCLUDED_FOLDERS & set(path.relative_to(folder).parts):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of invalid escapes
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError, RecursionError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""
