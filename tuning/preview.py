"""The table of `dpdist tune RECIPE --plan`: what each law of the number of trials would cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dpdist.errors import UserError
from dpdist.privacy.selection import SelectionLaw
from dpdist.recipe import Recipe
from dpdist.search_options import LawRecipe
from tuning.cost import SearchCost, Sizes

# Training records of data sets that everybody has; --records tells of others.
KNOWN_SIZES = {
    "digits": 1439,
    "mnist": 60_000,
    "cifar10": 50_000,
    "cifar100": 50_000,
    "svhn": 73_257,
}


@dataclass(frozen=True)
class Row:
    """One law. epsilon: of training and search when the noise is that of one untuned run.

    noise: the noise multiplier at which training and search meet the recipe's target; None without
    a target. at_least: P(K >= k) for k = 1, 2 and the mean. quantiles: of K at 5, 50 and 95 %.
    """

    law: str
    own: bool
    epsilon: float
    noise: float | None
    at_least: tuple[tuple[int, float], ...]
    quantiles: tuple[int, int, int]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "law": self.law,
            "of_the_recipe": self.own,
            "epsilon_at_untuned_noise": self.epsilon if math.isfinite(self.epsilon) else "inf",
            "noise_multiplier_for_target": self.noise,
            "probability_at_least": {str(k): p for k, p in self.at_least},
            "quantiles_5_50_95": list(self.quantiles),
        }


def sizes_without_data(recipe: Recipe, records: int | None, where: str) -> Sizes:
    """Expected numbers of records, without reading any. Raises UserError when none is known."""
    assert recipe.tune is not None
    whole = records or KNOWN_SIZES.get(recipe.data.name)
    if whole is None:
        raise UserError(
            f"{where}: data.name: the number of training records of {recipe.data.name!r} is not "
            "known without reading it; give it with --records"
        )
    if recipe.data.max_train is not None:
        whole = min(whole, recipe.data.max_train)
    score = recipe.tune.score
    return Sizes(whole, recipe.data.hold_out if score.public else score.hold_out)


def untuned_noise(recipe: Recipe, sizes: Sizes, where: str) -> float:
    """The noise multiplier of one run of the recipe without a search, on the same records."""
    alone = recipe.model_copy(update={"tune": None})
    if alone.privacy.noise_multiplier is not None:
        return alone.privacy.noise_multiplier
    from dpdist.privacy.calibrate import noise_multiplier_for
    from dpdist.recipe import step_count

    records = sizes.train(recipe.data.fraction)
    assert alone.privacy.epsilon is not None
    try:
        return noise_multiplier_for(
            alone.privacy.epsilon,
            records=records,
            batch_size=alone.training.batch_size,
            steps=step_count(alone, records),
            delta=alone.privacy.delta,
            neighbours=alone.privacy.neighbours,
            batch_cap=alone.privacy.batch_cap,
        )
    except ValueError as error:
        raise UserError(f"{where}: privacy.epsilon: {error}") from error


def laws(recipe: Recipe, means: Sequence[int]) -> Iterator[tuple[LawRecipe, bool]]:
    """The recipe's own law, then every law at each expected number of trials."""
    assert recipe.tune is not None
    own = recipe.tune.law
    yield own, True
    for mean in means:
        for law in (
            LawRecipe(name="negative-binomial", shape=-0.5, mean=mean),
            LawRecipe(name="logarithmic", mean=mean),
            LawRecipe(name="geometric", mean=mean),
            LawRecipe(name="poisson", mean=mean),
            LawRecipe(name="fixed", runs=mean),
        ):
            if law != own:
                yield law, False


def default_means(recipe: Recipe) -> tuple[int, ...]:
    """The recipe's own expected number of trials."""
    assert recipe.tune is not None
    law = recipe.tune.law
    return (law.runs or round(law.mean or 1),)


def row(recipe: Recipe, law: LawRecipe, own: bool, sizes: Sizes, noise: float, where: str) -> Row:
    """What a law costs. noise: that of one untuned run (`untuned_noise`)."""
    privacy = recipe.privacy
    untuned = privacy.model_copy(update={"epsilon": None, "noise_multiplier": noise})
    unchanged = SearchCost(recipe.model_copy(update={"privacy": untuned}), sizes, law, where)
    target = None
    if privacy.epsilon is not None:
        target = SearchCost(recipe, sizes, law, where).noise_multiplier
    mean = round(law.runs or law.mean or 1)
    marks = sorted({1, 2, mean})
    if law.name == "fixed":
        at_least = tuple((k, float(k <= mean)) for k in marks)
        quantiles = (mean, mean, mean)
    else:
        assert law.mean is not None
        selection = SelectionLaw(law.mean, law.shape_number)
        at_least = tuple((k, selection.at_least(k)) for k in marks)
        low, middle, high = (selection.quantile(q) for q in (0.05, 0.5, 0.95))
        quantiles = (low, middle, high)
    return Row(
        unchanged.law_in_words, own, unchanged.guarantee.epsilon, target, at_least, quantiles
    )
