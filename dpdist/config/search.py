"""The recipe's `tune` section: values to search, their score and the number of runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from dpdist.core.errors import UserError
from dpdist.core.fields import (
    Count,
    FilePath,
    Finite,
    Json,
    OptionCondition,
    Positive,
    PositiveOrZero,
    Probability,
    RejectBool,
    Rule,
    Section,
    Text,
    TrialCount,
)
from dpdist.privacy.selection import TrialDistribution

if TYPE_CHECKING:
    from dpdist.privacy.phases import Phase

BoundedInt = Annotated[int, RejectBool, Field(ge=-(10**9), le=10**9)]


def _also_kind(given: Any) -> str:
    return "values" if isinstance(given, Mapping) else "fields"


class Domain(Section):
    """The values of one field: either a range (including both ends) or a list.

    Attributes:
        log_uniform: A range [LOW, HIGH], sampled uniformly by the logarithm.
        uniform: A range [LOW, HIGH], sampled uniformly.
        integer: A range [LOW, HIGH] of integers, sampled uniformly.
        choice: A list of values, sampled uniformly; a value may be a whole section.
        linked: More fields with the same value, such as method.sigma with certify.sigma. Or by
            field a list with one value for each value of `choice`, for fields that are only valid
            together, such as the two parts of a noise split.
    """

    log_uniform: tuple[Finite, Finite] | None = None
    uniform: tuple[Finite, Finite] | None = None
    integer: tuple[BoundedInt, BoundedInt] | None = None
    choice: Annotated[tuple[Json, ...], Field(max_length=1000)] | None = None
    linked: Annotated[
        Annotated[tuple[Text, ...], Tag("fields")]
        | Annotated[dict[Text, tuple[Json, ...]], Tag("values")],
        Discriminator(_also_kind),
    ] = ()

    def rules(self) -> Iterator[Rule]:
        kinds = ("log_uniform", "uniform", "integer", "choice")
        given = [kind for kind in kinds if getattr(self, kind) is not None]
        yield Rule(len(given) != 1, f"give exactly one of {', '.join(kinds)}")
        yield Rule(self.choice == (), "must not be empty", "choice")
        if self.choice is None:
            low, high = self.values_or_bounds
            yield Rule(not low <= high, "must be [LOW, HIGH], ascending", given[0])
            yield Rule(self.log_uniform and low <= 0, "must have a low end above 0", "log_uniform")
        if not isinstance(self.linked, dict):
            return
        named = "must be names of fields, without values, with a range"
        yield Rule(self.choice is None, named, "linked")
        choice = self.choice or ()
        for field, listed in self.linked.items():
            rule = f"must have one value for each of choice's {len(choice)}, got {len(listed)}"
            yield Rule(len(listed) != len(choice), rule, f"linked.{field}")
        again = any(value in choice[:place] for place, value in enumerate(choice))
        yield Rule(again, "must not repeat a value if linked has values", "choice")

    @property
    def values_or_bounds(self) -> tuple[Any, ...]:
        """Return every listed value, or the two ends of the range."""
        found = self.choice or self.integer or self.uniform or self.log_uniform
        assert found is not None
        return found

    def value_of(self, field: str, value: Any) -> Any:
        """Return the value of `field` if the domain's own field has `value`.

        Raises UserError for an unlisted value, if `linked` has values.
        """
        if self.choice is None or not isinstance(self.linked, dict) or field not in self.linked:
            return value
        if value not in self.choice:
            raise UserError(f"must be {self.description}, got {value}")
        return self.linked[field][self.choice.index(value)]

    @property
    def description(self) -> str:
        """Return the values in words."""
        if self.choice is not None:
            text = f"one of {', '.join(map(str, self.choice))}"
        else:
            low, high = self.values_or_bounds
            text = f"{low:g} to {high:g}{', integers' if self.integer else ''}"
        more = f"; the same for {', '.join(self.linked)}" if self.linked else ""
        if isinstance(self.linked, dict):
            more = "".join(
                f"; with {field} {', '.join(map(str, values))}"
                for field, values in self.linked.items()
            )
        return f"{text}{', uniform by the logarithm' if self.log_uniform else ''}{more}"


class NumTrialsRecipe(Section):
    """The distribution of the number of trials K.

    logarithmic, geometric, negative-binomial, poisson and binomial sample a secret K with this
    mean; only the best trial is ever released. fixed: K = runs is public, with the privacy cost of
    plain composition; every trial may be shown, and the searcher may adapt.

    Attributes:
        name: The distribution.
        mean: Mean of the number of trials, of every distribution except fixed.
        shape: Shape of num_trials negative-binomial, at least -1/2.
        runs: Number of trials of num_trials fixed; the largest number of num_trials binomial, which
            limits the time of a search.
    """

    name: Literal["logarithmic", "geometric", "negative-binomial", "poisson", "binomial", "fixed"]
    mean: Annotated[float, RejectBool, Field(ge=1, le=10_000)] | None = None
    # Below -1/2 the tail of K is too long to run every sample.
    shape: Annotated[float, RejectBool, Field(ge=-0.5, le=1000)] | None = None
    runs: TrialCount | None = None

    def rules(self) -> Iterator[Rule]:
        only = "must be given with num_trials {}, and only then"
        runs = (self.name in ("fixed", "binomial")) != (self.runs is not None)
        yield Rule(runs, only.format("fixed or binomial"), "runs")
        mean = "must be given unless num_trials is fixed, and only then"
        yield Rule((self.name == "fixed") == (self.mean is not None), mean, "mean")
        beyond = self.runs is not None and self.mean is not None and self.mean > self.runs
        yield Rule(beyond, f"must be <= runs ({self.runs})", "mean")
        shape = (self.name == "negative-binomial") != (self.shape is not None)
        yield Rule(shape, only.format("negative-binomial"), "shape")

    @property
    def secret_distribution(self) -> TrialDistribution | None:
        """Return the distribution of a secret number of trials; None if it is public."""
        if self.mean is None:
            return None
        if self.name == "binomial":
            return TrialDistribution(self.mean, -float(self.runs or 1))
        shapes = {"logarithmic": 0.0, "geometric": 1.0, "poisson": math.inf}
        return TrialDistribution(self.mean, shapes.get(self.name, self.shape or 0.0))

    @property
    def mean_trials(self) -> float:
        """Return the mean number of trials."""
        return self.mean or float(self.runs or 1)

    @property
    def description(self) -> str:
        """Return the distribution in words."""
        secret = self.secret_distribution
        return f"fixed, {self.runs} trials" if secret is None else secret.describe()

    @property
    def full_description(self) -> str:
        """Return the distribution in words, and what to expect: few trials, or none."""
        secret = self.secret_distribution
        if secret is None:
            return self.description
        if (none := 1 - secret.tail_probability(1)) >= 0.005:
            return f"{self.description} (no trial, and no model, with probability {none:.2f})"
        least = max(2, secret.quantile(0.05))  # there is always one
        chance = math.floor(100 * secret.tail_probability(least)) / 100
        return f"{self.description} (at least {least} with probability {chance:.2f})"


class PublicData(Section):
    """Named public records for scores, without privacy cost.

    Attributes:
        name: A built-in name, or a folder of Parquet files.
        root: Folder of the data set; by default data.root.
        split: The split for scores.
        max_records: Largest number of scored records.
    """

    name: Text
    root: FilePath | None = None
    split: Text = "test"
    max_records: Count | None = None


class FunctionScore(Section):
    """The score of a search over a function (`dpdist.tune`); no command can repeat it.

    Attributes:
        value: Name of the function that values a record.
        records: Number of scored records, which is public.
        public: Whether the scored records are public; private ones get noise on the sum of their
            values.
    """

    value: Text
    records: Count
    public: bool


Objective = Literal[
    "accuracy",
    "brier",
    "log-loss",
    "balanced-accuracy",
    "value",
    "certified-accuracy",
    "average-radius",
]
_KEYS = {  # of each objective that needs some
    "certified-accuracy": ("radius",),
    "average-radius": ("radius_cap",),
    "log-loss": ("log_loss_cap",),
    "balanced-accuracy": ("class_weights",),
    "value": ("value", "value_range"),
}
_UNWRITTEN = Field(exclude_if=lambda value: value is None)  # omitted from recipes without it


class ScoreRecipe(Section):
    """The score of a trial: by public records, or by a noisy sum over held-out private ones.

    With privacy.unit: user, `private_eval_fraction` and `noise` are of users; each adds its
    records' mean.

    Attributes:
        public: Named public records for scores, without privacy cost.
        private_eval_fraction: Fraction of the training records (by hash) held out for scores.
        noise: Standard deviation of the noise on the sum over held-out records; by default the
            privacy cost of scores is at most that of the training.
        objectives: Weights of accuracy, brier (1 - half the Brier score), log-loss (1 - log loss /
            `log_loss_cap`), balanced-accuracy (by `class_weights`), value (your own function),
            certified-accuracy (at L2 `radius`) and average-radius (cut at `radius_cap`). Each is a
            record's value in [0, 1], so that a record, or a user, changes the sum by at most 1.
            The certified ones smooth with certify.sigma.
        radius: The L2 radius of objective certified-accuracy.
        radius_cap: The largest radius of an input in objective average-radius.
        log_loss_cap: The largest log loss of a record, in nats, of objective log-loss.
        class_weights: PUBLIC weights of the classes, in their order, of objective
            balanced-accuracy: 1 / (classes * fraction of the class).
        value: The function of objective value, `package.module:function`: of a model and a batch
            (inputs, targets) to one value per record, the larger the better. It is executed.
        value_range: The range [LOW, HIGH] to which values are clipped.
        samples: Number of noisy copies of each record that bound its probability; first the same
            number, at most 100, select its class.
        alpha: Error probability of each record's certificate in a score.
        function: The score of a search over a function; only `dpdist.tune` writes it.
    """

    conditions = (
        OptionCondition(
            ("private_eval_fraction",),
            "without public, as it is of private records",
            lambda it: not it.is_public and it.function is None,
        ),
        OptionCondition(
            ("samples", "alpha"),
            "with objectives certified-accuracy and average-radius",
            lambda it: it.needs_certificates,
        ),
    )

    public: PublicData | None = None
    private_eval_fraction: Probability = 0.1
    noise: Positive | None = None
    objectives: dict[Objective, Positive] = Field(default={"accuracy": 1.0}, min_length=1)
    radius: PositiveOrZero | None = None
    radius_cap: Positive | None = None
    log_loss_cap: Annotated[Positive | None, _UNWRITTEN] = None
    class_weights: Annotated[tuple[Positive, ...] | None, _UNWRITTEN] = None
    value: Annotated[Text | None, _UNWRITTEN] = None
    value_range: Annotated[tuple[Finite, Finite] | None, _UNWRITTEN] = None
    samples: Count = 100
    alpha: Probability = 0.01
    function: FunctionScore | None = None

    def rules(self) -> Iterator[Rule]:
        for objective, keys in _KEYS.items():
            for key in keys:
                wrong = (objective in self.objectives) != (getattr(self, key) is not None)
                yield Rule(wrong, f"must be given with objective {objective}, and only then", key)
        low, high = self.value_range or (0, 1)
        yield Rule(low >= high, "must be [LOW, HIGH], ascending", "value_range")
        noisy = self.is_public and self.noise is not None
        yield Rule(noisy, "must be left out with public records", "noise")

    @property
    def is_public(self) -> bool:
        """Return whether trials are scored on public records, without privacy cost."""
        return self.public is not None if self.function is None else self.function.public

    @property
    def needs_certificates(self) -> bool:
        return bool({"certified-accuracy", "average-radius"} & self.objectives.keys())

    def describe_records(self, counted: str) -> str:
        """Return the records that trials are scored on, in words.

        Args:
            counted: units of the plan, "records" or "users".
        """
        if self.function is not None:
            kind = "public records" if self.function.public else f"held-out private {counted}"
            noise = "" if self.function.public else ", with noise"
            return f"{self.function.records:,} {kind}{noise}"
        if self.public is None:
            return f"held-out private {counted}, with noise"
        return f"public records ({self.public.name}/{self.public.split})"

    @property
    def caution(self) -> str | None:
        """Return a caution about the objective, or None.

        Source: arXiv 2410.06895, where easy inputs alone raise the average.
        """
        if "average-radius" not in self.objectives:
            return None
        return (
            "easy inputs alone can raise the average radius, while fewer inputs are certified, "
            "unlike certified-accuracy at a radius (arXiv 2410.06895)"
        )

    def describe(self) -> str:
        """Return the objective of the search in words."""
        if self.function is not None:
            return f"mean of {self.function.value}"
        weights = ", ".join(f"{each:g}" for each in self.class_weights or ())
        names = {
            "accuracy": "accuracy",
            "certified-accuracy": f"certified accuracy at radius {self.radius or 0:g}",
            "average-radius": f"average certified radius (cut at {self.radius_cap or 0:g})",
            "brier": "Brier score",
            "log-loss": f"log loss clipped at {self.log_loss_cap or 0:g}",
            "balanced-accuracy": f"balanced accuracy (weights {weights})",
            "value": f"mean of {self.value}, clipped to {list(self.value_range or ())}",
        }
        total = sum(self.objectives.values())
        if len(self.objectives) == 1:
            return names[next(iter(self.objectives))]
        return " + ".join(f"{w / total:.3g} x {names[o]}" for o, w in self.objectives.items())


class AshaRecipe(Section):
    """Early stopping (ASHA): trials are scored at `rungs` points of training.

    The privacy cost includes every rung of every trial.

    Attributes:
        rungs: Number of points of a training at which it is scored.
        reduction_factor: Ratio of the steps of consecutive points; one of this many trials at a
            rung continues.
    """

    rungs: Annotated[int, RejectBool, Field(ge=2, le=100)] = 3
    reduction_factor: Annotated[int, RejectBool, Field(ge=2, le=100)] = 3


class TuneRecipe(Section):
    """A private search over fields of the recipe; epsilon then covers training and search.

    Attributes:
        space: The searched fields, by dotted key, each with its domain.
        num_trials: The distribution of the number of trials.
        score: The score by which the best trial is chosen.
        searcher: random samples each trial independently; optuna adapts to earlier scores, which
            only num_trials fixed allows.
        asha: Stop trials early by their scores, which only num_trials fixed allows.
        concurrent: Largest number of concurrent trials (default: as many as fit).
    """

    space: dict[str, Domain] = Field(min_length=1)
    num_trials: NumTrialsRecipe
    score: ScoreRecipe = ScoreRecipe()
    searcher: Literal["random", "optuna"] = "random"
    asha: AshaRecipe | None = None
    concurrent: Count | None = None

    def rules(self) -> Iterator[Rule]:
        secret = self.num_trials.name != "fixed"
        reason = (
            f"with num_trials {self.num_trials.name}, whose guarantee needs trials that are "
            "independent of the scores of others; use num_trials {name: fixed, runs: ...}"
        )
        yield Rule(
            secret and self.searcher != "random",
            f"must not be {self.searcher} {reason}",
            "searcher",
            see="explanation/tuning.md#why-may-no-searcher-adapt",
        )
        yield Rule(secret and self.asha is not None, f"must be left out {reason}", "asha")

    @property
    def searched_fields(self) -> tuple[str, ...]:
        """Return every field that the search sets, sorted."""
        return tuple(
            sorted({f for key, domain in self.space.items() for f in (key, *domain.linked)})
        )

    def scoring_phases(self, noise: float | None) -> tuple[Phase, ...]:
        """Return the phases of a trial's scores.

        Args:
            noise: standard deviation of the noise on the sum over held-out records; None if scores
                are of public records.
        """
        from dpdist.privacy.phases import GaussianReleases

        return () if noise is None else (GaussianReleases(noise, self.scores_per_trial),)

    @property
    def scores_per_trial(self) -> int:
        """Return the number of scores of each trial."""
        return 1 if self.asha is None else self.asha.rungs
