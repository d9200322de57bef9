"""Trackers receive what may be published, and refuse the rest."""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from dpdist.core.errors import UserError
from dpdist.reports.results import load_results
from dpdist.reports.tracking import Tracker, iter_metrics, open_tracker


class Kept:
    """A backend that keeps what it is given."""

    def __init__(self) -> None:
        self.figures: list[tuple[str, float, int]] = []
        self.closed = False

    def log_scalar(self, name: str, value: float, step: int) -> None:
        self.figures.append((name, value, step))

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    "name",
    ["loss", "train/accuracy", "privacy/noise", "xtest/accuracy", "test/accuracy ", "certified/a"],
)
def test_what_is_made_of_private_records_is_refused(name):
    kept = Kept()
    with pytest.raises(UserError):
        Tracker(kept.log_scalar, kept.close).log(name, 0.5, 1)
    assert kept.figures == []


@pytest.fixture(scope="module")
def facts(golden, tmp_path_factory):
    folder = golden("release", tmp_path_factory.mktemp("tracked"))
    shutil.rmtree(folder.certificates)
    return load_results(folder)


@pytest.mark.slow
def test_epsilon_rises_to_what_is_proved_and_scores_are_those_of_the_test_data(facts):
    kept = Kept()
    Tracker(kept.log_scalar, kept.close).log_run(facts)
    epsilons = [(step, value) for name, value, step in kept.figures if name == "privacy/epsilon"]
    assert epsilons == sorted(epsilons) and kept.closed
    assert epsilons[-1] == (facts.plan.steps, facts.guarantee.epsilon)
    others = {name: value for name, value, _ in kept.figures if not name.startswith("privacy")}
    assert others == {
        f"test/{name}": facts.evaluation[name] for name in ("accuracy", "cross_entropy")
    }


@pytest.mark.slow
def test_nothing_is_said_of_a_search_s_trials_or_of_a_run_with_a_fixed_key(facts):
    of_search = replace(facts, account=replace(facts.account, search=SimpleNamespace()))
    searched = [f for f in iter_metrics(of_search) if "epsilon" in f[0]]
    assert searched == [("privacy/epsilon", facts.guarantee.epsilon, facts.plan.steps)]
    fixed_key = replace(facts.guarantee, fixed_key=True)
    fixed = replace(facts, account=replace(facts.account, guarantee=fixed_key))
    assert not [f for f in iter_metrics(fixed) if "privacy" in f[0]]


def test_tensorboard_s_files_hold_them(facts, tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    open_tracker(f"tensorboard:{tmp_path}", "mine").log_run(facts)
    (file,) = (tmp_path / "mine").iterdir()
    raw, found = file.read_bytes(), []
    while raw:  # length, check, record, check
        size = int.from_bytes(raw[:8], "little")
        for value in Event.FromString(raw[12 : 12 + size]).summary.value:
            found.append(value.tag)
        raw = raw[size + 16 :]
    assert found == [name for name, _, _ in iter_metrics(facts)]


def test_wandb_s_own_files_hold_the_figures_and_nothing_of_this_machine(
    facts, tmp_path, monkeypatch
):
    """Offline, with the library itself: its log is looked through byte by byte."""
    pytest.importorskip("wandb", reason="wandb missing: pip install 'dpdist[wandb]'")
    import getpass
    import socket

    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["dpdist", "a-secret-argument"])
    open_tracker("wandb:mine", "run-1").log_run(facts)
    (log,) = tmp_path.rglob("*.wandb")
    for _ in range(100):  # another process of the library's writes it, after `finish` returned
        if b"privacy/delta" in log.read_bytes():
            break
        time.sleep(0.2)
    raw = log.read_bytes()
    for name in {name for name, _, _ in iter_metrics(facts)}:
        assert name.encode() in raw
    for secret in ("a-secret-argument", socket.gethostname() + "\n", getpass.getuser() + "@"):
        assert secret.encode() not in raw
    assert not list(tmp_path.rglob("requirements.txt")) and not list(tmp_path.rglob("*meta*"))
