"""TransDenoiser's Algorithm 1: the part of a step's noise that input noise is said to replace.

A_i = d(grad_theta l) / d(input) of record i, a (w, v) matrix: w parameters, v numbers in an input.
To first order, input noise b moves the record's gradient by A_i b, which has covariance s^2 A_i
A_i^T (Section 4, its "transformed" noise); the paper counts that as privacy noise and adds less of
its own. Not sound: the added amount depends on the private records, A A^T is singular, and the
first order is not the distribution.

A is never formed: A y and A^T u are two nested derivatives each (Pearlmutter 1994), and give the
smallest eigenvalue of A A^T.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpdist.gradients.clipping import Clipping
from dpdist.gradients.engine import (
    ClippedSum,
    GradientEngine,
    TrainingObjective,
    UserMembers,
    input_targets,
    squared_error,
)
from dpdist.gradients.hooks import Losses, run_with_values
from dpdist.gradients.noise import add_noise
from dpdist.gradients.perturbations import InputPerturbation, Perturbation
from dpdist.methods.base import Execution, MethodState
from dpdist.models import DENOISER
from dpdist.papers.transdenoiser.method import TransDenoiser, mixed_gaussian_added_std
from dpdist.privacy.plan import StepPlan
from dpdist.randomness.keys import derive_key

# --- hooks of a training ----------------------------------------------------------------------


class TransDenoiserExecution(Execution[TransDenoiser]):
    """Steps of the denoiser's squared error, in variant full by Algorithm 1."""

    def task(self) -> TrainingObjective:
        """Return the task of giving the clean inputs."""
        return TrainingObjective(squared_error, DENOISER, input_targets)

    def perturbation(
        self, step: StepPlan, learning_rate: float, state: MethodState
    ) -> Perturbation:
        """Return noisy copies of each input."""
        return InputPerturbation(self.method.augmentations, self.method.sigma)

    def engine(
        self,
        model: nn.Module,
        clipping: Clipping,
        *,
        expected_batch: float,
        steps: int,
        micro_batch: int | None = None,
        **others: Any,
    ) -> GradientEngine:
        """Return the usual engine, in variant full that of Algorithm 1."""
        if self.method.variant != "full":
            return super().engine(
                model,
                clipping,
                expected_batch=expected_batch,
                steps=steps,
                micro_batch=micro_batch,
                **others,
            )
        return SplitEngine(
            self.task().trained_module(model),
            self.method,
            clipping=clipping,
            expected_batch=expected_batch,
            steps=steps,
            micro_batch=micro_batch,
        )


# --- the mixed Jacobian -----------------------------------------------------------------------


_EXACT_UP_TO = 256  # eigenvalues of a matrix of this size cost less than a Lanczos run
_PROBE = 4  # records that confirm a null direction


class MixedJacobian:
    """A = [A_1 ... A_n] of n records: `matvec` is A y (w,), `rmatvec` is A^T u (n, v).

    model: its trainable parameters are theta, in the model's order. objective: per-example losses
    of (outputs, targets); the targets are held fixed while inputs move.
    """

    def __init__(
        self, model: nn.Module, objective: Losses, inputs: Tensor, targets: Tensor
    ) -> None:
        named = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
        self._parameters = {name: value.clone().requires_grad_() for name, value in named.items()}
        self._inputs = inputs.detach().clone().requires_grad_()
        self.num_records = len(inputs)
        self.num_parameters = sum(value.numel() for value in named.values())  # w
        self.num_features = inputs[0].numel()  # v
        with torch.enable_grad():
            outputs = run_with_values(model, self._parameters, lambda: model(self._inputs))
            self.losses = objective(outputs, targets)
            by_parameters = torch.autograd.grad(
                self.losses.sum(), [*self._parameters.values()], create_graph=True
            )
            (self.input_gradients,) = torch.autograd.grad(
                self.losses.sum(), [self._inputs], create_graph=True
            )
            self._by_parameters = torch.cat([piece.reshape(-1) for piece in by_parameters])

    def matvec(self, y: Tensor) -> Tensor:
        """Return sum_i A_i y_i: from y (n, v) to (w,)."""
        product = (self.input_gradients * y.view_as(self.input_gradients)).sum()
        pieces = torch.autograd.grad(
            product, [*self._parameters.values()], retain_graph=True, materialize_grads=True
        )
        return torch.cat([piece.reshape(-1) for piece in pieces])

    def rmatvec(self, u: Tensor) -> Tensor:
        """Return A_i^T u for every record: from u (w,) to (n, v)."""
        (gradient,) = torch.autograd.grad(
            self._by_parameters @ u, [self._inputs], retain_graph=True, materialize_grads=True
        )
        return gradient.reshape(self.num_records, self.num_features)

    def gram_matvec(self, u: Tensor) -> Tensor:
        """Return A A^T u: from (w,) to (w,)."""
        return self.matvec(self.rmatvec(u))


@dataclass(frozen=True)
class SmallestEigenvalue:
    """The smallest eigenvalue of a positive semi-definite matrix.

    value: never below the true one but for rounding.

    exact: it is the true one. reason: what decided it.
    """

    value: float
    exact: bool
    reason: str


def smallest_eigenvalue(
    jacobian: MixedJacobian,
    *,
    thin: bool = False,
    iterations: int = 20,
    is_sufficient: Callable[[float], bool] = lambda bound: False,
) -> SmallestEigenvalue:
    """Return S_min of A A^T, the covariance of the transformed noise in its weakest direction.

    Exactly 0 when the rank, at most n v, is below w. Otherwise eigenvalues of small matrices, and
    Lanczos with `iterations` products on large ones: a Ritz value, which is an upper bound. enough:
    stop as soon as a bound satisfies it.

    thin: the smallest of the min(w, n v) values that a thin singular value decomposition of A
    returns, squared. That is not S_min where n v < w: there it hides w - n v zeros.
    """
    rank = jacobian.num_records * jacobian.num_features
    if rank < jacobian.num_parameters and not thin:
        why = f"rank at most {rank:,} < {jacobian.num_parameters:,} parameters"
        return SmallestEigenvalue(0.0, True, why)
    shape = (jacobian.num_records, jacobian.num_features)
    size = min(rank, jacobian.num_parameters)
    like = jacobian.input_gradients

    def product(v: Tensor) -> Tensor:
        if size == jacobian.num_parameters:
            return jacobian.gram_matvec(v)
        return jacobian.rmatvec(jacobian.matvec(v.view(shape))).reshape(-1)

    if size <= _EXACT_UP_TO:
        unit = torch.eye(size, dtype=like.dtype, device=like.device)
        columns = [product(column) for column in unit]
        return SmallestEigenvalue(_smallest(torch.stack(columns)), True, f"all {size} eigenvalues")
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(size, generator=generator, dtype=torch.float64)
    value, steps = lanczos_smallest(
        lambda v: product(v.to(like)).double().to(v.device), start, iterations, is_sufficient
    )
    return SmallestEigenvalue(value, False, f"at most, after {steps} Lanczos steps")


def zero_by_symmetry(
    network: nn.Module, objective: Losses, inputs: Tensor
) -> SmallestEigenvalue | None:
    """Return S_min = 0 for a network whose parameters can move without effect; else None.

    `rescaling_directions` are in the null space of every A_i^T, whatever the records: the loss does
    not change along them, so neither does its gradient in the input. inputs (n, ...), of which a
    few confirm it numerically, with themselves as targets.
    """
    directions = rescaling_directions(network)
    if directions is None:
        return None
    some = inputs[:_PROBE]
    jacobian = MixedJacobian(network, objective, some, some)
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(jacobian.num_parameters, generator=generator, dtype=torch.float64)
    rounding = (
        1e3 * torch.finfo(jacobian.input_gradients.dtype).eps * _transposed_norm(jacobian, random)
    )
    if not any(_transposed_norm(jacobian, direction) <= rounding for direction in directions):
        return None
    return SmallestEigenvalue(0.0, True, "a symmetry of the network: a direction without effect")


def _transposed_norm(jacobian: MixedJacobian, direction: Tensor) -> float:
    unit = (direction / direction.norm()).to(jacobian.input_gradients)
    return float(jacobian.rmatvec(unit).double().norm())


def _smallest(matrix: Tensor) -> float:
    symmetric = (matrix + matrix.T).double() / 2
    return max(0.0, float(torch.linalg.eigvalsh(symmetric)[0]))


def lanczos_smallest(
    product: Callable[[Tensor], Tensor],
    start: Tensor,
    iterations: int,
    is_sufficient: Callable[[float], bool] = lambda bound: False,
) -> tuple[float, int]:
    """Return the smallest Ritz value of a symmetric positive semi-definite map, and its products.

    Lanczos with full reorthogonalization in float64 (Golub and Van Loan, Section 10.1). A Ritz
    value is a Rayleigh quotient, so it is never below the smallest eigenvalue; equal to it once
    the Krylov space is exhausted.
    """
    basis = [start.double() / start.double().norm()]
    diagonal: list[float] = []
    beside: list[float] = []
    value = float("inf")
    for step in range(min(iterations, len(start))):
        image = product(basis[-1])
        diagonal.append(float(image @ basis[-1]))
        matrix = np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1)
        value = max(0.0, float(np.linalg.eigvalsh(matrix)[0]))
        if is_sufficient(value):
            return value, step + 1
        for _ in range(2):
            for vector in basis:
                image = image - (image @ vector) * vector
        length = float(image.norm())
        if length <= 1e-12 * max(abs(d) for d in diagonal):
            return value, step + 1
        beside.append(length)
        basis.append(image / length)
    return value, len(diagonal)


def rescaling_directions(network: nn.Module) -> Tensor | None:
    """Return directions of the parameters that do not change the network, one per hidden channel.

    Between two affine layers with a ReLU, multiplying a channel's incoming weights and bias by c
    and its outgoing weights by 1/c changes nothing: to first order the direction (incoming,
    -outgoing). Returns float64 (k, w), or None for networks that are not such a sequence.
    """
    if type(network) is not nn.Sequential:
        return None
    layers = list(network)
    if not all(p.requires_grad for p in network.parameters()):
        return None
    slots, offset = {}, 0
    for name, parameter in network.named_parameters():
        slots[name] = offset
        offset += parameter.numel()
    found = []
    for place in range(len(layers) - 2):
        before, between, after = layers[place : place + 3]
        if not (_is_affine(before) and type(between) is nn.ReLU and _is_affine(after)):
            continue
        for channel in range(_outgoing(before)):
            direction = torch.zeros(offset, dtype=torch.float64)
            for name, sign, layer, axis in (
                (f"{place}.weight", 1.0, before, 1 if _is_transposed(before) else 0),
                (f"{place}.bias", 1.0, before, 0),
                (f"{place + 2}.weight", -1.0, after, 0 if _is_transposed(after) else 1),
            ):
                value = getattr(layer, name.rpartition(".")[2])
                if value is None:
                    continue
                piece = torch.zeros(value.shape, dtype=torch.float64)
                piece.select(axis, channel).copy_(value.detach().select(axis, channel))
                direction[slots[name] : slots[name] + value.numel()] = sign * piece.reshape(-1)
            if direction.norm() > 0:
                found.append(direction)
    return torch.stack(found) if found else None


def _is_affine(layer: nn.Module) -> bool:
    kinds = nn.Linear | nn.Conv2d | nn.ConvTranspose2d
    return isinstance(layer, kinds) and getattr(layer, "groups", 1) == 1


def _is_transposed(layer: nn.Module) -> bool:
    return isinstance(layer, nn.ConvTranspose2d)


def _outgoing(layer: nn.Module) -> int:
    return layer.out_features if isinstance(layer, nn.Linear) else int(layer.out_channels)  # type: ignore[arg-type]


# --- the split of the noise -------------------------------------------------------------------


def remainders(denoiser: nn.Module, inputs: Tensor, noisy: Tensor) -> Tensor:
    """Return o_i = l(z_i) - [l(x_i) + (z_i - x_i) . grad_x l(x_i)], (B,); l(z) = ||g(z) - x||^2.

    inputs: x, noisy: z, both (B, ...). The gradient is that of z -> l(z) at z = x.
    """
    at = inputs.detach().clone().requires_grad_()
    with torch.enable_grad():
        clean = squared_error(denoiser(at), inputs)
        (slope,) = torch.autograd.grad(clean.sum(), at)
    with torch.no_grad():
        there = squared_error(denoiser(noisy), inputs)
        return there - clean - (slope * (noisy - inputs)).flatten(1).sum(1)


@dataclass(frozen=True)
class NoiseSplit:
    """The values that Algorithm 1 decides in one step. PRIVATE: all are computed from the records.

    s_min: of (1/B^2) sum A_i A_i^T over the records with o_i >= 0. added_std: deviation of the
    noise added to their sum, in units of xi (xi_up: nothing was credited).
    """

    nonnegative: int
    negative: int
    s_min: SmallestEigenvalue
    added_std: float


def split_noise(
    denoiser: nn.Module,
    inputs: Tensor,
    noisy: Tensor,
    options: TransDenoiser,
    *,
    batch: float,
    steps: int,
) -> NoiseSplit:
    """Return the split of one batch: inputs x, noisy z (B, ...).

    batch: B, the divisor of M; steps: the run's T, credited as the paper does unless an option
    says otherwise. Units are the paper's: M is that of the mean gradient, xi that of the sum.
    """
    nonnegative = remainders(denoiser, inputs, noisy) >= 0
    count = int(nonnegative.sum())
    credit = steps if options.credit_steps else 1
    if not count:
        nothing = SmallestEigenvalue(0.0, True, "no record with a remainder >= 0")
        return NoiseSplit(0, len(inputs), nothing, options.xi_up)
    chosen = inputs[nonnegative]

    def too_little(bound: float) -> bool:
        return math.sqrt(credit * bound / batch**2) * options.sigma < options.xi_low

    found = None if options.thin else zero_by_symmetry(denoiser, squared_error, chosen)
    if found is None:
        found = smallest_eigenvalue(
            MixedJacobian(denoiser, squared_error, chosen, chosen),
            thin=options.thin,
            iterations=options.iterations,
            is_sufficient=too_little,
        )
    s_min = SmallestEigenvalue(found.value / batch**2, found.exact, found.reason)
    added = mixed_gaussian_added_std(
        options.xi_low, options.xi_up, s_min.value, options.sigma, steps=credit
    )
    return NoiseSplit(count, len(inputs) - count, s_min, added)


class SplitEngine(GradientEngine):
    """The engine of variant full: its sums contain Algorithm 1's noise already.

    Records with a negative remainder share N(0, (xi_up C)^2), the others N(0, (added C)^2), C the
    clip norm: the paper assumes a C-Lipschitz loss instead of clipping. NOT private.
    expected_batch, steps: of the plan. One worker only: noise is added to its sum.
    """

    def __init__(
        self,
        denoiser: nn.Module,
        options: TransDenoiser,
        *,
        clipping: Clipping,
        expected_batch: float,
        steps: int,
        micro_batch: int | None = None,
    ) -> None:
        super().__init__(denoiser, squared_error, clipping=clipping, micro_batch=micro_batch)
        self.options, self.expected_batch, self.steps = options, expected_batch, steps

    def clipped_sum(
        self,
        inputs: Tensor,
        targets: Tensor,
        *,
        draw_key: bytes = b"",
        record_ids: Tensor | None = None,
        out: Tensor | None = None,
        members: UserMembers | None = None,
    ) -> ClippedSum:
        """Return the clipped sum with the noise of the split in it."""
        if members is not None:
            raise NotImplementedError(
                "the noise of this method is made for single records, not for groups"
            )
        clipped = super().clipped_sum(
            inputs, targets, draw_key=draw_key, record_ids=record_ids, out=out
        )
        if not len(inputs):
            return clipped
        draws = self.perturbation
        assert isinstance(draws, InputPerturbation)
        noisy = draws.perturb_inputs(inputs, record_ids, draw_key, 0)
        found = split_noise(
            self.model,
            inputs,
            noisy,
            self.options,
            batch=self.expected_batch,
            steps=self.steps,
        )
        noise = np.zeros(self.size)
        for count, xi, name in (
            (found.nonnegative, found.added_std, "nonnegative"),
            (found.negative, self.options.xi_up, "negative"),
        ):
            if count:
                key = derive_key(draw_key, "transdenoiser", name)
                noise = add_noise(noise, key, xi * self.sensitivity)
        clipped.flat.add_(torch.from_numpy(noise).to(clipped.flat))
        details = {
            "nonnegative": found.nonnegative,
            "s_min": found.s_min.value,
            "s_min_exact": found.s_min.exact,
            "s_min_why": found.s_min.reason,
            "added_xi": found.added_std,
        }
        return ClippedSum(
            clipped.flat, clipped.examples, clipped.nonfinite, clipped.loss_sum, details
        )
