"""Whether a training still computes numbers, asked of nothing private.

That a run stops is seen by whoever watches it. So the question is put to the parameters, which the
ledger has paid for, and to the model's answers on public test inputs: stopping is post-processing.
Losses and gradients of private records are never asked; records whose gradient is not finite add
nothing to the sum (`dpdist.gradients`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dpdist.base.errors import UserError
from dpdist.data import Dataset
from dpdist.gradients.task import cross_entropy

_PROBE = 8  # test inputs
_EVERY = 25  # steps


def probe(test: Dataset) -> tuple[Tensor, Tensor]:
    """Inputs and labels of the first few test records."""
    rows = slice(0, _PROBE)
    return test.batch(rows), test.targets(rows)


def check_start(model: nn.Module, inputs: Tensor, labels: Tensor, name: str) -> None:
    """Raise UserError unless the untrained model gives finite logits for public test inputs, and
    a finite gradient for one of them at least."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    finite = False
    for row in range(len(labels)):
        try:
            with torch.enable_grad():
                outputs = model(inputs[row : row + 1])
                loss = cross_entropy(outputs, labels[row : row + 1])[0]
                gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        except RuntimeError as error:  # whatever a user's module does
            said = (str(error).splitlines() or [""])[0]
            raise UserError(f"model {name!r} fails on the first test inputs: {said}") from error
        if not torch.isfinite(outputs).all():
            raise UserError(
                f"model {name!r} gives logits that are not finite for test input {row}, before any "
                "training: mend the model, its model.mean and model.std, or its initial weights"
            )
        finite = finite or all(g is None or bool(torch.isfinite(g).all()) for g in gradients)
    if not finite:
        raise UserError(
            f"model {name!r} has gradients that are not finite for each of the first {len(labels)} "
            "test inputs, before any training: no record could train it"
        )


class Diverged(UserError):
    """A training whose numbers are no numbers any more."""


class Divergence:
    """Stops a training whose parameters, or answers to public inputs, are no numbers any more."""

    def __init__(self, model: nn.Module, inputs: Tensor) -> None:
        self._model, self._inputs = model, inputs

    def check(self, flat: Tensor, step: int, last: bool) -> None:
        """After the update of `step`; flat: all parameters. Raises Diverged."""
        what = ""
        if not torch.stack(flat.aminmax()).isfinite().all():  # NaN is both; no vector is made
            what = "the parameters are"
        elif last or step % _EVERY == 0:
            with torch.no_grad():
                if not torch.isfinite(self._model(self._inputs)).all():
                    what = "the logits for public test inputs are"
        if what:
            raise Diverged(
                f"training diverged: after step {step + 1:,} {what} not finite. The steps so far "
                "are charged; lower training.learning_rate (or privacy.clip_norm) and begin a new "
                "run under another --name"
            )
