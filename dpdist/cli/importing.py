"""Import existing models as runs (``dpdist import``); `dpdist certify --model` does so too."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpdist.cli.options import (
    DEFAULT_RUNS,
    Runs,
    changes_by_section,
    field_callback,
    option,
    parse_numbers,
    path_option,
    run_names,
)
from dpdist.core import console
from dpdist.core.errors import UserError
from dpdist.core.fields import Count, Finite, Positive, RunName, Text

if TYPE_CHECKING:
    from dpdist.runs.folder import RunFolder
    from dpdist.runs.recipe import Recipe

Model = Annotated[
    str | None,
    option(
        "Network that was trained elsewhere: package.module:factory, torchvision:NAME, timm:NAME, "
        "or the name of a network of dpdist. The factory is imported and executed.",
        metavar="PACKAGE.MODULE:FACTORY",
    ),
]
Weights = Annotated[
    Path | None, path_option("Its state dict: .pt, .pth or .safetensors.", metavar="FILE")
]
Input = Annotated[
    str | None,
    option("Shape of one input, such as 3,32,32 (default: that of the data).", metavar="C,H,W"),
]
Normalize = Annotated[
    str | None,
    option(
        "Normalization of inputs, which becomes part of the model: noise and radii apply to "
        "unnormalized inputs.",
        metavar="MEAN/STD",
    ),
]
Data = Annotated[
    str | None,
    option(
        "Test inputs: a Parquet file, a folder of Parquet files or of CLASS/*.png, or the name of "
        "a data set.",
        metavar="DIR|PARQUET|NAME",
    ),
]
Resize = Annotated[
    int | None,
    option("Resize images to this shorter side, and crop their center to --input.", Count),
]
_Run = Annotated[
    str | None,
    option(
        "Instead of --model: a run whose trained part to combine with a denoiser or classifier; it "
        "adds nothing to epsilon.",
        autocompletion=run_names,
        metavar="RUN",
    ),
]
_Classifier = Annotated[
    Path | None, path_option("Model folder of a classifier, for the outputs of --run's denoiser.")
]
_Denoiser = Annotated[
    Path | None, path_option("Model folder of a denoiser, for the inputs of --run's classifier.")
]
_PretrainingData = Annotated[
    str | None, option("Training data of that model folder, if it does not state them.", Text)
]
_Set = Annotated[
    list[str] | None,
    option(
        "Set an argument of the factory, model.options.KEY=VALUE, or a key of the run, such as "
        "certify.sigma=0.25 or data.root=DIR. You can repeat it.",
        None,
        "--set",
        metavar="KEY=VALUE",
    ),
]


def import_command(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", callback=field_callback(RunName), help="Name of the new run."
        ),
    ],
    model: Model = None,
    weights: Weights = None,
    changes: _Set = None,
    input: Input = None,
    normalize: Normalize = None,
    data: Data = None,
    resize: Resize = None,
    run: _Run = None,
    classifier: _Classifier = None,
    denoiser: _Denoiser = None,
    pretraining_data: _PretrainingData = None,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Import an existing model as a run, to certify, attack, compare and release it.

    The training of a model from elsewhere is unknown, so the run shows "not trained by dpdist: no
    epsilon" instead of an epsilon. BatchNorm uses its stored statistics, and dropout is off. Only
    tensors are unpickled from files of weights.

    With --run and --classifier or --denoiser, the new run combines a denoiser and a classifier, one
    of which is that of the run; its privacy card states the training data of both parts.
    """
    from dpdist.runs.folder import RunFolder

    folder = RunFolder(runs / name)
    asked = changes_by_section(changes, {"model": None, "certify": None, "data": ("root",)})
    if wrong := [key for key in asked["model"] if not key.startswith("options.")]:
        raise UserError(f"--set model.{wrong[0]}: must be model.options.KEY")
    root = asked["data"].get("root")
    data_root = None if root is None else Path(root)
    if any(given is not None for given in (run, classifier, denoiser)):
        _join(run, runs, classifier, denoiser, folder, pretraining_data, data_root)
        return
    given = {"model": model, "data": data}
    if missing := [f"--{key}" for key, value in given.items() if value is None]:
        raise UserError(f"{', '.join(missing)}: must be given without --run")
    assert model is not None and data is not None
    options = {key.removeprefix("options."): value for key, value in asked["model"].items()}
    sizes = parse_numbers(input, "--input", Count)
    shape = None if sizes is None else tuple(map(int, sizes))
    imported(
        folder,
        (model, weights, options, shape, None, *normalization(normalize)),
        (data, data_root, resize),
        asked["certify"] or None,
    )
    from dpdist.evaluation import evaluate_stage
    from dpdist.reports.results import load_results

    recipe = folder.read_recipe()
    console.log(f"evaluating: clean accuracy on {recipe.data.name}")
    evaluate_stage(recipe, folder)
    typer.echo(str(load_results(folder)))
    sigma_of = "" if "sigma" in asked["certify"] else " --sigma 0.25"
    typer.echo(f"next: dpdist certify {folder.path}{sigma_of} --n 10000 --set certify.every=20")


def _join(
    run: str | None,
    runs: Path,
    classifier: Path | None,
    denoiser: Path | None,
    target: RunFolder,
    pretraining_data: str | None,
    data_root: Path | None,
) -> None:
    """Combine a denoiser and a classifier, one of which is a run's, in a new run folder."""
    other = denoiser if classifier is None else classifier
    if run is None or other is None or (classifier is not None and denoiser is not None):
        raise UserError("--run: must be given with exactly one of --classifier and --denoiser")
    from dpdist.evaluation import evaluate_stage
    from dpdist.reports.results import load_results
    from dpdist.runs.folder import open_run
    from dpdist.training.pretraining import Part, join_parts

    part: Part = "denoiser" if classifier is None else "classifier"
    folder = join_parts(
        open_run(run, runs),
        part,
        other,
        target,
        pretraining_data=pretraining_data,
        data_root=data_root,
    )
    evaluate_stage(folder.read_recipe(), folder)
    typer.echo(str(load_results(folder)))


def imported(
    folder: RunFolder,
    model: tuple[Any, ...],
    data: tuple[str, Path | None, int | None],
    certify: dict[str, Any] | None,
) -> Recipe:
    """Import a model into a run folder, and return the run's recipe.

    model, data: fields of `ForeignModel` and `TestData`. Raises UserError.
    """
    console.log(f"importing: {model[0]} into {folder.path}")
    from dpdist.importing import ForeignModel, TestData, import_model  # loads torch

    recipe = import_model(ForeignModel(*model), TestData(*data), folder, certify=certify)
    console.log(f"importing: {folder.path}: {recipe.method.describe(folder.read_plan())}")
    return recipe


def normalization(text: str | None) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per channel, given as "0.49,0.48,0.45/0.2,0.2,0.2"."""
    if text is None:
        return (), ()
    parts = text.split("/")
    if len(parts) != 2:
        raise UserError(
            "--normalize: must be MEAN/STD, each with one number per channel or one for all, such "
            f"as 0.485,0.456,0.406/0.229,0.224,0.225, got {text!r}"
        )
    kinds = (Finite, Positive)
    mean, std = (parse_numbers(p, "--normalize", k) for p, k in zip(parts, kinds, strict=True))
    assert mean is not None and std is not None
    return mean, std
