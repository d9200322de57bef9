from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.local_execution import call

from dpdist import models
from dpdist.certification import table as tables
from dpdist.certification import table_reader
from dpdist.core.errors import UserError
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import parse_recipe

RECIPE = {
    "name": "small",
    "data": {"name": "digits"},
    "model": {"name": "linear"},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-5},
    "training": {"batch_size": 100, "steps": 1, "learning_rate": 0.1},
    "certify": {"sigma": 0.3, "n": 1000, "n0": 50, "max_inputs": 8, "radii": [0.1, 0.2]},
    "resources": {"certify_actors": 2},
}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A run that finished training: the nearest mean as a linear model (digits are easy)."""
    import torch

    import dpdist.data

    train = dpdist.data.load(dpdist.data.DataSource("digits", 10), "train")
    recipe = parse_recipe(RECIPE, "recipe")
    folder = RunFolder(tmp_path / "small")
    folder.create_or_open(recipe)
    spec = models.ModelSpec("linear", train.input_shape, 10)
    model = models.build_model(spec)
    x, y = train.batch(slice(None)).flatten(1), torch.from_numpy(np.array(train.labels))
    means = torch.stack([x[y == c].mean(0) for c in range(10)])
    with torch.no_grad():
        model[1].weight.copy_(means)
        model[1].bias.copy_(-means.square().sum(1) / 2)
    models.save(model, spec, folder.model_folder)
    finish(folder)
    return tmp_path


def finish(folder: RunFolder) -> None:
    trained = {
        "steps": 1, "fallback_layers": [], "model": models.model_hash(folder.model_folder),
        "ledger": {"records": 1, "check": ""},
    }  # fmt: skip
    folder.training_summary.write_text(json.dumps(trained))


def good(*arguments: object) -> str:
    result = call(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


@pytest.mark.slow
def test_certify_and_certify_again_at_another_error(here: None, runs: Path) -> None:
    output = good("certify", "small", "--runs", runs)
    path = runs / "small/certificates/sigma-0.3-fixed-n-1000/certificates.parquet"
    assert "at r=0.2" in output and str(path) in output
    assert "Of the population, at least" in output
    table = tables.read(path)
    assert table.num_rows == 8
    assert table_reader.from_arrow(table).certified_accuracy(0.0) > 0.5
    # Again: nothing is computed, the same file stays.
    before = path.read_bytes()
    good("certify", "small", "--runs", runs)
    assert path.read_bytes() == before
    for named in (path, path.parent):
        good("certify", named, "--set", "certify.alpha=0.05")
    again = path.parent.with_name("sigma-0.3-fixed-n-1000-alpha-0.05") / path.name
    looser = tables.read(again)["p_lower"].to_pylist()
    assert all(new > old for new, old in zip(looser, table["p_lower"].to_pylist(), strict=True))
    for wrong in ("certify.alpha=2", "certify.n=10", "certify.alpha=x"):
        result = call("certify", path, "--set", wrong)
        assert isinstance(result.exception, UserError), wrong


def test_a_form_by_name_is_executed_and_stated(here: None, runs: Path) -> None:
    words = ("--set", "certify.max_inputs=2", "--output", runs / "half")
    good("certify", "small", "--runs", runs, *words, "--set", "certify.backend=bf16")
    classifier = tables.read_job_record(tables.read(runs / "half/certificates.parquet"))
    assert classifier["classifier"]["backend"] == "bf16"


def test_results_of_another_model_are_never_taken_over(here: None, runs: Path) -> None:
    good("certify", "small", "--runs", runs)
    folder = runs / "small/certificates/sigma-0.3-fixed-n-1000"
    model = runs / "small/private/model"
    spec = models.read_spec(model)
    models.save(models.initialize(spec, 7), spec, model)  # model B
    finish(RunFolder(runs / "small"))
    (folder / "settings.json").unlink()
    result = call("certify", "small", "--runs", runs)
    assert isinstance(result.exception, UserError) and "model was" in str(result.exception)
    (folder / "certificates.parquet").unlink()
    result = call("certify", "small", "--runs", runs)
    assert isinstance(result.exception, UserError) and "remove the folder" in str(result.exception)
    assert not (folder / "certificates.parquet").exists()
    shutil.rmtree(folder)
    good("certify", "small", "--runs", runs)
    about = tables.read_job_record(tables.read(folder / "certificates.parquet"))
    assert about["model"] == models.model_hash(model)


def test_a_run_that_never_finished_is_refused(here: None, runs: Path) -> None:
    (runs / "small/private/trained.json").unlink()
    result = call("certify", "small", "--runs", runs)
    assert isinstance(result.exception, UserError) and "is not finished" in str(result.exception)
    assert not (runs / "small/certificates").exists()


def test_early_stopping_by_command(here: None, runs: Path) -> None:
    good("certify", "small", "--runs", runs, "--set", "certify.mode=target-radius", "--n", 20000)
    folder = runs / "small/certificates/sigma-0.3-target-radius-r-0.1-0.2-n-20000"
    table = tables.read(folder / "certificates.parquet")
    assert set(table["radius"].to_pylist()) <= {0.0, 0.1, 0.2}
    assert min(table["n"].to_pylist()) < 20000
    result = call("certify", folder, "--set", "certify.alpha=0.05")
    assert isinstance(result.exception, UserError) and "early stopping" in str(result.exception)


def test_predict(runs: Path) -> None:
    import dpdist.data

    test = dpdist.data.load(dpdist.data.DataSource("digits", 10), "test")
    image = np.array(test.inputs[0])
    pixels = image[0] if image.dtype == np.uint8 else (image[0] * 255).astype(np.uint8)
    Image.fromarray(pixels).save(runs / "a.png")
    np.save(runs / "b.npy", test.batch(slice(0, 1))[0].numpy())
    images = (runs / "a.png", runs / "b.npy")
    lines = good(
        "predict", "small", *images, "--runs", runs, "--json", "--set", "certify.n=2000"
    ).splitlines()
    answers = [json.loads(line) for line in lines]
    assert [answer["label"] for answer in answers] == [int(test.labels[0])] * 2
    assert all(0 < answer["radius"] < 1.2 and not answer["abstain"] for answer in answers)
    text = good("predict", "small", runs / "a.png", "--runs", runs, "--label-only")
    assert text.strip() == f"{runs / 'a.png'}: {int(test.labels[0])}"
