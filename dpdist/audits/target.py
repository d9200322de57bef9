"""What is audited: a recipe's plan, or a run, with what is proved and claimed of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpdist.base.errors import UserError
from dpdist.privacy.claims import Claim
from dpdist.privacy.guarantee import Guarantee
from dpdist.privacy.plan import PrivacyPlan
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import Recipe
from dpdist.runs.released import read_released


@dataclass(frozen=True)
class Target:
    """folder, model: of a trained run, the hash of its model; None for a recipe."""

    recipe: Recipe
    plan: PrivacyPlan
    proved: Guarantee
    folder: RunFolder | None = None
    model: str | None = None

    def __post_init__(self) -> None:
        if math.isinf(self.proved.epsilon) and self.claimed is None:
            raise UserError(
                f"{self.recipe.name}: nothing to audit against: nothing is proved (no noise, or no "
                "theorem), and the method claims nothing"
            )

    @property
    def claim(self) -> Claim | None:
        return self.recipe.method.claim(self.plan, self.proved)

    @property
    def claimed(self) -> float | None:
        """The claimed epsilon."""
        claim = self.claim
        return None if claim is None or claim.claimed is None else claim.claimed.epsilon


def of_recipe(recipe: Recipe, where: str) -> Target:
    """What a run of the recipe would execute. Raises UserError."""
    from dpdist.training.job import check_trainable
    from dpdist.training.planning import make_plan

    dataset, _ = check_trainable(recipe, where)
    plan = make_plan(recipe, len(dataset), where)
    return Target(recipe, plan, plan.guarantee())


def of_run(folder: RunFolder) -> Target:
    """A trained run, by its ledger. Raises UserError."""
    model = folder.require_trained().get("model")
    released = read_released(folder)
    proved = released.ledger.guarantee(released.plan)
    return Target(folder.read_recipe(), released.plan, proved, folder, model)
