"""ResNet-20 for 32 x 32 color pictures (He et al., 2016, section 4.2), as a user's own module."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions beside a shortcut that has no parameters (option A of the paper)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(width)
        self.stride, self.more = stride, width - channels

    def forward(self, x: Tensor) -> Tensor:
        out = torch.relu(self.first_norm(self.first(x)))
        out = self.second_norm(self.second(out))
        if self.more:
            before = self.more // 2
            x = x[:, :, :: self.stride, :: self.stride]
            x = nn.functional.pad(x, (0, 0, 0, 0, before, self.more - before))
        return torch.relu(out + x)


def resnet20(num_classes: int = 10) -> nn.Module:
    """Return the network with new weights; its inputs are pixels in [0, 1]."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
    ]  # fmt: skip
    channels = 16
    for width in (16, 32, 64):
        for number in range(3):
            stride = 2 if number == 0 and width > 16 else 1
            layers.append(Block(channels, width, stride))
            channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, num_classes))
