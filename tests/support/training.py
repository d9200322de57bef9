"""The training loop without Ray: workers are threads that meet in a barrier.

The loop is the one Ray Train runs; only the all-reduce is replaced.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import Recipe, parse_recipe
from dpdist.training import private_step, worker
from dpdist.training.collectives import Reducer
from dpdist.training.job import TrainJob, prepare
from support.networks import saved_parameters

KEY = "5a" * 32


class ThreadReducer(Reducer):
    """Reducer whose workers are threads of this process."""

    def __init__(self, rank: int, world_size: int, meeting: dict[str, Any]) -> None:
        super().__init__(rank, world_size, torch.device("cpu"))
        self.meeting = meeting

    def _meet(self, value: Any) -> list[Any]:
        box, barrier = self.meeting["box"], self.meeting["barrier"]
        box[self.rank] = value
        barrier.wait()
        values = [box[r] for r in sorted(box)]
        barrier.wait()
        return values

    def all_reduce(self, buffer: torch.Tensor) -> None:
        buffer.copy_(torch.stack(self._meet(buffer.clone())).sum(0))

    def broadcast_int(self, value: int) -> int:
        return self._meet(value)[0]

    def all_gather_text(self, text: str) -> list[str]:
        return self._meet(text)


def run_thread_workers(
    world_size: int, work: Callable[[ThreadReducer], None], reducer: type = ThreadReducer
) -> None:
    """Do `work` with so many thread workers; raises the first error that is not a consequence."""
    meeting = {"box": {}, "barrier": threading.Barrier(world_size)}

    def one(rank: int) -> None:
        threading.current_thread().name = f"worker {rank}"
        try:
            work(reducer(rank, world_size, meeting))
        except BaseException:
            meeting["barrier"].abort()
            raise

    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(one, rank) for rank in range(world_size)]
        errors = [future.exception() for future in futures]
    real = [e for e in errors if e and not isinstance(e, threading.BrokenBarrierError)]
    if real:
        raise real[0]


def execute(job: TrainJob, world_size: int = 1, until: int | None = None) -> None:
    """Run a prepared job with so many thread workers."""
    run_thread_workers(world_size, lambda reducer: worker.run_training(job, reducer, until))


def make(tmp: Path, name: str = "run", **overrides: Any) -> tuple[Recipe, RunFolder]:
    """A small recipe on the digits, with fields replaced (section__field), and its folder."""
    raw: dict[str, Any] = {
        "name": "x",
        "data": {"name": "digits", "max_train": 400},
        "model": {"name": "small-cnn", "options": {"width": 4}},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-4, "run_key": KEY},
        "training": {"batch_size": 40, "steps": 12, "learning_rate": 0.5, "momentum": 0.5},
        "resources": {"checkpoint_seconds": 1e-6},
    }
    for key, value in overrides.items():
        section, _, field = key.partition("__")
        if field:
            raw[section][field] = value
        else:
            raw[section] = value
    recipe = parse_recipe(raw, "test")
    return recipe, RunFolder(tmp / name)


def prepare_job(tmp: Path, name: str = "run", **overrides: Any) -> TrainJob:
    """The recipe of `make`, prepared."""
    recipe, folder = make(tmp, name, **overrides)
    return prepare(recipe, folder, "test")


def train(recipe: Recipe, folder: RunFolder, world_size: int = 1) -> torch.Tensor:
    """Train with `world_size` thread workers; returns the parameters as one vector."""
    execute(prepare(recipe, folder, "test"), world_size)
    return parameters(folder)


def parameters(folder: RunFolder) -> torch.Tensor:
    """The trained model of a run, as one vector."""
    return saved_parameters(folder.model_folder)


def release_ids(folder: RunFolder) -> list[str]:
    """The ids of the releases in a run's ledger: they name the bits of every sum."""
    records = [json.loads(line)["record"] for line in folder.ledger.read_text().splitlines()]
    return [record["id"] for record in records if record["kind"] == "release"]


class Interrupt(Exception):
    """A crash on purpose."""


def train_and_crash(
    recipe: Recipe, folder: RunFolder, patch: pytest.MonkeyPatch, crash_step: int, workers: int = 1
) -> None:
    """Train and let worker 0 die right after its ledger entry of step `crash_step`, counted from
    where the run goes on: the worst moment."""
    with patch.context() as inner:
        real = private_step.add_noise
        state = {"calls": 0}

        def dies(*args: Any) -> Any:
            if threading.current_thread().name == "worker 0":  # others may be here before its entry
                state["calls"] += 1
                if state["calls"] == crash_step + 1:
                    raise Interrupt
            return real(*args)

        inner.setattr(private_step, "add_noise", dies)
        with pytest.raises(Interrupt):
            train(recipe, folder, workers)
