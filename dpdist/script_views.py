"""What a script may look at of its own training, show and keep, beside the steps.

Guarantee: everything here is post-processing of what steps released, or of public records.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from dpdist.core.errors import UserError
from dpdist.data.adapters import as_records
from dpdist.data.protocol import Records
from dpdist.privacy.guarantee import Guarantee
from dpdist.privacy.plan import PrivacyPlan
from dpdist.reports.plots import plot_history
from dpdist.runs.folder import RunFolder
from dpdist.training.collectives import Workers
from dpdist.training.loop import Loop
from dpdist.training.script_history import (
    History,
    Metric,
    as_table,
    check_apart,
    evaluate_public,
    named_metric,
)
from dpdist.training.script_learner import ScriptLearner


class PublicViews:
    """The part of `dpdist.PrivateTraining` that takes no step.

    Attributes:
        model: the module that is trained.
        run: folder of the run.
        plan: plan of the run.
    """

    model: nn.Module
    run: RunFolder
    plan: PrivacyPlan
    _done: int
    _inside: bool
    _loop: Loop | None
    _workers: Workers
    _learner: ScriptLearner
    _records: Records
    _apart = ""
    _later = False  # the last step leaves the end to `finish`

    @property
    def guarantee(self) -> Guarantee:
        """Return the `Guarantee` of everything that was released so far: `epsilon` at `delta`."""
        raise NotImplementedError

    def checkpoint(self) -> None:
        """Keep the training as it is between two steps. Returns nothing."""
        raise NotImplementedError

    @property
    def history(self) -> Any:
        """Return the released values of all steps so far.

        Returns:
            A pandas DataFrame with one row per step; without pandas a dict of lists. Its columns
            are step, learning_rate and noisy_norm; score, if you declared scores; and eval_NAME for
            each metric of `evaluate`.
        """
        return as_table(History(self.run.history).columns(self._done))

    def evaluate(self, eval_data: Any, *, metric: Metric = "accuracy") -> float:
        """Return a metric of the current model on PUBLIC records, and add it to the history.

        Guarantee: post-processing of what was released; it does not affect epsilon. A record that
        is also in `data` is not supported.

        Args:
            eval_data: public records `(X, y)`, or anything that `dpdist.as_records` takes.
            metric: "accuracy", "auc", or a function of outputs and targets, two tensors of all
                records, that returns a number.

        Returns:
            The metric, a float: the accuracy or the AUC in [0, 1], or what your function returns.
            The model is in evaluation mode meanwhile.

        Raises:
            UserError: a record is also in `data`, targets are missing, or the metric is unknown.

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
        name, function = named_metric(metric)
        public = as_records(eval_data, name="eval_data")
        known = public.keyed_fingerprint(bytes(32))
        if known != self._apart:  # the last ones that were compared with the private records
            check_apart(public, self._records)
            self._apart = known
        found = evaluate_public(self.model, public, self._learner.spec.signature, function)
        if self._done:
            self._note(**{f"eval_{name}": found})
        return found

    def plot(self, *columns: str, ax: Any = None) -> Any:
        """Plot columns of the history against the steps, and return the matplotlib axes.

        Args:
            columns: names of columns, or "epsilon" for the plan's; default: "noisy_norm".
            ax: matplotlib axes to draw into; default: the current ones.

        Returns:
            The matplotlib `Axes` with one line per column.

        Raises:
            UserError: there is no such column.
        """
        told = History(self.run.history).columns(self._done)
        return plot_history(told, columns or ("noisy_norm",), self.plan, ax)

    def _note(self, **values: Any) -> None:
        """Add public values of the last step to the history."""
        if self._workers.first:
            there = {name: value for name, value in values.items() if value is not None}
            History(self.run.history).add(step=self._done - 1, **there)

    @contextmanager
    def finishing_later(self) -> Iterator[None]:
        """Leave the end of the training to `finish`, also after the last step in the block.

        A context manager; it yields nothing.
        """
        self._later = True
        try:
            yield
        finally:
            self._later = False

    def put_back(self, weights: Mapping[str, Tensor]) -> None:
        """Restore the parameters of an earlier step, chosen only by PUBLIC records.

        That is post-processing of what was released, so the card needs no further assumption.
        Returns nothing.

        Args:
            weights: the values by name of the parameter; other parameters stay as they are.
        """
        loop, changed = self._loop, self._learner.changed()
        if changed and loop is not None and loop.step.ledger is not None:
            loop.step.ledger.note_changes(changed)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if name in weights:
                    parameter.copy_(weights[name])
        self._learner.watch()

    def keep_interrupted(self, agreed: bool = False) -> str | None:
        """Write a checkpoint after Ctrl-C, and return where the run resumes.

        Args:
            agreed: all workers call it after the same step; otherwise several write none.

        Returns:
            A sentence (str) with the step at which the same script resumes; None before the first
            step.
        """
        loop = self._loop
        if loop is None:
            return None
        if self._inside or not (agreed or self._workers.count == 1):
            place = (
                f"{'inside' if self._inside else 'after'} step {self._done - (not self._inside):,}"
            )
            again = f"the newest checkpoint is of step {loop.kept:,}"
            return f"interrupted {place}; {again}; run the same script to resume"
        with suppress(UserError):  # the script changed what it must not: the last one stays
            self.checkpoint()
        return f"interrupted at step {self._done:,}; run the same script to resume"
