"""Any step through three functions, as docs/how-to/audits.md shows it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from dpdist.audits.mechanism import AuditedStep, audit_step
from dpdist.privacy import audit_bounds
from dpdist.privacy.audit_bounds import log_likelihood_ratio

DOC = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "audits.md"


def gaussian(sigma: float, promised: float, score=lambda seen: seen) -> AuditedStep:
    def release(included: bool, key: int) -> np.ndarray:
        return np.random.default_rng(key).normal([included, 0.0], sigma)

    return AuditedStep(release, score, audit_bounds.gaussian_tradeoff(1 / promised))


def test_the_example_in_the_docs():
    (code,) = re.findall(r"```python\n(.*?)```", DOC.read_text(), flags=re.S)
    names: dict = {}
    exec(code, names)  # ours
    assert names["found"].rejected and 1 < names["found"].counts.mu() < 1 / 0.8


@pytest.mark.parametrize("score", [lambda seen: seen[0], lambda seen: seen], ids=["one", "two"])
def test_a_step_that_keeps_its_promise_and_one_that_does_not(score):
    assert not audit_step(gaussian(1.0, 1.0, score), 1500, 1e-3).rejected
    assert audit_step(gaussian(0.6, 1.0, score), 1500, 1e-3).rejected


def test_no_release_is_seen_too():
    step = AuditedStep(
        lambda included, key: 1.0 if included else None,
        lambda seen: seen,
        audit_bounds.gaussian_tradeoff(1.0),
    )
    assert audit_step(step, 100, 1e-3).rejected


def test_the_likelihood_ratio_of_sampled_sums():
    x, sigma, rate = np.array([-1.0, 0.5, 2.0]), 0.8, 0.1
    direct = np.log(1 - rate + rate * np.exp((x - 0.5) / sigma**2))
    assert log_likelihood_ratio(x, sigma, rate) == pytest.approx(direct)
    assert log_likelihood_ratio(x, sigma, 1.0) == pytest.approx((x - 0.5) / sigma**2)
