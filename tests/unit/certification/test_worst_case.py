"""Each noise with its own draws against its own radius, where the certificate is exact.

The classifier is a threshold on the first number, so the distance to its boundary is known, and no
other classifier of the same probability has a smaller one (Gaussian: a half-space; Laplace and
uniform in L1: a half-space across one axis). A radius beyond the distance is false, one well below
it wastes what the draws show: so a scale that is wrong anywhere between the random words and the
radius is seen, from either side.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpdist.certification import predict, score_bounds
from dpdist.certification.certificate import Certificate, NoiseSampler
from dpdist.certification.cohen import Smoothing
from dpdist.certification.noise import NOISES
from dpdist.certification.predict import Predictor
from dpdist.certification.registry import BY_MODE, settings_of
from dpdist.certification.score_bounds import SCORE_UNIT, Sensitivity
from dpdist.certification.worker import (
    BlockScores,
    ScoreSampler,
)
from dpdist.randomness import keys as units

SIGMA = 0.5


class Threshold(nn.Module):
    """Class 1 where the first number is positive."""

    def forward(self, x: Tensor) -> Tensor:
        score = x.flatten(1)[:, :1]
        return torch.cat([-score, score], 1)


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A known sequence in place of the operating system's secret one."""
    seeds = itertools.count()
    monkeypatch.setattr(predict.secrets, "token_hex", lambda width: f"{next(seeds)} of {width}")


def at(distance: float) -> Tensor:
    return torch.tensor([distance, 0.3, -2.0])


def certify(distance: float, **settings: Any) -> Any:
    chosen = settings_of({"sigma": SIGMA, "n": 100_000, **settings})
    return Predictor(Threshold(), chosen, 2, (3,)).certify(at(distance))


# A lower bound at 1e-6 lies about 0.0056 below p, which is 2 to 4 % of these radii: beyond the
# distance with probability 1e-6, below 93 % of it with less than 1e-4.
@pytest.mark.parametrize(
    "settings",
    [*({"noise": noise} for noise in NOISES), {"mode": "anytime"},
     {"mode": "target-radius", "radii": (0.25, 0.47, 0.51, 0.6)}],
    ids=str,
)  # fmt: skip
def test_the_distance_is_certified_and_no_more(settings: dict[str, Any]) -> None:
    verdict = certify(0.5, alpha=1e-6, **settings)
    assert verdict.prediction == 1
    assert 0.93 * 0.5 <= verdict.radius <= 0.5


class ByStage:
    """Says class 0 when asked for the selection, class 1 when asked for the estimate."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, int]] = []

    def histogram(
        self, x: Tensor, index: int, stage: str, block: int, rows: int, draws: int
    ) -> np.ndarray:
        self.asked.append((stage, block, draws))
        counts = np.zeros(3, dtype=np.int64)
        counts[0 if stage == units.SELECT else 1] = draws
        return counts

    def sample_block(
        self, x: Tensor, index: int, block: int, rows: int, draws: int, binned: bool = False
    ) -> BlockScores:
        votes = self.histogram(x, index, units.ESTIMATE, block, rows, draws)
        each = np.repeat(np.eye(3, dtype=np.int64) * SCORE_UNIT, votes, axis=0)
        bins = score_bounds.bin_scores(each) if binned else ()
        return BlockScores(votes * SCORE_UNIT, votes * SCORE_UNIT**2, votes, draws, *bins)


def settings_in(mode: str, **settings: Any) -> Certificate:
    """Of every mode with a radius that can be decided."""
    if not issubclass(BY_MODE[mode], Smoothing):
        return settings_of({"bound": "betting"} | settings if mode == "betting" else settings)
    return settings_of({"sigma": SIGMA, "mode": mode, **settings})


@pytest.mark.parametrize("mode", BY_MODE)
def test_selection_and_estimation_share_no_draw(mode: str) -> None:
    counter = ByStage()
    settings = settings_in(mode, n=1050, n0=70, radii=(0.1,))
    place: NoiseSampler = ScoreSampler(1.0, Sensitivity(1.0, 1.0, 1.0))
    if isinstance(settings, Smoothing):
        place = settings.build_sampler(nn.Identity(), (3,))
    whole = settings.num_units(100)
    half = max(1, whole // 2)
    pieces = [(0, half), (half, whole)] if whole > 1 else [(0, 1)]
    partials = [settings.sample(counter, torch.zeros(3), 0, *piece, 100, place) for piece in pieces]
    verdict = settings.decide(partials, place)
    # Were one draw of the selection counted, k would not be 0; were the class chosen by the
    # estimate's draws, it would be 1.
    assert (verdict.selected, verdict.k) == (0, 0)
    stages = [stage for stage, _, _ in counter.asked]
    assert stages.count(units.SELECT) == 1 and set(stages) == {units.SELECT, units.ESTIMATE}
    assert (units.SELECT, 0, 70) in counter.asked
    counted = [(block, draws) for stage, block, draws in counter.asked if stage == units.ESTIMATE]
    assert len({block for block, _ in counted}) == len(counted)
    assert verdict.n == sum(draws for _, draws in counted) <= 1050
