"""Compare rates by class with equal rates and with loss weights, at equal epsilon, on a rare class.

    OMP_NUM_THREADS=1 python benchmarks/quality/rare_classes.py [--data-root DIR] [--epsilon 2]
        [--keys 5]
    python benchmarks/quality/rare_classes.py --table
    python benchmarks/quality/rare_classes.py --quick       # a smoke test on the built-in digits

One digit against all others: of the digit only so many training records are kept, by a hash, that
they are a share of --share of all. The test part is whole, and the score the balanced accuracy, the
mean of both classes' own. A linear model or a small network learns it. All ways have the same
expected batch, steps, clip and epsilon; the noise follows, and is larger where the largest rate is.

* `equal`: all records join at one rate.
* `weights-W`: the same, with the rare class's loss multiplied by W and divided so that the mean
  weight over a batch is 1; the clip comes after the weight.
* `rates-W`: the rare class joins W times as often, by `rates` and declared `class_counts`.
* `rates-W-importance`: the same with `importance_weights`, 1/rate before the clip.

Learning rates are chosen for each way by a key of their own on a tenth of the training records that
no training reads; that choice is not paid for, in any way. Each training is a line of --results;
what is there is not made again. --table prints Markdown: means, least and greatest of the keys, and
the difference to `equal`, key by key, with Student's 95 % interval of its mean.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))
from _common import (
    RESULTS_FOLDER,
    append_line,
    parse_arguments,
    read_lines,
    require_data,
    scratch_folder,
    show_gap,
)
from torch import Tensor, nn

import dpdist
from dpdist import data
from dpdist.reports.compare import markdown_table

RESULTS = RESULTS_FOLDER / "rare_classes.jsonl"
DELTA, TUNING = 1e-5, 1000  # TUNING: key of the trainings that a learning rate is chosen by
WAYS = ("equal", "weights-4", "weights-16", "rates-2", "rates-4", "rates-16", "rates-4-importance")
Part = tuple[Tensor, Tensor]  # inputs (N, pixels), and 1 where it is the rare digit (N,)


def read(options: argparse.Namespace) -> tuple[Part, Part, Part]:
    """Return the parts for training, for choices and for the test."""
    name, root = "digits", None
    if not options.quick:
        name, root = "mnist", require_data(options.data_root, "mnist")
    found = []
    for split in ("train", "test"):
        records = data.load(data.DataSource(name, 10, root), split)
        everything = np.arange(len(records))
        pixels = records.batch(everything).flatten(1).float()
        found.append((pixels, (records.targets(everything) == options.digit).long()))
    (inputs, rare), test = found
    places = torch.tensor([place_of(row) for row in range(len(rare))])
    apart, common = places < 0.1, int((rare == 0).sum())
    kept = options.share / (1 - options.share) * common / max(1, int((rare == 1).sum()))
    used = ~apart & ((rare == 0) | (places < 0.1 + 0.9 * kept))
    return (inputs[used], rare[used]), (inputs[apart], rare[apart]), test


def place_of(row: int) -> float:
    """Return a number from 0 to 1 that follows from a record's position alone."""
    digest = hashlib.blake2b(str(row).encode(), digest_size=8, person=b"rare.classes").digest()
    return int.from_bytes(digest, "little") / 2.0**64


def loss_with(weight: float, rare_share: float) -> Any:
    """Return the cross-entropy, weighted by class; the mean weight over all records is 1."""
    mean = 1 - rare_share + weight * rare_share
    weights = torch.tensor([1 / mean, weight / mean])

    def weighted_cross_entropy(module: nn.Module, batch: Any) -> Tensor:
        losses = nn.functional.cross_entropy(module(batch[0]), batch[1], reduction="none")
        return losses * weights[batch[1]]

    return weighted_cross_entropy


def train(
    way: str, part: Part, options: argparse.Namespace, key: int, rate: float
) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model trained in one of the ways, and what stands on its plan."""
    kind, _, rest = way.partition("-")
    weight = float(rest.partition("-")[0] or 1)
    counts = torch.bincount(part[1], minlength=2).tolist()  # of this benchmark's own making: public
    torch.manual_seed(key)
    model = nn.Sequential(nn.Linear(part[0].shape[1], 32), nn.Tanh(), nn.Linear(32, 2))
    given: dict[str, Any] = {"loss": "cross-entropy"}
    if kind == "weights":
        given["loss"] = loss_with(weight, counts[1] / sum(counts))
    if kind == "rates":
        given |= {
            "class_sampling": {0: 1.0, 1: weight}, "class_counts": dict(enumerate(counts)),
            "importance_weights": rest.endswith("importance"),
        }  # fmt: skip
    training = dpdist.PrivateTraining(
        model, torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9), part,
        privacy={
            "epsilon": options.epsilon, "delta": DELTA, "clip_norm": 1.0,
            "run_key": hashlib.sha256(f"{way} {key}".encode()).hexdigest(),
        },
        batch_size=options.batch_size, steps=options.steps,
        folder=scratch_folder() / f"{way}-{key}-{rate:g}", **given,
    )  # fmt: skip
    training.run_all()
    step = training.plan.step(0)
    told = {
        "records": sum(counts), "rare": counts[1], "largest_rate": step.sample_rate,
        "noise": step.noise_multiplier, "epsilon": training.guarantee.epsilon,
    }  # fmt: skip
    return model, told


def class_accuracies(model: nn.Module, part: Part) -> list[float]:
    """Return the accuracy on the common and on the rare class, in per cent."""
    with torch.no_grad():
        right = model(part[0]).argmax(1) == part[1]
    return [100 * float(right[part[1] == label].float().mean()) for label in (0, 1)]


def run(options: argparse.Namespace) -> None:
    """Train all that is not in the results: a choice for each way, then its keys."""
    training, choice, test = read(options)
    made = read_lines(options.results)
    for way in (each for each in WAYS if fnmatch.fnmatch(each, options.only)):

        def done(key: int, rate: float, way: str = way) -> dict[str, Any]:
            known = {
                "way": way, "target": options.epsilon, "steps": options.steps,
                "digit": options.digit, "batch": options.batch_size, "share": options.share,
                "key": key, "lr": rate,
            }  # fmt: skip
            for each in made:
                if known.items() <= each.items():
                    return each
            start = time.process_time()
            model, told = train(way, training, options, key, rate)
            common, rare = class_accuracies(model, test)
            found = {
                **known, **told, "choice": float(np.mean(class_accuracies(model, choice))),
                "common_accuracy": common, "rare_accuracy": rare, "balanced": (common + rare) / 2,
                "seconds": round(time.process_time() - start, 1),
            }  # fmt: skip
            append_line(options.results, found)
            made.append(found)
            print(f"{way} key {key} lr {rate:g}: {found['balanced']:.2f} %", flush=True)
            return found

        tried = [done(TUNING, rate) for rate in options.learning_rates]
        best = max(tried, key=lambda each: each["choice"])
        for key in range(options.keys):
            done(key, best["lr"])


def print_table(options: argparse.Namespace) -> None:
    """Print the trainings of all ways at this epsilon as Markdown."""
    rows: list[list[str]] = []
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for each in read_lines(options.results):
        if each["key"] != TUNING and each["target"] == options.epsilon:
            found.setdefault(each["way"], {})[each["key"]] = each
    for way in (each for each in WAYS if each in found):
        lines = list(found[way].values())
        scores = [one["balanced"] for one in lines]
        keys = sorted(found[way].keys() & found.get("equal", {}).keys())
        gaps = [found[way][key]["balanced"] - found["equal"][key]["balanced"] for key in keys]
        rows.append([
            way, f"{lines[0]['largest_rate']:.4f}", f"{lines[0]['noise']:.2f}",
            f"{lines[0]['lr']:g}", f"{max(one['epsilon'] for one in lines):.3f}",
            f"{np.mean([one['common_accuracy'] for one in lines]):.2f}",
            f"{np.mean([one['rare_accuracy'] for one in lines]):.2f}",
            f"{np.mean(scores):.2f} ({min(scores):.2f} to {max(scores):.2f})",
            "" if way == "equal" or not gaps else show_gap(gaps),
        ])  # fmt: skip
    head = [
        "way", "largest rate", "noise multiplier", "learning rate", "epsilon", "common, %",
        "rare, %", "balanced accuracy, %", "more than `equal`",
    ]  # fmt: skip
    print(markdown_table([head, *rows]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else "", allow_abbrev=False
    )
    parser.add_argument("--data-root", type=Path, help="folder that holds mnist as Parquet")
    parser.add_argument("--digit", type=int, default=8, help="the rare class")
    parser.add_argument("--share", type=float, default=0.02, help="of the records that are rare")
    parser.add_argument("--epsilon", type=float, default=2.0)
    parser.add_argument("--keys", type=int, default=5, help="trainings of each way")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument(
        "--learning-rates", type=float, nargs="+", default=[0.025, 0.1, 0.4, 1.6, 6.4]
    )
    parser.add_argument("--only", default="*", help="ways to train, as a pattern")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print the results, train nothing")
    options = parse_arguments(
        parser,
        {
            "steps": 2, "keys": 2, "only": "[er]*[l4]", "learning_rates": [0.4],
            "batch_size": 32, "share": 0.05,
        },
        ["results"],
    )  # fmt: skip
    warnings.filterwarnings("ignore", message="privacy.run_key")
    torch.set_num_threads(1)
    if not options.table:
        run(options)
    print_table(options)


if __name__ == "__main__":
    main()
