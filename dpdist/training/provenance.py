"""What a model's public part has seen: written by pretrain, checked before a run.

A run's epsilon speaks about the records it trains on. Initial weights, a frozen classifier or a
frozen denoiser that saw them too, without privacy, would void it; so their folder says on which
records they were trained, and none of these may be among the run's.
"""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from cluster.reading import read_bytes, read_json
from cluster.storage import write_atomic, write_json
from dpdist import data, models
from dpdist.errors import UserError
from dpdist.models import ModelSpec
from dpdist.models.zoo import ZOO
from dpdist.recipe import PretrainedRecipe, Recipe

PROVENANCE, RECORDS = "provenance.json", "records.npy"
_CARD = "privacy_card.json"
_WRITTEN = {"model": str, "records": int, "data": str, "fingerprint": str}
_STATED = {"private": bool, "guarantee.epsilon": float | str, "guarantee.delta": float}


def write_provenance(folder: Path, dataset: data.Dataset, facts: dict[str, Any]) -> None:
    """Say that the model in `folder` was trained on these PUBLIC records, without privacy."""
    buffer = io.BytesIO()
    np.save(buffer, np.sort(dataset.hashes))
    write_atomic(folder / RECORDS, buffer.getvalue())
    about = {
        "data": dataset.name,
        "fingerprint": dataset.fingerprint,
        "records": len(dataset),
        "model": models.model_hash(folder),
        **facts,
    }
    write_json(folder / PROVENANCE, about)


def with_frozen(spec: ModelSpec, recipe: Recipe, dataset: data.Dataset) -> ModelSpec:
    """The description of the whole model, from that of the trained part."""
    if recipe.model.frozen is None:
        return spec
    frozen = frozen_spec(recipe, dataset)
    if recipe.model.frozen[0] == models.DENOISER:
        return dataclasses.replace(spec, denoiser=frozen)
    return dataclasses.replace(spec, classifier=frozen)


def frozen_spec(recipe: Recipe, dataset: data.Dataset) -> ModelSpec:
    """The description of the model's frozen part.

    A denoiser may be that of a model that is a denoiser before a classifier. Raises UserError when
    the part does not fit the data.
    """
    assert recipe.model.frozen is not None
    part, section = recipe.model.frozen
    folder = section.folder.expanduser()
    begin = f"model.{part}.folder: {folder}"
    spec = _saved_spec(recipe, folder, begin)
    if spec.hidden_noise:
        raise UserError(f"{begin} has noise of its own; take one without")
    if part == models.DENOISER:
        spec = _denoiser_of(spec)
        if tuple(spec.input_shape) != dataset.input_shape:
            raise UserError(
                f"{begin} takes {spec.input_shape}, {dataset.name} has {dataset.input_shape}"
            )
    elif tuple(spec.input_shape) != dataset.input_shape or spec.classes != dataset.classes:
        raise UserError(
            f"{begin} takes {spec.input_shape} and tells "
            f"{spec.classes} classes, {dataset.name} has {dataset.input_shape} and "
            f"{dataset.classes}"
        )
    for name in spec.factories:
        if name not in ZOO and name != recipe.model.name:
            raise UserError(f"{begin} is built by {name!r}; a frozen part must be of the zoo")
    return spec


def _saved_spec(recipe: Recipe, folder: Path, begin: str) -> ModelSpec:
    if not (folder / "model.json").exists():
        hint = "; `dpdist pretrain` makes it from this recipe" if recipe.public else ""
        raise UserError(f"{begin}: no model there{hint}")
    return models.read_spec(folder)


def _check_initial(recipe: Recipe, dataset: data.Dataset) -> None:
    """Raise UserError unless the initial weights are those of the recipe's own network."""
    model = recipe.model
    assert model.initial is not None
    folder = model.initial.folder.expanduser()
    begin = f"model.initial.folder: {folder}"
    saved = _saved_spec(recipe, folder, begin)
    wanted = {
        "name": model.name,
        "options": model.options,
        "mean": tuple(model.mean),
        "std": tuple(model.std),
        "input_shape": dataset.input_shape,
        "classes": dataset.classes,
    }
    for name, value in wanted.items():
        found = getattr(saved, name)
        if found != value:
            raise UserError(f"{begin} is another network: its {name} is {found}, not {value}")


def _denoiser_of(spec: ModelSpec) -> ModelSpec:
    """The denoiser alone, of a model that may be a denoiser before a classifier."""
    return spec.denoiser or dataclasses.replace(spec, classifier=None)


def load_frozen(module: nn.Module, recipe: Recipe) -> None:
    """Copy the saved weights into the frozen part of the whole model."""
    assert recipe.model.frozen is not None
    part, section = recipe.model.frozen
    folder = section.folder.expanduser()
    spec = models.read_spec(folder)
    composed = spec.classifier is not None or spec.denoiser is not None
    inner = models.DENOISER if part == models.DENOISER and composed else None
    models.load_weights(module.get_submodule(part), folder, inner)


def check_pretrained(recipe: Recipe, private: data.Dataset, where: str) -> dict[str, Any] | None:
    """What the model's public part is and saw, as JSON types; None when there is none.

    private: all records of the data set that are not declared public. Raises UserError when one of
    them is among those that the part was trained on, or nobody says what it saw.
    """
    if recipe.model.pretrained is None:
        return None
    part, section = recipe.model.pretrained
    if part == "initial":
        _check_initial(recipe, private)
    else:
        frozen_spec(recipe, private)
    folder = section.folder.expanduser()
    begin = f"{where}: model.{part}.folder: {folder}"
    about = {"part": part, "model": models.model_hash(folder)}
    if (folder / PROVENANCE).exists():
        return {**about, **_pretrained(folder, about["model"], private, begin)}
    if (folder / _CARD).exists():
        card = read_json(folder / _CARD, _STATED)
        extra = card.get("extra")  # cards of earlier versions do not name their weights
        if isinstance(extra, dict) and extra.get("model hash", about["model"]) != about["model"]:
            raise UserError(f"{begin}: the model is not the one that {_CARD} speaks of")
        return {**about, **_released(card, recipe, begin)}
    return {**about, **_declared(part, section, begin)}


def refuse_common(private: data.Dataset, seen: np.ndarray, begin: str) -> None:
    """Raise UserError when a private record is among the hashes of public ones."""
    common = int(np.isin(private.hashes, seen).sum())
    if common:
        raise UserError(
            f"{begin}: {common:,} of the {len(private):,} private records of {private.name} are "
            "among the public ones, which are used without privacy; set them aside with "
            "data.public, or take others"
        )


def _pretrained(folder: Path, model: str, private: data.Dataset, begin: str) -> dict[str, Any]:
    written = read_json(folder / PROVENANCE, _WRITTEN)
    if written["model"] != model:
        raise UserError(f"{begin}: the model is not the one that {PROVENANCE} speaks of")
    try:
        seen = np.load(io.BytesIO(read_bytes(folder / RECORDS)), allow_pickle=False)
        if seen.ndim != 1 or seen.dtype != np.float64:
            raise ValueError("must hold one number for each record")
    except (ValueError, EOFError) as error:
        raise UserError(f"{folder / RECORDS}: cannot be read: {error}") from error
    if len(seen) != written["records"]:
        raise UserError(f"{folder / RECORDS}: {len(seen)} records, not {written['records']}")
    refuse_common(private, seen, begin)
    began = f"; it began with {written['began_with']}" if "began_with" in written else ""
    return {
        "public": True,
        "checked": True,
        "saw": (
            f"{written['records']:,} public records of {written['data']}, without privacy "
            f"(fingerprint {written['fingerprint']}); none of them is among the "
            f"private records (compared by content){began}"
        ),
    }


def _released(card: dict[str, Any], recipe: Recipe, begin: str) -> dict[str, Any]:
    extra = card.get("extra", {})
    name = extra.get("training data", "an unnamed data set") if isinstance(extra, dict) else ""
    if name == recipe.data.name:
        raise UserError(
            f"{begin}: trained on {name}, as this run is: its cost would have to be added, which "
            "is not done; take one that saw other records"
        )
    guarantee = card["guarantee"]
    how = (
        f"with epsilon {guarantee['epsilon']} at delta {guarantee['delta']:g}"
        if card["private"]
        else "without privacy"
    )
    return {"public": False, "checked": False, "saw": f"{name}, {how} (its own privacy card)"}


def _declared(part: str, section: PretrainedRecipe, begin: str) -> dict[str, Any]:
    if section.saw is None:
        raise UserError(
            f"{begin}: nothing says what it was trained on; make it with `dpdist pretrain`, or "
            f"declare it: model.{part}.saw"
        )
    return {"public": True, "checked": False, "saw": f"{section.saw} (declared, not checked)"}
