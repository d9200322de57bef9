from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from scipy import stats

from dpdist.certification import table as tables
from dpdist.certification import table_reader
from dpdist.certification.cohen import Cohen
from dpdist.certification.noise import gaussian_l2_radius
from dpdist.certification.registry import settings_of
from dpdist.certification.statistics import population_bounds
from dpdist.certification.table_reader import achievable_label_radii, recertify
from dpdist.core.binomial import clopper_pearson_lower
from dpdist.core.errors import UserError

CLASSIFIER = {"backend": "frozen", "batch": 100, "check": "c", "notes": []}


def make(histograms: Any, labels: Any, mode: str = "fixed", **changes: Any) -> pa.Table:
    n = int(np.sum(histograms[0]))
    settings: Any = settings_of({"sigma": 0.5, "n": n, "mode": mode, "radii": (0.25,), **changes})
    rows = []
    for place, (histogram, label) in enumerate(zip(histograms, labels, strict=True)):
        index = settings.start + place * settings.every
        selected = int(np.argmax(histogram))
        partial: dict[str, Any] = {"selected": selected, "histogram": [int(c) for c in histogram]}
        if mode != "fixed":
            k = int(histogram[selected])
            partial |= {"k": k, "n": n, "looks": 1, "passed": 1, "hits": [k]}
        rows.append(
            settings.table_row(
                index, label, settings.decide([partial], settings.build_sampler(None, ())), None
            )
        )
    about = {
        "settings": {"sigma": 0.5, "noise": settings.noise, "alpha": settings.alpha,
                     "start": settings.start, "every": settings.every, "max_inputs": None},
        "model": "m", "data": "d", "seed": f"s{settings.start}", "classifier": CLASSIFIER,
    }  # fmt: skip
    return tables.build(rows, about)


HISTOGRAMS = [[990, 10, 0], [0, 700, 300], [510, 490, 0], [1000, 0, 0]]
LABELS = [0, 1, 0, 2]


def test_rebound_equals_certifying_at_that_alpha() -> None:
    table = make(HISTOGRAMS, LABELS)
    again = recertify(table, 0.05)
    assert again.column("k").equals(table.column("k"))
    expected = make(HISTOGRAMS, LABELS, alpha=0.05)
    assert again.to_pylist() == expected.to_pylist()
    assert tables.read_job_record(again)["rebound_alpha"] == 0.05
    assert recertify(table, 0.001).to_pylist() == table.to_pylist()


def test_rebound_of_anytime_results_is_a_confidence_sequence() -> None:
    table = make(HISTOGRAMS, LABELS, mode="anytime")
    again = recertify(table, 0.05)
    assert again.to_pylist() == make(HISTOGRAMS, LABELS, mode="anytime", alpha=0.05).to_pylist()
    naive = clopper_pearson_lower(990, 1000, 0.05)
    assert again["p_lower"][0].as_py() < naive


def test_early_stopped_results_cannot_be_rebounded() -> None:
    with pytest.raises(UserError, match="mode"):
        recertify(make(HISTOGRAMS, LABELS, mode="target-radius"), 0.05)


def test_certified_accuracy_is_of_all_inputs() -> None:
    # Right and certified: the first two of four. The third abstains, the last is wrong.
    found = table_reader.from_arrow(make(HISTOGRAMS, LABELS))
    assert found.certified_accuracy(0.0) == 0.5 and found.abstention_rate == 0.25
    radii = found.radius[:2]
    assert found.certified_accuracy(float(radii.max())) == 0.25
    assert found.average_radius == pytest.approx(radii.sum() / 4)
    assert found.certified_accuracy(0.0, "cohen", "l2") == 0.5


def test_one_table_states_one_alpha() -> None:
    table = make(HISTOGRAMS, LABELS)
    rows = table.to_pylist()
    rows[2] = {**rows[2], "alpha": 0.05}
    mixed = tables.build(rows, tables.read_job_record(table))
    with pytest.raises(UserError, match="alpha"):
        table_reader.from_arrow(mixed)
    assert table_reader.from_arrow(recertify(table, 0.05)).alpha == 0.05


@pytest.mark.parametrize(
    "changes",
    [
        {"histogram": [980, 10, 0]}, {"histogram": [990, 11, 0]}, {"histogram": [990, -1, 0]},
        {"histogram": [10, 990, 0]}, {"selected": 1}, {"selected": 3}, {"selected": -1},
        {"k": 991}, {"n": 1001}, {"cap": 1001}, {"looks": 2},
    ],
)  # fmt: skip
def test_counts_that_contradict_each_other_are_refused(changes: dict[str, Any]) -> None:
    table = make(HISTOGRAMS, LABELS)
    about, (first, *others) = tables.read_job_record(table), table.to_pylist()
    changed = first | changes
    changed["prediction"] = changed["selected"]
    changed["p_lower"] = clopper_pearson_lower(changed["k"], changed["n"], changed["alpha"])
    changed["radius"] = gaussian_l2_radius(changed["p_lower"], 0.5)
    Cohen.check_table(tables.build([first, *others], about), "as it was")
    with pytest.raises(UserError):
        Cohen.check_table(tables.build([changed, *others], about), "changed")


N, DRAWS = 60, 1000


def counted(hits: Any, alpha: float) -> pa.Table:
    return make([[int(k), DRAWS - int(k)] for k in hits], [0] * len(hits), alpha=alpha)


def test_the_reach_of_a_label_is_that_of_its_upper_bound_rounded_up() -> None:
    k = np.arange(1, DRAWS, 37)
    reach = achievable_label_radii(counted(k, 0.1))
    wanted = 0.5 * stats.norm.ppf(stats.beta.ppf(0.9, k + 1, DRAWS - k))
    assert reach is not None and (reach[wanted > 0] >= wanted[wanted > 0]).all()
    assert reach[wanted > 0] == pytest.approx(wanted[wanted > 0], rel=1e-9)
    assert (reach[wanted <= 0] <= 0).all()


def test_a_radius_in_another_norm_is_the_largest_ball_inside() -> None:
    found = table_reader.from_arrow(make(HISTOGRAMS, LABELS))
    (own,), (other,) = found.sizes_in_norm("l2", 64), found.sizes_in_norm("linf", 64)
    assert found.norm == own.norm == "l2" and other.norm == "linf"
    assert (own.size == found.radius).all() and own.size.max() > 0
    assert np.allclose(other.size, found.radius / 8, rtol=1e-12, atol=0)
    assert (other.size <= found.radius / 8 * (1 + 1e-15)).all()


ALPHA = 0.1


def stated(hits: np.ndarray, at: list[float], error: float, alpha: float = ALPHA) -> list:
    return population_bounds(table_reader.from_arrow(counted(hits, alpha)), at, error)


def test_the_bounds_are_clopper_pearsons_with_alpha_folded_in() -> None:
    # 60 inputs: 45 certified at 0.5 for certain, 15 whose label is never drawn.
    hits = np.array([DRAWS] * 45 + [0] * 15)
    first, second = stated(hits, [0.25, 0.5], 0.2)
    low = stats.beta.ppf(0.2 / 4, 45, 16)  # two radii, two sides
    high = stats.beta.ppf(1 - 0.2 / 4, 46, 15)
    for each in (first, second):
        assert each.accuracy_lower_bound == pytest.approx((low - ALPHA) / (1 - ALPHA), rel=1e-9)
        assert each.certifiable_upper_bound == pytest.approx(min(1, high / (1 - ALPHA)), rel=1e-9)
    (alone,) = stated(hits, [0.5], 0.2)
    # less is stated of one radius, and it is tighter
    assert alone.accuracy_lower_bound > first.accuracy_lower_bound
    assert (first.radius, second.radius) == (0.25, 0.5)


def test_other_alphas_and_kinds() -> None:
    strict = recertify(make(HISTOGRAMS, LABELS), 0.05)
    (each,) = population_bounds(table_reader.from_arrow(strict), [0.0])
    assert each.accuracy_lower_bound == pytest.approx(
        (stats.beta.ppf(0.025, 2, 3) - 0.05) / 0.95, abs=1e-9
    )
    early = make(HISTOGRAMS, LABELS, mode="target-radius")  # keeps no counts of all classes
    (each,) = population_bounds(table_reader.from_arrow(early), [0.25])
    assert each.certifiable_upper_bound is None
