"""Load the model of a run and measure its accuracy on the named test data.

Every other part of dpdist that needs a run's model loads it by this module.
"""

from __future__ import annotations

import io
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dpdist import models
from dpdist.certification.subject import Subject
from dpdist.certification.table import input_range, range_words
from dpdist.core.errors import UserError
from dpdist.core.fields import MEASURES
from dpdist.core.files import check_shape, finite_or_none, write_json
from dpdist.data import Dataset
from dpdist.randomness.noise_location import find_noise_location
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import Recipe
from dpdist.training.records import data_source, load_test_records

if TYPE_CHECKING:
    import torch

_BATCH, _DOCUMENT_BATCH_SIZE = 1000, 100  # inputs in a batch; documents
_NUMBERS = 2**24  # at most, in a batch of inputs
_MAX_IMAGE_SIDE = 96  # at most, of an image in a report


def require_model(recipe: Recipe, folder: RunFolder) -> str:
    """Return the hash of a finished run's model.

    Raises UserError unless the model may be used and is the one that was trained.
    """
    trained = folder.require_trained()
    if recipe.method.capabilities.not_releasable_reason is not None:
        raise UserError(f"{folder.path}: {recipe.method.capabilities.not_releasable_reason}")
    own: str = check_shape(trained, str(folder.training_summary), {"model": str})["model"]
    if models.model_hash(folder.model_folder) != own:
        raise UserError(
            f"{folder.model_folder}: is not the model that this run trained (one of its files was "
            "damaged or replaced), and has no guarantee; restore the trained model"
        )
    return own


def load_subject(recipe: Recipe, folder: RunFolder) -> Subject:
    """Return the run's trained model with its hash; its own recipe names the trusted factory."""
    digest = require_model(recipe, folder)
    return Subject.load(folder.model_folder, recipe.model.name, digest)


def load_model(recipe: Recipe, folder: RunFolder) -> torch.nn.Module:
    """Return the run's trained model."""
    return load_subject(recipe, folder).model


def evaluate_stage(recipe: Recipe, folder: RunFolder) -> None:
    """Write the accuracy on the test split into evaluation.json.

    For documents it is that of all next tokens; for targets that are not classes, there are other
    measures (`MEASURES`). A model with its own noise answers by its mean scores over a few samples
    of it. If answers have a privacy cost, only the first few test inputs are used, or none.
    """
    if folder.evaluation.exists() or recipe.method.capabilities.max_evaluation_queries == 0:
        return
    import torch

    dataset = load_test_records(recipe, data_source(recipe)).first(
        recipe.method.capabilities.max_evaluation_queries
    )
    asked, answer, about, model = _scoring_function(recipe, folder, dataset)
    dataset = dataset.first(asked)
    if not len(dataset):
        return
    users = None
    if recipe.user_unit is not None and dataset.names_users:
        users = np.unique(dataset.user_hashes, return_inverse=True)[1]
    if dataset.target_kind != "class":
        with torch.inference_mode():
            low, high = recipe.data.columns.target_range
            about |= _measured(dataset, answer, users, high - low)
        said = {"data": dataset.name, "inputs": len(dataset), "fingerprint": dataset.fingerprint}
        write_json(folder.evaluation, said | about)
        return
    with torch.inference_mode():
        if dataset.predicts_next_token:
            found = _evaluate_next_tokens(dataset, answer)
        else:  # answers with a privacy cost are classes, without probabilities
            found = _evaluate_labels(dataset, answer, users, "model" in about)
        if model is not None and recipe.model.initial is not None and dataset.predicts_next_token:
            about |= _base_perplexity(dataset, model)
    asked, loss = found.pop("asked"), found.pop("loss")
    write_json(
        folder.evaluation,
        {
            "data": dataset.name,
            "inputs": len(dataset),
            "accuracy": found["correct"] / asked,
            "fingerprint": dataset.fingerprint,
            "cross_entropy": finite_or_none(loss / asked),
            "perplexity": _perplexity(loss, asked),
            **found,
            **about,
        },
    )


def _perplexity(loss: float, asked: int) -> float | None:
    return finite_or_none(math.exp(min(700.0, loss / asked)))


def _base_perplexity(dataset: Dataset, model: torch.nn.Module) -> dict[str, float]:
    """Return the perplexity of a model's public base, if only adapters were trained in it."""
    adapter = models.Adapter.of(model)
    if adapter is None or adapter.outside is not None:
        return {}
    if getattr(adapter.config, "bias", "none") != "none":  # trained biases are not switched off
        return {}
    with models.without_adapters(model):
        found = _evaluate_next_tokens(dataset, lambda inputs, start: model(inputs))
    perplexity = _perplexity(found["loss"], found["asked"])
    return {} if perplexity is None else {"base_perplexity": perplexity}


# From inputs and the position of the first one to their scores.
_ScoreFunction = Callable[["torch.Tensor", int], "torch.Tensor"]


def _evaluate_labels(
    dataset: Dataset,
    score_inputs: _ScoreFunction,
    users: np.ndarray | None = None,
    are_scores: bool = True,
) -> dict[str, Any]:
    """Return counts by class, the incorrect inputs, the sum of cross-entropies and metrics.

    Logits that are not finite are incorrect. are_scores: whether outputs are scores, for metrics.
    """
    import torch

    from dpdist.core.metrics import class_metrics

    wrong: list[int] = []
    scores, labels = list[np.ndarray](), list[np.ndarray]()
    loss = 0.0
    seen = torch.zeros(2, dataset.classes, dtype=torch.int64)  # by class: inputs, and errors
    batch = max(1, min(_BATCH, _NUMBERS // math.prod(dataset.input_shape)))
    for start in range(0, len(dataset), batch):
        rows = slice(start, start + batch)
        inputs, targets = dataset.batch(rows), dataset.targets(rows)
        outputs = score_inputs(inputs, start)
        missed = torch.nonzero(models.predicted_classes(outputs) != targets).flatten() + start
        wrong += missed.tolist()
        for row, found in enumerate((targets, targets[missed - start])):
            seen[row] += torch.bincount(found, minlength=dataset.classes)
        loss += float(torch.nn.functional.cross_entropy(outputs, targets, reduction="sum"))
        if are_scores:
            scores.append(outputs.double().cpu().numpy())
            labels.append(targets.cpu().numpy())
    metrics = class_metrics(np.concatenate(scores), np.concatenate(labels), users) if scores else {}
    return {
        "asked": len(dataset),
        **({"metrics": metrics} if metrics else {}),
        "loss": loss,
        "correct": len(dataset) - len(wrong),
        "wrong": " ".join(map(str, wrong)),  # positions, so that two runs can be compared by input
        "by_class": torch.stack([seen[0], seen[0] - seen[1]], 1).tolist(),  # inputs, correct
    }


def _measured(
    dataset: Dataset, answer: _ScoreFunction, users: np.ndarray | None, unit: float
) -> dict[str, Any]:
    """Return the test split's measures by name, for numbers (1 is `unit`) or labels, and more."""
    import torch

    from dpdist.core.metrics import error_metrics

    first = second = torch.zeros((), dtype=torch.float64)
    number, squared = dataset.target_kind == "number", list[np.ndarray]()
    for start in range(0, len(dataset), _BATCH):
        rows = slice(start, start + _BATCH)
        outputs = answer(dataset.batch(rows), start).double().cpu()
        targets = dataset.targets(rows).double()
        if number:
            errors = (outputs - targets) * unit
            squared.append(errors.square().flatten(1).mean(1).numpy())
            first, second = first + errors.square().sum(), second + errors.abs().sum()
        else:
            right = (outputs.isfinite()) & ((outputs > 0) == (targets > 0))
            first, second = first + right.sum(), second + right.all(1).sum()
    values = len(dataset) * dataset.classes
    means = float(first) / values, float(second) / (values if number else len(dataset))
    measures = dict(zip(MEASURES[dataset.target_kind], map(finite_or_none, means), strict=True))
    metrics = error_metrics(np.concatenate(squared), users) if squared else {}
    return {"measures": measures, **({"metrics": metrics} if metrics else {})}


def _evaluate_next_tokens(dataset: Dataset, score_inputs: _ScoreFunction) -> dict[str, Any]:
    """Return how many of all next tokens are correct, and the sum of their cross-entropies."""
    import torch

    asked = correct = 0
    loss = 0.0
    for start in range(0, len(dataset), _DOCUMENT_BATCH_SIZE):
        rows = slice(start, start + _DOCUMENT_BATCH_SIZE)
        targets = dataset.targets(rows)
        there = targets >= 0
        outputs, targets = score_inputs(dataset.batch(rows), start)[there], targets[there]
        asked += len(targets)
        correct += int((models.predicted_classes(outputs) == targets).sum())
        loss += float(torch.nn.functional.cross_entropy(outputs, targets, reduction="sum"))
    if not asked:
        raise UserError(f"{dataset.name}: no document of its test split has a second token")
    return {"asked": asked, "loss": loss, "correct": correct, "next_tokens": asked}


def _scoring_function(
    recipe: Recipe, folder: RunFolder, dataset: Dataset
) -> tuple[int, _ScoreFunction, dict[str, Any], torch.nn.Module | None]:
    """Return the number of inputs to evaluate, the score function, keys of the evaluation, and the
    model if it draws no random numbers.
    """
    if recipe.method.capabilities.not_releasable_reason is not None:
        from dpdist.training.ensembles import QueryOracle

        oracle = QueryOracle(recipe, folder)
        asked = oracle.num_affordable(dataset.batch(slice(0, len(dataset))))
        return asked, lambda inputs, start: oracle(inputs), {"noise_draws": None}, None
    subject = load_subject(recipe, folder)
    model, about = subject.model, dict[str, Any](model=subject.digest)
    if not find_noise_location(model).is_random:
        about["noise_draws"] = None
        return len(dataset), lambda inputs, start: model(inputs), about, model
    from dpdist.certification.worker import CLEAN_DRAWS, expected_log_scores

    seed, draws = secrets.token_hex(16), CLEAN_DRAWS
    return (
        len(dataset),
        lambda inputs, start: expected_log_scores(model, inputs, draws, seed, start),
        about | {"noise_draws": draws},
        None,
    )


def data_units_row(recipe: Recipe, test: Dataset) -> list[tuple[str, str]]:
    """Return a row with the range of a public test split next to sigma; no row for texts."""
    if recipe.data.text is not None:
        return []
    sigma = None if recipe.certify is None else recipe.certify.sigma
    columns = recipe.data.columns
    if columns.in_unit_range:
        return [("units", f"{range_words(0, 1, sigma)} (declared: data.columns.preprocessing)")]
    said = range_words(*input_range(test, range(len(test))), sigma)
    return [("units", f"{said} (of the test split)")]


@dataclass(frozen=True)
class SplitImages:
    """Give a report the test split as images."""

    dataset: Dataset

    @property
    def fingerprint(self) -> str:
        return self.dataset.fingerprint

    def png(self, index: int) -> bytes:
        """Return one input as a small PNG image. Raises UserError for an unknown index."""
        if not 0 <= index < len(self.dataset):
            raise UserError(f"{self.dataset.name}: has {len(self.dataset):,} inputs, not {index}")
        from PIL import Image

        pixels = self.dataset.input_array(slice(index, index + 1))[0].clip(0, 1)
        channels = (255 * pixels).round().astype(np.uint8).transpose(1, 2, 0)
        image = Image.fromarray(channels[:, :, 0] if channels.shape[2] == 1 else channels)
        image.thumbnail((_MAX_IMAGE_SIDE, _MAX_IMAGE_SIDE))
        buffer = io.BytesIO()
        image.save(buffer, format="PNG", optimize=True)
        return buffer.getvalue()


def split_images(recipe: Recipe) -> SplitImages | str:
    """Return the images of the test split, or why there are no images to show."""
    if recipe.canary_audit is not None:
        return "canaries of an audit may be among the test inputs"
    try:
        dataset = load_test_records(recipe, data_source(recipe))
    except UserError:
        return "the test data are not here, or cannot be read"
    shape = dataset.input_shape
    if len(shape) != 3 or shape[0] not in (1, 3):
        return "the test inputs are not images"
    return SplitImages(dataset)
