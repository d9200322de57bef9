"""The checks of `benchmarks/gpu/gpu.py` fail on a device that computes otherwise."""

from __future__ import annotations

import pytest
import torch
from support.benchmarks import load
from support.simulated_device import simulated_device

from dpdist.gradients import noise

pytestmark = pytest.mark.slow


def test_a_device_that_is_wrong_is_seen(monkeypatch) -> None:
    """Another noise, another rounding and another sum there: each part of them fails."""
    device = simulated_device()
    checks = load("benchmarks/gpu/_gpu_checks", monkeypatch)

    def fails(name: str, told: str) -> None:
        with pytest.raises(checks.CheckFailed, match=told):
            checks.CHECKS[name](device, True)

    with monkeypatch.context() as patch:
        own = noise.add_device_noise
        patch.setattr(
            noise, "add_device_noise", lambda total, key, std, low=0: own(total, key, 2 * std, low)
        )
        fails("noise", "steps of the grid off")
        fails("steps", "noise of the device: parameters are off")
    with monkeypatch.context() as patch:
        patch.setattr(
            checks.Philox,
            "fill",
            lambda self, num_trials, key, out: out.fill_(len(str(out.device))),
        )
        fails("certificates", "noise is off")
    with monkeypatch.context() as patch:
        patch.setattr(checks, "FlatClipping", lambda clip: checks.NoClipping())
        patch.setattr(checks, "CASES", {"Linear": checks.CASES["Linear"]})
        patch.setattr(checks, "uncovered_rules", lambda quick: [])
        fails("rules", "Linear, float32")
    assert torch.equal(torch.zeros(2, device=device).cpu(), torch.zeros(2))
