"""Runs that are made once a session, for tests that only read one.

The processes of a session share them: the first that needs a run makes it under a lock, beside the
temporary folders of all. A test gets a copy, and so may change what it likes.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpdist import pipeline
from dpdist.publishing import write_release
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import parse_recipe
from support.datasets import write_split
from support.local_execution import run_without_ray
from support.threads import one_thread
from support.training import KEY

NAME = "x"  # of every run
WORDS = ("the", "cat", "sat", "mat", "dog", "ran")
TOKENS = 8  # of a text, at most
DIGITS: dict[str, Any] = {
    "name": NAME,
    "data": {"name": "digits", "max_train": 400},
    "model": {"name": "linear"},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-4},
    "training": {"batch_size": 40, "steps": 30, "learning_rate": 0.5, "momentum": 0.5},
    "certify": {"sigma": 0.25, "n": 200, "n0": 20, "max_inputs": 20, "alpha": 0.01, "seed": "5a"},
}


def copy_run(kind: str, runs: Path, base: Path) -> RunFolder:
    """Return a copy, as `runs`/x, of the session's run of this kind.

    Args:
        kind: `digits`, DP-SGD with a fixed key, certified and reported; `release`, the same with a
            key of its own, released; `search`, a private search over digits with a secret number of
            trials; `text`, a language model with an adapter that labels texts, released.
        base: the session's folder for temporary folders.
    """
    place = base / "golden" / kind
    place.mkdir(parents=True, exist_ok=True)
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "done").exists():
            shutil.rmtree(place / "runs", ignore_errors=True)
            with one_thread(), pytest.MonkeyPatch.context() as patch:
                run_without_ray(patch)
                _MAKERS[kind](place)
            (place / "done").touch()
    return RunFolder(Path(shutil.copytree(place / "runs" / NAME, runs / NAME)))


def session_folder(factory: pytest.TempPathFactory) -> Path:
    """Return the folder of all temporary folders of a session, which its processes share."""
    own = factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


def _make(place: Path, raw: dict[str, Any]) -> RunFolder:
    return pipeline.run(parse_recipe(raw, "golden"), runs=place / "runs", context="golden")


def _digits(place: Path) -> None:
    _make(place, DIGITS | {"privacy": DIGITS["privacy"] | {"run_key": KEY}})


def _release(place: Path) -> None:
    write_release(_make(place, DIGITS))


def _search(place: Path) -> None:
    tune = {
        "space": {"training.learning_rate": {"log_uniform": [0.1, 1.0]}},
        "num_trials": {"name": "geometric", "mean": 3.0},
        "score": {"noise": 9.0},
    }
    training = {"batch_size": 200, "steps": 4, "learning_rate": 0.5}
    privacy = {"noise_multiplier": 4.0, "delta": 1e-4}
    raw = {"data": {"name": "digits"}, "privacy": privacy, "training": training, "tune": tune}
    pipeline.tune(parse_recipe(DIGITS | raw, "golden"), runs=place / "runs", context="golden")


def _text(place: Path) -> None:
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        texts = [f"{split} {k} " + " ".join(rng.choice(WORDS, 5)) for k in range(40)]
        write_split(place / "data" / "own", split, text=texts, label=np.arange(40) % 2)
    config = {
        "model_type": "bert", "vocab_size": 258, "hidden_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "intermediate_size": 16, "max_position_embeddings": 64,
    }  # fmt: skip
    adapter = {"kind": "lora", "r": 2, "lora_alpha": 4, "target_modules": ["query", "value"]}
    run = _make(
        place,
        {
            "name": NAME,
            "data": {
                "name": "own", "root": str(place / "data"), "classes": 2,
                "names": ["good", "bad"], "text": {"length": TOKENS, "predict": "label"},
            },
            "model": {"name": "transformer", "options": {"config": config, "adapter": adapter}},
            "privacy": {"noise_multiplier": 1.0, "delta": 1e-3},
            "training": {"batch_size": 8, "steps": 3, "learning_rate": 0.5},
        },
    )  # fmt: skip
    write_release(run)


_MAKERS: dict[str, Callable[[Path], None]] = {
    "digits": _digits, "release": _release, "search": _search, "text": _text,
}  # fmt: skip
