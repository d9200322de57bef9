"""The searched space: drawing values, and recipes with values put in.

Values are drawn independently of the data and of each other. A value is addressed by its field's
dotted name, as in a complaint about a recipe: "method.radius", "training.learning_rate".
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dpdist.base.errors import UserError
from dpdist.methods.base import Method
from dpdist.privacy.phases import Phase
from dpdist.privacy.releases import GaussianSteps
from dpdist.runs.recipe import Recipe, parse
from dpdist.sections.search import Domain, TuneRecipe

Values = dict[str, Any]

# Fields that change what one training costs.
COSTLY = (
    "privacy.noise_multiplier",
    "training.batch_size",
    "training.steps",
    "training.epochs",
    "data.fraction",
)
# Fields that are the same in all trials, whichever way a trial's values are given.
_FIXED = {
    "name": "it names the run",
    "data": "all trials are about the same records (data.fraction may be searched)",
    "tune": "a search does not search itself",
    "public": "what is trained on public records is trained once, before the search",
    "resources": "it changes nothing that is learnt",
    "privacy.epsilon": "it is the target of training and search together",
    "privacy.delta": "the guarantee is stated at one delta",
    "privacy.neighbours": "the guarantee is stated for one neighbouring relation",
    "privacy.batch_cap": "a trial with another cap would need a price of its own",
    "privacy.group_size": "the guarantee is stated for one size of group",
    "privacy.budget": "the whole search is charged once",
    "privacy.budget_ceiling": "the whole search is charged once",
    "privacy.budget_delta": "the whole search is charged once",
    "privacy.budget_composition": "the whole search is charged once",
    "privacy.run_key": "keys are drawn, never chosen by their scores",
    "privacy.allow_large_delta": "it is not a hyper-parameter",
    "privacy.nominal_records": "it is declared once, for the data set",
    "certify.alpha": "the error of a certificate is not chosen by its score",
}
# Ranges of batch sizes and shares are cut into intervals this narrow (ratio of their ends).
_INTERVAL = 1.05
_MIDDLE = (math.sqrt(5) - 1) / 2  # somewhere between the ends of a range


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


def fields(tune: TuneRecipe) -> Iterator[tuple[str, str]]:
    """Every field that the search sets, with the name of its entry in the space."""
    for key, domain in tune.space.items():
        for field in (key, *domain.also):
            yield field, key


def probes(tune: TuneRecipe) -> Iterator[Values]:
    """Values that show what the space contains: every listed value and both ends of every range,
    one entry at a time, all last ones together, and a number between the ends of each range."""
    first = {key: domain.ends[0] for key, domain in tune.space.items()}
    yield first
    yield {key: domain.ends[-1] for key, domain in tune.space.items()}
    for key, domain in tune.space.items():
        for end in domain.ends[1:]:
            yield {**first, key: end}
        if domain.choice is None:
            yield {**first, key: domain_value(domain, _MIDDLE)}


def with_values(recipe: Recipe, values: Mapping[str, Any], where: str) -> Recipe:
    """The recipe of one trial: the values put in, without the search itself.

    Raises UserError, beginning with `where`, for a value that the recipe does not take, and for one
    that changes a field that is the same in all trials: also by a section that leaves it out.
    """
    assert recipe.tune is not None
    raw = recipe.model_dump(mode="json")
    raw["tune"] = None
    for key, value in values.items():
        for field in (key, *recipe.tune.space[key].also):
            _put(raw, field, value, f"{where}: tune.space.{key}")
    trial = parse(raw, where)
    try:  # a method that is listed may be none for a search
        trial.method.check(trial.model_copy(update={"tune": recipe.tune}))
    except ValueError as error:
        raise UserError(f"{where}: tune.space: {error}") from error
    _check_fixed(recipe, trial, where)
    return trial


def check_space(recipe: Recipe, where: str) -> None:
    """Raise UserError for a field that cannot be searched, or an end of a domain that the recipe
    does not take."""
    tune = recipe.tune
    assert tune is not None
    seen: list[str] = []
    for field, _ in fields(tune):
        for other in seen:
            if _within(field, other) or _within(other, field):
                also = "" if field == other else f", alone and with {min(field, other, key=len)}"
                raise UserError(
                    f"{where}: tune.space: {max(field, other, key=len)} is set twice{also}"
                )
        seen.append(field)
        if (why := _why_fixed(recipe, field)) is not None:
            raise UserError(f"{where}: tune.space.{field}: cannot be searched: {why}")
    for values in probes(tune):
        with_values(recipe, values, where)


def _within(field: str, section: str) -> bool:
    return field == section or field.startswith(section + ".")


def _why_fixed(recipe: Recipe, field: str) -> str | None:
    if field == "data.fraction":
        return None
    if field == "privacy.noise_multiplier" and recipe.privacy.epsilon is not None:
        return (
            "privacy.epsilon is the target, which fixes the noise; give privacy.noise_multiplier "
            "instead of epsilon"
        )
    return next((why for prefix, why in _FIXED.items() if _within(field, prefix)), None)


def _check_fixed(recipe: Recipe, trial: Recipe, where: str) -> None:
    """Raise UserError when a trial differs from the recipe in what a search may not change."""
    mine = _leaves(recipe.model_dump(mode="json", exclude={"tune"}))
    other = _leaves(trial.model_dump(mode="json", exclude={"tune"}))
    assert recipe.tune is not None
    for leaf in sorted(mine.keys() | other.keys()):
        if mine.get(leaf) == other.get(leaf) or (why := _why_fixed(recipe, leaf)) is None:
            continue
        keys = [key for field, key in fields(recipe.tune) if _within(leaf, field)]
        raise UserError(
            f"{where}: {'.'.join(['tune.space', *keys[:1]])}: makes {leaf} {other.get(leaf)}, the "
            f"recipe says {mine.get(leaf)}; it cannot be searched: {why}"
        )


def _leaves(value: Any, name: str = "") -> dict[str, Any]:
    """The fields of nested sections by their dotted names."""
    if not isinstance(value, dict):
        return {name: value}
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found |= _leaves(inner, f"{name}.{key}" if name else str(key))
    return found


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


# --- what changes the cost of a trial

Box = dict[str, tuple[Any, Any]]  # costly field -> its least and greatest value


def own_box(recipe: Recipe) -> Box:
    """The recipe's own setting, as a box of one point."""
    box = {}
    for field in COSTLY:
        section, name = field.split(".")
        value = getattr(getattr(recipe, section), name)
        box[field] = (value, value)
    return box


def cost_boxes(recipe: Recipe, where: str) -> list[Box]:
    """Boxes that together hold the costly fields of every trial, whatever the searched fields are
    called: listed values are read off the trials' own recipes, ranges are cut into intervals."""
    tune = recipe.tune
    assert tune is not None
    first = {key: domain.ends[0] for key, domain in tune.space.items()}
    boxes = [own_box(recipe)]
    for key, domain in tune.space.items():
        touched = [f for f in COSTLY if any(_within(f, field) for field in (key, *domain.also))]
        if not touched:
            continue
        choices: list[Box] = []
        if domain.choice is not None:
            for value in domain.choice:
                point = own_box(with_values(recipe, {**first, key: value}, where))
                choice = {field: point[field] for field in touched}
                choices += [choice] * (choice not in choices)
        else:
            narrow = {"training.batch_size", "data.fraction"} & set(touched)
            pieces = _intervals(*domain.ends) if narrow else [domain.ends]
            choices = [dict.fromkeys(touched, piece) for piece in pieces]
        boxes = [{**box, **choice} for box, choice in itertools.product(boxes, choices)]
    return boxes


def methods(recipe: Recipe, where: str) -> list[Method]:
    """The methods of all trials, one for each cost: noise splits are searched by them.

    Raises UserError for a range of a field that changes what the method costs beside its steps: of
    a listed value the cost is known, between two of them it is not.
    """
    tune = recipe.tune
    assert tune is not None
    first = {key: domain.ends[0] for key, domain in tune.space.items()}
    touching = {
        key: tune.space[key]
        for field, key in fields(tune)
        if _within(field, "method") or _within("method", field)
    }
    ranges = {key: domain for key, domain in touching.items() if domain.choice is None}
    lists = {key: domain.choice for key, domain in touching.items() if domain.choice is not None}
    found = {unit_cost(recipe.method): recipe.method} if not lists else {}
    for listed in itertools.product(*lists.values()):
        values = {**first, **dict(zip(lists, listed, strict=True))}
        method = with_values(recipe, values, where).method
        for key, domain in ranges.items():
            for value in (domain.ends[-1], domain_value(domain, _MIDDLE)):
                other = with_values(recipe, {**values, key: value}, where).method
                if unit_cost(other) != unit_cost(method):
                    raise UserError(
                        f"{where}: tune.space.{key}: changes what the method costs beside its "
                        "steps; list its values (choice) in place of a range"
                    )
        found.setdefault(unit_cost(method), method)
    return list(found.values())


def unit_cost(method: Method) -> tuple[Phase, ...]:
    """What tells apart methods that cost differently with the same steps."""
    return method.cost(GaussianSteps(1, 1.0, 1.0))


def _intervals(low: float, high: float) -> list[tuple[float, float]]:
    """A range cut into intervals whose ends differ little."""
    edges = [float(low)]
    while edges[-1] < high:
        edges.append(min(float(high), edges[-1] * _INTERVAL))
    return list(itertools.pairwise(edges)) or [(low, high)]
