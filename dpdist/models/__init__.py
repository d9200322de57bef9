"""Architectures: inputs in [0, 1], no layer that mixes examples; saved as safetensors and JSON.

Names and descriptions are read without torch; names that need torch are loaded on first use.
"""

from typing import TYPE_CHECKING, Any

from dpdist.models.spec import (
    CLASSIFIER,
    DENOISER,
    ZOO,
    BlockNoise,
    ModelSpec,
    check_name,
    check_trusted,
    code_of,
    is_base,
    model_hash,
    read_spec,
    with_config,
)

if TYPE_CHECKING:
    from dpdist.models.batch_independence import allowed_rounding, fresh_copy, mixing
    from dpdist.models.builder import (
        build,
        check_denoiser,
        check_outputs,
        initialise,
        load,
        load_network,
        load_weights,
        save,
    )
    from dpdist.models.features import Patches, last_linear, patches_of
    from dpdist.models.noise import (
        SplitModel,
        attach_block_noise,
        attach_noise,
        require_split,
        split_first,
    )
    from dpdist.models.outputs import (
        NO_CLASS,
        check_views,
        device_of,
        predicted_classes,
        softmax_scores,
    )
    from dpdist.models.zoo import DPALNetwork, residual_blocks

__all__ = [
    "CLASSIFIER",
    "DENOISER",
    "NO_CLASS",
    "ZOO",
    "BlockNoise",
    "DPALNetwork",
    "ModelSpec",
    "Patches",
    "SplitModel",
    "allowed_rounding",
    "attach_block_noise",
    "attach_noise",
    "build",
    "check_denoiser",
    "check_name",
    "check_outputs",
    "check_trusted",
    "check_views",
    "code_of",
    "device_of",
    "fresh_copy",
    "initialise",
    "is_base",
    "last_linear",
    "load",
    "load_network",
    "load_weights",
    "mixing",
    "model_hash",
    "patches_of",
    "predicted_classes",
    "read_spec",
    "require_split",
    "residual_blocks",
    "save",
    "softmax_scores",
    "split_first",
    "with_config",
]
_WITH_TORCH = {
    "batch_independence": ("allowed_rounding", "fresh_copy", "mixing"),
    "builder": (
        "build",
        "check_denoiser",
        "check_outputs",
        "initialise",
        "load",
        "load_network",
        "load_weights",
        "save",
    ),
    "features": ("Patches", "last_linear", "patches_of"),
    "noise": ("SplitModel", "attach_block_noise", "attach_noise", "require_split", "split_first"),
    "outputs": ("NO_CLASS", "check_views", "device_of", "predicted_classes", "softmax_scores"),
    "zoo": ("DPALNetwork", "residual_blocks"),
}


def __getattr__(name: str) -> Any:
    for module, names in _WITH_TORCH.items():
        if name in names:
            import importlib

            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
