"""Measure the table of speeds, and make benchmarks/results/speed.md of what was measured.

    make bench                                     all rows, about half an hour on two cores
    python benchmarks/speed/speed.py --only cnn 'gpt2-*' some of them
    python benchmarks/speed/speed.py --write             only makes the page

A row is measured in a process of its own, beside its peers, in turn; medians are compared. Its line
in speed.jsonl replaces the one of the same row, threads and processor family; other processors keep
theirs. The same command continues: what was measured at this commit on this processor stays, unless
--again is given. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
from _common import RESULTS_FOLDER, choose_parts, describe_run, parse_arguments, read_parts

if TYPE_CHECKING:
    from torch import nn

RESULTS, PAGE = RESULTS_FOLDER / "speed.jsonl", RESULTS_FOLDER / "speed.md"
GPU_RESULTS = RESULTS_FOLDER / "gpu.jsonl"
FAMILIES = ("AMD", "Intel")  # columns of the page even before they are measured
ROUND_SECONDS, MOST_SECONDS = 30.0, 600  # of a row's rounds; of a row in all
Figures = dict[str, Any]


# --- what a row measures ----------------------------------------------------------------------


def ratios(medians: dict[str, float]) -> Figures:
    """Return how many times as long as our step the peers' take."""
    ours = medians["ours"]
    opacus = {name: each for name, each in medians.items() if name.startswith("opacus")}
    found: Figures = {"ms": {name: round(1e3 * each, 3) for name, each in medians.items()}}
    best = min(opacus, key=lambda name: opacus[name], default=None)
    if best is not None:
        found["best of Opacus"] = round(opacus[best] / ours, 3)
        found["Opacus' best mode"] = best.removeprefix("opacus ")
    for name, peer in (("ordinary", "ordinary"), ("channels-last", "ordinary channels-last")):
        if peer in medians:
            found[name] = round(medians[peer] / ours, 3)
    return found


def in_turn(steps: dict[str, Callable[[], None]], quick: bool) -> Figures:
    """Measure steps in turn, for as many rounds as fit into `ROUND_SECONDS`, three at least.

    Opacus' modes that take far longer than its best one in the first round have that round alone.
    """
    from _training import interleave

    one = interleave(steps, 1, 1)
    if quick:
        return ratios(one)
    modes = {name: each for name, each in one.items() if name.startswith("opacus")}
    slow = {n: each for n, each in modes.items() if each > 1.5 * min(modes.values())}
    kept = {name: step for name, step in steps.items() if name not in slow}
    rounds = max(3, min(25, int(ROUND_SECONDS / sum(one[name] for name in kept))))
    found = slow | interleave(kept, rounds, 1, warm=0)
    return {"rounds": rounds, "one round": sorted(slow)} | ratios(found)


def classifier(
    make: Callable[[bool], nn.Module], shape: tuple[int, ...], batch: int, quick: bool
) -> Figures:
    """Measure training steps of a classifier of images."""
    import copy

    import torch
    from _training import peers

    torch.manual_seed(0)
    batch = 4 if quick else batch
    model, inputs = make(quick), torch.rand(batch, *shape)
    targets = torch.randint(0, 10, (batch,))
    steps = {n: build(copy.deepcopy(model), inputs, targets) for n, build in peers().items()}
    return in_turn(steps, quick)


def fixed_rows(quick: bool) -> Figures:
    """How many times as long a step takes where every record has a row of its own."""
    import copy

    import torch
    from _networks import vit_tiny
    from _training import interleave, our_step

    from dpdist.models.zoo import resnet_gn, tf_cnn

    torch.manual_seed(0)
    found: Figures = {"ms": {}}
    for name, model, shape, batch in (
        ("CNN", tf_cnn((1, 28, 28), 10), (1, 28, 28), 256),
        ("ResNet-8", resnet_gn((3, 32, 32), 10, depth=8), (3, 32, 32), 128),
        ("ViT-Tiny", vit_tiny(quick), (3, 32, 32), 32),
    ):
        batch = 4 if quick else batch
        inputs, targets = torch.rand(batch, *shape), torch.randint(0, 10, (batch,))
        steps = {
            way: our_step(copy.deepcopy(model), inputs, targets, rounding=way)
            for way in ("standard", "fixed-row")
        }
        medians = interleave(steps, 1 if quick else 5, 1)
        found["ms"][name] = {way: round(1e3 * each, 3) for way, each in medians.items()}
        found[name] = round(medians["fixed-row"] / medians["standard"], 3)
    return found


def cnn(quick: bool) -> Figures:
    from dpdist.models.zoo import tf_cnn

    return classifier(lambda _: tf_cnn((1, 28, 28), 10), (1, 28, 28), 256, quick)


def resnet(depth: int) -> Callable[[bool], Figures]:
    def measure(quick: bool) -> Figures:
        from dpdist.models.zoo import resnet_gn

        return classifier(
            lambda _: resnet_gn((3, 32, 32), 10, depth=depth), (3, 32, 32), 128, quick
        )

    return measure


def vit(quick: bool) -> Figures:
    from _networks import vit_tiny

    return classifier(vit_tiny, (3, 32, 32), 32, quick)


def gpt2(lora: bool) -> Callable[[bool], Figures]:
    """A GPT-2 of six layers on invented documents of 64 tokens."""

    def measure(quick: bool) -> Figures:
        import _language_models as models
        from _networks import gpt2 as network

        rows, length = (2, 8) if quick else (8, 64) if lora else (4, 64)
        steps = {}
        for name, way in (("ours", "private"), ("ordinary", "ordinary"), ("opacus", "opacus")):
            model = network(6, lora, quick)
            fields = models.documents(model, rows, length)
            steps[name] = getattr(models, f"{way}_step")(model, fields)
        return in_turn(steps, quick)

    return measure


def lstm(quick: bool) -> Figures:
    """Texts of 64 words. Opacus takes an LSTM of its own, or torch's by expanded weights."""
    import torch
    from _networks import TextClassifier
    from _training import peers
    from torch import nn

    torch.manual_seed(0)
    rows, length = (4, 8) if quick else (64, 64)
    tokens, targets = torch.randint(0, 100, (rows, length)), torch.randint(0, 2, (rows,))
    found = {n: b for n, b in peers().items() if n != "ordinary channels-last"}  # no images
    steps = {}
    for name, build in found.items():
        kind: type[nn.Module] = nn.LSTM
        if name.startswith("opacus") and name != "opacus ew":
            from opacus.layers import DPLSTM

            kind = DPLSTM
        steps[name] = build(TextClassifier(kind, quick), tokens, targets)
    return in_turn(steps, quick)


def memory(quick: bool) -> Figures:
    from _training import net_memory

    net = net_memory(["ordinary", "ours"], 16 if quick else 512)
    mebibytes = {name: round(each / 2**10) for name, each in net.items()}
    return {"MiB": mebibytes, "memory": round(net["ours"] / net["ordinary"], 3)}


def workers(quick: bool) -> Figures:
    from _training_ray import RECORDS, rounds_of

    rounds, steps, records = (1, 30, 256) if quick else (3, 450, RECORDS)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DPDIST_CACHE"] = f"{folder}/cache"
        found = list(rounds_of(Path(folder), rounds, steps, records))
    each = [round(ratio, 3) for ratio in found]
    return {"rounds": each, "two processes": round(statistics.median(found), 3)}


def certify(shape: tuple[int, ...]) -> Callable[[bool], Figures]:
    def measure(quick: bool) -> Figures:
        import torch
        from _certification import BATCH, fixed_n
        from _resnet20 import resnet20

        from dpdist.models.zoo import tf_cnn

        torch.manual_seed(0)
        model = tf_cnn(shape, 10) if shape[0] == 1 else resnet20()
        blocks, rounds = (1, 1) if quick else (10, 9) if shape[0] == 1 else (1, 3)
        found = fixed_n(model.eval(), torch.rand(shape), blocks * BATCH, rounds)
        rates = {name: round(each) for name, each in found.items()}
        bare = found["engine"] / found["bare forward, best form"]
        return {"draws/s": rates, "bare forward": round(bare, 3)}

    return measure


def start_local(quick: bool) -> Figures:
    """Seconds to the first step in the command's own process, beyond those of `import torch`."""
    from _training_ray import RECORDS, until_first_step

    imports, found = [], []
    for _ in range(1 if quick else 3):
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        imports.append(time.monotonic() - began)
        with tempfile.TemporaryDirectory() as folder:
            os.environ["DPDIST_CACHE"] = f"{folder}/cache"
            found.append(until_first_step(Path(folder), 256 if quick else RECORDS, ray=False))
    torch_seconds, seconds = statistics.median(imports), statistics.median(found)
    about = {"import torch, s": round(torch_seconds, 2), "in all, s": round(seconds, 2)}
    return about | {"seconds beyond torch's import": round(seconds - torch_seconds, 2)}


def start_ray(quick: bool) -> Figures:
    from _training_ray import RECORDS, until_first_step

    found = []
    for _ in range(1 if quick else 3):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["DPDIST_CACHE"] = f"{folder}/cache"
            seconds = until_first_step(Path(folder), 256 if quick else RECORDS, ray=True)
            found.append(round(seconds, 1))
    return {"each, s": found, "seconds": statistics.median(found)}


@dataclass(frozen=True)
class Row:
    """A row of the table.

    goals: by figure; at_most: whether they are upper limits. threads: of torch's, each a line.
    """

    name: str
    measure: Callable[[bool], Figures]
    goals: dict[str, float]
    threads: tuple[int, ...] = (1, 2)
    at_most: bool = False


STEP = {"best of Opacus": 1.5, "ordinary": 0.8}
ROWS = {
    "cnn": Row(
        "TF-Privacy CNN, batch 256", cnn,
        {"best of Opacus": 2.2, "ordinary": 1.1, "channels-last": 0.7},
    ),
    "resnet8": Row(
        "GroupNorm ResNet-8, batch 128", resnet(8), {"best of Opacus": 1.8, "channels-last": 0.75}
    ),
    "resnet20": Row(
        "GroupNorm ResNet-20, batch 128", resnet(20), {"best of Opacus": 1.6, "channels-last": 0.75}
    ),
    "vit-tiny": Row("ViT-Tiny on 32 x 32, batch 32", vit, STEP),
    "gpt2-lora": Row("GPT-2 of 6 layers, LoRA, 8 documents of 64 tokens", gpt2(True), STEP),
    "gpt2-whole": Row("GPT-2 of 6 layers, whole, 4 documents of 64 tokens", gpt2(False), STEP),
    "lstm": Row("LSTM on 64 texts of 64 words", lstm, STEP),
    "fixed-rows": Row("a fixed row for every record / a step without", fixed_rows,
                    {"CNN": 1.5, "ResNet-8": 1.5, "ViT-Tiny": 1.5}, (1,), at_most=True),
    "memory": Row("linear-heavy model, batch 512: peak / ordinary's", memory, {"memory": 1.15},
                  (1,), at_most=True),
    "workers": Row("two Ray workers, one thread each / two processes", workers,
                   {"two processes": 0.93}, (1,)),
    "certify-cnn": Row("certifying with the TF-Privacy CNN / its forward pass",
                       certify((1, 28, 28)), {"bare forward": 0.9}, (1,)),
    "certify-resnet20": Row("certifying with ResNet-20 / its forward pass",
                            certify((3, 32, 32)), {"bare forward": 0.9}, (1,)),
    "start-local": Row("from the command to the first step, in one process", start_local,
                       {"seconds beyond torch's import": 2.0}, (1,), at_most=True),
    "start-ray": Row("from the command to the first step, two workers on Ray", start_ray,
                     {"seconds": 20.0}, (1,), at_most=True),
}  # fmt: skip


# --- rows in processes of their own -----------------------------------------------------------


def measured(name: str, threads: int, quick: bool) -> Figures:
    """Measure a row in a process of its own. Raises RuntimeError with what it said."""
    command = [sys.executable, str(Path(__file__).resolve()), "--row", name]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # a user's second start compiles nothing
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command += ["--threads", str(threads), "--answer", str(answer)]
        command += ["--quick"] * quick
        try:
            done = subprocess.run(command, env=environment, timeout=MOST_SECONDS,
                                  capture_output=True, text=True)  # fmt: skip
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"it took more than {MOST_SECONDS} s") from None
        if done.returncode or not answer.exists():
            said = (done.stderr.strip() or done.stdout.strip()).splitlines()
            raise RuntimeError(said[-1] if said else f"ended with {done.returncode}")
        return json.loads(answer.read_text())


def measure_one(options: argparse.Namespace) -> None:
    """Measure a row in this process, and leave what was found in a file."""
    import warnings

    import torch

    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    found = ROWS[options.row].measure(options.quick)
    options.answer.write_text(json.dumps(found))


def key_of(line: dict[str, Any]) -> str:
    """Return the name under which a line is the newest: row, threads, processor family."""
    return f"{line['row']}/{line['threads']}/{line['family']}"


def keep(results: Path, line: dict[str, Any]) -> None:
    """Write a line in the place of the one of its row, threads and family, the whole file anew."""
    lines = read_parts(results) | {line["part"]: line}
    order = {name: place for place, name in enumerate(ROWS)}
    ordered = sorted(
        lines.values(),
        key=lambda each: (order.get(each["row"], len(order)), each["family"], each["threads"]),
    )
    made = results.with_suffix(".new")
    made.write_text("".join(json.dumps(each) + "\n" for each in ordered))
    made.replace(results)


def measure_all(options: argparse.Namespace) -> list[str]:
    """Measure the rows that are asked for and not there; return those that failed."""
    about, failed = describe_run(), []
    jobs = [
        (name, threads)
        for name, row in choose_parts(ROWS, options.only).items()
        for threads in (row.threads[:1] if options.quick else row.threads)
    ]
    print(f"{len(jobs)} measurements on {about['processor']}, at {about['commit']}", flush=True)
    for name, threads in jobs:
        line = {"row": name, "threads": threads, **about}
        line["part"] = part = key_of(line)
        before = read_parts(options.results).get(part, {})
        if not options.again and all(
            before.get(each) == about[each] for each in ("commit", "processor", "versions")
        ):
            print(f"{name}, {threads} threads: measured before", flush=True)
            continue
        print(f"{name}, {threads} threads ...", flush=True)
        began = time.monotonic()
        try:
            found = measured(name, threads, options.quick)
        except RuntimeError as error:
            print(f"{name}, {threads} threads: failed: {error}", flush=True)
            failed.append(f"{name}/{threads}")
            continue
        line |= {"figures": found, "seconds": round(time.monotonic() - began, 1),
                 "load": round(os.getloadavg()[0], 2)}  # fmt: skip
        keep(options.results, line)
        goals = ROWS[name].goals
        told = ", ".join(f"{each} {cell(name, each, line)} (goal {goals[each]})" for each in goals)
        print(f"{name}, {threads} threads, {line['seconds']} s: {told}", flush=True)
        if not options.quick:
            PAGE.write_text(page())
    return failed


# --- the page ---------------------------------------------------------------------------------


def cell(name: str, figure: str, line: dict[str, Any] | None) -> str:
    """Return a figure as the page has it, a miss marked."""
    if line is None:
        return "not measured"
    value, row = line["figures"].get(figure), ROWS[name]
    if value is None:
        return "no peer"
    reached = value <= row.goals[figure] if row.at_most else value >= row.goals[figure]
    return f"{value:.2f}" if reached else f"**{value:.2f} (missed)**"


HEAD = """# Speed beside peers

`make bench` measures this table in half an hour or so, on two cores with nothing beside it, and
makes this page. A stopped one continues; `BENCH_ARGS="--only cnn"` measures some rows, `--again`
anew.

A figure is how many times as long as ours the peer's step takes: above 1, ours is faster. Rows that
say otherwise are ratios or seconds. Peers run in the same process, in turn, and medians are
compared. *Best of Opacus* is the fastest of its modes that runs. *Ordinary* trains without privacy;
*channels-last* does so in that memory format, for images. Nobody draws noise. A column keeps its
last figure, dated below. Other work on the machine gives other figures.
"""
GPU_HEAD = """## On a GPU

`python benchmarks/gpu/gpu.py` checks and measures a GPU in under 20 minutes, without Ray. Its head
names the wheels that it needs.
"""
MORE = """## Everything else

`make bench-all` runs the other scripts of benchmarks/; `--help` of each says what it does. Those
that take hours are named in the [Makefile](../../Makefile).
"""


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Return a Markdown table."""
    return ["| " + " | ".join(each) + " |" for each in [head, ["---"] * len(head), *rows]]


def page(results: Path = RESULTS, gpu_results: Path = GPU_RESULTS) -> str:
    """Return the whole page, made of the results."""
    lines = read_parts(results)
    families = list(dict.fromkeys([*FAMILIES, *(each["family"] for each in lines.values())]))
    columns = [(family, threads) for family in families for threads in (1, 2)]
    head = ["row", "figure", "goal", *(f"{f}, {n} thread{'s' * (n > 1)}" for f, n in columns)]
    body = []
    for name, row in ROWS.items():
        for figure, goal in row.goals.items():
            cells = [
                cell(name, figure, lines.get(f"{name}/{threads}/{family}"))
                if threads in row.threads else ""
                for family, threads in columns
            ]  # fmt: skip
            wanted = f"at most {goal:g}" if row.at_most else f"{goal:g}"
            body.append([row.name, figure, wanted, *cells])
    text = [HEAD, *table(head, body), ""]
    if lines:
        text += ["When, and with what:", "", *table(*dated(lines)), ""]
    return "\n".join([*text, GPU_HEAD, *on_gpus(gpu_results), "", MORE])


def dated(lines: dict[str, dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the table that says when a figure was measured, and with what."""
    head = ["rows", "processor", "cores", "commit", "date", "versions"]
    rows: dict[tuple[str, ...], list[str]] = {}
    for line in lines.values():
        versions = ", ".join(f"{name} {version}" for name, version in line["versions"].items())
        key = (line["processor"], str(line["cores"]), line["commit"], line["date"], versions)
        rows.setdefault(key, []).append(f"{line['row']} ({line['threads']})")
    return head, [[", ".join(names), *key] for key, names in rows.items()]


def on_gpus(results: Path) -> Iterator[str]:
    """Yield the table of what a GPU was found to compute, and how fast."""
    lines = {n: line for n, line in read_parts(results).items() if line["state"] != "begun"}
    if not lines:
        yield "Not measured: no GPU was there yet."
        return
    rows = []
    for name, line in lines.items():
        found = line.get("found", {})
        shown = ("times ours", "tokens/s", "million/s", "draws/s", "ratio")
        told = {key: found[key] for key in shown if key in found}
        said = line.get("error") or (json.dumps(told) if told else "")
        rows.append([name, line["state"], said.replace("|", "/").replace("\n", " "), line["device"],
                     line["commit"], line["date"]])  # fmt: skip
    yield from table(["part", "state", "found", "device", "commit", "date"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], epilog="rows: " + ", ".join(ROWS)
    )
    parser.add_argument("--only", nargs="+", default=["*"], help="rows: 'gpt2-*'")
    parser.add_argument("--again", action="store_true", help="rows that were measured too")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--write", action="store_true", help="make the page, and measure nothing")
    for name, kind in (("--row", str), ("--threads", int), ("--answer", Path)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    tiny = {"only": ["cnn", "certify-cnn"]}
    options = parse_arguments(parser, tiny, ("results",))
    if options.row:
        return measure_one(options)
    if options.write:
        PAGE.write_text(page())
        return None
    if not choose_parts(ROWS, options.only):
        parser.error(f"none of {', '.join(options.only)} is a row: {', '.join(ROWS)}")
    began = time.monotonic()
    failed = measure_all(options)
    print(f"{(time.monotonic() - began) / 60:.1f} minutes; {PAGE if not options.quick else 'done'}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")
    return None


if __name__ == "__main__":
    main()
