"""Train a small convolutional network on MNIST privately."""

from __future__ import annotations

import argparse

import dpdist
import torch
from torch import nn
from torchvision import datasets, transforms

PIXELS = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-root", default="data")
    parser.add_argument("--folder", default="runs/mnist")
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--invented", action="store_true", help="Run on invented images.")
    args = parser.parse_args(arguments)

    if args.invented:
        private = datasets.FakeData(256, (1, 28, 28), 10, transforms.ToTensor())
        public = datasets.FakeData(64, (1, 28, 28), 10, transforms.ToTensor(), random_offset=999)
    else:
        private = datasets.MNIST(args.data_root, train=True, download=True, transform=PIXELS)
        public = datasets.MNIST(args.data_root, train=False, download=True, transform=PIXELS)

    model = network()
    training = dpdist.PrivateTraining(
        model, torch.optim.SGD(model.parameters(), lr=0.1), private, loss=nn.CrossEntropyLoss(),
        privacy={"epsilon": args.epsilon, "delta": 1e-5, "clip_norm": 1.0},
        batch_size=args.batch_size, epochs=args.epochs, folder=args.folder,
    )  # fmt: skip
    per_epoch = max(1, training.plan.steps // args.epochs)
    for report in training:
        if (report.step + 1) % per_epoch == 0:
            print(f"{report}, test accuracy {training.evaluate(public):.3f}")
    print(training.guarantee)


if __name__ == "__main__":
    main()
