"""The run folder's disk fills up at any moment: a clear error, and the same run afterwards.

In a mount namespace of its own, on a small memory disk, without Ray.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

needs_a_small_disk = pytest.mark.skipif(
    os.geteuid() != 0
    or shutil.which("unshare") is None
    or subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "t", "/mnt"], capture_output=True
    ).returncode
    != 0,
    reason="needs root to mount a small disk",
)

_SCRIPT = """
import json, os, sys
from pathlib import Path
import subprocess
import torch
from dpdist.runs.recipe import parse_recipe
from dpdist.runs.folder import RunFolder
from dpdist.training import worker as loop
from dpdist.training.job import prepare
from dpdist.training.collectives import Reducer

torch.set_num_threads(1)
place = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "disk", str(place)], check=True)
recipe = parse_recipe({
    "name": "full",
    "data": {"name": "digits", "max_train": 200},
    "model": {"name": "small-cnn", "options": {"width": 4}},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-4, "run_key": "7f" * 32},
    "training": {"batch_size": 20, "steps": 40, "learning_rate": 0.1},
    "resources": {"checkpoint_seconds": 1e-6},
}, "r")

def train(name):
    loop.run_training(prepare(recipe, RunFolder(place / name), "r"), Reducer(0, 1, torch.device("cpu")))

def outcome(name):
    folder = RunFolder(place / name)
    lines = [json.loads(x)["record"] for x in folder.ledger.read_text().splitlines()]
    releases = [(r["epoch"], r["step"], r["id"]) for r in lines if r["kind"] == "release"]
    return (folder.model_folder / "model.safetensors").read_bytes(), releases

train("quiet")
quiet = outcome("quiet")
assert len(quiet[1]) == 40
errors = []
for number, left in enumerate((4, 12, 20, 32, 48)):
    name = f"full-{number}"
    prepare(recipe, RunFolder(place / name), "r")
    filler = place / "filler"
    free = os.statvfs(place)
    filler.write_bytes(bytes(max(0, free.f_bavail * free.f_bsize - left * 1024)))
    try:
        train(name)
    except (OSError, RuntimeError) as error:
        errors.append(f"{type(error).__name__}: {error}")
    filler.unlink()
    train(name)
    assert outcome(name) == quiet, f"with {left} KiB left: another model, or another ledger"
print(json.dumps(errors))
"""  # noqa: E501


@pytest.mark.e2e
@needs_a_small_disk
def test_a_full_disk_changes_nothing(tmp_path):
    done = subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", _SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout.splitlines()[-1])
    assert len(errors) >= 3, "the disk was never full"
    assert all("No space left" in error for error in errors), errors
