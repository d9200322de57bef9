"""Input that nobody should send, generated: no traceback, no hang, nothing half-written.

DPDIST_FUZZ_SEED seeds the cases. In one process, up to where Ray would start. What is invalid by
construction, and must be refused, is in test_fuzz_invalid.py.
"""

from __future__ import annotations

import copy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))
from harness import call, cases
from hostile import BASE, damage, options, put, restored, values
from hypothesis import strategies as st

from dpdist.runs.recipe import Recipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FIELDS = sorted(set(options(Recipe.model_json_schema())))
TUNED = {
    "space": {"training.learning_rate": {"uniform": [0.1, 1.0]}},
    "num_trials": {"name": "logarithmic", "mean": 3},
}


def test_recipes(tmp_path):
    """Every field of the schema with values of every kind, one to three at once."""

    @cases(500, st.data())
    def one(data):
        draw, raw = data.draw, copy.deepcopy(BASE)
        place = tmp_path / "case"
        changes = []
        for _ in range(draw(st.integers(1, 3))):
            path = draw(st.sampled_from(FIELDS))
            if path[0] == "tune":
                raw.setdefault("tune", copy.deepcopy(TUNED))
            changes.append((".".join(path), copy.deepcopy(draw(values))))
            put(raw, path, changes[-1][1])
        text = yaml.dump(raw, Dumper=_Dumper)
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        (place / "x.yaml").write_text(text, errors="surrogatepass")
        command = draw(
            st.sampled_from(
                [["run", "--until", "train"], ["run"], ["run", "--dry-run"], ["data", "check"],
                 ["recipes"], ["tune", "--plan", "--records", "200"], ["tune"],
                 ["run", "--until", "pretrain"], ["cluster", "check", "x.yaml", "--recipe"]]
            )
        )  # fmt: skip
        call(changes, place, *command, "x.yaml")

    one()


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def test_yaml_texts(tmp_path):
    """Text that is YAML no more, or more than YAML should be; of recipes and cluster files."""
    good = yaml.safe_dump(BASE)
    pieces = ["a: &a [*a]\n", "b: &b [x]\nc: [*b, *b]\n", "privacy: {delta: 1}\n", "? [1]\n: 2\n",
              "- 1\n", "\t", "---\n", "...\n", "%YAML 9.9\n", "<<: 1\n", "a: !!set {x}\n",
              "a: |\n x", "'", '"', "{" * 200, "[" * 2000, "\0", "\ufeff", "a: 1e400\n",
              "a: 0o777\n", "=: =\n", "a: 1:1:1\n", "a: .inf\n", "null: 1\n", "x: !x y\n",
              ]  # fmt: skip

    @cases(120, st.lists(st.one_of(st.sampled_from(pieces), st.text(max_size=5)), max_size=3),
           st.integers(0, len(good)), st.booleans(), st.booleans())  # fmt: skip
    def one(parts, at, keep, of_cluster):
        text = good[:at] + "".join(parts) + (good[at:] if keep else "")
        (tmp_path / "x.yaml").write_bytes(text.encode(errors="surrogatepass"))
        command = ["cluster", "check"] if of_cluster else ["recipes"]
        call(text[-200:], tmp_path, *command, "x.yaml")

    one()


READERS = [
    ["report", "x"], ["release", "x", "--not-private"], ["report", "x", "x"],
    ["certify", "runs/x/certificates/sigma-0.5-fixed-n-100", "--set", "certify.alpha=0.01"],
    ["predict", "x", "i.npy", "--set", "certify.n=50"], ["cluster", "export", "x"],
    ["budget"], ["attack", "x", "--set", "attack.sigma=0.5"], ["certify", "x"],
    ["attack", "x", "--check-certificates"],
    ["import", "y", "--run", "x", "--classifier", "runs/x/private/model", "--pretraining-data",
    "s"],
]  # fmt: skip


def test_run_folders(tmp_path, finished):
    """Each file of a finished run damaged in every way, read by every command that reads it."""
    import numpy as np

    np.save(tmp_path / "i.npy", np.zeros((1, 8, 8), np.float32))
    shutil.copy(finished / "x" / "recipe.yaml", tmp_path / "x.yaml")
    whole = tmp_path / "whole"
    shutil.copytree(finished.parent, whole)
    names = sorted(str(path.relative_to(whole)) for path in whole.rglob("*") if path.is_file())

    @cases(150, st.data())
    def one(data):
        name = data.draw(st.sampled_from(names))
        command = data.draw(st.sampled_from(READERS))
        place = tmp_path / "work"
        restored(whole, place)
        for extra in ("i.npy", "x.yaml"):
            shutil.copy(tmp_path / extra, place)
        how = damage(place / name, data.draw)
        call((name, how), place, *command)

    one()
