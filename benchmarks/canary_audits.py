"""What one-run audits of whole trainings show: lower bounds beside what is proved, by epsilon.

Every audit is an ordinary training with canaries, in this process (plan, ledger, checkpoints; no
Ray), and its audit. Without --recipe: a network of 9,610 weights on the built-in digits, a quarter
of all records in each of 100 steps; 9,000 canaries stand behind some 1,440 records: as strong as
one run allows, at the price of a small training. Median and extremes of the runs, in parts of the
proved epsilon; how many exceeded it (of correct code: at most 5 %).

    python benchmarks/canary_audits.py [--runs 10] [--epsilons 1,2,4,8] [--canary gradient]
    python benchmarks/canary_audits.py --canary mislabelled --canaries 300 --epsilons 8
    python benchmarks/canary_audits.py --recipe mnist-dpsgd --data-root DATA --canaries 20000
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from dpdist.audits.canaries import audit_canaries
from dpdist.audits.target import of_run
from dpdist.pipeline import resolve
from dpdist.privacy.audited import Audited
from dpdist.reports.facts import read_facts
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import Recipe, parse
from dpdist.sections.audit import CanaryAudit
from dpdist.training import loop
from dpdist.training.job import prepare
from dpdist.training.reducer import Reducer

DIGITS_RECORDS = 1440
DIGITS: dict[str, Any] = {
    "name": "digits",
    "data": {"name": "digits"},
    "model": {"name": "mlp", "options": {"hidden": [128]}},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-5},
    "training": {"batch_size": 2610, "steps": 100, "learning_rate": 2.0},
    "resources": {"checkpoint_seconds": 1e6},
}


def planted(raw: dict[str, Any], epsilon: float, section: dict[str, Any]) -> Recipe:
    """The recipe at this epsilon, with the audit's section."""
    privacy = {**raw["privacy"], "noise_multiplier": None, "epsilon": epsilon}
    return parse({**raw, "privacy": privacy, "audit": {"kind": "canaries", **section}}, "benchmark")


def audited(recipe: Recipe, folder: RunFolder) -> Audited:
    """Train and audit."""
    loop.run(prepare(recipe, folder, recipe.name), Reducer(0, 1, torch.device("cpu")))
    assert isinstance(recipe.audit, CanaryAudit)
    target = of_run(folder, read_facts(folder).guarantee)
    return audit_canaries(recipe.audit, target, folder.path, lambda done, total: None)


def row(raw: dict[str, Any], epsilon: float, section: dict[str, Any], runs: int) -> str:
    """One line of the table."""
    began = time.perf_counter()
    recipe = planted(raw, epsilon, section)
    with tempfile.TemporaryDirectory() as place:
        found = [audited(recipe, RunFolder(Path(place) / str(run))) for run in range(runs)]
    curves = sorted(each.epsilon / each.proved for each in found)
    counted = sorted(each.details["epsilon_by_counting"] / each.proved for each in found)
    above = sum(each.bug for each in found)
    seconds = (time.perf_counter() - began) / runs
    middle, ends = statistics.median(curves), f"{curves[0]:.2f} to {curves[-1]:.2f}"
    return (
        f"| {found[0].proved:.4g} | {middle:.2f} ({ends}) | {statistics.median(counted):.2f} | "
        f"{above} of {runs} | {seconds:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--epsilons", default="1,2,4,8")
    parser.add_argument("--canaries", type=int, default=9000)
    parser.add_argument("--canary", default="gradient")
    parser.add_argument("--recipe")
    parser.add_argument("--data-root")
    asked = parser.parse_args()
    quarter = (DIGITS_RECORDS + asked.canaries) // 4
    raw = {**DIGITS, "training": {**DIGITS["training"], "batch_size": quarter}}
    if asked.recipe:
        raw = resolve(asked.recipe, data_root=asked.data_root).model_dump(mode="json")
    print("| proved epsilon | audited / proved | by counting | exceeded | s |")
    print("|---|---|---|---|---|")
    section = {"canary": asked.canary, "canaries": asked.canaries}
    for epsilon in asked.epsilons.split(","):
        print(row(raw, float(epsilon), section, asked.runs), flush=True)


if __name__ == "__main__":
    main()
