"""The privacy plan that a recipe makes on a number of records: neither data, torch nor Ray.

Training, searches, dry runs and previews all take the cost of a training from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpdist.base.errors import UserError
from dpdist.base.fields import Section
from dpdist.methods.catalogue import DEFAULT
from dpdist.privacy.calibrate import least_noise
from dpdist.privacy.plan import PrivacyPlan
from dpdist.privacy.releases import GaussianSteps
from dpdist.runs.recipe import Recipe, check_against_data, field_error, parse, step_count


def plan_at(recipe: Recipe, records: int, noise_multiplier: float) -> PrivacyPlan:
    """What one training of the recipe executes with this noise, whatever its privacy section says
    about noise. Raises ValueError for what no plan allows."""
    privacy, batch_size = recipe.privacy, recipe.training.batch_size
    records = privacy.nominal_records or records
    if batch_size > records:
        raise ValueError(f"batch_size {batch_size} is larger than the {records} records")
    rate, cap = batch_size / records, privacy.batch_cap
    steps = GaussianSteps(step_count(recipe, records), noise_multiplier, rate, cap)
    return PrivacyPlan(
        records,
        recipe.method.cost(steps),
        privacy.delta,
        privacy.sensitivity,
        privacy.neighbours,
        privacy.nominal_records is not None,
    )


def make_plan(recipe: Recipe, records: int, where: str) -> PrivacyPlan:
    """The plan of a recipe on `records` records, as `settle` finds it."""
    return settle(recipe, records, where)[1]


def settle(recipe: Recipe, records: int, where: str) -> tuple[float, PrivacyPlan]:
    """The noise multiplier of a recipe on `records` records, calibrated when epsilon is given, and
    the plan with it. Of the plan's steps only the method knows what noise each has.

    With privacy.nominal_records nothing in it depends on `records`. Raises UserError when the
    recipe does not fit the data or the target cannot be reached.
    """
    privacy = recipe.privacy
    check_against_data(recipe, privacy.nominal_records or records, where)
    noise = privacy.noise_multiplier
    if noise is None:
        assert privacy.epsilon is not None

        def plan_with(noise: float) -> PrivacyPlan:
            return plan_at(recipe, records, noise)

        try:
            noise = least_noise(plan_with, privacy.epsilon)
        except ValueError as error:
            raise field_error(where, "privacy.epsilon", str(error), privacy.epsilon) from error
    try:
        return noise, plan_at(recipe, records, noise)
    except ValueError as error:
        raise UserError(f"{where}: privacy: {error}") from error


def check_plan(
    recipe: Recipe, plan: PrivacyPlan, noise_multiplier: float | None, where: str
) -> None:
    """Raise UserError unless the recipe makes this plan, on the plan's number of records.

    noise_multiplier: of its steps, as it was found for privacy.epsilon; not needed where the recipe
    gives it. None: it is found again.
    """
    given = recipe.privacy.noise_multiplier
    noise = noise_multiplier if given is None else given
    try:
        if noise is None:
            made = make_plan(recipe, plan.records, where)
        else:
            made = plan_at(recipe, plan.records, noise)
    except ValueError as error:
        raise UserError(f"{where}: no plan of this run's recipe: {error}") from error
    if made != plan:
        before, now = plan.to_dict(), made.to_dict()
        changed = sorted(key for key in before | now if before.get(key) != now.get(key))
        raise UserError(
            f"{where}: {', '.join(changed)}: must be what the run's recipe makes; put back "
            "plan and recipe as the run was begun with them, or begin a new run under another "
            "--name"
        )


def refuse_answers(plan: PrivacyPlan, where: str) -> None:
    """Raise UserError for a training that pays for answers: as one of many it has nobody to ask."""
    if plan.answers:
        raise UserError(
            f"{where}: each of many trainings would need teachers of its own; take another method"
        )


def training_alone(recipe: Recipe) -> Recipe:
    """The recipe of its training and nothing else."""
    return parse(_raw(recipe), recipe.name)


def ordinary(recipe: Recipe, sections: Mapping[str, Section] | None = None) -> Recipe:
    """The recipe of the same training by ordinary SGD: without method, clip and noise.

    sections: in place of its own, by name.
    """
    raw = _raw(recipe)
    for name, section in (sections or {}).items():
        raw[name] = section.model_dump(mode="json")
    if sections:
        raw["public"] = None  # about the recipe's own model
    raw["method"] = DEFAULT.model_dump(mode="json")
    raw["privacy"] |= {
        "epsilon": None, "noise_multiplier": 0.0, "clipping": "none", "batch_cap": None
    }  # fmt: skip
    return parse(raw, recipe.name)


def _raw(recipe: Recipe) -> dict[str, Any]:
    return recipe.model_dump(mode="json") | dict.fromkeys(("certify", "tune", "audit"))
