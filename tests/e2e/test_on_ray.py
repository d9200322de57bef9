"""Private searches and public sweeps on Ray Tune, which share a session of two CPUs."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from support.local_execution import command
from support.recipes import write_recipe

import dpdist
from dpdist.cluster.session import secure_staging_folder
from dpdist.privacy.ledger import Ledger
from dpdist.tuning.public import NOT_PRIVATE

pytestmark = [pytest.mark.timeout(1200)]


@pytest.mark.nightly
def test_trials_of_two_workers(recipe, session, tmp_path, monkeypatch, capsys):
    """Each trial a Ray Train job inside Ray Tune, on a session that has just their CPUs."""
    num_trials, score = {"name": "fixed", "runs": 2, "mean": None}, {"public": {"name": "digits"}}
    asked = recipe(resources={"workers": 2}, tune={"num_trials": num_trials, "score": score})
    write_recipe(tmp_path, asked)
    done = command(monkeypatch, capsys, tmp_path, "tune", "r.yaml")
    assert done.code == 0, done.err
    run = tmp_path / "runs" / "small"
    shown = json.loads((run / "trials.json").read_text())
    assert len(shown) == 2 and all(len(row["scores"]) == 1 for row in shown)
    ledger = Ledger.read(run / "private" / "ledger.jsonl")
    assert ledger.attempts[0]["identity"]["world_size"] == "2" and ledger.num_superseded == 0
    # Tune staged K and the scores in Ray's session folder, 0644, and left them there.
    staged = secure_staging_folder()
    assert stat.S_IMODE(staged.stat().st_mode) == 0o700
    assert list(staged.glob("*/search-*")) == []
    assert [path for path in staged.rglob("*") if "result" in path.name] == []


def test_a_recipe_is_stopped_early_and_chosen_by_optuna(
    recipe, session, tmp_path, monkeypatch, capsys
):
    pytest.importorskip("optuna")
    raw = recipe().model_dump(mode="json", exclude_none=True)
    del raw["certify"]
    raw |= {
        "privacy": "none",
        "tune": {
            "space": {"training.learning_rate": {"choice": [0.1, 0.5]}},
            "num_trials": {"name": "fixed", "runs": 4},
            "searcher": "optuna",
            "asha": {"rungs": 2, "reduction_factor": 2},
        },
    }
    write_recipe(tmp_path, raw)
    done = command(monkeypatch, capsys, tmp_path, "tune", "r.yaml", "--public")
    assert done.code == 0, done.err
    assert NOT_PRIVATE in done.out and done.out.count("training.learning_rate") == 4


def points() -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.rand(160, 6, generator=torch.Generator().manual_seed(1))
    return inputs, (inputs.sum(1) > 3).long()


def wrapped(folder: Path) -> Any:
    """A function as Ray Tune gets it, by value: no process of Ray's can import this file."""
    inputs, labels = points()

    def build(config: Any) -> dpdist.PrivateTraining:
        model = torch.nn.Linear(6, 2)
        return dpdist.PrivateTraining(
            model, torch.optim.Adam(model.parameters(), lr=config["lr"]), config.data,
            loss="cross-entropy", privacy=config.privacy, batch_size=30, steps=20,
            folder=config.folder,
        )  # fmt: skip

    score = {"public": (inputs[120:], labels[120:])}
    return dpdist.trainable(build, folder=folder, data=(inputs[:120], labels[:120]), score=score)


@pytest.mark.nightly
def test_trainings_are_cloned_and_changed_by_population_based_training(session, tmp_path):
    """A clone goes on with the weights of the other trial, under a rate of its own.

    The checkpoint has the model of the score.
    """
    from ray import tune
    from ray.tune.schedulers import PopulationBasedTraining

    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=5,
        quantile_fraction=0.5,
        hyperparam_mutations={"lr": tune.loguniform(1e-3, 1.0)},
        synch=True,
    )
    grid = tune.Tuner(
        wrapped(tmp_path / "runs"),
        param_space={"lr": tune.grid_search([1e-6, 0.1])},
        tune_config=tune.TuneConfig(metric="score", mode="max", scheduler=scheduler),
        run_config=tune.RunConfig(name="own", storage_path=str(tmp_path / "ray"), verbose=0),
    ).fit()
    assert not grid.errors and max(result.metrics["steps"] for result in grid) == 20
    started = [len(list(trial.iterdir())) for trial in (tmp_path / "runs").iterdir()]
    assert max(started) > 1, "no trial took another's checkpoint over"
    best = grid.get_best_result()
    assert best.metrics["privacy"] == NOT_PRIVATE
    model = torch.nn.Linear(6, 2)
    with best.checkpoint.as_directory() as kept:
        model.load_state_dict(torch.load(f"{kept}/state.pt", weights_only=True)["model"])
    inputs, labels = points()
    right = model(inputs[120:]).argmax(1) == labels[120:]
    assert best.metrics["score"] == pytest.approx(float(right.float().mean()))
