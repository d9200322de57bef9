"""HGM's shares r of the noise, hidden component by hidden component (Phan et al., IJCAI 2019).

r (Equation 7) is the mean of |dL/dh|^beta over records, normalized: more noise where the loss is
more sensitive. Component k then gets N(0, sigma_r^2 K r_k). As noise for robustness any r will do;
but r shapes every record's gradient, so an r computed from private records, unpaid for, voids the
privacy of the training. It comes from public records, or from one noised sum that is paid for.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from dpdist import models
from dpdist.core.errors import UserError
from dpdist.data import Dataset
from dpdist.gradients.clipping import assumed_move
from dpdist.gradients.noise import add_noise
from dpdist.gradients.passes import Rounding, labeled_passes, rows_per_pass
from dpdist.gradients.per_example import sums_in_order
from dpdist.gradients.perturbations import (
    HiddenPerturbation,
    Perturbation,
    standard_normal_shared,
)
from dpdist.gradients.sampling import MAX_BLOCK_RECORDS, Blocks, poisson_sample
from dpdist.methods.base import Execution, MethodSetup, MethodState, check_record_limit
from dpdist.models import ModelSpec, SplitModel
from dpdist.models.features import resize_images
from dpdist.models.noise import project_first_layer_norm
from dpdist.papers.secure_sgd.claims import redistribution
from dpdist.papers.secure_sgd.method import HiddenNoiseMethod, Redistribution
from dpdist.privacy.plan import StepPlan
from dpdist.randomness.keys import derive_key

STD = "std"  # the tensor of deviations, among what is made once
_BATCH = 256
_PASS = 128  # records of a pass over private ones


# --- hooks of a training ----------------------------------------------------------------------


class HiddenNoiseExecution(Execution[HiddenNoiseMethod]):
    """Steps with noise after the first layer, which is kept within its norm."""

    def prepare_state(self, setup: MethodSetup) -> dict[str, Tensor]:
        """Return the deviation of each component's noise."""
        method, section = self.method, self.method.redistribution
        if section is None:
            return self.placeholder_state(setup.build_initial_model(), setup.spec.input_shape)
        scale = method.noise_scale(math.prod(setup.spec.input_shape))
        return {STD: heterogeneous_std(scale, noise_shares(section, method.sensitivity, setup))}

    def placeholder_state(
        self, model: nn.Module, input_shape: tuple[int, ...]
    ) -> dict[str, Tensor]:
        """Return the same deviation for every component."""
        shape = models.require_split(model).hidden_shape(input_shape)
        return {STD: torch.full(shape, self.method.noise_scale(math.prod(input_shape)))}

    def perturbation(
        self, step: StepPlan, learning_rate: float, state: MethodState
    ) -> Perturbation:
        """Return draws of the noise after the first layer, one for all steps as published."""
        module, std = models.require_split(state.model).name, state.tensors[STD]
        if self.method.paper_faithful:
            return FixedHiddenPerturbation(module, std, state.key)
        return HiddenPerturbation(self.method.augmentations, module, std)

    def project_parameters(self, model: nn.Module) -> Callable[[], None]:
        """Return the function that scales the first layer back into its norm."""
        split = models.require_split(model)
        return lambda: project_first_layer_norm(split, self.method.sensitivity)

    def finalize(self, spec: ModelSpec, state: MethodState) -> ModelSpec:
        """Leave the noise in the model; return its spec with it."""
        models.attach_noise(state.model, state.tensors[STD])
        return dataclasses.replace(spec, hidden_noise=True)


class FixedHiddenPerturbation(Perturbation):
    """h + one fixed noise, the same for every record and in every step (Secure-SGD, Algorithm 1).

    run_key: 32 bytes that choose it; the same for the whole run.
    """

    def __init__(self, module: str, std: Tensor, run_key: bytes) -> None:
        super().__init__()
        self.hidden_modules = (module,)
        normals = standard_normal_shared(run_key, "draws/one-hidden", 0, std.numel())
        self.noise = std * normals.view_as(std).to(std)

    def perturb_output(
        self, output: Tensor, record_ids: Tensor | None, draw_key: bytes, draw: int, module: int = 0
    ) -> Tensor:
        """Return the output with the one noise."""
        return output + self.noise.to(output)


# --- the shares r -----------------------------------------------------------------------------


def noise_shares(section: Redistribution, sensitivity: float, setup: MethodSetup) -> Tensor:
    """Return K r from the records in the recipe: float64 of the hidden shape.

    sensitivity: the norm within which the first layer is kept. The recipe chooses the records, and
    `Method.cost` counts their privacy cost.
    """
    if section.source == "paid":
        powers = _released_powers(section, sensitivity, setup)
    else:
        records = setup.public_records if section.source == "public" else setup.private_records
        assert records is not None
        powers = _mean_powers_without_privacy(section, sensitivity, setup, records)
    return normalized_shares(powers, section.floor)


def _mean_powers_without_privacy(
    section: Redistribution, sensitivity: float, setup: MethodSetup, records: Dataset
) -> Tensor:
    """Return Equation 7 on records used without privacy, with the network trained on them.

    The network is that of `prepare_nonprivate_training`.
    """
    field = "method.redistribution.data"
    model, inputs, labels = prepare_nonprivate_training(records, section.max_records, setup, field)
    split = models.require_split(model)
    train_without_privacy(
        model, inputs, labels, section.steps, lambda: project_first_layer_norm(split, sensitivity)
    )
    return mean_powers(split, inputs, labels, section.beta)


def prepare_nonprivate_training(
    records: Dataset, max_records: int, setup: MethodSetup, recipe_key: str
) -> tuple[nn.Module, Tensor, Tensor]:
    """Return at most `max_records` records, and the network that may learn from them.

    The records are inputs and labels. The network is the run's own before its first step;
    records of other classes need another last layer, and so a network from its seed. Raises
    UserError, which names the field, for inputs that do not fit.
    """
    # A subset is enough for a mean; evenly spaced, whatever the order of the file.
    rows = np.linspace(0, len(records) - 1, min(max_records, len(records))).astype(np.int64)
    try:
        inputs = resize_images(records.batch(rows), setup.spec.input_shape)
    except ValueError as error:
        raise UserError(f"{recipe_key}: {records.name}: {error}") from error
    if records.classes == setup.spec.classes:
        model = setup.build_initial_model()
    else:
        other = dataclasses.replace(setup.spec, classes=records.classes)
        model = models.initialize(other, setup.recipe.training.init_seed)
    return model, inputs, records.targets(rows)


def _released_powers(section: Redistribution, sensitivity: float, setup: MethodSetup) -> Tensor:
    """Return Equation 7 on private records: a noisy clipped sum over a Poisson sample.

    Each call draws new noise: a sum that is not released costs nothing, and the same noise is never
    added to two sums. With a fixed run key the noise is the same again.
    """
    key, dataset = derive_key(setup.key, "redistribution"), setup.private_records
    split = models.require_split(setup.build_initial_model())
    project_first_layer_norm(split, sensitivity)
    most = check_record_limit(setup.recipe, len(dataset))
    sample_key = derive_key(key, "sample")
    members = poisson_sample(sample_key, 0, len(dataset), section.sample_rate, records=len(dataset))
    total = torch.zeros(split.hidden_shape(setup.spec.input_shape), dtype=torch.float64)
    lost = torch.zeros_like(total)
    planned = setup.recipe.privacy.nominal_records or len(dataset)

    def powers(inputs: Tensor, labels: Tensor) -> Tensor:
        return clipped_powers(split, inputs, labels, section.beta, section.clip_norm)

    blocks = Blocks.for_batches(planned, section.sample_rate)
    for inputs, labels, real in _passes(
        dataset, members, blocks, key, setup.recipe.resources.rounding
    ):
        part = powers(inputs, labels)[real].sum(0)
        added = total + part  # what is lost of it, of terms >= 0, exactly
        larger, smaller = torch.maximum(total, part), torch.minimum(total, part)
        lost, total = lost + ((larger - added) + smaller), added
    total += lost
    return noised_powers(total, key, section.noise_multiplier, section.clip_norm, most)


def _passes(
    dataset: Dataset, members: np.ndarray, blocks: Blocks, key: bytes, rounding: Rounding
) -> Iterator[tuple[Tensor, Tensor, slice | np.ndarray]]:
    """Yield inputs and labels of the members in passes, and which rows of each count.

    Who runs together follows from each record's place and the key (`dpdist.gradients.passes`): one
    record more or less changes the passes of one block alone.
    """
    rows = rows_per_pass(blocks, _PASS, rounding)
    for _, some, real in labeled_passes(blocks, key, members, rows, rounding):
        yield dataset.batch(members[some]), dataset.targets(members[some]), real


def normalized_shares(sensitivities: Tensor, floor: float) -> Tensor:
    """Return K r, float64, mean 1, each at least `floor`.

    sensitivities: >= 0, of the hidden shape. Raises UserError where they, or their sum, are not
    finite.
    """
    weights = sensitivities.double().flatten()
    if not weights.sum().isfinite():
        raise UserError("beta: powers of the records' gradients are not finite; take a smaller one")
    r = redistribution(weights.numpy(), floor)
    return torch.from_numpy(r * r.size).view_as(sensitivities)


def heterogeneous_std(scale: float, k_r: Tensor) -> Tensor:
    """Return standard deviations sigma_r sqrt(K r): float32 of the hidden shape."""
    return (scale * k_r.sqrt()).float()


def gradient_powers(split: SplitModel, inputs: Tensor, labels: Tensor, beta: float) -> Tensor:
    """Return |dL/dh|^beta of each record, float32 (B, *hidden), of its cross-entropy L."""
    with sums_in_order(inputs.device):
        hidden = split.first(inputs).detach().requires_grad_()
        loss = nn.functional.cross_entropy(split.rest(hidden), labels, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, hidden)
    result: Tensor = gradient.abs().pow(beta)
    return result


def mean_powers(split: SplitModel, inputs: Tensor, labels: Tensor, beta: float) -> Tensor:
    """Return the mean powers of public records: float64 of the hidden shape."""
    batches = zip(inputs.split(_BATCH), labels.split(_BATCH), strict=True)
    total = sum(gradient_powers(split, x, y, beta).double().sum(0) for x, y in batches)
    assert isinstance(total, Tensor)
    return total / len(inputs)


def clipped_powers(
    split: SplitModel, inputs: Tensor, labels: Tensor, beta: float, clip_norm: float
) -> Tensor:
    """Return each record's vector, clipped to L2 norm clip_norm: float64 (B, *hidden).

    One record more or less moves their sum by at most clip_norm. PRIVATE until noise is added.
    """
    powers = gradient_powers(split, inputs, labels, beta).double()
    norms = powers.flatten(1).norm(dim=1)
    # A record without a finite gradient counts as zero.
    powers[~norms.isfinite()] = 0
    factors = (clip_norm / norms.nan_to_num(posinf=1.0).clamp(min=1e-300)).clamp(max=1)
    result: Tensor = powers * factors.view(-1, *[1] * (powers.dim() - 1))
    return result


def noised_powers(
    total: Tensor, key: bytes, noise_multiplier: float, clip_norm: float, records: int = 1
) -> Tensor:
    """Return the clipped sum with Gaussian noise, negative components set to zero.

    records: the most that it is over. A pass of 128 is off by at most 128 2^-53 times the sum of
    its norms, and compensated summation of passes by 2^-52 times all of it (Higham, Accuracy and
    Stability of Numerical Algorithms, sections 3.1 and 4.3): two sums by less than 2^-44 clip_norm
    for each record. The records of a block may move to other rows, each by `assumed_move`.
    """
    moves = (MAX_BLOCK_RECORDS + 1) * assumed_move(torch.float32)
    std = noise_multiplier * clip_norm * (1 + 2.0**-43 * records + moves)
    noisy = add_noise(total.numpy(), derive_key(key, "redistribution"), std)
    return torch.from_numpy(np.maximum(noisy, 0.0))


def train_without_privacy(
    model: nn.Module, inputs: Tensor, labels: Tensor, steps: int, after_step: Callable[[], None]
) -> None:
    """Train with a few Adam steps without privacy, so that gradients are informative.

    after_step: called at the start and after every step (keeps the first layer's norm).
    """
    after_step()
    rng = np.random.default_rng(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    size = min(_BATCH // 2, len(inputs))
    for _ in range(steps):
        rows = torch.from_numpy(rng.choice(len(inputs), size, replace=False))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[rows]), labels[rows]).backward()
        optimizer.step()
        after_step()
