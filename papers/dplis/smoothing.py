"""Does DPlis' smoothing help a recipe? The same training without it, and with several radii.

    dpdist run docstrings-lstm --until pretrain --set data.root=data   # public weights, once
    python papers/dplis/smoothing.py docstrings-lstm --data-root data --radii 4,10 [--seeds 3]
    python papers/dplis/smoothing.py --quick                 # a smoke test on invented pictures

Each training has a fresh key, begins with the same public weights, and runs in this process. A line
of JSON for each; then of each row the mean of what is measured, and of its difference from no
smoothing, with Student's 95 % interval. papers/dplis/results/measured.md has the tables.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from _common import end_script, make_images, parse_arguments, require_data, scratch_folder

from dpdist.audits.membership_statistics import Estimate
from dpdist.evaluation import evaluate_stage
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import find_recipe, load_recipe, parse_changes
from dpdist.training import worker
from dpdist.training.collectives import Reducer
from dpdist.training.job import prepare


def training(name: str, change: dict[str, Any], root: Path) -> dict[str, float]:
    """Train once and return the accuracy in percent, for language models also the perplexity."""
    recipe = load_recipe(
        find_recipe(name), change | {"data.root": str(root.resolve()), "resources.workers": 1}
    )
    with tempfile.TemporaryDirectory(prefix="dpdist-smoothing-") as place:
        folder = RunFolder(Path(place) / "run")
        worker.run_training(prepare(recipe, folder, name), Reducer(0, 1, torch.device("cpu")))
        evaluate_stage(recipe, folder)
        found = json.loads(folder.evaluation.read_text())
    told = {"accuracy": round(100 * found["accuracy"], 3)}
    return told | ({"perplexity": found["perplexity"]} if "next_tokens" in found else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("recipe", nargs="?")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--radii", default="4,10")
    parser.add_argument("--draws", type=int, help="K; default: the recipe's")
    parser.add_argument("--set", action="append", metavar="KEY=VALUE", help="of the recipe")
    parser.add_argument("--seeds", type=int, default=3)
    tiny = {
        "recipe": "dplis-mnist-mlp", "data_root": scratch_folder() / "data", "radii": "10",
        "draws": 2,
        "set": ["training.steps=2", "training.batch_size=8"], "seeds": 1,
    }  # fmt: skip
    given = parse_arguments(parser, tiny)
    torch.set_num_threads(1)
    if given.quick:
        make_images(given.data_root, "mnist", 60)
    if given.recipe is None:
        end_script(
            "needs a recipe of method dplis and its data: smoothing.py RECIPE --data-root DATA"
        )
    root = require_data(given.data_root, load_recipe(find_recipe(given.recipe)).data.name)
    changes = parse_changes(given.set)
    draws = {} if given.draws is None else {"method.augmentations": given.draws}
    rows: dict[str, dict[str, Any]] = {"none": {"method": "dp-sgd"}}
    for radius in given.radii.split(","):
        rows[f"R = {radius}"] = {"method.radius": float(radius), **draws}
    found: dict[str, list[dict[str, float]]] = {row: [] for row in rows}
    for seed in range(given.seeds):
        for row, change in rows.items():
            found[row].append(training(given.recipe, changes | change, root))
            print(json.dumps({"row": row, "seed": seed, **found[row][-1]}), flush=True)
    for what in found["none"][0]:
        base = [one[what] for one in found["none"]]
        for row, lines in found.items():
            values = [one[what] for one in lines]
            apart = [value - other for value, other in zip(values, base, strict=True)]
            told = (Estimate.from_values(each) for each in (values, apart))
            shown = ", ".join(f"{e.value:.2f} [{e.low:.2f}, {e.high:.2f}]" for e in told)
            print(f"{what}, {row}: mean, and less none: {shown}")


if __name__ == "__main__":
    main()
