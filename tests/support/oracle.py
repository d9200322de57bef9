"""One training step worked out the slow way: one example at a time, float64, torch's optimizers.

Nothing of the engine, the loop or the optimizer is used. What is taken from the run are the keys it
used (`support.keys`), because they are secret by design; the random numbers are the library's own
functions of them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpdist.gradients import noise, perturbations
from dpdist.models import require_split
from dpdist.randomness import keys
from dpdist.runs.recipe import Recipe
from dpdist.training.job import TrainJob
from dpdist.training.model_setup import initial_model, model_spec
from dpdist.training.records import records_with_canaries
from dpdist.training.worker import read_method_state
from support.key_recorder import NOISE, SAMPLING, KeyRecorder

_ROOM = 1 + 2.0**-8  # that the clip leaves for rounding, as docs/explanation/gradients.md states


class ReferenceTraining:
    """Works out each step of a job from the keys that a recorder saw in it."""

    def __init__(self, job: TrainJob) -> None:
        self.job, self.recipe, self.plan = job, job.recipe, job.plan
        self.dataset = records_with_canaries(job.recipe, job.source)
        model = initial_model(job.recipe, model_spec(job.recipe, self.dataset))
        self.model = job.recipe.method.execution().task().trained_module(model).double().eval()
        self.whole = model
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.flat = flatten(self.parameters).clone()
        self._project_parameters()
        # A tensor's step, whatever its shape: all optimizers here work entry by entry.
        self.leaf = self.flat.clone().requires_grad_()
        self.optimizer = torch_optimizer(job.recipe, self.leaf)
        self.average = self.flat.clone()

    def learning_rate(self, t: int) -> float:
        training, done = self.recipe.training, t / self.plan.steps
        factors = {
            "constant": 1.0,
            "linear": 1 - done,
            "cosine": 0.5 + math.cos(math.pi * done) / 2,
            "step": multi_step(training, self.plan.steps, t),
        }
        return training.learning_rate * factors[training.schedule]

    def members(self, recorder: KeyRecorder, t: int) -> np.ndarray:
        """Record i joins iff the step's stream gives it a number below the rate."""
        (key,) = recorder.keys_opened_by(SAMPLING)
        uniform = keys.stream_words(key, 0, self.plan.records).astype(np.float64) * 2.0**-64
        batch = np.flatnonzero(uniform < self.plan.step(t).sample_rate)
        cap = self.plan.step(t).batch_cap
        if cap is not None and len(batch) > cap:
            batch = np.sort(batch[np.argsort(uniform[batch])[:cap]])
        return batch

    def noisy_sum(self, recorder: KeyRecorder, t: int) -> np.ndarray:
        """Sum of clipped gradients plus the step's noise: float64 (size,)."""
        draw_key = find_draw_key(recorder)
        total = np.zeros(len(self.flat))
        for i in self.members(recorder, t):
            total += self.clipped(int(i), draw_key, t)
        std = self.plan.step(t).noise_std
        if std:
            (key,) = recorder.keys_opened_by(NOISE)
            total += std * noise.standard_normal(key, 0, len(total))
        return total

    def step(self, recorder: KeyRecorder, t: int, gradient: np.ndarray) -> None:
        """Move on by a noisy gradient."""
        rate = self.learning_rate(t)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with torch.no_grad():
            self.leaf.copy_(self.flat)
        self.leaf.grad = torch.from_numpy(gradient)
        self.optimizer.step()
        self.flat = self.leaf.detach().clone()
        self._project_parameters()
        if self.recipe.training.ema is not None:
            decay = min(self.recipe.training.ema, (t + 1) / (t + 10))
            self.average = decay * self.average + (1 - decay) * self.flat

    def set_parameters(self, flat: Tensor) -> None:
        """Go on from the run's own parameters, so that rounding does not add up."""
        self.flat = flat.double().clone()

    def _project_parameters(self) -> None:
        limit = getattr(self.recipe.method, "sensitivity", None)
        if limit is None:
            return
        load(self.parameters, self.flat)
        weight = next(
            m for m in self.model.modules() if isinstance(m, nn.Conv2d | nn.Linear)
        ).weight
        layer = next(m for m in self.model.modules() if isinstance(m, nn.Conv2d | nn.Linear))
        norm = float(torch.linalg.matrix_norm(weight.detach().flatten(1), 2))
        if isinstance(layer, nn.Conv2d):
            sides = zip(layer.kernel_size, layer.stride, strict=True)
            norm *= math.sqrt(math.prod(math.ceil(k / s) for k, s in sides))
        if norm > limit:
            weight.data.mul_(limit / norm)
        self.flat = flatten(self.parameters).clone()

    # --- one example

    def clipped(self, i: int, draw_key: bytes, t: int) -> np.ndarray:
        gradient = self.gradient(i, draw_key, t)
        privacy = self.recipe.privacy
        norm, limit = np.linalg.norm(gradient) * _ROOM, privacy.clip_norm
        if privacy.clipping == "none":
            return gradient
        if privacy.clipping == "automatic":
            return gradient * limit / (norm + 0.01)
        if privacy.clipping == "flat":
            return gradient * min(1.0, limit / norm)
        return self._per_layer(gradient, limit)

    def _per_layer(self, gradient: np.ndarray, limit: float) -> np.ndarray:
        layers: dict[str, list[int]] = {}
        for name, p in self.model.named_parameters():
            layers.setdefault(name.rpartition(".")[0], []).append(p.numel())
        own = limit / math.sqrt(len(layers))
        pieces = np.split(gradient, np.cumsum([sum(sizes) for sizes in layers.values()])[:-1])
        return np.concatenate([p * min(1.0, own / (np.linalg.norm(p) * _ROOM)) for p in pieces])

    def gradient(self, i: int, draw_key: bytes, t: int) -> np.ndarray:
        """Of record i: the mean (or sum) over its draws."""
        method: Any = self.recipe.method
        x = self.dataset.batch(np.array([i])).double()
        label = self.dataset.targets(np.array([i]))
        count = getattr(method, "augmentations", 1)
        total = np.zeros(len(self.flat))
        for draw in range(count):
            total += self._one_draw(x, label, i, draw_key, draw, t)
        scale = getattr(method, "gradient_scale", 1.0)
        return total * scale / (1 if getattr(method, "aggregate", "mean") == "sum" else count)

    def _one_draw(
        self, x: Tensor, label: Tensor, i: int, draw_key: bytes, draw: int, t: int
    ) -> np.ndarray:
        load(self.parameters, self.flat + self._parameter_noise(i, draw_key, draw, t))
        seen = self._perturbed_input(x, i, draw_key, draw)
        handle = self._hidden_hook(i, draw_key, draw)
        try:
            loss = self._loss(self.model(seen), x, label, i, draw_key)
        finally:
            if handle is not None:
                handle.remove()
        gradients = torch.autograd.grad(loss, self.parameters)
        return flatten(list(gradients)).numpy()

    def _loss(self, output: Tensor, x: Tensor, label: Tensor, i: int, draw_key: bytes) -> Tensor:
        if self.recipe.method.name == "transdenoiser":
            return (output - x).square().sum()
        if self.dataset.target_kind != "class":
            return targets_loss(self.recipe.training.loss, output[0], label[0].double())
        losses = nn.functional.cross_entropy(output, label, reduction="sum")
        weight = getattr(self.recipe.method, "consistency", 0.0)
        if weight:
            with torch.no_grad():
                count = self.recipe.method.augmentations  # type: ignore[union-attr]
                copies = [self._perturbed_input(x, i, draw_key, k) for k in range(count)]
                mean = torch.stack([self.model(copy).softmax(1) for copy in copies]).mean(0)
            losses = losses - weight * (mean * output.log_softmax(1)).sum()
        return losses

    def _perturbed_input(self, x: Tensor, i: int, draw_key: bytes, draw: int) -> Tensor:
        """Record i, (1, ...), in one draw: cropped and flipped, then with noise on it."""
        training = self.recipe.training
        if training.has_augmentation:
            words = perturbations.words_per_record(
                draw_key, "draws/augment", draw, torch.tensor([i]), 3
            )[0].tolist()
            border = training.crop
            down, right = (word % (2 * border + 1) for word in words[:2])
            room = torch.zeros(*x.shape[:2], x.shape[2] + 2 * border, x.shape[3] + 2 * border)
            room = room.to(x)
            room[:, :, border : border + x.shape[2], border : border + x.shape[3]] = x
            x = room[:, :, down : down + x.shape[2], right : right + x.shape[3]]
            if training.flip and words[2] >= 2**63:
                x = x.flip(3)
        return x + self._input_noise(x, i, draw_key, draw)

    # --- its noises

    def _parameter_noise(self, i: int, draw_key: bytes, draw: int, t: int) -> Tensor:
        method: Any = self.recipe.method
        if method.name != "dplis":
            return torch.zeros(())
        plan = self.plan.step(t)
        scale = method.radius * self.learning_rate(t) / plan.expected_batch
        scale *= plan.noise_multiplier * self.recipe.privacy.clip_norm
        size = len(self.flat)
        if method.per_example:
            normals = perturbations.standard_normal_per_record(
                draw_key, "draws/parameters", draw, torch.tensor([i]), size
            )[0]
        else:
            normals = perturbations.standard_normal_shared(draw_key, "draws/parameters", draw, size)
        return scale * normals.double()

    def _input_noise(self, x: Tensor, i: int, draw_key: bytes, draw: int) -> Tensor:
        method: Any = self.recipe.method
        if method.name not in ("input-noise", "transdenoiser") and not (
            method.name == "dplis" and method.sigma
        ):
            return torch.zeros(())
        normals = perturbations.standard_normal_per_record(
            draw_key, "draws/inputs", draw, torch.tensor([i]), x.numel()
        )
        return method.sigma * normals.view_as(x).double()

    def _hidden_hook(self, i: int, draw_key: bytes, draw: int) -> Any:
        if not hasattr(self.recipe.method, "sensitivity"):
            return None
        std = read_method_state(self.job.folder)["std"]

        def add(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
            normals = perturbations.standard_normal_per_record(
                draw_key, "draws/hidden", draw, torch.tensor([i]), output.numel()
            )
            return output + std.double() * normals.view_as(output).double()

        return self.model.get_submodule(require_split(self.whole).name).register_forward_hook(
            add, prepend=True
        )


def targets_loss(name: str, output: Tensor, wanted: Tensor) -> Tensor:
    """Return one record's loss from its K outputs and targets, by the formulas."""
    error = output - wanted
    if name in ("mse", "support.losses:squared"):
        return (error**2).sum() / len(error)
    if name == "huber":
        small = error.abs() <= 1
        return torch.where(small, error**2 / 2, error.abs() - 0.5).sum() / len(error)
    chance = 1 / (1 + torch.exp(-output))
    return -(wanted * chance.log() + (1 - wanted) * (1 - chance).log()).sum() / len(error)


def find_draw_key(recorder: KeyRecorder) -> bytes:
    """The key under which this step's perturbations were drawn; b"" when there were none."""
    parents = {d.parent for d in recorder.derived if d.purpose.startswith("draws/")}
    assert len(parents) <= 1, "perturbations of one step come from one key"
    return parents.pop() if parents else b""


def flatten(tensors: list[Any]) -> Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def load(parameters: list[Tensor], flat: Tensor) -> None:
    pieces = flat.split([p.numel() for p in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.data.copy_(piece.view(parameter.shape))


def multi_step(training: Any, steps: int, t: int) -> float:
    """What torch's MultiStepLR multiplies the rate of step t by."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    milestones = [round(passed * steps) for passed in training.milestones]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, training.factor)
    for _ in range(t):
        optimizer.step()
        schedule.step()
    return schedule.get_last_lr()[0]


def torch_optimizer(recipe: Recipe, leaf: Tensor) -> torch.optim.Optimizer:
    training = recipe.training
    rate, decay = training.learning_rate, training.weight_decay
    if training.optimizer == "adam":
        return torch.optim.Adam([leaf], lr=rate, weight_decay=decay)
    if training.optimizer == "adamw":
        return torch.optim.AdamW([leaf], lr=rate, weight_decay=decay)
    return torch.optim.SGD([leaf], lr=rate, momentum=training.momentum, weight_decay=decay)
