"""TransDenoiser and its ablations on MNIST: the table of results/measured.md.

Every row is made by the commands that a user has: `dpdist run`, at
first `--until pretrain`, and
`dpdist attack` for each row and repetition (another initialization, another run key); for a public
denoiser before a private classifier `dpdist import` and `dpdist certify`. The classifier alone,
which is no run, goes through the jobs that those commands start. All share one Ray session (or the
cluster at RAY_ADDRESS). What is done is not done again: the same command continues, --only makes a
part, --minutes begins no further run after so many. --attacks: other ones beside PGD, also on runs
that are done. --results FILE: of each run a line that says of every image whether it was certified
and right under attack (hexadecimal bits, in the order of the test images).

    python papers/transdenoiser/run.py --data-root data [--out DIR] [--only PATTERN ...] [--quick]
"""

from __future__ import annotations

import argparse
import copy
import fnmatch
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from _common import mean_and_range, pack_bits, parse_arguments, require_data, run_command

from dpdist.attacks.table import AttackTable, read_attack
from dpdist.certification import table_reader
from dpdist.certification.cohen import Cohen
from dpdist.certification.statistics import compare
from dpdist.certification.table import CertificateTable
from dpdist.cluster.session import connect
from dpdist.core import optional_imports
from dpdist.core.fields import ATTACKS
from dpdist.evaluation import load_model
from dpdist.papers.stobatch.stobatch import StoBatch
from dpdist.privacy.guarantee import format_epsilon
from dpdist.randomness.noise_location import find_noise_location
from dpdist.reports.results import load_results
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import Recipe, find_recipe, load_recipe, parse_recipe, resolve_recipe

RADII = {0.25: (0.0, 0.1, 0.25, 0.5), 0.1: (0.0, 0.1, 0.2)}
SIZES = (0.5, 1.0, 2.0)
ALONE, PRIVATE, DENOISED = "classifier", "dp-sgd", "dp-sgd-denoised"
PGD = "pgd"
CURVE = (0.5, 2.0, 4.0)  # epsilons of one row beside 1 and 3: the paper's Figure 4a
SECURE, REVERSED = "transdenoiser-mnist-secure-sgd", "denoised-smoothing-public-mnist"
STOBATCH = "transdenoiser-mnist-stobatch"
AGAINST = ("no-dp", "separate-dp-3")  # rows that others are compared with

FULL = {
    "training.batch_size": 256,
    "training.steps": 200,
    "certify.n": 1000,
    "certify.every": 20,
}
# scikit-learn's digits and a tiny network: whether the script works, no result.
QUICK = {
    "data.name": "digits",
    "training.batch_size": 50,
    "training.steps": 3,
    "privacy.delta": 1e-4,
    "certify.n": 100,
    "certify.every": 30,
    "public.training": {"batch_size": 50, "steps": 20, "learning_rate": 0.1},
}
QUICK_NETWORKS = {
    "denoiser": {"name": "conv-autoencoder", "options": {"channels": [4]}},
    "classifier": {"name": "small-cnn", "options": {"width": 4}},
}


@dataclass(frozen=True)
class Row:
    """One method at one input noise. recipe: that comes along, with `changes` (dotted keys)."""

    name: str
    title: str
    noise: float
    recipe: str = "transdenoiser-mnist"
    changes: dict[str, Any] = field(default_factory=dict)
    repeats: int = 1

    def runs(self) -> list[str]:
        """Return the names of its run folders."""
        return [f"{self.name}-noise-{self.noise:g}-{k}" for k in range(self.repeats)]


def rows(repeats: int) -> list[Row]:
    """Return all rows; those that are compared have `repeats` runs at the larger noise."""
    tanh = {"model.options.activation": "tanh"}
    found = []
    for noise in RADII:
        many = repeats if noise == 0.25 else 1
        found += [
            Row(ALONE, "public classifier alone", noise),
            Row("no-dp", "no-dp", noise, "transdenoiser-mnist-no-dp", repeats=many),
            Row("full", "full", noise, "transdenoiser-mnist-full"),
            Row("full-tanh", "full, tanh denoiser", noise, "transdenoiser-mnist-full", tanh),
            Row("separate-dp-3", "separate-dp", noise, repeats=many),
            Row(
                "separate-dp-1",
                "separate-dp",
                noise,
                changes={"privacy.epsilon": 1.0},
                repeats=many,
            ),
            Row("secure-sgd", "Secure-SGD, pre-trained", noise, SECURE, repeats=many),
        ]
    private = {"method": "dp-sgd"}
    found += [
        Row(
            f"separate-dp-{e:g}",
            "separate-dp",
            0.25,
            changes={"privacy.epsilon": e},
            repeats=repeats,
        )
        for e in CURVE
    ]
    found += [
        Row("stobatch", "StoBatch, sound", 0.25, STOBATCH, repeats=repeats),
        Row(PRIVATE, "private classifier (DP-SGD)", 0.25, REVERSED, private),
        Row(DENOISED, "the same behind a public denoiser", 0.25, REVERSED, private),
    ]
    return found


class Bench:
    """Where it all lies: `out`/recipes, public (the frozen parts), runs, alone, the results."""

    def __init__(
        self, out: Path, data_root: Path | None, quick: bool, attacks: tuple[str, ...] = (PGD,)
    ) -> None:
        self.out, self.data_root, self.quick = out.resolve(), data_root, quick
        self.attacks = attacks
        self.runs, self.public = self.out / "runs", self.out / "public"

    def recipe(self, row: Row, repeat: int) -> Path:
        """Write the row's recipe into a file and return its path."""
        frozen, own = ("classifier", "denoiser")
        if row.recipe == REVERSED:
            frozen, own = own, frozen
        changes = dict(QUICK if self.quick else FULL)
        if self.quick:
            changes |= {f"model.{key}": value for key, value in QUICK_NETWORKS[own].items()}
            changes["public.model"] = QUICK_NETWORKS[frozen]
        changes |= row.changes
        changes[f"model.{frozen}"] = str(self.public / frozen)
        changes["training.init_seed"] = repeat
        changes["certify.sigma"] = row.noise
        changes["certify.radii"] = list(RADII[row.noise][1:])
        if row.recipe == REVERSED:
            changes["public.sigma"] = row.noise
        elif row.recipe != SECURE:
            changes["method.sigma"] = row.noise
        if row.recipe == STOBATCH:  # certified by noise of the same worth, of which a part is here
            method = load_recipe(find_recipe(STOBATCH), {"method.sigma": row.noise}).method
            assert isinstance(method, StoBatch)
            changes["certify.sigma"] = method.input_noise_std
        name = row.runs()[repeat]
        recipe = load_recipe(find_recipe(row.recipe), copy.deepcopy({**changes, "name": name}))
        path = self.out / "recipes" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(recipe.to_yaml())
        return path

    def private_classifier(self, row: Row) -> Path:
        """Write the recipe without the denoiser, which `dpdist import` adds."""
        raw = load_recipe(self.recipe(row, 0)).model_dump(mode="json")
        raw["model"]["denoiser"] = raw["public"] = None
        path = self.out / "recipes" / f"{row.runs()[0]}.yaml"
        path.write_text(parse_recipe(raw, str(path)).to_yaml())
        return path

    def command(self, *words: str) -> None:
        """Run one dpdist command in this process."""
        run_command(*words, data_root=self.data_root)

    def missing(self, chosen: list[Row], only: list[str]) -> list[tuple[Row, int]]:
        """Return row and repetition of what is not done, in the order of the patterns `only`;
        within a pattern, all first repetitions before the second ones.
        """
        runs = []
        for row in chosen:
            for repeat, name in enumerate(row.runs()):
                places = [k for k, pattern in enumerate(only) if fnmatch.fnmatch(name, pattern)]
                place = self.place(row) if row.name == ALONE else self.runs / name
                done = attacked(place, self.attacks)
                if places and not done:
                    runs.append((places[0], repeat, row))
        return [(row, repeat) for _, repeat, row in sorted(runs, key=lambda run: run[:2])]

    def make_all(self, todo: list[tuple[Row, int]], minutes: float) -> None:
        """Run by run in one Ray session; none is begun after so many minutes."""
        if not todo:
            return
        self.out.mkdir(parents=True, exist_ok=True)
        end = time.monotonic() + 60 * minutes
        with connect(self.out / "ray.log", worker_setup=optional_imports.install_torchvision_hook):
            for place, (row, repeat) in enumerate(todo):
                if time.monotonic() > end:
                    print(f"{len(todo) - place} runs are left: the same command makes them")
                    return
                self.make(row, repeat)

    def make(self, row: Row, repeat: int) -> None:
        """Make whatever is missing of a run."""
        part = "denoiser" if row.recipe == REVERSED else "classifier"
        if not (self.public / part / "provenance.json").exists():
            self.command("run", str(self.recipe(row, 0)), "--until", "pretrain")
        if row.name == ALONE:
            self.alone(row)
            return
        name = row.runs()[repeat]
        path, runs = self.recipe(row, repeat), ("--runs", str(self.runs))
        if row.name == PRIVATE:
            path = self.private_classifier(row)
        if row.name == DENOISED:
            if not (self.runs / name).exists():
                run, place = name.replace(DENOISED, PRIVATE), str(self.public / "denoiser")
                self.command("import", name, "--run", run, "--denoiser", place, *runs)
            if not list((self.runs / name / "certificates").glob("*/certificates.parquet")):
                self.command("certify", name, *runs)
        elif not (self.runs / name / "report" / "index.html").exists():
            self.command("run", str(path), *runs)
        if not attacked(self.runs / name, self.attacks):
            every = str(load_recipe(path).certify.every)  # type: ignore[union-attr]
            sizes = ",".join(f"{size:g}" for size in SIZES)
            folder = RunFolder(self.runs / name)
            noisy = find_noise_location(
                load_model(load_recipe(folder.recipe_file), folder)
            ).is_random
            self.command(
                "attack", name, *runs, "--set", "attack.norm=l2",
                "--set", f"attack.sizes=[{sizes}]", "--set", f"attack.every={every}",
                "--set", f"attack.attacks=[{','.join(self.attacks)}]",
                *(("--set", "attack.n=200") if noisy else ()),
            )  # fmt: skip

    def place(self, row: Row) -> Path:
        """Return the folder of the measurements of the classifier alone."""
        return self.out / "alone" / f"noise-{row.noise:g}"

    def alone(self, row: Row) -> None:
        """Certify and attack the frozen classifier without a denoiser."""
        folder = self.place(row)
        from dpdist.attacks.job import AttackJob
        from dpdist.attacks.settings import AttackSettings
        from dpdist.certification.job import certify
        from dpdist.certification.subject import Subject
        from dpdist.cluster.resumable_job import run_job
        from dpdist.training.public_training import accuracy
        from dpdist.training.records import data_source, load_test_records

        recipe = resolve_recipe(self.recipe(row, 0), data_root=self.data_root)
        section = recipe.certify
        assert section is not None
        test = load_test_records(recipe, data_source(recipe))
        print(f"{row.title}, noise {row.noise:g}", flush=True)
        settings = Cohen(sigma=row.noise, n=section.n, every=section.every)
        subject = Subject.load(self.public / ALONE)
        certify(subject, test, settings, folder / "certificates")
        attack = AttackSettings(norm="l2", sizes=SIZES, attacks=self.attacks, every=section.every)
        run_job(AttackJob(subject, test, attack), folder / "attacks" / attack.folder_name)
        found = accuracy(subject.model, test)
        (folder / "accuracy.json").write_text(json.dumps(found))


@dataclass(frozen=True)
class Measured:
    """One run of a row."""

    epsilon: str
    clean: float
    certificates: CertificateTable
    attacks: AttackTable
    split: str = ""
    repeat: int = 0

    def certified(self, radius: float) -> float:
        return self.certificates.certified_accuracy(radius)

    def attacked(self, size: float, attack: str = PGD) -> float:
        return self.attacks.outcome_shares(attack, size).correct

    def withstood(self, size: float, attacks: tuple[str, ...]) -> np.ndarray:
        """Return bool (N,): whether each image, by its index, is right under all these attacks."""
        t = self.attacks
        failed = (t.size == size) & np.isin(t.attack, attacks) & (t.prediction != t.label)
        return ~np.isin(np.unique(t.index), t.index[failed])

    def line(self, row: Row) -> dict[str, Any]:
        """Return a line of --results: of every image whether it succeeded, as hexadecimal bits."""
        held, labels = self.certificates.size_if_correct(), len(self.certificates.index)
        return {
            "row": row.name, "noise": row.noise, "repeat": self.repeat, "proved": self.epsilon,
            "clean": self.clean, "inputs": labels,
            "certified": {f"{r:g}": pack_bits(held >= r) for r in RADII[row.noise]},
            "attacked": {
                name: {f"{size:g}": pack_bits(self.withstood(size, (name,))) for size in SIZES}
                for name in self.attacks.attacks
            },
        }  # fmt: skip


def attacked(folder: Path, attacks: tuple[str, ...] = (PGD,)) -> bool:
    """Return whether the last stage of a run is done, with these attacks."""
    tables = map(read_attack, folder.glob("attacks/*/attacks.parquet"))
    return any(all(t.has(name, size) for name in attacks for size in SIZES) for t in tables)


def measured(bench: Bench, row: Row) -> list[Measured]:
    """Return the measurements of the row's finished runs."""
    if row.name == ALONE:
        folder = bench.place(row)
        if not (folder / "accuracy.json").exists():
            return []
        (attacks,) = folder.glob("attacks/*/attacks.parquet")
        return [
            Measured(
                "sees none of them",
                json.loads((folder / "accuracy.json").read_text()),
                table_reader.read(folder / "certificates" / "certificates.parquet"),
                read_attack(attacks),
            )
        ]
    found = []
    for repeat, name in enumerate(row.runs()):
        run = RunFolder(bench.runs / name)
        if not attacked(run.path):
            continue
        facts = load_results(run)
        assert facts.evaluation is not None
        (table,) = [t for t in facts.tables if t.mode == "fixed"]
        epsilon = "none"
        if np.isfinite(facts.guarantee.epsilon):
            epsilon = format_epsilon(facts.guarantee.epsilon)
        elif facts.claim is not None and facts.claim.claimed is not None:
            claimed = format_epsilon(facts.claim.claimed.epsilon)
            epsilon = f"none (claimed {claimed}, {facts.claim.verdict})"
        accuracy = facts.evaluation["accuracy"]
        split = split_line(run, facts.recipe)
        found.append(Measured(epsilon, accuracy, table, facts.attacks[0], split, repeat))
    return found


def split_line(folder: RunFolder, recipe: Recipe) -> str:
    """Describe what Algorithm 1 measured over the run, for variant full."""
    if getattr(recipe.method, "variant", "") != "full":
        return ""
    steps = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    values = [step["s_min"] for step in steps]
    whys = sorted({step["s_min_why"] for step in steps})
    added = [step["added_xi"] for step in steps]
    bound = "" if all(step["s_min_exact"] for step in steps) else "at most "
    shares = [step["nonnegative"] / max(1, step["examples"]) for step in (steps[0], steps[-1])]
    return (
        f"S_min {bound}{min(values):.3g} to {max(values):.3g} ({'; '.join(whys)}); added "
        f"{min(added):g} "
        f"to {max(added):g}; remainders >= 0: {100 * shares[0]:.0f} % of the first batch, "
        f"{100 * shares[1]:.0f} % of the last"
    )


def cell(values: list[float]) -> str:
    """Return the mean in percent, with the range if there are several."""
    return mean_and_range([100 * value for value in values])


def table(bench: Bench, chosen: list[Row]) -> str:
    """Return Markdown: a table for each noise, Algorithm 1's measurements, the differences."""
    lines = []
    for noise, radii in RADII.items():
        head = [f"input noise {noise:g}", "epsilon, proved", "clean"]
        head += [f"certified at {radii[0]:g}", *(f"{radius:g}" for radius in radii[1:])]
        head += [f"PGD {SIZES[0]:g}", *(f"{size:g}" for size in SIZES[1:])]
        lines += ["", *(f"| {' | '.join(part)} |" for part in (head, ["---"] * len(head)))]
        notes = []
        for row in chosen:
            found = measured(bench, row) if row.noise == noise else []
            if not found:
                continue
            cells = [row.title, found[0].epsilon, cell([m.clean for m in found])]
            cells += [cell([m.certified(radius) for m in found]) for radius in radii]
            cells += [cell([m.attacked(size) for m in found]) for size in SIZES]
            lines.append(f"| {' | '.join(cells)} |")
            notes += [f"{row.title}, noise {noise:g}: {m.split}" for m in found if m.split]
        lines += ["", *notes]
    return "\n".join([*lines, "", *under_attacks(bench, chosen), *comparisons(bench, chosen)])


def under_attacks(bench: Bench, chosen: list[Row]) -> list[str]:
    """Return Markdown: accuracy under each attack and under all; empty for PGD alone."""
    if bench.attacks == (PGD,):
        return []
    head = ["input noise", "row", "epsilon, proved"]
    head += [f"{name} {size:g}" for name in (*bench.attacks, "all") for size in SIZES]
    lines = [head, ["---"] * len(head)]
    for row in chosen:
        found = [
            one
            for one in measured(bench, row)
            if all(one.attacks.has(name, size) for name in bench.attacks for size in SIZES)
        ]
        if found:
            cells = [
                cell([m.attacked(size, name) for m in found])
                for name in bench.attacks
                for size in SIZES
            ]
            cells += [cell([m.attacks.worst(size).correct for m in found]) for size in SIZES]
            lines.append([f"{row.noise:g}", row.title, found[0].epsilon, *cells])
    return [*(f"| {' | '.join(line)} |" for line in lines), ""]


def comparisons(bench: Bench, chosen: list[Row]) -> list[str]:
    """Compare rows on the same images, repetition by repetition: the images on which only one run
    succeeds, in each direction, and McNemar's exact p.
    """
    lines = []
    for other in chosen:
        for row in chosen if other.name in AGAINST else ():
            if row.noise != other.noise or row is other:
                continue
            theirs = {m.repeat: m for m in measured(bench, other)}
            both = [(m, theirs[m.repeat]) for m in measured(bench, row) if m.repeat in theirs]
            for what, (ours, those) in _successes(bench, row.noise, both):
                found = [compare(b, a) for a, b in zip(ours, those, strict=True)]
                told = [f"{c.only_second} : {c.only_first} (p {c.p_value:.2g})" for c in found]
                lines.append(f"{row.name} against {other.name}, {what}: {', '.join(told)}")
    return lines


def _successes(
    bench: Bench, noise: float, both: list[tuple[Measured, Measured]]
) -> Iterator[tuple[str, tuple[list[np.ndarray], list[np.ndarray]]]]:
    """Yield the successes of the first runs and the second, by radius and by attack size."""
    names = bench.attacks
    made = [p for p in both if all(m.attacks.has(a, s) for m in p for a in names for s in SIZES)]
    for radius in RADII[noise] if both else ():
        held = [[m.certificates.size_if_correct() >= radius for m in pair] for pair in both]
        yield f"noise {noise:g}, radius {radius:g}", ([a for a, _ in held], [b for _, b in held])
    for size in SIZES if made else ():
        kept = [[m.withstood(size, names) for m in pair] for pair in made]
        told = f"noise {noise:g}, {'+'.join(names)} of size {size:g}"
        yield told, ([a for a, _ in kept], [b for _, b in kept])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--out", type=Path, default=Path("runs/transdenoiser"))
    parser.add_argument("--data-root", type=Path, help="folder with mnist/ as Parquet")
    parser.add_argument(
        "--only", nargs="*", default=["*"], help="in this order: NAME-noise-SIGMA-REPEAT"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--attacks", default=PGD, help=f"out of {','.join(ATTACKS)}")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--results", type=Path, help="write a line of each run's images")
    tiny = {"only": ["no-dp-noise-0.25-0"]}
    given = parse_arguments(parser, tiny, ["out", "results"], arguments)
    attacks = tuple(dict.fromkeys((*given.attacks.split(","), PGD)))  # the tables show PGD
    bench = Bench(given.out, given.data_root, given.quick, attacks)
    everything = rows(1 if given.quick else given.repeats)
    todo = bench.missing(everything, given.only)
    if todo and not given.quick:
        bench.data_root = require_data(given.data_root, "mnist")
    bench.make_all(todo, given.minutes)
    text = table(bench, everything)
    (bench.out / "table.md").write_text(text + "\n")
    if given.results is not None:
        found = [(row, m) for row in everything for m in measured(bench, row)]
        lines = [json.dumps(m.line(row)) + "\n" for row, m in found]
        given.results.write_text("".join(lines))
    print(text)
    print(f"\n{bench.out / 'table.md'}")


if __name__ == "__main__":
    main()
