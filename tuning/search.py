"""A private search from its recipe to the released winner, on Ray Tune; continued after a crash.

The rules on which its guarantee depends (docs/explanation/tuning.md): everything is drawn before
the first trial; with a secret K all trials run to their end, whatever the others score (with
num_trials fixed ASHA may stop some, but epsilon covers all); a failed trial counts as minus
infinity; a repetition replays with the same keys; only the best trial leaves private/; an
interrupted search releases nothing. Everything is checked before a search is drawn, and before
anything is written.
"""

from __future__ import annotations

import contextlib
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
from dpdist.cluster.executor import Executor
from dpdist.cluster.versions import PACKAGES
from dpdist.config.search import ScoreRecipe, TuneRecipe
from dpdist.core.binomial import clopper_pearson_lower
from dpdist.core.errors import DiskFullError, UserError
from dpdist.core.files import read_json, write_atomic, write_json
from dpdist.data import Dataset, refuse_common_records, refuse_common_users
from dpdist.privacy.budget import Charge, Lineage, read_budgets
from dpdist.privacy.ledger import new_nonce
from dpdist.privacy.plan import PrivacyPlan
from dpdist.randomness.keys import new_run_key
from dpdist.runs.charging import Hashed, check_charge, reserve_charge, settle_charge
from dpdist.runs.folder import DifferentRecipeError, RunFolder, read_verified_ledger
from dpdist.runs.recipe import Recipe, make_plan
from dpdist.training.job import check_records, check_trainable, check_users
from dpdist.training.records import by_unit, data_source, private_records, records_with_canaries
from dpdist.tuning.manifest import (
    SearchFolder,
    best_trial,
    draw_trials,
    ensure_manifest,
    read_scores,
    read_settings,
    read_terms,
    read_trial_limit,
    read_trials,
    read_winner,
)
from dpdist.tuning.space import (
    RecordCounts,
    SearchCost,
    TrialValues,
    apply_values,
    check_space,
    iter_probe_values,
    private_eval_fraction_of,
)
from dpdist.tuning.trial import (
    ContinueTrial,
    continue_recipe_trial,
    count_concurrent_trials,
    make_tune_pass,
    scoring_data,
    trial_recipe,
)

# --- the search -------------------------------------------------------------------------------


Progress = Callable[[int, int, float, str], None]  # done, total, trials a second, stages


class NoModelError(UserError):
    """The search ended without a model, which is one of the mechanism's outcomes."""


class Search:
    """Run a prepared search, from `prepare_search`.

    data_fingerprint: of the training records. assumptions: about the public parts that any trial
    may start with, for a new search.
    """

    def __init__(
        self, recipe: Recipe, folder: RunFolder, cost: SearchCost, data_fingerprint: str
    ) -> None:
        assert recipe.tune is not None
        self.recipe, self.cost, self.data_fingerprint = recipe, cost, data_fingerprint
        self.tune: TuneRecipe = recipe.tune
        self.run_folder = folder
        self.folder = SearchFolder(RunFolder(folder.path.resolve()))
        self.assumptions: list[str] = []
        self.way_out = "choose another --name"
        self._since: tuple[int, float] | None = None  # trials done, and time, at the first report
        self._noise_by_values: dict[str, float] = {}

    def run(
        self, executor: Executor, progress: Progress = lambda done, total, rate, stage: None
    ) -> None:
        """Run the remaining search; afterwards the run folder is that of the winner.

        Raises NoModelError if there is no winner, UserError and ClusterError for what can be fixed.
        """
        if self.run_folder.training_summary.exists():
            self._charge_budget(settle=True)  # a crash may have come between
            return
        if not self.folder.outcome.exists():
            self._charge_budget()
            concurrent = count_concurrent_trials(
                self.recipe.resources, self.tune.concurrent, executor.hosts()
            )
            executor.check_nodes(PACKAGES, self.folder.path)
            executor.supervise(
                lambda: self._run_trials(executor, concurrent),
                lambda: self._report_progress(progress),
            )
            self._choose_winner()
        self._check_trials()
        winner = read_winner(self.folder)
        if winner is None:
            self._charge_budget(settle=True)
            raise NoModelError(
                f"{self.run_folder.path}: the search ended without a model, which is one of its "
                f"outcomes, with the same privacy cost as the others: {self.cost.guarantee}",
                see="how-to/tuning.md#which-distribution",
            )
        self._promote_winner(winner)
        self._charge_budget(settle=True)

    def check_unchanged(self) -> None:
        """Raise UserError if this search was started with other records or privacy cost."""
        if not self.folder.terms.exists() or self.run_folder.training_summary.exists():
            return
        begun, terms = read_terms(self.folder), self._terms()
        changed = [name for name in terms if begun[name] != terms[name]]
        if changed:
            what = {
                "data": "the private records",
                "plan": "the privacy cost of the search",
                "trial": "the privacy cost of a trial",
                "score_noise": "the noise of the scores",
            }
            raise UserError(
                f"{self.run_folder.path}: {' and '.join(what[name] for name in changed)} changed "
                f"since this search was begun; restore it, or {self.way_out}"
            )
        for number in (trial.number for trial in read_trials(self.folder)):
            read_scores(self.folder, number)  # a damaged file raises: it is not a failed trial
            if self.folder.settings_file(number).exists():
                read_settings(self.folder, number)
        if self.folder.outcome.exists():
            read_winner(self.folder)

    def begin(self) -> Search:
        """Draw and write everything, unless it is written; errors come before the first file."""
        if self.run_folder.training_summary.exists() or self.folder.terms.exists():
            return self
        terms = self._terms()
        self.recipe.check_constants()
        secret = self.recipe.privacy.run_key
        key = bytes.fromhex(secret) if secret else new_run_key()
        for trial in draw_trials(self.tune, key):
            if trial.values is not None:
                self.trial_noise_multiplier(trial.values)
        self.run_folder.create_or_open(self.recipe)
        write_atomic(self.run_folder.search_recipe_file, self.recipe.to_yaml())
        self.run_folder.pin_recipe(self.recipe, None, search_recipe=self.recipe)
        ensure_manifest(self.folder, self.tune, key)
        self._keep_checked()
        drawn = {"charge": secrets.token_hex(8), "assumed": self.assumptions}
        write_json(self.folder.terms, {**terms, **drawn})
        return self

    def _keep_checked(self) -> None:
        """Write further results of checking the drawn trials, before any of them starts."""

    def _terms(self) -> dict[str, Any]:
        return {
            "data": self.data_fingerprint,
            "plan": self.cost.plan.to_dict(),
            "trial": self.cost.trial_limit.base_plan.to_dict(),
            "score_noise": self.cost.score_noise,
        }

    # --- the trials

    def _run_trials(self, executor: Executor, concurrent: int) -> None:
        """Run all trials to their end; repeat those whose worker was lost, with the same keys."""
        for _ in range(self.recipe.resources.max_failures + 1):
            if not self._unfinished_trials():
                return
            self.folder.disk_full_marker.unlink(missing_ok=True)
            try:
                self._run_pass(executor, concurrent)
            finally:
                # It must not count as a failed trial.
                if self.folder.disk_full_marker.exists():
                    raise DiskFullError(
                        f"{self.run_folder.path}: {os.strerror(errno.ENOSPC)}; make room, and the "
                        "same command continues the search"
                    )
        for number in self._unfinished_trials():
            state = read_scores(self.folder, number)
            gone = {**state, "done": True, "failed": "its workers were lost again and again"}
            write_json(self.folder.scores_file(number), gone)

    def _unfinished_trials(self) -> list[int]:
        trials = read_trials(self.folder)
        return [t.number for t in trials if not read_scores(self.folder, t.number)["done"]]

    def _run_pass(self, executor: Executor, concurrent: int) -> None:
        executor.run_trials(
            make_tune_pass(
                self.folder,
                self.recipe,
                concurrent,
                self.trial_noise_multiplier,
                self._continue_trial,
            )
        )

    @property
    def _continue_trial(self) -> ContinueTrial:
        """Return the function that runs a trial to its end."""
        return continue_recipe_trial

    def plan_trial(self, values: TrialValues) -> tuple[Recipe, PrivacyPlan]:
        """Return the recipe of a trial and the plan that it executes.

        Raises UserError if it exceeds the limit that the search accounts for.
        """
        where = self.cost.context
        noise = self.cost.trial_noise_multiplier(apply_values(self.recipe, values, where))
        settings = {"values": values, "noise_multiplier": noise}
        trial = trial_recipe(self.recipe, settings, bytes(32), where)
        plan = make_plan(
            trial, self.cost.record_counts.training_records(trial.data.fraction), where
        )
        self.cost.trial_limit.check(plan, f"{where}: tune.space")
        return trial, plan

    def example_trial(self) -> tuple[Recipe, PrivacyPlan]:
        """Return recipe and plan of a trial with the first value of every searched field."""
        return self.plan_trial(next(iter_probe_values(self.tune)))

    def describe(self) -> list[tuple[str, str]]:
        """Return names and values that describe the search, for a dry run."""
        count, noise = len(scoring_data(self.recipe)), self.cost.score_noise
        if noise is None:
            scored = f"{count:,} records, public"
        else:
            units = f"{count:,} {self.cost.plan.counted}"
            scored = f"{units}, held out, with noise {noise:.4g} on their count"
        trials = (
            "cost differently; below, one of them" if self.cost.varies_cost else "all cost the same"
        )
        return [
            ("guarantee", str(self.cost.guarantee)),
            ("search", self.tune.num_trials.full_description),
            ("scored by", self.tune.score.describe()),
            ("scored on", scored),
            *([("caution", caution)] if (caution := self.tune.score.caution) else []),
            ("trials", trials),
        ]

    def trial_noise_multiplier(self, values: TrialValues) -> float:
        """Return the noise multiplier of a trial, after checking it as `plan_trial` does."""
        key = json.dumps(values, sort_keys=True)
        if key not in self._noise_by_values:
            noise = self.plan_trial(values)[0].privacy.noise_multiplier
            assert noise is not None  # a trial's noise is fixed
            self._noise_by_values[key] = noise
        return self._noise_by_values[key]

    def _report_progress(self, progress: Progress) -> None:
        total = len(read_trials(self.folder))
        done = total - len(self._unfinished_trials())
        now = self.stages()
        stages = {"done": done, "trials": total, "stages": now}
        with contextlib.suppress(OSError):  # a full disk raises at a file that is needed
            write_json(self.folder.progress, stages, durable=False)
        if self._since is None:
            self._since = done, time.monotonic()
        rate = (done - self._since[0]) / max(time.monotonic() - self._since[1], 1e-9)
        progress(done, total, rate, "; ".join(now))

    def stages(self) -> list[str]:
        """Return the stage of each trial that has started and not ended.

        It is secret if the number of trials is.
        """
        found = []
        for number in self._unfinished_trials():
            own = self.folder.trial_folder(number)
            if own.training_summary.exists():
                found.append(f"trial {number} scoring")
            elif own.run_key.exists():
                found.append(f"trial {number} training{_describe_step(own)}")
        return found

    # --- the end

    def _check_trials(self) -> None:
        """Raise UserError if a trial executed more than was accounted; then nothing is released."""
        limit = read_trial_limit(self.folder)
        for trial in read_trials(self.folder):
            own = self.folder.trial_folder(trial.number)
            if own.plan.exists():
                limit.check(own.read_plan(), f"{self.run_folder.path}: a trial of this search")

    def _choose_winner(self) -> None:
        trials = read_trials(self.folder)
        states = {t.number: read_scores(self.folder, t.number) for t in trials}
        scores = {n: s["scores"][-1] for n, s in states.items() if s["failed"] is None}
        write_json(self.folder.outcome, {"winner": best_trial(trials, scores)})

    def _promote_winner(self, winner: int) -> None:
        """Copy the winner into the run folder. Repeatable; private/trained.json comes last."""
        source, target = self.folder.trial_folder(winner), self.folder.run
        trained = source.require_trained()
        read_verified_ledger(source)
        for name in (
            "plan.json",
            "ledger.jsonl",
            "ledger.anchor",
            "run.key",
            "data.json",
            "fixed-key",
            "pretrained.json",
        ):
            if (source.private / name).exists():
                write_atomic(target.private / name, (source.private / name).read_bytes())
        shutil.rmtree(target.model_folder, ignore_errors=True)
        shutil.copytree(source.model_folder, target.model_folder)
        for extra in sorted(source.private.glob("hidden*")):
            write_atomic(target.private / extra.name, extra.read_bytes())
        write_json(target.search_record, self._search_record(winner))
        chosen = self._take_along(source, target)
        budget = ("budget", "budget_ceiling", "budget_delta")
        own = {key: getattr(self.recipe.privacy, key) for key in budget}
        privacy = chosen.privacy.model_copy(update=own)
        named = chosen.model_copy(update={"name": self.recipe.name, "privacy": privacy})
        write_atomic(target.recipe_file, named.to_yaml())
        noise = named.privacy.noise_multiplier
        target.pin_recipe(named, noise, search_recipe=self.recipe)
        if self.tune.num_trials.name == "fixed":  # epsilon covers all trials
            write_json(target.trials, read_json(target.search_record, {"trials": list})["trials"])
        # The time depends on how many trials ran at the same time.
        trained.pop("seconds", None)
        write_json(target.training_summary, trained)

    def _take_along(self, source: RunFolder, target: RunFolder) -> Recipe:
        """Copy further files of the winner, and return its recipe."""
        return source.read_recipe()

    def _search_record(self, winner: int) -> dict[str, Any]:
        """Return the terms of the search, and its trials if their number is fixed.

        With a secret K nothing here depends on K or on a trial.
        """
        fixed = self.tune.num_trials.name == "fixed"
        return {
            **({"trials": self._trial_rows(winner)} if fixed else {}),
            "plan": self.cost.plan.to_dict(),
            "num_trials": self.tune.num_trials.full_description,
            "fields": self.tune.searched_fields,
            "objective": self.tune.score.describe(),
            "scored_on": self.tune.score.describe_records(self.cost.plan.counted),
            "one_training": self.cost.one_training_guarantee.to_dict(),
            "charge": self._charge_id(),
            "assumed": read_terms(self.folder)["assumed"],
        }

    def _trial_rows(self, winner: int) -> list[dict[str, Any]]:
        """Return the publishable values of every trial.

        Scores on private records are divided by a number that follows from public numbers.
        """
        from dpdist.tuning.scoring import publishable_score

        asked, rows = self.recipe, []
        aside, fraction = private_eval_fraction_of(asked), asked.data.fraction
        planned = self.cost.record_counts.training_records(fraction) / fraction
        planned *= (aside - asked.data.private_eval_fraction) / (1 - aside)
        records, noise = len(scoring_data(asked)), read_terms(self.folder)["score_noise"]
        for trial in read_trials(self.folder):
            state = read_scores(self.folder, trial.number)
            settings = read_settings(self.folder, trial.number)
            scores = [
                publishable_score(score, records, noise, planned) for score in state["scores"]
            ]
            told = {"scores": scores, "failed": state["failed"], "chosen": trial.number == winner}
            rows.append(settings | told)
        return rows

    # --- the data set's budget

    def budget_records(self) -> Hashed:
        """Return all private records of the search, to train on and to score on."""
        return load_training_records(self.recipe, 0.0, 1.0)

    def _charge_id(self) -> str:
        result: str = read_terms(self.folder)["charge"]
        return result

    def check_budget(self, context: str) -> None:
        """Raise UserError if a new search does not fit its records' budget; charge nothing."""
        if (budget := self.recipe.privacy.budget) is None:
            return
        begun = self.folder.processes.exists() and self._charge_id()
        if not (begun and any(each.find_charge(begun) for each in read_budgets(budget))):
            check_charge(self.recipe, self.cost.plan, self.budget_records(), context)

    def _charge_budget(self, settle: bool = False) -> None:
        """Charge the whole search to the records' budget before it starts; settle it after."""
        if self.recipe.privacy.budget is None:
            return
        plan, where = self.cost.plan, str(self.run_folder.recipe_file)
        records = self.budget_records()
        charge = Charge.for_plan(
            self._charge_id(), self.recipe.name, plan, (), self._lineage(settle)
        )
        if settle:
            settle_charge(self.recipe, records, charge, where)
        else:
            reserve_charge(self.recipe, records, charge, where)

    def _lineage(self, finished: bool) -> Lineage:
        """Return the releases that this search may make, or made if it ended.

        Each of two copies of its folder is charged for a search. That is too little for a secret
        number of trials, which both share, so it is then not allowed.
        """
        path = self.folder.processes
        known = read_json(path, {"processes": list})["processes"] if path.exists() else []
        if not known or not finished:
            known = [*known, new_nonce()]
            write_json(path, {"processes": known})
        phases = self.cost.plan.phases
        once = tuple(phase.num_units or 1 for phase in phases)
        made = dict.fromkeys(known, (0,) * len(phases))
        if finished:
            made[known[-1]] = once
        going_on = None if finished else known[-1]
        alone = self.tune.num_trials.secret_distribution is not None
        return Lineage.from_ledger(phases, path, made, going_on, once, alone)


def _describe_step(trial: RunFolder) -> str:
    """Return how far a trial's training is, or nothing before its first step."""
    try:
        at = read_json(trial.progress, {"done": int, "steps": int})
    except (UserError, OSError):
        return ""
    return f", step {at['done']:,} of {at['steps']:,}"


def load_training_records(recipe: Recipe, private_eval_fraction: float, fraction: float) -> Dataset:
    """Return the training records of the recipe with these fractions."""
    section = recipe.data.model_copy(
        update={"private_eval_fraction": private_eval_fraction, "fraction": fraction}
    )
    return records_with_canaries(recipe.model_copy(update={"data": section}), data_source(recipe))


# --- checks before a search -------------------------------------------------------------------


def prepare_search(recipe: Recipe, folder: RunFolder, context: str) -> Search:
    """Check as `check_search` does, then draw the search, or read it.

    After a UserError nothing is written.
    """
    return check_search(recipe, folder, context).begin()


def check_search(recipe: Recipe, folder: RunFolder, context: str) -> Search:
    """Return the checked and accounted search; write nothing. Raises UserError."""
    assert recipe.tune is not None
    if recipe.by_script is not None:
        raise UserError(
            f"{context}: script: this search is over a function, and no command repeats it: run "
            "the script, which also continues it"
        )
    continued = check_same_search(recipe, folder)
    check_space(recipe, context)
    private_eval_fraction = private_eval_fraction_of(recipe)
    dataset = load_training_records(recipe, private_eval_fraction, recipe.data.fraction)
    check_records(recipe, data_source(recipe), context)
    check_users(recipe, dataset, context)
    _check_scoring(recipe, dataset, context)

    @cache
    def counted(fraction: float) -> int:
        return len(load_training_records(recipe, private_eval_fraction, fraction))

    sizes = RecordCounts(
        len(load_training_records(recipe, 0.0, 1.0)), private_eval_fraction, counted
    )
    cost = SearchCost(recipe, sizes, recipe.tune.num_trials, context)
    # All private records, also those that trials are scored on.
    everything = by_unit(recipe, private_records(recipe, data_source(recipe)))
    search = Search(recipe, folder, cost, everything.fingerprint)
    if not (continued and search.folder.terms.exists()):
        cost.plan  # noqa: B018  (refused here, if no theorem covers it)
        parts = [
            check_trainable(search.plan_trial(v)[0], context)[1]
            for v in iter_probe_values(recipe.tune)
        ]
        assumed = {part["assumed"] for part in parts if part and part["assumed"]}
        if recipe.tune.score.value is not None and not recipe.tune.score.is_public:
            from dpdist.training.private_score import ASSUMED_OF_VALUE

            assumed.add(ASSUMED_OF_VALUE)
        search.assumptions = sorted(assumed)
    search.check_unchanged()
    return search


def check_same_search(recipe: Recipe, folder: RunFolder) -> bool:
    """Return whether this search was started before. Raises UserError for another run's folder."""
    if not folder.search_recipe_file.exists():
        # Between the two files of a beginning there is nothing else.
        if folder.check_same_recipe(recipe) and folder.plan.exists():
            raise DifferentRecipeError(
                f"{folder.path}: contains a run without a search; choose another --name"
            )
        return False
    folder.check_format()
    different = folder.read_search_recipe().differing_keys(recipe)
    if different:
        raise DifferentRecipeError(
            f"{folder.path}: a search of that name exists with a different recipe "
            f"({', '.join(different)} differ); choose another --name (in Python: folder=), or "
            "repeat the recipe to continue it"
        )
    return True


def _check_scoring(recipe: Recipe, dataset: Dataset, context: str) -> None:
    """Raise UserError if the records or the objective of the scores cannot be used."""
    assert recipe.tune is not None
    score = recipe.tune.score
    records = scoring_data(recipe)
    if not len(records):
        raise UserError(f"{context}: tune.score: there are no records to score on")
    if score.public is not None:
        if records.input_shape != dataset.input_shape:
            raise UserError(
                f"{context}: tune.score.public: inputs of shape {records.input_shape}, the "
                f"training records have {dataset.input_shape}"
            )
        why = (
            f"are in {records.name}, and scores on them would be used as if they were public; "
            "leave public out to score on a held-out part, with noise"
        )
        private = private_records(recipe, data_source(recipe))
        if private.by_user:
            refuse_common_users(private, records, f"{context}: tune.score.public")
        else:
            refuse_common_records(private, records, f"{context}: tune.score.public", why)
    classes, weights = recipe.data.num_classes, score.class_weights
    if weights is not None and len(weights) != classes:
        raise UserError(
            f"{context}: tune.score.class_weights: must be {classes} numbers, one for each class, "
            f"got {len(weights)}"
        )
    if score.value is not None:
        from dpdist.tuning.scoring import record_scores

        record_scores(score)  # before anything is drawn: its function must be there
    if not score.needs_certificates:
        return
    for values in iter_probe_values(recipe.tune):
        check_certifiable(apply_values(recipe, values, context), score, context)


def check_certifiable(trial: Recipe, score: ScoreRecipe, context: str) -> None:
    """Raise UserError if a trial cannot be scored by certified objectives."""
    certify = trial.certify
    if certify is None or certify.sigma is None or certify.noise != "gaussian":
        raise UserError(
            f"{context}: tune.score.objectives: certified objectives need certify.sigma and "
            "Gaussian noise in the recipe"
        )
    p_lower = clopper_pearson_lower(score.samples, score.samples, score.alpha)
    reach = float(gaussian_l2_radius(p_lower, certify.sigma))
    if trial.method.capabilities.has_prediction_noise:
        return  # noise inside the model also certifies, by an amount that only training shows
    if score.radius is not None and score.radius > reach:
        raise UserError(
            f"{context}: tune.score.radius: {score.samples} samples at alpha {score.alpha:g} never "
            f"certify more than {reach:.3g} with certify.sigma {certify.sigma:g}: give more "
            "samples or a larger sigma"
        )
