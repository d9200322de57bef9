"""Shared by the scripts of benchmarks/ and papers/: the option --quick, where data lie.

A script runs as `python benchmarks/speed/NAME.py`, so it adds this folder to `sys.path` itself.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import datetime
import fnmatch
import importlib.metadata
import io
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent
RESULTS_FOLDER = CHECKOUT / "benchmarks" / "results"
# Scripts take networks and measurements from one another, whichever folder they are in.
sys.path += [str(CHECKOUT / "benchmarks" / name) for name in ("", "speed", "scaling", "gpu")]


@cache
def scratch_folder() -> Path:
    """Return a temporary folder, which is removed when the script ends."""
    folder = tempfile.TemporaryDirectory(prefix="dpdist-benchmark-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


def parse_arguments(
    parser: argparse.ArgumentParser,
    quick: Mapping[str, Any],
    output_options: Sequence[str] = (),
    arguments: list[str] | None = None,
) -> argparse.Namespace:
    """Parse the command line, with one more option: --quick, a smoke test of seconds.

    With --quick an option that is not given has its value in `quick`, and nothing is written
    outside `scratch_folder()`: neither results nor decoded data.

    Args:
        parser: the script's own options.
        quick: tiny values of its options, by destination.
        output_options: destinations of the options that say where results go.
        arguments: the command line; None for that of the process.
    """
    told = "seconds, on built-in or invented data; its figures mean nothing, and none are kept"
    parser.add_argument("--quick", action="store_true", help=told)
    if parser.parse_known_args(arguments)[0].quick:
        for variable in ("DPDIST_CACHE", "HOME", "XDG_CACHE_HOME"):  # libraries' files, too
            os.environ[variable] = str(scratch_folder() / "home")
        parser.set_defaults(**{name: scratch_folder() / name for name in output_options}, **quick)
    return parser.parse_args(arguments)


def data_root() -> Path:
    """Return the folder of Parquet data: $DPDIST_DATA_ROOT, or shared/data beside the checkout."""
    beside = CHECKOUT.parent / "shared" / "data"
    return Path(os.environ.get("DPDIST_DATA_ROOT") or beside).resolve()


def require_data(requested_root: Path | None, *names: str) -> Path:
    """Return the folder that holds these data sets, or end the script with the reason.

    Args:
        requested_root: the folder that was asked for; None for `data_root()`. A script that was
            not told
            where to look ends well, so that `make bench` goes on.
        names: of data sets, each a subfolder.
    """
    root = data_root() if requested_root is None else requested_root
    missing = [name for name in names if not (root / name).is_dir()]
    if missing:
        end_script(
            f"needs {' and '.join(missing)} as Parquet under {root}", requested_root is not None
        )
    return root


def end_script(reason: str, failed: bool = False) -> None:
    """End the script: it cannot run here, which is a failure only if this was asked for."""
    print(f"{Path(sys.argv[0]).name}: not run: {reason}")
    sys.exit(2 if failed else 0)


def make_images(
    root: Path,
    name: str,
    num_train: int,
    num_test: int = 10,
    shape: tuple[int, ...] = (28, 28),
) -> None:
    """Write a data set of random pictures, for work that depends on no record.

    Args:
        root: folder of data sets, in which `name` becomes one.
        num_train: of the split train.
        num_test: records of the split test.
        shape: height and width, and 3 for colors.
    """
    import numpy as np  # not above: what a test of light imports loads needs none of these
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    rng = np.random.default_rng(0)
    rows = []
    for _ in range(num_train + num_test):
        buffer = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(buffer, format="PNG")
        rows.append({"bytes": buffer.getvalue(), "path": ""})
    (root / name).mkdir(parents=True)
    table = pa.table({"image": rows, "label": rng.integers(0, 10, num_train + num_test)})
    pq.write_table(table.slice(0, num_train), root / name / "train.parquet")
    pq.write_table(table.slice(num_train), root / name / "test.parquet")


def train_small_run(name: str, changes: dict[str, Any]) -> Path:
    """Train a recipe in this process, without Ray, and return its run folder in `scratch_folder()`.

    Args:
        name: of a recipe that comes along, or the path of one.
        changes: fields of it, by dotted key.
    """
    from dpdist.cluster.executor import LocalExecutor
    from dpdist.runs.folder import RunFolder
    from dpdist.runs.recipe import find_recipe, load_recipe
    from dpdist.training.job import prepare
    from dpdist.training.trainer import fit

    folder = scratch_folder() / "runs" / Path(name).stem
    job = prepare(load_recipe(find_recipe(name), changes), RunFolder(folder), name)
    fit(job, LocalExecutor())
    return folder


def run_command(*words: str, data_root: Path | None) -> None:
    """Run a dpdist command in this process; of what it prints, its seconds alone are shown."""
    from dpdist.cli.main import app

    root = [] if data_root is None else ["--set", f"data.root={data_root}"]
    print("$ dpdist", *words, *root, flush=True)
    began = time.monotonic()
    with contextlib.redirect_stdout(io.StringIO()):
        app([*words, *root], standalone_mode=False)
    print(f"  {time.monotonic() - began:.0f} s", flush=True)


def mean_and_range(values: Sequence[float], digits: int = 1) -> str:
    """Return the mean, and of several values the least and the greatest."""
    shown = f"{sum(values) / len(values):.{digits}f}"
    if len(values) > 1:
        shown += f" ({min(values):.{digits}f} to {max(values):.{digits}f})"
    return shown


def choose_parts(found: Mapping[str, Any], patterns: Sequence[str]) -> dict[str, Any]:
    """Return the parts of a script whose names match one of the patterns, in order."""
    return {
        name: part
        for name, part in found.items()
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
    }


def read_lines(results: Path, setting: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """Return the lines of a result file that have these values; none if there is no file."""
    lines = results.read_text().splitlines() if results.exists() else []
    return [line for line in map(json.loads, lines) if (setting or {}).items() <= line.items()]


def pack_bits(success: Any) -> str:
    """Return bool (N,) as hexadecimal digits, for a line of a results file."""
    import numpy as np

    return np.packbits(success).tobytes().hex()


def unpack_bits(digits: str, count: int | None) -> Any:
    """Return the first `count` of packed bits, bool (N,)."""
    import numpy as np

    packed = np.frombuffer(bytes.fromhex(digits), np.uint8)
    return np.unpackbits(packed, count=count).astype(bool)


def append_line(results: Path, line: Mapping[str, Any]) -> None:
    """Add a line to a result file, at once: what is there is not measured again."""
    with results.open("a") as file:
        file.write(json.dumps(line, ensure_ascii=False) + "\n")


def read_parts(results: Path) -> dict[str, dict[str, Any]]:
    """Return the lines of a result file by their parts; none if there is no file."""
    return {line["part"]: line for line in read_lines(results)}


def describe_run() -> dict[str, Any]:
    """Return what a figure depends on: commit, processor, its family, versions and date.

    Results, and the page that is made of them, are no changes of the code.
    """
    git = ["git", "-C", str(CHECKOUT)]
    made = [":!benchmarks/results/*", ":!papers/*.jsonl", ":!papers/**/*.jsonl"]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=8", "HEAD"], capture_output=True)
        changed = subprocess.run([*git, "status", "--porcelain", "--", ".", *made],
                                 capture_output=True)  # fmt: skip
        commit = head.stdout.decode().strip() + ("+changes" if changed.stdout else "")
    except OSError:  # no git
        commit = ""
    name, family = find_processor()
    versions = {"python": platform.python_version()}
    for each in ("torch", "numpy", "opacus", "transformers", "peft", "ray"):
        try:
            versions[each] = importlib.metadata.version(each)
        except importlib.metadata.PackageNotFoundError:
            continue
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"commit": commit, "processor": name, "family": family, "cores": os.cpu_count(),
            "versions": versions, "date": today}  # fmt: skip


def find_processor() -> tuple[str, str]:
    """Return the processor's name and its family: AMD, Intel, or the machine's architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine(), platform.machine()
    said = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    makers = {"AuthenticAMD": "AMD", "GenuineIntel": "Intel"}
    family = makers.get(said.get("vendor_id", ""), platform.machine())
    return said.get("model name", platform.machine()), family
