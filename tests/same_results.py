"""Do two versions of dpdist give the same results?

    python tests/same_results.py make BASE [CASE ...]     record results, with the old version
    python tests/same_results.py check BASE [CASE ...]    the same again with the new one, compared

`check` runs each case again beside BASE and compares contents: every tensor, ledger entry, row and
metadata key of a table, plan, card, recipe, number of a report and printed epsilon, by name. Of a
sentence it compares the numbers, so that words may change. Exit code 1, and one line for each
difference, when something is not the same. `LEFT_OUT` names what may differ, with the reason.

The cases are those of `same_results.yaml`: recipes, and the command line's own commands. What they
leave is read by the documented formats, so that modules may be renamed and moved. Commands run in
one process for each case, without Ray (`run_without_ray` of the checkout's
`tests/support/local_execution.py`). Cases marked `ray` use the `dpdist` beside this Python.

All random numbers follow from fixed keys. BASE must be made on the same machine, with the same
torch, by this script in a checkout of the old version. Both sides use one thread for each process,
and `--jobs` cases at a time (default: 2).
"""

from __future__ import annotations

import argparse
import base64
import copy
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from fnmatch import fnmatch
from functools import cache, partial
from importlib.metadata import entry_points
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors import safe_open

Facts = dict[str, Any]  # by name; a difference names them

_FILE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
COMMON, CASES = _FILE["base"], _FILE["cases"]

# ---- what may differ

LEFT_OUT_FILES = {
    "*.log": "what Ray says of its session",
    "*.svg": "pictures of what tables state, which are compared",
    "*.html": "rendered from the files of the run, which are compared",
    "private/*ray/*": "files of Ray's own",
    "private/*metrics.jsonl": "seconds of each step beside what the ledger and the weights say",
    "*/timings.csv": "seconds of each input",
    "*/rate.json": "draws per second, which size chunks only",
    "*/journal.jsonl": "chunks in the order in which they were done; the table holds the results",
    "private/*progress.json": "how fast the training was",
    "private/*ledger.anchor": "how far the ledger goes, by its last line's check",
    "private/*/processes.json": "nonces of processes",
    "release/SHA256SUMS": "sums of the files beside it, which are compared",
    "release/SHA256SUMS.sig": "the signature of these sums; `verify --signer` checks it",
    "release/README.md": "rendered from the files beside it, which are compared",
    "*/.*": "locks and leftovers",
}
LEFT_OUT = {  # the end of a key's place in JSON
    "format": "rose once, with the names",
    "version": "that of the ledger and of a budget too",
    "nonce": "drawn afresh by every process",
    "identity.recipe": "a digest over names of keys, too; the recipe is compared",
    "identity.begun with": "the same",
    "identity.code": "a digest of the package's sources",
    "ledger.check": "the last line's, which chains it to the nonces and code before it",
    "training time": "as a dry run measures it",
    "classifier.check": "a digest of answers to a batch that is drawn at random",
    "charge": "names what a run takes from a budget, drawn afresh",
    "seconds": "how long it took",
    "timed_from": "of its last start",
    "folder": "where a run lies",
    "doubts": "sentences about the table of certificates, which is compared",
    "rows": "sentences about results, which are compared",
}
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?(?!\d|\.\d| s\b)")
_SHOWN = 20  # differences of a case
# Of a page: a date, and the version of the code, which its text names.
_NO_RESULT = re.compile(r"\b20\d\d-\d\d-\d\d\b|\bdigest [0-9a-f]{32}\b|\bcommit [0-9a-f]{7,40}")


# ---- cases


def recipe(name: str) -> dict[str, Any]:
    """The recipe of a case, as plain data."""
    return _merged(copy.deepcopy(COMMON) | {"name": name}, CASES[name]["recipe"])


def _merged(raw: dict[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in change.items():
        if value is None:
            raw.pop(key, None)
        elif isinstance(value, dict):
            before = raw.get(key)
            raw[key] = _merged(dict(before) if isinstance(before, dict) else {}, value)
        else:
            raw[key] = value
    return raw


def commands(name: str) -> list[str]:
    """The commands of a case; what those with --json print is compared."""
    case = CASES[name]
    steps: list[str] = case.get("steps", [])
    if case.get("alone"):
        return steps
    public = {"initial", "classifier"} & set(case["recipe"].get("model", ()))
    before = [f"run {name}.yaml --until pretrain"] if public else []
    return [*before, f"run {name}.yaml", *steps, f"report {name}", f"report {name} --json"]


# ---- running


class Failed(Exception):
    """A command did not end as it should."""


def _environment() -> dict[str, str]:
    """One thread, and nothing that a user has set for Ray or for dpdist."""
    outer = ("RAY_", "DPDIST_")
    own = {key: value for key, value in os.environ.items() if not key.startswith(outer)}
    threads = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")}
    return own | threads | {"COLUMNS": "200", "NO_COLOR": "1"}


def dpdist(folder: Path, words: Sequence[str], ray: bool = False) -> str:
    """Run a command in `folder`; return what it printed."""
    if ray:
        command = [str(Path(sys.executable).with_name("dpdist")), *words]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        code, out, err = done.returncode, done.stdout, done.stderr
    else:
        _without_ray()
        code, out, err = _here(folder, words)
    if code:
        said = f"{out[-2000:]}\n{err[-2000:]}".strip()
        raise Failed(f"dpdist {' '.join(words)}: exit code {code}\n{said}")
    return out


@cache
def _without_ray() -> None:
    """See to it that commands in this process start no Ray."""
    package = importlib.util.find_spec("dpdist")
    assert package is not None and package.origin is not None
    sys.path.insert(0, str(Path(package.origin).parent.parent / "tests"))
    importlib.import_module("support.local_execution").run_without_ray(pytest.MonkeyPatch())


def _here(folder: Path, words: Sequence[str]) -> tuple[int, str, str]:
    """Exit code and output of a command in this process."""
    (script,) = entry_points(group="console_scripts", name="dpdist")
    out, err = StringIO(), StringIO()
    before, sys.argv = sys.argv, ["dpdist", *words]
    os.chdir(folder)
    code = 0
    try:
        with redirect_stdout(out), redirect_stderr(err):
            script.load()()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except Exception:
        code, err = -1, StringIO(traceback.format_exc())
    finally:
        sys.argv = before
    return code, out.getvalue(), err.getvalue()


def prepare(folder: Path, name: str) -> None:
    """The files that a case begins with."""
    folder.mkdir(parents=True)
    raw = recipe(name)
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(raw))
    if name == "audit":
        plain = {key: value for key, value in raw.items() if key != "audit"} | {"name": "many"}
        (folder / "many.yaml").write_text(yaml.safe_dump(plain))
    row, column = np.indices((8, 8))
    np.save(folder / "image.npy", ((row - 3.5) ** 2 + (column - 3.5) ** 2 < 9)[None].astype("f4"))
    _write_key(folder)


def _write_key(folder: Path) -> None:
    """An Ed25519 key (RFC 8410), always the same."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
    )

    key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex("5a" * 32))
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (folder / "key.pem").write_bytes(pem)
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (folder / "public.pem").write_bytes(public)


def run_case(folder: Path, name: str, old: Path | None = None) -> None:
    """Everything of a case, in a new folder. old: the recorded one, which pins what is executed."""
    prepare(folder, name)
    said = folder / "said"
    said.mkdir()
    for number, command in enumerate(commands(name)):
        words = command.split()
        text = dpdist(folder, words, CASES[name].get("ray", False))
        if old is not None:
            _pin(old, folder)
        if "--json" in words:
            (said / f"{number}-{words[0]}.txt").write_text(text)


def _pin(old: Path, new: Path) -> None:
    """Let the certification of a release execute what the recorded one did: its seed or its
    backend cannot be asked for. Attacks are given their seed; their check batch, whose
    digest is pinned with the backend, is that of certifications since they count by its worker."""
    found = [*old.glob("certificates/*/*/*.json")]
    for settings in found:
        place = new / settings.parent.relative_to(old)
        begun = "runs" not in settings.relative_to(old).parts or place.parent.parent.exists()
        if begun and not (place / settings.name).exists():
            place.mkdir(parents=True, exist_ok=True)
            shutil.copy(settings, place)
            if (rate := settings.with_name("rate.json")).exists():
                shutil.copy(rate, place)


# ---- what is compared


def results(folder: Path) -> Facts:
    """All that a case left and said, by name, but for what `LEFT_OUT` names."""
    found: Facts = {}
    others = [folder / "certificates", *folder.glob("*.csv"), *folder.glob("budget")]
    for path in sorted(each for top in [folder / "runs", *others] for each in _files(top)):
        inside = path.relative_to(folder).as_posix()
        of_run = inside.split("/", 2)[-1] if inside.startswith("runs/") else inside
        if not any(fnmatch(of_run, pattern) for pattern in LEFT_OUT_FILES):
            found |= {f"{inside}: {key}": value for key, value in contents(path).items()}
    for path in sorted(folder.glob("said/*.txt")):
        found |= {f"{path.stem}, printed: {k}": v for k, v in printed(path.read_text()).items()}
    return {k: _plain(v, str(folder)) if isinstance(v, str) else v for k, v in found.items()}


def _plain(text: str, folder: str) -> str | list[str]:
    """A value without the case's folder; of a sentence, its numbers alone."""
    text = text.replace(folder, "HERE")
    sentence = len(re.findall(r"[a-z]{2,} ", text)) > 3
    return _NUMBER.findall(text) if sentence else text


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    elif path.is_dir():
        yield from (each for each in path.rglob("*") if each.is_file())


def contents(path: Path) -> Facts:
    """What a file says, by its documented format."""
    readers: dict[str, Callable[[Path], Facts]] = {
        ".json": lambda it: _flat(json.loads(it.read_text())),
        ".yaml": lambda it: _flat(yaml.safe_load(it.read_text())),
        ".jsonl": _journal,
        ".safetensors": _tensors,
        ".parquet": _table,
    }
    if path.suffix in readers:
        return readers[path.suffix](path)
    data = path.read_bytes()
    try:
        return {"text": _NO_RESULT.sub(" ", data.decode())}
    except UnicodeDecodeError:
        return {"bytes": base64.b85encode(data).decode()}


def _flat(value: Any, name: str = "") -> Facts:
    """The leaves of JSON by their place; what `LEFT_OUT` names is not among them."""
    if isinstance(value, Mapping) and value:
        found, items = {}, [(str(key), each) for key, each in value.items()]
    elif isinstance(value, list):
        found, items = {f"{name}#": len(value)}, [(str(n), each) for n, each in enumerate(value)]
    else:
        return {name: value}
    for key, each in items:
        place = f"{name}.{key}" if name else key
        if not any(f".{place}".endswith(f".{left}") for left in LEFT_OUT):
            found |= _flat(each, place)
    return found


def _journal(path: Path) -> Facts:
    """A ledger, or another file of JSON lines."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    records = [line.get("record", line) for line in lines]
    if records and "plan" in records[0]:
        del records[0]["id"]  # names the file, and is drawn afresh
    return _flat(records)


def _tensors(path: Path) -> Facts:
    """Every tensor to the bit."""
    found: Facts = {}
    with safe_open(path, "pt") as file:
        found |= _flat(dict(file.metadata() or {}), "metadata")
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name)
            raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            found[name] = f"{tensor.dtype} {tuple(tensor.shape)} {base64.b85encode(raw).decode()}"
    return found


def _table(path: Path) -> Facts:
    """Columns, rows and metadata of a table, and the bytes of its file."""
    table = pq.read_table(path)
    found: Facts = {}
    for key, value in (table.schema.metadata or {}).items():
        name = key.decode()
        found[f"metadata {name}"] = "there"
        if name != "dpdist.settings":  # a digest of all of it, with what may differ
            found |= _flat(_parsed(value.decode()), name)
    for column in table.schema:
        found[f"column {column.name}"] = f"{column.type}{'' if column.nullable else ', not null'}"
        for row, value in enumerate(table[column.name].to_pylist()):
            found[f"{column.name}, row {row}"] = repr(value)
    return found


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def printed(text: str) -> Facts:
    """One value of JSON, or one in each line."""
    try:
        return _flat(json.loads(text))
    except ValueError:
        return _flat([json.loads(line) for line in text.splitlines()])


def _compared(found: Facts, left_out: Mapping[str, str]) -> Facts:
    return {k: v for k, v in found.items() if not any(fnmatch(k, each) for each in left_out)}


def differences(before: Facts, after: Facts) -> list[str]:
    """A line for each of the first things that are not the same."""
    lines = []
    for key in sorted(before | after):
        old, new = before.get(key, "nothing"), after.get(key, "nothing")
        if old != new or type(old) is not type(new):
            lines.append(f"{key}: {_short(old)} is now {_short(new)}")
    return [*lines[:_SHOWN], *[f"and {len(lines) - _SHOWN} more"] * (len(lines) > _SHOWN)]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:50]}..."


# ---- the two commands


def machine() -> dict[str, Any]:
    """What bits depend on besides the code."""
    return {
        "torch": torch.__version__, "machine": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
    }  # fmt: skip


def make(base: Path, name: str) -> list[str]:
    folder = base / name
    shutil.rmtree(folder, ignore_errors=True)
    run_case(folder, name)
    return []


def check(base: Path, name: str) -> list[str]:
    old, new = base / name, _beside(base) / name
    if not old.is_dir():
        raise Failed(f"{old}: not recorded; `make` it with the old version")
    shutil.rmtree(new, ignore_errors=True)
    run_case(new, name, old)
    before, after = results(old), results(new)
    left_out = CASES[name].get("left_out", {})
    return differences(_compared(before, left_out), _compared(after, left_out))


def _beside(base: Path) -> Path:
    """Where the new version's results go: one folder for each checkout."""
    return base.with_name(f"{base.name}-again-{Path.cwd().name}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("command", choices=("make", "check"))
    parser.add_argument("base", type=Path, help="the recorded results")
    parser.add_argument("cases", nargs="*", metavar="CASE", help="default: all")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    given = parser.parse_args()
    names = given.cases or list(CASES)
    if unknown := set(names) - set(CASES):
        parser.error(f"no such case: {sorted(unknown)}")
    base = given.base.resolve()
    where = base / "machine.json"
    if given.command == "make":
        base.mkdir(parents=True, exist_ok=True)
        where.write_text(json.dumps(machine()))
    elif json.loads(where.read_text()) != machine():
        parser.error(f"recorded with {where.read_text()}, this is {json.dumps(machine())}")
    os.environ["DPDIST_CACHE"] = str(base / "cache")
    if any(not CASES[name].get("ray") for name in names):
        _without_ray()  # what it loads, each case then finds loaded
    work = make if given.command == "make" else check
    return _all_of([partial(_tried, work, base, name) for name in names], given.jobs)


def _all_of(tasks: Sequence[Callable[[], bool]], jobs: int) -> int:
    """Do each task in a process of its own, so many at a time; 0 where all of them said True."""
    running, failed = 0, 0
    for task in tasks:
        if running == jobs:
            failed += os.waitstatus_to_exitcode(os.wait()[1]) != 0
            running -= 1
        running += 1
        if os.fork() == 0:
            os._exit(0 if task() else 1)
    while running:
        failed += os.waitstatus_to_exitcode(os.wait()[1]) != 0
        running -= 1
    return int(failed > 0)


def _tried(work: Callable[[Path, str], list[str]], base: Path, name: str) -> bool:
    began = time.monotonic()
    try:
        found = work(base, name)
    except Failed as error:
        found = [str(error)]
    except Exception:
        found = [traceback.format_exc()]
    result = "\n    ".join(["DIFFERS", *found]) if found else "made" if work is make else "the same"
    print(f"{name}: {result} ({time.monotonic() - began:.0f} s)", flush=True)
    return not found


if __name__ == "__main__":
    if "SAME_RESULTS" not in os.environ:  # threads are counted when torch is loaded
        outer = _environment() | {"SAME_RESULTS": ""}
        os.execve(sys.executable, [sys.executable, *sys.argv], outer)
    code = main()
    sys.stdout.flush()
    os._exit(code)  # Ray's own end would look for what `without_ray` has replaced
