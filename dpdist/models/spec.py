"""Describe models without torch: names of architectures, bases in folders, and model.json.

A new architecture is its factory function and an entry of the table of names. A base is a folder
of config.json and safetensors, as `save_pretrained` writes it: only numbers are read. Nothing is
unpickled, downloaded or imported, whatever the folder says. model.json is checked field by field.
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
    """Return where the networks are that a recipe names without a module, by name.

    They are those of this package, and those that dpdist names by entry points in the group
    dpdist.models: networks of one paper, which are imported when a recipe names them. Your own
    network needs no entry point: name it as package.module:factory.
    """
    own = {name: f"{__package__}.{location}" for name, location in _NETWORKS.items()}
    named = {each.name: each.value for each in entry_points(group="dpdist.models")}
    return own | {n: value for n, value in named.items() if value.startswith("dpdist.")}


def check_name(name: str) -> None:
    """Raise UserError for a name that is neither of the zoo nor package.module:factory."""
    if ":" not in name and name not in named_networks():
        known = ", ".join(sorted(named_networks()))
        raise UserError(f"model.name: unknown {name!r}; one of {known}, or package.module:factory")
    if name.partition(":")[0] == "__main__":
        raise UserError(
            f"model.name: must be importable in every worker, got {name!r}: there __main__ is "
            "another program; move the factory into a module beside the script"
        )


# Attribute of a module that was trained here or comes from a release: which one.
TRAINED_BY = "_dpdist_trained_by"
SCRIPT = "code-of-the-user"  # in place of a module: a script gave the model itself
_GIVEN: dict[tuple[str, str], Callable[[], Any]] = {}


def give(name: str, structure: str, make: Callable[[], Any]) -> None:
    """Let models of that name and structure be built in this process by `make`."""
    _GIVEN[name, structure] = make


def _given(name: str) -> Callable[..., Any]:
    def build(input_shape: tuple[int, ...], classes: int, structure: str = "") -> Any:
        if (name, structure) in _GIVEN:
            return _GIVEN[name, structure]()
        raise UserError(
            f"model.name: {name!r} is known to the script that trained it alone: call it there, or "
            "train with PrivateTraining(..., factory='package.module:function'), or release it by "
            "`dpdist release RUN --factory package.module:function`",
            see="how-to/releases.md#a-model-of-a-script",
        )

    return build


def import_factory(name: str) -> Callable[..., Any]:
    """Return the function that makes a model of that name.

    Raises UserError for a name that leads nowhere.
    """
    check_name(name)
    if name.startswith(f"{SCRIPT}:"):
        return _given(name)
    module, _, attribute = named_networks().get(name, name).partition(":")
    try:
        result: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
        return result
    except Exception as error:  # whatever a user's module does when it is imported
        raise UserError(f"model.name: cannot import {name!r}: {error}") from error


# --- bases in folders -------------------------------------------------------------------------


_CONFIG, _WEIGHTS_FILE, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_ADAPTER_PREFIXES = ("lora_", "ia3_")  # in names of tensors that no folder of a base has
_AT_ONCE = 2**22  # bytes


def is_base_model(folder: Path) -> bool:
    """Whether `folder` holds a base, not a model of dpdist."""
    return (folder / _CONFIG).exists() and not (folder / "model.json").exists()


def with_base_config(options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """`options` of a model with the configuration of the base in `folder`; as they are when there
    is none. Raises UserError for a base that needs code or formats of its own."""
    if not is_base_model(folder):
        return dict(options)
    if "config" in options:
        raise UserError(f"model.options.config: leave it out: it is that of {folder / _CONFIG}")
    found = read_json(folder / _CONFIG, {"model_type": str})
    for key in ("auto_map", "quantization_config"):
        if found.get(key):
            raise UserError(f"{folder / _CONFIG}: has {key}, which is not read: take a plain base")
    from dpdist.models.transformers import default_settings

    known = default_settings(found["model_type"])
    return {**options, "config": {k: v for k, v in found.items() if k in known}}


def base_hash(folder: Path) -> str:
    """Hex digest of configuration and weights."""
    digest = hashlib.blake2b(digest_size=16, person=b"dpdist.base")
    for path in (folder / _CONFIG, *_files(folder)):
        with open(check_regular_file(path), "rb") as file:
            while piece := file.read(_AT_ONCE):
                digest.update(piece)
    return digest.hexdigest()


def load_base_weights(module: nn.Module, folder: Path) -> None:
    """Copy the weights in `folder` into the base of a model that has adapters already.

    Heads that the folder has besides are left out. Raises UserError when they do not fit.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from dpdist.models.transformers import Transformer

    if not isinstance(module, Transformer):
        raise UserError(f"{folder}: a base is for model.name: transformer, without mean and std")
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
    """The same base without adapters and with these weights, of which the library knows what they
    were called before."""
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
            f"{folder}: has no {missing[0]}, and {len(missing) - 1:,} more are missing: are these "
            "another network's weights?"
        )
    return made


def _files(folder: Path) -> list[Path]:
    """The files of weights, which lie in the folder itself."""
    if not (folder / _INDEX).exists():
        return [folder / _WEIGHTS_FILE]
    names = read_json(folder / _INDEX, {"weight_map": dict})["weight_map"].values()
    for name in names:
        if not (isinstance(name, str) and name.endswith(".safetensors") and "/" not in name):
            raise UserError(f"{folder / _INDEX}: damaged: {name!r} is no file of the folder")
    return [folder / name for name in sorted(set(names))]


# --- descriptions of models -------------------------------------------------------------------


FORMAT = 1
DENOISER, CLASSIFIER = "denoiser", "classifier"  # the parts of a model with a frozen part


@dataclass(frozen=True)
class BlockNoise:
    """Which modules have noise on their outputs (names in ``model.named_modules()``), and how it
    comes to them; how much is saved with the weights, that of the input too."""

    modules: tuple[str, ...]
    mode: str = "additive"
    floor: float = 0.0


@dataclass(frozen=True)
class ModelSpec:
    """Everything needed to build a model again.

    name: a key of the zoo, or "package.module:factory" called as factory(input_shape, classes,
    **options). mean, std: public normalization constants per channel (or one for all), never
    computed from private data. hidden_noise: the model has noise of its own in its first hidden
    layer; block_noise: on its input and in these modules; the deviations are among the saved
    tensors (`dpdist.models.noise`). classifier: a frozen network behind this one, which then is a
    denoiser: images to images of the same shape. denoiser: a frozen one before this one, which then
    is a classifier. following: it says at each position of an input what comes next. shifts: once
    trained, it answers by its average over moves by up to so many pixels (`dpdist.models.outputs`);
    mirrored: and over mirror images; denoised_shifts: of what its denoiser shows. signature: how
    it is called if it reads anything but one tensor of numbers (`dpdist.models.signature`).
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
        """Whether the model carries noise of its own."""
        return self.hidden_noise or self.block_noise is not None

    @property
    def averages_views(self) -> bool:
        """Whether it answers by an average over views."""
        return self.shifts != 0 or self.mirrored

    @property
    def factories(self) -> tuple[str, ...]:
        """Names of all factories that building this model calls."""
        frozen = [part.factories for part in (self.classifier, self.denoiser) if part is not None]
        return (self.name, *(name for names in frozen for name in names))

    @property
    def user_factories(self) -> tuple[str, ...]:
        """Return the factories that are not of the zoo."""
        return tuple(dict.fromkeys(name for name in self.factories if name not in named_networks()))

    @property
    def to_dict(self) -> dict[str, Any]:
        """Return the content of model.json as JSON types."""
        return {"format": FORMAT, **_without_unset_fields(asdict(self))}


def _without_unset_fields(spec: dict[str, Any]) -> dict[str, Any]:
    """Noise in modules, that it follows, and views are said only where they are: descriptions name
    models in keys."""
    inner = {
        part: _without_unset_fields(spec[part]) for part in (CLASSIFIER, DENOISER) if spec[part]
    }
    unsaid = ("block_noise", *_OPTIONAL)
    return {k: v for k, v in (spec | inner).items() if v or k not in unsaid}


def read_spec(folder: Path) -> ModelSpec:
    """The description in model.json. Raises UserError when it is missing, damaged or newer."""
    description, _, where = _read_model_json(folder)
    return ModelRecord.parse(description, where).spec()


def read_factory_code(folder: Path) -> FactoryCode:
    """Return the code of its own factories with which a model was saved. Raises as `read_spec`."""
    description, code, where = _read_model_json(folder)
    if not code:
        return FactoryCode()
    return FactoryCode(ModelRecord.parse(description, where).spec().user_factories, code)


def _read_model_json(folder: Path) -> tuple[dict[str, Any], dict[str, str], str]:
    """model.json without its format: the description, the digests of code, and its path."""
    path = Path(folder) / "model.json"
    try:
        description = read_json(path, {"format": int})
    except MissingFileError:
        raise UserError(f"{path}: no model there; was the training finished?") from None
    version = description.pop("format")
    if version > FORMAT:
        raise UserError(f"{path}: written by a newer version of dpdist (format {version})")
    code = description.pop("code", {})
    if not isinstance(code, dict) or not all(isinstance(each, str) for each in code.values()):
        raise UserError(f"{path}: damaged: code must be a digest for each module")
    return description, code, str(path)


_MAX_INPUT_VALUES = 2**28  # of one input, and classes
_OPTIONAL = ("following", "shifts", "denoised_shifts", "mirrored", "signature")
_Size = Annotated[int, Field(ge=1)]
_Constants = list[Annotated[float, Field(gt=-1e30, lt=1e30)]]


class BlockNoiseRecord(FileShape):
    """The part of model.json about noise inside the model.

    Attributes:
        modules: Names of the modules that have noise on their outputs.
        mode: How the noise comes to them.
        floor: The least standard deviation.
    """

    modules: list[SingleLine]
    mode: SingleLine
    floor: Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ModelRecord(FileShape):
    """private/model/model.json, which describes the trained model; of a frozen part the same.

    Attributes:
        name: A name of the zoo, or package.module:factory.
        input_shape: Sizes of one input.
        classes: Number of outputs.
        options: Arguments of the factory.
        mean: Constants that the model subtracts from its input.
        std: Constants that it divides by.
        hidden_noise: Whether the model has noise in its first hidden layer.
        block_noise: Noise on its input and in modules.
        following: Whether it tells the next token at each position.
        shifts: Pixels of the moves that its answers are averaged over.
        denoised_shifts: Whether it moves what its denoiser returns.
        mirrored: Whether it averages over mirror images.
        signature: How it is called, if it reads anything but one tensor of numbers.
        classifier: The frozen network behind it.
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
            raise key_error("input_shape", "must be of fewer numbers and classes")
        averages = self.shifts != 0 or self.mirrored
        if any(
            part and (part.shifts or part.mirrored) for part in (self.classifier, self.denoiser)
        ):
            raise key_error("denoiser", "an average is of the whole model")
        if averages and (self.hidden_noise or self.block_noise or self.following):
            raise key_error("shifts", "must be 0 with noise of the model's own, and with tokens")
        if self.denoised_shifts and not (averages and self.denoiser):
            raise key_error("denoised_shifts", "needs shifts, or mirrored, and a denoiser")
        if self.signature:
            Signature.parse(self.signature, "signature")
        return self

    def spec(self) -> ModelSpec:
        """Return the description."""
        held = {name: getattr(self, name) for name in type(self).model_fields}
        held |= {name: tuple(held[name]) for name in ("input_shape", "mean", "std")}
        held |= {part: each.spec() for part in (CLASSIFIER, DENOISER) if (each := held[part])}
        if noise := self.block_noise:
            held["block_noise"] = BlockNoise(tuple(noise.modules), noise.mode, noise.floor)
        return ModelSpec(**held)


def check_trusted(spec: ModelSpec, trusted_factory: str | None, context: object) -> None:
    """Raise UserError when building the model would import a factory that nobody trusted."""
    for name in spec.factories:
        if name not in named_networks() and name != trusted_factory:
            raise UserError(
                f"{context}: the model is built by {name!r}, which is not ours; importing it runs "
                "its code. If you trust it, name it (--trust-factory "
                f"{shlex.quote(name)}; in Python trusted_factory={name!r})",
                see="how-to/extending.md#a-model",
            )


def model_hash(folder: Path) -> str:
    """Hex digest of weights and description: names the executed model in certificates.

    The description states the code of factories that are not of the zoo (`factory_code`), and a
    model whose code has changed since is not loaded.
    """
    if is_base_model(Path(folder)):
        return base_hash(Path(folder))
    digest = hashlib.blake2b(digest_size=16, person=b"dpdist.model")
    for name in ("model.json", "model.safetensors"):
        raw = read_bytes(Path(folder) / name)
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()
