"""Two commands at once in one folder: each ends as it would alone, or is refused in one line.

The second command runs, whole, inside the first one: once at each kind of moment at which the first
is about to make a file appear under its name, or to wait for the disk. So every order of the two in
which one is not interrupted itself is tried, the same way each time.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.folder_contents import contents
from support.local_execution import Done, command, run_without_ray
from support.recipes import write_recipe
from support.settings import sets

from dpdist.privacy.budget import BUDGET_SUFFIX, read_budgets

RECIPE = {
    "name": "small",
    "data": {"name": "digits", "max_train": 400},
    "model": "linear",
    "privacy": {"noise_multiplier": 2.0, "delta": 1e-4, "run_key": "ab" * 32},
    "training": {"batch_size": 50, "steps": 5, "learning_rate": 0.1},
    "certify": {"sigma": 0.25, "n": 50, "n0": 10, "max_inputs": 4, "seed": "s"},
    "resources": {"workers": 1, "cpus_per_worker": 1, "checkpoint_seconds": 1e-6},
}
# Seconds, or nonces that are drawn afresh, stand in these beside the results.
BESIDE = {"ledger.jsonl", "ledger.anchor", "trained.json", "done.json", "progress.json",
          "metrics.jsonl", "workers.jsonl", "timings.csv", "rate.json", "journal.jsonl",
          "index.html", "settings.json", "processes.json"}  # fmt: skip


def _plain(path: str | Path) -> str:
    """Return a file's name without what is drawn for it or counts steps."""
    name = re.sub(r"^\.(.*)\.\d+-[0-9a-f]{8}$", r"\1", Path(path).name)
    return re.sub(r"(step-|^|dpdist-training-)(\d{4,}|\w{8})$", r"\1", name)


@pytest.fixture
def inside(monkeypatch, capsys, tmp_path) -> Callable[..., tuple[Done, dict[str, Done]]]:
    """Run one command, and another inside it at each kind of moment.

    held: files that others wait for without end while they are locked; while one is, nothing is
    run. since: the second command is first run when this is true. until: and no more when it ended
    so. Returns what the first command left, and what the second left, by moment.
    """
    run_without_ray(monkeypatch)
    real = {"replace": os.replace, "fsync": os.fsync}

    def run(
        cwd: Path,
        first: list[str],
        second: list[str],
        held: Sequence[Path] = (),
        since: Callable[[], bool] | None = None,
        until: str | None = None,
    ) -> tuple[Done, dict[str, Done]]:
        found: dict[str, Done] = {}
        busy = False

        def at(moment: str) -> None:
            nonlocal busy
            if busy or moment in found or any(map(_is_locked, held)) or (since and not since()):
                return
            busy = True
            found[moment] = command(monkeypatch, capsys, cwd, *second)
            busy = until is not None and ends(found[moment]) == until

        def replace(source, target, **more):
            at(f"before {_plain(target)} appears")
            real["replace"](source, target, **more)
            at(f"after {_plain(target)} appears")

        def fsync(descriptor):
            real["fsync"](descriptor)
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if path.is_file() and not path.name.startswith("."):
                at(f"after a wait for {_plain(path)}")

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", replace)
            patch.setattr(os, "fsync", fsync)
            done = command(monkeypatch, capsys, cwd, *first)
        return done, found

    return run


def _is_locked(path: Path) -> bool:
    if not path.exists():
        return False
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def ends(done: Done) -> str:
    """Return "well" or "refused" for how a command ended; it did so in one line."""
    assert "Traceback" not in done.err + done.out
    if done.code == 0:
        return "well"
    said = [
        line
        for line in done.err.splitlines()
        if not re.match("(training|search): |certifying", line)
    ]
    assert done.code == 2 and not done.out and len(said) == 1, done.err
    assert said[0].startswith("dpdist: "), done.err
    return "refused"


def results(run: Path) -> dict[str, bytes | None]:
    """Return the files of a run; None for what seconds and nonces are in."""
    found = contents(run)
    assert not [name for name in found if Path(name).name.startswith(".")]
    return {name: None if Path(name).name in BESIDE else raw for name, raw in found.items()}


TRAIN, RUN, REPORT = (
    ["run", "--until", "train", "r.yaml"],
    ["run", "r.yaml"],
    ["report", "runs/small"],
)
VOTES = sets("poison", "models=3", "select=1", "bag=50", "max_inputs=2", f"seed={'cd' * 32}")
POISON = ["audit", "r.yaml", "--kind", "poison", *VOTES]
CERTIFY = ["certify", "runs/small", "--sigma", "0.5", "--n", "50", "--set", "certify.max_inputs=4"]
RELEASE = ["release", "runs/small", "--not-private"]
BOTH, ALWAYS = {"well", "refused"}, {"well"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "first", "second", "outcomes"),
    [
        pytest.param([], TRAIN, REPORT, BOTH, id="train-report"),
        pytest.param([], TRAIN, POISON, ALWAYS, id="train-poison"),
        pytest.param([RUN], CERTIFY, REPORT, ALWAYS, id="certify-report"),
        pytest.param([RUN], RELEASE, CERTIFY, ALWAYS, id="release-certify"),
    ],
)
def test_each_ends_as_alone_or_is_refused(
    before, first, second, outcomes, inside, tmp_path, monkeypatch, capsys
):
    one, both = tmp_path / "one after the other", tmp_path / "both"
    for place in (one, both):
        write_recipe(place, RECIPE)
        for arguments in before:
            assert command(monkeypatch, capsys, place, *arguments).code == 0
    for arguments in (first, second):
        assert command(monkeypatch, capsys, one, *arguments).code == 0
    done, found = inside(both, first, second)
    assert ends(done) == "well", done.err
    assert len(found) > 3 and {ends(each) for each in found.values()} == outcomes
    assert command(monkeypatch, capsys, both, *second).code == 0
    if "release" in (first[0], second[0]):
        for place in (one, both):  # with the table that the other command made
            assert command(monkeypatch, capsys, place, *RELEASE).code == 0
        verified = command(monkeypatch, capsys, both, "verify", "runs/small/release")
        assert verified.code == 0, verified.err
    assert results(both / "runs/small") == results(one / "runs/small")


SEARCH = {
    "space": {"training.learning_rate": {"log_uniform": [0.1, 1.0]}},
    "num_trials": {"name": "fixed", "runs": 2},
}


BUDGETED = [("run", 0.7), ("tune", 1.0)]  # a run costs 0.60, two 0.81, a search 0.91, both 1.09


@pytest.mark.slow
@pytest.mark.parametrize("earlier", ["first", "second"])
@pytest.mark.parametrize(("second", "ceiling"), BUDGETED)
def test_a_budget_with_room_for_one_lets_one_in(
    second, ceiling, earlier, inside, tmp_path, monkeypatch, capsys
):
    """Two runs, or a run and a search: the one that reserves its cost later is refused."""
    budget = tmp_path / "budget"
    privacy = {"run_key": None, "budget": str(budget), "budget_ceiling": ceiling,
               "budget_composition": "non-adaptive"}  # fmt: skip
    for kind, name in (("run", "a"), (second, "b")):
        more = {"tune": SEARCH} if kind == "tune" else {}
        write_recipe(tmp_path, RECIPE, f"{name}.yaml", name=name, privacy=privacy, **more)
    done, found = inside(
        tmp_path,
        ["run", "a.yaml"],
        [second, "b.yaml"],
        held=[budget / "records.key"],
        since=(lambda: any(budget.glob(f"*{BUDGET_SUFFIX}"))) if earlier == "first" else None,
        until="well",
    )
    assert found and {ends(each) for each in found.values()} == (
        {"refused"} if earlier == "first" else {"well"}
    )
    assert ends(done) == ("well" if earlier == "first" else "refused")
    late, kind = ("b", second) if earlier == "first" else ("a", "run")
    (kept,) = read_budgets(budget)
    (charge,) = kept.charges
    assert (charge.name, charge.status) == ("a" if late == "b" else "b", "settled")
    assert kept.guarantee(1e-4).epsilon <= ceiling
    run = tmp_path / "runs" / late
    left = results(run)
    assert "private/model/model.safetensors" not in left
    ledger = run / "private" / "ledger.jsonl"
    assert not ledger.exists() or '"kind":"release"' not in ledger.read_text()
    again = command(monkeypatch, capsys, tmp_path, kind, f"{late}.yaml")
    assert ends(again) == "refused" and results(run) == left
