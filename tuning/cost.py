"""What a private search costs, before anything runs: no data, no torch, no Ray.

The base mechanism of a search is one trial: training, and scoring by held-out private records (or
by public ones, which costs nothing). Training and held-out records are told apart by a hash of the
record, so a record pays for one of the two: the worse counts, not their sum. With a secret random
number of trials the best trial costs what `dpdist.privacy.searches` says; with a fixed one, plain
composition.

When the search varies what a trial costs (noise, batch size, steps, share of the data, how a method
splits its budget), the base is the pointwise maximum of the trials' profiles. With a target epsilon
each trial gets the least noise with which its profile stays below that of the recipe's own setting.
`Limit` is what every trial is held against, by its own plan, before it starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product
from typing import TYPE_CHECKING

from dpdist.base.errors import UserError
from dpdist.privacy.combined import WorstOf
from dpdist.privacy.guarantee import Guarantee
from dpdist.privacy.phases import Phase, walk
from dpdist.privacy.plan import PrivacyPlan
from dpdist.privacy.releases import GaussianSteps
from dpdist.privacy.searches import repeated, training_and_search
from dpdist.runs.planning import plan_at
from dpdist.runs.recipe import Recipe
from dpdist.sections.search import LawRecipe
from dpdist.tuning.space import Box, cost_boxes, methods, own_box, unit_cost

if TYPE_CHECKING:
    from dpdist.methods.base import Method
    from dpdist.privacy.losses import Loss

# Settings whose sampling rates differ by less than this factor are covered by one.
_NEAR = 1.05
# Of the guarantee's delta, this share is given up to a floor below which no trial's profile counts,
# so that its noise is not dictated by deltas that hardly matter.
_FLOOR = 1e-3
_CLOSE = 1e-3  # relative, on a trial's noise
_MOST = 1e6  # of a trial's noise


@dataclass(frozen=True)
class Sizes:
    """Numbers of records, all public. whole: before anything is held out.

    counted: (share to train on -> number of training records) as counted; without it, expected.
    """

    whole: int
    hold_out: float
    counted: Callable[[float], int] | None = None

    def train(self, fraction: float) -> int:
        if self.counted is not None:
            return self.counted(fraction)
        return max(1, math.floor(self.whole * (1 - self.hold_out) * fraction))


def kept_out(recipe: Recipe) -> float:
    """The share of the private records that no trial trains on: what data.hold_out keeps out of
    everything, and of the others those that trials are scored on."""
    assert recipe.tune is not None
    score, aside = recipe.tune.score, recipe.data.hold_out
    return aside if score.public is not None else aside + score.hold_out * (1 - aside)


@dataclass(frozen=True)
class SearchCost:
    """The cost of the search that a recipe's `tune` section asks for.

    Raises UserError, beginning with `where`, when a property cannot be had: a target out of reach,
    or a mechanism that no theorem covers.
    """

    recipe: Recipe
    sizes: Sizes
    law: LawRecipe
    where: str = "recipe"

    # --- what varies

    @cached_property
    def _boxes(self) -> list[Box]:
        return cost_boxes(self.recipe, self.where)

    @cached_property
    def _methods(self) -> list[Method]:
        return methods(self.recipe, self.where)

    @cached_property
    def costly(self) -> bool:
        """Whether the search changes what one training costs."""
        return bool(self._splits) or self._boxes != [own_box(self.recipe)]

    @property
    def _splits(self) -> list[Method]:
        """Methods in the space that cost, with the same steps, what the recipe's own does not."""
        own = unit_cost(self.recipe.method)
        return [method for method in self._methods if unit_cost(method) != own]

    @property
    def _records(self) -> int:
        return self.sizes.train(self.recipe.data.fraction)

    def _one_training(self, noise: float) -> tuple[Phase, ...]:
        """The train side of the base mechanism, at a noise multiplier of the recipe's setting."""
        if self.costly and self.recipe.privacy.epsilon is None:
            return (WorstOf(tuple(self._settings())),)
        own = self._at(self.recipe, self._records, noise).phases
        return (WorstOf((own,), self._floor),) if self.costly else own

    def _settings(self) -> list[tuple[Phase, ...]]:
        """Phases of which every setting in the space is a post-processing of one."""
        # Settings of nearly the same rate are covered by one.
        near: dict[tuple[float, int], tuple[float, int]] = {}
        for box in self._boxes:
            small, large = box["training.batch_size"]
            low, high = box["data.fraction"]
            rate = min(1.0, large / self.sizes.train(low))
            steps = box["training.steps"][1]
            if steps is None:
                epochs = box["training.epochs"][1]
                steps = max(1, math.floor(epochs * self.sizes.train(high) / small))
            noise = box["privacy.noise_multiplier"][0]
            place = (noise, math.floor(math.log(rate) / math.log(_NEAR)))
            known = near.get(place, (0.0, 0))
            near[place] = (max(rate, known[0]), max(steps, known[1]))
        cap = self.recipe.privacy.batch_cap
        found = {
            GaussianSteps(int(steps), float(noise), rate, cap)
            for (noise, _), (rate, steps) in near.items()
        }
        worst = [one for one in found if not any(one.at_most(o) for o in found - {one})]
        return [m.cost(one) for one in sorted(worst, key=repr) for m in self._methods]

    # --- the whole

    def _repeated(self, phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
        """A search over trials that each execute these phases."""
        return repeated(phases, self.law.secret, self.law.runs)

    def _plan(self, phases: Sequence[Phase]) -> PrivacyPlan:
        privacy = self.recipe.privacy
        return PrivacyPlan(
            self._records,
            tuple(phases),
            privacy.delta,
            clip_norm=privacy.sensitivity,
            neighbours=privacy.neighbours,
        )

    @cached_property
    def noise_multiplier(self) -> float:
        """Of the recipe's own setting: given, or the least that meets the target epsilon."""
        given = self.recipe.privacy.noise_multiplier
        if given is not None:
            return given
        return self._calibrated(lambda s: self._repeated(self._one_training(s)))

    @property
    def _floor(self) -> float:
        """The delta up to which any trial's profile may reach, when trials get noise of their own:
        each of E[K] trials is charged it."""
        return _FLOOR * self.recipe.privacy.delta / self.law.expected

    @cached_property
    def score_noise(self) -> float | None:
        """Standard deviation of the noise on the count of held-out records; None for public ones.

        By default the least with which a held-out record pays no more than a training record.
        """
        tune = self.recipe.tune
        assert tune is not None
        if tune.score.public is not None:
            return None
        if tune.score.noise is not None:
            return tune.score.noise
        target = self._epsilon(self._repeated(self._one_training(self.noise_multiplier)))
        if math.isinf(target):
            return 0.0
        return self._calibrated(lambda s: self._repeated(self._scoring(s)), target)

    def _scoring(self, noise: float) -> tuple[Phase, ...]:
        assert self.recipe.tune is not None
        return self.recipe.tune.scoring_phases(noise)

    @cached_property
    def plan(self) -> PrivacyPlan:
        """The plan of training and search together."""
        training = self._one_training(self.noise_multiplier)
        self._check_splits()
        if self.score_noise is None:
            return self._checked(self._repeated(training))
        if self.recipe.privacy.neighbours != "add-or-remove-one":
            raise UserError(
                f"{self.where}: tune.score: held-out records are accounted under "
                "add-or-remove-one only (a replaced record may change sides and then pays for "
                "both); score on public records (tune.score.public)"
            )
        scoring = self._scoring(self.score_noise)
        return self._checked(training_and_search(training, scoring, self.law.secret, self.law.runs))

    @cached_property
    def guarantee(self) -> Guarantee:
        """Of training and search together."""
        return self.plan.guarantee()

    @cached_property
    def one_training(self) -> Guarantee:
        """What a single training with the same noise costs, without any search."""
        return self._plan(self._one_training(self.noise_multiplier)).guarantee()

    # --- arithmetic

    def _checked(self, phases: Sequence[Phase]) -> PrivacyPlan:
        plan = self._plan(phases)
        self._epsilon(phases)
        return plan

    def _epsilon(self, phases: Sequence[Phase]) -> float:
        try:
            return self._plan(phases).guarantee().epsilon
        except ValueError as error:
            raise UserError(f"{self.where}: tune.law: {error}") from error

    def _calibrated(
        self, phases_with: Callable[[float], Sequence[Phase]], epsilon: float | None = None
    ) -> float:
        from dpdist.privacy.calibrate import least_noise

        target = self.recipe.privacy.epsilon if epsilon is None else epsilon
        assert target is not None

        def plan_with(noise: float) -> PrivacyPlan:
            return self._plan(phases_with(noise))

        try:
            return least_noise(plan_with, target)
        except ValueError as error:
            raise UserError(f"{self.where}: privacy.epsilon: {error}, got {target}") from error

    def _at(self, recipe: Recipe, records: int, noise: float) -> PrivacyPlan:
        try:
            return plan_at(recipe, records, noise)
        except ValueError as error:
            raise UserError(f"{self.where}: privacy: {error}") from error

    # --- trials

    @cached_property
    def limit(self) -> Limit:
        """What one trial's training may cost: what the search's price is computed from."""
        return Limit(self._plan(self._one_training(self.noise_multiplier)))

    def _check_splits(self) -> None:
        """Raise UserError for a method that costs too much whatever the noise of its steps."""
        if self.recipe.privacy.epsilon is None:
            return
        for method in self._splits:
            trial = self.recipe.model_copy(update={"method": method})
            if not self.limit.allows(self._at(trial, self._records, _MOST)):
                raise UserError(
                    f"{self.where}: tune.space: what method {method.name} reads besides its steps "
                    f"costs more than the recipe's own setting allows: {method.besides or method}"
                )

    def trial_noise(self, trial: Recipe) -> float:
        """The noise multiplier of one trial's recipe (made by
        `dpdist.tuning.space.with_values`)."""
        if trial.privacy.noise_multiplier is not None:
            return trial.privacy.noise_multiplier
        if not self.costly:
            return self.noise_multiplier
        records = self.sizes.train(trial.data.fraction)

        def fits(noise: float, coarser: int = 10) -> bool:
            return self.limit.allows(self._at(trial, records, noise), coarser)

        low, high = self.noise_multiplier, self.noise_multiplier
        while not fits(high):
            low, high = high, high * 1.5
            if high > _MOST:
                raise UserError(f"{self.where}: tune.space: no noise makes a trial affordable")
        while low > 1e-2 and fits(low):
            low, high = low / 1.5, low
        while high / low > 1 + _CLOSE:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if fits(middle) else (middle, high)
        while not fits(high, coarser=1):  # what counts is the grid that the price is computed on
            high *= 1 + _CLOSE
        return high


@dataclass(frozen=True)
class Limit:
    """What one trial's training may cost. base: the plan from which the search's price is computed.

    A trial is within the limit when it is a post-processing of one of the base's choices, or when
    the base is priced by nothing but its profile and the trial's own stays below it, on the grid
    that the price is computed on.
    """

    base: PrivacyPlan

    def allows(self, trial: PrivacyPlan, coarser: int = 1) -> bool:
        """Whether a trial, by the plan that it executes, costs no more.

        coarser: how many times the price's grid, for a first answer that need not be true.
        """
        base = self.base
        if (trial.delta, trial.neighbours) != (base.delta, base.neighbours):
            return False
        same_size = trial.records == base.records
        if same_size or not any(own.capped for own in walk(trial.phases)):
            for one_each in product(*(phase.settings for phase in base.phases)):
                if _post_processing(trial.phases, tuple(chain.from_iterable(one_each))):
                    return True
        return all(one.priced_by_profile for one in base.phases) and self._covers(trial, coarser)

    def check(self, trial: PrivacyPlan, where: str) -> None:
        """Raise UserError unless the trial is within the limit."""
        if not self.allows(trial):
            raise UserError(
                f"{where}: this training is not covered by what the search was accounted with, and "
                f"is not begun: {trial.phases} against {self.base.phases}"
            )

    def _covers(self, trial: PrivacyPlan, coarser: int) -> bool:
        """Path by path: a record takes as many through the trial as through the base.

        The price is computed on this grid or a coarser one, on which the base costs more still. It
        charges the rounding of the base: what a trial's own is larger by must be below as well.
        """
        from dpdist.privacy.accounting import Unsupported, losses_of
        from dpdist.privacy.losses import loss_of
        from dpdist.privacy.profiles import exceeds

        paths, base = trial.alternatives(trial.phases), self.base
        try:
            if coarser not in self._known:
                own_paths = base.alternatives(base.phases)
                self._known[coarser] = losses_of(own_paths, base.neighbours, coarser)
            grids, ceilings = self._known[coarser]
            if len(ceilings) != len(paths):
                return False
            for grid, ceiling, path in zip(grids, ceilings, paths, strict=True):
                if ceiling.pld is None:
                    continue
                own = loss_of(path, trial.neighbours, grid)
                margin = max(0.0, own.rounding - ceiling.rounding)
                if own.pld is None or exceeds(own.pld, ceiling.pld, margin):
                    return False
        except Unsupported:
            return False
        return True

    @cached_property
    def _known(self) -> dict[int, tuple[list[float], list[Loss]]]:
        """Grids and losses of the base's paths, by how much coarser."""
        return {}


def _post_processing(own: Sequence[Phase], other: Sequence[Phase]) -> bool:
    """Whether a sequence of phases costs no more than another, phase by phase."""
    return len(own) == len(other) and all(a.at_most(b) for a, b in zip(own, other, strict=True))
