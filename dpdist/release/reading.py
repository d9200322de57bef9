"""The one reader of a release: nothing of it is used before all of it was looked at.

Files are regular ones of the folder itself, each with its sum; every field has its type and its
bounds; weights, architecture, noise and cards speak of one model. Nothing is unpickled, and a
factory from elsewhere is imported only when the caller names it. What the cards claim is held
against the phases that they name by `dpdist.release.verifying`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpdist.base.errors import UserError
from dpdist.base.json_values import same_json
from dpdist.base.reading import read_json, shown, usable_path
from dpdist.privacy.card import accounted
from dpdist.privacy.plan import PrivacyPlan
from dpdist.release.description import Description, description_of
from dpdist.release.files import (
    CARD,
    DESCRIPTION,
    ReleaseError,
    check_signature,
    check_sums,
    is_release,
    tables_in,
)

if TYPE_CHECKING:
    from torch import nn

    from dpdist.certification.certificate import Certificate
    from dpdist.models import ModelSpec
    from dpdist.release.answering import Answerer


@dataclass(frozen=True)
class Release:
    """What lies in a release folder. about: release.json. card: the privacy card, as stated. plan:
    the phases that the card speaks of. sums: of its files, by name: they tell it from any other.
    trusted_factory: see `load`."""

    path: Path
    about: Description
    card: dict[str, Any]
    plan: PrivacyPlan
    sums: dict[str, str]
    trusted_factory: str | None = None

    @property
    def name(self) -> str:
        return self.about.name

    @property
    def epsilon(self) -> float:
        """At `delta`, as the card states it; `dpdist verify` computes it again."""
        return float(self.card["guarantee"]["epsilon"])

    @property
    def delta(self) -> float:
        return self.plan.delta

    @cached_property
    def spec(self) -> ModelSpec:
        """The architecture. Raises ReleaseError; UserError for a factory that is not trusted."""
        from dpdist import models

        with of_release():
            spec = models.read_spec(self.path)
        models.check_trusted(spec, self.trusted_factory, self.path)
        if spec.classes != len(self.about.classes):
            raise ReleaseError(
                f"{self.path}: its model tells {spec.classes} classes, {DESCRIPTION} names "
                f"{len(self.about.classes)}"
            )
        return spec

    @cached_property
    def model(self) -> nn.Module:
        """The network, in eval mode: float32 inputs (B, *spec.input_shape) in [0, 1] to logits.
        Noise of its own is not in its forward pass (`dpdist.randomness.places`). Raises as
        `spec`."""
        from dpdist import models
        from dpdist.randomness.places import place_of

        spec = self.spec
        with of_release():
            if models.model_hash(self.path) != self.about.model:
                raise UserError(f"{self.path}: its model is not the one that {DESCRIPTION} names")
            module = models.load(self.path, trusted_factory=self.trusted_factory)
            models.check_outputs(module, spec)
        for name, tensor in module.state_dict().items():
            if not bool(tensor.isfinite().all()):
                raise ReleaseError(f"{self.path}: {name} holds numbers that are not finite")
        if not same_json(place_of(module).describe(), self.about.noise):
            raise ReleaseError(f"{self.path}: its model has other noise than {DESCRIPTION} says")
        return module

    def need_numbers(self) -> None:
        """Raise UserError where inputs are tokens, which nothing certifies."""
        if self.about.tokens:
            raise UserError(f"{self.path}: takes tokens of text, which have no certificate")

    def settings(
        self, sigma: float | None = None, n: int = 10_000, alpha: float = 0.001
    ) -> Certificate:
        """How one input is certified: noise of `sigma` on it (None: what the release says), n draws
        and error alpha. Raises UserError where there is no noise at all."""
        from dpdist.certification.catalogue import settings_of
        from dpdist.randomness.places import smoothing_of

        self.need_numbers()
        if sigma is None and self.about.certificate is not None:
            sigma = self.about.certificate.sigma
        sigma = smoothing_of(self.model, sigma, self.path)
        return settings_of({"sigma": sigma, "n": n, "alpha": alpha})

    def answerer(
        self, sigma: float | None = None, n: int = 10_000, alpha: float = 0.001
    ) -> Answerer:
        """Class and certified radius, or ABSTAIN, of one image after another, by fresh secret
        noise. Raises as `settings`."""
        from dpdist.release.answering import Answerer

        return Answerer(self, self.settings(sigma, n, alpha))


def load(
    folder: str | Path, *, trusted_factory: str | None = None, signer: str | Path | None = None
) -> Release:
    """The release in `folder`, every file and field of it checked; nothing is unpickled.

    trusted_factory: "package.module:factory" that may be imported to build the model; by default
    only this project's own networks are built. signer: the public key (PEM, Ed25519) that must have
    signed it; by default a signature is not looked at. Raises ReleaseError (a UserError) for a
    release that does not hold, UserError where there is none, or no such key.
    """
    path = usable_path(folder)
    if not path.is_dir():
        raise UserError(f"{path}: no such folder")
    if not is_release(path):
        inside = path / "release"
        other = f"take {inside}" if is_release(inside) else "`dpdist release RUN` makes one"
        raise UserError(f"{path}: no release there ({other})")
    sums = check_sums(path)
    if signer is not None:
        check_signature(path, usable_path(signer))
    with of_release():
        about = description_of(read_json(path / DESCRIPTION), str(path / DESCRIPTION))
        card = read_json(path / CARD)
        plan = accounted(card, str(path / CARD))
        if card["guarantee"]["delta"] != plan.delta:
            raise UserError(f"{path / CARD}: states a delta that is not that of its phases")
        _check_same(card["extra"], about, path)
        if (tables := len(tables_in(sums))) != len(about.certified):
            raise UserError(
                f"{path}: has {tables} tables of certificates, {DESCRIPTION} names "
                f"{len(about.certified)}"
            )
    return Release(path, about, card, plan, sums, trusted_factory)


def _check_same(extra: dict[str, Any], about: Description, path: Path) -> None:
    """Check that the privacy card speaks of the model that release.json describes."""
    same = {
        "model hash": (extra.get("model hash", about.model), about.model),
        "method": (extra.get("method"), about.method),
        "training data": (extra.get("training data"), about.data.name),
        "dpdist": (extra.get("dpdist"), about.dpdist),
    }
    for name, (stated, described) in same.items():
        if stated != described:
            what = "model" if name == "model hash" else name
            raise UserError(
                f"{path / CARD}: speaks of another {what} than {DESCRIPTION} ({shown(stated)}, "
                f"{shown(described)})"
            )


@contextmanager
def of_release() -> Iterator[None]:
    """Complaints inside are about a release that does not hold, in one line each."""
    try:
        yield
    except UserError as error:
        raise ReleaseError(" ".join(str(error).split())) from error
