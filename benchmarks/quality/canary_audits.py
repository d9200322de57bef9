"""What one-run audits of whole trainings show: lower bounds beside what is proved, by epsilon.

Every audit is an ordinary training with canaries, in this process (plan, ledger, checkpoints; no
Ray), and its audit. Without --recipe: a network of 9,610 weights on the built-in digits, a quarter
of all records in each of 100 steps; 9,000 canaries stand behind some 1,440 records: as strong as
one run allows, at the price of a small training. Median and extremes of the runs, in parts of the
proved epsilon; how many exceeded it, of correct code at most 5 %: with --coverage the same of a
linear model and 20 steps, a training so short that hundreds are made, and the binomial test.

Each audit is a line of --results; what is there is not made again. --table prints Markdown; --quick
is a smoke test.

    python benchmarks/quality/canary_audits.py [--runs 10] [--epsilons 1,2,4,8] [--canary gradient]
    python benchmarks/quality/canary_audits.py --coverage --runs 50
    python benchmarks/quality/canary_audits.py --canary mislabeled --canaries 300 --epsilons 8
    python benchmarks/quality/canary_audits.py --recipe mnist-dpsgd --data-root DATA \\
        --canaries 20000
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))
from _common import RESULTS_FOLDER, append_line, parse_arguments
from _common import read_lines as read
from scipy.stats import binomtest

from dpdist.audits.canaries import audit_canaries
from dpdist.audits.target import target_of_run
from dpdist.config.sections import CanaryAudit
from dpdist.core.binomial import clopper_pearson_upper
from dpdist.privacy.card import AuditFinding
from dpdist.reports.results import load_results
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import Recipe, parse_recipe, resolve_recipe
from dpdist.training import worker
from dpdist.training.collectives import Reducer
from dpdist.training.job import prepare

RESULTS = RESULTS_FOLDER / "canary_audits.jsonl"
DIGITS_RECORDS = 1440
DIGITS: dict[str, Any] = {
    "name": "digits",
    "data": {"name": "digits"},
    "model": {"name": "mlp", "options": {"hidden": [128]}},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-5},
    "training": {"batch_size": 2610, "steps": 100, "learning_rate": 2.0},
    "resources": {"checkpoint_seconds": 1e6},
}
SHORT: dict[str, Any] = {
    **DIGITS, "name": "digits-linear", "model": "linear",
    "training": {**DIGITS["training"], "steps": 20},
}  # fmt: skip
CANARIES = {"digits": 9000, "digits-linear": 600}


def planted(raw: dict[str, Any], epsilon: float, section: dict[str, Any]) -> Recipe:
    """The recipe at this epsilon, with the audit's section."""
    privacy = {**raw["privacy"], "noise_multiplier": None, "epsilon": epsilon}
    return parse_recipe(
        {**raw, "privacy": privacy, "audit": {"kind": "canaries", **section}}, "benchmark"
    )


def audited(recipe: Recipe, folder: RunFolder) -> AuditFinding:
    """Train and audit."""
    worker.run_training(prepare(recipe, folder, recipe.name), Reducer(0, 1, torch.device("cpu")))
    assert isinstance(recipe.audit, CanaryAudit)
    target = target_of_run(folder, load_results(folder).guarantee)
    return audit_canaries(recipe.audit, target, folder.path, lambda done, total: None)


def measure(raw: dict[str, Any], epsilon: float, section: dict[str, Any]) -> dict[str, Any]:
    """One audit."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="dpdist-canaries-") as place:
        found = audited(planted(raw, epsilon, section), RunFolder(Path(place) / "run"))
    counted = found.details["epsilon_by_counting"]
    return {
        "proved": found.proved, "audited": found.epsilon, "counted": counted,
        "right": found.details["right"], "guesses": found.details["guesses"],
        "exceeded": found.exceeds_proved, "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def row(found: Sequence[dict[str, Any]]) -> str:
    """One line of the table, of audits of one setting."""
    proved, runs = found[0]["proved"], len(found)
    curves = sorted(each["audited"] / proved for each in found)
    counted = sorted(each["counted"] / proved for each in found)
    above = sum(each["exceeded"] for each in found)
    seconds = sum(each["seconds"] for each in found) / runs
    middle, ends = statistics.median(curves), f"{curves[0]:.2f} to {curves[-1]:.2f}"
    return (
        f"| {proved:.4g} | {middle:.2f} ({ends}) | {statistics.median(counted):.2f} | "
        f"{above} of {runs} | {seconds:.1f} |"
    )


def coverage(found: Sequence[dict[str, Any]]) -> str:
    """Whether bounds of correct code exceed what is proved more often than 5 % of the time."""
    runs, above = len(found), sum(each["exceeded"] for each in found)
    test = binomtest(above, runs, 0.05, alternative="greater").pvalue
    most = clopper_pearson_upper(above, runs, 0.05)
    return (
        f"{above} of {runs} exceeded what is proved; that it happens in more than 5 % of all runs: "
        f"binomial test, p = {test:.2g}; it happens in at most {100 * float(most):.1f} % (95 %)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--runs", type=int, default=10, help="of each epsilon")
    parser.add_argument("--epsilons", default="1,2,4,8")
    parser.add_argument("--canaries", type=int)
    parser.add_argument("--canary", default="gradient")
    parser.add_argument("--coverage", action="store_true")
    parser.add_argument("--recipe")
    parser.add_argument("--epochs", type=int, help="of the recipe, in place of its own")
    parser.add_argument("--data-root")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="of what is there")
    tiny = {"runs": 1, "epsilons": "8", "canaries": 100, "coverage": True}
    asked = parse_arguments(parser, tiny, output_options=["results"])
    torch.set_num_threads(1)
    raw = SHORT if asked.coverage else DIGITS
    section = {"canary": asked.canary, "canaries": asked.canaries or CANARIES[raw["name"]]}
    quarter = (DIGITS_RECORDS + section["canaries"]) // 4
    raw = {**raw, "training": {**raw["training"], "batch_size": quarter}}
    if asked.recipe:
        raw = resolve_recipe(asked.recipe, data_root=asked.data_root).model_dump(mode="json")
        raw["training"]["epochs"] = asked.epochs or raw["training"]["epochs"]
    print("| proved epsilon | audited / proved | by counting | exceeded | s |")
    print("|---|---|---|---|---|")
    everything = []
    for epsilon in map(float, asked.epsilons.split(",")):
        setting = {"recipe": raw["name"], "epsilon": epsilon, **section}
        if asked.recipe:
            setting["epochs"] = raw["training"]["epochs"]
        while not asked.table and len(read(asked.results, setting)) < asked.runs:
            append_line(asked.results, setting | measure(raw, epsilon, section))
        if found := read(asked.results, setting)[: asked.runs]:
            everything += found
            print(row(found), flush=True)
    if everything:
        print(coverage(everything))


if __name__ == "__main__":
    main()
