"""release.json: what is told of a released model beside its architecture and its privacy."""

from __future__ import annotations

from typing import Annotated, Any, Literal

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

FORMAT = 1
# Of settings, what a reader takes from no publisher: noise that was known, inputs that were chosen.
OF_ONE_CERTIFICATION = {"seed", "start", "every", "max_inputs", "batch", "form"}

Ratio = Annotated[float, Number, Field(ge=0, le=1)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class Tested(Section):
    """Clean accuracy on named test data, as the publisher measured it."""

    data: Line
    inputs: Count
    accuracy: Ratio


class Certified(Section):
    """Certified accuracy of one certification of test data, as the publisher measured it.

    accuracy: the share of `inputs` that are right and certified at each of `radii`, in input units
    of `norm`. alpha: the error of each certificate. sigma: of its noise."""

    title: Line
    norm: Line
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
        return self


class Description(Section):
    """All of release.json.

    model: hash of weights and architecture. tokens: whether inputs are tokens of text. classes:
    their names, in the order of the logits. noise: where the model is random by itself
    (`Place.describe`). certificate: the settings it is meant to be certified with; None where
    nothing was certified. data: of the test split; where it lies is everybody's own. licence: an
    SPDX identifier; None where the publisher gave none.
    """

    format: Literal[1]
    dpdist: Line
    name: RunName
    method: Line
    model: Digest
    tokens: bool
    classes: Annotated[tuple[Line, ...], Field(min_length=1, max_length=100_000)]
    noise: JsonObject
    certificate: AnyCertificate | None
    data: DataRecipe
    tested: Tested | None
    certified: tuple[Certified, ...]
    licence: Licence | None

    @model_validator(mode="after")
    def _of_everybody(self) -> Description:
        if self.data.root is not None:
            raise ValueError("data.root must be left out: it is a place of the reader's")
        if list(self.classes) != self.data.class_names:
            raise ValueError("classes must be those that data names")
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
    try:
        return Description.model_validate(record)
    except ValidationError as error:
        said = []
        for item in error.errors():
            key = ".".join(str(part) for part in item["loc"])
            got = "" if isinstance(item["input"], dict) else f", got {shown(item['input'])}"
            said.append(f"{key and key + ': '}{rule_of(item)}{got}")
        raise UserError(f"{where}: damaged: {'; '.join(said[:3])}") from None
