"""`dpdist.estimate`: the price of a training by its own plan, without a look at a record."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.own_loops import begin, net
from torch import nn

from dpdist import Privacy, estimate
from dpdist.privacy.plan import PrivacyPlan

INPUTS, LABELS = torch.randn(200, 6), torch.randint(2, (200,))
PRIVATE = {"epsilon": 3.0, "delta": 1e-3}


def estimated(model: nn.Module | None = None, data: Any = (INPUTS, LABELS), **given: Any) -> Any:
    options = {"privacy": PRIVATE, "batch_size": 20, "steps": 50, **given}
    return estimate(model or net(), data, **options)


@pytest.mark.parametrize("privacy", [PRIVATE, Privacy(noise_multiplier=1.3, delta=1e-3)])
@pytest.mark.parametrize("length", [{"steps": 50}, {"steps": None, "epochs": 4}])
def test_it_is_the_plan_that_a_training_would_have(tmp_path, privacy, length):
    found, model = estimated(privacy=privacy, **length), net()
    data = INPUTS, LABELS
    t = begin(tmp_path / "run", model, data=data, privacy=privacy, batch_size=20, **length)
    assert found.guarantee == t.plan.guarantee() and found.steps == t.plan.steps
    step = t.plan.step(0)
    assert (found.noise_multiplier, found.sample_rate) == (step.noise_multiplier, step.sample_rate)
    assert not (tmp_path / "run").exists()


def test_a_number_of_records_is_enough_for_epsilon():
    private = Privacy(noise_multiplier=1.1, delta=1e-5)
    found = estimated(data=60_000, privacy=private, batch_size=600, steps=1000)
    plan = PrivacyPlan.dp_sgd(
        records=60_000, batch_size=600, noise_multiplier=1.1, steps=1000, delta=1e-5
    )
    assert found.epsilon == plan.guarantee().epsilon
    assert found.seconds_per_step is found.seconds is found.memory_bytes is None
    assert str(found).endswith("sampling rate 0.01")
    shaped = estimated(data=400, examples=(INPUTS[:2], LABELS[:2]))
    assert shaped.seconds_per_step > 0 and "s a step" in str(shaped) and "MiB" in str(shaped)


# --- rates by class
