"""DP-SGD (Abadi et al. 2016), and its variants by noise before the clip: input noise and DPlis.

Input noise augments records inside each record's clip, with or without a consistency term.

DPlis trains on a smoothed loss (Wang et al., "DPlis", PoPETs 2021): L_smooth(theta) = E loss(theta
+ s * N(0, I)), estimated per record by K augmentations of parameter noise whose gradients are
averaged before the clip (Equation 6, Algorithm 2). Privacy is that of DP-SGD: the smoothing noise
is independent of the data and sits before the clip. The authors' released code sums the K gradients
instead of averaging them, which is an effective clip of C/K on the mean with a K-fold step for
unclipped records. So three variants exist:

* aggregate "mean": as the paper writes it;
* aggregate "sum": as the released code does it;
* method dp-sgd with gradient_scale K: plain DP-SGD with its gradient multiplied by K before the
  clip, which separates smoothing from the sum's larger gradients.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import model_validator

from dpdist.core.fields import Positive, PositiveOrZero
from dpdist.methods.base import Capabilities, DrawCount, Execution, Method, MethodState
from dpdist.privacy.plan import StepPlan

if TYPE_CHECKING:
    from dpdist.gradients.engine import TrainingObjective
    from dpdist.gradients.perturbations import Perturbation


# --- plain DP-SGD -----------------------------------------------------------------------------


class DPSGD(Method):
    """Plain DP-SGD (Abadi et al. 2016).

    Attributes:
        gradient_scale: Factor of each gradient before the clip: the control that separates DPlis'
            smoothing from the larger gradients of its summed augmentations.
    """

    name: Literal["dp-sgd"] = "dp-sgd"
    display_name: ClassVar[str] = "DP-SGD"
    gradient_scale: Positive = 1.0

    @property
    def capabilities(self) -> Capabilities:
        """Return that records may be tokens or users, with any loss and rates by class."""
        return Capabilities(supports_tokens=True, plain_steps=True)

    def execution(self) -> Execution[Any]:
        """Return the usual training."""
        return DPSGDExecution(self)


class DPSGDExecution(Execution[DPSGD]):
    """The usual step, with its gradients scaled."""

    def perturbation(
        self, step: StepPlan, learning_rate: float, state: MethodState
    ) -> Perturbation:
        """Return the factor of each gradient before its clip."""
        from dpdist.gradients.perturbations import Perturbation

        return Perturbation(gradient_scale=self.method.gradient_scale)


# --- input noise ------------------------------------------------------------------------------


class InputNoiseMethod(Method):
    """Augmentation: each record's gradient is averaged over noisy copies before the clip.

    Attributes:
        sigma: Standard deviation of the noise on the input, in input units.
        augmentations: Number of noisy copies of each record.
        consistency: Weight of the term that lets a record's copies agree (Jeong & Shin, NeurIPS
            2020).
    """

    name: Literal["input-noise"] = "input-noise"
    display_name: ClassVar[str] = "DP-SGD on noisy copies of each record"
    sigma: Positive
    augmentations: DrawCount = 4
    consistency: PositiveOrZero = 0.0

    @model_validator(mode="after")
    def _check_consistency(self) -> InputNoiseMethod:
        if self.consistency and self.augmentations < 2:
            raise ValueError("consistency is between a record's copies: give augmentations >= 2")
        return self

    @property
    def capabilities(self) -> Capabilities:
        """Return what a term between a record's copies rules out."""
        return Capabilities(
            needs_batched_passes=self.consistency > 0,
            plain_steps=not self.consistency,
        )

    def execution(self) -> Execution[Any]:
        """Return the training on noisy copies."""
        return InputNoiseExecution(self)


class InputNoiseExecution(Execution[InputNoiseMethod]):
    """Steps on noisy copies of each record."""

    def task(self) -> TrainingObjective:
        """Return the task of classifying, with the term between copies where it has a weight."""
        from dpdist.gradients.engine import TrainingObjective
        from dpdist.gradients.objective import consistency_targets, weighted_cross_entropy

        if not self.method.consistency:
            return TrainingObjective()
        targets = partial(consistency_targets, weight=self.method.consistency)
        return TrainingObjective(weighted_cross_entropy, target_function=targets)

    def perturbation(
        self, step: StepPlan, learning_rate: float, state: MethodState
    ) -> Perturbation:
        """Return noisy copies of each input."""
        from dpdist.gradients.perturbations import InputPerturbation

        return InputPerturbation(self.method.augmentations, self.method.sigma)


# --- DPlis ------------------------------------------------------------------------------------


class DPlis(Method):
    """DP-SGD on a parameter-smoothed loss (DPlis, PoPETs 2021, Algorithm 2).

    Attributes:
        radius: Size of the smoothing noise, which has for each weight the standard deviation radius
            * (learning_rate / batch_size) * noise_multiplier * clip_norm.
        augmentations: Number of noisy copies of the parameters (the paper uses 10, and 20 on text).
        aggregate: mean averages the augmentations before the clip; sum adds them up, as the
            authors' released code does.
        per_example: Draw for every record separately, as the paper writes it; false shares the
            augmentations over the batch, as the authors' code does.
        sigma: Standard deviation of input noise in each draw, as in method input-noise; not in the
            paper.
    """

    name: Literal["dplis"] = "dplis"
    display_name: ClassVar[str] = "DPlis (smoothed loss)"
    radius: Positive = 10.0
    augmentations: DrawCount = 10
    aggregate: Literal["mean", "sum"] = "mean"
    per_example: bool = False
    sigma: PositiveOrZero = 0.0

    @property
    def capabilities(self) -> Capabilities:
        """Return that records may be users, with any loss; tokens without noise on them."""
        return Capabilities(supports_tokens=not self.sigma, plain_steps=True)

    def execution(self) -> Execution[Any]:
        """Return the training on the smoothed loss."""
        return DPlisExecution(self)


class DPlisExecution(Execution[DPlis]):
    """Steps on the smoothed loss."""

    def perturbation(
        self, step: StepPlan, learning_rate: float, state: MethodState
    ) -> Perturbation:
        """Return augmentations of parameter noise, as large as Equation 6 says."""
        from dpdist.gradients.perturbations import ParameterPerturbation

        method, batch_size = self.method, round(step.expected_batch)
        std = dplis_smoothing_std(
            method.radius, learning_rate, batch_size, step.noise_multiplier, step.clip_norm
        )
        return ParameterPerturbation(
            method.augmentations,
            std,
            per_example=method.per_example,
            aggregate=method.aggregate,
            input_std=method.sigma,
        )


def dplis_smoothing_std(
    radius: float,
    learning_rate: float,
    batch_size: int,
    noise_multiplier: float,
    clip_norm: float,
) -> float:
    """Return the standard deviation of the smoothing noise on every weight.

    radius: R, smoothing in units of one step's noise (10 is the paper's rule without tuning);
    learning_rate: eta, of the averaged gradient; batch_size: the expected batch L. Returns
    R * (eta / L) * noise_multiplier * clip_norm (Equation 6).
    """
    return radius * (learning_rate / batch_size) * noise_multiplier * clip_norm
