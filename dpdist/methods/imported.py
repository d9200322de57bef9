"""A model that was trained elsewhere: certified and attacked here, without an epsilon.

`dpdist import` writes the recipe. The run has a plan of one phase, which says that nothing of the
training is known, and an empty ledger, so that report, card, release and comparison state this
instead of a guarantee.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from dpdist.core.fields import CountOrZero, SingleLine
from dpdist.methods.base import Capabilities, Method
from dpdist.privacy.phases import NOT_TRAINED_HERE, GaussianSteps, TrainedElsewhere
from dpdist.privacy.plan import PrivacyPlan

if TYPE_CHECKING:
    from dpdist.privacy.phases import Phase

# Required sections of a recipe that an import does not use.
UNUSED: dict[str, dict[str, Any]] = {
    "privacy": {"noise_multiplier": 0.0, "clipping": "none", "delta": 1e-5},
    "training": {"batch_size": 1, "steps": 1, "learning_rate": 1.0},
}


class Imported(Method):
    """Take a model that was trained elsewhere.

    Attributes:
        weights: Name of the file of its weights.
        sha256: SHA-256 sum of the file of weights.
        inputs: How pictures were brought to the model's input.
        evaluate: Number of test inputs that clean accuracy is measured on (default: all; 0: none).
    """

    name: Literal["imported"] = "imported"
    display_name: ClassVar[str] = "a model from elsewhere"
    excluded: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("audit", "tune", "public"), ", as it trains nothing"
    )
    weights: SingleLine = ""
    sha256: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    inputs: SingleLine = ""
    evaluate: CountOrZero | None = None

    @model_validator(mode="after")
    def _named(self) -> Imported:
        if bool(self.weights) != bool(self.sha256):
            raise ValueError("weights and sha256: must be given together, a file and its sum")
        return self

    # --- said in the recipe, the plan and the report

    @property
    def capabilities(self) -> Capabilities:
        """Return that nothing was trained here, and how often the model is evaluated."""
        return Capabilities(
            trained_elsewhere=(
                f"{NOT_TRAINED_HERE}; its training records and its training are unknown here. "
                "`dpdist certify`, `attack`, `compare`, `predict`, `release` and `report` work"
            ),
            picture_preparation=self.inputs,
            max_evaluation_queries=self.evaluate,
        )

    def cost(self, steps: GaussianSteps) -> tuple[Phase, ...]:
        """Return one phase of unknown cost: the training was neither executed nor seen."""
        return (TrainedElsewhere(),)

    def describe(self, plan: PrivacyPlan) -> str:
        """Return the line of a report on the origin of the model."""
        came = f"; weights from {self.weights}, SHA-256 {self.sha256[:16]}" if self.weights else ""
        shown = f"; inputs: {self.inputs}" if self.inputs else ""
        return f"{NOT_TRAINED_HERE}{came}{shown}"
