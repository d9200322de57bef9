"""Runs with noise behind the first layer: what is executed, what it costs, what is carried."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.training import execute
from torch import Tensor

from dpdist import models
from dpdist.core.errors import UserError
from dpdist.models.noise import first_layer_norm_bound
from dpdist.privacy.phases import GaussianReleases
from dpdist.privacy.plan import PrivacyPlan
from dpdist.randomness.noise_location import find_noise_location
from dpdist.reports.results import ROWS_MADE_ALONE, load_results
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import Recipe, parse_recipe
from dpdist.training.job import prepare

NO_PRIVACY = {"noise_multiplier": 0, "clipping": "none", "delta": 1e-4}
PRIVATE = {"noise_multiplier": 1.0, "delta": 1e-4}
QUICK = {"data": "digits", "steps": 3, "max_records": 50}
METHODS = {
    "hgm-pixeldp": ({"name": "hgm-pixeldp", "redistribution": QUICK}, NO_PRIVACY),
    "secure-sgd": ({"name": "secure-sgd", "redistribution": QUICK}, PRIVATE),
    "paid": ({"name": "secure-sgd", "redistribution": {"source": "paid"}}, PRIVATE),
    "unpaid": (
        {
            "name": "secure-sgd",
            "redistribution": {**QUICK, "source": "private"},
            "paper_faithful": True,
        },
        PRIVATE,
    ),
}


def make(tmp: Path, name: str, run: str = "run", **changes) -> tuple[Recipe, RunFolder]:
    method, privacy = METHODS[name]
    # Public r of the same data set comes from the half that is declared public.
    public = {"public": 0.5} if name == "secure-sgd" else {}
    raw = {
        "name": "x",
        "data": {"name": "digits", "max_train": 300, **public},
        "model": {
            "name": "hgm-cnn",
            "options": {"filters": [4], "kernels": [3], "strides": [2], "dense": 8},
        },
        "method": method,
        "privacy": {"run_key": "5a" * 32, **privacy},
        "training": {"batch_size": 30, "steps": 4, "learning_rate": 0.3},
        **changes,
    }
    return parse_recipe(raw, "test"), RunFolder(tmp / run)


def train(recipe: Recipe, folder: RunFolder) -> dict[str, Tensor]:
    execute(prepare(recipe, folder, "test"))
    return load_file(folder.model_folder / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_a_run_carries_its_noise_and_states_what_is_proved(tmp_path, name):
    recipe, folder = make(tmp_path, name)
    train(recipe, folder)
    model = models.load(folder.model_folder)
    noise = find_noise_location(model)
    assert noise.is_random and noise.module == "0"
    scale = {"classical": 0.25373, "extended": 0.25498}[recipe.method.mechanism]
    assert noise.rms_std == pytest.approx(recipe.method.sigma or scale, rel=1e-4)
    assert first_layer_norm_bound(models.require_split(model)) <= 1 + 1e-6
    facts = load_results(folder)
    assert math.isfinite(facts.guarantee.epsilon) == (name in ("secure-sgd", "paid"))
    assert facts.assumptions == [ROWS_MADE_ALONE]
    if name != "hgm-pixeldp":
        assert facts.claim.claimed.kind == "claimed" and facts.claim.proved == facts.guarantee
        assert facts.claim.verdict == ("sound" if name == "secure-sgd" else "not sound")
        # The paper's accountant is looser than what is proved, where the claim is sound.
        if facts.claim.verdict == "sound":
            assert facts.guarantee.epsilon < facts.claim.claimed.epsilon < math.inf


@pytest.mark.slow
def test_the_paid_query_costs_what_two_gaussians_cost(tmp_path):
    recipe, folder = make(tmp_path, "paid")
    plan = prepare(recipe, folder, "test").plan
    without = PrivacyPlan(plan.records, (plan.phases[1],), plan.delta)
    assert plan.phases[0] == GaussianReleases(20.0, 1, 1.0)
    alone = PrivacyPlan(plan.records, (plan.phases[0],), plan.delta).guarantee().epsilon
    spent = plan.guarantee().epsilon
    assert without.guarantee().epsilon < spent <= without.guarantee().epsilon + alone + 1e-3
    # A calibrated run pays for it out of the same epsilon.
    recipe, folder = make(tmp_path, "paid", "c", privacy={"epsilon": 2.0, "delta": 1e-4})
    calibrated = prepare(recipe, folder, "test").plan
    assert 1.98 < calibrated.guarantee().epsilon <= 2.0
    assert PrivacyPlan.from_dict(json.loads(folder.plan.read_text())) == calibrated


def test_public_r_may_not_read_private_records(tmp_path):
    recipe, folder = make(tmp_path, "secure-sgd", data={"name": "digits", "max_train": 300})
    with pytest.raises(UserError, match=r"method\.redistribution\.data"):
        prepare(recipe, folder, "test")
    assert not folder.path.exists()
