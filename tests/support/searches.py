"""Searches over a function, whose trials run in this process; and the end of any search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from dpdist import searched_function as built
from dpdist import searching
from dpdist.cluster.executor import LocalExecutor
from dpdist.runs.folder import RunFolder
from dpdist.tuning.manifest import read_scores, read_trials


def check(train: Any, folder: Path, **given: Any) -> searching.FunctionSearch:
    """A search as `dpdist.tune` prepares it."""
    section = {key: given[key] for key in ("space", "num_trials", "searcher") if key in given}
    return searching._check_function_search(
        train, given["data"], given["score"], given["privacy"], RunFolder(folder.resolve()),
        section, None,
    )  # fmt: skip


def run_trial(search: searching.FunctionSearch, number: int) -> dict[str, Any]:
    """The part of a trial's process, in this one. Returns what is written down of it."""
    trial = read_trials(search.folder)[number]
    path = search.folder.settings_file(number)
    if not path.exists():  # as the searcher writes it
        noise = search.trial_noise_multiplier(trial.values)
        searching.write_json(path, {"values": trial.values, "noise_multiplier": noise})
    built.run_trial(
        search.folder.run.path, built.package_fingerprints(built.PACKAGES), number,
        lambda rung, score: None,
        lambda *given: built._train_and_score(search._explorer.function, search.recipe, *given),
    )  # fmt: skip
    return read_scores(search.folder, number)


def load(folder: Path) -> nn.Module:
    return built.models.load(folder, trusted_factory="code-of-the-user:Linear")


def finish(search: Any) -> RunFolder:
    """Choose the winner of a search after its trials, and return the run."""
    search._choose_winner()
    search.run(LocalExecutor())
    return search.run_folder
