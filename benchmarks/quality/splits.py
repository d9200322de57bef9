"""Measure quality against noise split, at one epsilon, for each method that has a split.

    OMP_NUM_THREADS=1 python benchmarks/quality/splits.py [--only 'stobatch*'] [--keys 3]
    python benchmarks/quality/splits.py --table
    python benchmarks/quality/splits.py --quick      # a smoke test

Each point is a training of a `digits-...-search` recipe without its search: a split of it in place
of the recipe's own, with the noise that meets the recipe's epsilon for that one training. What is
told is the search's own objective on the *test* split, without noise: such scores are for figures
only. Nobody may choose by them on private records, where the search is what pays for a choice.

Each training is a line of --results; what is there is not made again. A key is a run key and
initial weights. Teachers of one key vote once for all points. --table prints Markdown: the mean,
least and greatest of the trainings, and the difference to the split that stands where nothing is
searched, key by key, with Student's 95 % interval of its mean. Intervals are over trainings: the
test records are the same ones, and no interval is widened for how many there are in a table.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import math
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))
from _common import (
    RESULTS_FOLDER,
    append_line,
    parse_arguments,
    processor,
    read_lines,
    scratch_folder,
)

from dpdist import models
from dpdist.audits.membership_statistics import Estimate
from dpdist.cluster.executor import LocalExecutor
from dpdist.core.files import make_private_folder, write_atomic
from dpdist.methods.pate import UNANSWERED, VOTES
from dpdist.privacy.ledger import Ledger
from dpdist.privacy.phases import GaussianReleases, NoisyVotes
from dpdist.randomness.keys import derive_key
from dpdist.reports.compare import markdown_table
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import find_recipe, load_recipe
from dpdist.training.job import TrainJob, prepare
from dpdist.training.record_scores import ACCURACY
from dpdist.training.records import load_test_records
from dpdist.training.trainer import fit
from dpdist.tuning.scoring import compute_score, values_by

RESULTS = RESULTS_FOLDER / "splits.jsonl"
SHARES = (0.05, 0.2, 0.36, 0.6, 0.8)
TOTAL, NORM = 0.25, 2.0  # of the noise that certifies, in input units; of the first layer
Changes = dict[str, Any]


@dataclass(frozen=True)
class Split:
    """A recipe, the splits of it by name, and the one that others are held against."""

    recipe: str
    points: dict[str, Changes]
    reference: str


def robust(change: Changes, hidden: bool = False) -> dict[str, Changes]:
    """Return the shares of the first layer in the variance of a certificate's noise.

    Without any there is nothing behind it: plain DP-SGD where the certificate alone has noise on
    its input.
    """
    none: Changes = {"method.split": 0.0, "method.sensitivity": 1.0}
    found = {"0": {**change, **({"method": "dp-sgd"} if hidden else none), **on_input(0.0)}}
    for share in SHARES:
        behind = TOTAL * NORM * math.sqrt(share)
        own = {"method.sigma": behind} if hidden else {"method.split": share}
        found[f"{share:g}"] = {**change, **own, **on_input(share)}
    return found


def on_input(share: float) -> Changes:
    return {"certify.sigma": TOTAL * math.sqrt(1 - share), "certify.radii": [0.1]}


def paid(noise: float) -> Changes:
    return {"method.redistribution.noise_multiplier": noise}


def screened(part: float, threshold: float = 30.0) -> Changes:
    return {"method.screening": part, "method.threshold": threshold}


def smoothed(radius: float, batch: int, clip: float) -> Changes:
    """Return a setting whose largest step is the same at each clip. Radius 0 is plain DP-SGD."""
    method: Changes = {"method.radius": radius} if radius else {"method": "dp-sgd"}
    return method | {
        "training.batch_size": batch,
        "training.learning_rate": 0.2 / clip,
        "privacy.clip_norm": clip,
    }


RADII = {
    (128, 1.0): (0.0, 1.0, 3.0, 10.0, 30.0, 100.0),
    (512, 1.0): (0.0, 10.0, 30.0),
    (128, 0.3): (0.0, 10.0, 30.0),
}
SPLITS = {
    "stobatch": Split("digits-stobatch-search", robust({}), "0"),
    "noise-alone": Split("digits-stobatch-search", robust({"method.xi": 0.0}), "0"),
    "certificate": Split("digits-certificate-search", robust({}, hidden=True), "0"),
    "secure-sgd": Split(
        "digits-secure-sgd-search",
        {
            **{f"r at noise {noise:g}": paid(noise) for noise in (3.0, 5.0, 10.0, 20.0, 40.0)},
            "equal noise, no r": {"method.redistribution": None},
        },
        "r at noise 20",
    ),
    "functional": Split(
        "digits-functional-search",
        {
            "as it is": {},
            **{f"center {part:g}": {"method.center": part} for part in (0.01, 0.1, 0.2)},
            **{f"refine {part:g}": {"method.refine": part} for part in (0.1, 0.3, 0.5, 0.85)},
            **{f"labels {part:g}": {"method.labels": part} for part in (0.25, 0.75)},
        },
        "as it is",
    ),
    "pate": Split(
        "digits-pate-search",
        {
            "none": screened(0.0, 0.0) | {"method.answers": 60, "method.queries": 60},
            **{f"{part:g}": screened(part) for part in (0.05, 0.15, 0.3, 0.5, 0.7)},
        },
        "none",
    ),
    "dplis": Split(
        "digits-dplis-search",
        {
            f"batch {batch}, clip {clip:g}, R {radius:g}": smoothed(radius, batch, clip)
            for (batch, clip), radii in RADII.items()
            for radius in radii
        },
        "batch 128, clip 1, R 10",
    ),
}  # fmt: skip


def train(name: str, point: str, key: int, more: Changes) -> tuple[TrainJob, RunFolder]:
    """Return a split's training, by one key, in a folder that goes with the script."""
    split = SPLITS[name]
    changes = {"tune": None, "training.init_seed": key, **split.points[point], **more}
    recipe = load_recipe(find_recipe(split.recipe), changes)
    folder = RunFolder(scratch_folder() / name / f"{len(list(scratch_folder().glob('*/*')))}-{key}")
    folder.create_or_open(recipe)
    write_atomic(folder.run_key, derive_key(bytes(32), "splits benchmark", name, key).hex())
    votes = scratch_folder() / f"{name}-{key}-{recipe_queries(recipe)}"
    if votes.exists():
        shutil.copy(votes, make_private_folder(folder.private) / VOTES)
    job = prepare(recipe, folder, split.recipe)
    fit(job, LocalExecutor())
    if (folder.private / VOTES).exists():
        shutil.copy(folder.private / VOTES, votes)
    return job, folder


def recipe_queries(recipe: Any) -> int:
    return getattr(recipe.method, "queries", 0)


def measure(name: str, point: str, key: int, more: Changes) -> dict[str, Any]:
    """Return what one training gave, in %: the search's objective on test records, accuracy."""
    job, folder = train(name, point, key, more)
    searched = load_recipe(find_recipe(SPLITS[name].recipe)).tune
    assert searched is not None
    test, certify = load_test_records(job.recipe, job.source), job.recipe.certify
    quality = compute_score(
        folder.model_folder, test, searched.score, noise=None,
        sigma=certify.sigma if certify else None,
        key=hashlib.blake2b(f"{name} {key}".encode(), digest_size=32).digest(),
    )  # fmt: skip
    model = models.load(folder.model_folder).eval()
    found = {
        "epsilon": job.plan.guarantee().epsilon,
        "noise": [round(each, 4) for each in noises(job)],
        "quality": 100 * quality,
        "accuracy": 100 * float(values_by(ACCURACY, model, test, 1000).mean()),
        "tested": len(test),
    }
    answers = Ledger.read(folder.ledger).recorded_answers
    if name == "pate" and answers:
        labels = np.array(answers[0])
        given = np.flatnonzero(labels != UNANSWERED)
        public = job.public_records()
        assert public is not None
        right = labels[given] == public.targets(slice(0, len(labels))).numpy()[given]
        found |= {"labels": len(given), "right": 100 * float(right.mean())}
    return found


def noises(job: TrainJob) -> list[float]:
    """Return the noise multipliers, of PATE the deviations, that the split is made of."""
    first, plan = job.plan.phases[0], job.plan
    if isinstance(first, NoisyVotes):
        return [first.vote_noise, *([first.screen_noise] if first.screening else [])]
    shares = [first.noise_multiplier] if isinstance(first, GaussianReleases) else []
    return [*shares, *dict.fromkeys(plan.step(t).noise_multiplier for t in range(plan.steps))]


def run(options: argparse.Namespace) -> None:
    """Train all that is not in the results."""
    made = read_lines(options.results)
    more = (
        {} if options.steps is None else {"training.steps": options.steps, "training.epochs": None}
    )
    for name in (each for each in SPLITS if fnmatch.fnmatch(each, options.only)):
        for key in range(options.keys):
            for point in list(SPLITS[name].points)[: options.points]:
                known = {"split": name, "point": point, "key": key, "steps": options.steps}
                if any(known.items() <= each.items() for each in made):
                    continue
                made_by = f"benchmarks/quality/splits.py --only {name}"
                found = known | measure(name, point, key, more)
                found |= {"command": made_by, "processor": processor()}
                made.append(found)
                append_line(options.results, found)
                print(f"{name}, {point}, key {key}: {found['quality']:.2f}", flush=True)


def print_table(options: argparse.Namespace) -> None:
    """Print each split's points as Markdown."""
    lines = [each for each in read_lines(options.results) if each["steps"] == options.steps]
    for name, split in SPLITS.items():
        found: dict[str, dict[int, dict[str, Any]]] = {}
        for each in lines:
            if each["split"] == name:
                found.setdefault(each["point"], {})[each["key"]] = each
        if not found:
            continue
        head = [
            name, "noise multipliers", "epsilon", "quality, %",
            f"more than {split.reference}", "accuracy, %",
        ]  # fmt: skip
        if name == "pate":
            head += ["labels", "right, %"]
        rows = [head]
        for point in (known for known in split.points if known in found):
            trained = list(found[point].values())
            rows.append([
                point, ", ".join(f"{noise:.3g}" for noise in trained[0]["noise"]),
                f"{max(one['epsilon'] for one in trained):.3f}", spread(trained, "quality"),
                difference(found, point, split.reference), spread(trained, "accuracy"),
                *(spread(trained, what) for what in ("labels", "right") if name == "pate"),
            ])  # fmt: skip
        print(markdown_table(rows), end="\n\n")


def spread(lines: list[dict[str, Any]], what: str) -> str:
    """Return a mean with the least and the greatest."""
    values = [each[what] for each in lines]
    return f"{np.mean(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def difference(found: dict[str, dict[int, dict[str, Any]]], point: str, reference: str) -> str:
    """Return the mean difference in quality of the keys that both have, with its interval."""
    keys = sorted(found[point].keys() & found.get(reference, {}).keys())
    if point == reference or not keys:
        return ""
    gaps = [found[point][key]["quality"] - found[reference][key]["quality"] for key in keys]
    told = Estimate.from_values(gaps)
    if len(gaps) < 2:
        return f"{told.value:+.1f}"
    return f"{told.value:+.1f} ({told.low:+.1f} to {told.high:+.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else "", allow_abbrev=False
    )
    parser.add_argument("--only", default="*", help="splits to train, as a pattern")
    parser.add_argument("--keys", type=int, default=3, help="trainings of each point")
    parser.add_argument("--points", type=int, help="of each split, the first so many")
    parser.add_argument("--steps", type=int, help="of a training; default: the recipe's")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print the results, train nothing")
    tiny = {"only": "[cf]*", "keys": 1, "points": 2, "steps": 2}
    options = parse_arguments(parser, tiny, ["results"])
    torch.set_num_threads(1)
    if not options.table:
        run(options)
    print_table(options)


if __name__ == "__main__":
    main()
