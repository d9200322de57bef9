"""What answers are worth at one epsilon, by their number and by the bound on a teacher's part.

    python papers/pate/private_prediction.py RUN --data-root DATA
    python papers/pate/private_prediction.py --quick      # a smoke test on the built-in digits

Reads the teachers of a finished run and answers the whole test split again and again: on private
records each row would be a release of its own, so this is for public data only. For each Q the
noise is found that the run's epsilon allows; then the mean and the least accuracy over `--draws`.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from _common import end_script, parse_arguments, train_small_run

from dpdist.core import console
from dpdist.methods.private_prediction import clip_logits
from dpdist.privacy.calibration import calibrate_noise
from dpdist.privacy.phases import GaussianAnswers
from dpdist.privacy.plan import PrivacyPlan
from dpdist.runs.folder import RunFolder
from dpdist.training.ensembles import TeacherEnsemble
from dpdist.training.records import data_source, load_test_records

SMALL = {
    "method.teachers": 4, "method.queries": 8, "method.evaluate": 4, "training.steps": 2,
}  # fmt: skip


def noise_for(plan: PrivacyPlan, epsilon: float, queries: int) -> float:
    """The noise multiplier with which so many answers cost epsilon."""
    return calibrate_noise(
        lambda noise: replace(plan, phases=(GaussianAnswers(noise, queries),)), epsilon
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, nargs="?", help="folder of a finished run")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--queries", type=int, nargs="+", default=[25, 100, 400, 1600])
    parser.add_argument("--bounds", type=float, nargs="+", default=[1, 2, 5, 10])
    parser.add_argument("--inputs", type=int, default=2000)
    parser.add_argument("--draws", type=int, default=20)
    tiny = {"queries": [25, 100], "bounds": [1, 10], "inputs": 20, "draws": 2}
    given = parse_arguments(parser, tiny)
    if given.quick and given.run is None:
        given.run = train_small_run("digits-private-prediction", SMALL)
    if given.run is None:
        end_script("needs the folder of a finished run of method private-prediction: RUN")
    folder = RunFolder(given.run)
    recipe, plan = folder.read_recipe(), folder.read_plan()
    source = data_source(recipe)
    if given.data_root is not None:
        source = replace(source, root=given.data_root.resolve())
    test = load_test_records(recipe, source).first(given.inputs)
    scores = TeacherEnsemble(folder, recipe.model.name).class_scores(test.batch(slice(None)))
    labels, rng = np.asarray(test.labels), np.random.default_rng(0)
    epsilon, teachers = plan.guarantee().epsilon, len(scores)
    own = (scores.argmax(-1) == labels).mean(axis=1)
    print(
        f"epsilon {epsilon:.4g}; {len(labels):,} inputs; a teacher alone: {100 * own.mean():.1f} %"
    )
    rows = []
    for bound in given.bounds:
        parts = [clip_logits(scores[:, i], bound).mean(axis=0) for i in range(len(labels))]
        mean = np.array(parts)
        cells = [f"{100 * (mean.argmax(1) == labels).mean():.1f}"]
        for queries in given.queries:
            std = noise_for(plan, epsilon, queries) * 2 * bound / teachers
            found = [
                ((mean + std * rng.normal(size=mean.shape)).argmax(1) == labels).mean()
                for _ in range(given.draws)
            ]
            cells.append(f"{100 * np.mean(found):.1f} (s {std:.3g})")
        rows.append([f"{bound:g}", *cells])
    print(console.format_columns(["B", "no noise", *(f"Q {q:,}" for q in given.queries)], rows))


if __name__ == "__main__":
    main()
