"""What a private search costs, before anything runs: no data, no torch, no Ray.

The base mechanism of a search is one trial: training, and scoring by held-out private records (or
by public ones, which costs nothing). Training and held-out records are told apart by a hash of the
record, so a record pays for one of the two: the worse counts, not their sum. With a secret random
number of trials the best trial costs what Papernot and Steinke 2022 prove (Theorems 2 and 6); with
a fixed number, plain composition.

When the search varies what a trial costs (noise, batch size, steps, share of the data), the base is
the pointwise maximum of the trials' Renyi curves. With a target epsilon each trial gets the least
noise with which its curve lies below that of the recipe's own setting.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from dpdist.errors import UserError
from dpdist.privacy.guarantee import Guarantee
from dpdist.privacy.plan import (
    GaussianReleases,
    GaussianSteps,
    ParallelParts,
    Phase,
    PrivacyPlan,
    RepeatAndSelect,
    WorstOf,
)
from dpdist.privacy.selection import SelectionLaw
from dpdist.recipe import Recipe
from dpdist.search_options import LawRecipe
from dpdist.training.planning import plan_at
from tuning.space import COSTLY, ends_of, varies

# Ranges of whole numbers and shares are covered by intervals this narrow (ratio of their ends).
_INTERVAL = 1.05
# Renyi orders above the one that costs this much (relative, in epsilon) are given up, so that a
# trial's noise is not dictated by orders that no bound uses.
_ORDER_TOLERANCE = 1e-3


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
    def costly(self) -> tuple[str, ...]:
        """Searched fields that change what one training costs."""
        assert self.recipe.tune is not None
        return tuple(field for field in COSTLY if varies(self.recipe.tune, field))

    @property
    def _records(self) -> int:
        return self.sizes.train(self.recipe.data.fraction)

    def _one_training(self, noise: float, max_order: float | None) -> tuple[Phase, ...]:
        """The train side of the base mechanism, at a noise multiplier of the recipe's setting."""
        if not self.costly:
            return plan_at(self.recipe, self._records, noise).phases
        if self.recipe.privacy.epsilon is not None:
            own = plan_at(self.recipe, self._records, noise).phases
            return (WorstOf((own,), max_order),)
        return (WorstOf(tuple(self._settings()), None),)

    def _settings(self) -> list[tuple[Phase, ...]]:
        """Phases whose curves together lie above those of every setting in the space."""
        recipe = self.recipe
        noise = min(ends_of(recipe, "privacy.noise_multiplier"))
        found: set[tuple[float, int]] = set()
        batches = _intervals(ends_of(recipe, "training.batch_size"), self._listed("batch_size"))
        shares = _intervals(ends_of(recipe, "data.fraction"), self._listed("fraction"))
        for (small, large), (low, high) in itertools.product(batches, shares):
            rate = min(1.0, large / self.sizes.train(low))
            if recipe.training.steps is not None:
                steps = max(ends_of(recipe, "training.steps"))
            else:
                epochs = max(ends_of(recipe, "training.epochs"))
                steps = max(1, math.floor(epochs * self.sizes.train(high) / small))
            found.add((rate, steps))
        worst = [
            (rate, steps)
            for rate, steps in found
            if not any((r, s) != (rate, steps) and r >= rate and s >= steps for r, s in found)
        ]
        # Settings of nearly the same rate are covered by one.
        near: dict[int, tuple[float, int]] = {}
        for rate, steps in worst:
            place = math.floor(math.log(rate) / math.log(_INTERVAL))
            known = near.get(place, (0.0, 0))
            near[place] = (max(rate, known[0]), max(steps, known[1]))
        return [
            (*recipe.method.besides, GaussianSteps(steps, noise, rate, recipe.privacy.batch_cap))
            for rate, steps in sorted(near.values())
        ]

    def _listed(self, name: str) -> bool:
        assert self.recipe.tune is not None
        field = f"training.{name}" if name == "batch_size" else f"data.{name}"
        domains = [d for f, d in _fields(self.recipe) if f == field]
        return not domains or domains[0].choice is not None

    # --- the whole

    @property
    def law_in_words(self) -> str:
        """For law fixed the number of trials is public."""
        if self.law.name == "fixed":
            return f"fixed, {self.law.runs} trials"
        assert self.law.mean is not None
        return SelectionLaw(self.law.mean, self.law.shape_number).describe()

    def _repeated(self, phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
        """A search over trials that each execute these phases."""
        if self.law.name != "fixed":
            assert self.law.mean is not None
            return (RepeatAndSelect(phases, self.law.mean, self.law.shape_number),)
        assert self.law.runs is not None
        repeated: list[Phase] = []
        for phase in phases:
            if isinstance(phase, GaussianSteps):
                repeated.append(replace(phase, steps=phase.steps * self.law.runs))
            elif isinstance(phase, GaussianReleases):
                repeated.append(replace(phase, count=phase.count * self.law.runs))
            else:
                repeated += [phase] * self.law.runs
        return tuple(repeated)

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
        return self._calibrated(lambda s: self._repeated(self._one_training(s, self.max_order)))

    @cached_property
    def max_order(self) -> float | None:
        """The highest Renyi order that counts, when trials get noise of their own."""
        epsilon = self.recipe.privacy.epsilon
        if not self.costly or epsilon is None:
            return None
        from dpdist.privacy import accounting

        noise = self._calibrated(lambda s: self._repeated(self._one_training(s, None)))
        plan = self._plan(self._repeated(self._one_training(noise, None)))
        orders = accounting.compose_rdp(plan.event(), plan.neighbours).orders
        for order in orders[orders >= 2]:
            capped = self._plan(self._repeated(self._one_training(noise, float(order))))
            if capped.guarantee().epsilon <= (1 + _ORDER_TOLERANCE) * epsilon:
                return float(order)
        return None

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
        target = self._epsilon(
            self._repeated(self._one_training(self.noise_multiplier, self.max_order))
        )
        if math.isinf(target):
            return 0.0
        return self._calibrated(lambda s: self._repeated(self._scoring(s)), target)

    def _scoring(self, noise: float) -> tuple[Phase, ...]:
        assert self.recipe.tune is not None
        return (GaussianReleases(noise, self.recipe.tune.rungs),)

    @cached_property
    def plan(self) -> PrivacyPlan:
        """The plan of training and search together."""
        training = self._one_training(self.noise_multiplier, self.max_order)
        if self.score_noise is None:
            return self._checked(self._repeated(training))
        if self.recipe.privacy.neighbours != "add-or-remove-one":
            raise UserError(
                f"{self.where}: tune.score: held-out records are accounted under "
                "add-or-remove-one only (a replaced record may change sides and then pays for "
                "both); score on public records (tune.score.public)"
            )
        scoring = self._scoring(self.score_noise)
        if self.law.name == "fixed":
            parts = ParallelParts((self._repeated(training), self._repeated(scoring)))
            return self._checked((parts,))
        return self._checked(self._repeated((ParallelParts((training, scoring)),)))

    @cached_property
    def guarantee(self) -> Guarantee:
        """Of training and search together."""
        return self.plan.guarantee()

    @cached_property
    def one_training(self) -> Guarantee:
        """What a single training with the same noise costs, without any search."""
        return self._plan(self._one_training(self.noise_multiplier, None)).guarantee()

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
        from dpdist.privacy.calibrate import calibrate_noise

        target = self.recipe.privacy.epsilon if epsilon is None else epsilon
        assert target is not None

        def plan_with(noise: float) -> PrivacyPlan:
            return self._plan(phases_with(noise))

        try:
            return calibrate_noise(plan_with, target, _start(plan_with, target))
        except ValueError as error:
            raise UserError(f"{self.where}: privacy.epsilon: {error}, got {target}") from error

    # --- trials

    def trial_noise(self, trial: Recipe) -> float:
        """The noise multiplier of one trial's recipe (made by `tuning.space.with_values`)."""
        if trial.privacy.noise_multiplier is not None:
            return trial.privacy.noise_multiplier
        if not self.costly:
            return self.noise_multiplier
        from dpdist.privacy import accounting

        records = self.sizes.train(trial.data.fraction)
        neighbours = self.recipe.privacy.neighbours
        bound = self._plan(self._one_training(self.noise_multiplier, self.max_order)).event()
        # Orders beyond max_order are infinite in the bound: they constrain nothing.
        ceiling = accounting.compose_rdp(bound, neighbours)
        orders = ceiling.orders[ceiling.rdp < math.inf]
        limit = ceiling.rdp[ceiling.rdp < math.inf]

        def fits(noise: float) -> bool:
            phases = plan_at(trial, records, noise).phases
            event = self._plan(phases).event()
            return bool((accounting.compose_rdp(event, neighbours, orders).rdp <= limit).all())

        low, high = self.noise_multiplier, self.noise_multiplier
        while not fits(high):
            low, high = high, high * 1.5
            if high > 1e6:
                raise UserError(f"{self.where}: tune.space: no noise makes a trial affordable")
        while low > 1e-2 and fits(low):
            low, high = low / 1.5, low
        while high / low > 1 + 1e-4:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if fits(middle) else (middle, high)
        return high

    def trial_plan(self, trial: Recipe) -> PrivacyPlan:
        """What a trial's training executes. Raises UserError when the method of this trial reads
        the records in another way than the recipe's own."""
        if trial.method.besides != self.recipe.method.besides:
            raise UserError(
                f"{self.where}: tune.space: a searched field changes what the method itself reads "
                "from the records, and no bound here covers such a search"
            )
        records = self.sizes.train(trial.data.fraction)
        phases = plan_at(trial, records, self.trial_noise(trial)).phases
        return replace(self._plan(phases), records=records, clip_norm=trial.privacy.sensitivity)


def _fields(recipe: Recipe) -> Any:
    from tuning.space import fields

    assert recipe.tune is not None
    return fields(recipe.tune)


def _intervals(ends: Sequence[Any], listed: bool) -> list[tuple[float, float]]:
    """Each listed value alone; a range cut into intervals whose ends differ little."""
    if listed:
        return [(value, value) for value in sorted(set(ends))]
    low, high = ends
    edges = [float(low)]
    while edges[-1] < high:
        edges.append(min(float(high), edges[-1] * _INTERVAL))
    return list(itertools.pairwise(edges)) or [(low, high)]


def _start(plan_with: Callable[[float], PrivacyPlan], target: float) -> float:
    """A noise near the answer, from whole Renyi orders only, which are fast."""
    from dpdist.privacy import accounting

    def quick(noise: float) -> float:
        plan = plan_with(noise)
        try:
            return max(
                float(
                    accounting.compose_rdp(
                        path, plan.neighbours, accounting.QUICK_ORDERS
                    ).get_epsilon(plan.delta)
                )
                for path in plan.alternatives(plan.phases)
            )
        except accounting.Unsupported:
            return 0.0

    low, high = 0.1, 1e4
    for _ in range(14):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if quick(middle) > target else (low, middle)
    return high if high < 1e4 else 1.0
