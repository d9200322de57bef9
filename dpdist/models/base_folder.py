"""Bases that others trained: folders of config.json and safetensors, as `save_pretrained` writes
them.

Numbers alone are read. Nothing is unpickled, downloaded or imported, whatever the folder says.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpdist.base.errors import UserError
from dpdist.base.reading import read_json, reason, regular_file

if TYPE_CHECKING:
    from torch import Tensor, nn

_CONFIG, _WHOLE, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_ADAPTED = ("lora_", "ia3_")  # in names of tensors that no folder of a base has
_AT_ONCE = 2**22  # bytes


def is_base(folder: Path) -> bool:
    """Whether `folder` holds a base, not a model of dpdist."""
    return (folder / _CONFIG).exists() and not (folder / "model.json").exists()


def with_config(options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """`options` of a model with the configuration of the base in `folder`; as they are when there
    is none. Raises UserError for a base that needs code or formats of its own."""
    if not is_base(folder):
        return dict(options)
    if "config" in options:
        raise UserError(f"model.options.config: leave it out: it is that of {folder / _CONFIG}")
    found = read_json(folder / _CONFIG, {"model_type": str})
    for key in ("auto_map", "quantization_config"):
        if found.get(key):
            raise UserError(f"{folder / _CONFIG}: has {key}, which is not read: take a plain base")
    from dpdist.models.transformer import known_settings

    known = known_settings(found["model_type"])
    return {**options, "config": {k: v for k, v in found.items() if k in known}}


def base_hash(folder: Path) -> str:
    """Hex digest of configuration and weights."""
    digest = hashlib.blake2b(digest_size=16, person=b"dpdist.base")
    for path in (folder / _CONFIG, *_files(folder)):
        with open(regular_file(path), "rb") as file:
            while piece := file.read(_AT_ONCE):
                digest.update(piece)
    return digest.hexdigest()


def load_base(module: nn.Module, folder: Path) -> None:
    """Copy the weights in `folder` into the base of a model that has adapters already.

    Heads that the folder has besides are left out. Raises UserError when they do not fit.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from dpdist.models.transformer import Transformer

    if not isinstance(module, Transformer):
        raise UserError(f"{folder}: a base is for model.name: transformer, without mean and std")
    tensors: dict[str, Tensor] = {}
    for path in _files(folder):
        try:
            tensors |= load_file(regular_file(path))
        except SafetensorError as error:
            raise UserError(f"{path}: damaged: {reason(error)}") from error
    found = _renamed(module.base, tensors, folder).state_dict()
    with torch.no_grad():
        for name, tensor in module.base.state_dict().items():
            if not any(part in name for part in _ADAPTED):
                tensor.copy_(found[name.replace(".base_layer.", ".")])


def _renamed(base: Any, tensors: dict[str, Tensor], folder: Path) -> nn.Module:
    """The same base without adapters and with these weights, of which the library knows what they
    were called before."""
    import torch

    from dpdist.models.transformer import bare

    try:
        with torch.random.fork_rng(devices=[]):
            made, found = type(base).from_pretrained(
                None, config=base.config, state_dict=tensors, dtype=torch.float32,
                output_loading_info=True, local_files_only=True, **bare(type(base)),
            )  # fmt: skip
    except (RuntimeError, ValueError, KeyError) as error:
        raise UserError(f"{folder}: does not fit the base: {reason(error)}") from error
    if missing := sorted(found["missing_keys"]):
        raise UserError(
            f"{folder}: has no {missing[0]}, and {len(missing) - 1:,} more are missing: are these "
            "another network's weights?"
        )
    return made


def _files(folder: Path) -> list[Path]:
    """The files of weights, which lie in the folder itself."""
    if not (folder / _INDEX).exists():
        return [folder / _WHOLE]
    names = read_json(folder / _INDEX, {"weight_map": dict})["weight_map"].values()
    for name in names:
        if not (isinstance(name, str) and name.endswith(".safetensors") and "/" not in name):
            raise UserError(f"{folder / _INDEX}: damaged: {name!r} is no file of the folder")
    return [folder / name for name in sorted(set(names))]
