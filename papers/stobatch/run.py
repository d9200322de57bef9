"""What objective perturbation is worth at one epsilon, and what is trained beside it: heads on
public features, StoBatch, Secure-SGD, DP-SGD; as they are and under attack.

    python papers/stobatch/run.py --data-root DATA [--rows patches,adversarial] [--seeds 3]
    python papers/stobatch/run.py --quick      # a smoke test on the built-in digits

Each row is a recipe with fields changed, trained in this process with keys of its own (plan,
ledger; no Ray): accuracy on all test images, and on the first 500 under each attack in L-infinity
(10 steps, images in [0, 1]). A model with noise of its own is attacked through it, a gradient being
the mean of --draws, and answers by --answers draws at 95 % or abstains, which is not right; its
accuracy without attack is that of its mean scores. Each training is a line of --results; what is
there is not made again. --table prints Markdown: the mean, and the least and the greatest of the
trainings.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from _attacked import attack_hits
from _common import append_line, mean_and_range, parse_arguments, read_lines, require_data
from torch import nn

from dpdist import models
from dpdist.attacks.settings import AttackSettings
from dpdist.certification.worker import expected_log_scores
from dpdist.core.fields import ATTACKS
from dpdist.data import Dataset
from dpdist.randomness.keys import StreamKeys
from dpdist.randomness.noise_location import find_noise_location
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import Recipe, find_recipe, load_recipe
from dpdist.training.collectives import Reducer
from dpdist.training.job import prepare
from dpdist.training.records import load_test_records
from dpdist.training.worker import run_training

RESULTS = Path(__file__).with_suffix(".jsonl")
SIZES, PASSES, BLOCK = "0.025,0.05,0.1,0.3", 16, 1000  # half of those on [-1, 1]
ROBUST, PLAIN = "mnist-functional-robust", {"method.adversarial": None}
CIFAR = {"data.name": "cifar10"}
DP_SGD = {
    "method": {"name": "dp-sgd"}, "privacy.clip_norm": 0.1,
    "training": {"batch_size": 6000, "steps": 150, "learning_rate": 80.0, "momentum": 0.9},
}  # fmt: skip
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "patches": (ROBUST, PLAIN),
    "adversarial": (ROBUST, {}),
    "relevance": (ROBUST, {**PLAIN, "method.relevance": {"data": "digits"}}),
    "encoder": (ROBUST, {**PLAIN, "method.encoder": 0.05}),
    "scattering": ("mnist-functional", {}),
    "scattering-adversarial": ("mnist-functional", {"method.adversarial": {"size": 0.1}}),
    "scattering-noisy": ("mnist-functional", {"method.sigma": 0.25}),
    "scattering-dp-sgd": ("mnist-functional", DP_SGD),
    "stobatch": ("mnist-stobatch", {}),
    "stobatch-noise-alone": ("mnist-stobatch", {"method.xi": 0.0}),
    "secure-sgd": ("secure-sgd-mnist", {}),
    "secure-sgd-agm": ("secure-sgd-agm-mnist", {}),
    "hgm-dp-sgd": ("dpsgd-hgm-mnist", {}),
    "cifar10-scattering": ("mnist-functional", CIFAR),
    "cifar10-patches": (ROBUST, {**PLAIN, **CIFAR}),
}
SMALL: dict[str, tuple[str, dict[str, Any]]] = {  # on built-in data
    "digits": ("digits-functional", {}),
    "digits-stobatch": ("digits-stobatch", {"training.steps": 2, "training.epochs": None}),
}


def recipe_of(row: str, epsilon: float, data_root: Path | None) -> Recipe:
    name, change = (ROWS | SMALL)[row]
    recipe = load_recipe(find_recipe(name), {**change, "privacy.epsilon": epsilon})
    if row in SMALL:
        return recipe
    root = require_data(data_root, recipe.data.name)
    return load_recipe(
        find_recipe(name), {**change, "privacy.epsilon": epsilon, "data.root": str(root)}
    )


def right(model: nn.Module, test: Dataset) -> int:
    """Count the inputs that are classified correctly."""
    noisy, found = find_noise_location(model).is_random, 0
    for low in range(0, len(test), BLOCK):
        rows = slice(low, min(low + BLOCK, len(test)))
        x = test.batch(rows)
        with torch.inference_mode():
            scores = expected_log_scores(model, x, PASSES, "1", low) if noisy else model(x)
        found += int((scores.argmax(1) == test.targets(rows)).sum())
    return found


def attacked(model: nn.Module, test: Dataset, settings: AttackSettings) -> dict[str, Any]:
    """Count the first inputs classified correctly, by attack and size; size 0 is no attack."""
    source = StreamKeys("benchmark", "1", "", "", "", 0.0)
    found: dict[str, dict[str, int]] = {name: {} for name in settings.attacks}
    for name, size, hits in attack_hits(model, test, settings, source):
        for attack in [name] if size else settings.attacks:
            found[attack][f"{size:g}"] = int(hits.sum())
    return found


def trained(recipe: Recipe, settings: AttackSettings) -> dict[str, Any]:
    """Train with a key of its own and return all measurements."""
    with tempfile.TemporaryDirectory(prefix="dpdist-functional-") as place:
        job = prepare(recipe, RunFolder(Path(place) / "run"), recipe.name)
        began = time.process_time()
        run_training(job, Reducer(0, 1, torch.device("cpu")))
        seconds = time.process_time() - began
        model = models.load(job.folder.model_folder).eval().requires_grad_(False)
    test = load_test_records(recipe, job.source)
    return {
        "proved": round(job.plan.guarantee().epsilon, 4), "seconds": round(seconds, 1),
        "n": len(test), "right": right(model, test),
        "attacked": len(settings.indices(len(test))), "draws": settings.samples,
        **attacked(model, test, settings),
    }  # fmt: skip


def line_of(row: str, found: list[dict[str, Any]], settings: AttackSettings) -> str:
    """Return a row of the table."""
    cells = [mean_and_range([100 * one["right"] / one["n"] for one in found])]
    for name, size in columns(settings):
        cells.append(mean_and_range([100 * one[name][size] / one["attacked"] for one in found]))
    seconds = sum(one["seconds"] for one in found) / len(found)
    told = [row, f"{found[0]['epsilon']:.3g}", *cells, str(len(found)), f"{seconds:.0f}"]
    return f"| {' | '.join(told)} |"


def columns(settings: AttackSettings) -> list[tuple[str, str]]:
    """Return attack and size of each column; without an attack once."""
    first = settings.attacks[0]
    return [
        (first if name == "none" else name, f"{size:g}") for name, size in settings.attack_sizes
    ]


def read(path: Path, setting: dict[str, Any], asked: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Read a setting's trainings from a file, those that were attacked with these settings."""
    found = read_lines(path, setting)
    return [one for one in found if all(size in one.get(name, {}) for name, size in asked)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--epsilon", type=float, default=0.2)
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each row")
    parser.add_argument("--inputs", type=int, default=500, help="that are attacked")
    parser.add_argument("--attacks", default=",".join(ATTACKS))
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--answers", type=int, default=100)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="of what is there")
    tiny = {
        "rows": ",".join(SMALL), "epsilon": 1.0, "seeds": 1, "inputs": 4, "attacks": "fgsm,pgd",
        "sizes": "0.1", "draws": 1, "answers": 20,
    }  # fmt: skip
    asked = parse_arguments(parser, tiny, output_options=["results"])
    torch.set_num_threads(1)
    settings = AttackSettings(
        sizes=tuple(map(float, asked.sizes.split(","))), attacks=tuple(asked.attacks.split(",")),
        samples=asked.draws, n=asked.answers, alpha=0.05, max_inputs=asked.inputs,
    )  # fmt: skip
    told = [f"{name} {size}" if float(size) else "0" for name, size in columns(settings)]
    head = ["row", "epsilon", "accuracy, %", *told, "trainings", "s"]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for row in asked.rows.split(","):
        setting = {"row": row, "epsilon": asked.epsilon}
        wanted = columns(settings)
        while not asked.table and len(read(asked.results, setting, wanted)) < asked.seeds:
            found = trained(recipe_of(row, asked.epsilon, asked.data_root), settings)
            append_line(asked.results, setting | found)
        if done := read(asked.results, setting, wanted)[: asked.seeds]:
            print(line_of(row, done, settings), flush=True)


if __name__ == "__main__":
    main()
