"""The run folder's disk fills up at any moment: a clear error, and the same run afterwards.

In a mount namespace of its own, on a small memory disk, without Ray. A trial of a search is not a
failed one for it.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys

import pytest

from dpdist.cli import main
from dpdist.core.errors import is_disk_full
from dpdist.core.files import write_json
from dpdist.runs.folder import RunFolder
from dpdist.training.trainer import _worker_error

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


_SEARCH = """
import json, os, sys, subprocess
from pathlib import Path
from dpdist.cluster.versions import package_fingerprints
from dpdist.core.errors import is_disk_full
from dpdist.runs.recipe import parse_recipe
from dpdist.runs.folder import RunFolder
from dpdist.cluster.versions import PACKAGES
from dpdist.tuning.search import prepare_search
from dpdist.tuning.manifest import read_trials
from dpdist.tuning.searchers import ManifestSearcher
from dpdist.tuning.trial import continue_recipe_trial, run_trial, read_scores

place = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "disk", str(place)], check=True)

def begin(name):
    search = prepare_search(parse_recipe({
        "name": name,
        "data": {"name": "digits", "max_train": 200},
        "model": {"name": "small-cnn", "options": {"width": 4}},
        "privacy": {"noise_multiplier": 4.0, "delta": 1e-4, "run_key": "33" * 32},
        "training": {"batch_size": 20, "steps": 40, "learning_rate": 0.1},
        "tune": {"space": {"training.learning_rate": {"log_uniform": [0.1, 1.0]}},
                 "num_trials": {"name": "geometric", "mean": 4.0}, "score": {"noise": 5.0}},
        "resources": {"checkpoint_seconds": 1e-6},
    }, "r"), RunFolder(place / name), "r")
    ManifestSearcher(search.folder, read_trials(search.folder), search.trial_noise_multiplier).suggest("0")
    return search.folder

def trial(folder):
    run_trial(
        folder.run.path,
        package_fingerprints(PACKAGES),
        0,
        lambda rung, score: None,
        continue_recipe_trial,
    )
    return read_scores(folder, 0)

quiet = trial(begin("quiet"))
assert quiet["done"] and quiet["failed"] is None
errors = []
for number, left in enumerate((4, 32, 48)):
    folder = begin(f"full-{number}")
    filler = place / "filler"
    free = os.statvfs(place)
    filler.write_bytes(bytes(max(0, free.f_bavail * free.f_bsize - left * 1024)))
    try:
        trial(folder)
    except Exception as error:
        assert is_disk_full(error) and folder.disk_full_marker.exists(), error
        assert not folder.scores_file(0).exists(), "a full disk made it a failed trial"
        errors.append(f"{type(error).__name__}: {error}")
    filler.unlink()
    assert trial(folder) == quiet, f"with {left} KiB left: another score"
print(json.dumps(errors))
"""  # noqa: E501


@pytest.mark.e2e
@needs_a_small_disk
@pytest.mark.parametrize("script, least", [(_SCRIPT, 3), (_SEARCH, 2)], ids=["training", "search"])
def test_a_full_disk_changes_nothing(tmp_path, script, least):
    done = subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout.splitlines()[-1])
    assert len(errors) >= least, "the disk was never full"
    assert all("No space left" in error for error in errors), errors


def test_what_a_worker_leaves_for_the_driver(tmp_path):
    """A mistake is told as it is; a full disk also when there was no room for its reason."""
    folder = RunFolder(tmp_path / "run")
    write_json(folder.failure, {"worker": 0, "error": "model: no such layer", "full": False})
    assert str(_worker_error(folder)) == "model: no such layer" and not is_disk_full(
        _worker_error(folder)
    )
    reason = "ledger.jsonl could not be written: [Errno 28] No space left on device"
    write_json(folder.failure, {"worker": 0, "error": reason, "full": True})
    assert str(_worker_error(folder)).startswith(f"{reason}; make room") and is_disk_full(
        _worker_error(folder)
    )
    folder.failure.write_text("")
    assert "run: No space left on device; make room" in str(_worker_error(folder))
    assert not is_disk_full(OSError(errno.ENOENT, "not there")) and not is_disk_full(ValueError())


FORBIDDEN = "Failed to open local file '/x'. Detail: [errno 13] Permission denied"  # pyarrow's


@pytest.mark.parametrize(
    ("number", "text", "said"),
    [
        (errno.ENOSPC, None, "No space left on device (where the run lies"),
        (errno.EFBIG, None, "File too large (where the run lies"),
        (errno.EACCES, FORBIDDEN, FORBIDDEN),
        (errno.EMFILE, None, "Too many open files"),
    ],
    ids=["full", "limit of size", "forbidden", "limit of files"],
)
def test_what_the_machine_refuses_is_one_line(monkeypatch, capsys, number, text, said):
    """Errors of a write do not name their file, and must not end in a traceback."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, text or os.strerror(number))

    monkeypatch.setattr(main, "app", fail)
    with pytest.raises(SystemExit, match="2"):
        main.main()
    err = capsys.readouterr().err
    assert err.startswith(f"dpdist: {said}") and err.count("\n") == 1
