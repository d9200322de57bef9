"""Classify IMDb reviews privately: an embedding, a mean over the tokens, two layers."""

from __future__ import annotations

import argparse
import random
import re
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor, nn

import dpdist

WORDS, LENGTH = 10_000, 256  # word 0 fills a review up


def read(folder: Path) -> tuple[Tensor, Tensor]:
    """Return tokens and labels of the reviews in `pos` and `neg`, as aclImdb has them."""
    found = [
        (path.read_text(), label)
        for label, name in enumerate(("neg", "pos"))
        for path in sorted((folder / name).glob("*.txt"))
    ]
    return tokens([text for text, _ in found]), torch.tensor([label for _, label in found])


def tokens(texts: list[str]) -> Tensor:
    """Return a number below WORDS for each word: a public hash, so no vocabulary is counted."""
    rows = torch.zeros(len(texts), LENGTH, dtype=torch.int64)
    for row, text in zip(rows, texts, strict=True):
        words = re.findall(r"[a-z']+", text.lower())[:LENGTH]
        row[: len(words)] = torch.tensor([1 + crc32(w.encode()) % (WORDS - 1) for w in words])
    return rows


def invented(count: int, seed: int) -> tuple[Tensor, Tensor]:
    draw, labels = random.Random(seed), torch.arange(count) % 2
    moods = (["dull", "bad", "slow"], ["fine", "good", "warm"])
    said = [" ".join(draw.choices([*moods[n], "film", "plot", "cast"], k=20)) for n in labels]
    return tokens(said), labels


class Reviews(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.hidden = nn.Embedding(WORDS, 16), nn.Linear(16, 16)
        self.answer = nn.Linear(16, 2)

    def forward(self, rows: Tensor) -> Tensor:
        there = (rows > 0).unsqueeze(2)
        mean = (self.words(rows) * there).sum(1) / there.sum(1).clamp(min=1)
        return self.answer(torch.relu(self.hidden(mean)))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-root", type=Path, default="data/aclImdb")
    parser.add_argument("--folder", default="runs/imdb")
    parser.add_argument("--epsilon", type=float, default=6.0)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--invented", action="store_true", help="Run on invented reviews.")
    args = parser.parse_args(arguments)

    if args.invented:
        private, public = invented(400, 0), invented(100, 1)
    else:
        private, public = (read(args.data_root / name) for name in ("train", "test"))

    model = Reviews()
    training = dpdist.PrivateTraining(
        model, torch.optim.Adam(model.parameters(), lr=0.02),
        dpdist.as_records(private, ranges={"inputs": WORDS}), loss="cross-entropy",
        privacy={"epsilon": args.epsilon, "delta": 1e-5, "clip_norm": 1.0},
        batch_size=args.batch_size, epochs=args.epochs, folder=args.folder,
    )  # fmt: skip
    training.run_all()
    print(training.guarantee, f"test accuracy {training.evaluate(public):.3f}", sep="\n")


if __name__ == "__main__":
    main()
