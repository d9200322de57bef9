"""Sound StoBatch / DPAL: adversarial training inside each record's clip.

The papers' aim is a network trained privately on records and on adversarial examples of them,
through the noise that certifies its predictions. Their privacy (one noise for a whole run) does
not hold (docs/explanation/adversarial.md); here it is DP-SGD's. An adversarial example is a
function of its own record, the step's key and parameters already released, so it stands inside
that record's clip.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from dpdist.config.sections import BaseRecipe
from dpdist.core.fields import Norm, OptionCondition, Positive, PositiveOrZero, RejectBool
from dpdist.methods.base import Capabilities, DrawCount, Execution, Method, load_execution
from dpdist.privacy.plan import PrivacyPlan

if TYPE_CHECKING:
    from dpdist.privacy.claims import Claim
    from dpdist.privacy.guarantee import Guarantee

AttackName = Literal["i-fgsm", "mim", "pgd"]  # of the ensemble
Share = Annotated[float, RejectBool, Field(ge=0, le=1)]


class StoBatch(Method):
    """DP-SGD on records and adversarial examples of them, with noise on input and first layer.

    It is the sound form of DPAL / StoBatch (ICLR and ICML 2020).

    A record's gradient is that of (loss + xi * loss at its adversarial example) / (1 + xi),
    clipped once. The example leads away from the class that the released parameters predict, not
    from the label. Noise is in training and at every prediction. At each split the certificate is
    that of sigma, or a larger one.

    Attributes:
        xi: Weight of the adversarial example's loss.
        attacks: The attacks; a keyed hash of step and record says which of them makes an example.
        steps: Number of steps of an attack.
        norm: Norm of the attack's ball.
        size: Range [LOW, HIGH] of the ball's size, drawn once a step, uniformly (input units).
        eot: Draws of the noise for the attack's gradient.
        sigma: Standard deviation of the noise that all of it certifies by, in input units.
        split: Share of the noise's variance that is added after the first layer, at deviation sigma
            * sensitivity * sqrt(split); the rest is on the input.
        sensitivity: L2 norm within which the first layer is kept.
    """

    conditions = (
        OptionCondition(
            ("attacks", "steps", "norm", "size", "eot"), "with xi > 0", lambda it: it.xi > 0
        ),
        OptionCondition(("eot", "split"), "with sigma > 0", lambda it: it.sigma > 0),
        OptionCondition(
            ("sensitivity",),
            "with noise after the first layer (sigma and split > 0)",
            lambda it: it.hidden_noise_std > 0,
        ),
    )

    name: Literal["stobatch"] = "stobatch"
    display_name: ClassVar[str] = "StoBatch (adversarial training inside the clip)"
    xi: PositiveOrZero = 1.0
    attacks: Annotated[tuple[AttackName, ...], Field(min_length=1, max_length=3)] = (
        "i-fgsm",
        "mim",
        "pgd",
    )
    steps: Annotated[int, RejectBool, Field(ge=1, le=1000)] = 5
    norm: Norm = "linf"
    size: tuple[PositiveOrZero, PositiveOrZero] = (0.0, 0.5)
    eot: DrawCount = 1
    sigma: PositiveOrZero = 0.25
    split: Share = 0.0
    sensitivity: Positive = 1.0

    @model_validator(mode="after")
    def _consistent(self) -> StoBatch:
        if self.size[0] > self.size[1]:
            raise ValueError(f"size must be [least, largest], got {list(self.size)}")
        return self

    @property
    def input_noise_std(self) -> float:
        """Return the standard deviation of the noise on the input, in input units."""
        return self.sigma * math.sqrt(1 - self.split)

    @property
    def hidden_noise_std(self) -> float:
        """Return the standard deviation of the noise after the first layer."""
        return self.sigma * self.sensitivity * math.sqrt(self.split)

    # --- said in the recipe, the plan and the report

    def check(self, recipe: BaseRecipe) -> None:
        """Raise ValueError for a certificate without sigma if there is noise on the input."""
        super().check(recipe)
        if recipe.certify is not None and recipe.certify.sigma is None and self.input_noise_std:
            raise ValueError(
                "certify.sigma is required: the model has noise on its input; "
                f"{self.input_noise_std:g} is that of training (method.sigma and split)"
            )

    @property
    def capabilities(self) -> Capabilities:
        """Return that passes are of several records, and whether there is noise."""
        return Capabilities(
            needs_batched_passes=True,
            has_prediction_noise=self.sigma > 0,
            supports_frozen_denoiser=False,
        )

    def claim(self, plan: PrivacyPlan, proved: Guarantee) -> Claim:
        """Return the claim without a value: Theorem 4 is about Laplace noise that is drawn once."""
        from dpdist.privacy.claims import Claim

        return Claim(
            "StoBatch", f"xi {self.xi:g}, noise {self.sigma:g}", None, None, proved, "not sound",
            "its Theorem 4 takes one Laplace noise, drawn once, to cover all records and steps; "
            "none of it is here, and what is proved is DP-SGD's",
        )  # fmt: skip

    def execution(self) -> Execution[Any]:
        """Return the training on adversarial draws."""
        return load_execution("dpdist.papers.stobatch.stobatch_draws:StoBatchExecution", self)
