"""dpdist membership: who can tell which records the models of a recipe were trained with?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import Field

from dpdist.base.errors import UserError
from dpdist.base.fields import Count, Models
from dpdist.base.storage import write_result
from dpdist.commands.options import (
    PICTURE,
    RUNS,
    Actors,
    Changes,
    DataRoot,
    Name,
    Output,
    PrivateSeed,
    RecipeArgument,
    Runs,
    need_label,
    numbers,
    option,
    path_option,
)

if TYPE_CHECKING:
    from dpdist.audits.findings import MembershipFindings
    from dpdist.audits.inference import Inference
    from dpdist.audits.membership import Membership
    from dpdist.runs.folder import RunFolder
    from dpdist.runs.recipe import Recipe


_Count = Annotated[Count, Field(le=100_000)]  # passes of one model
_Models = Annotated[int, option("Shadow models in the bank.", Models)]
_Attack = Annotated[str, option("Out of shadow,lira,lira-offline,rmia,rmia-offline.")]
_Game = Annotated[str, option("Who is in a model: coins, or halves (shadow has its own).")]
_Passes = Annotated[str, option("Averaged, of a model with noise of its own: 100, or 10,100.")]
_Picture = Annotated[Path | None, path_option("The ROC curves with their ceilings.", of=PICTURE)]


def command(
    recipe: RecipeArgument,
    changes: Changes = None,
    models: _Models = 16,
    attack: _Attack = "shadow,lira,rmia",
    game: _Game = "coins",
    passes: _Passes = "100",
    seed: PrivateSeed = None,
    picture: _Picture = None,
    name: Name = None,
    runs: Runs = RUNS,
    data_root: DataRoot = None,
    actors: Actors = None,
    output: Output = None,
) -> None:
    """Membership inference: trains a bank of shadow models, resumable, and attacks all of them.

    Private: results stay in the run's private/ folder. Exit code 1 when the one-run test exceeds
    the proved epsilon.
    """
    from dpdist import pipeline
    from dpdist.audits.membership import Membership
    from dpdist.runs.folder import RunFolder
    from dpdist.runs.recipe import read_changes, resolve

    resolved = resolve(recipe, changes=read_changes(changes), name=name, data_root=data_root)
    need_label(resolved, "membership")
    folder, chosen = RunFolder(runs / resolved.name), _attacks(attack)
    averaged = tuple(sorted({int(n) for n in numbers(passes, "--passes", _Count) or ()}))
    banks: list[tuple[Membership, list[Inference]]] = []
    if quarters := [one for one in chosen if one.quarters]:
        banks.append((Membership("quarters", 2, averaged, seed=seed), quarters))
    if others := [one for one in chosen if not one.quarters]:
        banks.append((Membership(game, models, averaged, seed=seed), others))
    _check(resolved, folder, banks, [output, picture], recipe)
    folder.begin(resolved)
    with pipeline.session(folder):
        found = [_examined(resolved, folder, *bank, output, actors) for bank in banks]
    if picture is not None:
        from dpdist.reports.figures import roc_curves

        write_result(picture, roc_curves([one.panel for one in found], picture.suffix[1:]))
        typer.echo(f"picture: {picture}")
    if not all(one.held for one in found):
        raise typer.Exit(1)


def _check(
    recipe: Recipe,
    folder: RunFolder,
    banks: Sequence[tuple[Membership, Sequence[Inference]]],
    written: Sequence[Path | None],
    where: str,
) -> None:
    """Raise UserError for whatever could go wrong later, before anything is written. written: the
    folder of a bank, and the picture."""
    from dpdist.runs.recipe import refuse_unused
    from dpdist.training.job import check_trainable

    if written[0] is not None and len(banks) > 1:
        raise UserError("--output: holds one bank; give shadow and the other attacks apart")
    for bank, attacks in banks:
        for one in attacks:
            one.check(bank.rules)
        for path in written:
            bank.place(folder, path)
    if not folder.check_same_recipe(recipe):
        refuse_unused(recipe, where)
    dataset, _ = check_trainable(recipe, where)
    for bank, _ in banks:
        bank.shadows(recipe, len(dataset))


def _attacks(names: str) -> list[Inference]:
    from dpdist.audits.inference import ATTACKS

    unknown = [name for name in names.split(",") if name not in ATTACKS]
    if unknown:
        raise UserError(f"--attack: must be out of {', '.join(ATTACKS)}, got {unknown[0]!r}")
    return [ATTACKS[name]() for name in dict.fromkeys(names.split(","))]


def _examined(
    recipe: Recipe,
    folder: RunFolder,
    settings: Membership,
    attacks: Sequence[Inference],
    output: Path | None,
    actors: int | None,
) -> MembershipFindings:
    """Train what is missing of a bank, attack it, print what was found."""
    from dpdist import pipeline
    from dpdist.audits.findings import examine
    from dpdist.base import console

    path = pipeline.evaluation_stage(recipe, folder, settings, output, actors)
    found = examine(settings, recipe, path, attacks)
    for title, rows in found.tables():
        typer.echo(console.table(rows, title=title))
    for note in found.notes:
        typer.echo(note)
    typer.echo(f"scores, models and numbers, all private: {path.parent}")
    return found
