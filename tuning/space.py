"""The search space of a private search, and its cost before anything runs: no data, torch or Ray.

Values are drawn independently of the data and of each other. A value is addressed by its field's
dotted name, as in an error about a recipe: "method.radius", "training.learning_rate".

The base mechanism of a search is one trial: training, and scoring by held-out private records (or
by public ones, which costs nothing). Training and held-out records are told apart by a hash of the
record (of its user, where users are the unit), so a record or user pays for one of the two: the
worse counts, not their sum. With a secret random
number of trials the best trial costs what `dpdist.privacy.calibration` computes; with a fixed one,
plain composition.

When the search varies the cost of a trial (noise, batch size, steps, share of the data, how a
method splits its budget), the base is the pointwise maximum of the trials' profiles. With a target
epsilon each trial gets the least noise with which its profile stays below that of the recipe's own
setting. `TrialLimit` is the bound that every trial is held against, by its own plan, before it
starts.
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
from dpdist.privacy.calibration import combine_training_and_scoring, repeat_phases
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

# Fields that change what one training costs.
COST_FIELDS = (
    "privacy.noise_multiplier",
    "training.batch_size",
    "training.steps",
    "training.epochs",
    "data.fraction",
)
# Fields that are the same in all trials, whichever way a trial's values are given.
_UNSEARCHABLE_FIELDS = {
    "name": "it names the run",
    "data": "all trials are about the same records (data.fraction may be searched)",
    "tune": "a search does not search itself",
    "public": "what is trained on public records is trained once, before the search",
    "statistics": "they are bought once, before the search",
    "resources": "it changes nothing that is learned",
    "certify.alpha": "the error of a certificate is not chosen by its score",
}
_SEARCHABLE_PRIVACY = ("privacy.noise_multiplier", "privacy.clip_norm", "privacy.clipping")
_PROBE_POSITION = (math.sqrt(5) - 1) / 2  # somewhere between the ends of a range


def domain_value(domain: Domain, uniform: float) -> Any:
    """The value at `uniform` in [0, 1) of a domain's distribution."""
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
    """One independent value for each searched field. uniform: a fresh number in [0, 1) per call."""
    return {key: domain_value(domain, uniform()) for key, domain in tune.space.items()}


def iter_searched_fields(tune: TuneRecipe) -> Iterator[tuple[str, str]]:
    """Every field that the search sets, with the name of its entry in the space."""
    for key, domain in tune.space.items():
        for field in (key, *domain.linked):
            yield field, key


def iter_probe_values(tune: TuneRecipe) -> Iterator[TrialValues]:
    """Values that show what the space contains: every listed value and both ends of every range,
    one entry at a time, all last ones together, and a number between the ends of each range."""
    first = {key: domain.values_or_bounds[0] for key, domain in tune.space.items()}
    yield first
    yield {key: domain.values_or_bounds[-1] for key, domain in tune.space.items()}
    for key, domain in tune.space.items():
        for end in domain.values_or_bounds[1:]:
            yield {**first, key: end}
        if domain.choice is None:
            yield {**first, key: domain_value(domain, _PROBE_POSITION)}


def apply_values(recipe: Recipe, values: Mapping[str, Any], context: str) -> Recipe:
    """The recipe of one trial: the values put in, without the search itself.

    Raises UserError, beginning with `context`, for a value that the recipe does not take, and for
    one that changes a field that is the same in all trials: also by a section that leaves it out.
    """
    assert recipe.tune is not None
    raw = recipe.model_dump(mode="json")
    raw["tune"] = None
    for key, value in values.items():
        domain = recipe.tune.space[key]
        for field in (key, *domain.linked):
            _set_field(raw, field, domain.value_of(field, value), f"{context}: tune.space.{key}")
    trial = parse_recipe(raw, context)
    try:  # a method that is listed may be none for a search
        trial.method.check(trial.model_copy(update={"tune": recipe.tune}))
    except ValueError as error:
        raise UserError(f"{context}: tune.space: {error}") from error
    _check_unsearchable_fields(recipe, trial, context)
    return trial


def check_space(recipe: Recipe, context: str) -> None:
    """Raise UserError for a field that cannot be searched, or an end of a domain that the recipe
    does not take."""
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
    """Raise UserError when a trial differs from the recipe in what a search may not change."""
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
    if last not in section and parents != ["model", "options"]:
        raise UserError(f"{context}: the recipe has no such field")
    section[last] = copy.deepcopy(value)


# --- what changes the cost of a trial


def trial_cost(recipe: Recipe) -> tuple[Any, ...]:
    """Return the settings of a recipe that determine what one training costs, to compare them."""
    fields = (field.split(".") for field in COST_FIELDS)
    own = (getattr(getattr(recipe, section), name) for section, name in fields)
    return (*own, one_step_cost(recipe.method))


def settings_of_space(
    tune: TuneRecipe, recipe_of: Callable[[TrialValues], Recipe], costly: Sequence[str], where: str
) -> tuple[Recipe, ...]:
    """Return the recipes that the space's values make, one for each cost of a training.

    Args:
        tune: with the space.
        recipe_of: the recipe of a trial with these values.
        costly: entries of the space that may change the cost; their listed values are combined.
        where: the space, for complaints.

    Raises:
        UserError: a range changes the cost: what lies between its ends is not known.
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
                        f"{where}.{key}: changes what a trial costs; list its values (choice) "
                        "in place of a range"
                    )
        found.setdefault(trial_cost(recipe), recipe)
    return tuple(found.values())


def settings_of_recipe(recipe: Recipe, context: str) -> tuple[Recipe, ...]:
    """Return the recipes of trials, one for each cost, whatever the searched fields are called.

    Raises UserError as `settings_of_space` does.
    """
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
    """Return the phases that tell methods of different cost apart at the same steps."""
    return method.cost(GaussianSteps(1, 1.0, 1.0))


# --- the cost ---------------------------------------------------------------------------------


# Settings whose sampling rates differ by less than this factor are covered by one.
_RATE_RATIO = 1.05
# Of the guarantee's delta, this share is given up to a floor below which no trial's profile counts,
# so that its noise is not dictated by deltas that hardly matter.
_FLOOR_SHARE = 1e-3
_NOISE_TOLERANCE = 1e-3  # relative, on a trial's noise
_MAX_NOISE_MULTIPLIER = 1e6  # of a trial's noise


@dataclass(frozen=True)
class RecordCounts:
    """Numbers of records, all public; of users where a user is the unit.

    total: before anything is held out. count_training_records: (share to train on -> number of
    training records) as counted; without it, expected.
    """

    total: int
    private_eval_fraction: float
    count_training_records: Callable[[float], int] | None = None

    def training_records(self, fraction: float) -> int:
        if self.count_training_records is not None:
            return self.count_training_records(fraction)
        return max(1, math.floor(self.total * (1 - self.private_eval_fraction) * fraction))


def private_eval_fraction_of(recipe: Recipe) -> float:
    """The share of the private records that no trial trains on: what data.private_eval_fraction
    keeps out of everything, and of the others those that trials are scored on."""
    assert recipe.tune is not None
    score, aside = recipe.tune.score, recipe.data.private_eval_fraction
    own = score.public is not None or score.function is not None
    return aside if own else aside + score.private_eval_fraction * (1 - aside)


@dataclass(frozen=True)
class SearchCost:
    """The cost of the search that a recipe's `tune` section asks for.

    settings: recipes of trials, one for each cost; by default those that the space makes.

    Raises UserError, beginning with `context`, when a property cannot be had: a target out of
    reach, or a mechanism that no theorem covers.
    """

    recipe: Recipe
    record_counts: RecordCounts
    num_trials: NumTrialsRecipe
    context: str = "recipe"
    settings: tuple[Recipe, ...] = ()

    # --- what varies

    @cached_property
    def _settings(self) -> tuple[Recipe, ...]:
        """Recipes of trials, one for each cost."""
        return self.settings or settings_of_recipe(self.recipe, self.context)

    @cached_property
    def _methods(self) -> dict[tuple[Phase, ...], Method]:
        """Methods of trials by what they cost with the same steps."""
        found: dict[tuple[Phase, ...], Method] = {}
        for each in self._settings:
            found.setdefault(one_step_cost(each.method), each.method)
        return found

    @cached_property
    def varies_cost(self) -> bool:
        """Whether the search changes what one training costs."""
        return {trial_cost(each) for each in self._settings} != {trial_cost(self.recipe)}

    @property
    def _training_records(self) -> int:
        return self.record_counts.training_records(self.recipe.data.fraction)

    def _training_phases(self, noise: float) -> tuple[Phase, ...]:
        """The train side of the base mechanism, at a noise multiplier of the recipe's setting."""
        if self.varies_cost and self.recipe.privacy.epsilon is None:
            return (WorstOf(tuple(self._worst_case_phases())),)
        own = self._recipe_plan(self.recipe, self._training_records, noise).phases
        return (WorstOf((own,), self._delta_floor),) if self.varies_cost else own

    def _worst_case_phases(self) -> list[tuple[Phase, ...]]:
        """Phases of which every setting in the space is a post-processing of one."""
        # Settings of nearly the same rate are covered by one.
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
            # Each rises with the mean rate.
            classes = checked_class_rates(self.recipe, rate, self.context)
            highest = rate if classes is None else classes.largest
            found.add(GaussianSteps(int(steps), float(noise), highest, cap, classes))
        worst = [one for one in found if not any(one.dominated_by(o) for o in found - {one})]
        return [m.cost(one) for one in sorted(worst, key=repr) for m in self._methods.values()]

    # --- the whole

    def _search_phases(self, phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
        """A search over trials that each execute these phases, after what is bought once."""
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
        given = self.recipe.privacy.noise_multiplier
        if given is not None:
            return given
        before = self._bought_before

        def phases_with(noise: float) -> tuple[Phase, ...]:
            return (*before, *self._search_phases(self._training_phases(noise)))

        return self._calibrate_noise(phases_with)

    @property
    def _bought_before(self) -> tuple[Phase, ...]:
        """Return the statistics that a script bought before its search, which the target covers."""
        return self.recipe.phases_in_target(self._plan(()))

    @property
    def _delta_floor(self) -> float:
        """The delta up to which any trial's profile may reach, when trials get noise of their own:
        each of E[K] trials is charged it."""
        return _FLOOR_SHARE * self.recipe.privacy.delta / self.num_trials.mean_trials

    @cached_property
    def score_noise(self) -> float | None:
        """Standard deviation of the noise on the count of held-out records; None for public ones.

        Where a user is the unit, users are counted. By default the least with which a held-out
        record (user) pays no more than one that is trained on.
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
        """The plan of training and search together."""
        training = self._training_phases(self.noise_multiplier)
        self._check_method_costs()
        if self.score_noise is None:
            return self._check_plan(self._search_phases(training))
        if self.recipe.privacy.adjacency != "add-or-remove-one":
            raise UserError(
                f"{self.context}: tune.score: held-out records are accounted under "
                "add-or-remove-one only (a replaced record may change sides and then pays for "
                "both); score on public records (tune.score.public)",
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
        """Return the cost of a single training with the same noise, without any search."""
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
        from dpdist.privacy.calibration import calibrate_noise

        target = self.recipe.privacy.epsilon if epsilon is None else epsilon
        assert target is not None

        def plan_with(noise: float) -> PrivacyPlan:
            return self._plan(phases_with(noise))

        try:
            return calibrate_noise(plan_with, target)
        except ValueError as error:
            raise UserError(f"{self.context}: privacy.epsilon: {error}, got {target}") from error

    def _recipe_plan(self, recipe: Recipe, records: int, noise: float) -> PrivacyPlan:
        trial = recipe.model_copy(update={"statistics": None})  # which are bought once
        try:
            return plan_with_noise(trial, records, noise)
        except ValueError as error:
            raise UserError(f"{self.context}: privacy: {error}") from error

    # --- trials

    @cached_property
    def trial_limit(self) -> TrialLimit:
        """Return the limit of one trial's training, from which the search's price is computed."""
        return TrialLimit(self._plan(self._training_phases(self.noise_multiplier)))

    def _check_method_costs(self) -> None:
        """Raise UserError for a method that costs too much whatever the noise of its steps."""
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
        """The noise multiplier of one trial's recipe (made by
        `dpdist.tuning.space.apply_values`)."""
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
        while not fits(high, coarser=1):  # what counts is the grid that the price is computed on
            high *= 1 + _NOISE_TOLERANCE
        return high


@dataclass(frozen=True)
class TrialLimit:
    """The limit of one trial's training.

    base_plan: the plan from which the search's price is computed.

    A trial is within the limit when it is a post-processing of one of the base's choices, or when
    the base is priced by nothing but its profile and the trial's own stays below it, on the grid
    that the price is computed on.
    """

    base_plan: PrivacyPlan

    def allows(self, trial: PrivacyPlan, grid_factor: int = 1) -> bool:
        """Whether a trial, by the plan that it executes, costs no more.

        grid_factor: how many times the price's grid, for a first answer that need not be true.
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
                f"so it is not begun, and fails as a trial: {trial.phases} against "
                f"{self.base_plan.phases}"
            )

    def _profile_covers(self, trial: PrivacyPlan, grid_factor: int) -> bool:
        """Path by path: a record takes as many through the trial as through the base.

        The price is computed on this grid or a coarser one, on which the base costs more still. It
        charges the rounding of the base: what a trial's own is larger by must be below as well.
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
        """Grids and losses of the base's paths, by how much coarser."""
        return {}


def _is_post_processing(own: Sequence[Phase], other: Sequence[Phase]) -> bool:
    """Whether a sequence of phases costs no more than another, phase by phase."""
    return len(own) == len(other) and all(
        a.dominated_by(b) for a, b in zip(own, other, strict=True)
    )
