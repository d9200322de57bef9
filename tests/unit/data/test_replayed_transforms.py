"""Random transforms through the loop: what a seed reaches is replayed, nothing else gets its noise.

A step is announced, the process dies, and the same script goes on. Its sample and its seeds are the
same. Where the sum has the same bits it is the same release, charged once; where a transform drew
from elsewhere, the sum is another one, which never gets the announced noise: the step is drawn
anew, and both are charged.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from support.training import Interrupt, release_ids
from torch import nn
from torch.utils.data import Dataset

import dpdist
from dpdist.privacy.ledger import Ledger
from dpdist.training import private_step

RECORDS, STEPS, AT = 60, 4, 2
OWN = np.random.default_rng(0)


def urandom() -> float:
    return int.from_bytes(os.urandom(4), "little") / 2**32


SEEDED = {
    "torch": lambda: torch.rand(1).item(),
    "own generator": lambda: float(OWN.random()),
}


class Items(Dataset):
    def __init__(self, draw) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.rand(RECORDS, 5, generator=generator)
        self.transform = lambda row: row + draw()

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int):
        return self.transform(self.rows[index]), int(self.rows[index].sum() > 2.5)


def training(folder: Path, draw) -> dpdist.PrivateTraining:
    torch.manual_seed(1)
    model = nn.Linear(5, 2)
    return dpdist.PrivateTraining(
        model, torch.optim.SGD(model.parameters(), lr=0.1), Items(draw), loss="cross-entropy",
        privacy={"noise_multiplier": 1.0, "delta": 1e-3}, batch_size=30, steps=STEPS,
        folder=folder, resources={"checkpoint_seconds": 1e-6},
    )  # fmt: skip


def killed(folder: Path, draw, patch: pytest.MonkeyPatch) -> tuple[list[str], list[bytes]]:
    """Die after the entry of step AT, before its noise is added; the release ids, and the keys of
    noise that was drawn before."""
    keys: list[bytes] = []
    real = private_step.add_noise

    def dies(total, key, *rest):
        if len(keys) == AT:
            raise Interrupt
        keys.append(key)
        return real(total, key, *rest)

    with patch.context() as inner:
        inner.setattr(private_step, "add_noise", dies)
        t = training(folder, draw)
        with pytest.raises(Interrupt):
            t.run_all()
        t.close()
    return release_ids(t.run), keys


def went_on(folder: Path, draw, patch: pytest.MonkeyPatch) -> tuple[dpdist.RunFolder, list[bytes]]:
    """Go on as the same script does; the run, and the keys of noise that was drawn."""
    keys: list[bytes] = []
    real = private_step.add_noise
    with patch.context() as inner:
        inner.setattr(
            private_step, "add_noise", lambda t, key, *r: (keys.append(key), real(t, key, *r))[1]
        )
        run = training(folder, draw).run_all()
    return run, keys


@pytest.mark.slow
@pytest.mark.parametrize("name", SEEDED)
def test_what_is_seeded_is_replayed_and_charged_once(tmp_path, monkeypatch, name):
    before, _ = killed(tmp_path / "run", SEEDED[name], monkeypatch)
    assert len(before) == AT + 1
    random.seed(7), np.random.seed(7), torch.manual_seed(7)  # generators are elsewhere by now
    run, _ = went_on(tmp_path / "run", SEEDED[name], monkeypatch)
    assert release_ids(run)[: AT + 1] == before
    assert Ledger.read(run.ledger).release_counts == dict.fromkeys(range(STEPS), 1)


@pytest.mark.slow
def test_another_sum_never_gets_the_announced_noise(tmp_path, monkeypatch):
    before, early = killed(tmp_path / "run", urandom, monkeypatch)
    run, late = went_on(tmp_path / "run", urandom, monkeypatch)
    counts = Ledger.read(run.ledger).release_counts
    assert counts == {step: 2 if step == AT else 1 for step in range(STEPS)}  # both are charged
    assert len(set(release_ids(run))) == STEPS + 1 and release_ids(run)[: AT + 1] == before
    assert len({*early, *late}) == len(early) + len(late) == STEPS  # no noise twice
    assert dpdist.load_results(run).guarantee.epsilon > run.read_plan().guarantee().epsilon


@pytest.mark.parametrize("targets", [[torch.full((RECORDS,), 91370)], []])
def test_records_without_fitting_targets_are_refused_without_a_value(tmp_path, targets):
    model = nn.Linear(5, 2)
    with pytest.raises(dpdist.UserError, match="targets") as caught:
        dpdist.PrivateTraining(
            model, torch.optim.SGD(model.parameters(), lr=0.1), (torch.zeros(RECORDS, 5), *targets),
            loss="cross-entropy", privacy={"noise_multiplier": 1.0, "delta": 1e-3}, batch_size=30,
            steps=1, folder=tmp_path / "run",
        )  # fmt: skip
    assert "91370" not in str(caught.value) and not (tmp_path / "run").exists()
