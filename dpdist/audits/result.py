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
    """RUN/audit/NAME/audit.json. Nothing in it says anything of a training record: scores of
    canaries stay in private/."""

    options: AuditOptions

    name: ClassVar[str] = "audit"
    file: ClassVar[str] = "audit.json"
    private: ClassVar[bool] = False

    @property
    def folder_name(self) -> str:
        return self.options.folder_name

    @classmethod
    def home(cls, run: Folders) -> Path:
        return run.path / "audit"

    @classmethod
    def read(cls, path: Path) -> Audited:
        return Audited.read(path)

    @classmethod
    def lines(cls, found: Sequence[Audited]) -> list[tuple[str, str]]:
        return [(f"audited, {audited.kind}", audited.line) for audited in found]
