"""The 6n + 2 network of residual perturbation (Tao et al.), and its ensembles (EnResNet)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from dpdist.models.zoo import ResidualBlock, residual_stages


class _PreActivation(ResidualBlock):
    """x + F(x), or F(x) without the skip: normalization, ReLU and a 3x3 convolution, twice."""

    def __init__(
        self,
        width_in: int,
        width_out: int,
        stride: int,
        normalize: Callable[[int], nn.Module],
        skip: bool,
    ) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            normalize(width_in),
            nn.ReLU(),
            nn.Conv2d(width_in, width_out, 3, stride=stride, padding=1, bias=False),
            normalize(width_out),
            nn.ReLU(),
            nn.Conv2d(width_out, width_out, 3, padding=1, bias=False),
        )
        self.skip: nn.Module | None = nn.Identity() if skip else None
        if skip and (stride != 1 or width_in != width_out):
            self.skip = nn.Conv2d(width_in, width_out, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.residual(x)
        output: Tensor = out if self.skip is None else self.skip(x) + out
        return output


class _Ensemble(nn.Module):
    """The mean of the logits of several networks."""

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([member(x) for member in self.members]).mean(0)


def resnet_rp(
    input_shape: Sequence[int],
    classes: int,
    depth: int = 8,
    width: int = 16,
    ensemble: int = 1,
    skip: bool = True,
    groups: int = 8,
    norm: str = "group",
) -> nn.Module:
    """Return the 6n + 2 residual network of residual perturbation, with GroupNorm.

    norm: "batch" is the paper's BatchNorm, for runs without privacy alone: it mixes records.
    Pre-activation blocks, so that a block's output is x + F(x) and nothing follows the sum.
    ensemble: number of networks, whose logits are averaged (EnResNet): one loss, on the mean. skip:
    False leaves the skip connections out (the paper's ablation).
    """
    if ensemble < 1:
        raise ValueError(f"ensemble must be >= 1, got {ensemble}")
    if norm not in ("group", "batch"):
        raise ValueError(f"norm must be group or batch, got {norm!r}")

    def normalize(width: int) -> nn.Module:
        return nn.BatchNorm2d(width) if norm == "batch" else nn.GroupNorm(groups, width)

    members = [
        nn.Sequential(
            nn.Conv2d(input_shape[0], width, 3, padding=1, bias=False),
            *[_PreActivation(*stage, normalize, skip) for stage in residual_stages(depth, width)],
            normalize(4 * width),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4 * width, classes),
        )
        for _ in range(ensemble)
    ]
    return members[0] if ensemble == 1 else _Ensemble(members)
