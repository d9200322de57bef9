"""Residual networks for small images, with GroupNorm: the zoo's resnet-gn and resnet-rp."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """One step x + F(x) of a residual network: where residual perturbation puts its noise."""


def residual_blocks(model: nn.Module) -> tuple[str, ...]:
    """Names of the residual blocks in ``model.named_modules()``."""
    return tuple(name for name, m in model.named_modules() if isinstance(m, ResidualBlock))


class _PostActivation(ResidualBlock):
    """Two 3x3 convolutions with GroupNorm around an identity (or 1x1 projection)."""

    def __init__(self, width_in: int, width_out: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width_out, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(groups, width_out)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(width_out, width_out, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups, width_out)
        self.relu2 = nn.ReLU()
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or width_in != width_out:
            self.skip = nn.Conv2d(width_in, width_out, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu1(self.norm1(self.conv1(x)))
        return self.relu2(self.norm2(self.conv2(out)) + self.skip(x))


class _PreActivation(ResidualBlock):
    """x + F(x), or F(x) without the skip: GroupNorm, ReLU and a 3x3 convolution, twice."""

    def __init__(self, width_in: int, width_out: int, stride: int, groups: int, skip: bool) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.GroupNorm(groups, width_in),
            nn.ReLU(),
            nn.Conv2d(width_in, width_out, 3, stride=stride, padding=1, bias=False),
            nn.GroupNorm(groups, width_out),
            nn.ReLU(),
            nn.Conv2d(width_out, width_out, 3, padding=1, bias=False),
        )
        self.skip: nn.Module | None = nn.Identity() if skip else None
        if skip and (stride != 1 or width_in != width_out):
            self.skip = nn.Conv2d(width_in, width_out, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.residual(x)
        return out if self.skip is None else self.skip(x) + out


class _Ensemble(nn.Module):
    """The mean of the logits of several networks."""

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([member(x) for member in self.members]).mean(0)


def _stages(depth: int, width: int) -> Iterator[tuple[int, int, int]]:
    """(width in, width out, stride) of each block of the 6n + 2 network (He et al. 2016)."""
    if depth < 8 or (depth - 2) % 6:
        raise ValueError(f"depth must be 6n + 2 with n >= 1 (8, 14, 20, ...), got {depth}")
    width_in = width
    for stage, width_out in enumerate((width, 2 * width, 4 * width)):
        for block in range((depth - 2) // 6):
            yield width_in, width_out, 2 if stage > 0 and block == 0 else 1
            width_in = width_out


def resnet_gn(
    input_shape: Sequence[int], classes: int, depth: int = 20, width: int = 16, groups: int = 8
) -> nn.Module:
    """The 6n + 2 residual network for 32x32 images (He et al. 2016) with GroupNorm."""
    blocks = [_PostActivation(*stage, groups) for stage in _stages(depth, width)]
    return nn.Sequential(
        nn.Conv2d(input_shape[0], width, 3, padding=1, bias=False),
        nn.GroupNorm(groups, width),
        nn.ReLU(),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, classes),
    )


def resnet_rp(
    input_shape: Sequence[int],
    classes: int,
    depth: int = 8,
    width: int = 16,
    ensemble: int = 1,
    skip: bool = True,
    groups: int = 8,
) -> nn.Module:
    """The 6n + 2 residual network of residual perturbation, with GroupNorm for its BatchNorm.

    Pre-activation blocks, so that a block's output is x + F(x) and nothing follows the sum.
    ensemble: so many networks, whose logits are averaged (EnResNet): one loss, on the mean. skip:
    False leaves the skip connections out (the paper's ablation).
    """
    if ensemble < 1:
        raise ValueError(f"ensemble must be >= 1, got {ensemble}")
    members = [
        nn.Sequential(
            nn.Conv2d(input_shape[0], width, 3, padding=1, bias=False),
            *[_PreActivation(*stage, groups, skip) for stage in _stages(depth, width)],
            nn.GroupNorm(groups, 4 * width),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4 * width, classes),
        )
        for _ in range(ensemble)
    ]
    return members[0] if ensemble == 1 else _Ensemble(members)
