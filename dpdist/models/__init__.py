"""Architectures: inputs in [0, 1], no layer that mixes examples; saved as safetensors + JSON."""

from dpdist.models.build import (
    ModelSpec,
    build,
    check_outputs,
    initialise,
    load,
    load_weights,
    model_hash,
    read_spec,
    save,
)

__all__ = [
    "ModelSpec",
    "build",
    "check_outputs",
    "initialise",
    "load",
    "load_weights",
    "model_hash",
    "read_spec",
    "save",
]
