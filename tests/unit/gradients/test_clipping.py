"""Clip factors by themselves, without a model: no record's gradient may exceed the sensitivity."""

from __future__ import annotations

import math

import pytest
import torch

from dpdist.core.errors import UserError
from dpdist.gradients.clipping import (
    AutomaticClipping,
    FlatClipping,
    NoClipping,
    PerLayerClipping,
    make_clipping,
    max_run_length,
    rounding_slack,
    sum_slack,
)

C = 0.7
SLACK = 2.0**-9
# Norms of two layers, by record: zero, tiny, at the clip norm, above it, and in one layer only.
NORMS = torch.tensor(
    [[0.0, 1e-6, 0.42, 3.0, 1e6, 5.0, 0.0], [0.0, 1e-6, 0.56, 4.0, 1e6, 0.0, 5.0]],
    dtype=torch.float64,
)


def clipped_norms(clipping, slack=0.0):
    """The norms that the layers of each record have after the clip, (layers, records)."""
    return NORMS * clipping.factors(NORMS.square(), slack)


@pytest.mark.parametrize("rule", ["flat", "automatic", "per-layer"])
@pytest.mark.parametrize("slack", [0.0, SLACK])
@pytest.mark.parametrize("clip_norm", [C, 0.1, 1 / 3, 1e-9, 1e9])
def test_a_record_never_exceeds_the_sensitivity(rule, slack, clip_norm):
    """Even if each true norm is larger than the computed one by the whole slack."""
    clipping = make_clipping(rule, clip_norm)
    assert clipping.sensitivity == clip_norm
    total = clipped_norms(clipping, slack).square().sum(0).sqrt() * (1 + slack)
    assert bool((total <= clip_norm * (1 + 1e-12)).all())


def test_the_flat_clip_scales_long_gradients_to_the_clip_norm_and_leaves_short_ones():
    expected = torch.tensor([1.0, 1.0, 1.0, C / 5, C / math.hypot(1e6, 1e6), C / 5, C / 5])
    factors = FlatClipping(C).factors(NORMS.square(), 0.0)
    assert factors.shape == (1, 7)
    torch.testing.assert_close(factors[0], expected.double())
    lowered = FlatClipping(C).factors(NORMS.square(), SLACK)[0]
    torch.testing.assert_close(lowered[3:], expected.double()[3:] / (1 + SLACK))


def test_the_automatic_clip_normalizes_with_gamma_and_can_scale_up():
    factors = AutomaticClipping(C, 0.05).factors(NORMS.square(), SLACK)
    assert factors.shape == (1, 7)
    whole = NORMS.square().sum(0).sqrt()
    torch.testing.assert_close(factors[0], C / (whole * (1 + SLACK) + 0.05))
    assert factors[0, 0] == pytest.approx(C / 0.05)
    assert AutomaticClipping(C).gamma == 0.01


def test_the_per_layer_clip_gives_each_layer_its_own_norm():
    equal = PerLayerClipping(C).factors(NORMS.square(), SLACK)
    assert equal.shape == NORMS.shape and equal.dtype == NORMS.dtype
    limit = C / math.sqrt(2)
    wanted = (limit / (NORMS * (1 + SLACK)).clamp(min=1e-300)).clamp(max=1.0)
    torch.testing.assert_close(equal, wanted)
    own = PerLayerClipping.from_layer_norms([3.0, 4.0])
    assert own.sensitivity == own.clip_norm == 5.0
    assert clipped_norms(own)[:, 4].tolist() == pytest.approx([3.0, 4.0])
    assert clipped_norms(own)[:, 3].tolist() == pytest.approx([3.0, 4.0])
    assert clipped_norms(own)[:, 2].tolist() == pytest.approx([0.42, 0.56])
    own.check(["first", "second"])
    for layers in (["first"], ["first", "second", "third"]):
        with pytest.raises(UserError):
            own.check(layers)
    PerLayerClipping(C).check(["first"])
    FlatClipping(C).check([])


def test_layer_norms_and_the_total_must_agree():
    PerLayerClipping(5.0, (3.0, 4.0))
    for total in (5.0 * (1 + 1e-6), 5.0 * (1 - 1e-6), 7.0):
        with pytest.raises(UserError):
            PerLayerClipping(total, (3.0, 4.0))
    with pytest.raises(UserError):
        PerLayerClipping(5.0, (5.0, 0.0))


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.inf, math.nan])
def test_a_clip_norm_is_positive_and_finite(wrong):
    for make in (FlatClipping, AutomaticClipping, PerLayerClipping):
        with pytest.raises(UserError):
            make(wrong)
    with pytest.raises(UserError):
        AutomaticClipping(C, wrong)


def test_without_a_clip_a_record_can_add_anything():
    clipping = make_clipping("none", C)
    assert clipping == NoClipping() and clipping.sensitivity == math.inf
    assert clipping.factors(NORMS.square(), SLACK).tolist() == [[1.0] * 7]


def test_each_rule_of_a_recipe_is_its_own_clipping():
    made = {rule: make_clipping(rule, C) for rule in ("flat", "automatic", "per-layer")}
    assert made == {
        "flat": FlatClipping(C),
        "automatic": AutomaticClipping(C),
        "per-layer": PerLayerClipping(C),
    }


def test_runs_of_float32_sums_keep_their_rounding_within_the_slack():
    """2 (r + 2) u n for runs of r of n gradients: Higham, section 3.1, for both sums."""
    for rows in range(1, 3000):
        run = max_run_length(rows)
        assert run == 1 or (4 <= run <= 32 and run * rows <= 2**13)
        if run > 1:
            assert 2 * (run + 2) * 2.0**-24 * rows < sum_slack(torch.float32)
    assert [max_run_length(rows) for rows in (0, 1, 256, 257, 2048, 2049)] == [32, 32, 32, 31, 4, 1]


def test_tiny_sensitivities_are_added_in_float64_only():
    """Below 2^-48 float32 factors lose their last bits to the range of float32."""
    assert max_run_length(8, 2.0**-48) == 32
    assert max_run_length(8, 2.0**-48 * 0.99) == 1


def test_the_slack_covers_what_is_proved_of_norms_and_sums():
    """2^-16.9 and 2^-43 for norms (`per_example`); a float64 block's sums are below 2^-24."""
    assert 2.0**-16.9 < rounding_slack(torch.float32) <= 2.0**-15
    assert 2.0**-43 < rounding_slack(torch.float64) < 2.0**-39
    rows = 1025
    assert 2 * rows**2 * 2.0**-53 + 2.0**-31 < sum_slack(torch.float64) < 2.0**-20
    assert sum_slack(torch.float64) < sum_slack(torch.float32) <= 2.0**-7
