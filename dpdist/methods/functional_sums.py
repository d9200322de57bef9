"""The sums that method functional releases, and what is made of them; float64.

A sum is PRIVATE until noise is added. One record moves each by a vector of norm at most 1, by
`slack` with the rounding in it.
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

Pass = tuple[Tensor, Tensor, float]  # features, labels, and what each record counts for

_KEPT = 1 << 30  # bytes of features that a worker keeps from one sum to the next
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
    """What is summed over records, and what follows from the noisy sums: of features, their
    coefficients, and residuals of the head so far.

    model: as it began; it is copied. example: inputs (B, ...) of made-up records, on which it is
    tried. records: of the plan. Raises UserError for a model without a head of its own, or that
    mixes records.
    """

    def __init__(self, method: Functional, model: nn.Module, example: Tensor, records: int) -> None:
        self.method, self.records = method, records
        exact = copy.deepcopy(model).double()
        wide = example.double()
        try:
            why = mixing(exact, wide)
        except RuntimeError as error:  # whatever a user's module does, a cast mostly
            said = (str(error).splitlines() or [""])[0]
            raise UserError(
                f"the model fails in float64, in which method functional sums: {said}"
            ) from error
        if why is not None:
            raise UserError(f"the model mixes records: {why}")
        self._read = Features(exact, wide)
        self._kept: dict[int, Tensor] = {}
        head = last_linear(model)
        self.classes, self.size = head.out_features, head.in_features + 1
        self._pairs = self.size * (self.size + 1) // 2
        self._whole = 1 - slack(records)

    def features(self, inputs: Tensor, place: int | None = None) -> Tensor:
        """f / clip of each record: (B, D), norms at most 1. inputs: (B, ...). place: by which they
        are kept, while there is room, and found again."""
        if place in self._kept:
            return self._kept[place]
        found = clipped_to(self._read(inputs.double()), self.method.clip) / self.method.clip
        used = len(self._kept) * found.numel() * found.element_size()
        if place is not None and used < _KEPT:
            self._kept[place] = found
        return found

    def directions(self, features: Tensor, centre: Tensor) -> Tensor:
        """h of each record: (B, D + 1), norms at most 1; 0 beside the constant at the centre."""
        method = self.method
        away = clipped_to(features * method.clip - centre, method.radius)
        away = away * (math.sqrt(1 - method.constant**2) / method.radius)
        return torch.cat([away, away.new_full((len(away), 1), method.constant)], 1)

    # --- sums over passes of records

    def of_features(self, passes: Iterable[Pass], centre: Tensor) -> Tensor:
        """float64 (D,), as the centre is."""
        total = torch.zeros_like(centre)
        for features, _, weight in passes:
            total += weight * features.sum(0)
        return total * self._whole

    def of_coefficients(self, passes: Iterable[Pass], centre: Tensor) -> Tensor:
        """Of h h' and of h y', packed into one vector: float64."""
        labels = self.method.labels
        squares = centre.new_zeros(self.size, self.size)
        cross = centre.new_zeros(self.size, self.classes)
        for features, targets, weight in passes:
            h = self.directions(features, centre)
            squares += weight * (h.T @ h)
            cross += weight * (h.T @ self._hot(targets, h))
        parts = (packed(squares) * math.sqrt(1 - labels), cross.flatten() * math.sqrt(labels))
        return torch.cat(parts) * self._whole

    def of_residuals(self, passes: Iterable[Pass], centre: Tensor, weights: Tensor) -> Tensor:
        """Of h (y - p)', in units of `residual`, to which y - p is clipped: float64. weights: of
        the head so far, on h."""
        total, bound = centre.new_zeros(self.size, self.classes), self.method.residual
        for features, targets, weight in passes:
            h = self.directions(features, centre)
            left = self._hot(targets, h) - (h @ weights).softmax(1)
            total += weight * (h.T @ (clipped_to(left, bound) / bound))
        return total.flatten() * self._whole

    def _hot(self, targets: Tensor, like: Tensor) -> Tensor:
        return nn.functional.one_hot(targets, self.classes).to(like)

    # --- what is made of noisy sums

    def centre(self, noisy: Tensor) -> Tensor:
        """The mean features: of a noisy sum (D,), by the public number of records."""
        mean = noisy * (self.method.clip / self.records)
        return clipped_to(mean[None], self.method.clip)[0]

    def fitted(self, noisy: Tensor, noise_multiplier: float) -> tuple[Tensor, Tensor]:
        """Weights on h (D + 1, classes), and the curvature (D + 1, D + 1): of noisy coefficients.

        With z_k = h . w_k the expansion is sum_k z_k (1/2 - y_k) + z_k^2 / 8 for each record, so
        w_k = 4 (A + ridge)^-1 (B_k - A c / 2), where h . c = 1.
        """
        method = self.method
        matrix = unpacked(noisy[: self._pairs], self.size) / math.sqrt(1 - method.labels)
        cross = noisy[self._pairs :].view(self.size, -1) / math.sqrt(method.labels)
        values, vectors = torch.linalg.eigh(matrix)
        spread = noise_multiplier / math.sqrt(1 - method.labels) * math.sqrt(2 * self.size)
        ridge = method.ridge * spread + _LEAST_RIDGE * self.records
        curvature = vectors * (values.clamp(min=0) + ridge) @ vectors.T  # noise made some negative
        target = cross - matrix[:, -1:] / (2 * method.constant)
        return 4 * torch.linalg.solve(curvature, target), curvature

    def refined(self, noisy: Tensor, weights: Tensor, curvature: Tensor) -> Tensor:
        """Better weights: a Newton step on the loss expanded at them, of noisy residuals."""
        change = torch.linalg.solve(curvature, noisy.view(self.size, -1))
        return weights + self.method.step * change

    def head(self, weights: Tensor, centre: Tensor) -> tuple[Tensor, Tensor]:
        """The same head on f, (classes, D) and (classes,). Beyond the radius it goes on
        linearly."""
        method = self.method
        weight = weights[:-1].T * (math.sqrt(1 - method.constant**2) / method.radius)
        return weight, weights[-1] * method.constant - weight @ centre

    def weights(self, weight: Tensor, bias: Tensor, centre: Tensor) -> Tensor:
        """Inverse of `head`."""
        method, weight, bias = self.method, weight.double(), bias.double()
        own = weight.T * (method.radius / math.sqrt(1 - method.constant**2))
        return torch.cat([own, (bias + weight @ centre)[None] / method.constant])
