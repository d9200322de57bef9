"""Plain DP-SGD (Abadi et al. 2016)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from dpdist.base.fields import Positive
from dpdist.methods.base import Fixed, Method
from dpdist.privacy.plan import StepPlan

if TYPE_CHECKING:
    from dpdist.gradients.perturbations import Draws


class DPSGD(Method):
    """Plain DP-SGD (Abadi et al. 2016).

    gradient_scale K multiplies each gradient before the clip: the control that separates DPlis'
    smoothing from the larger gradients of its summed draws.
    """

    name: Literal["dp-sgd"] = "dp-sgd"
    known_as: ClassVar[str] = "DP-SGD"
    gradient_scale: Positive = 1.0

    @property
    def takes_tokens(self) -> bool:
        return True

    def perturbation(self, step: StepPlan, learning_rate: float, fixed: Fixed) -> Draws:
        from dpdist.gradients.perturbations import Draws

        return Draws(gradient_scale=self.gradient_scale)
