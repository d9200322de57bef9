"""Secure-SGD: DP-SGD on a network with noise behind its first layer (HGM, IJCAI 2019)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from dpdist.methods.hidden_noise import HiddenNoiseMethod
from dpdist.methods.redistribution import Redistribution
from dpdist.privacy.plan import PrivacyPlan

if TYPE_CHECKING:
    from dpdist.privacy.claims import Claim, Verdict
    from dpdist.privacy.guarantee import Guarantee

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
    known_as: ClassVar[str] = "Secure-SGD"
    redistribution: Redistribution | None = Redistribution()

    def claim(self, plan: PrivacyPlan, proved: Guarantee) -> Claim | None:
        """The moments accountant's epsilon of its DP-SGD steps, and that r costs nothing."""
        from dpdist.privacy.claims import Claim, secure_sgd_claim

        steps = next((phase.loop for phase in plan.phases if phase.loop), None)
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
