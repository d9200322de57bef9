"""The worker of a bank: trains a shadow model by the recipe's own loop, and scores every record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.numpy import save
from torch import nn

from dpdist import data, models
from dpdist.audits.scores import log_odds, top_probabilities
from dpdist.certification.classifier import quiet_threads
from dpdist.certification.expected import expected_log_scores
from dpdist.privacy.plan import PrivacyPlan
from dpdist.randomness.keys import derive_key
from dpdist.randomness.places import place_of
from dpdist.runs.recipe import Recipe
from dpdist.training.many import files_of, trained_here
from dpdist.training.records import evaluation_data, source_of, training_data

if TYPE_CHECKING:
    from dpdist.audits.games import Game

_BATCH = 1000


@dataclass(frozen=True)
class ShadowSetup:
    """All that the trainings of a bank have in common. Each is a function of this and its number.

    recipes, plans: of the recipe's own models and of plain ones. passes: of a model with noise of
    its own, over which probabilities are averaged; each is a scoring of its own. population: test
    records that are scored beside.
    """

    game: Game
    key: bytes
    recipes: tuple[Recipe, Recipe]
    plans: tuple[PrivacyPlan, PrivacyPlan]
    passes: tuple[int, ...]
    population: int


class ShadowTrainer:
    """Called with a model's number; returns its files, by name."""

    def __init__(self, shared: ShadowSetup) -> None:
        quiet_threads()
        self._shared, recipe = shared, shared.recipes[0]
        source = source_of(recipe)
        self._records = training_data(recipe, source)
        self._test = evaluation_data(recipe, source)

    def __call__(self, number: int) -> dict[str, bytes]:
        shared, plain = self._shared, self._shared.game.plain(number)
        key = derive_key(shared.key, "shadow", number)
        recipe, plan = shared.recipes[plain], shared.plans[plain]
        members = shared.game.members(shared.key, number, len(self._records))
        with trained_here(recipe, plan, self._records, members, key) as folder:
            model = models.load(folder, trusted_factory=recipe.model.name)
            files = files_of(folder)
        seed = derive_key(key, "scores").hex()
        return files | {"scores.safetensors": save(self._scores(model, number, seed))}

    def _scores(self, model: nn.Module, number: int, seed: str) -> dict[str, np.ndarray]:
        """member (N,) uint8; for each number of passes the log-odds (N + Z,) and the largest
        probabilities (N + Z, 3), the Z population points last."""
        shared, records = self._shared, len(self._records)
        members = shared.game.members(shared.key, number, records)
        found: dict[str, np.ndarray] = {"member": members.astype(np.uint8)}
        noisy = place_of(model).random
        # One pass of a plain model is its mean of many, beside a target with noise of its own.
        several = noisy or shared.recipes[0].method.carries_noise
        for passes in shared.passes if several else shared.passes[:1]:
            parts = [
                part
                for dataset in (self._records, self._test.first(shared.population))
                for part in _passes(model, dataset, passes if noisy else None, seed)
            ]
            found[f"phi/{passes}"] = np.concatenate([phi for phi, _ in parts])
            found[f"top/{passes}"] = np.concatenate([top for _, top in parts])
        return found


def _passes(model: nn.Module, dataset: data.Dataset, passes: int | None, seed: str) -> Any:
    """Log-odds and largest probabilities, batch after batch. passes: None without noise."""
    for start in range(0, len(dataset), _BATCH):
        rows = slice(start, start + _BATCH)
        inputs = dataset.batch(rows)
        with torch.inference_mode():
            if passes is None:
                logits = model(inputs)
            else:
                one = f"{seed}/{dataset.name}/{passes}"
                logits = expected_log_scores(model, inputs, passes, one, start)
        values = logits.double().numpy()
        yield log_odds(values, np.asarray(dataset.labels[rows])), top_probabilities(values)
