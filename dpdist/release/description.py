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
from dpdist.core.files import quoted, read_json
from dpdist.core.result_rows import accuracy_rows, certified_row
from dpdist.privacy.card import bounding_guarantee, no_epsilon
from dpdist.privacy.guarantee import privacy_row

if TYPE_CHECKING:
    from dpdist.certification.table import CertificateTable
    from dpdist.data.preprocessing import Preprocessing
    from dpdist.data.text import TextColumn


from dpdist.release.files import BASE, SETTINGS, TOKENIZER, WORDS

FORMAT = 2
# Settings that a reader must choose: a publisher could choose noise or inputs in its favor.
PER_CERTIFICATION_FIELDS = {"seed", "start", "every", "max_inputs", "batch", "backend"}

Ratio = Annotated[float, RejectBool, Field(ge=0, le=1)]
Perplexity = Annotated[float, RejectBool, Field(ge=1, le=1e308)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class CleanAccuracy(Section):
    """Clean accuracy on named test data, as the publisher states it.

    perplexity: that of documents, over `next_tokens` tokens; None if not measured.
    base_perplexity: that of the public base without its adapters, on the same tokens.
    """

    data: SingleLine
    inputs: Count
    accuracy: Ratio
    perplexity: Perplexity | None = None
    next_tokens: Count | None = None
    base_perplexity: Perplexity | None = None


class CertifiedAccuracy(Section):
    """Certified accuracy of one table of certificates (`certified_accuracy_record`).

    accuracy: the fraction of `inputs` that are correct and certified at each of `radii`, in input
    units of `norm`. alpha: the error of each certificate. sigma: standard deviation of the noise.
    measured: clean accuracy and range of these inputs. population: bounds for the population that
    the inputs were sampled from. doubts: warnings.
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
            raise ValueError(f"accuracy: must have {len(self.radii)} values, one per radius")
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
    """Return the rows of a release, from only its description and privacy card.

    The model card and `print(release)` show them; warnings are first.
    """
    doubts = dict.fromkeys(text for table in about.certified for text in table.doubts)
    rows = [Row("verdict", f"{'; '.join(doubts)}.", brief=True)] if doubts else []
    bound, own = bounding_guarantee(card), card["guarantee"]
    why = no_epsilon(card)
    if why is None and not card["private"]:
        why = "NOT PRIVATE: see the privacy card"
    stated = {
        **own,
        "epsilon": bound["epsilon"],
        "delta": bound["delta"],
        "relation": card["relation"],
        "source": card["accountant"],
        "assumptions": card["assumptions"] if bound is own else (),
    }
    privacy = privacy_row(stated, why)
    if bound is not own:
        total = f"{privacy.beside}, for all releases of these records together"
        privacy = privacy._replace(beside=total)
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
    rows += [Row(name, value, brief=True) for name, value in about.measured.items()]
    for table in about.certified:
        shares = zip(table.radii, table.accuracy, strict=True)
        title = table.title if len(about.certified) > 1 else ""
        name, _, bounds = table.population.partition(": ")
        samples = f"at most {table.draws:,} samples, alpha {table.alpha:g} each"
        rows += [
            certified_row(shares, table.norm, table.sigma, title),
            Row("certified by", f"{table.inputs:,} inputs, {samples}"),
            Row("measured", table.measured),
            Row(name, bounds),
        ]
    if about.certificate is not None:
        rows.append(Row("meant to be certified as", about.certificate.folder_name))
    return rows


class ReleasedText(Section):
    """The settings that turn a text into tokens.

    length: the number of tokens that the model reads. tokens: bytes, the first `words` lines of
    words.txt, or those of tokenizer.json. predict: the label of a text, or its next token.
    settings: whether the release has a tokenizer_config.json. chat: whether the training documents
    were formatted by its chat template. bos_eos: whether documents were enclosed in its tokens for
    begin and end.
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
            raise ValueError("words: must be given if and only if tokens is words")
        return self

    @property
    def file(self) -> str | None:
        """Return the name of the tokenizer's file; None if tokens are bytes."""
        return {"words": WORDS, "tokenizer": TOKENIZER}.get(self.tokens)

    @property
    def files(self) -> set[str]:
        """Return the names of all files of the tokenizer."""
        return ({self.file} - {None}) | ({SETTINGS} if self.settings else set())  # type: ignore[return-value]


class ReleasedPictures(Section):
    """How an image of any size becomes an input of the model, as the test inputs of its run did.

    resize: the shorter side of every image before its center is cropped, in pixels; None resizes
    only images of a different size than the input, to the input's larger side.
    """

    resize: Count | None

    def fit(self, pixels: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
        """Return an image (C, H, W) uint8 as an input of `size`. Raises ValueError."""
        from dpdist.data.test_inputs import fit_picture

        return fit_picture(pixels, size, self.resize)

    def describe(self, size: tuple[int, ...]) -> str:
        """Return a description of the resizing."""
        side = max(size[1:]) if self.resize is None else self.resize
        which = "of other sizes " if self.resize is None else ""
        return (
            f"images {which}are resized (shorter side {side}, bilinear) and center-cropped to "
            f"{size[1]} x {size[2]}"
        )


class ReleasedBase(Section):
    """The base of an adapter: public name, digest of its weights, and their data type."""

    name: SingleLine
    digest: Digest
    dtype: SingleLine


def read_base(folder: Path) -> ReleasedBase:
    """Return the base of the adapter in a folder. Raises UserError."""
    try:
        return ReleasedBase.model_validate(read_json(folder / BASE))
    except ValidationError as error:
        raise UserError(f"{folder / BASE}: is damaged: must have name, digest and dtype") from error


class ReleaseDescription(Section):
    """The content of release.json.

    model: hash of weights and architecture. tokens: whether inputs are tokens of text. classes:
    their names, in the order of the logits; () for a language model. vocabulary: the number of
    tokens of a language model; None for other models. noise: where the model itself is random
    (`NoiseLocation.describe`). certificate: the settings to certify it with; None if nothing was
    certified. data: the test split, without its location. license: an SPDX identifier; None if the
    publisher gave none. measured: test results of targets that are not classes, by name. certified:
    one entry per table. text: how texts become tokens. pictures:
    how images of other sizes become inputs; None if they must have the size of the input.
    raw_inputs: whether inputs are scaled as in a script's training, without a declared range. base:
    that of the adapter next to the whole model; None without one.
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
    measured: Annotated[dict[SingleLine, SingleLine], Field(max_length=99)]
    certified: Annotated[tuple[CertifiedAccuracy, ...], Field(max_length=999)]
    license: License | None
    text: ReleasedText | None = None
    pictures: ReleasedPictures | None = None
    raw_inputs: bool = False
    base: ReleasedBase | None = None
    vocabulary: Count | None = None

    @property
    def is_certifiable(self) -> bool:
        """Return whether the model's own noise, or that of its settings, certifies its answers."""
        return self.certificate is not None or self.noise.get("kind") != "none"

    def preprocessing(self) -> Preprocessing | None:
        """Return what turns raw rows into inputs; None if inputs are not columns of a table."""
        from dpdist.core.preprocessing import ColumnPreprocessing
        from dpdist.data.preprocessing import Preprocessing

        columns = self.data.columns
        plain = dict.fromkeys(columns.features, ColumnPreprocessing())
        rules = columns.feature_rules or plain
        return Preprocessing(rules) if rules else None

    @property
    def outputs(self) -> int:
        """Return the number of the model's classes or tokens."""
        return self.vocabulary or len(self.classes)

    @model_validator(mode="after")
    def _check_consistency(self) -> ReleaseDescription:
        if self.tokens != (self.text is not None):
            raise ValueError("text: must be given if and only if inputs are tokens")
        if self.data.root is not None:
            raise ValueError("data.root: must be left out: the reader chooses it")
        language = self.text is not None and self.text.predict == "next"
        if language != (self.vocabulary is not None):
            raise ValueError("vocabulary: must be given if and only if text.predict is next")
        if language and (self.classes or self.vocabulary != self.data.classes):
            raise ValueError("vocabulary: must be data.classes, without classes")
        if not language and list(self.classes) != self.data.class_names:
            raise ValueError("classes: must be those of data")
        certificate = self.certificate
        if chosen := certificate and certificate.model_fields_set & PER_CERTIFICATION_FIELDS:
            raise ValueError(f"certificate.{min(chosen)}: must be left out: the reader chooses it")
        return self


def text_column(text: ReleasedText, folder: Path) -> TextColumn:
    """Return the column that turns texts into tokens, with the tokenizer in a release's folder."""
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
            f"{context}: format: must be {FORMAT}, got {quoted(version)}; read it with the version "
            "of dpdist that wrote it"
        )
    try:
        return ReleaseDescription.model_validate(record)
    except ValidationError as error:
        lines = []
        for item in error.errors()[:3]:
            key = ".".join(str(part) for part in item["loc"])
            got = "" if isinstance(item["input"], dict) else f", got {quoted(item['input'])}"
            lines.append(f"{key and key + ': '}{validation_message(item)}{got}")
        raise UserError(f"{context}: is damaged: {'; '.join(lines)}") from None
