"""`benchmarks/training_ray.py` and `training_phases.py` run without Ray in this process, on a few
records; with Ray their `--quick` in `tests/test_benchmarks.py`, and `--start` here."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from support.benchmarks import BENCHMARKS, load

from dpdist.training import private_step

FEW = ["--records", "256"]
pytestmark = pytest.mark.slow


def beside(bench: ModuleType, code: str, *arguments: object) -> SimpleNamespace:
    """What `start` gives, of a thread that trains alone; of the command, with what Ray leaves."""
    process = SimpleNamespace(returncode=1, pid=os.getpid())
    if code == bench._ALONE:
        recipe, folder = arguments
    else:
        assert arguments[0] == "train" and arguments[2] == "--runs"
        recipe, folder = arguments[1], arguments[3] / "whole-2"

    def work() -> None:
        alone = bench._ALONE.replace("sys.argv[1]", repr(str(recipe)))
        lines = alone.replace("sys.argv[2]", repr(str(folder))).splitlines()
        exec("\n".join(lines[:-1]), space := {})  # as far as the prepared job
        (folder / "private" / "ray").touch()
        exec("\n".join(lines[-1:]), space)
        process.returncode = 0

    thread = threading.Thread(target=work)
    process.poll = lambda: None if thread.is_alive() else process.returncode
    process.wait = thread.join
    thread.start()
    return process


@pytest.mark.long
@pytest.mark.parametrize("options", [["--quick"], ["--start"]])
def test_rates_and_seconds_are_printed(monkeypatch, capsys, options):
    bench = load("training_ray", monkeypatch)
    monkeypatch.setattr(bench, "start", lambda *given: beside(bench, *given))
    monkeypatch.setattr(bench, "worker_seen", lambda: True)
    monkeypatch.setattr(sys, "argv", ["training_ray.py", *options, *FEW])
    bench.main()
    printed = capsys.readouterr().out.splitlines()
    if options == ["--quick"]:
        assert printed[0].startswith("round 0: Ray ")
        assert float(printed[1].rpartition(": ")[2]) > 0
    else:
        assert [line.rpartition(" s  ")[2].partition(":")[0] for line in printed] == [
            "the command", "Ray", "Ray Train", "workers", "the first step, with the self-check",
        ]  # fmt: skip


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="reads /proc")
def test_every_phase_of_a_step_is_seen(tmp_path, monkeypatch, capsys):
    for name in ("_announce", "add_noise"):  # which are wrapped for good
        monkeypatch.setattr(private_step, name, getattr(private_step, name))
    phases, ray = load("training_phases", monkeypatch), load("training_ray", monkeypatch)
    monkeypatch.setenv("DPDIST_CACHE", str(tmp_path / "cache"))
    ray.make_images(tmp_path / "data", "half", 128)
    recipe = ray.recipe(tmp_path, "half", 16, 1, 6)
    commands = phases.processes("alone", tmp_path / "alone", recipe)
    assert [line[2] for line in commands] == ["--one"] * 2 and commands[0][3] != commands[1][3]
    job, meet, rank, workers, answer = commands[0][3:]
    assert pickle.loads(Path(job).read_bytes()).recipe.training.steps == 6
    before = phases.processor_seconds(os.getppid())
    phases.one_process(Path(job), Path(meet), int(rank), int(workers), Path(answer))
    (kept,) = [json.loads(path.read_text()) for path in Path(answer).glob("*.json")]
    assert all(kept["wall"][name] > 0 for name in phases.PHASES)
    assert sum(kept["wall"].values()) <= 2 * kept["wall"]["step"]
    shares = phases.processor_shares(before, phases.processor_seconds(os.getppid()), 1.0)
    phases.show({"alone": [[kept]]}, {title: [share] for title, share in shares.items()})
    printed = capsys.readouterr().out
    assert all(f"\n{name} " in printed for name in phases.PHASES) and " %  " in printed


@pytest.mark.long
@pytest.mark.nightly
def test_the_seconds_before_the_first_step_of_a_training_on_ray():
    command = [sys.executable, str(BENCHMARKS / "training_ray.py"), "--start", *FEW]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 0, done.stderr[-3000:]
    assert "workers: imports, process group, records, model" in done.stdout
