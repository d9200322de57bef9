"""Private prediction: teachers on disjoint shards answer together, with noise.

The number of answers is fixed beforehand and paid for by the plan. The models themselves are never
released.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from dpdist.core.fields import Count, CountOrZero, Positive, RejectBool
from dpdist.methods.base import Capabilities, Execution, Method
from dpdist.privacy.phases import GaussianAnswers, GaussianSteps
from dpdist.privacy.plan import PrivacyPlan

if TYPE_CHECKING:
    from dpdist.methods.base import TrainingDriver
    from dpdist.privacy.phases import Phase


class PrivatePrediction(Method):
    """(epsilon, delta)-DP answers; the models have no privacy of their own and are never released.

    Each record is in the shard of one of the `teachers` by a keyed hash, and each teacher is
    trained on its shard by the recipe's training section, without a clip or noise. An answer is
    the mean of the teachers' logits, each centered and clipped to L2 norm `logit_bound`, plus
    Gaussian noise: a record that comes or goes changes one teacher and moves the mean by at most 2
    logit_bound / teachers. privacy.noise_multiplier, given or computed for privacy.epsilon, is the
    noise in this unit. Questions may depend on earlier answers.

    Attributes:
        teachers: Number of teachers, each with a shard of the records.
        logit_bound: L2 norm to which a teacher's logits are clipped.
        queries: The most answers that the plan counts and the run gives.
        evaluate: Number of answers for the first test inputs.
    """

    name: Literal["private-prediction"] = "private-prediction"
    display_name: ClassVar[str] = "private prediction (the model never leaves)"
    excluded: ClassVar[Mapping[str, str]] = {
        "certify": "",
        "tune": "",
        "audit": "",
        "data.max_train": ", a share of the number of records (take data.fraction)",
        "privacy.clipping": ": teachers have none",
        "privacy.clip_norm": ": teachers have none",
        "privacy.batch_cap": ": teachers have none",
        "resources.archive_private": ": an archive does not know what was answered since",
    }
    teachers: Annotated[int, RejectBool, Field(ge=1, le=10_000)]
    logit_bound: Positive
    queries: Count
    evaluate: CountOrZero = 0

    @model_validator(mode="after")
    def _check_evaluate(self) -> PrivatePrediction:
        if self.evaluate > self.queries:
            raise ValueError("evaluate: must be <= queries, of which they are a part")
        return self

    # --- said in the recipe, the plan and the report

    def cost(self, steps: GaussianSteps) -> tuple[Phase, ...]:
        """Return the phase of the answers: nothing of the training is released."""
        return (GaussianAnswers(steps.noise_multiplier, self.queries),)

    @property
    def capabilities(self) -> Capabilities:
        """Return that the models are never released, and the answers that the evaluation uses."""
        return Capabilities(
            not_releasable_reason=(
                f"the models of method {self.name} are trained without privacy and never leave; "
                "ask with `dpdist predict`"
            ),
            max_evaluation_queries=self.evaluate,
        )

    def noise_std(self, plan: PrivacyPlan, teachers: int) -> float:
        """Return the standard deviation of the noise on each logit of an answer."""
        phase: Any = next(phase for phase in plan.phases if phase.num_queries)
        return float(phase.noise_multiplier * 2 * self.logit_bound / teachers)

    def reported_values(self, private_folder: Path) -> list[tuple[str, str]]:
        """Return how many answers were given, by the ledger."""
        from dpdist.privacy.ledger import Ledger

        given = Ledger.read(private_folder / "ledger.jsonl").num_queries
        return [("answers", f"{given:,} given of {self.queries:,} that epsilon pays for")]

    def describe(self, plan: PrivacyPlan) -> str:
        """Return teachers, answers and their noise in words."""
        return (
            f"{self.teachers:,} teachers on disjoint shards; at most {plan.num_queries:,} answers, "
            f"logits clipped to {self.logit_bound:g}, noise "
            f"{self.noise_std(plan, self.teachers):.4g} on their mean"
        )

    def execution(self) -> Execution[Any]:
        """Return the training of the teachers, who answer."""
        return PrivatePredictionExecution(self)


class PrivatePredictionExecution(Execution[PrivatePrediction]):
    """Teachers on disjoint shards, and noisy answers of theirs."""

    def train(self, run: TrainingDriver) -> None:
        """Train the teachers; no workers follow."""
        run.train_teachers(self.method.teachers)
        run.write_summary()

    def answer(self, scores: np.ndarray, plan: PrivacyPlan, key: bytes) -> np.ndarray:
        """Return the mean of clipped logits, with noise."""
        from dpdist.gradients.noise import add_noise

        mean = clip_logits(scores, self.method.logit_bound).sum(axis=0) / len(scores)
        return add_noise(mean, key, self.method.noise_std(plan, len(scores)))


def clip_logits(scores: np.ndarray, bound: float) -> np.ndarray:
    """Return logits (teachers, classes), each teacher's centered and clipped to an L2 norm.

    The norm bounds a teacher's part in an answer. A teacher with non-finite scores has no part.
    """
    finite = np.isfinite(scores).all(axis=1, keepdims=True)
    known = np.where(finite, scores, 0.0)
    # Scaled first, so that squares of huge logits stay finite.
    largest = np.maximum(np.abs(known).max(axis=1, keepdims=True), 1.0)
    centered = known / largest - (known / largest).mean(axis=1, keepdims=True)
    norms = np.linalg.norm(centered, axis=1, keepdims=True)
    # Below the bound by more than the rounding of the norm and of this product.
    factors = np.minimum(largest, bound * (1 - 1e-9) / np.maximum(norms, 1e-300))
    clipped: np.ndarray = centered * factors
    return clipped
