"""Many trainings at once, by torch.func over parameters and keys: for audits of small models.

From the real step: keys and Poisson sampling, the clip factors, the noise and its grid, the fixed
divisor, the optimizer. Not from it: the per-example gradients come from torch.func and are added up
in one product, where a run has `dpdist.gradients.engine`, blocks and an all-reduce; there is no
ledger. A test holds one training against the loop's. The mechanism audit drives the loop's own
pieces.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpdist import data
from dpdist.audits.scores import log_odds
from dpdist.base.errors import UserError
from dpdist.certification.classifier import quiet_threads
from dpdist.gradients.clipping import clipping_for, rounding_slack, sum_slack
from dpdist.gradients.forms import squared_lengths
from dpdist.gradients.noise import add_noise
from dpdist.gradients.perturbations import Draws
from dpdist.gradients.sampling import poisson_sample
from dpdist.methods.base import Fixed
from dpdist.privacy.audit_bounds import log_likelihood_ratio
from dpdist.privacy.plan import PrivacyPlan, StepPlan
from dpdist.randomness.keys import derive_key
from dpdist.runs.recipe import Recipe
from dpdist.training.building import initial_model, model_spec
from dpdist.training.canaries import places
from dpdist.training.optimizer import FlatOptimizer

_BYTES = 1 << 28  # of per-example gradients at once
_HUGE = 1e300


@dataclass(frozen=True)
class TrainerSetup:
    """All that the trainings of an audit have in common. key: of the audit; training number m has
    its own. copies: of the canary, in every second training. gradient: the canary is no record but
    a gradient of the clip's norm on one coordinate, and the adversary sees every noisy sum and
    knows the records' part of it."""

    recipe: Recipe
    plan: PrivacyPlan
    dataset: data.Dataset
    key: bytes
    copies: int
    gradient: bool


class Trainer:
    """Called with the numbers of trainings; returns a row of each: odd ones have the canary."""

    def __init__(self, shared: TrainerSetup) -> None:
        quiet_threads()
        self._shared = shared
        self.trainings = Trainings(shared.recipe, shared.plan, shared.dataset)
        self._canary = None if shared.gradient else canary(shared.dataset)
        self._coordinate = int(places(1, len(self.trainings.initial))[0])

    def __call__(self, numbers: range) -> list[dict[str, Any]]:
        shared, trainings = self._shared, self.trainings
        keys = [derive_key(shared.key, "training", number) for number in numbers]
        copies = [shared.copies * (number % 2) for number in numbers]
        if self._canary is None:
            scores = trainings.run(keys, "audit", copies, coordinate=self._coordinate)[1]
        else:
            flat, _ = trainings.run(keys, "audit", copies, canary=self._canary)
            scores = trainings.odds(flat, *self._canary)
        scores = np.nan_to_num(scores, nan=0.0, posinf=_HUGE, neginf=-_HUGE)  # of what diverged
        return [
            {"trial": number, "present": number % 2, "score": float(score)}
            for number, score in zip(numbers, scores, strict=True)
        ]


class Trainings:
    """Trainings of one recipe on the same records. Raises UserError where a step of the recipe is
    more than clipped gradients of its loss plus noise."""

    def __init__(self, recipe: Recipe, plan: PrivacyPlan, dataset: data.Dataset) -> None:
        self._recipe, self._plan = recipe, plan
        model = initial_model(recipe, model_spec(recipe, dataset))
        self._model, self._losses = model, recipe.method.task().losses
        self._named = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
        self._sizes = [p.numel() for p in self._named.values()]
        self._clipping = clipping_for(recipe.privacy.clipping, recipe.privacy.clip_norm)
        rate = recipe.training.learning_rate
        draws = recipe.method.perturbation(plan.step(0), rate, Fixed(model)) if plan.steps else None
        own = type(draws) is not Draws or recipe.training.augmented or not recipe.method.stepwise
        if own or recipe.privacy.clipping == "per-layer":
            raise UserError(
                f"{recipe.name}: many runs at once: method {recipe.method.name} with clipping "
                f"{recipe.privacy.clipping} draws noise, crops or flips, clips by layer, or takes "
                "no steps, which only the loop does; audit it by canaries in one run"
            )
        everything = slice(0, len(dataset))
        self._inputs, self._labels = dataset.batch(everything), dataset.targets(everything)
        self.initial = torch.cat([p.reshape(-1) for p in self._named.values()])

    def run(
        self,
        keys: list[bytes],
        attempt: str,
        copies: list[int],
        canary: tuple[Tensor, int] | None = None,
        coordinate: int | None = None,
    ) -> tuple[Tensor, np.ndarray]:
        """Train one model for each key; copies (M,) of the canary, an input with its label or a
        coordinate of the gradient, come after the records.

        Returns the parameters (M, size), and how much all noisy sums speak for the coordinate (M,),
        to an adversary who knows the records and which of them joined each step: the guarantee
        holds against it, so it subtracts their part.
        """
        plan, flat = self._plan, self.initial.repeat(len(keys), 1)
        optimizer = FlatOptimizer(self._recipe.training, plan.steps, flat)
        inputs, labels = self._inputs, self._labels
        if canary is not None:
            inputs = torch.cat([inputs, canary[0][None]])
            labels = torch.cat([labels, torch.tensor([canary[1]])])
        evidence = np.zeros(len(keys))
        for step in range(plan.steps):
            todo = plan.step(step)
            members = [self._members(k, attempt, step, todo, c) for k, c in zip(keys, copies)]  # noqa: B905
            sums = self._sums(flat, inputs, labels, members, coordinate is None)
            known = None if coordinate is None else sums[:, coordinate].copy()
            for row, (key, chosen) in enumerate(zip(keys, members, strict=True)):
                if coordinate is not None:
                    count = int((chosen >= len(self._labels)).sum())
                    sums[row, coordinate] += todo.clip_norm * count
                noise_key = derive_key(key, "noise", attempt, step)
                sums[row] = add_noise(sums[row], noise_key, todo.noise_std)
            if known is not None:
                evidence += _evidence(sums[:, coordinate] - known, todo)
            gradient = torch.from_numpy(sums / todo.expected_batch).to(flat)
            optimizer.update(flat, gradient, step)
        return optimizer.result(flat), evidence

    def _members(
        self, key: bytes, attempt: str, step: int, todo: StepPlan, copies: int
    ) -> np.ndarray:
        records = len(self._labels) + copies
        sample_key = derive_key(key, "sample", attempt, step)
        return poisson_sample(
            sample_key, 0, records, todo.sample_rate, batch_cap=todo.batch_cap, records=records
        )

    def _sums(
        self, flat: Tensor, inputs: Tensor, labels: Tensor, members: list[np.ndarray], seen: bool
    ) -> np.ndarray:
        """Clipped sums, float64 (M, size). seen: whether what comes after the records has an input;
        its copies share one."""
        last = len(self._labels)
        rows = [np.minimum(m, last) if seen else m[m < last] for m in members]
        widest = max(1, max(map(len, rows)))
        index = torch.zeros(len(rows), widest, dtype=torch.int64)
        real = torch.zeros(len(rows), widest)
        for place, chosen in enumerate(rows):
            index[place, : len(chosen)] = torch.from_numpy(chosen)
            real[place, : len(chosen)] = 1
        each = max(1, _BYTES // (4 * widest * flat.shape[1]))
        per_model = torch.func.vmap(self._clipped_sum)
        parts = [
            per_model(flat[some], inputs[index[some]], labels[index[some]], real[some])
            for some in torch.arange(len(rows)).split(each)
        ]
        return torch.cat(parts).numpy()

    def _clipped_sum(self, flat: Tensor, inputs: Tensor, labels: Tensor, real: Tensor) -> Tensor:
        """Of one model: (size,), (B, ...), (B,), (B,) to float64 (size,)."""
        gradients, _ = torch.func.vmap(
            torch.func.grad(self._loss, has_aux=True), in_dims=(None, 0, 0)
        )(flat, inputs, labels)
        squared = squared_lengths(gradients)[None]
        slack = rounding_slack(torch.float32) + sum_slack(torch.float32)
        finite = squared.isfinite()
        factors = self._clipping.factors(torch.where(finite, squared, 0.0), slack)
        weights = ((factors * finite)[0] * real).to(gradients)
        return (weights @ gradients.nan_to_num(0.0, 0.0, 0.0)).double()

    def _loss(self, flat: Tensor, example: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self._forward(flat, example[None])
        return self._losses(outputs, label[None])[0], outputs

    def _forward(self, flat: Tensor, inputs: Tensor) -> Tensor:
        pieces = flat.split(self._sizes)
        values = {
            name: piece.view(p.shape)
            for (name, p), piece in zip(self._named.items(), pieces, strict=True)
        }
        return torch.func.functional_call(self._model, values, (inputs,))

    def odds(self, flat: Tensor, example: Tensor, label: int) -> np.ndarray:
        """Every model's log-odds of an example's label: (M,)."""
        with torch.no_grad():
            logits = torch.cat([self._forward(one, example[None]) for one in flat])
        return log_odds(logits.double().numpy(), np.full(len(flat), label))


def _evidence(sums: np.ndarray, todo: StepPlan) -> np.ndarray:
    """How much each noisy sum speaks for a gradient of the clip's norm; without noise, itself."""
    along = sums / todo.clip_norm if math.isfinite(todo.clip_norm) else sums
    if not todo.noise_multiplier:
        return along
    return log_likelihood_ratio(along, todo.noise_multiplier, todo.sample_rate)


def canary(dataset: data.Dataset) -> tuple[Tensor, int]:
    """An input unlike all others, with the rarest label: the data's least singular direction, of
    their mean norm (ClipBKD: Jagielski, Ullman and Oprea 2020, Section 4)."""
    everything = slice(0, len(dataset))
    inputs = dataset.batch(everything).double()
    rows = inputs.flatten(1)
    direction = torch.linalg.eigh(rows.T @ rows)[1][:, 0]
    direction *= torch.sign(direction[direction.abs().argmax()])
    labels = np.bincount(np.asarray(dataset.labels), minlength=dataset.classes)
    scaled = direction * rows.norm(dim=1).mean()
    return scaled.view(inputs.shape[1:]).float(), int(labels.argmin())
