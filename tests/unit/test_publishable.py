"""Nothing that may be published is a function of private records, but for the noisy model.

One private record is changed where it cannot reach the model; then everything that leaves private/
must be the same, byte for byte: a hash or a count of private records in it would differ.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from support.datasets import write_images
from typer.testing import CliRunner

from dpdist import pipeline
from dpdist.cli.main import app
from dpdist.data.record_hashes import hash_inputs, hash_positions
from dpdist.publishing import write_release
from dpdist.reports.export import run_as_json as published_json
from dpdist.reports.results import load_results
from dpdist.runs.archive import Archive, export_text, publishable_files
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import Recipe, parse_recipe
from dpdist.training import worker
from dpdist.training.collectives import Reducer
from dpdist.training.job import prepare
from dpdist.training.records import data_source, load_test_records, records_with_canaries

PUBLIC, HELD = 0.4, 0.3  # shares: public, held out of the others


def recipe_in(work: Path) -> Recipe:
    described = {
        "name": "run",
        "data": {
            "name": "shapes", "root": str(work), "classes": 3, "public": PUBLIC,
            "private_eval_fraction": HELD
        },
        "model": {"name": "linear", "initial": str(work / "public")},
        "public": {"training": {"batch_size": 10, "steps": 5, "learning_rate": 0.1}},
        "privacy": {
            "noise_multiplier": 1.0, "clip_norm": 1e-6, "delta": 1e-3, "run_key": "5a" * 32
        },
        # So little that no weight moves: the model is then the same whatever its records were.
        "training": {"batch_size": 10, "steps": 2, "learning_rate": 1e-9},
    }  # fmt: skip
    return parse_recipe(described, "test")


def images(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 6, 6), dtype=np.uint8)


def place(image: np.ndarray) -> str:
    """Which part a record lies in."""
    at = float(hash_positions(hash_inputs(image[None, None]))[0])
    return "public" if at < PUBLIC else "held" if at < PUBLIC + HELD * (1 - PUBLIC) else "trained"


def changed_in(part: str) -> np.ndarray:
    """The records with one of this part replaced by another one of this part."""
    pixels = images(0, 100)
    row = next(i for i, image in enumerate(pixels) if place(image) == part)
    other = next(image for image in images(99, 100) if place(image) == part)
    return np.concatenate([pixels[:row], other[None], pixels[row + 1 :]])


def published(work: Path, pixels: np.ndarray) -> tuple[dict[str, bytes], str]:
    """Everything a run of these records publishes, by name; and the fingerprint of its records."""
    write_images(work / "shapes", "train", pixels)
    write_images(work / "shapes", "test", images(1, 30))
    recipe, folder = recipe_in(work), RunFolder(work / "run")
    store = work / "store"
    pipeline.pretrain_stage(recipe, "test")
    job = prepare(recipe, folder, "test")
    Archive.claim(folder, f"file://{store}", private=False)
    worker.run_training(job, Reducer(0, 1, torch.device("cpu")))
    pipeline.evaluate_stage(recipe, folder)
    write_release(folder, not_private=True)
    pipeline.report_stage(folder)
    pipeline.archive_stage(folder)

    found = {str(p): (folder.path / p).read_bytes() for p in publishable_files(folder)}
    found |= {f"public/{p.name}": p.read_bytes() for p in (work / "public").iterdir()}
    found |= archived(store)
    found["what certificates name"] = load_test_records(
        recipe, data_source(recipe)
    ).fingerprint.encode()
    found["summary"] = repr(load_results(folder).rows()).encode()
    found["--json"] = json.dumps(published_json(load_results(folder))).encode()
    (work / "recipe.yaml").write_text(recipe.to_yaml())
    told = CliRunner().invoke(app, ["data", "check", str(work / "recipe.yaml")])
    assert told.exit_code == 0, told.output
    found["data check"] = told.output.encode()
    assert export_text(folder)  # holds the publishable files and nothing else
    fingerprint = records_with_canaries(recipe, data_source(recipe)).fingerprint
    shutil.rmtree(work)
    return {name: timeless(raw) for name, raw in found.items()}, fingerprint


def archived(store: Path) -> dict[str, bytes]:
    """The archive's objects; in the manifest, without the random names they were given."""
    manifests = list(store.rglob("manifest.json"))
    assert len(manifests) == 1
    found = {}
    for path in store.rglob("*"):
        if path.is_file() and path not in manifests and "claims" not in path.parts:
            found[f"archive/{path.name}"] = path.read_bytes()
    about = json.loads(manifests[0].read_text())
    for entry in about["files"].values():
        entry.pop("object")
        entry.pop("digest")  # of a file that is compared itself, and may name a duration
    found["manifest"] = json.dumps(about, sort_keys=True).encode()
    return found


def timeless(raw: bytes) -> bytes:
    """How long the training took is no function of the records alone."""
    return re.sub(rb"\b\d+ s\b", b"", raw)


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("published") / "work"  # one path: recipes name it


@pytest.fixture(scope="module")
def before(work) -> tuple[dict[str, bytes], str]:
    return published(work, images(0, 100))


@pytest.mark.slow
@pytest.mark.parametrize("part", ["held", "trained"])
def test_a_private_record_changes_nothing_that_is_published(work, before, part):
    (first, fingerprint), (second, other) = before, published(work, changed_in(part))
    assert (fingerprint != other) == (part == "trained")  # it was changed, and the run knows it
    assert {"release/privacy_card.json", "evaluation.json", "report/index.html"} <= first.keys()
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []
