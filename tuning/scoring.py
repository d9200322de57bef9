"""The score of one trial: a count over records, with noise when the records are private.

Every record adds a number in [0, 1] that depends only on itself, the model and fresh randomness, so
the sum changes by at most 1 if one record is added or removed. If a user is the unit, a user adds
the mean of its records' numbers, and is counted once. Private records are evaluated one at a time,
in batches of one shape: with other records in the batch, the last bit of a result (and so a class)
could depend on them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from dpdist import models
from dpdist.certification.cohen import Cohen
from dpdist.certification.worker import Assignment, Worker, probe
from dpdist.config.search import Objective, ScoreRecipe
from dpdist.core.errors import UserError
from dpdist.data import Dataset, UserDataset
from dpdist.gradients.noise import add_noise, grid_exponent
from dpdist.models.spec import import_factory
from dpdist.randomness.keys import StreamKeys, derive_key
from dpdist.training.private_score import Value
from dpdist.training.record_scores import (
    ACCURACY,
    RecordScore,
    balanced_accuracy,
    bounded_score,
    brier_score,
    log_loss_score,
)

PUBLIC_BATCH = 1000
_CHECK_ROWS = 64
_MAX_SELECTION_SAMPLES = 100  # at most, samples that select the class


def compute_score(
    model_folder: Path,
    dataset: Dataset,
    settings: ScoreRecipe,
    *,
    sigma: float | None,
    noise: float | None,
    key: bytes,
    trusted_factory: str | None = None,
) -> float:
    """Return the weighted mean of the objectives over the records, in [0, 1] except for noise.

    For records by user it is the mean over users, each of which has the mean of its records.
    sigma: smoothing noise of the certified objectives. noise: standard deviation of the Gaussian
    noise on the sum over private records; None if they are public. key: the trial's key for only
    this score. Raises UserError if parameters of the model are not finite.
    """
    model = models.load(model_folder, trusted_factory=trusted_factory).eval()
    if not all(bool(torch.isfinite(value).all()) for value in model.state_dict().values()):
        raise UserError("the trained parameters are not finite numbers")
    total = np.array([_total_score(model, dataset, settings, sigma, noise, key)])
    if noise is not None:
        total = add_noise(total, derive_key(key, "score", "noise"), noise)
    return float(total[0]) / len(dataset)


def publishable_score(
    score: float, records: int, noise: float | None, planned_records: float
) -> float:
    """Return a publishable score: the noisy count of held-out records by a public number of them.

    A noisy count is on a grid; divided by the real number of records it would be on a different
    grid for each number, and reveal it. noise: as in `compute_score`; without noise the score is
    unchanged.
    """
    if not noise:
        return score
    step = 2.0 ** grid_exponent(noise)
    return round(score * records / step) * step / planned_records


def _total_score(
    model: torch.nn.Module,
    dataset: Dataset,
    settings: ScoreRecipe,
    sigma: float | None,
    noise: float | None,
    key: bytes,
) -> float:
    """Return the sum of all records' numbers, or of all users' means: a unit adds at most 1."""
    if not isinstance(dataset, UserDataset):
        return float(_record_scores(model, dataset, settings, sigma, noise, key).sum())
    values = _record_scores(model, dataset.records, settings, sigma, noise, key)
    return dataset.users.sum_of_means(values)


def _record_scores(
    model: torch.nn.Module,
    dataset: Dataset,
    settings: ScoreRecipe,
    sigma: float | None,
    noise: float | None,
    key: bytes,
) -> np.ndarray:
    """Return each record's number in [0, 1], float64 (records,)."""
    weights = settings.objectives
    values = np.zeros(len(dataset))
    rows = 1 if noise is not None else PUBLIC_BATCH
    for name, score in record_scores(settings).items():
        values += weights[name] * values_by(score, model, dataset, rows)
    if settings.needs_certificates:
        assert sigma is not None
        radii = certified_radii(model, dataset, settings, sigma, key)
        if settings.radius is not None:
            values += weights["certified-accuracy"] * (radii >= settings.radius)
        if settings.radius_cap is not None:
            scaled = np.clip(radii, 0.0, settings.radius_cap) / settings.radius_cap
            values += weights["average-radius"] * scaled
    return np.clip(values / sum(weights.values()), 0.0, 1.0)


def record_scores(settings: ScoreRecipe) -> dict[Objective, Value]:
    """Return the scores of a record besides certificates, by their objective.

    Raises UserError for a function that cannot be imported.
    """
    found: dict[Objective, Value] = {}
    if "accuracy" in settings.objectives:
        found["accuracy"] = ACCURACY
    if "brier" in settings.objectives:
        found["brier"] = brier_score()
    if settings.log_loss_cap is not None:
        found["log-loss"] = log_loss_score(settings.log_loss_cap)
    if settings.class_weights is not None:
        found["balanced-accuracy"] = balanced_accuracy(dict(enumerate(settings.class_weights)))
    if settings.value is not None and settings.value_range is not None:
        try:
            function = import_factory(settings.value)
        except UserError as error:
            said = str(error).replace("model.name", "tune.score.value")
            raise UserError(said) from error
        found["value"] = bounded_score(function, *settings.value_range)
    return found


def values_by(score: Value, model: torch.nn.Module, dataset: Dataset, rows: int) -> np.ndarray:
    """Return each record's value in [0, 1], float64 (records,); 0 if a private one fails.

    rows: of a pass; 1 if the records are private.
    """
    found = np.zeros(len(dataset))
    with torch.inference_mode():
        for start in range(0, len(dataset), rows):
            chosen = slice(start, start + rows)
            inputs, targets = dataset.batch(chosen), dataset.targets(chosen)
            try:
                if isinstance(score, RecordScore):
                    values = score(model(inputs), targets)
                else:
                    values = score(model, (inputs, targets))
                found[chosen] = values.double().numpy()
            except Exception:
                if rows > 1:  # whether a trial fails must not depend on a private record
                    raise
    return found


def certified_radii(
    model: torch.nn.Module, dataset: Dataset, settings: ScoreRecipe, sigma: float, key: bytes
) -> np.ndarray:
    """Return the certified L2 radius of each record, float64 (records,) (Cohen et al. 2019).

    It is -1 if the class is incorrect or nothing is certified.
    """
    certify = Cohen(
        sigma=sigma,
        n0=min(settings.samples, _MAX_SELECTION_SAMPLES),
        n=settings.samples,
        alpha=settings.alpha,
        backend="frozen",
    )
    source = StreamKeys("score", derive_key(key, "score", "draws").hex(), "", "", "gaussian", sigma)
    # On invented inputs: which form is executed must not depend on private records.
    made_up = np.random.default_rng(0).random((_CHECK_ROWS, *dataset.input_shape), dtype=np.float32)
    place, shape = certify.build_sampler(model, dataset.input_shape), dataset.input_shape
    # No row is executed again: whether a trial stops must not depend on private records.
    assignment = Assignment(
        model, certify, place, source, dataset.classes, shape, made_up, reexecution_key=None
    )
    worker = Worker(replace(assignment, spec=probe(assignment)))
    labels = dataset.targets(slice(None)).numpy()
    radii = np.full(len(dataset), -1.0)
    for index in range(len(dataset)):
        image = dataset.batch(slice(index, index + 1))[0].numpy()
        verdict = worker.certify(image, index)
        if verdict.prediction == labels[index]:
            radii[index] = verdict.radius
    return radii
