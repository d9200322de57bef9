"""DPAL as published (ICLR 2020 submission; StoBatch, ICML 2020): NOT PRIVATE, a reference.

One Laplace noise is drawn on inputs, on the code of an auto-encoder and on the coefficients of a
Taylor-expanded loss, and is held to pay for all records and all steps. Nothing is proved of it,
and its lemmas have counterexamples (docs/explanation/adversarial.md). The sound forms are methods
functional and stobatch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from dpdist.config.sections import BaseRecipe
from dpdist.core.console import format_exact, format_percent
from dpdist.core.fields import (
    Count,
    CountOrZero,
    OptionCondition,
    Positive,
    PositiveOrZero,
    RejectBool,
    Rule,
)
from dpdist.core.files import read_json
from dpdist.methods.base import Capabilities, DrawCount, Execution, Method, load_execution
from dpdist.privacy.claims import claimed_guarantee
from dpdist.privacy.guarantee import Guarantee
from dpdist.privacy.phases import FixedBatches, GaussianSteps, Phase
from dpdist.privacy.plan import PrivacyPlan

if TYPE_CHECKING:
    from dpdist.privacy.claims import Claim

ACCURACY_FILE = "dpal.json"  # in the run's private folder
_NOT_PRIVATE_REASON = "one noise is shared by all records and steps (DPAL as published)"


class DPAL(Method):
    """Algorithms 1 and 2 of DPAL, for model dpal-cnn on images in [-1, 1] (model.mean, std: 0.5).

    training.batch_size is m. Predictions as the paper makes them are measured on test images.

    Attributes:
        epsilon: Epsilon of Theorem 4, claimed and not proved.
        epsilon_2: Part of the claimed epsilon for the last layer.
        encoder_sensitivity: The paper's Delta_R = d (beta + 2).
        output_sensitivity: The paper's Delta_L2 = 2 |h_pi| of the network.
        weight_norm: L1 norm within which each filter of the encoder is kept; gamma follows from it.
            The paper has no bound, and its reconstruction loss then no minimum.
        pretraining: Number of first steps that train the auto-encoder alone.
        xi: Weight of the adversarial examples' loss.
        attacks: The attacks that make adversarial examples.
        steps: Number of steps of an attack (T_mu).
        size: The largest size of an attack, drawn uniformly for each step (input units; 0.5 is 1 on
            [-1, 1]).
        psi: At a prediction, noise on the input and on the code is 1 / psi of the training's.
        augmentations: Draws of a prediction.
        images: Number of test images that predictions are measured on.
        sizes: Sizes of the attacks on those images, in input units.
    """

    conditions = (
        OptionCondition(("attacks", "steps", "size"), "with xi > 0", lambda it: it.xi > 0),
    )

    name: Literal["dpal"] = "dpal"
    display_name: ClassVar[str] = "DPAL as published"
    epsilon: Positive = 0.2
    epsilon_2: Positive = 0.1
    encoder_sensitivity: Positive = 4950.0
    output_sensitivity: Positive = 512.0
    weight_norm: Positive = 1.0
    pretraining: CountOrZero = 0
    xi: PositiveOrZero = 1.0
    attacks: Annotated[tuple[Literal["i-fgsm", "mim", "pgd"], ...], Field(min_length=1)] = (
        "i-fgsm",
        "mim",
        "pgd",
    )
    steps: Annotated[int, RejectBool, Field(ge=1, le=1000)] = 10
    size: Positive = 0.5
    psi: Positive = 2.0
    augmentations: DrawCount = 100
    images: Count = 100
    sizes: tuple[Positive, ...] = (0.025, 0.1)

    def rules(self) -> Iterator[Rule]:
        """Yield the rules between the options."""
        broken = self.epsilon_2 >= self.epsilon
        yield Rule(broken, "epsilon_2 is a part of epsilon: it must be smaller")

    # --- the paper's numbers

    def gammas(self, batch: float) -> tuple[float, float]:
        """Return gamma and gamma_x of Theorem 4."""
        return dpal_gammas(self.encoder_sensitivity, batch, self.weight_norm)

    def encoder_budget(self, batch: float) -> float:
        """Return epsilon_1."""
        return dpal_encoder_budget(self.epsilon, self.epsilon_2, *self.gammas(batch))

    def noise_scale(self, batch: float) -> float:
        """Return the scale of chi_1 / m, Laplace, on inputs in [-1, 1]; twice that on the code."""
        return self.encoder_sensitivity / (batch * self.encoder_budget(batch))

    # --- said in the recipe, the plan and the report

    def check(self, recipe: BaseRecipe) -> None:
        """Raise ValueError for DP-SGD, or for other inputs than images in [-1, 1]."""
        if recipe.privacy.noise_multiplier != 0 or recipe.privacy.clipping != "none":
            raise ValueError(
                "method dpal is the paper as published, without DP-SGD: give "
                "privacy.noise_multiplier: 0 and clipping: none, or take method stobatch"
            )
        if recipe.model.mean != [0.5] or recipe.model.std != [0.5]:
            raise ValueError("method dpal takes images in [-1, 1]: model.mean: [0.5], std: [0.5]")
        if recipe.training.has_augmentation:
            raise ValueError("method dpal noises records as they are: leave out crop and flip")
        super().check(recipe)

    @property
    def capabilities(self) -> Capabilities:
        """Return that there are no sums of clipped gradients."""
        return Capabilities(
            takes_gradient_steps=False, needs_batched_passes=True, supports_frozen_denoiser=False
        )

    def cost(self, steps: GaussianSteps) -> tuple[Phase, ...]:
        """Return one phase whose cost is infinite: nothing is proved."""
        return (FixedBatches(steps.steps, steps.sample_rate, _NOT_PRIVATE_REASON),)

    def claim(self, plan: PrivacyPlan, proved: Guarantee) -> Claim:
        """Return Theorem 4's claim: pure epsilon for all steps."""
        from dpdist.privacy.claims import Claim

        batch = plan.step(0).expected_batch
        budget = self.encoder_budget(batch)
        claimed = dpal_claim(budget, self.epsilon_2, *self.gammas(batch))
        setting = f"m {batch:g}, Delta_R {self.encoder_sensitivity:g}, epsilon_1 {budget:.4g}"
        return Claim(
            "DPAL / StoBatch", setting, None, claimed, proved, "not sound",
            "shared noise cancels between records, sensitivity is a ratio, noise reused every step",
        )  # fmt: skip

    def describe(self, plan: PrivacyPlan) -> str:
        """Return batches and noise in words."""
        batch = plan.step(0).expected_batch
        return (
            f"{plan.steps:,} steps on disjoint batches of {batch:g}, Laplace noise of scale "
            f"{self.noise_scale(batch):.4g} on inputs in [-1, 1], drawn once"
        )

    def reported_values(self, private_folder: Path) -> list[tuple[str, str]]:
        """Return the accuracy that worker 0 measured, if the training has ended."""
        path = private_folder / ACCURACY_FILE
        if not path.exists():
            return []
        found = read_json(path, {"images": int, "right": float, "attacked": list, "psi": float})
        about = f"of {found['images']:,} test images, psi {found['psi']:g}"
        rows = [("the paper's predictions", f"{format_percent(found['right'], 1)} % right {about}")]
        for at in found["attacked"]:
            right, printed, harmonic = (
                format_percent(at[n], 1) for n in ("right", "printed", "harmonic")
            )
            rows.append(
                (
                    f"as the paper measures it, PGD linf {format_exact(at['size'])}",
                    f"{right} % right; {printed} % right and 'certified' by kappa + phi "
                    f"({harmonic} % by the harmonic rule); no certificate: neither rule holds for "
                    "noise around a fixed center",
                )
            )
        return rows

    def execution(self) -> Execution[Any]:
        """Return the training by Algorithm 1."""
        return load_execution("dpdist.papers.stobatch.dpal_training:DPALExecution", self)


# --- the paper's formulas; none of them is proved -----------------------------------------------


def dpal_gammas(
    encoder_sensitivity: float, batch_size: float, weight_norm: float
) -> tuple[float, float]:
    """Return (gamma, gamma_x) of DPAL Theorem 4.

    2 Delta_R / (m ||theta_1^T||_{1,1}) and Delta_R / m.
    """
    return (
        2 * encoder_sensitivity / (batch_size * weight_norm),
        encoder_sensitivity / batch_size,
    )


def dpal_claim(epsilon_1: float, epsilon_2: float, gamma: float, gamma_x: float) -> Guarantee:
    """Return DPAL's Theorem 4: pure epsilon_1 (1 + 1/gamma + 1/gamma_x) + epsilon_2.

    Source: DPAL / StoBatch, ICML 2020.
    """
    if min(epsilon_1, epsilon_2, gamma, gamma_x) <= 0:
        raise ValueError("epsilon_1, epsilon_2, gamma and gamma_x must be > 0")
    return claimed_guarantee(
        epsilon_1 * (1 + 1 / gamma + 1 / gamma_x) + epsilon_2,
        0.0,
        "replace-one",
        "DPAL Theorem 4",
        ("one noise draw for the whole run", "disjoint fixed batches", "no composition over steps"),
    )


def dpal_encoder_budget(total: float, epsilon_2: float, gamma: float, gamma_x: float) -> float:
    """Return the epsilon_1 that makes Theorem 4's sum equal `total`."""
    return (total - epsilon_2) / (1 + 1 / gamma + 1 / gamma_x)


def dpal_encoder_sensitivity(inputs: int, hidden: int) -> int:
    """Return DPAL's Delta_R = d (beta + 2) as printed: 25 * (14^2 + 2) = 4,950 on MNIST."""
    return inputs * (hidden + 2)


def dpal_output_sensitivity(last_hidden: int) -> int:
    """Return DPAL's Delta_L2 = 2 |h_pi| as printed: 512 on MNIST."""
    return 2 * last_hidden
