"""What many trainings show: lower bounds beside what is proved, by epsilon and adversary.

`dpdist audit --kind many-runs` of logistic regression on some 40 of the built-in digits, 5 steps at
a --rate: what this adversary finds does not depend on the records. Columns: by trade-off curves
(the run is the plan but for the size of its noise), if the loss were Gaussian, and by counts alone,
which assume nothing and see only what they have trials for. --loop: the same of as many ordinary
trainings, one after another in this process (plan, ledger, checkpoints), each with 20 gradient
canaries of which the first one's score is taken.

Trainings are kept in --runs and continued; each audit is a line of --results.

    python benchmarks/quality/many_run_audits.py [--epsilons 2,4,8] [--trainings 6000] [--rate 1]
        [--quick]
    python benchmarks/quality/many_run_audits.py --rate 0.5 --epsilons 4 --trainings 12000
    python benchmarks/quality/many_run_audits.py --loop --rate 0.5 --epsilons 8 --trainings 500
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))
from _common import RESULTS_FOLDER, append_line, parse_arguments, read_lines

from dpdist.audits.canaries import audit_many_runs, evaluate_trials
from dpdist.audits.target import target_of_recipe
from dpdist.config.sections import ManyRunsAudit
from dpdist.privacy.audit_bounds import CanaryScores
from dpdist.privacy.card import AuditFinding
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import Recipe, parse_recipe
from dpdist.training import checkpoint, worker
from dpdist.training.canaries import SLOT, draw_coins
from dpdist.training.collectives import Reducer
from dpdist.training.job import prepare
from dpdist.training.records import data_source, records_with_canaries

RESULTS = RESULTS_FOLDER / "many_run_audits.jsonl"
SEED = "5b" * 32
PLANTED = {"kind": "canaries", "canaries": 20}


def recipe_at(epsilon: float, rate: float, **more: Any) -> Recipe:
    raw: dict[str, Any] = {
        "name": "digits-linear",
        "data": {"name": "digits", "max_train": 40},
        "model": "linear",
        "privacy": {"epsilon": epsilon, "delta": 1e-5},
        "training": {"batch_size": 1, "steps": 5, "learning_rate": 2.0},
        "resources": {"checkpoint_seconds": 1e6},
    }
    raw |= more
    recipe = parse_recipe(raw, "benchmark")
    records = len(records_with_canaries(recipe, data_source(recipe)))
    raw["training"]["batch_size"] = round(rate * records)
    return parse_recipe(raw, "benchmark")


def trained(recipe: Recipe) -> dict[str, Any]:
    """Coin and score of the first canary of one training."""
    with tempfile.TemporaryDirectory(prefix="dpdist-many-runs-") as place:
        folder = RunFolder(Path(place) / "run")
        worker.run_training(
            prepare(recipe, folder, "benchmark"), Reducer(0, 1, torch.device("cpu"))
        )
        state = checkpoint.load_latest(folder.checkpoints)
        assert state is not None and state.step == folder.read_plan().steps
        present = draw_coins(folder.read_run_key(), PLANTED["canaries"])[0]
        return {"present": bool(present), "score": float(state.slots[SLOT][0])}


def by_the_loop(recipe: Recipe, options: ManyRunsAudit, folder: Path) -> AuditFinding:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "scores.jsonl"
    for _ in range(len(read_lines(path)), options.trainings):
        append_line(path, trained(recipe))
    found = read_lines(path)[: options.trainings]
    present, scores = (np.array([one[key] for one in found]) for key in ("present", "score"))
    return evaluate_trials(
        options,
        target_of_recipe(recipe, "bench"),
        CanaryScores(np.arange(len(found)), present, scores),
    )


def measure(setting: dict[str, Any], options: ManyRunsAudit, runs: Path) -> dict[str, Any]:
    """One audit."""
    began, at = time.perf_counter(), (setting["epsilon"], setting["rate"])
    folder = runs / "-".join(map(str, setting.values()))
    if setting["loop"]:
        found = by_the_loop(recipe_at(*at, audit=PLANTED), options, folder)
    else:
        target = target_of_recipe(recipe_at(*at), "benchmark")
        found = audit_many_runs(options, target, folder, lambda *_: None)
    told = ("if_gaussian", "epsilon_by_counting", "counting_at_most", "hits")
    return {
        "proved": found.proved, "audited": found.epsilon, "exceeded": found.exceeds_proved,
        **{name: found.details[name] for name in told},
        "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def row(one: dict[str, Any]) -> str:
    return (
        f"| {one['proved']:.4g} | {one['rate']:g}{', the loop' * one['loop']} | "
        f"{one['trainings']:,} | {one['audited']:.2f} ({one['audited'] / one['proved']:.2f}) | "
        f"{one['if_gaussian']:.2f} | {one['epsilon_by_counting']:.2f} | "
        f"{one['counting_at_most']:.1f} | {one['seconds']:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--epsilons", default="2,4,8")
    parser.add_argument("--trainings", type=int, default=6000)
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--loop", action="store_true")
    parser.add_argument("--seed", default=SEED, help="64 hex digits; lines without it have this")
    parser.add_argument("--runs", type=Path, default=Path("runs/many-run-audits"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parse_arguments(
        parser, {"epsilons": "4", "trainings": 100}, output_options=["runs", "results"]
    )
    torch.set_num_threads(1)
    options = ManyRunsAudit(trainings=asked.trainings, canary="gradient", seed=asked.seed)
    of = {"rate": asked.rate, "trainings": asked.trainings, "loop": asked.loop}
    print("| proved ε | rate | trainings | audited | if Gaussian | by counting | at most | s |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for epsilon in map(float, asked.epsilons.split(",")):
        setting = {"epsilon": epsilon, **of} | ({} if asked.seed == SEED else {"seed": asked.seed})
        known = [{"seed": SEED} | line for line in read_lines(asked.results)]
        made = [one for one in known if ({"seed": SEED} | setting).items() <= one.items()]
        if not made:
            made = [setting | measure(setting, options, asked.runs)]
            append_line(asked.results, made[0])
        print(row(made[0]), flush=True)


if __name__ == "__main__":
    main()
