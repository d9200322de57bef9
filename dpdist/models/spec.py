"""Describe models without torch: names of architectures, bases in folders, and model.json.

To add an architecture, write its factory and add it to the table of names. A base is a folder of
config.json and safetensors, as `save_pretrained` writes it. Nothing in it is unpickled, downloaded
or imported. model.json is checked field by field.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field, model_validator

from dpdist.core.errors import UserError
from dpdist.core.fields import MAX_SHIFT, FileShape, SingleLine, key_error
from dpdist.core.files import (
    MissingFileError,
    check_regular_file,
    error_text,
    read_bytes,
    read_json,
)
from dpdist.models.factory_code import FactoryCode
from dpdist.models.signature import Signature

if TYPE_CHECKING:
    from torch import Tensor, nn


# --- architectures by name --------------------------------------------------------------------


_NETWORKS = {
    "linear": "zoo:linear",
    "mlp": "zoo:mlp",
    "tf-cnn": "zoo:tf_cnn",
    "unet-cnn": "zoo:unet_cnn",
    "pool-cnn": "zoo:pool_cnn",
    "small-cnn": "zoo:small_cnn",
    "resnet-gn": "zoo:resnet_gn",
    "next-word-mlp": "zoo:next_word_mlp",
    "next-word-lstm": "zoo:next_word_lstm",
    "conv-autoencoder": "zoo:conv_autoencoder",
    "dncnn": "zoo:dncnn",
    "unet": "zoo:unet",
    "patches": "features:patches",
    "scattering": "features:scattering",
    "torchvision": "zoo:torchvision_classifier",
    "transformer": "transformers:transformer",
}


@cache
def named_networks() -> Mapping[str, str]:
    """Return the module and function of each network that has a name in recipes.

    They are those of this package, and dpdist's entry points in the group dpdist.models: networks
    of one paper, imported when a recipe names them. Your own network needs no entry point: name it
    as package.module:factory.
    """
    own = {name: f"{__package__}.{location}" for name, location in _NETWORKS.items()}
    named = {each.name: each.value for each in entry_points(group="dpdist.models")}
    return own | {n: value for n, value in named.items() if value.startswith("dpdist.")}


def check_name(name: str) -> None:
    """Raise UserError for a name that is neither of the zoo nor package.module:factory."""
    if ":" not in name and name not in named_networks():
        known = ", ".join(sorted(named_networks()))
        raise UserError(
            f"model.name: must be one of {known}, torchvision:NAME or package.module:factory, "
            f"got {name!r}"
        )
    if name.partition(":")[0] == "__main__":
        raise UserError(
            f"model.name: must be importable in every worker, got {name!r}, but a worker's "
            "__main__ is a different program; move the factory to a module next to the script"
        )


# Attribute of a module from a run or release, which names it.
TRAINED_BY = "_dpdist_trained_by"
SCRIPT = "code-of-the-user"  # instead of a module, for a model that a script built
_GIVEN: dict[tuple[str, str], Callable[[], Any]] = {}


def give(name: str, structure: str, make: Callable[[], Any]) -> None:
    """Register `make` as the factory of models of that name and structure in this process."""
    _GIVEN[name, structure] = make


def _given(name: str) -> Callable[..., Any]:
    def build(input_shape: tuple[int, ...], classes: int, structure: str = "") -> Any:
        if (name, structure) in _GIVEN:
            return _GIVEN[name, structure]()
        raise UserError(
            f"model.name: must be importable, got {name!r}, which only the script that trained it "
            "can build: call it there, train with PrivateTraining(..., "
            "factory='package.module:function'), or release it by `dpdist release RUN --factory "
            "package.module:function`",
            see="how-to/releases.md#a-model-of-a-script",
        )

    return build


def import_factory(name: str) -> Callable[..., Any]:
    """Return the function that builds a model of that name. Raises UserError."""
    check_name(name)
    if name.startswith(f"{SCRIPT}:"):
        return _given(name)
    module, _, attribute = named_networks().get(name, name).partition(":")
    try:
        result: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
        return result
    except Exception as error:  # any error of a user's module
        raise UserError(f"model.name: cannot import {name!r}: {error}") from error


# --- bases in folders -------------------------------------------------------------------------


_CONFIG, _WEIGHTS_FILE, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_ADAPTER_PREFIXES = ("lora_", "ia3_")  # of tensors that a base's folder does not have
_AT_ONCE = 2**22  # bytes


def is_base_model(folder: Path) -> bool:
    """Return whether `folder` has a base rather than a model of dpdist."""
    return (folder / _CONFIG).exists() and not (folder / "model.json").exists()


def with_base_config(options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return `options` of a model with the configuration of the base in `folder`, if it has one.

    Raises UserError for a base that needs custom code or formats.
    """
    if not is_base_model(folder):
        return dict(options)
    if "config" in options:
        raise UserError(
            f"model.options.config: must be left out with {folder / _CONFIG}, which replaces it"
        )
    found = read_json(folder / _CONFIG, {"model_type": str})
    for key in ("auto_map", "quantization_config"):
        if found.get(key):
            raise UserError(f"{folder / _CONFIG}: must not have {key}; take a plain base")
    from dpdist.models.transformers import default_settings

    known = default_settings(found["model_type"])
    return {**options, "config": {k: v for k, v in found.items() if k in known}}


def base_hash(folder: Path) -> str:
    """Return a hex digest of configuration and weights."""
    digest = hashlib.blake2b(digest_size=16, person=b"dpdist.base")
    for path in (folder / _CONFIG, *_files(folder)):
        with open(check_regular_file(path), "rb") as file:
            while piece := file.read(_AT_ONCE):
                digest.update(piece)
    return digest.hexdigest()


def load_base_weights(module: nn.Module, folder: Path) -> None:
    """Copy the weights in `folder` into the base of a model with adapters, without its heads.

    Raises UserError if they do not fit.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from dpdist.models.transformers import Transformer

    if not isinstance(module, Transformer):
        raise UserError(
            f"{folder}: must not be a base unless model.name is transformer, without mean and std"
        )
    tensors: dict[str, Tensor] = {}
    for path in _files(folder):
        try:
            tensors |= load_file(check_regular_file(path))
        except SafetensorError as error:
            raise UserError(f"{path}: damaged: {error_text(error)}") from error
    found = _load_pretrained_base(module.base, tensors, folder).state_dict()
    with torch.no_grad():
        for name, tensor in module.base.state_dict().items():
            if not any(part in name for part in _ADAPTER_PREFIXES):
                tensor.copy_(found[name.replace(".base_layer.", ".")])


def _load_pretrained_base(base: Any, tensors: dict[str, Tensor], folder: Path) -> nn.Module:
    """Return the same base without adapters, with these weights.

    `from_pretrained` also maps former names of tensors.
    """
    import torch

    from dpdist.models.transformers import base_arguments

    made: nn.Module
    try:
        with torch.random.fork_rng(devices=[]):
            made, found = type(base).from_pretrained(
                None, config=base.config, state_dict=tensors, dtype=torch.float32,
                output_loading_info=True, local_files_only=True, **base_arguments(type(base)),
            )  # fmt: skip
    except (RuntimeError, ValueError, KeyError) as error:
        raise UserError(f"{folder}: does not fit the base: {error_text(error)}") from error
    if missing := sorted(found["missing_keys"]):
        raise UserError(
            f"{folder}: must have the weights of the base, lacks {missing[0]} and "
            f"{len(missing) - 1:,} more; check that it is the same network"
        )
    return made


def _files(folder: Path) -> list[Path]:
    """Return the files of weights, which must be in the folder itself."""
    if not (folder / _INDEX).exists():
        return [folder / _WEIGHTS_FILE]
    names = read_json(folder / _INDEX, {"weight_map": dict})["weight_map"].values()
    for name in names:
        if not (isinstance(name, str) and name.endswith(".safetensors") and "/" not in name):
            raise UserError(f"{folder / _INDEX}: damaged: {name!r} is not a file of the folder")
    return [folder / name for name in sorted(set(names))]


# --- descriptions of models -------------------------------------------------------------------


FORMAT = 1
DENOISER, CLASSIFIER = "denoiser", "classifier"  # the parts of a model with a frozen part


@dataclass(frozen=True)
class BlockNoise:
    """Modules with noise on their outputs (names in ``model.named_modules()``), and its mode.

    The standard deviations, also that of the input, are saved with the weights.
    """

    modules: tuple[str, ...]
    mode: str = "additive"
    floor: float = 0.0


@dataclass(frozen=True)
class ModelSpec:
    """Everything needed to rebuild a model.

    name: a key of the zoo, or "package.module:factory", called as factory(input_shape, classes,
    **options). mean, std: public normalization constants per channel (or one for all), never
    computed from private data. hidden_noise: the model has noise in its first hidden layer;
    block_noise: on its input and in these modules; the deviations are among the saved tensors
    (`dpdist.models.noise`). classifier: a frozen network after this one, which then is a denoiser:
    images to images of the same shape. denoiser: a frozen one before this one, which then is a
    classifier. following: it predicts the next token at each position. shifts: the trained model
    averages over moves of the image by up to this many pixels (`dpdist.models.outputs`); mirrored:
    and over mirror images; denoised_shifts: it moves the output of its denoiser. signature: how it
    is called, if not with one tensor of numbers (`dpdist.models.signature`).
    """

    name: str
    input_shape: tuple[int, ...]
    classes: int
    options: dict[str, Any] = field(default_factory=dict)
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    hidden_noise: bool = False
    classifier: ModelSpec | None = None
    denoiser: ModelSpec | None = None
    block_noise: BlockNoise | None = None
    following: bool = False
    shifts: int = 0
    denoised_shifts: bool = False
    mirrored: bool = False
    signature: dict[str, Any] = field(default_factory=dict)

    @property
    def has_noise(self) -> bool:
        """Return whether the model has noise of its own."""
        return self.hidden_noise or self.block_noise is not None

    @property
    def averages_views(self) -> bool:
        """Return whether it averages over views."""
        return self.shifts != 0 or self.mirrored

    @property
    def factories(self) -> tuple[str, ...]:
        """Return the names of all factories that build this model."""
        frozen = [part.factories for part in (self.classifier, self.denoiser) if part is not None]
        return (self.name, *(name for names in frozen for name in names))

    @property
    def user_factories(self) -> tuple[str, ...]:
        """Return the names of factories outside the zoo."""
        return tuple(dict.fromkeys(name for name in self.factories if name not in named_networks()))

    @property
    def to_dict(self) -> dict[str, Any]:
        """Return the content of model.json as JSON types."""
        return {"format": FORMAT, **_without_unset_fields(asdict(self))}


def _without_unset_fields(spec: dict[str, Any]) -> dict[str, Any]:
    """Return a description without optional fields at their defaults, as it is part of hashes."""
    inner = {
        part: _without_unset_fields(spec[part]) for part in (CLASSIFIER, DENOISER) if spec[part]
    }
    return {k: v for k, v in (spec | inner).items() if v or k not in _OPTIONAL}


def read_spec(folder: Path) -> ModelSpec:
    """Return the description in model.json. Raises UserError if it is missing, damaged or newer."""
    description, _, where = _read_model_json(folder)
    return ModelRecord.parse(description, where).spec()


def read_factory_code(folder: Path) -> FactoryCode:
    """Return the code of a model's factories when it was saved. Raises as `read_spec`."""
    description, code, where = _read_model_json(folder)
    if not code:
        return FactoryCode()
    return FactoryCode(ModelRecord.parse(description, where).spec().user_factories, code)


def _read_model_json(folder: Path) -> tuple[dict[str, Any], dict[str, str], str]:
    """Return the description and the digests of code in model.json, and its path."""
    path = Path(folder) / "model.json"
    try:
        description = read_json(path, {"format": int})
    except MissingFileError:
        raise UserError(f"{path}: no such model; finish the training first") from None
    version = description.pop("format")
    if version > FORMAT:
        raise UserError(f"{path}: written by a newer version of dpdist (format {version})")
    code = description.pop("code", {})
    if not isinstance(code, dict) or not all(isinstance(each, str) for each in code.values()):
        raise UserError(f"{path}: damaged: code must have a digest for each module")
    return description, code, str(path)


_MAX_INPUT_VALUES = 2**28  # of one input, and classes
_OPTIONAL = ("block_noise", "following", "shifts", "denoised_shifts", "mirrored", "signature")
_Size = Annotated[int, Field(ge=1)]
_Constants = list[Annotated[float, Field(gt=-1e30, lt=1e30)]]


class BlockNoiseRecord(FileShape):
    """The part of model.json about noise inside the model.

    Attributes:
        modules: Names of the modules with noise on their outputs.
        mode: How the noise is applied.
        floor: The least standard deviation.
    """

    modules: list[SingleLine]
    mode: SingleLine
    floor: Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ModelRecord(FileShape):
    """private/model/model.json, which describes the trained model, or a frozen part of it.

    Attributes:
        name: A name of the zoo, or package.module:factory.
        input_shape: Sizes of one input.
        classes: Number of outputs.
        options: Arguments of the factory.
        mean: Constants that the model subtracts from its input.
        std: Constants that it divides by.
        hidden_noise: Whether the model has noise in its first hidden layer.
        block_noise: Noise on its input and in modules.
        following: Whether it predicts the next token at each position.
        shifts: Pixels of the moves that its outputs are averaged over.
        denoised_shifts: Whether it moves the output of its denoiser.
        mirrored: Whether it averages over mirror images.
        signature: How it is called, if not with one tensor of numbers.
        classifier: The frozen network after it.
        denoiser: The frozen network before it.
    """

    model_config = ConfigDict(extra="forbid")

    name: SingleLine
    input_shape: Annotated[list[_Size], Field(min_length=1)]
    classes: _Size
    options: dict[str, Any]
    mean: _Constants
    std: _Constants
    hidden_noise: bool
    block_noise: BlockNoiseRecord | None = None
    following: bool = False
    shifts: Annotated[int, Field(ge=0, le=MAX_SHIFT)] = 0
    denoised_shifts: bool = False
    mirrored: bool = False
    signature: dict[str, Any] = Field(default={})
    classifier: ModelRecord | None = None
    denoiser: ModelRecord | None = None

    @model_validator(mode="after")
    def _check(self) -> ModelRecord:
        if math.prod([*self.input_shape, self.classes]) > _MAX_INPUT_VALUES:
            raise key_error("input_shape", "must have fewer numbers and classes")
        averages = self.shifts != 0 or self.mirrored
        parts = (self.classifier, self.denoiser)
        if any(part and (part.shifts or part.mirrored) for part in parts):
            raise key_error("denoiser", "must not average over views; only a whole model may")
        if averages and (self.hidden_noise or self.block_noise or self.following):
            raise key_error("shifts", "must be 0 with noise inside the model, and with tokens")
        if self.denoised_shifts and not (averages and self.denoiser):
            raise key_error("denoised_shifts", "needs shifts, or mirrored, and a denoiser")
        if self.signature:
            Signature.parse(self.signature, "signature")
        return self

    def spec(self) -> ModelSpec:
        """Return the description."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        values |= {name: tuple(values[name]) for name in ("input_shape", "mean", "std")}
        values |= {part: each.spec() for part in (CLASSIFIER, DENOISER) if (each := values[part])}
        if noise := self.block_noise:
            values["block_noise"] = BlockNoise(tuple(noise.modules), noise.mode, noise.floor)
        return ModelSpec(**values)


def check_trusted(spec: ModelSpec, trusted_factory: str | None, context: object) -> None:
    """Raise UserError if building the model would import a factory that is not trusted."""
    for name in spec.factories:
        if name not in named_networks() and name != trusted_factory:
            raise UserError(
                f"{context}: the model is built by {name!r}, which is not part of dpdist, and "
                "importing it runs its code; if you trust it, name it (--trust-factory "
                f"{shlex.quote(name)}; in Python trusted_factory={name!r})",
                see="how-to/extending.md#a-model",
            )


def model_hash(folder: Path) -> str:
    """Return a hex digest of weights and description, which identifies the model in certificates.

    The description has digests of the code of factories outside the zoo (`factory_code`); a model
    whose code has changed is not loaded.
    """
    if is_base_model(Path(folder)):
        return base_hash(Path(folder))
    digest = hashlib.blake2b(digest_size=16, person=b"dpdist.model")
    for name in ("model.json", "model.safetensors"):
        raw = read_bytes(Path(folder) / name)
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()
