"""Fine-tune the last layer of a BERT on SNLI privately: does one sentence follow from another?

Without `--base`, a folder or name of a pre-trained BERT, a small random one is trained.
"""

from __future__ import annotations

import argparse
import csv
import random
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import dpdist

ANSWERS, LENGTH, WORDS = ("contradiction", "entailment", "neutral"), 64, 1000


def read(file: Path) -> list[tuple[str, str, str]]:
    """Return answer and both sentences of snli_1.0_train.txt and the like."""
    with file.open() as lines:
        rows = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [(r["gold_label"], r["sentence1"], r["sentence2"]) for r in rows
                if r["gold_label"] in ANSWERS]  # fmt: skip


def invented(count: int, seed: int) -> list[tuple[str, str, str]]:
    draw = random.Random(seed)
    words = ["a dog", "runs", "sleeps", "in the park", "at home", "a man", "sings", "outside"]
    return [(ANSWERS[n % 3], " ".join(draw.choices(words, k=4)), " ".join(draw.choices(words, k=3)))
            for n in range(count)]  # fmt: skip


def encode(rows: list[tuple[str, str, str]], tokenizer: Any) -> dict[str, Tensor]:
    labels = torch.tensor([ANSWERS.index(answer) for answer, _, _ in rows])
    if tokenizer is not None:
        found = tokenizer([r[1] for r in rows], [r[2] for r in rows], max_length=LENGTH,
                          truncation=True, padding="max_length", return_tensors="pt")  # fmt: skip
        return {"input_ids": found["input_ids"], "token_type_ids": found["token_type_ids"],
                "attention_mask": found["attention_mask"], "labels": labels}  # fmt: skip
    ids, kinds = (torch.zeros(len(rows), LENGTH, dtype=torch.int64) for _ in range(2))
    for n, (_, first, second) in enumerate(rows):
        words = [*first.split(), *second.split()][:LENGTH]
        ids[n, : len(words)] = torch.tensor([1 + crc32(w.encode()) % (WORDS - 1) for w in words])
        kinds[n, len(first.split()) : len(words)] = 1
    return {"input_ids": ids, "token_type_ids": kinds, "attention_mask": (ids > 0).long(),
            "labels": labels}  # fmt: skip


def loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    fields = {name: each for name, each in batch.items() if name != "labels"}
    return functional.cross_entropy(module(**fields).logits, batch["labels"], reduction="none")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-root", type=Path, default="data/snli_1.0")
    parser.add_argument("--base", help="A BERT, such as google-bert/bert-base-cased.")
    parser.add_argument("--folder", default="runs/snli")
    parser.add_argument("--epsilon", type=float, default=7.5)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--invented", action="store_true", help="Run on invented sentences.")
    args = parser.parse_args(arguments)

    tokenizer = None
    if args.base:
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.base)
        model = transformers.BertForSequenceClassification.from_pretrained(args.base, num_labels=3)
    else:
        model = transformers.BertForSequenceClassification(transformers.BertConfig(
            vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=64, num_labels=3,
        ))  # fmt: skip
    trained = [model.bert.encoder.layer[-1], model.bert.pooler, model.classifier]
    model.requires_grad_(False)
    for part in trained:
        part.requires_grad_(True)
    model.train()

    files = [args.data_root / f"snli_1.0_{name}.txt" for name in ("train", "dev")]
    rows = [invented(300, 0), invented(60, 1)] if args.invented else [read(each) for each in files]
    private, public = (encode(each, tokenizer) for each in rows)
    weights = [each for each in model.parameters() if each.requires_grad]
    ranges = {"input_ids": model.config.vocab_size, "labels": 3}
    training = dpdist.PrivateTraining(
        model, torch.optim.AdamW(weights, lr=5e-4),
        dpdist.as_records(private, target="labels", ranges=ranges), loss=loss,
        privacy={"epsilon": args.epsilon, "delta": 1e-5, "clip_norm": 0.1},
        batch_size=args.batch_size, epochs=args.epochs, folder=args.folder,
    )  # fmt: skip
    training.run_all()
    model.eval()
    with torch.no_grad():
        fields = {name: each for name, each in public.items() if name != "labels"}
        right = (model(**fields).logits.argmax(1) == public["labels"]).float().mean()
    print(training.guarantee, f"dev accuracy {right:.3f}", sep="\n")


if __name__ == "__main__":
    main()
