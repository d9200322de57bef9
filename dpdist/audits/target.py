"""The target of an audit, a recipe's plan or a run, and the results of audits in a run folder.

A target states the proved and the claimed guarantee.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from dpdist.certification.evaluation import Evaluation, Folders
from dpdist.config.sections import AuditOptions
from dpdist.core.errors import UserError
from dpdist.privacy.card import Audited
from dpdist.privacy.claims import Claim
from dpdist.privacy.guarantee import Guarantee
from dpdist.privacy.plan import PrivacyPlan
from dpdist.runs.folder import RunFolder, read_released
from dpdist.runs.recipe import Recipe

# --- the target -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """folder, model: of a trained run, the hash of its model; None for a recipe."""

    recipe: Recipe
    plan: PrivacyPlan
    proved: Guarantee
    folder: RunFolder | None = None
    model: str | None = None

    def __post_init__(self) -> None:
        refuse_withheld(self.recipe)
        if self.recipe.method.local:
            raise UserError(
                f"{self.recipe.name}: nothing to audit: what is private was noised before the "
                "steps, and steps are what audits drive"
            )
        if math.isinf(self.proved.epsilon) and self.claimed is None:
            raise UserError(
                f"{self.recipe.name}: nothing to audit against: nothing is proved (no noise, or no "
                "theorem), and the method claims nothing"
            )

    def audited(self, options: AuditOptions, alpha: float, **found: Any) -> Audited:
        """The result of an audit at error alpha: `found`, beside what it is held against."""
        return Audited(
            kind=options.kind,
            view=options.sees,
            exploratory=options.exploratory,
            alpha=alpha,
            delta=self.plan.delta,
            neighbours=self.proved.relation,
            proved=self.proved.epsilon,
            claimed=self.claimed,
            model=self.model,
            **found,
        )

    @property
    def removal(self) -> tuple[str, ...]:
        """Return the assumptions of audits that add or remove a record under another relation."""
        if self.proved.neighbours != "replace-one":
            return ()
        return ("to be replaced by a record that adds nothing is to be removed",)

    @property
    def claim(self) -> Claim | None:
        return self.recipe.method.claim(self.plan, self.proved)

    @property
    def claimed(self) -> float | None:
        """The claimed epsilon, where it is claimed of the data sets that are told apart and at no
        larger delta: no lower bound refutes it otherwise."""
        claim = None if self.claim is None else self.claim.claimed
        if claim is None or claim.neighbours != self.proved.neighbours:
            return None
        return claim.epsilon if claim.delta <= self.plan.delta else None


def refuse_planted(recipe: Recipe, what: str) -> None:
    """Raise UserError for a recipe that has canaries behind its records."""
    if recipe.planted is not None:
        raise UserError(
            f"{recipe.name}: audit.kind: canaries plants records in this training; {what} are of a "
            "recipe without it"
        )


def refuse_withheld(recipe: Recipe) -> None:
    """Raise UserError for a recipe whose models never leave: nobody sees a step or a model."""
    if recipe.method.withheld is not None:
        raise UserError(f"{recipe.name}: nothing to audit: {recipe.method.withheld}")


def of_recipe(recipe: Recipe, where: str) -> Target:
    """Return the target that a run of the recipe would execute. Raises UserError."""
    from dpdist.runs.recipe import make_plan
    from dpdist.training.job import check_trainable

    dataset, _ = check_trainable(recipe, where)
    plan = make_plan(recipe, len(dataset), where)
    return Target(recipe, plan, plan.guarantee())


def of_run(folder: RunFolder, proved: Guarantee) -> Target:
    """A trained run. proved: of all that it released, and of the search that chose it if one did
    (`dpdist.reports.facts`). Raises UserError."""
    model = folder.require_trained().get("model")
    return Target(folder.read_recipe(), read_released(folder).plan, proved, folder, model)


# --- results in a run folder ------------------------------------------------------------------


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
