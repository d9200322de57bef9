"""Whoever states a guarantee holds the ledger against what was made of its releases: of a run that
crashed and went on as another attempt, whose ledger is damaged in ways that leave its chain whole.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.power_cut import anchor_of
from support.threads import one_thread
from support.training import make, train, train_and_crash

from dpdist.cli.account import budget_command as show_budget
from dpdist.core.errors import UserError
from dpdist.privacy.budget import read_budgets
from dpdist.privacy.ledger import JournalError, Ledger
from dpdist.publishing import write_release
from dpdist.reports.results import load_results
from dpdist.runs import archive as archives
from dpdist.runs.archive import Archive
from dpdist.runs.folder import RunFolder, read_verified_ledger
from dpdist.runs.recipe import Recipe
from dpdist.training.job import prepare
from dpdist.training.trainer import _budget_charged

STEPS = 6
REFUSED = "lacks records that were written|lacks releases|is empty|missing"


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Recipe, RunFolder]:
    """Two workers, a crash after four steps, one worker to the end: four releases superseded."""
    tmp = tmp_path_factory.mktemp("runs")
    recipe, folder = make(
        tmp, data__max_train=100, training__batch_size=20, training__steps=STEPS,
        privacy__budget=str(tmp / "budgets"), resources__checkpoint_seconds=1e9, model="linear",
    )  # fmt: skip
    charged = _budget_charged(prepare(recipe, folder, "test"))
    with one_thread(), charged, pytest.MonkeyPatch.context() as patch:
        train_and_crash(recipe, folder, patch, 3, workers=2)
        train(recipe, folder, 1)
    return recipe, folder


@pytest.fixture
def run(finished, tmp_path) -> tuple[Recipe, RunFolder]:
    """A copy of the finished run, to be damaged."""
    recipe, folder = finished
    copy = RunFolder(tmp_path / "runs" / "x")
    shutil.copytree(folder.path, copy.path)
    return recipe, copy


def lines(folder: RunFolder) -> list[bytes]:
    return folder.ledger.read_bytes().splitlines(keepends=True)


def put(folder: RunFolder, kept: list[bytes], *, anchored: bool = False) -> None:
    """Another content for the ledger; anchored: with an anchor that fits it."""
    folder.ledger.write_bytes(b"".join(kept))
    if anchored and kept:
        folder.anchor.write_text(anchor_of(b"".join(kept)).file_line)


def archived(folder: RunFolder) -> str:
    """The archive of a copy of the run: a run that has one waits for its permits."""
    base = folder.path.parent.parent
    for name in ("store", "archived"):
        shutil.rmtree(base / name, ignore_errors=True)
    copy = RunFolder(base / "archived" / folder.name)
    shutil.copytree(folder.path, copy.path)
    url = f"file://{base}/store"
    archive = Archive.claim(copy, url, True)
    assert archive is not None
    archive.update()
    return url


def settle(recipe: Recipe, folder: RunFolder) -> None:
    with _budget_charged(prepare(recipe, folder, "test")):
        pass


def restore(recipe: Recipe, folder: RunFolder) -> None:
    archives.restore(archived(folder), folder.path.parent / "restored")


READERS: dict[str, Callable[[Recipe, RunFolder], object]] = {
    "facts": lambda recipe, folder: load_results(folder),
    "release": lambda recipe, folder: write_release(folder, not_private=True),
    "budget": settle,
    "restore": restore,
}


def refused(recipe: Recipe, folder: RunFolder, match: str = REFUSED) -> None:
    for name, reader in READERS.items():
        with pytest.raises((UserError, JournalError), match=match):
            reader(recipe, folder)
            raise AssertionError(f"{name} accepted it")
        assert not folder.release_folder.exists()


def test_an_undamaged_run_is_read_by_all(run):
    recipe, folder = run
    whole = read_verified_ledger(folder)
    assert whole.ledger.release_counts == {step: 2 if step < 4 else 1 for step in range(STEPS)}
    paths = whole.plan.path_events(whole.plan.executed_phases([STEPS + 4]))
    assert load_results(folder).guarantee == whole.plan.guarantee_for_events(paths)
    restore(recipe, folder)
    copy = read_verified_ledger(RunFolder(folder.path.parent / "restored" / recipe.name))
    assert copy.ledger.release_counts == whole.ledger.release_counts
    settle(recipe, folder)
    (charge,) = read_budgets(recipe.privacy.budget)[0].charges
    assert charge.status == "settled" and charge.phases[0].steps == STEPS + 4


@pytest.mark.slow
@pytest.mark.parametrize("anchored", [False, True], ids=["", "with-a-fitting-anchor"])
def test_a_finished_run_whose_ledger_was_cut(run, anchored):
    """At every line boundary, to the header and to nothing; beside it an anchor that agrees."""
    recipe, folder = run
    kept = lines(folder)
    for end in range(len(kept)):
        put(folder, kept[:end], anchored=anchored)
        with pytest.raises(UserError, match=REFUSED):
            read_verified_ledger(folder)
    for end in (0, len(kept) - 1):
        put(folder, kept[:end], anchored=anchored)
        refused(recipe, folder)


def test_a_finished_run_whose_ledger_is_gone(run):
    recipe, folder = run
    folder.ledger.unlink()
    folder.anchor.unlink()
    refused(recipe, folder)


def rewritten(kept: list[bytes], path: Path) -> list[bytes]:
    """The records of these lines in a chain of their own."""
    records = [json.loads(line)["record"] for line in kept]
    path.unlink(missing_ok=True)
    path.with_suffix(".anchor").unlink(missing_ok=True)
    with Ledger.open(path, records[0]["plan"]) as ledger:
        for record in records[1:]:
            ledger._append(record)
    return path.read_bytes().splitlines(keepends=True)


def test_a_ledger_with_another_past(run, tmp_path):
    """Another run's of the same plan; the superseded attempt left out, every step still there once;
    a record dropped in the middle: each in a chain that holds."""
    recipe, folder = run
    kept = lines(folder)
    records = [json.loads(line)["record"] for line in kept]
    second = next(n for n, r in enumerate(records) if r.get("epoch") == 1)
    others = [line.replace(b'"nonce":"', b'"nonce":"0') for line in kept]
    for left in (others, [kept[0], *kept[second:]], [*kept[:3], *kept[4:]]):
        put(folder, rewritten(left, tmp_path / "other.jsonl"), anchored=True)
        refused(recipe, folder)


def test_what_does_not_name_its_ledger_is_damaged(run):
    recipe, folder = run
    for path in (folder.training_summary, *folder.checkpoints.glob("*/done.json")):
        kept = path.read_text()
        record = json.loads(kept)
        del record["ledger"]
        path.write_text(json.dumps(record))
        refused(recipe, folder, "damaged: ledger")
        path.write_text(kept)


def test_a_step_that_the_plan_has_not(run):
    """The first one behind its end."""
    recipe, folder = run
    with Ledger.open(folder.ledger, read_verified_ledger(folder).plan.fingerprint()) as ledger:
        ledger.record(STEPS, "ab" * 32)
    refused(recipe, folder, "steps")


def test_another_plan_beside_the_ledger(run):
    recipe, folder = run
    plan = json.loads(folder.plan.read_text())
    plan["phases"][0]["noise_multiplier"] = 50.0
    folder.plan.write_text(json.dumps(plan))
    refused(recipe, folder, r"plan\.json: phases")
    # And the recipe with it.
    privacy = recipe.privacy.model_copy(update={"noise_multiplier": 50.0})
    other = recipe.model_copy(update={"privacy": privacy})
    folder.recipe_file.write_text(other.to_yaml())
    refused(other, folder, r"recipe\.yaml: privacy\.noise_multiplier")


def test_a_budget_that_was_cut_is_refused(run):
    """Its last line says what was really released; cut off, re-executed steps are free."""
    recipe, folder = run
    (file,) = Path(recipe.privacy.budget).glob("*.jsonl")
    raw = file.read_bytes()
    kept = raw.splitlines(keepends=True)
    try:
        for end in range(1, len(kept)):
            file.write_bytes(b"".join(kept[:end]))
            with pytest.raises(UserError, match="lacks records"):
                show_budget(Path(recipe.privacy.budget), 1e-5, False, True)
            with pytest.raises(UserError, match="lacks records"):
                settle(recipe, folder)
    finally:
        file.write_bytes(raw)
