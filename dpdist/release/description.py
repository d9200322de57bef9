"""release.json: what is told of a released model beside its architecture and its privacy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from dpdist.base.errors import UserError
from dpdist.base.fields import (
    Count,
    JsonObject,
    Licence,
    Line,
    NotNegative,
    Number,
    Probability,
    RunName,
    Section,
    rule_of,
)
from dpdist.base.reading import shown
from dpdist.certification.catalogue import AnyCertificate
from dpdist.sections.data import DataRecipe

if TYPE_CHECKING:
    from dpdist.certification.certificate import CertificateTable

FORMAT = 2  # 1 had no tables of certificates
# Of settings, what a reader takes from no publisher: noise that was known, inputs that were chosen.
OF_ONE_CERTIFICATION = {"seed", "start", "every", "max_inputs", "batch", "form"}

Ratio = Annotated[float, Number, Field(ge=0, le=1)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class Tested(Section):
    """Clean accuracy on named test data: the publisher's word."""

    data: Line
    inputs: Count
    accuracy: Ratio


class Certified(Section):
    """Certified accuracy of one certification of test data, as its table says it (`certified_of`).

    accuracy: the share of `inputs` that are right and certified at each of `radii`, in input units
    of `norm`. alpha: the error of each certificate. sigma: of its noise."""

    title: Line
    norm: Literal["l1", "l2", "linf"]
    sigma: NotNegative
    alpha: Probability
    draws: Count
    inputs: Count
    radii: Annotated[tuple[NotNegative, ...], Field(min_length=1, max_length=101)]
    accuracy: tuple[Ratio, ...]

    @model_validator(mode="after")
    def _one_for_each(self) -> Certified:
        if len(self.accuracy) != len(self.radii):
            raise ValueError(f"accuracy must be one for each of {len(self.radii)} radii")
        if list(self.radii) != sorted(set(self.radii)):
            raise ValueError("radii must rise")
        if list(self.accuracy) != sorted(self.accuracy, reverse=True):
            raise ValueError("accuracy must not rise with the radius")
        if not all(is_share(accuracy, self.inputs) for accuracy in self.accuracy):
            raise ValueError(f"accuracy must be a share of {self.inputs} inputs")
        return self


def is_share(accuracy: float, inputs: int) -> bool:
    """Return whether a share is that of a whole number of the inputs."""
    return round(accuracy * inputs) / inputs == accuracy


def certified_of(table: CertificateTable) -> dict[str, Any]:
    """Return what release.json says of a table of certificates, computed from it (`Certified`)."""
    radii = table.shown_radii
    return {
        "title": table.title,
        "norm": table.norm,
        "sigma": table.sigma,
        "alpha": table.alpha,
        "draws": table.n,
        "inputs": len(table.index),
        "radii": radii,
        "accuracy": [table.certified_accuracy(radius) for radius in radii],
    }


class Description(Section):
    """All of release.json.

    model: hash of weights and architecture. tokens: whether inputs are tokens of text. classes:
    their names, in the order of the logits. noise: where the model is random by itself
    (`Place.describe`). certificate: the settings it is meant to be certified with; None where
    nothing was certified. data: of the test split; where it lies is everybody's own. licence: an
    SPDX identifier; None where the publisher gave none. certified: of each table, in their order.
    """

    format: Literal[2]
    dpdist: Annotated[str, Field(pattern=r"^[0-9]{1,4}(\.[0-9]{1,4}){1,3}[a-z0-9.+]{0,30}$")]
    name: RunName
    method: Line
    model: Digest
    tokens: bool
    classes: Annotated[tuple[Line, ...], Field(min_length=1, max_length=100_000)]
    noise: JsonObject
    certificate: AnyCertificate | None
    data: DataRecipe
    tested: Tested | None
    certified: Annotated[tuple[Certified, ...], Field(max_length=999)]
    licence: Licence | None

    @model_validator(mode="after")
    def _of_everybody(self) -> Description:
        if self.data.root is not None:
            raise ValueError("data.root must be left out: it is a place of the reader's")
        if list(self.classes) != self.data.class_names:
            raise ValueError("classes must be those that data names")
        if self.tokens and (self.certified or self.certificate is not None):
            raise ValueError("tokens of text have no certificate")
        tested = self.tested
        if tested is not None and not self.tokens and not is_share(tested.accuracy, tested.inputs):
            raise ValueError(f"tested.accuracy must be a share of {tested.inputs} inputs")
        of_one = self.certificate and self.certificate.model_fields_set & OF_ONE_CERTIFICATION
        if of_one:
            raise ValueError(f"certificate.{min(of_one)} must be left out: the reader chooses it")
        return self


def description_of(record: dict[str, Any], where: str) -> Description:
    """release.json as read. Raises UserError, in one line, for what it may not say."""
    version = record.get("format")
    if isinstance(version, int) and version > FORMAT:
        raise UserError(
            f"{where}: written by a newer dpdist (format {version}); upgrade to read it"
        )
    if version == 1 and not isinstance(version, bool):
        raise UserError(
            f"{where}: of a release without the counts of its certificates; make it again with "
            "`dpdist release`"
        )
    try:
        return Description.model_validate(record)
    except ValidationError as error:
        said = []
        for item in error.errors():
            key = ".".join(str(part) for part in item["loc"])
            got = "" if isinstance(item["input"], dict) else f", got {shown(item['input'])}"
            said.append(f"{key and key + ': '}{rule_of(item)}{got}")
        raise UserError(f"{where}: damaged: {'; '.join(said[:3])}") from None
