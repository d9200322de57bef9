"""Noise that belongs to a model, the network cut at it, and the norm of the layer before it.

Noise is saved and loaded with the weights. The module's own forward pass draws none; training,
evaluation, certification and attacks add fresh noise where `dpdist.randomness.noise_location`
says. Behind the first hidden layer: PixelDP (Lecuyer et al., IEEE S&P 2019), HGM-PixelDP and
Secure-SGD (Phan et al., IJCAI 2019). On the input and in several modules: residual perturbation.

Everything behind the cut must see the input through the first layer only, and that layer must be
the affine map that its weights say. So a model is cut when it is a sequence of layers beginning
with a plain convolution or dense layer, and refused otherwise: subclasses, parametrizations, hooks
and replaced forward functions may compute anything. `SplitModel.affine_layer` checks the rest by
numbers.

Noise of a fixed scale hides nothing from a layer that grows. PixelDP therefore keeps the layer's
norm at most 1 after every update (Section III-B). Here the layer is scaled back by a valid bound
of its norm, which reads released parameters and public constants only: post-processing, free of
privacy cost.
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


# Machines may differ in the last bits of a spectral norm; their weights must not. A factor on this
# grid is the same on all of them, but for a rounding at a grid point.
_GRID = 2.0**20


def first_layer_norm_bound(split: SplitModel) -> float:
    """An upper bound of the L2 operator norm of the first layer, in input units.

    Dense: the spectral norm. Convolution: that of the kernel as a (filters, patch) matrix, times
    the square root of how many patches one pixel can lie in (at most ceil(kernel / stride) a side).
    The certificate uses the exact norm of the whole map, which is smaller.
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
    """Scale the first layer's weight back, in place, so that its bound is at most `limit`."""
    bound = first_layer_norm_bound(split)
    if bound > limit:
        with torch.no_grad():
            split.layer.weight.mul_(math.floor(limit / bound * _GRID) / _GRID)


# --- the network cut after its first layer ----------------------------------------------------


_SCALES = (1e-3, 1.0, 1e3)  # of the inputs on which a cut is checked
# what is rounding in float64 and float32, of the largest output
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
        """Shape of one example's output of ``first``."""
        with torch.no_grad():
            zeros = torch.zeros(1, *input_shape, device=device_of(self.model))
            return tuple(self.first(zeros).shape[1:])

    def affine_layer(self, input_shape: tuple[int, ...]) -> nn.Linear | nn.Conv2d:
        """A float64 copy of ``layer`` whose weight is that of ``first`` as a whole, in input units.

        Checked on inputs of several sizes: ``first`` moves as this layer does, and ``rest`` of it
        is the model. Raises UserError where that does not hold.
        """
        layer = copy.deepcopy(self.layer).double().requires_grad_(False)
        if self.std is not None:
            std = self.std
            if isinstance(layer, nn.Linear):
                layer.weight /= std.expand(input_shape).reshape(1, -1)
            elif layer.groups != 1:
                raise UserError("a grouped first convolution behind a normalization is not handled")
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
                    _require_equal(
                        moved, shown, _AFFINE_TOLERANCE, "its first layer is not the map it shows"
                    )
                    whole, parts = self.model(x), self.rest(self.first(x))
                    _require_equal(
                        parts, whole, _MODEL_TOLERANCE, "cut behind that layer it is another"
                    )
        except (RuntimeError, TypeError, IndexError) as error:  # shapes that do not fit, mostly
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(f"the model cannot be cut behind its first layer: {reason}") from error


def _apply_weight(layer: nn.Linear | nn.Conv2d, x: Tensor) -> Tensor:
    """The map that the layer's weight says, which calling the layer may not be."""
    if isinstance(layer, nn.Linear):
        return nn.functional.linear(x, layer.weight)
    return nn.functional.conv2d(
        x, layer.weight, None, layer.stride, layer.padding, layer.dilation, layer.groups
    )


def _require_equal(got: Tensor, expected: Tensor, rounding: float, what: str) -> None:
    atol = rounding * float(expected.abs().nan_to_num(0.0).max())
    if not torch.allclose(got, expected, rtol=0.0, atol=atol, equal_nan=True):
        raise UserError(f"noise in the first hidden layer does not fit this model: {what}")


def split_after_first_layer(model: nn.Module) -> SplitModel | None:
    """The cut after the first convolution or dense layer; None when the model cannot be cut."""
    found = _split_or_reason(model)
    return found if isinstance(found, SplitModel) else None


def require_split(model: nn.Module) -> SplitModel:
    """Return `split_after_first_layer`. Raises UserError with the reason when the model cannot be
    cut."""
    found = _split_or_reason(model)
    if isinstance(found, str):
        raise UserError(
            "noise in the first hidden layer needs a model that is a sequence of layers beginning "
            f"with a convolution or a dense layer: {found}"
        )
    return found


def _split_or_reason(model: nn.Module) -> SplitModel | str:
    """The cut, or why there is none."""
    changed: list[str] = []
    modules = _flatten(model, "", changed)
    std: Tensor | None = None
    for place, (name, module) in enumerate(modules):
        where = f"{name or 'the model itself'} ({type(module).__name__})"
        if _has_custom_forward(module):
            changed.append(name)
        if changed:
            return f"{changed[0] or 'the model itself'} has hooks or a forward of its own"
        if type(module) is nn.Linear or type(module) is nn.Conv2d:
            if isinstance(module, nn.Conv2d) and module.padding_mode != "zeros":
                return f"{where} has padding_mode {module.padding_mode!r}, only zeros is handled"
            if any(
                module is again for _, later in modules[place + 1 :] for again in later.modules()
            ):
                return f"{where} is used again further on"
            first = nn.Sequential(*[m for _, m in modules[: place + 1]]).train(model.training)
            rest = nn.Sequential(*[m for _, m in modules[place + 1 :]]).train(model.training)
            return SplitModel(model, name, module, first, rest, std)
        if type(module) is NormalizedNetwork:  # of nothing: the first step alone
            std = module.std.double() if std is None else std * module.std.double()
        elif type(module) not in (nn.Flatten, nn.Identity):
            return f"{where} is none (subclasses and parametrizations may compute anything)"
    return "it has no layers"


def _has_custom_forward(module: nn.Module) -> bool:
    """Whether calling the module does something else than its class's forward."""
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    return any(hooks) or "forward" in vars(module)


def _flatten(model: nn.Module, name: str, changed: list[str]) -> list[tuple[str, nn.Module]]:
    """(name, module) in order; changed: names of opened containers that are more than they hold."""
    prefix = f"{name}." if name else ""
    if type(model) not in (NormalizedNetwork, nn.Sequential):
        return [(name, model)]
    if _has_custom_forward(model):
        changed.append(name)
    if isinstance(model, NormalizedNetwork):
        inner = _flatten(model.network, f"{prefix}network", changed)
        return [(name, NormalizedNetwork(nn.Identity(), model.mean, model.std)), *inner]
    children = model._modules.items()  # named_children leaves out what comes a second time
    return [pair for key, child in children for pair in _flatten(child, prefix + key, changed)]  # type: ignore[arg-type]


# --- noise saved with a model -----------------------------------------------------------------


HIDDEN_STD, INPUT_STD, BLOCK_STDS = "hidden_std", "input_std", "block_std"  # the saved tensors
BLOCK_NOISE_ATTRIBUTE = "block_noise"  # the attribute of a model that says where BLOCKS go


def attach_noise(model: nn.Module, std: Tensor) -> None:
    """Give the model noise behind its first layer; std has the shape of that layer's output.

    Raises UserError when the model has no such layer.
    """
    require_split(model)
    model.register_buffer(HIDDEN_STD, std.detach().float().clone().to(device_of(model)))


def attach_zero_noise(model: nn.Module, input_shape: tuple[int, ...]) -> None:
    """Room for the noise of a model about to be loaded."""
    attach_noise(model, torch.zeros(require_split(model).hidden_shape(input_shape)))


def attach_block_noise(
    model: nn.Module, noise: BlockNoise, stds: Sequence[float], input_std: float
) -> None:
    """Give the model noise on the outputs of its modules and on its input.

    stds: one for each module of ``noise``. Raises UserError when the model has no such module.
    """
    known = {name for name, _ in model.named_modules()}
    missing = [name for name in noise.modules if name not in known]
    if missing:
        raise UserError(f"noise in modules: the model has no module named {missing[0]!r}")
    setattr(model, BLOCK_NOISE_ATTRIBUTE, noise)
    model.register_buffer(BLOCK_STDS, torch.tensor(list(stds), dtype=torch.float64))
    model.register_buffer(INPUT_STD, torch.tensor(input_std, dtype=torch.float64))


def drop_noise(tensors: dict[str, Tensor], model: nn.Module) -> None:
    """A model with noise may give its weights to one without: leave out the noise of others."""
    for name in (HIDDEN_STD, BLOCK_STDS, INPUT_STD):
        if not hasattr(model, name):
            tensors.pop(name, None)
