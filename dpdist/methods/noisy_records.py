"""Noisy records: each record is noised once, before training; the rest is post-processing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from dpdist.config.sections import BaseRecipe
from dpdist.core.fields import Positive
from dpdist.methods.base import Capabilities, Execution, Method
from dpdist.privacy.phases import GaussianSteps, NoisyRecords
from dpdist.privacy.plan import PrivacyPlan

if TYPE_CHECKING:
    from torch import Tensor

    from dpdist.data import Dataset
    from dpdist.privacy.phases import Phase


class NoisyRecordsMethod(Method):
    """(epsilon, delta)-DP of each record separately (local), whatever uses the noisy records.

    An input, clipped to L2 norm `input_norm` (input units), gets Gaussian noise once, of standard
    deviation privacy.noise_multiplier (given, or computed for privacy.epsilon) times input_norm;
    its label is kept with probability e^label_epsilon / (e^label_epsilon + classes - 1), else
    replaced by one of the others with equal probability. Training sees nothing else, so the model
    may be released. It is the sound part of residual perturbation's noise on inputs.

    Attributes:
        input_norm: L2 norm to which an input is clipped, in input units.
        label_epsilon: Epsilon of the randomized label.
    """

    name: Literal["noisy-records"] = "noisy-records"
    display_name: ClassVar[str] = "training on records that were noised once"
    excluded: ClassVar[Mapping[str, str]] = {"audit": "", "tune": ""}
    input_norm: Positive
    label_epsilon: Positive

    def check(self, recipe: BaseRecipe) -> None:
        """Raise ValueError if the number of released records would depend on records."""
        super().check(recipe)
        if recipe.privacy.adjacency != "replace-one":
            raise ValueError(
                "privacy.adjacency: must be replace-one: the number of records is public"
            )
        chosen = recipe.data.content_filter_key
        if chosen is not None:
            raise ValueError(
                f"method {self.name} does not support data.{chosen}, which selects records by "
                "content"
            )

    @property
    def capabilities(self) -> Capabilities:
        """Return that the noise is drawn before the steps."""
        return Capabilities(steps_are_post_processing=True)

    def cost(self, steps: GaussianSteps) -> tuple[Phase, ...]:
        """Return one release of each record; the steps have no privacy cost."""
        noises = (steps.noise_multiplier, self.label_epsilon)
        return (NoisyRecords(*noises, steps.steps, steps.sample_rate, steps.batch_cap),)

    def noise_std(self, plan: PrivacyPlan) -> float:
        """Return the standard deviation of the noise on an input."""
        phase: Any = plan.phases[0]
        return float(phase.noise_multiplier * self.input_norm)

    def assumptions(self, recipe: BaseRecipe) -> list[str]:
        """Return the clip of inputs."""
        return [f"every input is clipped to L2 norm {self.input_norm:g} before it is noised"]

    def describe(self, plan: PrivacyPlan) -> str:
        """Return the noise on records, and the steps, in words."""
        step = plan.step(0)
        return (
            f"inputs clipped to {self.input_norm:g} with noise {self.noise_std(plan):.4g}, drawn "
            f"once; labels by randomized response; then {plan.steps:,} steps, expected batch "
            f"{step.expected_batch:g}"
        )

    def execution(self) -> Execution[Any]:
        """Return the training on noisy records."""
        return NoisyRecordsExecution(self)


class NoisyRecordsExecution(Execution[NoisyRecordsMethod]):
    """The usual steps, on records with noise."""

    def transform_records(self, records: Any, plan: PrivacyPlan, key: bytes) -> NoisyDataset:
        """Return the records with their noise, drawn by `key`."""
        method = self.method
        return NoisyDataset(
            records, key, method.input_norm, method.noise_std(plan), method.label_epsilon
        )


@dataclass(frozen=True)
class NoisyDataset:
    """Records with their own fixed noise.

    std: standard deviation of the noise on an input clipped to `norm`.
    """

    _records: Dataset
    _key: bytes
    norm: float
    std: float
    label_epsilon: float

    @property
    def name(self) -> str:
        """Return the name of the records."""
        return self._records.name

    @property
    def classes(self) -> int:
        """Return the number of classes."""
        return self._records.classes

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Return the shape of one input."""
        return self._records.input_shape

    def __len__(self) -> int:
        return len(self._records)

    @cached_property
    def _indices(self) -> np.ndarray:
        return np.arange(len(self))

    def batch(self, indices: np.ndarray | slice) -> Tensor:
        """Return noisy inputs, float32 (B, *input_shape).

        Noise is keyed by position: equal records must get different noise, which hides that they
        are equal.
        """
        import torch

        from dpdist.gradients.noise import add_noise
        from dpdist.randomness.keys import derive_key

        inputs = self._records.batch(indices).double().flatten(1).numpy()
        inputs = np.where(np.isfinite(inputs), inputs, 0.0)
        norms = np.linalg.norm(inputs, axis=1, keepdims=True)
        # Below the norm by more than the rounding of its computation and of this product.
        inputs = inputs * np.minimum(1.0, self.norm * (1 - 1e-9) / np.maximum(norms, 1e-300))
        noisy = [
            add_noise(row, derive_key(self._key, "input", place), self.std)
            for place, row in zip(self._indices[indices].tolist(), inputs, strict=True)
        ]
        shape = (len(noisy), *self.input_shape)
        return torch.from_numpy(np.array(noisy, dtype=np.float32).reshape(shape))

    def targets(self, indices: np.ndarray | slice) -> Tensor:
        """Return labels by randomized response, int64 (B,)."""
        import torch

        labels = self._records.targets(indices).numpy()
        return torch.from_numpy((labels + self._label_shifts[indices]) % self.classes)

    @cached_property
    def _label_shifts(self) -> np.ndarray:
        """Return the shift of each label, 0 for a label that is kept: int64 (N,)."""
        from dpdist.randomness.keys import derive_key, stream_words

        others = self.classes - 1
        kept = 1 / (1 + others * math.exp(-self.label_epsilon))
        bits = stream_words(derive_key(self._key, "labels"), 0, 2 * len(self)).reshape(-1, 2)
        other = 1 + (bits[:, 1] % np.uint64(max(1, others))).astype(np.int64)
        return np.where((bits[:, 0] >> np.uint64(11)) * 2.0**-53 < kept, 0, other)
