"""The worker of an attack: holds the classifier, attacks blocks of inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dpdist.adversary.balls import Ball, box_of, distance
from dpdist.adversary.randomised import RandomisedClassifier
from dpdist.attacks.counting import Counted, Counters, MeanScores, count
from dpdist.attacks.evasion import attack
from dpdist.base.tensors import tensor_of
from dpdist.certification.certificate import Counter
from dpdist.certification.classifier import quiet_threads
from dpdist.certification.cohen import predict
from dpdist.certification.fresh_process import alone_by
from dpdist.certification.reexecution import Reexecution
from dpdist.certification.sampling import Randomness
from dpdist.models import NO_CLASS, predicted_classes
from dpdist.randomness.units import UnitSource

if TYPE_CHECKING:
    from dpdist.attacks.settings import AttackSettings


@dataclass(frozen=True)
class Block:
    """Rows low..high-1 of the attacked inputs, and what is done to them.

    sizes: float64 (high - low,); all equal but in a check of certificates.
    """

    attack: str
    low: int
    high: int
    sizes: np.ndarray

    @classmethod
    def of(cls, attack: str, rows: slice, sizes: np.ndarray) -> Block:
        """Of these rows, with the sizes of all inputs."""
        part = sizes[rows]
        return cls(attack, rows.start, rows.start + len(part), part)


@dataclass(frozen=True)
class Assignment:
    """All that workers share; put into the object store once: workers need no data set.

    inputs: float32 (N, ...), the attacked ones. indices: (N,), their places in the data set.
    targets: int64 (N,), the classes that attacks lead away from.
    """

    counted: Counted
    settings: AttackSettings
    source: UnitSource
    inputs: np.ndarray
    indices: np.ndarray
    targets: np.ndarray


class Attacker:
    """Finds attacked points of blocks, always with the same random numbers for the same input."""

    def __init__(self, assignment: Assignment) -> None:
        quiet_threads()
        self._assignment = assignment
        self._randomness = Randomness(assignment.source)
        counted = assignment.counted
        counted.code.check("this worker")
        model = counted.model.eval().requires_grad_(False)
        self.classifier = RandomisedClassifier(model, counted.place, counted.by_votes)

    def centres(self, block: Block) -> Tensor:
        """float32 (B, ...): the block's inputs."""
        return torch.from_numpy(self._assignment.inputs[block.low : block.high].copy())

    def points(self, block: Block, targets: Tensor) -> Tensor:
        """float32 (B, ...), within the block's sizes; raises RuntimeError if they were not."""
        centres = self.centres(block)
        if block.attack == "none":
            return centres
        settings = self._assignment.settings
        found = attack(
            block.attack,  # type: ignore[arg-type]
            self.classifier,
            Ball(centres, torch.tensor(block.sizes), settings.norm, box_of(centres)),
            targets,
            self._assignment.indices[block.low : block.high].tolist(),
            self._randomness,
            steps=settings.steps,
            draws=settings.draws,
            restarts=settings.restarts,
            step_scale=settings.step_scale,
        )
        if not (distance(found.numpy(), centres.numpy(), settings.norm) <= block.sizes).all():
            raise RuntimeError(f"{block.attack} left its ball")
        return found


class Worker:
    """Called with a block; returns a JSON row for each of its inputs."""

    def __init__(self, assignment: Assignment) -> None:
        self._attacker = Attacker(assignment)
        self._assignment, self._settings = assignment, assignment.settings
        self._counts: Counter | None = None
        self._inspect: Reexecution | None = None
        counted = assignment.counted
        if counted.place.random:
            counters = Counters(counted, assignment.source)
            self._counts, self._batch = counters.named("answers"), counters.batch
        elif counted.choice is not None:
            others = tensor_of(counted.inputs)
            self._inspect = Reexecution(
                counted.choice, counted.model, self._logits, others,
                alone=alone_by("eager", counted.code),
            )  # fmt: skip

    def __call__(self, block: Block) -> list[dict[str, Any]]:
        centres = self._attacker.centres(block)
        indices, labels = (
            values[block.low : block.high].tolist()
            for values in (self._assignment.indices, self._assignment.targets)
        )
        targets = torch.tensor(labels)
        if self._settings.labels == "predicted" and block.attack != "none":
            found = self._answers(centres, indices, "targets")[0]
            targets = torch.where(found == NO_CLASS, targets, found)  # there is no answer to leave
        points = self._attacker.points(block, targets)
        stage = f"predict/{block.attack}/{float(block.sizes[0]).hex()}"
        predictions, hits = self._answers(points, indices, stage)
        moved = distance(points.numpy(), centres.numpy(), self._settings.norm)
        return [
            {
                "index": index,
                "label": labels[i],
                "attack": block.attack,
                "size": float(block.sizes[i]),
                "distance": float(moved[i]),
                "prediction": int(predictions[i]),
                "hits": int(hits[i]),
                "n": 1 if self._counts is None else self._settings.n,
            }
            for i, index in enumerate(indices)
        ]

    def _logits(self, points: Tensor) -> Tensor:
        with torch.inference_mode():
            return self._attacker.classifier.logits(points, None)

    def _answers(self, points: Tensor, indices: list[int], stage: str) -> tuple[Tensor, Tensor]:
        """Return classes and how many draws say the most frequent one, int64 (B,) each.

        Deterministic: the largest logit, -1 where the logits are not finite. Randomised, with fresh
        noise, -1 where it abstains: PREDICT (Cohen et al., ICML 2019) by votes, the class of the
        largest mean score where the certificates of the same noise speak of that. For the attack's
        own targets what seems likeliest.
        """
        if self._counts is None:
            logits = self._logits(points)
            if self._inspect is not None:
                self._inspect(indices[0], stage, 0, points, logits, len(points))
            found = predicted_classes(logits)
            return found, (found != NO_CLASS).long()
        n, alpha = self._settings.n, None if stage == "targets" else self._settings.alpha
        labels, hits = [], []
        for x, index in zip(points, indices, strict=True):
            asked = self._counts, x, index, stage, n, self._batch
            if self._assignment.counted.by_votes:
                histogram = count(*asked)
                labels.append(predict(histogram, 1.0 if alpha is None else alpha, n))
            else:
                scores = MeanScores.of(*asked)
                histogram = scores.histogram
                labels.append(scores.largest if alpha is None else scores.predict(alpha))
            hits.append(int(histogram.max()))
        return torch.tensor(labels), torch.tensor(hits)
