"""What a search left behind, edited by hand: refused, or nothing that is printed changes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.folder_contents import changed_at
from test_release_edits import found_at, leaves, others, said, shown

from dpdist.core.errors import UserError
from dpdist.privacy.calibration import combine_training_and_scoring
from dpdist.publishing import write_release
from dpdist.reports.html import write_report
from dpdist.reports.results import load_results
from dpdist.runs.folder import SEARCH_IDENTITY, RunFolder
from dpdist.tuning.search import Search, prepare_search


@pytest.fixture
def searched(golden, tmp_path) -> Search:
    run = golden("search", tmp_path)
    return prepare_search(run.read_search_recipe(), run, "golden", only_resume=True)


def everything(folder: RunFolder) -> Any:
    """All that summary, card and report say of a run."""
    write_report(folder)
    return shown(folder), folder.report_file.read_text()


def files_of(search: Search) -> list[Path]:
    """All that lies in the search's folder, and what of it lies elsewhere."""
    run = search.run_folder
    trials = [
        path for path in sorted(search.folder.path.rglob("*.json")) if "ray" not in path.parts
    ]
    return [run.search_record, run.search_recipe_file, run.start_record, run.search_terms, *trials]


@pytest.mark.slow
@pytest.mark.nightly
def test_every_edit_of_what_a_search_wrote_is_refused_or_shows_nothing(searched):
    run, passed, refused = searched.run_folder, {}, set()
    before = everything(run)
    assert "geometric" in before[1]
    for path in files_of(searched):
        raw = path.read_text()
        read, write = (
            (yaml.safe_load, yaml.safe_dump)
            if path == run.search_recipe_file
            else (json.loads, json.dumps)
        )
        whole = read(raw)
        for at in leaves(whole) if isinstance(whole, dict) else ():
            for value in others(found_at(whole, at)):
                path.write_text(write(changed_at(whole, at, value)))
                try:
                    if shown(run) != before[0]:
                        passed[path.name, said(at)] = value
                except UserError as error:
                    assert "\n" not in str(error)
                    refused.add((path.name, said(at)))
        path.write_text(raw)
    assert passed == {} and everything(run) == before
    told = {("search.json", name) for name in ("plan", "charge", "assumed")}
    told |= {("terms.json", name) for name in ("plan", "trial", "score_noise", "data", "charge")}
    assert (
        told | {("search.yaml", "tune.num_trials.name"), ("search.yaml", "tune.score.noise")}
        <= refused
    )


def test_a_search_that_was_exchanged_whole_is_refused(searched):
    """A cheaper distribution and less noise, in all files alike: the ledger knows better."""
    run = searched.run_folder
    kept = {path: path.read_text() for path in files_of(searched)}

    def forge(change: Any) -> None:
        asked, begun = (
            yaml.safe_load(kept[run.search_recipe_file]),
            json.loads(kept[run.start_record]),
        )
        terms, stated = (json.loads(kept[path]) for path in (run.search_terms, run.search_record))
        for tune in (asked["tune"], begun["asked"]["tune"]):
            change(tune)
        run.search_recipe_file.write_text(yaml.safe_dump(asked))
        run.start_record.write_text(json.dumps(begun))
        terms["score_noise"] = asked["tune"]["score"]["noise"]
        trial = searched.cost.trial_limit.base_plan
        tune = run.read_search_recipe().tune
        scoring = tune.scoring_phases(terms["score_noise"])
        phases = combine_training_and_scoring(
            trial.phases, scoring, tune.num_trials.secret_distribution, tune.num_trials.runs
        )
        stated["plan"] = terms["plan"] = replace(trial, phases=phases).to_dict()
        run.search_terms.write_text(json.dumps(terms))
        run.search_record.write_text(json.dumps(stated))

    for change in (
        lambda tune: tune["num_trials"].update(mean=1.5),
        lambda tune: tune["score"].update(noise=90.0),
    ):
        forge(change)
        for read in (load_results, write_report, write_release):
            with pytest.raises(
                UserError, match=r"terms\.json: must be what the search of this run"
            ):
                read(run)
    for path, text in kept.items():
        path.write_text(text)
    assert load_results(run)


def test_a_search_without_its_terms_states_no_epsilon(searched):
    run = searched.run_folder
    (attempt,) = load_results(run).ledger.attempts
    assert attempt["identity"][SEARCH_IDENTITY]
    for path in (run.search_recipe_file, run.search_terms):
        kept = path.read_text()
        path.unlink()
        with pytest.raises(UserError, match=path.name):
            load_results(run)
        path.write_text(kept)
    assert load_results(run)
