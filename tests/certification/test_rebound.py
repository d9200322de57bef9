from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from scipy import stats

from dpdist.certification import rebound as module
from dpdist.certification import table as tables
from dpdist.certification.bounds import clopper_pearson_lower
from dpdist.certification.procedures import PROCEDURES
from dpdist.certification.radii import gaussian_l2_radius
from dpdist.certification.rebound import certified_accuracy_band, merge, rebound
from dpdist.certification.settings import CertifySettings
from dpdist.errors import UserError

CLASSIFIER = {"form": "frozen", "batch": 100, "check": "c"}


def make(histograms: Any, labels: Any, mode: str = "fixed", **changes: Any) -> pa.Table:
    n = int(np.sum(histograms[0]))
    settings = CertifySettings(sigma=0.5, n=n, mode=mode, radii=(0.25,), **changes)  # type: ignore
    steps = PROCEDURES[mode](settings, 100)
    rows = []
    for place, (histogram, label) in enumerate(zip(histograms, labels, strict=True)):
        index = settings.start + place * settings.every
        selected = int(np.argmax(histogram))
        partial: dict[str, Any] = {"selected": selected, "histogram": [int(c) for c in histogram]}
        if mode != "fixed":
            partial |= {"k": int(histogram[selected]), "n": n, "looks": 1, "passed": 1}
        rows.append(tables.row(index, label, steps.verdict([partial]), settings, steps.spending))
    about = {
        "settings": {"sigma": 0.5, "start": settings.start, "every": settings.every,
                     "max_inputs": None, "noise_bank": settings.noise_bank},
        "model": "m", "data": "d", "seed": f"s{settings.start}", "classifier": CLASSIFIER,
    }  # fmt: skip
    return tables.build(rows, about)


HISTOGRAMS = [[990, 10, 0], [0, 700, 300], [510, 490, 0], [1000, 0, 0]]
LABELS = [0, 1, 0, 2]


def test_rebound_equals_certifying_at_that_alpha() -> None:
    table = make(HISTOGRAMS, LABELS)
    again = rebound(table, 0.05)
    assert again.column("k").equals(table.column("k"))
    expected = make(HISTOGRAMS, LABELS, alpha=0.05)
    assert again.to_pylist() == expected.to_pylist()
    assert tables.about(again)["rebound_alpha"] == 0.05
    assert rebound(table, 0.001).to_pylist() == table.to_pylist()


def test_rebound_of_anytime_results_is_a_confidence_sequence() -> None:
    table = make(HISTOGRAMS, LABELS, mode="anytime")
    again = rebound(table, 0.05)
    assert again.to_pylist() == make(HISTOGRAMS, LABELS, mode="anytime", alpha=0.05).to_pylist()
    naive = clopper_pearson_lower(990, 1000, 0.05)
    assert again["p_lower"][0].as_py() < naive


def test_early_stopped_results_cannot_be_rebounded() -> None:
    with pytest.raises(UserError, match="early stopping"):
        rebound(make(HISTOGRAMS, LABELS, mode="target"), 0.05)


def test_shares_merge_into_the_whole() -> None:
    parts = [make(HISTOGRAMS[i::2], LABELS[i::2], start=i, every=2) for i in (1, 0)]
    whole = merge(parts)
    assert whole.to_pylist() == make(HISTOGRAMS, LABELS).to_pylist()
    assert tables.about(whole)["seeds"] == ["s0", "s1"]
    assert merge([whole, parts[0]]).num_rows == 4  # the same row twice is one row


def test_other_results_do_not_merge() -> None:
    table = make(HISTOGRAMS, LABELS)
    changed = make([[980, 20, 0]], [0])
    with pytest.raises(UserError, match="two different results for input 0"):
        merge([table, changed])
    about = {**tables.about(table), "model": "other"}
    with pytest.raises(UserError, match="differ in model"):
        merge([table, tables.build(table.to_pylist(), about)])
    with pytest.raises(UserError):
        merge([])


def test_the_band_covers_the_truth() -> None:
    # 60 inputs of known p, 150 seeded repetitions. With error 0.2 the truth may be missed in 20 %
    # of them at most; more than 46 (3.4 standard deviations) has probability 7e-4.
    rng = np.random.default_rng(3)
    p = np.linspace(0.6, 0.999, 60)
    truth = (gaussian_l2_radius(p, 0.5) >= 0.5).mean()
    missed = {False: 0, True: 0}
    for _ in range(150):
        hits = rng.binomial(300, p)
        table = make([[k, 300 - k] for k in hits], [0] * 60, alpha=0.05)
        for bonferroni in missed:
            (band,) = certified_accuracy_band(table, [0.5], error=0.2, bonferroni=bonferroni)
            assert band.upper is not None
            missed[bonferroni] += not band.lower <= truth <= band.upper
            assert band.lower <= band.accuracy <= band.upper or bonferroni
    assert max(missed.values()) < 47


def test_a_noise_bank_needs_bonferroni() -> None:
    table = make(HISTOGRAMS, LABELS, noise_bank=True)
    with pytest.raises(UserError, match="Bonferroni"):
        certified_accuracy_band(table, [0.5])
    (band,) = certified_accuracy_band(table, [0.5], bonferroni=True)
    assert "Bonferroni" in band.method


def test_neyman_pearson_gains_when_the_rest_is_spread() -> None:
    spread = module.neyman_pearson_radius([900, 50, 50], 0, 0.001, 0.5)
    alone = gaussian_l2_radius(clopper_pearson_lower(900, 1000, 0.001), 0.5)
    assert spread > alone
    p_a = stats.beta.ppf(0.0005, 900, 101)
    p_b = stats.beta.ppf(1 - 0.001 / 4, 51, 950)
    exact = 0.25 * (stats.norm.ppf(p_a) - stats.norm.ppf(p_b))
    assert spread == pytest.approx(exact, rel=1e-9)
