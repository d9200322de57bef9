"""What MNIST's heads on public features are worth at one epsilon, as they are and under attack.

    python benchmarks/functional.py --data-root DATA [--rows patches,adversarial] [--seeds 3]

Each row is a recipe with fields changed, trained in this process with keys of its own (plan,
ledger; no Ray): accuracy on all test images, and on the first 500 under PGD in L-infinity, 10
steps within 0.1 in [0, 1] of the images. Each training is a line of --results; what is there is not
made again. --table prints Markdown: the mean, and the least and the greatest of the trainings.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dpdist import models
from dpdist.adversary.balls import Ball
from dpdist.adversary.randomised import RandomisedClassifier
from dpdist.attacks.evasion import attack
from dpdist.certification.sampling import Randomness
from dpdist.data import Dataset
from dpdist.randomness.units import UnitSource
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import Recipe, find, load
from dpdist.training.job import prepare
from dpdist.training.loop import run
from dpdist.training.records import evaluation_data
from dpdist.training.reducer import Reducer

RESULTS = Path(__file__).with_suffix(".jsonl")
SIZES, STEPS, BLOCK = (0.025, 0.05, 0.1), 10, 100
ROBUST, PLAIN = "mnist-functional-robust", {"method.adversarial": None}
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
    "scattering-dp-sgd": ("mnist-functional", DP_SGD),
}


def recipe_of(row: str, epsilon: float, data_root: str | None) -> Recipe:
    name, change = ROWS[row]
    root = {} if data_root is None else {"data.root": data_root}
    return load(find(name), {**change, "privacy.epsilon": epsilon, **root})


def right(model: nn.Module, test: Dataset, size: float, inputs: int) -> int:
    """How many of the first inputs are named rightly, moved by at most `size`."""
    classifier = RandomisedClassifier(model)
    randomness = Randomness(UnitSource("benchmark", "1", "", "", "", 0.0))
    found = 0
    for low in range(0, inputs, BLOCK):
        names = range(low, min(low + BLOCK, inputs))
        x, labels = test.batch(slice(low, names.stop)), test.targets(slice(low, names.stop))
        if size:
            ball = Ball(x, torch.full((len(x),), size, dtype=torch.float64), "linf")
            x = attack("pgd", classifier, ball, labels, names, randomness, steps=STEPS)
        with torch.inference_mode():
            found += int((model(x).argmax(1) == labels).sum())
    return found


def trained(recipe: Recipe, inputs: int) -> dict[str, Any]:
    """One training with a key of its own."""
    with tempfile.TemporaryDirectory(prefix="dpdist-functional-") as place:
        job = prepare(recipe, RunFolder(Path(place) / "run"), recipe.name)
        began = time.process_time()
        run(job, Reducer(0, 1, torch.device("cpu")))
        seconds = time.process_time() - began
        model = models.load(job.folder.model).eval().requires_grad_(False)
    test = evaluation_data(recipe, job.source)
    return {
        "proved": round(job.plan.guarantee().epsilon, 4), "seconds": round(seconds, 1),
        "n": len(test), "right": right(model, test, 0.0, len(test)),
        "attacked": min(inputs, len(test)),
        "pgd": {f"{size:g}": right(model, test, size, inputs) for size in (0.0, *SIZES)},
    }  # fmt: skip


def line_of(row: str, found: list[dict[str, Any]]) -> str:
    """Of the table."""

    def shares(rights: list[float]) -> str:
        low, high = min(rights), max(rights)
        return f"{sum(rights) / len(rights):.1f} ({low:.1f} to {high:.1f})"

    cells = [shares([100 * one["right"] / one["n"] for one in found])]
    for size in ("0", *(f"{size:g}" for size in SIZES)):
        cells.append(shares([100 * one["pgd"][size] / one["attacked"] for one in found]))
    seconds = sum(one["seconds"] for one in found) / len(found)
    return f"| {row} | {found[0]['epsilon']:.3g} | {' | '.join(cells)} | {seconds:.0f} |"


def read(path: Path, setting: dict[str, Any]) -> list[dict[str, Any]]:
    """The trainings of a setting that a file holds."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [one for one in map(json.loads, lines) if setting.items() <= one.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data-root")
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--epsilon", type=float, default=0.2)
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each row")
    parser.add_argument("--inputs", type=int, default=500, help="that are attacked")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="of what is there")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    sizes = " | ".join(f"L∞ {size:g}" for size in (0.0, *SIZES))
    print(f"| head | epsilon | accuracy, % | {sizes} | s |\n|{'---|' * (5 + len(SIZES))}")
    for row in asked.rows.split(","):
        setting = {"row": row, "epsilon": asked.epsilon}
        while not asked.table and len(read(asked.results, setting)) < asked.seeds:
            found = trained(recipe_of(row, asked.epsilon, asked.data_root), asked.inputs)
            with asked.results.open("a") as file:
                file.write(json.dumps(setting | found) + "\n")
        if done := read(asked.results, setting)[: asked.seeds]:
            print(line_of(row, done), flush=True)


if __name__ == "__main__":
    main()
