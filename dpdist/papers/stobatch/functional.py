"""A sound functional mechanism: a quadratic objective, whose coefficients are released once.

Each sum of coefficients is released with Gaussian noise, which AdLM and DPAL aim at and do not
prove. The last layer of a model is fitted; the layers before it keep their initial weights: public
features. A few sums are released in a whole training, with any number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from dpdist.config.sections import BaseRecipe
from dpdist.core.fields import (
    Count,
    FilePath,
    OptionCondition,
    Positive,
    PositiveFraction,
    PositiveOrZero,
    RejectBool,
    Rule,
    Section,
    Text,
)
from dpdist.methods.base import (
    Capabilities,
    DrawCount,
    Execution,
    Method,
    PublicRecords,
    load_execution,
    record_limit_assumptions,
)
from dpdist.privacy.phases import GaussianSteps, Phase
from dpdist.privacy.plan import PrivacyPlan

_OpenUnitInterval = Annotated[float, RejectBool, Field(gt=0, lt=1)]


class Adversarial(Section):
    """Rounds see each record, and an adversarial copy of it, at shares 1 and xi of 1 + xi.

    The copy leads away from the record's own label, at the head so far.

    Attributes:
        size: L-infinity size of the attack, in input units.
        steps: Number of steps of the attack.
        xi: Weight of the adversarial copy.
    """

    size: Positive = 0.1
    steps: Annotated[int, RejectBool, Field(ge=1, le=100)] = 1
    xi: Positive = 1.0


class Relevance(Section):
    """Less noise for features that matter more (the idea of AdLM), judged by public records.

    A direction's components are multiplied by the square roots of shares r, of mean 1, before they
    are clipped, so that component j has 1 / r_j of the noise variance. r_j is the mean of
    |f_j dL/df_j|^beta over public records, for a head fitted to them, and at least `floor`.

    Attributes:
        data: Name of the public data set.
        root: Folder that holds the public data set.
        classes: Number of classes of the public data set.
        beta: The exponent in r_j.
        floor: The least share.
        max_records: The most public records that are read.
    """

    data: Text = "digits"
    root: FilePath | None = None
    classes: Annotated[int, RejectBool, Field(ge=1, le=100_000)] = 10
    beta: Positive = 1.0
    floor: PositiveFraction = 0.1
    max_records: Count = 2000


class Functional(Method):
    """The last layer of a model, fitted to coefficients of its loss, each released once.

    Features f are the inputs of the last layer; all before it stays at its initial weights, which
    must be public. Released are, with every record in each:

    1. the sum of f, clipped to norm `clip`: its mean is the center m;
    2. the sums A of h h' and B of h y', the coefficients of the second-order Taylor expansion of
       the sigmoid cross-entropy at 0; h is f - m clipped to norm `radius`, in units of it, beside
       the constant `constant`, of norm at most 1. Of a record at the center h is that constant.
       The head minimizes the noisy expansion plus a ridge of `ridge` times the noise of A;
    3. in `rounds` rounds, the sum of h (y - p)', the linear coefficients of the softmax
       cross-entropy expanded at the head so far; y - p is clipped to norm `residual`. The head
       moves by `step` times the minimum of that with A's curvature.

    With an `encoder`, of model patches, a sum before them: of the mean over a record's patches p
    of p p', each of norm at most 1. Its leading eigenvectors are the filters: principal components
    in place of the auto-encoder of DPAL, whose loss has no minimum.

    Each release costs a part of mu^2 = 1 / noise_multiplier^2.

    Attributes:
        clip: Norm to which a record's features are clipped in the sum that gives their center.
        radius: Norm to which features are clipped around their center.
        constant: The constant feature next to them, a norm below 1.
        ridge: The ridge of the fit, in units of the noise of A.
        rounds: Number of rounds after the first fit.
        residual: Norm to which y - p is clipped in a round.
        step: Length of a round's step, in units of the step to the minimum.
        center: Part of mu^2 that the center costs.
        refine: Part of mu^2 that all rounds together cost; the first fit has the rest.
        labels: Part of a record's squared norm that the sum B may have.
        sigma: Standard deviation of noise on the input, in input units: records are seen in `draws`
            noisy copies, as a certificate's are.
        noise: fresh for each sum, or each record's own, a public function of it, so that all sums
            have the same features.
        augmentations: Number of noisy copies of each record.
        encoder: Part of mu^2 that the encoder costs; above 0 with model patches only.
        adversarial: Rounds see adversarial copies too.
        relevance: Share out the noise among features by public records.
    """

    conditions = (
        OptionCondition(
            ("residual", "step", "refine"), "with rounds > 0", lambda it: it.rounds > 0
        ),
        OptionCondition(("noise", "augmentations"), "with sigma > 0", lambda it: it.sigma > 0),
    )

    recipe_conditions = (
        OptionCondition(
            (
                "training.optimizer", "training.schedule", "training.milestones",
                "training.momentum", "training.weight_decay",
            ),
            "to steps along gradients; method functional fits a head to sums",
        ),
    )  # fmt: skip

    name: Literal["functional"] = "functional"
    display_name: ClassVar[str] = "functional mechanism"
    clip: Positive = 1.0
    radius: Positive = 0.4
    constant: _OpenUnitInterval = 0.15
    ridge: Positive = 0.2
    rounds: Annotated[int, RejectBool, Field(ge=0, le=1000)] = 8
    residual: Positive = 0.1
    step: Positive = 3.0
    center: _OpenUnitInterval = 0.05
    refine: _OpenUnitInterval = 0.7
    labels: _OpenUnitInterval = 0.5
    sigma: PositiveOrZero = 0.0
    noise: Literal["fresh", "own"] = "fresh"
    augmentations: DrawCount = 1
    encoder: Annotated[float, RejectBool, Field(ge=0, lt=1)] = 0.0
    adversarial: Adversarial | None = None
    relevance: Relevance | None = None

    def rules(self) -> Iterator[Rule]:
        """Yield the rules between the options."""
        whole = self.encoder + self.center + self.refine >= 1
        yield Rule(
            whole, "center, refine and encoder are parts of one budget: their sum must be < 1"
        )
        unused = self.adversarial is not None and not self.rounds
        yield Rule(unused, "adversarial is of the rounds: rounds must be > 0")

    # --- said in the recipe, the plan and the report

    def check(self, recipe: BaseRecipe) -> None:
        """Raise ValueError for keys that are for steps along gradients."""
        super().check(recipe)
        privacy, planted = recipe.privacy, recipe.canary_audit
        if privacy.clipping != "flat" or privacy.clip_norm != 1 or privacy.batch_cap is not None:
            raise ValueError(
                "method functional bounds what it sums by itself: leave out privacy.clipping, "
                "clip_norm and batch_cap"
            )
        if recipe.training.ema is not None or recipe.training.has_augmentation:
            raise ValueError(
                "method functional takes no steps: leave out training.ema, crop and flip"
            )
        if recipe.model.classifier is not None:
            raise ValueError("method functional fits the last layer, which is frozen here")
        if planted is not None and planted.inserts_gradients:
            raise ValueError(
                "method functional sums no gradients: audit.canary must be mislabeled or blank"
            )

    @property
    def public_records(self) -> PublicRecords | None:
        """Return the records that the relevance of features is judged by."""
        named = self.relevance
        if named is None:
            return None
        return PublicRecords("method.relevance.data", named.data, named.classes, named.root)

    @property
    def capabilities(self) -> Capabilities:
        """Return that there are no sums of clipped gradients."""
        return Capabilities(
            takes_gradient_steps=False,
            needs_batched_passes=True,
            # an encoder is learned from the records, not from a denoiser's outputs
            supports_frozen_denoiser=not self.encoder,
        )

    def cost(self, steps: GaussianSteps) -> tuple[Phase, ...]:
        """Return sums over all records, whose mu^2 add up to that of the noise multiplier."""
        rest = 1 - self.center - (self.refine if self.rounds else 0) - self.encoder
        parts = [(1, self.center), (1, rest)]
        if self.rounds:
            parts.append((self.rounds, self.refine))
        if self.encoder:
            parts.insert(0, (1, self.encoder))
        noise = steps.noise_multiplier
        return tuple(GaussianSteps(n, noise * math.sqrt(n / part), 1.0) for n, part in parts)

    def describe(self, plan: PrivacyPlan) -> str:
        """Return the number of sums and their noises in words."""
        noises = dict.fromkeys(f"{plan.step(t).noise_multiplier:.4g}" for t in range(plan.steps))
        return f"{plan.steps} sums over all records, noise multipliers {', '.join(noises)}"

    def assumptions(self, recipe: BaseRecipe) -> list[str]:
        """Return those of the frozen layers, of a declared number of records, of public ones."""
        public = self.public_records
        return [
            "the model's weights before its last layer were made without the private records"
            + (", or are what the encoder's sum paid for" if self.encoder else ""),
            *record_limit_assumptions(recipe),
            *([] if public is None else public.assumptions(recipe)),
        ]

    def execution(self) -> Execution[Any]:
        """Return the release of the sums."""
        return load_execution("dpdist.papers.stobatch.functional_sums:FunctionalExecution", self)
