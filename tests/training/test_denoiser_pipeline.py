"""Denoisers through the whole pipeline: the CIFAR-10 recipe, the benchmark's own rows."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from support.benchmarks import load as load_benchmark
from support.datasets import png, write_split

from dpdist import models, pipeline
from dpdist.cli import main
from dpdist.models.zoo import FixedBatchNorm
from dpdist.reports.facts import read_facts
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import find_recipe, load_recipe, resolve_recipe
from dpdist.training.pretraining import pretrain

pytestmark = [pytest.mark.timeout(600), pytest.mark.whole]


def colour_images(root: Path, records: int = 60) -> Path:
    """Made-up records in CIFAR-10's layout."""
    rng = np.random.default_rng(3)
    for split in ("train", "test"):
        pictures = rng.integers(0, 256, (records, 32, 32, 3), dtype=np.uint8)
        rows = [{"bytes": png(picture), "path": ""} for picture in pictures]
        write_split(root / "cifar10", split, image=rows, label=rng.integers(0, 10, records))
    return root


@pytest.mark.long
@pytest.mark.nightly
def test_the_cifar10_recipe_with_a_torchvision_classifier(here, tmp_path):
    """pretrain, train, evaluate, certify, report: a few steps of the recipe that comes along."""
    small = {
        "model.classifier": str(tmp_path / "classifier"),
        "public.training": {"batch_size": 8, "steps": 2, "learning_rate": 0.01},
        "training.batch_size": 8,
        "training.steps": 3,
        "privacy.delta": 1e-3,
        "certify.n": 20,
        "certify.n0": 5,
        "certify.every": 30,
        "certify.radii": [0.1],
        "resources.workers": 2,
        "resources.cpus_per_worker": 1,
    }
    recipe = load_recipe(find_recipe("transdenoiser-cifar10"), small)
    recipe = resolve_recipe(recipe, data_root=colour_images(tmp_path / "data"))
    pretrain(recipe, "test")
    folder = pipeline.run(recipe, runs=tmp_path / "runs")
    facts = read_facts(folder)
    assert facts.training_summary["steps"] == 3 and facts.guarantee.epsilon <= 3.0
    assert len(facts.tables[0].index) == 2 and folder.report_file.exists()
    assert facts.training_summary["fallback_layers"] == []
    model = models.load(folder.model_folder)
    classifier = models.load(tmp_path / "classifier").state_dict()
    behind = model.get_submodule("classifier")
    assert any(isinstance(module, FixedBatchNorm) for module in behind.modules())
    # Nothing of the classifier moved: weights, and the statistics it was pre-trained with.
    assert all(torch.equal(value, classifier[key]) for key, value in behind.state_dict().items())


@pytest.fixture
def benchmark(monkeypatch) -> ModuleType:
    return load_benchmark("papers/transdenoiser/run", monkeypatch)


@pytest.mark.long
@pytest.mark.nightly
def test_the_benchmark_makes_its_table_and_its_picture(here, benchmark, tmp_path, monkeypatch):
    """Rows of three kinds on the digits: no run, a run, and one put together."""
    asked = []

    def watch(words: list[str], **options: bool) -> None:
        asked.append(words[0])
        main.app(words, **options)

    monkeypatch.setattr(benchmark, "app", watch)
    arguments = ["--quick", "--out", str(tmp_path), "--only", "classifier-*0.25-0", "dp-sgd*"]
    benchmark.main(arguments)
    steps = ["run", "run", "run", "attack", "import", "certify", "attack"]
    assert asked == steps
    text = (tmp_path / "table.md").read_text()
    lines = {line.split(" | ")[0][2:]: line.split(" | ") for line in text.splitlines()[3:6]}
    public, private, behind = lines.values()
    assert next(iter(lines)) == "public classifier alone" and public[1] == "sees none of them"
    assert private[1] == behind[1] and 2.9 < float(behind[1]) <= 3.0
    # Its figures are those of the run folders.
    folder = tmp_path / "runs" / "dp-sgd-denoised-noise-0.25-0"
    (certificates,) = folder.glob("certificates/*/certificates.parquet")
    table = pq.read_table(certificates).to_pylist()
    share = np.mean([r["prediction"] == r["label"] and r["radius"] >= 0.1 for r in table])
    assert behind[4] == f"{100 * share:.1f}"
    evaluation = json.loads((folder / "evaluation.json").read_text())
    assert behind[2] == f"{100 * evaluation['accuracy']:.1f}"
    assert (tmp_path / "denoisers.png").stat().st_size > 10_000
    # What is done is not done again.
    benchmark.main(arguments)
    assert asked == steps and (tmp_path / "table.md").read_text() == text
    # Other attacks are made on the runs that are there.
    benchmark.main([*arguments, "--attacks", "fgsm"])
    assert asked == [*steps, "attack", "attack"]
    more = (tmp_path / "table.md").read_text()
    head, _, *rows = [
        line
        for line in more.splitlines()
        if line.startswith("| input noise |")
        or line.startswith("| 0.25 |")
        or line.startswith("| --- ")
    ][-5:]
    assert "fgsm 0.5 | fgsm 1 | fgsm 2 | pgd 0.5" in head and len(rows) == 3
    for line in rows:
        cells = [float(cell) for cell in line.strip("| ").split(" | ")[3:]]
        fgsm, pgd, every = cells[:3], cells[3:6], cells[6:]
        assert all(e <= min(f, p) for f, p, e in zip(fgsm, pgd, every, strict=True))


def test_the_benchmark_shows_what_algorithm_1_measured(benchmark, tmp_path):
    bench = benchmark.Bench(tmp_path, None, quick=True)
    (row,) = [r for r in benchmark.rows(1) if (r.name, r.noise) == ("full-tanh", 0.1)]
    recipe, folder = load_recipe(bench.recipe(row, 0)), RunFolder(tmp_path / "run")
    assert recipe.model.options["activation"] == "tanh" and recipe.method.sigma == 0.1
    folder.create_or_open(recipe)
    steps = [
        {
            "s_min": s_min,
            "s_min_why": why,
            "s_min_exact": not s_min,
            "added_xi": 2.0,
            "nonnegative": count,
            "examples": 10,
        }
        for s_min, why, count in ((0.0, "rank", 3), (1e-5, "Lanczos", 9))
    ]
    folder.metrics.write_text("".join(json.dumps(step) + "\n" for step in steps))
    assert benchmark.split_line(folder, recipe) == (
        "S_min at most 0 to 1e-05 (Lanczos; rank); added 2 to 2; remainders >= 0: 30 % of the "
        "first batch, 90 % of the last"
    )
    # The networks of the smoke test are as they were.
    assert "activation" not in benchmark.QUICK_NETWORKS["denoiser"]["options"]


@pytest.mark.long
def test_exact_eigenvalues_relu_has_zeros_and_tanh_has_none(benchmark):
    """One zero for each hidden channel of a ReLU network: 2 + 3 + 2; none with tanh."""
    for activation, zeros in (("relu", 7), ("tanh", 0)):
        for found in benchmark.eigenvalues(activation, None):
            assert (found < 1e-14 * found[-1]).sum() >= zeros
            assert (found[0] > 1e-12 * found[-1]) == (zeros == 0)


def test_cells_show_the_mean_and_the_range(benchmark):
    assert benchmark.cell([0.5]) == "50.0"
    assert benchmark.cell([0.5, 0.6, 0.55]) == "55.0 (50.0 to 60.0)"


def test_stobatch_s_row_is_certified_by_noise_of_the_row_s_worth(benchmark, tmp_path):
    (row,) = [r for r in benchmark.rows(2) if r.name == "stobatch"]
    bench = benchmark.Bench(tmp_path, None, quick=False)
    recipe = load_recipe(bench.recipe(row, 1))
    assert recipe.method.name == "stobatch" and recipe.method.sigma == row.noise
    assert recipe.certify.sigma == pytest.approx(0.2) and recipe.training.init_seed == 1
    assert str(recipe.model.classifier.folder) == str(bench.public / "classifier")


def measured(benchmark, repeat: int, radii: list[float], wrong: dict[tuple[str, float], list[int]]):
    """Three images with labels 0 to 2, answered rightly but for `wrong`: attack and size, index."""
    pairs = [(name, size) for name in ("pgd", "mim") for size in benchmark.SIZES]
    cells = [
        (name, size, i, -1 if i in wrong.get((name, size), []) else i)
        for name, size in pairs
        for i in (2, 0, 1)
    ]
    attack, size, index, prediction = map(np.array, zip(*cells, strict=True))
    attacks = SimpleNamespace(
        attack=attack, size=size, index=index, label=index, prediction=prediction,
        attacks=["pgd", "mim"], has=lambda name, size: (name, size) in pairs,
    )  # fmt: skip
    certificates = SimpleNamespace(index=[0, 1, 2], size_if_correct=lambda: np.array(radii))
    return benchmark.Measured("1", 0.9, certificates, attacks, repeat=repeat)


def test_rows_are_compared_image_by_image_and_key_by_key(benchmark, tmp_path, monkeypatch):
    chosen = [r for r in benchmark.rows(2) if r.noise == 0.25 and r.name in ("no-dp", "stobatch")]
    runs = {
        "no-dp": [measured(benchmark, 0, [0.3, 0.3, 0.0], {}), measured(benchmark, 1, [0] * 3, {})],
        "stobatch": [measured(benchmark, 1, [0.3, 0.0, 0.0], {("mim", 2.0): [1, 2]})],
    }
    monkeypatch.setattr(benchmark, "measured", lambda bench, row: runs[row.name])
    bench = benchmark.Bench(tmp_path, None, quick=True, attacks=("mim", "pgd"))
    lines = benchmark.comparisons(bench, chosen)
    assert "stobatch against no-dp, noise 0.25, radius 0.25: 1 : 0 (p 1)" in lines
    assert "stobatch against no-dp, noise 0.25, mim+pgd of size 2: 0 : 2 (p 0.5)" in lines
    line = runs["stobatch"][0].line(chosen[1])
    assert (line["row"], line["repeat"], line["inputs"]) == ("stobatch", 1, 3)
    assert line["attacked"]["mim"]["2"] == benchmark.bits(np.array([True, False, False]))
    assert line["attacked"]["pgd"]["2"] == line["attacked"]["mim"]["1"] == "e0"
    assert line["certified"]["0.25"] == "80"
