"""`dpdist.estimate`: the price of a training by its own plan, without a look at a record."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from training.own_loops import Rows, begin, net

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


class Watched(Rows):
    def __init__(self) -> None:
        super().__init__((INPUTS, LABELS))
        self.asked: list[int] = []

    def batch(self, indices: Any) -> torch.Tensor:
        self.asked += list(indices)
        return super().batch(indices)

    def targets(self, indices: Any) -> torch.Tensor:
        self.asked += list(indices)
        return super().targets(indices)


def test_no_record_is_measured():
    """One record's shapes are asked for; the probe's inputs are none of the records."""
    seen, records = [], Watched()

    class Telling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 2)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            seen.append(inputs.detach())
            return self.layer(inputs)

    estimated(Telling(), records)
    assert set(records.asked) <= {0} and seen
    rows = {tuple(row.tolist()) for row in INPUTS}
    assert not any(tuple(row.tolist()) in rows for batch in seen for row in batch.float())


def test_the_model_stays_as_it_is():
    model = net().train()
    before = copy.deepcopy(model.state_dict())
    estimated(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters()) and model.training


# --- rates by class


RATES = {"class_sampling": {0: 1, 1: 4}, "class_counts": {0: 180, 1: 20}}


@pytest.mark.parametrize("private", [PRIVATE, {"noise_multiplier": 1.3, "delta": 1e-3}])
def test_rates_by_class_are_priced_at_the_largest(tmp_path, private):
    labels, model = torch.arange(200) % 10 // 9, net()
    found = estimated(data=(INPUTS, labels), privacy=private, **RATES)
    t = begin(
        tmp_path / "run", model, data=(INPUTS, labels), privacy=private, batch_size=20, steps=50,
        **RATES,
    )  # fmt: skip
    assert found.guarantee == t.plan.guarantee()
    assert found.sample_rate == t.plan.step(0).class_rates.largest > 0.1
    assert found.noise_multiplier == t.plan.step(0).noise_multiplier
    by_number = estimated(data=200, privacy=private, **RATES)
    assert (by_number.epsilon, by_number.sample_rate) == (found.epsilon, found.sample_rate)
    equal = estimated(data=200, privacy=private)
    # With a target epsilon the noise rises, with a given noise epsilon does.
    key = "noise_multiplier" if "epsilon" in private else "epsilon"
    assert getattr(found, key) > getattr(equal, key)
