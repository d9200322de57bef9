"""The worker of a certification: holds the executed classifier, does pieces of inputs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from dpdist.certification import units
from dpdist.certification.bank import BankSampler, split_first_layer
from dpdist.certification.classifier import (
    ClassifierSpec,
    ExecutedClassifier,
    check_digest,
    choose,
)
from dpdist.certification.noises import Noise
from dpdist.certification.procedures import PROCEDURES, Procedure
from dpdist.certification.sampling import Counter, HiddenNoiseSampler, Sampler
from dpdist.certification.score_settings import ScoreSettings
from dpdist.certification.scores import ExpectedScores, Sensitivity
from dpdist.certification.settings import CertifySettings
from dpdist.errors import UserError
from dpdist.models import hidden_noise, mixing, require_split


@dataclass(frozen=True)
class Piece:
    """Units low..high-1 of one input, with the input itself: workers need no data set."""

    index: int
    low: int
    high: int
    x: np.ndarray


@dataclass(frozen=True)
class Assignment:
    """All that workers share; put into the object store once.

    norms: of the first layer, for certificates by a model's own hidden noise.
    """

    model: nn.Module
    settings: CertifySettings | ScoreSettings
    source: units.UnitSource
    classes: int
    input_shape: tuple[int, ...]
    check_inputs: np.ndarray
    spec: ClassifierSpec | None = None
    norms: Sensitivity | None = None


def procedure(assignment: Assignment) -> Procedure:
    """The steps of the mode that the settings name, for the executed batch."""
    settings, spec = assignment.settings, assignment.spec
    if spec is None:
        raise ValueError("the executed classifier must be chosen before counting")
    if isinstance(settings, ScoreSettings):
        noise = hidden_noise(assignment.model)
        if noise is None or assignment.norms is None:
            raise ValueError("the model has no noise of its own")
        return ExpectedScores(settings, spec.batch, noise.scale, assignment.norms)
    return PROCEDURES[settings.mode](settings, spec.batch)


def probe(assignment: Assignment) -> ClassifierSpec:
    """Choose the executed classifier, on the kind of machine that will execute it.

    Raises ValueError when the model does not give finite logits for each class, or when its answer
    to one input depends on what else is in the batch, or where.
    """
    network, batch = _check_batch(assignment)
    with torch.inference_mode():
        logits = network.eval()(batch)
    expected = (len(batch), assignment.classes)
    if tuple(logits.shape) != expected:
        raise ValueError(f"it returns {tuple(logits.shape)} for a batch, not {expected}")
    if not bool(torch.isfinite(logits).all()):
        # The argmax of NaN is a constant, which would be certified with the largest radius.
        raise ValueError("its outputs are not finite numbers (did the training diverge?)")
    if found := mixing(network, batch):
        raise ValueError(f"it looks at its batch: {found}; no certificate holds for such a model")
    form = assignment.settings.form
    spec, _ = choose(network, batch, (form,) if form else ())
    return spec


class Worker:
    """Called with a list of pieces; returns a JSON row for each, with the seconds it took."""

    def __init__(self, assignment: Assignment) -> None:
        spec = assignment.spec
        if spec is None:
            raise ValueError("the executed classifier must be chosen before counting")
        self._sampler = _sampler(assignment, spec)
        self._procedure = procedure(assignment)
        self._classes, self._batch = assignment.classes, spec.batch

    def __call__(self, pieces: list[Piece]) -> list[dict[str, Any]]:
        rows = []
        for piece in pieces:
            start = time.perf_counter()
            x = torch.from_numpy(piece.x)
            partial = self._procedure.work(self._sampler, x, piece.index, piece.low, piece.high)
            seconds = round(time.perf_counter() - start, 6)
            rows.append({"index": piece.index, "low": piece.low, "high": piece.high,
                         "partial": partial, "seconds": seconds})  # fmt: skip
        return rows

    def histogram(self, x: torch.Tensor, index: int, draws: int) -> np.ndarray:
        """Counts of all classes over ``draws`` noisy copies: int64 (classes,)."""
        counts = np.zeros(self._classes, dtype=np.int64)
        for block in range(-(-draws // self._batch)):
            rows = min(self._batch, draws - block * self._batch)
            counts += self._sampler.histogram(x, index, units.ESTIMATE, block, self._batch, rows)
        return counts


def _sampler(assignment: Assignment, spec: ClassifierSpec) -> Counter:
    """The sampler on the executed classifier. Raises UserError when it fails the check here."""
    settings, source = assignment.settings, assignment.source
    network, batch = _check_batch(assignment)
    shapes = [(rows, *batch.shape[1:]) for rows in (spec.batch, settings.n0)]
    sampler: Counter
    if isinstance(settings, ScoreSettings):
        executed = ExecutedClassifier(network, spec.form, shapes)
        sampler, answer = _hidden_sampler(assignment, executed), executed(batch)
    elif settings.noise_bank and (parts := split_first_layer(assignment.model)) is not None:
        bank = BankSampler(
            *parts, spec.form, settings.smoothing, source, assignment.classes, shapes,
            evict=settings.mode == "fixed",
        )  # fmt: skip
        sampler, answer = bank, bank.classes_of(*_check_parts(assignment, settings))
    else:
        classify = ExecutedClassifier(network, spec.form, shapes)
        sampler = Sampler(
            classify, settings.smoothing, source, assignment.classes, assignment.input_shape,
            bank=settings.noise_bank,
        )  # fmt: skip
        answer = classify(batch)
    if check_digest(answer) != spec.check:
        raise UserError(
            "this worker computes other classes on the check batch than the model did when the "
            f"certification began ({spec.machine}, torch {spec.torch_version}): use workers of "
            "one kind" + (", or no noise bank" if settings.noise_bank else "")
        )
    return sampler


def _hidden_sampler(
    assignment: Assignment, executed: ExecutedClassifier | None
) -> HiddenNoiseSampler:
    split, noise = require_split(assignment.model), hidden_noise(assignment.model)
    if noise is None:
        raise ValueError("the model has no noise of its own")
    logits = split.rest if executed is None else executed.logits
    return HiddenNoiseSampler(split.first, logits, noise.std, assignment.source)


def _check_batch(assignment: Assignment) -> tuple[nn.Module, torch.Tensor]:
    """The executed network, and a batch for it under a random unit used for nothing else."""
    settings = assignment.settings
    if not isinstance(settings, ScoreSettings):
        noise, inputs = _check_parts(assignment, settings)
        return assignment.model, noise + inputs
    split = require_split(assignment.model)
    rows = settings.executed_batch(int(np.prod(split.hidden_shape(assignment.input_shape))))
    inputs = torch.from_numpy(assignment.check_inputs)
    sampler = _hidden_sampler(assignment, None)
    with torch.inference_mode():
        hidden = split.first(inputs[torch.arange(rows) % len(inputs)])
        noise = sampler.noisy(torch.zeros_like(inputs[0]), None, units.CHECK, 0, rows)
        at_zero = split.first(torch.zeros_like(inputs[:1]))
        return split.rest, hidden + (noise - at_zero)


def _check_parts(
    assignment: Assignment, settings: CertifySettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise and inputs of the check batch, under a random unit used for nothing else."""
    rows = settings.executed_batch(int(np.prod(assignment.input_shape)))
    inputs = torch.from_numpy(assignment.check_inputs)
    noise: Noise = settings.smoothing
    values = torch.empty(rows, *assignment.input_shape)
    words = units.RandomWords(values.numel() + values.numel() % 2)
    noise.draw(words.fill(assignment.source.key(None, units.CHECK, 0)), values.numpy().reshape(-1))
    return values, inputs[torch.arange(rows) % len(inputs)]
