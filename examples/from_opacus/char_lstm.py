"""Tell the language of a family name privately, letter by letter, with an LSTM."""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
from torch import Tensor, nn

import dpdist

LETTERS, LENGTH = 128, 16  # letter 0 fills a name up


def encode(names: list[str]) -> Tensor:
    rows = torch.zeros(len(names), LENGTH, dtype=torch.int64)
    for row, name in zip(rows, names, strict=True):
        codes = [min(ord(letter), LETTERS - 1) for letter in name[:LENGTH]]
        row[: len(codes)] = torch.tensor(codes)
    return rows


def read(folder: Path) -> tuple[list[str], list[int], int]:
    """Return names and languages of files such as names/Italian.txt, and how many languages."""
    files = sorted(folder.glob("*.txt"))
    pairs = [(n, label) for label, file in enumerate(files) for n in file.read_text().split("\n")]
    pairs = [(name.strip(), label) for name, label in pairs if name.strip()]
    return [name for name, _ in pairs], [label for _, label in pairs], len(files)


def invented(count: int) -> tuple[list[str], list[int], int]:
    draw, ends = random.Random(0), ("ov", "ini", "son")
    names = ["".join(draw.choices("abcdefgh", k=5)) + ends[n % 3] for n in range(count)]
    return names, [n % 3 for n in range(count)], 3


class Names(nn.Module):
    def __init__(self, languages: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, 32)
        self.lstm = nn.LSTM(32, 64, num_layers=1, batch_first=True)
        self.answer = nn.Linear(64, languages)

    def forward(self, rows: Tensor) -> Tensor:
        states, _ = self.lstm(self.letters(rows))
        there = (rows > 0).unsqueeze(2)
        return self.answer((states * there).sum(1) / there.sum(1).clamp(min=1))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-root", type=Path, default="data/names")
    parser.add_argument("--folder", default="runs/names")
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=400)
    parser.add_argument("--invented", action="store_true", help="Run on invented names.")
    args = parser.parse_args(arguments)

    names, labels, languages = invented(400) if args.invented else read(args.data_root)
    known = dict(reversed(list(zip(names, labels, strict=True))))  # a name has one language
    inputs, targets = encode(list(known)), torch.tensor(list(known.values()))
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    test, train = order.tensor_split([len(order) // 5])

    model = Names(languages)
    training = dpdist.PrivateTraining(
        model, torch.optim.SGD(model.parameters(), lr=2.0),
        dpdist.as_records((inputs[train], targets[train]), ranges={"inputs": LETTERS}),
        loss=nn.CrossEntropyLoss(), batch_size=min(args.batch_size, len(train) // 4),
        privacy={"epsilon": args.epsilon, "delta": 8e-5, "clip_norm": 1.5},
        epochs=args.epochs, folder=args.folder,
    )  # fmt: skip
    training.run_all()
    print(training.guarantee)
    print(f"test accuracy {training.evaluate((inputs[test], targets[test])):.3f}")


if __name__ == "__main__":
    main()
