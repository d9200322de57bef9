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
from dpdist.certification.sampling import Counter, Sampler
from dpdist.certification.settings import CertifySettings
from dpdist.errors import UserError


@dataclass(frozen=True)
class Piece:
    """Units low..high-1 of one input, with the input itself: workers need no data set."""

    index: int
    low: int
    high: int
    x: np.ndarray


@dataclass(frozen=True)
class Assignment:
    """All that workers share; put into the object store once."""

    model: nn.Module
    settings: CertifySettings
    source: units.UnitSource
    classes: int
    input_shape: tuple[int, ...]
    check_inputs: np.ndarray
    spec: ClassifierSpec | None = None


def procedure(settings: CertifySettings, batch: int) -> Procedure:
    """The steps of the mode that the settings name, for executed batches of that many rows."""
    return PROCEDURES[settings.mode](settings, batch)


def probe(assignment: Assignment) -> ClassifierSpec:
    """Choose the executed classifier, on the kind of machine that will execute it.

    Raises ValueError when the model does not give finite logits for each class.
    """
    noise, inputs = _check_parts(assignment)
    batch = noise + inputs
    with torch.inference_mode():
        logits = assignment.model.eval()(batch)
    expected = (len(batch), assignment.classes)
    if tuple(logits.shape) != expected:
        raise ValueError(f"it returns {tuple(logits.shape)} for a batch, not {expected}")
    if not bool(torch.isfinite(logits).all()):
        # The argmax of NaN is a constant, which would be certified with the largest radius.
        raise ValueError("its outputs are not finite numbers (did the training diverge?)")
    form = assignment.settings.form
    spec, _ = choose(assignment.model, batch, (form,) if form else ())
    return spec


class Worker:
    """Called with a list of pieces; returns a JSON row for each, with the seconds it took."""

    def __init__(self, assignment: Assignment) -> None:
        spec = assignment.spec
        if spec is None:
            raise ValueError("the executed classifier must be chosen before counting")
        settings = assignment.settings
        self._sampler = _sampler(assignment, spec)
        self._procedure = procedure(settings, spec.batch)
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
    noise, inputs = _check_parts(assignment)
    shapes = [(rows, *assignment.input_shape) for rows in (spec.batch, settings.n0)]
    parts = split_first_layer(assignment.model) if settings.noise_bank else None
    sampler: Counter
    if parts is not None:
        bank = BankSampler(
            *parts, spec.form, settings.smoothing, source, assignment.classes, shapes,
            evict=settings.mode == "fixed",
        )  # fmt: skip
        sampler, answer = bank, bank.classes_of(noise, inputs)
    else:
        classify = ExecutedClassifier(assignment.model, spec.form, shapes)
        sampler = Sampler(
            classify, settings.smoothing, source, assignment.classes, assignment.input_shape,
            bank=settings.noise_bank,
        )  # fmt: skip
        answer = classify(noise + inputs)
    if check_digest(answer) != spec.check:
        raise UserError(
            "this worker computes other classes on the check batch than the model did when the "
            f"certification began ({spec.machine}, torch {spec.torch_version}): use workers of "
            "one kind" + (", or no noise bank" if settings.noise_bank else "")
        )
    return sampler


def _check_parts(assignment: Assignment) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise and inputs of the check batch, under a random unit used for nothing else."""
    settings = assignment.settings
    rows = settings.executed_batch(int(np.prod(assignment.input_shape)))
    inputs = torch.from_numpy(assignment.check_inputs)
    noise: Noise = settings.smoothing
    values = torch.empty(rows, *assignment.input_shape)
    words = units.RandomWords(values.numel() + values.numel() % 2)
    noise.draw(words.fill(assignment.source.key(None, units.CHECK, 0)), values.numpy().reshape(-1))
    return values, inputs[torch.arange(rows) % len(inputs)]
