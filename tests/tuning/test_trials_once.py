"""A trial does each part once, and nobody pays for it besides the search."""

from __future__ import annotations

import pytest

from dpdist.tuning import scoring
from dpdist.tuning.manifest import read_scores

FIXED = {"name": "fixed", "runs": 1, "mean": None}


@pytest.mark.slow
def test_a_rung_that_was_scored_is_never_scored_again(recipe, begin, run_trials, monkeypatch):
    """After a crash its model is that of a later rung: the same noise on another count would cancel
    in their difference."""
    asked = recipe(tune={"num_trials": FIXED, "asha": {"rungs": 2}})
    search, real, keys = begin(asked), scoring.compute_score, []

    def noted(*args, key, **more):
        keys.append(key)
        if len(keys) == 2:
            raise KeyboardInterrupt  # trained to the end, and not scored
        return real(*args, key=key, **more)

    monkeypatch.setattr(scoring, "compute_score", noted)
    with pytest.raises(KeyboardInterrupt):
        run_trials(search)
    (first,) = read_scores(search.folder, 0)["scores"]
    (report,) = run_trials(search)
    assert [value for _, value in report] == read_scores(search.folder, 0)["scores"]
    assert report[0] == (1, first) and len(report) == 2
    assert keys[0] not in keys[1:] and keys[1:] == [keys[1]] * 2
