"""The privacy plan that a recipe makes on a number of records: neither data, torch nor Ray.

Training, searches, dry runs and previews all take the cost of a training from here.
"""

from __future__ import annotations

from dpdist.errors import UserError
from dpdist.privacy.calibrate import noise_multiplier_for
from dpdist.privacy.plan import PrivacyPlan
from dpdist.recipe import Recipe, check_against_data, field_error, step_count


def plan_at(recipe: Recipe, records: int, noise_multiplier: float) -> PrivacyPlan:
    """What one training of the recipe executes with this noise, whatever its privacy section says
    about noise. Raises ValueError for what no plan allows."""
    privacy = recipe.privacy
    records = privacy.nominal_records or records
    return PrivacyPlan.dp_sgd(
        records=records,
        batch_size=recipe.training.batch_size,
        noise_multiplier=noise_multiplier,
        steps=step_count(recipe, records),
        delta=privacy.delta,
        clip_norm=privacy.sensitivity,
        neighbours=privacy.neighbours,
        batch_cap=privacy.batch_cap,
        besides=recipe.method.besides,
        nominal=privacy.nominal_records is not None,
    )


def make_plan(recipe: Recipe, records: int, where: str) -> PrivacyPlan:
    """The plan of a recipe on `records` records; the noise is calibrated when epsilon is given.

    With privacy.nominal_records nothing in it depends on `records`. Raises UserError when the
    recipe does not fit the data or the target cannot be reached.
    """
    privacy = recipe.privacy
    records = privacy.nominal_records or records
    check_against_data(recipe, records, where)
    noise_multiplier = privacy.noise_multiplier
    if noise_multiplier is None:
        assert privacy.epsilon is not None
        try:
            noise_multiplier = noise_multiplier_for(
                privacy.epsilon,
                records=records,
                batch_size=recipe.training.batch_size,
                steps=step_count(recipe, records),
                delta=privacy.delta,
                neighbours=privacy.neighbours,
                batch_cap=privacy.batch_cap,
                besides=recipe.method.besides,
            )
        except ValueError as error:
            raise field_error(where, "privacy.epsilon", str(error), privacy.epsilon) from error
    try:
        return plan_at(recipe, records, noise_multiplier)
    except ValueError as error:
        raise UserError(f"{where}: privacy: {error}") from error
