"""Sample texts from a released model of next tokens, and write them beside its privacy card.

What is sampled follows from the released weights, a prompt and fresh random numbers alone, so it is
post-processing: any number of texts costs no more privacy than the release.
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
    """State how texts are sampled.

    Attributes:
        count: texts for each prompt.
        max_tokens: most tokens behind a prompt; the model's own length bounds both together.
        temperature: divides the scores; 0 takes the most probable token.
        seed: of the random numbers; who knows it can sample the same texts from the same release.
    """

    count: Count
    max_tokens: Count
    temperature: Temperature
    seed: Seed


class TokenDecoder:
    """Tell texts of tokens, and where a document ends.

    Args:
        column: makes tokens of texts.

    Attributes:
        ends: the tokens that end a document; none where the tokenizer says of none.
        never: tokens that are no text: the begin, and words that are on no list.
    """

    def __init__(self, column: TextColumn) -> None:
        self._column = column
        self.ends = column.ends
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
        """Return the text of tokens; words stand apart by a space each."""
        if self._tokenizer is not None:
            return str(self._tokenizer.decode(list(tokens)))
        if self._column.words is not None:
            return " ".join(self._column.token_name(token) for token in tokens)
        return bytes(token - FIRST_BYTE for token in tokens).decode(errors="replace")


Prompt = str | Sequence[Mapping[str, Any]]


def parse_prompts(text: str, where: Path) -> list[Prompt]:
    """Return the prompts of a file: a text a line, or of a .jsonl file a value a line.

    A value is a text, or a conversation: a list of messages, each with a role and a content, or an
    object with this list under "messages".

    Raises:
        UserError: a line is no such value, or there is none.
    """
    from dpdist.data.text import messages_of

    # Of the ends of lines that Python knows, only these are those of a file.
    lines = re.split("\r?\n", text)
    lines = lines if lines[-1] else lines[:-1]
    if not lines:
        raise UserError(f"FILE: must have a prompt a line, got none in {where}")
    if where.suffix == ".json":
        raise UserError(f"FILE: must be a text or a .jsonl file, got {where}: a value a line")
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
    """Yield texts that a model says after a prompt, without the prompt.

    Args:
        answerer: of a model of next tokens.
        prompt: the beginning of each text; "" where the model begins by itself. A list of messages
            is shown by the chat template, and the assistant goes on.
        sampling: how many, how long and how random.

    Raises:
        UserError: the model tells labels, the prompt does not fit, or scores are not finite.
    """
    import torch

    column = answerer.column
    begun = _prompt_tokens(column, prompt)
    decoder = TokenDecoder(column)
    generator = torch.Generator().manual_seed(sampling.seed)
    for _ in range(sampling.count):
        found: list[int] = []
        while len(found) < sampling.max_tokens and len(begun) + len(found) < column.length:
            scores = answerer.next_scores(np.concatenate([begun, np.array(found, dtype=np.int64)]))
            scores = scores[: column.vocabulary_size].clone()
            scores[list(decoder.never)] = float("-inf")
            token = _draw(scores, sampling.temperature, generator)
            if token in decoder.ends:
                break
            found.append(token)
        yield decoder.decode(found)


def _prompt_tokens(column: TextColumn, prompt: Prompt) -> np.ndarray:
    """Return the tokens of a prompt that leave room for one more. Raises as `sample_texts`."""
    if not column.predicts_next_token:
        raise UserError("--to: must have a model of next tokens, got one that tells labels")
    if isinstance(prompt, str):
        return column.tokenize_beginning(prompt, room=1)
    return column.tokenize_chat(prompt, room=1)


def _check_prompts(column: TextColumn, prompts: Sequence[Prompt]) -> None:
    """Raise UserError with the line of a prompt that cannot be continued."""
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
    """Draw a token by its scores (tokens,). Raises UserError where they are no numbers."""
    import torch

    if not bool(scores.max().isfinite()):  # of NaN it is NaN; -inf is no text
        raise UserError("sampling: the scores of the next token must be finite; train again")
    if temperature == 0:
        return int(scores.argmax())
    shares = ((scores - scores.max()) / temperature).softmax(-1)  # 0 or less: no overflow
    return int(torch.multinomial(shares, 1, generator=generator))


_PAGE = """# Synthetic texts of {name}

{count:,} texts in {texts}, sampled by dpdist {version} from a released model. The privacy card of
the model is beside them ({card}), and what it proves holds for these texts too, whatever their
number: they are post-processing of the release.

{private}What the card does **not** promise:

* that no text, name or number of a training record appears. Epsilon bounds how much one unit of the
  card ({unit}) changes what may be sampled; what many records say, the model may say, too.
* anything of the prompts, which are printed as given, and were read by no mechanism. Prompts made
  from private records need a guarantee of their own.
* anything of public weights that the model began with: they may repeat what they were trained on.
* that the texts are true, harmless or like the training records. No figure of them was measured.
"""
_NOT_PRIVATE = "**The model is NOT private, and neither are these texts.**\n\n"


def write_texts(
    release: Release, prompts: Sequence[Prompt], sampling: Sampling, folder: Path
) -> Path:
    """Write sampled texts into a new folder, with the release's card and what it does not promise.

    Guarantee: post-processing of the release; the folder holds no more of private records than it.

    Args:
        release: of a model of next tokens.
        prompts: one or more; `sampling.count` texts are sampled for each.
        sampling: how they are sampled; prompt number k is sampled with seed + k.
        folder: a new folder: texts.jsonl, generated.json, the privacy card, and a page.

    Returns:
        The folder.

    Raises:
        UserError: the folder exists, or as `sample_texts`; nothing is written then.
    """
    if folder.exists() or folder.is_symlink():
        raise UserError(f"--to: must be a new folder, got {folder}: name another one")
    if folder.resolve().is_relative_to(release.path.resolve()):
        raise UserError(
            f"--to: must be outside of the release, got {folder}: it holds what its checksums "
            "name, and would not be read any more; name another one"
        )
    answerer = release.text_answerer
    _check_prompts(answerer.column, prompts)
    rows = [
        {"prompt": prompt, "text": text}
        for place, prompt in enumerate(prompts)
        # each prompt has random numbers of its own
        for text in sample_texts(
            answerer,
            prompt,
            sampling.model_copy(update={"seed": (sampling.seed + place) % 2**63}),
        )
    ]
    about = {
        "dpdist": __version__, "release": release.name, "model": release.description.model,
        "texts": len(rows), "n": sampling.count, "tokens": sampling.max_tokens,
        "temperature": sampling.temperature, "seed": sampling.seed,
    }  # fmt: skip
    page = _PAGE.format(
        name=release.name, count=len(rows), texts=TEXTS, version=__version__,
        card=PRIVACY_CARD_TEXT, unit=release.card["unit"],
        private="" if release.card["private"] else _NOT_PRIVATE,
    )  # fmt: skip
    with atomic_folder(folder) as aside:
        aside.mkdir()
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        write_atomic(aside / TEXTS, "".join(f"{line}\n" for line in lines))
        write_json(aside / ABOUT, about)
        write_json(aside / PRIVACY_CARD, release.card)
        write_atomic(aside / PRIVACY_CARD_TEXT, card_markdown(release.card))
        write_atomic(aside / PAGE, page)
    return folder
