"""Architectures by name; a new one is its function and a line here. No torch before one is made."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from dpdist.base import vision
from dpdist.base.errors import UserError

# Modules are those of this package.
ZOO: Mapping[str, str] = {
    "linear": "zoo:linear",
    "mlp": "zoo:mlp",
    "tf-cnn": "zoo:tf_cnn",
    "unet-cnn": "zoo:unet_cnn",
    "hgm-cnn": "zoo:hgm_cnn",
    "pool-cnn": "zoo:pool_cnn",
    "small-cnn": "zoo:small_cnn",
    "resnet-gn": "residual:resnet_gn",
    "resnet-rp": "residual:resnet_rp",
    "next-word-mlp": "zoo:next_word_mlp",
    "next-word-lstm": "zoo:next_word_lstm",
    "conv-autoencoder": "denoiser:conv_autoencoder",
    "dncnn": "denoiser:dncnn",
    "unet": "denoiser:unet",
    "dpal-cnn": "dpal:dpal_cnn",
    "patches": "patches:patches",
    "scattering": "scattering:scattering",
    "torchvision": "torchvision_zoo:torchvision_classifier",
    "transformer": "transformer:transformer",
}


def check_name(name: str) -> None:
    """Raise UserError for a name that is neither of the zoo nor package.module:factory."""
    if name not in ZOO and ":" not in name:
        known = ", ".join(sorted(ZOO))
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


def factory_of(name: str) -> Callable[..., Any]:
    """What makes a model of that name. Raises UserError for a name that leads nowhere."""
    check_name(name)
    vision.install()  # a user's module may import torchvision
    module, _, attribute = (f"{__package__}.{ZOO[name]}" if name in ZOO else name).partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever a user's module does when it is imported
        raise UserError(f"model.name: cannot import {name!r}: {error}") from error
