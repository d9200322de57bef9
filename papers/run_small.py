"""Rows of the five papers that a CPU can train, at a size that is said beside each: CIFAR-10 first.

    python papers/run_small.py --data-root DATA [--hours 2.5] [--only 'secure-sgd/*'] [--list]
    python papers/run_small.py --quick      # one cell on the built-in digits

A cell is one training of a row with one key, certified and attacked by the commands that a user
has: `dpdist run`, `dpdist attack`. Cells are made in the order of the papers,
the first key of all before the second; none is begun after --hours. Each is a line of --results,
written when the cell is done: what is there is not made again. A line holds the shares of right
answers, and of each test image whether it was right (hexadecimal bits), to compare rows image by
image. `python papers/tables.py --write` shows them in the pages of the papers.

DPlis' and residual perturbation's cells are those of dplis/run.py and residual/run.py, which keep
lines of their own. `residual/cost` is a figure of speed: leave it out of a run beside other work.
Seconds in a line are the processor's.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
from _common import (
    append_line,
    choose_parts,
    describe_run,
    pack_bits,
    parse_arguments,
    read_parts,
    require_data,
)

from dpdist.attacks.table import read_attack
from dpdist.cli.main import app
from dpdist.core.errors import UserError
from dpdist.data.tables import split_files
from dpdist.evaluation import load_model
from dpdist.papers.stobatch.dpal import ACCURACY_FILE
from dpdist.privacy.guarantee import format_epsilon
from dpdist.randomness.noise_location import find_noise_location
from dpdist.reports.results import load_results
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import find_recipe, load_recipe

HERE = Path(__file__).resolve().parent
RESULTS = Path(__file__).resolve().with_suffix(".jsonl")
KEYS = 3


@dataclass(frozen=True)
class Cell:
    """One row of a table or figure: a recipe with fields changed, and what attacks its runs.

    Attributes:
        paper, item, row: Where PAPER/published.yaml has it.
        recipe, change: What is trained.
        sizes, norm: Of the attack by projected gradients; no sizes: none.
        setting: What is not as published, in words.
    """

    paper: str
    item: str
    row: str
    recipe: str
    setting: str
    change: dict[str, Any] = field(default_factory=dict)
    sizes: tuple[float, ...] = ()
    norm: str = "linf"


# --- what is trained --------------------------------------------------------------------------

TESTS, EVERY = 10, 5  # of the test images each tenth is there, and of those each fifth attacked
SHORT = {"training.steps": 400, "certify.every": EVERY, "certify.n": 500}
PRIVATE = SHORT | {"training.steps": 100, "training.batch_size": 512}
ATTACKED = PRIVATE | {"training.steps": 64, "training.batch_size": 256}  # 16 passes a record
L2, NOISES = (0.25, 0.5, 1.0), (0.25, 0.1)
CHECKED = "Sound certificates of 500 draws, PGD of 10 steps"
SHARES = {"method.redistribution": {"source": "public", "data": "digits", "steps": 200}}


def hgm(epsilon_r: float) -> Iterator[Cell]:
    """Yield the cells of Figures 2 and 4 on CIFAR-10: the paper's network, 51,200 records each."""
    setting = (
        f"epsilon_r {epsilon_r:g}, the paper's network, the analytic Gaussian's noise in all rows, "
        "400 steps of 128 (private: 100 of 512, epsilon 8), r of scikit-learn's digits resized. "
        f"{CHECKED}"
    )
    own = {"method.epsilon_r": epsilon_r, "method.mechanism": "analytic"}
    rows: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
        ("Figure 2", "PixelDP", "pixeldp-cifar10", SHORT),
        ("Figure 2", "HGM-PixelDP", "hgm-pixeldp-cifar10", SHORT | SHARES),
        ("Figure 4", "Secure-SGD, AGM", "secure-sgd-agm-cifar10", PRIVATE),
        ("Figure 4", "Secure-SGD", "secure-sgd-cifar10", PRIVATE | SHARES),
    )
    for item, row, recipe, change in rows:
        yield Cell("secure-sgd", item, row, recipe, setting, change | own, (0.1,))


def transdenoiser(noise: float) -> Iterator[Cell]:
    """Yield the cells of Figures 2 and 3 on CIFAR-10: denoisers of one size, and from scratch."""
    item = "Figures 2c and 2d"
    setting = (
        f"input noise {noise:g}, a DnCNN of depth 6 and width 16 before a ResNet-18 of five "
        "epochs on the public half, 200 steps of 256, epsilon 3 where private. "
        f"{CHECKED} without noise"
    )
    small: dict[str, Any] = {
        "model.options": {"depth": 6, "width": 16, "groups": 4}, "public.training.epochs": 5,
        "training.steps": 200, "training.batch_size": 256, "certify.sigma": noise,
        "certify.n": 500, "certify.every": EVERY, "method.sigma": noise,
        "certify.radii": [noise, 2 * noise],
    }  # fmt: skip
    free = {"privacy.epsilon": None, "privacy.noise_multiplier": 0}
    rows: dict[str, dict[str, Any]] = {
        "without privacy (nodp)": {"method.variant": "no-dp",
                                   "privacy": {"noise_multiplier": 0, "clipping": "none"}},
        "separate noise (sepdp)": {},
        "Algorithm 1 (full; its privacy does not hold)":
            free | {"method.variant": "full", "method.xi_low": 1.0, "method.xi_up": 2.0},
    }  # fmt: skip
    for row, change in rows.items():
        recipe = "transdenoiser-cifar10"
        yield Cell("transdenoiser", item, row, recipe, setting, small | change, L2, "l2")
    scratch = {"privacy.epsilon": 3.0, "certify.radii": small["certify.radii"]}
    if noise == NOISES[0]:  # its noise is behind the first layer: none on the input
        own = {"method.norm": "l2", "method.epsilon_r": 1.0}
        yield Cell(
            "transdenoiser", item, "Secure-SGD from scratch", "secure-sgd-agm-cifar10",
            "from scratch, noise behind the first layer (epsilon_r 1 in L2), 100 steps of 512, "
            f"epsilon 3. {CHECKED}",
            PRIVATE | scratch | own, L2, "l2",
        )  # fmt: skip
    yield Cell(
        "transdenoiser", item, "StoBatch from scratch, soundly", "cifar10-stobatch",
        f"from scratch at noise {noise:g}, {0.8 * noise:g} of it on the input, 64 steps of 256, "
        f"epsilon 3. {CHECKED}",
        ATTACKED | scratch | {"method.sigma": noise, "certify.sigma": 0.8 * noise}, L2, "l2",
    )  # fmt: skip


def dpal() -> Iterator[Cell]:
    """Yield the cells of Figures 3 and 5 on CIFAR-10 at one budget; DPAL's own prove nothing."""
    setting = (
        "epsilon 2, 64 steps of 256 (functional: one release of ten sums of public features). "
        f"{CHECKED}"
    )
    sizes = (0.025, 0.1)
    yield Cell(
        "stobatch", "Figure 3", "StoBatch, soundly", "cifar10-stobatch", setting,
        ATTACKED | {"privacy.epsilon": 2.0}, sizes,
    )  # fmt: skip
    yield Cell(
        "stobatch", "Figure 3", "functional, soundly", "mnist-functional", setting,
        {"data.name": "cifar10", "privacy.epsilon": 2.0, "certify.every": EVERY,
         "certify.n": 500}, sizes,
    )  # fmt: skip
    for item, about, recipe, alone in (
        ("Figure 3", "CIFAR-10, claimed epsilon 2", "dpal-cifar10", 27),
        ("Figure 2", "MNIST, claimed epsilon 0.2", "dpal-mnist", 24),
    ):
        steps = {"Figure 3": 2 * alone, "Figure 2": 4 * alone}[item]
        yield Cell(
            "stobatch", item, "DPAL as published (NOT PRIVATE: its budget is refuted)", recipe,
            f"{about}, {steps} steps of the published m, the auto-encoder alone in the first "
            f"{alone}. As the paper measures it: its predictions of the first test images, "
            "attacks by PGD of 3 steps on the training's noise alone",
            {"training.epochs": None, "training.steps": steps, "method.images": 200,
             "method.steps": 3, "method.sizes": list(sizes)},
        )  # fmt: skip


def cells() -> dict[str, Cell]:
    """Return every cell by name; digits is for --quick."""
    denoised = [each for noise in NOISES for each in transdenoiser(noise)]
    found = [*hgm(8.0), *dpal(), *denoised, *hgm(4.0)]
    return {f"{each.paper}/{each.setting.split(',')[0]}/{each.row}": each for each in found}


# Scripts that keep their own lines: rows of DPlis at a quarter of the first budget, and residual
# perturbation's shadows at 32 x 32 pixels with 2,500 members, judged by three plain shadows.
def scripts(key: int) -> Iterator[tuple[str, list[str]]]:
    """Yield name and command of each part that another script makes with this key."""
    for item, row in (
        ("Table 2", "CIFAR-10 MLP, none"), ("Table 2", "CIFAR-10 MLP, R = 10"),
        ("Table 2", "CIFAR-10 CNN, none"), ("Table 2", "CIFAR-10 CNN, R = 10"),
        ("Table 2", "MNIST MLP, none"), ("Table 2", "MNIST MLP, R = 10"),
        ("Table 2", "MNIST CNN, none"), ("Table 2", "MNIST CNN, R = 10"),
        ("Table 2", "MNIST CNN, R best"), ("Table 11", "tanh, none"), ("Table 11", "tanh, R = 10"),
    ):  # fmt: skip
        yield f"dplis/{item}/{row}", [
            "dplis/run.py", "--item", item, "--row", row, "--shorter", "4", "--draws", "3",
            "--seeds", str(key + 1),
        ]  # fmt: skip
    for task in ("shadow", "cost"):
        yield f"residual/{task}", [
            "residual/run.py", "--tasks", task, "--data", "cifar10", "--seeds", str(key + 1),
            "--shadows", str(KEYS),
        ]  # fmt: skip


# --- one cell ---------------------------------------------------------------------------------


def with_fewer_tests(source: Path, root: Path) -> Path:
    """Return a data root with the training records of `source` and each tenth test image: a
    network with noise inside answers each by 16 passes.
    """
    for name in ("cifar10", "mnist"):
        own = root / name
        if (own / "test.parquet").exists():
            continue
        (own / "train").mkdir(parents=True, exist_ok=True)
        for place, file in enumerate(split_files(source, name, "train")):
            link = own / "train" / f"{place:05}.parquet"
            link.unlink(missing_ok=True)
            link.symlink_to(file.resolve())
        table = pq.read_table(list(map(str, split_files(source, name, "test"))))
        pq.write_table(table.take(np.arange(0, len(table), TESTS)), own / "test.parquet")
    return root


def command(options: argparse.Namespace, *words: str) -> None:
    """Run one dpdist command in this process; what it prints goes to a log beside the runs."""
    root = ["--set", f"data.root={options.tests}"] if options.tests else []
    print("  $ dpdist", *words, *root, flush=True)
    told = io.StringIO()
    os.environ["DPDIST_EXECUTOR"] = "local"
    try:
        with contextlib.redirect_stdout(told):
            app([*words, *root], standalone_mode=False)
    finally:
        with (options.out / "run_small.log").open("a") as log:
            log.write(f"$ dpdist {' '.join(words)}\n{told.getvalue()}")


def run_name(part: str) -> str:
    """Return the name of a cell's run folder."""
    return re.sub(r"[^a-z0-9.]+", "-", part.lower()).strip("-")


def make(options: argparse.Namespace, part: str, cell: Cell, key: int) -> dict[str, Any]:
    """Train, certify and attack one cell, and return what its line says beside its name."""
    began, name = processor_time(), run_name(part)
    recipes, runs = options.out / "recipes", options.out / "runs"
    recipes.mkdir(parents=True, exist_ok=True)
    recipe = load_recipe(
        find_recipe(cell.recipe),
        {**cell.change, "name": name, "training.init_seed": key, **place_of_public(options, cell)},
    )
    path, run = recipes / f"{name}.yaml", RunFolder(runs / name)
    path.write_text(recipe.to_yaml())
    if recipe.public is not None and not (public_folder(options) / "provenance.json").exists():
        command(options, "run", str(path), "--until", "pretrain")
    if not run.report_file.exists():
        command(options, "run", str(path), "--runs", str(runs))
    if cell.sizes and not list(run.path.glob("attacks/*/attacks.parquet")):
        every = recipe.certify.every if recipe.certify is not None else 1
        noisy = find_noise_location(load_model(recipe, run)).is_random
        command(
            options, "attack", name, "--runs", str(runs),
            "--set", f"attack.norm={cell.norm}", "--set", "attack.attacks=[pgd]",
            "--set", f"attack.every={every}",
            "--set", f"attack.sizes={list(cell.sizes)}",
            *(("--set", "attack.samples=4", "--set", "attack.n=100") if noisy else ()),
        )  # fmt: skip
    return measured(run) | {"seconds": round(processor_time() - began)}


def processor_time() -> float:
    """Return the processor seconds of this process and of children that ended."""
    return sum(os.times()[:4])


def public_folder(options: argparse.Namespace) -> Path:
    """Return the folder of the frozen classifier that all denoisers share."""
    return Path(options.out / "public" / "classifier")


def place_of_public(options: argparse.Namespace, cell: Cell) -> dict[str, Any]:
    own = cell.recipe.startswith("transdenoiser")
    return {"model.classifier": str(public_folder(options))} if own else {}


def measured(run: RunFolder) -> dict[str, Any]:
    """Return shares in % and bits of a finished run: clean, certified by radius, under attack."""
    facts = load_results(run)
    assert facts.evaluation is not None
    epsilon = facts.guarantee.epsilon
    shares: dict[str, float] = {"clean": 100 * facts.evaluation["accuracy"]}
    right: dict[str, str] = {}
    count = facts.evaluation["inputs"]
    counts = {"clean": count}
    if facts.recipe.method.name == "dpal":  # measured in training, as the paper does
        own = json.loads((run.private / ACCURACY_FILE).read_text())
        count = own["images"]
        shares["as the paper predicts"] = 100 * own["right"]
        shares |= {f"under PGD {at['size']:g}": 100 * at["right"] for at in own["attacked"]}
    for table in facts.tables[:1]:
        held, count = table.size_if_correct(), len(table.index)
        for radius in (0.0, *facts.recipe.certify.radii):  # type: ignore[union-attr]
            column = f"certified at {radius:g}"
            shares[column] = 100 * float((held >= radius).mean())
            right[column] = pack_bits(held >= radius)
    for place in sorted(run.path.glob("attacks/*/attacks.parquet")):
        attacks = read_attack(place)
        count = len(np.unique(attacks.index))
        for size in sorted(set(attacks.size) - {0.0}):
            failed = (attacks.size == size) & (attacks.prediction != attacks.label)
            held = ~np.isin(np.unique(attacks.index), attacks.index[failed])
            column = f"under PGD {size:g}"
            shares[column] = 100 * float(held.mean())
            right[column] = pack_bits(held)
    return {
        "test": shares, "bits": right, "n": count, "counts": counts,
        "proved": format_epsilon(epsilon) if np.isfinite(epsilon) else "none",
    }  # fmt: skip


# --- all of them ------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-root", type=Path, help="folder with cifar10/ and mnist/ as Parquet")
    parser.add_argument("--out", type=Path, default=Path("runs/papers"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--hours", type=float, default=2.5, help="no cell begins after so many")
    parser.add_argument("--only", nargs="+", default=["*"], help="cells: 'secure-sgd/*'")
    parser.add_argument("--keys", type=int, default=KEYS)
    parser.add_argument("--list", action="store_true", help="print the cells, and whether done")
    options = parse_arguments(parser, {"keys": 1, "only": ["quick"]}, ["out", "results"])
    found: dict[str, Any] = {}
    for key in range(options.keys):
        for name, cell in cells().items():
            found[f"{name}/{key}"] = (cell, key)
        for name, words in scripts(key):
            found[f"{name}/{key}"] = words
    chosen = choose_parts(found, options.only) if not options.quick else {"quick/digits/0": QUICK}
    done = read_parts(options.results)
    if options.list:
        for name, part in chosen.items():
            state = (
                "by its script" if isinstance(part, list) else "done" if name in done else "open"
            )
            print(f"{state:13} {name}")
        return
    if not options.quick:
        options.data_root = require_data(options.data_root, "cifar10", "mnist")
    options.out.mkdir(parents=True, exist_ok=True)
    options.tests = None
    if not options.quick:
        options.tests = with_fewer_tests(options.data_root, options.out.resolve() / "data")
    end, failed = time.monotonic() + 3600 * options.hours, 0
    for place, (name, part) in enumerate(chosen.items()):
        if name in done:
            continue
        if time.monotonic() > end:
            print(
                f"{len(chosen) - place} cells are left or to be looked at: the same command goes on"
            )
            break
        print(f"{name} ({place + 1} of {len(chosen)})", flush=True)
        try:
            run_part(options, name, part)
        except (UserError, subprocess.CalledProcessError) as error:  # the others are made
            failed += 1
            print(f"  failed: {error}", file=sys.stderr, flush=True)
    if failed:
        raise SystemExit(f"{failed} cells failed")


def run_part(options: argparse.Namespace, name: str, part: Any) -> None:
    """Make one cell and write its line, or let its script do both."""
    if isinstance(part, list):
        results = (options.results.resolve().parent / part[0]).with_suffix(".jsonl")
        results.parent.mkdir(parents=True, exist_ok=True)
        words = ["--data-root", str(options.data_root), "--results", str(results)]
        began = processor_time()
        subprocess.run([sys.executable, str(HERE / part[0]), *part[1:], *words], check=True)
        print(f"  {processor_time() - began:.0f} s", flush=True)
        return
    cell, key = part
    about = {
        "part": name, "paper": cell.paper, "item": cell.item, "row": cell.row, "key": key,
        "setting": cell.setting, "recipe": cell.recipe, "commit": describe_run()["commit"],
        "command": "python papers/run_small.py --data-root DATA",
    }  # fmt: skip
    line = about | make(options, name, cell, key)
    append_line(options.results, line)
    told = ", ".join(f"{column} {value:.1f}" for column, value in line["test"].items())
    print(f"  {told}; {line['seconds']} s", flush=True)


QUICK = (
    Cell(
        "secure-sgd", "Figure 4", "DP-SGD", "digits", "a smoke test",
        {"training.steps": 3, "training.epochs": None, "certify.n": 100, "certify.every": 30},
        (0.1,),
    ), 0,
)  # fmt: skip


if __name__ == "__main__":
    main()
