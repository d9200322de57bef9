"""Architectures: inputs in [0, 1], no layer that mixes examples; saved as safetensors + JSON."""

from dpdist.models.build import (
    CLASSIFIER,
    DENOISER,
    ModelSpec,
    build,
    check_denoiser,
    check_outputs,
    initialise,
    load,
    load_weights,
    model_hash,
    read_spec,
    save,
)
from dpdist.models.company import mixing
from dpdist.models.dpal import DPALNetwork
from dpdist.models.head import last_linear
from dpdist.models.hidden import BlockNoise, attach_block_noise, attach_noise
from dpdist.models.patches import Patches, patches_of
from dpdist.models.residual import residual_blocks
from dpdist.models.split import SplitModel, require_split, split_first

__all__ = [
    "CLASSIFIER",
    "DENOISER",
    "BlockNoise",
    "DPALNetwork",
    "ModelSpec",
    "Patches",
    "SplitModel",
    "attach_block_noise",
    "attach_noise",
    "build",
    "check_denoiser",
    "check_outputs",
    "initialise",
    "last_linear",
    "load",
    "load_weights",
    "mixing",
    "model_hash",
    "patches_of",
    "read_spec",
    "require_split",
    "residual_blocks",
    "save",
    "split_first",
]
