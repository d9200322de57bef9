"""Membership inference with and without privacy: what attacks find, beside what they may find.

For each recipe the residual perturbation paper's shadow protocol (a quarter of the records in each
model), and a bank for LiRA and RMIA; for those with --epsilon the same recipe with DP-SGD at that
epsilon. Data under DPDIST_DATA_ROOT (default ../shared/data). Banks are kept in --runs and continue
where they stopped. --quick: a smoke test on scikit-learn's digits, of the bank alone.

    python papers/residual/membership.py [--recipes mnist-membership] [--models 8] [--records 15000]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from _common import parse_arguments, require_data

from dpdist.runs.recipe import Recipe, find_recipe, load_recipe, parse_recipe

PRIVATE = {"batch_size": 256, "learning_rate": 0.25, "momentum": 0.0}  # of DP-SGD
QUICK: dict[str, Any] = {
    "name": "digits-membership", "data": {"name": "digits", "max_train": 200}, "model": "linear",
    "privacy": {"noise_multiplier": 0, "clipping": "none", "delta": 1e-5},
    "training": {"batch_size": 20, "steps": 20, "learning_rate": 0.5},
}  # fmt: skip


def variants(
    recipe: Recipe, records: int | None, epsilon: float | None, epochs: int | None = None
) -> list[Recipe]:
    """Return the recipe with these records and epochs, and the same with DP-SGD at `epsilon`."""
    raw = recipe.model_dump(mode="json")
    if records is not None:
        raw["data"]["max_train"] = records
    if epochs is not None:
        raw["training"]["epochs"] = epochs
    found = [raw]
    if epsilon is not None:
        privacy = raw["privacy"] | {
            "noise_multiplier": None, "epsilon": epsilon, "clipping": "flat"
        }  # fmt: skip
        name = f"{recipe.name}-eps-{epsilon:g}"
        training = raw["training"] | PRIVATE
        found.append(raw | {"name": name, "privacy": privacy, "training": training})
    return [parse_recipe(one, one["name"]) for one in found]


def measure(recipe: Recipe, runs: Path, models: int, attacks: str, root: Path | None) -> list[str]:
    """Return lines of the table, from `dpdist audit --kind membership`."""
    path = runs / f"{recipe.name}.yaml"
    path.write_text(recipe.to_yaml())
    began = time.monotonic()
    arguments = ["--kind", "membership", "--runs", str(runs)]
    arguments += ["--set", f"membership.models={models}"]
    arguments += ["--set", f"membership.attacks=[{attacks}]"]
    arguments += ["--set", f"data.root={root}"] if root else []
    subprocess.run([sys.executable, "-m", "dpdist", "audit", str(path), *arguments], check=True)
    seconds = time.monotonic() - began
    bank = "quarters-2" if attacks == "shadow" else f"coins-{models}"
    home = runs / recipe.name / "private" / "attacks" / f"membership-{bank}"
    found = json.loads((home / "membership.json").read_text())
    return [_line(recipe.name, found, one, seconds) for one in found["attacks"]]


def _line(name: str, bank: dict[str, Any], one: dict[str, Any], seconds: float) -> str:
    auc, low, high = one["auc"]
    mean = sum(one["aucs"]) / len(one["aucs"])
    rate, least, most = one["tpr_at"]["0.01"]
    ceiling = one["ceilings"][0]["auc"] if one["ceilings"] else 1.0
    epsilon = bank["proved"]["epsilon"]
    return (
        f"| {name} | {one['attack']} | {epsilon if epsilon == 'inf' else f'{epsilon:.3g}'} | "
        f"{auc:.3f} [{low:.3f}, {high:.3f}] | {mean:.3f} | {ceiling:.3f} | "
        f"{100 * rate:.2f} [{100 * least:.2f}, {100 * most:.2f}] | {seconds:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--recipes", default="mnist-membership,cifar10-membership")
    parser.add_argument("--attacks", default="shadow;lira,lira-offline,rmia")
    parser.add_argument("--models", type=int, default=16)
    parser.add_argument("--records", type=int)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--side", type=int, help="average images to so many pixels a side")
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--only", choices=("plain", "private"), help="of a recipe's two rows")
    parser.add_argument("--runs", type=Path, default=Path("runs/membership"))
    given = parse_arguments(parser, {"models": 4, "attacks": "lira,rmia"}, output_options=["runs"])
    recipes, root = [parse_recipe(QUICK, "quick")], None
    if not given.quick:
        recipes = [load_recipe(find_recipe(name)) for name in given.recipes.split(",")]
        root = require_data(None, *(recipe.data.name for recipe in recipes))
    given.runs.mkdir(parents=True, exist_ok=True)
    print("| recipe | attack | proved ε | AUC | mean AUC | ceiling | TPR at 1 % FPR, % | s |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    original = root
    for recipe in recipes:
        if given.side and original is not None:
            from run import smaller  # beside this file

            place, name = given.runs / f"data-{given.side}", recipe.data.name
            root = smaller(original, place, name, given.side, {"train": 60_000, "test": 10_000})
        private = None if given.quick else given.epsilon
        chosen = {"plain": slice(0, 1), "private": slice(1, None)}.get(given.only, slice(None))
        for one in variants(recipe, given.records, private, given.epochs)[chosen]:
            for attacks in given.attacks.split(";"):
                for line in measure(one, given.runs, given.models, attacks, root):
                    print(line, flush=True)


if __name__ == "__main__":
    main()
