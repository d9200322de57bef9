"""The searched space: drawing values, and recipes with values put in.

Values are drawn independently of the data and of each other. A value is addressed by its field's
dotted name, as in a complaint about a recipe: "method.radius", "training.learning_rate".
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dpdist.errors import UserError
from dpdist.recipe import Recipe, parse
from dpdist.search_options import Domain, TuneRecipe

Values = dict[str, Any]

# Fields that change what one training costs.
COSTLY = (
    "privacy.noise_multiplier",
    "training.batch_size",
    "training.steps",
    "training.epochs",
    "data.fraction",
)
_FIXED = {
    "name": "it names the run",
    "data": "all trials are about the same records (data.fraction may be searched)",
    "tune": "a search does not search itself",
    "resources": "it changes nothing that is learnt",
    "privacy.epsilon": "it is the target of training and search together",
    "privacy.delta": "the guarantee is stated at one delta",
    "privacy.neighbours": "the guarantee is stated for one neighbouring relation",
    "privacy.batch_cap": "no bound on searches covers capped batches",
    "privacy.group_size": "the guarantee is stated for one size of group",
    "privacy.budget": "the whole search is charged once",
    "privacy.budget_ceiling": "the whole search is charged once",
    "privacy.run_key": "keys are drawn, never chosen by their scores",
    "privacy.allow_large_delta": "it is not a hyper-parameter",
    "certify.alpha": "the error of a certificate is not chosen by its score",
}


def domain_value(domain: Domain, uniform: float) -> Any:
    """The value at `uniform` in [0, 1) of a domain's distribution."""
    if domain.choice is not None:
        return copy.deepcopy(domain.choice[int(uniform * len(domain.choice))])
    if domain.integer is not None:
        low, high = domain.integer
        return low + int(uniform * (high - low + 1))
    low, high = domain.ends
    if domain.log_uniform is not None:
        value = math.exp(math.log(low) + uniform * (math.log(high) - math.log(low)))
    else:
        value = low + uniform * (high - low)
    return min(max(value, low), high)


def draw(tune: TuneRecipe, uniform: Callable[[], float]) -> Values:
    """One independent value for each searched field. uniform: a fresh number in [0, 1) per call."""
    return {key: domain_value(domain, uniform()) for key, domain in tune.space.items()}


def fields(tune: TuneRecipe) -> Iterator[tuple[str, Domain]]:
    """Every field that the search sets, with its domain."""
    for key, domain in tune.space.items():
        for field in (key, *domain.also):
            yield field, domain


def with_values(recipe: Recipe, values: Mapping[str, Any], where: str) -> Recipe:
    """The recipe of one trial: the values put in, without the search itself.

    Raises UserError, beginning with `where`, for a value that the recipe does not take.
    """
    assert recipe.tune is not None
    raw = recipe.model_dump(mode="json")
    raw["tune"] = None
    for key, value in values.items():
        for field in (key, *recipe.tune.space[key].also):
            _put(raw, field, value, f"{where}: tune.space.{key}")
    return parse(raw, where)


def check_space(recipe: Recipe, where: str) -> None:
    """Raise UserError for a field that cannot be searched, or an end of a domain that the recipe
    does not take."""
    tune = recipe.tune
    assert tune is not None
    seen: set[str] = set()
    for field, _ in fields(tune):
        if field in seen:
            raise UserError(f"{where}: tune.space: {field} is set twice")
        seen.add(field)
        if (why := _not_searchable(field)) is not None:
            raise UserError(f"{where}: tune.space.{field}: cannot be searched: {why}")
    if "privacy.noise_multiplier" in seen and recipe.privacy.epsilon is not None:
        raise UserError(
            f"{where}: tune.space.privacy.noise_multiplier: cannot be searched when "
            "privacy.epsilon is the target, which fixes the noise; give privacy.noise_multiplier "
            "instead of epsilon"
        )
    first = {key: domain.ends[0] for key, domain in tune.space.items()}
    last = {key: domain.ends[-1] for key, domain in tune.space.items()}
    with_values(recipe, first, where)
    with_values(recipe, last, where)
    for key, domain in tune.space.items():
        for end in domain.ends:
            with_values(recipe, {**first, key: end}, where)


def _not_searchable(field: str) -> str | None:
    if field == "data.fraction":
        return None
    for prefix, why in _FIXED.items():
        if field == prefix or field.startswith(prefix + "."):
            return why
    return None


def _put(raw: dict[str, Any], dotted: str, value: Any, where: str) -> None:
    *parents, last = dotted.split(".")
    section: Any = raw
    for depth, parent in enumerate(parents):
        section = section.get(parent)
        if not isinstance(section, dict):
            raise UserError(f"{where}: the recipe has no {'.'.join(parents[: depth + 1])} section")
    if last not in section and parents != ["model", "options"]:
        raise UserError(f"{where}: the recipe has no such field")
    section[last] = copy.deepcopy(value)


def varies(tune: TuneRecipe, field: str) -> bool:
    """Whether the search sets this field."""
    return any(field == other for other, _ in fields(tune))


def ends_of(recipe: Recipe, field: str) -> tuple[Any, ...]:
    """Every listed value, or the two ends, of a field; its one value when it is not searched."""
    assert recipe.tune is not None
    for other, domain in fields(recipe.tune):
        if other == field:
            return domain.ends
    section, name = field.split(".")
    return (getattr(getattr(recipe, section), name),)
