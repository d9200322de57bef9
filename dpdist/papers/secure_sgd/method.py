"""Noise after the first layer, in training and at every prediction: PixelDP, HGM and Secure-SGD.

Its scale is what a Gaussian mechanism needs for (epsilon_r, delta_r) when the input moves by the
construction size L and the layer has norm Delta: sigma_r = scale(epsilon_r, delta_r) Delta L. It
protects nothing about training records: epsilon_r is a parameter of robustness. The sizes that the
trained network certifies are computed from its real first layer
(`dpdist.certification.expected_scores`).

PixelDP (Lecuyer et al., IEEE S&P 2019) and HGM (Phan et al., IJCAI 2019: the same noise power,
redistributed over the hidden components) are not private: they claim robustness only. Secure-SGD
(HGM's paper) is DP-SGD on such a network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, final

from pydantic import Field

from dpdist.config.sections import BaseRecipe
from dpdist.core.fields import (
    Count,
    FilePath,
    OptionCondition,
    Positive,
    PositiveFraction,
    PositiveNoise,
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
from dpdist.privacy.phases import GaussianReleases, GaussianSteps, NonPrivate, Phase
from dpdist.privacy.plan import PrivacyPlan

if TYPE_CHECKING:
    from dpdist.privacy.claims import Claim, Verdict
    from dpdist.privacy.guarantee import Guarantee


# --- options that the three share -------------------------------------------------------------


class Redistribution(Section):
    """Where the shares r of heterogeneous noise come from (HGM, IJCAI 2019, Equation 7).

    r_k is the mean over records of |dL/dh_k|^beta, normalized, and at least `floor` of the uniform
    share.

    Attributes:
        source: The records that r is computed from. public: those of the public data set, with the
            network trained on them for `steps` steps. paid: the private records, in one clipped and
            noised sum that the plan pays for, with the network at its initial weights. private: the
            private records, for nothing, as the paper does it; it needs paper_faithful: true, and
            nothing is then proved.
        data: Name of the public data set; its images are resized to the model's.
        root: Folder that holds the public data set.
        classes: Number of classes of the public data set.
        steps: Number of steps that the network is trained before r is computed.
        beta: The exponent in r_k.
        floor: The least share, in units of the uniform one.
        max_records: The most records that are read.
        noise_multiplier: Noise multiplier of the one paid release.
        clip_norm: Norm to which a record is clipped in the paid release.
        sample_rate: Probability with which a record joins the paid release.
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


class HiddenNoiseMethod(Method):
    """Gaussian noise after the first layer, in training and at every prediction.

    Its scale is `sigma`, or follows from the other keys by `mechanism`. These are parameters of
    robustness and say nothing about training records.

    Attributes:
        sigma: Standard deviation of the noise; null computes it from the keys below.
        epsilon_r: Epsilon of the robustness that the noise is computed for.
        delta_r: Delta of the robustness that the noise is computed for.
        attack_size: Size of the change of the input that the noise is computed for, in `norm`.
        norm: Norm of `attack_size`.
        mechanism: Formula of the noise: classical (epsilon_r at most 1), analytic, or extended (any
            epsilon_r).
        sensitivity: L2 norm of the first layer, which is scaled back to it after every update.
        redistribution: Shares of the noise among components; null gives every component the same.
        augmentations: Independent noises for each record and step, averaged before the clip.
        paper_faithful: One noise for the whole training, as Algorithm 1 of Secure-SGD has it,
            instead of a fresh one for every record and step.
    """

    conditions = (
        OptionCondition(
            ("epsilon_r", "delta_r", "attack_size", "norm", "mechanism"),
            "without sigma, which is the noise's scale itself",
            lambda it: it.sigma is None,
        ),
        OptionCondition(
            ("augmentations",),
            "without paper_faithful, which has one noise",
            lambda it: not it.paper_faithful,
        ),
    )

    sigma: Positive | None = None
    epsilon_r: Positive = 1.0
    delta_r: Annotated[float, RejectBool, Field(ge=1e-30, lt=0.5)] = 0.05
    attack_size: Positive = 0.1
    norm: Literal["l2", "linf"] = "l2"
    mechanism: Literal["classical", "analytic", "extended"] = "extended"
    sensitivity: Positive = 1.0
    redistribution: Redistribution | None = None
    augmentations: DrawCount = 1
    paper_faithful: bool = False

    def rules(self) -> Iterator[Rule]:
        """Yield the rules between the options."""
        large = self.mechanism == "classical" and self.epsilon_r > 1 and self.sigma is None
        yield Rule(large, "the classical mechanism needs epsilon_r <= 1; use extended")
        unpaid = self.redistribution is not None and self.redistribution.source == "private"
        yield Rule(
            unpaid and not self.paper_faithful,
            "redistribution.source private reads private records for nothing, which voids the "
            "guarantee: use public or paid, or set paper_faithful: true to see that",
        )

    # --- said in the recipe, the plan and the report

    @property
    def capabilities(self) -> Capabilities:
        """Return that noise stays after the first layer, which is the network's own."""
        return Capabilities(
            needs_batched_passes=True, has_prediction_noise=True, supports_frozen_denoiser=False
        )

    @property
    def public_records(self) -> PublicRecords | None:
        """Return the records that shape the noise, with source: public."""
        section = self.redistribution
        if section is None or section.source != "public":
            return None
        field = "method.redistribution.data"
        return PublicRecords(field, section.data, section.classes, section.root)

    def cost(self, steps: GaussianSteps) -> tuple[Phase, ...]:
        """Return the cost of the shares r (nothing, one noised sum, or everything) and of steps."""
        section = self.redistribution
        if section is None or section.source == "public":
            return (steps,)
        if section.source == "paid":
            paid = GaussianReleases(section.noise_multiplier, 1, section.sample_rate)
            return (paid, steps)
        return (NonPrivate("the redistribution r is computed from private records"), steps)

    def assumptions(self, recipe: BaseRecipe) -> list[str]:
        """Return those of the records that the shares r are made of."""
        public, section = self.public_records, self.redistribution
        room = (
            record_limit_assumptions(recipe)
            if section is not None and section.source == "paid"
            else []
        )
        return room + ([] if public is None else public.assumptions(recipe))

    # --- done in training

    @final
    def noise_scale(self, inputs: int) -> float:
        """Return sigma_r, the standard deviation on every hidden component before redistribution.

        inputs: numbers in one input; an L-infinity size moves the first layer's output by at most
        sqrt(inputs) times as much as an L2 size.
        """
        from dpdist.privacy import mechanisms

        if self.sigma is not None:
            return self.sigma
        scales: dict[str, Callable[..., object]] = {
            "classical": mechanisms.classical_gaussian_scale,
            "analytic": mechanisms.analytic_gaussian_scale,
            "extended": mechanisms.extended_gaussian_scale,
        }
        reach = self.sensitivity * (math.sqrt(inputs) if self.norm == "linf" else 1.0)
        unit = float(scales[self.mechanism](self.epsilon_r, self.delta_r))  # type: ignore[arg-type]
        return unit * reach * self.attack_size

    def execution(self) -> Execution[Any]:
        """Return the training with noise after the first layer."""
        return load_execution("dpdist.papers.secure_sgd.shares:HiddenNoiseExecution", self)


class NonPrivateHiddenNoiseMethod(HiddenNoiseMethod):
    """Trained by ordinary gradients: nothing is proved about training records."""

    def check(self, recipe: BaseRecipe) -> None:
        """Raise ValueError for noise on gradients."""
        if recipe.privacy.noise_multiplier != 0:
            raise ValueError(
                f"method {self.name} trains without gradient privacy: give "
                "privacy.noise_multiplier: 0 and clipping: none, or take method secure-sgd"
            )
        super().check(recipe)


# --- PixelDP ----------------------------------------------------------------------------------


class PixelDP(NonPrivateHiddenNoiseMethod):
    """Certified robustness by equal noise after the first layer (Lecuyer et al., IEEE S&P 2019).

    Trained without gradient privacy: nothing is proved about training records.
    """

    name: Literal["pixeldp"] = "pixeldp"
    display_name: ClassVar[str] = "PixelDP"
    mechanism: Literal["classical", "analytic", "extended"] = "classical"
    redistribution: None = None


# --- HGM --------------------------------------------------------------------------------------


class HGMPixelDP(NonPrivateHiddenNoiseMethod):
    """PixelDP with heterogeneous noise and any epsilon_r (HGM, IJCAI 2019). Not private either."""

    name: Literal["hgm-pixeldp"] = "hgm-pixeldp"
    display_name: ClassVar[str] = "HGM-PixelDP"
    redistribution: Redistribution = Redistribution()


# --- Secure-SGD -------------------------------------------------------------------------------


_VERDICTS: dict[str, tuple[Verdict, str]] = {
    "equal": ("sound", "DP-SGD, clipped one by one, Poisson batches; all noise shares are equal"),
    "public": ("sound", "DP-SGD, clipped one by one, Poisson batches; r is from public records"),
    "paid": ("not sound", "r reads private records, which the claim leaves out; the proof pays"),
    "private": ("not sound", "r is computed from private records and shapes every gradient"),
}


class SecureSGD(HiddenNoiseMethod):
    """DP-SGD on a network with noise after its first layer (HGM, IJCAI 2019, Algorithm 1).

    A composition: DP-SGD (clip, noise, Poisson sampling), HGM's noise after the first layer,
    PixelDP's certificate at prediction. Privacy is that of DP-SGD and of r, where it is paid.

    Attributes:
        redistribution: Shares of the noise among components; null gives every component the same.
            With mechanism: analytic that is the paper's AGM variant.
    """

    name: Literal["secure-sgd"] = "secure-sgd"
    display_name: ClassVar[str] = "Secure-SGD"
    redistribution: Redistribution | None = Redistribution()

    def claim(self, plan: PrivacyPlan, proved: Guarantee) -> Claim | None:
        """Return the claim: the moments accountant's epsilon of DP-SGD, with r for free."""
        from dpdist.papers.secure_sgd.claims import secure_sgd_claim
        from dpdist.privacy.claims import Claim

        steps = next((phase.training_steps for phase in plan.phases if phase.training_steps), None)
        if steps is None or steps.noise_multiplier == 0:
            return None
        expected_batch, noise = plan.step(0).expected_batch, steps.noise_multiplier
        claimed = secure_sgd_claim(
            plan.records, round(expected_batch), noise, steps.steps, plan.delta
        )
        section = self.redistribution
        verdict, reason = _VERDICTS["equal" if section is None else section.source]
        setting = f"N {plan.records}, L {expected_batch:g}, sigma {noise:.4g}, T {steps.steps}"
        return Claim("Secure-SGD", setting, None, claimed, proved, verdict, reason)
