"""Noise behind the first layer at the papers' epsilon_r, 4 and 8: HGM against equal noise, with and
without DP-SGD, by certificates and under attack, on the same test images.

    python papers/secure-sgd/run.py --data-root DATA [--only 'hgm-4*' 'pixeldp-4'] [--seeds 3]
    python papers/secure-sgd/run.py --table
    python papers/secure-sgd/run.py --quick      # a smoke test on invented pictures

Each row is a recipe with fields changed, trained in this process (no Ray) with a run key of its own
and the seed as `training.init_seed`: accuracy on all test images, and on --inputs of them, evenly
spaced, certificates of n = --draws (alpha 0.05) and four attacks in L-infinity as `dpdist attack`
makes them (10 steps, two draws for each gradient, 100 for an answer, at 95 %). A name says method,
epsilon_r and what differs: `hgm` and `secure` have r from public digits, `pixeldp-E` and
`secure-equal-E` equal noise of the same sigma_r, `secure-agm-E` that of the analytic Gaussian
mechanism; `pixeldp` and `secure` without a number are at epsilon_r 1; `secure-4-dp-E` is trained at
epsilon E. Each training is a line of
--results, which says of each image whether it was right (hexadecimal bits); what is there is not
made again. --table prints Markdown: means, the least and the greatest of the trainings, and pairs
of rows: differences seed by seed with McNemar's test, and their mean with Student's 95 % interval.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import secrets
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from _attacked import attack_hits
from _common import (
    append_line,
    make_images,
    mean_and_range,
    pack_bits,
    parse_arguments,
    require_data,
    scratch_folder,
    unpack_bits,
)
from _common import read_lines as read
from torch import nn

from dpdist import models
from dpdist.attacks.settings import AttackSettings
from dpdist.audits.membership_statistics import Estimate
from dpdist.certification import worker as certifying
from dpdist.certification.expected_scores import ExpectedScores
from dpdist.certification.inference import ClassifierSpec
from dpdist.certification.statistics import compare
from dpdist.certification.worker import expected_log_scores
from dpdist.core.fields import ATTACKS
from dpdist.data import Dataset
from dpdist.randomness.keys import StreamKeys
from dpdist.reports.compare import markdown_table
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import Recipe, find_recipe, load_recipe
from dpdist.training.collectives import Reducer
from dpdist.training.job import prepare
from dpdist.training.records import data_source, load_test_records
from dpdist.training.worker import run_training

RESULTS = Path(__file__).with_suffix(".jsonl")
PIXELDP, HGM = "pixeldp-mnist", "hgm-pixeldp-mnist"
SECURE, AGM = "secure-sgd-mnist", "secure-sgd-agm-mnist"
EQUAL = {"method.mechanism": "extended"}  # equal noise at the sigma_r that HGM has
FLOORS = (0.01, 0.5)  # beside the recipes' 0.1
EPSILONS = (0.2, 0.5, 1.0)  # of Secure-SGD's training, beside the recipe's 2
L2, LINF = (0.02, 0.05, 0.1, 0.2), (0.001, 0.0025, 0.005, 0.01)
PRINTED = (0.01, 0.02, 0.05, 0.1)
COLUMNS = {
    **{f"{name}_l2": L2 for name in ("exact", "cohen")},
    **{f"{name}_linf": LINF for name in ("exact", "cohen")},
    "as_printed_linf": PRINTED,
}
SHOWN = {"exact_l2": "exact, L2", "cohen_l2": "vote, L2", "cohen_linf": "vote, L-infinity"}
PASSES, BLOCK, FORM = 4, 1000, "frozen"


def rows() -> dict[str, tuple[str, dict[str, Any]]]:
    """Return recipe and changes of each row."""
    found: dict[str, tuple[str, dict[str, Any]]] = {
        "pixeldp": (PIXELDP, {}), "hgm": (HGM, {}), "secure": (SECURE, {}),
        "secure-agm": (AGM, {}), "secure-equal": (AGM, EQUAL),
    }  # fmt: skip
    for e in (4, 8):
        at = {"method.epsilon_r": float(e)}
        found |= {
            f"pixeldp-{e}": (PIXELDP, at | EQUAL),
            f"hgm-{e}": (HGM, at),
            f"secure-{e}": (SECURE, at),
            f"secure-agm-{e}": (AGM, at),
            f"secure-equal-{e}": (AGM, at | EQUAL),
        }
        for floor in FLOORS:
            change = at | {"method.redistribution.floor": floor}
            found |= {f"hgm-{e}-floor-{floor:g}": (HGM, change)}
            found |= {f"secure-{e}-floor-{floor:g}": (SECURE, change)}
    for epsilon in EPSILONS:
        change = {"method.epsilon_r": 4.0, "privacy.epsilon": epsilon}
        found[f"secure-4-dp-{epsilon:g}"] = (SECURE, change)
    return found


def pairs() -> list[tuple[str, str]]:
    """Return the pairs to compare; the paper has the first ahead, or the floor differs."""
    found = [("secure", "secure-equal")]
    for e in (4, 8):
        found += [
            (f"hgm-{e}", f"pixeldp-{e}"), (f"hgm-{e}", "pixeldp"),
            (f"secure-{e}", f"secure-agm-{e}"), (f"secure-{e}", f"secure-equal-{e}"),
        ]  # fmt: skip
        for floor in FLOORS:
            found += [(f"{name}-{e}-floor-{floor:g}", f"{name}-{e}") for name in ("hgm", "secure")]
        uniform = f"floor-{FLOORS[-1]:g}"
        found += [(f"hgm-{e}-{uniform}", f"pixeldp-{e}")]
        found += [(f"secure-{e}-{uniform}", f"secure-equal-{e}")]
    return found + [("secure-4", f"secure-4-dp-{epsilon:g}") for epsilon in EPSILONS]


def recipe_of(row: str, seed: int, given: argparse.Namespace) -> Recipe:
    name, change = rows()[row]
    more: dict[str, Any] = {"training.init_seed": seed, "name": row}
    more["data.root"] = str(require_data(given.data_root, "mnist"))
    if given.steps is not None:
        more["training.steps"] = given.steps
    if given.quick:
        more |= {"training.batch_size": 8, "method.redistribution.steps": 1}
        more["method.redistribution.max_records"] = 16
    return load_recipe(find_recipe(name), {**change, **more})


def right(model: nn.Module, test: Dataset) -> int:
    """Count the test images that are classified correctly by the mean of scores."""
    found = 0
    for low in range(0, len(test), BLOCK):
        part = slice(low, min(low + BLOCK, len(test)))
        scores = expected_log_scores(model, test.batch(part), PASSES, first_index=low)
        found += int((scores.argmax(1) == test.targets(part)).sum())
    return found


def certified(
    model: nn.Module, test: Dataset, chosen: np.ndarray, source: StreamKeys, draws: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return by certificate and size whether each chosen image is certified correctly, as bits; and
    sigma_r with the first layer's norms. Certifies as an actor of `dpdist certify` does.
    """
    x, labels = test.batch(chosen).numpy(), np.asarray(test.labels)[chosen]
    settings = ExpectedScores(n=draws, alpha=0.05, backend=FORM)
    place = settings.build_sampler(model, tuple(x.shape[1:]))
    own = replace(source, purpose="certify", noise=settings.noise, sigma=place.sigma)
    assignment = certifying.Assignment(
        model, settings, place, own, test.classes, tuple(x.shape[1:]), x[:64]
    )
    assignment = replace(assignment, spec=certifying.probe(assignment))
    worker = certifying.Worker(assignment)
    lines = [
        settings.table_row(index, label, worker.certify(each, index), place)
        for index, label, each in zip(chosen.tolist(), labels.tolist(), x, strict=True)
    ]
    table = pa.Table.from_pylist(lines, schema=settings.table_schema())
    found: dict[str, Any] = {}
    for one in settings.read_sizes(table):
        held, name = one.size_if_correct(labels), f"{one.name}_{one.norm}"
        for size in COLUMNS.get(name, ()):
            found.setdefault(name, {})[f"{size:g}"] = pack_bits(held >= size)
    norms = {
        "l2": place.sensitivity.l2,
        "linf": place.sensitivity.linf,
        "printed": place.sensitivity.as_printed,
    }
    return found, {"sigma": place.sigma, **norms}


def attacked(
    model: nn.Module, test: Dataset, settings: AttackSettings, source: StreamKeys
) -> dict[str, Any]:
    """Return by attack and size whether each chosen image is right, as bits; 0 is no attack."""
    # Batches of one answer: larger ones would be executed whole for a part of them.
    backend = ClassifierSpec(FORM, settings.n, "", "", "", 0.0)
    own, found = replace(source, purpose="attack"), {}
    for name, size, hits in attack_hits(model, test, settings, own, backend):
        found.setdefault(name, {})[f"{size:g}"] = pack_bits(hits)
    return found


def trained(recipe: Recipe, settings: AttackSettings, draws: int) -> dict[str, Any]:
    """Train with a run key of its own and return all measurements."""
    clock = [time.process_time()]
    with tempfile.TemporaryDirectory(prefix="dpdist-hidden-") as place:
        job = prepare(recipe, RunFolder(Path(place) / "run"), recipe.name)
        run_training(job, Reducer(0, 1, torch.device("cpu")))
        model = models.load(job.folder.model_folder).eval().requires_grad_(False)
        identity = models.model_hash(job.folder.model_folder)
    test = load_test_records(recipe, job.source)
    source = StreamKeys("", secrets.token_hex(16), identity, test.fingerprint, "", 0.0)
    clock.append(time.process_time())
    good = right(model, test)
    chosen = np.asarray(settings.indices(len(test)))
    held, noise = certified(model, test, chosen, source, draws)
    clock.append(time.process_time())
    answered = attacked(model, test, settings, source)
    clock.append(time.process_time())
    epsilon = job.plan.guarantee().epsilon
    return {
        "proved": round(epsilon, 4) if np.isfinite(epsilon) else None, "noise": noise,
        "n": len(test), "right": good, "inputs": len(chosen), "certified": held,
        "attacked": answered, "seconds": [round(b - a) for a, b in itertools.pairwise(clock)],
    }  # fmt: skip


def success(line: dict[str, Any], what: str, size: str) -> np.ndarray:
    """Return bool (N,): whether each image is certified by `what`, or right under attack `what`."""
    if what in COLUMNS:
        return unpack_bits(line["certified"][what][size], line["inputs"])
    names = [name for name in line["attacked"] if name != "none"] if what == "worst" else [what]
    each = [unpack_bits(line["attacked"][name][size], line["inputs"]) for name in names]
    return np.all(each, axis=0)


def measures(line: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the columns of the tables: certificate or attack, and size."""
    sizes = [size for name, found in line["attacked"].items() if name != "none" for size in found]
    found = [(name, f"{size:g}") for name in SHOWN for size in COLUMNS[name]]
    return [*found, ("none", "0"), *(("worst", size) for size in dict.fromkeys(sizes))]


def tables(lines: list[dict[str, Any]]) -> str:
    """Return Markdown tables of all rows, and of all pairs whose both rows are there."""
    by_row: dict[str, list[dict[str, Any]]] = {}
    for name in rows():
        own = sorted((one for one in lines if one["row"] == name), key=lambda one: one["seed"])
        if own:
            by_row[name] = own
    if not by_row:
        return "nothing is measured"
    shown = measures(lines[0])
    head = [f"{SHOWN.get(name, name)} {size}" for name, size in shown]
    grid = [["row", "sigma_r", "trainings", "accuracy, %", *head]]
    for name, own in by_row.items():
        cells = [mean_and_range([100 * one["right"] / one["n"] for one in own])]
        cells += [
            mean_and_range([100 * success(one, *what).mean() for one in own]) for what in shown
        ]
        grid.append([name, f"{own[0]['noise']['sigma']:.3f}", str(len(own)), *cells])
    printed = [["row", "first layer over sqrt(K r), L2", "L-infinity", "as printed"]]
    printed[0] += [f"as printed {size:g}" for size in PRINTED]
    for name, own in by_row.items():
        norms = [
            mean_and_range([one["noise"][norm] for one in own], 2)
            for norm in ("l2", "linf", "printed")
        ]
        says = [
            [100 * success(one, "as_printed_linf", f"{s:g}").mean() for one in own] for s in PRINTED
        ]
        printed.append([name, *norms, *map(mean_and_range, says)])
    return "\n\n".join(markdown_table(part) for part in (grid, printed, differences(by_row, shown)))


def differences(
    by_row: dict[str, list[dict[str, Any]]], shown: list[tuple[str, str]]
) -> list[list[str]]:
    """Return header and rows: first minus second, seed by seed, on the same images."""
    grid = [[
        "first", "second", "what", "size", "difference, points", "mean",
        "only first : only second", "p",
    ]]  # fmt: skip
    for first, second in pairs():
        both = [
            (one, other) for one in by_row.get(first, []) for other in by_row.get(second, [])
            if one["seed"] == other["seed"]
        ]  # fmt: skip
        for what, size in shown if both else []:
            found = [compare(success(b, what, size), success(a, what, size)) for a, b in both]
            if not any(one.only_first or one.only_second for one in found):
                continue
            grid.append([
                first, second, SHOWN.get(what, what), size,
                ", ".join(f"{100 * one.difference:+.1f}" for one in found),
                interval([100 * one.difference for one in found]),
                ", ".join(f"{one.only_second} : {one.only_first}" for one in found),
                ", ".join(f"{one.p_value:.2g}" for one in found),
            ])  # fmt: skip
    return grid


def interval(values: list[float]) -> str:
    """Return the mean ± half of Student's 95 % interval; empty for a single training."""
    if len(values) < 2:
        return ""
    estimate = Estimate.from_values(values)
    return f"{estimate.value:+.1f} ± {estimate.high - estimate.value:.1f}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--only", nargs="*", default=["*"], help="rows, in this order: patterns")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each row")
    parser.add_argument(
        "--steps", type=int, help="of training; by default the recipes' 400 and 300"
    )
    parser.add_argument("--inputs", type=int, default=500, help="certified and attacked")
    parser.add_argument("--draws", type=int, default=1000, help="of each certificate")
    parser.add_argument("--sizes", default="0.05", help="of the attacks; half of those on [-1, 1]")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="none begins after")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="of what is there")
    tiny = {
        "only": ["hgm-4", "secure-4"], "seeds": 1, "steps": 2, "inputs": 2, "draws": 100,
        "data_root": scratch_folder() / "data",
    }  # fmt: skip
    given = parse_arguments(parser, tiny, ["results"], arguments)
    if given.quick:
        make_images(given.data_root, "mnist", 60)
    torch.set_num_threads(1)
    sizes = tuple(map(float, given.sizes.split(",")))
    setting = {
        "steps": given.steps,
        "inputs": given.inputs,
        "draws": given.draws,
        "sizes": given.sizes,
    }
    chosen = [name for only in given.only for name in rows() if fnmatch.fnmatch(name, only)]
    todo = [] if given.table else [(seed, row) for seed in range(given.seeds) for row in chosen]
    end = time.monotonic() + 60 * given.minutes
    for seed, row in dict.fromkeys(todo):
        mine = setting | {"row": row, "seed": seed}
        if read(given.results, mine) or time.monotonic() > end:
            continue
        recipe = recipe_of(row, seed, given)
        every = max(1, len(load_test_records(recipe, data_source(recipe))) // given.inputs)
        settings = AttackSettings(
            sizes=sizes, attacks=ATTACKS, samples=2, n=100, alpha=0.05, every=every,
            max_inputs=given.inputs,
        )  # fmt: skip
        found = trained(recipe, settings, given.draws)
        append_line(given.results, mine | found)
        print(f"{row}, seed {seed}: {found['seconds']} s", flush=True)
    print(tables(read(given.results, setting)))


if __name__ == "__main__":
    main()
