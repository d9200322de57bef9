"""The runner-up's own bound: its error over every outcome, its radius against the exact one."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from support import certificates
from support.certificates import Data
from support.networks import save_small_cnn

from dpdist.certification import cohen, job, table_reader, variants
from dpdist.certification.noise import Gaussian
from dpdist.certification.registry import settings_of
from dpdist.certification.table_reader import achievable_label_radii, recertify
from dpdist.certification.variants import TwoClass

NOISE = Gaussian(0.5)


def certify(counts: list[int], alpha: float = 0.001) -> cohen.Verdict:
    return variants.certify_against_runner_up(0, np.array(counts), alpha, NOISE)


@pytest.mark.parametrize(
    "shares",
    [(0.5, 0.25, 0.25), (0.7, 0.3, 0.0), (0.34, 0.33, 0.33), (0.95, 0.03, 0.02)],
)
def test_the_radius_is_too_large_at_most_alpha_often(shares: tuple[float, ...]) -> None:
    """Exact, over all counts of 30 draws: no class pays for another."""
    n, alpha, wrong = 30, 0.1, 0.0
    truth = 0.25 * (stats.norm.ppf(shares[0]) - stats.norm.ppf(max(shares[1:])))
    for a, b in itertools.product(range(n + 1), repeat=2):
        if a + b > n:
            continue
        if certify([a, b, n - a - b], alpha).radius > max(truth, 0.0):
            wrong += stats.multinomial.pmf([a, b, n - a - b], n, shares)
    assert wrong <= alpha


def test_the_radius_is_the_one_at_which_the_runner_up_catches_up() -> None:
    # Half-spaces on both sides of a slab of other classes: the worst classifier there is.
    p_a, p_b = 0.45, 0.1
    r = 0.25 * (stats.norm.ppf(p_a) - stats.norm.ppf(p_b))
    moved = [
        stats.norm.cdf(stats.norm.ppf(p_a) - r / 0.5),
        stats.norm.cdf(stats.norm.ppf(p_b) + r / 0.5),
    ]
    assert moved[0] == pytest.approx(moved[1])
    many = 10**8  # of so many draws the bounds are the shares
    found = certify([int(p_a * many), *[int(p_b * many)] * 5, int(0.05 * many)])
    assert found.radius == pytest.approx(r, rel=1e-3) and found.radius < r
    assert found.prediction == 0  # without a majority
    with_majority = cohen.certify(0, np.array([45, 10, 45]), 0.001, NOISE)
    assert with_majority.prediction == -1


def test_it_gains_where_the_rest_is_spread_and_loses_a_hair_elsewhere() -> None:
    spread, alone = certify([900, 50, 50]), cohen.certify(0, np.array([900, 50, 50]), 0.001, NOISE)
    assert spread.radius > alone.radius * 1.05
    p_a = stats.beta.ppf(0.0009, 900, 101)
    p_b = stats.beta.ppf(1 - 0.0001, 51, 950)
    assert spread.radius == pytest.approx(
        0.25 * (stats.norm.ppf(p_a) - stats.norm.ppf(p_b)), rel=1e-9
    )
    assert (spread.p_lower, spread.p_upper) == (pytest.approx(p_a), pytest.approx(p_b))
    assert certify([500, 500, 0]).prediction == -1 and certify([10, 980, 10]).radius == 0
    assert certify([1000]).radius > 0  # of one class


def test_a_table_of_both_bounds(here: None, tmp_path: Path) -> None:
    save_small_cnn(tmp_path / "model")
    section = {"sigma": 0.5, "n": 1130, "n0": 50, "batch": 100, "seed": "5", "backend": "eager"}
    settings = settings_of({**section, "mode": "two-class"})
    assert type(settings) is TwoClass and settings.folder_name == "sigma-0.5-two-class-n-1130"
    table = certificates.certify(tmp_path / "model", Data(), settings, tmp_path / "t", actors=2)
    for row in table.to_pylist():
        made = variants.certify_against_runner_up(
            row["selected"], np.array(row["histogram"]), 0.001, NOISE
        )
        for name in ("p_lower", "p_upper", "radius", "prediction"):
            assert row[name] == getattr(made, name), name
    found = table_reader.read(tmp_path / "t" / job.TABLE)
    looser = recertify(found.table, 0.05)
    assert (looser["radius"].to_numpy() >= table["radius"].to_numpy()).all()
    assert recertify(looser, 0.001).to_pylist() == table.to_pylist()
    # What no number of draws could certify allows for a rest that is spread evenly.
    reach = achievable_label_radii(found.table)
    assert reach is not None and (reach >= found.size_if_correct() - 1e-9).all()
    other, _ = found.certificate_class.recreate(found, "l2", 100)
    assert type(other) is TwoClass
