"""Read, check and describe the files of a release: checksums, signature, description, answers.

SHA256SUMS is the file that `sha256sum -c SHA256SUMS` reads. The signature is Ed25519 (RFC 8032)
over that file, and so over all files that it names:

    openssl genpkey -algorithm ed25519 -out key.pem
    openssl pkey -in key.pem -pubout -out public.pem
    openssl pkeyutl -verify -pubin -inkey public.pem -rawin -in SHA256SUMS -sigfile SHA256SUMS.sig

No part of a release is used before all of it was checked. Files are regular ones of the folder
itself, each with its sum; every field has its type and its bounds; weights, architecture, noise
and cards speak of one model. Nothing is unpickled, and a factory from elsewhere is imported only
when the caller names it. The claims of the cards are held against the phases that they name by
`dpdist.release.verify`. An answer is class and certified radius, or ABSTAIN, for one image at a
time.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field, ValidationError, model_validator

from dpdist.certification.predict import Predictor, to_model_input
from dpdist.certification.registry import AnyCertificate
from dpdist.config.data import DataRecipe
from dpdist.core.console import format_exact, format_percent, format_significant
from dpdist.core.errors import UserError
from dpdist.core.fields import (
    PADDING,
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
    check_regular_file,
    error_text,
    exists_as_non_folder,
    json_equal,
    quoted,
    read_bytes,
    read_json,
    read_text,
    validate_path,
)
from dpdist.models.signature import Signature
from dpdist.privacy.card import (
    PRIVACY_CARD,
    PRIVACY_CARD_TEXT,
    bounding_guarantee,
    no_epsilon,
    parse_card_plan,
)
from dpdist.privacy.guarantee import format_delta, format_epsilon, shown_kind
from dpdist.privacy.phases import UNKNOWN_DATA
from dpdist.privacy.plan import PrivacyPlan

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dpdist.certification.certificate import Certificate
    from dpdist.certification.subject import Subject
    from dpdist.certification.table import CertificateTable
    from dpdist.data.text import TextColumn
    from dpdist.models import ModelSpec


# --- files, checksums and signature -----------------------------------------------------------


DESCRIPTION, MODEL_CARD = "release.json", "README.md"
WEIGHTS, ARCHITECTURE = "model.safetensors", "model.json"
CHECKSUMS, SIGNATURE = "SHA256SUMS", "SHA256SUMS.sig"
CHECKSUMMED_FILES = (
    MODEL_CARD,
    ARCHITECTURE,
    WEIGHTS,
    PRIVACY_CARD,
    PRIVACY_CARD_TEXT,
    DESCRIPTION,
)
REQUIRED_FILES = (*CHECKSUMMED_FILES, CHECKSUMS)
"""What is in every release; beside it, `table_name(1)`, `table_name(2)`, ... where it certifies."""
WORDS, TOKENIZER, SETTINGS = "words.txt", "tokenizer.json", "tokenizer_config.json"
"""A release of a text model whose tokens are no bytes has one of the first two, to make them by; of
a tokenizer that has special tokens or a chat template, the third too."""
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE = "base.json"
"""A release of a model of which an adapter alone was trained has these, as `peft` reads them."""

_ADAPTER = (ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE)
_TABLE = re.compile(r"certificates-([1-9][0-9]{0,2})\.parquet")
_MAX_BYTES = 2**20  # bytes of a file of sums, of a key


class ReleaseError(UserError):
    """A release that is not valid: files, sums, signature or statements that do not fit."""


def table_name(number: int) -> str:
    """Return the name of a release's table of certificates; the first one is number 1."""
    return f"certificates-{number}.parquet"


def is_release_file(name: str) -> bool:
    """Return whether a file of this name may lie in a release."""
    known = (*REQUIRED_FILES, SIGNATURE, WORDS, TOKENIZER, SETTINGS, *_ADAPTER)
    return name in known or _TABLE.fullmatch(name) is not None


def list_table_names(names: Iterable[str]) -> list[str]:
    """Return the names that are of tables of certificates, in the order of their numbers.

    Raises:
        ReleaseError: a number is left out.
    """
    numbers = sorted(int(found[1]) for found in map(_TABLE.fullmatch, names) if found)
    if numbers != list(range(1, len(numbers) + 1)):
        raise ReleaseError(f"tables of certificates must be numbered from 1 on, got {numbers}")
    return [table_name(number) for number in numbers]


def is_release(folder: Path) -> bool:
    """Return whether a folder is meant as a release, whole or not."""
    return exists_as_non_folder(folder / CHECKSUMS) or (
        exists_as_non_folder(folder / DESCRIPTION) and exists_as_non_folder(folder / PRIVACY_CARD)
    )


def compute_checksums(folder: Path) -> str:
    """Return the text of SHA256SUMS for the files in `folder`."""
    names = _checksummed_names([path.name for path in folder.iterdir()])
    return "".join(f"{_digest(folder / name)}  {name}\n" for name in names)


def _checksummed_names(present: Collection[str]) -> tuple[str, ...]:
    """Return the names that SHA256SUMS has a line for, where these files lie."""
    optional = (WORDS, TOKENIZER, SETTINGS, *_ADAPTER)
    others = (name for name in optional if name in present)
    return (*CHECKSUMMED_FILES, *others, *list_table_names(present))


def verify_checksums(folder: Path) -> dict[str, str]:
    """Return the checksums by name, checked against the files.

    Raises ReleaseError unless the files of a release lie there, no others, each with its sum.

    Names that begin with a dot are not looked at: tools that fetch releases leave such files, and
    nothing reads them.
    """
    try:
        found = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise UserError(f"{folder}: cannot be read: {error_text(error)}") from None
    shown = [entry for entry in found if not entry.name.startswith(".")]
    for entry in shown:
        if not is_release_file(entry.name):
            raise ReleaseError(f"{folder}: holds {entry.name!r}, which is not of a release")
        if not entry.is_file(follow_symlinks=False):
            raise ReleaseError(f"{entry.path}: must be a file of its own, no link and no folder")
    missing = set(REQUIRED_FILES) - {entry.name for entry in shown}
    if missing:
        raise ReleaseError(f"{folder}: lacks {', '.join(sorted(missing))}: no whole release")
    stated = _read_checksums(folder / CHECKSUMS, [entry.name for entry in shown])
    for name in stated:
        if _digest(folder / name) != stated[name]:
            raise ReleaseError(f"{folder / name}: was changed: its sum is not that of {CHECKSUMS}")
    return stated


def _read_checksums(path: Path, present_names: list[str]) -> dict[str, str]:
    """Return the sums by name, of exactly the files that have one.

    Every line ends with a line feed alone, as `sha256sum -c` needs it.
    """
    names = _checksummed_names(present_names)
    *lines, rest = read_text(path, _MAX_BYTES).split("\n")
    read = [re.fullmatch(r"([0-9a-f]{64})  ([A-Za-z0-9_.-]+)", line) for line in lines]
    stated = {match[2]: match[1] for match in read if match}
    if rest or len(stated) != len(lines) or stated.keys() != set(names):
        ends = " (its lines end as on Windows)" if any("\r" in line for line in lines) else ""
        raise ReleaseError(
            f"{path}: damaged{ends}: must have one line for each of {', '.join(names)}"
        )
    return stated


def _digest(path: Path) -> str:
    with check_regular_file(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sign_checksums(key: Path, checksums: bytes) -> bytes:
    """Return the signature of 64 bytes, by an Ed25519 private key in PEM without a password.

    Raises UserError.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        found = load_pem_private_key(read_bytes(key, _MAX_BYTES), password=None)
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{key}: no private key in PEM without a password: {error_text(error)}"
        ) from None
    if not isinstance(found, Ed25519PrivateKey):
        raise UserError(f"{key}: must be an Ed25519 key (openssl genpkey -algorithm ed25519)")
    return found.sign(checksums)


def verify_signature(folder: Path, public_key: Path) -> None:
    """Raise ReleaseError unless the release is signed by the private key of `public_key` (PEM).

    Raises UserError when that is no Ed25519 public key.
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(read_bytes(public_key, _MAX_BYTES))
    except ValueError as error:
        raise UserError(f"{public_key}: no public key in PEM: {error_text(error)}") from None
    if not isinstance(key, Ed25519PublicKey):
        raise UserError(f"{public_key}: must be an Ed25519 public key (openssl pkey -pubout)")
    if not exists_as_non_folder(folder / SIGNATURE):
        raise ReleaseError(
            f"{folder}: is not signed: no {SIGNATURE}", see="how-to/releases.md#releases"
        )
    try:
        key.verify(
            read_bytes(folder / SIGNATURE, _MAX_BYTES), read_bytes(folder / CHECKSUMS, _MAX_BYTES)
        )
    except InvalidSignature:
        raise ReleaseError(
            f"{folder}: is not signed by the key of {public_key}", see="how-to/releases.md#releases"
        ) from None


# --- release.json -----------------------------------------------------------------------------


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

    def describe(self) -> tuple[str, str]:
        """Return what was measured, and its figures, in words."""
        if self.perplexity is None or self.next_tokens is None:
            return "clean accuracy", f"{format_percent(self.accuracy)} % of {self.inputs:,} inputs"
        said = f"{format_significant(self.perplexity, 4)} of {self.next_tokens:,} next tokens"
        if self.base_perplexity is not None:
            said += f", {format_significant(self.base_perplexity, 4, round_down=True)} of the base"
        return "perplexity", f"{said}, {self.inputs:,} test documents"


class CertifiedAccuracy(Section):
    """Certified accuracy of one certification of test data, as its table states it.

    See `certified_accuracy_record`.

    accuracy: the share of `inputs` that are right and certified at each of `radii`, in input units
    of `norm`. alpha: the error of each certificate. sigma: of its noise. measured: clean accuracy
    and range of these inputs, as the table states them. population: what the table
    states of the population that the inputs were drawn from.
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

    @model_validator(mode="after")
    def _check_accuracies(self) -> CertifiedAccuracy:
        if len(self.accuracy) != len(self.radii):
            raise ValueError(f"accuracy must be one for each of {len(self.radii)} radii")
        if list(self.radii) != sorted(set(self.radii)):
            raise ValueError("radii must rise")
        if list(self.accuracy) != sorted(self.accuracy, reverse=True):
            raise ValueError("accuracy must not rise with the radius")
        if not all(is_count_ratio(accuracy, self.inputs) for accuracy in self.accuracy):
            raise ValueError(f"accuracy must be a share of {self.inputs} inputs")
        return self


def is_count_ratio(accuracy: float, inputs: int) -> bool:
    """Return whether a share is that of a whole number of the inputs."""
    return round(accuracy * inputs) / inputs == accuracy


def certified_accuracy_record(table: CertificateTable) -> dict[str, Any]:
    """Return the entry of release.json for a table of certificates (`CertifiedAccuracy`)."""
    from dpdist.certification.statistics import input_rows, population_summary_row  # loads pyarrow

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
        "measured": "; ".join(f"{name}: {value}" for name, value in input_rows(table))
        or "clean accuracy: not measured",
        "population": ": ".join(population_summary_row(table)),
    }


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
    def _check_settings(self) -> ReleasedText:
        if self.settings and self.tokens != "tokenizer":
            raise ValueError("settings must be left out without a tokenizer")
        if self.chat and not self.settings:
            raise ValueError("chat must be left out without settings, which hold the template")
        if self.bos_eos and not self.settings:
            raise ValueError("bos_eos must be left out without settings, which name the tokens")
        return self

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
    """The base that an adapter was trained in: public name, digest of its weights, their type.

    dtype: None in folders that were written before it was stated.
    """

    name: SingleLine
    digest: Digest
    dtype: SingleLine | None = None


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
        if self.pictures is not None and self.tokens:
            raise ValueError("pictures must be left out where inputs are tokens")
        if self.data.root is not None:
            raise ValueError("data.root must be left out: it is a place of the reader's")
        language = self.text is not None and self.text.predict == "next"
        if language != (self.vocabulary is not None):
            raise ValueError("vocabulary must be given where text.predict is next, and only there")
        if language and (self.classes or self.vocabulary != self.data.classes):
            raise ValueError("vocabulary must be that of data, without classes")
        if not language and list(self.classes) != self.data.class_names:
            raise ValueError("classes must be those that data names")
        if self.tokens and (self.certified or self.certificate is not None):
            raise ValueError("tokens of text have no certificate")
        tested = self.tested
        if (
            tested is not None
            and not self.tokens
            and not is_count_ratio(tested.accuracy, tested.inputs)
        ):
            raise ValueError(f"tested.accuracy must be a share of {tested.inputs} inputs")
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


# --- answers ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """The answer to one image.

    label: index of the class, -1 for ABSTAIN. name: of the class, None for ABSTAIN. radius: no
    change of the input below it in `norm` changes the answer of the smoothed classifier; wrong
    with probability at most `alpha`, over the noise drawn for this answer. sigma: of noise on
    the input; None where the model's own noise certifies.
    """

    label: int
    name: str | None
    radius: float
    norm: str
    sigma: float | None
    alpha: float

    @property
    def abstain(self) -> bool:
        """Return whether the answer is ABSTAIN."""
        return self.label == -1

    @property
    def as_json(self) -> dict[str, Any]:
        """Return the answer as JSON types."""
        return asdict(self) | {"abstain": self.abstain}


class Answerer:
    """Answers by one certificate, with fresh secret noise for each call.

    Not to be shared by threads.
    """

    def __init__(self, release: Release, settings: Certificate) -> None:
        self._release, self._settings = release, settings
        shape = release.spec.input_shape
        try:
            self._predictor = Predictor(release.model, settings, release.spec.classes, shape)
        except ValueError as error:
            raise UserError(f"{release.path}: the model cannot be certified: {error}") from error

    def __call__(self, image: np.ndarray) -> Answer:
        """Return the answer to one image.

        image: of the model's input shape, uint8 or numbers in [0, 1]; of a script's run, numbers as
        its training had them. Raises ValueError for anything else.
        """
        shape = self._release.spec.input_shape
        if image.shape == shape and len(shape) == 1:  # raw features, as their files hold them
            image = self._release.description.data.columns.scale(image)
        bounded = not self._release.description.raw_inputs
        verdict = self._predictor.certify(to_model_input(image, shape, bounded=bounded))
        label = int(verdict.prediction)
        settings = self._settings
        return Answer(
            label,
            None if label == -1 else self._release.description.classes[label],
            float(verdict.radius),
            getattr(settings, "norm", "l2"),
            settings.sigma,
            settings.alpha,
        )


# --- answers to texts -------------------------------------------------------------------------


_SHOWN = 5  # continuations, of all tokens
_DRAWS = 16  # of a model with noise of its own


@dataclass(frozen=True)
class TextAnswer:
    """The answer to one text.

    label, name: the class and its name; -1 and None where the model says none, or where outputs are
    no classes. likely: of the classes, or of the next tokens, names and probabilities by softmax,
    the most probable first. outputs: where they are no classes, the numbers; else ().
    """

    label: int
    name: str | None
    likely: tuple[tuple[str, float], ...]
    outputs: tuple[float, ...] = ()

    @property
    def as_json(self) -> dict[str, Any]:
        """Return the answer as JSON types."""
        if self.outputs:
            return {"outputs": list(self.outputs)}
        likely = [{"name": name, "probability": share} for name, share in self.likely]
        return {"label": self.label, "name": self.name, "likely": likely}


class TextAnswerer:
    """Answers to texts, by a model in evaluation mode.

    A model with noise of its own answers by its mean scores over 16 fresh draws, as its clean
    accuracy is measured.

    Args:
        model: float32 tokens (B, length) to logits (B, classes), or (B, length, tokens) of what
            comes next.
        column: makes tokens of texts.
        classes: names, in the order of the logits; those of next tokens are `column`'s.
        targets: data.targets of the recipe.
    """

    def __init__(
        self, model: nn.Module, column: TextColumn, classes: Sequence[str], targets: str
    ) -> None:
        self._model, self._column = model, column
        self._classes, self._targets = tuple(classes), targets

    def __call__(self, text: str) -> TextAnswer:
        """Return the answer to one text. Raises UserError for a text that cannot be continued."""
        import torch

        if self._column.predicts_next_token:
            scores = self.next_scores(self._column.tokenize_beginning(text))
            return self._class(scores, self._column.token_name)
        outputs = self._scores(torch.from_numpy(self._column.tokenize_one(text)))[0]
        if self._targets != "class":
            return TextAnswer(-1, None, (), tuple(outputs.tolist()))
        return self._class(outputs, self._classes.__getitem__)

    @property
    def column(self) -> TextColumn:
        """Return what makes tokens of texts."""
        return self._column

    def next_scores(self, tokens: np.ndarray) -> Tensor:
        """Return the scores (classes,) of the token that comes after 1 to `length` tokens."""
        import torch

        row = np.full((1, self._column.length), PADDING, dtype=np.float32)
        row[0, : len(tokens)] = tokens
        return self._scores(torch.from_numpy(row))[0, len(tokens) - 1]

    def _scores(self, rows: Tensor) -> Tensor:
        import torch

        from dpdist.certification.worker import expected_log_scores
        from dpdist.randomness.noise_location import find_noise_location

        with torch.inference_mode():
            if find_noise_location(self._model).is_random:
                return expected_log_scores(self._model, rows, _DRAWS)
            found: Tensor = self._model(rows).double()
            return found

    def _class(self, scores: Tensor, name: Any) -> TextAnswer:
        from dpdist import models

        label = int(models.predicted_classes(scores))
        if label < 0:
            return TextAnswer(label, None, ())
        shares, places = scores.softmax(-1).topk(min(_SHOWN, len(scores)))
        likely = tuple(
            (name(place), share)
            for place, share in zip(places.tolist(), shares.tolist(), strict=True)
        )
        return TextAnswer(label, name(label), likely)


def check_text_column(column: TextColumn, spec: ModelSpec, context: Path) -> None:
    """Raise UserError unless a model of this description reads the tokens that `column` makes."""
    if spec.input_shape != (column.length,):
        raise UserError(
            f"{context}: text.length must be {spec.input_shape[0]}, the tokens that its model "
            f"reads, got {column.length}"
        )
    if spec.following != column.predicts_next_token:
        raise UserError(
            f"{context}: text.predict must be {'next' if spec.following else 'label'}, as its "
            "model answers"
        )
    if column.words is not None:
        lines = len(read_text(column.words.file).splitlines())
        if lines != len(column.words.token_ids):
            raise UserError(
                f"{context}: text.words must be {lines:,}, the words of {column.words.file.name}, "
                f"got {column.words.count:,}"
            )
    if spec.following and column.vocabulary_size > spec.classes:
        raise UserError(
            f"{context}: its tokenizer must have at most {spec.classes:,} tokens, those that its "
            f"model tells, got {column.vocabulary_size:,}"
        )


def check_adapter(release: Release) -> str:
    """Hold the adapter's tensors and the digest of its base against the whole model.

    Returns what holds, in words. Raises ReleaseError.
    """
    import torch
    from safetensors.torch import load_file

    from dpdist import models

    base, adapter = release.description.base, models.Adapter.of(release.model)
    stated, held = load_file(release.path / ADAPTER_WEIGHTS), adapter and adapter.tensors
    if not held or stated.keys() != held.keys() or not all(
        torch.equal(stated[name], tensor) for name, tensor in held.items()
    ):  # fmt: skip
        raise ReleaseError(f"{release.path / ADAPTER_WEIGHTS}: is not the adapter of its model")
    assert base is not None
    if (digest := models.base_digest(release.model)) != base.digest:
        raise ReleaseError(
            f"{release.path / BASE}: names the digest {base.digest}; that of its model's base is "
            f"{digest}"
        )
    return f"that of the model; its base is {base.name}, digest {base.digest}"


# --- the reader -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Release:
    """Hold a released model with its card and its noise, as `dpdist.load` opened it.

    Args:
        path: the release's folder.
        description: the content of release.json.
        card: the privacy card, as stated.
        plan: the phases that the card names.
        checksums: checksums of its files, by name: they tell it from any other release.
        trusted_factory: see `load`.

    Example:
        After `dpdist.write_release` wrote runs/small/release:

        >>> import dpdist
        >>> import numpy as np
        >>> release = dpdist.load("runs/small/release")
        >>> answer = release.answerer(n=200)
        >>> answer(np.zeros(release.spec.input_shape)).norm
        'l2'
    """

    path: Path
    description: ReleaseDescription
    card: dict[str, Any]
    plan: PrivacyPlan
    checksums: dict[str, str]
    trusted_factory: str | None = None

    def __repr__(self) -> str:
        """Return what a reader asks first, in about ten lines; all of it is in the files."""
        about = self.description
        rows = [
            ("files", f"{len(self.checksums)} in {self.path}, each with its sum"),
            ("model", f"{about.model[:12]}, by {about.method}, dpdist {about.dpdist}"),
            ("privacy", self._privacy_words()),
            ("test data", about.data.name),
            ("classes", _format_names(about.classes))
            if about.text is None or about.text.predict == "label"
            else ("vocabulary", f"{about.outputs:,} tokens"),
        ]
        if about.tested is not None:
            rows.append(about.tested.describe())
        for table in about.certified[:3]:
            shares = ", ".join(
                f"{format_percent(share)} % at {format_exact(radius)}"
                for radius, share in list(zip(table.radii, table.accuracy, strict=True))[:5]
            )
            rows.append((f"certified, {table.title}", shares))
        if len(about.certified) > 3:
            rows.append(("certified", f"{len(about.certified) - 3} more tables"))
        if about.text is not None:
            rows.append(("texts", f"{about.text.length} tokens: {about.text.tokens}"))
        elif about.certificate is not None:
            rows.append(("meant to be certified as", about.certificate.folder_name))
        rows.append(("license", about.license or "none named: ask the publisher"))
        call = "text_answerer(text)" if about.tokens else "answerer()(image)"
        if (signature := self.signature) is not None:
            call = f"predict({{...}}) of {signature}"
        rows.append(("to ask it", f"release.{call}; dpdist verify {self.path}"))
        return "\n".join([f"release {self.name}", *(f"  {name}: {said}" for name, said in rows)])

    def _privacy_words(self) -> str:
        """Return the guarantee that the card states, in words."""
        if self.no_epsilon is not None:
            return self.no_epsilon
        if not self.card["private"]:
            return "NOT private, as its card says"
        stated = f"epsilon {format_epsilon(self.epsilon)} at delta {format_delta(self.delta)}"
        kind = shown_kind(self.card["guarantee"]["kind"])
        return f"{stated}, {self.card['relation']}, {kind}, as its card says"

    @property
    def name(self) -> str:
        """Return the name that the publisher gave the release, a str."""
        return self.description.name

    @property
    def epsilon(self) -> float:
        """Return epsilon at `delta` as the card states it, a float; infinite if nothing is proved.

        Where it leaves an earlier release out, it is that of all releases of the data set. It is
        infinite too where `no_epsilon` says why none is stated. `dpdist verify` computes that of
        the run again, and refuses one of all releases that is smaller.
        """
        return float(bounding_guarantee(self.card)["epsilon"])

    def fit_picture(self, pixels: np.ndarray) -> np.ndarray:
        """Resize a picture to the model's input shape, as the test inputs of its run were.

        Args:
            pixels: the picture, uint8 (C, H, W).

        Returns:
            A uint8 array of `spec.input_shape`; `pixels` itself, of whatever shape and type, where
            test inputs were not resized or the release does not say how.

        Raises:
            ValueError: the picture would have to be resized and is not uint8.
        """
        pictures = self.description.pictures
        return pixels if pictures is None else pictures.fit(pixels, self.spec.input_shape)

    @property
    def no_epsilon(self) -> str | None:
        """Return why the card states no epsilon at all, a str; None where it states one."""
        return no_epsilon(self.card)

    @property
    def delta(self) -> float:
        """Return delta of the guarantee that the card states, a float in [0, 1)."""
        return float(bounding_guarantee(self.card)["delta"])

    @cached_property
    def spec(self) -> ModelSpec:
        """Return the architecture, a `ModelSpec` with `input_shape` and `classes` (their number).

        Raises:
            ReleaseError: the model's file is damaged, or has another number of classes.
            UserError: the model needs a factory that is not trusted.
        """
        from dpdist import models

        with as_release_errors():
            spec = models.read_spec(self.path)
        models.check_trusted(spec, self.trusted_factory, self.path)
        if spec.classes != self.description.outputs:
            raise ReleaseError(
                f"{self.path}: its model tells {spec.classes} classes, {DESCRIPTION} names "
                f"{self.description.outputs}"
            )
        return spec

    @cached_property
    def model(self) -> nn.Module:
        """Return the network, a torch module in evaluation mode.

        It maps float32 inputs (B, *spec.input_shape), images in [0, 1], to logits. Noise of its own
        is not in its forward pass (`dpdist.randomness.noise_location`).

        Raises:
            ReleaseError: the model's files are damaged, or are of another model than the release
                names.
            UserError: the model needs a factory that is not trusted.
        """
        from dpdist import models
        from dpdist.randomness.noise_location import find_noise_location

        spec = self.spec
        with as_release_errors():
            if models.model_hash(self.path) != self.description.model:
                raise UserError(f"{self.path}: its model is not the one that {DESCRIPTION} names")
            module = models.load(self.path, trusted_factory=self.trusted_factory)
            models.check_outputs(module, spec)
        for name, tensor in module.state_dict().items():
            if not bool(tensor.isfinite().all()):
                raise ReleaseError(f"{self.path}: {name} holds numbers that are not finite")
        if not json_equal(find_noise_location(module).describe(), self.description.noise):
            raise ReleaseError(f"{self.path}: its model has other noise than {DESCRIPTION} says")
        for each in module.modules():  # no own loop begins with a part of it unnoticed
            setattr(each, models.TRAINED_BY, str(self.path))
        return module

    @property
    def subject(self) -> Subject:
        """Return the model as jobs take it, a `Subject`; loaded and hashed once, as `model` is.

        Raises:
            UserError: nothing certifies or attacks such inputs or outputs.
            ReleaseError: the model's files are damaged.
        """
        from dpdist.certification.subject import Subject
        from dpdist.models import read_factory_code

        self.require_numeric_inputs()
        self.need_label()
        code = read_factory_code(self.path)
        return Subject(self.model, self.description.model, self.path, code)

    @cached_property
    def text_answerer(self) -> TextAnswerer:
        """Return a `TextAnswerer`: called with a str, it returns a `TextAnswer`.

        An answer has the class or the next token, or the outputs of a model without classes.

        Raises:
            UserError: inputs are no texts, or no tokenizer was released with the model.
            ReleaseError: the tokenizer is not that of the model.
        """
        text = self.description.text
        if text is None:
            why = "takes numbers; call its answerer()"
            if self.description.tokens:
                why = "was released without its tokenizer; make it again with `dpdist release`"
            raise UserError(f"{self.path}: {why}")
        column = text_column(text, self.path)
        with as_release_errors():
            check_text_column(column, self.spec, self.path)
        return TextAnswerer(
            self.model, column, self.description.classes, self.description.data.targets
        )

    @property
    def signature(self) -> Signature | None:
        """Return the fields that the model reads, a `Signature`; None for one tensor of numbers.

        Raises:
            ReleaseError: the model's file is damaged.
        """
        from dpdist.models import read_spec

        with as_release_errors():
            said = read_spec(self.path).signature
            return Signature.parse(said, str(self.path)) if said else None

    def predict(self, inputs: Any) -> Tensor:
        """Return what the model answers to records, without noise and without a certificate.

        Args:
            inputs: the fields of the records by name, arrays (B, ...), where the model reads
                several; else one array (B, *spec.input_shape), as the training had them.

        Returns:
            A tensor (B, ...) of the model's outputs: logits, numbers or labels.

        Raises:
            UserError: inputs are no such fields, or texts, which `text_answerer` takes.
            ReleaseError: the model's files are damaged.
        """
        import torch

        if self.description.tokens:
            raise UserError(f"{self.path}: takes texts: call its text_answerer(text)")
        with torch.inference_mode():
            if (signature := self.signature) is not None:
                found: Tensor = signature.outputs(self.model, signature.batch(inputs))
                return found
            rows = torch.as_tensor(inputs, dtype=torch.float32)
            if rows.shape[1:] != self.spec.input_shape:
                wanted = ", ".join(map(str, self.spec.input_shape))
                raise UserError(
                    f"inputs: must have shape (records, {wanted}), got {tuple(rows.shape)}"
                )
            found = self.model(rows)
            return found

    def require_single_input(self) -> None:
        """Raise UserError where the model reads several fields. Returns nothing."""
        from dpdist.models import read_spec

        refuse_fields(read_spec(self.path), self.path)

    def require_numeric_inputs(self) -> None:
        """Raise UserError where inputs are no single tensor of numbers. Returns nothing.

        Nothing certifies tokens, or several fields.
        """
        self.require_single_input()
        if self.description.tokens:
            raise UserError(
                f"{self.path}: takes tokens of text, which have no certificate",
                see="how-to/text.md#ask-a-model",
            )

    def need_label(self) -> None:
        """Raise UserError where outputs are no classes: nothing certifies them. Returns nothing."""
        if (why := self.description.data.single_label_error(str(self.path))) is not None:
            raise UserError(f"{why}; take `dpdist predict`, or call its `model`")

    def certificate_settings(
        self, sigma: float | None = None, n: int = 10_000, alpha: float = 0.001
    ) -> Certificate:
        """Return the settings by which the release certifies one input.

        Args:
            sigma: standard deviation of the noise on the input, in input units; None: the release's
                own, or none where the model's own noise certifies.
            n: draws for each input.
            alpha: error probability of each certificate.

        Returns:
            A `dpdist.Cohen` with sigma, or a `dpdist.ExpectedScores` without.

        Raises:
            UserError: there is no noise at all, or nothing certifies such inputs or outputs.
            ReleaseError: the model's files are damaged.
        """
        from dpdist.certification.registry import settings_of
        from dpdist.randomness.noise_location import resolve_smoothing_sigma

        self.require_numeric_inputs()
        self.need_label()
        if sigma is None and self.description.certificate is not None:
            sigma = self.description.certificate.sigma
        sigma = resolve_smoothing_sigma(self.model, sigma, self.path)
        return settings_of({"sigma": sigma, "n": n, "alpha": alpha})

    def answerer(
        self, sigma: float | None = None, n: int = 10_000, alpha: float = 0.001
    ) -> Answerer:
        """Return an answerer: a callable from one image to its class and certified radius.

        The noise is fresh and secret.

        Args:
            sigma: standard deviation of the noise on the input, in input units; None: the release's
                own, or none where the model's own noise certifies.
            n: draws for each image.
            alpha: error probability of each certificate.

        Returns:
            An `Answerer`: called with an image of `spec.input_shape`, uint8 or in [0, 1], it
            returns an `Answer` with `label` (int, -1: abstains), `name` (None: abstains), `radius`
            and `norm`.

        Raises:
            UserError: there is no noise at all, or nothing certifies such inputs or outputs.
            ReleaseError: the model's files are damaged.
        """
        return Answerer(self, self.certificate_settings(sigma, n, alpha))


def _format_names(names: Sequence[str], shown: int = 10) -> str:
    more = f", ... ({len(names):,} in all)" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def refuse_fields(spec: ModelSpec, path: Path) -> None:
    """Raise UserError for a model of several fields, which no file or image holds."""
    if not spec.signature:
        return
    signature = Signature.parse(spec.signature, str(path))
    call = ", ".join(f"{name!r}: ..." for name in signature.fields)
    raise UserError(
        f"{path}: reads {signature}, which have no certificate and are in no file: release it, and "
        f"call dpdist.load(folder).predict({{{call}}})",
        see="how-to/releases.md#a-model-of-several-inputs",
    )


def load(
    folder: str | Path, *, trusted_factory: str | None = None, signer: str | Path | None = None
) -> Release:
    """Open a release, every file and field of it checked; nothing is unpickled.

    Args:
        folder: the release's folder, made by `dpdist release` or `dpdist.write_release`.
        trusted_factory: "package.module:factory" that may be imported to build the model; by
            default only this project's own networks are built.
        signer: the public key (PEM, Ed25519) that must have signed it; by default a signature is
            not looked at.

    Returns:
        A `Release`: its card, its model, and an answerer of inputs.

    Raises:
        ReleaseError: the release is not valid (a UserError).
        UserError: there is no release, or no such key.

    Example:
        After `dpdist.write_release` wrote runs/small/release:

        >>> import dpdist
        >>> release = dpdist.load("runs/small/release")
        >>> release.name, release.epsilon <= 3
        ('small', True)
    """
    path = validate_path(folder)
    if not path.is_dir():
        raise UserError(f"{path}: no such folder")
    if not is_release(path):
        inside = path / "release"
        other = f"take {inside}" if is_release(inside) else "`dpdist release RUN` makes one"
        raise UserError(f"{path}: no release there ({other})")
    sums = verify_checksums(path)
    if signer is not None:
        verify_signature(path, validate_path(signer))
    with as_release_errors():
        about = parse_description(read_json(path / DESCRIPTION), str(path / DESCRIPTION))
        card = read_json(path / PRIVACY_CARD)
        plan = parse_card_plan(card, str(path / PRIVACY_CARD))
        if card["guarantee"]["delta"] != plan.delta:
            raise UserError(f"{path / PRIVACY_CARD}: states a delta that is not that of its phases")
        _check_card_matches_description(card, about, path)
        if (tables := len(list_table_names(sums))) != len(about.certified):
            raise UserError(
                f"{path}: has {tables} tables of certificates, {DESCRIPTION} names "
                f"{len(about.certified)}"
            )
        wanted = set() if about.text is None else about.text.files
        if (there := {WORDS, TOKENIZER, SETTINGS} & sums.keys()) != wanted:
            raise UserError(
                f"{path}: must hold {', '.join(sorted(wanted)) or 'no tokenizer'} as {DESCRIPTION} "
                f"says, got {', '.join(sorted(there)) or 'none'}"
            )
        adapter = set(_ADAPTER) & sums.keys()
        if adapter != (set() if about.base is None else set(_ADAPTER)):
            raise UserError(
                f"{path}: must hold {'no adapter' if about.base is None else ', '.join(_ADAPTER)} "
                f"as {DESCRIPTION} says, got {', '.join(sorted(adapter)) or 'none'}"
            )
        if about.base is not None and read_base(path) != about.base:
            raise UserError(f"{path / BASE}: names another base than {DESCRIPTION}")
    return Release(path, about, card, plan, sums, trusted_factory)


def _check_card_matches_description(
    card: dict[str, Any], description: ReleaseDescription, path: Path
) -> None:
    """Check that the privacy card describes the model that release.json describes."""
    elsewhere = no_epsilon(card) is not None
    extra, trained_on = card["extra"], UNKNOWN_DATA if elsewhere else description.data.name
    same = {
        "model hash": (extra.get("model hash", description.model), description.model),
        "method": (extra.get("method"), description.method),
        "training data": (extra.get("training data"), trained_on),
        "dpdist": (extra.get("dpdist"), description.dpdist),
    }
    for name, (stated, described) in same.items():
        if stated != described:
            what = "model" if name == "model hash" else name
            raise UserError(
                f"{path / PRIVACY_CARD}: speaks of another {what} than {DESCRIPTION} "
                f"({quoted(stated)}, {quoted(described)})"
            )


@contextmanager
def as_release_errors() -> Iterator[None]:
    """Turn every UserError inside into a ReleaseError of one line."""
    try:
        yield
    except UserError as error:
        raise ReleaseError(" ".join(str(error).split())) from error
