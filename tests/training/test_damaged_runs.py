"""What carries a run's privacy is never silently begun afresh, and a damaged file never believed.

A run that crashed half-way loses one file, or has one edited; the same command is then refused in
one line before anything is written, and goes on where it stopped once the file is put back.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.folder_contents import contents, empty, gone, half
from support.training import execute, make, parameters, prepare, train, train_and_crash

from dpdist import evaluation, models
from dpdist.core.errors import UserError
from dpdist.core.files import write_secret_once
from dpdist.runs.folder import RunFolder, complete_checkpoints, has_released, read_verified_ledger
from dpdist.training import monitoring
from dpdist.training.trainer import _budget_charged

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


def other_digit(path: Path) -> None:
    text = path.read_text()
    path.write_text(("1" if text[0] == "0" else "0") + text[1:])


def one_bit(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(raw)


def a_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def no_text(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\xff")


def not_a_record(path: Path) -> None:
    path.write_bytes(b"\n" + path.read_bytes())


CASES = [
    ("run.key", gone, "run.key: missing"),
    ("run.key", empty, "run.key: is damaged: must be 64 hex digits"),
    ("run.key", half, "run.key: is damaged: must be 64 hex digits"),
    ("run.key", other_digit, "is not the key that this run"),
    ("run.key", a_loop, "run.key: missing"),
    ("plan.json", gone, "plan.json: missing"),
    ("data.json", gone, "data.json: missing"),
    ("begun-with.json", gone, "begun-with.json: missing"),
    ("data.json", a_loop, "data.json: missing"),
    ("workers.jsonl", not_a_record, "workers.jsonl, line 1: damaged"),
    ("workers.jsonl", no_text, "workers.jsonl: must be UTF-8 text"),
    (
        "checkpoints/step-00000006/state.safetensors",
        one_bit,
        "its numbers are not those .*; move .*/step-00000006 away, and the run repeats its steps",
    ),
    (
        "checkpoints/step-00000006/state.safetensors",
        half,
        "damaged: .*; move .*/step-00000006 away",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "damage", "why"), CASES)
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
    """Every component of the hidden noise, which the first steps were taken with."""
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
    evaluation.evaluate_stage(recipe, folder)
    assert parameters(folder).isfinite().all()
    path = folder.model_folder / "model.safetensors"
    for damaged in (path, folder.model_folder / "model.json"):
        kept = damaged.read_bytes()
        if damaged == path:
            tensors = load_file(path)
            name = next(iter(tensors))
            tensors[name].view(-1)[0] += 1
            save_file(tensors, path)
        else:
            damaged.write_bytes(kept + b" ")
        for use in (evaluation.require_model, evaluation.load_model):
            with pytest.raises(UserError, match="model"):
                use(recipe, folder)
        damaged.write_bytes(kept)
    assert isinstance(evaluation.load_model(recipe, folder), torch.nn.Module)
    assert models.model_hash(folder.model_folder) == folder.require_trained()["model"]


@pytest.mark.parametrize("number", [10**400, 1e300, True, "1"])
@pytest.mark.parametrize("name", ["mean", "std"])
def test_a_constant_of_a_model_is_a_number_that_it_holds(tmp_path, name, number):
    """Of somebody else's description too; the first is no 64-bit number at all."""
    spec = models.ModelSpec("linear", (1, 8, 8), 10, {})
    models.save(models.initialize(spec, 3), spec, tmp_path)
    path = tmp_path / "model.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: [number]}))
    with pytest.raises(UserError, match=r"(mean|std)\.0 must be"):
        models.read_spec(tmp_path)


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


@pytest.mark.slow
@pytest.mark.parametrize("left", [b"", b'{"record":{"kind":"pl', b"\0" * 64])
@pytest.mark.parametrize("anchor", [None, b""])
def test_a_ledger_whose_first_write_failed_is_begun(tmp_path, left, anchor):
    """A disk that was full at its first line: nothing was released, and the same command goes on,
    under a budget too."""
    recipe, folder = small(tmp_path, privacy__budget=str(tmp_path / "budgets"))
    prepare(recipe, folder, "test")
    folder.ledger.write_bytes(left)
    if anchor is not None:
        folder.anchor.write_bytes(anchor)
    assert not has_released(folder)
    job = prepare(recipe, folder, "test")
    with _budget_charged(job):
        execute(job)
    assert has_released(folder) and read_verified_ledger(folder).ledger.num_superseded == 0
