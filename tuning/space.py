"""The search space of a private search, and its cost before anything runs: no data, torch or Ray.

Values are drawn independently of the data and of each other. A value is addressed by its field's
dotted name, as in an error about a recipe: "method.radius", "training.learning_rate".

The base mechanism of a search is one trial: training, and scoring by held-out private records (or
by public ones, without privacy cost). Training and held-out records are separated by a hash of the
record (of its user, if users are the unit), so a record or user is used by one of the two: the
worse counts, not their sum. With a secret random number of trials the privacy cost of the best
trial is what `dpdist.privacy.calibration` computes; with a fixed one, plain composition.

If the search varies the cost of a trial (noise, batch size, steps, fraction of the data, how a
method splits its budget), the base is the pointwise maximum of the trials' profiles. With a target
epsilon each trial gets the least noise with which its profile stays below that of the recipe's own
setting. Every trial's own plan is checked against the bound `TrialLimit` before it starts.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product
from typing import TYPE_CHECKING, Any

from dpdist.config.search import Domain, NumTrialsRecipe, TuneRecipe
from dpdist.core.errors import UserError
from dpdist.methods.base import Method
from dpdist.privacy.calibration import calibrate_noise, combine_training_and_scoring, repeat_phases
from dpdist.privacy.guarantee import Guarantee
from dpdist.privacy.phases import GaussianSteps, Phase, WorstOf, walk_phases
from dpdist.privacy.plan import PrivacyPlan
from dpdist.runs.recipe import (
    Recipe,
    checked_class_rates,
    flatten,
    parse_recipe,
    plan_with_noise,
    step_count,
)

if TYPE_CHECKING:
    from dpdist.privacy.pld import PrivacyLoss


# --- the space --------------------------------------------------------------------------------


TrialValues = dict[str, Any]

# Fields that change the privacy cost of one training.
COST_FIELDS = (
    "privacy.noise_multiplier",
    "training.batch_size",
    "training.steps",
    "training.epochs",
    "data.fraction",
)
# Fields that must be the same in all trials.
_UNSEARCHABLE_FIELDS = {
    "name": "it names the run",
    "data": "all trials use the same records (data.fraction may be searched)",
    "tune": "a search does not search itself",
    "public": "what is trained on public records is trained once, before the search",
    "statistics": "they are bought once, before the search",
    "resources": "it does not affect the trained model",
    "certify.alpha": "the error of a certificate must not be chosen by its score",
}
_SEARCHABLE_PRIVACY = ("privacy.noise_multiplier", "privacy.clip_norm", "privacy.clipping")
_PROBE_POSITION = (math.sqrt(5) - 1) / 2  # somewhere between the ends of a range


def domain_value(domain: Domain, uniform: float) -> Any:
    """Return the value of a domain's distribution at `uniform` in [0, 1)."""
    if domain.choice is not None:
        return copy.deepcopy(domain.choice[int(uniform * len(domain.choice))])
    if domain.integer is not None:
        low, high = domain.integer
        return low + int(uniform * (high - low + 1))
    low, high = domain.values_or_bounds
    if domain.log_uniform is not None:
        value = math.exp(math.log(low) + uniform * (math.log(high) - math.log(low)))
    else:
        value = low + uniform * (high - low)
    return min(max(value, low), high)


def draw_values(tune: TuneRecipe, uniform: Callable[[], float]) -> TrialValues:
    """Return one independent value per searched field. uniform: returns new numbers in [0, 1)."""
    return {key: domain_value(domain, uniform()) for key, domain in tune.space.items()}


def iter_searched_fields(tune: TuneRecipe) -> Iterator[tuple[str, str]]:
    """Yield every field that the search sets, with the name of its entry in the space."""
    for key, domain in tune.space.items():
        for field in (key, *domain.linked):
            yield field, key


def iter_probe_values(tune: TuneRecipe) -> Iterator[TrialValues]:
    """Yield values that represent the space.

    They are every listed value and both ends of every range, one entry at a time, all last ones
    together, and a number between the ends of each range.
    """
    first = {key: domain.values_or_bounds[0] for key, domain in tune.space.items()}
    yield first
    yield {key: domain.values_or_bounds[-1] for key, domain in tune.space.items()}
    for key, domain in tune.space.items():
        for end in domain.values_or_bounds[1:]:
            yield {**first, key: end}
        if domain.choice is None:
            yield {**first, key: domain_value(domain, _PROBE_POSITION)}


def apply_values(recipe: Recipe, values: Mapping[str, Any], context: str) -> Recipe:
    """Return the recipe of one trial, with the values and without the search.

    Raises UserError, beginning with `context`, for a value that the recipe does not accept, and for
    one that changes a field that must be the same in all trials, also by a section that omits it.
    """
    assert recipe.tune is not None
    raw = recipe.model_dump(mode="json")
    raw["tune"] = None
    for key, value in values.items():
        domain = recipe.tune.space[key]
        for field in (key, *domain.linked):
            _set_field(raw, field, domain.value_of(field, value), f"{context}: tune.space.{key}")
    trial = parse_recipe(raw, context)
    try:  # a listed method may not support a search
        trial.method.check(trial.model_copy(update={"tune": recipe.tune}))
    except ValueError as error:
        raise UserError(f"{context}: tune.space: {error}") from error
    _check_unsearchable_fields(recipe, trial, context)
    return trial


def check_space(recipe: Recipe, context: str) -> None:
    """Raise UserError for a field that cannot be searched, or a value that is not accepted."""
    tune = recipe.tune
    assert tune is not None
    seen: list[str] = []
    for field, _ in iter_searched_fields(tune):
        for other in seen:
            if _is_within(field, other) or _is_within(other, field):
                also = "" if field == other else f", alone and with {min(field, other, key=len)}"
                raise UserError(
                    f"{context}: tune.space: {max(field, other, key=len)} is set twice{also}"
                )
        seen.append(field)
        if (why := _unsearchable_reason(recipe, field)) is not None:
            raise UserError(
                f"{context}: tune.space.{field}: cannot be searched: {why}",
                see="how-to/tuning.md#a-recipe-with-a-search",
            )
    for values in iter_probe_values(tune):
        apply_values(recipe, values, context)


def _is_within(field: str, section: str) -> bool:
    return field == section or field.startswith(section + ".")


def _unsearchable_reason(recipe: Recipe, field: str) -> str | None:
    if field == "data.fraction":
        return None
    if field == "privacy.noise_multiplier" and recipe.privacy.epsilon is not None:
        return (
            "privacy.epsilon is the target, which fixes the noise; give privacy.noise_multiplier "
            "instead of epsilon"
        )
    if field.startswith("privacy.") and field not in _SEARCHABLE_PRIVACY:
        return "it is a term of the guarantee of training and search together"
    return next(
        (why for prefix, why in _UNSEARCHABLE_FIELDS.items() if _is_within(field, prefix)), None
    )


def _check_unsearchable_fields(recipe: Recipe, trial: Recipe, context: str) -> None:
    """Raise UserError if a trial differs from the recipe in a field that cannot be searched."""
    mine = dict(flatten(recipe.model_dump(mode="json", exclude={"tune"})))
    other = dict(flatten(trial.model_dump(mode="json", exclude={"tune"})))
    assert recipe.tune is not None
    for leaf in sorted(mine.keys() | other.keys()):
        if mine.get(leaf) == other.get(leaf) or (why := _unsearchable_reason(recipe, leaf)) is None:
            continue
        keys = [key for field, key in iter_searched_fields(recipe.tune) if _is_within(leaf, field)]
        raise UserError(
            f"{context}: {'.'.join(['tune.space', *keys[:1]])}: makes {leaf} {other.get(leaf)}, "
            f"the recipe says {mine.get(leaf)}; it cannot be searched: {why}",
            see="how-to/tuning.md#a-recipe-with-a-search",
        )


def _set_field(raw: dict[str, Any], dotted: str, value: Any, context: str) -> None:
    *parents, last = dotted.split(".")
    section: Any = raw
    for depth, parent in enumerate(parents):
        section = section.get(parent)
        if not isinstance(section, dict):
            raise UserError(
                f"{context}: the recipe has no {'.'.join(parents[: depth + 1])} section"
            )
    section[last] = copy.deepcopy(value)


# --- what changes the cost of a trial


def trial_cost(recipe: Recipe) -> tuple[Any, ...]:
    """Return the settings of a recipe that determine the privacy cost of one training."""
    fields = (field.split(".") for field in COST_FIELDS)
    own = (getattr(getattr(recipe, section), name) for section, name in fields)
    return (*own, one_step_cost(recipe.method))


def settings_of_space(
    tune: TuneRecipe, recipe_of: Callable[[TrialValues], Recipe], costly: Sequence[str], where: str
) -> tuple[Recipe, ...]:
    """Return the recipes that the space's values give, one for each privacy cost of a training.

    Args:
        tune: with the space.
        recipe_of: returns the recipe of a trial with these values.
        costly: entries of the space that may change the cost; their listed values are combined.
        where: name of the space, for error messages.

    Raises:
        UserError: a range changes the cost, which is then unknown between its ends.
    """
    first = {key: domain.values_or_bounds[0] for key, domain in tune.space.items()}
    domains = {key: tune.space[key] for key in costly}
    lists = {key: domain.choice for key, domain in domains.items() if domain.choice is not None}
    found: dict[tuple[Any, ...], Recipe] = {}
    for listed in product(*lists.values()):
        values = {**first, **dict(zip(lists, listed, strict=True))}
        recipe = recipe_of(values)
        for key, domain in domains.items():
            if key in lists:
                continue
            for value in (domain.values_or_bounds[-1], domain_value(domain, _PROBE_POSITION)):
                if trial_cost(recipe_of({**values, key: value})) != trial_cost(recipe):
                    raise UserError(
                        f"{where}.{key}: changes a trial's privacy cost; list its values (choice) "
                        "instead of a range"
                    )
        found.setdefault(trial_cost(recipe), recipe)
    return tuple(found.values())


def settings_of_recipe(recipe: Recipe, context: str) -> tuple[Recipe, ...]:
    """Return the recipes of trials, one for each privacy cost. Raises as `settings_of_space`."""
    tune = recipe.tune
    assert tune is not None
    costly = [
        key
        for key, domain in tune.space.items()
        if any(
            _is_within(one, field) or _is_within(field, one)
            for one in (*COST_FIELDS, "method")
            for field in (key, *domain.linked)
        )
    ]
    return settings_of_space(
        tune, lambda values: apply_values(recipe, values, context), costly, f"{context}: tune.space"
    )


def one_step_cost(method: Method) -> tuple[Phase, ...]:
    """Return a method's phases for one step, by which costs of methods are compared."""
    return method.cost(GaussianSteps(1, 1.0, 1.0))


# --- the cost ---------------------------------------------------------------------------------


# Settings whose sampling rates differ by less than this factor are covered by one.
_RATE_RATIO = 1.05
# This fraction of the guarantee's delta is a floor below which no trial's profile counts, so that
# tiny deltas do not determine its noise.
_FLOOR_FRACTION = 1e-3
_NOISE_TOLERANCE = 1e-3  # relative, on a trial's noise
_MAX_NOISE_MULTIPLIER = 1e6  # of a trial's noise


@dataclass(frozen=True)
class RecordCounts:
    """Hold public numbers of records; of users if a user is the unit.

    total: before anything is held out. count_training_records: returns the real number of training
    records from the fraction to train on; without it, numbers are expected.
    """

    total: int
    private_eval_fraction: float
    count_training_records: Callable[[float], int] | None = None

    def training_records(self, fraction: float) -> int:
        """Return the number of records that a trial trains on. fraction: data.fraction."""
        if self.count_training_records is not None:
            return self.count_training_records(fraction)
        return max(1, math.floor(self.total * (1 - self.private_eval_fraction) * fraction))


def private_eval_fraction_of(recipe: Recipe) -> float:
    """Return the fraction of the private records that no trial trains on.

    It is data.private_eval_fraction, and of the others those that trials are scored on.
    """
    assert recipe.tune is not None
    score, aside = recipe.tune.score, recipe.data.private_eval_fraction
    own = score.public is not None or score.function is not None
    return aside if own else aside + score.private_eval_fraction * (1 - aside)


@dataclass(frozen=True)
class SearchCost:
    """Compute the privacy cost of the search in a recipe's `tune` section.

    settings: recipes of trials, one for each cost; by default those of the space.

    Properties raise UserError, beginning with `context`, for a target out of reach, or a mechanism
    that no theorem covers.
    """

    recipe: Recipe
    record_counts: RecordCounts
    num_trials: NumTrialsRecipe
    context: str = "recipe"
    settings: tuple[Recipe, ...] = ()

    # --- what varies

    @cached_property
    def _settings(self) -> tuple[Recipe, ...]:
        """Return recipes of trials, one for each privacy cost."""
        return self.settings or settings_of_recipe(self.recipe, self.context)

    @cached_property
    def _methods(self) -> dict[tuple[Phase, ...], Method]:
        """Return methods of trials, by their cost of one step."""
        found: dict[tuple[Phase, ...], Method] = {}
        for each in self._settings:
            found.setdefault(one_step_cost(each.method), each.method)
        return found

    @cached_property
    def varies_cost(self) -> bool:
        """Return whether the search changes the privacy cost of one training."""
        return {trial_cost(each) for each in self._settings} != {trial_cost(self.recipe)}

    @property
    def _training_records(self) -> int:
        return self.record_counts.training_records(self.recipe.data.fraction)

    def _training_phases(self, noise: float) -> tuple[Phase, ...]:
        """Return the phases of training in the base mechanism, at the recipe's noise multiplier."""
        if self.varies_cost and self.recipe.privacy.epsilon is None:
            return (WorstOf(tuple(self._worst_case_phases())),)
        own = self._recipe_plan(self.recipe, self._training_records, noise).phases
        return (WorstOf((own,), self._delta_floor),) if self.varies_cost else own

    def _worst_case_phases(self) -> list[tuple[Phase, ...]]:
        """Return phases such that every setting in the space is a post-processing of one.

        Settings of nearly the same rate are covered by one.
        """
        near: dict[tuple[float, int], tuple[float, int]] = {}
        for each in self._settings:
            records = self.record_counts.training_records(each.data.fraction)
            rate, steps = min(1.0, each.training.batch_size / records), step_count(each, records)
            noise = each.privacy.noise_multiplier
            assert noise is not None  # it is the recipe's, which has no target
            place = (noise, math.floor(math.log(rate) / math.log(_RATE_RATIO)))
            known = near.get(place, (0.0, 0))
            near[place] = (max(rate, known[0]), max(steps, known[1]))
        cap, found = self.recipe.privacy.batch_cap, set[GaussianSteps]()
        for (noise, _), (rate, steps) in near.items():
            # Each rate increases with the mean rate.
            classes = checked_class_rates(self.recipe, rate, self.context)
            highest = rate if classes is None else classes.largest
            found.add(GaussianSteps(int(steps), float(noise), highest, cap, classes))
        worst = [one for one in found if not any(one.dominated_by(o) for o in found - {one})]
        return [m.cost(one) for one in sorted(worst, key=repr) for m in self._methods.values()]

    # --- the whole

    def _search_phases(self, phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
        """Return the phases of a search over trials of these phases, and of its statistics."""
        searched = repeat_phases(phases, self.num_trials.secret_distribution, self.num_trials.runs)
        return (*searched, *self.recipe.statistics_phases)

    def _plan(self, phases: Sequence[Phase]) -> PrivacyPlan:
        privacy = self.recipe.privacy
        return PrivacyPlan(
            self._training_records,
            tuple(phases),
            privacy.delta,
            clip_norm=privacy.sensitivity,
            adjacency=privacy.adjacency,
            user=self.recipe.user_unit,
        )

    @cached_property
    def noise_multiplier(self) -> float:
        """Return the noise of the recipe's own setting: given, or the least that meets epsilon."""
        given, before = self.recipe.privacy.noise_multiplier, self._bought_before
        if given is not None:
            return given
        return self._calibrate_noise(
            lambda noise: (*before, *self._search_phases(self._training_phases(noise)))
        )

    @property
    def _bought_before(self) -> tuple[Phase, ...]:
        """Return the statistics that a script bought before its search; the target covers them."""
        return self.recipe.phases_in_target(self._plan(()))

    @property
    def _delta_floor(self) -> float:
        """Return the delta up to which any trial's profile may be, if trials get their own noise.

        Each of E[K] trials is charged it.
        """
        return _FLOOR_FRACTION * self.recipe.privacy.delta / self.num_trials.mean_trials

    @cached_property
    def score_noise(self) -> float | None:
        """Return the standard deviation of noise on the held-out count; None for public records.

        Users are counted if a user is the unit. By default it is the least noise for which epsilon
        of a held-out record (user) is at most that of a training record.
        """
        tune = self.recipe.tune
        assert tune is not None
        if tune.score.is_public:
            return None
        if tune.score.noise is not None:
            return tune.score.noise
        target = self._epsilon(self._search_phases(self._training_phases(self.noise_multiplier)))
        if math.isinf(target):
            return 0.0
        return self._calibrate_noise(lambda s: self._search_phases(tune.scoring_phases(s)), target)

    @cached_property
    def plan(self) -> PrivacyPlan:
        """Return the plan of training and search together."""
        training = self._training_phases(self.noise_multiplier)
        self._check_method_costs()
        if self.score_noise is None:
            return self._check_plan(self._search_phases(training))
        if self.recipe.privacy.adjacency != "add-or-remove-one":
            raise UserError(
                f"{self.context}: tune.score: held-out records are accounted only under "
                "add-or-remove-one (a replaced record may change sides and is then in both); score "
                "on public records (tune.score.public)",
                see="explanation/tuning.md#what-is-counted",
            )
        assert self.recipe.tune is not None
        scoring = self.recipe.tune.scoring_phases(self.score_noise)
        searched = combine_training_and_scoring(
            training, scoring, self.num_trials.secret_distribution, self.num_trials.runs
        )
        return self._check_plan((*searched, *self.recipe.statistics_phases))

    @cached_property
    def guarantee(self) -> Guarantee:
        """Return the guarantee of training and search together, and of bought statistics."""
        return self._plan((*self._bought_before, *self.plan.phases)).guarantee()

    @cached_property
    def one_training_guarantee(self) -> Guarantee:
        """Return the guarantee of a single training with the same noise, without a search."""
        training = self._training_phases(self.noise_multiplier)
        return self._plan((*training, *self.recipe.statistics_phases)).guarantee()

    # --- arithmetic

    def _check_plan(self, phases: Sequence[Phase]) -> PrivacyPlan:
        plan = self._plan(phases)
        self._epsilon(phases)
        return plan

    def _epsilon(self, phases: Sequence[Phase]) -> float:
        try:
            return self._plan(phases).guarantee().epsilon
        except ValueError as error:
            raise UserError(f"{self.context}: tune.num_trials: {error}") from error

    def _calibrate_noise(
        self, phases_with: Callable[[float], Sequence[Phase]], epsilon: float | None = None
    ) -> float:
        target = self.recipe.privacy.epsilon if epsilon is None else epsilon
        assert target is not None

        def plan_with(noise: float) -> PrivacyPlan:
            return self._plan(phases_with(noise))

        try:
            return calibrate_noise(plan_with, target)
        except ValueError as error:
            raise UserError(f"{self.context}: privacy.epsilon: {error}, got {target}") from error

    def _recipe_plan(self, recipe: Recipe, records: int, noise: float) -> PrivacyPlan:
        trial = recipe.model_copy(update={"statistics": None})  # bought once, not in each trial
        try:
            return plan_with_noise(trial, records, noise)
        except ValueError as error:
            raise UserError(f"{self.context}: privacy: {error}") from error

    # --- trials

    @cached_property
    def trial_limit(self) -> TrialLimit:
        """Return the limit of one trial's training, from which the search's cost is computed."""
        return TrialLimit(self._plan(self._training_phases(self.noise_multiplier)))

    def _check_method_costs(self) -> None:
        """Raise UserError for a method that exceeds the limit with any noise of its steps."""
        if self.recipe.privacy.epsilon is None:
            return
        own = one_step_cost(self.recipe.method)
        for method in (each for cost, each in self._methods.items() if cost != own):
            trial = self.recipe.model_copy(update={"method": method})
            if not self.trial_limit.allows(
                self._recipe_plan(trial, self._training_records, _MAX_NOISE_MULTIPLIER)
            ):
                besides = tuple(it for it in one_step_cost(method) if it.training_steps is None)
                raise UserError(
                    f"{self.context}: tune.space: what method {method.name} reads besides its "
                    f"steps costs more than the recipe's own setting allows: {besides or method}",
                    see="how-to/tuning.md#noise-splits",
                )

    def trial_noise_multiplier(self, trial: Recipe) -> float:
        """Return the noise multiplier of one trial's recipe (from `apply_values`)."""
        if trial.privacy.noise_multiplier is not None:
            return trial.privacy.noise_multiplier
        if not self.varies_cost:
            return self.noise_multiplier
        records = self.record_counts.training_records(trial.data.fraction)

        def fits(noise: float, coarser: int = 10) -> bool:
            return self.trial_limit.allows(self._recipe_plan(trial, records, noise), coarser)

        low, high = self.noise_multiplier, self.noise_multiplier
        while not fits(high):
            low, high = high, high * 1.5
            if high > _MAX_NOISE_MULTIPLIER:
                raise UserError(f"{self.context}: tune.space: no noise makes a trial affordable")
        while low > 1e-2 and fits(low):
            low, high = low / 1.5, low
        while high / low > 1 + _NOISE_TOLERANCE:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if fits(middle) else (middle, high)
        while not fits(high, coarser=1):  # on the grid of the search's cost
            high *= 1 + _NOISE_TOLERANCE
        return high


@dataclass(frozen=True)
class TrialLimit:
    """Check one trial's training against the limit that the search accounts for.

    base_plan: the plan from which the search's privacy cost is computed.

    A trial is within the limit if it is a post-processing of one of the base's choices, or if the
    base's cost depends only on its profile and the trial's own stays below it, on the grid of that
    computation.
    """

    base_plan: PrivacyPlan

    def allows(self, trial: PrivacyPlan, grid_factor: int = 1) -> bool:
        """Return whether a trial, by its plan, is within the limit.

        grid_factor: multiplies the grid, for a first answer that may be incorrect.
        """
        base = self.base_plan
        if (trial.delta, trial.adjacency) != (base.delta, base.adjacency):
            return False
        if trial.user != base.user:
            return False
        same_size = trial.records == base.records
        if same_size or not any(own.has_batch_cap for own in walk_phases(trial.phases)):
            for one_each in product(*(phase.alternative_sequences for phase in base.phases)):
                if _is_post_processing(trial.phases, tuple(chain.from_iterable(one_each))):
                    return True
        return all(one.uses_only_profile for one in base.phases) and self._profile_covers(
            trial, grid_factor
        )

    def check(self, trial: PrivacyPlan, context: str) -> None:
        """Raise UserError unless the trial is within the limit."""
        if not self.allows(trial):
            raise UserError(
                f"{context}: this training is not covered by what the search was accounted with, "
                f"so it is not started, and fails as a trial: {trial.phases} against "
                f"{self.base_plan.phases}"
            )

    def _profile_covers(self, trial: PrivacyPlan, grid_factor: int) -> bool:
        """Return whether the base's profile is above the trial's on every path of a record.

        The search's cost is computed on this grid or a coarser one, on which the base costs more.
        It includes the rounding of the base: a larger rounding of the trial is a margin here.
        """
        from dpdist.privacy.accounting import compute_privacy_losses
        from dpdist.privacy.pld import UnsupportedMechanismError, compute_privacy_loss
        from dpdist.privacy.profiles import profile_exceeds

        paths, base = trial.path_events(trial.phases), self.base_plan
        try:
            if grid_factor not in self._base_losses:
                own_paths = base.path_events(base.phases)
                self._base_losses[grid_factor] = compute_privacy_losses(
                    own_paths, base.adjacency, grid_factor
                )
            grids, ceilings = self._base_losses[grid_factor]
            if len(ceilings) != len(paths):
                return False
            for grid, ceiling, path in zip(grids, ceilings, paths, strict=True):
                if ceiling.pld is None:
                    continue
                own = compute_privacy_loss(path, trial.adjacency, grid)
                margin = max(0.0, own.rounding - ceiling.rounding)
                if own.pld is None or profile_exceeds(own.pld, ceiling.pld, margin):
                    return False
        except UnsupportedMechanismError:
            return False
        return True

    @cached_property
    def _base_losses(self) -> dict[int, tuple[list[float], list[PrivacyLoss]]]:
        """Return the cache of grids and losses of the base's paths, by grid factor."""
        return {}


def _is_post_processing(own: Sequence[Phase], other: Sequence[Phase]) -> bool:
    """Return whether a sequence of phases costs no more than another, phase by phase."""
    return len(own) == len(other) and all(
        a.dominated_by(b) for a, b in zip(own, other, strict=True)
    )
