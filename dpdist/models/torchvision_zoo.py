"""Classifiers of torchvision, in a form that keeps examples apart and draws nothing.

BatchNorm becomes a fixed map by its running statistics, dropout is taken out. As a frozen public
part such a network may stand behind a trained one; its own statistics are public constants.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dpdist.base.vision import torchvision

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


class FixedBatchNorm(nn.Module):
    """BatchNorm by stored statistics: (x - mean) / sqrt(var + eps) * weight + bias, per channel.

    Its tensors are named as BatchNorm2d's. Only inside `estimating` it normalises by the batch and
    updates the statistics: that mixes examples and is for training on public records.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, features: int, eps: float, momentum: float | None) -> None:
        super().__init__()
        self.eps, self.momentum = eps, 0.1 if momentum is None else momentum
        self.estimate = False
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))
        self.register_buffer("running_mean", torch.zeros(features))
        self.register_buffer("running_var", torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        if self.estimate:
            return nn.functional.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias,
                training=True, momentum=self.momentum, eps=self.eps,
            )  # fmt: skip
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        shift = self.bias - self.running_mean * scale
        return x * scale.view(1, -1, 1, 1) + shift.view(1, -1, 1, 1)


@contextmanager
def estimating(module: nn.Module) -> Iterator[None]:
    """Let the fixed normalisations estimate their statistics, as BatchNorm does in training."""
    layers = [layer for layer in module.modules() if isinstance(layer, FixedBatchNorm)]
    for layer in layers:
        layer.estimate = True
    try:
        yield
    finally:
        for layer in layers:
            layer.estimate = False


def torchvision_classifier(
    input_shape: Sequence[int], classes: int, architecture: str = "resnet18"
) -> nn.Module:
    """torchvision.models' `architecture` with `classes` outputs, for (3, H, W) images."""
    if len(input_shape) != 3 or input_shape[0] != 3:
        raise ValueError(f"torchvision's classifiers take (3, H, W), got {tuple(input_shape)}")
    known = torchvision("models").list_models(module=torchvision("models"))
    if architecture not in known:
        raise ValueError(f"architecture: unknown {architecture!r}; torchvision has {known}")
    options = {"init_weights": True} if architecture in ("googlenet", "inception_v3") else {}
    network = torchvision("models").get_model(
        architecture, weights=None, num_classes=classes, **options
    )
    return fixed(network)


def published_weights(architecture: str) -> tuple[dict[str, Tensor], str]:
    """torchvision's default weights of an architecture, downloaded, and their name.

    Kept where torch.hub keeps its files; the download is compared with its checksum and nothing in
    it is executed. Raises ValueError when there are none, OSError or RuntimeError when they cannot
    be had.
    """
    weights = torchvision("models").get_model_weights(architecture).DEFAULT
    tensors = weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
    return tensors, str(weights)


def fixed(module: nn.Module) -> nn.Module:
    """Replace, in place, every BatchNorm2d by `FixedBatchNorm` and every dropout by nothing."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            if child.running_mean is None or child.running_var is None or not child.affine:
                raise ValueError(f"{name}: a BatchNorm without statistics or weights of its own")
            layer = FixedBatchNorm(child.num_features, child.eps, child.momentum)
            state = child.state_dict()
            layer.load_state_dict({key: state[key] for key in layer.state_dict()})
            setattr(module, name, layer)
        elif isinstance(child, _DROPOUT):
            setattr(module, name, nn.Identity())
        else:
            fixed(child)
    return module
