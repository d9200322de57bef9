"""The base class of methods: a published system's options, and everything dpdist asks of it.

The fields of a method are the recipe's `method` section. Its rules, its cost, its paper's claim
and its way to train are methods of the class, whose defaults are plain DP-SGD. No other code asks
which method a recipe has. torch is imported where work is done, so that a recipe is read without
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

from pydantic import Field

from dpdist.config.sections import BaseRecipe
from dpdist.core.errors import UserError
from dpdist.core.fields import (
    Count,
    FilePath,
    OptionCondition,
    Positive,
    PositiveFraction,
    PositiveNoise,
    RejectBool,
    Section,
    Text,
)
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


# --- options of heterogeneous noise -----------------------------------------------------------


class Redistribution(Section):
    """Where the shares r of heterogeneous noise come from (HGM, IJCAI 2019, Equation 7).

    r_k is the mean over records of |dL/dh_k|^beta, normalised, and at least `floor` of the uniform
    share. source:

    * "public": records of the public data set `data` (under `root`, with `classes` classes; images
      are resized to the model's), and the network trained on them for `steps` steps;
    * "paid": the private records, in one clipped and noised sum that the plan pays for; the network
      at its initial weights;
    * "private": the private records, for nothing, as the paper does it, and the network trained on
      them for `steps` steps. Needs paper_faithful: true; nothing is then proved.
    """

    conditions = (
        OptionCondition(
            ("data", "root", "classes"), "with source: public", lambda it: it.source == "public"
        ),
        OptionCondition(
            ("steps", "max_records"),
            "with source: public and private",
            lambda it: it.source != "paid",
        ),
        OptionCondition(
            ("noise_multiplier", "clip_norm", "sample_rate"),
            "with source: paid",
            lambda it: it.source == "paid",
        ),
    )

    source: Literal["public", "paid", "private"] = "public"
    data: Text = "digits"
    root: FilePath | None = None
    classes: Annotated[int, RejectBool, Field(ge=1, le=100_000)] = 10
    steps: Annotated[int, RejectBool, Field(ge=0, le=1_000_000)] = 200
    beta: Positive = 1.0
    floor: PositiveFraction = 0.1
    max_records: Count = 2000
    noise_multiplier: PositiveNoise = 20.0
    clip_norm: Positive = 1.0
    sample_rate: PositiveFraction = 1.0


# --- the base class ---------------------------------------------------------------------------


_MIN_RECORD_LIMIT = 2**20  # records, where their number is declared


def record_limit(recipe: BaseRecipe) -> int | None:
    """Return how many records a sum may be over where privacy.nominal_records is given; None where
    their number is public.

    What rounding adds to a sum grows with the number of records, and room is left for it in the
    clip. A declared number says nothing of how many there are, so the room is for many more.
    """
    nominal = recipe.privacy.nominal_records
    return None if nominal is None else max(_MIN_RECORD_LIMIT, 4 * nominal)


def check_record_limit(recipe: BaseRecipe, records: int) -> int:
    """Return the number of records that a sum over `records` leaves room for. Raises UserError for
    more than `record_limit`: that there are no more is an assumption of the guarantee."""
    most = record_limit(recipe)
    if most is not None and records > most:
        raise UserError(
            f"privacy.nominal_records: must be at least a quarter of the number of records beyond "
            f"{_MIN_RECORD_LIMIT:,}, got {recipe.privacy.nominal_records:,}: the rounding of sums "
            "over more is not within the clip; declare more"
        )
    return records if most is None else most


def record_limit_assumptions(recipe: BaseRecipe) -> list[str]:
    """Say what a declared number of records leaves to be assumed: how many there are at most."""
    most = record_limit(recipe)
    return (
        [] if most is None else [f"there are at most {most:,} records, however many are declared"]
    )


# of perturbations per record and step
DrawCount = Annotated[int, RejectBool, Field(ge=1, le=10_000)]


@dataclass(frozen=True)
class PublicRecords:
    """Public records that a method reads: the training split of the data set `dataset_name` under
    `root` (default: where the recipe's own data lie). recipe_key: the recipe's key, for complaints.
    used_for_training: whether a model is trained on them, so that no test record may be among
    them."""

    recipe_key: str
    dataset_name: str
    classes: int
    root: Path | None = None
    used_for_training: bool = False

    def assumptions(self, recipe: BaseRecipe) -> list[str]:
        """Return the unchecked assumption: no private record is among them in another shape."""
        compared = recipe.privacy.noise_multiplier != 0  # else nothing was promised
        if not compared or (recipe.data.public and self.dataset_name == recipe.data.name):
            return []
        return [
            "no private record is, in another shape, among the public records of "
            f"{self.dataset_name} that shaped the noise (in the same shape: compared by content)"
        ]


@dataclass(frozen=True)
class MethodSetup:
    """The inputs from which a method makes something once, before the first step
    (`Method.prepare_state`).

    private_records: the private ones; what is made of them costs what `Method.cost` says.
    public_records: those that the method named. build_initial_model: makes the model as it is
    before the first step. key: a fresh secret (the run key where the recipe fixes it): of two
    attempts, no noise is used twice.
    """

    recipe: BaseRecipe
    spec: ModelSpec
    build_initial_model: Callable[[], nn.Module]
    private_records: Dataset
    public_records: Dataset | None
    key: bytes


@dataclass(frozen=True)
class MethodState:
    """State that was made once, for one worker: tensors by name, and its copy of the model.

    key: the same in all steps of a run, for noise that is drawn once.
    """

    model: nn.Module
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    key: bytes = b""


class Ensemble(Protocol):
    """Models trained on disjoint shards of the records (`dpdist.training.ensembles`)."""

    def __len__(self) -> int: ...

    def class_scores(self, inputs: Tensor) -> np.ndarray:
        """PRIVATE: the logits of each, float64 (teachers, B, classes)."""


class TrainingDriver(Protocol):
    """A training in the hands of the driver, or of a search's trial; Ray is there.

    job: the `dpdist.training.job.TrainJob`. write_summary: sums up a training that had no workers.
    """

    @property
    def job(self) -> Any: ...

    def run_workers(self, records: Any = None) -> None:
        """Start the training workers, each of which calls `Method.learn`, and wait for their end.

        records: what they train on in place of the private ones (`Method.transform_records` gets
        it): made of public data and of what was paid for.
        """

    def train_teachers(self, count: int, sections: Mapping[str, Section] | None = None) -> Ensemble:
        """Models trained on disjoint shards of the records, in bulk; one record is in one of them.

        sections: of the recipe, in place of its own, by name ("model", "training").
        """

    def release_once(
        self, private_source: bytes, draw: Callable[[bytes], Sequence[float]]
    ) -> list[float]:
        """draw(key): noisy numbers that the plan pays for, on record before they are drawn, and the
        same ones whenever this is asked again. private_source: PRIVATE, all that they are drawn
        from.

        Raises UserError when they were drawn from something else before.
        """

    def write_summary(self) -> None: ...


class Worker(Protocol):
    """A training in the hands of one worker, from its newest checkpoint on.

    It is `dpdist.training.worker.Loop`, whose other parts (step, model, fixed, flat, save) are
    there for methods that make releases of their own: `step` is the `PrivateStep`.
    """

    def steps(self) -> None:
        """Take the plan's steps that are left."""


class Method(Section):
    """A published system. The defaults are those of plain DP-SGD."""

    name: str

    # --- said in the recipe, the plan and the report

    display_name: ClassVar[str] = ""  # to people
    # conditions of keys of a whole recipe
    recipe_conditions: ClassVar[tuple[OptionCondition, ...]] = ()

    @property
    def title(self) -> str:
        """Return the name for readers; of a class from elsewhere, its location."""
        return self.display_name if self.display_name and ":" not in self.name else self.name

    def check(self, recipe: BaseRecipe) -> None:
        """Raise ValueError for a recipe in which the method would not be what it says."""
        privacy = recipe.privacy
        if (
            privacy.clipping == "none"
            and privacy.noise_multiplier != 0
            and not self.steps_are_post_processing
        ):
            raise ValueError(
                "privacy.clipping: none is training without privacy: noise_multiplier: 0"
            )
        if (
            recipe.certify is not None
            and recipe.certify.sigma is None
            and not self.has_prediction_noise
        ):
            raise ValueError(
                "certify.sigma is required: the model of this method has no noise of its own"
            )
        if (
            recipe.tune is not None
            and recipe.tune.asha is not None
            and not self.takes_gradient_steps
        ):
            raise ValueError(
                f"tune.asha: method {self.name} takes no steps of which the first could be scored"
            )
        if recipe.model.isolate and self.needs_batched_passes:
            raise ValueError(
                f"model.isolate: method {self.name} with these options runs records together; use "
                "another method, or a model from the zoo without it"
            )

    def check_public_records(self, public_dataset: Any, private_dataset: Any, context: str) -> None:
        """Raise UserError for public records that it cannot learn from beside the
        `private_dataset`."""

    @property
    def has_prediction_noise(self) -> bool:
        """Whether the trained model has noise of its own, in training and at every prediction."""
        return False

    @property
    def supports_frozen_denoiser(self) -> bool:
        """Whether it may train a network that a frozen denoiser stands before: nothing that it does
        passes the denoiser by, or belongs behind the network's own first layer."""
        return True

    @property
    def needs_batched_passes(self) -> bool:
        """Whether the method itself needs a pass of several records."""
        return False

    @property
    def supports_tokens(self) -> bool:
        """Whether a record may be tokens (data.text): to these nothing can be added."""
        return False

    @property
    def supports_groups(self) -> bool:
        """Whether an example of its steps may be a group of records (privacy.unit: group): nothing
        that it does is made for each record, or from the number of records."""
        return False

    @property
    def takes_losses(self) -> bool:
        """Whether training.loss may be another than cross-entropy: the method then says nothing of
        what is learned."""
        return False

    @property
    def takes_gradient_steps(self) -> bool:
        """Whether the plan's steps are sums of clipped gradients, as audits take them apart."""
        return True

    @property
    def public_records(self) -> PublicRecords | None:
        """Public records that it reads; they are held against the private ones."""
        return None

    @property
    def extra_cost(self) -> tuple[Phase, ...]:
        """Return the phases of other reading of private records, before the steps of training."""
        return ()

    def cost(self, steps: GaussianSteps) -> tuple[Phase, ...]:
        """Return the phases of a training whose steps, by the recipe, are `steps`.

        The only statement of it: plans, searches, previews and budgets take it from here, and the
        noise multiplier that meets a target epsilon is found by it.
        """
        return (*self.extra_cost, steps)

    def claim(self, plan: PrivacyPlan, proved: Guarantee) -> Claim | None:
        """Return the paper's privacy claim for a run with this plan, or None.

        It stands beside the proved guarantee. None when the paper claims nothing of its
        own.
        """
        return None

    def reported_values(self, private_folder: Path) -> list[tuple[str, str]]:
        """Return name and value of results of `learn` for summary, report and card.

        `learn` left them in the run's private folder. They are published, so that they may
        depend on public data and released parameters alone.
        """
        return []

    @property
    def steps_are_post_processing(self) -> bool:
        """Whether what is private is released with noise before the steps (`transform_records`),
        which are then post-processing, without noise of their own."""
        return False

    @property
    def not_releasable_reason(self) -> str | None:
        """Return why no model may ever leave; None where the trained model is released.

        Such models are only asked (`answer`), so often as the plan pays for.
        """
        return None

    @property
    def trained_elsewhere(self) -> str | None:
        """Why no training of the run can be executed, audited or priced; None where it trains."""
        return None

    @property
    def picture_preparation(self) -> str:
        """Return how pictures were brought to the input, in words; empty where none were."""
        return ""

    @property
    def max_evaluation_queries(self) -> int | None:
        """Return the number of test inputs to ask about, where asking is paid; None: all."""
        return None

    def describe(self, plan: PrivacyPlan) -> str:
        """Return the executed training in words, for a report."""
        step = plan.step(0)
        clip = "no clip" if math.isinf(step.clip_norm) else f"clip {step.clip_norm:g}"
        return (
            f"{plan.steps:,} steps, expected batch {step.expected_batch:g}, noise multiplier "
            f"{step.noise_multiplier:.4g}, {clip}"
        )

    def assumptions(self, recipe: BaseRecipe) -> list[str]:
        """Return the assumptions of the guarantee that nobody can check."""
        return []

    # --- done in training

    def task(self) -> TrainingObjective:
        """Return the learning task; by default, to classify."""
        from dpdist.gradients.engine import TrainingObjective

        return TrainingObjective()

    def prepare_state(self, setup: MethodSetup) -> dict[str, Tensor]:
        """Return the tensors that worker 0 makes once and the private folder keeps."""
        return {}

    def placeholder_state(
        self, model: nn.Module, input_shape: tuple[int, ...]
    ) -> dict[str, Tensor]:
        """Return a placeholder for `prepare_state` where only its shapes matter; read no record."""
        return {}

    def transform_records(self, records: Any, plan: PrivacyPlan, key: bytes) -> Any:
        """Return the records that the steps are taken on: their len, batch and targets.

        key: secret, and the same in all steps and attempts of a run.
        """
        return records

    def perturbation(
        self, step: StepPlan, learning_rate: float, state: MethodState
    ) -> Perturbation:
        """The perturbation of one step. Scales come from public hyper-parameters only."""
        from dpdist.gradients.perturbations import Perturbation

        return Perturbation()

    def extra_checkpoint_state(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint keeps for `learn` besides parameters, before step 0.

        `learn` finds them in the worker's `extra_checkpoint_state`.
        """
        return {}

    def engine(
        self,
        model: nn.Module,
        clipping: Clipping,
        *,
        expected_batch: float,
        steps: int,
        micro_batch: int | None = None,
        isolate: bool = False,
    ) -> GradientEngine:
        """Sums clipped gradients of the part of `model` that is trained. Raises UserError for a
        model that mixes records."""
        from dpdist.gradients.engine import GradientEngine

        task = self.task()
        return GradientEngine(
            task.trained_module(model), task.loss_function, clipping=clipping,
            micro_batch=micro_batch,
            isolate=isolate,
        )  # fmt: skip

    def project_parameters(self, model: nn.Module) -> Callable[[], None]:
        """Return the function that constrains `model` in place: post-processing.

        It is called before the first step and after every update. Raises UserError for a
        model to which it cannot be done.
        """
        return lambda: None

    def finalize(self, spec: ModelSpec, state: MethodState) -> ModelSpec:
        """Give the trained model (fixed.model) what it carries at prediction; its description."""
        return spec

    def answer(self, scores: np.ndarray, plan: PrivacyPlan, key: bytes) -> np.ndarray:
        """Return one answer of withheld models that the plan pays for, float64 (classes,).

        scores: what each teacher says of the input (teachers, classes). key: of this answer alone.
        """
        raise NotImplementedError(f"the model of method {self.name} is released, not asked")

    def train(self, run: TrainingDriver) -> None:
        """A whole training, on the driver: work of one's own in bulk comes before the workers."""
        run.run_workers()

    def learn(self, worker: Worker) -> None:
        """A whole training, on each worker at once."""
        worker.steps()
