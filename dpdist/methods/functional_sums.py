"""The two sums that method functional releases, and what is made of them; float64.

A sum is PRIVATE until noise is added. One record moves each by a vector of norm at most 1: a
sensitivity with rounding in it, by `slack`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dpdist.base.errors import UserError
from dpdist.models import mixing
from dpdist.models.head import Features, last_linear

if TYPE_CHECKING:
    from dpdist.methods.functional import Functional

Pass = tuple[Tensor, Tensor, float]  # inputs, labels, and what each counts for

_LEAST_RIDGE = 1e-9  # of a record's share of A, where there is no noise


def slack(records: int) -> float:
    """By how much a record's vector is shortened for what rounding adds to the difference of two
    sums over `records` and one record fewer.

    A matrix product over passes of 128 rows is off by at most (128 + n / 128) 2^-53 times the sum
    of the norms, n (Higham, Accuracy and Stability of Numerical Algorithms, section 3.5); that, of
    both sums, and features that are off by some 2^-45 in other company, stay below.
    """
    return 2.0**-26 * max(1.0, records / 2**16) ** 2


def clipped_to(vectors: Tensor, norm: float) -> Tensor:
    """Each row scaled back to `norm`; a row that is not finite becomes 0."""
    finite = vectors.isfinite().all(1, keepdim=True)
    vectors = torch.where(finite, vectors, 0.0)
    return vectors * (norm / vectors.norm(dim=1, keepdim=True).clamp(min=norm))


def packed(matrix: Tensor) -> Tensor:
    """A symmetric matrix (D, D) as the vector of the same norm: D (D + 1) / 2 numbers."""
    rows, columns = torch.triu_indices(*matrix.shape, device=matrix.device)
    return matrix[rows, columns] * torch.where(rows == columns, 1.0, math.sqrt(2)).to(matrix)


def unpacked(vector: Tensor, size: int) -> Tensor:
    """The symmetric matrix (size, size) of a `packed` vector."""
    rows, columns = torch.triu_indices(size, size)
    values = vector / torch.where(rows == columns, 1.0, math.sqrt(2)).to(vector)
    matrix = vector.new_zeros(size, size)
    matrix[rows, columns] = values
    matrix[columns, rows] = values
    return matrix


class Sums:
    """What is summed over records, and what follows from the noisy sums.

    model: as it began; it is copied. example: inputs (B, ...) of made-up records, on which it is
    tried. records: of the plan. Raises UserError for a model without a head of its own, or that
    mixes records.
    """

    def __init__(self, method: Functional, model: nn.Module, example: Tensor, records: int) -> None:
        self.method = method
        exact = copy.deepcopy(model).double()
        wide = example.double()
        if (why := mixing(exact, wide)) is not None:
            raise UserError(f"the model mixes records: {why}")
        self._features = Features(exact, wide)
        head = last_linear(model)
        self.features, self.classes = head.in_features, head.out_features
        self._whole = 1 - slack(records)
        size = self.features + 1
        self.sizes = (self.features, size * (size + 1) // 2 + size * self.classes)

    def of_centre(self, inputs: Tensor) -> Tensor:
        """Each record's vector in the first sum: (B, D), norms at most 1. inputs: (B, ...)."""
        return clipped_to(self._features(inputs.double()), self.method.clip) / self.method.clip

    def directions(self, inputs: Tensor, centre: Tensor) -> Tensor:
        """h of each record: (B, D + 1), norms at most 1; 0 beside the constant at the centre."""
        method = self.method
        away = clipped_to(self.of_centre(inputs) * method.clip - centre, method.radius)
        away = away * (math.sqrt(1 - method.constant**2) / method.radius)
        return torch.cat([away, away.new_full((len(away), 1), method.constant)], 1)

    def shard(self, step: int, copies: Iterable[Pass], centre: Tensor) -> Tensor:
        """The sum of step 0 or 1 over passes of records: float64 (sizes[step],)."""
        if step == 0:
            total = centre.new_zeros(self.features)
            for inputs, _, weight in copies:
                total += weight * self.of_centre(inputs).sum(0)
            return total * self._whole
        size, labels = self.features + 1, self.method.labels
        squares, cross = centre.new_zeros(size, size), centre.new_zeros(size, self.classes)
        for inputs, targets, weight in copies:
            h = self.directions(inputs, centre)
            squares += weight * (h.T @ h)
            cross += weight * (h.T @ nn.functional.one_hot(targets, self.classes).to(h))
        parts = (packed(squares) * math.sqrt(1 - labels), cross.flatten() * math.sqrt(labels))
        return torch.cat(parts) * self._whole

    def centre(self, noisy: Tensor, records: int) -> Tensor:
        """The mean features: of a noisy first sum (D,), by the public number of records."""
        mean = noisy * (self.method.clip / records)
        return clipped_to(mean[None], self.method.clip)[0]

    def head(
        self, noisy: Tensor, centre: Tensor, noise_multiplier: float, records: int
    ) -> tuple[Tensor, Tensor]:
        """Weight (classes, D) and bias (classes,) of a head on f: of a noisy second sum.

        With z_k = h . w_k the expansion is sum_k z_k (1/2 - y_k) + z_k^2 / 8 for each record, so
        w_k = 4 (A + ridge)^-1 (B_k - A c / 2), where h . c = 1. Beyond the radius the head goes on
        linearly.
        """
        method, size = self.method, self.features + 1
        squares, cross = noisy.split([size * (size + 1) // 2, size * self.classes])
        matrix = unpacked(squares, size) / math.sqrt(1 - method.labels)
        coefficients = cross.view(size, -1) / math.sqrt(method.labels)
        coefficients = coefficients - matrix[:, -1:] / (2 * method.constant)
        values, vectors = torch.linalg.eigh(matrix)
        values = values.clamp(min=0)  # what noise made negative
        spread = noise_multiplier / math.sqrt(1 - method.labels) * math.sqrt(2 * size)
        ridge = method.ridge * spread + _LEAST_RIDGE * records
        weights = 4 * vectors @ (vectors.T @ coefficients / (values + ridge)[:, None])
        scale = math.sqrt(1 - method.constant**2) / method.radius
        weight = weights[:-1].T * scale
        return weight, weights[-1] * method.constant - weight @ centre
