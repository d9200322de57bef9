"""A check counts an attack as successful only if another class is certified inside the radius."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from scipy import stats
from support import certificates
from support.certificates import check_certificates, save_plane
from support.local_execution import run_without_ray
from support.separable_points import Points

from dpdist.attacks.settings import AttackSettings
from dpdist.attacks.table import Plausibility
from dpdist.certification import job
from dpdist.certification.cohen import Cohen

POINTS = Points(4)


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Certify a plane, with counts of points so many times as far from it, and hold the radii
    against an attack on the points themselves."""
    run_without_ray(monkeypatch)
    save_plane(tmp_path / "model", 4)

    def run(factor: float, n: int = 1000, alpha: float = 0.001) -> tuple[list[dict], Plausibility]:
        settings = Cohen(sigma=0.25, n0=50, n=n, alpha=alpha, batch=200, seed="1")
        far = replace(POINTS, near=factor * POINTS.near, far=factor * POINTS.far)
        certificates.certify(tmp_path / "model", far, settings, tmp_path / f"times-{factor:g}")
        path = tmp_path / f"times-{factor:g}" / job.TABLE
        attack = AttackSettings(attacks=("pgd",), steps=5, samples=4, seed="2", batch=30)
        output = tmp_path / f"check-{factor:g}"
        found, verdict = check_certificates(tmp_path / "model", POINTS, path, attack, output)
        return found.to_pylist(), verdict

    return run


def test_valid_certificates_end_in_abstentions_not_contradictions(check) -> None:
    # The attack goes to the edge of the radius, near the plane, where nothing is certified.
    points, verdict = check(1.0)
    assert len(points) >= 25 and any(row["prediction"] == -1 for row in points)
    assert verdict.contradictions == 0 and verdict.plausible
    assert verdict.error == pytest.approx(0.002) and verdict.inputs == POINTS.count


def test_inputs_that_abstained_were_submitted_too(check) -> None:
    # Of few draws only the farthest points are certified.
    points, verdict = check(1.0, n=20)
    assert 0 < len(points) < verdict.inputs == POINTS.count


def test_points_are_certified_at_the_error_of_the_table(check) -> None:
    points, verdict = check(3.0, alpha=0.02)
    assert verdict.error == pytest.approx(0.04)
    counted = [row for row in points if row["k"] > 0]
    assert len(counted) >= 20
    for row in counted:
        lower = stats.beta.ppf(0.02, row["k"], row["n"] - row["k"] + 1)
        assert row["n"] == 1000 and row["p_lower"] == pytest.approx(lower, rel=1e-9)


def test_another_class_inside_a_radius_is_a_contradiction(check) -> None:
    points, verdict = check(3.0)
    wrong = [row for row in points if row["prediction"] == 1 - row["certified"]]
    assert len(wrong) >= 20 and all(row["p_lower"] > 0.5 for row in wrong)
    assert verdict.contradictions == len(wrong) and not verdict.plausible
