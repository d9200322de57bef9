"""Read and check a release.

No part of a release is used before all of it was checked. Files are regular ones of the folder
itself, each with its sum; every field has its type and its bounds; weights, architecture, noise
and cards speak of one model. Nothing is unpickled, and a factory from elsewhere is imported only
when the caller names it. The claims of the cards are held against the phases that they name by
`dpdist.release.verify`. An answer is class and certified radius, or ABSTAIN, for one image at a
time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpdist.core.console import Row, format_table
from dpdist.core.errors import UserError
from dpdist.core.files import (
    json_equal,
    quoted,
    read_json,
    validate_path,
)
from dpdist.models.signature import Signature
from dpdist.privacy.card import (
    PRIVACY_CARD,
    bounding_guarantee,
    no_epsilon,
    parse_card_plan,
)
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
    _ADAPTER,
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
    """A released model with its card and its noise, as `dpdist.load` opened it.

    Each argument is an attribute of the same name. `model`, `predict` and `answerer` give answers;
    `epsilon` and `delta` are the guarantee on the card.

    Args:
        path: the release's folder, a `Path`.
        description: the content of release.json.
        card: the privacy card as stated, a dict with keys such as "guarantee" and "assumptions".
        plan: the `PrivacyPlan` of the phases that the card names.
        checksums: checksums of its files by name, which identify the release.
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
        """Return what the files state, a list of `Row`: the doubtful entries are first.

        A `Row` has `name`, `value`, `beside` (how to read it; all str) and `brief` (bool).
        """
        return release_rows(self.description, self.card)

    def __repr__(self) -> str:
        """Return what a reader asks first; all of it is in the files."""
        about = self.description
        call = "text_answerer(text)" if about.tokens else "answerer()(image)"
        if (signature := self.signature) is not None:
            call = f"predict({{...}}) of {signature}"
        rows = [
            *self.rows,
            Row("model", f"{about.model[:12]}, by {about.method}, dpdist {about.dpdist}"),
            Row("test data", about.data.name),
            Row("classes", _format_names(about.classes))
            if about.text is None or about.text.predict == "label"
            else Row("vocabulary", f"{about.outputs:,} tokens"),
            Row("license", about.license or "none named: ask the publisher"),
            Row("to ask it", f"release.{call}; dpdist verify {self.path}"),
        ]
        return format_table(rows, f"Release {self.name} ({self.path})")

    @property
    def name(self) -> str:
        """Return the name that the publisher gave the release, a str."""
        return self.description.name

    @property
    def epsilon(self) -> float:
        """Return epsilon at `delta` as the card states it, a float; infinite if nothing is proved.

        If the card's own epsilon omits an earlier release, it is that of all releases of the data
        set. It is also infinite if `no_epsilon` gives a reason. `dpdist verify` computes epsilon of
        the run again, and raises an error if that of all releases is smaller.
        """
        return float(bounding_guarantee(self.card)["epsilon"])

    def fit_picture(self, pixels: np.ndarray) -> np.ndarray:
        """Resize an image to the model's input shape, as the test inputs of its run were.

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
        """Return why the card states no epsilon at all, a str; None if it states one."""
        return no_epsilon(self.card)

    @property
    def delta(self) -> float:
        """Return delta of the guarantee that the card states, a float in [0, 1)."""
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
                f"{self.path}: its model tells {spec.classes} classes, {DESCRIPTION} names "
                f"{self.description.outputs}"
            )
        return spec

    @cached_property
    def model(self) -> nn.Module:
        """Return the network, a torch module in evaluation mode.

        It maps float32 inputs (B, *spec.input_shape), images in [0, 1], to logits. Its forward pass
        does not add the model's own noise (`dpdist.randomness.noise_location`).

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

        Returns:
            Its answers have `label` (int, -1: no class), `name` (None: no class), `likely` (pairs
            of name and probability of the classes or next tokens, the most probable first) and
            `outputs` (floats of a model without classes, else empty).

        Raises:
            UserError: inputs are not texts, or no tokenizer was released with the model.
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

        `fields` of a `Signature` maps each name to its shape and the type of its numbers.

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
            inputs: the fields of the records by name, arrays (B, ...), if the model reads several;
                else one array (B, *spec.input_shape), as the training had them.

        Returns:
            A tensor (B, ...) of the model's outputs: logits (B, classes) for classes, else numbers
            or labels.

        Raises:
            UserError: inputs are not such fields, or are texts: use `text_answerer`.
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
                f"{self.path}: takes tokens of text, which have no certificate",
                see="how-to/text.md#ask-a-model",
            )

    def need_label(self) -> None:
        """Raise UserError if outputs are not classes. Returns nothing.

        Other outputs cannot be certified.
        """
        if (why := self.description.data.single_label_error(str(self.path))) is not None:
            raise UserError(f"{why}; take `dpdist predict`, or call its `model`")

    def certificate_settings(
        self, sigma: float | None = None, n: int = 10_000, alpha: float = 0.001
    ) -> Certificate:
        """Return the settings with which the release certifies one input.

        Args:
            sigma: standard deviation of the noise on the input, in input units; None: the release's
                own, or none if the model's own noise certifies.
            n: draws for each input.
            alpha: error probability of each certificate.

        Returns:
            A `dpdist.Cohen` if there is a sigma, else a `dpdist.ExpectedScores`.

        Raises:
            UserError: there is no noise at all, or such inputs or outputs cannot be certified.
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
        """Return an answerer, a callable from one image to its class and certified radius.

        The noise is fresh and secret.

        Args:
            sigma: standard deviation of the noise on the input, in input units; None: the release's
                own, or none if the model's own noise certifies.
            n: draws for each image.
            alpha: error probability of each certificate.

        Returns:
            An `Answerer`: called with an image of `spec.input_shape`, uint8 or in [0, 1], it
            returns an `Answer` with `label` (int, -1: abstains), `name` (None: abstains), `radius`
            (float, in input units; 0 if it abstains) and `norm` (str).

        Raises:
            UserError: there is no noise at all, or such inputs or outputs cannot be certified.
            ReleaseError: the model's files are damaged.
        """
        settings, shape = self.certificate_settings(sigma, n, alpha), self.spec.input_shape
        return Answerer(self.subject, self.description, settings, shape)


def _format_names(names: Sequence[str]) -> str:
    more = f", ... ({len(names):,} in all)" if len(names) > 10 else ""
    return ", ".join(names[:10]) + more


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
