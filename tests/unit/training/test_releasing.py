"""What `dpdist release` publishes is the trained model, its card, and nothing else; or nothing."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.folder_contents import contents
from support.training import make, train

from dpdist import models, publishing
from dpdist.core.errors import UserError
from dpdist.models import ModelSpec
from dpdist.publishing import write_release
from dpdist.release.files import REQUIRED_FILES
from dpdist.runs.folder import RunFolder

FILES = {*REQUIRED_FILES}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> RunFolder:
    recipe, folder = make(
        tmp_path_factory.mktemp("runs"), "x", data__max_train=40, training__batch_size=40,
        training__steps=2, model="linear", privacy__run_key=None,
    )  # fmt: skip
    train(recipe, folder)
    return folder


@pytest.fixture
def run(finished, tmp_path) -> RunFolder:
    folder = RunFolder(tmp_path / "x")
    shutil.copytree(finished.path, folder.path)
    return folder


def refused(folder: RunFolder, match: str) -> None:
    """And release/ is as it was, with nothing left beside it."""
    before = contents(folder.release_folder) if folder.release_folder.exists() else None
    with pytest.raises(UserError, match=match):
        write_release(folder)
    assert (contents(folder.release_folder) if folder.release_folder.exists() else None) == before
    assert not list(folder.path.glob(".*"))


def test_exactly_these_files_and_the_card_names_its_weights(run):
    for _ in range(2):  # anew and whole each time
        assert {path.name for path in write_release(run)} == FILES
        assert contents(run.release_folder).keys() == FILES
        for name in ("model.safetensors", "model.json"):
            assert (run.release_folder / name).read_bytes() == (
                run.model_folder / name
            ).read_bytes()
    card = json.loads((run.release_folder / "privacy_card.json").read_text())
    assert card["private"] and card["extra"]["model hash"] == models.model_hash(run.release_folder)
    assert not list(run.path.glob(".*"))


def test_another_model_is_not_published_under_this_guarantee(run):
    write_release(run)
    other = ModelSpec("linear", (1, 8, 8), 10)
    models.save(models.initialize(other, 5), other, run.model_folder)
    refused(run, "model")
    trained = json.loads(run.training_summary.read_text())
    del trained["model"]
    run.training_summary.write_text(json.dumps(trained))
    refused(run, "model")


def test_numbers_that_are_not_finite_are_not_published(run):
    weights = run.model_folder / "model.safetensors"
    tensors = load_file(weights)
    name = sorted(tensors)[0]
    tensors[name].view(-1)[0] = torch.nan
    save_file(tensors, weights)
    trained = json.loads(run.training_summary.read_text())
    trained["model"] = models.model_hash(run.model_folder)
    run.training_summary.write_text(json.dumps(trained))
    refused(run, f"{name}: ")


def plant_link(release: Path) -> None:
    (release / "model.json").unlink()
    (release / "model.json").symlink_to("../private/run.key")


@pytest.mark.parametrize(
    ("plant", "name"),
    [
        (lambda release: (release / "run.key").write_text("secret"), "run.key"),
        (lambda release: os.symlink("../private", release / "more"), "more"),
        (plant_link, "model.json"),
    ],
)
def test_what_is_not_ours_is_named_and_nothing_is_published(run, plant, name):
    write_release(run)
    plant(run.release_folder)
    with pytest.raises(UserError, match=name):
        write_release(run)


def test_a_release_folder_that_is_a_link_is_refused(run, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    run.release_folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="must be a folder"):
        write_release(run)
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("last", ["model.safetensors", "privacy_card.json"])
def test_a_crash_leaves_the_release_before_or_none(run, monkeypatch, before, last):
    """Never weights without their card."""
    if before:
        write_release(run)
    for writer in ("write_atomic", "write_json"):
        real = getattr(publishing, writer)

        def crash(path, content, real=real):
            if path.name == last:
                raise OSError(28, "No space left on device")
            real(path, content)

        monkeypatch.setattr(publishing, writer, crash)
    with pytest.raises(OSError, match="No space"):
        write_release(run)
    assert run.release_folder.exists() == before
    assert not before or contents(run.release_folder).keys() == FILES
