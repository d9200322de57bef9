"""Memory and tokens per second of LoRA in a random causal model: private, ordinary, and Opacus.

    python benchmarks/language_models.py [--quick] [--way private|ordinary|opacus] [--rounds 3]

Without --way each way runs in a process of its own, so that its peak memory is its own, in turn.
One step reads `--batch` documents of `--length` tokens; tokens are those of the documents.
The model has about 100 million random parameters (hidden 768, 12 layers, 32,000 tokens); --quick
takes a tiny one. A way whose library does not run is named with its error.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dpdist.core.optional_imports import import_extra
from dpdist.gradients.clipping import FlatClipping
from dpdist.gradients.engine import GradientEngine
from dpdist.gradients.hooks import OwnLoss
from dpdist.gradients.objective import language_model_loss

WAYS = ("ordinary", "private", "opacus")


def make(quick: bool) -> nn.Module:
    """A Llama of random weights with LoRA of rank 16 in all linear layers, in training mode."""
    library, peft = (import_extra(name, "hf", "benchmark") for name in ("transformers", "peft"))
    torch.manual_seed(0)
    width, layers, vocabulary = (64, 2, 500) if quick else (768, 12, 32_000)
    config = library.LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=3 * width,
        num_hidden_layers=layers, num_attention_heads=4 if quick else 12,
        max_position_embeddings=2048, use_cache=False, tie_word_embeddings=True,
    )  # fmt: skip
    lora = peft.LoraConfig(r=16, target_modules="all-linear")
    return peft.get_peft_model(library.LlamaForCausalLM(config), lora).train()


def documents(model: Any, batch: int, length: int) -> dict[str, Tensor]:
    ids = torch.randint(model.config.vocab_size, (batch, length))
    return {"input_ids": ids, "labels": ids.clone()}


def private_step(model: nn.Module, fields: dict[str, Tensor]) -> Callable[[], None]:
    """Clip and add up by documents, as a run does it; noise and update are another 10 ms."""
    rows = len(fields["labels"])
    engine = GradientEngine(
        model, OwnLoss(language_model_loss), clipping=FlatClipping(1.0), micro_batch=rows
    )
    few = {name: each[:2].repeat(17, 1)[:33, :16] for name, each in fields.items()}
    engine.validate(few, torch.zeros(33, dtype=torch.int64))
    targets = torch.zeros(rows, dtype=torch.int64)
    return lambda: engine.clipped_sum(fields, targets) and None


def ordinary_step(model: nn.Module, fields: dict[str, Tensor]) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        language_model_loss(model, fields).mean().backward()

    return step


def opacus_step(model: nn.Module, fields: dict[str, Tensor]) -> Callable[[], None]:
    """Per-example gradients by Opacus' hooks, clipped and added up."""
    from opacus import GradSampleModule

    wrapped = GradSampleModule(model)
    trained: list[Any] = [p for p in model.parameters() if p.requires_grad]

    def step() -> None:
        language_model_loss(wrapped._module, fields).sum().backward()
        squares = sum(p.grad_sample.flatten(1).square().sum(1) for p in trained)
        factors = (1.0 / squares.sqrt()).clamp(max=1.0)
        for parameter in trained:
            parameter.grad = torch.einsum("b,b...->...", factors, parameter.grad_sample)
            parameter.grad_sample = None

    return step


def measure(way: str, options: argparse.Namespace) -> None:
    model = make(options.quick)
    fields = documents(model, options.batch, options.length)
    step = {"private": private_step, "ordinary": ordinary_step, "opacus": opacus_step}[way](
        model, fields
    )
    step()
    seconds = []
    for _ in range(options.rounds):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rate = options.batch * options.length / statistics.median(seconds)
    size = sum(p.numel() for p in model.parameters())
    print(f"{way:9} {size:,} parameters, {rate:,.0f} tokens/s, peak memory {peak:,.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    options = parser.parse_args()
    if options.way:
        measure(options.way, options)
        return
    for way in WAYS:
        done = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--way", way], capture_output=True, text=True
        )
        error = (done.stderr.strip().splitlines() or ["?"])[-1]
        print(done.stdout.strip() or f"{way:9} does not run: {error[:160]}")


if __name__ == "__main__":
    main()
