"""Train a DCGAN on MNIST whose discriminator is private.

The generator never sees an image: it learns from the discriminator, whose weights were released, so
its images cost no further privacy.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import dpdist
import torch
from torch import Tensor, nn
from torch.nn import functional
from torchvision import datasets, transforms, utils

NOISE = 64
PIXELS = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,), (0.5,))])


def generator() -> nn.Module:
    return nn.Sequential(
        nn.Linear(NOISE, 64 * 49), nn.ReLU(), nn.Unflatten(1, (64, 7, 7)),
        nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.GroupNorm(8, 32), nn.ReLU(),
        nn.ConvTranspose2d(32, 1, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip


def discriminator() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 4, 2, 1), nn.LeakyReLU(0.2),
        nn.Conv2d(32, 64, 4, 2, 1), nn.GroupNorm(8, 64), nn.LeakyReLU(0.2),
        nn.Flatten(), nn.Linear(64 * 49, 1),
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-root", default="data")
    parser.add_argument("--folder", default="runs/dcgan")
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--invented", action="store_true", help="Run on invented images.")
    args = parser.parse_args(arguments)

    if args.invented:
        private = datasets.FakeData(256, (1, 28, 28), 10, PIXELS)
    else:
        private = datasets.MNIST(args.data_root, train=True, download=True, transform=PIXELS)

    make, judge = generator(), discriminator()
    maker = torch.optim.Adam(make.parameters(), lr=2e-4, betas=(0.5, 0.999))

    def loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """A real image and a made one for each record."""
        images, _ = batch
        with torch.no_grad():
            made = make(torch.randn(len(images), NOISE, device=images.device))
        real, fake = module(images)[:, 0], module(made)[:, 0]
        return functional.softplus(-real) + functional.softplus(fake)

    training = dpdist.PrivateTraining(
        judge, torch.optim.Adam(judge.parameters(), lr=2e-4, betas=(0.5, 0.999)), private,
        loss=loss, privacy={"epsilon": args.epsilon, "delta": 1e-5, "clip_norm": 1.0},
        batch_size=args.batch_size, epochs=args.epochs, folder=args.folder, state=[make, maker],
    )  # fmt: skip
    for report in training:
        maker.zero_grad()
        made = make(torch.randn(args.batch_size, NOISE))
        functional.softplus(-judge(made)).mean().backward()
        maker.step()
        if report.step % 100 == 0:
            print(report)
    utils.save_image(make(torch.randn(64, NOISE)), Path(args.folder) / "made.png", normalize=True)
    print(training.guarantee)


if __name__ == "__main__":
    main()
