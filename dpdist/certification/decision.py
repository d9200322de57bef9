"""A question about a whole set (`dpdist certify --decide`).

`set_level` has the tests and why they hold, `deciding` the job, `decided` the answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dpdist.base.errors import UserError
from dpdist.bulk.evaluation import Evaluation, Subject
from dpdist.certification.cohen import Cohen
from dpdist.certification.decided import TABLE, Decided, read_decision
from dpdist.certification.paired import ERROR

if TYPE_CHECKING:
    from dpdist.certification.certificate import Certificate
    from dpdist.certification.deciding import Deciding

_ASKED = re.compile(r"accuracy>=(0?\.\d+|[01](?:\.0*)?)@(\d*\.?\d+)")
_LOOK = 100  # draws of a block: how often an input's test may end


@dataclass(frozen=True)
class Decision(Evaluation):
    """Whether at least a share of the inputs are right and robust at a radius.

    share: as a decimal. certificate: noise, inputs and cap of the draws of an input. error: of the
    answer, over all noise and the order of the inputs.
    """

    share: str
    radius: float
    certificate: Cohen
    error: float = ERROR

    name: ClassVar[str] = "decision"
    file: ClassVar[str] = TABLE
    private: ClassVar[bool] = False

    @staticmethod
    def parsed(text: str) -> tuple[float, float]:
        """Share and radius of accuracy>=SHARE@RADIUS. Raises UserError."""
        found = _ASKED.fullmatch(text.replace(" ", ""))
        if found is None or not 0 < Fraction(found[1]) <= 1:
            raise UserError(
                "--decide: give accuracy>=SHARE@RADIUS with a share above 0 and up to 1, as in "
                f"accuracy>=0.9@0.5, got {text!r}"
            )
        return float(found[1]), float(found[2])

    @classmethod
    def asked(cls, text: str, like: Certificate, error: float = ERROR) -> Decision:
        """By smoothing as `like` does. Raises UserError."""
        share, radius = cls.parsed(text)
        if like.sigma is None:
            raise UserError("--decide: is of smoothing by noise on the inputs; give --sigma")
        if like.noise_bank:
            raise UserError("--decide: the inputs must have noise of their own: no noise bank")
        names = ("n", "start", "every", "max_inputs", "form", "seed", "sigma", "noise")
        settings = {name: getattr(like, name) for name in names}
        batch = min(like.batch or _LOOK, like.n)
        try:
            certificate = Cohen(**settings, batch=batch, radii=(radius,))
        except ValueError:
            raise UserError(
                f"--decide: radius {radius:g} is out of reach of {like.noise} noise, sigma "
                f"{like.sigma:g}"
            ) from None
        return cls(str(share), radius, certificate, error)

    @property
    def folder_name(self) -> str:
        return f"decision-{self.share}-at-{self.radius:g}-{self.certificate.folder_name}"

    @property
    def identity(self) -> dict[str, Any]:
        """Beside the certificate's own settings."""
        return {"share": self.share, "radius": self.radius, "error": self.error}

    def work(self, subject: Subject) -> Deciding:
        from dpdist.certification.deciding import Deciding

        return Deciding(self, subject.model, subject.test, subject.trusted_factory)

    @classmethod
    def read(cls, path: Path) -> Decided:
        return read_decision(path)

    @classmethod
    def lines(cls, found: Sequence[Decided]) -> list[tuple[str, str]]:
        return [each.line for each in found]
