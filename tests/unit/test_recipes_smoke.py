"""Every recipe that comes along trains for two steps, on made-up records of the right shape."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.datasets import png, write_split
from support.local_execution import TestExecutor, run_without_ray
from support.optional_extras import needs_hf

from dpdist import data, models
from dpdist.data import registry
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import built_in_recipes, load_recipe, paper_recipes
from dpdist.training.collectives import Reducer
from dpdist.training.ensembles import TeacherEnsemble
from dpdist.training.job import prepare
from dpdist.training.pretraining import pretrain
from dpdist.training.trainer import fit
from dpdist.training.worker import run_training

RECORDS = 48
SIDES = {"mnist": (28, 28), "cifar10": (32, 32, 3), "cifar100": (32, 32, 3), "idc": (50, 50, 3)}
SIDES["svhn"] = SIDES["cifar10"]
FEATURES = {"cifar100-features": 1280, "pubfig83-features": 2048, "celeba1000-features": 2048}


def make_up(root, section) -> None:
    """Parquet files that look like the recipe's data."""
    write(root, section.name, section.classes, section.columns, section.text)


def write(root, name, classes, columns, text=None) -> None:
    rng = np.random.default_rng(list(name.encode()))  # no record of one is in another
    labels = rng.integers(0, classes, 2 * RECORDS)
    if text is not None:
        rows = [f"letter {number} of {labels[number]}" for number in range(2 * RECORDS)]
    elif name in SIDES:
        pictures = rng.integers(0, 256, (2 * RECORDS, *SIDES[name]), dtype=np.uint8)
        rows = [{"bytes": png(picture), "path": ""} for picture in pictures]
    else:
        rows = rng.random((2 * RECORDS, FEATURES[name]), dtype=np.float32).tolist()
    column = columns.features[0] if columns.features else columns.image
    (root / name).mkdir(parents=True)
    if text is not None:
        column = text.column
        (root / name / data.WORDS_FILE).write_text(
            "".join(f"{n}\n" for n in range(text.words or 0))
        )
        said = [f"a public letter {number}" for number in range(RECORDS)]
        write_split(root / name, "public", **{column: said})
    for split, half in (("train", slice(RECORDS)), ("test", slice(RECORDS, None))):
        write_split(root / name, split, **{column: rows[half], columns.label: labels[half]})


# Large ones, and variants: each has a smaller relative among the others.
LARGE = {
    "cifar10-flagship", "cifar10-stobatch", "dpal-cifar10", "dpal-cifar10-audited",
    "dplis-cifar10-cnn-tanh", "dplis-cifar10-mlp",
    "dplis-cifar100-transfer", "dplis-mnist-cnn-control", "dplis-mnist-cnn-r40",
    "dplis-mnist-cnn-sum", "dplis-pubfig83-transfer",
    "hgm-pixeldp-cifar10", "mnist-search-untuned", "pate-svhn", "pixeldp-cifar10",
    "residual-cifar10-2", "residual-cifar10-batchnorm",
    "residual-cifar10-dpsgd", "residual-cifar10-en2", "residual-cifar10-en5",
    "residual-cifar10-multiplicative", "residual-cifar10-no-skip", "residual-cifar100",
    "residual-idc", "residual-mnist-dpsgd", "secure-sgd-agm-cifar10", "secure-sgd-cifar10",
    "transdenoiser-cifar10", "transdenoiser-mnist-full", "transdenoiser-mnist-secure-sgd",
}  # fmt: skip
PATHS = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.nightly] if path.stem in LARGE else [])
    for path in [*built_in_recipes(), *paper_recipes()]
]


def small_changes(path, root, monkeypatch):
    """Return changes that make a recipe tiny, on invented data under `root`."""
    recipe = load_recipe(path)
    if recipe.model.name == "transformer":
        needs_hf()
    small = {
        "training.batch_size": 4,
        "training.steps": 2,
        "training.epochs": None,
        "privacy.noise_multiplier": 1.0,
        "privacy.epsilon": None,
        "privacy.delta": 1e-4,
    }
    if recipe.privacy.noise_multiplier == 0:
        small["privacy.noise_multiplier"] = 0
    if hasattr(recipe.method, "augmentations"):
        small["method.augmentations"] = min(2, recipe.method.augmentations)
    if recipe.privacy.nominal_records is not None:
        small["privacy.nominal_records"] = RECORDS
    taught = hasattr(recipe.method, "teachers")
    if taught:
        small |= {"method.teachers": 2}
    if taught and recipe.tune is None:
        small |= {"privacy.nominal_records": RECORDS}
    if hasattr(recipe.method, "answers"):
        small |= {"method.queries": 3, "method.answers": 3, "method.teaching": {}}
        small |= {"method.threshold": 0.0, "method.screening": 0.0}
        if recipe.method.spreading is not None:
            small["method.spreading.neighbors"] = 2
    if hasattr(recipe.method, "attacks") and getattr(recipe.method, "xi", 1):
        small["method.steps"] = 1
    public = getattr(recipe.method, "redistribution", None)
    if public is not None and public.source != "paid":
        small["method.redistribution.steps"] = 1
        small["method.redistribution.max_records"] = 16
        if public.data != "digits":
            write(root / "data", public.data, public.classes, recipe.data.columns)
    if recipe.data.name != "digits":
        make_up(root / "data", recipe.data)
        small["data.root"] = str(root / "data")
    if recipe.model.name == "resnet-rp":
        members = min(2, recipe.model.options.get("ensemble", 1))
        small["model.options"] = {**recipe.model.options, "width": 8, "ensemble": members}
    if recipe.public is not None:
        part, _ = recipe.model.pretrained_part
        small[f"model.{part}"] = str(root / part)
        if recipe.public.weights is not None:
            small["public.weights"] = None  # nothing is downloaded here
        small["public.training"] = {"batch_size": 2, "steps": 1, "learning_rate": 0.0001}
        for name in registry.SYNTHETIC_RECORDS:
            monkeypatch.setitem(registry.SYNTHETIC_RECORDS, name, 400)
    return small


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_recipe_trains(path, tmp_path, monkeypatch):
    recipe = load_recipe(path, small_changes(path, tmp_path, monkeypatch))
    taught = hasattr(recipe.method, "teachers")
    if recipe.public is not None:
        pretrain(recipe, str(path))
    folder = RunFolder(tmp_path / "run")
    job = prepare(recipe, folder, str(path))
    if taught:
        run_without_ray(monkeypatch)
        fit(job, TestExecutor())
        scores = TeacherEnsemble(folder).class_scores(
            data.load(job.source, "test").batch(slice(0, 2))
        )
        assert len(scores) == 2 and np.isfinite(scores).all()
    else:
        run_training(job, Reducer(0, 1, torch.device("cpu")))
    if recipe.method.capabilities.not_releasable_reason is not None:
        return
    trained = models.load(folder.model_folder)
    values = torch.cat([p.flatten() for p in trained.parameters()])
    assert torch.isfinite(values).all()
    assert folder.require_trained()["steps"] == job.plan.steps
