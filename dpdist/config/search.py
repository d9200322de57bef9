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
    """The values of one field: exactly one of a range (both ends included) and a list.

    Attributes:
        log_uniform: A range [LOW, HIGH], drawn evenly by the logarithm.
        uniform: A range [LOW, HIGH], drawn evenly.
        integer: A range [LOW, HIGH] of whole numbers, drawn evenly.
        choice: A list of values, drawn evenly; a value may be a whole section.
        linked: Further fields that take the same value, such as method.sigma beside certify.sigma.
            Or by field a list with one value for each value of `choice`, in its order, for fields
            that only go together, such as the two parts of a noise split.
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
        yield Rule(self.choice == (), "choice must not be empty")
        if self.choice is None:
            low, high = self.values_or_bounds
            yield Rule(not low <= high, f"{given[0]} must be [low, high], ascending")
            yield Rule(self.log_uniform and low <= 0, "log_uniform needs a low end above 0")
        if not isinstance(self.linked, dict):
            return
        named = "linked: must be names of fields, without values, beside a range"
        yield Rule(self.choice is None, named)
        choice = self.choice or ()
        for field, listed in self.linked.items():
            yield Rule(
                len(listed) != len(choice),
                f"linked: {field}: must list one value for each of choice's {len(choice)}, got "
                f"{len(listed)}",
            )
        again = any(value in choice[:place] for place, value in enumerate(choice))
        yield Rule(again, "choice: must not repeat a value where also has values beside it")

    @property
    def values_or_bounds(self) -> tuple[Any, ...]:
        """Return every listed value, or the two ends of the range."""
        found = self.choice or self.integer or self.uniform or self.log_uniform
        assert found is not None
        return found

    def value_of(self, field: str, value: Any) -> Any:
        """Return the value that `field` gets where the domain's own field gets `value`.

        Raises UserError for a value that is not listed, where others stand beside those that are.
        """
        if self.choice is None or not isinstance(self.linked, dict) or field not in self.linked:
            return value
        if value not in self.choice:
            raise UserError(f"must be {self.description}, got {value}")
        return self.linked[field][self.choice.index(value)]

    @property
    def description(self) -> str:
        """Return the values for a reader."""
        if self.choice is not None:
            text = f"one of {', '.join(map(str, self.choice))}"
        else:
            low, high = self.values_or_bounds
            text = f"{low:g} to {high:g}{', whole numbers' if self.integer else ''}"
        more = f"; the same for {', '.join(self.linked)}" if self.linked else ""
        if isinstance(self.linked, dict):
            more = "".join(
                f"; with {field} {', '.join(map(str, values))}"
                for field, values in self.linked.items()
            )
        return f"{text}{', evenly by its logarithm' if self.log_uniform else ''}{more}"


class NumTrialsRecipe(Section):
    """The distribution of the number of trials K.

    logarithmic, geometric, negative-binomial, poisson and binomial draw a secret K with this mean;
    only the best trial is ever released. fixed: K = runs, public, paid by plain composition; every
    trial may be shown, and the searcher may adapt.

    Attributes:
        name: The distribution.
        mean: Mean of the number of trials, of every distribution but fixed.
        shape: Shape of num_trials negative-binomial, at least -1/2.
        runs: Number of trials of num_trials fixed; the most trials of num_trials binomial, so that
            a search has a longest time.
    """

    name: Literal["logarithmic", "geometric", "negative-binomial", "poisson", "binomial", "fixed"]
    mean: Annotated[float, RejectBool, Field(ge=1, le=10_000)] | None = None
    # Below -1/2 the tail of K is so long that no computer could run every draw.
    shape: Annotated[float, RejectBool, Field(ge=-0.5, le=1000)] | None = None
    runs: TrialCount | None = None

    def rules(self) -> Iterator[Rule]:
        runs = "runs belongs to the distributions fixed and binomial, which need it"
        yield Rule((self.name in ("fixed", "binomial")) != (self.runs is not None), runs)
        mean = "mean (of the number of trials) belongs to every distribution but fixed"
        yield Rule((self.name == "fixed") == (self.mean is not None), mean)
        beyond = self.runs is not None and self.mean is not None and self.mean > self.runs
        yield Rule(beyond, f"mean must be <= runs, the {self.runs} trials there may be")
        shape = "shape belongs to num_trials negative-binomial, which needs it"
        yield Rule((self.name == "negative-binomial") != (self.shape is not None), shape)

    @property
    def secret_distribution(self) -> TrialDistribution | None:
        """Return the distribution of a secret number of trials; None if it is fixed and public."""
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
        """Return the distribution in words; with `fixed` the number of trials is public."""
        secret = self.secret_distribution
        return f"fixed, {self.runs} trials" if secret is None else secret.describe()

    @property
    def full_description(self) -> str:
        """Return the distribution in words, with a number of trials hardly ever exceeded."""
        secret = self.secret_distribution
        if secret is None:
            return self.description
        least = secret.quantile(0.05)
        chance = math.floor(100 * secret.tail_probability(least)) / 100
        return f"{self.description} (at least {least} with probability {chance:.2f})"


class PublicData(Section):
    """Named public records to score on, free of charge.

    Attributes:
        name: A built-in name, or a folder of Parquet files.
        root: Folder that holds the data set; by default data.root.
        split: The split that is scored on.
        max_records: The most records that are scored.
    """

    name: Text
    root: FilePath | None = None
    split: Text = "test"
    max_records: Count | None = None


class FunctionScore(Section):
    """Describe the score of a search over a function (`dpdist.tune`); no command can repeat it.

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
_UNWRITTEN = Field(exclude_if=lambda value: value is None)  # in recipes that do without


class ScoreRecipe(Section):
    """The score of a trial: by public records, or by a noisy count over held-out private ones.

    With privacy.unit: user, `private_eval_fraction` and `noise` are of users; each adds its
    records' mean.

    Attributes:
        public: Named public records to score on, free of charge.
        private_eval_fraction: The fraction of the training records (by hash) kept for scoring.
        noise: Standard deviation of the noise on the count of held-out records; by default as much
            as costs no more than the training.
        objectives: Weights of accuracy, brier (1 - half the Brier score), log-loss (1 - log loss /
            `log_loss_cap`), balanced-accuracy (by `class_weights`), value (a function of yours),
            certified-accuracy (at L2 `radius`) and average-radius (cut at `radius_cap`). Each is a
            record's value in [0, 1], so that a record, or a person, moves the sum by 1 at most.
            The certified ones smooth with certify.sigma.
        radius: The L2 radius of objective certified-accuracy.
        radius_cap: The cut of objective average-radius: one input counts at most this much.
        log_loss_cap: The largest log loss of a record, in nats, of objective log-loss.
        class_weights: PUBLIC weights of the classes, in their order, of objective
            balanced-accuracy: 1 / (classes * share of the class).
        value: The function of objective value, `package.module:function`: of a model and a batch
            (inputs, targets) to one value per record, the larger the better. It is executed.
        value_range: The range [LOW, HIGH] that values are clipped to.
        samples: Noisy copies of each record that bound its probability; as many, 100 at most,
            choose its class before.
        alpha: Error probability of each record's certificate in a score.
        function: The score of a search over a function; written by `dpdist.tune` alone.
    """

    conditions = (
        OptionCondition(
            ("private_eval_fraction",),
            "without public: it is of private records",
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
                missing = (objective in self.objectives) != (getattr(self, key) is not None)
                yield Rule(missing, f"{key} belongs to objective {objective}, which needs it")
        low, high = self.value_range or (0, 1)
        yield Rule(low >= high, "value_range must be [low, high], ascending")
        noise = "noise belongs to private scoring; public records need none"
        yield Rule(self.is_public and self.noise is not None, noise)

    @property
    def is_public(self) -> bool:
        """Return whether trials are scored on public records, which costs nothing."""
        return self.public is not None if self.function is None else self.function.public

    @property
    def needs_certificates(self) -> bool:
        return bool({"certified-accuracy", "average-radius"} & self.objectives.keys())

    def describe_records(self, counted: str) -> str:
        """Return the records that trials are scored on, in words.

        Args:
            counted: the word for the units of the plan, "records" or "users".
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
        """Return what a reader must know of the objective, if anything.

        Source: arXiv 2410.06895, where the average is raised by easy inputs alone.
        """
        if "average-radius" not in self.objectives:
            return None
        return (
            "the average radius can be raised by easy inputs alone, while fewer are certified: "
            "certified-accuracy at a radius cannot (arXiv 2410.06895)"
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

    Every rung of every trial is charged beforehand.

    Attributes:
        rungs: Number of points of a training at which it is scored.
        reduction_factor: Each point is this many times the last; of the trials at a rung one in so
            many goes on.
    """

    rungs: Annotated[int, RejectBool, Field(ge=2, le=100)] = 3
    reduction_factor: Annotated[int, RejectBool, Field(ge=2, le=100)] = 3


class TuneRecipe(Section):
    """A private search over fields of the recipe; epsilon then covers training and search.

    Attributes:
        space: The searched fields, by dotted key, each with its domain.
        num_trials: The distribution of the number of trials.
        score: The score by which the best trial is chosen.
        searcher: random draws each trial by itself; optuna adapts to earlier scores, which only
            num_trials fixed allows.
        asha: Stop trials early by their scores, which only num_trials fixed allows.
        concurrent: The most trials at once (default: as many as fit).
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
            "sees the scores of other trials, which the best of a secret number of independent "
            f"trials (distribution {self.num_trials.name}) does not cover: take num_trials "
            f"{{name: fixed, runs: ...}}, "
            "whose composition pays for every score"
        )
        yield Rule(
            secret and self.searcher != "random",
            f"searcher {self.searcher} {reason}",
            see="explanation/tuning.md#why-may-no-searcher-adapt",
        )
        yield Rule(secret and self.asha is not None, f"asha {reason}")

    @property
    def searched_fields(self) -> tuple[str, ...]:
        """Return every field that the search sets, sorted."""
        return tuple(
            sorted({f for key, domain in self.space.items() for f in (key, *domain.linked)})
        )

    def scoring_phases(self, noise: float | None) -> tuple[Phase, ...]:
        """Return the phases of a trial's scores.

        Args:
            noise: standard deviation of the noise on the count of held-out records; None where
                scores are of public records, which cost nothing.
        """
        from dpdist.privacy.phases import GaussianReleases

        return () if noise is None else (GaussianReleases(noise, self.scores_per_trial),)

    @property
    def scores_per_trial(self) -> int:
        """Return how often each trial is scored."""
        return 1 if self.asha is None else self.asha.rungs
