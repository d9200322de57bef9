"""Architectures: inputs in [0, 1], no layer that mixes examples; saved as safetensors + JSON.

Names and descriptions are read without torch; what makes or holds a module loads it on first use.
"""

from typing import TYPE_CHECKING, Any

from dpdist.models.base_folder import is_base, with_config
from dpdist.models.catalogue import ZOO, check_name
from dpdist.models.spec import (
    CLASSIFIER,
    DENOISER,
    BlockNoise,
    ModelSpec,
    check_trusted,
    code_of,
    model_hash,
    read_spec,
)

if TYPE_CHECKING:
    from dpdist.models.classes import NO_CLASS, predicted_classes, softmax_scores
    from dpdist.models.company import allowed_rounding, fresh_copy, mixing
    from dpdist.models.dpal import DPALNetwork
    from dpdist.models.head import last_linear
    from dpdist.models.hidden import attach_block_noise, attach_noise
    from dpdist.models.making import (
        build,
        check_denoiser,
        check_outputs,
        initialise,
        load,
        load_network,
        load_weights,
        save,
    )
    from dpdist.models.patches import Patches, patches_of
    from dpdist.models.place import device_of
    from dpdist.models.residual import residual_blocks
    from dpdist.models.split import SplitModel, require_split, split_first
    from dpdist.models.views import check_views

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
    "classes": ("NO_CLASS", "predicted_classes", "softmax_scores"),
    "company": ("allowed_rounding", "fresh_copy", "mixing"),
    "dpal": ("DPALNetwork",),
    "head": ("last_linear",),
    "hidden": ("attach_block_noise", "attach_noise"),
    "making": (
        "build", "check_denoiser", "check_outputs", "initialise", "load", "load_network",
        "load_weights", "save",
    ),
    "patches": ("Patches", "patches_of"),
    "place": ("device_of",),
    "residual": ("residual_blocks",),
    "views": ("check_views",),
    "split": ("SplitModel", "require_split", "split_first"),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    for module, names in _WITH_TORCH.items():
        if name in names:
            import importlib

            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
