"""Create a run of an imported model, for all commands except training.

The run has no epsilon: its plan states that dpdist did not train it, and its ledger is empty. The
model is stored as safetensors with a description; normalization is part of the model, so that noise
and radii are in units of unnormalized inputs.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpdist import models
from dpdist.core.errors import UserError
from dpdist.core.files import (
    atomic_folder,
    make_private_folder,
    read_json,
    write_atomic,
    write_json,
)
from dpdist.data.registry import BUILT_IN, DataSource
from dpdist.data.registry import load as load_data
from dpdist.data.test_inputs import find_test_inputs, size_text
from dpdist.methods.imported import UNUSED
from dpdist.models import ModelSpec
from dpdist.privacy.ledger import Ledger
from dpdist.runs.folder import FORMAT, WRITER, DifferentRecipeError, RunFolder
from dpdist.runs.recipe import Recipe, parse_recipe, plan_with_noise

if TYPE_CHECKING:
    from torch import nn

INPUTS = "inputs"  # a run's folder of test inputs that were resized
_TORCHVISION = ("torchvision", "torchvision.models")
_TIMM = "timm"


@dataclass(frozen=True)
class ForeignModel:
    """An imported model and its weights.

    name: "package.module:factory", "torchvision:ARCHITECTURE", "timm:ARCHITECTURE", or a name of
    the zoo. weights: a state dict (.pt) or .safetensors; None keeps the factory's weights. options:
    of the factory. input_shape, classes: None takes those of the data, and of the model's outputs.
    mean, std: constants of each channel (or one for all) for normalization.
    """

    name: str
    weights: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    input_shape: tuple[int, ...] | None = None
    classes: int | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()


@dataclass(frozen=True)
class TestData:
    """Test inputs: the name of a data set (in `root`, unless it is built in), or a path."""

    __test__ = False  # not a test class of pytest

    where: str
    root: Path | None = None
    resize: int | None = None

    @property
    def path(self) -> Path | None:
        """Return the path; None if it is built in. Raises UserError if it does not exist."""
        under = Path(self.where) if self.root is None else self.root / self.where
        for path in (under, Path(self.where)):
            if path.exists():
                return path
        if self.where in BUILT_IN:
            return None
        raise UserError(
            f"--data: must be a Parquet file, a folder of images or of Parquet files, or one of "
            f"{', '.join(BUILT_IN)}, got {self.where}, which does not exist"
        )


def import_model(
    foreign: ForeignModel,
    data: TestData,
    folder: RunFolder,
    *,
    certify: Mapping[str, Any] | None = None,
) -> Recipe:
    """Create the run folder of an imported model; return its recipe.

    A repeated import into the same folder returns the existing run's recipe. certify: the recipe's
    section of a new run.

    Raises:
        UserError: model, weights or data cannot be read or do not fit together; nothing is written.
        DifferentRecipeError: the folder has a different run.
    """
    asked = _asked(foreign, data)
    if folder.path.exists() and any(folder.path.iterdir()):
        return _found(folder, asked)
    with atomic_folder(folder.path, keep_existing=True) as aside:
        section, shape, resized = _data_section(data, foreign, folder, aside / INPUTS)
        network, spec = build_foreign(foreign, shape, section["classes"])
        section |= _classes(section, spec.classes)
        recipe = _recipe(foreign, folder.name, section, spec, resized, certify)
        _write(RunFolder(aside), recipe, network, spec, asked)
    return _found(folder, asked)  # a concurrent import of the same may have been faster


def _asked(foreign: ForeignModel, data: TestData) -> dict[str, Any]:
    """Return everything that an import depends on as JSON, by which it is recognized."""
    from dpdist.models.weights import file_digest

    weights = foreign.weights and {foreign.weights.name: file_digest(foreign.weights)}
    path = data.path
    where = data.where if path is None else str(path.resolve())
    model = asdict(foreign) | {"weights": weights, "options": dict(foreign.options)}
    lists = {name: list(value) for name, value in model.items() if isinstance(value, tuple)}
    return {"model": model | lists, "data": {"where": where, "resize": data.resize}}


def _found(folder: RunFolder, asked: Mapping[str, Any]) -> Recipe:
    """Return the recipe of the run of such an import. Raises DifferentRecipeError."""
    folder.check_format()
    if not folder.imported.exists():
        raise DifferentRecipeError(
            f"{folder.path}: is a trained run; import the model under a different name"
        )
    before = read_json(folder.imported, {"model": dict, "data": dict})
    different = [
        f"{part}.{name}"
        for part in ("model", "data")
        for name, value in asked[part].items()
        if before[part].get(name) != value
    ]
    if different:
        raise DifferentRecipeError(
            f"{folder.path}: is a different import ({', '.join(different)} differ); import the "
            "model under a different name (dpdist import NAME)"
        )
    return folder.read_recipe()


# --- the test inputs --------------------------------------------------------------------------


def _data_section(
    data: TestData, foreign: ForeignModel, folder: RunFolder, target: Path
) -> tuple[dict[str, Any], tuple[int, ...], str]:
    """Return the recipe's section, the shape of an input, and how images were resized to it.

    target: folder for written inputs, which becomes the run's `INPUTS`.
    """
    path = data.path
    if path is None:
        dataset = load_data(DataSource(data.where, BUILT_IN[data.where]), "test")
        return {"name": data.where, "classes": dataset.classes}, dataset.input_shape, ""
    found = find_test_inputs(path, target, foreign.input_shape, data.resize)
    written = found.root == target.parent
    section: dict[str, Any] = {
        "name": found.name,
        "root": str((folder.path if written else found.root).resolve()),
        "test": found.split,
        "classes": found.classes,
        "names": list(found.names),
        "columns": {
            "label": found.label,
            **({"image": found.image} if found.image else {"features": list(found.features)}),
        },
    }
    return section, found.shape, found.resized


def _classes(section: Mapping[str, Any], answers: int) -> dict[str, Any]:
    """Return the number of classes, which may be more than in the data. Raises UserError."""
    known, names = section["classes"], section.get("names")
    fixed = bool(names) or section.get("root") is None
    if answers < known or (fixed and answers != known):
        raise UserError(
            f"--classes: must be {known}, the classes of --data, got {answers} outputs of the "
            "model; name data with all classes of its training, in order"
        )
    return {"classes": answers}


# --- the model --------------------------------------------------------------------------------


def build_foreign(
    foreign: ForeignModel, data_shape: tuple[int, ...], data_classes: int
) -> tuple[nn.Module, ModelSpec]:
    """Return the network with its weights, in evaluation mode, and its description.

    Args:
        foreign: the model.
        data_shape: of an input of the data, if `foreign` has none.
        data_classes: of the data, if `foreign` has none.

    Raises:
        UserError: the factory fails, the weights do not fit, or the model does not return one logit
            for each class.
    """
    import torch

    from dpdist.models.weights import load_foreign, read_weights
    from dpdist.models.zoo import NormalizedNetwork

    shape = foreign.input_shape or data_shape
    if shape != data_shape:
        raise UserError(
            f"--input: must be {size_text(data_shape)}, the shape of --data, got {size_text(shape)}"
        )
    answers = foreign.classes or data_classes
    name, options = _factory(foreign, answers)
    spec = ModelSpec(name, shape, answers, options, foreign.mean, foreign.std)
    network = models.build_model(spec).eval()
    inner = network.network if isinstance(network, NormalizedNetwork) else network
    if foreign.weights is not None:
        load_foreign(inner, read_weights(foreign.weights), foreign.weights)
    with torch.inference_mode(), suppress(Exception):  # `check_outputs` reports what fails
        answers = int(network(torch.zeros(2, *shape)).shape[1])
    if foreign.classes not in (None, answers):
        raise UserError(f"--classes: must be {answers}, the model's outputs, got {foreign.classes}")
    spec = replace(spec, classes=answers)
    models.check_outputs(network, spec)
    return network, spec


def _factory(foreign: ForeignModel, classes: int) -> tuple[str, dict[str, Any]]:
    """Return the factory's name and options, including the number of classes if it is one."""
    from dpdist.models.builder import class_parameter, takes_shape
    from dpdist.models.spec import import_factory, named_networks

    package, _, last = foreign.name.partition(":")
    options = dict(foreign.options)
    if package in _TORCHVISION:
        return "torchvision", {"architecture": last, **options}
    if package == _TIMM:
        try:
            importlib.import_module(_TIMM)
        except ImportError as error:
            raise UserError(
                f"--model: {foreign.name}: needs timm ({error}): pip install timm"
            ) from None
        return "timm:create_model", {"model_name": last, "num_classes": classes, **options}
    models.check_name(foreign.name)
    if foreign.name in named_networks():
        return foreign.name, options
    factory = import_factory(foreign.name)
    keyword = class_parameter(factory)
    if not takes_shape(factory, options) and keyword is not None:
        options.setdefault(keyword, classes)
    return foreign.name, options


# --- the run ----------------------------------------------------------------------------------


def _recipe(
    foreign: ForeignModel,
    name: str,
    section: Mapping[str, Any],
    spec: ModelSpec,
    resized: str,
    certify: Mapping[str, Any] | None,
) -> Recipe:
    from dpdist.models.weights import file_digest

    method: dict[str, Any] = {"name": "imported", "inputs": resized}
    if foreign.weights is not None:
        method |= {"weights": foreign.weights.name, "sha256": file_digest(foreign.weights)}
    raw = {
        "name": name,
        "data": dict(section),
        "model": {
            "name": spec.name,
            "options": spec.options,
            "mean": list(spec.mean),
            "std": list(spec.std),
        },
        "method": method,
        "certify": None if certify is None else dict(certify),
        **UNUSED,
    }
    return parse_recipe(raw, "import")


def _write(
    aside: RunFolder, recipe: Recipe, network: nn.Module, spec: ModelSpec, asked: Mapping[str, Any]
) -> None:
    """Write the files of a finished training, and the record of the import."""
    make_private_folder(aside.private)
    write_atomic(aside.recipe_file, recipe.to_yaml())
    write_json(aside.path / "run.json", {"format": FORMAT, **WRITER})
    aside.pin_recipe(recipe, 0.0)
    plan = plan_with_noise(recipe, 1, 0.0)
    write_json(aside.plan, plan.to_dict())
    write_json(aside.imported, dict(asked))
    models.save(network, spec, aside.model_folder)
    with Ledger.open(aside.ledger, plan.fingerprint()) as ledger:
        done = {
            "steps": 0, "seconds": 0.0, "fallback_layers": [], "reexecuted_releases": 0,
            "attempt_epochs": 1, "model": models.model_hash(aside.model_folder),
            "ledger": ledger.anchor.to_dict(),
        }  # fmt: skip
    write_json(aside.training_summary, done)
