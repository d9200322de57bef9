"""Documents of a language model, and pairs of answers to one prompt, as records of token dicts.

`dpdist.documents` converts texts or conversations, `dpdist.preferences` chosen and rejected answers
(DPO).
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dpdist.core.errors import UserError
from dpdist.core.script_errors import warn
from dpdist.data.array_records import IGNORED, ArrayRecords, Options
from dpdist.data.protocol import Records, chunks_of
from dpdist.data.tables import open_table
from dpdist.data.text import ConversationTokenizer, Tokens, messages_of

if TYPE_CHECKING:
    from dpdist.data.protocol import Batch

# --- documents of a language model --------------------------------------------------------------


LEARNED_FROM = "no private document is among what the tokenizer was learned from"


class DocumentRecords(ArrayRecords):
    """Documents as tokens: dicts of input_ids, attention_mask and labels, int64 (B, length)."""

    assumed: Sequence[str] = (LEARNED_FROM,)
    vocabulary = 2

    def describe(
        self, cutter: ConversationTokenizer, unit: Any, length: int, chat: bool, **more: bool
    ) -> None:
        """Set the name of the unit, and how the tokens were computed."""
        self.has_targets, self.vocabulary = False, cutter.vocabulary_size
        self.unit_name = unit if isinstance(unit, str) else ""
        self.tokenization = {"length": length, "chat": chat, "files": cutter.files, **more}

    def examples(self, count: int) -> tuple[Batch, Tensor]:
        """Return invented documents of all lengths, each with a prompt of random length."""
        named = self._invented(count, int(next(iter(self._fields().values())).shape[1]))
        return named, torch.zeros(count, dtype=torch.int64)

    def _invented(self, count: int, length: int, seed: int = 0) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(self.vocabulary, (count, length), generator=generator)
        sizes = torch.randint(min(2, length), length + 1, (count,), generator=generator)
        prompts = (torch.rand(count, generator=generator) * (sizes - 1)).long()
        places = torch.arange(length)
        real = places < sizes[:, None]
        labels = tokens.where(real & (places >= prompts[:, None]), torch.tensor(IGNORED))
        tokens = tokens.where(real, torch.tensor(0))
        return {"input_ids": tokens, "attention_mask": real.long(), "labels": labels}

    def _fields(self) -> dict[str, Tensor]:
        found = self.batch(slice(0, 1))
        assert isinstance(found, dict)
        return found


def documents(
    data: Any,
    tokenizer: Any,
    *,
    length: int,
    text: str = "text",
    prompt: str = "prompt",
    answer: str = "answer",
    messages: str = "messages",
    unit: str | Sequence[Hashable] | np.ndarray | None = None,
    name: str = "documents",
    bos_eos: bool = False,
) -> DocumentRecords:
    """Return records of documents: one document is one record, however many tokens it has.

    Guarantee: a record's tensors are computed from only one row. Tokens of prompts, all messages
    except the assistant's, and padding are read and not learned (label -100). A document of more
    than `length` tokens is cut at its end.

    Args:
        data: rows with named fields: a list of dicts, a `datasets.Dataset`, a pandas DataFrame, a
            pyarrow Table, or the path of a Parquet, CSV or JSONL file.
        tokenizer: a fast tokenizer of `transformers`, or the folder of one. It must not have been
            trained on private documents: the run's card lists that as an assumption.
        length: most tokens of a document, and the length of every record.
        text: name of the field of a document, which is learned as a whole.
        prompt: name of the field of a prompt, which needs an answer.
        answer: name of the field of an answer. The tokenizer's chat template renders both; if it
            has none, the answer follows the prompt.
        messages: name of the field of a conversation, a list of messages with a role and a content,
            rendered by the chat template; ShareGPT's `from` and `value` are accepted for these. A
            row with it needs no other field.
        unit: the user or other unit that each record belongs to: a field's name, or one value for
            each record.
        name: name of the data in error messages and on cards.
        bos_eos: put the tokenizer's begin and end tokens around each text, never twice. A text that
            is cut has no end token. Prompts and messages have their own marks.

    Returns:
        A `dpdist.Records` for `dpdist.PrivateTraining` with `loss=dpdist.language_model_loss`. Its
        `batch(indices)` returns a dict of int64 tensors (B, length): `input_ids`, `attention_mask`
        and `labels` (-100: not learned).

    Raises:
        UserError: a row lacks its fields, or the tokenizer does not fit. No row's text is shown.

    Example:
        >>> import dpdist, tokenizers, transformers
        >>> words = {"?": 0, "2": 1, "+": 2, "=": 3, "4": 4, "end": 5}
        >>> cutter = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "?"))
        >>> cutter.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        >>> tokenizer = transformers.PreTrainedTokenizerFast(
        ...     tokenizer_object=cutter, eos_token="end"
        ... )
        >>> rows = [{"prompt": "2 + 2 = ", "answer": "4"}]
        >>> dpdist.documents(rows, tokenizer, length=8).batch([0])["labels"].tolist()
        [[-100, -100, -100, -100, 4, 5, -100, -100]]
    """
    cutter = _tokenizer_of(tokenizer)
    rows = _document_rows(data, name)
    fields = {"text": text, "prompt": prompt, "answer": answer, "messages": messages}
    inputs = np.zeros((len(rows), length), dtype=np.int64)
    real, labels = np.zeros_like(inputs), np.full_like(inputs, IGNORED)
    for place, row in enumerate(rows):
        try:
            found = cutter.document(row, fields, length, bos_eos)
        except UserError as error:
            raise UserError(f"{name}: record {place}: {error}") from None
        size = len(found.ids)
        inputs[place, :size], real[place, :size] = found.ids, 1
        labels[place, :size] = np.where(found.learned, found.ids, IGNORED)
    if not (labels != IGNORED).any():  # training would use the budget and learn only noise
        raise UserError(
            f"{name}: length must leave a token of an answer in some document, got {length}, which "
            "cuts all answers; give a longer length"
        )
    columns: dict[str, np.ndarray | Tensor] = {
        "input_ids": inputs,
        "attention_mask": real,
        "labels": labels,
    }
    whose = [row.get(unit) for row in rows] if isinstance(unit, str) else unit
    records = DocumentRecords.of(columns, dict, {}, Options(name, unit=whose))
    assert isinstance(records, DocumentRecords)
    by_template = cutter.has_template and any(row.get(text) is None for row in rows)
    records.describe(cutter, unit, length, by_template, **({"bos_eos": True} if bos_eos else {}))
    return records


def _tokenizer_of(tokenizer: Any) -> ConversationTokenizer:
    if isinstance(tokenizer, str | Path):
        return ConversationTokenizer.from_folder(Path(tokenizer), "tokenizer")
    return ConversationTokenizer(tokenizer)


def tokenization_of(tokenizer: Any, records: Records) -> dict[str, Any] | None:
    """Return the `Records.tokenization` of records that were given as tokens.

    None if it is not a fast tokenizer of `transformers`, or the records are not tokens. Whether a
    chat template rendered the documents is unknown.
    """
    if not (getattr(tokenizer, "is_fast", False) and hasattr(tokenizer, "backend_tokenizer")):
        return None
    fields = records.examples(2)[0]
    if not (isinstance(fields, dict) and "input_ids" in fields):
        return None
    length = int(fields["input_ids"].shape[1])
    return {"length": length, "chat": False, "files": ConversationTokenizer(tokenizer).files}


def _document_rows(data: Any, name: str) -> list[Mapping[str, Any]]:
    if isinstance(data, str | Path):
        file = open_table(Path(data))
        data = file.read(file.schema.names)
    if hasattr(data, "to_pylist"):  # a pyarrow Table
        data = data.to_pylist()
    elif type(data).__module__.partition(".")[0] == "pandas":
        data = data.to_dict("records")
    try:
        rows = [data[place] for place in range(len(data))]
    except (TypeError, KeyError, IndexError):
        rows = []
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        raise UserError(
            f"{name}: must be one or more rows with named fields, such as [{{'text': '...'}}], got "
            f"a {type(data).__name__}"
        )
    return rows


# --- checks of token dicts ----------------------------------------------------------------------


PACKED = (  # rule and fix
    "must be one document, got position_ids that begin again: several documents in one row",
    "give each document a separate row (packing=False)",
)


def begin_again(places: Tensor, mask: Tensor | None) -> bool:
    """Return whether position ids (B, length) fall or repeat within a row.

    mask: 0 for padding, which does not count; None without padding.
    """
    places = places.reshape(len(places), -1)
    seen = mask if mask is not None and mask.shape == places.shape else torch.ones_like(places)
    rows = [row[there != 0] for row, there in zip(places, seen, strict=True)]
    return any(bool((row[1:] <= row[:-1]).any()) for row in rows)


def check_not_packed(records: Records) -> None:
    """Raise UserError for a row of several documents, which would be protected as one."""
    for rows in chunks_of(records):
        found = records.batch(rows)
        assert isinstance(found, dict)
        if begin_again(found["position_ids"], found.get("attention_mask")):
            Options(records.name).refuse(f"a record {PACKED[0]}", PACKED[1])


def check_tokens(records: Records, tokens: int, labels: int) -> None:
    """Raise UserError for a token or a label that a language model does not have.

    torch's own error would quote it in the middle of a run.
    """
    for rows in chunks_of(records):
        found = records.batch(rows)
        for name, low, count in (("input_ids", 0, tokens), ("labels", None, labels)):
            values = found.get(name) if isinstance(found, dict) else None
            if values is None or not values.numel():
                continue
            if int(values.max()) >= count or (low is not None and int(values.min()) < low):
                Options(records.name).refuse(
                    f"{name} must be 0 to {count - 1:,}, the tokens of the model, got others",
                    "take the tokenizer of the model, or call resize_token_embeddings",
                )


# --- pairs of answers ---------------------------------------------------------------------------


REFERENCE = "reference"  # the field of the reference's log-probabilities, chosen minus rejected
PUBLIC_REFERENCE = (
    "no private pair is among what the reference and the first weights were trained on, {}: "
    "declared only"
)
UNNAMED_REFERENCE = PUBLIC_REFERENCE.format(
    "by which the user computed each pair's reference from that pair alone"
)


class PreferenceRecords(DocumentRecords):
    """Pairs of answers, chosen then rejected.

    Fields: input_ids and labels (B, 2 * length), and the float `reference` (B,).
    """

    def examples(self, count: int) -> tuple[Batch, Tensor]:
        """Return invented pairs of documents of all lengths, and references of either sign."""
        fields = self._fields()
        length, kind = fields["input_ids"].shape[1] // 2, fields[REFERENCE].dtype
        halves = [self._invented(count, length, seed) for seed in (0, 1)]
        named = {
            name: torch.cat([each[name] for each in halves], 1) for name in ("input_ids", "labels")
        }
        generator = torch.Generator().manual_seed(2)
        named[REFERENCE] = (torch.rand(count, generator=generator) - 0.5).to(kind)
        return named, torch.zeros(count, dtype=torch.int64)

    def input_macs(self, key: bytes) -> Iterator[tuple[bytes, ...]]:
        """Yield MACs of only the tokens: a pair is the same with a different reference."""
        every = self.batch(slice(None))
        assert isinstance(every, dict)
        tokens = {name: each for name, each in every.items() if name != REFERENCE}
        yield from ArrayRecords(tokens, None, Options(self.name)).input_macs(key)


def preference_records(
    data: Any,
    tokenizer: Any,
    reference: Callable[[dict[str, Tensor]], Tensor],
    *,
    length: int,
    pretraining_data: str,
    prompt: str,
    chosen: str,
    rejected: str,
    unit: str | Sequence[Hashable] | np.ndarray | None,
    name: str,
) -> PreferenceRecords:
    """Return records of pairs of answers, as `dpdist.preferences` describes them.

    reference: returns the difference (1,) of the log-probabilities of a pair, whose fields have one
    row. It gets one pair at a time, so that no pair changes the bits of another one.
    """
    cutter = _tokenizer_of(tokenizer)
    rows, keys, every = _document_rows(data, name), list[str](), list[dict[str, Tensor]]()
    cut_away = 0
    for place, row in enumerate(rows):
        try:
            asked, pair = _pair_tokens(row, cutter, (prompt, chosen, rejected), length)
        except UserError as error:
            raise UserError(f"{name}: record {place}: {error}") from None
        fields, learns = _pair_fields(pair, length)
        cut_away += not learns
        keys.append(asked)
        every.append(fields)
    _check_pairs(keys, cut_away, length, name, prompt if unit is None else None)
    whose: Any = unit
    if isinstance(unit, str):
        whose = keys if unit == prompt else [row.get(unit) for row in rows]
    margins = torch.cat([reference(each) for each in every])
    columns: dict[str, np.ndarray | Tensor] = {
        "input_ids": torch.cat([each["input_ids"] for each in every]),
        "labels": torch.cat([each["labels"] for each in every]),
        REFERENCE: margins,
    }
    _check_margins(reference, every, margins, name)
    records = PreferenceRecords.of(columns, dict, {}, Options(name, unit=whose))
    assert isinstance(records, PreferenceRecords)
    records.describe(cutter, unit, length, cutter.has_template)
    records.assumed = (LEARNED_FROM, PUBLIC_REFERENCE.format(pretraining_data))
    return records


def _pair_fields(pair: tuple[Tokens, Tokens], length: int) -> tuple[dict[str, Tensor], bool]:
    """Return a pair's fields of one row, and whether each answer has a token to learn."""
    ids = torch.zeros(1, 2 * length, dtype=torch.int64)
    labels = torch.full_like(ids, IGNORED)
    learns = all(any(half.learned[1:]) for half in pair)  # a first token is not predicted
    for begin, half in zip((0, length), pair, strict=True):
        there = slice(begin, begin + len(half.ids))
        ids[0, there] = torch.tensor(half.ids)
        learned = torch.tensor(half.learned) & learns
        labels[0, there] = ids[0, there].where(learned, torch.tensor(IGNORED))
    return {"input_ids": ids, "labels": labels}, learns


def _check_pairs(
    keys: Sequence[str], cut_away: int, length: int, name: str, prompt: str | None
) -> None:
    """Raise UserError if no pair can be learned, or pairs share a prompt; warn of cut pairs.

    prompt: name of the field of prompts, if each pair is its own unit; else None.
    """
    if cut_away == len(keys):
        raise UserError(
            f"{name}: length must leave a token of both answers in some pair, got {length}, which "
            "cuts all answers; give a longer length"
        )
    if prompt is not None and (more := len(keys) - len(set(keys))):
        raise UserError(
            f"{name}: must have one pair per prompt, or a unit for each, got {more:,} more; give "
            f"unit={prompt!r}, or a field of persons, and dpdist.Privacy(unit='user', ...)"
        )
    if cut_away:
        warn(
            f"{name}: {cut_away:,} of {len(keys):,} pairs are not learned, since token {length} "
            "comes before an answer; give a longer length, or leave them out (the count is "
            "private)"
        )


def _check_margins(
    reference: Callable[[dict[str, Tensor]], Tensor],
    every: Sequence[dict[str, Tensor]],
    margins: Tensor,
    name: str,
) -> None:
    """Raise UserError if a margin (N,) is not finite, or changes after other pairs were read."""
    if not margins.isfinite().all():
        raise UserError(
            f"{name}: reference must return finite log-probabilities, got NaN or Inf; check its "
            "weights"
        )
    first = next(n for n, each in enumerate(every) if (each["labels"] != IGNORED).any())
    again = reference(every[first])
    if not torch.allclose(again, margins[first : first + 1], rtol=1e-4, atol=1e-4):
        raise UserError(
            f"{name}: reference must return the same for a pair after any others, got a different "
            "value for the first one at the end; give a model without state and random numbers"
        )


def _pair_tokens(
    row: Mapping[str, Any], cutter: ConversationTokenizer, names: tuple[str, str, str], length: int
) -> tuple[str, tuple[Tokens, Tokens]]:
    """Return the key of a row's prompt, and the tokens of its answers.

    Raises UserError for a row without the named fields.
    """
    asked, *answers = (row.get(name) for name in names)
    if isinstance(asked, str) and all(isinstance(answer, str) for answer in answers):
        good, bad = (cutter.answer(asked, str(answer), length) for answer in answers)
        return _prompt_key([{"role": "user", "content": asked}]), (good, bad)
    if any(answer is None or isinstance(answer, str) for answer in answers) or isinstance(
        asked, str
    ):
        raise UserError(
            f"must have {', '.join(names[:2])} and {names[2]}: all texts, or all messages with a "
            "role and a content"
        )
    wholes = [messages_of(answer) for answer in answers]
    if asked is None:  # each answer is a whole conversation, with the prompt as common start
        same = [a == b for a, b in zip(*wholes, strict=False)]
        first = min(
            same.index(False) if False in same else len(same), *(len(w) - 1 for w in wholes)
        )
        asked = wholes[0][:first]
    else:
        asked = messages_of(asked)
        first, wholes = len(asked), [[*asked, *whole] for whole in wholes]
    good, bad = (cutter.conversation(whole, length, first) for whole in wholes)
    return _prompt_key(asked), (good, bad)


def _prompt_key(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a prompt as a text that is the same for prompts that read the same.

    Differences in white space, and between compatible Unicode characters, are removed.
    """
    return json.dumps(
        [
            {
                "role": each["role"],
                "content": " ".join(unicodedata.normalize("NFKC", each["content"]).split()),
            }
            for each in messages
        ]
    )
