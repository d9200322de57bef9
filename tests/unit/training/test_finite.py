"""What can be known is known before the first release; a training without numbers stops."""

from __future__ import annotations

import math
import re
import time

import pytest
import torch
from support.training import make, prepare, prepare_job, run_thread_workers
from torch import nn

from dpdist.core.errors import UserError
from dpdist.privacy.ledger import Ledger
from dpdist.training import private_step, worker
from dpdist.training.loop import TrainingDiverged

HERE = __name__


class Broken(nn.Module):
    """Logits, or only their gradient, that are not finite."""

    def __init__(self, shape: tuple[int, ...], classes: int, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(math.prod(shape), classes), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.layer(x.flatten(1))
        if self.how == "logits":
            return logits + (logits - logits) / (logits - logits)
        if self.how == "gradient":  # d sqrt(y)/dy at y = 0
            return logits + (logits - logits.detach()).abs().sqrt()
        return torch.exp(logits)


def broken(shape, classes, how):
    return Broken(shape, classes, how)


@pytest.mark.parametrize(
    ("how", "complaint"),
    [
        ("logits", "logits that are not finite for test input 0, before any training"),
        ("gradient", "gradients that are not finite for each of the first 8"),
    ],
)
def test_a_model_that_computes_no_numbers_is_refused_before_anything(tmp_path, how, complaint):
    recipe, folder = make(tmp_path, model={"name": f"{HERE}:broken", "options": {"how": how}})
    with pytest.raises(UserError, match=complaint):
        prepare(recipe, folder, "test")
    assert list(tmp_path.iterdir()) == []


def diverging(tmp_path):
    return prepare_job(
        tmp_path,
        model={"name": f"{HERE}:broken", "options": {"how": "overflow"}},
        training__learning_rate=1e6,
    )


def test_nobody_says_that_it_diverged_before_the_ledger_has_the_step(tmp_path, monkeypatch):
    job, charged = diverging(tmp_path), []

    def slow(*args, announce=private_step._announce):
        time.sleep(0.3)
        announce(*args)

    def work(reducer):
        try:
            worker.run_training(job, reducer)
        except TrainingDiverged as stop:
            step = int(re.findall(r"after step (\d+)", str(stop))[0])
            charged.append(len(Ledger.read(job.folder.ledger).release_counts) >= step)
            raise

    monkeypatch.setattr(private_step, "_announce", slow)
    with pytest.raises(TrainingDiverged):
        run_thread_workers(2, work)
    assert charged and all(charged)
    assert not job.folder.training_summary.exists() and not job.folder.model_folder.exists()
