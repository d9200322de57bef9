"""What clipping per document costs beyond an ordinary step: a frozen transformer with LoRA.

    OMP_NUM_THREADS=1 python benchmarks/speed/adapters.py [--hidden 256] [--layers 4] [--batch 64]

Ordinary is the forward pass and autograd's gradient of the mean loss, of the same parameters and
documents, of which there are as many as a Poisson sample has. A run fills its passes up to a fixed
shape (docs/explanation/gradients.md, Clipping): that is measured too. Processor time of one thread,
medians of interleaved rounds. Needs the extra dpdist[hf]. --quick: a smoke test.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))
from _common import parse_arguments

from dpdist.core.console import format_table
from dpdist.gradients.clipping import FlatClipping
from dpdist.gradients.engine import GradientEngine, cross_entropy
from dpdist.gradients.passes import rows_per_pass
from dpdist.gradients.sampling import Blocks
from dpdist.models import ModelSpec, initialize

AIM = 1.15
RECORDS, KEY = 10_000, bytes(32)


def model_of(hidden: int, layers: int, length: int, dtype: str) -> torch.nn.Module:
    config = {
        "model_type": "bert", "vocab_size": 258, "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": hidden // 64,
        "intermediate_size": 4 * hidden, "max_position_embeddings": length,
    }  # fmt: skip
    lora = {"kind": "lora", "r": 8, "lora_alpha": 16, "target_modules": ["query", "value"]}
    options = {"config": config, "adapter": lora, "dtype": dtype}
    return initialize(ModelSpec("transformer", (length,), 2, options), 0)


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
    tiny = {"hidden": 64, "layers": 1, "length": 16, "batch": 8, "rounds": 1}
    asked = parse_arguments(parser, tiny)
    torch.set_num_threads(1)
    model = model_of(asked.hidden, asked.layers, asked.length, asked.dtype)
    trained = [p for p in model.parameters() if p.requires_grad]
    generator = torch.Generator().manual_seed(0)
    blocks = Blocks.for_batches(RECORDS, asked.batch / RECORDS)

    def engine(micro_batch: int, blocks: Blocks | None = None) -> GradientEngine:
        clipping = FlatClipping(1.0)
        made = GradientEngine(
            model, cross_entropy, clipping=clipping, micro_batch=micro_batch, blocks=blocks
        )
        made._checked = True  # a check is not a step
        return made

    def ordinary(inputs: torch.Tensor, labels: torch.Tensor) -> object:
        return torch.autograd.grad(cross_entropy(model(inputs), labels).mean(), trained)

    def clipped(by: GradientEngine) -> Callable[[torch.Tensor, torch.Tensor], object]:
        def step(inputs: torch.Tensor, labels: torch.Tensor) -> object:
            keyed = {"draw_key": KEY, "record_ids": torch.arange(len(labels))}
            return by.clipped_sum(inputs, labels, **(keyed if by.blocks else {}))

        return step

    plain = engine(2 * asked.batch)
    quarter = rows_per_pass(blocks, max(1, asked.batch // 4))
    ways = {
        "clipped per document": clipped(plain),
        f"as a run does it: {blocks.capacity} rows a pass": clipped(engine(1024, blocks)),
        f"with resources.micro_batch: {asked.batch // 4}, {quarter} rows a pass": clipped(
            engine(asked.batch // 4, blocks)
        ),
    }
    took: dict[str, list[float]] = {name: [] for name in ["ordinary step", *ways]}
    for turn in range(asked.rounds + 1):
        size = int(torch.poisson(torch.tensor(float(asked.batch)), generator=generator))
        inputs = torch.randint(0, 258, (size, asked.length), generator=generator).float()
        inputs[::2, asked.length // 2 :] = -1  # every second document is half as long
        labels = torch.arange(size) % 2
        for name, way in {"ordinary step": ordinary, **ways}.items():
            seconds = timed(lambda way=way: way(inputs, labels))  # noqa: B023
            if turn:  # the first warms up
                took[name].append(seconds)
    frozen = sum(p.numel() for p in model.parameters()) - plain.size
    base = took.pop("ordinary step")
    rows = [
        ("frozen, trained parameters", f"{frozen:,}, {plain.size:,}"),
        ("ordinary step, ms", f"{1000 * statistics.median(base):,.0f}"),
        ("times that (aim)", f"({AIM})"),
    ]
    for name, seconds in took.items():
        ratio = statistics.median(one / other for one, other in zip(seconds, base, strict=True))
        rows.append((name, f"{ratio:.3f}"))
    print(format_table(rows, title=f"LoRA in a frozen base, {asked.batch} documents expected"))


if __name__ == "__main__":
    main()
