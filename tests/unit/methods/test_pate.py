"""PATE: one record is one vote, votes are noised as the plan says, and the student sees no more."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from scipy import sparse
from scipy.stats import binom, norm
from sklearn.semi_supervised import LabelSpreading
from support.datasets import write_split
from support.local_execution import JobRecorder, command, run_without_ray
from support.recipes import write_recipe
from support.training import execute

from dpdist.core.errors import UserError
from dpdist.core.files import write_json
from dpdist.methods.pate import (
    PATE,
    UNANSWERED,
    VOTES,
    PATEExecution,
    SpreadingRecipe,
    count_votes,
    similarity_graph,
    spread_scores,
)
from dpdist.privacy.ledger import JournalError, Ledger
from dpdist.privacy.phases import GaussianSteps
from dpdist.privacy.plan import PrivacyPlan
from dpdist.runs import archive as archives
from dpdist.runs.archive import Archive, export_text, unpack_export
from dpdist.runs.folder import RunFolder, read_verified_ledger
from dpdist.runs.recipe import parse_recipe
from dpdist.training.ensembles import release_once
from dpdist.training.job import TrainJob, prepare
from dpdist.training.trainer import fit

KEY = "5a" * 32
METHOD = {
    "name": "pate", "teachers": 5, "public": {"data": "digits"}, "queries": 20, "answers": 12,
    "threshold": 1.0, "screening": 0.2,
}  # fmt: skip
RAW: dict[str, Any] = {
    "name": "x",
    "data": {"name": "digits", "public": 0.2},
    "model": "linear",
    "method": METHOD,
    "privacy": {
        "noise_multiplier": 0.05, "delta": 1e-4, "clipping": "none", "nominal_records": 1100,
    },
    "training": {"batch_size": 50, "steps": 4, "learning_rate": 0.5},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    run_without_ray(monkeypatch)


def method(**more: Any) -> PATE:
    return PATE(**(METHOD | more))


def plan_of(noise: float, one: PATE | None = None, **more: Any) -> PrivacyPlan:
    phases = (one or method()).cost(GaussianSteps(4, noise, 0.1))
    return PrivacyPlan(1100, phases, 1e-5, math.inf, nominal=True, **more)


# ---- what one record moves


def releases_of(
    one: PATE, plan: PrivacyPlan, votes: np.ndarray, patch: pytest.MonkeyPatch
) -> list[tuple[np.ndarray, float]]:
    """Return the releases of an execution in order, and their noise; each key is used once."""
    seen, keys = [], {b"k" * 32}

    def without(total: np.ndarray, key: bytes, std: float) -> np.ndarray:
        seen.append((total.copy(), std))
        keys.add(key)
        return total

    with patch.context() as inner:
        inner.setattr("dpdist.gradients.noise.add_noise", without)
        one.execution().release_labels(votes, plan, b"k" * 32)
    assert len(keys) == 3  # else the difference of two releases had no noise
    return seen


def test_one_teacher_moves_the_votes_by_what_is_paid(monkeypatch: pytest.MonkeyPatch) -> None:
    """In units of the noise; votes that go from the first class to one without any attain it."""
    rng, one, plan = np.random.default_rng(4), method(), plan_of(2.0)
    others = rng.multinomial(30, [0.7, 0.1, 0.1, 0.1, 0, 0, 0, 0, 0, 0], 20)
    most = 0.0
    for trial in range(30):
        before, after = rng.integers(0, 10, 20), rng.integers(0, 10, 20)
        if not trial:
            before[:], after[:] = 0, 9
        found = [
            releases_of(one, plan, others + np.eye(10, dtype=int)[said], monkeypatch)
            for said in (before, after)
        ]
        assert [len(each) for each in found] == [2, 2]
        moved = 0.0
        for (first, std), (second, same) in zip(*found, strict=True):
            assert std == same and first.shape == second.shape
            moved += float(((first - second) ** 2).sum()) / std**2
        most = max(most, math.sqrt(moved))
        assert moved <= (1 / 2.0) ** 2 * (1 + 1e-12)
    assert most == pytest.approx(1 / 2.0)


def write(root: Path, keep: np.ndarray | slice) -> None:
    """A data set of made-up features; of its training records those in `keep`."""
    rng = np.random.default_rng(3)
    inputs = rng.random((98, 6), dtype=np.float32)
    labels = (3 * inputs[:, 0]).astype(np.int64)
    for split, rows in (("train", np.arange(90)[keep]), ("test", np.arange(90, 98))):
        write_split(root / "made", split, x=inputs[rows], label=labels[rows])


def job_of(home: Path, keep: np.ndarray | slice = slice(None), **more: Any) -> TrainJob:
    write(home / "data", keep)
    raw = {
        "name": "x",
        "data": {
            "name": "made", "root": str(home / "data"), "classes": 3, "public": 0.3,
            "columns": {"features": ["x"]},
        },
        "model": "linear",
        "method": METHOD | {"public": {"data": "made", "classes": 3}, "teachers": 4, **more},
        "privacy": RAW["privacy"] | {"nominal_records": 60, "delta": 1e-3, "run_key": KEY},
        "training": {"batch_size": 8, "epochs": 3, "learning_rate": 2.0},
    }  # fmt: skip
    return prepare(parse_recipe(raw, "test"), RunFolder(home / "run"), "test")


def votes_of(job: TrainJob) -> np.ndarray:
    fit(job, JobRecorder())
    return np.load(job.folder.private / VOTES)


@pytest.mark.slow
def test_one_record_is_one_vote_of_each_row(tmp_path: Path) -> None:
    every = job_of(tmp_path / "every")
    votes, private = votes_of(every), every.records_without_canaries()
    assert votes.shape == (20, 3) and (votes.sum(axis=1) == 4).all()
    assert (every.folder.private / VOTES).stat().st_mode & 0o077 == 0
    changed = 0
    inputs = pq.read_table(tmp_path / "every/data/made/train.parquet")["x"].to_pylist()
    own = {tuple(row) for row in private.batch(slice(0, len(private))).tolist()}
    gone = [n for n, row in enumerate(inputs) if tuple(np.float32(row).tolist()) in own][:2]
    for n in gone:
        fewer = votes_of(job_of(tmp_path / f"without-{n}", np.arange(90) != n))
        moved = np.abs(fewer - votes)
        assert moved.max() <= 1 and (moved.sum(axis=1) <= 2).all()
        assert (fewer.sum(axis=1) == 4).all()
        changed += bool(moved.any())
    assert len(gone) == 2 and changed


def test_a_teacher_has_at_most_one_vote_whatever_it_says() -> None:
    """None where it says no numbers: the argmax of NaN is the first class."""
    scores = np.zeros((3, 2, 4))
    scores[0, :, 2], scores[1, 0], scores[2, 1, 3] = 1, np.nan, np.inf
    found = count_votes(scores)
    assert found.tolist() == [[1, 0, 1, 0], [1, 0, 1, 0]]


# ---- its noise


def test_what_passes_and_what_is_told_follow_the_exact_law() -> None:
    """Two classes, 60 votes to 40: a threshold of 70 under noise 10, then noise 20. Counts are
    within binomial limits that are wrong with probability 1e-6; two thirds and three halves of
    either noise are not."""
    count = 20_000
    one = method(queries=count, answers=count, threshold=70.0, screening=2 / 3)
    plan = plan_of(math.sqrt(100 * (2 / 3) / count), one)
    phase: Any = plan.phases[0]
    assert phase.screen_noise == pytest.approx(10) and phase.vote_noise == pytest.approx(20)
    labels = np.array(
        one.execution().release_labels(np.tile([60, 40], (count, 1)), plan, b"n" * 32)
    )
    passed = int((labels != UNANSWERED).sum())

    def likely(seen: int, among: int, share: float) -> bool:
        low, high = binom.ppf([5e-7, 1 - 5e-7], among, share)
        return bool(low <= seen <= high)

    wrong = int((labels == 1).sum())
    for factor in (1.0, 2 / 3, 1.5):
        assert likely(passed, count, norm.cdf(-10 / (10 * factor))) == (factor == 1)
        assert likely(wrong, passed, norm.cdf(-20 / (math.sqrt(2) * 20 * factor))) == (factor == 1)
    again = one.execution().release_labels(np.tile([60, 40], (count, 1)), plan, b"m" * 32)
    assert again != labels.tolist()


def test_no_more_is_told_than_was_paid_for() -> None:
    votes = np.zeros((20, 10), dtype=int)
    votes[:, 4] = 100
    votes[::2] = 10  # no class has enough

    def told(**more: Any) -> list[float]:
        one = method(**more)
        return one.execution().release_labels(votes, plan_of(0.01, one), b"k" * 32)

    assert told(threshold=50.0) == [UNANSWERED, 4.0] * 10
    first = [UNANSWERED, 4.0] * 3
    assert told(threshold=50.0, answers=3) == [*first, *[UNANSWERED] * 14]
    assert UNANSWERED not in told(threshold=0.0, screening=0.0, answers=20)
    assert set(told(threshold=200.0)) == {UNANSWERED}


# ---- once


def test_a_crash_replays_the_votes_and_others_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, real = job_of(tmp_path / "a"), PATEExecution.release_labels
    path = job.folder.ledger

    def dies(self: PATEExecution, *given: Any) -> Any:
        assert Ledger.read(path).num_queries == 1  # on the disk, before its noise
        real(self, *given)
        raise KeyboardInterrupt

    with monkeypatch.context() as inner, pytest.raises(KeyboardInterrupt):
        inner.setattr(PATEExecution, "release_labels", dies)
        votes_of(job)
    assert Ledger.read(path).recorded_answers == ()
    votes = votes_of(job)
    ledger = Ledger.read(path)
    undisturbed = job_of(tmp_path / "b")
    assert np.array_equal(votes_of(undisturbed), votes) and ledger.num_queries == 1
    assert ledger.recorded_answers == Ledger.read(undisturbed.folder.ledger).recorded_answers
    with monkeypatch.context() as inner:
        inner.setattr(PATEExecution, "release_labels", dies)  # never asked again
        votes_of(job)
    votes[0] = np.roll(votes[0], 1)
    np.save(job.folder.private / VOTES, votes)
    with pytest.raises(UserError):
        votes_of(job)
    assert Ledger.read(path).num_queries == 1


def test_copies_of_a_run_draw_other_votes_afresh(tmp_path: Path) -> None:
    """Without a fixed key. Made before the votes were counted, two copies draw keys of their own;
    after that the same one, from the same votes by the same recipe, and for anything else none.
    With another threshold the same noise would be on the votes of other inputs."""
    recipe = job_of(tmp_path / "fixed").recipe
    privacy = recipe.privacy.model_copy(update={"run_key": None})
    recipe = recipe.model_copy(update={"privacy": privacy})
    jobs = {"run": prepare(recipe, RunFolder(tmp_path / "run"), "test")}

    def copied(name: str) -> None:
        folder = RunFolder(tmp_path / name)
        shutil.copytree(jobs["run"].folder.path, folder.path)
        jobs[name] = replace(jobs["run"], folder=folder)

    def key_of(job: TrainJob, about: bytes = b"votes") -> bytes:
        """The process dies before the votes are kept."""
        found: list[bytes] = []

        def dies(key: bytes) -> list[float]:
            found.append(key)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            release_once(job, about, dies)
        return found[0]

    copied("before")
    first = key_of(jobs["run"])
    assert key_of(jobs["run"]) == first  # to go on after a crash is an exact replay
    copied("after")
    assert key_of(jobs["after"]) == first and key_of(jobs["before"]) != first
    method = recipe.method.model_copy(update={"threshold": 1.5})
    other = replace(jobs["after"], recipe=recipe.model_copy(update={"method": method}))
    for job, about in ((other, b"votes"), (jobs["after"], b"other votes")):
        with pytest.raises(UserError):
            release_once(job, about, lambda key: [1.0])


def test_nothing_is_released_once_more_on_a_ledger_that_lost_it(tmp_path: Path) -> None:
    """The steps that followed it are in a checkpoint: its ledger was not empty."""
    job, drawn = job_of(tmp_path), []
    folder = job.folder

    def draw(key: bytes) -> list[float]:
        drawn.append(key)
        return [1.0]

    for _ in range(2):
        assert release_once(job, b"votes", draw) == [1.0] and len(drawn) == 1
    with Ledger.open(folder.ledger, job.plan.fingerprint()) as ledger:
        ledger.begin_attempt({})
        ledger.record(0, "ab" * 32)
        anchor = ledger.anchor
    checkpoint = folder.checkpoints / "step-00000001"
    checkpoint.mkdir(parents=True)
    write_json(checkpoint / "done.json", {"step": 1, "ledger": anchor.to_dict()})
    folder.ledger.unlink()
    folder.anchor.unlink()
    with pytest.raises((UserError, JournalError)):
        release_once(job, b"votes", draw)
    assert len(drawn) == 1


@pytest.mark.slow
def test_the_student_sees_answers_and_nothing_else(tmp_path: Path) -> None:
    job = job_of(tmp_path / "a")
    with pytest.raises(UserError):  # by private records
        execute(job_of(tmp_path / "refused"))
    recorder = JobRecorder()
    fit(job, recorder)
    given = recorder.jobs
    (told,) = Ledger.read(job.folder.ledger).recorded_answers
    labels = np.array(told)
    public = job.public_records()
    assert public is not None and 0 < (labels != UNANSWERED).sum() <= 12 and len(labels) == 20
    student = given[0].records()
    assert len(student) == job.plan.records == 60
    asked = torch.from_numpy(np.flatnonzero(labels != UNANSWERED))
    some = np.array([0, 59, 7])
    assert torch.equal(student.batch(some), public.batch(slice(0, 20))[asked[some % len(asked)]])
    expected = labels[labels != UNANSWERED][some % len(asked)]
    assert student.targets(some).tolist() == expected.tolist()


def test_no_question_is_a_test_record(tmp_path: Path) -> None:
    job, path = job_of(tmp_path), tmp_path / "data/made/test.parquet"
    public = job.public_records()
    assert public is not None
    one = {"x": public.batch(slice(0, 1))[0].tolist(), "label": 0}
    pq.write_table(pa.Table.from_pylist([*pq.read_table(path).to_pylist(), one]), path)
    with pytest.raises(UserError, match=r"method\.public\.data:"):
        prepare(job.recipe, job.folder, "test")


def what_leaves(folder: RunFolder, tmp_path: Path) -> list[Path]:
    """The files of an export and of an archive, fetched and where it is."""
    unpack_export(export_text(folder), tmp_path / "fetched")
    archive = Archive.claim(folder, f"file://{tmp_path}/archive", False)
    assert archive is not None
    archive.update()
    archives.fetch_publishable_files(f"file://{tmp_path}/archive", tmp_path / "archived")
    return [
        path for at in ("fetched", "archived", "archive") for path in (tmp_path / at).rglob("*")
    ]


@pytest.mark.slow
def test_a_run_from_teachers_to_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    smooth = {"smoothing": {"std": 0.01, "augmentations": 2}}
    training = {"batch_size": 20, "steps": 8, "learning_rate": 0.5}
    teaching = {"teaching": {"model": "mlp", "training": training}}
    write_recipe(tmp_path, RAW | {"method": METHOD | smooth | teaching}, "x.yaml")

    def here(*arguments: object) -> int:
        return command(monkeypatch, capsys, tmp_path, *arguments).code

    assert here("run", "x.yaml", "--dry-run") == 0
    assert here("run", "x.yaml") == 0
    folder = RunFolder(tmp_path / "runs" / "x")
    ledger, plan = read_verified_ledger(folder).ledger, folder.read_plan()
    assert ledger.num_queries == 1 and ledger.guarantee(plan) == plan.guarantee(0)
    before = folder.ledger.read_bytes()
    assert here("run", "x.yaml") == 0 and folder.ledger.read_bytes() == before
    assert here("release", "x") == 0
    card = json.loads((folder.release_folder / "privacy_card.json").read_text())
    assert card["private"] and card["mechanism"][0].startswith("votes of models on disjoint shards")
    assert here("audit", "x.yaml") == 2
    votes = (folder.private / VOTES).read_bytes()
    for path in [*what_leaves(folder, tmp_path), *folder.release_folder.rglob("*")]:
        assert "teacher" not in path.name and "votes" not in path.name
        assert path.is_dir() or votes not in path.read_bytes()


# ---- labels that spread over public inputs: Zhou's closed form, and nothing private

SPREADING = {"spreading": {"neighbors": 5}}


def blobs(each: int = 40, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Three clouds in the plane, far apart, in random order."""
    rng = np.random.default_rng(seed)
    classes = rng.permutation(np.repeat(np.arange(3), each))
    centers = np.array([[0.0, 0.0], [8.0, 0.0], [0.0, 8.0]])
    return centers[classes] + rng.normal(0, 1, (3 * each, 2)), classes


# ---- the arithmetic


def test_scores_are_zhou_s_closed_form_and_scikit_learn_s_limit() -> None:
    (points, _), alpha = blobs(20), 0.99
    graph, asked, told = similarity_graph(points, 6), np.arange(12), np.arange(12) % 3
    given = np.zeros((60, 3))
    given[asked, told] = 1
    found = spread_scores(graph, asked, told, 3, alpha)
    exact = np.linalg.solve(np.eye(60) - alpha * graph.toarray(), given)
    assert np.allclose(found, exact, atol=1e-6)
    # scikit-learn normalizes the weights that it is given; those of a graph of row sums 1 stay.
    labels = np.full(60, -1)
    labels[asked] = told
    distances = np.linalg.norm(points[:, None] - points[None], axis=2)
    weights = np.exp(-(distances**2) / 2) * ~np.eye(60, dtype=bool)
    theirs = LabelSpreading(
        kernel=lambda a, b: weights + np.eye(60), alpha=alpha, max_iter=20_000, tol=1e-12
    ).fit(points, labels)
    degrees = np.sqrt(weights.sum(axis=1))
    own = sparse.csr_matrix(weights / degrees[:, None] / degrees[None])
    mine = spread_scores(own, asked, told, 3, alpha)
    rows = mine / mine.sum(axis=1, keepdims=True)
    assert np.allclose(rows, theirs.label_distributions_, atol=1e-5)


def test_what_no_label_reaches_has_none() -> None:
    two = sparse.block_diag([similarity_graph(blobs(4, seed)[0], 3) for seed in (1, 2)]).tocsr()
    found = SpreadingRecipe().spread_labels(two, np.array([0, 1]), np.array([2, 2]), 5)
    reached = spread_scores(two, np.array([0]), np.array([0]), 1, 0.9)[:, 0] > 0
    assert (found[12:] == UNANSWERED).all() and (found[:12][reached[:12]] == 2).all()


# ---- what flows into it


def given_to(job: TrainJob) -> Any:
    recorder = JobRecorder()
    fit(job, recorder)
    return recorder.jobs[0].records()


@pytest.mark.slow
def test_nothing_private_flows_into_it_but_released_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other private records, the same released labels: what the student is given is the same to the
    bit. Other released labels: it is not."""
    released = [float(each % 3) for each in range(12)] + [UNANSWERED] * 8
    monkeypatch.setattr(PATEExecution, "release_labels", lambda *_: released)
    every = job_of(tmp_path / "every", **SPREADING)
    first = given_to(every)
    own = {tuple(row) for row in every.records_without_canaries().batch(slice(0, 99)).tolist()}
    path = tmp_path / "every/data/made/train.parquet"
    rows = pq.read_table(path)["x"].to_pylist()
    private = [n for n, row in enumerate(rows) if tuple(np.float32(row).tolist()) in own]
    fewer = job_of(tmp_path / "fewer", np.setdiff1d(np.arange(90), private[:7]), **SPREADING)
    assert len(fewer.records_without_canaries()) == len(every.records_without_canaries()) - 7
    assert given_to(fewer).fingerprint == first.fingerprint

    turned = [each if each == UNANSWERED else (each + 1) % 3 for each in released]
    monkeypatch.setattr(PATEExecution, "release_labels", lambda *_: turned)
    assert given_to(job_of(tmp_path / "turned", **SPREADING)).fingerprint != first.fingerprint
