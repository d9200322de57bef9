"""Labels that spread over public inputs: Zhou's closed form, and nothing private but what was
released."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from methods.test_pate import job_of
from scipy import sparse
from sklearn.semi_supervised import LabelSpreading
from support.local_execution import JobRecorder, run_without_ray

from dpdist.methods.pate import (
    UNANSWERED,
    PATEExecution,
    SpreadingRecipe,
    similarity_graph,
    spread_scores,
)
from dpdist.training.job import TrainJob
from dpdist.training.trainer import fit

SPREADING = {"spreading": {"neighbors": 5}}


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    run_without_ray(monkeypatch)


def blobs(each: int = 40, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Three clouds in the plane, far apart, in random order."""
    rng = np.random.default_rng(seed)
    classes = rng.permutation(np.repeat(np.arange(3), each))
    centers = np.array([[0.0, 0.0], [8.0, 0.0], [0.0, 8.0]])
    return centers[classes] + rng.normal(0, 1, (3 * each, 2)), classes


# ---- the arithmetic


def test_the_ties_are_those_of_the_definition() -> None:
    points, _ = blobs(8)
    distances = np.linalg.norm(points[:, None] - points[None], axis=2)
    np.fill_diagonal(distances, np.inf)
    near = np.argsort(distances, axis=1)[:, :4]
    farthest = np.sort(distances, axis=1)[:, 3]
    width, weights = farthest.mean() / 2, np.zeros((24, 24))
    for row, found in enumerate(near):
        weights[row, found] = np.exp(-(distances[row, found] ** 2) / (2 * width**2))
    weights = (weights + weights.T) / 2
    degrees = weights.sum(axis=1)
    expected = weights / np.sqrt(degrees[:, None] * degrees[None])
    assert np.allclose(similarity_graph(points, 4).toarray(), expected, atol=1e-12)


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
