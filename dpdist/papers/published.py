"""The table of published claims: what each system claims, what is proved, and why they differ.

`dpdist account --claims` prints it; it is found by the entry point `published` of dpdist.claims.
"""

from __future__ import annotations

from dpdist.papers.pate.claims import pate_guarantee
from dpdist.papers.residual.claims import (
    residual_black_box_claim,
    residual_claim,
    residual_input_guarantee,
)
from dpdist.papers.secure_sgd.claims import classic_rdp_epsilon, hgm_claim, secure_sgd_claim
from dpdist.papers.stobatch.dpal import dpal_claim, dpal_encoder_budget, dpal_gammas
from dpdist.papers.transdenoiser.method import transdenoiser_training_claim
from dpdist.privacy import mechanisms
from dpdist.privacy.claims import Claim, claimed_guarantee, unproved_guarantee
from dpdist.privacy.guarantee import Guarantee, format_epsilon
from dpdist.privacy.plan import PrivacyPlan

_DELTA = 1e-5  # of all claims with a delta


def _dp_sgd(records: int, batch: int, noise: float, steps: int) -> Guarantee:
    return PrivacyPlan.dp_sgd(
        records=records, batch_size=batch, noise_multiplier=noise, steps=steps, delta=_DELTA
    ).guarantee()


def _dplis(data: str, records: int, noise: float, steps: int, printed: float) -> Claim:
    claimed = claimed_guarantee(
        classic_rdp_epsilon(256 / records, noise, steps, _DELTA),
        _DELTA,
        "add-or-remove-one",
        "DPlis, DP-SGD by RDP at whole orders",
        ("Poisson sampling", "smoothing noise independent of the data"),
    )
    return Claim(
        f"DPlis, {data}",
        f"N {records}, L 256, sigma {noise:g}, T {steps}",
        printed,
        claimed,
        _dp_sgd(records, 256, noise, steps),
        "sound",
        "DP-SGD; per-record smoothing before the clip is free",
    )


def _residual(data: str, pi: float, printed: float) -> Claim:
    every_pass, once = (residual_input_guarantee(pi, 30, passes) for passes in (100, 1))
    return Claim(
        f"Residual I, {data}",
        f"pi {pi:g}, gamma {2 * pi:g}, R = G = 30, 100 passes",
        printed,
        residual_claim(pi, 2 * pi, 30, 30, 100),
        unproved_guarantee(1e-5, "labels enter gradients without noise", "replace-one"),
        "not sound",
        "labels unprotected, G unverifiable, printed budget does not follow; with labels public "
        f"and inputs clipped: {format_epsilon(every_pass.epsilon, 3)}; with noise drawn once "
        f"(noisy-records): {format_epsilon(once.epsilon, 3)}",
    )


def _residual_dp_sgd(data: str, records: int, printed: float) -> Claim:
    steps = 100 * (records // 128)
    claimed = secure_sgd_claim(records, 128, 1.1, steps)
    return Claim(
        f"DP-SGD beside Residual I, {data}",
        f"N {records}, sigma 1.1; L 128, 100 epochs (our reading)",
        printed,
        claimed,
        _dp_sgd(records, 128, 1.1, steps),
        "sound if",
        "batches are Poisson-sampled; the batch size behind the printed budget is not printed",
    )


def _dpal(data: str, total: float, epsilon_2: float, sensitivity: int, batch: int) -> Claim:
    # The weight norm is not printed; 1 keeps gamma in the range of gamma_x.
    gamma, gamma_x = dpal_gammas(sensitivity, batch, 1.0)
    epsilon_1 = dpal_encoder_budget(total, epsilon_2, gamma, gamma_x)
    return Claim(
        f"DPAL / StoBatch, {data}",
        f"m {batch}, Delta_R {sensitivity}, epsilon_2 {epsilon_2:g}, weight norm 1 (our choice)",
        total,
        dpal_claim(epsilon_1, epsilon_2, gamma, gamma_x),
        unproved_guarantee(0.0, "one Laplace vector shared by all records cancels", "replace-one"),
        "not sound",
        "shared noise cancels between records, sensitivity is a ratio, noise reused every step",
    )


def _hgm() -> list[Claim]:
    exact = float(mechanisms.gaussian_epsilon(1e-5, 4.8542))
    secure = (50_000, 125, 4.0, 40_000)
    return [
        Claim(
            "HGM (one release)",
            "noise 4.8542, weighted sensitivity 1",
            None,
            hgm_claim(4.8542, 1e-5),
            Guarantee(exact, 1e-5, "replace-one", "proved", "exact Gaussian profile"),
            "sound if",
            "r > 0 is fixed without private records; loose: the analytic Gaussian is exact",
        ),
        Claim(
            "Secure-SGD",
            f"N {secure[0]}, L {secure[1]}, sigma {secure[2]:g}, T {secure[3]} (our choice)",
            None,
            secure_sgd_claim(*secure),
            unproved_guarantee(1e-5, "r is computed from private records"),
            "sound if",
            "r is public or private by itself and examples are clipped one by one (the code does "
            f"neither); then {format_epsilon(_dp_sgd(*secure).epsilon)} at our choice of 100 "
            "epochs",
        ),
    ]


def _transdenoiser() -> list[Claim]:
    steps = 31_726  # what noise multiplier 2 affords at epsilon 1, batch 128
    return [
        Claim(
            "TransDenoiser",
            f"xi_up 2, B 128, N 60000, T {steps}",
            1.0,
            transdenoiser_training_claim(2.0, 128 / 60_000, steps),
            unproved_guarantee(1e-5, "the transformed noise depends on the record it should hide"),
            "not sound",
            "data-dependent rank-deficient covariance (S_min = 0), factor T taken twice, no clip",
        ),
        Claim(
            "TransDenoiser_sepdp",
            f"noise multiplier 2, B 128, N 60000, T {steps}",
            1.0,
            secure_sgd_claim(60_000, 128, 2.0, steps),
            _dp_sgd(60_000, 128, 2.0, steps),
            "sound if",
            "gradients are clipped one by one; the input noise earns nothing",
        ),
    ]


def _others() -> list[Claim]:
    return [
        Claim(
            "PATE, Confident-GNMax",
            "4000 queries, thresholds 200, votes 40",
            7.44,
            None,
            pate_guarantee(4000, 4000, 200.0, 40.0),
            "sound if",
            "charged without looking at votes; the printed value is an expected, data-dependent "
            "cost. Capped at 1323 answers: "
            f"{format_epsilon(pate_guarantee(4000, 1323, 200.0, 40.0).epsilon)}",
        ),
        Claim(
            "AdLM",
            "described only",
            None,
            None,
            unproved_guarantee(0.0, "the mechanism is not specified", "replace-one"),
            "not sound",
            "too little is specified to check; Laplace noise is reused while coefficients change",
        ),
    ]


def published_claims() -> list[Claim]:
    """Return one row per published claim, at the settings of the papers."""
    return [
        _dplis("MNIST", 60_000, 1.1, 6057, 1.99),
        _dplis("MNIST", 60_000, 1.1, 129_642, 10.0),
        _dplis("CIFAR-10", 50_000, 1.1, 4097, 1.99),
        _dplis("CIFAR-10", 50_000, 1.1, 89_746, 10.0),
        _dplis("PubFig83", 9688, 2.0, 2960, 4.06),
        _dplis("CelebA1000", 25_000, 1.3, 9700, 4.88),
        *_hgm(),
        _dpal("MNIST", 0.2, 0.1, 4950, 2499),
        _dpal("CIFAR-10", 2.0, 1.0, 9504, 1851),
        _residual("IDC", 0.25, 1.1e3),
        _residual("CIFAR-10", 2.25, 3e3),
        _residual_dp_sgd("IDC", 9988, 15.79),
        _residual_dp_sgd("CIFAR-10", 12_500, 22.33),
        Claim(
            "Residual II",
            "pi 1, gamma 2, ||w|| <= 1, B 1, eta_0 0.1, 3 blocks (bounds are ours)",
            None,
            residual_black_box_claim(1.0, 2.0, 1.0, 1.0, 0.1, 3),
            unproved_guarantee(1e-5, "the model is not private and queries compose", "replace-one"),
            "not sound",
            "covers one prediction with fresh noise, any two models; k predictions cost k times",
        ),
        *_transdenoiser(),
        *_others(),
    ]
