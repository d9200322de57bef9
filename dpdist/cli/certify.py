"""``dpdist certify``, ``radius`` and ``predict``: certificates and certified answers.

certify: certify a run's test split, recompute its tables; or certify a release, without
its run. radius: the certified radius of a count, without model, data, torch or Ray. predict: label
or ABSTAIN, with a certified radius, for single images. serve: a released model behind HTTP, on
this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import Field

from dpdist.cli import importing
from dpdist.cli.options import (
    DEFAULT_RUNS,
    Actors,
    DataRoot,
    Every,
    Local,
    MaxInputs,
    ModelArgument,
    Name,
    Output,
    PublishableJson,
    Runs,
    Signer,
    Start,
    TrustFactory,
    executor_name,
    flag,
    load_trained_recipe,
    open_release_if_any,
    option,
    parse_numbers,
    path_callback,
    path_option,
    run_names,
)
from dpdist.core import console
from dpdist.core.console import format_percent
from dpdist.core.errors import UserError
from dpdist.core.fields import Count, CountOrZero, Positive, Probability, RejectBool
from dpdist.core.files import (
    MAX_JSON_BYTES,
    check_regular_file,
    error_text,
    quoted,
    read_bytes,
    read_text,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor, nn

    from dpdist.certification.certificate import Certificate
    from dpdist.release.bundle import Release, TextAnswerer
    from dpdist.runs.folder import RunFolder
    from dpdist.training.ensembles import QueryOracle


# --- certifying a release ---------------------------------------------------------------------


def resolve_settings(
    options: dict[str, Any], default: Certificate | None, model: nn.Module, path: Path
) -> Certificate:
    """Return the certificate that options ask for, the usual one where nothing else is asked for.

    Args:
        options: options by name, None where one is not given.
        default: of the recipe or release.
        model: what is certified: noise of its own and smoothing exclude each other.
        path: it lies, for complaints.

    Raises:
        UserError: an option belongs to another certificate, or to another model.
    """
    from dpdist.certification.registry import settings_of
    from dpdist.randomness.noise_location import resolve_smoothing_sigma

    sigma = resolve_smoothing_sigma(model, requested_sigma(options, default), path)
    return settings_of(options | {"sigma": sigma}, default)


def requested_sigma(options: dict[str, Any], default: Certificate | None) -> float | None:
    """Return the noise on the input that is asked for, if any."""
    return options["sigma"] or (None if default is None else default.sigma)


def certify_release(
    release: Release,
    options: dict[str, Any],
    data_root: Path | None,
    output: Path | None,
    actors: int | None,
    local: bool | None = None,
) -> tuple[pa.Table, Path]:
    """Certify the test split that a release names, with its settings where nothing else is asked
    for."""
    from dpdist import data, pipeline
    from dpdist.certification.job import TABLE, certify
    from dpdist.core import console
    from dpdist.training.job import PACKAGES
    from dpdist.training.records import data_source_under

    dataset = data.load(data_source_under(release.description.data, data_root), "test")
    chosen = resolve_settings(options, release.description.certificate, release.model, release.path)
    output = output or Path("certificates", release.name, chosen.folder_name)
    if release.path.resolve() in (output.resolve(), *output.resolve().parents):
        raise UserError(f"--output: {output} lies in the release, which stays as it was published")
    output.parent.mkdir(parents=True, exist_ok=True)
    log_file = output.parent / "ray.log"
    with pipeline.run_session(log_file, executor=executor_name(local)) as executor:
        executor.check_nodes(PACKAGES, output.parent.resolve())
        with console.progress(f"certifying, {chosen.folder_name}", "inputs", "draws") as show:
            table = certify(
                release.path,
                dataset,
                chosen,
                output,
                actors=actors,
                progress=show,
                trusted_factory=release.trusted_factory,
                log=console.log,
            )
    return table, output / TABLE


# --- dpdist certify ---------------------------------------------------------------------------


if TYPE_CHECKING:
    _CertifyRequest = tuple[Any, Any, Certificate]  # recipe, trained model, certificate


_Sigma = Annotated[float | None, option("Noise, in input units.", Positive)]
_N = Annotated[int | None, option("Draws per input (sequential: at most).", Count)]
_N0 = Annotated[int | None, option("Draws that choose the class.", Count)]
_Alpha = Annotated[float | None, option("Error of each certificate.", Probability)]
_Mode = Annotated[
    str | None, option("fixed, two-class, target, anytime; of scores: target-scores.")
]
_Radii = Annotated[str | None, option("Radii to decide, ascending: 0.25,0.5,0.75.")]
_Noise = Annotated[str | None, option("gaussian, laplace or uniform.")]
_Bound = Annotated[
    str | None,
    option(
        "Of votes: clopper-pearson (default) or hoeffding; of expected scores: hoeffding, "
        "bernstein, counts, betting."
    ),
]
_Form = Annotated[
    str | None,
    option(
        "Inference form: frozen, compiled, channels-last, eager or bf16 (another function: the "
        "network in bfloat16); by default a probe chooses among those of the model's precision."
    ),
]
_OneSided = Annotated[
    bool | None, flag("--one-sided", "Of betting: bound the class that n0 draws chose only.")
]
_Norm = Annotated[str | None, option("Of expected scores' radius: l2 or linf.")]
_AttackedCopies = Annotated[
    str | None,
    option(
        "At attacked copies, as papers measure it; no certificate of the clean input.",
        metavar="attacked:ATTACK,SIZE[,NORM]",
    ),
]
_Recertify = Annotated[
    str | None, option("Certify the stored counts at another alpha.", metavar="alpha=A")
]
_OUTPUT_FILE = path_callback(for_writing=True)
_Tsv = Annotated[
    Path | None, path_option("Also write Cohen's columns here.", callback=_OUTPUT_FILE)
]
_Csv = Annotated[Path | None, path_option("Also write all columns here.", callback=_OUTPUT_FILE)]


def certify_command(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN|RELEASE",
            autocompletion=run_names,
            help="A run folder, its name under --runs, its archive's address, or a release; left "
            "out with --model.",
        ),
    ] = None,
    runs: Runs = DEFAULT_RUNS,
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
    form: _Form = None,
    start: Start = None,
    every: Every = None,
    max_inputs: MaxInputs = None,
    actors: Actors = None,
    local: Local = None,
    output: Output = None,
    at: _AttackedCopies = None,
    rebound: _Recertify = None,
    tsv: _Tsv = None,
    csv: _Csv = None,
    trust_factory: TrustFactory = None,
    signer: Signer = None,
    as_json: PublishableJson = False,
    model: importing.Model = None,
    weights: importing.Weights = None,
    options: importing.Options = None,
    input: importing.Input = None,
    classes: importing.Classes = None,
    normalize: importing.Normalize = None,
    data: importing.Data = None,
    resize: importing.Resize = None,
    name: Name = None,
) -> None:
    """Certify the test split on all CPUs; continues what was interrupted.

    Of a release, the test split of the data that it names, under --data-root; the table goes to
    --output, by default certificates/NAME/SETTINGS here.

    A model with noise in its first hidden layer is certified under that noise, by expected scores;
    with --sigma, it is smoothed at its inputs as well, and both noises certify, in quadrature. A
    model with noise on its input is smoothed by that noise unless --sigma says otherwise, and noise
    that it has further inside is drawn with it.

    With --model, --weights and --data, a model that was trained elsewhere is first imported into
    the run --name (default: the name of the file of weights), as by `dpdist import`.

    Settings not given are the recipe's. --rebound works on stored counts, without the
    model: on the table in --output, or on the only table of the run.
    """
    from dpdist.runs.archive import Archive, open_run_or_archive

    given = {
        "sigma": sigma, "n": n, "n0": n0, "alpha": alpha, "mode": mode, "noise": noise,
        "bound": bound, "one_sided": one_sided, "norm": norm, "radii": parse_numbers(radii,
            "--radii"),
        "form": form, "start": start, "every": every, "max_inputs": max_inputs,
    }  # fmt: skip
    foreign = {
        "weights": weights, "option": options, "input": input, "classes": classes,
        "normalize": normalize, "data": data, "resize": resize, "name": name,
    }  # fmt: skip
    run = _run_or_import(run, runs, model, foreign, given, data_root)
    data_root = None if model is not None else data_root
    release = open_release_if_any(run, trust_factory, signer)
    if release is not None:
        if rebound is not None or at is not None:
            raise UserError("--rebound, --at: of a run, not of a release")

        table, path = certify_release(release, given, data_root, output, actors, local)
        _export_table(table, path, tsv, csv)
        _print_tables(release.name, [path], [], as_json)
        return
    chosen = given | {"data_root": data_root, "actors": actors}
    if (where := executor_name(local)) is not None:
        chosen[where] = True
    if rebound is not None:
        _refuse_certify_options(chosen)
    folder = open_run_or_archive(run, runs)
    if rebound is None:
        folder.require_trained()
        console.log(f"certifying: {folder.path}")  # before torch and Ray are loaded
    Archive.check_archive_key(folder)
    measured: list[tuple[str, str]] = []
    if at is not None:
        if rebound is not None:
            raise UserError("--at: certifies; it does not go with --rebound")
        made, measured = _certify_attacked_copies(
            at, folder, output, _resolve_request(folder, given, data_root), actors, local
        )
    elif rebound is not None:
        made = _recertify_table(folder, output, rebound)
    else:
        request = _resolve_request(folder, given, data_root)
        made = _certify_run(folder, output, request, actors, local)
    table, path = made
    _export_table(table, path, tsv, csv)
    if folder.archive.exists():
        from dpdist import pipeline

        pipeline.archive_stage(folder)
    _print_tables(folder.name, [path], measured, as_json)


def _run_or_import(
    run: str | None, runs: Path, model: str | None, foreign: dict[str, Any], given: dict[str, Any],
    data_root: Path | None,
) -> str:  # fmt: skip
    """Return the run that is named, or that of a model from elsewhere, imported."""
    from dpdist.runs.folder import RunFolder

    if model is None:
        stray = [f"--{key}" for key, value in foreign.items() if value]
        if stray:
            raise UserError(f"{', '.join(stray)}: must be left out without --model")
        if run is None:
            raise UserError(
                "RUN: must be a run or a release, or give --model, --weights and --data of a model "
                "that was trained elsewhere"
            )
        return run
    if run is not None:
        raise UserError(f"RUN: must be left out with --model, got {run}")
    if foreign["data"] is None:
        raise UserError("--data: must be given with --model: the test inputs to certify")
    if given["sigma"] is None:
        raise UserError("--sigma: must be given with --model: the noise on its input")
    source = foreign["weights"] or Path(model.rpartition(":")[2])
    folder = RunFolder(runs / (foreign.pop("name") or source.stem))
    chosen = {key: given[key] for key in ("sigma", "n", "n0", "alpha") if given[key] is not None}
    importing.imported(
        folder, model, foreign["weights"], foreign["option"], foreign["input"],
        foreign["classes"], foreign["normalize"], foreign["data"], data_root, foreign["resize"],
        chosen, None,
    )  # fmt: skip
    return str(folder.path)


def _refuse_certify_options(options: dict[str, Any]) -> None:
    """Raise UserError for options of a certification where none is made."""
    useless = [
        f"--{name.replace('_', '-')}" for name, value in options.items() if value is not None
    ]
    if useless:
        raise UserError(
            f"{', '.join(useless)}: must be left out with --rebound, which takes what is there as "
            "it is"
        )


def _export_table(table: pa.Table, path: Path, tsv: Path | None, csv: Path | None) -> None:
    from dpdist.certification import table as tables
    from dpdist.certification.job import read_timings

    if tsv is not None:
        tables.write_cohen_tsv(table, tsv, read_timings(path.parent))
    if csv is not None:
        tables.write_csv(table, csv)


def _certify_run(
    folder: RunFolder,
    output: Path | None,
    request: _CertifyRequest,
    actors: int | None,
    local: bool | None,
) -> tuple[pa.Table, Path]:
    from dpdist import pipeline
    from dpdist.certification import table as tables

    recipe, _, chosen = request
    pipeline.require_certifying_gpus(recipe)
    with pipeline.run_session(folder, executor=executor_name(local)):
        path = pipeline.certify_stage(recipe, folder, chosen, output, actors)
    return tables.read(path), path


def _certify_attacked_copies(
    text: str,
    folder: RunFolder,
    output: Path | None,
    request: _CertifyRequest,
    actors: int | None,
    local: bool | None,
) -> tuple[tuple[pa.Table, Path], list[tuple[str, str]]]:
    """The table, and what is shown of it."""
    from dpdist import pipeline
    from dpdist.attacks.attacked_copies import AttackedCopies, AttackedCopiesSpec
    from dpdist.certification import table_reader
    from dpdist.training.records import data_source, load_test_records

    at = AttackedCopiesSpec.parse(text)
    recipe, model, chosen = request
    pipeline.require_certifying_gpus(recipe)
    copies = AttackedCopies(at, load_test_records(recipe, data_source(recipe)), model, chosen)
    beside = folder.certificates / chosen.folder_name / "certificates.parquet"
    output = output or folder.path / "attacks" / f"{at.folder_name}-{chosen.folder_name}"
    with pipeline.run_session(folder, executor=executor_name(local)):
        path = pipeline.certify_stage(recipe, folder, chosen, output, actors, copies)
    found = table_reader.read(path)
    clean = table_reader.read(beside) if beside.is_file() else None
    rows = [
        ("inputs", f"{len(found.index):,}"),
        *copies.summary_rows(found, clean),
        ("table", str(path)),
    ]
    return (found.table, path), rows


def _resolve_request(
    folder: RunFolder, options: dict[str, Any], data_root: Path | None
) -> _CertifyRequest:
    """Recipe, trained model and certificate, the recipe's where nothing else is asked for."""
    from dpdist.certification.registry import settings_of
    from dpdist.evaluation import load_model

    recipe = load_trained_recipe(folder, data_root, "certify")
    if requested_sigma(options, recipe.certify) is not None:
        settings_of(options, recipe.certify)  # refused before torch is loaded
    model = load_model(recipe, folder)
    return recipe, model, resolve_settings(options, recipe.certify, model, folder.path)


def _recertify_table(folder: RunFolder, output: Path | None, text: str) -> tuple[pa.Table, Path]:
    from dpdist.certification import table as tables
    from dpdist.certification.table_reader import recertify

    name, _, value = text.partition("=")
    try:
        alpha = float(value)
    except ValueError:
        alpha = 0.0
    if name != "alpha" or not 0 < alpha < 1:
        raise UserError(f"--rebound: give alpha=A with A between 0 and 1, got {text!r}")
    sources = [output / "certificates.parquet"] if output else _stored_tables(folder.certificates)
    if output is None:  # one made from another is not taken for a further certification
        sources = [
            s for s in sources if "rebound_alpha" not in tables.read_job_record(tables.read(s))
        ]
    if not sources:
        raise UserError(f"{folder.path}: no certificates yet; `dpdist certify` makes them")
    if len(sources) > 1:
        names = ", ".join(str(source.parent) for source in sources)
        raise UserError(f"several tables: name one with --output: {names}")
    table = recertify(tables.read(sources[0]), alpha)
    parent = sources[0].parent
    path = _derived_table_path(parent.with_name(f"{parent.name}-alpha-{alpha:g}"))
    tables.write(table, path)
    return table, path


def _derived_table_path(folder: Path) -> Path:
    """Where a table made from others goes. Raises UserError where it would replace a certification,
    which took its time."""
    from dpdist.cluster.job_folder import SETTINGS

    if (folder / SETTINGS).exists():
        raise UserError(f"{folder}: holds a certification, which would be replaced; choose another")
    return folder / "certificates.parquet"


def _stored_tables(certificates: Path) -> list[Path]:
    return sorted(certificates.glob("*/certificates.parquet"))


def _print_tables(
    name: str, paths: Sequence[Path], measured: list[tuple[str, str]], as_json: bool
) -> None:
    """measured: of attacked copies, in place of their certificates."""
    from dpdist.certification import statistics, table_reader

    if as_json:
        from dpdist.reports.export import table_as_json

        tables = [] if measured else [table_reader.read(path) for path in paths]
        found = [table_as_json(table) for table in tables]
        at = {"at_attacked_copies": dict(measured)} if measured else {}
        console.print_json({"run": name, "certificates": found, **at})
    elif measured:
        from dpdist.attacks.attacked_copies import DISCLAIMER

        typer.echo(console.format_table(measured, title=DISCLAIMER))
    else:
        for path in paths:
            table = table_reader.read(path)
            rows = [*statistics.summary_rows(table), ("table", str(path))]
            typer.echo(console.format_table(rows, title=f"certificates, sigma {table.sigma:g}"))


# --- dpdist radius ----------------------------------------------------------------------------


_Hits = Annotated[int, option("Noisy draws that returned the predicted class.", CountOrZero)]
_RadiusDraws = Annotated[int, option("Noisy draws in all, a number fixed in advance.", Count)]
_RadiusSigma = Annotated[float, option("Standard deviation of the Gaussian input noise.", Positive)]
_RadiusAlpha = Annotated[float, option("Error probability of the certificate.", Probability)]
_Dimension = Annotated[
    int | None, option("Number of inputs (28x28: 784); adds the L-infinity radius.", Count)
]
_RadiusBound = Annotated[
    Literal["clopper-pearson", "hoeffding"], option("Of the predicted class's probability.")
]
_RadiusAsJson = Annotated[bool, flag("--json", "Print one JSON object.")]


def radius_command(
    hits: _Hits,
    draws: _RadiusDraws,
    sigma: _RadiusSigma,
    alpha: _RadiusAlpha = 0.001,
    dimension: _Dimension = None,
    bound: _RadiusBound = "clopper-pearson",
    as_json: _RadiusAsJson = False,
) -> None:
    """L2 radius of Cohen's certificate: sigma * Phi^-1(Clopper-Pearson lower bound at alpha).

    Counts of a run that stopped early certify less than this says: use it for fixed draws only.
    """
    from dpdist.certification.noise import format_radius, gaussian_l2_radius, linf_from_l2
    from dpdist.core.binomial import clopper_pearson_lower, hoeffding_lower

    try:
        lower = {"clopper-pearson": clopper_pearson_lower, "hoeffding": hoeffding_lower}[bound]
        p_lower = float(lower(hits, draws, alpha))
        radius = float(gaussian_l2_radius(p_lower, sigma))
        answer: dict[str, object] = {
            "hits": hits,
            "draws": draws,
            "alpha": alpha,
            "sigma": sigma,
            "bound": bound,
            "p_lower": p_lower,
            "radius": radius,
            "norm": "l2",
            "abstain": p_lower <= 0.5,
        }
        if dimension is not None:
            answer["radius_linf"] = float(linf_from_l2(radius, dimension))
    except ValueError as error:
        raise UserError(f"dpdist radius: {error}") from None
    if as_json:
        console.print_json(answer)
        return
    named = {"clopper-pearson": "Clopper-Pearson", "hoeffding": "Hoeffding"}[bound]
    typer.echo(f"p_lower  {format_radius(p_lower, 6)}  ({named}, alpha = {alpha:g})")
    if answer["abstain"]:
        typer.echo("radius   ABSTAIN: the bound does not exceed 1/2")
        return
    typer.echo(f"radius   {format_radius(radius, 6)}  (L2, sigma = {sigma:g})")
    if "radius_linf" in answer:
        typer.echo(f"         {format_radius(float(str(answer['radius_linf'])), 6)}  (L-infinity)")


# --- dpdist predict ---------------------------------------------------------------------------


DEFAULT_DRAWS, DEFAULT_ALPHA = 10_000, 0.001  # by default
DrawCount = Annotated[int, RejectBool, Field(ge=1, le=10_000_000)]  # one process makes them
_Inputs = Annotated[
    list[Path] | None,
    typer.Argument(
        callback=path_callback(),
        metavar="[FILE]...",
        help="Image files, .npy arrays of the model's input shape, tables of features (.csv, "
        ".jsonl, .parquet), of which each row is an input, or files of one text each.",
    ),
]
_Texts = Annotated[
    list[str] | None,
    option("A text, of a model of texts. May be repeated.", None, "--text", metavar="TEXT"),
]
_PredictSigma = Annotated[
    float | None, option("Noise, in input units (default: the recipe's).", Positive)
]
_PredictDraws = Annotated[int | None, option(f"Draws per image ({DEFAULT_DRAWS:,}).", DrawCount)]
_PredictAlpha = Annotated[
    float | None, option(f"Error of each answer ({DEFAULT_ALPHA:g}).", Probability)
]
_LabelOnly = Annotated[bool, flag("--label-only", "No radius: the two-sided test of the label.")]
_PredictAsJson = Annotated[bool, flag("--json", "One JSON object for each image.")]


def predict_command(
    run: ModelArgument,
    files: _Inputs = None,
    texts: _Texts = None,
    runs: Runs = DEFAULT_RUNS,
    sigma: _PredictSigma = None,
    n: _PredictDraws = None,
    alpha: _PredictAlpha = None,
    label_only: _LabelOnly = False,
    as_json: _PredictAsJson = False,
    trust_factory: TrustFactory = None,
    signer: Signer = None,
) -> None:
    """Predict with fresh secret noise, on this machine, by a run's model or a released one.

    A model of texts answers without noise, as texts have no certificate: with the label, or with
    the most probable next tokens.
    """
    from dpdist.runs.folder import open_run

    release = open_release_if_any(run, trust_factory, signer, labelled=False, numeric=False)
    for path in files or ():
        check_regular_file(path)
    given = {"sigma": sigma, "n": n, "alpha": alpha, "label-only": label_only or None}
    recipe = None
    if release is not None:
        saved = _saved_release(release)
    else:
        folder = open_run(run, runs)
        folder.require_trained()
        recipe = folder.read_recipe()
        saved = _saved_run(folder, recipe)
    tokens, targets = saved.tokens, saved.targets
    _require_inputs(files, texts, tokens, saved.path)
    if tokens:
        _refuse_smoothing(given, "texts")
        answerer = release.text_answerer if release is not None else _text_answerer(recipe, saved)
        _answer_texts(answerer, targets, _documents(files, texts), as_json)
        return
    saved = _with_rows(saved, files or [])
    images = list(saved.inputs)
    if targets != "class":
        _refuse_smoothing(given, "numbers and labels")
        _tell_values(saved, targets, images, as_json)
        return
    if recipe is not None and recipe.method.capabilities.not_releasable_reason is not None:
        _refuse_smoothing(given, "this run's answers are paid for, and")
        from dpdist.training.ensembles import QueryOracle

        _predict_with_paid_answers(QueryOracle(recipe, folder), saved, images, as_json)
        return
    asked = {"sigma": sigma, "n": n, "alpha": alpha}
    _predict_smoothed(saved, images, asked, label_only, as_json)


def _text_answerer(recipe: Any, saved: _SavedModel) -> TextAnswerer:
    """Return the answerer of a run of texts. Raises UserError where answers are paid for."""
    from dpdist.release.bundle import TextAnswerer
    from dpdist.training.records import data_source

    if recipe.method.capabilities.not_releasable_reason is not None:
        raise UserError(f"{saved.path}: {recipe.method.capabilities.not_releasable_reason}")
    column = data_source(recipe).columns.text
    assert column is not None
    return TextAnswerer(saved.load_model(), column, saved.classes, recipe.data.targets)


def _require_inputs(
    files: list[Path] | None, texts: list[str] | None, tokens: bool, where: Path
) -> None:
    """Raise UserError where nothing is asked, or texts are that the model does not take."""
    if texts and not tokens:
        raise UserError(f"--text: must be left out, as {where} takes no texts")
    if not files and not texts:
        wanted = "a text by --text, or files of texts" if tokens else "image files or .npy arrays"
        raise UserError(f"FILE: must be given: {wanted}")


def _documents(files: list[Path] | None, texts: list[str] | None) -> list[tuple[str, str]]:
    """Return names and texts: of files, without the line feed at their ends, and as given."""
    found = [(str(path), read_text(path).removesuffix("\n")) for path in files or ()]
    return found + [(quoted(text), text) for text in texts or ()]


def _answer_texts(
    answerer: TextAnswerer, targets: str, documents: list[tuple[str, str]], as_json: bool
) -> None:
    column = answerer.column
    shown: Callable[[str], str] = str
    if column.predicts_next_token and column.tokenizer is not None:
        shown = repr  # tokens that differ by a space alone
    for name, text in documents:
        answer = answerer(text)
        if as_json:
            console.print_json({"text": name} | answer.as_json)
        elif targets == "class":
            shares = [f"{shown(each)} {format_percent(p)} %" for each, p in answer.likely]
            typer.echo(f"{name}: {', '.join(shares) or 'no answer: its numbers are not finite'}")
        else:
            told = answer.outputs
            if targets == "labels":
                told = tuple(float(value > 0) for value in told)
            typer.echo(f"{name}: {' '.join(f'{value:.6g}' for value in told)}")


@dataclass(frozen=True)
class _SavedModel:
    """Where a model lies, how it is meant to be certified, names of its classes, what its outputs
    are, whether it reads texts, and the model."""

    path: Path
    certificate: Certificate | None
    classes: tuple[str, ...]
    targets: str
    tokens: bool
    scale: Callable[[Any], Any]
    load_model: Callable[[], nn.Module]
    fit: Callable[[Any], Any] = lambda pixels: pixels
    bounded: bool = True  # numbers of images lie in [0, 1]
    columns: Any = None  # names of the features of a table
    inputs: Mapping[Path, Any] = field(default_factory=dict)  # by name: a row; None: to be read


def _saved_release(release: Release) -> _SavedModel:
    about = release.description
    if about.pictures is not None:
        console.log(about.pictures.describe(release.spec.input_shape))
    return _SavedModel(
        release.path, about.certificate, about.classes, about.data.targets, about.tokens,
        about.data.columns.scale, lambda: release.model,
        release.fit_picture, not about.raw_inputs, about.data.columns,
    )  # fmt: skip


def _saved_run(folder: RunFolder, recipe: Any) -> _SavedModel:
    from dpdist.evaluation import load_model  # only now: what is refused needs no data

    data = recipe.data
    return _SavedModel(
        folder.model_folder, recipe.certify, tuple(data.class_names), data.targets,
        data.text is not None, data.columns.scale, lambda: load_model(recipe, folder),
        _picture_fit(folder, recipe), recipe.by_script is None, data.columns,
    )  # fmt: skip


def _picture_fit(folder: RunFolder, recipe: Any) -> Callable[[Any], Any]:
    """Return how pictures are brought to the input of a model from elsewhere, as its test inputs
    were; of other runs, and where nothing was done, they stay as they are."""
    prepared = recipe.method.capabilities.picture_preparation
    if not prepared:
        return lambda pixels: pixels
    from dpdist import models
    from dpdist.core.files import read_json
    from dpdist.release.bundle import ReleasedPictures

    size = models.read_spec(folder.model_folder).input_shape
    pictures = ReleasedPictures(resize=read_json(folder.imported, {"data": dict})["data"]["resize"])
    console.log(f"pictures: {prepared}, as the test inputs of the run")
    return lambda pixels: pictures.fit(pixels, size)


def _predict_smoothed(
    saved_model: _SavedModel,
    images: list[Path],
    given: dict[str, Any],
    label_only: bool,
    as_json: bool,
) -> None:
    """Print label and radius of images; without any noise the label alone, and that it is plain."""
    from dpdist import models

    asked = given["n"] is not None or given["alpha"] is not None
    defaults = {"n": DEFAULT_DRAWS, "alpha": DEFAULT_ALPHA}
    options = given | {key: given[key] or usual for key, usual in defaults.items()}
    spec = models.read_spec(saved_model.path)
    inputs = _read_images(saved_model, images, spec.input_shape)
    console.log(f"{saved_model.path}: loading the model")
    from dpdist.certification.predict import Predictor
    from dpdist.certification.registry import settings_of
    from dpdist.randomness.noise_location import find_noise_location, resolve_smoothing_sigma

    model, sigma = saved_model.load_model(), options["sigma"]
    if sigma is None and saved_model.certificate is not None:
        sigma = saved_model.certificate.sigma
    if sigma is None and not (asked or label_only or find_noise_location(model).is_random):
        _tell_plain_labels(saved_model, model, images, inputs, as_json)
        return
    sigma = resolve_smoothing_sigma(model, sigma, saved_model.path)
    settings = settings_of(options | {"sigma": sigma})
    try:
        predictor = Predictor(model, settings, spec.classes, spec.input_shape)
    except ValueError as error:
        raise UserError(f"{saved_model.path}: the model cannot be certified: {error}") from error
    for path, x in zip(images, inputs, strict=True):
        if label_only:
            label, radius = predictor.predict(x), None
        else:
            with console.progress(path.name, "blocks of draws") as show:
                verdict = predictor.certify(x, show)
            label, radius = verdict.prediction, verdict.radius
        named = None if label == -1 else saved_model.classes[label]
        _print_answer(path, (label, named), radius, sigma, settings.alpha, as_json)


def _refuse_smoothing(given: dict[str, Any], what: str) -> None:
    """Raise UserError for options of answers with noise."""
    if useless := [f"--{name}" for name, value in given.items() if value is not None]:
        raise UserError(f"{', '.join(useless)}: must be left out: {what} are not smoothed")


def _tell_values(saved: _SavedModel, targets: str, images: list[Path], as_json: bool) -> None:
    """Print what a model of numbers or labels says, without noise: numbers as they are, of labels
    which are 1."""
    import torch

    from dpdist import models

    shape = models.read_spec(saved.path).input_shape
    inputs = torch.stack(_read_images(saved, images, shape))
    with torch.inference_mode():
        outputs = saved.load_model()(inputs).double().tolist()
    for path, values in zip(images, outputs, strict=True):
        told = values if targets == "number" else [int(value > 0) for value in values]
        if as_json:
            console.print_json({"image": str(path), targets: told, "outputs": values})
        else:
            typer.echo(f"{path}: {' '.join(f'{value:.6g}' for value in told)}")


def _tell_plain_labels(
    saved: _SavedModel, model: nn.Module, images: list[Path], inputs: list[Tensor], as_json: bool
) -> None:
    """Print the labels that a model without noise says, and that nothing is certified of them."""
    import torch

    from dpdist import models

    console.log(
        f"{saved.path}: no noise is named, so these are plain predictions without a certificate; "
        "--sigma certifies"
    )
    with torch.inference_mode():
        labels = models.predicted_classes(model(torch.stack(inputs))).tolist()
    for path, label in zip(images, labels, strict=True):
        named = None if label == -1 else saved.classes[label]
        if as_json:
            answer = {"image": str(path), "label": label, "class": named, "abstain": label == -1}
            uncertified = {"radius": None, "norm": None, "sigma": None, "alpha": None}
            console.print_json(answer | uncertified | {"certified": False})
        else:
            said = "no answer: its numbers are not finite" if named is None else named
            typer.echo(f"{path}: {said} (no certificate)")


def _predict_with_paid_answers(
    oracle: QueryOracle, saved: _SavedModel, images: list[Path], as_json: bool
) -> None:
    """Answers that are paid for, each counted; an image answered before is answered so again."""
    import torch

    inputs = torch.stack([_read_image(saved, path, oracle.input_shape) for path in images])
    for path, scores in zip(images, oracle(inputs).tolist(), strict=True):
        label = scores.index(max(scores))
        if as_json:
            answer = {
                "image": str(path),
                "label": label,
                "class": saved.classes[label],
                "scores": scores,
            }
            console.print_json(answer)
        else:
            typer.echo(f"{path}: {saved.classes[label]}")
    console.log(f"{oracle.answers_left:,} answers are left")


def _print_answer(
    path: Path,
    label_and_name: tuple[int, str | None],
    radius: float | None,
    sigma: float | None,
    alpha: float,
    as_json: bool,
) -> None:
    """label_and_name: the label, -1 where there is none, and what its class is called."""
    from dpdist.certification.noise import format_radius

    label, named = label_and_name
    if as_json:
        answer: dict[str, Any] = {"image": str(path), "label": label, "class": named}
        answer["abstain"] = label == -1
        answer |= {"radius": radius, "norm": "l2", "sigma": sigma, "alpha": alpha}
        console.print_json(answer)
    elif label == -1:
        typer.echo(f"{path}: ABSTAIN")
    elif radius is None:
        typer.echo(f"{path}: {named}")
    else:
        typer.echo(f"{path}: {named} (L2 radius {format_radius(radius)})")


def _with_rows(saved: _SavedModel, files: list[Path]) -> _SavedModel:
    """Return the model with its inputs: each row of a table of features is one, FILE:ROW."""
    from dpdist.data.parquet import Columns, read_features

    found: dict[Path, Any] = {}
    for file in files:
        if file.suffix.lower() not in (".csv", ".jsonl", ".parquet"):
            found[file] = None
            continue
        if not (saved.columns and saved.columns.features):
            raise UserError(f"{file}: a table is for models of features; give pictures or arrays")
        columns = Columns(label=saved.columns.label, features=tuple(saved.columns.features))
        rows = read_features(file, columns)
        found |= {Path(f"{file}:{number}"): row for number, row in enumerate(rows)}
    return replace(saved, inputs=found)


def _read_images(saved: _SavedModel, paths: list[Path], shape: tuple[int, ...]) -> list[Tensor]:
    """Return the inputs of some files, each of the model's shape."""
    pictures = [path for path in paths if saved.inputs[path] is None and path.suffix != ".npy"]
    if not saved.bounded and pictures:
        console.log(
            "pictures: numbers of 8 bits are divided by 255; how the script scaled its inputs is "
            "not known here"
        )
    return [_read_image(saved, path, shape) for path in paths]


def _read_image(saved: _SavedModel, path: Path, input_shape: tuple[int, ...]) -> Any:
    """Return the input of a file, or of a row of a table."""
    import numpy as np

    from dpdist.certification.predict import to_model_input
    from dpdist.data.parquet import UnreadableImage, decode_picture

    try:
        if (values := saved.inputs[path]) is not None:
            values = saved.scale(values)
        elif path.suffix == ".npy":
            values = np.load(path, mmap_mode="r", allow_pickle=False)  # its size was not checked
            if values.shape == input_shape and len(input_shape) == 1:
                values = saved.scale(values)
        else:
            values = saved.fit(decode_picture(read_bytes(path, MAX_JSON_BYTES)))
        return to_model_input(values, input_shape, bounded=saved.bounded)
    except UnreadableImage as error:
        raise UserError(f"{path}: not a readable image: {error_text(error)}") from error
    except ValueError as error:
        raise UserError(f"{path}: {error_text(error)}") from error
    except UserError:
        raise
    except Exception as error:  # numpy raises whatever a damaged file leads it to
        raise UserError(f"{path}: not a readable image: {error_text(error)}") from error
