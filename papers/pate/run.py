"""What smoothing is worth to a student of noisy votes, by their noise (DPlis, Section 5.7).

    python papers/pate/run.py RUN --data-root DATA
    python papers/pate/run.py --quick              # a smoke test on the built-in digits

Takes the votes of a finished run of method pate and trains students on them again and again, at
each noise with as many keys as `--seeds`, without smoothing and with each deviation: on private
records each would be a release of its own, so this is for public data only. The students of one
seed have the same labels. With --spreading, of a run of `pate-mnist-spread`, each is made by the
answers alone, and after they spread over all public inputs as the recipe says. Each student is a
line of --results; what is there is not made again.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from _common import append_line, end_script, parse_arguments, read_lines, train_small_run

from dpdist.cluster.executor import LocalExecutor
from dpdist.core.files import make_private_folder, write_atomic
from dpdist.evaluation import evaluate_stage
from dpdist.methods.pate import PATE, UNANSWERED, VOTES
from dpdist.privacy.ledger import Ledger
from dpdist.randomness.keys import derive_key
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import parse_recipe
from dpdist.training.job import prepare
from dpdist.training.trainer import fit

RESULTS = Path(__file__).with_suffix(".jsonl")
SMALL = {
    "method.teachers": 4, "method.queries": 8, "method.answers": 8, "training.steps": 2,
    "method.teaching.training": {"batch_size": 20, "steps": 2, "learning_rate": 0.5},
}  # fmt: skip


def student(raw: dict[str, Any], votes: Path, key: bytes, home: Path) -> dict[str, Any]:
    """Train a student; return epsilon, the share of correct labels and the test accuracy."""
    recipe, folder = parse_recipe(raw, "benchmark"), RunFolder(home)
    folder.create_or_open(recipe)
    write_atomic(folder.run_key, key.hex())
    shutil.copy(votes, make_private_folder(folder.private) / VOTES)
    job = prepare(recipe, folder, "benchmark")
    fit(job, LocalExecutor())
    evaluate_stage(recipe, folder)
    labels = np.array(Ledger.read(folder.ledger).recorded_answers[0])
    answered = np.flatnonzero(labels != UNANSWERED)
    public = job.public_records()
    true = public.targets(slice(0, len(public))).numpy()
    right = labels[answered] == true[answered]
    found = {
        "epsilon": job.plan.guarantee().epsilon,
        "labels": len(answered),
        "labels right": float(right.mean()),
        "accuracy": json.loads(folder.evaluation.read_text())["accuracy"],
    }
    assert isinstance(recipe.method, PATE)
    spreading = recipe.method.spreading
    if spreading is not None:
        told, graph = labels[answered].astype(int), spreading.build_graph(public)
        every = spreading.spread_labels(graph, answered, told, public.classes)
        found["spread labels right"] = float((every == true).mean())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, nargs="?", help="folder of a finished run")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--noises", type=float, nargs="+", default=[40, 80, 120], help="in votes")
    parser.add_argument("--smoothing", type=float, nargs="*", default=[0.03])
    parser.add_argument("--spreading", action="store_true", help="with and without, too")
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--all", action="store_true", help="label all inputs, without a threshold")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--results", type=Path, default=RESULTS)
    tiny = {"noises": [4.0], "draws": 2, "seeds": 1}
    given = parse_arguments(parser, tiny, output_options=["results"])
    torch.set_num_threads(1)
    if given.quick and given.run is None:
        given.run = train_small_run("digits-pate", SMALL)
    if given.run is None:
        end_script(
            "needs the folder of a finished run of method pate: pate.py RUN --data-root DATA"
        )
    raw = RunFolder(given.run).read_recipe().model_dump(mode="json")
    if given.data_root is not None:
        raw["data"]["root"] = str(given.data_root.resolve())
    method, votes = raw["method"], given.run / "private" / VOTES
    if given.all:
        method |= {"answers": method["queries"], "threshold": 0.0, "screening": 0.0}
    if given.steps is not None:
        raw["training"] |= {"steps": given.steps, "epochs": None}
    of = {"queries": method["queries"], "answers": method["answers"]}
    of |= {"steps": raw["training"]["steps"], "draws": given.draws}
    spreading, deviations = method["spreading"], (0.0, *given.smoothing)
    ways = (True, False) if given.spreading else (None,)
    for seed, noise, std, spread in product(range(given.seeds), given.noises, deviations, ways):
        setting = of | {"noise": noise, "seed": seed, "smoothing": std}
        setting |= {} if spread is None else {"spreading": spread}
        method["spreading"] = spreading if spread else None
        if read_lines(given.results, setting):
            continue
        part = math.sqrt((1 - method["screening"]) / (2 * method["answers"]))
        raw["privacy"] |= {"epsilon": None, "noise_multiplier": noise * part}
        method["smoothing"] = {"std": std, "augmentations": given.draws} if std else None
        key = derive_key(bytes(32), "pate benchmark", str(noise), seed)
        with tempfile.TemporaryDirectory() as home:
            line = setting | student(raw, votes, key, Path(home) / "run")
        append_line(given.results, line)
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
