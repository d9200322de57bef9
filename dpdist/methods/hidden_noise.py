"""Noise behind the first layer, in training and at every prediction: PixelDP, HGM and Secure-SGD.

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
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from dpdist.config.sections import BaseRecipe
from dpdist.core.fields import OptionCondition, Positive, RejectBool
from dpdist.methods.base import (
    DrawCount,
    Method,
    MethodSetup,
    MethodState,
    PublicRecords,
    Redistribution,
    record_limit_assumptions,
)
from dpdist.privacy.phases import GaussianReleases, NonPrivate, Phase
from dpdist.privacy.plan import PrivacyPlan, StepPlan

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dpdist.gradients.perturbations import Perturbation
    from dpdist.models import ModelSpec
    from dpdist.privacy.claims import Claim, Verdict
    from dpdist.privacy.guarantee import Guarantee


# --- options that the three share -------------------------------------------------------------


STD = "std"  # the tensor of deviations, among what is made once


class HiddenNoiseMethod(Method):
    """Gaussian noise behind the first layer, in training and at every prediction.

    Its scale sigma_r is `sigma`, or what `mechanism` needs for (epsilon_r, delta_r) against changes
    of the input of size `attack_size` in `norm`, for a first layer of L2 norm `sensitivity`; the
    layer is scaled back to that norm after every update. These are parameters of robustness and
    say nothing about training records. draws: independent noises per record and step, averaged
    before the clip. paper_faithful: one noise for the whole training, as Algorithm 1 of Secure-SGD
    has it, instead of a fresh one for every record and step.
    """

    conditions = (
        OptionCondition(
            ("epsilon_r", "delta_r", "attack_size", "norm", "mechanism"),
            "without sigma, which is the noise's scale itself",
            lambda it: it.sigma is None,
        ),
        OptionCondition(
            ("draws",),
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
    draws: DrawCount = 1
    paper_faithful: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> HiddenNoiseMethod:
        if self.mechanism == "classical" and self.epsilon_r > 1 and self.sigma is None:
            raise ValueError("the classical mechanism needs epsilon_r <= 1; use extended")
        unpaid = self.redistribution is not None and self.redistribution.source == "private"
        if unpaid and not self.paper_faithful:
            raise ValueError(
                "redistribution.source private reads private records for nothing, which voids the "
                "guarantee: use public or paid, or set paper_faithful: true to see that"
            )
        return self

    # --- said in the recipe, the plan and the report

    @property
    def supports_frozen_denoiser(self) -> bool:
        return False

    @property
    def has_prediction_noise(self) -> bool:
        return True

    @property
    def needs_batched_passes(self) -> bool:
        return True

    @property
    def public_records(self) -> PublicRecords | None:
        section = self.redistribution
        if section is None or section.source != "public":
            return None
        field = "method.redistribution.data"
        return PublicRecords(field, section.data, section.classes, section.root)

    @property
    def extra_cost(self) -> tuple[Phase, ...]:
        """Return the cost of the shares r: nothing, one noised sum, or everything."""
        section = self.redistribution
        if section is None or section.source == "public":
            return ()
        if section.source == "paid":
            return (GaussianReleases(section.noise_multiplier, 1, section.sample_rate),)
        return (NonPrivate("the redistribution r is computed from private records"),)

    def assumptions(self, recipe: BaseRecipe) -> list[str]:
        public, section = self.public_records, self.redistribution
        room = (
            record_limit_assumptions(recipe)
            if section is not None and section.source == "paid"
            else []
        )
        return room + ([] if public is None else public.assumptions(recipe))

    # --- done in training

    def noise_scale(self, inputs: int) -> float:
        """sigma_r: deviation of the noise on every hidden component, before redistribution.

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

    def prepare_state(self, setup: MethodSetup) -> dict[str, Tensor]:
        from dpdist.methods.hidden_noise_shares import heterogeneous_std, noise_shares

        section = self.redistribution
        if section is None:
            return self.placeholder_state(setup.build_initial_model(), setup.spec.input_shape)
        scale = self.noise_scale(math.prod(setup.spec.input_shape))
        return {STD: heterogeneous_std(scale, noise_shares(section, self.sensitivity, setup))}

    def placeholder_state(
        self, model: nn.Module, input_shape: tuple[int, ...]
    ) -> dict[str, Tensor]:
        """The same deviation for every component."""
        import torch

        from dpdist.models import require_split

        shape = require_split(model).hidden_shape(input_shape)
        return {STD: torch.full(shape, self.noise_scale(math.prod(input_shape)))}

    def perturbation(
        self, step: StepPlan, learning_rate: float, state: MethodState
    ) -> Perturbation:
        from dpdist.gradients.perturbations import FixedHiddenPerturbation, HiddenPerturbation
        from dpdist.models import require_split

        module, std = require_split(state.model).name, state.tensors[STD]
        if self.paper_faithful:
            return FixedHiddenPerturbation(module, std, state.key)
        return HiddenPerturbation(self.draws, module, std)

    def project_parameters(self, model: nn.Module) -> Callable[[], None]:
        """The first layer is scaled back into its norm."""
        from dpdist.models import require_split
        from dpdist.models.noise import project_first_layer_norm

        split = require_split(model)
        return lambda: project_first_layer_norm(split, self.sensitivity)

    def finalize(self, spec: ModelSpec, state: MethodState) -> ModelSpec:
        from dataclasses import replace

        from dpdist.models import attach_noise

        attach_noise(state.model, state.tensors[STD])
        return replace(spec, hidden_noise=True)


class NonPrivateHiddenNoiseMethod(HiddenNoiseMethod):
    """Trained by ordinary gradients: nothing is proved about training records."""

    def check(self, recipe: BaseRecipe) -> None:
        if recipe.privacy.noise_multiplier != 0:
            raise ValueError(
                f"method {self.name} trains without gradient privacy: give "
                "privacy.noise_multiplier: 0 and clipping: none, or take method secure-sgd"
            )
        super().check(recipe)


# --- PixelDP ----------------------------------------------------------------------------------


class PixelDP(NonPrivateHiddenNoiseMethod):
    """Certified robustness by equal noise behind the first layer (Lecuyer et al., IEEE S&P 2019).

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
    """DP-SGD on a network with noise behind its first layer (HGM, IJCAI 2019, Algorithm 1).

    A composition: DP-SGD (clip, noise, Poisson sampling), HGM's noise behind the first layer,
    PixelDP's certificate at prediction. Privacy is that of DP-SGD and of what r cost.
    redistribution: null gives every component the same noise; with mechanism: analytic that is the
    paper's AGM variant.
    """

    name: Literal["secure-sgd"] = "secure-sgd"
    display_name: ClassVar[str] = "Secure-SGD"
    redistribution: Redistribution | None = Redistribution()

    def claim(self, plan: PrivacyPlan, proved: Guarantee) -> Claim | None:
        """The moments accountant's epsilon of its DP-SGD steps, and that r costs nothing."""
        from dpdist.privacy.claims import Claim, secure_sgd_claim

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
