"""Public sweeps by Ray Tune's own Tuner: what says NOT PRIVATE, and what goes on after a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.local_execution import command
from support.processes import descendants, kill, start, wait_for
from support.recipes import write_recipe

import dpdist
from dpdist.privacy.ledger import Ledger
from dpdist.reports.results import load_results
from dpdist.runs.folder import RunFolder
from dpdist.tuning.public import NOT_PRIVATE

pytestmark = pytest.mark.timeout(1200)

SMALL: dict[str, Any] = {
    "name": "small",
    "data": {"name": "digits", "max_train": 300},
    "model": "linear",
    "privacy": "none",
    "training": {"batch_size": 50, "steps": 4, "learning_rate": 0.5},
    "tune": {
        "space": {"training.learning_rate": {"choice": [0.1, 0.5]}},
        "num_trials": {"name": "fixed", "runs": 4},
        "concurrent": 1,
    },
}


@pytest.mark.e2e
@pytest.mark.nightly
def test_not_private_is_said_and_a_killed_sweep_goes_on(tmp_path, monkeypatch, capsys, request):
    """kill -9 once a trial has ended; the same command then does the others alone."""
    write_recipe(tmp_path, SMALL, training={"steps": 700})
    folder = tmp_path / "runs" / "small-public"
    process = start("tune", "r.yaml", "--public", cwd=tmp_path, TUNE_GLOBAL_CHECKPOINT_S="1")

    def ended() -> list[Path]:
        states = folder.glob("ray/experiment_state*.json")
        saved = any('\\"TERMINATED\\"' in path.read_text() for path in states)
        return sorted(folder.glob("trials/*/private/trained.json")) if saved else []

    wait_for(lambda: bool(ended()), process=process)
    kill(process, list(descendants(process.pid)))
    before = {path: path.stat().st_mtime_ns for path in ended()}
    assert 1 <= len(before) < 4
    request.getfixturevalue("session")
    done = command(monkeypatch, capsys, tmp_path, "tune", "r.yaml", "--public")
    assert done.code == 0, done.err
    first = min(before)
    assert first.stat().st_mtime_ns == before[first]
    assert len(Ledger.read(first.with_name("ledger.jsonl")).attempts) == 1
    runs = [RunFolder(path) for path in sorted((folder / "trials").iterdir())]
    assert len(runs) == 4 and NOT_PRIVATE in done.out and "-DP" not in done.out + done.err
    for run in runs:
        assert load_results(run).privacy_statement.startswith("NOT PRIVATE")
    write_recipe(tmp_path, SMALL, training={"steps": 701})
    refused = command(monkeypatch, capsys, tmp_path, "tune", "r.yaml", "--public")
    assert refused.code == 2 and "--name" in refused.err


@pytest.mark.e2e
def test_a_recipe_is_stopped_early_and_chosen_by_optuna(session, tmp_path, monkeypatch, capsys):
    pytest.importorskip("optuna")
    tune = {"searcher": "optuna", "asha": {"rungs": 2, "reduction_factor": 2}}
    write_recipe(tmp_path, SMALL, tune=tune)
    done = command(monkeypatch, capsys, tmp_path, "tune", "r.yaml", "--public")
    assert done.code == 0, done.err
    assert NOT_PRIVATE in done.out and done.out.count("training.learning_rate") == 4


INPUTS = torch.rand(160, 6, generator=torch.Generator().manual_seed(1))
LABELS = (INPUTS.sum(1) > 3).long()


def wrapped(folder: Path) -> Any:
    """A function as Ray Tune gets it, by value: no process of Ray's can import this file."""

    def build(config: Any) -> dpdist.PrivateTraining:
        model = torch.nn.Linear(6, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
        return dpdist.PrivateTraining(
            model,
            optimizer,
            config.data,
            loss="cross-entropy",
            privacy=config.privacy,
            batch_size=30,
            steps=20,
            folder=config.folder,
        )

    return dpdist.trainable(
        build,
        folder=folder,
        data=(INPUTS[:120], LABELS[:120]),
        score={"public": (INPUTS[120:], LABELS[120:])},
    )


@pytest.mark.e2e
def test_the_function_of_a_private_search_is_swept_by_asha_into_ray_s_own_grid(session, tmp_path):
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler

    grid = tune.Tuner(
        wrapped(tmp_path / "runs"),
        param_space={"lr": tune.loguniform(1e-3, 1.0)},
        tune_config=tune.TuneConfig(
            metric="score", mode="max", num_samples=4, scheduler=ASHAScheduler(grace_period=2)
        ),
        run_config=tune.RunConfig(name="own", storage_path=str(tmp_path / "ray"), verbose=0),
    ).fit()
    assert isinstance(grid, tune.ResultGrid) and len(grid) == 4 and not grid.errors
    best = grid.get_best_result()
    assert best.metrics["privacy"] == NOT_PRIVATE and "NOT_PRIVATE_build" in best.path
    assert best.metrics["steps"] == 20 and 0 <= best.metrics["score"] <= 1
    (run,) = (tmp_path / "runs" / best.metrics["trial_id"]).iterdir()
    assert load_results(RunFolder(run)).privacy_statement.startswith("NOT PRIVATE")


@pytest.mark.e2e
def test_trainings_are_cloned_and_changed_by_population_based_training(session, tmp_path):
    """A clone goes on with the weights of the other trial, under a rate of its own."""
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
