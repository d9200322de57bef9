"""Input that nobody should send, generated: no traceback, no hang, nothing half-written.

The same cases for the same DPDIST_FUZZ_SEED. All faults of a family are shown, not the first. In
one process, up to where Ray would start; a few go through the console script as well. What is
invalid by construction, and must be refused, is in test_fuzz_invalid.py.
"""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))
import draws as st
from harness import cases
from hostile import BASE, TEXTS, VALUES, damage, options, put, restored, values

from dpdist import pipeline
from dpdist.runs.archive import Archive
from dpdist.runs.recipe import Recipe

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

FIELDS = sorted(set(options(Recipe.model_json_schema())))
TUNED = {
    "space": {"training.learning_rate": {"uniform": [0.1, 1.0]}},
    "law": {"name": "logarithmic", "mean": 3},
}


def test_recipes(fuzz, tmp_path):
    """Every field of the schema with values of every kind, one to three at once."""

    @cases(500, st.data())
    def one(data):
        draw, raw = data.draw, copy.deepcopy(BASE)
        place = tmp_path / str(fuzz.cases)
        changes = []
        for _ in range(draw(st.integers(1, 3))):
            path = draw(st.sampled_from(FIELDS))
            if path[0] == "tune":
                raw.setdefault("tune", copy.deepcopy(TUNED))
            changes.append((".".join(path), copy.deepcopy(draw(values))))
            put(raw, path, changes[-1][1])
        text = yaml.dump(raw, Dumper=_Dumper)
        place.mkdir(exist_ok=True)
        (place / "x.yaml").write_text(text, errors="surrogatepass")
        command = draw(
            st.sampled_from(
                [["run", "--until", "train"], ["run"], ["run", "--dry-run"], ["data", "check"],
                 ["recipes"], ["tune", "--plan", "--records", "200"], ["tune"],
                 ["run", "--until", "pretrain"], ["cluster", "check", "x.yaml", "--recipe"]]
            )
        )  # fmt: skip
        fuzz.call(changes, place, *command, "x.yaml")
        shutil.rmtree(place)

    one()
    fuzz.verdict(500)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def test_yaml_texts(fuzz, tmp_path):
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
        fuzz.call(text[-200:], tmp_path, *command, "x.yaml")

    one()
    fuzz.verdict(120)


OPTIONS = {
    ("account",): {"records": 100, "batch-size": 10, "noise-multiplier": 1, "steps": 5,
                   "delta": 1e-4, "batch-cap": 50, "trials": 3},
    ("account", "--delta", "1e-4"): {"epsilon": 1, "records": 100, "batch-size": 10, "steps": 5},
    ("account", "--json"): {"hits": 90, "draws": 100, "sigma": 0.5, "alpha": 0.01, "dimension": 10},
    ("budget",): {"folder": ".", "delta": 1e-5},
    ("certify", "x"): {"sigma": 1, "n": 10, "radii": "0.1", "set": "certify.max_inputs=1",
                       "workers": 1, "output": "o", "runs": "runs"},
    ("attack", "x"): {"set": "sizes=[0.1]", "workers": 1},
    ("audit", "x", "--kind", "membership"): {"set": "models=1"},
    ("audit", "x", "--kind", "poison"): {"set": "select=66"},
    ("predict", "x", "i.npy"): {"set": "certify.n=50", "runs": "runs"},
    ("report", "x", "x"): {"l2": "0.1", "linf": "0.1", "picture": "p.png", "runs": "runs"},
    ("import", "n"): {"run": "x", "classifier": "runs/x/private/model", "saw": "s"},
    ("tune", "digits", "--plan"): {"trials": "3", "records": 100, "plot": "p.png"},
    ("run", "digits", "--dry-run"): {"name": "n", "workers": 1},
    ("data", "list"): {"data-root": "."},
    ("cluster", "fetch", "file:///nowhere"): {"into": "i"},
    ("cluster", "fetch", "--restore", "file:///nowhere"): {"name": "n", "into": "r"},
}  # fmt: skip
ARGUMENTS = [v for v in (*TEXTS, *map(str, VALUES[:27])) if "\0" not in v]  # argv holds no NUL


def test_options(fuzz, tmp_path, finished):
    """Every option of every command with hostile text, the others as they should be."""
    import numpy as np

    shutil.copytree(finished, tmp_path / "runs")
    np.save(tmp_path / "i.npy", np.zeros((1, 8, 8), np.float32))
    places = [(command, name) for command, given in OPTIONS.items() for name in given]

    @cases(150, st.sampled_from(places), st.sampled_from(ARGUMENTS))
    def one(place, value):
        command, name = place
        given = {**OPTIONS[command], name: value}
        line = [part for key, each in given.items() for part in (f"--{key}", str(each))]
        fuzz.call((name, value), tmp_path, *command, *line)
        for path in tmp_path.iterdir():
            if path.name not in ("runs", "i.npy"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    one()
    fuzz.verdict(150)


READERS = [
    ["report", "x"], ["release", "x", "--not-private"], ["report", "x", "x"],
    ["certify", "runs/x/certificates/sigma-0.5-fixed-n-100", "--set", "certify.alpha=0.01"],
    ["predict", "x", "i.npy", "--set", "certify.n=50"], ["cluster", "export", "x"],
    ["budget"], ["attack", "x", "--smoothed"], ["certify", "x"],
    ["attack", "x", "--check-certificates"],
    ["import", "y", "--run", "x", "--classifier", "runs/x/private/model", "--saw", "s"],
]  # fmt: skip


def test_run_folders(fuzz, tmp_path, finished):
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
        fuzz.call((name, how), place, *command)

    one()
    fuzz.verdict(150)


def test_data_sets(fuzz, tmp_path):
    """Parquet files of another schema, damaged, empty, or with columns twice."""
    recipe = copy.deepcopy(BASE) | {"data": {"name": "d", "root": "root", "classes": 3}}
    kinds: list[Any] = [
        [1.0, 2.0, 3.0, 4.0], [1, 2, 0, 1], [None, 1, 2, 0], ["a", "b", "c", "d"],
        [[1.0], [2.0], [3.0], [4.0]], [[1.0], [2.0, 3.0], [], [1.0]], [b"x", b"y", b"", b"z"],
        [{"bytes": b"x", "path": "p"}] * 4, [float("nan")] * 4, [True, False, True, False],
        [10**18] * 4, [-1, 0, 1, 2], [None] * 4, [[], [], [], []], [1e300] * 4,
        [[["a"]]] * 4, [[None]] * 4,
    ]  # fmt: skip
    column = st.sampled_from(kinds)
    names = st.sampled_from(["x", "y", "label", ""])
    named = st.tuples(st.sampled_from(["image", "label", "x", "y", "", "label"]), column)

    @cases(150, st.lists(named, max_size=4), st.lists(names, max_size=3), st.data())
    def one(columns, features, data):
        place = tmp_path / str(fuzz.cases)
        (place / "root" / "d").mkdir(parents=True, exist_ok=True)
        for split in ("train", "test"):
            path = place / "root" / "d" / f"{split}.parquet"
            arrays = [pa.array(values) for _, values in columns]
            table = pa.Table.from_arrays(arrays, names=[name for name, _ in columns])
            pq.write_table(table.slice(0, data.draw(st.integers(0, 4))), path)
            if data.draw(st.booleans()):
                damage(path, data.draw)
        raw = copy.deepcopy(recipe)
        raw["data"]["columns"] = {"features": features}
        (place / "x.yaml").write_text(yaml.safe_dump(raw))
        fuzz.call((columns, features), place, "data", "check", "x.yaml", "--data-root", "root")
        shutil.rmtree(place)

    one()
    fuzz.verdict(150)


MANIFEST = [
    ("run",), ("files",), ("private",), ("trained",), ("permit",), ("format",), ("checkpoint",),
    ("files", "/abs"), ("files", "../up"), ("files", "recipe.yaml"),
    ("files", "recipe.yaml", "object"), ("files", "recipe.yaml", "size"),
]  # fmt: skip


def test_archives(fuzz, tmp_path, finished):
    """A manifest and objects that somebody else wrote."""
    work = tmp_path / "own"
    shutil.copytree(finished, work / "runs")
    folder = pipeline.RunFolder(work / "runs" / "x")
    url = f"file://{tmp_path}/store"
    archive = Archive.claim(folder, url, True)
    assert archive is not None
    archive.update()
    whole, store = tmp_path / "whole", tmp_path / "store"
    shutil.copytree(store, whole)
    (tmp_path / "here").mkdir()

    @cases(120, st.data())
    def one(data):
        draw = data.draw
        restored(whole, store)
        files = sorted(path for path in store.rglob("*") if path.is_file())
        manifest = next(path for path in files if path.name == "manifest.json")
        if draw(st.booleans()):
            body = json.loads(manifest.read_text())
            path = draw(st.sampled_from(MANIFEST))
            put(body, path, draw(values))
            body.pop("check", None)
            from dpdist.runs.archive import manifest_digest

            try:
                body["check"] = manifest_digest(body)
                manifest.write_text(json.dumps(body))
            except (ValueError, TypeError):
                return
            how = ".".join(path)
        else:
            target = draw(st.sampled_from(files))
            how = f"{target.name}: {damage(target, draw)}"
        command = draw(
            st.sampled_from(
                [["fetch"], ["fetch", "--restore"], ["fetch", "--restore", "--name", "y"]]
            )
        )
        fuzz.call(how, tmp_path / "here", "cluster", *command, url)
        shutil.rmtree(tmp_path / "here")
        (tmp_path / "here").mkdir()

    one()
    fuzz.verdict(100)


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "~nosuchuser/x.yaml"],
        ["account", "--epsilon", "1", "--records", "100", "--batch-size", "10", "--delta",
         "1e-5", "--steps", "1" + "0" * 18],
        ["tune", "digits", "--plan", "--plot", "x.xyz"],
        ["recipes", "deep.yaml"],
        ["recipes", b"\xff.yaml"],
    ],
)  # fmt: skip
def test_the_console_script_says_the_same(tmp_path, arguments):
    (tmp_path / "deep.yaml").write_text("[" * 10_000)
    program = Path(sys.executable).with_name("dpdist")
    done = subprocess.run([program, *arguments], cwd=tmp_path, capture_output=True, timeout=120)
    assert done.returncode == 2 and done.stderr.startswith(b"dpdist: "), done.stderr
    assert b"Traceback" not in done.stderr and len(done.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["deep.yaml"]
