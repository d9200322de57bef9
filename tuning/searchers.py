"""Suggest trials to Ray Tune: in the manifest's order, or by an adaptive searcher.

Ray asks for one trial after another; each is written, with its noise, before it starts. So a
continued search starts the trials it had, never others. An adaptive searcher (Optuna's TPE) gets
only scores that epsilon already covers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray.tune.search import Searcher

from dpdist.config.search import AshaRecipe, Domain, TuneRecipe
from dpdist.core.files import write_json
from dpdist.core.optional_imports import import_extra
from dpdist.tuning.manifest import SearchFolder, Trial, read_scores
from dpdist.tuning.space import TrialValues

METRIC = "score"


class ManifestSearcher(Searcher):
    """Suggest the numbers 0..K-1 of the manifest's trials, each with its settings on record.

    noise_multiplier_of: returns the noise multiplier of a trial from its values. suggester:
    suggests values if the manifest has none. stops_early: whether a scheduler may stop a trial
    between two rungs.
    """

    def __init__(
        self,
        folder: SearchFolder,
        trials: list[Trial],
        noise_multiplier_of: Callable[[TrialValues], float],
        suggester: OptunaSuggester | None = None,
        *,
        stops_early: bool = False,
    ) -> None:
        super().__init__(metric=METRIC, mode="max")
        self._folder, self._trials, self._noise_multiplier_of = folder, trials, noise_multiplier_of
        self._suggester, self._stops_early = suggester, stops_early
        self._next = 0
        self._numbers: dict[str, int] = {}

    def suggest(self, trial_id: str) -> Any:
        """Return the next trial as {"trial": number}, or FINISHED."""
        if self._next == len(self._trials):
            return Searcher.FINISHED
        trial = self._trials[self._next]
        path = self._folder.settings_file(trial.number)
        if not path.exists():
            values = trial.values
            if values is None:
                assert self._suggester is not None
                values = self._suggester.suggest(trial_id)
            settings = {"values": values, "noise_multiplier": self._noise_multiplier_of(values)}
            write_json(path, settings)
        self._next += 1
        self._numbers[trial_id] = trial.number
        return {"trial": trial.number}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Do nothing: scores are read from the trials' own files."""

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Tell the adaptive searcher; mark a trial that the scheduler stopped."""
        number = self._numbers[trial_id]
        state = read_scores(self._folder, number)
        if self._stops_early and not error and not state["done"]:
            write_json(
                self._folder.scores_file(number), {**state, "done": True, "failed": "stopped early"}
            )
        if self._suggester is not None:
            score = state["scores"][-1] if state["scores"] else None
            self._suggester.tell(trial_id, score)

    def __getstate__(self) -> dict[str, Any]:
        """Return no state, since Ray pickles the searcher: no keys and settings leave private/."""
        return {}

    def save(self, checkpoint_path: str) -> None:
        """Do nothing: the manifest and the trials' files are the state."""

    def restore(self, checkpoint_path: str) -> None:
        """Do nothing: a continued search builds a new searcher from the files."""


def asha_scheduler(asha: AshaRecipe | None, **metric: Any) -> Any:
    """Return Ray Tune's ASHA by the rungs of a recipe, or None.

    metric: `metric` and `mode`, unless the Tuner has them.
    """
    from ray.tune.schedulers import ASHAScheduler

    if asha is None:
        return None
    factor = asha.reduction_factor
    return ASHAScheduler(
        time_attr="reached",
        max_t=factor ** (asha.rungs - 1),
        grace_period=1,
        reduction_factor=factor,
        **metric,
    )


def ray_domain(domain: Domain, by_position: bool = False) -> Any:
    """Return a domain as one of Ray Tune.

    by_position: whether a choice is a position in its list.
    """
    from ray import tune

    if domain.choice is not None:
        return tune.choice(list(range(len(domain.choice)) if by_position else domain.choice))
    low, high = domain.values_or_bounds
    if domain.integer is not None:
        return tune.randint(low, high + 1)
    return (tune.loguniform if domain.log_uniform is not None else tune.uniform)(low, high)


class OptunaSuggester:
    """Suggest values by Optuna's TPE through Ray Tune, from the scores of all earlier trials."""

    def __init__(
        self, tune: TuneRecipe, seed: int, evaluated: list[tuple[TrialValues, float]]
    ) -> None:
        optuna = import_extra("optuna", "tune", "tune.searcher")
        from ray.tune.search.optuna import OptunaSearch

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._space = tune.space
        domains = {key: ray_domain(domain, by_position=True) for key, domain in tune.space.items()}
        space = OptunaSearch.convert_search_space(domains)
        self._optuna_search = OptunaSearch(space, metric=METRIC, mode="max", seed=seed)
        self._suggested_ids: set[str] = set()
        for values, score in evaluated:
            point = {
                key: domain.choice.index(values[key]) if domain.choice is not None else values[key]
                for key, domain in self._space.items()
            }
            self._optuna_search.add_evaluated_point(point, score)

    def suggest(self, trial_id: str) -> TrialValues:
        """Return values of the searched fields for the next trial."""
        self._suggested_ids.add(trial_id)
        found = self._optuna_search.suggest(trial_id)
        assert isinstance(found, dict)
        return {
            key: domain.choice[found[key]] if domain.choice is not None else found[key]
            for key, domain in self._space.items()
        }

    def tell(self, trial_id: str, score: float | None) -> None:
        """Give Optuna the last score of a trial that was suggested here; None for a failed one."""
        if trial_id in self._suggested_ids:
            result = None if score is None else {METRIC: score}
            self._optuna_search.on_trial_complete(trial_id, result, error=score is None)
