"""The base classes of methods: options and cost of a published system, and its training.

* `Method`: the options of the recipe's `method` section, rules across sections, cost, the paper's
  claim, and descriptions for plans and reports;
* `Capabilities`: the facts by which the rest of dpdist decides;
* `Execution`: the hooks of a training, four of which are those of a step. Its defaults are DP-SGD.

No other code depends on a recipe's method. A recipe is read without torch: an execution that needs
torch at module level is in a separate file, which imports the options and is loaded by name
(`load_execution`).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Generic,
    Protocol,
    TypeVar,
    final,
)

from pydantic import Field

from dpdist.config.sections import BaseRecipe
from dpdist.core.errors import UserError
from dpdist.core.fields import OptionCondition, RejectBool, Section, value_and_default
from dpdist.privacy.phases import GaussianSteps, Phase
from dpdist.privacy.plan import PrivacyPlan, StepPlan

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from dpdist.data import Dataset
    from dpdist.gradients.clipping import Clipping
    from dpdist.gradients.engine import GradientEngine, TrainingObjective
    from dpdist.gradients.perturbations import Perturbation
    from dpdist.models import ModelSpec
    from dpdist.privacy.claims import Claim
    from dpdist.privacy.guarantee import Guarantee

# of perturbations per record and step
DrawCount = Annotated[int, RejectBool, Field(ge=1, le=10_000)]


# --- options, facts and cost ------------------------------------------------------------------


@dataclass(frozen=True)
class Capabilities:
    """The facts about a method with its options by which the rest of dpdist decides.

    The defaults are the safe choice: training record by record on numbers, with a cross-entropy.

    Args:
        takes_gradient_steps: whether the plan's steps are sums of clipped gradients, which audits
            can inspect.
        steps_are_post_processing: whether private data are released with noise before the steps
            (`Execution.transform_records`), which then have no noise of their own.
        needs_batched_passes: whether the method needs a pass of several records.
        has_prediction_noise: whether the trained model has its own noise, in training and at every
            prediction.
        supports_frozen_denoiser: whether a frozen denoiser may come before the trained network: all
            inputs pass it, and no noise belongs after the network's own first layer.
        supports_tokens: whether a record may be tokens (data.text), to which noise cannot be added.
        plain_steps: whether every pass of the steps is the engine's, over records with their own
            targets, and the steps are those given to `Method.cost`. An example may then be a user
            (privacy.unit: user), records may be sampled at rates of their classes
            (data.class_sampling), training.loss need not be cross-entropy, and the model may use
            random numbers (dropout).
        not_releasable_reason: reason why no model may be released; None for a releasable model.
            Other models only answer (`Execution.answer`), as often as the plan counts.
        trained_elsewhere: reason why no training of the run can be executed, audited or accounted;
            None if dpdist trains.
        picture_preparation: conversion of pictures to inputs, as text; "" without pictures.
        max_evaluation_queries: number of test inputs for the evaluation if answers are counted;
            None for all.
    """

    takes_gradient_steps: bool = True
    steps_are_post_processing: bool = False
    needs_batched_passes: bool = False
    has_prediction_noise: bool = False
    supports_frozen_denoiser: bool = True
    supports_tokens: bool = False
    plain_steps: bool = False
    not_releasable_reason: str | None = None
    trained_elsewhere: str | None = None
    picture_preparation: str = ""
    max_evaluation_queries: int | None = None


@dataclass(frozen=True)
class PublicRecords:
    """Public records that a method reads: the training split of a named data set.

    Args:
        recipe_key: the key of the recipe that names it, for errors.
        dataset_name: the data set, which has `classes` classes.
        root: its folder; None: where the recipe's own data lie.
        used_for_training: a model is trained on them, so that no test record may be among them.
    """

    recipe_key: str
    dataset_name: str
    classes: int
    root: Path | None = None
    used_for_training: bool = False

    def check(self, public_dataset: Any, private_dataset: Any, context: str) -> None:
        """Raise UserError for records that do not fit the method or the private records."""

    def assumptions(self, recipe: BaseRecipe) -> list[str]:
        """Return the unchecked assumption: no private record is among them in a different form."""
        compared = recipe.privacy.noise_multiplier != 0  # else nothing was promised
        if not compared or (recipe.data.public and self.dataset_name == recipe.data.name):
            return []
        return [
            "no private record is, in another shape, among the public records of "
            f"{self.dataset_name} that shaped the noise (in the same shape: compared by content)"
        ]


class Method(Section):
    """A published system: its options, rules, cost and words. The defaults are plain DP-SGD's.

    A subclass gives `name`, its options as fields, and overrides what differs. Nothing is
    abstract.

    Attributes:
        name: The method's name, or package.module:Class for a class of your own.
    """

    name: str

    display_name: ClassVar[str] = ""  # to people
    # conditions of keys of a whole recipe
    recipe_conditions: ClassVar[tuple[OptionCondition, ...]] = ()
    # keys of a recipe that it does not go with, and why
    excluded: ClassVar[Mapping[str, str]] = {}

    @property
    @final
    def title(self) -> str:
        """Return the name for readers; for a class of your own, its location."""
        return self.display_name if self.display_name and ":" not in self.name else self.name

    # --- facts and rules

    @property
    def capabilities(self) -> Capabilities:
        """Return the facts about the method with these options."""
        return Capabilities()

    @property
    def public_records(self) -> PublicRecords | None:
        """Return the public records that it reads, which are compared with the private ones."""
        return None

    def check(self, recipe: BaseRecipe) -> None:
        """Raise ValueError for a recipe that does not fit the method."""
        for key, why in self.excluded.items():
            value, usual = value_and_default(recipe, key)
            if value != usual:
                raise ValueError(f"method {self.name} does not go with {key}{why}")
        privacy, own = recipe.privacy, self.capabilities
        unclipped = privacy.clipping == "none" and privacy.noise_multiplier != 0
        if unclipped and not own.steps_are_post_processing:
            raise ValueError(
                "privacy.clipping: none is training without privacy: noise_multiplier: 0"
            )
        if recipe.certify and recipe.certify.sigma is None and not own.has_prediction_noise:
            raise ValueError(
                "certify.sigma is required: the model of this method has no noise of its own"
            )
        if recipe.tune and recipe.tune.asha and not own.takes_gradient_steps:
            raise ValueError(
                f"tune.asha: method {self.name} takes no steps of which the first could be scored"
            )
        if recipe.model.vmap and own.needs_batched_passes:
            raise ValueError(f"model.vmap: method {self.name} runs records together")

    def cost(self, steps: GaussianSteps) -> tuple[Phase, ...]:
        """Return the phases of a training whose steps, by the recipe, are `steps`.

        Plans, searches, previews, budgets and the calibration of noise use only this. Other reading
        of private records comes before the steps: (GaussianReleases(5.0), steps).
        """
        return (steps,)

    # --- words for plans and reports

    def describe(self, plan: PrivacyPlan) -> str:
        """Return a description of the executed training for a report."""
        step = plan.step(0)
        clip = "no clip" if math.isinf(step.clip_norm) else f"clip {step.clip_norm:g}"
        return (
            f"{plan.steps:,} steps, expected batch {step.expected_batch:g}, noise multiplier "
            f"{step.noise_multiplier:.4g}, {clip}"
        )

    def claim(self, plan: PrivacyPlan, proved: Guarantee) -> Claim | None:
        """Return the paper's privacy claim for a run with this plan, or None.

        It is shown next to the proved guarantee. None if the paper has no claim of its own.
        """
        return None

    def assumptions(self, recipe: BaseRecipe) -> list[str]:
        """Return the assumptions of the guarantee that cannot be checked."""
        return []

    def reported_values(self, private_folder: Path) -> list[tuple[str, str]]:
        """Return name and value of results of `Execution.measure` for summary, report and card.

        `measure` stored them in the run's private folder. They are published, so they may depend
        only on public data and released parameters.
        """
        return []

    # --- the way to its training

    def execution(self) -> Execution[Any]:
        """Return the hooks of its training.

        Either an `Execution` of the same file that imports torch inside its hooks, or
        `load_execution` of a file that imports torch itself.
        """
        return Execution(self)


def load_execution(location: str, method: Method) -> Execution[Any]:
    """Return the execution of a method from a file that imports torch, which is loaded only now.

    Args:
        location: package.module:Class of a subclass of `Execution`. It is named and not imported,
            so that the options do not depend on the file that executes them.
        method: the options.
    """
    module, _, name = location.partition(":")
    found: Execution[Any] = getattr(importlib.import_module(module), name)(method)
    return found


# --- how a method trains ----------------------------------------------------------------------


M = TypeVar("M", bound=Method)


@dataclass(frozen=True)
class Execution(Generic[M]):
    """The hooks of a training. The defaults are plain DP-SGD's.

    Most methods override one to four: `prepare_state` before the first step, `perturbation` in a
    step, `project_parameters` after it, `finalize` after the last. `train`, `own_steps`, `measure`
    and `answer` are for methods beyond plain gradient steps. Scales come from public
    hyperparameters only, and every reading of private records is in `Method.cost`.

    Args:
        method: the options.
    """

    method: M

    # --- the task and its sums

    def task(self) -> TrainingObjective:
        """Return the learning task; by default, to classify."""
        from dpdist.gradients.engine import TrainingObjective

        return TrainingObjective()

    def engine(
        self,
        model: nn.Module,
        clipping: Clipping,
        *,
        expected_batch: float,
        steps: int,
        micro_batch: int | None = None,
        vmap: bool = False,
    ) -> GradientEngine:
        """Return the engine that sums clipped gradients of the trained part of `model`.

        Raises UserError for a model that mixes records.
        """
        from dpdist.gradients.engine import GradientEngine

        task = self.task()
        return GradientEngine(
            task.trained_module(model),
            task.loss_function,
            clipping=clipping,
            micro_batch=micro_batch,
            vmap=vmap,
        )

    # --- the four of a step, and a placeholder of the first

    def prepare_state(self, setup: MethodSetup) -> dict[str, Tensor]:
        """Return the tensors that worker 0 computes once and the private folder keeps."""
        return {}

    def placeholder_state(
        self, model: nn.Module, input_shape: tuple[int, ...]
    ) -> dict[str, Tensor]:
        """Return tensors with the shapes of `prepare_state`, without reading a record."""
        return {}

    def perturbation(
        self, step: StepPlan, learning_rate: float, state: MethodState
    ) -> Perturbation:
        """Return the perturbation of a record's passes in one step, inside its clip."""
        from dpdist.gradients.perturbations import Perturbation

        return Perturbation()

    def project_parameters(self, model: nn.Module) -> Callable[[], None]:
        """Return the function that constrains `model` in place: post-processing.

        It is called before the first step and after every update. Raises UserError for a
        model to which it cannot be done.
        """
        return lambda: None

    def finalize(self, spec: ModelSpec, state: MethodState) -> ModelSpec:
        """Attach the noise of predictions to the trained model, `state.model`; return its spec."""
        return spec

    # --- trainings of another kind

    def transform_records(self, records: Any, plan: PrivacyPlan, key: bytes) -> Any:
        """Return the records for the steps, with len, batch and targets.

        key: secret, the same in all steps and attempts of a run.
        """
        return records

    def train(self, run: TrainingDriver) -> None:
        """Train, on the driver; other bulk work comes before the workers."""
        run.run_workers()

    def own_steps(self, given: WorkerInputs) -> OwnSteps | None:
        """Return the steps of a method that releases its own sums, on each worker.

        None, the default, for steps of clipped gradients.
        """
        return None

    def measure(self, given: WorkerInputs, stage: str) -> None:
        """Measure the model on public data, on each worker, and store the results in private/.

        stage: "before" the first step, or "after" the last one, on the published model.
        """

    def answer(self, scores: np.ndarray, plan: PrivacyPlan, key: bytes) -> np.ndarray:
        """Return one answer of withheld models that the plan counts, float64 (classes,).

        scores: scores of the input by each teacher (teachers, classes). key: of this answer only.
        """
        raise NotImplementedError(f"the model of method {self.method.name} is released, not asked")


# --- inputs of hooks --------------------------------------------------------------------------


@dataclass(frozen=True)
class MethodSetup:
    """The inputs of `Execution.prepare_state`, once before the first step.

    Args:
        recipe: the whole recipe.
        spec: the description of the model.
        build_initial_model: returns the model before the first step.
        private_records: the private records; `Method.cost` counts everything computed from them.
        public_records: the public records of the method.
        key: a fresh secret (the run key if the recipe fixes it): two attempts never use the same
            noise.
    """

    recipe: BaseRecipe
    spec: ModelSpec
    build_initial_model: Callable[[], nn.Module]
    private_records: Dataset
    public_records: Dataset | None
    key: bytes


@dataclass(frozen=True)
class MethodState:
    """The state that was computed once, for one worker.

    Args:
        model: the worker's copy of the model.
        tensors: tensors of `Execution.prepare_state`, by name.
        key: key for noise that is drawn once, the same in all steps of a run.
    """

    model: nn.Module
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    key: bytes = b""


class Ensemble(Protocol):
    """Models trained on disjoint shards of the records (`dpdist.training.ensembles`)."""

    def __len__(self) -> int:
        """Return the number of models."""

    def class_scores(self, inputs: Tensor) -> np.ndarray:
        """Return the logits of each model, PRIVATE: float64 (teachers, B, classes)."""


class TrainingDriver(Protocol):
    """A training on the driver, or in a trial of a search."""

    @property
    def job(self) -> Any:
        """Return the `dpdist.training.job.TrainJob`."""

    def run_workers(self, records: Any = None) -> None:
        """Start the training workers, each of which calls `Execution.learn`, and wait for them.

        records: records for `Execution.transform_records` instead of the private ones, computed
        from public data and counted releases.
        """

    def train_teachers(self, count: int, sections: Mapping[str, Section] | None = None) -> Ensemble:
        """Train models on disjoint shards of the records, in bulk; one record is in one of them.

        sections: replacements of the recipe's sections, by name ("model", "training").
        """

    def release_once(
        self, private_source: bytes, draw: Callable[[bytes], Sequence[float]]
    ) -> list[float]:
        """Return draw(key), noisy numbers that the plan counts.

        They are recorded before they are drawn, and later calls return the same numbers.

        Args:
            private_source: PRIVATE, all data that they depend on.
            draw: computes them from a secret key.

        Raises UserError if they were drawn from different data before.
        """

    def write_summary(self) -> None:
        """Write the summary of a training without workers."""


@dataclass(frozen=True)
class WorkerInputs:
    """The inputs of a method's own steps, on one worker. It cannot release anything.

    Args:
        recipe: the whole recipe.
        plan: the plan that is executed.
        model: the worker's copy of the model.
        state: the state that was computed once.
        parameters: the trained parameters, in the order of a sum's numbers.
        records: the private records, as `Execution.transform_records` returned them.
        shards: the worker's part of the records (`dpdist.training.collectives.Shards`).
        canaries: canaries of an audit (`dpdist.training.canaries.Canaries`); `inputs_for` and
            `labels_for` return the record at a position.
        rank: number of the worker.
        draw_key: returns the key of a step's draws, from its number and further labels.
        public_test: loads the public test records.
        private_folder: the run's private folder.
        shared_cache: cache of trainings that differ only in their keys.
    """

    recipe: BaseRecipe
    plan: PrivacyPlan
    model: nn.Module
    state: MethodState
    parameters: Sequence[Tensor]
    records: Any
    shards: Any
    canaries: Any
    rank: int
    draw_key: Callable[..., bytes]
    public_test: Callable[[], Dataset]
    private_folder: Path
    shared_cache: dict[Any, Any] | None = None

    def sum_rows(self, size: int) -> Tensor:
        """Return zeros for a step's sums, float64 (rows, size)."""
        import torch

        device = self.parameters[0].device
        return torch.zeros(self.shards.num_rows, size, dtype=torch.float64, device=device)


class OwnSteps(Protocol):
    """Steps that release a method's own sums: two functions of a step's number.

    save_every: steps from one checkpoint to the next. slots: tensors of a checkpoint besides the
    parameters, by name; written in place.
    """

    save_every: int
    slots: Mapping[str, Tensor]

    def sums(self, number: int) -> Tensor:
        """Return this worker's part of a step's sum, float64 (rows, size): PRIVATE."""

    def update(self, number: int, released: Tensor) -> Tensor | None:
        """Return the gradient (size,) that follows from a released sum, for the optimizer.

        None if the parameters were set from it; those of worker 0 count.
        """


# --- a declared number of records -------------------------------------------------------------


_MIN_RECORD_LIMIT = 2**20  # records, where their number is declared


def record_limit(recipe: BaseRecipe) -> int | None:
    """Return the most records of a sum; None if their number is public.

    There is a limit if privacy.nominal_records is given. The rounding of a sum grows with the
    number of records, and the clip leaves room for it. The true number may differ from the declared
    one, so the room is for many more.
    """
    nominal = recipe.privacy.nominal_records
    return None if nominal is None else max(_MIN_RECORD_LIMIT, 4 * nominal)


def check_record_limit(recipe: BaseRecipe, records: int) -> int:
    """Return the number of records for which a sum over `records` leaves room.

    Raises UserError above `record_limit`, which is an assumption of the guarantee.
    """
    most = record_limit(recipe)
    if most is not None and records > most:
        raise UserError(
            f"privacy.nominal_records: must be at least a quarter of the number of records beyond "
            f"{_MIN_RECORD_LIMIT:,}, got {recipe.privacy.nominal_records:,}: the rounding of sums "
            "over more is not within the clip; declare more"
        )
    return records if most is None else most


def record_limit_assumptions(recipe: BaseRecipe) -> list[str]:
    """Return the assumption of a declared number of records: the most that there are."""
    most = record_limit(recipe)
    return (
        [] if most is None else [f"there are at most {most:,} records, however many are declared"]
    )
