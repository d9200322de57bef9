"""The sums that method functional releases, and the layer that is fitted from them, in float64.

A sum is PRIVATE until noise is added. One record moves each by a vector of norm at most 1, by
`slack` with the rounding in it. The scales of public features are chosen by their relevance on
public records.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dpdist.attacks.gradient_attacks import box_of, per_row
from dpdist.core.errors import UserError
from dpdist.methods.base import Setup
from dpdist.methods.hidden_noise_shares import shares, without_privacy
from dpdist.models import mixing
from dpdist.models.batch_independence import difference
from dpdist.models.features import Features, last_linear

if TYPE_CHECKING:
    from dpdist.methods.functional import Functional, Relevance
    from dpdist.models import Patches


# --- relevance of public features -------------------------------------------------------------


_EXAMPLES = 32
_PASS = 128


def scales_of(method: Functional, asked: Relevance, setup: Setup) -> Tensor:
    """float64 (D,), whose squares have mean 1: a function of public records and initial weights."""
    records = setup.public
    assert records is not None
    field = "method.relevance.data"
    model, inputs, labels = without_privacy(records, asked.max_records, setup, field)
    plain = method.model_copy(update={"adversarial": None, "relevance": None})
    sums = Sums(plain, model, inputs[:_EXAMPLES], len(inputs))
    features = torch.cat([sums.features(some) for some in inputs.split(_PASS)])
    passes = [(features, labels, 1.0)]
    nowhere = features.new_zeros(features.shape[1])
    centre = sums.centre(sums.of_features(passes, nowhere))
    weights, _ = sums.fitted(sums.of_coefficients(passes, centre), 1.0)  # a little ridge
    weight, bias = sums.head(weights, centre)
    own = features * method.clip
    left = (own @ weight.T + bias).softmax(1) - nn.functional.one_hot(labels, len(bias))
    matters = (own * (left @ weight)).abs().pow(asked.beta).mean(0)
    return shares(matters, asked.floor).sqrt()


# --- sums and their minimiser -----------------------------------------------------------------


Pass = tuple[Tensor, Tensor, float]  # features, labels, and what each record counts for
Place = tuple[int, int]  # first record and draw of a pass
Copy = tuple[Callable[[], Tensor], Tensor, float, Place | None]  # makes inputs; names features

_KEPT = 1 << 30  # bytes of features that a worker keeps from one sum to the next
_LEAST_RIDGE = 1e-9  # of a record's share of A, where there is no noise
_MOVED = 2.0**-25  # by which rounding may change a vector of an adversarial copy in other company
_STEEP = 2.0**12  # of vectors in features: more than |w| / (2 residual radius) at usual settings
_SOFT = 0.1


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
    result: Tensor = vectors * (norm / vectors.norm(dim=1, keepdim=True).clamp(min=norm))
    return result


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


def of_moments(patches: Patches, copies: Iterable[Copy], records: int) -> Tensor:
    """The sum of their `moments`, packed: float64. records: the most that there may be."""
    size = patches.encoder.weight[0].numel()
    total = torch.zeros(size, size, dtype=torch.float64, device=patches.encoder.weight.device)
    for inputs, _, weight, _ in copies:
        total += weight * patches.moments(inputs()).sum(0)
    return packed(total) * (1 - slack(records))


class Sums:
    """What is summed over records, and what follows from the noisy sums: of features, their
    coefficients, and residuals of the head so far.

    model: as it began; it is copied. example: inputs (B, ...) of made-up records, on which it is
    tried. records: of the plan. scales (D,): public, of the directions; default 1. most: records
    that there may be, which their rounding grows with (default: those of the plan). Raises
    UserError for a model without a head of its own, that mixes records, or whose adversarial
    copies do.
    """

    def __init__(
        self,
        method: Functional,
        model: nn.Module,
        example: Tensor,
        records: int,
        scales: Tensor | None = None,
        most: int | None = None,
    ) -> None:
        self.method, self.records = method, records
        most = records if most is None else most
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
        self.kept: dict[Place, Tensor] = {}  # features, PRIVATE
        head = last_linear(model)
        self.classes, self.size = head.out_features, head.in_features + 1
        self._pairs = self.size * (self.size + 1) // 2
        self._whole = 1 - slack(most)
        self._scales = wide.new_ones(self.size - 1) if scales is None else scales.to(wide)
        if method.adversarial is not None:
            self._whole -= _MOVED * max(2**16, most)
            self._screen(head, wide)

    def features(self, inputs: Tensor) -> Tensor:
        """f / clip of each record: (B, D), norms at most 1. inputs: (B, ...)."""
        return clipped_to(self._read(inputs.double()), self.method.clip) / self.method.clip

    def known(self, inputs: Callable[[], Tensor], place: Place | None) -> Tensor:
        """Their `features`; kept by the name of the pass, while there is room, and found again."""
        if place in self.kept:
            return self.kept[place]
        found = self.features(inputs())
        used = len(self.kept) * found.numel() * found.element_size()
        if place is not None and used < _KEPT:
            self.kept[place] = found
        return found

    def moved(self, inputs: Tensor, targets: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Adversarial copies of inputs (B, ...) for a head on f: float64, within `size` of them.

        Row b is a smooth function of record b: steps along g / sqrt(g^2 + t^2), t a tenth of the
        gradient's root mean square, where a sign would make a whole step of a last bit.
        """
        asked = self.method.adversarial
        assert asked is not None
        centre, box = inputs.double(), box_of(inputs)
        point, step = centre, asked.size / asked.steps * (1.0 if asked.steps == 1 else 1.5)
        hot = self._hot(targets, centre).bool()
        for _ in range(asked.steps):
            with torch.enable_grad():
                seen = point.detach().requires_grad_()
                logits = self._read(seen, graph=True) @ weight.T + bias
                others = logits.masked_fill(hot, -math.inf).logsumexp(1)
                (slope,) = torch.autograd.grad((others - logits[hot]).sum(), seen)
            typical = slope.flatten(1).square().mean(1).sqrt() * _SOFT + 1e-30
            soft = slope / (slope.square() + per_row(typical, slope).square()).sqrt()
            point = centre + (point + step * soft - centre).clamp(-asked.size, asked.size)
            point = point if box is None else point.clamp(*box)
        return point.detach()

    def _screen(self, head: nn.Linear, example: Tensor) -> None:
        """Raise UserError where an adversarial copy depends on its company by more than rounding,
        for which `_whole` leaves room."""
        weight, bias = head.weight.detach().double(), head.bias.detach().double()

        def forward(batch: Tensor) -> Tensor:
            targets = torch.zeros(len(batch), dtype=torch.int64, device=batch.device)
            return self.features(self.moved(batch, targets, weight, bias))

        allowed = example.new_full((self.size - 1,), _MOVED / _STEEP / math.sqrt(self.size))
        why = difference(forward, example, allowed)
        if why is not None:
            raise UserError(f"method.adversarial: the model has kinks: {why}; take a smooth one")

    def directions(self, features: Tensor, centre: Tensor) -> Tensor:
        """h of each record: (B, D + 1), norms at most 1; 0 beside the constant at the centre."""
        method = self.method
        away = clipped_to((features * method.clip - centre) * self._scales, method.radius)
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
        result: Tensor = weights + self.method.step * change
        return result

    def head(self, weights: Tensor, centre: Tensor) -> tuple[Tensor, Tensor]:
        """The same head on f, (classes, D) and (classes,). Beyond the radius it goes on
        linearly."""
        method = self.method
        weight = weights[:-1].T * (math.sqrt(1 - method.constant**2) / method.radius)
        weight = weight * self._scales
        return weight, weights[-1] * method.constant - weight @ centre

    def weights(self, weight: Tensor, bias: Tensor, centre: Tensor) -> Tensor:
        """Inverse of `head`."""
        method, weight, bias = self.method, weight.double(), bias.double()
        own = weight.T * (method.radius / math.sqrt(1 - method.constant**2))
        own = own / self._scales[:, None]
        return torch.cat([own, (bias + weight @ centre)[None] / method.constant])
