"""What the frozen classifier behind a denoiser has seen: written by pretrain, checked before a run.

A run's epsilon speaks about the records it trains on. A classifier that saw them too, without
privacy, would void it; so its folder says on which records it was trained, and none of them may be
among the run's.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from cluster.storage import write_atomic, write_json
from dpdist import data, models
from dpdist.errors import UserError
from dpdist.models import ModelSpec
from dpdist.models.zoo import ZOO
from dpdist.recipe import ClassifierRecipe, Recipe
from dpdist.runfolder import read_json

PROVENANCE, RECORDS = "provenance.json", "records.npy"
_CARD = "privacy_card.json"


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


def classifier_spec(recipe: Recipe, dataset: data.Dataset) -> ModelSpec:
    """The description of model.classifier. Raises UserError when it does not fit the data."""
    section = recipe.model.classifier
    assert section is not None
    folder = section.folder.expanduser()
    if not (folder / "model.json").exists():
        hint = "; `dpdist pretrain` makes it from this recipe" if recipe.public else ""
        raise UserError(f"model.classifier.folder: {folder}: no model there{hint}")
    spec = models.read_spec(folder)
    if tuple(spec.input_shape) != dataset.input_shape or spec.classes != dataset.classes:
        raise UserError(
            f"model.classifier.folder: {folder} takes {spec.input_shape} and tells "
            f"{spec.classes} classes, {dataset.name} has {dataset.input_shape} and "
            f"{dataset.classes}"
        )
    if spec.hidden_noise:
        raise UserError(f"model.classifier.folder: {folder} has noise of its own; take one without")
    for name in spec.factories:
        if name not in ZOO and name != recipe.model.name:
            raise UserError(
                f"model.classifier.folder: {folder} is built by {name!r}; a classifier behind a "
                "denoiser must be of the zoo"
            )
    return spec


def check_classifier(recipe: Recipe, private: data.Dataset, where: str) -> dict[str, Any] | None:
    """What the run's frozen classifier is and saw, as JSON types; None when there is none.

    private: all records of the data set that are not declared public. Raises UserError when one of
    them is among those that the classifier was trained on, or nobody says what it saw.
    """
    section = recipe.model.classifier
    if section is None:
        return None
    classifier_spec(recipe, private)
    folder = section.folder.expanduser()
    begin = f"{where}: model.classifier.folder: {folder}"
    about = {"model": models.model_hash(folder)}
    if (folder / PROVENANCE).exists():
        return {**about, **_pretrained(folder, about["model"], private, begin)}
    if (folder / _CARD).exists():
        return {**about, **_released(read_json(folder / _CARD), recipe, begin)}
    return {**about, **_declared(section, begin)}


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
    written = read_json(folder / PROVENANCE)
    if written["model"] != model:
        raise UserError(f"{begin}: the model is not the one that {PROVENANCE} speaks of")
    try:
        seen = np.load(io.BytesIO((folder / RECORDS).read_bytes()), allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / RECORDS}: cannot be read: {error}") from error
    if len(seen) != written["records"]:
        raise UserError(f"{folder / RECORDS}: {len(seen)} records, not {written['records']}")
    refuse_common(private, seen, begin)
    return {
        "public": True,
        "checked": True,
        "saw": (
            f"{written['records']:,} public records of {written['data']}, without privacy "
            f"(fingerprint {written['fingerprint']}); none of them is among the "
            "private records (compared by content)"
        ),
    }


def _released(card: dict[str, Any], recipe: Recipe, begin: str) -> dict[str, Any]:
    name = card.get("extra", {}).get("training data", "an unnamed data set")
    if name == recipe.data.name:
        raise UserError(
            f"{begin}: trained on {name}, as this run is: its cost would have to be added, which "
            "is not done; take a classifier that saw other records"
        )
    guarantee = card["guarantee"]
    how = (
        f"with epsilon {guarantee['epsilon']} at delta {guarantee['delta']:g}"
        if card["private"]
        else "without privacy"
    )
    return {"public": False, "checked": False, "saw": f"{name}, {how} (its own privacy card)"}


def _declared(section: ClassifierRecipe, begin: str) -> dict[str, Any]:
    if section.saw is None:
        raise UserError(
            f"{begin}: nothing says what it was trained on; make it with `dpdist pretrain`, or "
            "declare it: model.classifier.saw"
        )
    return {"public": True, "checked": False, "saw": f"{section.saw} (declared, not checked)"}
