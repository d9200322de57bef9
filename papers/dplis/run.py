"""DPlis' tables and sweeps: one training a row, read at each of its budgets.

    python papers/dplis/run.py --item 'Table 2' --row 'MNIST MLP, none' --data-root DATA [--seeds 5]
    python papers/dplis/run.py --small [--sweeps radius,clip,draws] [--seeds 5]
    python papers/dplis/run.py --quick                                  # a smoke test of the second

The first trains a row of papers/dplis.yaml at full size, in this process; --shorter 4 for a quarter
of its first budget's steps, --draws 3 with so many draws of the smoothing, and its line says so.
The second sweeps R, the clip and K on scikit-learn's digits at the paper's noise multiplier, to the
same epsilons by its accountant. A training pauses at the steps of each budget, and its model so far
is evaluated: all of these models together cost what the last one costs alone, for they are made of
the same noisy gradients. Accuracy on training records is told of public data only.

Each training is a line of --results; what is there is not made again. papers/README.md and
papers/dplis/results/measured.md have the tables.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from _common import append_line, describe_run, parse_arguments, require_data
from _common import read_lines as read

from dpdist import models
from dpdist.data import Dataset
from dpdist.privacy.plan import PrivacyPlan
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import Recipe, find_recipe, load_recipe, parse_recipe
from dpdist.training import worker
from dpdist.training.collectives import Reducer
from dpdist.training.job import prepare
from dpdist.training.records import load_test_records

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "run.jsonl"
# Epsilons of the paper's tables, and the steps that spend them in SMALL by its accountant. (1.99 is
# spent in 6 steps.)
BUDGETS = {5.01: 252, 7.01: 528, 10.0: 1033}
SMALL: dict[str, Any] = {
    "name": "small", "data": {"name": "digits"},
    "model": {"name": "mlp", "options": {"hidden": [64, 32]}},
    "privacy": {"noise_multiplier": 1.1, "clip_norm": 1.0, "delta": 1e-5},
    "training": {"batch_size": 64, "learning_rate": 0.15, "steps": 1},
    "resources": {"checkpoint_seconds": 1e6},
}  # fmt: skip
SETTING = "digits (1,439 records of 8 x 8), ReLU 64-32, batch 64, rate 0.15, noise 1.1; K = 3"


def smoothed(radius: float, draws: int = 3, aggregate: str = "mean") -> dict[str, Any]:
    return {"name": "dplis", "radius": radius, "augmentations": draws, "aggregate": aggregate}


# By row; the first of each sweep is what the others are held against.
SWEEPS: dict[str, dict[str, dict[str, Any]]] = {
    "radius": {"none": {"name": "dp-sgd"}, "R = 10": smoothed(10), "R = 40": smoothed(40)},
    "clip": {
        "none, gradients times 3": {"name": "dp-sgd", "gradient_scale": 3},
        "R = 40, draws summed": smoothed(40, aggregate="sum"),
    },
    "draws": {"K = 1": smoothed(40, 1), "K = 10": smoothed(40, 10)},
    "more": {f"R = {radius}": smoothed(radius) for radius in (5, 20, 30, 60)},
}


@cache
def proved(records: int, batch: int, noise: float, steps: int, delta: float) -> float:
    """Return the epsilon of `steps` steps."""
    plan = PrivacyPlan.dp_sgd(
        records=records, batch_size=batch, noise_multiplier=noise, steps=steps, delta=delta
    )
    return round(plan.guarantee().epsilon, 4)


def accuracy(model: torch.nn.Module, records: Dataset) -> float:
    """Return the accuracy in percent."""
    right = 0
    with torch.inference_mode():
        for start in range(0, len(records), 1000):
            rows = slice(start, start + 1000)
            right += int((model(records.batch(rows)).argmax(1) == records.targets(rows)).sum())
    return round(100 * right / len(records), 4)


def reading(recipe: Recipe, steps: dict[str, int]) -> dict[str, Any]:
    """Train once and return the accuracies after `steps[column]` steps, by column."""
    found: dict[str, Any] = {"test": {}, "train": {}, "steps": steps, "proved": {}}
    with tempfile.TemporaryDirectory(prefix="dpdist-dplis-") as place:
        job = prepare(recipe, RunFolder(Path(place) / "run"), recipe.name)
        splits = {"test": load_test_records(recipe, job.source), "train": job.records()}
        for column, until in steps.items():
            worker.run_training(job, Reducer(0, 1, torch.device("cpu")), until)
            model = models.load(job.folder.model_folder, trusted_factory=recipe.model.name)
            for split, records in splits.items():
                found[split][column] = accuracy(model, records)
            step = job.plan.step(0)
            found["proved"][column] = proved(
                job.plan.records, recipe.training.batch_size, step.noise_multiplier, until,
                job.plan.delta,
            )  # fmt: skip
    return found | {"n": len(splits["test"])}


def small_trainings(
    sweeps: list[str], seeds: int, only: int | None
) -> Iterator[tuple[dict[str, Any], Recipe, Any]]:
    """Yield name, recipe and steps of each training: all rows of one seed, then of the next.

    With `only`, each training takes that many steps instead of those of the budgets.
    """
    steps = {f"ε {epsilon:.2f}": count for epsilon, count in BUDGETS.items()}
    setting = SETTING
    if only is not None:
        steps, setting = {f"{only} steps": only}, f"{SETTING}; {only} steps"
    for seed in range(seeds):
        for sweep in sweeps:
            for row, method in SWEEPS[sweep].items():
                own = SMALL["training"] | {"steps": max(steps.values()), "init_seed": seed}
                recipe = parse_recipe(SMALL | {"method": method, "training": own}, row)
                name = {"sweep": sweep, "row": row, "seed": seed, "setting": setting}
                yield name, recipe, steps


def full_trainings(given: argparse.Namespace) -> Iterator[tuple[dict[str, Any], Recipe, Any]]:
    """Yield the same for rows as published."""
    about = yaml.safe_load((HERE / "published.yaml").read_text())
    items = {item["id"]: item for item in about["items"] if "at" in item}
    if given.item not in items:
        raise SystemExit(f"--item: one of {', '.join(items)}")
    item = items[given.item]
    rows = [row for row in item["rows"] if given.row in (None, row["row"])]
    for seed in range(given.seeds):
        for row in rows:
            recipe = load_recipe(find_recipe(row["recipe"]), row.get("change"))
            root = require_data(given.data_root, recipe.data.name)
            budgets = list(about["budgets"][recipe.data.name]["steps"].values())
            steps = {c: budgets[i] for c, i in zip(item["columns"], item["at"], strict=True)}
            change, setting = row.get("change") or {}, None
            if given.shorter > 1:
                few = budgets[item["at"][0]] // given.shorter
                steps, setting = {f"{few:,} steps": few}, f"the paper's network, {few:,} steps"
            if given.draws is not None:
                setting = f"{setting or 'as published'}, K = {given.draws} where smoothed"
                if recipe.method.name == "dplis":
                    change = change | {"method.augmentations": given.draws}
            change = change | {
                "training.steps": max(steps.values()),
                "training.init_seed": seed,
                "data.root": str(root),
            }
            name = {"item": item["id"], "row": row["row"], "seed": seed, "setting": setting}
            yield (
                name | {"recipe": row["recipe"]},
                load_recipe(find_recipe(row["recipe"]), change),
                steps,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--item", help="a table of published.yaml, at full size")
    parser.add_argument("--row", help="of it; all of them if left out")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--small", action="store_true", help="the sweeps, on digits; the default")
    parser.add_argument("--sweeps", default="radius,clip,draws", help=", ".join(SWEEPS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="of each small training; default: the budgets'")
    parser.add_argument("--shorter", type=int, default=1, help="share of the first budget's steps")
    parser.add_argument("--draws", type=int, help="K of rows at full size, in place of the paper's")
    parser.add_argument("--results", type=Path, default=RESULTS)
    tiny = {"sweeps": "radius", "seeds": 1, "steps": 2}
    given = parse_arguments(parser, tiny, output_options=["results"])
    torch.set_num_threads(1)
    if given.item is None:
        trainings = small_trainings(given.sweeps.split(","), given.seeds, given.steps)
        words = f"--small --sweeps {given.sweeps} --seeds {given.seeds}"
    else:
        trainings = full_trainings(given)
        words = f"--item '{given.item}' --seeds {given.seeds} --data-root DATA"
        words += f" --shorter {given.shorter}" if given.shorter > 1 else ""
        words += f" --draws {given.draws}" if given.draws is not None else ""
    for name, recipe, steps in trainings:
        if any(name.items() <= one.items() for one in read(given.results)):
            continue
        began = time.monotonic()
        found = reading(recipe, steps)
        about = {
            "command": f"python papers/dplis/run.py {words}",
            "commit": describe_run()["commit"],
        }
        line = name | found | about | {"seconds": round(time.monotonic() - began, 1)}
        append_line(given.results, line)
        print(json.dumps(name, ensure_ascii=False), found["test"], flush=True)


if __name__ == "__main__":
    main()
