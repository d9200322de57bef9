"""dpdist poison: how many poisoned training records cannot change an answer?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpdist.base.errors import UserError
from dpdist.base.fields import Count, CountOrZero, Models, Positive, Probability
from dpdist.base.rounding import exact, percent
from dpdist.base.storage import write_result
from dpdist.commands.options import (
    RUNS,
    Actors,
    Changes,
    DataRoot,
    Every,
    MaxInputs,
    Name,
    Output,
    PrivateSeed,
    RecipeArgument,
    Runs,
    Start,
    file_path,
    flag,
    need_label,
    numbers,
    option,
    path_option,
)

if TYPE_CHECKING:
    from dpdist.poisoning.certificates import UnderPoison, Withstands
    from dpdist.poisoning.votes import Votes
    from dpdist.poisoning.voting import Poisoning
    from dpdist.privacy.plan import PrivacyPlan
    from dpdist.runs.folder import RunFolder

_SELECT, _ALPHA = 6, 0.001
_SHOWN = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


_Models = Annotated[int, option("Models that vote.", Models)]
_Select = Annotated[int | None, option("Of them, those that choose the class: 6.", Count)]
_Alpha = Annotated[float | None, option("Error of each certificate: 0.001.", Probability)]
_Sigma = Annotated[float | None, option("Noise on each vote's input.", Positive)]
_Radii = Annotated[str | None, option("L2 changes of the input besides, with --sigma: 0.1,0.25.")]
_Counts = Annotated[str | None, option("Numbers of changed records to show: 1,10,50.")]
_Partitions = Annotated[bool, flag("--partitions", "Plain models on disjoint shards instead.")]
_Bag = Annotated[int | None, option("Plain models on so many random records instead.", Count)]
_Csv = Annotated[Path | None, path_option("Each input's result.", of=file_path(written=True))]


def command(
    recipe: RecipeArgument,
    changed: Changes = None,
    models: _Models = 66,
    select: _Select = None,
    alpha: _Alpha = None,
    sigma: _Sigma = None,
    radii: _Radii = None,
    changes: _Counts = None,
    partitions: _Partitions = False,
    bag: _Bag = None,
    seed: PrivateSeed = None,
    csv: _Csv = None,
    name: Name = None,
    runs: Runs = RUNS,
    data_root: DataRoot = None,
    start: Start = None,
    every: Every = None,
    max_inputs: MaxInputs = None,
    actors: Actors = None,
    output: Output = None,
) -> None:
    """Certify answers against poisoned training records: trains many models, resumable.

    A differentially private recipe, trained many times with keys of its own, cannot change its
    answer by much when few records change. Private: votes and results stay in the run's private/
    folder.
    """
    from dpdist import pipeline
    from dpdist.poisoning.voting import Poisoning
    from dpdist.runs.folder import RunFolder
    from dpdist.runs.recipe import read_changes, refuse_unused, resolve
    from dpdist.training.job import check_trainable
    from dpdist.training.records import evaluation_data, source_of

    resolved = resolve(recipe, changes=read_changes(changed), name=name, data_root=data_root)
    need_label(resolved, "poison")
    folder = RunFolder(runs / resolved.name)
    at = (0.0, *[r for r in numbers(radii, "--radii") or () if r])
    if partitions:
        _refuse_random(select=select, alpha=alpha, radii=radii)
    rule = _Rule(models, select or _SELECT, alpha or _ALPHA, at, sigma)
    shown = [int(k) for k in numbers(changes, "--changes", CountOrZero) or ()]
    settings = Poisoning(models, partitions, sigma, start or 0, every or 1, max_inputs, seed, bag)
    _check_written(settings, folder, output, csv)
    if not folder.check_same_recipe(resolved):
        refuse_unused(resolved, recipe)
    trained = settings.recipe_of(resolved)
    records = len(check_trainable(trained, recipe)[0])
    settings.chosen(len(evaluation_data(trained, source_of(trained))), recipe)
    _, plan = settings.training(trained, records)
    poisoned = None if partitions else rule.poisoned(settings, plan, records)
    folder.begin(resolved)
    with pipeline.session(folder):
        path = pipeline.evaluation_stage(resolved, folder, settings, output, actors)
    votes = settings.read(path)
    found = rule.withstood(votes, poisoned)
    _print(votes, found, plan, shown, path)
    if csv is not None:
        _write(csv, votes, found[0])


@dataclass(frozen=True)
class _Rule:
    """How votes are read: how many models choose the class, error, input radii, input noise."""

    models: int
    select: int
    alpha: float
    radii: tuple[float, ...]
    sigma: float | None

    def poisoned(self, settings: Poisoning, plan: PrivacyPlan, records: int) -> UnderPoison:
        """What changed records leave of one training, before it is trained. Raises UserError."""
        from dpdist.poisoning.bagging import Bagged
        from dpdist.poisoning.certificates import check
        from dpdist.privacy import poisoning

        check(self.models, self.select, self.radii, self.sigma)
        if settings.bag is not None:
            return Bagged(records, settings.bag)
        try:
            return poisoning.Poisoned(plan)
        except ValueError as error:
            raise UserError(str(error)) from None

    def withstood(self, votes: Votes, poisoned: UnderPoison | None) -> list[Withstands]:
        """Of partitions one reading; of keys each input's by itself, and one with which none of the
        whole set is false."""
        from dpdist.certification.paired import ERROR
        from dpdist.poisoning.certificates import by_keys, by_partitions

        if poisoned is None:
            return [by_partitions(votes)]
        how: dict[str, Any] = {"select": self.select, "radii": self.radii, "sigma": self.sigma}
        errors = (self.alpha, ERROR / len(votes.index))
        return [by_keys(votes, poisoned, alpha=each, **how) for each in errors]


def _check_written(
    settings: Poisoning, folder: RunFolder, output: Path | None, csv: Path | None
) -> None:
    """Raise UserError where private results would lie in a run folder's public part."""
    for path in (output, csv):
        settings.place(folder, path)
    if csv is not None and folder.around(csv) is not None and csv.suffix.lower() != ".csv":
        raise UserError(f"--csv: in a run folder the file must end in .csv, got {str(csv)!r}")


def _refuse_random(**given: object) -> None:
    """Raise UserError for an option that says something of models that draw at random."""
    for name, value in given.items():
        if value is not None:
            raise UserError(
                f"--{name}: goes with models that draw at random, not with --partitions, whose "
                "votes are exact"
            )


def _print(
    votes: Votes, found: list[Withstands], plan: PrivacyPlan, shown: list[int], path: Path
) -> None:
    from dpdist.base import console

    each = found[0]
    counts = shown or [k for k in _SHOWN if k <= max(2, each.most)]
    rows = [("inputs", f"{len(votes.index):,}"), ("models", _models(votes, each))]
    rows.append(("right", f"{percent((each.answer == votes.label).mean())} %"))
    for one, what in zip(found, ("", ", of all inputs together"), strict=False):
        for radius in one.changes:
            shares = ", ".join(
                f"{percent(one.accuracy(votes.label, k, radius))} % at {k}" for k in counts
            )
            moved = f" and an L2 change below {exact(radius)}" if radius else ""
            rows.append((f"changed records withstood{moved}{what}", shares))
    rows += _terms(votes, found, plan)
    rows.append(("votes, private", str(path)))
    typer.echo(console.table(rows, title="against poisoned training records"))


def _models(votes: Votes, each: Withstands) -> str:
    total = len(votes.vote)
    if each.alpha == 0:
        return f"{total}, each on its own shard of the records, without privacy"
    said = f"{each.models} that vote, {total - each.models} others that chose the class"
    bag = votes.settings.get("bag")
    return said + (f"; each on {bag:,} random records, without privacy" if bag else "")


def _terms(votes: Votes, found: list[Withstands], plan: PrivacyPlan) -> list[tuple[str, str]]:
    from dpdist.certification.paired import ERROR
    from dpdist.privacy.guarantee import format_epsilon
    from dpdist.privacy.poisoning import cost_of_votes

    bag = votes.settings.get("bag")
    public = [("left out", "records whose input is a test input (data.drop_test_records)")]
    if votes.settings.get("data.public"):
        public.append(("trusted", "data.public: whose hash lies there is no training record"))
    error = ("error", f"alpha {found[0].alpha:g} each; of all together: {ERROR:g} (union bound)")
    certified = ("certified", "what the recipe says most often over its secret keys")
    if bag or found[0].alpha == 0:
        what = "a record inserted or removed"
        if votes.settings.get("data.max_train") is not None:
            what = "a record blanked out or filled in, N fixed (data.max_train is a share of it)"
        return [
            ("a change", f"{what}; another label is both"),
            *public,
            *([error, certified] if bag else []),
        ]
    one, all_of_them = plan.guarantee(), cost_of_votes(plan, len(votes.vote)).guarantee()
    what = {
        "replace-one": "a record replaced by another",
        "add-or-remove-one": "a record inserted or removed; another label or image is both",
    }.get(
        one.relation, "a record blanked out or filled in, N fixed; another label or image is both"
    )
    return [
        ("a change", what),
        *public,
        error,
        certified,
        ("one training", str(one)),
        ("these votes, if published", f"epsilon = {format_epsilon(all_of_them.epsilon)}"),
    ]


def _write(path: Path, votes: Votes, found: Withstands) -> None:
    import csv
    import io

    file = io.StringIO(newline="")
    writer = csv.writer(file, lineterminator="\n")
    names = [f"changes at {exact(radius)}" for radius in found.changes]
    writer.writerow(["index", "label", "answer", *names])
    columns = (votes.index, votes.label, found.answer, *found.changes.values())
    writer.writerows(zip(*(column.tolist() for column in columns), strict=True))
    write_result(path, file.getvalue())
    typer.echo(f"each input: {path}")
