"""dpdist certify: certify a run's test split, re-bound or merge what was certified."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpdist.base.errors import UserError
from dpdist.base.fields import Count, Positive, Probability
from dpdist.commands.options import (
    RUNS,
    Actors,
    ArchivedModelArgument,
    AsJson,
    DataRoot,
    Every,
    MaxInputs,
    Output,
    Runs,
    Signer,
    Start,
    TrustFactory,
    file_path,
    flag,
    numbers,
    option,
    path_option,
    recipe_of,
    release_at,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from dpdist.certification.certificate import Certificate
    from dpdist.runs.folder import RunFolder

    _Asked = tuple[Any, Any, Certificate]  # recipe, trained model, certificate


_Sigma = Annotated[float | None, option("Noise, in input units.", Positive)]
_N = Annotated[int | None, option("Draws per input (sequential: at most).", Count)]
_N0 = Annotated[int | None, option("Draws that choose the class.", Count)]
_Alpha = Annotated[float | None, option("Error of each certificate.", Probability)]
_Mode = Annotated[
    str | None, option("fixed, two-class, target, anytime; of scores: target-scores.")
]
_Radii = Annotated[str | None, option("Radii to decide, ascending: 0.25,0.5,0.75.")]
_Noise = Annotated[str | None, option("gaussian, laplace or uniform.")]
_Bound = Annotated[str | None, option("Of expected scores: hoeffding, bernstein, counts, betting.")]
_OneSided = Annotated[
    bool | None, flag("--one-sided", "Of betting: bound the class that n0 draws chose only.")
]
_Norm = Annotated[str | None, option("Of expected scores' radius: l2 or linf.")]
_At = Annotated[
    str | None,
    option(
        "At attacked copies, as papers measure it; no certificate of the clean input.",
        metavar="attacked:ATTACK,SIZE[,NORM]",
    ),
]
_Rebound = Annotated[
    str | None, option("Certify the stored counts at another alpha.", metavar="alpha=A")
]
_Merge = Annotated[bool, flag("--merge", "Merge the run's tables of shares into one.")]
_WRITTEN = file_path(written=True)
_Tsv = Annotated[Path | None, path_option("Also write Cohen's columns here.", of=_WRITTEN)]
_Csv = Annotated[Path | None, path_option("Also write all columns here.", of=_WRITTEN)]


def command(
    run: ArchivedModelArgument,
    runs: Runs = RUNS,
    data_root: DataRoot = None,
    sigma: _Sigma = None,
    n: _N = None,
    n0: _N0 = None,
    alpha: _Alpha = None,
    mode: _Mode = None,
    radii: _Radii = None,
    noise: _Noise = None,
    bound: _Bound = None,
    one_sided: _OneSided = None,
    norm: _Norm = None,
    start: Start = None,
    every: Every = None,
    max_inputs: MaxInputs = None,
    actors: Actors = None,
    output: Output = None,
    at: _At = None,
    rebound: _Rebound = None,
    merge: _Merge = False,
    tsv: _Tsv = None,
    csv: _Csv = None,
    trust_factory: TrustFactory = None,
    signer: Signer = None,
    as_json: AsJson = False,
) -> None:
    """Certify the test split on all CPUs; continues what was interrupted.

    Of a release, the test split of the data that it names, under --data-root; the table goes to
    --output, by default certificates/NAME/SETTINGS here.

    A model with noise in its first hidden layer is certified under that noise, by expected scores;
    with --sigma, it is smoothed at its inputs as well, and both noises certify, in quadrature. A
    model with noise on its input is smoothed by that noise unless --sigma says otherwise, and noise
    that it has further inside is drawn with it.

    Settings not given are the recipe's. --rebound and --merge work on stored counts, without the
    model: on the table in --output, or on all tables of the run.
    """
    from dpdist.bulk.evaluation import refuse_decisions
    from dpdist.runs.archive import Archive, open_anywhere

    release = release_at(run, trust_factory, signer)
    given = {
        "sigma": sigma, "n": n, "n0": n0, "alpha": alpha, "mode": mode, "noise": noise,
        "bound": bound, "one_sided": one_sided, "norm": norm, "radii": numbers(radii, "--radii"),
        "start": start, "every": every, "max_inputs": max_inputs,
    }  # fmt: skip
    if release is not None:
        if merge or rebound is not None or at is not None:
            raise UserError("--merge, --rebound, --at: of a run, not of a release")
        from dpdist.commands.certifying import certify_release

        table, path = certify_release(release, given, data_root, output, actors)
        _export(table, path, tsv, csv)
        _show(release.name, [path], [], as_json)
        return
    _refuse_settings(given | {"data_root": data_root, "actors": actors}, merge, rebound)
    folder = open_anywhere(run, runs)
    Archive.check_key(folder)
    refuse_decisions(folder, output)
    measured: list[tuple[str, str]] = []
    if at is not None:
        if merge or rebound is not None:
            raise UserError("--at: certifies; it does not go with --merge or --rebound")
        made, measured = _certified_at(at, folder, output, _asked(folder, given, data_root), actors)
    elif merge:
        made = _merged(folder, output)
    elif rebound is not None:
        made = [_rebounded(folder, output, rebound)]
    else:
        made = [_certified(folder, output, _asked(folder, given, data_root), actors)]
    if len(made) > 1 and (tsv or csv):
        names = ", ".join(path.parent.name for _, path in made)
        raise UserError(f"--tsv, --csv: hold one table, these are several: {names}")
    for table, path in made:
        _export(table, path, tsv, csv)
    if folder.archive.exists():
        from dpdist import pipeline

        pipeline.archive_stage(folder)
    _show(folder.name, [path for _, path in made], measured, as_json)


def _refuse_settings(given: dict[str, Any], merge: bool, rebound: str | None) -> None:
    """Raise UserError for options of a certification where none is made."""
    made = "--merge" if merge else "--rebound" if rebound is not None else None
    if merge and rebound is not None:
        raise UserError("--merge, --rebound: give one of them")
    useless = [f"--{name.replace('_', '-')}" for name, value in given.items() if value is not None]
    if made and useless:
        raise UserError(
            f"{', '.join(useless)}: must be left out with {made}, which takes what is there as "
            "it is"
        )


def _export(table: pa.Table, path: Path, tsv: Path | None, csv: Path | None) -> None:
    from dpdist.certification import table as tables
    from dpdist.certification.job import timings

    if tsv is not None:
        tables.write_cohen_tsv(table, tsv, timings(path.parent))
    if csv is not None:
        tables.write_csv(table, csv)


def _certified(
    folder: RunFolder, output: Path | None, asked: _Asked, actors: int | None
) -> tuple[pa.Table, Path]:
    from dpdist import pipeline
    from dpdist.certification import table as tables

    recipe, _, chosen = asked
    pipeline.require_certifying_gpus(recipe)
    with pipeline.session(folder):
        path = pipeline.certify_stage(recipe, folder, chosen, output, actors)
    return tables.read(path), path


def _certified_at(
    text: str, folder: RunFolder, output: Path | None, asked: _Asked, actors: int | None
) -> tuple[list[tuple[pa.Table, Path]], list[tuple[str, str]]]:
    """The table, and what is shown of it."""
    from dpdist import pipeline
    from dpdist.attacks.attacked import At, AttackedCopies
    from dpdist.certification import reading
    from dpdist.training.records import evaluation_data, source_of

    at = At.parse(text)
    recipe, model, chosen = asked
    pipeline.require_certifying_gpus(recipe)
    copies = AttackedCopies(at, evaluation_data(recipe, source_of(recipe)), model, chosen)
    beside = folder.certificates / chosen.folder_name / "certificates.parquet"
    output = output or folder.path / "attacks" / f"{at.folder_name}-{chosen.folder_name}"
    with pipeline.session(folder):
        path = pipeline.certify_stage(recipe, folder, chosen, output, actors, copies)
    found = reading.read(path)
    clean = reading.read(beside) if beside.is_file() else None
    rows = [("inputs", f"{len(found.index):,}"), *copies.lines(found, clean), ("table", str(path))]
    return [(found.table, path)], rows


def _asked(folder: RunFolder, given: dict[str, Any], data_root: Path | None) -> _Asked:
    """Recipe, trained model and certificate, the recipe's where nothing else is asked for."""
    from dpdist.certification.catalogue import settings_of
    from dpdist.commands.certifying import chosen_settings, sigma_of
    from dpdist.evaluation import load_model

    recipe = recipe_of(folder, data_root, "certify")
    if sigma_of(given, recipe.certify) is not None:
        settings_of(given, recipe.certify)  # refused before torch is loaded
    model = load_model(recipe, folder)
    return recipe, model, chosen_settings(given, recipe.certify, model, folder.path)


def _merged(folder: RunFolder, output: Path | None) -> list[tuple[pa.Table, Path]]:
    """The shares of each certification of the run, each merged into a table of its own."""
    from dpdist.certification import table as tables
    from dpdist.certification.rebound import apart, merge, shares

    sources = _stored(folder.certificates)
    found = [tables.read(source) for source in sources]
    groups = shares(found)
    left = [
        f"{sources[place].parent.name} differs from {sources[nearest].parent.name} in "
        f"{', '.join(names)}"
        for place, nearest, names in apart(found)
    ]
    if not groups:
        raise UserError(
            f"{folder.certificates}: no two tables are shares of one certification (the same but "
            "for --start, --every and --max-inputs)" + "".join(f": {why}" for why in left[:1])
        )
    if output is not None and len(groups) > 1:
        raise UserError(
            f"--output: holds one table, there are shares of {len(groups)} certifications; leave "
            "it out, and each gets a folder of its own"
        )
    made = []
    for group in groups:
        table = merge([found[place] for place in group])
        name = "merged" if len(groups) == 1 else f"merged-{sources[group[0]].parent.name}"
        made.append((table, _derived(output or folder.certificates / name)))
    for table, path in made:
        tables.write(table, path)
    for why in left:
        typer.echo(f"left alone: {why}", err=True)
    return made


def _rebounded(folder: RunFolder, output: Path | None, text: str) -> tuple[pa.Table, Path]:
    from dpdist.certification import table as tables
    from dpdist.certification.rebound import rebound

    name, _, value = text.partition("=")
    try:
        alpha = float(value)
    except ValueError:
        alpha = 0.0
    if name != "alpha" or not 0 < alpha < 1:
        raise UserError(f"--rebound: give alpha=A with A between 0 and 1, got {text!r}")
    sources = [output / "certificates.parquet"] if output else _stored(folder.certificates)
    if output is None:  # one made from another is not taken for a further certification
        sources = [s for s in sources if "rebound_alpha" not in tables.about(tables.read(s))]
    if not sources:
        raise UserError(f"{folder.path}: no certificates yet; `dpdist certify` makes them")
    if len(sources) > 1:
        names = ", ".join(str(source.parent) for source in sources)
        raise UserError(f"several tables: name one with --output: {names}")
    table = rebound(tables.read(sources[0]), alpha)
    parent = sources[0].parent
    path = _derived(parent.with_name(f"{parent.name}-alpha-{alpha:g}"))
    tables.write(table, path)
    return table, path


def _derived(folder: Path) -> Path:
    """Where a table made from others goes. Raises UserError where it would replace a certification,
    which took its time."""
    from dpdist.bulk import SETTINGS

    if (folder / SETTINGS).exists():
        raise UserError(f"{folder}: holds a certification, which would be replaced; choose another")
    return folder / "certificates.parquet"


def _stored(certificates: Path) -> list[Path]:
    return sorted(certificates.glob("*/certificates.parquet"))


def _show(name: str, paths: Sequence[Path], measured: list[tuple[str, str]], as_json: bool) -> None:
    """measured: of attacked copies, in place of their certificates."""
    from dpdist.base import console
    from dpdist.certification import reading

    if as_json:
        from dpdist.reports.as_json import certified

        tables = [] if measured else [reading.read(path) for path in paths]
        found = [certified(table) for table in tables]
        at = {"at_attacked_copies": dict(measured)} if measured else {}
        console.print_json({"run": name, "certificates": found, **at})
    elif measured:
        from dpdist.attacks.attacked import NAMED

        typer.echo(console.table(measured, title=NAMED))
    else:
        for path in paths:
            _print(path)


def _print(path: Path) -> None:
    from dpdist.base import console
    from dpdist.certification import population, reading

    table = reading.read(path)
    abstained = int((table.prediction == -1).sum())
    rows = [("inputs", f"{len(table.index):,}"), ("abstained", f"{abstained:,}")]
    rows += table.kind.lines(table, table.shown_radii)
    rows.append(population.line(table))
    rows.append(("draws", f"{sum(table.table['n'].to_pylist()):,}"))
    rows.append(("alpha", f"{table.alpha:g} each"))
    classifier = table.about.get("classifier", {})
    if classifier:
        executed = f"{classifier['form']}, batches of {classifier['batch']}"
        if "device" in classifier:
            executed += f", on {classifier['machine']}"
        if "generator" in classifier:
            executed += f", noise of {classifier['generator']}"
        rows.append(("executed", "; ".join([executed, *classifier["notes"]])))
    rows.append(("table", str(path)))
    typer.echo(console.table(rows, title=f"certificates, sigma {table.sigma:g}"))
