"""Networks of somebody else's, as `package.module:factory` names them: BatchNorm, dropout, and a
calling convention of their own."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """A convolution with BatchNorm and dropout, as no network of the zoo has."""

    def __init__(self, num_classes: int = 10, width: int = 4, channels: int = 1) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Dropout(0.5), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(16 * width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def net(num_classes: int = 10, width: int = 4) -> nn.Module:
    return Net(num_classes, width)


def constant(num_classes: int = 10) -> nn.Module:
    """Says class 0 whatever it is shown."""
    module = nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))
    module(torch.zeros(1, 1, 8, 8))
    with torch.no_grad():
        module[1].weight.zero_()
        module[1].bias.copy_(torch.eye(num_classes)[0])
    return module


def loaded(num_classes: int = 10) -> nn.Module:
    """Makes a net and loads weights that do not depend on torch's generator."""
    module = Net(num_classes)
    numbers = torch.Generator().manual_seed(5)
    weights = {
        name: torch.rand(each.shape, generator=numbers)
        for name, each in module.state_dict().items() if each.is_floating_point()
    }  # fmt: skip
    module.load_state_dict(weights, strict=False)
    return module


@lru_cache
def trained(seed: int = 0) -> Net:
    """A `net` after a few steps on the training digits, its BatchNorm's statistics away from their
    beginning; in evaluation mode."""
    import dpdist.data

    train = dpdist.data.load(dpdist.data.DataSource("digits", 10), "train")
    x, y = train.batch(slice(None)), train.targets(slice(None))
    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = Net()
        optimizer = torch.optim.Adam(module.parameters(), 2e-2)
        for step in range(60):
            rows = torch.arange(200 * step, 200 * step + 200) % len(y)
            noisy = x[rows] + 0.2 * torch.randn_like(x[rows])
            loss = nn.functional.cross_entropy(module((noisy - 0.3) / 0.4), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return module.eval().requires_grad_(False)
