"""Answers are given on the run's own ledger, whole, and each with noise of its own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.training import make

from dpdist.cluster.executor import LocalExecutor
from dpdist.core.errors import UserError
from dpdist.core.files import write_json
from dpdist.methods.private_prediction import PrivatePredictionExecution
from dpdist.privacy.ledger import JournalError, Ledger
from dpdist.privacy.phases import NoisyVotes
from dpdist.privacy.plan import PrivacyPlan
from dpdist.runs.folder import RunFolder
from dpdist.training.ensembles import QueryOracle, release_once
from dpdist.training.job import prepare
from dpdist.training.trainer import fit


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run with a fixed key whose models never leave, and that may give six answers."""
    before = torch.get_num_threads()
    place = tmp_path_factory.mktemp("trained")
    recipe, folder = make(
        place, data={"name": "digits", "fraction": 0.1}, model="linear",
        method={"name": "private-prediction", "teachers": 2, "logit_bound": 2.0, "queries": 6},
        training={"batch_size": 20, "steps": 2, "learning_rate": 0.5},
    )  # fmt: skip
    fit(prepare(recipe, folder, "test"), LocalExecutor())
    yield folder.path
    torch.set_num_threads(before)


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> RunFolder:
    return RunFolder(Path(shutil.copytree(trained, tmp_path / "run")))


def inputs(count: int) -> torch.Tensor:
    return torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def test_no_answer_is_given_on_a_ledger_that_lost_what_was_given(run: RunFolder) -> None:
    """Lost after the run was opened: made anew, it would pay for all answers again."""
    recipe = run.read_recipe()
    first = QueryOracle(recipe, run)
    first(inputs(6))
    assert first.answers_left == 0
    late = QueryOracle(recipe, run)
    run.ledger.unlink()
    run.anchor.unlink()
    with pytest.raises(UserError):
        late(inputs(7)[6:])
    with pytest.raises(UserError):
        QueryOracle(recipe, run)


def test_answers_under_a_fixed_key_are_repeatable_and_no_two_share_noise(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = RunFolder(Path(shutil.copytree(run.path, tmp_path / "other")))
    keys: list[bytes] = []
    real = PrivatePredictionExecution.answer

    def noted(self: PrivatePredictionExecution, scores: Any, plan: Any, key: bytes) -> Any:
        keys.append(key)
        return real(self, scores, plan, key)

    monkeypatch.setattr(PrivatePredictionExecution, "answer", noted)
    oracle = QueryOracle(run.read_recipe(), run)
    found = torch.cat([oracle(inputs(2)), oracle(inputs(4)[2:])])
    assert len(keys) == len(set(keys)) == 4
    # Four at once are scored by other kernels than two: the noise is the same, not each last bit.
    assert torch.allclose(
        QueryOracle(other.read_recipe(), other)(inputs(4)), found, rtol=0, atol=1e-5
    )
    assert keys[4:] == keys[:4]


def test_nothing_is_released_once_more_on_a_ledger_that_lost_it(tmp_path: Path) -> None:
    """The steps that followed it are in a checkpoint: its ledger was not empty."""
    recipe, folder = make(tmp_path, "run")
    folder.private.mkdir(parents=True, exist_ok=True)
    folder.run_key.write_text("5a" * 32)
    plan = PrivacyPlan(1000, (NoisyVotes(12.0, 1, 1, 0.2, 4, 0.1),), 1e-4)
    job: Any = SimpleNamespace(folder=folder, plan=plan, recipe=recipe)
    drawn: list[bytes] = []

    def draw(key: bytes) -> list[float]:
        drawn.append(key)
        return [1.0, 2.0]

    for _ in range(2):
        assert release_once(job, b"votes", draw) == [1.0, 2.0] and len(drawn) == 1
    with Ledger.open(folder.ledger, plan.fingerprint()) as ledger:
        ledger.begin_attempt({})
        ledger.record(0, "ab" * 32)
        anchor = ledger.anchor
    checkpoint = folder.checkpoints / "step-00000001"
    checkpoint.mkdir(parents=True)
    write_json(checkpoint / "done.json", {"step": 1, "ledger": anchor.to_dict()})
    folder.ledger.unlink()
    folder.anchor.unlink()
    with pytest.raises((UserError, JournalError)):
        release_once(job, b"votes", draw)
    assert len(drawn) == 1
