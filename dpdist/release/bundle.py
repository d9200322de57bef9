"""Read and check a release.

No part of a release is used before all of it is checked. Files are regular files of the folder,
each with its checksum; every field has its type and bounds; weights, architecture, noise and cards
are those of one model. Nothing is unpickled, and a user's factory is imported only if the caller
names it. `dpdist.release.verify` checks the statements of the cards against their phases.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpdist.core.console import Row, format_table
from dpdist.core.errors import UserError
from dpdist.core.files import json_equal, quoted, read_json, validate_path
from dpdist.models.signature import Signature, naming_inputs
from dpdist.privacy.card import PRIVACY_CARD, bounding_guarantee, no_epsilon, parse_card_plan
from dpdist.privacy.phases import UNKNOWN_DATA
from dpdist.privacy.plan import PrivacyPlan

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dpdist.certification.certificate import Certificate
    from dpdist.certification.subject import Subject
    from dpdist.models import ModelSpec


from dpdist.release.answers import Answerer, TextAnswerer, check_text_column
from dpdist.release.description import (
    ReleaseDescription,
    parse_description,
    read_base,
    release_rows,
    text_column,
)
from dpdist.release.files import (
    ADAPTER_FILES,
    ADAPTER_WEIGHTS,
    BASE,
    DESCRIPTION,
    SETTINGS,
    TOKENIZER,
    WORDS,
    ReleaseError,
    is_release,
    list_table_names,
    verify_checksums,
    verify_signature,
)


def check_adapter(release: Release) -> str:
    """Check the adapter's tensors and the digest of its base against the whole model.

    Returns a description of the adapter. Raises ReleaseError.
    """
    import torch
    from safetensors.torch import load_file

    from dpdist import models

    base, adapter = release.description.base, models.Adapter.of(release.model)
    stated = load_file(release.path / ADAPTER_WEIGHTS)
    own = {} if adapter is None else adapter.tensors
    equal = own and stated.keys() == own.keys()
    if not equal or not all(torch.equal(stated[name], own[name]) for name in own):
        raise ReleaseError(f"{release.path / ADAPTER_WEIGHTS}: is not the adapter of its model")
    assert base is not None
    if (digest := models.base_digest(release.model)) != base.digest:
        raise ReleaseError(
            f"{release.path / BASE}: digest: must be {digest}, that of its model's base, got "
            f"{base.digest}"
        )
    return f"that of the model; its base is {base.name}, digest {base.digest}"


# --- the reader -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Release:
    """A released model with its card and its noise, as `dpdist.load` opened it.

    Each argument is an attribute of the same name. `model`, `predict` and `answerer` give answers;
    `epsilon` and `delta` are the guarantee on the card.

    Args:
        path: the release's folder, a `Path`.
        description: the content of release.json, a `ReleaseDescription`.
        card: the privacy card as stated, a dict with keys such as "guarantee" and "assumptions".
        plan: the `PrivacyPlan` of the phases on the card.
        checksums: dict from the name of a file to its checksum (str); they identify the release.
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

    @property
    def rows(self) -> list[Row]:
        """Return guarantee, accuracy and other statements of the release, a list of `Row`.

        Warnings are first.

        A `Row` has `name`, `value` and `beside` (how to read the value), all str, and `brief`
        (bool: whether short summaries show it).
        """
        return release_rows(self.description, self.card)

    def __repr__(self) -> str:
        """Return the most important statements of the files."""
        about = self.description
        call = "answerer()(image)" if about.is_certifiable else "predict(rows)"
        if about.tokens:
            call = "text_answerer(text)"
        if (signature := self.signature) is not None:
            call = f"predict({{...}}) of {signature}"
        trust = f" --trust-factory {self.trusted_factory}" if self.trusted_factory else ""
        rows = [
            *self.rows,
            Row("model", f"{about.model[:12]}, by {about.method}, dpdist {about.dpdist}"),
            Row("test data", about.data.name),
            Row("classes", _format_names(about.classes))
            if about.text is None or about.text.predict == "label"
            else Row("vocabulary", f"{about.outputs:,} tokens"),
            Row("license", about.license or "not named: ask the publisher"),
            Row("to use it", f"release.{call}; dpdist verify {self.path}{trust}"),
        ]
        return format_table(rows, f"Release {self.name} ({self.path})")

    @property
    def name(self) -> str:
        """Return the name that the publisher gave the release, a str."""
        return self.description.name

    @property
    def epsilon(self) -> float:
        """Return epsilon at `delta` as the card states it, a float; infinite if nothing is proved.

        It is also infinite if `no_epsilon` gives a reason. If the run depends on an earlier release
        that the run's own epsilon omits, this is the epsilon of all releases of the data set.
        `dpdist verify` recomputes the run's epsilon, and raises an error if that of all releases is
        smaller.
        """
        return float(bounding_guarantee(self.card)["epsilon"])

    def fit_picture(self, pixels: np.ndarray) -> np.ndarray:
        """Return an image resized to the model's input shape, as the test inputs of its run were.

        Args:
            pixels: the image, uint8 (C, H, W).

        Returns:
            A uint8 array of `spec.input_shape`; `pixels` itself, of any shape and type, if test
            inputs were not resized or the release does not state how.

        Raises:
            ValueError: the image would have to be resized and is not uint8.
        """
        pictures = self.description.pictures
        return pixels if pictures is None else pictures.fit(pixels, self.spec.input_shape)

    @property
    def no_epsilon(self) -> str | None:
        """Return why the card states no epsilon at all, a str; None if it states one.

        For a model that was trained elsewhere it states none, not even an infinite one.
        """
        return no_epsilon(self.card)

    @property
    def delta(self) -> float:
        """Return the delta at which `epsilon` is stated, a float in [0, 1)."""
        return float(bounding_guarantee(self.card)["delta"])

    @cached_property
    def spec(self) -> ModelSpec:
        """Return the architecture, a `ModelSpec` with `input_shape` and `classes` (their number).

        Raises:
            ReleaseError: the model's file is damaged, or has a different number of classes.
            UserError: the model needs a factory that is not trusted.
        """
        from dpdist import models

        with as_release_errors():
            spec = models.read_spec(self.path)
        models.check_trusted(spec, self.trusted_factory, self.path)
        if spec.classes != self.description.outputs:
            raise ReleaseError(
                f"{self.path}: its model must have the {self.description.outputs} classes in "
                f"{DESCRIPTION}, got {spec.classes}"
            )
        return spec

    @cached_property
    def model(self) -> nn.Module:
        """Return the network, a torch module in evaluation mode.

        It maps float32 inputs (B, *spec.input_shape), scaled as in training, to outputs: for
        classes logits (B, classes). Its forward pass does not add the model's own noise
        (`dpdist.randomness.noise_location`).

        Raises:
            ReleaseError: the model's files are damaged, or are those of a different model than the
                release names.
            UserError: the model needs a factory that is not trusted.
        """
        from dpdist import models
        from dpdist.randomness.noise_location import find_noise_location

        spec = self.spec
        with as_release_errors():
            if models.model_hash(self.path) != self.description.model:
                raise UserError(f"{self.path}: its model is not the one in {DESCRIPTION}")
            module = models.load(self.path, trusted_factory=self.trusted_factory)
            models.check_outputs(module, spec)
        for name, tensor in module.state_dict().items():
            if not bool(tensor.isfinite().all()):
                raise ReleaseError(f"{self.path}: {name}: must be finite")
        if not json_equal(find_noise_location(module).describe(), self.description.noise):
            raise ReleaseError(f"{self.path}: noise: must be that in {DESCRIPTION}")
        for each in module.modules():  # so that a training that starts from a part of it knows
            setattr(each, models.TRAINED_BY, str(self.path))
        return module

    @property
    def subject(self) -> Subject:
        """Return the model as certifications and attacks take it, a `Subject`.

        A `Subject` has `model` (in evaluation mode) and `digest` (hex, a hash). The model is loaded
        and hashed once.

        Raises:
            UserError: such inputs or outputs cannot be certified or attacked.
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
        """Return a `TextAnswerer`, a callable from one text (str) to a `TextAnswer`.

        A `TextAnswer` has `label` (int, -1: no class), `name` (None: no class), `likely` (at most 5
        pairs of name and probability, the most probable first) and `outputs` (floats of a model
        without classes; else empty).

        Raises:
            UserError: inputs are not texts, or no tokenizer was released with the model.
            ReleaseError: the tokenizer is not that of the model.
        """
        text = self.description.text
        if text is None:
            why = "its inputs are not texts; call its answerer()"
            if self.description.tokens:
                why = "was released without its tokenizer; repeat `dpdist release`"
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

        `fields` of a `Signature` is a dict from name to a pair: shape without the batch (a tuple of
        int) and data type (a str).

        Raises:
            ReleaseError: the model's file is damaged.
        """
        from dpdist.models import read_spec

        with as_release_errors():
            fields = read_spec(self.path).signature
            return Signature.parse(fields, str(self.path)) if fields else None

    def predict(self, inputs: Any) -> Tensor:
        """Return the model's outputs for records, a tensor, without noise or a certificate.

        Args:
            inputs: one array (B, *spec.input_shape), or a DataFrame of numbers whose columns are in
                the order of training; both scaled as in training. Or raw rows of a table, which the
                release preprocesses: a DataFrame, an Arrow table, a dict of columns or the path of
                a file. If the model reads several fields: arrays (B, ...) by name.

        Returns:
            A tensor (B, ...) with the outputs of `model`: for classes logits (B, classes), of which
            `.softmax(1)` are the probabilities; for numbers, in the label's own unit.

        Raises:
            UserError: inputs are not such fields, the model fails on them, or they are texts: use
                `text_answerer`.
            ReleaseError: the model's files are damaged.
        """
        import torch

        if self.description.tokens:
            raise UserError(f"{self.path}: its inputs are texts; call its text_answerer(text)")
        model, signature = self.model, self.signature
        given = self._numbers(inputs) if signature is None else inputs
        with torch.inference_mode(), naming_inputs("inputs"):
            if signature is not None:
                found: Tensor = signature.outputs(model, signature.batch(given))
                return found
            rows = torch.as_tensor(given, dtype=torch.float32)
            if rows.shape[1:] != self.spec.input_shape:
                wanted = ", ".join(map(str, self.spec.input_shape))
                raise UserError(
                    f"inputs: must have shape (records, {wanted}), got {tuple(rows.shape)}"
                )
            low, high = self.description.data.columns.target_range
            found = low + (high - low) * model(rows)
            return found

    def _numbers(self, inputs: Any) -> Any:
        """Return an array of numbers as it is; raw rows preprocessed, or a table as an array."""
        import torch

        numbers = isinstance(inputs, np.ndarray | torch.Tensor | list)
        if numbers and not (len(inputs) and isinstance(inputs[0], Mapping)):
            return inputs
        if (preprocessing := self.description.preprocessing()) is not None:
            return preprocessing.transform(inputs)
        if not hasattr(inputs, "columns"):
            raise UserError(
                "inputs: must be an array or a table of numbers, as the model reads no columns"
            )
        from dpdist.data.array_records import Options, as_numbers

        return as_numbers("inputs", inputs, Options(name="inputs"))

    def require_single_input(self) -> None:
        """Raise UserError if the model reads several fields. Returns nothing."""
        from dpdist.models import read_spec

        refuse_fields(read_spec(self.path), self.path)

    def require_numeric_inputs(self) -> None:
        """Raise UserError if inputs are not a single tensor of numbers. Returns nothing.

        Tokens and several fields cannot be certified.
        """
        self.require_single_input()
        if self.description.tokens:
            raise UserError(
                f"{self.path}: its inputs are tokens of text, which cannot be certified",
                see="how-to/text.md#ask-a-model",
            )

    def need_label(self) -> None:
        """Raise UserError if outputs are not classes. Returns nothing.

        Other outputs cannot be certified.
        """
        if (why := self.description.data.single_label_error(str(self.path))) is not None:
            raise UserError(f"{why}; use `dpdist predict`, or call its `model`")

    def certificate_settings(
        self, sigma: float | None = None, n: int = 10_000, alpha: float = 0.001
    ) -> Certificate:
        """Return the settings with which the release certifies one input, a `Certificate`.

        Args:
            sigma: standard deviation of the noise on the input, in input units; None: the release's
                own, or none if the model's own noise certifies.
            n: noise samples per input.
            alpha: error probability of each certificate.

        Returns:
            A `dpdist.Cohen` if there is a sigma, else a `dpdist.ExpectedScores`; both are a
            `Certificate`.

        Raises:
            UserError: there is no noise at all, or such inputs or outputs cannot be certified.
            ReleaseError: the model's files are damaged.
        """
        from dpdist.certification.registry import settings_of
        from dpdist.randomness.noise_location import resolve_smoothing_sigma

        self.require_numeric_inputs()
        self.need_label()
        if sigma is None and not self.description.is_certifiable:
            raise UserError(
                f"{self.path}: sigma: must be given, as the model has no noise; predict(inputs) "
                "answers without noise and without a certificate"
            )
        if sigma is None and self.description.certificate is not None:
            sigma = self.description.certificate.sigma
        sigma = resolve_smoothing_sigma(self.model, sigma, self.path)
        return settings_of({"sigma": sigma, "n": n, "alpha": alpha})

    def answerer(
        self, sigma: float | None = None, n: int = 10_000, alpha: float = 0.001
    ) -> Answerer:
        """Return an `Answerer`, a callable from one image to its class and certified radius.

        Each answer uses fresh, secret noise.

        Args:
            sigma: standard deviation of the noise on the input, in input units; None: the release's
                own, or none if the model's own noise certifies.
            n: noise samples per image.
            alpha: error probability of each certificate.

        Returns:
            An `Answerer`: called with an image of `spec.input_shape` (uint8 or in [0, 1]) or a raw
            record of a table, it returns an `Answer` with `label` (int, -1: abstains), `name`
            (None: abstains), `radius` (float, in input units of `norm`; 0 if it abstains) and
            `norm` (str).

        Raises:
            UserError: there is no noise at all, or such inputs or outputs cannot be certified.
            ReleaseError: the model's files are damaged.
        """
        settings, shape = self.certificate_settings(sigma, n, alpha), self.spec.input_shape
        return Answerer(self.subject, self.description, settings, shape)


def _format_names(names: Sequence[str]) -> str:
    more = f", ... ({len(names):,} in total)" if len(names) > 10 else ""
    return ", ".join(names[:10]) + more


def refuse_fields(spec: ModelSpec, path: Path) -> None:
    """Raise UserError for a model of several fields, which files and images cannot contain."""
    if not spec.signature:
        return
    signature = Signature.parse(spec.signature, str(path))
    call = ", ".join(f"{name!r}: ..." for name in signature.fields)
    raise UserError(
        f"{path}: reads {signature}, which cannot be certified or read from files: call "
        f"dpdist.load(RELEASE).predict({{{call}}})",
        see="how-to/releases.md#a-model-of-several-inputs",
    )


def load(
    folder: str | Path, *, trusted_factory: str | None = None, signer: str | Path | None = None
) -> Release:
    """Open a release and check every file and field of it; nothing is unpickled.

    Args:
        folder: the release's folder, written by `dpdist release` or `dpdist.write_release`.
        trusted_factory: "package.module:factory" that may be imported to build the model; by
            default only this project's own networks are built.
        signer: the public key (PEM, Ed25519) that must have signed it; by default a signature is
            not checked.

    Returns:
        A `Release`, with `name`, `epsilon`, `delta`, `card` (dict) and `model` (a torch module);
        `predict(inputs)` and `answerer()` give answers.

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
        cure = f"use {inside}" if is_release(inside) else "write one with `dpdist release RUN`"
        raise UserError(f"{path}: is not a release; {cure}")
    sums = verify_checksums(path)
    if signer is not None:
        verify_signature(path, validate_path(signer))
    with as_release_errors():
        about = parse_description(read_json(path / DESCRIPTION), str(path / DESCRIPTION))
        card = read_json(path / PRIVACY_CARD)
        plan = parse_card_plan(card, str(path / PRIVACY_CARD))
        if card["guarantee"]["delta"] != plan.delta:
            raise UserError(f"{path / PRIVACY_CARD}: delta: must be that of its phases")
        _check_card_matches_description(card, about, path)
        if (tables := len(list_table_names(sums))) != len(about.certified):
            raise UserError(
                f"{path}: must contain the {len(about.certified)} tables of certificates in "
                f"{DESCRIPTION}, got {tables}"
            )
        wanted = set() if about.text is None else about.text.files
        wanted |= set() if about.base is None else set(ADAPTER_FILES)
        optional = {WORDS, TOKENIZER, SETTINGS, *ADAPTER_FILES} & sums.keys()
        if optional != wanted:
            expected, got = (", ".join(sorted(names)) or "none" for names in (wanted, optional))
            raise UserError(
                f"{path}: must contain the optional files in {DESCRIPTION} ({expected}), got {got}"
            )
        if about.base is not None and read_base(path) != about.base:
            raise UserError(f"{path / BASE}: must be the base in {DESCRIPTION}")
    return Release(path, about, card, plan, sums, trusted_factory)


def _check_card_matches_description(
    card: dict[str, Any], description: ReleaseDescription, path: Path
) -> None:
    """Raise UserError unless the privacy card is that of the model in release.json."""
    described = {
        "model hash": description.model,
        "method": description.method,
        "training data": UNKNOWN_DATA if no_epsilon(card) is not None else description.data.name,
        "dpdist": description.dpdist,
    }
    extra = {"model hash": description.model, **card["extra"]}
    for name, value in described.items():
        if extra.get(name) != value:
            raise UserError(
                f"{path / PRIVACY_CARD}: {name}: must be {quoted(value)}, as in {DESCRIPTION}, got "
                f"{quoted(extra.get(name))}"
            )


@contextmanager
def as_release_errors() -> Iterator[None]:
    """Raise every UserError inside as a ReleaseError of one line."""
    try:
        yield
    except UserError as error:
        raise ReleaseError(" ".join(str(error).split())) from error
