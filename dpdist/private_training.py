"""Private training of a script's own model, by its own optimizer, in its own loop.

It is a run like any other: the plan of a recipe, its ledger, the same loop and `PrivateStep`,
checkpoints and a run folder. The script gives the module, the optimizer, the records and the loss,
and takes the steps. What the script does between two steps is post-processing as long as it uses
only released fields of what `step` returned; other detected changes are on the card.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dpdist.config.sections import PrivacyRecipe
from dpdist.config.training import ResourcesRecipe, Stage
from dpdist.core.console import Row, format_table, log
from dpdist.core.errors import UserError
from dpdist.core.script_errors import TrainingInterrupted, unfinished, warn
from dpdist.data.adapters import as_records
from dpdist.data.protocol import Records, count_common, single_records
from dpdist.evaluation import evaluate_stage
from dpdist.gradients.engine import GradientEngine
from dpdist.gradients.hooks import each_tensor, take
from dpdist.gradients.independence import SYNTHETIC_KEY
from dpdist.gradients.objective import checked_losses, objective_of, under_autocast
from dpdist.gradients.random_passes import keyed_draws
from dpdist.methods.base import MethodState
from dpdist.models.factory_code import code_digest_of
from dpdist.privacy.guarantee import Guarantee
from dpdist.privacy.ledger import JournalBusy, Ledger, ReplayConflict
from dpdist.randomness.keys import derive_key
from dpdist.reports.plots import plot_history
from dpdist.reports.results import read_stage, stage_of_card
from dpdist.reports.summary import result_doubts
from dpdist.reports.tracking import check_script_tracker, track_script
from dpdist.runs.charging import charged, check_charge
from dpdist.runs.folder import RunFolder, complete_checkpoints, open_run
from dpdist.runs.recipe import Recipe, resolve_plan
from dpdist.training.collectives import Workers
from dpdist.training.estimate import optimizer_of
from dpdist.training.job import (
    CheckedTraining,
    check_kept,
    check_same_data,
    choose_run_key,
    ensure_run_key,
)
from dpdist.training.loop import Loop
from dpdist.training.model_setup import MEASURED, importance_weighted, script_engine
from dpdist.training.monitoring import StepMetrics
from dpdist.training.private_score import (
    PrivateScore,
    Value,
    check_apart,
    check_scored_targets,
    declare,
    with_kept_score,
    with_score,
)
from dpdist.training.private_step import PrivateStep, build_shards, check_clip
from dpdist.training.provenance import card_of_release
from dpdist.training.script_checks import (
    HashedRecords,
    by_unit,
    check_model,
    check_optimizer,
    check_public,
    check_scored_users,
    check_units_apart,
    check_users,
    check_what_is_learned,
    leave_out_unused,
    scored_by_unit,
    store_public,
)
from dpdist.training.script_history import (
    History,
    Metric,
    StepReport,
    as_table,
    evaluate_public,
    named_metric,
)
from dpdist.training.script_learner import EXAMPLES, ScriptLearner
from dpdist.training.script_recipe import Script, are_pairs, spec_of
from dpdist.training.script_state import kept_buffers
from dpdist.training.script_terminal import shown_progress, tell_resumed, whole_step
from dpdist.training.statistics import read_statistics_stage, warn_if_uncounted
from dpdist.training.trained_weights import check_first_weights, mark_trained
from dpdist.training.worker import Attempt, method_state_digest, replay_fingerprint

# --- the training -----------------------------------------------------------------------------


_CONTEXT = "PrivateTraining"  # in error messages about its settings
_open: dict[Path, weakref.ref[PrivateTraining]] = {}  # trainings of this process, by run folder


IN_SEARCH = ContextVar("IN_SEARCH", default=False)  # whether a search builds trainings


class RunBusyError(UserError):
    """A different process trains the run."""


class PrivateTraining:
    """Train your own module privately, by your own optimizer, in your own loop.

    Guarantee: the run is (epsilon, delta)-differentially private as `guarantee` states, for
    everything released so far. Each step takes a keyed Poisson sample, clips every record's
    gradient, adds up, puts the release on record, adds noise and divides by the expected batch: the
    same `PrivateStep` as in a recipe. The optimizer gets only that noisy gradient. The run's card
    lists the assumptions that dpdist cannot check.

    The folder is an ordinary run folder, created by the first step. The same script continues it
    after a crash, from the newest checkpoint: it must build the same objects.

    In several processes with a `torch.distributed` process group, as `torchrun` and Ray Train start
    them, the same script trains together: each step is the step of one process, and is on record
    before any of them draws its noise. Only worker 0 writes. All must build the same objects.

    Call `step` for one step, iterate over the training for one `StepReport` per step that is left,
    or call `run_all`. `history`, `guarantee` and `remaining_steps` describe what was released so
    far.

    Args:
        model: the module itself, on its device; layers that normalize over the batch and modules
            wrapped for distributed training raise an error: use `dpdist.prepare`, and the module
            inside.
        optimizer: any torch optimizer that needs no closure, of the model's parameters.
        data: the private records: `(X, y)`, or anything that `dpdist.as_records` takes.
        loss: a name, such as "cross-entropy"; a criterion object, such as
            `torch.nn.CrossEntropyLoss()`; or a callable that returns one value per record.
        privacy: a `dpdist.Privacy`, or its fields as a dict.
        batch_size: expected number of records in a step (of users if privacy has unit: user); the
            real one is random.
        steps, epochs: length of the training; one of the two.
        folder: folder of the run, created if it does not exist.
        resources: `micro_batch`, `rounding` and `checkpoint_seconds` of a recipe's section, as a
            dict.
        state: schedulers and other objects with `state_dict` that a checkpoint keeps. It is written
            when the next step starts, with what your loop did in between.
        eval_data: PUBLIC records `(X, y)` for evaluation, certificates and attacks; kept in the run
            folder.
        factory: "package.module:function" that builds this model from (input_shape, classes). With
            it commands in other processes can load the trained model; without it, only this script.
        vmap: run every record through the model separately.
        certify: a recipe's section `certify`, for `dpdist certify` of the run.
        reproducible: add sums up in the same order on any number of workers, at most 8: the same
            bits, slower.
        private_metrics: let `step` return losses and counts of private records, too; with several
            workers, of this worker's. The ledger records it, and the guarantee's kind is then
            "assumed: post-processing".
        class_sampling: relative sampling rates by class, such as {0: 1, 1: 4}: a record joins a
            step at the rate of its own target. The largest rate determines the privacy cost.
        class_counts: the PUBLIC number of records of each class, from which rates follow; they are
            never counted in the data. Required with rates.
        importance_weights: multiply a record's loss by 1/rate, of mean 1, before the clip.
        began_with: run or release whose weights the model starts with, or a list of several: its
            folder, `RunFolder` or `Release`. The guarantee then is that of this run and of them
            together, if one can be stated. Without it, weights that a run trained raise an error.
            Also the `Statistics` that prepared the records; `privacy.epsilon` then covers both.
        trackers: "tensorboard", "mlflow" or "wandb", or KIND:PLACE such as "wandb:my-project", that
            get epsilon, the history and public evaluations when the training has finished.
        autocast: run forward and backward passes in bfloat16, for the operations for which
            `torch.autocast` does; norms stay float32, and sums float64.

    Attributes:
        model, optimizer, state: the arguments; `model` has the trained weights.
        plan: the `PrivacyPlan` that the steps execute.
        run: the `RunFolder`, for `dpdist.certify`, `dpdist.load_results` and
            `dpdist.write_release`.

    Raises:
        UserError: one line that names the wrong argument and its rule; nothing was released.

    Example:
        >>> import tempfile, torch, dpdist
        >>> inputs, labels = torch.randn(200, 4), torch.randint(2, (200,))
        >>> model = torch.nn.Linear(4, 2)
        >>> training = dpdist.PrivateTraining(
        ...     model, torch.optim.SGD(model.parameters(), lr=0.1), (inputs, labels),
        ...     loss="cross-entropy",
        ...     privacy=dpdist.Privacy(noise_multiplier=1.0, delta=1e-3),
        ...     batch_size=20, steps=3, folder=tempfile.mkdtemp() + "/run",
        ... )
        >>> while training.remaining_steps:
        ...     report = training.step()
        >>> training.remaining_steps, training.guarantee.kind
        (0, 'proved')
    """

    _started = False  # the run's folder is there, and its ledger
    _scored: PrivateScore | None = None
    _compared = ""  # fingerprint of the public records last compared with the private ones
    _later = False  # the last step leaves the end to `finish`
    _warned = False  # about changes between steps

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        data: Any,
        *,
        loss: Any,
        privacy: PrivacyRecipe | Mapping[str, Any],
        batch_size: int,
        steps: int | None = None,
        epochs: int | None = None,
        folder: str | Path,
        resources: ResourcesRecipe | Mapping[str, Any] | None = None,
        state: Sequence[Any] = (),
        eval_data: Any = None,
        factory: str | None = None,
        vmap: bool = False,
        certify: Mapping[str, Any] | None = None,
        reproducible: bool = False,
        private_metrics: bool = False,
        class_sampling: Mapping[Any, float] | None = None,
        class_counts: Mapping[Any, int] | None = None,
        importance_weights: bool = False,
        began_with: Any = None,
        trackers: Sequence[str] = (),
        autocast: bool = False,
    ) -> None:
        self._workers = Workers.of_this_process()
        with self._workers.sharing_errors():
            check_model(model)
            check_optimizer(optimizer, model)
            self.model, self.optimizer, self.state = model, optimizer, list(state)
            stages = _stages(began_with)
            self.run, self._private_metrics, self._loss = _run_folder(folder), private_metrics, loss
            self._history, self._autocast = History(self.run.history), autocast
            self._records = as_records(data)
            warn_if_uncounted(len(self._records), stages)
            self._device = next(model.parameters()).device
            examples = self._examples(EXAMPLES)
            unused = leave_out_unused(model, loss, examples)
            self._learner = ScriptLearner(model, optimizer, state, self._workers, self._records)
            self._public = None if eval_data is None else as_records(eval_data, name="eval_data")
            self._learner.spec = spec = spec_of(model, factory, examples, loss)
            check_what_is_learned(self._records, loss, model, spec.classes)
            self._script = Script(
                model, spec, optimizer, loss, self._records, self.run, eval_data is not None,
                stages, unused, autocast,
            )  # fmt: skip
            live = {
                path: each.model if (each := ref()) and each.steps_taken else None
                for path, ref in _open.items()
            }
            named = [place for each in stages for place in each.places]
            check_first_weights(model, self.run, live, named, are_pairs(examples[0]))
            section = {
                "batch_size": batch_size,
                "steps": steps,
                "epochs": epochs,
                "reproducible": reproducible,
            }
            sampling = {
                "class_sampling": class_sampling or {},
                "class_counts": class_counts or {},
                "importance_weights": importance_weights,
            }
            recipe = self._script.recipe(
                self._workers, privacy, resources, section, sampling, vmap=vmap, certify=certify
            )
            self._records = by_unit(recipe, self._records)
            self._engine = self._engine_of(recipe, examples)
            self._learner.check_form()
            self._done, self._inside, self._loop, self._stack = 0, False, None, ExitStack()
            self._asked: list[bool] = []  # of Ctrl-C, until all workers know
            self.trackers = [check_script_tracker(each, self.run) for each in trackers]
            if recipe.privacy.run_key is not None:
                warn(
                    "privacy.run_key: is fixed, so this run is NOT PRIVATE (who knows the key can "
                    "subtract the noise); leave it out outside of tests"
                )
            self._planned(with_kept_score(recipe, self.run))
            if any(each["continued"] for each in self._workers.agree(continued=self._continued)):
                self._begin()
            else:
                _check_same_start(self)

    # --- start-up

    def _examples(self, count: int) -> tuple[Any, Tensor]:
        """Return invented inputs and targets, on the model's device."""
        inputs, targets = self._records.examples(count)
        return each_tensor(lambda each: each.to(self._device), inputs), targets.to(self._device)

    def _engine_of(self, recipe: Recipe, examples: tuple[Any, Tensor]) -> GradientEngine:
        """Return the gradient engine, checked on invented examples. Raises UserError."""
        count = recipe.privacy.nominal_records or len(self._records)
        objective = importance_weighted(objective_of(self._loss), recipe, count)
        if self._autocast:
            objective = under_autocast(objective)
        engine = script_engine(self.model, objective, recipe)
        with kept_buffers(self.model):
            few = take(examples[0], slice(2)), examples[1][:2]
            with keyed_draws(SYNTHETIC_KEY, self._device), torch.no_grad():
                checked_losses(self.model, objective, *few)
            # Worker 0 screens for all: `_check_same_start` compares models and settings.
            (engine.validate if self._workers.first else engine.prepare)(*examples)
        return engine

    def _planned(self, recipe: Recipe) -> None:
        """Set the plan of a recipe, or of the run that was started; write nothing."""
        folder, records = self.run, self._records
        continued = folder.check_same_recipe(recipe)
        check_kept(recipe, folder, None)
        begun = continued and folder.plan.exists()
        if begun:
            noise, plan = None, folder.read_plan()
        else:
            noise, plan = resolve_plan(recipe, len(records), _CONTEXT)
        if len(records) != plan.records and not plan.nominal:
            raise UserError(
                f"data: must be the {plan.records:,} {plan.counted} that the run was begun with, "
                f"got {len(records):,}"
            )
        check_users(recipe, records)
        self._hashed = None if recipe.privacy.budget is None else HashedRecords(records)
        if self._hashed is not None and not continued and self._workers.first:
            check_charge(recipe, plan, self._hashed, _CONTEXT)
        check_clip(self._engine, plan.clip_norm, plan.max_expected_batch)
        if self._public is not None:
            check_public(self._public, records, recipe.data.targets, self._script.spec.classes)
        self._recipe, self.plan, self._noise, self._continued = recipe, plan, noise, begun
        self._learner.plan = plan

    def _begin(self) -> None:
        """Start the run, or continue it; errors come before anything is written."""
        if self.run.plan.exists() != self._continued:  # a different process started it first
            self._planned(self._recipe)
        folder, learner = self.run, self._learner
        run_key = self._begin_run()
        self._started = True
        key = derive_key(run_key, "run", self.plan.fingerprint(), self._fingerprint, "trial", 0)
        if self._scored is not None:
            self._scored.open(folder, self.plan, self._workers)
        older = _open.get(folder.path, lambda: None)()
        self._done = learner.restore(folder, older is not None and older.model is self.model)
        self._workers.check_same({"checkpoint": str(self._done), **learner.digests("checkpoint")})
        if folder.training_summary.exists():
            if self._hashed is not None and self._workers.first:  # a crash may have left it open
                with charged(self._recipe, self.plan, folder, self._hashed, _CONTEXT):
                    pass
            self._evaluate_public()
            learner.watch()
            if self._workers.first:
                log(f"{folder.path}: this training has finished; the model has its weights now")
            return
        self._attempt(key)
        unfinished.add(self)
        if self._workers.first:
            tell_resumed(self._done, sum(step >= self._done for step in self._before))
        if not complete_checkpoints(folder.checkpoints):
            self._save()
        if not self.remaining_steps:  # it ended before it wrote its summary
            self._finish()

    def _begin_run(self) -> bytes:
        """Write a new run, the same on all workers, and return its key. Raises UserError."""
        recipe, folder = self._recipe, self.run
        _check_same_start(self)
        chosen, records_key, told = self._compared_data()
        checked = CheckedTraining(recipe, folder, self.plan, told, None, self._noise)
        if chosen is not None:
            if self._public is not None:
                store_public(self._public, folder, recipe)
            folder.create_or_open(recipe)
            ensure_run_key(folder, recipe.privacy.run_key, chosen)
            checked.begin()
        self._workers.agree()  # worker 0 has written
        if not folder.run_key.exists() or _records_key(folder.read_run_key()) != records_key:
            raise UserError(
                f"folder: {folder.path}: contains another run than worker 0 began: give one on "
                "shared storage, and let no other process start this run"
            )
        self.plan = self._learner.plan = folder.read_plan()
        self._fingerprint = told
        self._job = replace(checked, plan=self.plan).job()
        return folder.read_run_key()

    def _compared_data(self) -> tuple[bytes | None, bytes, str]:
        """Return worker 0's run key, the key of the records' fingerprint, and the fingerprint.

        Raises UserError if the run began on other records, or workers have others.
        """
        chosen = choose_run_key(self._recipe, self.run) if self._workers.first else None
        told_key = "" if chosen is None else _records_key(chosen).hex()
        records_key = bytes.fromhex(self._workers.of_first(told_key))
        told = self._records.keyed_fingerprint(records_key)
        self._workers.check_same({"data": told})
        check_same_data(self.run, self._records.name, told)
        return chosen, records_key, told

    def _attempt(self, key: bytes) -> None:
        """Start an attempt in the ledger, and the loop that takes its steps."""
        job, plan, folder, workers = self._job, self.plan, self.run, self._workers
        reducer = workers.reducer_on(self._device)
        _take_over(folder.path, self)
        identity = {
            **replay_fingerprint(job, reducer, self._fingerprint, self._learner.initial),
            "hidden noise": method_state_digest(MethodState(self.model, {}, key)),
            "script": code_digest_of(self.model, self._loss),
        }
        held = None
        try:
            if workers.first:
                if self._hashed is not None:
                    self._stack.enter_context(
                        charged(self._recipe, plan, folder, self._hashed, _CONTEXT)
                    )
                held = Attempt.open_ledger(job, self._stack, identity, self._done)
        except JournalBusy:
            raise RunBusyError(
                f"folder: {folder.path}: another process trains this run; wait for it, or end it, "
                "and run this script again to continue"
            ) from None
        workers.agree()  # worker 0 holds the ledger
        attempt = Attempt.shared(job, reducer, held, self._done)
        ledger = held or Ledger.read(folder.ledger)
        assert ledger.epoch is not None
        self._epoch, self._before = ledger.epoch, ledger.released_steps(ledger.epoch)
        reproducible = self._recipe.training.reproducible
        step = PrivateStep(
            self._engine, self._records, key, attempt.label, reducer=reducer, ledger=held,
            shards=build_shards(
                len(self._records), plan.records, reducer, reproducible, nominal=plan.nominal
            ),
            announced=attempt.announced, announcing=workers.announcing,
        )  # fmt: skip
        self._loop = Loop(
            job, step, self._learner, start=self._done,
            monitor=None if self._loop is None else self._loop.monitor,
            examples=lambda: self._examples(MEASURED),
        )  # fmt: skip
        self._learner.watch()

    @property
    def _ledger(self) -> Ledger | None:
        """Return the ledger that this process writes, if it has it open."""
        return None if self._loop is None else self._loop.step.ledger

    def _evaluate_public(self) -> None:
        """Measure the accuracy on public records, if there are any and it is not measured yet."""
        if self._public is not None and self._workers.first:
            evaluate_stage(self._recipe, self.run)
        self._workers.agree()  # worker 0 has written

    def _save(self) -> None:
        """Write a checkpoint of the current state, the same on all workers."""
        assert self._loop is not None
        self._loop.save()
        self._workers.agree()  # worker 0 has written

    # --- used by a search

    @property
    def recipe(self) -> Recipe:
        """Return the `Recipe` of this training, as it is or will be in the run folder.

        Its section `privacy` has epsilon or noise_multiplier, whichever you gave.
        """
        return self._recipe

    @property
    def records(self) -> Records:
        """Return the private data, a `Records`, whose length is the number of units of privacy.

        If the unit is a user, one position is one user with all of its records.
        """
        return self._records

    def state_digest(self) -> str:
        """Return a hash of the current model, optimizer and `state`, a str of 32 hex digits.

        It includes plain attributes of the model's layers. Equal states have equal hashes.

        Raises:
            UserError: an object's state cannot be kept in a checkpoint.
        """
        return self._learner.state_digest()

    # --- public and released values

    @property
    def history(self) -> Any:
        """Return the released values of all steps so far, a table with one row per step.

        It is a pandas DataFrame; without pandas a dict of lists. Columns are `step` (from 0 on),
        `learning_rate` and `noisy_norm`; `score` if you declared scores; and `eval_NAME` for each
        metric of `evaluate`. A step without a score or metric has None or NaN there.
        """
        return as_table(self._history.columns(self._done))

    def evaluate(self, eval_data: Any, *, metric: Metric = "accuracy") -> float:
        """Return a metric of the current model on PUBLIC records, and add it to the history.

        Before the first step it is not added, since the history has no row yet.

        Guarantee: post-processing of what was released; it does not affect epsilon. A record that
        is also in `data` is not supported.

        Args:
            eval_data: public records `(X, y)`, or anything that `dpdist.as_records` takes.
            metric: "accuracy" or "auc" for classes; "mae" (mean absolute error) or "mse" (mean
                squared error) for numbers. Or a function that returns a number; its arguments are
                the outputs and the targets of all records, two tensors.

        Returns:
            The metric, a float.
            The model is in evaluation mode meanwhile.

        Raises:
            UserError: a record is also in `data`, targets are missing, the metric is unknown or
                does not fit the targets, or the model fails on the inputs.

        Example:
            >>> import tempfile, torch, dpdist
            >>> inputs, labels = torch.randn(300, 4), torch.randint(2, (300,))
            >>> model = torch.nn.Linear(4, 2)
            >>> training = dpdist.PrivateTraining(
            ...     model, torch.optim.SGD(model.parameters(), lr=0.1),
            ...     (inputs[:200], labels[:200]), loss="cross-entropy",
            ...     privacy=dpdist.Privacy(epsilon=3, delta=1e-3),
            ...     batch_size=20, steps=4, folder=tempfile.mkdtemp() + "/run",
            ... )
            >>> for report in training:
            ...     found = training.evaluate((inputs[200:], labels[200:]))
            >>> 0 <= found <= 1, list(training.history)
            (True, ['step', 'learning_rate', 'noisy_norm', 'eval_accuracy'])
        """
        self._look_after()
        name, function = named_metric(metric, self._script.kind, self._script.threshold)
        public = as_records(eval_data, name="eval_data")
        known = public.keyed_fingerprint(bytes(32))
        if known != self._compared:
            if common := count_common(public, self._records):
                raise UserError(
                    f"eval_data: must share no record with data, got {common:,} in common: a score "
                    "on private records would be published; training.score(...) releases one with "
                    "noise"
                )
            self._compared = known
        found = evaluate_public(self.model, public, self._learner.spec.signature, function)
        if self._done:
            self._note(**{f"eval_{name}": found})
        return found

    def plot(self, *columns: str, ax: Any = None) -> Any:
        """Plot columns of the history against the steps, and return the matplotlib `Axes`.

        Args:
            columns: names of columns, or "epsilon" for the plan's epsilon; default: "noisy_norm".
            ax: matplotlib axes to draw into; default: the current ones.

        Returns:
            The matplotlib `Axes` with one line per column.

        Raises:
            UserError: there is no such column.
        """
        told = self._history.columns(self._done)
        return plot_history(told, columns or ("noisy_norm",), self.plan, ax)

    def _note(self, **values: Any) -> None:
        """Add released values of the last step to the history."""
        if self._workers.first:
            known = {name: value for name, value in values.items() if value is not None}
            self._history.add(step=self._done - 1, **known)

    # --- the loop

    @property
    def remaining_steps(self) -> int:
        """Return the number of steps of the plan that can still be taken, an int.

        It is 0 after the last step and after `finish`.
        """
        return 0 if self._learner.stopped else self.plan.steps - self._done

    @property
    def steps_taken(self) -> int:
        """Return the number of steps that trained the current model, an int; 0 before the first."""
        return self._done

    @property
    def guarantee(self) -> Guarantee:
        """Return the `Guarantee` of everything that was released so far, over all attempts.

        Its `kind` is "assumed: post-processing" if the script changed the model between steps or
        saw private metrics. Before the first step it counts no steps. After `finish` it counts all
        planned steps, because the step at which a loop stops may depend on what steps returned.
        With a fixed run key, `fixed_key` is True and the text says NOT PRIVATE.
        """
        plan = self.plan
        self._look_after()
        if not self._started:  # nothing was released: only scores are counted
            return self._recipe.guarantee_of(plan, plan.executed_phases(plan.step_counts(0)))
        ledger = self._ledger or Ledger.read(self.run.ledger)
        released = ledger.released_phases(plan)
        return self._recipe.guarantee_of(plan, released, ledger.post_processed)

    def __str__(self) -> str:
        """Return a table of the guarantee and the steps so far."""
        planned = self.steps_taken + self.remaining_steps
        steps = Row("training", f"{self.steps_taken:,} of {planned:,} steps")
        return format_table(
            [self.guarantee.row, steps], f"Training {self.run.name} ({self.run.path})"
        )

    def step(self) -> StepReport:
        """Take the next step of the plan: noisy gradient, then one step of the optimizer.

        Ctrl-C lets the step end and writes a checkpoint; a second one ends it at once.

        Several workers take it together: each calls it, in the same order.

        Returns:
            A `StepReport` of this step: `step` (int, from 0 on), `learning_rate`, `noisy_norm` and
            `epsilon` so far (floats), `private` (dict; None without private_metrics) and `score`
            (float; None after a step without a score).

        Raises:
            UserError: no step is left, parts of the model were frozen or exchanged since the last
                step, or the training diverged.
            KeyboardInterrupt: Ctrl-C; the next call takes the next step.
        """
        with whole_step(self._asked, self._workers.first):
            report, agreed = self._step()
        if agreed or (self._asked and self._workers.count == 1):
            self._asked.clear()
            if said := self.keep_interrupted(agreed=True):
                raise TrainingInterrupted(said if self._workers.first else "")
        return report

    def _step(self) -> tuple[StepReport, bool]:
        """Take a step, and return its report and whether any worker got Ctrl-C before it."""
        with self._workers.sharing_errors():
            if not self.remaining_steps:
                raise UserError(f"step: all {self.plan.steps:,} steps of the plan are done")
            if self._look_between("step"):
                self._save()
        number = self._done
        rate = float(self.optimizer.param_groups[0]["lr"])
        self._inside = True
        seen, agreed = self._take()
        score = None
        if self._scored is not None and self._scored.is_due(number):
            fixed = self._recipe.privacy.run_key is not None
            score = self._scored.release(number, self.model, self._ledger, fixed)
        self._done, self._inside = number + 1, False
        private = asdict(seen) if self._private_metrics and seen is not None else None
        report = StepReport(
            number, rate, self._learner.noisy_norm, private, score, _so_far=_so_far(self)
        )
        self._note(learning_rate=rate, noisy_norm=report.noisy_norm, score=score)
        if not self.remaining_steps and not self._later:
            self._finish()
        return report, agreed

    def __iter__(self) -> Iterator[StepReport]:
        """Take the remaining steps, one for each `StepReport`; `break` ends between two.

        Raises:
            UserError: as `step` does.
        """
        while self.remaining_steps:
            yield self.step()

    def _take(self) -> tuple[StepMetrics | None, bool]:
        """Take the loop's next step; return its metrics and whether any worker got Ctrl-C.

        If its sum differs from the announced one, a new attempt takes it, and both count.
        """
        assert self._loop is not None
        try:
            return self._loop.take(bool(self._asked))
        except ReplayConflict:
            self._stack.close()
            with self._workers.sharing_errors():
                self._attempt(self._loop.step.key)
                self._save()
            return self._loop.take(bool(self._asked))

    def checkpoint(self) -> None:
        """Write a checkpoint between two steps, so that a restart repeats no step.

        Checkpoints are written every `resources.checkpoint_seconds`. Call this if a script learns
        that it will end, for example by SIGTERM. Let the signal's handler only set a flag, since a
        call inside a step raises an error. Several workers must call it after the same step, so
        they first agree on the flag (`torch.distributed.all_reduce`). Before the first step and
        after the last it does nothing. Returns nothing.

        Raises:
            UserError: as `step` does, a step was interrupted, or other workers continue.

        Example:
            >>> import signal, torch
            >>> from dpdist import PrivateTraining
            >>> model = torch.nn.Linear(4, 2)
            >>> training = PrivateTraining(
            ...     model, torch.optim.SGD(model.parameters(), 0.1),
            ...     (torch.randn(200, 4), torch.randint(2, (200,))), loss="cross-entropy",
            ...     privacy={"epsilon": 3, "delta": 1e-4}, batch_size=20, steps=5,
            ...     folder="runs/kept",
            ... )
            >>> told = []
            >>> before = signal.signal(signal.SIGTERM, lambda *_: told.append("end"))
            >>> while training.remaining_steps and not told:
            ...     report = training.step()
            ...     if report.step == 1:
            ...         signal.raise_signal(signal.SIGTERM)
            >>> training.checkpoint()
            >>> training.remaining_steps
            3
            >>> training.close()
            >>> _ = signal.signal(signal.SIGTERM, before)
        """
        self._refuse_inside("checkpoint")
        if not self._started or not self.remaining_steps:
            return
        with self._workers.sharing_errors():
            self._look_between("checkpoint")
            self._save()

    def finish(self) -> RunFolder:
        """End the training before its last step, at the privacy cost of all planned steps.

        Guarantee: that of the whole plan. If a loop stops by scores or norms of its steps, the
        number of steps depends on the records, while the planned number does not. So the remaining
        steps are counted in epsilon without being taken, and cannot be taken later.

        Several workers call it together. After the last step it only returns the folder. If you
        restored the parameters of an earlier step without `put_back`, the kind of the guarantee is
        "assumed: post-processing".

        Returns:
            The `RunFolder` of the finished run, which reports, releases and certificates take.

        Raises:
            UserError: no step was taken, or as `step` does.

        Example:
            >>> import torch
            >>> from dpdist import PrivateTraining
            >>> model = torch.nn.Linear(4, 2)
            >>> training = PrivateTraining(
            ...     model, torch.optim.SGD(model.parameters(), 0.1),
            ...     (torch.randn(200, 4), torch.randint(2, (200,))), loss="cross-entropy",
            ...     privacy={"epsilon": 3, "delta": 1e-4}, batch_size=20, steps=50,
            ...     folder="runs/stopped",
            ... )
            >>> while training.remaining_steps:
            ...     if training.step().step == 4:
            ...         run = training.finish()
            >>> training.steps_taken, training.guarantee == training.plan.guarantee()
            (5, True)
        """
        self._refuse_inside("finish")
        if not self._done:
            raise UserError("finish: must be called after a step: take one first")
        if self.remaining_steps or self._loop is not None:  # open, also after an end that failed
            with self._workers.sharing_errors():
                self._look_between("finish")
                self._learner.stopped |= self.remaining_steps > 0
            self._finish()
        return self.run

    def run_all(self, *, progress: bool = True) -> RunFolder:
        """Take all remaining steps, with nothing in between, and return the run's folder.

        Args:
            progress: show a line of progress on a terminal or in a notebook, with epsilon so far.

        Returns:
            The `RunFolder` of the finished run, for `dpdist.load_results`, `dpdist.certify` and
            `dpdist.write_release`; without a step left, of the run as it is.

        Raises:
            UserError: as `step` does.
        """
        with shown_progress(self._done, self.plan.steps, progress) as tell:
            for report in self:
                tell(report)
        return self.run

    @contextmanager
    def finishing_later(self) -> Iterator[None]:
        """Return a context manager in whose block the last step does not end the training.

        Call `finish` after the block. The `with` statement yields None.
        """
        self._later = True
        try:
            yield
        finally:
            self._later = False

    def put_back(self, weights: Mapping[str, Tensor]) -> None:
        """Restore parameters of an earlier step, chosen only by PUBLIC records. Returns nothing.

        The choice is post-processing of what was released, so the card needs no further assumption.

        Args:
            weights: dict from parameter name to tensor; other parameters stay as they are.
        """
        if (changed := self._learner.changed()) and self._ledger is not None:
            self._ledger.note_changes(changed)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if name in weights:
                    parameter.copy_(weights[name])
        self._learner.watch()

    def keep_interrupted(self, agreed: bool = False) -> str | None:
        """Write a checkpoint after Ctrl-C, and return a sentence (str) that says how to resume.

        Args:
            agreed: whether all workers call it after the same step; else several workers write no
                checkpoint.

        Returns:
            A sentence with the interrupted step. It also names the step of the newest checkpoint if
            Ctrl-C came inside a step, or if several workers do not call this after the same step.
            None before the run begins and after it is closed.
        """
        loop = self._loop
        if loop is None:
            return None
        if self._inside or not (agreed or self._workers.count == 1):
            where, step = ("inside", self._done) if self._inside else ("after", self._done - 1)
            return (
                f"interrupted {where} step {step:,}; the newest checkpoint is of step "
                f"{loop.kept:,}; run the same script to resume"
            )
        with suppress(UserError):  # the script made a change that is not allowed
            self.checkpoint()
        return f"interrupted at step {self._done:,}; run the same script to resume"

    def score(
        self,
        private_eval_data: Any,
        *,
        every: int,
        noise: float | None = None,
        value: Value | None = None,
    ) -> None:
        """Declare noisy scores of the model on held-out PRIVATE records, before the first step.

        Returns nothing. After each `every` steps, `step` returns a `StepReport` whose `score` is a
        float; after other steps it is None.

        Guarantee: a score is the records' values, each in [0, 1], added up with Gaussian noise, and
        divided by the public number of records. The plan counts all scores from the beginning. No
        step trains on these records, so a record is used by the steps or by the scores, and the
        guarantee is the worse of both. Neither costs more than a given `privacy.epsilon`.

        A loop may depend on scores, to choose a rate or when to stop. A score that cannot be
        repeated exactly after a crash is sampled again and counts as a new one: when all scores of
        the plan are used, later ones are None.

        Several workers score together: all call this with the same records, of which each evaluates
        a part, and all get the one noisy score, whose sum is that of one process.

        Args:
            private_eval_data: private records `(X, y)`, or anything that `dpdist.as_records` takes;
                an error if one of them is in the training's records, by keyed hashes of their
                inputs. If privacy has unit: user, they name their units, which have no record in
                data; a unit adds the mean of its records' values, and units are what is counted.
            every: number of steps from one score to the next; the first comes after the first
                `every` steps.
            noise: standard deviation of the noise on the sum, in records: the score of M records is
                off by noise / M. Default: the least that epsilon allows.
            value: function of the module and a batch of one record, `(inputs, targets)`, that
                returns its value, shape (1,), which is cut to [0, 1]; default: 1 if the largest
                output is that of the target's class, else 0. The module is in evaluation mode, so
                dropout is off. A record on which it fails counts 0.

        Raises:
            UserError: the run started without these scores, the noise is too small for epsilon, a
                record is also trained on, or the value is not valid; nothing was released.

        Source:
            McSherry, SIGMOD 2009 (parallel composition).

        Example:
            >>> import tempfile, torch, dpdist
            >>> inputs, labels = torch.randn(300, 4), torch.randint(2, (300,))
            >>> model = torch.nn.Linear(4, 2)
            >>> training = dpdist.PrivateTraining(
            ...     model, torch.optim.SGD(model.parameters(), lr=0.1),
            ...     (inputs[:200], labels[:200]), loss="cross-entropy",
            ...     privacy=dpdist.Privacy(epsilon=3, delta=1e-3),
            ...     batch_size=20, steps=4, folder=tempfile.mkdtemp() + "/run",
            ... )
            >>> training.score((inputs[200:], labels[200:]), every=2)
            >>> [training.step().score is None for _ in range(4)]
            [True, False, True, False]
            >>> training.guarantee.epsilon <= 3
            True
        """
        if self._hashed is not None:
            raise UserError(
                "score: must be left out with privacy.budget, which is charged only for steps; use "
                "one of the two"
            )
        with self._workers.sharing_errors():
            self._scored = self._declared_score(as_records(private_eval_data), value, every, noise)

    def _declared_score(
        self, records: Records, value: Value | None, every: int, noise: float | None
    ) -> PrivateScore:
        """Return the checked scores that `score` declares, and add them to the plan."""
        begun = self._recipe.score
        check_scored_targets(records, value)
        if self._recipe.user_unit is not None:
            records = scored_by_unit(self._recipe, self._records, records)
            if self._public is not None:
                check_units_apart(self._public, single_records(records))
        if self._scored is not None or (self._started and begun is None):
            raise UserError(
                "score: must be declared once, before the first step of a new run, whose plan "
                f"counts it from the beginning; start another one than {self.run.path}",
                see="how-to/own-loop.md#looking-at-private-records-at-a-price",
            )
        terms = declare(self._recipe, self.plan, len(records), value, every=every, noise=noise)
        if self._recipe.user_unit is None:
            check_scored_users(self._recipe, self._records, records)
        check_apart(records, {"data": self._records, "eval_data": self._public})
        scored = PrivateScore(records, terms, value, self._device, self._learner.spec.signature)
        scored.check(self.model)
        self._learner.check_form()
        scored.check_same(self._workers, code_digest_of(self.model, value))
        if begun is None:
            self._planned(with_score(self._recipe, terms, value is not None))
        if self._started:
            scored.open(self.run, self.plan, self._workers)
        return scored

    def close(self) -> None:
        """Close the run folder, so that another process can continue the run. Returns nothing."""
        self._started = True
        self._stack.close()
        if self._loop is not None and self._loop.monitor is not None:
            self._loop.monitor.metrics.close()
        self._loop = None

    def __enter__(self) -> PrivateTraining:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refuse_inside(self, call: str) -> None:
        if self._inside:
            raise UserError(
                f"{call}: must be called between two steps, not inside one or after an interrupted "
                "one: let a signal's handler set a flag, and call it after step()"
            )

    def _ready(self) -> None:
        """Prepare the next step. Raises UserError if the run cannot continue."""
        if (begun := self._recipe.score) is not None and self._scored is None:
            raise UserError(
                f"step: the run was begun with scores every {begun.every:,} steps on "
                f"{begun.records:,} held-out records: call score(...) with them first"
            )
        if self._inside and self._loop is not None and self._workers.count == 1:
            self.close()  # an interrupted step: continue from the newest checkpoint
            self._inside = False
            self._learner.check_form()
            self._begin()
            return
        if self._inside or (self._started and self._loop is None):
            raise UserError(
                f"step: this object of {self.run.path} was closed, or its last step interrupted; "
                "call PrivateTraining(...) again to continue"
            )
        self._learner.check_form()
        if not self._started:
            self._begin()
            mark_trained(self.model, self.run.path)

    def _look_between(self, call: str) -> bool:
        """Record what the script changed since the last step, before anything more is released.

        Args:
            call: name of the script's call, which must be the same on all workers: else some would
                wait for the others' sums.

        Returns:
            Whether a checkpoint is due, the same on all workers.
        """
        self._ready()
        assert self._loop is not None
        number, learner, ledger = self._done, self._learner, self._ledger
        changed = learner.changed()
        told = self._workers.check_same(
            {"step": str(number), "call": call, **learner.settings()},
            changed=changed,
            due=self._loop.is_due,
            shown=self._private_metrics,
        )
        if any(each["shown"] for each in told):
            if ledger is not None:
                ledger.note_shown(number)
            self._workers.agree()  # worker 0 has written
        if any(each["changed"] for each in told):
            parts = {"changes between steps": ", ".join(changed), **learner.digests("parameters")}
            self._workers.check_same(parts)
            if ledger is not None:
                ledger.note_changes(changed)
            self._workers.agree()  # worker 0 has written
            if not self._warned and {"parameters", "optimizer state"} & {*changed}:
                self._warned = True
                warn(
                    "the model or the optimizer's state changed between two steps. Epsilon does "
                    "not cover it if private records were used, as by loss.backward() and "
                    "optimizer.step(): leave these calls out, since step() replaces them. The card "
                    "states 'assumed: post-processing'"
                )
        return bool(told[0]["due"])

    def _look_after(self) -> None:
        """Warn if the script changed the model of a finished run."""
        ended = self._started and self._loop is None and not self.remaining_steps
        if ended and not self._warned and "parameters" in self._learner.changed():
            self._warned = True
            warn(
                "the model changed after the last step. The guarantee is that of the weights in "
                f"{self.run.model_folder}, and does not cover this model if private records were "
                "used, as by loss.backward() and optimizer.step(): leave these calls out"
            )

    def _finish(self) -> None:
        """Save the model, write the summary, and close the run."""
        assert self._loop is not None
        with self._workers.sharing_errors():
            self._save()
            self._loop.finish()
            self.close()
            self._evaluate_public()
            if self._workers.first and (doubts := result_doubts(self.run, self._learner.growth)):
                warn(f"{self.run.path}: {'; '.join(doubts)}")
            if self.trackers and self._workers.first:
                track_script(self.run, self.trackers, self._history.columns(self._done))


def _check_same_start(training: PrivateTraining) -> None:
    """Raise UserError, on all workers, unless they start with the same script."""
    learner, workers, device = training._learner, training._workers, training._device
    if workers.count == 1:
        return
    sections = training.recipe.model_dump(mode="json", exclude={"resources"})
    told = {f"{name} settings": json.dumps(each) for name, each in sections.items()}
    workers.reducer_on(device)
    code = code_digest_of(training.model, training._loss)
    told |= {"data": str(len(training.records)), "code": code, **learner.settings()}
    told["device"] = device.type
    workers.check_same({**told, **learner.digests("model")})


def _so_far(training: PrivateTraining) -> Callable[[], Guarantee]:
    """Return a function that computes the guarantee of the steps up to the current one."""
    plan, path, last = training.plan, training.run.ledger, training.steps_taken
    epoch, before = training._epoch, training._before

    def found() -> Guarantee:
        counts, ledger = [0 for _ in plan.step_counts()], Ledger.read(path)
        for of in range(epoch + 1):
            for step in ledger.released_steps(of):
                # Later steps count if an earlier process released them.
                counts[plan.training_phase_index(step)] += (
                    of < epoch or step < last or step in before
                )
        return training.recipe.guarantee_of(plan, plan.executed_phases(counts))

    return found


def _run_folder(folder: str | Path) -> RunFolder:
    """Return the folder of a run, absolute. Raises UserError for one of a search."""
    found = RunFolder(Path(folder).resolve())
    if found.search_recipe_file.exists() or not (IN_SEARCH.get() or found.parent_run is None):
        raise UserError(
            f"folder: {found.path}: belongs to a search, whose epsilon covers it as a whole; run "
            "the search again to continue it, or give another folder"
        )
    return found


def _stages(began_with: Any) -> list[Stage]:
    """Return the stages of the statistics, releases and runs that a script starts with."""
    given: Any = began_with if isinstance(began_with, list | tuple) else [began_with]
    stages = list[Stage]()
    for path in (Path(getattr(each, "path", each)) for each in given if each is not None):
        if (bought := read_statistics_stage(path)) is not None:
            stages.append(bought)
        elif (card := card_of_release(path)) is not None:
            stages.append(stage_of_card(card, path.name, [str(path.resolve())]))
        else:
            stages.append(read_stage(open_run(str(path), Path("runs"))))
    return stages


def _records_key(run_key: bytes) -> bytes:
    """Return the key of the fingerprint of a run's records."""
    return derive_key(run_key, "fingerprint of a script's records")


def _take_over(path: Path, training: PrivateTraining) -> None:
    """Close an older object of this process that trains the same run, as in a notebook."""
    older = _open.get(path, lambda: None)()
    if older is not None and older is not training:
        older.close()
    _open[path] = weakref.ref(training)


# --- a whole training in one call -------------------------------------------------------------


def fit(
    model: nn.Module,
    data: Any,
    *,
    loss: Any = "cross-entropy",
    optimizer: str | Callable[..., Optimizer] = "sgd",
    learning_rate: float,
    privacy: PrivacyRecipe | Mapping[str, Any],
    batch_size: int,
    steps: int | None = None,
    epochs: int | None = None,
    folder: str | Path,
    **options: Any,
) -> RunFolder:
    """Train a module privately to the end, and return its run folder.

    Guarantee: the trained weights and everything else that the run released are (epsilon,
    delta)-differentially private, as `PrivateTraining(...).guarantee` states; `fit` builds a
    `PrivateTraining` and takes all of its steps, with nothing in between.

    Args:
        model: the module itself, as in `PrivateTraining`; its trainable parameters are given to the
            optimizer.
        data: the private records: `(X, y)`, or anything that `dpdist.as_records` takes.
        loss: a name, such as "cross-entropy"; a criterion object, such as
            `torch.nn.CrossEntropyLoss()`; or a callable that returns one value per record.
        optimizer: "sgd", "adam" or "adamw", or a callable of (parameters, lr=...).
        learning_rate: learning rate of the optimizer, constant.
        privacy: a `dpdist.Privacy`, or its fields as a dict.
        batch_size: expected number of records in a step; the real one is random.
        steps: number of steps; give this or epochs.
        epochs: passes over the data, in expectation; give this or steps.
        folder: folder of the run, created if it does not exist; the same call continues it.
        options: further options of `PrivateTraining`, such as `eval_data` and `factory`.

    Returns:
        The `RunFolder` of the trained run, for `dpdist.load_results`, `dpdist.certify` and
        `dpdist.write_release`. If the run was finished before, nothing is trained again.

    Raises:
        UserError: the optimizer's name is unknown, `PrivateTraining` does not accept an argument,
            or the training diverged.

    Source:
        Abadi et al., CCS 2016 (DP-SGD).

    Example:
        >>> import tempfile, torch, dpdist
        >>> inputs, labels = torch.randn(200, 4), torch.randint(2, (200,))
        >>> run = dpdist.fit(
        ...     torch.nn.Linear(4, 2), (inputs, labels), learning_rate=0.1,
        ...     privacy=dpdist.Privacy(noise_multiplier=1.0, delta=1e-3),
        ...     batch_size=20, steps=3, folder=tempfile.mkdtemp() + "/run",
        ... )
        >>> run.model_folder.is_dir()
        True
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    training = PrivateTraining(
        model,
        optimizer_of(optimizer)(trained, lr=learning_rate),
        data,
        loss=loss,
        privacy=privacy,
        batch_size=batch_size,
        steps=steps,
        epochs=epochs,
        folder=folder,
        **options,
    )
    return training.run_all()
