"""Attacks and checks of certificates as evaluations: their settings, results and jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from dpdist.attacks import table as reading
from dpdist.attacks.table import TABLE, AttackTable
from dpdist.certification.evaluation import EvaluatedModel, Evaluation
from dpdist.core.fields import (
    ATTACKS,
    Count,
    CountOrZero,
    Norm,
    OneOrMore,
    Positive,
    Probability,
    Section,
    Text,
)

if TYPE_CHECKING:
    from dpdist.attacks.job import AttackJob, CertificateCheckJob


def _check_attack(name: str) -> str:
    if name not in ATTACKS:
        raise ValueError(f"must be out of {', '.join(ATTACKS)}")
    return name


_KnownAttack = Annotated[str, AfterValidator(_check_attack)]
Labels = Literal["true", "predicted"]
DEFAULT_SIZES: dict[Norm, tuple[float, ...]] = {
    "linf": (0.025, 0.05, 0.1, 0.2),
    "l2": (0.25, 0.5, 1.0, 1.5),
}
_BLOCK = 100
_MAX_BLOCK_NUMBERS = 16 * 2**20


class AttackSettings(Section, Evaluation):
    """Accuracy of a model under attack: everything that its results depend on.

    norm, sizes: "linf" or "l2", sizes in input units; None: ``DEFAULT_SIZES``. attacks: names out
    of "fgsm", "i-fgsm", "mim", "pgd". steps: of the last three. restarts, step_scale: of PGD
    (``evasion.attack``).
    sigma: attack the network smoothed by N(0, sigma^2) input noise; None: the model as it is,
    with noise of its own if it has some. draws: of the noise for each gradient (EOT).
    n, alpha: draws of each answer of a randomized classifier and the error of its two-sided test;
    ABSTAIN where it does not decide.
    labels: what the attack leads away from: the "true" label, or the class "predicted" without an
    attack.
    start, every, max_inputs: as in a certification. batch: inputs attacked at once, which is also
    the canonical block. seed: None draws a secret one when the attack starts, and stores it.
    """

    norm: Norm = "linf"
    sizes: Annotated[tuple[Positive, ...], OneOrMore, Field(min_length=1)] | None = None
    attacks: Annotated[tuple[_KnownAttack, ...], OneOrMore, Field(min_length=1)] = ATTACKS
    steps: Count = 10
    restarts: Count = 1
    step_scale: Positive = 2.5
    sigma: Positive | None = None
    samples: Count = 16
    n: Count = 1000
    alpha: Probability = 0.001
    labels: Labels = "true"
    start: CountOrZero = 0
    every: Count = 1
    max_inputs: Count | None = None
    batch: Count | None = None
    seed: Text | None = None

    name: ClassVar[str] = "attack"
    file: ClassVar[str] = TABLE
    private: ClassVar[bool] = False

    @property
    def attack_sizes(self) -> list[tuple[str, float]]:
        """(attack, size) of everything asked for; ("none", 0) is the unattacked input."""
        return [
            ("none", 0.0),
            *(
                (name, size)
                for size in sorted(set(self.sizes or DEFAULT_SIZES[self.norm]))
                for name in dict.fromkeys(self.attacks)
            ),
        ]

    @property
    def identity(self) -> dict[str, Any]:
        """Return the settings that a result depends on beside its own attack and size.

        More attacks and sizes may be added.
        """
        return self.model_dump(exclude={"attacks", "sizes", "seed"})

    def batch_size(self, numbers_per_input: int) -> int:
        """Inputs attacked at once."""
        if self.batch is not None:
            return self.batch
        return max(1, min(_BLOCK, _MAX_BLOCK_NUMBERS // (numbers_per_input * self.samples)))

    def indices(self, count: int) -> range:
        """Return the indices of the attacked inputs of a data set of ``count``."""
        chosen = range(self.start, count, self.every)
        return chosen if self.max_inputs is None else chosen[: self.max_inputs]

    @property
    def folder_name(self) -> str:
        """Return the default folder of the table."""
        parts: list[str] = [self.norm]
        if self.sigma is not None:
            parts.append(f"sigma-{self.sigma:g}")
        parts.append(f"steps-{self.steps}")
        if self.restarts > 1:
            parts.append(f"restarts-{self.restarts}")
        if self.every > 1:
            parts.append(f"every-{self.every}")
        if self.start:
            parts.append(f"from-{self.start}")
        if self.max_inputs is not None:
            parts.append(f"first-{self.max_inputs}")
        return "-".join(parts)

    def job_spec(self, subject: EvaluatedModel) -> AttackJob:
        from dpdist.attacks.job import AttackJob

        assert subject.subject is not None
        return AttackJob(subject.subject, subject.test_data, self)

    @classmethod
    def read(cls, path: Path) -> AttackTable:
        return reading.read_attack(path)

    @classmethod
    def summary_rows(cls, results: Sequence[AttackTable]) -> list[tuple[str, str]]:
        return [(f"under attack, {table.name}", reading.attack_line(table)) for table in results]


@dataclass(frozen=True)
class CheckSettings(Evaluation):
    """Certificates against attacks: no other class may be certified inside a certified radius.

    certificates: the table whose certificates are attacked, each within its radius. attack: how;
    ``start``, ``every`` and ``max_inputs`` choose rows of the table, and norm, sizes, sigma and the
    draws of an answer are the certificates' own. claim: a column of sizes in a table of expected
    scores ("as_printed_linf") that is attacked in place of its radius; at attacked points a valid
    certificate of the classifier that the column speaks of answers
    (`CertifiedSizes.predicts_by_vote`).
    """

    certificates: Path
    attack: AttackSettings
    claim: str | None = None

    name: ClassVar[str] = "check of certificates"
    file: ClassVar[str] = reading.VERDICT
    private: ClassVar[bool] = False

    @property
    def folder_name(self) -> str:
        return f"check-{self.certificates.parent.name}" + (f"-{self.claim}" if self.claim else "")

    def job_spec(self, subject: EvaluatedModel) -> CertificateCheckJob:
        """Raises UserError for certificates of another model, of other data, or in L1."""
        from dpdist.attacks.job import CertificateCheckJob

        assert subject.subject is not None
        return CertificateCheckJob(
            subject.subject, subject.test_data, self.certificates, self.attack, self.claim
        )

    @classmethod
    def read(cls, path: Path) -> dict[str, Any]:
        return reading.read_check(path)

    @classmethod
    def summary_rows(cls, results: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
        return [
            (f"certificates attacked, {check['certificates']}", reading.check_line(check))
            for check in results
        ]
