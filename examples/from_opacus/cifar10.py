"""Train a ResNet-18 on CIFAR-10 privately."""

from __future__ import annotations

import argparse

import dpdist
import torch
from torch import nn
from torchvision import datasets, models, transforms

PIXELS = transforms.Compose(
    [transforms.ToTensor(), transforms.Normalize((0.491, 0.482, 0.447), (0.202, 0.199, 0.201))]
)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-root", default="data")
    parser.add_argument("--folder", default="runs/cifar10")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--noise-multiplier", type=float, default=1.5)
    parser.add_argument("--max-grad-norm", type=float, default=10.0)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--batch-size", type=int, default=2000)
    parser.add_argument("--invented", action="store_true", help="Run on invented images.")
    args = parser.parse_args(arguments)

    if args.invented:
        private = datasets.FakeData(64, (3, 32, 32), 10, transforms.ToTensor())
        public = datasets.FakeData(32, (3, 32, 32), 10, transforms.ToTensor(), random_offset=999)
    else:
        private = datasets.CIFAR10(args.data_root, train=True, download=True, transform=PIXELS)
        public = datasets.CIFAR10(args.data_root, train=False, download=True, transform=PIXELS)

    model = dpdist.prepare(models.resnet18(num_classes=10)).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    steps = max(1, args.epochs * len(private) // args.batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    training = dpdist.PrivateTraining(
        model, optimizer, private, loss=nn.CrossEntropyLoss(), batch_size=args.batch_size,
        privacy={"noise_multiplier": args.noise_multiplier, "delta": 1e-5,
                 "clip_norm": args.max_grad_norm},
        steps=steps, folder=args.folder, state=[schedule],
    )  # fmt: skip
    for report in training:
        schedule.step()
        if (report.step + 1) % max(1, steps // args.epochs) == 0:
            print(f"{report}, test accuracy {training.evaluate(public):.3f}")
    print(training.guarantee)


if __name__ == "__main__":
    main()
