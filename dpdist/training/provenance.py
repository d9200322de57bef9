"""Record which data a model's public part has seen, and check it before a run.

A run's epsilon is about the records it trains on. Initial weights, a frozen classifier or a frozen
denoiser that also saw them, without privacy, would void it; so their folder states on which records
they were trained, and none of these may be among the run's.
"""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpdist import data, models
from dpdist.config.sections import PretrainedRecipe, PublicRecipe
from dpdist.core.errors import UserError
from dpdist.core.files import quoted, read_bytes, read_json, write_atomic, write_json
from dpdist.data import RecordHashes, refuse_common_records
from dpdist.models import ModelSpec
from dpdist.privacy.guarantee import format_delta
from dpdist.release.bundle import load as load_release
from dpdist.release.files import is_release
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import Recipe, iter_differences
from dpdist.training.records import data_source, private_records, records_with_canaries

if TYPE_CHECKING:
    from torch import nn

PROVENANCE_FILE, RECORDS_FILE = "provenance.json", "records.npy"
AMONG_PUBLIC_REASON = (
    "are among the public ones, which are used without privacy; set them aside with data.public, "
    "or use others"
)
_CARD = "privacy_card.json"
SAYS_WHAT_IT_SAW = ("model.json", PROVENANCE_FILE, _CARD)  # next to weights that dpdist wrote
# Keys in a card for the public parts that its model started with (`dpdist.reports.results`).
_PUBLIC_PART_KEYS = (
    "initial weights trained on",
    "frozen classifier trained on",
    "frozen denoiser trained on",
    "features by a network trained on",
)
_PROVENANCE_TYPES = {"model": str, "records": int, "data": str, "fingerprint": str, "inputs": list}
_FEATURES_TYPES = {
    "model": str,
    "pretraining_data": str,
    "public": bool,
    "checked": bool,
    "files": dict,
}
_CARD_TYPES = {
    "private": bool,
    "guarantee.epsilon": float | str,
    "guarantee.delta": float,
    "extra": dict,
}


def write_provenance(folder: Path, dataset: data.Dataset, facts: dict[str, Any]) -> None:
    """Write that the model in `folder` was trained on these PUBLIC records, without privacy."""
    buffer = io.BytesIO()
    np.save(buffer, np.sort(dataset.hashes))
    write_atomic(folder / RECORDS_FILE, buffer.getvalue())
    about = {
        "data": dataset.name,
        "fingerprint": dataset.fingerprint,
        "records": len(dataset),
        "inputs": list(dataset.input_shape),
        "model": models.model_hash(folder),
        **facts,
    }
    write_json(folder / PROVENANCE_FILE, about)


def pretraining_settings(section: PublicRecipe) -> dict[str, Any]:
    """Return the settings of section public that affect the trained weights, without paths."""
    settings = section.model_dump(mode="json")
    if section.data is not None:
        del settings["data"]["root"]
    if section.weights is not None:
        settings["weights"] = Path(section.weights).name
    return settings


def _check_pretraining_settings(folder: Path, section: PublicRecipe, context: str) -> None:
    """Raise UserError if `pretrain` wrote the folder by other settings than the recipe's."""
    made = read_json(folder / PROVENANCE_FILE, {"made_by": object})["made_by"]
    for name, before, now in iter_differences(made, pretraining_settings(section), "public"):
        raise UserError(
            f"{context}: made with {name}: {quoted(before)}, the recipe says {quoted(now)}; name "
            "another folder, or remove this one to train it again"
        )


def with_frozen_part(spec: ModelSpec, recipe: Recipe, dataset: data.Dataset) -> ModelSpec:
    """Return the description of the whole model, from that of the trained part.

    Initial weights may have a frozen denoiser.
    """
    if recipe.model.initial is not None:
        before = _initial_denoiser_spec(recipe, dataset)
        return spec if before is None else dataclasses.replace(spec, denoiser=before)
    if recipe.model.frozen_part is None:
        return spec
    frozen = frozen_spec(recipe, dataset)
    if recipe.model.frozen_part[0] == models.DENOISER:
        return dataclasses.replace(spec, denoiser=frozen)
    return dataclasses.replace(spec, classifier=frozen)


def frozen_spec(recipe: Recipe, dataset: data.Dataset) -> ModelSpec:
    """Return the description of the model's frozen part.

    A denoiser may be part of a model that is a denoiser before a classifier. Raises UserError if
    the part does not fit the data.
    """
    assert recipe.model.frozen_part is not None
    part, section = recipe.model.frozen_part
    folder = section.folder
    begin = f"model.{part}.folder: {folder}"
    spec = _saved_spec(recipe, folder, begin)
    if spec.has_noise:
        raise UserError(f"{begin} has its own noise; use one without")
    # The recipe states the average of the whole model.
    spec = dataclasses.replace(spec, shifts=0, denoised_shifts=False, mirrored=False)
    if part == models.DENOISER:
        spec = spec.denoiser or dataclasses.replace(spec, classifier=None)
    elif spec.classes != dataset.classes:
        raise UserError(f"{begin} has {spec.classes} classes, {dataset.name} has {dataset.classes}")
    _check_part(spec, recipe, dataset, begin)
    return spec


def _check_part(spec: ModelSpec, recipe: Recipe, dataset: data.Dataset, context: str) -> None:
    """Raise UserError for a frozen part with other inputs, or with an unknown factory."""
    if tuple(spec.input_shape) != dataset.input_shape:
        raise UserError(
            f"{context} takes {spec.input_shape}, {dataset.name} has {dataset.input_shape}"
        )
    for name in spec.factories:
        if name not in models.named_networks() and name != recipe.model.name:
            raise UserError(f"{context} is built by {name!r}; a frozen part must be of the zoo")


def _initial_denoiser_spec(recipe: Recipe, dataset: data.Dataset) -> ModelSpec | None:
    """Return the spec of the frozen denoiser before the initial weights, or None."""
    assert recipe.model.initial is not None
    folder = recipe.model.initial.folder
    if models.is_base_model(folder) or not (folder / "model.json").exists():
        return None
    begin = f"model.initial.folder: {folder}"
    spec = models.read_spec(folder).denoiser
    if spec is None:
        return None
    if spec.has_noise:
        raise UserError(f"{begin}: its denoiser has its own noise; use one without")
    _check_part(spec, recipe, dataset, f"{begin}: its denoiser")
    if not recipe.method.capabilities.supports_frozen_denoiser:
        raise UserError(
            f"{begin}: these weights come after a frozen denoiser, which is not compatible with "
            f"method {recipe.method.name}: use others"
        )
    return spec


def _saved_spec(recipe: Recipe, folder: Path, context: str) -> ModelSpec:
    if not (folder / "model.json").exists():
        hint = "; `dpdist run --until pretrain` trains it by this recipe" if recipe.public else ""
        raise UserError(f"{context}: no model there{hint}")
    return models.read_spec(folder)


def _check_initial(recipe: Recipe, dataset: data.Dataset) -> None:
    """Raise UserError unless the initial weights are those of the recipe's own network."""
    model = recipe.model
    assert model.initial is not None
    folder = model.initial.folder
    if models.is_base_model(folder):  # the model uses its configuration
        return
    begin = f"model.initial.folder: {folder}"
    saved = _saved_spec(recipe, folder, begin)
    wanted = {
        "name": model.name,
        "options": model.options,
        "mean": tuple(model.mean),
        "std": tuple(model.std),
        "input_shape": dataset.input_shape,
        "classes": dataset.classes,
        "following": recipe.data.predicts_next_token,
    }
    for name, value in wanted.items():
        found = getattr(saved, name)
        if found != value:
            raise UserError(f"{begin} is another network: its {name} is {found}, not {value}")


def load_frozen_weights(module: nn.Module, recipe: Recipe) -> None:
    """Copy the saved weights into the frozen part of the whole model."""
    assert recipe.model.frozen_part is not None
    part, section = recipe.model.frozen_part
    folder = section.folder
    spec = models.read_spec(folder)
    composed = spec.classifier is not None or spec.denoiser is not None
    inner = models.DENOISER if part == models.DENOISER and composed else None
    models.load_weights(module.get_submodule(part), folder, inner)


def check_pretrained(recipe: Recipe, private: data.Dataset, context: str) -> dict[str, Any] | None:
    """Return kind and data of the model's public part, as JSON types; None if there is none.

    private: all records of the data set that are not declared public. "assumed" is a further
    assumption of the guarantee for the privacy card, if no record could be compared. "denoiser": of
    initial weights, whether they come after a frozen one. Raises UserError if a private record is
    among those that the part was trained on, or these are not stated, or the part was trained by a
    different section public than the recipe's.
    """
    if (made := _describe_features(recipe, context)) is not None:
        return made
    if recipe.model.pretrained_part is None:
        return None
    part, section = recipe.model.pretrained_part
    if part == "initial":
        _check_initial(recipe, private)
    else:
        frozen_spec(recipe, private)
    folder = section.folder
    begin = f"{context}: model.{part}.folder: {folder}"
    about: dict[str, Any] = {"part": part, "model": models.model_hash(folder)}
    if part == "initial":
        about["denoiser"] = _initial_denoiser_spec(recipe, private) is not None
    compared = was_compared(folder, private, begin)
    if (folder / PROVENANCE_FILE).exists() and recipe.public is not None:
        _check_pretraining_settings(folder, recipe.public, begin)
    found = describe_seen(folder, about["model"], recipe.data.name, begin, compared)
    return {**about, **(found or _describe_declared(part, section, begin, compared))}


def describe_seen(
    folder: Path, model: str, private: str, context: str, compared: bool
) -> dict[str, Any] | None:
    """Return the data that a folder's model has seen, by files next to it; None without such."""
    if (folder / PROVENANCE_FILE).exists():
        return _describe_pretrained(folder, model, context, compared)
    if not (folder / _CARD).exists():
        run = _enclosing_run(folder)
        if run is not None and run.read_recipe().by_script is not None:  # records of no file
            raise UserError(
                f"{context}: was trained by run {run.name}, on private records; name a release of "
                "it (`dpdist release`), whose card says how privately"
            )
        return None
    card = card_of_release(folder) or read_json(folder / _CARD, _CARD_TYPES)
    if card["extra"].get("model hash") != model:
        raise UserError(f"{context}: the model is not the one of {_CARD}")
    return _describe_released(card, private, context, compared)


# --- features that a network computed -----------------------------------------------------------


# Records are recognized by their content, and features of two networks differ.
_OTHER_FORM = "in another form cannot be told; train on the images, or without it"


def _describe_features(recipe: Recipe, context: str) -> dict[str, Any] | None:
    """Return the provenance of the recipe's inputs if they are features of a network, else None.

    Raises UserError if the files are not those of the provenance.
    """
    if recipe.data.root is None:
        return None
    folder = Path(recipe.data.root) / recipe.data.name
    if not data.holds_features(recipe.data.root, recipe.data.name):
        return None
    from dpdist.models.weights import file_digest

    if not (folder / data.FEATURES_FILE).exists():
        raise UserError(
            f"{context}: {folder}: must contain {data.FEATURES_FILE}, which lists what the "
            "network of these features saw: restore it, or compute the features again"
        )
    if recipe.model.pretrained_part is not None:
        raise UserError(
            f"{context}: model.{recipe.model.pretrained_part[0]}: must be left out, as the records "
            f"are features that a network made: whether it saw the same records {_OTHER_FORM}"
        )
    if recipe.privacy.budget is not None:
        raise UserError(
            f"{context}: privacy.budget: must be left out, as the records are features that a "
            f"network made: whether the budget knows the same records {_OTHER_FORM}"
        )
    written = read_json(folder / data.FEATURES_FILE, _FEATURES_TYPES)
    for file in sorted(folder.rglob("*.parquet")):
        if written["files"].get(str(file.relative_to(folder))) != file_digest(file):
            raise UserError(
                f"{context}: {file}: is not a file that {data.FEATURES_FILE} lists; compute the "
                "features again"
            )
    return {
        "part": "features",
        **{
            key: written.get(key)
            for key in ("model", "public", "checked", "pretraining_data", "assumed")
        },
    }


def card_of_release(folder: Path) -> dict[str, Any] | None:
    """Return the privacy card of a verified release; None for any other folder."""
    return load_release(folder).card if is_release(folder) else None


def was_compared(folder: Path, private: data.Dataset, context: str) -> bool:
    """Return whether all training records of the folder's model were compared with private ones.

    Raises UserError if a private record is among them.
    """
    if (folder / PROVENANCE_FILE).exists():
        return refuse_common_records(
            private, _read_seen_records(folder), context, AMONG_PUBLIC_REASON
        )
    run = _enclosing_run(folder)
    if run is None:
        return False
    try:
        other = run.read_recipe()
        source = data_source(other)
        begun = read_json(run.data_fingerprint, {"train": str})["train"]
        if records_with_canaries(other, source).fingerprint != begun:
            return False  # the data changed
        theirs = private_records(other, source)
    except UserError:
        return False  # the data are not here
    if data.holds_features(source.root, source.name):
        return False  # by content, features differ from the records they were computed from
    why = (
        f"trained it, or chose its settings, in run {run.name}: its cost would have to be added, "
        "which is not done; use one that saw other records"
    )
    whole = refuse_common_records(private, theirs, context, why)
    inner = other.model.pretrained_part
    return whole and (inner is None or was_compared(inner[1].folder, private, context))


def _enclosing_run(folder: Path) -> RunFolder | None:
    """Return the run that contains this release/ or private/model, or None."""
    for path in list(folder.absolute().parents)[:2]:
        if (path / "run.json").exists():
            return RunFolder(path)
    return None


def _read_seen_records(folder: Path) -> RecordHashes:
    """Return the records that `pretrain` trained on."""
    written, path = read_json(folder / PROVENANCE_FILE, _PROVENANCE_TYPES), folder / RECORDS_FILE
    try:
        hashes = np.load(io.BytesIO(read_bytes(path)), allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    if len(hashes) != written["records"]:
        raise UserError(f"{path}: {len(hashes)} records, not {written['records']}")
    return RecordHashes(tuple(written["inputs"]), hashes)


def _describe_pretrained(folder: Path, model: str, context: str, compared: bool) -> dict[str, Any]:
    written = read_json(folder / PROVENANCE_FILE, _PROVENANCE_TYPES)
    if written["model"] != model:
        raise UserError(f"{context}: the model is not the one of {PROVENANCE_FILE}")
    how, assumed = "none of them is among the private records (compared by content)", None
    if not compared:
        shape = "x".join(map(str, written["inputs"]))
        how = f"of another shape, {shape}, so not compared with the private records"
        assumed = f"no private record is, in another shape, among the records of {written['data']}"
    began = ""
    if "began_with" in written:
        began = f"; it began with {written['began_with']}"
        before = f"no private record is among what was seen by {written['began_with']}"
        assumed = before if assumed is None else f"{assumed}; {before}"
    return {
        "public": True,
        "checked": compared,
        "pretraining_data": (
            f"{written['records']:,} public records of {written['data']}, without privacy "
            f"(fingerprint {written['fingerprint']}); {how}{began}"
        ),
        "assumed": assumed,
    }


def _describe_released(
    card: dict[str, Any], private: str, context: str, compared: bool
) -> dict[str, Any]:
    extra = card["extra"]
    name = extra.get("training data")
    name = name if isinstance(name, str) else "an unnamed data set"
    if not compared and name.casefold() == private.casefold():
        raise UserError(
            f"{context}: trained on {name}, as this run is: its cost would have to be added, which "
            "is not done; use one that saw other records",
            see="explanation/denoisers.md#what-the-frozen-part-saw",
        )
    guarantee = card["guarantee"]
    how = (
        f"with epsilon {guarantee['epsilon']} at delta {format_delta(guarantee['delta'])}"
        if card["private"]
        else "without privacy"
    )
    found, assumed = "none of its records is private here (compared by content)", None
    if not compared:
        found = "told apart by name only, not checked by record"
        assumed = f"no private record is among those of {name}: {found}"
        if began := [str(extra[part]) for part in _PUBLIC_PART_KEYS if part in extra]:
            assumed += f"; and none among what it began with: {'; '.join(began)}"
    return {
        "public": False,
        "checked": compared,
        "pretraining_data": f"{name}, {how} (its own privacy card); {found}",
        "assumed": assumed,
    }


def _describe_declared(
    part: str, section: PretrainedRecipe, context: str, compared: bool
) -> dict[str, Any]:
    if section.pretraining_data is None:
        raise UserError(
            f"{context}: its training data are unknown; train it by "
            f"`dpdist run --until pretrain`, or declare it: model.{part}.pretraining_data",
            see="explanation/denoisers.md#what-the-frozen-part-saw",
        )
    seen = section.pretraining_data
    assumed = f"no private record is among what the {part} part saw, {seen}: declared only"
    return {
        "public": True,
        "checked": False,
        "pretraining_data": f"{section.pretraining_data} (declared, not checked)",
        "assumed": None if compared else assumed,
    }
