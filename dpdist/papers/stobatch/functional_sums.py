"""The sums that method functional releases, and the layer that is fitted from them, in float64.

A sum is PRIVATE until noise is added. One record moves each by a vector of norm at most 1, by
`rounding_slack` with the rounding in it. The scales of public features are chosen by their
relevance on public records.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from dpdist.attacks.gradient_attacks import input_range, per_row
from dpdist.core.errors import UserError
from dpdist.data.record_hashes import hash_inputs
from dpdist.gradients.perturbations import InputPerturbation, Perturbation
from dpdist.methods.base import (
    Execution,
    MethodSetup,
    MethodState,
    WorkerInputs,
    check_record_limit,
)
from dpdist.models import find_batch_dependence, patch_features_of
from dpdist.models.batch_independence import find_output_difference
from dpdist.models.features import PenultimateFeatures, last_linear
from dpdist.papers.secure_sgd.shares import normalized_shares, prepare_nonprivate_training
from dpdist.papers.stobatch.functional import Functional, Relevance
from dpdist.privacy.plan import StepPlan
from dpdist.randomness.keys import derive_key

if TYPE_CHECKING:
    from dpdist.models import PatchFeatures


CENTER, CURVATURE = "center", "curvature"  # the tensors of a checkpoint besides the head
SCALES = "scales"  # the tensor that is computed once, from public records
PASS = 128  # records of a pass; `rounding_slack` rests on it
_EXAMPLES = 32  # inputs that the model is tried on


# --- relevance of public features -------------------------------------------------------------


def feature_scales(method: Functional, relevance: Relevance, setup: MethodSetup) -> Tensor:
    """Return scales (D,), float64, whose squares have mean 1, from public records and weights."""
    records = setup.public_records
    assert records is not None
    field = "method.relevance.data"
    model, inputs, labels = prepare_nonprivate_training(
        records, relevance.max_records, setup, field
    )
    plain = method.model_copy(update={"adversarial": None, "relevance": None})
    sums = CoefficientSums(plain, model, inputs[:_EXAMPLES], len(inputs))
    features = torch.cat([sums.features(some) for some in inputs.split(PASS)])
    passes = [(features, labels, 1.0)]
    nowhere = features.new_zeros(features.shape[1])
    center = sums.mean_features(sums.sum_features(passes, nowhere))
    weights, _ = sums.fit_weights(sums.sum_coefficients(passes, center), 1.0)  # a little ridge
    weight, bias = sums.head_from_weights(weights, center)
    own = features * method.clip
    left = (own @ weight.T + bias).softmax(1) - nn.functional.one_hot(labels, len(bias))
    matters = (own * (left @ weight)).abs().pow(relevance.beta).mean(0)
    return normalized_shares(matters, relevance.floor).sqrt()


# --- sums and their minimizer -----------------------------------------------------------------


FeaturePass = tuple[Tensor, Tensor, float]  # features, labels, and what each record counts for
PassId = tuple[int, int]  # first record and draw of a pass
CopyPass = tuple[Callable[[], Tensor], Tensor, float, PassId | None]  # makes inputs; names features

_CACHE_BYTES = 1 << 30  # bytes of features that a worker keeps from one sum to the next
_MIN_RIDGE = 1e-9  # of a record's share of A, where there is no noise
# by which rounding may change a vector of an adversarial copy in other company
_ADVERSARIAL_ROUNDING = 2.0**-25
# of vectors in features: more than |w| / (2 residual radius) at usual settings
_MAX_SLOPE = 2.0**12
_SIGN_SMOOTHING = 0.1


def rounding_slack(records: int) -> float:
    """Return how much a record's vector is shortened, to make room for rounding.

    Rounding adds this to the difference of two sums over `records` and one record fewer.

    A matrix product over passes of 128 rows is off by at most (128 + n / 128) 2^-53 times the sum
    of the norms, n (Higham, Accuracy and Stability of Numerical Algorithms, section 3.5); that, of
    both sums, and features that are off by some 2^-45 in other company, stay below.
    """
    return 2.0**-26 * max(1.0, records / 2**16) ** 2


def clip_rows(vectors: Tensor, norm: float) -> Tensor:
    """Return rows scaled back to `norm`; a row that is not finite becomes 0."""
    finite = vectors.isfinite().all(1, keepdim=True)
    vectors = torch.where(finite, vectors, 0.0)
    result: Tensor = vectors * (norm / vectors.norm(dim=1, keepdim=True).clamp(min=norm))
    return result


def pack_symmetric(matrix: Tensor) -> Tensor:
    """Return a symmetric matrix (D, D) as a vector of the same norm with D (D + 1) / 2 numbers."""
    rows, columns = torch.triu_indices(*matrix.shape, device=matrix.device)
    return matrix[rows, columns] * torch.where(rows == columns, 1.0, math.sqrt(2)).to(matrix)


def unpack_symmetric(vector: Tensor, size: int) -> Tensor:
    """Return the symmetric matrix (size, size) of a `pack_symmetric` vector."""
    rows, columns = torch.triu_indices(size, size)
    values = vector / torch.where(rows == columns, 1.0, math.sqrt(2)).to(vector)
    matrix = vector.new_zeros(size, size)
    matrix[rows, columns] = values
    matrix[columns, rows] = values
    return matrix


def sum_moments(patches: PatchFeatures, copies: Iterable[CopyPass], records: int) -> Tensor:
    """Return the packed sum of `moments`: float64. records: the most that there may be."""
    size = patches.encoder.weight[0].numel()
    total = torch.zeros(size, size, dtype=torch.float64, device=patches.encoder.weight.device)
    for inputs, _, weight, _ in copies:
        total += weight * patches.moments(inputs()).sum(0)
    return pack_symmetric(total) * (1 - rounding_slack(records))


class CoefficientSums:
    """The sums over records, and the results that follow from the noisy sums.

    They are of features, their coefficients, and residuals of the head so far.

    model: as it began; it is copied. example: inputs (B, ...) of made-up records, on which it is
    tried. records: of the plan. scales (D,): public, of the directions; default 1. max_records:
    records that there may be, which their rounding grows with (default: those of the plan). Raises
    UserError for a model without a head of its own, that mixes records, or whose adversarial copies
    do.
    """

    def __init__(
        self,
        method: Functional,
        model: nn.Module,
        example: Tensor,
        records: int,
        scales: Tensor | None = None,
        max_records: int | None = None,
    ) -> None:
        self.method, self.records = method, records
        max_records = records if max_records is None else max_records
        exact = copy.deepcopy(model).double()
        wide = example.double()
        try:
            why = find_batch_dependence(exact, wide)
        except RuntimeError as error:  # whatever a user's module does, a cast mostly
            said = (str(error).splitlines() or [""])[0]
            raise UserError(
                f"the model fails in float64, in which method functional sums: {said}"
            ) from error
        if why is not None:
            raise UserError(f"the model mixes records: {why}")
        self._penultimate_features = PenultimateFeatures(exact, wide)
        self.feature_cache: dict[PassId, Tensor] = {}  # features, PRIVATE
        head = last_linear(model)
        self.classes, self.size = head.out_features, head.in_features + 1
        self._pairs = self.size * (self.size + 1) // 2
        self._slack_factor = 1 - rounding_slack(max_records)
        self._scales = wide.new_ones(self.size - 1) if scales is None else scales.to(wide)
        if method.adversarial is not None:
            self._slack_factor -= _ADVERSARIAL_ROUNDING * max(2**16, max_records)
            self._check_adversarial_independence(head, wide)

    def features(self, inputs: Tensor) -> Tensor:
        """Return f / clip of each record: (B, D), norms at most 1. inputs: (B, ...)."""
        return (
            clip_rows(self._penultimate_features(inputs.double()), self.method.clip)
            / self.method.clip
        )

    def cached_features(self, inputs: Callable[[], Tensor], pass_id: PassId | None) -> Tensor:
        """Return `features`, cached by the name of the pass while there is room."""
        if pass_id in self.feature_cache:
            return self.feature_cache[pass_id]
        found = self.features(inputs())
        used = len(self.feature_cache) * found.numel() * found.element_size()
        if pass_id is not None and used < _CACHE_BYTES:
            self.feature_cache[pass_id] = found
        return found

    def adversarial_copies(
        self, inputs: Tensor, targets: Tensor, weight: Tensor, bias: Tensor
    ) -> Tensor:
        """Return adversarial copies of inputs (B, ...) for a head on f: float64, within `size`.

        Row b is a smooth function of record b: steps along g / sqrt(g^2 + t^2), t a tenth of the
        gradient's root mean square, where a sign would make a whole step of a last bit.
        """
        asked = self.method.adversarial
        assert asked is not None
        center, box = inputs.double(), input_range(inputs)
        point, step = center, asked.size / asked.steps * (1.0 if asked.steps == 1 else 1.5)
        hot = self._one_hot(targets, center).bool()
        for _ in range(asked.steps):
            with torch.enable_grad():
                seen = point.detach().requires_grad_()
                logits = self._penultimate_features(seen, track_gradients=True) @ weight.T + bias
                others = logits.masked_fill(hot, -math.inf).logsumexp(1)
                (slope,) = torch.autograd.grad((others - logits[hot]).sum(), seen)
            typical = slope.flatten(1).square().mean(1).sqrt() * _SIGN_SMOOTHING + 1e-30
            soft = slope / (slope.square() + per_row(typical, slope).square()).sqrt()
            point = center + (point + step * soft - center).clamp(-asked.size, asked.size)
            point = point if box is None else point.clamp(*box)
        return point.detach()

    def _check_adversarial_independence(self, head: nn.Linear, example: Tensor) -> None:
        """Raise UserError where an adversarial copy depends on its company by more than rounding,
        for which `_slack_factor` leaves room."""
        weight, bias = head.weight.detach().double(), head.bias.detach().double()

        def forward(batch: Tensor) -> Tensor:
            targets = torch.zeros(len(batch), dtype=torch.int64, device=batch.device)
            return self.features(self.adversarial_copies(batch, targets, weight, bias))

        allowed = example.new_full(
            (self.size - 1,), _ADVERSARIAL_ROUNDING / _MAX_SLOPE / math.sqrt(self.size)
        )
        why = find_output_difference(forward, example, allowed)
        if why is not None:
            raise UserError(f"method.adversarial: the model has kinks: {why}; take a smooth one")

    def directions(self, features: Tensor, center: Tensor) -> Tensor:
        """Return h of each record: (B, D + 1), norms at most 1; only the constant at the center."""
        method = self.method
        away = clip_rows((features * method.clip - center) * self._scales, method.radius)
        away = away * (math.sqrt(1 - method.constant**2) / method.radius)
        return torch.cat([away, away.new_full((len(away), 1), method.constant)], 1)

    # --- sums over passes of records

    def sum_features(self, passes: Iterable[FeaturePass], center: Tensor) -> Tensor:
        """Return the sum of features, float64 (D,)."""
        total = torch.zeros_like(center)
        for features, _, weight in passes:
            total += weight * features.sum(0)
        return total * self._slack_factor

    def sum_coefficients(self, passes: Iterable[FeaturePass], center: Tensor) -> Tensor:
        """Return the sums of h h' and of h y', packed into one vector: float64."""
        labels = self.method.labels
        squares = center.new_zeros(self.size, self.size)
        cross = center.new_zeros(self.size, self.classes)
        for features, targets, weight in passes:
            h = self.directions(features, center)
            squares += weight * (h.T @ h)
            cross += weight * (h.T @ self._one_hot(targets, h))
        parts = (
            pack_symmetric(squares) * math.sqrt(1 - labels),
            cross.flatten() * math.sqrt(labels),
        )
        return torch.cat(parts) * self._slack_factor

    def sum_residuals(
        self, passes: Iterable[FeaturePass], center: Tensor, weights: Tensor
    ) -> Tensor:
        """Return the sum of h (y - p)', in units of `residual`, to which y - p is clipped: float64.

        weights: of the head so far, on h.
        """
        total, bound = center.new_zeros(self.size, self.classes), self.method.residual
        for features, targets, weight in passes:
            h = self.directions(features, center)
            left = self._one_hot(targets, h) - (h @ weights).softmax(1)
            total += weight * (h.T @ (clip_rows(left, bound) / bound))
        return total.flatten() * self._slack_factor

    def _one_hot(self, targets: Tensor, like: Tensor) -> Tensor:
        return nn.functional.one_hot(targets, self.classes).to(like)

    # --- what is made of noisy sums

    def mean_features(self, noisy: Tensor) -> Tensor:
        """Return the mean features from a noisy sum (D,) and the public number of records."""
        mean = noisy * (self.method.clip / self.records)
        return clip_rows(mean[None], self.method.clip)[0]

    def fit_weights(self, noisy: Tensor, noise_multiplier: float) -> tuple[Tensor, Tensor]:
        """Return weights on h (D + 1, classes), curvature (D + 1, D + 1) from noisy coefficients.

        With z_k = h . w_k the expansion is sum_k z_k (1/2 - y_k) + z_k^2 / 8 for each record, so
        w_k = 4 (A + ridge)^-1 (B_k - A c / 2), where h . c = 1.
        """
        method = self.method
        matrix = unpack_symmetric(noisy[: self._pairs], self.size) / math.sqrt(1 - method.labels)
        cross = noisy[self._pairs :].view(self.size, -1) / math.sqrt(method.labels)
        values, vectors = torch.linalg.eigh(matrix)
        spread = noise_multiplier / math.sqrt(1 - method.labels) * math.sqrt(2 * self.size)
        ridge = method.ridge * spread + _MIN_RIDGE * self.records
        curvature = vectors * (values.clamp(min=0) + ridge) @ vectors.T  # noise made some negative
        target = cross - matrix[:, -1:] / (2 * method.constant)
        return 4 * torch.linalg.solve(curvature, target), curvature

    def refine_weights(self, noisy: Tensor, weights: Tensor, curvature: Tensor) -> Tensor:
        """Return weights after a Newton step on the loss expanded at them, from noisy residuals."""
        change = torch.linalg.solve(curvature, noisy.view(self.size, -1))
        result: Tensor = weights + self.method.step * change
        return result

    def head_from_weights(self, weights: Tensor, center: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same head on f, (classes, D) and (classes,), linear beyond the radius."""
        method = self.method
        weight = weights[:-1].T * (math.sqrt(1 - method.constant**2) / method.radius)
        weight = weight * self._scales
        return weight, weights[-1] * method.constant - weight @ center

    def weights_from_head(self, weight: Tensor, bias: Tensor, center: Tensor) -> Tensor:
        """Return the weights of a head: the inverse of `head_from_weights`."""
        method, weight, bias = self.method, weight.double(), bias.double()
        own = weight.T * (method.radius / math.sqrt(1 - method.constant**2))
        own = own / self._scales[:, None]
        return torch.cat([own, (bias + weight @ center)[None] / method.constant])


# --- hooks of a training ----------------------------------------------------------------------


class FunctionalExecution(Execution[Functional]):
    """Release the sums one after the other; worker 0 fits the layer to each."""

    def prepare_state(self, setup: MethodSetup) -> dict[str, Tensor]:
        if self.method.relevance is None:
            return {}
        return {SCALES: feature_scales(self.method, self.method.relevance, setup)}

    def placeholder_state(
        self, model: nn.Module, input_shape: tuple[int, ...]
    ) -> dict[str, Tensor]:
        """Return the same scale for every feature."""
        if self.method.relevance is None:
            return {}
        return {SCALES: torch.ones(last_linear(model).in_features, dtype=torch.float64)}

    def project_parameters(self, model: nn.Module) -> Callable[[], None]:
        """Constrain nothing. Raises UserError for a model without a last linear layer, or without
        the encoder that is asked for."""
        last_linear(model)
        if self.method.encoder:
            patch_features_of(model)
        return lambda: None

    def perturbation(
        self, step: StepPlan, learning_rate: float, state: MethodState
    ) -> Perturbation:
        draws, sigma = self.method.augmentations, self.method.sigma
        return InputPerturbation(draws, sigma) if sigma else Perturbation()

    def own_steps(self, given: WorkerInputs) -> FunctionalSteps:
        """Return the releases, each of which sets the head or the encoder."""
        return FunctionalSteps(self, given)


class FunctionalSteps:
    """The releases of one worker; worker 0 fits the layer to each."""

    save_every = 1

    def __init__(self, execution: FunctionalExecution, given: WorkerInputs) -> None:
        check_record_limit(given.recipe, len(given.records))
        self._given, self._execution, self.method = given, execution, execution.method
        self._head, self._device = last_linear(given.model), given.parameters[0].device
        size = self._head.in_features
        self._center = torch.zeros(size, dtype=torch.float64, device=self._device)
        self._curvature = self._center.new_zeros(size + 1, size + 1)
        self.slots: Mapping[str, Tensor] = {CENTER: self._center, CURVATURE: self._curvature}
        self._coefficients: CoefficientSums | None = None  # made when it is asked for

    def sums(self, number: int) -> Tensor:
        """Return this worker's part of a sum."""
        given, found = self._given, []
        sums = None if self._stage(number) < 0 else self._sums()
        for row, begin, end in given.shards.local_shards:
            members = given.canaries.inputs_for(np.arange(begin, end))
            copies = self._noisy_copies(number, members)
            found.append((row, self._sum(sums, self._stage(number), copies)))
        rows = found[0][1].new_zeros(given.shards.num_rows, len(found[0][1]))
        for row, total in found:
            rows[row] = total
        return rows

    def update(self, number: int, released: Tensor) -> None:
        """Set the center on all workers; on worker 0 the encoder or the head."""
        stage, head, center = self._stage(number), self._head, self._center
        noisy = released.to(center)
        if stage == 0:
            center.copy_(self._sums().mean_features(noisy))
            return
        if self._given.rank:  # the solution of another machine may have other bits
            return
        if stage < 0:
            patches = patch_features_of(self._given.model)
            patches.fit_filters(unpack_symmetric(noisy, patches.encoder.weight[0].numel()))
            return
        sums, curvature = self._sums(), self._curvature
        if stage == 1:
            multiplier = self._given.plan.step(number).noise_multiplier
            weights, matrix = sums.fit_weights(noisy, multiplier)
            curvature.copy_(matrix)
        else:
            weights = sums.weights_from_head(head.weight.data, head.bias.data, center)
            weights = sums.refine_weights(noisy, weights, curvature)
        weight, bias = sums.head_from_weights(weights, center)
        head.weight.data.copy_(weight)
        head.bias.data.copy_(bias)

    def _stage(self, step: int) -> int:
        """Return -1 for the encoder, 0 for features, 1 for coefficients, larger for rounds."""
        return step - (1 if self.method.encoder else 0)

    def _sums(self) -> CoefficientSums:
        given = self._given
        if self._coefficients is None:
            example = given.public_test().batch(slice(0, _EXAMPLES)).to(self._device)
            scales, records = given.state.tensors.get(SCALES), given.plan.records
            most = check_record_limit(given.recipe, records)
            made = CoefficientSums(self.method, given.model, example, records, scales, most)
            # whose filters no two trainings share
            if given.shared_cache is not None and not self.method.encoder:
                made.feature_cache = given.shared_cache
            self._coefficients = made
        return self._coefficients

    def _noisy_copies(self, step: int, members: np.ndarray) -> Iterator[CopyPass]:
        """Yield the records in passes, each in its noisy copies."""
        given, method = self._given, self.method
        fresh = method.sigma > 0 and method.noise == "fresh"
        draws = self._execution.perturbation(given.plan.step(step), 1.0, given.state)
        key = given.draw_key(step)
        for start in range(0, len(members), PASS):
            rows = members[start : start + PASS]
            targets = given.canaries.labels_for(rows, given.records.targets(rows))
            for draw in range(draws.count):
                noisy = partial(self._noisy_copy, draws, key, rows, draw)
                place = None if fresh else (int(rows[0]), draw)
                yield noisy, targets.to(self._device), 1 / draws.count, place

    def _noisy_copy(self, draws: Perturbation, key: bytes, rows: np.ndarray, draw: int) -> Tensor:
        """Return a noisy copy of these records."""
        inputs, names = self._given.records.batch(rows), rows
        if self.method.noise == "own":  # a public function of the record
            key = derive_key(bytes(32), "functional", "noise")
            hashes = np.frombuffer(hash_inputs(inputs.numpy()).tobytes(), dtype="<u8")
            names = (hashes[::2] >> np.uint64(1)).astype(np.int64)
        return draws.perturb_inputs(inputs.to(self._device), torch.from_numpy(names), key, draw)

    def _sum(self, sums: CoefficientSums | None, stage: int, copies: Iterator[CopyPass]) -> Tensor:
        center, head, given = self._center, self._head, self._given
        if sums is None:
            most = check_record_limit(given.recipe, given.plan.records)
            return sum_moments(patch_features_of(given.model), copies, most)
        weights = sums.weights_from_head(head.weight.data, head.bias.data, center)
        passes = self._passes(sums, stage, copies, sums.head_from_weights(weights, center))
        if stage == 0:
            return sums.sum_features(passes, center)
        if stage == 1:
            return sums.sum_coefficients(passes, center)
        return sums.sum_residuals(passes, center, weights)

    def _passes(
        self,
        sums: CoefficientSums,
        stage: int,
        copies: Iterator[CopyPass],
        head: tuple[Tensor, Tensor],
    ) -> Iterator[FeaturePass]:
        """Yield features, targets and weight of each copy to sum, adversarial ones included."""
        asked = self.method.adversarial if stage > 1 else None
        own = 1.0 if asked is None else 1 / (1 + asked.xi)
        for noisy, targets, weight, place in copies:
            yield sums.cached_features(noisy, place), targets, weight * own
            if asked is not None:
                moved = sums.adversarial_copies(noisy(), targets, *head)
                yield sums.features(moved), targets, weight * (1 - own)
