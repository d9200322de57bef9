"""Convert a network for private training: `dpdist.prepare(model)`.

BatchNorm becomes GroupNorm, which normalizes each example by itself (Wu & He, "Group
Normalization", ECCV 2018), or a fixed map by its stored statistics. Weights and biases are kept.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from dpdist.core.errors import UserError
from dpdist.models.zoo import FixedBatchNorm

_MOST_GROUPS, _FEWEST_CHANNELS = 32, 8
_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def prepare(model: nn.Module, batch_norm: Literal["group", "eval"] = "group") -> nn.Module:
    """Return a copy of a model with layers that mix examples replaced, and print what changed.

    Guarantee: the copy has no BatchNorm, no running statistics and no embedding that rescales over
    a batch. A training detects other layers that mix examples when it starts. Build the optimizer
    from the copy.

    BatchNorm becomes GroupNorm of at most 32 groups with 8 channels or more each. Weight, bias and
    eps are kept; the outputs change, so a network that was trained before needs more training.
    Weight and spectral norms by hooks become parametrizations, and RReLU a LeakyReLU of its mean
    slope. InstanceNorm stops keeping running statistics, embeddings stop rescaling (`max_norm`,
    `scale_grad_by_freq`), and `nn.TransformerEncoder` stops packing tokens.

    Args:
        model: any module; it stays as it is.
        batch_norm: "group", or "eval" for a fixed map by the stored statistics, which must be of
            PUBLIC records: the card lists the data behind the initial weights as an assumption.

    Returns:
        The copy, a torch module in the same mode (training or evaluation) on the same device; an
        equal copy if no layer mixes examples.

    Raises:
        UserError: a subclass of BatchNorm does more than normalize, or "eval" finds no statistics.

    Example:
        >>> import torch, dpdist
        >>> network = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16))
        >>> dpdist.prepare(network)[1].num_groups
        prepare: 1 BatchNorm2d -> GroupNorm
        2
    """
    if batch_norm not in ("group", "eval"):
        raise UserError(f"batch_norm: must be 'group' or 'eval', got {batch_norm!r}")
    changed: Counter[str] = Counter()
    holder = nn.ModuleDict({"model": copy.deepcopy(model, _computed(model))})
    done: dict[int, nn.Module] = {}  # a layer with two names stays one layer
    for name, module in list(holder.named_modules(remove_duplicate=False)):
        if isinstance(module, nn.RReLU):
            mean = (module.lower + module.upper) / 2
            path, _, own = name.rpartition(".")
            setattr(holder.get_submodule(path), own, nn.LeakyReLU(mean, module.inplace))
            changed["RReLU -> LeakyReLU"] += 1
        if isinstance(module, _BatchNorm):
            where = name.removeprefix("model").removeprefix(".") or "the model itself"
            if id(module) not in done:
                done[id(module)] = _replaced(module, where, batch_norm)
                new = "GroupNorm" if batch_norm == "group" else "fixed statistics"
                changed[f"{type(module).__name__} -> {new}"] += 1
            path, _, own = name.rpartition(".")
            setattr(holder.get_submodule(path), own, done[id(module)])
    for module in list(holder.modules()):
        if isinstance(module, _InstanceNorm) and module.track_running_stats:
            module.track_running_stats = False
            module.running_mean = module.running_var = module.num_batches_tracked = None
            changed[f"{type(module).__name__} without running statistics"] += 1
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and (
            module.max_norm is not None or module.scale_grad_by_freq
        ):
            module.max_norm, module.scale_grad_by_freq = None, False
            changed[f"{type(module).__name__} without max_norm and scale_grad_by_freq"] += 1
        for kind in _by_parametrization(module):
            changed[f"{kind} as a parametrization"] += 1
        if isinstance(module, nn.TransformerEncoder) and module.enable_nested_tensor:
            module.enable_nested_tensor = module.use_nested_tensor = False
            changed["TransformerEncoder without nested tensors"] += 1
    summary = ", ".join(f"{count} {what}" for what, count in changed.items())
    print(f"prepare: {summary or 'nothing to change'}")
    found: nn.Module = holder["model"]
    return found


def _computed(model: nn.Module) -> dict[int, Any]:
    """Return copies of tensors that the hook of a norm computed, for `deepcopy`."""
    held = (value for module in model.modules() for value in vars(module).values())
    return {id(v): v.detach().clone() for v in held if isinstance(v, Tensor) and not v.is_leaf}


def _by_parametrization(module: nn.Module) -> list[str]:
    """Replace weight and spectral norms by hooks with parametrizations; return their names."""
    done = []
    for hook in list(module._forward_pre_hooks.values()):
        name = getattr(hook, "name", "weight")
        if isinstance(hook, WeightNorm):
            nn.utils.remove_weight_norm(module, name)
            nn.utils.parametrizations.weight_norm(module, name, hook.dim)
            done.append("weight norm")
        if isinstance(hook, SpectralNorm):
            nn.utils.remove_spectral_norm(module, name)
            nn.utils.parametrizations.spectral_norm(
                module, name, hook.n_power_iterations, hook.eps, hook.dim
            )
            done.append("spectral norm")
    return done


def _replaced(layer: Any, where: str, batch_norm: str) -> nn.Module:
    """Return the replacement of a BatchNorm, with its weights."""
    kind = type(layer)
    # timm's BatchNormAct2d: dropout and an activation follow.
    parts = [getattr(layer, name, None) for name in ("drop", "act")]
    after = [each for each in parts if isinstance(each, nn.Module)]
    follows = len(after) == 2
    if kind not in _PLAIN and not follows and kind.forward not in {each.forward for each in _PLAIN}:
        raise UserError(
            f"layer {where}: must be one of torch's BatchNorms, got {kind.__name__}, which may do "
            "more than normalize; replace it by torch.nn.GroupNorm and its other operations"
        )
    made = _group_norm(layer) if batch_norm == "group" else _fixed(layer, where)
    made.train(layer.training)
    made.requires_grad_(layer.weight is not None and layer.weight.requires_grad)
    return nn.Sequential(made, *after) if follows else made


def _group_norm(layer: Any) -> nn.GroupNorm:
    channels = layer.num_features
    most = max(1, min(_MOST_GROUPS, channels // _FEWEST_CHANNELS))
    groups = next(count for count in range(most, 0, -1) if channels % count == 0)
    made = nn.GroupNorm(groups, channels, eps=layer.eps, affine=layer.affine)
    if layer.affine:
        made.weight, made.bias = layer.weight, layer.bias
    return made


def _fixed(layer: Any, where: str) -> FixedBatchNorm:
    if layer.running_mean is None or layer.running_var is None:
        raise UserError(
            f"layer {where}: must have stored statistics for batch_norm='eval', got none; take "
            "batch_norm='group'"
        )
    made = FixedBatchNorm(layer.num_features, layer.eps, layer.momentum)
    made.running_mean, made.running_var = layer.running_mean, layer.running_var
    if layer.affine:
        made.weight, made.bias = layer.weight, layer.bias
    return made.to(layer.running_mean)
