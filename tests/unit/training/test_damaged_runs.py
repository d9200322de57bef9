"""What carries a run's privacy is never silently begun afresh, and a damaged file never believed.

A run that crashed half-way loses one file, or has one edited; the same command is then refused in
one line before anything is written, and goes on where it stopped once the file is put back.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.folder_contents import contents, gone, half
from support.training import execute, make, prepare, train, train_and_crash

from dpdist import evaluation
from dpdist.core.errors import UserError
from dpdist.core.files import write_secret_once
from dpdist.runs.folder import RunFolder, complete_checkpoints, has_released, read_verified_ledger
from dpdist.training import monitoring

HIDDEN = {
    "method": {"name": "pixeldp"},
    "model": {
        "name": "hgm-cnn",
        "options": {"filters": [4], "kernels": [3], "strides": [2], "dense": 8},
    },
    "privacy": {"noise_multiplier": 0.0, "clipping": "none", "delta": 1e-4},
    "training": {"batch_size": 40, "steps": 5, "learning_rate": 0.3},
}


@pytest.fixture(scope="module")
def crashed(tmp_path_factory) -> Path:
    """A run with a key of its own that died with step 6 on its ledger, the checkpoint of 6 steps
    behind it."""
    place = tmp_path_factory.mktemp("crashed")
    torch.set_num_threads(1)  # as for each test: an attempt's identity
    with pytest.MonkeyPatch.context() as patch:
        train_and_crash(*small(place), patch, 6)
    return place / "run"


def small(place: Path, **more):
    return make(place, model="linear", privacy__run_key=None, **more)


def one_bit(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(raw)


def not_a_record(path: Path) -> None:
    path.write_bytes(b"\n" + path.read_bytes())


@pytest.mark.parametrize(
    ("name", "damage", "why"),
    [
        ("run.key", gone, "run.key: missing"),
        ("run.key", half, "run.key: is damaged"),
        ("plan.json", gone, "plan.json: missing"),
        ("data.json", gone, "data.json: missing"),
        ("begun-with.json", gone, "begun-with.json: missing"),
        ("workers.jsonl", not_a_record, "workers.jsonl, line 1: damaged"),
        ("checkpoints/step-00000006/state.safetensors", one_bit, "its numbers are not those"),
    ],
)
def test_a_crashed_run_is_refused_until_it_is_whole(crashed, tmp_path, name, damage, why):
    shutil.copytree(crashed, tmp_path / "run")
    recipe, folder = small(tmp_path)
    path = folder.private / name
    kept = path.read_bytes()
    damage(path)
    before = contents(folder.path)
    with pytest.raises(UserError, match=why):
        monitoring.WorkerChangeReporter(folder, print)  # as the driver does before workers start
        train(recipe, folder)
    assert contents(folder.path) == before, "nothing was written"
    path.unlink(missing_ok=True)
    path.write_bytes(kept)
    train(recipe, folder)
    ledger = read_verified_ledger(folder).ledger
    assert ledger.num_superseded == 0, ledger.attempts


def test_a_ledger_is_not_begun_again_beside_what_was_made_of_it(crashed, tmp_path):
    """Ledger and anchor gone: whatever else is left of the run says that it had them."""
    for left in ("checkpoints", "workers.jsonl"):
        shutil.copytree(crashed, tmp_path / left / "run")
        recipe, folder = small(tmp_path / left)
        folder.ledger.unlink()
        folder.anchor.unlink()
        if left == "checkpoints":
            folder.worker_groups.unlink()
        else:
            shutil.rmtree(folder.checkpoints)
        with pytest.raises(UserError, match=r"ledger\.jsonl: is missing"):
            prepare(recipe, folder, "test")
        assert not folder.ledger.exists() and not folder.anchor.exists()


def test_a_checkpoint_is_that_of_its_step(crashed, tmp_path):
    shutil.copytree(crashed, tmp_path / "run")
    recipe, folder = small(tmp_path)
    before, newest = complete_checkpoints(folder.checkpoints)
    shutil.copy(before / "done.json", newest / "done.json")
    with pytest.raises(UserError, match=r"done\.json"):
        train(recipe, folder)


@pytest.mark.slow
def test_noise_fixed_once_is_not_fixed_again(tmp_path):
    """The hidden noise, which the first steps were taken with."""
    recipe, folder = make(tmp_path, **HIDDEN)
    execute(prepare(recipe, folder, "test"), until=3)
    kept = folder.method_state.read_bytes()
    tensors = load_file(folder.method_state)
    save_file({name: tensor * 0.5 for name, tensor in tensors.items()}, folder.method_state)
    with pytest.raises(UserError, match="hidden-noise"):
        train(recipe, folder)
    folder.method_state.unlink()
    with pytest.raises(UserError, match="missing"):
        train(recipe, folder)
    assert not folder.method_state.exists()
    folder.method_state.write_bytes(kept)
    train(recipe, folder)
    assert read_verified_ledger(folder).ledger.num_superseded == 0


def test_only_the_model_that_was_trained_is_used(tmp_path):
    """One number of its weights, and its description."""
    recipe, folder = make(tmp_path, model="linear", training__steps=2)
    train(recipe, folder)
    for name in ("model.safetensors", "model.json"):
        damaged = folder.model_folder / name
        kept = damaged.read_bytes()
        damaged.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
        for use in (evaluation.require_model, evaluation.load_model):
            with pytest.raises(UserError, match="model"):
                use(recipe, folder)
        damaged.write_bytes(kept)
    evaluation.load_model(recipe, folder)


def test_a_secret_is_written_once_and_whole(tmp_path, monkeypatch):
    """Not at all where the disk is full; not over what is there, a link to nowhere included."""
    path = tmp_path / "key"
    with monkeypatch.context() as patch, pytest.raises(OSError, match="full"):
        patch.setattr("os.fsync", full)
        write_secret_once(path, "a" * 64)
    assert not list(tmp_path.iterdir())
    write_secret_once(path, "a" * 64)
    write_secret_once(path, "b" * 64)
    assert path.read_text() == "a" * 64 and path.stat().st_mode & 0o777 == 0o600
    link = tmp_path / "link"
    link.symlink_to("nowhere")
    write_secret_once(link, "c")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["key", "link"]


def full(descriptor: int) -> None:
    raise OSError("full")


def test_a_fixed_key_is_marked_before_it_is_there(tmp_path, monkeypatch):
    """A crash between the two leaves no fixed key that nobody sees to be one."""
    recipe, folder = make(tmp_path, model="linear")

    def crash(path, text):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("dpdist.training.job.write_secret_once", crash)
        prepare(recipe, folder, "test")
    assert RunFolder(folder.path).fixed_key_marker.exists() and not folder.run_key.exists()


def test_a_ledger_whose_first_write_failed_is_begun(tmp_path):
    """A disk that was full at its first line: nothing was released, and the command goes on."""
    recipe, folder = small(tmp_path)
    prepare(recipe, folder, "test")
    folder.ledger.write_bytes(b'{"record":{"kind":"pl')
    folder.anchor.write_bytes(b"")
    assert not has_released(folder)
    execute(prepare(recipe, folder, "test"))
    assert has_released(folder) and read_verified_ledger(folder).ledger.num_superseded == 0
