"""How long each command takes to refuse, and whether it loads torch or Ray for that.

    python benchmarks/speed/refusals.py [--only WORD] [CHECKOUT ...]
    python benchmarks/speed/refusals.py --quick                          a smoke test

Processor time of a fresh process, the best of --rounds: what a machine with nothing else to do
takes.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

sys.path.append(str(Path(__file__).resolve().parents[1]))
from _common import CHECKOUT, parse_arguments

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
CODE = """
import sys
sys.argv = ["dpdist", *sys.argv[1:]]
from dpdist.cli.main import main
try:
    main()
except SystemExit:
    pass
print("loaded", *sorted({"torch", "ray"} & set(sys.modules)))
"""


def prepare(folder: Path) -> None:
    """Recipes, and a run that was begun by another one of its name."""
    for name, changed in RECIPES.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({**SMALL, **changed}))
    run = folder / "runs" / "begun"
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text(yaml.safe_dump({"name": "begun", **SMALL}))
    (run / "run.json").write_text('{"format": 1, "dpdist": "0.1.0"}')


def refused(arguments: str, checkout: Path, folder: Path, rounds: int) -> tuple[float, str]:
    """Seconds, and what was loaded."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, "-c", CODE, *arguments.split()]
    times = []
    for _ in range(rounds):
        began = _children()
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=True
        )
        times.append(_children() - began)
    return min(times), ", ".join(done.stdout.splitlines()[-1].split()[1:])


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkouts", nargs="*", type=Path, default=[CHECKOUT])
    parser.add_argument("--only", default="", help="commands that contain this")
    parser.add_argument("--rounds", type=int, default=3)
    given = parse_arguments(parser, {"only": "audit", "rounds": 1})
    checkouts = [each.resolve() for each in given.checkouts]
    print("| command |" + " seconds | loads |" * len(checkouts))
    print("|---|" + "---|---|" * len(checkouts))
    with tempfile.TemporaryDirectory() as scratch:
        prepare(Path(scratch))
        for arguments in (each for each in CASES if given.only in each):
            cells = [refused(arguments, each, Path(scratch), given.rounds) for each in checkouts]
            row = " | ".join(f"{seconds:.2f} | {loaded}" for seconds, loaded in cells)
            print(f"| `dpdist {arguments}` | {row} |", flush=True)


if __name__ == "__main__":
    main()
