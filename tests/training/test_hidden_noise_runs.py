"""Runs with noise behind the first layer: what is executed, what it costs, what is carried."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.training import execute
from torch import Tensor

from dpdist import models
from dpdist.core.errors import UserError
from dpdist.models.noise import first_layer_norm_bound
from dpdist.papers.secure_sgd import shares as hidden_noise_shares
from dpdist.papers.secure_sgd.shares import HiddenNoiseExecution
from dpdist.privacy.phases import GaussianReleases
from dpdist.privacy.plan import PrivacyPlan
from dpdist.randomness.noise_location import find_noise_location
from dpdist.reports.results import ROWS_MADE_ALONE, load_results
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import Recipe, parse_recipe
from dpdist.training import private_step
from dpdist.training.job import prepare
from dpdist.training.records import data_source, method_public_records, records_with_canaries

NO_PRIVACY = {"noise_multiplier": 0, "clipping": "none", "delta": 1e-4}
PRIVATE = {"noise_multiplier": 1.0, "delta": 1e-4}
QUICK = {"data": "digits", "steps": 3, "max_records": 50}
METHODS = {
    "pixeldp": ({"name": "pixeldp"}, NO_PRIVACY),
    "hgm-pixeldp": ({"name": "hgm-pixeldp", "redistribution": QUICK}, NO_PRIVACY),
    "secure-sgd": ({"name": "secure-sgd", "redistribution": QUICK}, PRIVATE),
    "agm": ({"name": "secure-sgd", "redistribution": None, "mechanism": "analytic"}, PRIVATE),
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
    scale = recipe.method.sigma or {
        "classical": 0.25373, "extended": 0.25498, "analytic": 0.13328,
    }[recipe.method.mechanism]  # fmt: skip
    assert noise.rms_std == pytest.approx(scale, rel=1e-4)
    equal = recipe.method.redistribution is None
    assert (float(noise.relative_variances.max()) < 1 + 1e-6) == equal
    assert first_layer_norm_bound(models.require_split(model)) <= 1 + 1e-6
    facts = load_results(folder)
    private = name in ("secure-sgd", "agm", "paid")
    assert math.isfinite(facts.guarantee.epsilon) == private
    assert facts.assumptions == [ROWS_MADE_ALONE]
    summary = dict(facts.summary())
    claim = summary.get("claimed, not proved")
    assert (claim is None) == ("pixeldp" in name)
    if claim is not None:
        assert facts.claim.claimed.kind == "claimed" and facts.claim.proved == facts.guarantee
        assert facts.claim.verdict == ("sound" if name in ("secure-sgd", "agm") else "not sound")
        # The paper's accountant is looser than what is proved, where the claim is sound.
        if facts.claim.verdict == "sound":
            assert facts.guarantee.epsilon < facts.claim.claimed.epsilon < math.inf
    card = facts.privacy_card()
    assert not card["private"]  # its key is fixed
    text = json.dumps(card)
    assert ("r is computed from private records" in text) == (name == "unpaid")
    assert ("Nothing is proved about training records" in text) == (not private)
    assert ("Claimed by the paper" in text) == (claim is not None)


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


@pytest.mark.slow
@pytest.mark.parametrize(("name", "once"), [("secure-sgd", False), ("unpaid", True)])
def test_noise_is_drawn_afresh_unless_paper_faithful(tmp_path, monkeypatch, name, once):
    noises: list[Tensor] = []

    def spy(draws):
        real = draws.perturb_output

        def watched(output, ids, key, draw, place=0):
            result = real(output, ids, key, draw, place)
            noises.append((result - output).detach().clone())
            return result

        draws.perturb_output = watched
        return draws

    real = HiddenNoiseExecution.perturbation
    monkeypatch.setattr(HiddenNoiseExecution, "perturbation", lambda *a: spy(real(*a)))
    train(*make(tmp_path, name))
    rows = torch.cat(noises)
    spread = float((rows - rows[0]).abs().amax())
    assert (spread < 1e-5) == once


@pytest.mark.slow
@pytest.mark.parametrize("name", ["secure-sgd", "paid", "unpaid"])
def test_neighbor_replay(tmp_path, monkeypatch, name):
    """One record less, same keys: sums differ by at most C, by nothing where it was not drawn.

    An r computed from private records, unpaid, moves every record's gradient: the same test fails.
    With a paid r both sides are given the same released r.
    """
    special, drawn, worst, untouched = 17, 0, 0.0, 0.0
    data = {"name": "digits", "max_train": 60}
    for number in range(6):
        sums = {}
        for present in (True, False):
            changes = {
                "data": data | ({"public": 0.5} if name == "secure-sgd" else {}),
                "privacy": {**PRIVATE, "delta": 1e-3, "run_key": f"{number:064x}"},
                "training": {"batch_size": 20, "steps": 1, "learning_rate": 0.5},
            }
            recipe, folder = make(tmp_path, name, f"{present}-{number}", **changes)
            with monkeypatch.context() as patch:
                sample, powers = private_step.poisson_sample, hidden_noise_shares.mean_powers
                took_part = []

                def members(*args, keep=present, real=sample, seen=took_part, **kwargs):
                    batch = real(*args, **kwargs)
                    seen.append(special in batch)
                    return batch if keep else batch[batch != special]

                def without(split, inputs, labels, beta, keep=present, real=powers):
                    # max_records 50 of 60 leaves some out; take one that is in.
                    rows = torch.arange(len(inputs)) != (-1 if keep else 14)
                    return real(split, inputs[rows], labels[rows], beta)

                patch.setattr(private_step, "poisson_sample", members)
                if name == "unpaid":
                    patch.setattr(hidden_noise_shares, "mean_powers", without)
                captured: list[np.ndarray] = []
                patch.setattr(
                    private_step, "add_noise", lambda t, *_, c=captured: c.append(t.copy()) or t
                )
                if name == "paid" and not present:
                    other = RunFolder(tmp_path / f"True-{number}").method_state
                    prepare(recipe, folder, "test")
                    folder.method_state.write_bytes(other.read_bytes())
                train(recipe, folder)
                sums[present] = captured[0]
        difference = float(np.linalg.norm(sums[True] - sums[False]))
        worst = max(worst, difference)
        drawn += took_part[0]
        if not took_part[0]:
            untouched = max(untouched, difference)
    assert 0 < drawn < 6
    if name == "unpaid":
        assert untouched > 1e-4
    else:
        assert worst <= 1 + 1e-6 and untouched == 0.0


@pytest.mark.slow
def test_a_continued_run_keeps_its_noise_and_a_lost_one_is_a_new_attempt(tmp_path, monkeypatch):
    recipe, folder = make(tmp_path, "hgm-pixeldp")
    undisturbed = train(recipe, folder)
    recipe, other = make(tmp_path, "hgm-pixeldp", "other")

    class Stop(Exception):
        pass

    def die(*args):
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(private_step, "add_noise", die)
        with pytest.raises(Stop):
            train(recipe, other)
    before = other.method_state.read_bytes()
    with monkeypatch.context() as patch:  # must not be computed again
        patch.setattr(HiddenNoiseExecution, "prepare_state", die)
        again = train(recipe, other)
    assert other.method_state.read_bytes() == before
    assert all(torch.equal(undisturbed[name], again[name]) for name in undisturbed)
    other.method_state.write_bytes(b"not tensors")
    other.training_summary.unlink()
    with pytest.raises(UserError, match="hidden-noise"):
        train(recipe, other)


def test_public_r_may_not_read_private_records(tmp_path):
    recipe, folder = make(tmp_path, "secure-sgd", data={"name": "digits", "max_train": 300})
    with pytest.raises(UserError, match=r"method\.redistribution\.data: 1,439 "):
        prepare(recipe, folder, "test")
    assert not folder.path.exists()
    recipe, folder = make(tmp_path, "secure-sgd")
    public = method_public_records(recipe)
    assert public is not None and 100 < len(public) < 200
    private = records_with_canaries(recipe, data_source(recipe))
    assert not np.isin(public.hashes, private.hashes).any()
