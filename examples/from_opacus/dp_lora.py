"""Fine-tune a causal language model privately by LoRA, and save the adapter with its privacy card.

Without `--base`, a folder or name of a pre-trained model, a small random Llama is trained on bytes.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

import dpdist
from dpdist.integrations.transformers import save_adapter

LENGTH, BYTES = 48, 257  # byte n is token n + 1, and token 0 fills a document up


def encode(texts: list[str], tokenizer: Any) -> dict[str, torch.Tensor]:
    """Return tokens, and as labels the same but for what fills a document up."""
    ids = torch.zeros(len(texts), LENGTH, dtype=torch.int64)
    for row, text in zip(ids, texts, strict=True):
        found = [n + 1 for n in text.encode()] if tokenizer is None else tokenizer.encode(text)
        row[: len(found[:LENGTH])] = torch.tensor(found[:LENGTH])
    there = torch.tensor([[n < _length(t, tokenizer) for n in range(LENGTH)] for t in texts])
    return {"input_ids": ids, "attention_mask": there.long(), "labels": ids.where(there, -100)}


def _length(text: str, tokenizer: Any) -> int:
    return len(text.encode()) if tokenizer is None else len(tokenizer.encode(text))


def invented(count: int) -> list[str]:
    draw = random.Random(0)
    return [f"{draw.choice(('Ann', 'Bo', 'Cy'))} sent {n} letters on day {draw.randrange(30)}."
            for n in range(count)]  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="A file of PRIVATE documents, one per line.")
    parser.add_argument("--base", help="A causal model, such as openai-community/gpt2.")
    parser.add_argument("--folder", default="runs/lora")
    parser.add_argument("--adapter", default="adapter")
    parser.add_argument("--epsilon", type=float, default=4.0)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--invented", action="store_true", help="Run on invented documents.")
    args = parser.parse_args(arguments)

    if args.base:
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.base)
        base = transformers.AutoModelForCausalLM.from_pretrained(args.base)
    else:
        tokenizer = None
        base = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=BYTES, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=LENGTH,
        ))  # fmt: skip
    lora = peft.LoraConfig(r=args.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, lora)

    texts = invented(300) if args.invented else args.data.read_text().splitlines()
    records = dpdist.as_records(
        encode(texts, tokenizer), name="documents",
        ranges={"input_ids": base.config.vocab_size, "labels": base.config.vocab_size},
    )  # fmt: skip
    trained = [each for each in model.parameters() if each.requires_grad]
    training = dpdist.PrivateTraining(
        model, torch.optim.AdamW(trained, lr=1e-3), records, loss=dpdist.language_model_loss,
        privacy={"epsilon": args.epsilon, "delta": 1e-5, "clip_norm": 1.0},
        batch_size=args.batch_size, epochs=args.epochs, folder=args.folder,
    )  # fmt: skip
    run = training.run_all()
    print(training.guarantee)
    print(f"adapter and card: {save_adapter(model, run, args.adapter)}")


if __name__ == "__main__":
    main()
