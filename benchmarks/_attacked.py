"""Attacks on a model in this process, as a worker of `dpdist attack` makes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from torch import nn

from dpdist.attacks.job import Assignment, AttackBatch, Worker, choose_backend, counting_assignment
from dpdist.attacks.settings import AttackSettings
from dpdist.certification.inference import ClassifierSpec
from dpdist.data import Dataset
from dpdist.randomness.keys import StreamKeys
from dpdist.randomness.noise_location import find_noise_location


def attack_hits(
    model: nn.Module,
    test: Dataset,
    settings: AttackSettings,
    source: StreamKeys,
    backend: ClassifierSpec | None = None,
) -> Iterator[tuple[str, float, np.ndarray]]:
    """Yield each attack and size, and whether each chosen input is answered rightly; 0: no attack.

    backend: how a model with noise of its own is executed; None chooses.
    """
    chosen = np.asarray(settings.indices(len(test)))
    x, labels = test.batch(chosen).numpy(), np.asarray(test.labels, np.int64)[chosen]
    place = find_noise_location(model)
    counted = counting_assignment(
        model, place, test.classes, x[:64], source, n=settings.n, backend=backend
    )
    if place.is_random:
        counted = replace(counted, spec=choose_backend(counted, backend))
    by_vote = place.predicts_by_vote
    worker = Worker(Assignment(counted, place, settings, x, chosen, labels, by_vote))
    each = settings.batch_size(x[0].size)
    parts = [slice(low, low + each) for low in range(0, len(x), each)]
    for name, size in settings.attack_sizes:
        sizes = np.full(len(x), size)
        answers = [one for part in parts for one in worker(AttackBatch(name, part, sizes[part]))]
        yield name, size, np.array([one["prediction"] == one["label"] for one in answers])
