"""Certify test splits (``dpdist certify``), and predict single inputs (``predict``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpdist.cli import importing
from dpdist.cli.options import (
    DEFAULT_RUNS,
    Changes,
    ModelArgument,
    Output,
    PublishableJson,
    Runs,
    Signer,
    TrustFactory,
    changes_by_section,
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
from dpdist.core.fields import Count, Positive, ProcessCount
from dpdist.core.files import (
    MAX_JSON_BYTES,
    check_regular_file,
    error_text,
    quoted,
    read_bytes,
    read_text,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dpdist.certification.certificate import Certificate
    from dpdist.certification.table import CertificateTable
    from dpdist.release.answers import TextAnswerer
    from dpdist.release.bundle import Release
    from dpdist.release.description import ReleasedPictures
    from dpdist.runs.folder import RunFolder
    from dpdist.training.ensembles import QueryOracle


# --- dpdist certify ---------------------------------------------------------------------------


def resolve_settings(
    asked: Mapping[str, Any], default: Certificate | None, model: nn.Module, path: Path
) -> Certificate:
    """Return the requested certificate, with the default's values for other settings.

    Args:
        asked: requested settings by name.
        default: the certificate of the recipe or release.
        model: the model to certify, whose own noise must fit the settings.
        path: its path, for error messages.

    Raises:
        UserError: a setting does not belong to this kind of certificate or model.
    """
    from dpdist.certification.registry import settings_of
    from dpdist.randomness.noise_location import resolve_smoothing_sigma

    sigma = asked.get("sigma")
    if sigma is None and default is not None:
        sigma = default.sigma
    sigma = resolve_smoothing_sigma(model, sigma, path)
    return settings_of({**asked, "sigma": sigma}, default)


_Sigma = Annotated[
    float | None,
    option("Standard deviation of the noise, in input units; like certify.sigma.", Positive),
]
_N = Annotated[int | None, option("Noise samples per input; like certify.n.", Count)]
_Radii = Annotated[
    str | None, option("Radii to report or decide, ascending: 0.25,0.5; like certify.radii.")
]
_Workers = Annotated[
    int | None,
    option("Number of workers (default: all CPUs); like resources.certify_actors.", ProcessCount),
]
_SECTIONS: dict[str, Sequence[str] | None] = {
    "certify": None,
    "attacked": None,
    "resources": ("certify_actors", "certify_gpus"),
    "data": ("root",),
}


def certify_command(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN|RELEASE|TABLE",
            autocompletion=run_names,
            help="A run folder, its name under --runs, its archive's address, a release, or the "
            "folder of a finished table. Omit it with --model.",
        ),
    ] = None,
    changes: Changes = None,
    output: Output = None,
    as_json: PublishableJson = False,
    workers: _Workers = None,
    runs: Runs = DEFAULT_RUNS,
    model: importing.Model = None,
    weights: importing.Weights = None,
    data: importing.Data = None,
    normalize: importing.Normalize = None,
    sigma: _Sigma = None,
    radii: _Radii = None,
    n: _N = None,
    trust_factory: TrustFactory = None,
    signer: Signer = None,
) -> None:
    """Certify the test split on all CPUs; repeat the command to resume.

    Settings are those of the recipe, with the changes of --set: certify.mode=target-radius,
    certify.alpha=0.01, certify.every=20. For a release, the test data that it names are read from
    data.root, and the table is written to --output (default: certificates/NAME/SETTINGS here).

    A model with noise in its first hidden layer is certified with that noise, by expected scores;
    with --sigma, its inputs are smoothed too, and both noises add in quadrature. A model with noise
    on its input is smoothed by that noise, unless you give --sigma; noise in later layers is
    sampled with it.

    With --model, --weights and --data, a model that was trained elsewhere is first imported, like
    with `dpdist import`, into a run named like the file of weights.

    For a TABLE, the stored counts are certified again without the model, with a different error:
    give --set certify.alpha=A. With --set attacked.attack=pgd and --set attacked.size=0.1, attacked
    copies of the inputs are certified, as papers do; this does not certify the clean inputs.
    """
    asked = changes_by_section(changes, _SECTIONS)
    given = {"sigma": sigma, "n": n, "radii": parse_numbers(radii, "--radii")}
    asked["certify"] |= {key: value for key, value in given.items() if value is not None}
    if workers is not None:
        asked["resources"]["certify_actors"] = workers
    foreign = {"weights": weights, "data": data, "normalize": normalize}
    if model is not None:
        if run is not None:
            raise UserError(f"RUN: must be left out with --model, got {run}")
        run = str(_imported(model, foreign, asked, runs).path)
    elif stray := [f"--{key}" for key, value in foreign.items() if value]:
        raise UserError(f"{', '.join(stray)}: must be left out without --model")
    elif run is None:
        raise UserError(
            "RUN: must be a run or a release; for a model that was trained elsewhere, give --model,"
            " --weights and --data"
        )
    measured: list[tuple[str, str]] = []
    if (table := _table_folder(run)) is not None:
        found, name = _recertified(table, asked), table.resolve().parent.parent.name
    elif (release := open_release_if_any(run, trust_factory, signer)) is not None:
        found, name = _certify_release(release, asked, output), release.name
    else:
        found, name, measured = _certify_run(run, runs, asked, output)
    _print_table(name, found, measured, as_json)


def _imported(
    model: str, foreign: dict[str, Any], asked: dict[str, dict[str, Any]], runs: Path
) -> RunFolder:
    """Import a model that was trained elsewhere, and return its run. Raises UserError."""
    from dpdist.runs.folder import RunFolder

    if foreign["data"] is None:
        raise UserError("--data: must be given with --model: the test inputs to certify")
    if asked["certify"].get("sigma") is None:
        raise UserError("--sigma: must be given with --model: the noise on its input")
    source = foreign["weights"] or Path(model.rpartition(":")[2])
    folder, root = RunFolder(runs / source.stem), asked["data"].pop("root", None)
    kept = ("sigma", "n", "n0", "alpha")
    chosen = {key: value for key, value in asked["certify"].items() if key in kept}
    moments = importing.normalization(foreign["normalize"])
    importing.imported(
        folder,
        (model, foreign["weights"], {}, None, None, *moments),
        (foreign["data"], None if root is None else Path(root), None),
        chosen,
    )
    return folder


def _certify_release(
    release: Release, asked: dict[str, dict[str, Any]], output: Path | None
) -> CertificateTable:
    """Certify the test split that a release names, with the requested changes of its settings."""
    from dpdist import data, pipeline
    from dpdist.certification.job import certify
    from dpdist.certifying import parse_resources
    from dpdist.cluster.versions import PACKAGES
    from dpdist.training.records import data_source_under

    if asked["attacked"]:
        raise UserError("--set attacked: must be left out with a release; it needs a run")
    resources = parse_resources(asked["resources"])
    root = asked["data"].get("root")
    source = data_source_under(release.description.data, None if root is None else Path(root))
    subject, dataset = release.subject, data.load(source, "test")
    default = release.description.certificate
    settings = resolve_settings(asked["certify"], default, subject.model, release.path)
    output = output or Path("certificates", release.name, settings.folder_name)
    if release.path.resolve() in (output.resolve(), *output.resolve().parents):
        raise UserError(f"--output: must be outside of the release, got {output}")
    output.parent.mkdir(parents=True, exist_ok=True)
    log_file = output.parent / "ray.log"
    with pipeline.run_session(log_file, executor=executor_name()) as executor:
        executor.check_nodes(PACKAGES, output.parent.resolve())
        with console.progress(f"certifying, {settings.folder_name}", "inputs", "samples") as show:
            return certify(
                subject,
                dataset,
                settings,
                output,
                actors=resources.certify_actors,
                gpus=resources.certify_gpus,
                progress=show,
                log=console.log,
            )


def _certify_run(
    run: str, runs: Path, asked: dict[str, dict[str, Any]], output: Path | None
) -> tuple[CertificateTable, str, list[tuple[str, str]]]:
    """Return the table of a run, the run's name, and the results on attacked copies."""
    from dpdist.certification.registry import settings_of
    from dpdist.runs.archive import open_run_or_archive

    folder = open_run_or_archive(run, runs)
    folder.require_trained()
    console.log(f"certifying: {folder.path}")  # before torch and Ray, which load slowly
    changes = {
        f"{section}.{key}": value
        for section in ("resources", "data")
        for key, value in asked[section].items()
    }
    recipe = load_trained_recipe(folder, "certify", changes)
    default = None if recipe.certify is None else recipe.certify.sigma
    if asked["certify"].get("sigma", default) is not None:
        settings_of(asked["certify"], recipe.certify)  # to fail before torch is loaded
    from dpdist import pipeline
    from dpdist.evaluation import load_subject

    subject = load_subject(recipe, folder)
    settings = resolve_settings(asked["certify"], recipe.certify, subject.model, folder.path)
    pipeline.require_certifying_gpus(recipe)
    copies, measured = None, []
    if asked["attacked"]:
        from dpdist.attacks.attacked_copies import AttackedCopies, AttackedCopiesSpec
        from dpdist.runs.recipe import parse_section
        from dpdist.training.records import data_source, load_test_records

        at = parse_section(AttackedCopiesSpec, asked["attacked"], "attacked")
        test = load_test_records(recipe, data_source(recipe))
        copies = AttackedCopies(at, test, subject.model, settings)
        output = output or folder.path / "attacks" / f"{at.folder_name}-{settings.folder_name}"
    with pipeline.run_session(folder, executor=executor_name()):
        found = pipeline.certify_stage(
            recipe, folder, settings, output, subject=subject, inputs=copies
        )
    if copies is not None:
        from dpdist.certification.table_reader import read

        clean = folder.certificates / settings.folder_name / "certificates.parquet"
        measured = [
            ("inputs", f"{len(found.index):,}"),
            *copies.summary_rows(found, read(clean) if clean.is_file() else None),
            ("table", str(found.path)),
        ]
    if folder.archive.exists():
        pipeline.archive_stage(folder)
    return found, folder.name, measured


def _table_folder(named: str) -> Path | None:
    """Return the folder of a finished table; None for other paths."""
    from dpdist.release.files import is_release

    path = Path(named)
    folder = path.parent if path.name == "certificates.parquet" else path
    is_table = (folder / "certificates.parquet").is_file() and not is_release(folder)
    return folder if is_table else None


def _recertified(folder: Path, asked: dict[str, dict[str, Any]]) -> CertificateTable:
    """Certify the counts of a table with a different error, in a new folder next to it.

    Raises UserError.
    """
    from dpdist.certification import table as tables
    from dpdist.certification.table_reader import read, recertify
    from dpdist.cluster.job_folder import SETTINGS
    from dpdist.runs.folder import RunFolder

    alpha = asked["certify"].pop("alpha", None)
    if any(asked.values()) or not isinstance(alpha, float):
        raise UserError(
            f"{folder}: a table can only be certified again with a different error: give only "
            "--set certify.alpha=A, with A between 0 and 1"
        )
    table = recertify(tables.read(folder / tables.TABLE), alpha)
    new = folder.with_name(f"{folder.name}-alpha-{alpha:g}")
    if (new / SETTINGS).exists():
        raise UserError(f"{new}: already contains a certification; choose a different alpha")
    tables.write(table, new / tables.TABLE)
    run = RunFolder(folder.parent.parent)
    if run.archive.exists():
        from dpdist import pipeline

        pipeline.archive_stage(run)
    return read(new / tables.TABLE)


def _print_table(
    name: str, table: CertificateTable, measured: list[tuple[str, str]], as_json: bool
) -> None:
    """Print the certificates of a table, or the results on attacked copies (`measured`)."""
    if as_json:
        from dpdist.reports.export import table_as_json

        found = [] if measured else [table_as_json(table)]
        at = {"at_attacked_copies": dict(measured)} if measured else {}
        console.print_json({"run": name, "certificates": found, **at})
    elif measured:
        from dpdist.attacks.attacked_copies import DISCLAIMER

        typer.echo(console.format_table(measured, title=DISCLAIMER))
    else:
        from dpdist.certification.statistics import table_rows

        rows = [*table_rows(table), console.Row("table", str(table.path))]
        typer.echo(console.format_table(rows, title=f"Certificates {table.name} of {name}"))


# --- dpdist predict ---------------------------------------------------------------------------


DEFAULT_DRAWS, DEFAULT_ALPHA = 10_000, 0.001
_Inputs = Annotated[
    list[Path] | None,
    typer.Argument(
        callback=path_callback(),
        metavar="[FILE]...",
        help="Image files, .npy arrays of the model's input shape, tables of features with one "
        "input per row (.csv, .jsonl, .parquet), or files with one text each. With --to, files "
        "with one prompt per line (.jsonl: texts or messages).",
    ),
]
_Texts = Annotated[
    list[str] | None,
    option("An input text. You can repeat it.", None, "--text", metavar="TEXT"),
]
_LabelOnly = Annotated[
    bool, flag("--label-only", "Decide only the label, by a two-sided test, without a radius.")
]
_PredictAsJson = Annotated[bool, flag("--json", "Print one JSON object per input.")]
_To = Annotated[
    Path | None,
    path_option(
        "Sample texts from a released language model into this new folder, with its privacy card.",
        metavar="FOLDER",
    ),
]


def predict_command(
    run: ModelArgument,
    files: _Inputs = None,
    texts: _Texts = None,
    changes: Changes = None,
    label_only: _LabelOnly = False,
    to: _To = None,
    as_json: _PredictAsJson = False,
    runs: Runs = DEFAULT_RUNS,
    trust_factory: TrustFactory = None,
    signer: Signer = None,
) -> None:
    """Predict on this machine with the model of a run or a release: labels of images or rows.

    If the recipe certifies, each answer uses fresh secret noise and has a certified radius; change
    the noise by --set certify.sigma=S, certify.n=N and certify.alpha=A. Otherwise the answer is the
    probabilities of the classes. A model of texts answers with probabilities of labels or of next
    tokens.

    With --to, a released language model continues the prompts, which adds nothing to epsilon: it
    writes --set sampling.count=N texts per prompt; you can also set sampling.max_tokens,
    sampling.temperature (0: the most probable token) and sampling.seed. The folder has the texts,
    the release's privacy card, and a page about the limits of the card.
    """
    from dpdist.runs.folder import open_run

    sections = {
        "certify": ("sigma", "n", "alpha"),
        "sampling": ("count", "max_tokens", "temperature", "seed"),
    }
    asked = changes_by_section(changes, sections)
    release = open_release_if_any(run, trust_factory, signer, labeled=False, numeric=False)
    for path in files or ():
        check_regular_file(path)
    given = {key: value for key, value in asked["certify"].items() if value is not None}
    if to is not None:
        _write_texts(run, release, files or [], texts, asked["sampling"], to)
        return
    recipe = None
    if release is not None:
        saved = _saved_release(release)
    else:
        folder = open_run(run, runs)
        folder.require_trained()
        recipe = folder.read_recipe()
        saved = _saved_run(folder, recipe)
    tokens, targets = saved.tokens, saved.targets
    _require_inputs(files, texts, tokens or saved.counts_words, saved.path)
    if tokens:
        answerer = release.text_answerer if release is not None else _text_answerer(recipe, saved)
        _answer_texts(answerer, targets, _documents(files, texts), as_json)
        return
    given_inputs = [*(files or ()), *(texts or ())]
    if targets != "class":
        _tell_values(saved, given_inputs, as_json)
        return
    if recipe is not None and recipe.method.capabilities.not_releasable_reason is not None:
        from dpdist.training.ensembles import QueryOracle

        if given or label_only:  # before an answer of the budget is used
            raise UserError(
                "--set certify, --label-only: must be left out: the answers of this run have no "
                "certificate"
            )
        _predict_with_paid_answers(QueryOracle(recipe, folder), saved, given_inputs, as_json)
        return
    _predict_smoothed(saved, given_inputs, given, label_only, as_json)


def _write_texts(
    run: str,
    release: Release | None,
    files: Sequence[Path],
    texts: list[str] | None,
    sampling: dict[str, Any],
    to: Path,
) -> None:
    """Sample texts from a release into a new folder. Raises UserError."""
    import secrets

    from dpdist.release.generation import PAGE, Sampling, parse_prompts, write_texts
    from dpdist.runs.recipe import parse_section

    if release is None:
        raise UserError(
            f"--to: must be given a release, got the run {run}; write one with `dpdist release`"
        )
    prompts = [*(texts or ())]
    for path in files:
        prompts += parse_prompts(read_text(path), path)
    usual = {"count": 1, "max_tokens": 100, "temperature": 1.0, "seed": secrets.randbits(32)}
    how = parse_section(Sampling, usual | sampling, "sampling")
    folder = write_texts(release, prompts or [""], how, to)
    console.log(f"{folder / PAGE}: describes the guarantee and its limits")
    typer.echo(str(folder))


def _text_answerer(recipe: Any, saved: _SavedModel) -> TextAnswerer:
    """Return the answerer of a run of texts. Raises UserError if its model must not be used."""
    from dpdist.release.answers import TextAnswerer
    from dpdist.training.records import data_source

    if recipe.method.capabilities.not_releasable_reason is not None:
        raise UserError(f"{saved.path}: {recipe.method.capabilities.not_releasable_reason}")
    column = data_source(recipe).columns.text
    assert column is not None
    return TextAnswerer(saved.load_model(), column, saved.classes, recipe.data.targets)


def _require_inputs(
    files: list[Path] | None, texts: list[str] | None, tokens: bool, where: Path
) -> None:
    """Raise UserError without inputs, or for texts if the model does not read texts."""
    if texts and not tokens:
        raise UserError(
            f"--text: must be left out: {where} reads columns or images; give a file with them"
        )
    if not files and not texts:
        wanted = "--text, or files of texts" if tokens else "image files or .npy arrays"
        raise UserError(f"FILE: must be given: {wanted}")


def _documents(files: list[Path] | None, texts: list[str] | None) -> list[tuple[str, str]]:
    """Return name and text of each file, without a final line feed, and of each given text."""
    documents = [(str(path), read_text(path).removesuffix("\n")) for path in files or ()]
    return documents + [(quoted(text), text) for text in texts or ()]


def _answer_texts(
    answerer: TextAnswerer, targets: str, documents: list[tuple[str, str]], as_json: bool
) -> None:
    column = answerer.column
    shown: Callable[[str], str] = str
    if column.predicts_next_token and column.tokenizer is not None:
        shown = repr  # some tokens differ only by a space
    for name, text in documents:
        answer = answerer(text)
        if as_json:
            console.print_json({"text": name} | answer.as_json)
        elif targets == "class":
            shares = [f"{shown(each)} {format_percent(p)} %" for each, p in answer.likely]
            typer.echo(f"{name}: {', '.join(shares) or _NOT_FINITE}")
        else:
            values = answer.outputs
            if targets == "labels":
                values = tuple(float(value > 0) for value in values)
            typer.echo(f"{name}: {' '.join(f'{value:.6g}' for value in values)}")


_NOT_FINITE = "no answer: its scores are not finite"
_SHOWN = 5  # most probable classes


@dataclass(frozen=True)
class _SavedModel:
    """A model of a run or release, with what `dpdist predict` needs to know about it."""

    path: Path
    certificate: Certificate | None
    classes: tuple[str, ...]
    targets: str
    tokens: bool  # whether it reads texts
    load_model: Callable[[], nn.Module]
    pictures: ReleasedPictures | None  # how images are resized; None: they are not
    bounded: bool  # whether inputs are in [0, 1]
    columns: Any  # names of the features of a table

    @property
    def counts_words(self) -> bool:
        """Return whether its only feature is a text, whose words are counted."""
        rules = [*self.columns.feature_rules.values()]
        return len(rules) == 1 and bool(rules[0].text)


def _saved_release(release: Release) -> _SavedModel:
    about = release.description
    release.require_single_input()
    return _SavedModel(
        path=release.path,
        certificate=about.certificate,
        classes=about.classes,
        targets=about.data.targets,
        tokens=about.tokens,
        load_model=lambda: release.model,
        pictures=about.pictures,
        bounded=not about.raw_inputs,
        columns=about.data.columns,
    )


def _saved_run(folder: RunFolder, recipe: Any) -> _SavedModel:
    from dpdist import models
    from dpdist.core.files import read_json
    from dpdist.evaluation import load_model  # after the checks, since it loads torch
    from dpdist.release.bundle import refuse_fields
    from dpdist.release.description import ReleasedPictures

    if recipe.by_script is not None:  # no recipe's model reads several inputs
        refuse_fields(models.read_spec(folder.model_folder), folder.model_folder)
    data, pictures = recipe.data, None
    if recipe.method.capabilities.picture_preparation:  # of a model from elsewhere
        imported = read_json(folder.imported, {"data": dict})["data"]
        pictures = ReleasedPictures(resize=imported["resize"])
    return _SavedModel(
        path=folder.model_folder,
        certificate=recipe.certify,
        classes=tuple(data.class_names),
        targets=data.targets,
        tokens=data.text is not None,
        load_model=lambda: load_model(recipe, folder),
        pictures=pictures,
        bounded=recipe.by_script is None,
        columns=data.columns,
    )


def _predict_smoothed(
    saved: _SavedModel,
    files: Sequence[Path | str],
    given: dict[str, Any],
    label_only: bool,
    as_json: bool,
) -> None:
    """Print label and radius of inputs; only the label of a model without noise."""
    from dpdist import models

    options = {"n": DEFAULT_DRAWS, "alpha": DEFAULT_ALPHA} | given
    spec = models.read_spec(saved.path)
    inputs = _read_inputs(saved, files, spec.input_shape)
    console.log(f"{saved.path}: loading the model")
    from dpdist.certification.noise import format_radius
    from dpdist.certification.predict import Predictor
    from dpdist.certification.registry import settings_of
    from dpdist.randomness.noise_location import find_noise_location, resolve_smoothing_sigma

    model, sigma = saved.load_model(), given.get("sigma")
    if sigma is None and saved.certificate is not None:
        sigma = saved.certificate.sigma
    if sigma is None and not (given or label_only or find_noise_location(model).is_random):
        _tell_plain_labels(saved, model, inputs, as_json)
        return
    sigma = resolve_smoothing_sigma(model, sigma, saved.path)
    settings = settings_of(options | {"sigma": sigma})
    try:
        predictor = Predictor(model, settings, spec.classes, spec.input_shape)
    except ValueError as error:
        raise UserError(f"{saved.path}: the model cannot be certified: {error}") from error
    for name, x in inputs:
        if label_only:
            label, radius = predictor.predict(x), None
        else:
            with console.progress(Path(name).name, "blocks of samples") as show:
                verdict = predictor.certify(x, show)
            label, radius = verdict.prediction, verdict.radius
        text = "ABSTAIN" if label == -1 else saved.classes[label]
        if label != -1 and radius is not None:
            text += f" (L2 radius {format_radius(radius)})"
        certified = {"radius": radius, "norm": "l2", "sigma": sigma, "alpha": settings.alpha}
        more = {"abstain": label == -1, **certified}
        _print_label(name, saved.classes, label, more, text, as_json)


def _plain_outputs(model: nn.Module, inputs: list[tuple[str, Tensor]]) -> Tensor:
    """Return the outputs of a model without noise."""
    import torch

    with torch.inference_mode():
        outputs: Tensor = model(torch.stack([x for _, x in inputs]))
        return outputs


def _tell_values(saved: _SavedModel, files: Sequence[Path | str], as_json: bool) -> None:
    """Print the outputs of a model of numbers, or which labels of a model of labels are 1."""
    from dpdist import models

    inputs = _read_inputs(saved, files, models.read_spec(saved.path).input_shape)
    low, high = saved.columns.target_range
    outputs = (low + (high - low) * _plain_outputs(saved.load_model(), inputs).double()).tolist()
    for (name, _), values in zip(inputs, outputs, strict=True):
        answer = values if saved.targets == "number" else [int(value > 0) for value in values]
        if as_json:
            console.print_json({"image": name, saved.targets: answer, "outputs": values})
        else:
            typer.echo(f"{name}: {' '.join(f'{value:.6g}' for value in answer)}")


def _tell_plain_labels(
    saved: _SavedModel, model: nn.Module, inputs: list[tuple[str, Tensor]], as_json: bool
) -> None:
    """Print the probabilities of a model without noise, and that they are not certified."""
    from dpdist import models

    console.log(
        f"{saved.path}: predictions without noise and without a certificate; to certify, use --set "
        "certify.sigma=S"
    )
    outputs = _plain_outputs(model, inputs)
    labels = models.predicted_classes(outputs).tolist()
    for (name, _), label, shares in zip(inputs, labels, outputs.double().softmax(1), strict=True):
        likely = sorted(zip(shares.tolist(), saved.classes, strict=True), reverse=True)
        named = ", ".join(f"{each} {format_percent(p)} %" for p, each in likely[:_SHOWN])
        text = _NOT_FINITE if label == -1 else named
        uncertified = {"radius": None, "norm": None, "sigma": None, "alpha": None}
        more = {"abstain": label == -1, **uncertified, "certified": False}
        if label != -1:
            more["probabilities"] = {each: p for p, each in likely}
        _print_label(name, saved.classes, label, more, f"{text} (no certificate)", as_json)


def _predict_with_paid_answers(
    oracle: QueryOracle, saved: _SavedModel, files: Sequence[Path | str], as_json: bool
) -> None:
    """Print answers that use the run's budget; repeated images get their previous answer."""
    import torch

    inputs = _read_inputs(saved, files, oracle.input_shape)
    answers = oracle(torch.stack([x for _, x in inputs])).tolist()
    for (name, _), scores in zip(inputs, answers, strict=True):
        label = scores.index(max(scores))
        _print_label(name, saved.classes, label, {"scores": scores}, saved.classes[label], as_json)
    console.log(f"{oracle.answers_left:,} answers are left")


def _print_label(
    name: str, classes: Sequence[str], label: int, more: dict[str, Any], text: str, as_json: bool
) -> None:
    """Print an input's answer: as JSON, with `more` keys, or as `text`. label: -1 without one."""
    if as_json:
        named = None if label == -1 else classes[label]
        console.print_json({"image": name, "label": label, "class": named, **more})
    else:
        typer.echo(f"{name}: {text}")


_TABLES = (".csv", ".jsonl", ".parquet")


def _read_inputs(
    saved: _SavedModel, given: Sequence[Path | str], shape: tuple[int, ...]
) -> list[tuple[str, Tensor]]:
    """Return name and input of each file or text; for a table, those of each row (FILE:ROW)."""
    from dpdist.certification.predict import to_model_input

    files = [each for each in given if isinstance(each, Path)]
    if not saved.bounded and any(file.suffix not in (*_TABLES, ".npy") for file in files):
        console.log(
            "images: pixels are divided by 255; check that this is how your script scaled its "
            "inputs, which dpdist does not know"
        )
    if saved.pictures is not None:
        console.log(f"{saved.pictures.describe(shape)}, as the test inputs were")
    inputs = []
    for file in given:
        try:
            if isinstance(file, str):
                rows = [(quoted(file), _transformed(saved, file))]
            elif file.suffix.lower() in _TABLES:
                rows = _read_rows(saved, file, shape)
            else:
                rows = [(str(file), _read_array(saved, file, shape))]
            inputs += [(n, to_model_input(x, shape, bounded=saved.bounded)) for n, x in rows]
        except ValueError as error:
            raise UserError(f"{file}: {error_text(error)}") from error
    return inputs


def _read_rows(saved: _SavedModel, file: Path, shape: tuple[int, ...]) -> list[tuple[str, Any]]:
    """Return name and values of each row of a table of features."""
    from dpdist.data.discovery import feature_columns
    from dpdist.data.parquet import Columns, read_features
    from dpdist.data.tables import open_table

    label, features = saved.columns.label, tuple(saved.columns.features)
    if not features and not saved.bounded and len(shape) == 1:  # a script's, without names
        features = feature_columns(open_table(file), label)
        console.log(
            f"{file}: its columns of numbers, except {label!r}, are the inputs in their order; "
            "check that your script had this order and scaling, which dpdist does not know"
        )
    if not features:
        raise UserError(f"{file}: must be an image or an array: the model does not read features")
    columns = Columns(
        label=label,
        features=features,
        preprocessing=tuple(saved.columns.preprocessing.items()),
    )
    return [(f"{file}:{number}", row) for number, row in enumerate(read_features(file, columns))]


def _read_array(saved: _SavedModel, file: Path, shape: tuple[int, ...]) -> Any:
    """Return the values of an array file, or of an image."""
    import numpy as np

    from dpdist.data.parquet import decode_picture

    try:
        if saved.counts_words and file.suffix != ".npy":
            return _transformed(saved, read_text(file).removesuffix("\n"))
        if file.suffix != ".npy":
            pixels = decode_picture(read_bytes(file, MAX_JSON_BYTES))
            return pixels if saved.pictures is None else saved.pictures.fit(pixels, shape)
        values = np.load(file, mmap_mode="r", allow_pickle=False)  # mapped, as it may be large
    except UserError:
        raise
    except Exception as error:  # numpy raises many types for damaged files
        raise UserError(f"{file}: is not a readable image: {error_text(error)}") from error
    return _transformed(saved, values)


def _transformed(saved: _SavedModel, record: Any) -> Any:
    """Return the inputs of a record's raw values by the model's preprocessing, if it has any."""
    from dpdist.data.preprocessing import Preprocessing

    rules = saved.columns.feature_rules
    return Preprocessing(rules).transform_record(record) if rules else record
