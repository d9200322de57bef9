"""`run --dry-run` prints what `run` executes, and refuses what it refuses: one path makes both."""

from __future__ import annotations

import pytest

from dpdist import pipeline
from dpdist.core.files import write_json
from dpdist.privacy.plan import PrivacyPlan
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import Recipe, parse_recipe
from dpdist.training.job import prepare
from dpdist.training.records import data_source, records_with_canaries
from dpdist.tuning import search as preparing
from dpdist.tuning.manifest import read_trials
from dpdist.tuning.trial import prepare_trial

BASE = {
    "name": "r",
    "data": {"name": "digits"},
    "model": "linear",
    "privacy": {"noise_multiplier": 4.0, "delta": 1e-4},
    "training": {"batch_size": 200, "steps": 6, "learning_rate": 0.5},
}
TARGET = {"epsilon": 3.0, "delta": 1e-4}
TUNE = {
    "space": {"training.learning_rate": {"uniform": [0.1, 1.0]}},
    "num_trials": {"name": "fixed", "runs": 2},
}
HIDDEN = {
    "model": "mlp",
    "method": {"name": "secure-sgd", "redistribution": {"source": "paid"}},
    "privacy": TARGET,
}
DATA = {"name": "digits"}
CASES = {
    "plain": {"privacy": TARGET},
    "paid": HIDDEN,
    "search, private_eval_fraction": {
        "tune": TUNE,
        "data": DATA | {"private_eval_fraction": 0.2, "max_train": 900},
    },
}


def executed(recipe: Recipe, runs) -> tuple[PrivacyPlan, int, str]:
    """The plan in the folder that a run begins, the records it is about, its guarantee."""
    folder = RunFolder(runs / recipe.name)
    if recipe.tune is None:
        job = prepare(recipe, folder, "r.yaml")
        stated = str(folder.read_plan().guarantee())
    else:
        search = preparing.prepare_search(recipe, folder, "r.yaml")
        trial = read_trials(search.folder)[0]
        settings = {
            "values": trial.values,
            "noise_multiplier": search.trial_noise_multiplier(trial.values),
        }
        write_json(search.folder.settings_file(0), settings)
        job = prepare_trial(search.folder, recipe, trial)
        stated = str(search.cost.guarantee)
    records = len(records_with_canaries(job.recipe, data_source(job.recipe)))
    return job.folder.read_plan(), records, stated


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_what_is_printed_is_what_runs(case, tmp_path):
    recipe = parse_recipe(BASE | CASES[case], "r.yaml")
    rows = dict(pipeline.dry_run(recipe, runs=tmp_path, context="r.yaml"))
    assert list(tmp_path.iterdir()) == []
    plan, records, stated = executed(recipe, tmp_path)
    step = plan.step(0)
    assert rows["noise multiplier"] == f"{step.noise_multiplier:.4g}"
    assert rows["steps"] == f"{plan.steps:,}"
    assert rows["records"].startswith(f"{records:,} to train") and plan.records == records
    assert rows["sampling rate"].startswith(f"{step.sample_rate:.4g} ")
    assert rows["guarantee"] == stated
    # and of a run that was begun, its own
    assert dict(pipeline.dry_run(recipe, runs=tmp_path, context="r.yaml"))["guarantee"] == stated


def test_a_run_on_another_part_of_the_data_set_is_named(golden, tmp_path):
    run = golden("digits", tmp_path)
    asked, new = run.read_recipe(), RunFolder(run.path.parent / "new")
    ((_, text),) = pipeline._other_runs(asked, new, "another fingerprint")
    assert run.name in text
    other = asked.model_copy(update={"data": asked.data.model_copy(update={"name": "strokes"})})
    assert not pipeline._other_runs(other, new, "another fingerprint")
