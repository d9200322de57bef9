"""The flagship recipe against what is published, and what each of its ingredients gives.

Every row is `dpdist run` of a recipe of the flagship's family (recipes/mnist-flagship*.yaml,
recipes/cifar10-flagship-*.yaml) with the changes below, under a fresh key.
Rows share the pre-training. What is done is not done again: the same command continues.

    python papers/dp-cert/run.py --data-root data [--out DIR] [--only PATTERN ...] [--quick]

Its figures go into results.jsonl there. With --figure PATH nothing runs: those of
papers/dp-cert/run.jsonl are drawn (of runs before that file: the means in
papers/dp-cert/README.md).

With --all the runs of the comparison are also certified on all test images, with early stopping
(mode target-radius: the same alpha for each image, at most the same n).

Published: DP-CERT (Wu et al., TMLR 2024), certified accuracy on MNIST at n = 10,000, alpha = 0.001,
epsilon about 2.9 at delta = 1e-6, without public data.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import signal
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from _common import mean_and_range, parse_arguments, require_data, run_command

from dpdist.certification.table import CertificateTable
from dpdist.cluster.session import connect
from dpdist.core import optional_imports
from dpdist.core.errors import ClusterError, UserError
from dpdist.privacy.guarantee import format_epsilon
from dpdist.reports.charts import Axis, Line, chart
from dpdist.reports.compare import markdown_table
from dpdist.reports.results import RunResults, load_results
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import find_recipe, load_recipe

PUBLISHED = {  # by data set and sigma: certified at radii, in %
    ("MNIST", 0.25): {0.0: 98.0, 0.3: 95.6, 0.5: 92.8, 0.7: 87.4},
    ("MNIST", 0.5): {0.0: 97.0, 0.5: 92.7, 1.0: 81.3},
    ("MNIST", 1.0): {0.0: 90.3, 0.5: 80.1, 1.0: 64.6, 1.5: 45.6},
    ("CIFAR-10", 0.25): {0.0: 64.4, 0.3: 37.5, 0.5: 21.2, 0.7: 8.5},
}
NEAR_ZERO = 0.001  # the radius of a test that decides whether any is certified
PUBLISHED_AT_HALF = ((1.0, 89.3), (2.9, 92.8))  # certified at 0.5, sigma 0.25: by epsilon
# In the figure, beside the recipe's own, and what else changes with them. The noise that is added
# to the weights grows with the steps too: a smaller epsilon has fewer in proportion, a larger one
# as many. Rows with public weights have steps of their own.
EPSILONS: dict[float, dict[str, Any]] = {
    8.0: {},
    1.0: {"training.steps": 500},
    0.5: {"training.steps": 250},
    0.25: {"training.steps": 125},
}
ENDS = (min(EPSILONS), max(EPSILONS))  # where the line of what has no epsilon begins and ends
RESULTS = Path(__file__).with_suffix(".jsonl")
RECIPE, SEARCH = "mnist-flagship", "mnist-flagship-search"
WIDE, WIDE_SEARCH = "mnist-flagship-wide", "mnist-flagship-wide-search"
WIDEST = "mnist-flagship-widest"
PUBLIC, PUBLIC_SEARCH = "mnist-flagship-public", "mnist-flagship-public-search"
CIFAR, SCENES = "cifar10-flagship-no-public", "cifar10-flagship-scenes"
PHOTOGRAPHS = (CIFAR, SCENES)
# What lies in the folder of initial weights, by recipe or row.
BEGUN = dict.fromkeys((RECIPE, SEARCH), "strokes-")
BEGUN |= dict.fromkeys((WIDE, WIDE_SEARCH), "denoised-strokes-")
PLAIN = "scenes-plain"  # a row with initial weights of its own
BEGUN |= {WIDEST: "unet-cnn-strokes-", SCENES: "scenes-white-", PLAIN: "scenes-"}


@dataclass(frozen=True)
class Row:
    """`recipe` with `changes` (dotted keys; None takes a section out), `repeats` times.

    compared: beside what is published, so --all certifies its runs on all test images.
    """

    name: str
    title: str
    sigma: float = 0.25
    changes: dict[str, Any] = field(default_factory=dict)
    repeats: int = 1
    compared: bool = False
    recipe: str = PUBLIC

    @property
    def task(self) -> tuple[str, float]:
        """Return the data set's name and sigma."""
        return ("CIFAR-10" if self.recipe in PHOTOGRAPHS else "MNIST", self.sigma)

    def runs(self) -> list[str]:
        """Return the names of its run folders."""
        return [f"{self.name}-{k}" for k in range(self.repeats)]


def _epsilon(value: float, **changes: Any) -> dict[str, Any]:
    return {"privacy.epsilon": value, **changes}


# The recipe as it was before: one answer for an image, and no term that makes copies agree.
EARLIER = {"model.shifts": 0, "method.consistency": 0.0}


ROWS = [
    Row("flagship", "public weights", repeats=3, compared=True),
    Row("flagship-0.5", "public weights, noise 0.5", 0.5, repeats=3, compared=True),
    Row("epsilon-8", "public weights, epsilon 8", changes=_epsilon(8.0), compared=True),
    Row("epsilon-1", "public weights, epsilon 1", changes=_epsilon(1.0), compared=True),
    Row("epsilon-0.5", "public weights, epsilon 0.5", changes=_epsilon(0.5), compared=True),
    Row(
        "epsilon-0.25",
        "public weights, epsilon 0.25, 150 steps",
        changes=_epsilon(0.25, **{"training.steps": 150}),
        compared=True,
    ),
    Row(
        "longer",
        "public weights, 600 steps, learning rate 3, consistency 4, epsilon 2.5",
        changes=_epsilon(
            2.5,
            **{"training.steps": 600, "training.learning_rate": 3.0, "method.consistency": 4.0},
        ),
    ),
    Row(
        "longer-0.5",
        "public weights, noise 0.5 in training too, 600 steps, consistency 1, epsilon 2.9",
        0.5,
        changes=_epsilon(
            2.9, **{"training.steps": 600, "method.sigma": 0.5, "method.consistency": 1.0}
        ),
    ),
    Row("searched", "public weights, searched", compared=True, recipe=PUBLIC_SEARCH),
    Row("strokes-searched", "searched: the tuning is counted", compared=True, recipe=SEARCH),
    Row(
        "strokes-searched-1.5",
        "searched: the tuning is counted, epsilon 1.5",
        changes=_epsilon(1.5),
        compared=True,
        recipe=SEARCH,
    ),
    Row("shifts", "the recipe", repeats=3, compared=True, recipe=RECIPE),
    *(
        Row(
            f"shifts-epsilon-{epsilon:g}",
            f"the recipe at epsilon {epsilon:g}"
            + (f", {changes['training.steps']} steps" if changes else ""),
            changes=_epsilon(epsilon, **changes),
            compared=True,
            recipe=RECIPE,
        )
        for epsilon, changes in EPSILONS.items()
    ),
    Row(
        "shifts-inf",
        "the recipe without noise on the gradient: not private",
        changes={"privacy.epsilon": None, "privacy.noise_multiplier": 0.0},
        recipe=RECIPE,
    ),
    Row(
        "shifts-alone",
        "without consistency",
        changes={"method.consistency": 0.0},
        compared=True,
        recipe=RECIPE,
    ),
    Row(
        "strokes",
        "one answer for an image, no consistency, epsilon 2.9",
        changes=_epsilon(2.9, **EARLIER),
        repeats=3,
        compared=True,
        recipe=RECIPE,
    ),
    Row(
        "strokes-2",
        "one answer for an image, no consistency",
        changes=EARLIER,
        compared=True,
        recipe=RECIPE,
    ),
    Row(
        "strokes-inf",
        "the same steps, one answer, without noise on the gradient: not private",
        changes={"privacy.epsilon": None, "privacy.noise_multiplier": 0.0, **EARLIER},
        recipe=RECIPE,
    ),
    Row(
        "strokes-head",
        "only a head fitted by the functional mechanism",
        changes={
            "model.shifts": 0,
            "method": {
                "name": "functional",
                "clip": 58.2,
                "radius": 35.5,
                "rounds": 16,
                "sigma": 0.3,
                "noise": "own",
            },
            "privacy": {"epsilon": 2.9, "delta": 1e-6},
            "training": {"batch_size": 1, "steps": 1, "learning_rate": 1.0},
        },
        recipe=RECIPE,
    ),
    Row(
        "strokes-0.5",
        "noise 0.5, one answer for an image, no consistency, epsilon 2.9",
        0.5,
        changes=_epsilon(2.9, **EARLIER),
        repeats=3,
        compared=True,
        recipe=RECIPE,
    ),
    Row(
        "strokes-1.0",
        "noise 1.0, one answer for an image, no consistency, epsilon 2.9",
        1.0,
        changes=_epsilon(2.9, **EARLIER),
        compared=True,
        recipe=RECIPE,
    ),
    Row(
        "shifts-0.5",
        "the recipe at noise 0.5, epsilon 2.9",
        0.5,
        changes=_epsilon(2.9),
        compared=True,
        recipe=RECIPE,
    ),
    Row(
        "shifts-1.0",
        "the recipe at noise 1.0, epsilon 2.9",
        1.0,
        changes=_epsilon(2.9),
        compared=True,
        recipe=RECIPE,
    ),
    Row(
        "denoised-0.5",
        "noise 0.5, behind a denoiser learned from strokes, epsilon 2.9",
        0.5,
        repeats=3,
        compared=True,
        recipe=WIDE,
    ),
    Row(
        "denoised-1.0",
        "noise 1.0, behind a denoiser learned from strokes, epsilon 2.9",
        1.0,
        repeats=3,
        compared=True,
        recipe=WIDE,
    ),
    Row(
        "denoised-1.0-rate-8",
        "the same, without consistency, training noise 1.0, learning rate 8",
        1.0,
        changes={"method.sigma": 1.0, "method.consistency": 0.0, "training.learning_rate": 8.0},
        repeats=3,
        recipe=WIDE,
    ),
    Row(
        "widest",
        "noise 1.0, what clears the noise is trained too, epsilon 2.9",
        1.0,
        changes={"method.sigma": 1.0},
        repeats=3,
        compared=True,
        recipe=WIDEST,
    ),
    Row(
        "denoised-searched",
        "noise 0.5, searched: the tuning is counted",
        0.5,
        compared=True,
        recipe=WIDE_SEARCH,
    ),
    Row("cifar10", "no public data: a head on scattering", repeats=3, recipe=CIFAR),
    Row(
        "scenes",
        "no public data: begun from drawn scenes",
        changes={"method.sigma": 0.25},
        repeats=3,
        recipe=SCENES,
    ),
    Row(
        PLAIN,
        "the same, features not whitened",
        changes={
            "method.sigma": 0.25,
            "model.options": {"groups": 8},
            "model.trained": ["12"],
            "training.learning_rate": 64.0,
        },
        repeats=3,
        recipe=SCENES,
    ),
    Row(
        "no-public",
        "random initial weights",
        changes={"model.initial": None, "public": None},
    ),
    Row(
        "no-public-2.9",
        "random initial weights, epsilon 2.9",
        changes=_epsilon(2.9, **{"model.initial": None, "public": None}),
    ),
    Row("no-noise", "no input noise in private training", changes={"method": {"name": "dp-sgd"}}),
    Row(
        "one-draw",
        "one draw of noise, which has nothing to agree with",
        changes={"method.augmentations": 1, "method.consistency": 0.0},
    ),
    Row("no-consistency", "without the consistency term", changes={"method.consistency": 0.0}),
    Row("no-average", "without the average of the parameters", changes={"training.ema": None}),
    Row(
        "dplis",
        "DPlis (R = 10) on top of the input noise",
        changes={"method": {"name": "dplis", "radius": 10, "augmentations": 2, "sigma": 0.3}},
    ),
    Row("same-noise", "trained with the certificate's noise", changes={"method.sigma": 0.25}),
]
QUICK = {
    "data.name": "digits",
    "model": {"name": "small-cnn", "options": {"width": 4}},
    "public.training": {"batch_size": 50, "steps": 20, "learning_rate": 0.1},
    "privacy.delta": 1e-4,
    "training.batch_size": 50,
    "training.steps": 3,
    "certify.n": 100,
    "certify.every": 30,
}


class Bench:
    """Where it all lies: `out`/recipes, public, runs, table.md."""

    def __init__(self, out: Path, data_root: Path | None, quick: bool) -> None:
        self.out, self.data_root, self.quick = out.resolve(), data_root, quick
        self.runs = self.out / "runs"

    def recipe(self, row: Row, name: str) -> Path:
        """Write the row's recipe into a file and return its path."""
        found = load_recipe(find_recipe(row.recipe), {**self._changes(row), "name": name})
        path = self.out / "recipes" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(found.to_yaml())
        return path

    def _changes(self, row: Row) -> dict[str, Any]:
        if row.recipe == CIFAR:
            return row.changes
        changes: dict[str, Any] = dict(QUICK) if self.quick else {}
        if self.quick:  # the private half and the public half of the digits
            changes |= {"data.public": 0.5, "public.data": None}
        begun = f"{BEGUN.get(row.name, BEGUN.get(row.recipe, ''))}sigma"
        changes["model.initial"] = str(self.out / "public" / f"{begun}-{row.sigma:g}")
        changes |= dict.fromkeys(("public.sigma", "certify.sigma"), row.sigma)
        changes["method.sigma"] = 1.2 * row.sigma
        # Where draws stop early, 0 is decided with the others.
        decides_zero = 0 in load_recipe(find_recipe(row.recipe)).certify.radii
        radii = [radius for radius in PUBLISHED[row.task] if radius or decides_zero]
        changes["certify.radii"] = radii
        if "method" in row.changes:
            del changes["method.sigma"]
        changes |= row.changes
        if changes.get("model.initial", True) is None:
            changes = {k: v for k, v in changes.items() if not k.startswith("public.")}
        return changes

    def make(self, row: Row, name: str) -> None:
        """Execute `dpdist run` for one run folder."""
        self._dpdist("run", str(self.recipe(row, name)))

    def certify_all(self, name: str) -> None:
        """Certify all test images at the recipe's radii, and at 0, which needs few samples."""
        for radii in ([], ["--radii", f"{NEAR_ZERO:g}"]):
            self._dpdist(
                "certify",
                name,
                *radii,
                "--set",
                "certify.mode=target-radius",
                "--set",
                "certify.every=1",
            )

    def _dpdist(self, *words: str) -> None:
        run_command(*words, "--runs", str(self.runs), data_root=self.data_root)

    def done(self, name: str) -> bool:
        return (self.runs / name / "report" / "index.html").exists()

    def all_done(self, name: str) -> bool:
        return self.done(name) and 0.0 in certified(self.facts(name), True, [0.0])

    def facts(self, name: str) -> RunResults:
        return load_results(RunFolder(self.runs / name))


def tables_of(facts: RunResults, more: bool) -> list[CertificateTable]:
    """Return the run's tables of the evenly spaced images that its recipe certifies, or with `more`
    those of all images.
    """
    assert facts.evaluation is not None and facts.recipe.certify is not None
    spaced = math.ceil(facts.evaluation["inputs"] / facts.recipe.certify.every)
    return [table for table in facts.tables if (len(table.index) > spaced) == more]


def certified(facts: RunResults, more: bool, radii: Iterable[float]) -> dict[float, float]:
    """Return the certified accuracy at each of the radii that those tables decide."""
    found = {}
    for radius in radii:
        for each in tables_of(facts, more):
            if each.mode == "fixed" or {radius, radius or NEAR_ZERO} & set(each.radii):
                found[radius] = each.certified_accuracy(radius)
    return found


def percent(values: list[float]) -> str:
    """Return the mean in percent, with the range if there are several."""
    return mean_and_range([100 * value for value in values])


def table(bench: Bench) -> str:
    """Return Markdown: by sigma the published figures, evenly spaced images, then all of them."""
    lines: list[str] = []
    for task, published in PUBLISHED.items():
        cells = ["published (DP-CERT)", "3.0" if task[0] == "CIFAR-10" else "2.9", "1e-6", ""]
        cells += [f"{value:.1f}" for value in published.values()]
        spaced, whole = [cells], [[*cells[:3], *cells[4:]]]
        for row in (row for row in ROWS if row.task == task):
            facts = [bench.facts(name) for name in row.runs() if bench.done(name)]
            if not facts:
                continue
            guarantee = facts[0].guarantee
            begin = [row.title, format_epsilon(guarantee.epsilon), f"{guarantee.delta:g}"]
            clean = percent([f.evaluation["accuracy"] for f in facts if f.evaluation])
            found = [certified(f, False, published) for f in facts]
            spaced.append([*begin, clean, *(percent([f[r] for f in found]) for r in published)])
            every = [shares for f in facts if (shares := certified(f, True, published))]
            if every:
                cells = ([shares[r] for shares in every if r in shares] for r in published)
                if len(every) < len(facts):
                    begin[0] += f", {len(every)} of {len(facts)} runs"
                whole.append(begin + [percent(cell) if cell else "" for cell in cells])
        head = [f"{task[0]}, sigma {task[1]:g}", "epsilon", "delta"]
        radii = [f"certified at {radius:g}" for radius in published]
        lines += ["", markdown_table([[*head, "clean", *radii], *spaced])]
        if len(whole) > 1:
            head[0] += ", all images"
            lines += ["", markdown_table([[*head, *radii], *whole])]
    return "\n".join(lines)


def results(bench: Bench) -> list[dict[str, Any]]:
    """Return a line for each table of each run: the shares of `n` images certified correctly."""
    found = []
    done = [(row, name) for row in ROWS for name in row.runs() if bench.done(name)]
    for row, name in done:
        facts = bench.facts(name)
        for more in (False, True):
            shares = certified(facts, more, PUBLISHED[row.task])
            if not shares:
                continue
            images = len(tables_of(facts, more)[0].index)
            proved = facts.guarantee.epsilon
            found.append({
                "row": row.name, "runs": 1, "sigma": row.sigma,
                "epsilon": proved if math.isfinite(proved) else None, "n": images,
                "clean": facts.evaluation and facts.evaluation["accuracy"],
                "certified": {f"{radius:g}": share for radius, share in shares.items()},
            })  # fmt: skip
    return found


def figure(lines: list[dict[str, Any]]) -> str:
    """Return an SVG: the share not certified at radius 0.5 by epsilon, evenly spaced images."""

    def points(*names: str) -> list[tuple[float, float]]:
        """Return (epsilon, mean) of each row."""
        found: dict[float, list[float]] = {}
        for line in lines:
            if line["row"] in names and line["n"] == 500:
                share = 100 * (1 - line["certified"]["0.5"])
                for epsilon in [line["epsilon"]] if line["epsilon"] is not None else ENDS:
                    found.setdefault(epsilon, []).extend([share] * line["runs"])
        return [(epsilon, mean(found[epsilon])) for epsilon in sorted(found)]

    drawn = [
        ("ours, no public data", points("shifts", *(f"shifts-epsilon-{e:g}" for e in EPSILONS))),
        ("the same, tuning counted", points("strokes-searched", "strokes-searched-1.5")),
        ("ours, public weights", points("flagship", *(f"epsilon-{e:g}" for e in EPSILONS))),
        ("ours, random initial weights", points("no-public", "no-public-2.9")),
        ("not private: ours, no noise on the gradient", points("shifts-inf")),
        ("published (DP-CERT), no public data", [(e, 100 - a) for e, a in PUBLISHED_AT_HALF]),
    ]
    drawn = [(label, found) for label, found in drawn if found]
    title = "MNIST, sigma 0.25: test images not certified at L2 radius 0.5"
    said = (f"{label}: " + ", ".join(f"{y:.1f} % at {x:g}" for x, y in p) for label, p in drawn)
    shown = [
        Line(label, p, muted="published" in label, show_markers="not private" not in label)
        for label, p in drawn
    ]
    highest = max(y for line in shown for _, y in line.points)
    axes = (
        Axis("epsilon at delta = 1e-6", ENDS[1], ENDS[0]),
        Axis("not certified, %", max(20.0, 5 * math.ceil(highest / 5))),
    )
    return chart(shown, *axes, description="; ".join(said), title=title)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--out", type=Path, default=Path("runs/flagship"))
    parser.add_argument("--data-root", type=Path, help="folder with mnist/ and cifar10/ as Parquet")
    parser.add_argument("--only", nargs="*", default=["*"], help="runs by name, in this order")
    parser.add_argument("--all", action="store_true", help="all test images too, early stopping")
    parser.add_argument("--figure", type=Path, help="draw papers/dp-cert/run.jsonl as SVG")
    given = parse_arguments(parser, {"only": ["flagship-0"]}, ["out"], arguments)
    if given.figure is not None:
        lines = [json.loads(line) for line in RESULTS.read_text().splitlines()]
        given.figure.write_text(figure(lines))
        return
    bench = Bench(given.out, given.data_root, given.quick)
    wanted = [
        (row, name)
        for pattern in given.only
        for row in ROWS
        for name in row.runs()
        if fnmatch.fnmatch(name, pattern)
    ]
    todo = {name: row for row, name in wanted if not bench.done(name)}
    whole = {
        name: row for row, name in wanted if given.all and row.compared and not bench.all_done(name)
    }
    failed: list[str] = []
    if todo or whole:
        if not given.quick:
            needed = {
                "cifar10" if r.recipe in PHOTOGRAPHS else "mnist" for r in (todo | whole).values()
            }
            bench.data_root = require_data(given.data_root, *sorted(needed))
        bench.out.mkdir(parents=True, exist_ok=True)
        with connect(bench.out / "ray.log", worker_setup=optional_imports.install_torchvision_hook):
            for name, row in (todo | whole).items():
                try:
                    if not bench.done(name):
                        bench.make(row, name)
                    if name in whole:
                        bench.certify_all(name)
                except (UserError, ClusterError) as error:  # a search without a model, too
                    failed.append(f"{name}: {error}")
                    print(failed[-1], file=sys.stderr)
    text = table(bench)
    (bench.out / "table.md").write_text(text + "\n")
    rows = "".join(json.dumps(line) + "\n" for line in results(bench))
    (bench.out / "results.jsonl").write_text(rows)
    print(text)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: it can be continued
    main()
