"""dpdist attack: accuracy of a run's model under attack; its certificates attacked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpdist.base.errors import UserError
from dpdist.base.fields import Count, Positive, Probability, Text
from dpdist.commands.options import (
    RUNS,
    Actors,
    DataRoot,
    Every,
    MaxInputs,
    Output,
    RunArgument,
    Runs,
    Start,
    flag,
    numbers,
    option,
    recipe_of,
)

if TYPE_CHECKING:
    from dpdist.attacks.settings import AttackSettings
    from dpdist.runs.folder import RunFolder
    from dpdist.runs.recipe import Recipe


_Steps = Annotated[int | None, option("Steps of i-fgsm, mim and pgd (10).", Count)]
_Restarts = Annotated[int | None, option("Random starts of pgd (1).", Count)]
_Scale = Annotated[float | None, option("pgd steps by this times size / steps (2.5).", Positive)]
_Sigma = Annotated[float | None, option("Attack the classifier smoothed by this noise.", Positive)]
_Draws = Annotated[int | None, option("Draws of the noise for each gradient (16).", Count)]
_N = Annotated[int | None, option("Draws per answer of a randomised classifier (1000).", Count)]
_Alpha = Annotated[float | None, option("Error of each such answer (0.001).", Probability)]
_Seed = Annotated[str | None, option("Of all random numbers (default: secret, stored).", Text)]
_Norm = Annotated[str | None, option("linf (default) or l2.")]
_Sizes = Annotated[str | None, option("Sizes in input units: 0.05,0.1 (default: by the norm).")]
_Attacks = Annotated[str | None, option("Out of fgsm,i-fgsm,mim,pgd (default: all; check: pgd).")]
_Labels = Annotated[str | None, option("Lead away from the true (default) or predicted class.")]
_Table = Annotated[str | None, option("The table to check, by name or path (default: each).")]
_Claim = Annotated[
    str | None, option("Attack this column of sizes in place of the radius: as_printed_linf.")
]
_Smoothed = Annotated[bool, flag("--smoothed", "As --sigma with the recipe's certify.sigma.")]
_Check = Annotated[
    bool,
    flag(
        "--check-certificates",
        "Attack the run's L2 certificates within their radii instead; exit code 1 when more "
        "are contradicted than alpha allows.",
    ),
]


def command(
    run: RunArgument,
    runs: Runs = RUNS,
    data_root: DataRoot = None,
    norm: _Norm = None,
    sizes: _Sizes = None,
    attacks: _Attacks = None,
    steps: _Steps = None,
    restarts: _Restarts = None,
    step_scale: _Scale = None,
    sigma: _Sigma = None,
    smoothed: _Smoothed = False,
    draws: _Draws = None,
    n: _N = None,
    alpha: _Alpha = None,
    labels: _Labels = None,
    start: Start = None,
    every: Every = None,
    max_inputs: MaxInputs = None,
    seed: _Seed = None,
    actors: Actors = None,
    output: Output = None,
    check_certificates: _Check = False,
    certificates: _Table = None,
    claim: _Claim = None,
) -> None:
    """Attack the test split on all CPUs, white-box; continues what was interrupted.

    Shows how many inputs stay right, abstain or go wrong, and how many are certified.
    """
    from dpdist.runs.folder import open_run

    folder = open_run(run, runs)
    recipe = recipe_of(folder, data_root, "attack")
    given: dict[str, Any] = {
        "steps": steps, "restarts": restarts, "step_scale": step_scale, "draws": draws,
        "start": start, "every": every, "max_inputs": max_inputs, "seed": seed,
        "attacks": tuple(attacks.split(",")) if attacks is not None else None,
    }  # fmt: skip
    own = {
        "norm": norm, "sizes": numbers(sizes, "--sizes"), "n": n, "alpha": alpha, "labels": labels,
        "sigma": _sigma(recipe, folder, sigma, smoothed),
    }  # fmt: skip
    _refuse_useless(check_certificates, own, {"certificates": certificates, "claim": claim})
    if check_certificates:
        _check(recipe, folder, given, certificates, claim, output, actors)
    else:
        _attack(recipe, folder, given | own, output, actors)


def _refuse_useless(check: bool, own: dict[str, Any], checks: dict[str, Any]) -> None:
    """Options of an attack with a check, or those of a check without it."""
    useless = [f"--{name}" for name, value in own.items() if value is not None]
    if check and useless:
        raise UserError(
            f"{', '.join(useless)}: not with --check-certificates, which takes norm, sizes, noise "
            "and draws from the certificates"
        )
    if not check and any(value is not None for value in checks.values()):
        raise UserError("--certificates, --claim: only with --check-certificates")


def _attack(
    recipe: Recipe,
    folder: RunFolder,
    given: dict[str, Any],
    output: Path | None,
    actors: int | None,
) -> None:
    from dpdist import pipeline
    from dpdist.base import console
    from dpdist.reports.attacks import grid
    from dpdist.reports.facts import read_facts

    settings = _settings(given)
    _refuse_draws(recipe, folder, settings, given)
    with pipeline.session(folder):
        path = pipeline.evaluation_stage(recipe, folder, settings, output, actors)
    table = settings.read(path)
    shown = grid(table, read_facts(folder).tables)
    widths = [
        max(len(row[place]) for row in (shown.header, *shown.rows))
        for place in range(len(shown.header))
    ]
    lines = [
        (
            row[0],
            "  ".join(value.rjust(width) for value, width in zip(row[1:], widths[1:], strict=True)),
        )
        for row in (shown.header, *shown.rows)
    ]
    title = f"under attack, % of {table.inputs:,} inputs ({table.classifier})"
    typer.echo(console.table(lines, title=title))
    for note in shown.notes:
        typer.echo(note)
    typer.echo(f"table: {path}")
    pipeline.report_stage(folder)


def _settings(given: dict[str, Any]) -> AttackSettings:
    """Return the attack that is asked for. Raises UserError for an option that it has not."""
    from dpdist.attacks.settings import AttackSettings

    said = {name: value for name, value in given.items() if value is not None}
    settings = AttackSettings(**said)
    settings.refuse_unused(said)
    return settings


def _refuse_draws(
    recipe: Recipe, folder: RunFolder, settings: AttackSettings, given: dict[str, Any]
) -> None:
    """Raise UserError for options of noise where the attacked classifier has none."""
    useless = [f"--{name}" for name in ("draws", "n", "alpha") if given[name] is not None]
    if not useless or settings.sigma is not None:
        return
    from dpdist.evaluation import load_model
    from dpdist.randomness.places import place_of

    if not place_of(load_model(recipe, folder)).random:
        raise UserError(
            f"{', '.join(useless)}: must be left out: the model has no noise, so nothing is drawn; "
            "give --sigma or --smoothed to attack it smoothed"
        )


def _check(
    recipe: Recipe,
    folder: RunFolder,
    given: dict[str, Any],
    certificates: str | None,
    claim: str | None,
    output: Path | None,
    actors: int | None,
) -> None:
    from dpdist import pipeline
    from dpdist.attacks.reading import check_line
    from dpdist.attacks.settings import CheckSettings
    from dpdist.base import console

    if given["attacks"] is None:
        given["attacks"] = ("pgd",)
    settings = _settings(given)
    tables = _tables(folder, certificates)
    if not tables:
        raise UserError(f"{folder.path}: no L2 or L-infinity certificates to attack")
    if output is not None and len(tables) > 1:
        names = ", ".join(path.parent.name for path in tables)
        raise UserError(f"--output: holds one check; name one with --certificates: {names}")
    rows, held = [], True
    with pipeline.session(folder):
        for path in tables:
            check = CheckSettings(path, settings, claim)
            found = check.read(pipeline.evaluation_stage(recipe, folder, check, output, actors))
            held = held and found["plausible"]
            rows.append((found["certificates"], check_line(found)))
    typer.echo(console.table(rows, title="certificates under attack"))
    pipeline.report_stage(folder)
    if not held:
        raise typer.Exit(1)


def _tables(folder: RunFolder, name: str | None) -> list[Path]:
    from dpdist.attacks.settings import NORMS
    from dpdist.base import console
    from dpdist.reports.facts import read_facts

    if name is None:
        found = read_facts(folder).tables
        if not found:
            raise UserError(f"{folder.path}: no certificates yet; `dpdist certify` makes them")
        for table in found:
            if table.norm not in NORMS:
                console.say(f"{table.name}: {table.norm} certificates cannot be attacked, left out")
        return [table.path for table in found if table.norm in NORMS]
    for path in (folder.certificates / name / "certificates.parquet", Path(name)):
        if path.is_file():
            return [path]
    raise UserError(f"--certificates: {name}: no such table in {folder.certificates}")


def _sigma(recipe: Recipe, folder: RunFolder, sigma: float | None, smoothed: bool) -> float | None:
    if not smoothed:
        return sigma
    if sigma is not None:
        raise UserError("give --sigma or --smoothed, not both")
    if recipe.certify is None or recipe.certify.sigma is None:
        raise UserError(
            f"{folder.path}: the recipe does not certify with input noise; give --sigma"
        )
    return recipe.certify.sigma
