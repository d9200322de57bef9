"""Describe a release: release.json, its bounds, and the rows that its pages show."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field, ValidationError, model_validator

from dpdist.certification.registry import AnyCertificate
from dpdist.config.data import DataRecipe
from dpdist.core.console import Row
from dpdist.core.errors import UserError
from dpdist.core.fields import (
    Count,
    JsonObject,
    License,
    NotNegative,
    Probability,
    RejectBool,
    RunName,
    Section,
    SingleLine,
    validation_message,
)
from dpdist.core.files import (
    quoted,
    read_json,
)
from dpdist.core.result_rows import accuracy_rows, certified_row
from dpdist.privacy.card import (
    bounding_guarantee,
    no_epsilon,
)
from dpdist.privacy.guarantee import privacy_row

if TYPE_CHECKING:
    from dpdist.certification.table import CertificateTable
    from dpdist.data.text import TextColumn


from dpdist.release.files import BASE, SETTINGS, TOKENIZER, WORDS

FORMAT = 2
# Of settings, what a reader takes from no publisher: noise that was known, inputs that were chosen.
PER_CERTIFICATION_FIELDS = {"seed", "start", "every", "max_inputs", "batch", "backend"}

Ratio = Annotated[float, RejectBool, Field(ge=0, le=1)]
Perplexity = Annotated[float, RejectBool, Field(ge=1, le=1e308)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class CleanAccuracy(Section):
    """Clean accuracy on named test data: the publisher's word.

    perplexity, next_tokens: of documents, over so many tokens; only where they were measured.
    base_perplexity: of the public base without its adapters, on the same tokens.
    """

    data: SingleLine
    inputs: Count
    accuracy: Ratio
    perplexity: Perplexity | None = None
    next_tokens: Count | None = None
    base_perplexity: Perplexity | None = None


class CertifiedAccuracy(Section):
    """Certified accuracy of one certification of test data, as its table states it.

    See `certified_accuracy_record`.

    accuracy: the share of `inputs` that are right and certified at each of `radii`, in input units
    of `norm`. alpha: the error of each certificate. sigma: of its noise. measured: clean accuracy
    and range of these inputs, as the table states them. population: what the table
    states of the population that the inputs were drawn from. doubts: what is odd about all of it.
    """

    title: SingleLine
    norm: Literal["l1", "l2", "linf"]
    sigma: NotNegative
    alpha: Probability
    draws: Count
    inputs: Count
    radii: Annotated[tuple[NotNegative, ...], Field(min_length=1, max_length=101)]
    accuracy: tuple[Ratio, ...]
    measured: SingleLine
    population: SingleLine
    doubts: tuple[SingleLine, ...] = ()

    @model_validator(mode="after")
    def _check_accuracies(self) -> CertifiedAccuracy:
        if len(self.accuracy) != len(self.radii):
            raise ValueError(f"accuracy must be one for each of {len(self.radii)} radii")
        return self


def certified_accuracy_record(table: CertificateTable) -> dict[str, Any]:
    """Return the entry of release.json for a table of certificates (`CertifiedAccuracy`)."""
    from dpdist.certification.statistics import (  # loads pyarrow
        doubts,
        input_rows,
        population_row,
    )

    radii = table.reported_radii
    return {
        "title": table.title,
        "norm": table.norm,
        "sigma": table.sigma,
        "alpha": table.alpha,
        "draws": table.n,
        "inputs": len(table.index),
        "radii": radii,
        "accuracy": [table.certified_accuracy(radius) for radius in radii],
        "measured": "; ".join(f"{row.name}: {row.value}" for row in input_rows(table))
        or "clean accuracy: not measured",
        "population": ": ".join(population_row(table)[:2]),
        "doubts": doubts(table),
    }


def release_rows(about: ReleaseDescription, card: Mapping[str, Any]) -> list[Row]:
    """Return the rows of a release, by its description and privacy card alone.

    The model card shows them, and `print(release)`; what is doubtful is first.
    """
    doubtful = dict.fromkeys(text for table in about.certified for text in table.doubts)
    rows = [Row("verdict", f"{'; '.join(doubtful)}.", brief=True)] if doubtful else []
    bound, own = bounding_guarantee(card), card["guarantee"]
    why = no_epsilon(card)
    if why is None and not card["private"]:
        why = "NOT PRIVATE: the privacy card says why"
    apart = bound is own
    stated = {
        **own,
        "epsilon": bound["epsilon"],
        "delta": bound["delta"],
        "relation": card["relation"],
        "source": card["accountant"],
        "assumptions": card["assumptions"] if apart else (),
    }
    privacy = privacy_row(stated, why)
    if not apart:
        beside = f"{privacy.beside}, with all else that was released of these records"
        privacy = privacy._replace(beside=beside)
    rows.append(privacy)
    if (tested := about.tested) is not None:
        rows += accuracy_rows(
            tested.accuracy,
            tested.inputs,
            f"inputs of {tested.data}",
            next_tokens=tested.next_tokens,
            perplexity=tested.perplexity,
            base_perplexity=tested.base_perplexity,
        )
    for table in about.certified:
        shares = zip(table.radii, table.accuracy, strict=True)
        title = table.title if len(about.certified) > 1 else ""
        name, _, bounds = table.population.partition(": ")
        draws = (
            f"{table.inputs:,} inputs, at most {table.draws:,} draws, alpha {table.alpha:g} each"
        )
        rows += [
            certified_row(shares, table.norm, table.sigma, title),
            Row("certified by", draws),
            Row("measured", table.measured),
            Row(name, bounds),
        ]
    if about.certificate is not None:
        rows.append(Row("meant to be certified as", about.certificate.folder_name))
    return rows


class ReleasedText(Section):
    """Settings that make tokens of a text.

    length: tokens that the model reads. tokens: what they are; of words, the first `words` lines of
    words.txt; of a tokenizer, those of tokenizer.json. predict: the label of a text, or what comes
    after it. settings: tokenizer_config.json lies beside it. chat: the documents of the training
    were shown by its chat template. bos_eos: its begin and end of a text stand around documents.
    """

    length: Annotated[int, RejectBool, Field(ge=4, le=2**16)]
    tokens: Literal["bytes", "words", "tokenizer"]
    words: Annotated[int, RejectBool, Field(ge=1, le=99_000)] | None
    predict: Literal["label", "next"]
    settings: bool = False
    chat: bool = False
    bos_eos: bool = False

    @model_validator(mode="after")
    def _check_words(self) -> ReleasedText:
        if (self.words is None) == (self.tokens == "words"):
            raise ValueError("words must be given with tokens: words, and only then")
        return self

    @property
    def file(self) -> str | None:
        """Return the name of the file that makes the tokens; None where they are bytes."""
        return {"words": WORDS, "tokenizer": TOKENIZER}.get(self.tokens)

    @property
    def files(self) -> set[str]:
        """Return the names of all files that lie in the release for its tokens."""
        return ({self.file} - {None}) | ({SETTINGS} if self.settings else set())  # type: ignore[return-value]


class ReleasedPictures(Section):
    """How a picture becomes an input of the model, as the test inputs of its run did.

    resize: what the shorter side of every picture becomes, before the center is cropped; None: the
    larger side of the input, of pictures that have another size.
    """

    resize: Count | None

    def fit(self, pixels: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
        """Return a picture (C, H, W) uint8 as an input of `size`. Raises ValueError."""
        from dpdist.data.test_inputs import fit_picture

        return fit_picture(pixels, size, self.resize)

    def describe(self, size: tuple[int, ...]) -> str:
        """Return what is done to a picture, in words."""
        side = max(size[1:]) if self.resize is None else self.resize
        which = "of other sizes " if self.resize is None else ""
        return (
            f"pictures {which}have their shorter side resized to {side} (bilinear) and their "
            f"center cropped, {size[1]} x {size[2]}"
        )


class ReleasedBase(Section):
    """The base that an adapter was trained in: public name, digest of its weights, their type."""

    name: SingleLine
    digest: Digest
    dtype: SingleLine


def read_base(folder: Path) -> ReleasedBase:
    """Return the base that the adapter in a folder belongs to. Raises UserError."""
    try:
        return ReleasedBase.model_validate(read_json(folder / BASE))
    except ValidationError as error:
        raise UserError(f"{folder / BASE}: damaged: must name a base and its digest") from error


class ReleaseDescription(Section):
    """The content of release.json.

    model: hash of weights and architecture. tokens: whether inputs are tokens of text. classes:
    their names, in the order of the logits; () of a language model. vocabulary: how many tokens a
    language model tells; None of other models. noise: where the model is random by itself
    (`NoiseLocation.describe`). certificate: the settings it is meant to be certified with; None
    where nothing was certified. data: of the test split; where it lies is everybody's own.
    license: an SPDX identifier; None where the publisher gave none. certified: of each table, in
        their order. text: how tokens are made of texts. pictures: how pictures of other sizes
    become inputs; None: they must have the size of the input. raw_inputs: inputs are numbers as a
    script had them, of no declared range; written only where it is so. base: of the adapter that
    lies beside the whole model; written only where there is one.
    """

    format: Literal[2]
    dpdist: Annotated[str, Field(pattern=r"^[0-9]{1,4}(\.[0-9]{1,4}){1,3}[a-z0-9.+]{0,30}$")]
    name: RunName
    method: SingleLine
    model: Digest
    tokens: bool
    classes: Annotated[tuple[SingleLine, ...], Field(max_length=100_000)]
    noise: JsonObject
    certificate: AnyCertificate | None
    data: DataRecipe
    tested: CleanAccuracy | None
    certified: Annotated[tuple[CertifiedAccuracy, ...], Field(max_length=999)]
    license: License | None
    text: ReleasedText | None = None
    pictures: ReleasedPictures | None = None
    raw_inputs: bool = False
    base: ReleasedBase | None = None
    vocabulary: Count | None = None

    @property
    def outputs(self) -> int:
        """How many classes or next tokens the model tells."""
        return self.vocabulary or len(self.classes)

    @model_validator(mode="after")
    def _check_consistency(self) -> ReleaseDescription:
        if self.tokens != (self.text is not None):
            raise ValueError("text must be given where inputs are tokens, and only there")
        if self.data.root is not None:
            raise ValueError("data.root must be left out: it is a place of the reader's")
        language = self.text is not None and self.text.predict == "next"
        if language != (self.vocabulary is not None):
            raise ValueError("vocabulary must be given where text.predict is next, and only there")
        if language and (self.classes or self.vocabulary != self.data.classes):
            raise ValueError("vocabulary must be that of data, without classes")
        if not language and list(self.classes) != self.data.class_names:
            raise ValueError("classes must be those that data names")
        of_one = self.certificate and self.certificate.model_fields_set & PER_CERTIFICATION_FIELDS
        if of_one:
            raise ValueError(f"certificate.{min(of_one)} must be left out: the reader chooses it")
        return self


def text_column(text: ReleasedText, folder: Path) -> TextColumn:
    """Return how a release in `folder` makes tokens of texts."""
    from dpdist.data.text import TextColumn, WordList

    return TextColumn(
        length=text.length,
        tokenizer=folder / TOKENIZER if text.tokens == "tokenizer" else None,
        words=None if text.words is None else WordList(folder / WORDS, text.words),
        predicts_next_token=text.predict == "next",
        bos_eos=text.bos_eos,
    )


def parse_description(record: dict[str, Any], context: str) -> ReleaseDescription:
    """Return the checked content of release.json.

    Raises UserError, in one line, for invalid content.
    """
    if (version := record.get("format")) != FORMAT:
        raise UserError(
            f"{context}: format must be {FORMAT}, got {quoted(version)}; read it with the version "
            "of dpdist that wrote it"
        )
    try:
        return ReleaseDescription.model_validate(record)
    except ValidationError as error:
        said = []
        for item in error.errors():
            key = ".".join(str(part) for part in item["loc"])
            got = "" if isinstance(item["input"], dict) else f", got {quoted(item['input'])}"
            said.append(f"{key and key + ': '}{validation_message(item)}{got}")
        raise UserError(f"{context}: damaged: {'; '.join(said[:3])}") from None
