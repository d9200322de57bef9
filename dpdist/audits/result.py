"""The results of audits in a run folder, as every reader of evaluations finds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dpdist.bulk.evaluation import Evaluation, Folders
from dpdist.privacy.audited import Audited
from dpdist.sections.audit import AuditOptions


@dataclass(frozen=True)
class AuditResult(Evaluation):
    """RUN/audit/NAME/audit.json. Nothing in it is made of more than the run's guarantee covers: of
    its canaries the number of right guesses, never scores or coins."""

    options: AuditOptions

    name: ClassVar[str] = "audit"
    file: ClassVar[str] = "audit.json"
    private: ClassVar[bool] = False

    @property
    def folder_name(self) -> str:
        return self.options.folder_name

    @classmethod
    def home(cls, run: Folders) -> Path:
        return (run.private if cls.private else run.path) / "audit"

    @classmethod
    def read(cls, path: Path) -> Audited:
        return Audited.read(path)

    @classmethod
    def lines(cls, found: Sequence[Audited]) -> list[tuple[str, str]]:
        return [(f"audited, {audited.kind}", audited.line) for audited in found]


@dataclass(frozen=True)
class PrivateAuditResult(AuditResult):
    """RUN/private/audit/NAME/audit.json, made of more trainings than the run's guarantee covers."""

    private: ClassVar[bool] = True


def result_of(options: AuditOptions) -> AuditResult:
    """The kind of result that an audit has."""
    return (PrivateAuditResult if options.private else AuditResult)(options)
