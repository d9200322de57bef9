"""Residual perturbation's tables at a size that two cores allow: accuracy, gap, and what leaks.

In this process, by the parts that runs and audits of membership are made of. For each row:

* shadow: the paper's protocol, once for each seed: a target on a quarter of the records, judged by
  a network that learned from one plain shadow (the same for all rows of a seed); and by LiRA, whose
  references are the plain shadows of all seeds (--shadows).
* audit: one training with mislabeled canaries behind a quarter, and what they bound epsilon by.
* inside: whether residual noise inside the clip helps at equal epsilon, on scikit-learn's digits.
* cost: seconds of the processor that a training alone takes, the rows of a seed in turn.

Each result is a line of --results; what is there is not made again. --table prints Markdown.

    nice python papers/residual/run.py --data-root DATA [--tasks shadow,audit,inside]
        [--data mnist] [--seeds 3]
    python papers/residual/run.py --table
    python papers/residual/run.py --quick       # a smoke test on invented pictures
"""

from __future__ import annotations

import argparse
import hashlib
import io
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from _common import (
    append_line,
    describe_run,
    make_images,
    parse_arguments,
    require_data,
    scratch_folder,
)
from _common import read_lines as read
from PIL import Image
from safetensors.numpy import load as load_tensors
from scipy.special import expit

from dpdist import models
from dpdist.audits.canaries import audit_canaries
from dpdist.audits.membership import Membership
from dpdist.audits.membership_findings import ATTACKS
from dpdist.audits.membership_statistics import GAMES, BankScores, Estimate, Game, Roc, log_odds
from dpdist.audits.target import target_of_run
from dpdist.audits.trainings import ShadowSetup, ShadowTrainer
from dpdist.certification.worker import expected_log_scores
from dpdist.config.sections import CanaryAudit
from dpdist.data.parquet import decode_picture
from dpdist.data.tables import split_files
from dpdist.privacy.guarantee import format_epsilon
from dpdist.randomness.noise_location import find_noise_location
from dpdist.reports.results import load_results
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import Recipe, parse_recipe
from dpdist.training import worker
from dpdist.training.collectives import Reducer
from dpdist.training.job import prepare
from dpdist.training.records import data_source, load_test_records, records_with_canaries

RESULTS = Path(__file__).with_suffix(".jsonl")
Scores = dict[str, np.ndarray]

DATA: dict[str, dict[str, Any]] = {
    "cifar10": {"mean": [0.4914, 0.4822, 0.4465], "std": [0.2470, 0.2435, 0.2616]},
    "cifar10-2": {
        "data": {"name": "cifar10", "labels": [3, 5]},
        "mean": [0.4914, 0.4822, 0.4465], "std": [0.2470, 0.2435, 0.2616],
    },
    "mnist": {"mean": [0.1307], "std": [0.3081]},
    "digits": {"data": {"root": None}, "mean": [0.3], "std": [0.4]},
}  # fmt: skip
PRIVATE = {
    "privacy": {"noise_multiplier": 1.1, "clip_norm": 1.0},
    "training": {
        "learning_rate": 0.5, "momentum": 0.0, "weight_decay": 0.0,
        "milestones": [0.2, 0.4, 0.6, 0.8], "factor": 0.5,
    },
}  # fmt: skip


def noisy(gamma: float, ensemble: int = 1, skip: bool = True, **method: Any) -> dict[str, Any]:
    options = {"ensemble": ensemble, "skip": skip}
    return {"method": {"name": "residual", "gamma": gamma, **method}, "options": options}


BOTH: dict[str, dict[str, Any]] = {"none": {}, "DP-SGD, noise multiplier 1.1": PRIVATE}
ROWS: dict[str, dict[str, dict[str, Any]]] = {
    "cifar10": {
        **BOTH,
        "crop and flip": {"training": {"crop": 4, "flip": True}},
        "En1, gamma 0.75": noisy(0.75),
        "En1, gamma 2": noisy(2.0),
        "En1, gamma 4.5": noisy(4.5),
        "En1, gamma 9": noisy(9.0),
        "En1, gamma 18": noisy(18.0),
        "En1, gamma 0.75, no skip": noisy(0.75, skip=False),
        "En1, Strategy II, gamma 2": noisy(2.0, strategy="multiplicative"),
        "En2, gamma 0.75": noisy(0.75, 2),
        "En5, gamma 0.75": noisy(0.75, 5),
    },
    "cifar10-2": {
        **BOTH, "En1, gamma 0.5": noisy(0.5),
        "En1, Strategy II, gamma 0.5": noisy(0.5, strategy="multiplicative"),
    },
    "mnist": {**BOTH, "En1, gamma 0.5": noisy(0.5), "En1, gamma 2.5": noisy(2.5)},
}  # fmt: skip
ROWS["digits"] = {
    f"{name}gamma {gamma:g}": (noisy(gamma) if gamma else {})
    | {"privacy": {"epsilon": e}, "training": PRIVATE["training"] | {"milestones": [0.5, 0.75]}}
    for name, e, grid in (
        ("", 3.0, (0.0, 0.1, 0.3, 1.0)),
        ("epsilon 2, ", 2.0, (0.0, 0.03, 0.1, 0.3, 1.0, 2.5)),
    )
    for gamma in grid
}
CORE = [*BOTH, "En1, gamma 0.75", "En1, gamma 4.5", "En1, gamma 0.75, no skip"]
ENSEMBLES = ["En5, gamma 0.75", "En2, gamma 0.75"]
PROMISED = ["DP-SGD, noise multiplier 1.1", "En1, gamma 0.75", "En1, gamma 4.5"]  # to audit against
ORDER: tuple[tuple[str, str, list[str] | None], ...] = (  # what is made first; None: all rows
    ("cifar10", "shadow", CORE), ("cifar10", "audit", PROMISED), ("cifar10", "shadow", ENSEMBLES),
    ("cifar10", "shadow", None), ("cifar10", "cost", [*BOTH, "En1, gamma 4.5"]),
    ("cifar10-2", "shadow", None), ("mnist", "shadow", None), ("digits", "inside", None),
)  # fmt: skip
# records: of all four quarters. side: of an image, in pixels; 0 for the original's. shadows: plain
# ones that LiRA has; 0 for as many as seeds.
NUMBERS = {
    "seeds": 3, "records": 10_000, "side": 0, "epochs": 30, "batch": 128, "rate": 0.1, "width": 4,
    "passes": 10, "population": 2000, "canaries": 500, "shadows": 0,
}  # fmt: skip
SIZE = ("records", "side", "epochs", "width")  # what a result is of, besides its row
LONG, QUERIED = 100, "En1, gamma 0.75"  # passes, of this row's first seed; elsewhere `--passes`


def recipe_of(data: str, row: str, given: argparse.Namespace, seed: int, part: float) -> Recipe:
    """Return a row's recipe on the share `part` of the --records in the pool."""
    setting, changes = DATA[data], ROWS[data][row]
    raw: dict[str, Any] = {
        "name": "row",
        "data": {
            "name": data, "root": str(given.data_root), **setting.get("data", {}),
            "max_train": round(part * given.records),
        },
        "model": {
            "name": "resnet-rp", "mean": setting["mean"], "std": setting["std"],
            "options": {"width": given.width, "groups": given.width // 2}
            | changes.get("options", {}),
        },
        "method": dict(changes.get("method", {"name": "dp-sgd"})),
        "privacy": changes.get("privacy", {"noise_multiplier": 0, "clipping": "none"})
        | {"delta": 1e-5},
        "training": {
            "batch_size": given.batch, "epochs": given.epochs, "learning_rate": given.rate,
            "schedule": "step", "milestones": [0.5, 0.75], "momentum": 0.9,
            "weight_decay": 1e-4, "init_seed": seed, **changes.get("training", {}),
        },
        "resources": {"checkpoint_seconds": 1e6},
    }  # fmt: skip
    if "gamma" in raw["method"]:  # pi = gamma / 2 and R = 30 on standardized pixels
        std = float(np.mean(setting["std"]))
        raw["method"] |= {"pi": round(raw["method"]["gamma"] / 2 * std, 4), "input_norm": 30 * std}
    return parse_recipe(raw, row)


def smaller(source: Path, root: Path, name: str, side: int, needed: Mapping[str, int]) -> Path:
    """Return a data root with the data set of `source` averaged down to `side` x `side` pixels.

    Of each split it has the first `needed` records: the files are in random order.
    """
    for split, count in needed.items():
        path = root / name / f"{split}.parquet"
        if path.exists():
            continue
        files = map(str, split_files(source, name, split))
        table = pq.read_table(list(files)).slice(0, count)
        images = []
        for one in table["image"].to_pylist():
            picture = decode_picture(one["bytes"])
            channels, cell = picture.shape[0], picture.shape[1] // side
            if cell * side != picture.shape[1]:
                raise SystemExit(f"--side {side}: must divide {picture.shape[1]}, {name}'s own")
            cells = picture.reshape(channels, side, cell, side, cell)
            pixels = cells.mean((2, 4)).round().astype(np.uint8).transpose(1, 2, 0).squeeze()
            buffer = io.BytesIO()
            Image.fromarray(pixels).save(buffer, format="PNG")
            images.append({"bytes": buffer.getvalue(), "path": ""})
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"image": images, "label": table["label"]}), path)
    return root


def scores_of(
    recipe: Recipe, plain: Recipe, game: Game, key: bytes, number: int, passes: tuple[int, ...],
    population: int,
) -> tuple[Scores, float]:  # fmt: skip
    """Return the scores of one model of a bank and the proved epsilon of its training.

    `plain` is the recipe of the shadow models.
    """
    records = len(records_with_canaries(recipe, data_source(recipe)))
    settings = Membership(game=game.name, models=game.models)
    both = [settings.plan_shadows(one, records)[0] for one in (recipe, plain)]
    recipes, plans = zip(*both, strict=True)
    setup = ShadowSetup(game, key, recipes, plans, passes, population)
    found = load_tensors(ShadowTrainer(setup)(number)["scores.safetensors"])
    return found, plans[0].guarantee().epsilon


def key_of(*labels: object) -> bytes:
    return hashlib.blake2b("/".join(map(str, labels)).encode(), digest_size=32).digest()


def bank_of(models: list[Scores], passes: int) -> BankScores:
    """Stack the models' scores; a model without noise answers the same in every pass."""
    member = np.stack([one["member"] == 1 for one in models])
    count = member.shape[1]

    def stacked(name: str) -> np.ndarray:
        return np.stack([one.get(f"{name}/{passes}", one[f"{name}/1"]) for one in models])

    phi, top = stacked("phi"), stacked("top")
    return BankScores(member, phi[:, :count], top[:, :count], phi[:, count:])


def accuracies(scores: Scores, passes: int) -> tuple[float, float]:
    """Return the accuracies on members and on test records."""
    phi, top = (scores.get(f"{name}/{passes}", scores[f"{name}/1"]) for name in ("phi", "top"))
    right = expit(phi) >= top[:, 0] - 1e-9
    count = len(scores["member"])
    return float(right[:count][scores["member"] == 1].mean()), float(right[count:].mean())


def plain_shadow(data: str, seed: int, given: argparse.Namespace, shadows: Path) -> Scores:
    """Return the scores of the seed's shadow model, made once for all rows."""
    kept = shadows / f"{data}-{'-'.join(str(getattr(given, key)) for key in SIZE)}-{seed}.npz"
    if not kept.exists():
        game, key = GAMES["quarters"](2), key_of("residual", data, seed)
        plain = recipe_of(data, "none", given, seed, 1.0)
        found, _ = scores_of(plain, plain, game, key, 1, (1,), given.population)
        np.savez(kept, **found)
    return dict(np.load(kept))


def shadow(data: str, row: str, seed: int, given: argparse.Namespace, shadows: Path) -> Any:
    game, key = GAMES["quarters"](2), key_of("residual", data, seed)
    recipe = recipe_of(data, row, given, seed, 1.0)
    plain = recipe_of(data, "none", given, seed, 1.0)
    besides = [
        plain_shadow(data, each, given, shadows) for each in range(given.shadows or given.seeds)
    ]
    most = LONG if row == QUERIED and not seed else given.passes
    passes = tuple(sorted({1, given.passes, most}))
    target, epsilon = scores_of(recipe, plain, game, key, 0, passes, given.population)
    judged, out = (game.guessed_records(key, model, len(target["member"])) for model in (0, 1))
    line: dict[str, Any] = {"epsilon": format_epsilon(epsilon), "auc": {}, "train": {}, "test": {}}
    for each in passes:
        bank, several = bank_of([target, besides[seed]], each), bank_of([target, *besides], each)
        roc = Roc.from_scores(
            ATTACKS["shadow"].score(bank, 0, out, seed)[judged], bank.member[0][judged]
        )
        own = Roc.from_scores(bank.phi[0][judged], bank.member[0][judged])
        line["auc"][each] = roc.auc.value
        ratio = Roc.from_scores(
            ATTACKS["lira"].score(several, 0, judged, seed)[judged], bank.member[0][judged]
        )
        line.setdefault("auc_lira", {})[each] = ratio.auc.value
        line.setdefault("auc_log_odds", {})[each] = own.auc.value
        line["train"][each], line["test"][each] = accuracies(target, each)
    return line


def audit(data: str, row: str, seed: int, given: argparse.Namespace, shadows: Path) -> Any:
    guesses = min(100, given.canaries)
    options = CanaryAudit(canaries=given.canaries, canary="mislabeled", guesses=guesses)
    recipe = recipe_of(data, row, given, seed, 0.25)
    raw = recipe.model_dump(mode="json") | {"audit": options.model_dump(mode="json")}
    if recipe.privacy.noise_multiplier == 0:  # what the paper claims it of
        raw["privacy"]["adjacency"] = "replace-one"
    recipe = parse_recipe(raw, row)
    with tempfile.TemporaryDirectory(prefix="dpdist-residual-") as place:
        folder = RunFolder(Path(place) / "run")
        worker.run_training(prepare(recipe, folder, row), Reducer(0, 1, torch.device("cpu")))
        target = target_of_run(folder, load_results(folder).guarantee)
        found = audit_canaries(options, target, folder.path, lambda done, total: None)
    return {
        "proved": format_epsilon(target.proved.epsilon), "claimed": target.claimed_epsilon,
        "at_least": found.epsilon, "right": found.details["right"], "of": options.num_guesses,
    }  # fmt: skip


def inside(data: str, row: str, seed: int, given: argparse.Namespace, shadows: Path) -> Any:
    """Train by DP-SGD on all records; return the test accuracy and the AUC of telling members."""
    recipe = recipe_of(data, row, given, seed, 1.0)
    with tempfile.TemporaryDirectory(prefix="dpdist-residual-") as place:
        folder = RunFolder(Path(place) / "run")
        worker.run_training(prepare(recipe, folder, row), Reducer(0, 1, torch.device("cpu")))
        model, epsilon = models.load(folder.model_folder), load_results(folder).guarantee.epsilon
    line: dict[str, Any] = {"epsilon": format_epsilon(epsilon), "test": {}, "auc": {}}
    source = data_source(recipe)
    splits = (records_with_canaries(recipe, source), load_test_records(recipe, source))
    for passes in (1, given.passes):
        odds = []
        for records in splits:
            x, y = records.batch(slice(None)), np.asarray(records.labels)
            with torch.inference_mode():
                noisy = find_noise_location(model).is_random
                answers = expected_log_scores(model, x, passes, str(seed)) if noisy else model(x)
            odds.append(log_odds(answers.double().numpy(), y))
            line["test"][passes] = float((answers.argmax(1).numpy() == y).mean())  # the last's
        line["auc"][passes] = Roc.from_scores(
            np.concatenate(odds), np.repeat([True, False], list(map(len, odds)))
        ).auc.value
    return line


def cost(data: str, row: str, seed: int, given: argparse.Namespace, shadows: Path) -> Any:
    """Measure CPU seconds of one training on a quarter of the records, without its set-up."""
    recipe = recipe_of(data, row, given, seed, 0.25)
    with tempfile.TemporaryDirectory(prefix="dpdist-residual-") as place:
        job = prepare(recipe, RunFolder(Path(place) / "run"), row)
        worker.run_training(job, Reducer(0, 1, torch.device("cpu")), 1)  # its set-up
        began, steps = time.process_time(), job.plan.steps
        worker.run_training(job, Reducer(0, 1, torch.device("cpu")))
        return {"processor_seconds": round(time.process_time() - began, 2), "steps": steps - 1}


TASKS = {"shadow": shadow, "audit": audit, "inside": inside, "cost": cost}


# --- the tables; intervals are Student's over trainings


def shadow_cells(own: list[dict[str, Any]]) -> list[str]:
    lines = [one for one in own if one["task"] == "shadow"]
    one, most = "1", max(set.intersection(*(set(each["auc"]) for each in lines)), key=int)
    gaps = [each["train"][one] - each["test"][one] for each in lines]
    columns = [[each[what][one] for each in lines] for what in ("train", "test")]
    columns += [gaps, [each["auc"][one] for each in lines]]
    columns += [[each["auc_log_odds"][at] for each in lines] for at in (one, most)]
    columns.append([each["auc_lira"][most] for each in lines if "auc_lira" in each])
    audits = [f"{each['at_least']:.2f}" for each in own if each["task"] == "audit"]
    return [*map(_mean, columns), *(audits or [""])]


def inside_cells(own: list[dict[str, Any]]) -> list[str]:
    most = max(own[0]["test"], key=int)
    columns = [[each["test"][at] for each in own] for at in ("1", most)]
    return [_mean(column) for column in (*columns, [each["auc"][most] for each in own])]


def _mean(values: list[float]) -> str:
    if len(values) < 2:
        return "".join(f"{value:.3f}" for value in values)
    estimate = Estimate.from_values(values)
    return f"{estimate.value:.3f} ± {estimate.high - estimate.value:.3f}"


TABLES = {
    "shadow": (
        "train | test | gap | AUC, shadow | AUC, log-odds | of the mean of 10 | AUC, LiRA | "
        "audited ε ≥",
        shadow_cells,
    ),
    "inside": ("test | of the mean of 10 | AUC, log-odds of the mean", inside_cells),
}


def tables(found: list[dict[str, Any]]) -> Iterator[str]:
    sizes = list({json.dumps(one["size"]): one["size"] for one in found}.values())
    for (task, (columns, cells)), data, size in itertools.product(TABLES.items(), ROWS, sizes):
        head = f"| {data} | proved ε | {columns} | trainings |"
        lines = [head, "|" + (head.count("|") - 1) * "---|"]
        for row in ROWS[data]:
            name = {"data": data, "row": row, "size": size}
            own = [one for one in found if name.items() <= one.items()]
            trained = [one for one in own if one["task"] == task]
            if trained:
                told = [row, trained[0]["epsilon"], *cells(own), str(len(trained))]
                lines.append(f"| {' | '.join(told)} |")
        if len(lines) > 2:
            sized = ", ".join(f"{key} {value}" for key, value in size.items())
            yield from (f"{data}: {sized}", "", *lines, "")


def make(given: argparse.Namespace) -> None:
    """Make all missing results, the most informative first."""
    torch.set_num_threads(1)
    chosen, wanted = given.tasks.split(","), given.data.split(",")
    named = {DATA[data].get("data", {}).get("name", data) for data in wanted if data != "digits"}
    original = given.data_root = require_data(given.data_root, *sorted(named))
    given.runs.mkdir(parents=True, exist_ok=True)
    size = {key: getattr(given, key) for key in SIZE}
    for data, task, some in ORDER:
        if task not in chosen or data not in wanted:
            continue
        if given.side and data != "digits":
            needed = {"train": 6 * given.records, "test": given.population + 4 * given.canaries}
            root = given.runs / f"data-{given.side}-{given.records}"
            kept = DATA[data].get("data", {}).get("name", data)
            given.data_root = smaller(original, root, kept, given.side, needed)
        for seed in range(1 if task == "audit" else given.seeds):
            for row in some or ROWS[data]:
                name = {"data": data, "task": task, "row": row, "seed": seed, "size": size}
                if any(name.items() <= one.items() for one in read(given.results)):
                    continue
                began = time.monotonic()
                found = TASKS[task](data, row, seed, given, given.runs)
                taken = {
                    "seconds": round(time.monotonic() - began, 1),
                    "commit": describe_run()["commit"],
                }
                append_line(given.results, name | found | taken)
                print(json.dumps(name | found | taken), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--tasks", default="shadow,audit,inside")
    parser.add_argument("--data", default=",".join(ROWS))
    for name, default in NUMBERS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--runs", type=Path, default=Path("runs/residual"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true")
    tiny = {
        "data": "mnist,digits", "data_root": scratch_folder() / "data", "seeds": 1, "records": 48,
        "side": 7, "epochs": 1, "batch": 4, "width": 2, "passes": 2, "population": 10,
    }  # fmt: skip
    given = parse_arguments(parser, tiny, output_options=["runs", "results"])
    if given.quick:
        make_images(given.data_root, "mnist", 48, 10)
    if not given.table:
        make(given)
    print("\n".join(tables(read(given.results))))


if __name__ == "__main__":
    main()
