"""Draws of adversarial training: a record and an adversarial example of it, each with fresh noise.

Row b of everything here is a function of record b's input, its id, the step's key and the model as
it is: of no label, no other record, and no place in a batch. All rows of a pass are attacked in
one ascent, whichever attack each has, so that the pass keeps its shape and, with it, the last bits
of each row: a sign makes a whole step of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from dpdist.attacks.gradient_attacks import (
    Ball,
    RandomizedClassifier,
    ascend,
    input_range,
    loss_gradient,
    per_row,
    with_momentum,
)
from dpdist.core.errors import UserError
from dpdist.gradients.perturbations import ModulePerturbation, standard_normal_per_record
from dpdist.gradients.sampling import keyed_hash
from dpdist.methods.base import Execution, MethodState
from dpdist.models import ModelSpec, attach_noise, require_split
from dpdist.models.noise import BLOCK_NOISE_ATTRIBUTE, project_first_layer_norm
from dpdist.papers.stobatch.stobatch import StoBatch
from dpdist.privacy.plan import StepPlan
from dpdist.randomness.keys import derive_key, stream_words
from dpdist.randomness.noise_location import InputNoise, ModuleNoise, NoiseLocation, NoNoise

# Each attack: whether it starts at a random point of the ball, and its momentum.
ENSEMBLE = {"i-fgsm": (False, 0.0), "mim": (False, 1.0), "pgd": (True, 0.0)}


# --- hooks of a training ----------------------------------------------------------------------


class StoBatchExecution(Execution[StoBatch]):
    """Steps on records and adversarial examples of them, with noise where it certifies."""

    def noise_location(self, model: nn.Module) -> NoiseLocation:
        """Return the place where the model is random.

        Raises UserError for a model without such a place.
        """
        if self.method.hidden_noise_std:
            name = require_split(model).name
            return ModuleNoise(
                {name: self.method.hidden_noise_std}, input_std=self.method.input_noise_std
            )
        return InputNoise(self.method.input_noise_std) if self.method.input_noise_std else NoNoise()

    def perturbation(
        self, step: StepPlan, learning_rate: float, state: MethodState
    ) -> AdversarialDraws:
        """Return the record and its adversarial example, at the released parameters."""
        return AdversarialDraws(state.model, self.noise_location(state.model), self.method)

    def project_parameters(self, model: nn.Module) -> Callable[[], None]:
        """Return the function that scales the first layer down if noise is added after it."""
        if not self.method.hidden_noise_std:
            return lambda: None
        split = require_split(model)
        return lambda: project_first_layer_norm(split, self.method.sensitivity)

    def finalize(self, spec: ModelSpec, state: MethodState) -> ModelSpec:
        """Leave the noise in the model; return its spec with it."""
        model = state.model
        if self.method.hidden_noise_std and not self.method.input_noise_std:
            shape = require_split(model).hidden_shape(spec.input_shape)
            attach_noise(model, torch.full(shape, self.method.hidden_noise_std))
            return replace(spec, hidden_noise=True)
        self.noise_location(model).attach(model)
        return replace(spec, block_noise=getattr(model, BLOCK_NOISE_ATTRIBUTE, None))


# --- draws ------------------------------------------------------------------------------------


class AdversarialDraws(ModulePerturbation):
    """Draw 0 is the record, draw 1 an adversarial example of it, at shares 1 and xi of 1 + xi.

    model: the network that is trained, at its released parameters; only read, into a copy that is
    attacked. location: where it is random. method: what else is asked for.
    """

    def __init__(self, model: nn.Module, location: NoiseLocation, method: StoBatch) -> None:
        xi = method.xi
        super().__init__(2 if xi else 1, location.as_module_noise(), aggregate="sum")
        self.draw_weights = (1 / (1 + xi), xi / (1 + xi)) if xi else (1.0,)
        self.method = method
        self.model = model
        # On a CPU convolutions and pooling are several times faster in this format.
        own = copy.deepcopy(model).requires_grad_(False).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.classifier = RandomizedClassifier(own, location)

    def perturb_inputs(
        self, inputs: Tensor, record_ids: Tensor | None, draw_key: bytes, draw: int
    ) -> Tensor:
        """Return the inputs, or adversarial examples of them, with noise."""
        if record_ids is None:
            raise UserError("record_ids: must be given for adversarial draws, which they key")
        seen = self.adversarial_examples(inputs, record_ids, draw_key) if draw else inputs
        return super().perturb_inputs(seen, record_ids, draw_key, draw)

    def attack_size(self, draw_key: bytes) -> float:
        """Return the size of all balls of a step."""
        low, high = self.method.size
        (word,) = stream_words(derive_key(draw_key, "stobatch/size"), 0, 1).tolist()
        result: float = low + (high - low) * word / 2**64
        return result

    def attack_indices(self, record_ids: Tensor, draw_key: bytes) -> Tensor:
        """Return the number of each record's attack in this step, int64 (B,)."""
        hashes = keyed_hash(derive_key(draw_key, "stobatch/attack"), record_ids.cpu().numpy())
        return torch.from_numpy((hashes % len(self.method.attacks)).astype("int64"))

    def adversarial_examples(self, inputs: Tensor, record_ids: Tensor, draw_key: bytes) -> Tensor:
        """Return adversarial examples of inputs (B, ...): float32, inside each one's ball."""
        for old, new in zip(
            self.classifier.model.parameters(), self.model.parameters(), strict=True
        ):
            old.copy_(new.detach())
        one = self.attack_size(draw_key)
        size = torch.full((len(inputs),), one, dtype=torch.float64, device=inputs.device)
        ball = Ball(inputs, size, self.method.norm, input_range(inputs))
        normals = self._noise(inputs, record_ids, draw_key)
        targets = self._predicted(inputs, normals)
        settings = [ENSEMBLE[name] for name in self.method.attacks]
        own = self.attack_indices(record_ids, draw_key)
        random, momentum = (
            torch.tensor(column)[own].to(size) for column in zip(*settings, strict=True)
        )

        def gradient(point: Tensor, step: int) -> Tensor:
            return loss_gradient(self.classifier, point, targets, normals)

        start = inputs.double()
        if any(begins for begins, _ in settings):
            chosen = per_row(random, start) > 0
            start = torch.where(chosen, self._random_points(ball, record_ids, draw_key), start)
        steps = self.method.steps
        found = ascend(
            with_momentum(gradient, ball, momentum), ball, start, steps, ball.size / steps
        )
        return torch.empty_like(inputs).copy_(found)  # in the inputs' memory format

    def _noise(self, inputs: Tensor, record_ids: Tensor, draw_key: bytes) -> Tensor | None:
        """Return the attack's own noise, one for all its steps (Salman et al., NeurIPS 2019).

        `eot` draws of each record are adjacent.
        """
        shape = self.classifier.noise_shape(inputs.shape[1:])
        if shape is None:
            return None
        count, size = self.method.eot, torch.Size(shape).numel()
        draws = [
            standard_normal_per_record(draw_key, "stobatch/eot", draw, record_ids, size)
            for draw in range(count)
        ]
        return torch.stack(draws, 1).view(-1, *shape).to(inputs.device)

    def _predicted(self, inputs: Tensor, normals: Tensor | None) -> Tensor:
        """Return the class of the largest mean score under the attack's noise: int64 (B,)."""
        count = 1 if normals is None else self.method.eot
        with torch.no_grad():
            logits = self.classifier.logits(inputs.repeat_interleave(count, 0), normals)
        return logits.double().softmax(1).view(len(inputs), count, -1).mean(1).argmax(1)

    def _random_points(self, ball: Ball, record_ids: Tensor, draw_key: bytes) -> Tensor:
        numbers = ball.center[0].numel()
        normals = standard_normal_per_record(
            draw_key, "stobatch/start", 0, record_ids, numbers + 1
        ).to(ball.center.device)
        # Rolled by one: the first uniform, which L2 balls take, is of no normal of the direction.
        uniforms = torch.special.ndtr(normals.double().roll(1, 1))
        return ball.random_point(uniforms[:, :numbers], normals[:, :numbers])
