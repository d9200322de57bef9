"""Do two versions of dpdist give the same results?

    python tests/same_results.py make BASE [CASE ...]     record results, with the old version
    python tests/same_results.py check BASE [CASE ...]    the same again with the new one, compared
    python tests/same_results.py list                     the cases, and what each one is about

`check` runs each case again beside BASE and compares contents: every tensor, ledger entry, row and
metadata key of a table, plan, card, recipe, number of a report and printed epsilon, by name. Of a
sentence it compares the numbers, so that words may change. It opens none of the old files with the
new code. Exit code 1, and one line for each difference, when something is not the same.

A case is made of the command line's own commands, and what they leave is read by the documented
formats, so that modules may be renamed and moved. Commands run in one process for each case,
without Ray, by what the checkout's tests have for that (`without_ray` of
`tests/support/local_execution.py`). Those of cases marked `ray`, and all where there is no such
function any more, are made by the `dpdist` beside this Python.

All random numbers follow from fixed keys (`_KEY`, `_SEED`); `_without_key` says what is compared
where no key is fixed. BASE must be made on the same machine, with the same torch: sums are added up
in another order elsewhere. Both sides use one thread for each process, and `--jobs` cases at a time
(default: 2).

`LEFT_OUT` names what may differ, with the reason. Nothing else may.

Which old version: `BASE_2`, a commit. Make BASE from a checkout of it. That commit changed bits
once: the clip's slack is 2^-8, and a block's last pass has the records that are left, so every
clipped gradient has other bits than before. Across it only plans, events, epsilon, sampled ids and
the certificate tables of a given model are the same. Every later version equals it bit for bit.
"""

from __future__ import annotations

import argparse
import base64
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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cache, partial
from html import unescape
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

BASE_2 = "4b8c6dc493d2e30dee2d9358b7a31eb89662b1e0"  # the commit that BASE is made from

Facts = dict[str, Any]  # by name; a difference names them

_KEY, _SEED = "5a" * 32, "5b" * 32
_PRIVATE = {"noise_multiplier": 1.0, "delta": 1e-4, "run_key": _KEY}
_OPEN = {"noise_multiplier": 0, "clipping": "none"}
# The executed classifier is named, not chosen by a probe of this machine's speed.
_FIXED = {"seed": "5a5a", "backend": "frozen", "batch": 50, "max_inputs": 12}
_VOTES = {**_FIXED, "sigma": 0.25, "n": 300, "n0": 20}
_SCORES = {**_FIXED, "n": 300, "n0": 20}
_DENOISER = {
    "name": "conv-autoencoder", "options": {"channels": [4, 8], "width": None},
    "classifier": "classifier",
}  # fmt: skip
_SCATTERING = {"widths": [1.0], "stride": 1, "width": None}
_PUBLIC = {
    "model": {"name": "small-cnn", "options": {"width": 4}},
    "training": {"batch_size": 40, "steps": 10, "learning_rate": 0.5},
}

# ---- what may differ

LEFT_OUT_FILES = {
    "*.log": "what Ray says of its session",
    "*.svg": "pictures of what tables state, which are compared",
    "private/ray/*": "files of Ray's own",
    "private/*/ray/*": "files of Ray's own",
    "private/metrics.jsonl": "seconds of each step beside what the ledger and the weights say",
    "private/*/metrics.jsonl": "the same of a trial",
    "*/timings.csv": "seconds of each input",
    "*/rate.json": "draws per second, which size chunks only",
    "*/journal.jsonl": "chunks in the order in which they were done; the table holds the results",
    "private/progress.json": "how fast the training was",
    "private/*/progress.json": "the same of a trial",
    "private/ledger.anchor": "how far the ledger goes, by its last line's check",
    "private/*/ledger.anchor": "the same of a trial",
    "private/*/processes.json": "nonces of processes",
    "release/SHA256SUMS": "sums of the files beside it, which are compared",
    "release/SHA256SUMS.sig": "the signature of these sums; `verify --signer` checks it",
    "release/README.md": "rendered from the files beside it, which are compared",
    "report/certified_accuracy.svg": "its headline is worded from the rows",
    "report/index.html": "rendered from the files of the run, which are compared",
    "*/.*": "locks and leftovers",
}
LEFT_OUT = {  # the end of a key's place in JSON
    "format": "rose once, with the names",
    "version": "that of the ledger and of a budget too",
    "nonce": "drawn afresh by every process",
    "identity.recipe": "a digest over names of keys, too; the recipe is compared",
    "identity.begun with": "the same",
    "identity.code": "a digest of the package's sources",
    "identity.searched by": "left out of later ledgers",
    "by_renyi_alone": "left out of later tables",
    "ledger.check": "the last line's, which chains it to the nonces and code before it",
    "training time": "as a dry run measures it",
    "classifier.check": "a digest of answers to a batch that is drawn at random",
    "charge": "names what a run takes from a budget, drawn afresh",
    "seconds": "how long it took",
    "timed_from": "of its last start",
    "folder": "where a run lies",
    "doubts": "sentences about the table of certificates, which is compared",
    "measured": "sentences about results, which are compared; now among the rows",
    "metrics": "AUC, calibration and intervals, which BASE has not",
    "rows": "sentences about results, which are compared",
}
# Of some cases only, by the name of what is compared.
_NOISY = {
    "*evaluation*": "of a model with noise of its own, over fresh draws",
    "*/report/*": "shows it",
    "*verdict.sentence": "quotes it",
}
_PROBED = {"*/attacks/*classifier.backend": "chosen by a probe, in the time that it has"}
# What was renamed since `BASE_2`: a piece of a place, or a whole value, before and now.
NAMES = {
    "method.draws": "method.augmentations",
    "score.draws": "score.samples",
    "settings.draws": "settings.samples",
    "neighbours": "adjacency",
    "neighbour": "neighbor",
    "form": "backend",
    "law": "num_trials",
    "isolate": "vmap",
    "saw": "pretraining_data",
    "rates": "class_sampling",
    "hold_out": "private_eval_fraction",
    "licence": "license",
    "also": "linked",
    "centre": "center",
    "target-r": "target-radius-r",
    "group": "user",
    "max_records_per_group": "max_records_per_user",
    "columns.ranges": "columns.preprocessing",
    "superseded_releases": "reexecuted_releases",
    "add-or-remove-one at a fixed number of records (zero-out)":
        "zero-out adjacency (data set size public)",
}  # fmt: skip
_NAME = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, NAMES))})(?!\w)")
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?(?!\d|\.\d| s\b)")
# Of a page: a date, and the version of the code, which its text names.
_NO_RESULT = re.compile(r"\b20\d\d-\d\d-\d\d\b|\bdigest [0-9a-f]{32}\b|\bcommit [0-9a-f]{7,40}")


# ---- cases


@dataclass(frozen=True)
class Step:
    """One command of a case. output: the name under which what it prints is compared: all of it
    where it is JSON, of other text the numbers called epsilon. code: its exit code."""

    words: tuple[str, ...]
    output: str | None = None
    code: int = 0


def step(text: str, output: str | None = None, *, code: int = 0) -> Step:
    return Step(tuple(text.split()), output, code)


@dataclass(frozen=True)
class Case:
    """about: what it compares. recipe: what differs from the base; None removes a field. steps:
    after `dpdist run`, or in place of it (`first`). left_out: what may differ here, and why. ray:
    by the `dpdist` beside this Python, with Ray. special: what it does besides.
    """

    about: str
    recipe: Mapping[str, Any]
    steps: tuple[Step, ...] = ()
    first: tuple[Step, ...] | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    ray: bool = False
    special: str | None = None

    def commands(self, name: str) -> tuple[Step, ...]:
        public = {"initial", "classifier"} & set(self.recipe.get("model", ()))
        before = (step(f"run {name}.yaml --until pretrain"),) if public else ()
        return (*before, *(self.first or (step(f"run {name}.yaml"),)), *self.steps, *_ends(name))


def _ends(name: str) -> tuple[Step, ...]:
    """What is said of every run: the page, and all facts that reports are made of."""
    return step(f"report {name}", "report"), step(f"report {name} --json", "facts")


_FOLDER = "sigma-0.25-fixed-n-300"
_FEW = "--set certify.every=2 --set certify.max_inputs=3"
_QUIET = "--set certify.sigma=0.001 --set certify.n=200"
_ATTACK = "--set attack.max_inputs=6 --set attack.steps=2 --set attack.seed=5a5a"
CASES: dict[str, Case] = {
    "fixed": Case(
        "DP-SGD; Cohen's certificate, its parts and re-bound table, at attacked copies, PREDICT",
        {"certify": _VOTES},
        (
            step("certify fixed --json", "certified"),
            step(f"certify runs/fixed/certificates/{_FOLDER} --set certify.alpha=0.01 --json",
                 "rebound"),
            step(f"certify fixed --set certify.start=1 {_FEW}"),
            step(f"certify fixed --set certify.start=2 {_FEW}"),
            step("certify fixed --set attacked.attack=pgd --set attacked.size=0.05 "
                 "--set certify.max_inputs=4 --json", "attacked"),
            # With so little noise all draws agree: the radius then follows from n alone.
            step(f"predict fixed image.npy {_QUIET} --json", "predicted"),
            step(f"predict fixed image.npy {_QUIET} --json --label-only", "label"),
        ),
    ),
    "attacks": Case(
        "attacks in both norms, of the network and the smoothed one; certificates under attack",
        {"certify": _VOTES},
        (
            step(f"attack attacks --set attack.sizes=[0.05,0.1] {_ATTACK}"),
            step("attack attacks --set attack.norm=l2 --set attack.sigma=0.25 "
                 f"--set attack.sizes=[0.25] --set attack.n=100 {_ATTACK}"),
            step(f"attack attacks --check-certificates {_ATTACK}"),
        ),
        left_out=_PROBED,
    ),
    "released": Case(
        "a signed release with certificates, what verify says, a certification of the release",
        {"certify": _VOTES},
        (
            step("audit released --set audit.releases=500", "audit"),
            step("release released --license MIT --not-private --sign key.pem --json", "card"),
            step("verify runs/released/release --signer public.pem --redraw 3", "verified"),
            step("certify runs/released/release --set certify.max_inputs=3 --json", "certified"),
            step(f"predict runs/released/release image.npy {_QUIET} --json", "said"),
        ),
    ),
    "two-class": Case(
        "a batch cap, clips by layer; two classes bounded",
        {
            "privacy": {"batch_cap": 100, "clipping": "per-layer"},
            "certify": {**_VOTES, "mode": "two-class"},
        },
    ),
    "target": Case(
        "two workers; radii decided by a sequential test",
        {
            "resources": {"workers": 2},
            "certify": {**_VOTES, "mode": "target-radius", "radii": [0.1, 0.2]},
        },
        ray=True,
    ),
    "anytime": Case(
        "automatic clipping, calibrated noise, Adam, averaged weights; a confidence sequence",
        {
            "privacy": {"clipping": "automatic", "epsilon": 3.0, "noise_multiplier": None},
            "training": {"optimizer": "adam", "momentum": 0.0, "learning_rate": 0.01, "ema": 0.9},
            "certify": {**_VOTES, "mode": "anytime", "radii": [0.1]},
        },
    ),
    "uniform": Case(
        "DPlis by sums for each example; uniform noise, L1",
        {
            "method": {"name": "dplis", "augmentations": 2, "aggregate": "sum",
            "per_example": True},
            "certify": {**_VOTES, "noise": "uniform"},
        },
    ),
    "laplace": Case(
        "noise on the input with a consistency loss; Laplace noise, L1",
        {
            "method": {"name": "input-noise", "sigma": 0.25, "augmentations": 2,
            "consistency": 1.0},
            "certify": {**_VOTES, "noise": "laplace"},
        },
    ),
    "scores-hoeffding": Case(
        "PixelDP; expected scores by Hoeffding, L-infinity",
        {
            "method": {"name": "pixeldp", "epsilon_r": 1.0},
            "privacy": _OPEN,
            "certify": {**_SCORES, "norm": "linf"},
        },
        (step(f"attack scores-hoeffding --set attack.sizes=[0.05] --set attack.n=100 {_ATTACK}"),),
        left_out=_NOISY | _PROBED,
    ),
    "scores-counts": Case(
        "HGM-PixelDP with redistributed noise; expected scores by counts",
        {
            "method": {"name": "hgm-pixeldp", "redistribution": {"steps": 5, "max_records": 50}},
            "data": {"public": 0.3}, "privacy": _OPEN,
            "certify": {**_SCORES, "bound": "counts"},
        },
        left_out=_NOISY,
    ),
    "scores-bernstein": Case(
        "Secure-SGD with paid redistribution; expected scores by Bernstein",
        {
            "method": {"name": "secure-sgd", "redistribution": {"source": "paid"}},
            "certify": {**_SCORES, "bound": "bernstein"},
        },
        left_out=_NOISY,
    ),
    "scores-betting": Case(
        "PixelDP; expected scores by betting, one-sided",
        {
            "method": {"name": "pixeldp", "epsilon_r": 1.0},
            "privacy": _OPEN,
            "certify": {**_SCORES, "bound": "betting", "one_sided": True},
        },
        left_out=_NOISY,
    ),
    "scores-target": Case(
        "PixelDP; radii decided by scores",
        {
            "method": {"name": "pixeldp", "epsilon_r": 1.0},
            "privacy": _OPEN,
            "certify": {**_SCORES, "mode": "target-scores", "radii": [0.01, 0.05]},
        },
        left_out=_NOISY,
    ),
    "both-noises": Case(
        "Secure-SGD as published, redistributed from private sums; both its noises certify",
        {
            "method": {
                "name": "secure-sgd", "paper_faithful": True, "mechanism": "analytic",
                "redistribution": {"source": "private", "steps": 5, "max_records": 50},
            },
            "certify": _VOTES,
        },
        left_out=_NOISY,
    ),
    "reproducible": Case(
        "canonical shards by two workers",
        {"training": {"reproducible": True}, "resources": {"workers": 2}},
    ),
    "elastic": Case(
        "as many workers as there is room for, from one to two, with canonical shards",
        {
            "training": {"reproducible": True},
            "resources": {"workers": {"min": 1, "max": 2}},
        },
        ray=True,
    ),
    "initial": Case(
        "initial weights trained on public records",
        {"data": {"public": 0.3}, "model": {"initial": "initial"}, "public": {"model": None}},
    ),
    "denoiser": Case(
        "TransDenoiser before a frozen classifier",
        {
            "data": {"public": 0.3}, "method": {"name": "transdenoiser", "augmentations": 2},
            "model": _DENOISER, "public": {}, "certify": _VOTES,
        },
    ),
    "denoiser-full": Case(
        "TransDenoiser, its full variant",
        {
            "data": {"public": 0.3}, "method": {"name": "transdenoiser", "variant": "full"},
            "model": _DENOISER, "privacy": {"noise_multiplier": 0}, "public": {},
            "training": {"steps": 4},
        },
    ),
    "stobatch": Case(
        "StoBatch: adversarial training inside each record's clip",
        {
            "method": {
                "name": "stobatch", "steps": 2, "size": [0.0, 0.1], "sigma": 0.25, "split": 0.36,
                "sensitivity": 2.0,
            },
            "training": {"steps": 4},
        },
        left_out=_NOISY,
    ),
    "functional": Case(
        "a linear head from noisy sums",
        {
            "model": {"name": "scattering", "options": _SCATTERING},
            "method": "functional",
            "training": {"batch_size": 1, "steps": 1, "learning_rate": 1.0, "momentum": 0.0},
        },
        left_out={"*state.safetensors: metadata.blake2b": "a digest over names of tensors, too"},
    ),
    "noisy-records": Case(
        "records noised once before training",
        {
            "model": "linear",
            "data": {"max_train": None},
            "method": {"name": "noisy-records", "input_norm": 4, "label_epsilon": 3},
            "privacy": {"epsilon": 20, "noise_multiplier": None, "adjacency": "replace-one"},
        },
    ),
    "pate": Case(
        "PATE: teachers, votes, a student",
        {
            "data": {"public": 0.2, "max_train": None}, "model": "linear",
            "method": {
                "name": "pate", "teachers": 8, "public": {"data": "digits"}, "queries": 20,
                "answers": 20,
                "teaching": {"training": {"batch_size": 10, "steps": 5, "learning_rate": 0.5}},
            },
            "privacy": {"clipping": "none", "nominal_records": 1100},
        },
        left_out={"*ledger.jsonl: *.id": "a digest of the recipe, whose keys were renamed"},
    ),
    "prediction": Case(
        "private prediction: teachers, and answers that are counted",
        {
            "data": {"max_train": None},
            "model": "linear",
            "method": {
                "name": "private-prediction", "teachers": 8, "logit_bound": 3, "queries": 12,
                "evaluate": 6,
            },
            "privacy": {"nominal_records": 1400},
        },
        (step("predict prediction image.npy --json", "answered"),),
    ),
    "search": Case(
        "a private search of a secret number of trials, its winner certified",
        {
            "certify": {**_VOTES, "n": 100},
            "tune": {
                "space": {
                    "training.learning_rate": {"log_uniform": [0.1, 1.0]},
                    "training.batch_size": {"choice": [30, 40]},
                },
                "num_trials": {"name": "poisson", "mean": 2},
                "score": {"private_eval_fraction": 0.2}, "concurrent": 1,
            },
        },
        (step("tune search.yaml"),),
        left_out={"*begun-with.json: trained.*": "the trial's recipe, which lies in its folder"},
        ray=True,
    ),
    "poison": Case(
        "certificates against poisoned records: by keys, by partitions",
        {"model": "linear", "training": {"steps": 3}},
        (
            step("audit poison.yaml --kind poison --set poison.models=8 --set poison.select=2 "
                 f"--set poison.alpha=0.1 --set poison.seed={_SEED} --set poison.max_inputs=12 "
                 "--set poison.sigma=0.1 --set poison.radii=[0.05]"),
            step("audit poison.yaml --kind poison --set poison.models=6 "
                 "--set poison.partitions=true "
                 f"--set poison.seed={_SEED} --set poison.max_inputs=12"),
        ),
        left_out=dict.fromkeys(
            ("keys.csv*", "partitions.csv*", "*inputs.csv*"), "moved beside the votes, same rows"
        ),
    ),
    "audit": Case(
        "audits: canaries in one training, many trainings",
        {
            "model": "linear", "training": {"steps": 4},
            "audit": {"kind": "canaries", "canaries": 40, "guesses": 10},
        },
        (
            step("audit audit", "canaries"),
            step("audit many.yaml --kind many-runs --set audit.trainings=12 "
                 f"--set audit.seed={_SEED}", "many"),
        ),
    ),
    "accounting": Case(
        "privacy arithmetic, without any run",
        {
            "tune": {
                "space": {"training.learning_rate": {"log_uniform": [0.1, 1.0]}},
                "num_trials": {"name": "logarithmic", "mean": 3},
            },
        },
        first=tuple(
            step(f"{words} --json", f"{number:02d}")
            for number, words in enumerate((
                "account --records 60000 --batch-size 256 --noise-multiplier 1.1 "
                "--steps 3516 --delta 1e-5",
                "account --epsilon 1 --records 60000 --batch-size 256 --steps 3516 "
                "--delta 1e-5",
                "tune accounting.yaml --plan --records 400 --trials 2,5",
                "run accounting.yaml --dry-run",
                "account --hits 990 --samples 1000 --sigma 0.5",
            ))
        ),
        special="no run",
        left_out={"*radius_linf": "no longer printed"},
    ),
    "no-key": Case(
        "no fixed key, on a budget, released: epsilon, attempts and ledger entries, not bits",
        {
            "privacy": {"run_key": None, "budget": "budget", "epsilon": 4.0,
                        "noise_multiplier": None},
            "certify": {**_VOTES, "seed": None},
        },
        (
            step("release no-key --license MIT --json", "card"),
            step("verify runs/no-key/release"),
            step("budget --folder budget --json", "budget"),
        ),
        special="no key",
    ),
}  # fmt: skip


def recipe(name: str) -> dict[str, Any]:
    """The recipe of a case, as plain data."""
    raw: dict[str, Any] = {
        "name": name,
        "data": {"name": "digits", "max_train": 400},
        "model": {"name": "small-cnn", "options": {"width": 4}},
        "privacy": dict(_PRIVATE),
        "training": {"batch_size": 80, "steps": 16, "learning_rate": 0.5, "momentum": 0.5},
        "resources": {"micro_batch": 16, "certify_actors": 1},
    }
    change = dict(CASES[name].recipe)
    if "public" in change:
        change["public"] = {**_PUBLIC, **change["public"]}
    return _merged(raw, change)


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


# ---- running


class Failed(Exception):
    """A command did not end as it should."""


def _environment() -> dict[str, str]:
    """One thread, and nothing that a user has set for Ray or for dpdist."""
    outer = ("RAY_", "DPDIST_")
    own = {key: value for key, value in os.environ.items() if not key.startswith(outer)}
    threads = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")}
    return own | threads | {"COLUMNS": "200", "NO_COLOR": "1"}


def dpdist(folder: Path, each: Step, ray: bool = False) -> str:
    """Run a command in `folder`; return what it printed."""
    if ray or not _without_ray():
        done = subprocess.run(_command(each.words), cwd=folder, capture_output=True, text=True)
        code, out, err = done.returncode, done.stdout, done.stderr
    else:
        code, out, err = _here(folder, each.words)
    if code != each.code:
        said = f"{out[-2000:]}\n{err[-2000:]}".strip()
        raise Failed(f"dpdist {' '.join(each.words)}: exit code {code}\n{said}")
    return out


def _command(words: Sequence[str]) -> list[str]:
    return [str(Path(sys.executable).with_name("dpdist")), *words]


# Module of tests/support and function: of this version, and of those before names were changed.
_LOCAL_EXECUTION = (("local_execution", "run_without_ray"), ("here", "without_ray"))


@cache
def _without_ray() -> bool:
    """See to it that commands in this process start no Ray. Whether the checkout knows how to."""
    package = importlib.util.find_spec("dpdist")
    assert package is not None and package.origin is not None
    sys.path.insert(0, str(Path(package.origin).parent.parent / "tests"))
    try:
        for name, function in _LOCAL_EXECUTION:
            if importlib.util.find_spec(f"support.{name}") is not None:
                module = importlib.import_module(f"support.{name}")
                getattr(module, function)(pytest.MonkeyPatch())
                return True
    except (ImportError, AttributeError):
        pass
    return False


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

    key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(_KEY))
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (folder / "key.pem").write_bytes(pem)
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (folder / "public.pem").write_bytes(public)


def run_case(folder: Path, name: str, old: Path | None = None) -> None:
    """Everything of a case, in a new folder. old: the recorded one, which pins what is executed."""
    prepare(folder, name)
    said = folder / "said"
    said.mkdir()
    case = CASES[name]
    steps = case.commands(name)
    if case.special == "no run":
        steps = steps[: -len(_ends(name))]
    for each in steps:
        text = dpdist(folder, each, case.ray)
        if old is not None:
            _pin(old, folder)
        if each.output is not None:
            (said / f"{each.output}.txt").write_text(text)


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
            recorded = settings.read_text()
            text = _NAME.sub(_now, recorded.replace('"format": 1', '"format": 2'))
            text = text.replace('"mode": "target"', '"mode": "target-radius"')
            (place / settings.name).write_text(text)
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
        ".html": _page,
    }
    if path.suffix in readers:
        return readers[path.suffix](path)
    data = path.read_bytes()
    try:
        return {"text": _NO_RESULT.sub(" ", data.decode())}
    except UnicodeDecodeError:
        return {"bytes": base64.b85encode(data).decode()}


def _renamed(value: Any, key: str = "") -> Any:
    """A recorded place or value by today's names; a long text, such as a tensor, as it is."""
    if not isinstance(value, str) or len(value) > 300:
        return value
    if value in ("target", "'target'") and re.search(r"mode(, row \d+)?$", key):
        return value.replace("target", "target-radius")
    return _NAME.sub(_now, value)


def _now(found: re.Match[str]) -> str:
    return NAMES[found[0]]


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


def _page(path: Path) -> Facts:
    """The numbers that a reader of the page sees, in their order, and how many of them."""
    text = path.read_text()
    text = re.sub(r"(?s)<(script|style)\b.*?</\1>", " ", text)
    shown = _NO_RESULT.sub(" ", unescape(re.sub(r"(?s)<[^>]*>", " ", text)))
    return _flat(_NUMBER.findall(shown), "number")


def printed(text: str) -> Facts:
    """JSON as it stands; of other text the values of epsilon."""
    try:
        lines = [json.loads(text)]
    except ValueError:
        try:
            lines = [json.loads(line) for line in text.splitlines()]
        except ValueError:
            return _flat(re.findall(r"epsilon\W+([0-9.]+(?:e[+-]?\d+)?|inf\w*)", text), "epsilon")
    return _flat(lines[0] if len(lines) == 1 else lines)


def _compared(found: Facts, left_out: Mapping[str, str]) -> Facts:
    return {k: v for k, v in found.items() if not any(fnmatch(k, each) for each in left_out)}


def _without_key(found: Facts) -> Facts:
    """What does not depend on a key drawn afresh: plan, card, how many entries of which kind."""
    kept: Facts = {}
    kinds: Counter[str] = Counter()
    fixed = ("plan.json", "privacy_card.json", "recipe.yaml", "data.json", "run.json")
    for key, value in found.items():
        place, _, leaf = key.partition(": ")
        if place.endswith("ledger.jsonl") and leaf.endswith((".kind", ".step", ".epoch")):
            kinds[f"{place}: {leaf.split('.')[-1]} {value}"] += 1
        elif leaf.endswith((".model hash", ".budget", ".run")):
            continue  # follow from the key
        elif place.endswith(fixed) or place in ("card, printed", "budget, printed"):
            kept[key] = value
        elif place == "facts, printed":
            kept |= {key: value} if ".privacy_card." in leaf else {}
    return kept | kinds


def differences(before: Facts, after: Facts) -> list[str]:
    """A line for each thing that is not the same; several in one place share one."""
    lines: dict[str, list[str]] = {}
    for key in sorted(before | after):
        old, new = before.get(key, "nothing"), after.get(key, "nothing")
        if old != new or type(old) is not type(new):
            short = f"{key.partition(': ')[2]}: {_short(old)} is now {_short(new)}"
            lines.setdefault(key.partition(": ")[0], []).append(short)
    return [
        f"{place}: {'; '.join(each[:3])}{f'; and {len(each) - 3} more' if len(each) > 3 else ''}"
        for place, each in lines.items()
    ]


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
    before = {_renamed(key): _renamed(value, key) for key, value in before.items()}
    if CASES[name].special == "no key":
        before, after = _without_key(before), _without_key(after)
    return differences(*(_compared(facts, CASES[name].left_out) for facts in (before, after)))


def _beside(base: Path) -> Path:
    """Where the new version's results go: one folder for each checkout."""
    return base.with_name(f"{base.name}-again-{Path.cwd().name}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("command", choices=("make", "check", "list"))
    parser.add_argument("base", nargs="?", type=Path, help="the recorded results")
    parser.add_argument("cases", nargs="*", metavar="CASE", help="default: all")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    given = parser.parse_args()
    if given.command == "list":
        for name, case in CASES.items():
            print(f"{name:<18} {case.about}")
        return 0
    names = given.cases or list(CASES)
    if given.base is None or (unknown := set(names) - set(CASES)):
        parser.error("give BASE" if given.base is None else f"no such case: {sorted(unknown)}")
    base = given.base.resolve()
    where = base / "machine.json"
    if given.command == "make":
        base.mkdir(parents=True, exist_ok=True)
        where.write_text(json.dumps(machine()))
    elif json.loads(where.read_text()) != machine():
        parser.error(f"recorded with {where.read_text()}, this is {json.dumps(machine())}")
    os.environ["DPDIST_CACHE"] = str(base / "cache")
    if any(not CASES[name].ray for name in names):
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
