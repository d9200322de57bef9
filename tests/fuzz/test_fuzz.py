"""Input that nobody should send, generated: recipes, and journals with damage.

A recipe is used or refused in words: no traceback, nothing left of what was refused. A ledger or a
budget that was changed is refused. DPDIST_FUZZ_SEED seeds the cases.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from support.folder_contents import contents
from support.local_execution import command

from dpdist import pipeline
from dpdist.core.errors import UserError
from dpdist.privacy import budget as budgets
from dpdist.privacy.budget import Charge, DataBudget
from dpdist.privacy.ledger import JournalError, Ledger
from dpdist.privacy.plan import PrivacyPlan
from dpdist.runs.recipe import Recipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SEED = int(os.environ.get("DPDIST_FUZZ_SEED", "0"))


def cases(count: int) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a test that is called with so many generated cases, which `SEED` chooses."""
    chosen = settings(
        max_examples=count, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    return lambda test: seed(SEED)(chosen(given(st.data())(test)))


# --- recipes

BASE: dict[str, Any] = {
    "name": "x",
    "data": {"name": "digits", "max_train": 200},
    "model": {"name": "linear"},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-4},
    "training": {"batch_size": 20, "steps": 3, "learning_rate": 0.5},
    "certify": {"sigma": 0.5, "n": 100, "max_inputs": 2},
}
TUNED = {
    "space": {"training.learning_rate": {"uniform": [0.1, 1.0]}},
    "num_trials": {"name": "logarithmic", "mean": 3},
}
# What no strategy makes by itself: edges, names of places and code, and wide values.
SPECIAL: list[Any] = [
    5e-324, 1 - 1e-16, 1e300, 10**400, "1e5", "nan", "x" * 5000, "a\0b", "~nosuchuser/x", "../..",
    "/dev/zero", "*", "{", "2001-01-01", "builtins:len", "no_such:f", "s3://", "--help", [0] * 2000,
    {str(i): i for i in range(2000)}, {"name": None}, {"name": "x"}, {"choice": []},
]  # fmt: skip
TEXT = st.text(st.characters(), max_size=20)  # surrogates too
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.integers(), st.floats(), TEXT,
    st.sampled_from(SPECIAL),
)  # fmt: skip
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3)
)


def options(schema: Any) -> Iterator[tuple[str, ...]]:
    """Every dotted field below a JSON schema, sections and their leaves."""

    def walk(node: Any, path: tuple[str, ...], room: int) -> Iterator[tuple[str, ...]]:
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].rpartition("/")[2]]
        for choice in (*node.get("anyOf", ()), *node.get("oneOf", ())):
            yield from walk(choice, path, room)
        for name, inner in node.get("properties", {}).items():
            yield (*path, name)
            if room:
                yield from walk(inner, (*path, name), room - 1)

    return walk(schema, (), 4)


FIELDS = sorted(set(options(Recipe.model_json_schema())))
COMMANDS = (
    ["run"], ["run", "--dry-run"], ["run", "--until", "pretrain"], ["data", "check"], ["recipes"],
    ["tune"], ["tune", "--plan", "--records", "200"], ["cluster", "check", "x.yaml", "--recipe"],
)  # fmt: skip


def put(raw: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for part in path[:-1]:
        inner = raw.get(part)
        if isinstance(inner, str):
            inner = {"name": inner}
        raw[part] = inner if isinstance(inner, dict) else {}
        raw = raw[part]
    raw[path[-1]] = value


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def test_recipes(tmp_path, monkeypatch, capsys):
    """Every field of the schema with values of every kind, one to three at once; up to where Ray
    would start."""

    @contextlib.contextmanager
    def no_session(*_: Any, **__: Any) -> Iterator[None]:
        raise UserError("would begin")
        yield

    monkeypatch.setattr(pipeline, "run_session", no_session)
    place = tmp_path / "case"

    @cases(150)
    def one(data):
        draw, raw = data.draw, copy.deepcopy(BASE)
        for _ in range(draw(st.integers(1, 3))):
            path = draw(st.sampled_from(FIELDS))
            if path[0] == "tune":
                raw.setdefault("tune", copy.deepcopy(TUNED))
            put(raw, path, copy.deepcopy(draw(values)))
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        text = yaml.dump(raw, Dumper=_Dumper)
        (place / "x.yaml").write_text(text, errors="surrogatepass")
        before = contents(place)
        done = command(monkeypatch, capsys, place, *draw(st.sampled_from(COMMANDS)), "x.yaml")
        hypothesis.note(done.err[-1500:])
        assert done.code in (0, 2) and "Traceback" not in done.err
        if done.code == 2:
            assert done.err.strip() and len(done.err) <= 4000
            assert "would begin" in done.err or contents(place) == before, "left behind"

    one()


# --- journals


def damage(path: Path, draw: Callable[[Any], Any]) -> None:
    """Damage a journal whose lines are chained, or its anchor, in one of many ways."""
    raw = path.read_bytes()
    lines = raw.splitlines(keepends=True)
    at = draw(st.integers(0, len(lines) - 1))
    kind = draw(
        st.sampled_from(["dropped", "swapped", "twice", "edited", "cut", "flipped", "bytes"])
    )
    if kind == "swapped" and len(lines) > 1:
        other = (at + 1) % len(lines)
        lines[at], lines[other] = lines[other], lines[at]
    elif kind == "twice":
        lines.insert(at, lines[at])
    elif kind == "edited" and path.suffix == ".jsonl":
        record = json.loads(lines[at])
        record["record"] = draw(st.sampled_from([{}, [], None, {"step": 1}, "x", {"kind": 1}]))
        lines[at] = json.dumps(record).encode() + b"\n"
    elif kind == "cut":
        lines[at:] = [lines[at][: draw(st.integers(0, len(lines[at]) - 1))]]
    elif kind == "flipped":
        place = draw(st.integers(0, len(raw) - 1))
        lines = [raw[:place], bytes([draw(st.integers(0, 255))]), raw[place + 1 :]]
    elif kind == "bytes":
        lines = [draw(st.sampled_from([b"", b"{", b"[]", b"null", b"\xff\xfe"]) | st.binary())]
    else:
        del lines[at]
    path.write_bytes(b"".join(lines))


@pytest.mark.parametrize("kind", ["ledger", "budget"])
def test_journals(tmp_path, kind):
    """Ledgers and budgets with lines gone, moved or changed, or files that are none."""
    place, whole = tmp_path / "work", tmp_path / "whole"
    reader: Callable[[Path], Any] = DataBudget.open
    if kind == "ledger":
        whole.mkdir()
        with Ledger.open(whole / "ledger.jsonl", "f" * 64) as ledger:
            ledger.begin_attempt({"code": "1"})
            for step in range(4):
                ledger.record(step, f"{step:064x}")
        reader = lambda path: Ledger.open(path, "f" * 64)  # noqa: E731
    else:
        plan = PrivacyPlan.dp_sgd(
            records=100, batch_size=10, noise_multiplier=2.0, steps=4, delta=1e-4
        )
        charge = Charge.for_plan("x", "x", plan, plan.phases)
        budgets.reserve(whole, np.arange(100.0), charge, None, plan.adjacency, name="toy")
    journal = next(whole.glob("*.jsonl"))
    anchor = next(path for path in whole.iterdir() if path.suffix == ".anchor")

    @cases(120)
    def one(data):
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(whole, place)
        name = data.draw(st.sampled_from([journal.name, journal.name, anchor.name]))
        damage(place / name, data.draw)
        # of the anchor, its line's end may be missing
        ends = bytes.strip if name == anchor.name else bytes
        if ends((place / name).read_bytes()) == ends((whole / name).read_bytes()):
            return
        with pytest.raises((JournalError, UserError)):
            reader(place / journal.name).close()

    one()
