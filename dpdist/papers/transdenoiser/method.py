"""TransDenoiser: a private denoiser before a frozen public classifier (ICLR 2022 submission).

The denoiser g learns ||g(x + b) - x||^2 with input noise b ~ N(0, sigma^2). Three ways to train
it:

* separate-dp: DP-SGD on that loss; the input noise gets no credit. Proved.
* no-dp: without privacy.
* full: Algorithm 1 (`dpdist.papers.transdenoiser.split`), which is not sound. It trains here as a
  labeled reference whose proved epsilon is infinite.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from dpdist.config.sections import BaseRecipe
from dpdist.core.fields import NotNegative, OptionCondition, Positive, RejectBool, Rule
from dpdist.methods.base import DrawCount, Execution, Method, load_execution
from dpdist.privacy.claims import claimed_guarantee
from dpdist.privacy.guarantee import Guarantee
from dpdist.privacy.phases import GaussianSteps, NonPrivate, Phase
from dpdist.privacy.plan import PrivacyPlan

if TYPE_CHECKING:
    from dpdist.privacy.claims import Claim


class TransDenoiser(Method):
    """A denoiser before a frozen public classifier, by squared error (TransDenoiser, ICLR 2022).

    Needs model.classifier.

    Attributes:
        variant: separate-dp: DP-SGD, whose privacy is proved. no-dp: without privacy; it needs
            privacy.noise_multiplier: 0 and clipping: none. full: Algorithm 1, a reference that is
            NOT private; it adds noise itself, xi_up (or less) clip norms, so
            privacy.noise_multiplier must be 0, and one worker does it.
        sigma: Standard deviation of the noise on the input, in input units.
        augmentations: Noisy copies of each record in a step, averaged before the clip.
        xi_low: Lower bound of the split of variant full, for which the paper gives no value.
        xi_up: Upper bound of the split of variant full.
        credit_steps: In variant full, multiply S_min by the number of steps, as the paper does.
        thin: In variant full, take the smallest value of a thin decomposition for S_min.
        iterations: In variant full, Lanczos products for each step where S_min is not known to be
            0.
    """

    conditions = (
        OptionCondition(
            ("xi_low", "xi_up", "credit_steps", "thin", "iterations"),
            "with variant: full",
            lambda it: it.variant == "full",
        ),
    )

    name: Literal["transdenoiser"] = "transdenoiser"
    display_name: ClassVar[str] = "TransDenoiser"
    variant: Literal["separate-dp", "no-dp", "full"] = "separate-dp"
    sigma: Positive = 0.25
    augmentations: DrawCount = 1
    xi_low: NotNegative = 1.0
    xi_up: Positive = 2.0
    credit_steps: bool = True
    thin: bool = False
    iterations: Annotated[int, RejectBool, Field(ge=1, le=10_000)] = 20

    def rules(self) -> Iterator[Rule]:
        """Yield the rules between the options."""
        yield Rule(self.xi_low > self.xi_up, "xi_low must be <= xi_up")
        several = self.variant == "full" and self.augmentations != 1
        yield Rule(several, "variant full has one draw for each record: draws: 1")

    def check(self, recipe: BaseRecipe) -> None:
        """Raise ValueError for a recipe without a classifier, or that the variant does not fit."""
        super().check(recipe)
        privacy, resources = recipe.privacy, recipe.resources
        if recipe.model.classifier is None:
            raise ValueError(
                "method transdenoiser needs model.classifier: the folder of the frozen classifier "
                "behind the denoiser"
            )
        if self.variant != "separate-dp" and privacy.noise_multiplier != 0:
            raise ValueError(
                f"variant {self.variant} trains without noise from the plan: give "
                "privacy.noise_multiplier: 0, or take variant separate-dp"
            )
        if self.variant == "full" and privacy.clipping == "none":
            raise ValueError(
                "variant full measures its noise in clip norms: clipping may not be none"
            )
        if self.variant == "full" and (resources.max_workers > 1 or recipe.training.reproducible):
            raise ValueError(
                "variant full adds its noise on one worker: give resources.workers: 1 and no "
                "training.reproducible"
            )

    def cost(self, steps: GaussianSteps) -> tuple[Phase, ...]:
        """Return the cost of the steps, and of the split between transformed and added noise.

        In variant full the split costs everything.
        """
        if self.variant != "full":
            return (steps,)
        split = NonPrivate(
            "TransDenoiser's Algorithm 1 chooses the added noise from the private records "
            "(sign of the remainder, S_min)"
        )
        return (split, steps)

    def claim(self, plan: PrivacyPlan, proved: Guarantee) -> Claim | None:
        """Return Algorithm 1's claim that transformed and added noise together are worth xi_up."""
        from dpdist.privacy.claims import Claim

        if self.variant != "full":
            return None
        rate = plan.step(0).sample_rate
        return Claim(
            "TransDenoiser",
            f"xi_up {self.xi_up:g}, q {rate:.4g}, T {plan.steps}",
            None,
            transdenoiser_training_claim(self.xi_up, rate, plan.steps, plan.delta),
            proved,
            "not sound",
            "the signs of the remainders and S_min, and with them the noise, depend on the private "
            "records",
        )

    def execution(self) -> Execution[Any]:
        """Return the training of the denoiser."""
        return load_execution("dpdist.papers.transdenoiser.split:TransDenoiserExecution", self)


# --- the paper's formulas -----------------------------------------------------------------------


def transdenoiser_training_claim(
    xi_up: float, sample_rate: float, steps: int, delta: float = 1e-5
) -> Guarantee:
    """Return TransDenoiser's Theorem 3: epsilon = c2 q sqrt(T ln(1/delta)) / xi_up.

    The paper leaves c2 open; 2 is our choice, the order of Abadi et al.'s.
    """
    value = 2 * sample_rate * math.sqrt(steps * math.log(1 / delta)) / xi_up
    return claimed_guarantee(
        value,
        delta,
        "add-or-remove-one",
        "TransDenoiser Theorem 3 with c2 = 2",
        ("C-Lipschitz loss", "transformed noise counts as added noise"),
    )


def mixed_gaussian_added_std(
    xi_low: float, xi_up: float, s_min: float, sigma: float, steps: int = 1
) -> float:
    """Return the noise MMGA adds to the transformed noise (TransDenoiser, Algorithm 1).

    xi_up when sqrt(steps S_min) sigma < xi_low, nothing when it reaches xi_up, the missing variance
    in between. steps = 1 is the reading without the unjustified factor.
    """
    if not 0 <= xi_low <= xi_up:
        raise ValueError(f"0 <= xi_low <= xi_up is needed, got {xi_low} and {xi_up}")
    transformed = math.sqrt(steps * s_min) * sigma
    if transformed < xi_low:
        return xi_up
    return math.sqrt(max(0.0, xi_up**2 - transformed**2))
