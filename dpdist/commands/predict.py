"""dpdist predict: label or ABSTAIN, with a certified radius, for single images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field

from dpdist.base import console
from dpdist.base.errors import UserError
from dpdist.base.fields import Number, Positive, Probability
from dpdist.base.reading import MOST_BYTES, read_bytes, reason, regular_file
from dpdist.commands.options import (
    RUNS,
    ModelArgument,
    Runs,
    Signer,
    TrustFactory,
    file_path,
    flag,
    need_numbers,
    option,
    release_at,
)

if TYPE_CHECKING:
    from torch import nn

    from dpdist.certification.certificate import Certificate
    from dpdist.training.answering import Oracle

DRAWS, ALPHA = 10_000, 0.001  # by default
Draws = Annotated[int, Number, Field(ge=1, le=10_000_000)]  # one process makes them
_Images = Annotated[
    list[Path],
    typer.Argument(
        callback=file_path(), help="Image files, or .npy arrays of the model's input shape."
    ),
]
_Sigma = Annotated[float | None, option("Noise, in input units (default: the recipe's).", Positive)]
_N = Annotated[int | None, option(f"Draws per image ({DRAWS:,}).", Draws)]
_Alpha = Annotated[float | None, option(f"Error of each answer ({ALPHA:g}).", Probability)]
_LabelOnly = Annotated[bool, flag("--label-only", "No radius: the two-sided test of the label.")]
_AsJson = Annotated[bool, flag("--json", "One JSON object for each image.")]


def command(
    run: ModelArgument,
    images: _Images,
    runs: Runs = RUNS,
    sigma: _Sigma = None,
    n: _N = None,
    alpha: _Alpha = None,
    label_only: _LabelOnly = False,
    as_json: _AsJson = False,
    trust_factory: TrustFactory = None,
    signer: Signer = None,
) -> None:
    """Predict with fresh secret noise, on this machine, by a run's model or a released one."""
    from dpdist.runs.folder import open_run

    release = release_at(run, trust_factory, signer)
    if release is not None:
        about = release.about
        saved = _Saved(release.path, about.certificate, about.classes, lambda: release.model)
    else:
        folder = open_run(run, runs)
        folder.require_trained()
        recipe = folder.read_recipe()
        need_numbers(recipe, "predict")
        from dpdist.evaluation import load_model  # only now: what is refused needs no data

        names = tuple(recipe.data.class_names)
        saved = _Saved(folder.model, recipe.certify, names, lambda: load_model(recipe, folder))
    for path in images:
        regular_file(path)
    if release is None and recipe.method.withheld is not None:
        given = {"sigma": sigma, "n": n, "alpha": alpha, "label-only": label_only or None}
        if useless := [f"--{name}" for name, value in given.items() if value is not None]:
            raise UserError(
                f"{', '.join(useless)}: must be left out: this run's answers are paid for, and are "
                "not smoothed"
            )
        from dpdist.training.answering import Oracle

        _ask(Oracle(recipe, folder), images, saved.classes, as_json)
        return
    asked = {"sigma": sigma, "n": n or DRAWS, "alpha": alpha or ALPHA}
    _smoothed(saved, images, asked, label_only, as_json)


@dataclass(frozen=True)
class _Saved:
    """Where a model lies, how it is meant to be certified, names of its classes, and the model."""

    where: Path
    certify: Certificate | None
    classes: tuple[str, ...]
    load: Callable[[], nn.Module]


def _smoothed(
    saved: _Saved, images: list[Path], given: dict[str, Any], label_only: bool, as_json: bool
) -> None:
    from dpdist import models

    spec = models.read_spec(saved.where)
    inputs = [_read(path, spec.input_shape) for path in images]
    console.say(f"{saved.where}: loading the model")
    from dpdist.certification.catalogue import settings_of
    from dpdist.certification.predict import Predictor
    from dpdist.randomness.places import smoothing_of

    model, sigma = saved.load(), given["sigma"]
    if sigma is None and saved.certify is not None:
        sigma = saved.certify.sigma
    sigma = smoothing_of(model, sigma, saved.where)
    settings = settings_of(given | {"sigma": sigma})
    try:
        predictor = Predictor(model, settings, spec.classes, spec.input_shape)
    except ValueError as error:
        raise UserError(f"{saved.where}: the model cannot be certified: {error}") from error
    for path, x in zip(images, inputs, strict=True):
        if label_only:
            label, radius = predictor.label(x), None
        else:
            with console.progress(path.name, "blocks of draws") as show:
                verdict = predictor.certify(x, show)
            label, radius = verdict.prediction, verdict.radius
        named = None if label == -1 else saved.classes[label]
        _print(path, (label, named), radius, sigma, settings.alpha, as_json)


def _ask(oracle: Oracle, images: list[Path], classes: tuple[str, ...], as_json: bool) -> None:
    """Answers that are paid for, each counted; an image answered before is answered so again."""
    import torch

    inputs = torch.stack([_read(path, oracle.input_shape) for path in images])
    for path, scores in zip(images, oracle(inputs).tolist(), strict=True):
        label = scores.index(max(scores))
        if as_json:
            answer = {"image": str(path), "label": label, "class": classes[label], "scores": scores}
            console.print_json(answer)
        else:
            typer.echo(f"{path}: {classes[label]}")
    console.say(f"{oracle.left:,} answers are left")


def _print(
    path: Path,
    found: tuple[int, str | None],
    radius: float | None,
    sigma: float | None,
    alpha: float,
    as_json: bool,
) -> None:
    """found: the label, -1 where there is none, and what its class is called."""
    from dpdist.certification.radii import format_radius

    label, named = found
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


def _read(path: Path, input_shape: tuple[int, ...]) -> Any:
    import numpy as np

    from dpdist.certification.predict import as_input
    from dpdist.data.images import Unreadable, decode

    try:
        if path.suffix == ".npy":
            values = np.load(path, mmap_mode="r", allow_pickle=False)  # its size was not checked
        else:
            values = decode(read_bytes(path, MOST_BYTES))
        return as_input(values, input_shape)
    except Unreadable as error:
        raise UserError(f"{path}: not a readable image: {reason(error)}") from error
    except ValueError as error:
        raise UserError(f"{path}: {reason(error)}") from error
    except UserError:
        raise
    except Exception as error:  # numpy raises whatever a damaged file leads it to
        raise UserError(f"{path}: not a readable image: {reason(error)}") from error
