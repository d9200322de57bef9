"""Perplexity of LoRA at epsilon 3, at 8 and without privacy, on texts new to a small base.

    python benchmarks/quality/perplexity.py --out DIR [--only base 'private-*'] [--quick]
    python benchmarks/quality/perplexity.py --table

All texts are docstrings of packages that an installation of dpdist[hf] has; none is downloaded.
Three sets share no document, and no 39 words in a row: the *public* one trains the tokenizer and
a Llama of a few million parameters, the *proxy* (public as well, and not seen by the base) chooses
learning rates, and the *private* one is learned by LoRA: at epsilon 3, at 8 and without privacy,
three keys each. One document, of which the first tokens are read, is the unit of privacy. So no
setting is chosen on a private text. Keys are fixed, so that a run can be repeated.

Perplexity is that of all next tokens of held-out documents. Each part is a line of --results; what
is there is not made again. Times are wall clock, of a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))
from _common import (
    RESULTS_FOLDER,
    append_line,
    choose_parts,
    end_script,
    parse_arguments,
    read_parts,
)
from torch import nn

import dpdist
from dpdist.audits.membership_statistics import Estimate
from dpdist.core.optional_imports import import_extra
from dpdist.data import text
from dpdist.evaluation import load_model
from dpdist.reports.compare import markdown_table
from dpdist.runs.recipe import parse_recipe
from dpdist.training.model_setup import initial_model, model_spec
from dpdist.training.records import data_source, load_test_records, records_with_canaries

RESULTS = RESULTS_FOLDER / "perplexity.jsonl"
SETS = {
    "public": ("python", "torch", "torchvision", "numpy", "ray", "pyarrow", "pydantic"),
    "proxy": ("matplotlib", "sklearn", "transformers"),
    "private": ("scipy", "pandas", "sympy", "networkx"),
}
TEST = 0.1  # share of the documents of a set, by hash
ROW = 20  # words of a block of a public document that no other set's document may hold
BEGIN = "<begin>"
WAYS = {"none": None, "3": 3.0, "8": 8.0}
RATES = {"none": (3e-3, 1e-2, 3e-2), "3": (1e-3, 3e-3, 1e-2, 3e-2)}  # tried on the proxy
KEYS = 3
RESAMPLES = 2000


# --- texts ------------------------------------------------------------------------------------


def docstrings_of(package: str) -> tuple[str, list[str]]:
    """Return the version of an installed package and its docstrings; of Python, its library's."""
    if package == "python":
        folder, version = Path(sysconfig.get_path("stdlib")), platform.python_version()
    else:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            end_script(f"needs {package} to be installed, whose docstrings are read", True)
        folder = Path(spec.submodule_search_locations[0])
        own = importlib.metadata.packages_distributions().get(package, [package])[0]
        version = importlib.metadata.version(own)
    return version, [found for _, found in text._docstrings(folder)]


def invented(name: str) -> tuple[str, list[str]]:
    """Return texts in place of a package's: sentences of Python's help topics, in other orders."""
    generator = np.random.default_rng(list(name.encode()))
    words = text.split_words(" ".join(text._paragraphs()[:400]))
    return "0", [" ".join(generator.choice(words, 16)) for _ in range(150)]


def blocks(document: str, every: int) -> Iterator[str]:
    """Yield runs of `ROW` words of a document, one from each `every`-th word on."""
    words = text.split_words(document)
    for start in range(0, len(words) - ROW + 1, every):
        yield " ".join(words[start : start + ROW])


def corpus(options: argparse.Namespace) -> dict[str, Any]:
    """Write train and test of each set as Parquet, and the tokenizer of the public one's train.

    A document that holds a block of 20 words of an earlier set's is left out.
    """
    found: dict[str, Any] = {}
    seen: set[bytes] = set()
    known: set[str] = set()
    for name, packages in SETS.items():
        read = {each: (invented if options.quick else docstrings_of)(each) for each in packages}
        whole = text._deduplicate([each for _, texts in read.values() for each in texts])
        new = [each for each in whole if each.word_hash not in seen]
        kept = [each for each in new if not known & set(blocks(each.text, 1))]
        seen |= {each.word_hash for each in whole}
        known |= {block for each in kept for block in blocks(each.text, ROW)}
        splits: dict[str, list[str]] = {"train": [], "test": []}
        for each in kept[: options.documents]:
            splits["test" if text._hash_position(each) < TEST else "train"].append(each.text)
        (options.out / name).mkdir(parents=True, exist_ok=True)
        for split, texts in splits.items():
            pq.write_table(pa.table({"text": texts}), options.out / name / f"{split}.parquet")
        found[name] = {
            "versions": {each: version for each, (version, _) in read.items()},
            "near_copies_left_out": len(whole) - len(kept),
            "bytes": sum(len(each.encode()) for texts in splits.values() for each in texts),
            **{split: len(texts) for split, texts in splits.items()},
        }
    write_tokenizer(options)
    return found


def read_texts(options: argparse.Namespace, name: str, split: str) -> list[str]:
    """Return the documents of a split of a set."""
    return pq.read_table(options.out / name / f"{split}.parquet")["text"].to_pylist()


def write_tokenizer(options: argparse.Namespace) -> None:
    """Train byte pairs on the public documents; a document begins with a token of its own."""
    tokenizers = import_extra("tokenizers", "hf", "benchmark")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=options.vocabulary, special_tokens=[BEGIN], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train_from_iterator(read_texts(options, "public", "train"), trainer)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, made.token_to_id(BEGIN))]
    )
    folder(options).mkdir(exist_ok=True)
    made.save(str(folder(options) / "tokenizer.json"))


# --- the public base --------------------------------------------------------------------------


def folder(options: argparse.Namespace) -> Path:
    """Return the folder of the base and its tokenizer."""
    return options.out / "base"


def tokenizer(options: argparse.Namespace) -> Any:
    tokenizers = import_extra("tokenizers", "hf", "benchmark")
    return tokenizers.Tokenizer.from_file(str(folder(options) / "tokenizer.json"))


def base(options: argparse.Namespace) -> dict[str, Any]:
    """Train the base on windows of all public documents behind one another, and save it."""
    transformers = import_extra("transformers", "hf", "benchmark")
    began, size = time.monotonic(), tokenizer(options).get_vocab_size()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=size, hidden_size=options.width, intermediate_size=3 * options.width,
        num_hidden_layers=options.layers, num_attention_heads=options.width // 64,
        max_position_embeddings=options.length, tie_word_embeddings=True, use_cache=False,
        bos_token_id=0, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).train()
    stream = {
        split: torch.tensor([
            token
            for each in tokenizer(options).encode_batch(read_texts(options, "public", split))
            for token in each.ids
        ])
        for split in ("train", "test")
    }  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 3e-3, total_steps=options.base_steps, pct_start=0.05
    )
    generator = torch.Generator().manual_seed(0)
    for step in range(options.base_steps):
        starts = torch.randint(
            len(stream["train"]) - options.length, (options.base_batch, 1), generator=generator
        )
        rows = stream["train"][starts + torch.arange(options.length)]
        loss = next_token_losses(model, rows).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"base, step {step:,}: loss {loss.item():.3f}", flush=True)
    model.eval()
    rows = stream["test"][: len(stream["test"]) // options.length * options.length]
    with torch.inference_mode():
        losses = [
            next_token_losses(model, some) for some in rows.view(-1, options.length).split(64)
        ]
    import_extra("transformers.utils.logging", "hf", "benchmark").disable_progress_bar()
    model.save_pretrained(str(folder(options)))
    return {
        "parameters": sum(each.numel() for each in model.parameters()), "vocabulary": size,
        "tokens": len(stream["train"]), "steps": options.base_steps,
        "steps_tokens": options.base_steps * options.base_batch * options.length,
        "public_test_perplexity": math.exp(torch.cat(losses).mean().item()),
        "seconds": time.monotonic() - began,
    }  # fmt: skip


def next_token_losses(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of each next token of rows (B, T) without padding, (B * (T - 1),)."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=rows).logits
    told = logits[:, :-1].float().flatten(0, 1)
    return nn.functional.cross_entropy(told, rows[:, 1:].flatten(), reduction="none")


# --- LoRA -------------------------------------------------------------------------------------


def recipe_of(
    options: argparse.Namespace, name: str, way: str, key: int, rate: float
) -> dict[str, Any]:
    """Return the recipe of LoRA on a set of documents, at an epsilon or without privacy."""
    about = read_parts(options.results)["corpus"]
    records = about[name]["train"]
    epsilon = WAYS[way]
    privacy: dict[str, Any] = {"noise_multiplier": 0.0, "clipping": "none"}
    if epsilon is not None:
        privacy = {"epsilon": epsilon, "delta": records**-1.1, "clip_norm": "automatic"}
    versions = (f"{each} {version}" for each, version in about["public"]["versions"].items())
    pretraining_data = f"{about['public']['train']:,} docstrings of {', '.join(versions)}"
    run_key = hashlib.sha256(f"perplexity {name} {way} {key}".encode()).hexdigest()
    return {
        "name": f"{name}-{way}-{rate:g}-{key}",
        "data": {
            "name": name, "root": str(options.out), "classes": read_parts(options.results)["base"][
                "vocabulary"],
            "text": {"length": options.length, "predict": "next",
                     "tokenizer": str(folder(options) / "tokenizer.json")},
        },
        "model": {
            "name": "transformer",
            "options": {"head": "own", "dtype": options.dtype, "adapter": {
                "kind": "lora", "r": 4, "lora_alpha": 8, "target_modules": "all-linear"}},
            "initial": {"folder": str(folder(options)), "pretraining_data": pretraining_data},
        },
        "privacy": {**privacy, "run_key": run_key},
        "training": {
            "batch_size": options.batch, "steps": options.steps, "optimizer": "adam",
            "learning_rate": rate, "schedule": "linear", "init_seed": key,
        },
        "resources": {"cpus_per_worker": options.threads, "micro_batch": options.micro_batch},
    }  # fmt: skip


def tune(
    options: argparse.Namespace, name: str, way: str, key: int, rate: float | None = None
) -> dict[str, Any]:
    """Train LoRA by a recipe in this process, and keep the losses of each held-out document."""
    began, rate = time.monotonic(), rate or best_rate(options, way)
    recipe = recipe_of(options, name, way, key, rate)
    run = dpdist.run(recipe, runs=options.out / "runs", executor="local")
    parsed = run.read_recipe()
    losses, counts = document_losses(parsed, load_model(parsed, run))
    by_run = json.loads(run.evaluation.read_text())["perplexity"]
    assert math.isclose(by_run, perplexity(losses, counts), rel_tol=1e-2), by_run  # dtypes differ
    np.savez(options.out / f"{name}-{way}-{rate:g}-{key}.npz", losses=losses, counts=counts)
    facts = dpdist.load_results(run.path)
    return {
        "set": name, "way": way, "key": key, "rate": rate, "batch": options.batch,
        "steps": options.steps, "epsilon": facts.guarantee.epsilon if WAYS[way] else None,
        "delta": facts.guarantee.delta if WAYS[way] else None,
        "noise_multiplier": facts.plan.step(0).noise_multiplier if WAYS[way] else 0.0,
        "documents": len(counts), "tokens": int(counts.sum()),
        "perplexity": perplexity(losses, counts), "seconds": time.monotonic() - began,
    }  # fmt: skip


def untuned(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the base as it is: adapters begin as nothing, and no step is taken."""
    recipe = parse_recipe(recipe_of(options, "private", "none", 0, 1e-3), "perplexity")
    model = initial_model(recipe, model_spec(recipe, records_with_canaries(
        recipe, data_source(recipe))))  # fmt: skip
    losses, counts = document_losses(recipe, model.eval())
    np.savez(options.out / "private-base.npz", losses=losses, counts=counts)
    return {"documents": len(counts), "tokens": int(counts.sum()),
            "perplexity": perplexity(losses, counts)}  # fmt: skip


def document_losses(recipe: Any, model: nn.Module) -> tuple[np.ndarray, np.ndarray]:
    """Sum of cross-entropies of each held-out document's next tokens, and how many there are."""
    test = load_test_records(recipe, data_source(recipe))
    losses, counts = [], []
    with torch.inference_mode():
        for start in range(0, len(test), 64):
            rows = slice(start, min(start + 64, len(test)))
            targets = test.targets(rows)
            each = nn.functional.cross_entropy(
                model(test.batch(rows)).flatten(0, 1), targets.clamp(min=0).flatten(),
                reduction="none",
            ).view_as(targets)  # fmt: skip
            losses.append((each * (targets >= 0)).sum(1).double().numpy())
            counts.append((targets >= 0).sum(1).numpy())
    return np.concatenate(losses), np.concatenate(counts)


def perplexity(losses: np.ndarray, counts: np.ndarray) -> float:
    """Perplexity of all tokens of documents."""
    return math.exp(losses.sum() / counts.sum())


def best_rate(options: argparse.Namespace, way: str) -> float:
    """Return the rate of the least perplexity on the proxy; 8 takes that of 3."""
    tried = "none" if way == "none" else "3"
    found = [
        line
        for part, line in read_parts(options.results).items()
        if part.startswith(f"proxy-{tried}-")
    ]
    if not found:
        end_script(f"needs the parts 'proxy-{tried}-*' first, which choose the rate", True)
    return float(min(found, key=lambda line: line["perplexity"])["rate"])


# --- intervals --------------------------------------------------------------------------------


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Give intervals: by documents, drawn anew with all of their tokens, and by keys.

    Of each way the mean perplexity of its keys; of two ways the difference on the same documents.
    """
    kept = {"base": [np.load(options.out / "private-base.npz")]}
    for way in WAYS:
        lines = sorted((
            line for line in read_parts(options.results).values()
            if line.get("set") == "private" and line["way"] == way
        ), key=lambda line: line["key"])  # fmt: skip
        names = [f"private-{way}-{line['rate']:g}-{line['key']}.npz" for line in lines]
        if names:
            kept[way] = [np.load(options.out / name) for name in names]
    counts = kept["base"][0]["counts"]
    losses = {way: np.stack([each["losses"] for each in found]) for way, found in kept.items()}
    generator = np.random.default_rng(0)
    drawn = generator.integers(len(counts), size=(RESAMPLES, len(counts)))
    tokens = counts[drawn].sum(1)
    again = {  # (resamples,): the mean over keys
        way: np.mean([np.exp(each[drawn].sum(1) / tokens) for each in rows], axis=0)
        for way, rows in losses.items()
    }
    by_key = {way: np.exp(rows.sum(1) / counts.sum()) for way, rows in losses.items()}
    found: dict[str, Any] = {"documents": len(counts), "tokens": int(counts.sum()), "ways": {}}
    for way, values in by_key.items():
        found["ways"][way] = interval(values, again[way], len(values) > 1)
    pairs = [("3", "none"), ("8", "none"), ("3", "8"), ("base", "3"), ("base", "8")]
    found["differences"] = {
        f"{a} less {b}": interval(by_key[a] - by_key[b], again[a] - again[b], len(by_key[b]) > 1)
        for a, b in pairs
        if a in by_key and b in by_key and len(by_key[a]) in (1, len(by_key[b]))
    }
    return found


def interval(values: np.ndarray, again: np.ndarray, keys: bool) -> dict[str, Any]:
    """Return the mean, the bootstrap's 95 % interval, and Student's of the keys."""
    found = {"each": values.tolist(), "mean": float(values.mean()),
             "documents": np.quantile(again, (0.025, 0.975)).tolist()}  # fmt: skip
    if keys:
        student = Estimate.from_values(values)
        found["keys"] = [student.low, student.high]
    return found


# --- parts ------------------------------------------------------------------------------------


def parts(options: argparse.Namespace) -> dict[str, Any]:
    """Every part by name, in order."""
    found: dict[str, Any] = {"corpus": (corpus,), "base": (base,)}
    for way, rates in RATES.items():
        for rate in rates:
            found[f"proxy-{way}-{rate:g}"] = (tune, "proxy", way, 0, rate)
    found["untuned"] = (untuned,)
    for key in range(KEYS):
        for way in WAYS:
            found[f"private-{way}-{key}"] = (tune, "private", way, key)
    found["compare"] = (compare,)
    return choose_parts(found, options.only)


def show(found: dict[str, dict[str, Any]]) -> None:
    """Print the sets, the rates of the proxy, and perplexities with their intervals."""
    for name in SETS if "corpus" in found else ():
        line = found["corpus"][name]
        versions = ", ".join(f"{each} {v}" for each, v in line["versions"].items())
        print(
            f"{name}: {line['train']:,} documents to learn, {line['test']:,} to test, "
            f"{line['bytes']:,} bytes, {line['near_copies_left_out']:,} left out: {versions}"
        )
    if "base" in found:
        line = found["base"]
        print(f"base: {line['parameters']:,} parameters, {line['tokens']:,} public tokens, "
              f"{line['seconds'] / 60:.1f} minutes, perplexity "
              f"{line['public_test_perplexity']:.2f} on public test documents")  # fmt: skip
    tried = [line for part, line in found.items() if part.startswith("proxy")]
    if tried:
        rows = [[each["way"], f"{each['rate']:g}", f"{each['perplexity']:.2f}"] for each in tried]
        print(markdown_table([["proxy: epsilon", "learning rate", "perplexity"], *rows]))
    if "compare" not in found:
        return
    line, rows = found["compare"], []
    for name, each in {**line["ways"], **line["differences"]}.items():
        spans = [
            f"{each[by][0]:.2f} to {each[by][1]:.2f}" if by in each else ""
            for by in ("documents", "keys")
        ]
        listed = ", ".join(f"{value:.2f}" for value in each["each"])
        rows.append([name, listed, f"{each['mean']:.2f}", *spans])
    heads = ["epsilon", "perplexity by key", "mean", "95 % by documents", "95 % by keys"]
    print(f"{line['documents']:,} held-out documents, {line['tokens']:,} tokens")
    print(markdown_table([heads, *rows]))
    minutes = sum(each.get("seconds", 0.0) for each in found.values()) / 60
    print(f"all parts: {minutes:.0f} minutes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("perplexity"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--only", nargs="+", default=["*"], help="parts: 'private-*'")
    parser.add_argument("--documents", type=int, help="of each set, at most")
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--length", type=int, default=96, help="tokens of a document that are read")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--base-steps", type=int, default=1300)
    parser.add_argument("--base-batch", type=int, default=64)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--micro-batch", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16", help="of the frozen base")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--table", action="store_true", help="print what --results holds")
    tiny = {"documents": 400, "vocabulary": 320, "length": 16, "width": 64, "layers": 1,
            "base_steps": 3, "base_batch": 4, "batch": 8, "steps": 2, "micro_batch": 16,
            "threads": 1, "only": ["corpus", "base", "proxy-*-0.003", "untuned", "private-*-0",
                                   "compare"]}  # fmt: skip
    options = parse_arguments(parser, tiny, ("out", "results"))
    if options.table:
        return show(read_parts(options.results))
    warnings.filterwarnings("ignore", message="privacy.run_key")
    torch.set_num_threads(options.threads)
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, (work, *arguments) in parts(options).items():
        if name in read_parts(options.results):
            continue
        began = time.monotonic()
        line = {"part": name, **work(options, *arguments)}
        line.setdefault("seconds", time.monotonic() - began)
        append_line(options.results, line)
        print(f"{name}: {line['seconds']:.0f} s", flush=True)
    show(read_parts(options.results))
    return None


if __name__ == "__main__":
    main()
