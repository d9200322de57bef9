"""Attacks and checks of certificates as evaluations: their settings, results and jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dpdist.attacks import table as reading
from dpdist.attacks.table import AttackOptions, AttackTable
from dpdist.certification.evaluation import EvaluatedModel, Evaluation

if TYPE_CHECKING:
    from dpdist.attacks.job import AttackJob, CertificateCheckJob


class AttackSettings(AttackOptions, Evaluation):
    """Accuracy of a model under attack."""

    name: ClassVar[str] = "attack"
    file: ClassVar[str] = reading.TABLE
    private: ClassVar[bool] = False

    @property
    def folder_name(self) -> str:
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
    """A check of certificates: each is attacked within its radius and certified again there.

    certificates: path of their table. attack: the settings of the attacks, of which ``start``,
    ``every`` and ``max_inputs`` choose rows of the table; norm, sizes, sigma and n are those of the
    certificates. claim: a column of sizes in a table of expected scores ("as_printed_linf") that is
    attacked instead of the radius; attacked points are certified for the classifier of that column
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
        """Return the job. Raises UserError if it cannot attack the certificates."""
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
