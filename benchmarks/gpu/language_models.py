"""Memory and tokens per second of LoRA in a random causal model: private, ordinary, and Opacus.

    python benchmarks/gpu/language_models.py [--quick] [--repeats 3] [--rounds 3]

Each way runs in a process of its own, so that its peak memory is its own, and the ways take turns
--repeats times. Ratios are of one turn; medians of them, and each turn's figures, are a line of
--results for each way. --way measures one, here, and prints its line. A step reads `--batch`
documents of `--length` tokens; tokens are those of the documents.
The model has about 100 million random parameters (hidden 768, 12 layers, 32,000 tokens); --quick
takes a tiny one. A way whose library does not run is named with its error.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))
from _common import CHECKOUT, RESULTS_FOLDER, parse_arguments, processor
from torch import Tensor, nn

from dpdist.core.optional_imports import import_extra
from dpdist.gradients.clipping import FlatClipping
from dpdist.gradients.engine import GradientEngine
from dpdist.gradients.hooks import OwnLoss
from dpdist.gradients.objective import language_model_loss
from dpdist.gradients.sampling import Blocks

WAYS = ("ordinary", "private", "opacus")
LIBRARIES = ("torch", "transformers", "peft", "opacus")
RESULTS = RESULTS_FOLDER / "language_models.jsonl"
DOCUMENTS = 60_000  # of which a batch is a Poisson sample of its expected size


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
    """Clip and add up by documents, as a run does it: in keyed blocks, and passes of one shape.

    Noise and update are another 10 ms.
    """
    rows = len(fields["labels"])
    engine = GradientEngine(
        model, OwnLoss(language_model_loss), clipping=FlatClipping(1.0),
        blocks=Blocks.for_batches(DOCUMENTS, rows / DOCUMENTS),
    )  # fmt: skip
    few = {name: each[:2].repeat(17, 1)[:33, :16] for name, each in fields.items()}
    engine.validate(few, torch.zeros(33, dtype=torch.int64))
    targets, ids = torch.zeros(rows, dtype=torch.int64), torch.arange(rows)
    engine.micro_batch = None  # chosen by documents as long as these, as a run does
    engine.validate({name: each[:2] for name, each in fields.items()}, targets[:2])

    def step() -> None:
        engine.clipped_sum(fields, targets, draw_key=bytes(32), record_ids=ids)

    return step


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


def measure(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Time a way's steps in this process: tokens per second, and the process's peak memory."""
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
    return {
        "tokens_per_second": options.batch * options.length / statistics.median(seconds),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "parameters": sum(p.numel() for p in model.parameters()),
        "threads": torch.get_num_threads(),
    }


def measure_apart(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return what a process of its own measures, or its error."""
    words = [f"--{name}={getattr(options, name)}" for name in ("rounds", "batch", "length")]
    words += ["--quick"] * options.quick
    done = subprocess.run(
        [sys.executable, __file__, *words, "--way", way], capture_output=True, text=True
    )
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["?"])[-1][:160]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def summarize(way: str, turns: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return a way's line: medians over the turns, and ratios within a turn to `ordinary`."""
    error = next((turn[way]["error"] for turn in turns if "error" in turn[way]), None)
    if error is not None:
        return {"way": way, "error": error}
    line: dict[str, Any] = {"way": way, **turns[0][way]}
    for name in ("tokens_per_second", "peak_mib"):
        each = [turn[way][name] for turn in turns]
        ratios = [turn[way][name] / turn["ordinary"][name] for turn in turns]
        line |= {name: statistics.median(each), f"{name}_each": each}
        line |= {f"{name}_ratio": statistics.median(ratios), f"{name}_ratio_each": ratios}
    return line


def conditions(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the figures hold for."""
    asked = ["git", "-C", str(CHECKOUT), "describe", "--always", "--dirty", "--abbrev=8"]
    commit = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    names = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
    return {
        "processor": processor(),
        "processors": len(os.sched_getaffinity(0)),
        "versions": {name: names[name] for name in LIBRARIES if name in names},
        "commit": commit,
        "batch": options.batch,
        "length": options.length,
        "rounds": options.rounds,
        "repeats": options.repeats,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--repeats", type=int, default=3, help="turns of all ways")
    parser.add_argument("--rounds", type=int, default=3, help="timed steps of a turn")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parse_arguments(parser, {"rounds": 1, "repeats": 1}, ["results"])
    if options.way:
        print(json.dumps(measure(options.way, options)))
        return
    turns = [{way: measure_apart(way, options) for way in WAYS} for _ in range(options.repeats)]
    if any("error" in turn["ordinary"] for turn in turns):
        sys.exit(f"ordinary training does not run: {turns[0]['ordinary']}")
    shared = conditions(options)
    lines = [{**summarize(way, turns), **shared} for way in WAYS]
    options.results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for line in lines:
        if "error" in line:
            print(f"{line['way']:9} does not run: {line['error']}")
            continue
        print(
            f"{line['way']:9} {line['parameters']:,} parameters, {line['tokens_per_second']:,.0f} "
            f"tokens/s ({line['tokens_per_second_ratio']:.2f} of ordinary), peak memory "
            f"{line['peak_mib']:,.0f} MiB ({line['peak_mib_ratio']:.2f} of ordinary)"
        )


if __name__ == "__main__":
    main()
