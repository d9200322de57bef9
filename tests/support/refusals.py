"""Commands that are refused, and the recipes that they name."""

from __future__ import annotations

from pathlib import Path

import yaml

SMALL = {
    "data": {"name": "digits"},
    "model": "linear",
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-4},
    "training": {"batch_size": 50, "steps": 5, "learning_rate": 0.1},
}
RECIPES = {
    "small": {},
    "begun": {"training": {"batch_size": 60, "steps": 5, "learning_rate": 0.1}},
    "bad-key": {"training": {"batch_size": 0, "steps": 5, "learning_rate": 0.1}},
    "bad-model": {"model": "nothing"},
    "bad-delta": {"privacy": {"noise_multiplier": 1.0, "delta": 0.1}},
    "no-root": {"data": {"name": "mnist", "root": "nowhere"}},
    "no-weights": {"model": {"name": "linear", "initial": "nowhere"}},
}
# What is refused, by its arguments. The run `begun` was begun by another recipe, and never trained.
CASES = (
    "--version",
    "run nothing",
    "run bad-key.yaml",
    "run bad-model.yaml",
    "run bad-delta.yaml",
    "run no-root.yaml",
    "run no-weights.yaml",
    "run begun.yaml",
    "run small.yaml --log nothing",
    "run small.yaml --set training.steps=0",
    "run nothing --until train",
    "tune small.yaml",
    "run small.yaml --until pretrain",
    "certify nothing",
    "certify begun",
    "attack nothing",
    "attack begun",
    "predict nothing image.png",
    "predict begun image.png",
    "report nothing",
    "report nothing other",
    "release begun",
    "import new --run begun --classifier nowhere",
    "audit small.yaml --kind membership --set attacks=[nothing]",
    "audit begun.yaml --kind membership",
    "audit begun.yaml --kind poison",
    "audit nothing",
    "audit small.yaml --set nothing=1",
    "account --epsilon 0 --records 10 --batch-size 1 --steps 1 --delta 0.1",
    "account --hits 5 --draws 3 --sigma 0.5",
    "budget",
    "recipes nothing",
    "data check nothing",
    "data check no-root.yaml",
    "data list --data-root nowhere",
    "data fetch nothing",
    "cluster check nowhere.yaml",
    "cluster template nothing",
    "cluster submit nothing",
    "cluster status --address nothing",
    "cluster fetch --restore nothing",
)


def prepare(folder: Path) -> None:
    """Recipes, and a run that was begun by another one of its name."""
    for name, changed in RECIPES.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({**SMALL, **changed}))
    run = folder / "runs" / "begun"
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text(yaml.safe_dump({"name": "begun", **SMALL}))
    (run / "run.json").write_text('{"format": 1, "dpdist": "0.1.0"}')
