"""TransDenoiser's Algorithm 1: how much of a step's noise the input noise is said to be worth.

To first order, input noise moves a record's gradient by A_i b (`MixedJacobian`); the paper counts
that as privacy noise and adds less of its own. Not sound: how much is added depends on the private
records, A A^T is singular, and the first order is not the distribution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from dpdist.gradients.clipping import Clipping
from dpdist.gradients.engine import ClippedSum, GradientEngine
from dpdist.gradients.mixed_jacobian import (
    MixedJacobian,
    SmallestEigenvalue,
    settled_by_symmetry,
    smallest_eigenvalue,
)
from dpdist.gradients.noise import add_noise
from dpdist.gradients.perturbations import InputDraws
from dpdist.gradients.task import squared_error
from dpdist.privacy.mechanisms import mixed_gaussian_added_std
from dpdist.randomness.keys import derive_key


class Options(Protocol):
    """Those of `dpdist.methods.transdenoiser.TransDenoiser` that decide the split."""

    @property
    def sigma(self) -> float: ...
    @property
    def xi_low(self) -> float: ...
    @property
    def xi_up(self) -> float: ...
    @property
    def credit_steps(self) -> bool: ...
    @property
    def thin(self) -> bool: ...
    @property
    def iterations(self) -> int: ...


def remainders(denoiser: nn.Module, inputs: Tensor, noisy: Tensor) -> Tensor:
    """o_i = l(z_i) - [l(x_i) + (z_i - x_i) . grad_x l(x_i)]: (B,). l(z) = ||g(z) - x||^2.

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
class Split:
    """What Algorithm 1 decides in one step. PRIVATE: all of it is computed from the records.

    s_min: of (1/B^2) sum A_i A_i^T over the records with o_i >= 0. added: deviation of the noise
    added to their sum, in units of xi (xi_up: nothing was credited).
    """

    nonnegative: int
    negative: int
    s_min: SmallestEigenvalue
    added: float


def split(
    denoiser: nn.Module,
    inputs: Tensor,
    noisy: Tensor,
    options: Options,
    *,
    batch: float,
    steps: int,
) -> Split:
    """The split of one batch: inputs x, noisy z (B, ...).

    batch: B, the divisor of M; steps: the run's T, credited as the paper does unless an option
    says otherwise. Units are the paper's: M is that of the mean gradient, xi that of the sum.
    """
    nonnegative = remainders(denoiser, inputs, noisy) >= 0
    count = int(nonnegative.sum())
    credit = steps if options.credit_steps else 1
    if not count:
        nobody = SmallestEigenvalue(0.0, True, "no record with a remainder >= 0")
        return Split(0, len(inputs), nobody, options.xi_up)
    chosen = inputs[nonnegative]

    def too_little(bound: float) -> bool:
        return math.sqrt(credit * bound / batch**2) * options.sigma < options.xi_low

    found = None if options.thin else settled_by_symmetry(denoiser, squared_error, chosen)
    if found is None:
        found = smallest_eigenvalue(
            MixedJacobian(denoiser, squared_error, chosen, chosen),
            thin=options.thin,
            iterations=options.iterations,
            enough=too_little,
        )
    s_min = SmallestEigenvalue(found.value / batch**2, found.exact, found.why)
    added = mixed_gaussian_added_std(
        options.xi_low, options.xi_up, s_min.value, options.sigma, steps=credit
    )
    return Split(count, len(inputs) - count, s_min, added)


class SplitEngine(GradientEngine):
    """The engine of variant full: its sums contain Algorithm 1's noise already.

    Records with a negative remainder share N(0, (xi_up C)^2), the others N(0, (added C)^2), C the
    clip norm: the paper assumes a C-Lipschitz loss instead of clipping. NOT private.
    expected_batch, steps: of the plan. One worker only: noise is added to its sum.
    """

    def __init__(
        self,
        denoiser: nn.Module,
        options: Options,
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
    ) -> ClippedSum:
        clipped = super().clipped_sum(
            inputs, targets, draw_key=draw_key, record_ids=record_ids, out=out
        )
        if not len(inputs):
            return clipped
        draws = self.draws
        assert isinstance(draws, InputDraws)
        noisy = draws.inputs(inputs, record_ids, draw_key, 0)
        found = split(
            self.model, inputs, noisy, self.options,
            batch=self.expected_batch, steps=self.steps,
        )  # fmt: skip
        noise = np.zeros(self.size)
        for count, xi, name in (
            (found.nonnegative, found.added, "nonnegative"),
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
            "s_min_why": found.s_min.why,
            "added_xi": found.added,
        }
        return ClippedSum(
            clipped.flat, clipped.examples, clipped.nonfinite, clipped.loss_sum, details
        )
