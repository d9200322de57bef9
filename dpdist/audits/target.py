"""The target of an audit, a recipe's plan or a run, and the results of audits in a run folder.

A target states the proved and the claimed guarantee.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from dpdist.certification.evaluation import Evaluation, RunFolderLike
from dpdist.config.sections import AuditOptions
from dpdist.core.errors import UserError
from dpdist.privacy.card import AuditFinding
from dpdist.privacy.claims import Claim
from dpdist.privacy.guarantee import Guarantee
from dpdist.privacy.plan import PrivacyPlan
from dpdist.runs.folder import RunFolder, read_verified_ledger
from dpdist.runs.recipe import Recipe

ProgressCallback = Callable[[int, int], None]  # done, in total


# --- the target -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """The target of an audit.

    folder, model: of a trained run, and the hash of its model; None for a recipe.
    """

    recipe: Recipe
    plan: PrivacyPlan
    proved: Guarantee
    folder: RunFolder | None = None
    model: str | None = None

    def __post_init__(self) -> None:
        if (why := self.recipe.method.capabilities.not_releasable_reason) is not None:
            raise UserError(f"{self.recipe.name}: nothing to audit: {why}")
        if self.recipe.method.capabilities.steps_are_post_processing:
            raise UserError(
                f"{self.recipe.name}: nothing to audit: what is private was noised before the "
                "steps, and steps are what audits drive"
            )
        if math.isinf(self.proved.epsilon) and self.claimed_epsilon is None:
            raise UserError(
                f"{self.recipe.name}: nothing to audit against: nothing is proved (no noise, or no "
                "theorem), and the method claims nothing",
                see="how-to/audits.md#what-an-audit-can-and-cannot-say",
            )

    def build_result(self, options: AuditOptions, alpha: float, **found: Any) -> AuditFinding:
        """Return the finding of an audit at error alpha, with the guarantees that it tests."""
        return AuditFinding(
            kind=options.kind,
            view=options.adversary_view,
            exploratory=options.exploratory,
            alpha=alpha,
            delta=self.plan.delta,
            adjacency=self.proved.relation,
            proved=self.proved.epsilon,
            claimed=self.claimed_epsilon,
            model=self.model,
            **found,
        )

    @property
    def removal_assumptions(self) -> tuple[str, ...]:
        """Return the assumptions of audits that add or remove a record under another relation."""
        if self.proved.adjacency != "replace-one":
            return ()
        return ("to be replaced by a record that adds nothing is to be removed",)

    @property
    def claim(self) -> Claim | None:
        return self.recipe.method.claim(self.plan, self.proved)

    @property
    def claimed_epsilon(self) -> float | None:
        """Return the claimed epsilon, or None if no lower bound can refute it.

        The claim must be of the same adjacency, at no larger delta.
        """
        claim = None if self.claim is None else self.claim.claimed
        if claim is None or claim.adjacency != self.proved.adjacency:
            return None
        return claim.epsilon if claim.delta <= self.plan.delta else None


def target_of_recipe(recipe: Recipe, context: str) -> Target:
    """Return the target that a run of the recipe would execute. Raises UserError."""
    from dpdist.runs.recipe import make_plan
    from dpdist.training.job import check_trainable

    dataset, _ = check_trainable(recipe, context)
    plan = make_plan(recipe, len(dataset), context)
    return Target(recipe, plan, plan.guarantee())


def target_of_run(folder: RunFolder, proved: Guarantee) -> Target:
    """Return a trained run as a target. Raises UserError.

    proved: the guarantee of all that it released, including the search that chose it
    (`dpdist.reports.results`).
    """
    model = folder.require_trained().get("model")
    return Target(folder.read_recipe(), read_verified_ledger(folder).plan, proved, folder, model)


# --- results in a run folder ------------------------------------------------------------------


@dataclass(frozen=True)
class AuditResult(Evaluation):
    """RUN/audit/NAME/audit.json.

    It depends only on what the run's guarantee covers: on canaries by the number of correct
    guesses, not by scores or coins.
    """

    options: AuditOptions

    name: ClassVar[str] = "audit"
    file: ClassVar[str] = "audit.json"
    private: ClassVar[bool] = False

    @property
    def folder_name(self) -> str:
        return self.options.folder_name

    @classmethod
    def results_folder(cls, run: RunFolderLike) -> Path:
        return (run.private if cls.private else run.path) / "audit"

    @classmethod
    def read(cls, path: Path) -> AuditFinding:
        return AuditFinding.read(path)

    @classmethod
    def summary_rows(cls, results: Sequence[AuditFinding]) -> list[tuple[str, str]]:
        return [(f"audited, {audited.kind}", audited.summary_line) for audited in results]


@dataclass(frozen=True)
class PrivateAuditResult(AuditResult):
    """RUN/private/audit/NAME/audit.json, from more trainings than the run's guarantee covers."""

    private: ClassVar[bool] = True


def audit_result_of(options: AuditOptions) -> AuditResult:
    """Return the kind of result of an audit."""
    return (PrivateAuditResult if options.result_is_private else AuditResult)(options)
