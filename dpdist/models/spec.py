"""Describe models without torch: names of architectures, bases in folders, and model.json.

A new architecture is its factory function and an entry of the table of names. A base is a folder
of config.json and safetensors, as `save_pretrained` writes it: only numbers are read. Nothing is
unpickled, downloaded or imported, whatever the folder says. model.json is checked field by field.
"""

from __future__ import annotations

import hashlib
import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpdist.core.errors import UserError
from dpdist.core.fields import MAX_SHIFT
from dpdist.core.files import (
    MissingFileError,
    check_regular_file,
    check_shape,
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
    if name.startswith("torchvision."):
        architecture = name.partition(":")[2]
        raise UserError(
            f"model.name: must be a factory of input shape and classes, got {name!r}, which would "
            "take the shape for a request of weights; use model: {name: torchvision, options: "
            f"{{architecture: {architecture}}}}}"
        )
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
    unsaid = ("block_noise", *_OPTIONAL_DEFAULTS)
    return {k: v for k, v in (spec | inner).items() if v or k not in unsaid}


def read_spec(folder: Path) -> ModelSpec:
    """The description in model.json. Raises UserError when it is missing, damaged or newer."""
    description, _, where = _read_model_json(folder)
    return _parse_spec(description, where)


def read_factory_code(folder: Path) -> FactoryCode:
    """Return the code of its own factories with which a model was saved. Raises as `read_spec`."""
    description, code, where = _read_model_json(folder)
    return (
        FactoryCode(_parse_spec(description, where).user_factories, code) if code else FactoryCode()
    )


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


_SHAPE = {
    "name": str, "input_shape": list, "classes": int, "options": dict, "mean": list, "std": list,
    "hidden_noise": bool, "following": bool, "shifts": int, "denoised_shifts": bool,
    "mirrored": bool, "signature": dict,
}  # fmt: skip
_OPTIONAL_DEFAULTS = {
    "following": False, "shifts": 0, "denoised_shifts": False, "mirrored": False, "signature": {},
}  # fmt: skip
_MAX_INPUT_VALUES = 2**28  # of one input, and classes


def _parse_spec(description: dict[str, Any], context: str) -> ModelSpec:
    check_shape({**_OPTIONAL_DEFAULTS, **description}, context, _SHAPE)
    sizes = [*description["input_shape"], description["classes"]]
    good = len(sizes) > 1 and all(type(size) is int and size >= 1 for size in sizes)
    if not good or math.prod(sizes) > _MAX_INPUT_VALUES:
        raise UserError(f"{context}: damaged: input_shape and classes must be sizes, got {sizes}")
    numbers = description["mean"] + description["std"]
    if not all(type(value) in (int, float) and abs(value) < 1e30 for value in numbers):
        raise UserError(f"{context}: damaged: mean and std must be numbers below 1e30")
    for name in ("input_shape", "mean", "std"):
        description[name] = tuple(description[name])
    for part in (CLASSIFIER, DENOISER):
        if description.get(part) is not None:
            inner = check_shape(description, context, {part: dict})[part]
            description[part] = _parse_spec(inner, f"{context}: {part}")
            if description[part].averages_views:
                raise UserError(f"{context}: damaged: {part}: an average is of the whole model")
    if description.get("block_noise") is not None:
        description["block_noise"] = _parse_block_noise(description, context)
    try:
        spec = ModelSpec(**description)
    except TypeError as error:
        raise UserError(f"{context}: damaged: {error}") from error
    if spec.signature:
        Signature.parse(spec.signature, context)
    if spec.averages_views:
        _check_views(spec, context)
    if spec.denoised_shifts and not (spec.averages_views and spec.denoiser):
        raise UserError(
            f"{context}: damaged: denoised_shifts needs shifts, or mirrored, and a denoiser"
        )
    return spec


def _check_views(spec: ModelSpec, context: str) -> None:
    """Raise UserError for an average that no training of ours leaves behind."""
    if not 0 <= spec.shifts <= MAX_SHIFT:
        raise UserError(f"{context}: damaged: shifts must be 0 to {MAX_SHIFT}, got {spec.shifts}")
    if spec.has_noise or spec.following:
        raise UserError(
            f"{context}: damaged: an average over shifts or mirror images goes with no noise of "
            "the model's own, nor with tokens"
        )


def _parse_block_noise(description: dict[str, Any], context: str) -> BlockNoise:
    shape = {
        "block_noise": dict, "block_noise.modules": list, "block_noise.mode": str,
        "block_noise.floor": float,
    }  # fmt: skip
    noise = check_shape(description, context, shape)["block_noise"]
    if not all(isinstance(name, str) for name in noise["modules"]):
        raise UserError(f"{context}: damaged: block_noise.modules must be names of modules")
    floor = noise["floor"]
    if not (math.isfinite(floor) and floor >= 0):
        raise UserError(f"{context}: damaged: block_noise.floor must be a number >= 0, got {floor}")
    return BlockNoise(tuple(noise["modules"]), noise["mode"], float(floor))


def check_trusted(spec: ModelSpec, trusted_factory: str | None, context: object) -> None:
    """Raise UserError when building the model would import a factory that nobody trusted."""
    for name in spec.factories:
        if name not in named_networks() and name != trusted_factory:
            raise UserError(
                f"{context}: the model is built by {name!r}, which is not ours; importing it runs "
                f"its code. If you trust it, name it (--trust-factory {name}; in Python "
                f"trusted_factory={name!r})",
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
