"""Noise inside a model, the network split at it, and the norm of the layer before it.

The scale of the noise is saved with the weights. The module's forward pass adds none; training,
evaluation, certification and attacks add fresh noise as `dpdist.randomness.noise_location` says.
After the first hidden layer: PixelDP (Lecuyer et al., IEEE S&P 2019), HGM-PixelDP and Secure-SGD
(Phan et al., IJCAI 2019). On the input and in several modules: residual perturbation.

All layers after the split must depend on the input only through the first layer, which must be the
affine map of its weights. So a model is split only if it is a sequence of layers that begins with a
plain convolution or linear layer: subclasses, parametrizations, hooks and replaced forward
functions may compute anything. `SplitModel.affine_layer` checks the rest numerically.

Noise of a fixed scale does not protect a layer whose weights grow. PixelDP therefore keeps the
layer's norm at most 1 after every update (Section III-B). Here the layer is scaled by a valid bound
of its norm, which depends only on released parameters and public constants: post-processing.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpdist.core.errors import UserError
from dpdist.models.outputs import device_of
from dpdist.models.spec import BlockNoise
from dpdist.models.zoo import NormalizedNetwork

# --- norm of the first layer ------------------------------------------------------------------


# Machines may differ in the last bits of a spectral norm, but their weights must not. A factor
# rounded down to this grid is the same on all of them, except at a grid point.
_GRID = 2.0**20


def first_layer_norm_bound(split: SplitModel) -> float:
    """Return an upper bound of the L2 operator norm of the first layer, in input units.

    For a linear layer it is the spectral norm. For a convolution it is that of the kernel as a
    (filters, patch) matrix, times the square root of the most patches that contain one pixel
    (ceil(kernel / stride) per side). Certificates use the smaller exact norm of the whole map.
    """
    layer = split.layer
    weight = layer.weight.detach().double().flatten(1)
    bound = float(torch.linalg.matrix_norm(weight, 2))
    if isinstance(layer, nn.Conv2d):
        sides = zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)
        patches = [k if dilated > 1 else math.ceil(k / stride) for k, stride, dilated in sides]
        bound *= math.sqrt(math.prod(patches))
        # Groups are a block-diagonal map: their joint norm is at most that of the stacked kernel.
    if split.std is not None:
        bound /= float(split.std.min())
    return bound


def project_first_layer_norm(split: SplitModel, limit: float) -> None:
    """Scale the first layer's weight, in place, so that its bound is at most `limit`."""
    bound = first_layer_norm_bound(split)
    if bound > limit:
        with torch.no_grad():
            split.layer.weight.mul_(math.floor(limit / bound * _GRID) / _GRID)


# --- the network cut after its first layer ----------------------------------------------------


_SCALES = (1e-3, 1.0, 1e3)  # of the inputs on which a split is checked
# rounding in float64 and float32, relative to the largest output
_AFFINE_TOLERANCE, _MODEL_TOLERANCE = 1e-9, 1e-6


@dataclass(frozen=True)
class SplitModel:
    """rest(first(x)) = model(x); all share the model's parameters.

    name: of ``layer``, the last module of ``first``, in ``model.named_modules()``. std: product of
    the normalizations before it (float64), or None.
    """

    model: nn.Module
    name: str
    layer: nn.Linear | nn.Conv2d
    first: nn.Module
    rest: nn.Module
    std: Tensor | None

    def hidden_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of one example's output of ``first``."""
        with torch.no_grad():
            zeros = torch.zeros(1, *input_shape, device=device_of(self.model))
            return tuple(self.first(zeros).shape[1:])

    def affine_layer(self, input_shape: tuple[int, ...]) -> nn.Linear | nn.Conv2d:
        """Return a float64 copy of ``layer`` with the weight of all of ``first``, in input units.

        Raises UserError unless, on inputs of several sizes, ``first`` is this affine map, and
        ``rest`` after ``first`` is the model.
        """
        layer = copy.deepcopy(self.layer).double().requires_grad_(False)
        if self.std is not None:
            std = self.std
            if isinstance(layer, nn.Linear):
                layer.weight /= std.expand(input_shape).reshape(1, -1)
            elif layer.groups != 1:
                raise UserError(
                    "the first convolution must have one group after a normalization, got "
                    f"{layer.groups}; normalize the data, or take groups=1"
                )
            else:
                layer.weight /= std.reshape(1, -1, 1, 1)
        self._check(layer, input_shape)
        return layer

    def _check(self, layer: nn.Linear | nn.Conv2d, input_shape: tuple[int, ...]) -> None:
        generator = torch.Generator().manual_seed(0)
        unit = torch.randn(4, *input_shape, generator=generator).to(device_of(self.model))
        try:
            with torch.no_grad():
                for x in (scale * unit for scale in _SCALES):
                    seen = x.double().flatten(1) if isinstance(layer, nn.Linear) else x.double()
                    shown = _apply_weight(layer, seen)
                    exact = copy.deepcopy(self.first).double()
                    moved = exact(x.double()) - exact(torch.zeros_like(x.double()))
                    what = "its first layer is not the map of its weights"
                    _require_equal(moved, shown, _AFFINE_TOLERANCE, what)
                    whole, parts = self.model(x), self.rest(self.first(x))
                    what = "split after that layer it is a different function"
                    _require_equal(parts, whole, _MODEL_TOLERANCE, what)
        except (RuntimeError, TypeError, IndexError) as error:  # mostly shapes that do not fit
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(f"the model cannot be split after its first layer: {reason}") from error


def _apply_weight(layer: nn.Linear | nn.Conv2d, x: Tensor) -> Tensor:
    """Return the map of the layer's weight, which calling the layer may not be."""
    if isinstance(layer, nn.Linear):
        return nn.functional.linear(x, layer.weight)
    return nn.functional.conv2d(
        x, layer.weight, None, layer.stride, layer.padding, layer.dilation, layer.groups
    )


def _require_equal(got: Tensor, expected: Tensor, rounding: float, what: str) -> None:
    atol = rounding * float(expected.abs().nan_to_num(0.0).max())
    if not torch.allclose(got, expected, rtol=0.0, atol=atol, equal_nan=True):
        raise UserError(f"noise in the first hidden layer does not support this model: {what}")


def split_after_first_layer(model: nn.Module) -> SplitModel | None:
    """Return the split after the first convolution or linear layer; None if it is impossible."""
    found = _split_or_reason(model)
    return found if isinstance(found, SplitModel) else None


def require_split(model: nn.Module) -> SplitModel:
    """Return `split_after_first_layer`. Raises UserError with the reason if it is impossible."""
    found = _split_or_reason(model)
    if isinstance(found, str):
        raise UserError(
            "noise in the first hidden layer needs a model that is a sequence of layers beginning "
            f"with a convolution or a linear layer: {found}"
        )
    return found


def _split_or_reason(model: nn.Module) -> SplitModel | str:
    """Return the split, or why there is none."""
    changed: list[str] = []
    modules = _flatten(model, "", changed)
    std: Tensor | None = None
    for place, (name, module) in enumerate(modules):
        where = f"{name or 'the model itself'} ({type(module).__name__})"
        if _has_custom_forward(module):
            changed.append(name)
        if changed:
            return f"{changed[0] or 'the model itself'} has hooks or a replaced forward"
        if type(module) is nn.Linear or type(module) is nn.Conv2d:
            if isinstance(module, nn.Conv2d) and module.padding_mode != "zeros":
                return f"{where} has padding_mode {module.padding_mode!r}, only zeros is supported"
            before = [each for _, each in modules[: place + 1]]
            after = [each for _, each in modules[place + 1 :]]
            if any(module is again for later in after for again in later.modules()):
                return f"{where} is used again in a later layer"
            first = nn.Sequential(*before).train(model.training)
            rest = nn.Sequential(*after).train(model.training)
            return SplitModel(model, name, module, first, rest, std)
        if type(module) is NormalizedNetwork:  # around an identity
            std = module.std.double() if std is None else std * module.std.double()
        elif type(module) not in (nn.Flatten, nn.Identity):
            return f"{where} is neither (subclasses and parametrizations may compute anything)"
    return "it has no layers"


def _has_custom_forward(module: nn.Module) -> bool:
    """Return whether the module has hooks or a replaced forward function."""
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    return any(hooks) or "forward" in vars(module)


def _flatten(model: nn.Module, name: str, changed: list[str]) -> list[tuple[str, nn.Module]]:
    """Return (name, module) in order; add containers with a custom forward to `changed`."""
    prefix = f"{name}." if name else ""
    if type(model) not in (NormalizedNetwork, nn.Sequential):
        return [(name, model)]
    if _has_custom_forward(model):
        changed.append(name)
    if isinstance(model, NormalizedNetwork):
        inner = _flatten(model.network, f"{prefix}network", changed)
        return [(name, NormalizedNetwork(nn.Identity(), model.mean, model.std)), *inner]
    children = model._modules.items()  # named_children omits duplicates
    return [pair for key, child in children for pair in _flatten(child, prefix + key, changed)]  # type: ignore[arg-type]


# --- noise saved with a model -----------------------------------------------------------------


HIDDEN_STD, INPUT_STD, BLOCK_STDS = "hidden_std", "input_std", "block_std"  # the saved tensors
BLOCK_NOISE_ATTRIBUTE = "block_noise"  # attribute of a model with its `BlockNoise`


def attach_noise(model: nn.Module, std: Tensor) -> None:
    """Set the model's noise after its first layer; std has the shape of that layer's output.

    Raises UserError if the model has no such layer.
    """
    require_split(model)
    model.register_buffer(HIDDEN_STD, std.detach().float().clone().to(device_of(model)))


def attach_zero_noise(model: nn.Module, input_shape: tuple[int, ...]) -> None:
    """Register the buffer for the noise of a model that is loaded next."""
    attach_noise(model, torch.zeros(require_split(model).hidden_shape(input_shape)))


def attach_block_noise(
    model: nn.Module, noise: BlockNoise, stds: Sequence[float], input_std: float
) -> None:
    """Set the model's noise on the outputs of modules and on its input.

    stds: one for each module of ``noise``. Raises UserError if the model has no such module.
    """
    known = {name for name, _ in model.named_modules()}
    missing = [name for name in noise.modules if name not in known]
    if missing:
        raise UserError(f"noise in modules: the model has no module named {missing[0]!r}")
    setattr(model, BLOCK_NOISE_ATTRIBUTE, noise)
    model.register_buffer(BLOCK_STDS, torch.tensor(list(stds), dtype=torch.float64))
    model.register_buffer(INPUT_STD, torch.tensor(input_std, dtype=torch.float64))


def drop_noise(tensors: dict[str, Tensor], model: nn.Module) -> None:
    """Remove the noise from saved tensors if the model has none."""
    for name in (HIDDEN_STD, BLOCK_STDS, INPUT_STD):
        if not hasattr(model, name):
            tensors.pop(name, None)
