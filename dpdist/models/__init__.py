"""Architectures: inputs in [0, 1], no layer that mixes examples; saved as safetensors and JSON.

Names and descriptions are read without torch; names that need torch are loaded on first use.
"""

from typing import TYPE_CHECKING, Any

from dpdist.models.spec import CLASSIFIER as CLASSIFIER
from dpdist.models.spec import DENOISER as DENOISER
from dpdist.models.spec import SCRIPT as SCRIPT
from dpdist.models.spec import TRAINED_BY as TRAINED_BY
from dpdist.models.spec import BlockNoise as BlockNoise
from dpdist.models.spec import ModelSpec as ModelSpec
from dpdist.models.spec import check_name as check_name
from dpdist.models.spec import check_trusted as check_trusted
from dpdist.models.spec import is_base_model as is_base_model
from dpdist.models.spec import model_hash as model_hash
from dpdist.models.spec import named_networks as named_networks
from dpdist.models.spec import read_factory_code as read_factory_code
from dpdist.models.spec import read_spec as read_spec
from dpdist.models.spec import with_base_config as with_base_config

if TYPE_CHECKING:
    from dpdist.models.batch_independence import find_batch_dependence as find_batch_dependence
    from dpdist.models.batch_independence import fresh_copy as fresh_copy
    from dpdist.models.batch_independence import rounding_tolerance as rounding_tolerance
    from dpdist.models.builder import build_model as build_model
    from dpdist.models.builder import check_denoiser as check_denoiser
    from dpdist.models.builder import check_outputs as check_outputs
    from dpdist.models.builder import initialize as initialize
    from dpdist.models.builder import load as load
    from dpdist.models.builder import load_network as load_network
    from dpdist.models.builder import load_weights as load_weights
    from dpdist.models.builder import normalized as normalized
    from dpdist.models.builder import save as save
    from dpdist.models.features import PatchFeatures as PatchFeatures
    from dpdist.models.features import last_linear as last_linear
    from dpdist.models.features import patch_features_of as patch_features_of
    from dpdist.models.noise import SplitModel as SplitModel
    from dpdist.models.noise import attach_block_noise as attach_block_noise
    from dpdist.models.noise import attach_noise as attach_noise
    from dpdist.models.noise import require_split as require_split
    from dpdist.models.noise import split_after_first_layer as split_after_first_layer
    from dpdist.models.outputs import NO_CLASS as NO_CLASS
    from dpdist.models.outputs import NextTokenLogits as NextTokenLogits
    from dpdist.models.outputs import check_views as check_views
    from dpdist.models.outputs import device_of as device_of
    from dpdist.models.outputs import may_hold_script as may_hold_script
    from dpdist.models.outputs import predicted_classes as predicted_classes
    from dpdist.models.outputs import softmax_scores as softmax_scores
    from dpdist.models.weights import Adapter as Adapter
    from dpdist.models.weights import base_digest as base_digest
    from dpdist.models.weights import base_dtype as base_dtype
    from dpdist.models.weights import without_adapters as without_adapters
    from dpdist.models.zoo import residual_blocks as residual_blocks

_WITH_TORCH = {  # module: names that are loaded on first use
    "batch_independence": "find_batch_dependence fresh_copy rounding_tolerance",
    "builder": (
        "build_model check_denoiser check_outputs initialize load load_network load_weights "
        "normalized save"
    ),
    "features": "PatchFeatures last_linear patch_features_of",
    "noise": "SplitModel attach_block_noise attach_noise require_split split_after_first_layer",
    "outputs": (
        "NO_CLASS NextTokenLogits check_views device_of may_hold_script predicted_classes "
        "softmax_scores"
    ),
    "weights": "Adapter base_digest base_dtype without_adapters",
    "zoo": "residual_blocks",
}


def __getattr__(name: str) -> Any:
    for module, names in _WITH_TORCH.items():
        if name in names.split():
            import importlib

            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
