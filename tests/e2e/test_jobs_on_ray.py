"""Jobs on Ray itself, once each. All other tests of jobs and commands run in one process
(`support/local_execution.py`): here both give the same rows, and a killed driver loses nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from support import certificates
from support.local_execution import run_without_ray
from support.training import make

from dpdist import models, pipeline
from dpdist.audits.membership import Membership
from dpdist.audits.target import target_of_recipe
from dpdist.audits.trainings import ManyRunsJob
from dpdist.certification import job
from dpdist.certification.cohen import Cohen
from dpdist.cluster.resumable_job import run_job as run_job
from dpdist.config.sections import ManyRunsAudit
from dpdist.runs.folder import RunFolder

PATHS = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
SETTINGS = Cohen(sigma=0.25, n0=10, n=60, batch=10, seed="5")


class Images(certificates.Data):
    """Four, of a size that torchvision takes."""

    def __init__(self) -> None:
        super().__init__(count=4)

    def batch(self, indices: np.ndarray | slice) -> torch.Tensor:
        images = np.random.default_rng(0).random((self.count, 3, 32, 32), dtype=np.float32)
        return torch.from_numpy(images[indices])


@pytest.fixture(scope="module")
def ray_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """As a command starts it."""
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    with pipeline.run_session(folder, executor="ray"):
        yield
    assert folder.log.exists()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of torchvision: only what mends torchvision in every worker lets an actor take it."""
    folder = tmp_path_factory.mktemp("model")
    spec = models.ModelSpec("torchvision", (3, 32, 32), 3, {"architecture": "squeezenet1_1"})
    models.save(models.initialize(spec, 0), spec, folder)
    return folder


@contextmanager
def here() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        run_without_ray(patch)
        yield


def test_a_killed_driver_loses_nothing(ray_session: None, model: Path, tmp_path: Path) -> None:
    """Certificates by a driver that is killed, and the rest by another, with two actors."""
    script = textwrap.dedent(
        f"""
        import sys; sys.path[:0] = {PATHS!r}
        import time
        from pathlib import Path
        from test_jobs_on_ray import Images, SETTINGS
        from dpdist import pipeline
        from support import certificates
        from dpdist.runs.folder import RunFolder
        with pipeline.run_session(RunFolder(Path({str(tmp_path / "run")!r})), executor="ray"):
            certificates.certify(
                Path({str(model)!r}), Images(), SETTINGS, Path({str(tmp_path)!r}),
                actors=1, chunk_seconds=1e-3, progress=lambda *_: time.sleep(0.05),
            )
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    journal = tmp_path / "journal.jsonl"
    deadline = time.monotonic() + 240  # of 300; starting Ray takes a minute on a busy machine
    while not (journal.exists() and journal.read_bytes().count(b"\n") >= 6):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    lines = journal.read_bytes().count(b"\n")
    assert not (tmp_path / job.TABLE).exists()
    found = certificates.certify(model, Images(), SETTINGS, tmp_path, actors=2, chunk_seconds=1e-3)
    assert lines < journal.read_bytes().count(b"\n") <= 1 + 4 * 7  # one says whose they are
    with here():
        reference = certificates.certify(model, Images(), SETTINGS, tmp_path / "here")
    assert found.to_pylist() == reference.to_pylist() and found.num_rows == 4


def test_trainings_on_ray_are_those_of_one_process(ray_session: None, tmp_path: Path) -> None:
    """Shadow models, and many at once with a canary and without."""
    recipe, _ = make(
        tmp_path, data__max_train=60, model="linear", training__batch_size=20, training__steps=2,
        privacy__run_key=None,
    )  # fmt: skip
    folder, bank = RunFolder(tmp_path / "run"), Membership(game="halves", models=2, seed="5b" * 32)
    folder.create_or_open(recipe)
    retraining = ManyRunsJob(
        ManyRunsAudit(trainings=8, seed="5b" * 32), target_of_recipe(recipe, "test")
    )
    found = [
        pipeline.evaluation_stage(recipe, folder, bank, actors=1).read_bytes(),
        run_job(retraining, tmp_path / "many", actors=1).to_pylist(),
    ]
    with here():
        again = pipeline.evaluation_stage(recipe, folder, bank, tmp_path / "bank").read_bytes()
        assert found == [again, run_job(retraining, tmp_path / "again").to_pylist()]
