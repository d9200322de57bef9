"""Execute DPAL as published: its noise, losses, examples, predictions and certified accuracy.

For comparison only: no statement of it holds. Everything is on inputs in [-1, 1], and equations
are those of the ICLR 2020 submission. A prediction is a product of two passes, one with fresh
noise on the input, one with fresh noise on the code, each a part 1 / psi of the training's noise
and centered on it (its Appendix L). Sizes are Laplace sizes of PixelDP for each pass, added up
(Proposition 1, Equations 11 to 15).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpdist.attacks.gradient_attacks import (
    ATTACKS_FROM_CENTER,
    Ball,
    Gradient,
    RandomizedClassifier,
    ascend,
    loss_gradient,
)
from dpdist.core.errors import UserError
from dpdist.core.files import write_json
from dpdist.methods.base import Execution, WorkerInputs
from dpdist.models import predicted_classes
from dpdist.papers.stobatch.dpal import (
    ACCURACY_FILE,
    DPAL,
    dpal_encoder_sensitivity,
    dpal_output_sensitivity,
)
from dpdist.papers.stobatch.network import DPALNetwork
from dpdist.randomness.keys import derive_key, stream_words

# --- hooks of a training ----------------------------------------------------------------------


class DPALExecution(Execution[DPAL]):
    """Algorithm 1's steps, and the accuracy that the paper measures at their end."""

    def project_parameters(self, model: nn.Module) -> Callable[[], None]:
        """Return the function that scales each filter of the encoder back into its norm.

        Raises UserError for another network, or other sensitivities than the paper's formulas
        give for it.
        """
        network = check_network(self.method, model)
        return lambda: project_filter_norms(network.encoder, self.method.weight_norm)

    def own_steps(self, given: WorkerInputs) -> DPALSteps:
        """Return the steps of Algorithm 1."""
        return DPALSteps(self.method, given)

    def measure(self, given: WorkerInputs, stage: str) -> None:
        """Measure the model on worker 0 once all steps are taken."""
        if given.rank == 0 and stage == "after":
            measure_accuracy(self.method, given)


# --- training steps ---------------------------------------------------------------------------


_PASS = 512  # records
_SAVED = 100  # steps between checkpoints


def check_network(method: DPAL, model: nn.Module) -> DPALNetwork:
    """Return the network of a model.

    Raises UserError for a different network, or for sensitivities that do not fit it.
    """
    found = [module for module in model.modules() if isinstance(module, DPALNetwork)]
    if not found:
        raise UserError("method dpal trains the paper's network: take model dpal-cnn")
    network = found[0]
    patch, units = network.encoder.weight[0].numel(), network.hidden_noise[0].numel()
    right = {
        "encoder_sensitivity": (method.encoder_sensitivity, dpal_encoder_sensitivity(patch, units)),
        "output_sensitivity": (
            method.output_sensitivity,
            dpal_output_sensitivity(network.head.in_features),
        ),
    }
    for key, (given, formula) in right.items():
        if given != formula:
            raise UserError(
                f"method.{key}: the paper's formula gives {formula} for this network, got {given:g}"
            )
    return network


def project_filter_norms(encoder: nn.Conv2d, norm: float) -> None:
    """Scale each filter back, in place, into this L1 norm."""
    with torch.no_grad():
        own = encoder.weight.abs().sum((1, 2, 3), keepdim=True)
        encoder.weight.mul_((norm / own.clamp(min=1e-12)).clamp(max=1.0))


def laplace(key: bytes, purpose: str, shape: torch.Size, scale: float) -> Tensor:
    """Return Laplace noise, float32 of this shape."""
    philox = np.random.Philox(key=int.from_bytes(derive_key(key, purpose)[:16], "little"))
    return torch.from_numpy(np.random.Generator(philox).laplace(0.0, scale, shape)).float()


# --- the losses, summed over records


def reconstruction_loss(network: DPALNetwork, noisy: Tensor, code: Tensor) -> Tensor:
    """Return R-bar (Equations 5 to 7), the first-order expansion of the cross-entropy between
    inputs and their reconstruction, without its constant."""
    return ((0.5 - noisy) * network.decode(code)).sum()


def classification_loss(
    head: nn.Linear, last_hidden: Tensor, labels: Tensor, noise: Tensor
) -> Tensor:
    """Return L-bar (Equations 8 to 10), the second-order expansion of the sigmoid cross-entropy.

    It is without its constant. noise: chi_3 / m, (classes, |h_pi|), on each record's coefficients
    of the labels.
    """
    z = head(last_hidden)
    own = z.gather(1, labels[:, None]).sum() + len(last_hidden) * (noise * head.weight).sum()
    result: Tensor = (z / 2 + z.square() / 8).sum() - own
    return result


class _NoisyInputNetwork(nn.Module):
    """The network on inputs that have their noise."""

    def __init__(self, network: DPALNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, noisy: Tensor) -> Tensor:
        return self.network.logits(noisy)


def adversarial_examples(network: DPALNetwork, noisy: Tensor, method: DPAL, key: bytes) -> Tensor:
    """Return adversarial copies of noisy inputs (B, ...), away from the predicted classes.

    As in the paper, each attack gets an equal part of the batch, by position.
    """
    drawn = (int(stream_words(derive_key(key, "dpal/size"), 0, 1)[0]) + 1) / 2**64
    classifier = RandomizedClassifier(_NoisyInputNetwork(network))
    with torch.no_grad():
        predicted = network.logits(noisy).argmax(1)
    parts = zip(
        method.attacks,
        noisy.tensor_split(len(method.attacks)),
        predicted.tensor_split(len(method.attacks)),
        strict=True,
    )
    found = []
    for name, center, targets in parts:
        size = torch.full((len(center),), 2 * method.size * drawn).double().to(center.device)
        ball = Ball(center, size, "linf", None)

        def gradient(point: Tensor, step: int, targets: Tensor = targets) -> Tensor:
            return loss_gradient(classifier, point, targets, None)

        found.append(_attack(name, gradient, ball, method.steps, key))
    return torch.cat(found)


def _attack(name: str, gradient: Gradient, ball: Ball, steps: int, key: bytes) -> Tensor:
    if len(ball.center) == 0:
        return ball.center
    if name in ATTACKS_FROM_CENTER:
        return ATTACKS_FROM_CENTER[name](gradient, ball, steps)
    count = ball.center.numel()
    uniform = torch.from_numpy(stream_words(derive_key(key, "dpal/start"), 0, count) / 2.0**64)
    there = uniform.view(len(ball.center), -1).to(ball.center.device)
    start = ball.random_point(there, ball.center)
    return ascend(gradient, ball, start, steps, ball.size / steps)


# --- a training


class DPALSteps:
    """The steps of one worker. The network's noise, the batches and chi_3 are drawn here, from the
    run's key, once for all steps and attempts."""

    save_every = _SAVED

    def __init__(self, method: DPAL, given: WorkerInputs) -> None:
        self._method, self._given = method, given
        self.slots: Mapping[str, Tensor] = {}
        self._network = network = check_network(method, given.model)
        self._batch = batch = round(given.plan.step(0).expected_batch)
        key, scale = given.state.key, method.noise_scale(batch)
        network.input_noise.copy_(laplace(key, "chi_1", network.input_noise.shape, scale))
        network.hidden_noise.copy_(laplace(key, "chi_2", network.hidden_noise.shape, 2 * scale))
        out = method.output_sensitivity / (method.epsilon_2 * batch)
        self._chi_3 = laplace(key, "chi_3", network.head.weight.shape, out).to(network.input_noise)
        records = len(given.records)
        rank = np.argsort(
            np.argsort(stream_words(derive_key(key, "batches"), 0, records), kind="stable")
        )
        self._batch_of, self._batches = rank // batch, max(1, records // batch)

    def sums(self, number: int) -> Tensor:
        """Return the gradients of batch `number`, and of adversarial examples of the next one."""
        given = self._given
        rows = given.sum_rows(sum(each.numel() for each in given.parameters))
        for row, begin, end in given.shards.local_shards:
            for noisy, labels in self._batch_passes(number, begin, end):
                rows[row] += self._gradient(number, noisy, labels, 1.0)
            if number < self._method.pretraining or not self._method.xi:
                continue
            key = given.draw_key(number, row)
            for place, (noisy, labels) in enumerate(self._batch_passes(number + 1, begin, end)):
                adversarial = adversarial_examples(
                    self._network, noisy, self._method, derive_key(key, "pass", place)
                )
                rows[row] += self._gradient(number, adversarial, labels, self._method.xi)
        return rows

    def update(self, number: int, released: Tensor) -> Tensor:
        """Return the mean over the batch."""
        return (released / self._batch).to(self._given.parameters[0])

    def _batch_passes(self, step: int, begin: int, end: int) -> list[tuple[Tensor, Tensor]]:
        """Return this shard's part of the step's batch, in passes of noisy inputs and labels."""
        given, network = self._given, self._network
        joined = self._batch_of[begin:end] == step % self._batches
        members = given.canaries.inputs_for(begin + np.flatnonzero(joined))
        found = []
        for start in range(0, len(members), _PASS):
            some = members[start : start + _PASS]
            inputs = network.center(given.records.batch(some).to(network.input_noise))
            labels = given.canaries.labels_for(some, given.records.targets(some))
            found.append((2 * inputs - 1 + network.input_noise, labels.to(inputs.device)))
        return found

    def _gradient(self, step: int, noisy: Tensor, labels: Tensor, weight: float) -> Tensor:
        """Return the gradient summed over records, float64 (size,).

        The encoder's is that of its own loss, the rest is that of the second loss. weight: weight
        of the second loss, of 1 + xi in all.
        """
        network, parameters = self._network, self._given.parameters
        code = network.encode(noisy)
        loss = reconstruction_loss(network, noisy, code)
        if step >= self._method.pretraining:
            last = network.last_hidden(code.detach())
            share = weight / (1 + self._method.xi)
            loss = loss + share * classification_loss(network.head, last, labels, self._chi_3)
        parts = torch.autograd.grad(loss, parameters, allow_unused=True)
        return torch.cat(
            [
                (torch.zeros_like(p) if g is None else g).double().flatten()
                for g, p in zip(parts, parameters, strict=True)
            ]
        )


def taylor_errors(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return the errors of the first- and second-order expansions of ln(1 + e^z), elementwise.

    They are at most z^2 / 8 and z^4 / 192 (the paper's Equations 29 and 30).
    """
    exact = nn.functional.softplus(z.double()) - math.log(2) - z.double() / 2
    return exact, z.double().square() / 8 - exact


# --- predictions and certified accuracy -------------------------------------------------------


_CONFIDENCE = 0.95


def mean_scores(
    network: DPALNetwork, inputs: Tensor, key: bytes, method: DPAL, scale: float
) -> Tensor:
    """Return mean products of the two passes' scores over the draws: float64 (B, classes).

    inputs: in [-1, 1]. scale: scale of the training's noise on inputs.
    """
    center = inputs + network.input_noise
    total = torch.zeros(len(inputs), network.head.out_features, dtype=torch.float64)
    with torch.no_grad():
        for draw in range(method.augmentations):
            own = derive_key(key, "dpal/draw", draw)
            code = network.encode(center)
            first = laplace(own, "input", center.shape, scale / method.psi).to(center)
            second = laplace(own, "code", code.shape, 2 * scale / method.psi).to(center)
            passes = (network.logits(center + first), network.logits(center, second))
            products = torch.stack([z.double().softmax(1) for z in passes]).prod(0)
            total += products.cpu()
    return total / method.augmentations


def robustness_budget(scores: Tensor, draws: int) -> Tensor:
    """Return the largest epsilon_r with E_lb[k] > e^(2 epsilon_r) max E_ub[i], float64 (B,).

    Equation 14, with Hoeffding bounds; 0 if no epsilon_r satisfies it.
    """
    classes = scores.shape[1]
    off = math.sqrt(math.log(2 * classes / (1 - _CONFIDENCE)) / (2 * draws))
    best = scores.topk(2, dim=1).values
    low, high = (best[:, 0] - off).clamp(min=0.0), (best[:, 1] + off).clamp(max=1.0)
    return ((low / high).clamp(min=1.0).log() / 2).nan_to_num(0.0)


def published_certified_sizes(
    budget: Tensor, size: float, scale: float, inputs: int, hidden: int, norm: float
) -> tuple[Tensor, Tensor]:
    """Return kappa and phi at these epsilon_r (Equations 11 to 13).

    Delta_x = size * inputs, Delta_h = hidden * norm; scale: scale of the noise on inputs.
    """
    return scale * budget / (size * inputs), 2 * scale * budget / (hidden * norm)


def measure_accuracy(method: DPAL, given: WorkerInputs) -> None:
    """Write the paper's accuracies and certified shares, on test images and attacked copies."""
    network, plan, test = check_network(method, given.model), given.plan, given.public_test()
    count = min(method.images, len(test))
    inputs = 2 * network.center(test.batch(slice(0, count)).to(network.input_noise)) - 1
    labels = test.targets(slice(0, count)).to(inputs.device)
    scale, key = method.noise_scale(plan.step(0).expected_batch), given.state.key
    first, second = (error.sum() / count for error in _errors(network, inputs))
    found: dict[str, Any] = {
        "images": count, "psi": method.psi, "augmentations": method.augmentations,
        "reconstruction_error": float(first), "output_error": float(second), "attacked": [],
    }  # fmt: skip
    for size in (0.0, *method.sizes):
        seen = (
            inputs if size == 0 else _attack_inputs(network, inputs, labels, 2 * size, method.steps)
        )
        scores = mean_scores(network, seen, derive_key(key, "measured", str(size)), method, scale)
        right = predicted_classes(scores) == labels.cpu()
        if size == 0:
            found["right"] = float(right.double().mean())
            continue
        kappa, phi = published_certified_sizes(
            robustness_budget(scores, method.augmentations), 2 * size, scale, inputs[0].numel(),
            network.hidden_noise[0].numel(), method.weight_norm,
        )  # fmt: skip
        harmonic = kappa * phi / (kappa + phi).clamp(min=1e-300)
        counted = {"printed": kappa + phi >= 2 * size, "harmonic": harmonic >= 2 * size}
        shares = {name: float((right & held).double().mean()) for name, held in counted.items()}
        found["attacked"].append({"size": size, "right": float(right.double().mean()), **shares})
    write_json(given.private_folder / ACCURACY_FILE, found)


def _errors(network: DPALNetwork, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the errors of the two expansions, by number of a reconstruction and by logit."""
    with torch.no_grad():
        code = network.encode(inputs + network.input_noise)
        said, z = network.decode(code), network.head(network.last_hidden(code))
    return taylor_errors(said)[0], taylor_errors(z)[1]


def _attack_inputs(
    network: DPALNetwork, inputs: Tensor, labels: Tensor, size: float, steps: int
) -> Tensor:
    """Return inputs after PGD on the network with only the training's noise."""
    classifier = RandomizedClassifier(network)
    sizes = torch.full((len(inputs),), size).double().to(inputs.device)
    ball = Ball(inputs, sizes, "linf", (-1.0, 1.0))
    return ascend(
        lambda point, step: loss_gradient(classifier, point, labels, None),
        ball,
        inputs,
        steps,
        2.5 * ball.size / steps,
    )
