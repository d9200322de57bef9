"""dpdist poison: how many poisoned training records cannot change an answer?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpdist.base.errors import UserError
from dpdist.base.fields import Count, CountOrZero, Positive, Probability
from dpdist.commands.options import (
    RUNS,
    Actors,
    Changes,
    DataRoot,
    Every,
    MaxInputs,
    Name,
    Output,
    RecipeArgument,
    Runs,
    Start,
    file_path,
    kind,
    numbers,
)

if TYPE_CHECKING:
    from dpdist.poisoning.certificates import Withstands
    from dpdist.poisoning.votes import Votes
    from dpdist.privacy.plan import PrivacyPlan
    from dpdist.privacy.poisoning import Poisoned

_SHOWN = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def command(
    recipe: RecipeArgument,
    changed: Changes = None,
    models: Annotated[int, typer.Option(callback=kind(Count), help="Models that vote.")] = 66,
    select: Annotated[
        int, typer.Option(callback=kind(Count), help="Of them, those that choose the class.")
    ] = 6,
    alpha: Annotated[
        float, typer.Option(callback=kind(Probability), help="Error of each certificate.")
    ] = 0.001,
    sigma: Annotated[
        float | None, typer.Option(callback=kind(Positive), help="Noise on each vote's input.")
    ] = None,
    radii: Annotated[
        str | None, typer.Option(help="L2 changes of the input besides, with --sigma: 0.1,0.25.")
    ] = None,
    changes: Annotated[
        str | None, typer.Option(help="Numbers of changed records to show: 1,10,50.")
    ] = None,
    partitions: Annotated[
        bool, typer.Option("--partitions", help="Plain models on disjoint shards instead.")
    ] = False,
    seed: Annotated[
        str | None, typer.Option(help="64 hex digits (default: secret, stored in private/).")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(callback=file_path(written=True), help="Each input's result.")
    ] = None,
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
    from dpdist.certification.paired import ERROR
    from dpdist.poisoning.certificates import by_partitions, by_privacy
    from dpdist.poisoning.voting import Poisoning
    from dpdist.runs.folder import RunFolder
    from dpdist.runs.recipe import read_changes, resolve
    from dpdist.training.job import check_trainable

    resolved = resolve(recipe, changes=read_changes(changed), name=name, data_root=data_root)
    folder = RunFolder(runs / resolved.name)
    at = (0.0, *[r for r in numbers(radii, "--radii") or () if r])
    if partitions and len(at) > 1:
        raise UserError("--radii: goes with private models, not with --partitions")
    shown = numbers(changes, "--changes", CountOrZero)
    settings = Poisoning(models, partitions, sigma, start or 0, every or 1, max_inputs, seed)
    for path in (output, csv):
        settings.place(folder, path)
    folder.check_same_recipe(resolved)
    dataset, _ = check_trainable(resolved, recipe)
    _, plan = settings.training(resolved, len(dataset))
    poisoned = None if partitions else _poisoned(plan, models, select, at, sigma)
    folder.begin(resolved)
    with pipeline.session(folder):
        path = pipeline.evaluation_stage(resolved, folder, settings, output, actors)
    votes = settings.read(path)
    if poisoned is None:
        found = [by_partitions(votes)]
    else:  # each by itself, and with which none of the set is false
        found = [
            by_privacy(votes, poisoned, select=select, alpha=each, radii=at, sigma=sigma)
            for each in (alpha, ERROR / len(votes.index))
        ]
    _print(votes, found, plan, [int(k) for k in shown or ()], path)
    if csv is not None:
        _write(csv, votes, found[0])
        typer.echo(f"each input: {csv}")


def _poisoned(
    plan: PrivacyPlan, models: int, select: int, at: tuple[float, ...], sigma: float | None
) -> Poisoned:
    """Raises what could be refused later, before a model is trained."""
    from dpdist.poisoning.certificates import check
    from dpdist.privacy.poisoning import Poisoned

    check(models, select, at, sigma)
    try:
        return Poisoned(plan)
    except ValueError as error:
        raise UserError(str(error)) from None


def _print(
    votes: Votes, found: list[Withstands], plan: PrivacyPlan, shown: list[int], path: Path
) -> None:
    from dpdist.base import console

    each = found[0]
    counts = shown or [k for k in _SHOWN if k <= max(2, each.most)]
    rows = [("inputs", f"{len(votes.index):,}"), ("models", _models(votes, each))]
    rows.append(("right", f"{100 * float((each.answer == votes.label).mean()):.2f} %"))
    for one, what in zip(found, ("", ", of all inputs together"), strict=False):
        for radius in one.changes:
            shares = ", ".join(
                f"{100 * one.accuracy(votes.label, k, radius):.2f} % at {k}" for k in counts
            )
            moved = f" and an L2 change below {radius:g}" if radius else ""
            rows.append((f"changed records withstood{moved}{what}", shares))
    rows += _terms(votes, found, plan)
    rows.append(("votes, private", str(path)))
    typer.echo(console.table(rows, title="against poisoned training records"))


def _models(votes: Votes, each: Withstands) -> str:
    total = len(votes.vote)
    if each.alpha == 0:
        return f"{total}, each on its own shard of the records, without privacy"
    return f"{each.models} that vote, {total - each.models} others that chose the class"


def _terms(votes: Votes, found: list[Withstands], plan: PrivacyPlan) -> list[tuple[str, str]]:
    from dpdist.certification.paired import ERROR
    from dpdist.privacy.guarantee import format_epsilon
    from dpdist.privacy.poisoning import cost_of_votes

    if found[0].alpha == 0:
        what = "a record inserted or removed"
        if votes.settings.get("data.max_train") is not None:
            what = "a record blanked out or filled in, N fixed (data.max_train is a share of it)"
        return [("a change", f"{what}; another label is both")]
    one, all_of_them = plan.guarantee(), cost_of_votes(plan, len(votes.vote)).guarantee()
    what = {
        "replace-one": "a record replaced by another",
        "add-or-remove-one": "a record inserted or removed; another label or image is both",
    }.get(
        one.relation, "a record blanked out or filled in, N fixed; another label or image is both"
    )
    public = [("trusted", "data.public: whose hash lies there is no training record")]
    return [
        ("a change", what),
        *(public if votes.settings.get("data.public") else []),
        ("error", f"alpha {found[0].alpha:g} each; of all together: {ERROR:g} (union bound)"),
        ("certified", "what the recipe says most often over its secret keys"),
        ("one training", str(one)),
        ("these votes, if published", f"epsilon = {format_epsilon(all_of_them.epsilon)}"),
    ]


def _write(path: Path, votes: Votes, found: Withstands) -> None:
    import csv

    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        names = [f"changes at {radius:g}" for radius in found.changes]
        writer.writerow(["index", "label", "answer", *names])
        columns = (votes.index, votes.label, found.answer, *found.changes.values())
        writer.writerows(zip(*(column.tolist() for column in columns), strict=True))
