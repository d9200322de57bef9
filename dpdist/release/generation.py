"""Sample texts from a released language model, and write them with its privacy card.

The texts depend only on the released weights, a prompt and random numbers, so they are
post-processing: any number of texts adds nothing to epsilon.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from dpdist.core.errors import UserError
from dpdist.core.fields import BEGIN, FIRST_BYTE, UNKNOWN, Count, RejectBool, Section
from dpdist.core.files import atomic_folder, read_bytes, write_atomic, write_json
from dpdist.core.optional_imports import import_extra
from dpdist.core.version import __version__
from dpdist.privacy.card import PRIVACY_CARD, PRIVACY_CARD_TEXT, card_markdown
from dpdist.release.bundle import Release

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from dpdist.data.text import TextColumn
    from dpdist.release.answers import TextAnswerer

Temperature = Annotated[float, RejectBool, Field(ge=0, le=100)]
Seed = Annotated[int, RejectBool, Field(ge=0, lt=2**63)]
TEXTS, ABOUT, PAGE = "texts.jsonl", "generated.json", "README.md"


class Sampling(Section):
    """The settings of sampling.

    Attributes:
        count: number of texts per prompt.
        max_tokens: most tokens after a prompt; the length of the model limits prompt and text.
        temperature: divisor of the scores; 0 takes the most probable token.
        seed: seed of the random numbers; with it, the same texts can be sampled again.
    """

    count: Count
    max_tokens: Count
    temperature: Temperature
    seed: Seed


class TokenDecoder:
    """Turn tokens into texts.

    Args:
        column: turns texts into tokens.

    Attributes:
        never: tokens that are not text: the begin, and unknown words.
    """

    def __init__(self, column: TextColumn) -> None:
        self._column = column
        self.never: tuple[int, ...] = (BEGIN,)
        self._tokenizer = None
        if column.words is not None:
            self.never = (BEGIN, UNKNOWN)
        elif column.tokenizer is not None:
            tokenizers = import_extra("tokenizers", "hf", "generate")
            text = read_bytes(column.tokenizer).decode()
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
            self.never = ()

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; words are separated by spaces."""
        if self._tokenizer is not None:
            return str(self._tokenizer.decode(list(tokens)))
        if self._column.words is not None:
            return " ".join(self._column.token_name(token) for token in tokens)
        return bytes(token - FIRST_BYTE for token in tokens).decode(errors="replace")


Prompt = str | Sequence[Mapping[str, Any]]


def parse_prompts(text: str, where: Path) -> list[Prompt]:
    """Return the prompts of a file: one text per line, or one JSON value per line of a .jsonl file.

    A value is a text, or a conversation: a list of messages, each with a role and a content, or an
    object with this list under "messages".

    Raises:
        UserError: a line is not such a value, or there are no lines.
    """
    from dpdist.data.text import messages_of

    lines = re.split("\r?\n", text)  # and not at the other line ends of `splitlines`
    lines = lines if lines[-1] else lines[:-1]
    if not lines:
        raise UserError(f"FILE: must have one prompt per line, got none in {where}")
    if where.suffix == ".json":
        raise UserError(
            f"FILE: must be a text or a .jsonl file, got {where}: write one value per line"
        )
    if where.suffix != ".jsonl":
        return list(lines)
    found: list[Prompt] = []
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
            value = value.get("messages") if isinstance(value, dict) else value
            found.append(value if isinstance(value, str) else messages_of(value))
        except (ValueError, UserError):
            raise UserError(
                f"FILE: line {number} must be a text or a list of messages, each with a "
                f"role and a content, in JSON: {where}"
            ) from None
    return found


def sample_texts(answerer: TextAnswerer, prompt: Prompt, sampling: Sampling) -> Iterator[str]:
    """Yield sampled continuations of a prompt, without the prompt.

    Args:
        answerer: answers with a language model.
        prompt: the beginning of each text; may be "" if the tokenizer can start a text. A list of
            messages is formatted by the chat template, and the assistant's answer is sampled.
        sampling: number, length and randomness of the texts.

    Raises:
        UserError: it is not a language model, the prompt is too long, or scores are not finite.
    """
    import torch

    column = answerer.column
    start = _prompt_tokens(column, prompt)
    decoder = TokenDecoder(column)
    generator = torch.Generator().manual_seed(sampling.seed)
    for _ in range(sampling.count):
        tokens: list[int] = []
        while len(tokens) < sampling.max_tokens and len(start) + len(tokens) < column.length:
            scores = answerer.next_scores(np.concatenate([start, np.array(tokens, dtype=np.int64)]))
            scores = scores[: column.vocabulary_size].clone()
            scores[list(decoder.never)] = float("-inf")
            token = _draw(scores, sampling.temperature, generator)
            if token in column.ends:
                break
            tokens.append(token)
        yield decoder.decode(tokens)


def _prompt_tokens(column: TextColumn, prompt: Prompt) -> np.ndarray:
    """Return the tokens of a prompt that leave room for one more. Raises as `sample_texts`."""
    if not column.predicts_next_token:
        raise UserError("--to: must be given a language model, got a model of labels")
    if isinstance(prompt, str):
        return column.tokenize_beginning(prompt, room=1)
    return column.tokenize_chat(prompt, room=1)


def _check_prompts(column: TextColumn, prompts: Sequence[Prompt]) -> None:
    """Raise UserError with the line of the first prompt that cannot be continued."""
    for number, prompt in enumerate(prompts, 1):
        try:
            _prompt_tokens(column, prompt)
        except UserError as error:
            if not column.predicts_next_token:
                raise
            line = "an empty prompt" if [*prompts] == [""] else f"line {number}"
            rule = str(error).removeprefix("text: ").removeprefix("messages: ")
            raise UserError(f"FILE: {line} {rule}") from None


def _draw(scores: Tensor, temperature: float, generator: Generator) -> int:
    """Return a token sampled by its scores (tokens,). Raises UserError if they are not finite."""
    import torch

    if not bool(scores.max().isfinite()):  # the maximum is NaN with a NaN, -inf without any text
        raise UserError("sampling: the scores of the next token must be finite; train again")
    if temperature == 0:
        return int(scores.argmax())
    shares = ((scores - scores.max()) / temperature).softmax(-1)  # at most 0: no overflow
    return int(torch.multinomial(shares, 1, generator=generator))


_PAGE = """# Synthetic texts of {name}

{count:,} texts in {texts}, sampled by dpdist {version} from a released model. The model's privacy
card ({card}) applies to any number of these texts too, since they are post-processing of the
release.

{private}The card does **not** guarantee:

* that no text, name or number of a training record appears. Epsilon limits how much one unit of the
  card ({unit}) changes the distribution of the texts; the model may repeat what is in many records.
* anything about the prompts, which are printed as given. Prompts from private records need their
  own guarantee.
* anything about the public weights that the training started from: they may repeat their own
  training data.
* that the texts are true, harmless or like the training records. Their quality was not measured.
"""
_NOT_PRIVATE = "**The model is NOT private, and neither are these texts.**\n\n"


def write_texts(
    release: Release, prompts: Sequence[Prompt], sampling: Sampling, folder: Path
) -> Path:
    """Write sampled texts into a new folder, with the release's card and a page about its limits.

    Guarantee: post-processing of the release; the texts add nothing to its epsilon.

    Args:
        release: the release of a language model.
        prompts: one or more; `sampling.count` texts are sampled for each.
        sampling: the settings; prompt number k is sampled with seed + k.
        folder: a new folder: texts.jsonl, generated.json, the privacy card, and a page.

    Returns:
        The folder.

    Raises:
        UserError: the folder exists, or as `sample_texts`; nothing is written then.
    """
    if folder.exists() or folder.is_symlink():
        raise UserError(f"--to: must be a new folder, got {folder}: choose a different one")
    if folder.resolve().is_relative_to(release.path.resolve()):
        raise UserError(
            f"--to: must be outside of the release, got {folder}: additional files would make the "
            "release invalid; choose a different folder"
        )
    answerer = release.text_answerer
    _check_prompts(answerer.column, prompts)
    rows = [
        {"prompt": prompt, "text": text}
        for number, prompt in enumerate(prompts)
        for text in sample_texts(
            answerer,
            prompt,
            sampling.model_copy(update={"seed": (sampling.seed + number) % 2**63}),
        )
    ]
    about = {
        "dpdist": __version__,
        "release": release.name,
        "model": release.description.model,
        "texts": len(rows),
        "n": sampling.count,
        "tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "seed": sampling.seed,
    }
    page = _PAGE.format(
        name=release.name,
        count=len(rows),
        texts=TEXTS,
        version=__version__,
        card=PRIVACY_CARD_TEXT,
        unit=release.card["unit"],
        private="" if release.card["private"] else _NOT_PRIVATE,
    )
    with atomic_folder(folder) as aside:
        aside.mkdir()
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        write_atomic(aside / TEXTS, "".join(f"{line}\n" for line in lines))
        write_json(aside / ABOUT, about)
        write_json(aside / PRIVACY_CARD, release.card)
        write_atomic(aside / PRIVACY_CARD_TEXT, card_markdown(release.card))
        write_atomic(aside / PAGE, page)
    return folder
