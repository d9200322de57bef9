"""Architectures: inputs in [0, 1], no layer that mixes examples; saved as safetensors and JSON.

Names and descriptions are read without torch; names that need torch are loaded on first use.
"""

from typing import TYPE_CHECKING, Any

from dpdist.models.spec import (
    CLASSIFIER,
    DENOISER,
    SCRIPT,
    TRAINED_BY,
    BlockNoise,
    ModelSpec,
    check_name,
    check_trusted,
    is_base_model,
    model_hash,
    named_networks,
    read_factory_code,
    read_spec,
    with_base_config,
)

if TYPE_CHECKING:
    from dpdist.models.batch_independence import (
        find_batch_dependence,
        fresh_copy,
        rounding_tolerance,
    )
    from dpdist.models.builder import (
        build_model,
        check_denoiser,
        check_outputs,
        initialize,
        load,
        load_network,
        load_weights,
        normalized,
        save,
    )
    from dpdist.models.features import PatchFeatures, last_linear, patch_features_of
    from dpdist.models.noise import (
        SplitModel,
        attach_block_noise,
        attach_noise,
        require_split,
        split_after_first_layer,
    )
    from dpdist.models.outputs import (
        NO_CLASS,
        NextTokenLogits,
        check_views,
        device_of,
        may_hold_script,
        predicted_classes,
        softmax_scores,
    )
    from dpdist.models.weights import Adapter, base_digest, base_dtype, without_adapters
    from dpdist.models.zoo import residual_blocks

__all__ = [
    "CLASSIFIER",
    "DENOISER",
    "NO_CLASS",
    "SCRIPT",
    "TRAINED_BY",
    "Adapter",
    "BlockNoise",
    "ModelSpec",
    "NextTokenLogits",
    "PatchFeatures",
    "SplitModel",
    "attach_block_noise",
    "attach_noise",
    "base_digest",
    "base_dtype",
    "build_model",
    "check_denoiser",
    "check_name",
    "check_outputs",
    "check_trusted",
    "check_views",
    "device_of",
    "find_batch_dependence",
    "fresh_copy",
    "initialize",
    "is_base_model",
    "last_linear",
    "load",
    "load_network",
    "load_weights",
    "may_hold_script",
    "model_hash",
    "named_networks",
    "normalized",
    "patch_features_of",
    "predicted_classes",
    "read_factory_code",
    "read_spec",
    "require_split",
    "residual_blocks",
    "rounding_tolerance",
    "save",
    "softmax_scores",
    "split_after_first_layer",
    "with_base_config",
    "without_adapters",
]
_WITH_TORCH = {
    "batch_independence": ("rounding_tolerance", "fresh_copy", "find_batch_dependence"),
    "builder": (
        "build_model",
        "check_denoiser",
        "check_outputs",
        "initialize",
        "load",
        "load_network",
        "load_weights",
        "normalized",
        "save",
    ),
    "features": ("PatchFeatures", "last_linear", "patch_features_of"),
    "noise": (
        "SplitModel",
        "attach_block_noise",
        "attach_noise",
        "require_split",
        "split_after_first_layer",
    ),
    "outputs": (
        "NO_CLASS",
        "NextTokenLogits",
        "check_views",
        "device_of",
        "may_hold_script",
        "predicted_classes",
        "softmax_scores",
    ),
    "weights": ("Adapter", "base_digest", "base_dtype", "without_adapters"),
    "zoo": ("residual_blocks",),
}


def __getattr__(name: str) -> Any:
    for module, names in _WITH_TORCH.items():
        if name in names:
            import importlib

            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
