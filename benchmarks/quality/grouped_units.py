"""Compare two ways to protect a person with many records, at equal epsilon per person.

    OMP_NUM_THREADS=1 python benchmarks/quality/grouped_units.py [--epsilon 3] [--keys 3]
        [--only 'unit*']
    python benchmarks/quality/grouped_units.py --table
    python benchmarks/quality/grouped_units.py --quick      # a smoke test on invented texts

Records are the docstrings of `dpdist data fetch docstrings`, each text once; the person is the
source file that a docstring stands in, the author of up to hundreds of them. A model (softmax over
the words of the public vocabulary that a text has) says which package a text is from. A tenth of
the files, by a hash of their names, is the test part, and another one the part by which learning
rate and clip of each way are chosen; that choice is not paid for, in any way.

* `unit-K`: `privacy.unit: user`; of a file at most K records count in a step, drawn anew each
  time.
* `one`: one record of a file is kept, drawn by a hash; the person is a record.

Both ways sample at the same rate and take equally many steps; noise follows from epsilon. Each
training is a line of --results; what is there is not made again. --table prints Markdown: means,
least and greatest of the trainings, and the difference to the last row, key by key, with Student's
95 % interval of its mean.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import math
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))
from _common import (
    RESULTS_FOLDER,
    append_line,
    parse_arguments,
    read_lines,
    scratch_folder,
    show_gap,
)
from torch import nn

import dpdist
from dpdist.data import text
from dpdist.reports.compare import markdown_table

RESULTS = RESULTS_FOLDER / "grouped_units.jsonl"
DELTA, WORDS, MIN_WORDS = 1e-5, 2000, 8
CLIPS = {"unit": (1.0, 3.0), "one": (1.0,)}
TUNING = 1000  # key of the trainings that a rate and a clip are chosen by
WAYS = ("unit-4", "unit-16", "one")


@dataclass(frozen=True)
class Texts:
    """Hold texts as word vectors float32 (N, words), their packages and files int64 (N,)."""

    inputs: np.ndarray
    labels: np.ndarray
    files: np.ndarray

    def at(self, rows: np.ndarray) -> Texts:
        return Texts(self.inputs[rows], self.labels[rows], self.files[rows])


def read_installed() -> Iterator[tuple[str, str, str]]:
    """Yield package, file and docstring of all that `dpdist data fetch docstrings` reads."""
    for name, version, folder in text._sources(print):
        print(f"reads {name} {version}", flush=True)
        for path, found in text._docstrings(folder):
            yield name, f"{name}/{path.relative_to(folder)}", found


def read_invented() -> Iterator[tuple[str, str, str]]:
    """Yield packages, files and texts of random words."""
    generator = np.random.default_rng(0)
    words = text.split_words(" ".join(text._paragraphs()))[:4000]
    for file in range(120):
        for _ in range(int(generator.integers(1, 9))):
            some = generator.choice(words[1000 * (file % 3) :][:1500], 12)
            yield f"package{file % 3}", f"file{file}", " ".join(some)


def make_texts(found: Iterator[tuple[str, str, str]]) -> tuple[Texts, int]:
    """Return the texts, each once, as vectors of length 1, and the number of packages."""
    vocabulary = text._vocabulary(text._deduplicate(text._paragraphs()))[:WORDS]
    places = {word: place for place, word in enumerate(vocabulary)}
    kept: dict[bytes, tuple[str, str, list[int]]] = {}
    for package, file, each in found:
        words = text.split_words(each)
        known = sorted({places[word] for word in words if word in places})
        if len(words) >= MIN_WORDS and known:
            digest = hashlib.blake2b("\0".join(words).encode(), digest_size=16).digest()
            kept.setdefault(digest, (package, file, known))
    rows = [kept[digest] for digest in sorted(kept)]
    packages = {name: place for place, name in enumerate(sorted({row[0] for row in rows}))}
    files = {name: place for place, name in enumerate(sorted({row[1] for row in rows}, key=mixed))}
    inputs = np.zeros((len(rows), len(vocabulary)), np.float32)
    for row, (_, _, known) in zip(inputs, rows, strict=True):
        row[known] = 1 / math.sqrt(len(known))
    labels = np.array([packages[package] for package, _, _ in rows])
    return Texts(inputs, labels, np.array([files[file] for _, file, _ in rows])), len(packages)


def mixed(name: str) -> bytes:
    """Return a hash of a file's name, by which files are put in order."""
    return hashlib.blake2b(name.encode(), digest_size=16).digest()


def split(texts: Texts) -> tuple[Texts, Texts, Texts]:
    """Return the parts for training, for choices and for the test: whole files."""
    place = texts.files / (texts.files.max() + 1)
    return texts.at(place < 0.8), texts.at((place >= 0.8) & (place < 0.9)), texts.at(place >= 0.9)


def one_of_each(texts: Texts) -> Texts:
    """Return one text of each file, the first one: texts are in order of a hash."""
    return texts.at(np.sort(np.unique(texts.files, return_index=True)[1]))


def train(
    way: str, texts: Texts, classes: int, options: argparse.Namespace, key: int, rate: float,
    clip: float,
) -> tuple[nn.Module, dict[str, Any]]:  # fmt: skip
    """Return a model trained in one of the ways, and what stands on its run."""
    kind, _, most = way.partition("-")
    privacy: dict[str, Any] = {
        "delta": DELTA, "clip_norm": clip, "epsilon": options.epsilon,
        "run_key": hashlib.sha256(f"{way} {key}".encode()).hexdigest(),
    }  # fmt: skip
    if kind == "unit":
        privacy |= {"unit": "user", "max_records_per_user": int(most)}
    else:
        texts = one_of_each(texts)
    units = len(np.unique(texts.files))
    torch.manual_seed(key)
    model = nn.Linear(texts.inputs.shape[1], classes)
    nn.init.zeros_(model.weight)
    records = dpdist.as_records(
        (torch.from_numpy(texts.inputs), torch.from_numpy(texts.labels)), unit=texts.files.tolist()
    )
    training = dpdist.PrivateTraining(
        model, torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9), records,
        loss="cross-entropy", privacy=privacy, batch_size=round(options.rate * units),
        steps=options.steps, folder=scratch_folder() / f"{way}-{key}-{rate:g}-{clip:g}",
    )  # fmt: skip
    training.run_all()
    plan = training.plan
    told = {
        "records": len(texts.labels), "units": units, "batch": plan.step(0).expected_batch,
        "noise": plan.step(0).noise_multiplier, "epsilon": training.guarantee.epsilon,
    }  # fmt: skip
    return model, told


def hits(model: nn.Module, texts: Texts) -> np.ndarray:
    """Return whether each text is classified rightly, bool (N,)."""
    with torch.no_grad():
        found = model(torch.from_numpy(texts.inputs)).argmax(1).numpy()
    return np.asarray(found == texts.labels)


def line(
    way: str, parts: tuple[Texts, Texts, Texts], classes: int, options: argparse.Namespace,
    key: int, rate: float, clip: float,
) -> dict[str, Any]:  # fmt: skip
    """Return what one training is known by and what it gave."""
    start = time.process_time()
    model, told = train(way, parts[0], classes, options, key, rate, clip)
    seconds = time.process_time() - start
    choice, test = (float(100 * hits(model, part).mean()) for part in parts[1:])
    return {
        "way": way, "target": options.epsilon, "steps": options.steps, "rate": options.rate,
        "key": key, "lr": rate, "clip": clip, "choice": choice, "test": test, **told,
        "files": len(np.unique(parts[0].files)), "tested": len(parts[2].labels),
        "seconds": round(seconds, 1),
    }  # fmt: skip


def run(options: argparse.Namespace) -> None:
    """Train all that is not in the results: a choice for each way, then its keys."""
    read = read_invented() if options.quick else read_installed()
    texts, classes = make_texts(read)
    parts = split(texts)
    made = read_lines(options.results)
    for way in (each for each in WAYS if fnmatch.fnmatch(each, options.only)):
        clips = CLIPS[way.partition("-")[0]]

        def done(key: int, rate: float, clip: float, way: str = way) -> dict[str, Any]:
            known = {
                "way": way, "target": options.epsilon, "steps": options.steps,
                "rate": options.rate, "key": key, "lr": rate, "clip": clip,
            }  # fmt: skip
            for each in made:
                if known.items() <= each.items():
                    return each
            found = line(way, parts, classes, options, key, rate, clip)
            append_line(options.results, found)
            made.append(found)
            print(f"{way} key {key} lr {rate:g} clip {clip:g}: {found['test']:.2f} %", flush=True)
            return found

        tried = [done(TUNING, rate, clip) for rate in options.learning_rates for clip in clips]
        best = max(tried, key=lambda each: each["choice"])
        for key in range(options.keys):
            done(key, best["lr"], best["clip"])


def print_table(options: argparse.Namespace) -> None:
    """Print the trainings of all ways at this epsilon as Markdown."""
    rows, found = [], {}
    for each in read_lines(options.results):
        if each["key"] != TUNING and each["target"] == options.epsilon:
            found.setdefault(each["way"], {})[each["key"]] = each
    ways = [way for way in WAYS if way in found]
    for way in ways:
        each = list(found[way].values())
        tests = [one["test"] for one in each]
        keys = sorted(found[way].keys() & found[ways[-1]].keys())
        gaps = [found[way][key]["test"] - found[ways[-1]][key]["test"] for key in keys]
        first = each[0]
        rows.append([
            way, f"{first['units']:,}", f"{first['records']:,}", f"{first['noise']:.2f}",
            f"{first['lr']:g}, {first['clip']:g}", f"{max(one['epsilon'] for one in each):.3f}",
            f"{np.mean(tests):.2f} ({min(tests):.2f} to {max(tests):.2f})",
            "" if way == ways[-1] else show_gap(gaps),
        ])  # fmt: skip
    head = [
        "way", "units", "records", "noise multiplier", "rate, clip", "epsilon of a person",
        "accuracy, %", f"more than `{ways[-1] if ways else ''}`",
    ]  # fmt: skip
    print(markdown_table([head, *rows]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else "", allow_abbrev=False
    )
    parser.add_argument("--epsilon", type=float, default=3.0, help="of a person")
    parser.add_argument("--keys", type=int, default=3, help="trainings of each way")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rate", type=float, default=0.05, help="share of the units in a step")
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[0.25, 1.0, 4.0])
    parser.add_argument("--only", default="*", help="ways to train, as a pattern")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print the results, train nothing")
    options = parse_arguments(
        parser, {"steps": 2, "keys": 1, "only": "[uo]n*[4e]", "learning_rates": [1.0]}, ["results"]
    )
    warnings.filterwarnings("ignore", message="privacy.run_key")
    torch.set_num_threads(1)
    if not options.table:
        run(options)
    print_table(options)


if __name__ == "__main__":
    main()
