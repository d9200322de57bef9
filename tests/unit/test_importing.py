"""A model that was trained elsewhere: imported, certified, attacked, reported and released, without
an epsilon, by the commands that runs of one's own have."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support import foreign
from support.local_execution import call

import dpdist
from dpdist import data, models
from dpdist.certification import table as tables
from dpdist.certification.predict import Predictor
from dpdist.core.errors import UserError
from dpdist.importing import ForeignModel, TestData, import_model
from dpdist.models.weights import load_foreign, read_weights
from dpdist.privacy.phases import NOT_TRAINED_HERE
from dpdist.release.description import ReleasedPictures
from dpdist.reports.compare import privacy_rows
from dpdist.runs.folder import DifferentRecipeError, RunFolder
from dpdist.training.records import data_source

FACTORY = "support.foreign:net"
ARGUMENTS = ("--model", FACTORY, "--normalize", "0.3/0.4", "--data", "digits")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "net.pt"
    torch.save(foreign.trained().state_dict(), path)
    return path


def good(*arguments: object) -> str:
    result = call(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return str(result.stdout)


def refused(*arguments: object) -> str:
    result = call(*arguments)
    assert isinstance(result.exception, UserError), (result.output, result.exception)
    return str(result.exception)


def digits() -> data.Dataset:
    return data.load(data.DataSource("digits", 10), "test")


# --- what is executed -------------------------------------------------------------------------


def test_the_run_answers_as_the_network_that_was_trained(weights: Path, tmp_path: Path) -> None:
    """Statistics of BatchNorm, dropout off, normalization inside: unnormalized inputs go in."""
    folder = RunFolder(tmp_path / "mine")
    given = ForeignModel(FACTORY, weights, mean=(0.3,), std=(0.4,))
    recipe = import_model(given, TestData("digits"), folder)
    loaded = models.load(folder.model_folder, trusted_factory=recipe.model.name)
    x = digits().batch(slice(0, 50))
    with torch.inference_mode():
        wanted = foreign.trained()((x - 0.3) / 0.4)
        assert torch.equal(loaded(x), wanted)
        assert torch.allclose(loaded(x[:1]), wanted[:1], atol=1e-5)  # no statistics of a batch
    fresh = foreign.net().eval()
    assert not torch.equal(fresh(x), wanted)


def test_a_run_is_of_one_import_only(weights: Path, tmp_path: Path) -> None:
    folder, where = RunFolder(tmp_path / "mine"), TestData("digits")
    given = ForeignModel(FACTORY, weights, mean=(0.3,), std=(0.4,))
    first = import_model(given, where, folder)
    assert import_model(given, where, folder) == first
    for model, inputs in (
        (replace(given, std=(0.5,)), where),
        (replace(given, weights=None), where),
        (given, replace(where, resize=40)),
    ):
        with pytest.raises(DifferentRecipeError):
            import_model(model, inputs, folder)


def test_a_certificate_counts_the_votes_of_that_network(
    here: None, weights: Path, tmp_path: Path
) -> None:
    """Against Cohen's own few lines on the original network, by other noise: two shares of 2,000
    draws of one probability differ by 0.08 or more with probability at most 4 exp(-2 2000 0.04^2)
    = 0.0066 by Hoeffding, by 0.15 with 6e-10 for all 18 inputs together."""
    good("certify", *ARGUMENTS, "--weights", weights, "--sigma", "0.2", "--n", "2000",
         "--set", "certify.every=20", "--runs", tmp_path)  # fmt: skip
    (path,) = tmp_path.glob("*/certificates/*/certificates.parquet")
    table = tables.read(path)
    network, inputs = foreign.trained(), digits()
    generator = torch.Generator().manual_seed(1)
    for row in table.to_pylist():
        x = inputs.batch(slice(row["index"], row["index"] + 1))
        noisy = x + 0.2 * torch.randn(2000, 1, 8, 8, generator=generator)
        with torch.inference_mode():
            votes = torch.bincount(network((noisy - 0.3) / 0.4).argmax(1), minlength=10) / 2000
        assert abs(float(votes[row["selected"]]) - row["k"] / row["n"]) < 0.15
    assert len(table) == 18


# --- weights ----------------------------------------------------------------------------------


def test_a_pickled_module_is_refused_with_what_to_do(tmp_path: Path) -> None:
    ran = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return (Path.touch, (ran,))

    torch.save({"weights": Evil()}, tmp_path / "evil.pt")
    torch.save(foreign.trained(), tmp_path / "whole.pt")
    for name in ("evil.pt", "whole.pt"):
        said = refused("import", "x", *ARGUMENTS, "--weights", tmp_path / name, "--runs", tmp_path)
        assert "state_dict()" in said
    assert not ran.exists()


def test_weights_are_taken_out_of_their_wrappers_and_must_be_whole(tmp_path: Path) -> None:
    own = foreign.trained().state_dict()
    torch.save({"epoch": 3, "state_dict": {f"module.{k}": v for k, v in own.items()}},
               tmp_path / "wrapped.pt")  # fmt: skip
    network = foreign.Net()
    load_foreign(network, read_weights(tmp_path / "wrapped.pt"), tmp_path)
    assert all(torch.equal(own[name], value) for name, value in network.state_dict().items())
    for wrong, said in (
        ({k: v for k, v in own.items() if k != "head.bias"}, "head.bias"),
        (own | {"more": torch.zeros(1)}, "more"),
        (own | {"head.bias": torch.zeros(3)}, "head.bias"),
        (own | {"head.bias": torch.full((10,), torch.nan)}, "finite"),
    ):
        with pytest.raises(UserError, match=said):
            load_foreign(foreign.Net(), wrong, tmp_path)


# --- test inputs ------------------------------------------------------------------------------


def write_pictures(folder: Path, classes: tuple[str, ...], *sizes: tuple[int, int]) -> None:
    generator = np.random.default_rng(0)
    for name in classes:
        (folder / name).mkdir(parents=True)
        for number, size in enumerate(sizes):
            pixels = generator.integers(0, 256, (*size, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")


@pytest.mark.slow
def test_predict_brings_a_picture_to_the_input_as_certify_does(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pictures(tmp_path / "p", [f"c{place}" for place in range(10)], (40, 56), (32, 32))
    for path in (tmp_path / "p").rglob("*.png"):
        Image.open(path).convert("L").save(path)
    sized = ("--input", "1,32,32", "--resize", "40")
    runs = ("--runs", tmp_path / "runs")
    good("import", "small", "--model", FACTORY, "--weights", weights, "--data", tmp_path / "p",
         "--set", "certify.sigma=0.25", *sized, *runs)  # fmt: skip
    folder = RunFolder(tmp_path / "runs" / "small")
    inputs = data.load(data_source(folder.read_recipe()), "test")
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(Predictor, "predict", lambda self, x: seen.append(x) or 0)
    files = [tmp_path / "p" / "c3" / f"{number}.png" for number in (0, 1)]
    done = call("predict", "small", *files, "--label-only", *runs)
    assert done.exit_code == 0, (done.output, done.exception)
    assert torch.equal(torch.stack(seen), inputs.batch(np.array([6, 7])))
    # A release does so, too, and its card says it.
    good("release", "small", "--not-private", *runs)
    released = folder.path / "release"
    assert dpdist.load(released).description.pictures == ReleasedPictures(resize=40)
    trust = ("--trust-factory", FACTORY)
    before = list(seen)
    seen.clear()
    done = call("predict", released, *files, "--label-only", *trust)
    assert done.exit_code == 0, (done.output, done.exception)
    assert torch.equal(torch.stack(seen), torch.stack(before))


# --- a run without an epsilon -----------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    sigma = ("--set", "certify.sigma=0.25")
    good("import", "mine", *ARGUMENTS, "--weights", weights, *sigma, "--runs", runs)
    return runs


@pytest.mark.slow
def test_every_statement_says_that_there_is_no_epsilon(here: None, runs: Path) -> None:
    good("certify", "mine", "--runs", runs, "--n", "500", "--set", "certify.every=60")
    good("report", "mine", "--runs", runs)
    good("release", "mine", "--runs", runs, "--not-private")
    folder = RunFolder(runs / "mine")
    facts = dpdist.load_results(folder)
    assert facts.privacy_statement == NOT_TRAINED_HERE == "not trained by dpdist: no epsilon"
    card = facts.privacy_card()
    assert card["private"] is False and card["mechanism"] == [NOT_TRAINED_HERE]
    assert (card["records"], card["assumptions"]) == (None, [])
    pages = [
        folder.report_file.read_text(),
        (folder.release_folder / "README.md").read_text(),
        (folder.release_folder / "privacy_card.md").read_text(),
        str(privacy_rows([facts])),
        good("verify", folder.release_folder, "--trust-factory", FACTORY),
        json.dumps(dict(facts.summary())),
    ]
    for text in pages:
        assert NOT_TRAINED_HERE in text.lower().replace("\n", " ")
        for false in ("infinite", "(inf", "epsilon inf", "proved by"):
            assert false not in text, false
    release = dpdist.load(folder.release_folder, trusted_factory=FACTORY)
    assert release.no_epsilon == NOT_TRAINED_HERE


def test_a_release_needs_the_word_that_it_is_not_private(runs: Path) -> None:
    assert NOT_TRAINED_HERE in refused("release", "mine", "--runs", runs)


@pytest.mark.parametrize("command", ["run", "audit --kind membership", "audit --kind poison"])
def test_nothing_of_its_training_can_be_done(runs: Path, command: str) -> None:
    recipe = runs / "mine" / "recipe.yaml"
    assert NOT_TRAINED_HERE in refused(*command.split(), recipe)


def test_an_edited_model_is_noticed(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "mine", tmp_path / "mine")
    folder = RunFolder(tmp_path / "mine")
    raw = bytearray((folder.model_folder / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (folder.model_folder / "model.safetensors").write_bytes(bytes(raw))
    refused("certify", folder.path, "--set", "certify.max_inputs=1", "--n", "100")
