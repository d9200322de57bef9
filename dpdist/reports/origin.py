"""Where a report comes from: code, machine, data, seeds, and the command that makes it again.

Nothing here is made of private records. Their fingerprint stays private: whoever guesses all of
them could confirm the guess. So does the run key, whose noise would then be known.
"""

from __future__ import annotations

import platform
import shlex
import subprocess
from datetime import date
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

import dpdist
from dpdist.base.reading import read_json
from dpdist.reports.facts import Facts

_LIBRARIES = ("torch", "ray", "dp-accounting", "numpy", "scipy")


def origin(facts: Facts, card: dict[str, Any], written: date | None) -> list[tuple[str, str]]:
    """Name and value of all that is known and may be told. written: None where a date could tell
    how long something secret took."""
    begun = read_json(facts.folder.path / "run.json", {"dpdist": str})["dpdist"]
    rows = [
        ("report written", "not told: when a search ended, or how long a training took, is secret"
         if written is None else f"{written.isoformat()} (UTC)"),
        ("run begun by", f"dpdist {begun}"),
    ]  # fmt: skip
    rows += _training(facts)
    rows.append(("page written by", f"dpdist {dpdist.__version__}{_commit()}, {_software()}"))
    if facts.evaluation is not None:
        about = facts.evaluation
        told = f"{about['data']}, {about['inputs']:,} inputs, fingerprint {about['fingerprint']}"
        rows.append(("test data", told))
    rows.append(
        ("training data", f"{facts.recipe.data.name}; the fingerprint of the records stays private")
    )
    if card["plan"]:
        rows.append(("privacy plan", f"fingerprint {card['plan']}"))
    if "model" in facts.trained:
        rows.append(("model", f"hash {facts.trained['model']}"))
    for table in facts.tables:
        if seed := table.about.get("seed"):
            rows.append((f"seed of: {table.words}", f"{seed} (drawn after the model was fixed)"))
    rows.append(("run key", "secret, and never shown: with it the noise would be known"))
    return rows


def command(facts: Facts) -> str:
    """What makes such a run again, from the recipe on the page."""
    name = facts.folder.name
    return f"dpdist run {shlex.quote(f'{name}.yaml')} --name {shlex.quote(name)}"


def _training(facts: Facts) -> list[tuple[str, str]]:
    attempts = facts.ledger.attempts
    if facts.search is not None or not attempts:
        return []  # on which machine the best trial ran is the search's
    identity = attempts[-1]["identity"]
    machines = identity["machines"].replace("/", " ").replace(",", ", ")
    workers, threads = identity["world_size"], identity["threads"]
    several = "any number of workers" if workers == "any" else f"{workers} worker(s)"
    rows = [("training code", f"digest {identity['code']}"),
            ("hardware", f"{several}, {threads} thread(s) each, on {machines}")]  # fmt: skip
    if not facts.times_hidden:
        rows.append(("training took", f"{facts.trained['seconds']:.0f} s"))
    return rows


def _software() -> str:
    found = [f"Python {platform.python_version()}"]
    for name in _LIBRARIES:
        try:
            found.append(f"{name} {installed(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def _commit() -> str:
    """Of the checkout that this code lies in, if any."""
    root = Path(dpdist.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return ""
    asked = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return f" (commit {done.stdout.strip()})" if done.returncode == 0 else ""
