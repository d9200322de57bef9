"""The table of `dpdist tune RECIPE --plan`: the cost of each distribution of trials."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dpdist.config.search import NumTrialsRecipe
from dpdist.core.errors import UserError
from dpdist.privacy.plan import PrivacyPlan
from dpdist.runs.recipe import Recipe, resolve_plan
from dpdist.tuning.space import RecordCounts, SearchCost, private_eval_fraction_of

# Training records of well-known data sets; give --records for others.
KNOWN_SIZES = {
    "digits": 1439,
    "mnist": 60_000,
    "cifar10": 50_000,
    "cifar100": 50_000,
    "svhn": 73_257,
}


@dataclass(frozen=True)
class DistributionCost:
    """Hold the privacy cost of a distribution of the number of trials K.

    kind: family of the distribution. mean: expected K. epsilon: of training and search with the
    noise of one untuned run. noise_multiplier: with which training and search meet the recipe's
    target; None without a target. tail_probabilities: P(K >= k) for k = 1, 2 and the mean.
    quantiles: of K at 5, 50 and 95 %.
    """

    distribution: str
    kind: str
    mean: float
    is_recipe_distribution: bool
    epsilon: float
    noise_multiplier: float | None
    tail_probabilities: tuple[tuple[int, float], ...]
    quantiles: tuple[int, int, int]

    def to_dict(self) -> dict[str, Any]:
        """Return the values as JSON types."""
        return {
            "num_trials": self.distribution,
            "of_the_recipe": self.is_recipe_distribution,
            "epsilon_at_untuned_noise": self.epsilon if math.isfinite(self.epsilon) else "inf",
            "noise_multiplier_for_target": self.noise_multiplier,
            "probability_at_least": {str(k): p for k, p in self.tail_probabilities},
            "quantiles_5_50_95": list(self.quantiles),
        }


def sizes_without_data(recipe: Recipe, records: int | None, context: str) -> RecordCounts:
    """Return expected numbers of records, without reading any. Raises UserError if unknown."""
    assert recipe.tune is not None
    whole = records or KNOWN_SIZES.get(recipe.data.name)
    if whole is None:
        raise UserError(
            f"{context}: data.name: the number of training {recipe.counted} of "
            f"{recipe.data.name!r} is not known without reading it; give it with --records"
        )
    if recipe.data.max_train is not None:
        whole = min(whole, recipe.data.max_train)
    whole = math.floor(whole * (1 - recipe.data.public))
    return RecordCounts(whole, private_eval_fraction_of(recipe))


def untuned_run(recipe: Recipe, sizes: RecordCounts, context: str) -> tuple[float, PrivacyPlan]:
    """Return the noise multiplier and the plan of one run without a search, on the same records."""
    return resolve_plan(recipe, sizes.training_records(recipe.data.fraction), context)


def iter_distributions(
    recipe: Recipe, means: Sequence[int]
) -> Iterator[tuple[NumTrialsRecipe, bool]]:
    """Yield the recipe's distribution, then every distribution at each mean, and which it is."""
    assert recipe.tune is not None
    own = recipe.tune.num_trials
    yield own, True
    for mean in means:
        for distribution in (
            NumTrialsRecipe(name="negative-binomial", shape=-0.5, mean=mean),
            NumTrialsRecipe(name="logarithmic", mean=mean),
            NumTrialsRecipe(name="geometric", mean=mean),
            NumTrialsRecipe(name="poisson", mean=mean),
            NumTrialsRecipe(name="binomial", mean=mean, runs=math.ceil(4 / 3 * mean)),
            NumTrialsRecipe(name="fixed", runs=mean),
        ):
            if distribution != own:
                yield distribution, False


def default_means(recipe: Recipe) -> tuple[int, ...]:
    """Return the recipe's expected number of trials."""
    assert recipe.tune is not None
    distribution = recipe.tune.num_trials
    return (distribution.runs or round(distribution.mean or 1),)


def distribution_cost(
    recipe: Recipe,
    distribution: NumTrialsRecipe,
    is_recipe_distribution: bool,
    sizes: RecordCounts,
    untuned_noise: float,
    context: str,
) -> DistributionCost:
    """Return the cost of a distribution. untuned_noise: that of one untuned run (`untuned_run`)."""
    privacy = recipe.privacy
    untuned = privacy.model_copy(update={"epsilon": None, "noise_multiplier": untuned_noise})
    unchanged = SearchCost(
        recipe.model_copy(update={"privacy": untuned}), sizes, distribution, context
    )
    target = None
    if privacy.epsilon is not None:
        target = SearchCost(recipe, sizes, distribution, context).noise_multiplier
    mean, secret = round(distribution.mean_trials), distribution.secret_distribution
    marks = sorted({1, 2, mean})
    if secret is None:
        at_least = tuple((k, float(k <= mean)) for k in marks)
        quantiles = (mean, mean, mean)
    else:
        at_least = tuple((k, secret.tail_probability(k)) for k in marks)
        low, middle, high = (secret.quantile(q) for q in (0.05, 0.5, 0.95))
        quantiles = (low, middle, high)
    return DistributionCost(
        distribution.description,
        "fixed" if secret is None else secret.family,
        distribution.mean_trials,
        is_recipe_distribution,
        unchanged.guarantee.epsilon,
        target,
        at_least,
        quantiles,
    )
