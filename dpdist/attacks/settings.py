"""Attacks and checks of certificates as evaluations: their settings, results and jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dpdist.attacks import table as reading
from dpdist.attacks.table import TABLE, AttackOptions, AttackTable
from dpdist.certification.evaluation import EvaluatedModel, Evaluation

if TYPE_CHECKING:
    from dpdist.attacks.job import AttackJob, CertificateCheckJob


class AttackSettings(AttackOptions, Evaluation):
    """Accuracy of a model under attack, by the options of `dpdist.attacks.table.AttackOptions`."""

    name: ClassVar[str] = "attack"
    file: ClassVar[str] = TABLE
    private: ClassVar[bool] = False

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
