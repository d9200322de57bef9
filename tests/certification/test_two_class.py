"""The runner-up's own bound: its error over every outcome, its radius against the exact one."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy import stats
from support import certificates
from support.certificates import Data
from support.networks import save_small_cnn

from dpdist.certification import cohen, job, table_reader, variants
from dpdist.certification.noise import Gaussian
from dpdist.certification.registry import settings_of
from dpdist.certification.statistics import population_bounds
from dpdist.certification.table_reader import achievable_label_radii, recertify
from dpdist.certification.variants import TwoClass
from dpdist.core.binomial import clopper_pearson_lower
from dpdist.core.errors import UserError

NOISE = Gaussian(0.5)


def certify(counts: list[int], alpha: float = 0.001) -> cohen.Verdict:
    return variants.certify_against_runner_up(0, np.array(counts), alpha, NOISE)


@pytest.mark.parametrize(
    "shares",
    [(0.5, 0.25, 0.25), (0.4, 0.3, 0.3), (0.7, 0.3, 0.0), (0.34, 0.33, 0.33), (0.2, 0.4, 0.4),
     (0.9, 0.05, 0.05), (0.3, 0.5, 0.2), (0.95, 0.03, 0.02)],
)  # fmt: skip
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
    for counts in ([900, 100, 0], [1000, 0, 0], [600, 400, 0], [99_000, 900, 100]):
        total = sum(counts)
        floor = NOISE.radius(clopper_pearson_lower(counts[0], total, 0.0009))
        cohens = cohen.certify(0, np.array(counts), 0.001, NOISE).radius
        assert certify(counts).radius >= floor * (1 - 1e-9) >= cohens * 0.95
    assert certify([500, 500, 0]).prediction == -1 and certify([10, 980, 10]).radius == 0
    assert certify([1000]).radius > 0  # of one class


def test_a_table_of_both_bounds(here: None, tmp_path: Path) -> None:
    save_small_cnn(tmp_path / "model")
    section = {"sigma": 0.5, "n": 1130, "n0": 50, "batch": 100, "seed": "5", "backend": "eager"}
    plain = certificates.certify(
        tmp_path / "model", Data(), settings_of(section), tmp_path / "p", actors=1
    )
    settings = settings_of({**section, "mode": "two-class"})
    assert type(settings) is TwoClass and settings.folder_name == "sigma-0.5-two-class-n-1130"
    table = certificates.certify(tmp_path / "model", Data(), settings, tmp_path / "t", actors=1)
    again = certificates.certify(tmp_path / "model", Data(), settings, tmp_path / "t2", actors=3,
                        chunk_seconds=1e-3)  # fmt: skip
    assert table.equals(again, check_metadata=True)
    assert table["histogram"].equals(plain["histogram"])
    for row in table.to_pylist():
        made = variants.certify_against_runner_up(
            row["selected"], np.array(row["histogram"]), 0.001, NOISE
        )
        for name in ("p_lower", "p_upper", "radius", "prediction"):
            assert row[name] == getattr(made, name), name
    found = table_reader.read(tmp_path / "t" / job.TABLE)
    assert "runner-up" in found.description and found.sizes[0].name == "cohen"
    looser = recertify(found.table, 0.05)
    assert (looser["radius"].to_numpy() >= table["radius"].to_numpy()).all()
    assert recertify(looser, 0.001).to_pylist() == table.to_pylist()
    # What no number of draws could certify allows for a rest that is spread evenly.
    one, both = achievable_label_radii(plain), achievable_label_radii(found.table)
    assert one is not None and both is not None and (both >= one - 1e-9).all()
    assert (both >= found.size_if_correct() - 1e-9).all() and (both > one)[both > 0].all()
    assert all(
        0 <= s.accuracy_lower_bound <= (s.certifiable_upper_bound or 1)
        for s in population_bounds(found, (0.1, 0.5))
    )
    other, _ = found.certificate_class.recreate(found, "l2", 100)
    assert type(other) is TwoClass
    pq.write_table(table.drop_columns("p_upper"), tmp_path / "t" / job.TABLE)
    with pytest.raises(UserError, match="p_upper"):
        table_reader.read(tmp_path / "t" / job.TABLE)


def test_only_gaussian_noise_has_this_radius() -> None:
    with pytest.raises(UserError, match=r"certify\.noise:"):
        settings_of({"sigma": 0.5, "mode": "two-class", "noise": "laplace"})
