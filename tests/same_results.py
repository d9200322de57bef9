"""Do two versions of dpdist give the same parameters, ledgers and tables, bit for bit?

    python tests/same_results.py make FOLDER     with the old version: a dozen small runs
    python tests/same_results.py check FOLDER    with the new one: the same again, compared

One machine for both and one number of threads (OMP_NUM_THREADS): otherwise sums are added up in
another order. Each run has a fixed key, and its tables are made again from the settings that the
old version pinned, seed included. A check also lets the new version report on the old run folders
as they are. Uses the `dpdist` beside this Python, so that it survives any change of module names.

What has changed since the first versions: noise on the input and behind the first layer certify
together (`secure-faithful`), so `certify` refuses to continue an older table of such a run.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

_PRIVATE = {"noise_multiplier": 1.0, "delta": 1e-4, "run_key": "5a" * 32}
_OPEN = {"noise_multiplier": 0, "clipping": "none"}
_SMOOTHED = {"sigma": 0.25, "n": 300, "n0": 20, "max_inputs": 10}
_SCORES = {"n": 300, "n0": 20, "max_inputs": 10}
_DENOISER = {
    "name": "conv-autoencoder", "options": {"channels": [4, 8], "width": None},
    "classifier": "classifier",
}  # fmt: skip
_PUBLIC = {
    "model": {"name": "small-cnn", "options": {"width": 4}},
    "training": {"batch_size": 40, "steps": 10, "learning_rate": 0.5},
}

# name -> what differs from the base; None removes a field.
CASES: dict[str, dict[str, Any]] = {
    "dp-sgd": {"certify": _SMOOTHED},
    "capped": {
        "privacy": {"batch_cap": 50, "clipping": "per-layer"},
        "certify": {**_SMOOTHED, "mode": "target", "radii": [0.1, 0.2]},
    },
    "automatic": {
        "privacy": {"clipping": "automatic", "epsilon": 3.0, "noise_multiplier": None},
        "training": {"optimizer": "adam", "momentum": 0.0, "learning_rate": 0.01, "ema": 0.9},
        "certify": {**_SMOOTHED, "mode": "anytime"},
    },
    "dplis": {"method": {"name": "dplis", "draws": 3}, "certify": _SMOOTHED},
    "dplis-sum": {"method": {"name": "dplis", "draws": 2, "aggregate": "sum", "per_example": True}},
    "input-noise": {
        "method": {"name": "input-noise", "sigma": 0.25, "draws": 2, "consistency": 1.0},
        "certify": {**_SMOOTHED, "noise": "laplace"},
    },
    "pixeldp": {
        "method": {"name": "pixeldp", "epsilon_r": 1.0},
        "privacy": _OPEN,
        "certify": {**_SCORES, "norm": "linf"},
    },
    "hgm": {
        "method": {"name": "hgm-pixeldp", "redistribution": {"steps": 5, "max_records": 50}},
        "data": {"public": 0.3},
        "privacy": _OPEN,
        "certify": {**_SCORES, "bound": "counts"},
    },
    "secure-paid": {
        "method": {"name": "secure-sgd", "redistribution": {"source": "paid"}},
        "certify": {**_SCORES, "bound": "bernstein"},
    },
    "secure-faithful": {
        "method": {
            "name": "secure-sgd", "paper_faithful": True, "mechanism": "analytic",
            "redistribution": {"source": "private", "steps": 5, "max_records": 50},
        },
        "certify": _SMOOTHED,
    },
    "two-workers": {
        "training": {"reproducible": True}, "resources": {"workers": 2},
    },
    "initial": {
        "data": {"public": 0.3}, "model": {"initial": "initial"}, "public": {"model": None},
    },
    "denoiser": {
        "data": {"public": 0.3}, "method": {"name": "transdenoiser", "draws": 2},
        "model": _DENOISER,
        "public": {}, "certify": _SMOOTHED,
    },
    "denoiser-full": {
        "data": {"public": 0.3}, "method": {"name": "transdenoiser", "variant": "full"},
        "model": _DENOISER,
        "privacy": {"noise_multiplier": 0}, "public": {}, "training": {"steps": 4},
    },
}  # fmt: skip
ATTACKED = ("dp-sgd", "hgm", "secure-faithful")
_ATTACK = ("--max-inputs", "6", "--sizes", "0.05", "--steps", "2", "--seed", "5a5a")
_DRAWS = ("--n", "100")  # of a model with noise


def recipe(name: str) -> dict[str, Any]:
    """The recipe of a case, as plain data."""
    raw: dict[str, Any] = {
        "name": name,
        "data": {"name": "digits", "max_train": 400},
        "model": {"name": "small-cnn", "options": {"width": 4}},
        "privacy": dict(_PRIVATE),
        "training": {"batch_size": 40, "steps": 8, "learning_rate": 0.5, "momentum": 0.5},
        "resources": {"micro_batch": 16, "certify_actors": 1},
    }
    change = CASES[name]
    if "public" in change:
        change = {**change, "public": {**_PUBLIC, **change["public"]}}
    return _merged(raw, change)


def _merged(raw: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    for key, value in change.items():
        if value is None:
            raw.pop(key, None)
        elif isinstance(value, dict):
            raw[key] = _merged(dict(raw.get(key, {})), value)
        else:
            raw[key] = value
    return raw


def dpdist(folder: Path, *words: str) -> None:
    """Run the command in `folder`; ends the program when it fails."""
    command = [str(Path(sys.executable).with_name("dpdist")), *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"dpdist {' '.join(words)} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


def train(folder: Path, name: str) -> None:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(recipe(name)))
    public = {"initial", "classifier"} & set(CASES[name].get("model", ()))
    if any(not (folder / part).exists() for part in public):
        dpdist(folder, "pretrain", path.name)
    dpdist(folder, "train", path.name)


def evaluate(folder: Path, name: str) -> None:
    """Everything that reads the model: certificates, attacks, report."""
    if "certify" in CASES[name]:
        dpdist(folder, "certify", name)
    if name in ATTACKED:
        dpdist(folder, "attack", name, *_ATTACK, *(() if name == "dp-sgd" else _DRAWS))
    dpdist(folder, "report", name)


def results(run: Path) -> dict[str, Any]:
    """What must not change, by name: bytes of models and tables, releases of the ledger, plan."""
    found: dict[str, Any] = {
        "model": (run / "private/model/model.safetensors").read_bytes(),
        "plan": json.loads((run / "private/plan.json").read_text()),
    }
    entries = [json.loads(line) for line in (run / "private/ledger.jsonl").read_text().splitlines()]
    records = [entry.get("record", entry) for entry in entries]
    found["releases"] = [r["id"] for r in records if r["kind"] == "release"]
    for table in sorted([*run.glob("certificates/*/*.parquet"), *run.glob("attacks/*/*.parquet")]):
        found[str(table.relative_to(run))] = table.read_bytes()
    return found


def make(folder: Path, names: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        train(folder, name)
        evaluate(folder, name)
        print(f"{name}: made", flush=True)


def check(old: Path, names: list[str]) -> int:
    new = old.with_name(f"{old.name}-again-{Path.cwd().name}")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    wrong = 0
    for name in names:
        train(new, name)
        for settings in (old / "runs" / name).glob("certificates/*/settings.json"):
            place = new / "runs" / name / "certificates" / settings.parent.name
            place.mkdir(parents=True)
            shutil.copy(settings, place)  # the seed, and the classifier as it was executed
            shutil.copy(settings.with_name("rate.json"), place)
        evaluate(new, name)
        before, after = results(old / "runs" / name), results(new / "runs" / name)
        differ = [key for key in sorted(before | after) if before.get(key) != after.get(key)]
        wrong += bool(differ)
        print(f"{name}: {'DIFFERS in ' + ', '.join(differ) if differ else 'the same'}", flush=True)
        kept = new / "kept" / "runs" / name
        shutil.copytree(old / "runs" / name, kept)
        dpdist(new / "kept", "report", name)
        if results(kept) != before:
            wrong += 1
            print(f"{name}: a report changed the old run", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] not in ("make", "check"):
        sys.exit(__doc__)
    where, chosen = Path(sys.argv[2]).resolve(), sys.argv[3:] or list(CASES)
    sys.exit(make(where, chosen) if sys.argv[1] == "make" else check(where, chosen))
