"""What a run's paper claims about its privacy, beside what is proved: never mixed."""

from __future__ import annotations

from dpdist.methods.options import TransDenoiser
from dpdist.privacy.claims import (
    Claim,
    Verdict,
    secure_sgd_claim,
    transdenoiser_training_claim,
)
from dpdist.privacy.guarantee import Guarantee, format_epsilon
from dpdist.privacy.plan import PrivacyPlan
from dpdist.recipe import Recipe


def claim_of(recipe: Recipe, plan: PrivacyPlan, proved: Guarantee) -> Claim | None:
    """The claim of the method's paper at this run's setting; None when it makes none of its own.

    PixelDP and HGM-PixelDP claim robustness only. Secure-SGD claims the moments accountant's
    epsilon of its DP-SGD steps, and that r costs nothing. TransDenoiser's Algorithm 1 claims that
    its transformed and added noise together are worth xi_up.
    """
    if recipe.method.name == "transdenoiser":
        return _transdenoiser_claim(recipe.method, plan, proved)
    steps = next((phase.loop for phase in plan.phases if phase.loop), None)
    method = recipe.method
    if method.name != "secure-sgd" or steps is None or steps.noise_multiplier == 0:
        return None
    step = plan.step(0)
    claimed = secure_sgd_claim(
        plan.records,
        round(step.expected_batch),
        steps.noise_multiplier,
        steps.steps,
        plan.delta,
    )
    section = method.redistribution
    source = "equal" if section is None else section.source
    verdict, reason = _VERDICTS[source]
    setting = (
        f"N {plan.records}, L {step.expected_batch:g}, sigma {steps.noise_multiplier:.4g}, "
        f"T {steps.steps}"
    )
    return Claim("Secure-SGD", setting, None, claimed, proved, verdict, reason)


def _transdenoiser_claim(
    method: TransDenoiser, plan: PrivacyPlan, proved: Guarantee
) -> Claim | None:
    if method.variant != "full":
        return None
    rate = plan.step(0).sample_rate
    return Claim(
        "TransDenoiser",
        f"xi_up {method.xi_up:g}, q {rate:.4g}, T {plan.steps}",
        None,
        transdenoiser_training_claim(method.xi_up, rate, plan.steps, plan.delta),
        proved,
        "not sound",
        "the signs of the remainders and S_min, and with them the noise, depend on the private "
        "records",
    )


def claim_line(claim: Claim) -> str:
    """The claim in one line."""
    assert claim.claimed is not None
    return (
        f"epsilon = {format_epsilon(claim.claimed.epsilon)} at delta = {claim.claimed.delta:g} "
        f"({claim.claimed.source}): {claim.verdict}: {claim.reason}"
    )


_VERDICTS: dict[str, tuple[Verdict, str]] = {
    "equal": ("sound", "DP-SGD, clipped one by one, Poisson batches; all noise shares are equal"),
    "public": ("sound", "DP-SGD, clipped one by one, Poisson batches; r is from public records"),
    "paid": ("not sound", "r reads private records, which the claim leaves out; the proof pays"),
    "private": ("not sound", "r is computed from private records and shapes every gradient"),
}
