"""The recipe's sections `training` and `resources`: settings of the loop and of machines."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from dpdist.core.fields import (
    Count,
    CountOrZero,
    Cpus,
    FractionBelowOne,
    Gpus,
    JsonObject,
    OptionCondition,
    Positive,
    PositiveNoise,
    PositiveOrZero,
    Probability,
    ProcessCount,
    RejectBool,
    Rule,
    Section,
    Seed,
    Steps,
    Text,
)

if TYPE_CHECKING:
    from dpdist.privacy.phases import GaussianScores, Phase
    from dpdist.privacy.plan import PrivacyPlan

# --- training ---------------------------------------------------------------------------------


LOSSES = ("cross-entropy", "bce", "multi-label-bce", "mse", "huber")
CANONICAL_SHARDS = 8  # of `reproducible: true`; the most workers such a run can use


class TrainingRecipe(Section):
    """Settings of the training loop.

    Attributes:
        batch_size: The expected number of records of a step; the Poisson batch varies around it.
        steps: Number of steps. Give either this or `epochs`.
        epochs: Number of passes over the records: steps = epochs * records // batch_size.
        optimizer: The optimizer that takes the noisy gradients.
        loss: A name (`dpdist.gradients.objective`), or package.module:function, from the module and
            a batch to one value per record.
        learning_rate: The learning rate, which `schedule` scales.
        schedule: The factor of the learning rate over the training. The schedule step multiplies it
            by `factor` at each of the `milestones`.
        milestones: Fractions of all steps at which schedule step lowers the rate, ascending.
        factor: The factor of schedule step.
        momentum: Momentum of optimizer sgd.
        weight_decay: This multiple of the parameters is added to the noisy gradient, as in torch's
            SGD and Adam; with adamw it shrinks the parameters, times the learning rate. It is
            post-processing, without privacy cost.
        crop: Move the image of each sampled record at random by up to this many pixels in each
            direction, with black borders, before its clip; without privacy cost.
        flip: Mirror the image of each sampled record with probability 1/2; without privacy cost.
        ema: Average the parameters with this decay; post-processing, without privacy cost.
        init_seed: Seed of the initial weights, which are public.
        reproducible: Compute the same bits on any number of workers, by canonical shards; slower.
    """

    conditions = (
        OptionCondition(("factor",), "with schedule: step", lambda loop: loop.schedule == "step"),
    )

    batch_size: Count
    steps: Steps | None = None
    epochs: Count | None = None
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    loss: str = "cross-entropy"
    learning_rate: Positive
    schedule: Literal["constant", "cosine", "linear", "step"] = "constant"
    milestones: list[Probability] = Field(default=[], max_length=100)
    factor: Probability = 0.1
    momentum: FractionBelowOne = 0.0
    weight_decay: PositiveOrZero = 0.0
    crop: Annotated[int, RejectBool, Field(ge=0, le=64)] = 0
    flip: bool = False
    ema: Probability | None = None
    init_seed: Seed = 0
    reproducible: bool = False

    @field_validator("loss")
    @classmethod
    def _known_loss(cls, value: str) -> str:
        if value in LOSSES or re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*", value):
            return value
        raise ValueError(f"must be {', '.join(LOSSES)} or package.module:function")

    @property
    def own_loss(self) -> bool:
        """Return whether the loss is a user's function."""
        return self.loss not in LOSSES

    def rules(self) -> Iterator[Rule]:
        one = "give exactly one of steps and epochs"
        yield Rule((self.steps is None) == (self.epochs is None), one)
        momentum = self.momentum and self.optimizer != "sgd"
        yield Rule(momentum, "must be left out unless optimizer is sgd", "momentum")
        yield Rule(
            (self.schedule == "step") != bool(self.milestones),
            "must be given with schedule: step, and only then: the fractions of the training at "
            "which the rate falls, such as [0.5, 0.75]",
            "milestones",
        )
        ascending = self.milestones == sorted(set(self.milestones))
        yield Rule(not ascending, f"must ascend, got {self.milestones}", "milestones")

    @property
    def has_augmentation(self) -> bool:
        """Return whether images are moved or mirrored at random."""
        return self.crop > 0 or self.flip


# --- training by a script ---------------------------------------------------------------------


class ScriptTraining(TrainingRecipe):
    """The part of a training that a script's loop takes from the plan.

    The script has its own optimizer, learning rate and schedule.
    """

    optimizer: Literal["script"] = "script"  # type: ignore[assignment]
    learning_rate: Positive | None = None  # type: ignore[assignment]


class ScriptScore(Section):
    """The scores on held-out private records by `dpdist.PrivateTraining.score`.

    every: steps from one score to the next. noise: standard deviation on the sum of the records'
    values. records: public number of held-out records. value: name of a record's value.
    """

    every: Steps
    noise: PositiveNoise
    records: Count
    value: Text

    def phases(self, training: tuple[Phase, ...], steps: int) -> tuple[Phase, ...]:
        """Return the phases of a training of `steps` steps together with its scores.

        Raises:
            ValueError: there are fewer than `every` steps.
        """
        from dpdist.privacy.phases import ScoredTraining

        return (ScoredTraining((training, (self.scores(steps),))),)

    def scores(self, steps: int) -> GaussianScores:
        """Return the phase of the scores of a training of `steps` steps. Raises ValueError."""
        from dpdist.privacy.phases import GaussianScores

        if self.every > steps:
            raise ValueError(f"score.every: must be <= the {steps} steps, got {self.every}")
        return GaussianScores(self.noise, steps // self.every, records=self.records)


class Stage(Section):
    """The card of an earlier run whose weights a script started with.

    name: of the run or release. places: its folder, and those of the runs before it. plan:
    everything that it released or may still release. unit, guarantee, assumed: as on its card.
    fixed_key: whether its run key was fixed, so that its noise can be subtracted. in_target:
    whether privacy.epsilon covers it and the run together, as for statistics.
    """

    name: Text
    places: list[Text] = Field(max_length=1000)
    plan: JsonObject
    unit: Text
    guarantee: JsonObject
    fixed_key: bool
    assumed: list[Text] = Field(max_length=1000)
    in_target: bool = False

    @property
    def stated(self) -> str:
        """Return its guarantee in words."""
        from dpdist.privacy.guarantee import format_delta, format_epsilon, kind_of

        epsilon, delta = self.guarantee["epsilon"], self.guarantee["delta"]
        private = "NOT PRIVATE" if self.fixed_key else kind_of(self.assumed)
        return (
            f"{self.name}: epsilon {format_epsilon(epsilon)} at delta {format_delta(delta)}, "
            f"{private}, for {self.unit}, {self.guarantee['relation']}"
        )

    def phases_within(self, plan: PrivacyPlan, unit: str) -> tuple[Phase, ...] | None:
        """Return its phases as a part of a later plan for this unit.

        None without a joint guarantee, for a different unit or adjacency. Statistics are of a
        table, whose column of users the training may not name.
        """
        from dpdist.privacy.phases import NonPrivate, walk_phases
        from dpdist.privacy.plan import PrivacyPlan

        if float(self.guarantee["epsilon"]) == math.inf:
            return (NonPrivate(f"nothing is proved of {self.name}, whose weights it began with"),)
        own = PrivacyPlan.from_dict(self.plan)
        capped = any(each.has_batch_cap for each in walk_phases((*own.phases, *plan.phases)))
        same = all(getattr(own, n) == getattr(plan, n) for n in ("adjacency", "nominal", "user"))
        same = same and (own.records == plan.records or not capped)
        return own.phases if same and (self.in_target or self.unit == unit) else None


class ScriptRecipe(Section):
    """The arguments of `dpdist.PrivateTraining` in words; no command can repeat them.

    model, optimizer, loss: names of their classes or functions. replaced: parts of the data that
    were not used. unused: parameters that the loss does not depend on, which are not trained.
    assumed: unchecked assumptions of the guarantee. score: scores included in the plan. unit: the
    protected unit, in words, unless it is "one record". began_with: the runs whose weights it
    started with.
    """

    model: Text
    optimizer: Text
    loss: Text
    replaced: list[Text] = Field(default=[], max_length=100)
    unused: list[Text] = Field(default=[], max_length=10000)
    assumed: list[Text] = Field(default=[], max_length=100)
    score: ScriptScore | None = None
    unit: Text | None = None
    began_with: list[Stage] = Field(default=[])


# --- resources --------------------------------------------------------------------------------


class WorkerRange(Section):
    """A range of training workers: as many as the cluster has resources for.

    Attributes:
        min: Smallest number of workers with which the training proceeds.
        max: Largest number of workers.
    """

    min: ProcessCount
    max: ProcessCount

    def rules(self) -> Iterator[Rule]:
        order = f"min must be at most max, got {self.min} and {self.max}"
        yield Rule(self.min > self.max, order)


def _worker_count_kind(value: Any) -> str:
    return "range" if isinstance(value, dict | WorkerRange) else "number"


AnyWorkers = Annotated[
    Annotated[ProcessCount, Tag("number")] | Annotated[WorkerRange, Tag("range")],
    Discriminator(_worker_count_kind),
]


class ResourcesRecipe(Section):
    """Settings of the machines and processes of a run; they may change when a run continues.

    Attributes:
        workers: Number of training workers, or a range {min: 1, max: 8}: as many as there are
            resources for at any time.
        cpus_per_worker: CPUs of each training worker, also a fraction.
        gpus_per_worker: GPUs of each training worker, also a fraction.
        noise: The device that draws a step's noise: the host's CPU, or the worker's device.
        micro_batch: Number of records in one pass of the model; by default chosen to fit. With 1 a
            record's rounding does not depend on others, even if a model selects records by values.
        rounding: Layout of the passes: standard, or fixed-row, in which a record's row depends only
            on its id and the step's key, so that no bound assumes how rows round; slower.
        checkpoint_seconds: Seconds between two checkpoints of a training.
        max_failures: Number of times that failed workers are restarted.
        certify_actors: Number of processes that certify or attack; by default one per CPU, or per
            GPU fraction.
    """

    workers: AnyWorkers = 1
    cpus_per_worker: Cpus = 1
    gpus_per_worker: Gpus = 0
    noise: Literal["host", "device"] = "host"
    micro_batch: Count | None = None
    rounding: Literal["standard", "fixed-row"] = "standard"
    checkpoint_seconds: Positive = 30
    max_failures: CountOrZero = 3
    certify_actors: ProcessCount | None = None
    certify_gpus: Gpus | None = Field(
        default=None,
        description="GPUs of each certifying actor, also a fraction; default: 1 if there are GPUs",
    )
    archive: str | None = Field(
        default=None, description="copy the run to s3://BUCKET/PREFIX (gs://, file://) as it goes"
    )
    archive_private: bool = Field(
        default=False,
        description="also copy the private state, so that a lost run folder can be restored",
    )

    def rules(self) -> Iterator[Rule]:
        each = (self.cpus_per_worker, self.gpus_per_worker)
        yield Rule(
            self.is_elastic and any(amount != int(amount) for amount in each),
            "must be a number with fractions of cpus_per_worker or gpus_per_worker, which Ray "
            "miscounts in a range",
            "workers",
        )
        # Not a rule of the field, whose message would show a password.
        address = self.archive
        yield Rule(
            address is not None and not re.fullmatch(r"(s3|gs|file)://[^@\s]+", address),
            "must be s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or file:///FOLDER, without "
            "credentials, which come from the environment",
            "archive",
        )
        needs = "needs archive, the address to copy to"
        yield Rule(self.archive_private and address is None, needs, "archive_private")

    @property
    def is_elastic(self) -> bool:
        """Return whether the number of training workers may change while they train."""
        return isinstance(self.workers, WorkerRange)

    @property
    def min_workers(self) -> int:
        """Return the smallest number of workers with which the training proceeds."""
        return self.workers.min if isinstance(self.workers, WorkerRange) else self.workers

    @property
    def max_workers(self) -> int:
        return self.workers.max if isinstance(self.workers, WorkerRange) else self.workers

    @property
    def worker_count_text(self) -> str:
        """Return the number of training workers, in words."""
        least = f"{self.min_workers:,} to " if self.is_elastic else ""
        return f"{least}{self.max_workers:,}"

    @property
    def min_cpus(self) -> float:
        """Return the smallest number of CPUs with which the training proceeds."""
        return self.min_workers * self.cpus_per_worker
