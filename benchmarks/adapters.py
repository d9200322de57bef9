"""What clipping per document costs beyond an ordinary step: a frozen transformer with LoRA.

    OMP_NUM_THREADS=1 python benchmarks/adapters.py [--hidden 256] [--layers 4] [--batch 64]

Ordinary is the forward pass and autograd's gradient of the mean loss, of the same parameters.
Processor time of one thread, medians of interleaved rounds. Needs the extra dpdist[hf].
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from dpdist.base.console import table
from dpdist.gradients.clipping import FlatClipping
from dpdist.gradients.engine import GradientEngine
from dpdist.gradients.task import cross_entropy
from dpdist.models import ModelSpec, initialise

AIM = 1.15


def model_of(hidden: int, layers: int, length: int, dtype: str) -> torch.nn.Module:
    config = {
        "model_type": "bert", "vocab_size": 258, "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": hidden // 64,
        "intermediate_size": 4 * hidden, "max_position_embeddings": length,
    }  # fmt: skip
    lora = {"kind": "lora", "r": 8, "lora_alpha": 16, "target_modules": ["query", "value"]}
    options = {"config": config, "adapter": lora, "dtype": dtype}
    return initialise(ModelSpec("transformer", (length,), 2, options), 0)


def timed(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("hidden", 256), ("layers", 4), ("length", 64), ("batch", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", default="float32")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    model = model_of(asked.hidden, asked.layers, asked.length, asked.dtype)
    inputs = torch.randint(0, 258, (asked.batch, asked.length)).float()
    inputs[::2, asked.length // 2 :] = -1  # every second document is half as long
    labels = torch.arange(asked.batch) % 2
    trained = [p for p in model.parameters() if p.requires_grad]
    engine = GradientEngine(
        model, cross_entropy, clipping=FlatClipping(1.0), micro_batch=asked.batch
    )
    engine._checked = True  # a check is not a step

    def ordinary() -> object:
        return torch.autograd.grad(cross_entropy(model(inputs), labels).mean(), trained)

    def clipped() -> object:
        return engine.clipped_sum(inputs, labels)

    ordinary(), clipped()
    rounds = [(timed(ordinary), timed(clipped)) for _ in range(asked.rounds)]
    plain, private = (statistics.median(column) for column in zip(*rounds, strict=True))
    frozen = sum(p.numel() for p in model.parameters()) - engine.size
    rows = [
        ("frozen, trained parameters", f"{frozen:,}, {engine.size:,}"),
        ("ordinary step, ms", f"{1000 * plain:,.0f}"),
        ("clipped per document, ms", f"{1000 * private:,.0f}"),
        ("ratio (aim)", f"{private / plain:.3f} ({AIM})"),
    ]
    print(table(rows, title=f"LoRA in a frozen base, {asked.batch} documents"))


if __name__ == "__main__":
    main()
