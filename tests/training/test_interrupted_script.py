"""Ctrl-C in a script or a notebook: one line, a checkpoint, and a run that resumes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training.own_loops import WIDTH, begin

import dpdist
from dpdist.core.script_errors import TrainingInterrupted, _OneLine, unfinished
from dpdist.training.checkpoint import load_latest

SCRIPT = """
import os, sys, time
import torch, dpdist

inputs = torch.rand(200, 4, generator=torch.Generator().manual_seed(0))
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
training = dpdist.PrivateTraining(
    model, torch.optim.SGD(model.parameters(), lr=0.1), (inputs, (inputs[:, 0] > 0.5).long()),
    loss="cross-entropy", privacy=dict(noise_multiplier=1.0, delta=1e-3), batch_size=20, steps=6,
    folder="run",
)
for report in training:
    print("step", report.step, flush=True)
    if report.step == 2 and sys.argv[1:] == ["wait"]:
        time.sleep(60)
    if report.step == 2 and sys.argv[1:] == ["kill"]:
        os.kill(os.getpid(), 9)
"""


def _script(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, "train.py", *arguments], cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        # A shell's background jobs, and what they start, ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


@pytest.mark.e2e
def test_a_killed_or_interrupted_script_resumes(tmp_path):
    """Killed, it names the steps that it replays; interrupted, it repeats none."""
    _script(tmp_path, "kill").communicate(timeout=60)
    process = _script(tmp_path, "wait")
    assert process.stdout is not None and process.stdout.readline() == "step 0\n"
    while "step 2" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.splitlines() == [
        "resuming at step 0, replaying 3 steps already counted in epsilon",
        "interrupted at step 3; run the same script to resume",
    ]
    process = _script(tmp_path)
    out, said = process.communicate(timeout=60)
    assert process.returncode == 0 and out.startswith("step 3\n")
    assert said == "resuming at step 3\n"


@pytest.mark.parametrize("kind", [dpdist.UserError, dpdist.ClusterError, TypeError])
def test_a_user_s_error_has_no_traceback(kind, capsys):
    before: list[Any] = []
    try:
        raise kind("optimizer: must be this\nloss: must be that")
    except kind as error:
        _OneLine(lambda *given: before.append(given))(kind, error, error.__traceback__)
    said = capsys.readouterr().err.splitlines()
    if kind is TypeError:
        assert before and not said
    else:
        where = [line.removesuffix(end) for line, end in zip(said, (
            "optimizer: must be this", "loss: must be that"), strict=True)]  # fmt: skip
        mine = kind is dpdist.UserError  # the script's own line is named
        assert not before and all(each.startswith("test_interrupted_") == mine for each in where)


class _SlowOnce(nn.Linear):
    """It gets Ctrl-C in a forward pass."""

    at = -1

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and _SlowOnce.at == 0:
            signal.raise_signal(signal.SIGINT)
            _SlowOnce.at = -1
        return super().forward(inputs)


def test_an_interrupted_step_leaves_a_training_that_continues(tmp_path):
    training = begin(tmp_path / "run", _SlowOnce(WIDTH, 2), steps=4)
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        training.step()
        _SlowOnce.at = 0
        with pytest.raises(TrainingInterrupted, match="interrupted at step 2"):
            training.step()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    state = load_latest(training.run.checkpoints)
    assert state is not None and state.step == 2 and training in unfinished
    assert training.run_all().training_summary.exists()
    assert training.keep_interrupted() is None
