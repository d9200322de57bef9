"""docs/how-to/from-opacus.md: both scripts run as printed, and what it says of Opacus holds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpdist

PAGE = Path(__file__).resolve().parent.parent / "docs" / "how-to" / "from-opacus.md"
SCRIPTS = dict(re.findall(r"(?s)```python file=(\S+)\n(.*?)```", PAGE.read_text()))


def execute(name: str, folder: Path) -> list[str]:
    """Run a printed script; return the lines that it printed."""
    (folder / name).write_text(SCRIPTS[name])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", name], cwd=folder, capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.e2e
def test_our_script_runs_as_printed(tmp_path):
    guarantee, accuracy = execute("after.py", tmp_path)
    facts = dpdist.load_results(tmp_path / "runs" / "digits")
    assert guarantee == str(facts.guarantee) and 2.9 < facts.guarantee.epsilon <= 3
    assert float(accuracy.split()[1]) > 0.8
    assert any("RandomSampler" in note for note in facts.privacy_card()["notes"])


@pytest.mark.e2e
def test_the_script_for_opacus_runs_as_printed(tmp_path):
    pytest.importorskip("opacus")
    epsilon, accuracy = execute("before.py", tmp_path)
    assert 2.9 < float(epsilon.split()[1]) <= 3 and float(accuracy.split()[1]) > 0.7


def engine(count: int, batch: int, **options: object) -> tuple[object, object, object]:
    from opacus import PrivacyEngine

    data = TensorDataset(torch.randn(count, 3), torch.zeros(count).long())
    model = nn.Linear(3, 2)
    made = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = made.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=batch, shuffle=True), noise_multiplier=1.0,
        max_grad_norm=1.0, **options,
    )  # fmt: skip
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data[:9][0]), data[:9][1]).backward()
        optimizer.step()
    return made, optimizer, loader


def test_what_is_said_of_opacus_holds():
    """The page's claims hold of the installed Opacus, whose version pyproject.toml bounds."""
    pytest.importorskip("opacus")
    from opacus.accountants import RDPAccountant
    from opacus.data_loader import DPDataLoader

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {poisson: engine(1500, 150, poisson_sampling=poisson) for poisson in (True, False)}
        rounded = engine(1501, 150)[1]
    assert isinstance(found[True][2], DPDataLoader)
    assert not isinstance(found[False][2], DPDataLoader)  # and yet the same is accounted
    assert all(isinstance(made.accountant, RDPAccountant) for made, _, _ in found.values())
    epsilons = [made.get_epsilon(1e-5) for made, _, _ in found.values()]
    assert epsilons[0] == epsilons[1] > 0
    assert rounded.expected_batch_size == 136  # of 1501 / 11
