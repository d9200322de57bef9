"""A private search from its recipe to the released winner, on Ray Tune; continued after a crash.

The rules that make its guarantee true (docs/how-to/tuning.md): everything is drawn before the
first trial; all K trials run to their end, whatever the others score; a failed trial counts as
minus infinity; a repetition replays with the same keys; only the best trial leaves private/; a
search that is broken off releases nothing. Everything is checked before a search is drawn; nothing
is written until all holds.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable
from functools import cache
from typing import Any

from dpdist.certification.noise import gaussian_l2_radius
from dpdist.cluster.session import Session
from dpdist.cluster.versions import check_nodes
from dpdist.config.search import ScoreRecipe, TuneRecipe
from dpdist.core.binomial import clopper_pearson_lower
from dpdist.core.errors import NoRoom, UserError
from dpdist.core.files import read_json, write_atomic, write_json
from dpdist.data import Dataset
from dpdist.data.dataset import refuse_common
from dpdist.privacy.budget import Charge, Lineage
from dpdist.privacy.ledger import new_nonce
from dpdist.privacy.plan import PrivacyPlan
from dpdist.randomness.keys import new_run_key
from dpdist.runs.folder import OtherRun, RunFolder, read_released
from dpdist.runs.recipe import Recipe, make_plan
from dpdist.training import job
from dpdist.training.job import PACKAGES, check_groups, check_records, check_trainable
from dpdist.training.records import private_data, source_of, training_data
from dpdist.tuning.manifest import (
    SearchFolder,
    best,
    draw_trials,
    ensure_manifest,
    read_outcome,
    read_settings,
    read_terms,
    read_trials,
    scores_of,
    trial_limit,
)
from dpdist.tuning.space import (
    SearchCost,
    Sizes,
    Values,
    check_space,
    kept_out,
    probes,
    with_values,
)
from dpdist.tuning.trial import (
    in_background,
    live_nodes,
    one_pass,
    scoring_data,
    trial_recipe,
    trials_at_once,
)

# --- the search -------------------------------------------------------------------------------


Progress = Callable[[int, int, float], None]


class NoModel(UserError):
    """The search ended without a model, which is one of the mechanism's outcomes."""


class Search:
    """A prepared search. `prepare` makes it; `run` brings it to its end."""

    def __init__(self, recipe: Recipe, folder: RunFolder, cost: SearchCost, data: str) -> None:
        """data: fingerprint of the training records. `assumed`: what must hold of the public parts
        that any trial may begin with, for a search that was not begun."""
        assert recipe.tune is not None
        self.recipe, self.cost, self.data = recipe, cost, data
        self.tune: TuneRecipe = recipe.tune
        self.run_folder = folder
        self.folder = SearchFolder(RunFolder(folder.path.resolve()))
        self.assumed: list[str] = []
        self._since = time.monotonic()
        self._noises: dict[str, float] = {}

    def run(self, session: Session, progress: Progress = lambda done, total, rate: None) -> None:
        """Run what is left of the search; afterwards the run folder holds the winner.

        Raises NoModel when there is none, UserError and ClusterError for what the user can mend.
        """
        if self.run_folder.trained.exists():
            self._charge(settle=True)  # a crash may have come between
            return
        if not self.folder.outcome.exists():
            self._charge()
            concurrent = trials_at_once(self.recipe.resources, self.tune.concurrent, live_nodes())
            check_nodes(PACKAGES, self.folder.path)
            in_background(lambda: self._trials(concurrent), lambda: self._show(progress))
            self._decide()
        self._check_trials()
        winner = read_outcome(self.folder)
        if winner is None:
            self._charge(settle=True)
            raise NoModel(
                f"{self.run_folder.path}: the search ended without a model. This is one of its "
                "outcomes, and costs as much as the others: "
                f"{self.cost.guarantee}. Another search is paid for anew"
            )
        self._promote(winner)
        self._charge(settle=True)

    def check_begun(self) -> None:
        """Raise UserError when this search was begun with other records or another cost."""
        if not self.folder.terms.exists() or self.run_folder.trained.exists():
            return
        begun, terms = read_terms(self.folder), self._terms()
        changed = [name for name in terms if begun[name] != terms[name]]
        if changed:
            what = {
                "data": "the private records",
                "plan": "what the search costs",
                "trial": "what a trial may cost",
                "score_noise": "the noise of the scores",
            }
            raise UserError(
                f"{self.run_folder.path}: {' and '.join(what[name] for name in changed)} changed "
                "since this search was begun; restore it, or choose another --name"
            )
        for number in (trial.number for trial in read_trials(self.folder)):
            scores_of(self.folder, number)  # whole, or no trial may go on: that is no failed one
            if self.folder.settings(number).exists():
                read_settings(self.folder, number)
        if self.folder.outcome.exists():
            read_outcome(self.folder)

    def begin(self) -> Search:
        """Draw everything and write it down, unless that was done before.

        All that can fail comes before the first file.
        """
        if self.run_folder.trained.exists():
            return self
        terms = self._terms()
        if self.folder.terms.exists():
            return self
        secret = self.recipe.privacy.run_key
        key = bytes.fromhex(secret) if secret else new_run_key()
        for trial in draw_trials(self.tune, key):
            if trial.values is not None:
                self.noise_of(trial.values)
        self.run_folder.begin(self.recipe)
        write_atomic(self.run_folder.asked, self.recipe.to_yaml())
        self.run_folder.pin_recipe(self.recipe, None, asked=self.recipe)
        ensure_manifest(self.folder, self.tune, key)
        drawn = {"charge": secrets.token_hex(8), "assumed": self.assumed}
        write_json(self.folder.terms, {**terms, **drawn})
        return self

    def _terms(self) -> dict[str, Any]:
        return {
            "data": self.data,
            "plan": self.cost.plan.to_dict(),
            "trial": self.cost.limit.base.to_dict(),
            "score_noise": self.cost.score_noise,
        }

    # --- the trials

    def _trials(self, concurrent: int) -> None:
        """All trials to their end; those whose worker was lost are repeated, with the same keys."""
        for _ in range(self.recipe.resources.max_failures + 1):
            if not self._unfinished():
                return
            self.folder.full.unlink(missing_ok=True)
            try:
                self._round(concurrent)
            finally:
                if self.folder.full.exists():  # not the trial's fault: it must not count as failed
                    raise NoRoom(
                        f"{self.run_folder.path}: {os.strerror(errno.ENOSPC)}; make room, and the "
                        "same command continues the search"
                    )
        for number in self._unfinished():
            state = scores_of(self.folder, number)
            gone = {**state, "done": True, "failed": "its workers were lost again and again"}
            write_json(self.folder.scores(number), gone)

    def _unfinished(self) -> list[int]:
        trials = read_trials(self.folder)
        return [t.number for t in trials if not scores_of(self.folder, t.number)["done"]]

    def _round(self, concurrent: int) -> None:
        one_pass(self.folder, self.recipe, concurrent, self.noise_of)

    def planned(self, values: Values) -> tuple[Recipe, PrivacyPlan]:
        """The recipe of a trial and the plan that it executes.

        Raises UserError when it costs more than what the search was accounted with.
        """
        where = self.cost.where
        noise = self.cost.trial_noise(with_values(self.recipe, values, where))
        settings = {"values": values, "noise_multiplier": noise}
        trial = trial_recipe(self.recipe, settings, bytes(32), where)
        plan = make_plan(trial, self.cost.sizes.train(trial.data.fraction), where)
        self.cost.limit.check(plan, f"{where}: tune.space")
        return trial, plan

    def example(self) -> tuple[Recipe, PrivacyPlan]:
        """A trial with the first value of every searched field."""
        return self.planned(next(probes(self.tune)))

    def describe(self) -> list[tuple[str, str]]:
        """Name and value of what the whole search is, for a dry run."""
        records = f"{len(scoring_data(self.recipe)):,} records"
        noise = self.cost.score_noise
        if noise is None:
            scored = f"{records}, public"
        else:
            scored = f"{records}, held out, with noise {noise:.4g} on their count"
        trials = "cost differently; below, one of them" if self.cost.costly else "all cost the same"
        return [
            ("guarantee", str(self.cost.guarantee)),
            ("search", self.tune.law.in_full),
            ("scored on", scored),
            ("trials", trials),
        ]

    def noise_of(self, values: Values) -> float:
        """The noise multiplier of a trial, after checking its cost as `planned` does."""
        key = json.dumps(values, sort_keys=True)
        if key not in self._noises:
            noise = self.planned(values)[0].privacy.noise_multiplier
            assert noise is not None  # a trial's is settled
            self._noises[key] = noise
        return self._noises[key]

    def _show(self, progress: Progress) -> None:
        total = len(read_trials(self.folder))
        done = total - len(self._unfinished())
        progress(done, total, done / (time.monotonic() - self._since))

    # --- the end

    def _check_trials(self) -> None:
        """Raise UserError when a trial executed more than what was accounted: nothing is shown."""
        limit = trial_limit(self.folder)
        for trial in read_trials(self.folder):
            own = self.folder.trial(trial.number)
            if own.plan.exists():
                limit.check(own.read_plan(), f"{self.run_folder.path}: a trial of this search")

    def _decide(self) -> None:
        trials = read_trials(self.folder)
        states = {t.number: scores_of(self.folder, t.number) for t in trials}
        scores = {n: s["scores"][-1] for n, s in states.items() if s["failed"] is None}
        write_json(self.folder.outcome, {"winner": best(trials, scores)})

    def _promote(self, winner: int) -> None:
        """Make the run folder the winner's. Repeatable; private/trained.json comes last."""
        source, target = self.folder.trial(winner), self.folder.run
        trained = source.require_trained()
        read_released(source)
        for name in (
            "plan.json", "ledger.jsonl", "ledger.anchor", "run.key", "data.json", "fixed-key",
            "pretrained.json",
        ):  # fmt: skip
            if (source.private / name).exists():
                write_atomic(target.private / name, (source.private / name).read_bytes())
                (target.private / name).chmod(0o600)
        shutil.rmtree(target.model, ignore_errors=True)
        shutil.copytree(source.model, target.model)
        for extra in sorted(source.private.glob("hidden*")):
            write_atomic(target.private / extra.name, extra.read_bytes())
        write_json(target.search, self._terms_of_the_guarantee())
        chosen = source.read_recipe()
        named = chosen.model_copy(
            update={
                "name": self.recipe.name,
                "privacy": chosen.privacy.model_copy(
                    update={
                        "budget": self.recipe.privacy.budget,
                        "budget_ceiling": self.recipe.privacy.budget_ceiling,
                        "budget_delta": self.recipe.privacy.budget_delta,
                    }
                ),
            }
        )
        write_atomic(target.recipe_file, named.to_yaml())
        noise = named.privacy.noise_multiplier
        target.pin_recipe(named, noise, asked=self.recipe, trained=source)
        if self.tune.law.name == "fixed":
            self._show_trials()
        # How long it took depends on how many trials ran beside it.
        trained.pop("seconds", None)
        write_json(target.trained, trained)

    def _terms_of_the_guarantee(self) -> dict[str, Any]:
        """What is told about the search. Nothing here depends on K or on a trial."""
        return {
            "plan": self.cost.plan.to_dict(),
            "law": self.tune.law.in_full,
            "fields": self.tune.searched,
            "objective": self.tune.score.describe(),
            "scored_on": self.tune.score.scored_on,
            "one_training": self.cost.one_training.to_dict(),
            "charge": self._charge_id(),
            "assumed": read_terms(self.folder)["assumed"],
        }

    def _show_trials(self) -> None:
        """Every trial of a search with a fixed number of trials: all of it was paid for. Scores on
        private records are told as shares of how many there are by public numbers alone."""
        from dpdist.tuning.scoring import published

        asked, rows = self.recipe, []
        aside, fraction = kept_out(asked), asked.data.fraction
        planned = self.cost.sizes.train(fraction) / fraction
        planned *= (aside - asked.data.hold_out) / (1 - aside)
        records, noise = len(scoring_data(asked)), read_terms(self.folder)["score_noise"]
        for trial in read_trials(self.folder):
            state = scores_of(self.folder, trial.number)
            settings = read_settings(self.folder, trial.number)
            scores = [published(score, records, noise, planned) for score in state["scores"]]
            rows.append({**settings, "scores": scores, "failed": state["failed"]})
        write_json(self.folder.run.path / "trials.json", rows)

    # --- the data set's budget

    def _charge_id(self) -> str:
        result: str = read_terms(self.folder)["charge"]
        return result

    def _charge(self, settle: bool = False) -> None:
        """Charge the whole search to the records' budget before it starts; settle it after."""
        if self.recipe.privacy.budget is None:
            return
        plan, where = self.cost.plan, str(self.run_folder.recipe_file)
        records = records_of(self.recipe, 0.0, 1.0)  # some to train, the others to score
        charge = Charge.of(self._charge_id(), self.recipe.name, plan, (), self._lineage(settle))
        if settle:
            job.settle_charge(self.recipe, records, charge, where)
        else:
            job.reserve_charge(self.recipe, records, charge, where)

    def _lineage(self, ended: bool) -> Lineage:
        """What this search may release, or has where it ended. Of two copies of its folder each is
        charged for a search; a secret number of trials, which both have, makes that too little."""
        path = self.folder.processes
        known = read_json(path, {"processes": list})["processes"] if path.exists() else []
        if not known or not ended:
            known = [*known, new_nonce()]
            write_json(path, {"processes": known})
        phases = self.cost.plan.phases
        once = tuple(phase.units or 1 for phase in phases)
        made = dict.fromkeys(known, (0,) * len(phases))
        if ended:
            made[known[-1]] = once
        going_on = None if ended else known[-1]
        alone = self.tune.law.secret is not None
        return Lineage.of(phases, path, made, going_on, once, alone)


def records_of(recipe: Recipe, hold_out: float, fraction: float) -> Dataset:
    """The training records of the recipe with these shares."""
    section = recipe.data.model_copy(update={"hold_out": hold_out, "fraction": fraction})
    return training_data(recipe.model_copy(update={"data": section}), source_of(recipe))


# --- checks before a search -------------------------------------------------------------------


def prepare(recipe: Recipe, folder: RunFolder, where: str, *, only_resume: bool = False) -> Search:
    """Check as `check` does, then draw the search, or read it back. Raises UserError, and then
    nothing was written."""
    return check(recipe, folder, where, only_resume=only_resume).begin()


def check(recipe: Recipe, folder: RunFolder, where: str, *, only_resume: bool = False) -> Search:
    """Check all that can be checked, account the search, and write nothing.

    only_resume: refuse to begin. Raises UserError.
    """
    assert recipe.tune is not None
    continued = _check_same_search(recipe, folder)
    if only_resume and not continued:
        raise UserError(f"{folder.path}: no search to resume; without --resume one is begun")
    check_space(recipe, where)
    hold_out = kept_out(recipe)
    dataset = records_of(recipe, hold_out, recipe.data.fraction)
    check_records(recipe, source_of(recipe), where)
    check_groups(recipe, dataset, where)
    _check_scoring(recipe, dataset, where)

    @cache
    def counted(fraction: float) -> int:
        return len(records_of(recipe, hold_out, fraction))

    sizes = Sizes(len(records_of(recipe, 0.0, 1.0)), hold_out, counted)
    cost = SearchCost(recipe, sizes, recipe.tune.law, where)
    everything = private_data(recipe, source_of(recipe))  # what is scored on is among it
    search = Search(recipe, folder, cost, everything.fingerprint)
    if not (continued and search.folder.terms.exists()):
        cost.plan  # noqa: B018  (refused here, if no theorem covers it)
        parts = [check_trainable(search.planned(v)[0], where)[1] for v in probes(recipe.tune)]
        search.assumed = sorted({part["assumed"] for part in parts if part and part["assumed"]})
    search.check_begun()
    return search


def _check_same_search(recipe: Recipe, folder: RunFolder) -> bool:
    """Whether this search was begun before. Raises UserError when the folder holds another run."""
    if not folder.asked.exists():
        # Between the two files of a beginning there is nothing else.
        if folder.check_same_recipe(recipe) and folder.plan.exists():
            raise OtherRun(f"{folder.path}: holds a run without a search; choose another --name")
        return False
    folder.check_format()
    different = folder.read_asked().same_experiment(recipe)
    if different:
        raise OtherRun(
            f"{folder.path}: a search of that name exists with a different recipe "
            f"({', '.join(different)} differ); choose another --name, or repeat the recipe to "
            "continue it"
        )
    return True


def _check_scoring(recipe: Recipe, dataset: Dataset, where: str) -> None:
    """Raise UserError when the records or the objective of the scores cannot be used."""
    assert recipe.tune is not None
    score = recipe.tune.score
    records = scoring_data(recipe)
    if not len(records):
        raise UserError(f"{where}: tune.score: there are no records to score on")
    if score.public is not None:
        if records.input_shape != dataset.input_shape:
            raise UserError(
                f"{where}: tune.score.public: inputs of shape {records.input_shape}, the training "
                f"records have {dataset.input_shape}"
            )
        why = (
            f"are in {records.name}, and scores on them would be used as if they were public; "
            "leave public out to score on a held-out part, with noise"
        )
        private = private_data(recipe, source_of(recipe))
        refuse_common(private, records, f"{where}: tune.score.public", why)
    if not score.certifies:
        return
    for values in probes(recipe.tune):
        _check_certified(with_values(recipe, values, where), score, where)


def _check_certified(trial: Recipe, score: ScoreRecipe, where: str) -> None:
    """Raise UserError when a trial cannot be scored by what is certified."""
    certify = trial.certify
    if certify is None or certify.sigma is None or certify.noise != "gaussian":
        raise UserError(
            f"{where}: tune.score.objectives: certified objectives need certify.sigma and Gaussian "
            "noise in the recipe"
        )
    p_lower = clopper_pearson_lower(score.draws, score.draws, score.alpha)
    reach = float(gaussian_l2_radius(p_lower, certify.sigma))
    if score.radius is not None and score.radius > reach:
        raise UserError(
            f"{where}: tune.score.radius: {score.draws} draws at alpha {score.alpha:g} never "
            f"certify more than {reach:.3g} with certify.sigma {certify.sigma:g}: give more draws "
            "or a larger sigma"
        )
