"""The registry of audits and evaluations; a new kind is its class and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dpdist.attacks.settings import AttackSettings, CheckSettings
from dpdist.audits import canaries, mechanism
from dpdist.audits.membership import Membership
from dpdist.audits.target import AuditResult, PrivateAuditResult, ProgressCallback, Target
from dpdist.certification.evaluation import Evaluation
from dpdist.config.sections import AuditOptions, CanaryAudit, ManyRunsAudit, MechanismAudit
from dpdist.core.errors import UserError
from dpdist.core.files import quoted
from dpdist.poisoning.evaluation import Poisoning
from dpdist.privacy.card import AuditFinding
from dpdist.runs.recipe import Recipe, parse_section

EVALUATIONS: tuple[type[Evaluation], ...] = (
    AttackSettings, CheckSettings, AuditResult, PrivateAuditResult, Membership, Poisoning
)  # fmt: skip

# Options, target, the folder of its files, and a callback.
AuditFunction = Callable[[Any, Target, Path, ProgressCallback], AuditFinding]

AUDITS: Mapping[str, tuple[type[AuditOptions], AuditFunction]] = {
    "mechanism": (MechanismAudit, mechanism.audit_mechanism),
    "canaries": (CanaryAudit, canaries.audit_canaries),
    "many-runs": (ManyRunsAudit, canaries.audit_many_runs),
}


def resolve_audit_options(
    recipe: Recipe, kind: str | None, overrides: Mapping[str, Any] | None = None
) -> AuditOptions:
    """Return the recipe's audit section, or that of a different kind, with overrides.

    Without either, return those of a mechanism audit. Raises UserError.
    """
    section: dict[str, Any] = {"kind": kind or "mechanism"}
    if recipe.audit is not None and kind in (None, recipe.audit.kind):
        section = recipe.audit.model_dump(mode="json")
    section |= overrides or {}
    named = section["kind"]
    if named not in AUDITS:
        raise UserError(f"audit.kind: must be one of {', '.join(AUDITS)}, got {quoted(named)}")
    return parse_section(AUDITS[named][0], section, "audit")


def run_audit(
    options: AuditOptions, target: Target, output: Path, report_progress: ProgressCallback
) -> AuditFinding:
    """Return the finding of an audit, and write it into `output`. Raises UserError."""
    recipe = target.recipe
    if recipe.user_unit is not None and not options.audits_users:
        raise UserError(
            f"{recipe.name}: privacy.unit: user is not supported by audits of kind "
            f"{options.kind}, which distinguish single records: audit its mechanism or gradient "
            "canaries, or a run of the same recipe with unit: record",
            see="explanation/privacy.md#a-person-as-the-unit",
        )
    found = AUDITS[options.kind][1](options, target, output, report_progress)
    found.write(output / AuditResult.file)
    return found
