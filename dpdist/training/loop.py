"""The training loop: one for recipes, scripts, the trainers of other libraries, and audits.

`take` is a step: a private release by `PrivateStep`, one update of the learner, and a check that
its numbers are finite. `save` writes a checkpoint between two steps, and `finish` saves the model
and writes the summary. The caller decides when: the worker of a recipe by its clock and by
interruptions (`dpdist.training.worker`), a script by its own lines (`dpdist.PrivateTraining`).

The order of effects in a step, on the worker with the ledger: sum, permit, ledger, noise, update,
check, metrics. The others get the same noisy sum and write nothing. What is on the ledger counts
in epsilon whatever happens after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

from dpdist import models
from dpdist.core.errors import UserError
from dpdist.core.fields import SCREENED
from dpdist.models import ModelSpec
from dpdist.privacy.plan import StepPlan
from dpdist.training import checkpoint, monitoring
from dpdist.training.job import TrainJob
from dpdist.training.model_setup import measured_rounding
from dpdist.training.monitoring import Monitor, StepMetrics
from dpdist.training.private_step import PrivateStep, charge_rest
from dpdist.training.trained_weights import write_trained


class TrainingDiverged(UserError):
    """The numbers of a training are not finite any more."""


class Learner(Protocol):
    """A model and its optimizer, and the state of both that a checkpoint keeps."""

    @property
    def model(self) -> nn.Module:
        """Return the module that is trained."""

    def release(
        self, step: PrivateStep, number: int, step_plan: StepPlan, flag: bool
    ) -> tuple[Tensor, StepMetrics | None, bool]:
        """Return what a step releases, the metrics of its records, and any worker's flag."""

    def update(self, released: Tensor, number: int) -> None:
        """Change the parameters by what was released, and by nothing else."""

    def not_finite(self, number: int, last: bool) -> str:
        """Return which numbers are not finite after a step, with a verb; "" if all are."""

    def check_same(self, done: int) -> None:
        """Raise an error on all workers unless they have the same parameters."""

    def state(self, done: int) -> checkpoint.TrainState:
        """Return the state that a checkpoint after `done` steps keeps."""

    def finished(self, whole: bool) -> ModelSpec:
        """Put the model into its published form, and return its description.

        whole: whether the plan is finished.
        """


class Loop:
    """Take the steps of a plan, from a checkpoint on.

    Args:
        job: folder, plan and recipe of the run.
        step: releases the gradients. Only worker 0's has the ledger, and only worker 0 writes.
        learner: is changed by the releases.
        start: number of the first step.
        last: step before which this process ends; default: the end of the plan.
        examples: returns public or invented examples, on which rounding is measured; None: rounding
            is not measured.
        monitor: of an earlier loop of this process, which continues.

    Attributes:
        done: number of steps that the model was trained by.
        kept: number of steps before the newest checkpoint.
    """

    def __init__(
        self,
        job: TrainJob,
        step: PrivateStep,
        learner: Learner,
        *,
        start: int,
        last: int | None = None,
        examples: Callable[[], tuple[Any, Tensor]] | None = None,
        monitor: Monitor | None = None,
    ) -> None:
        self.job, self.step, self.learner, self.plan = job, step, learner, job.plan
        self.start = self.done = self.kept = start
        self.last = self.plan.steps if last is None else min(last, self.plan.steps)
        self._examples, self.monitor = examples, monitor
        if step.ledger is not None:
            self.monitor = monitor or Monitor(job, self.plan.steps, start)
            again, reducer = step.ledger.count_repeated_steps(start), step.reducer
            group = monitoring.WorkerGroup(
                start, reducer.world_size, reducer.backend, again, self._independence()
            )
            monitoring.append_group(job.folder, group)
        self._saved = time.monotonic()

    def _independence(self) -> str:
        """Return why records count as independent; "" if no noisy step depends on it."""
        if not self.plan.step(0).noise_multiplier:
            return ""
        steps = self.job.recipe.method.capabilities.takes_gradient_steps
        return self.step.engine.independence if steps else SCREENED

    @property
    def is_due(self) -> bool:
        """Return whether a checkpoint is due by this worker's clock."""
        return time.monotonic() - self._saved > self.job.recipe.resources.checkpoint_seconds

    def take(self, flag: bool = False) -> tuple[StepMetrics | None, bool]:
        """Take the next step.

        Args:
            flag: a bool for the other workers to see.

        Returns:
            The metrics of the step's records, PRIVATE, and whether any worker's flag was True.

        Raises:
            TrainingDiverged: numbers are not finite; the release is on the ledger.
            ReplayConflict: the step was announced with a different sum; nothing was released.
        """
        number, learner = self.done, self.learner
        released, seen, flagged = learner.release(self.step, number, self.plan.step(number), flag)
        learner.update(released, number)
        if what := learner.not_finite(number, number + 1 == self.last):
            # No worker raises before worker 0 has the step on its ledger.
            self.step.reducer.all_gather_text("")
            raise TrainingDiverged(
                f"training diverged: after step {number + 1:,} {what} not finite. The steps so far "
                "are counted in epsilon; lower the learning rate (or privacy.clip_norm) and start "
                "a new run with a newly built model"
            )
        if self.monitor is not None and seen is not None:
            self.monitor.record_step(number, seen)
        self.done = number + 1
        return seen, flagged

    def save(self) -> None:
        """Write a checkpoint, unless the workers' parameters differ."""
        self.learner.check_same(self.done)
        if self.step.ledger is not None:
            state = self.learner.state(self.done)
            checkpoint.save(self.job.folder.checkpoints, state, self.step.ledger.anchor)
        self._saved, self.kept = time.monotonic(), self.done

    def pause(self) -> None:
        """Close this process's part of a training that another process continues."""
        if self.monitor is not None:
            self.monitor.pause(self.done)

    def finish(self) -> None:
        """Save the model; at the end of the plan write the summary, and charge steps not taken."""
        frozen = sum(p.numel() for p in self.learner.model.parameters() if not p.requires_grad)
        whole = self.last == self.plan.steps
        spec, ledger, folder = self.learner.finished(whole), self.step.ledger, self.job.folder
        if self.monitor is None or ledger is None:
            return
        if whole and self.done < self.plan.steps:
            charge_rest(ledger, self.plan.steps)
        models.save(self.learner.model, spec, folder.model_folder)
        write_trained(self.learner.model, folder.model_folder)
        if not whole:
            return self.pause()
        rounding = {}
        if self._examples is not None:
            largest = self.step.shards.largest_shard
            rounding = measured_rounding(self.step.engine, self._examples, self.plan, largest)
        made = {
            "frozen_parameters": frozen,
            "steps_taken": self.done if self.done < self.plan.steps else 0,
            "rounding": rounding,
        }
        told = {name: value for name, value in made.items() if value}
        self.monitor.finish(ledger, fallback_layers=self.step.engine.fallback_layers, **told)
