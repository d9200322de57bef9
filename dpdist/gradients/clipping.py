"""Clip factors from per-example gradient norms, which bound the contribution of one example.

A clipping turns per-example, per-layer squared norms into factors for the gradients.
`sensitivity` is the largest L2 norm one example's clipped gradient can have, hence the L2
sensitivity of the clipped sum under add-or-remove-one.

Rounding: norms and sums are computed in floating point, so every factor is lowered by a relative
`slack`. The change by one record then stays within the sensitivity, rounding included, and the clip
is slightly lower than the given one: by 0.0015 % for the norms and, in keyed blocks, by 0.4 % for
the sum and for records that move to a different row.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpdist.core.errors import UserError


def rounding_slack(dtype: torch.dtype) -> float:
    """Return the relative bound on the rounding of a computed per-example gradient norm.

    `dpdist.gradients.per_example` proves 2^-16.9 for float32 and 2^-43 for float64: a norm is a
    product of two `squared_row_norms` at most, or float64 throughout.
    """
    return 2.0**-40 if dtype == torch.float64 else 2.0**-16


# Below this sensitivity, float32 factors are off by too much: by 2^-150 at worst, times a finite
# norm of at most 2^75 (2^64 for each 128 entries, of 2^28), for each of a block's 2^10 records.
_LEAST_FLOAT32_SENSITIVITY = 2.0**-48


def max_batch(dtype: torch.dtype) -> int:
    """Return the largest number of records of a step that `sum_slack` covers."""
    return 2**13 if dtype == torch.float64 else 2**19


def max_run_length(rows: int, sensitivity: float = 1.0) -> int:
    """Return the number of clipped gradients to add in float32 before float64 takes over.

    It bounds run * rows by 2^13, hence the sum's rounding. rows: number of clipped gradients in a
    sum. sensitivity: largest norm of one.
    """
    if sensitivity < _LEAST_FLOAT32_SENSITIVITY:
        return 1
    run = min(32, (1 << 13) // max(1, rows))
    return run if run >= 4 else 1


def assumed_move(dtype: torch.dtype) -> float:
    """Return the assumed bound on a kernel's rounding, relative to the sensitivity.

    It bounds the change of a record's computed clipped gradient when the record moves to a
    different row of a pass, or to a pass of a different length. `sum_slack` rests on it, and
    nothing proves it. `GradientEngine.measure_moves` measures the change on public examples after a
    training, and the card lists both numbers.
    """
    return 2.0**-35 if dtype == torch.float64 else 2.0**-19


def sum_slack(dtype: torch.dtype) -> float:
    """Return a bound on the rounding of the difference of two sums, relative to the sensitivity C.

    The sums differ by one record: n <= 1025 records of its keyed block
    (`dpdist.gradients.sampling`) move, and all others keep their rows and passes.

    Let S and S' be the computed sums without and with the record, f_b and g_b the computed factor
    and gradient of record b. Then S' - S is the new record's f g, whose norm is at most
    C / (1 + slack) up to the norms' own rounding (`rounding_slack`); plus, for each of the n others
    of its block, the change of f_b g_b by the move; plus the rounding of both sums. In float32:

    1. Moves. By assumption (`assumed_move`) f_b g_b changes by at most 2^-19 C: together by at most
       1025 * 2^-19 <= 1.96e-3. That covers all of a row's rounding: activations, back-signals,
       norms and factors.
    2. Runs. A run of r gradients in unit roundoff u = 2^-24 is off by at most (r + 2) u times the
       sum of their norms (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1).
       Both sums together: 2 (r + 2) u n <= 1.23e-3 for r n <= 2^13 (`max_run_length`).
    3. Positions. Sums over T positions run in float64: each is off by at most (n T + 2) 2^-53 times
       sum_b f_b sum_t |l_bt| |r_bt|, whatever the order. The norms' floor under cancellation
       (`per_example._CANCELLATION_FLOOR`, 2^-42 T^2 of the square) keeps f_b sum_t |l_bt| |r_bt|
       below 2^21 / T times C. Both sums together: 2 n (n T + 2) 2^-53 2^21 / T <= 2^-31 n (n + 2)
       <= 4.9e-4 for every T and width.
    4. Blocks. The sums of passes are added in float64. Over a batch of N records both sums are off
       by at most 2 N^2 2^-53 <= 6.2e-5 for N <= 2^19.

    Items 2 and 3 are 1.72e-3, all four 3.74e-3. A factor 1 + slack of at least
    (1 + 1.79e-3 + 2^-16) / (1 - 1.96e-3) = 1.00377 keeps |S' - S| <= C; 2^-8 = 3.91e-3 is more.

    If the number of records is protected, those after the record have different positions in S and
    S'. Both are compared under a coupling in which each record keeps its words, shard and block
    (`dpdist.training.private_step.build_shards`), so that the same bound applies.

    In float64 the assumption is 2^-35, of a gradient with its positions summed up: 1025 * 2^-35 <=
    2^-24.99. Adding N records of a batch rounds by 2 N^2 2^-53 <= 2^-26 for N <= 2^13, whatever its
    blocks. Together that is below 2^-24.
    """
    return 2.0**-24 if dtype == torch.float64 else 2.0**-8


def _positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise UserError(f"{name} must be a positive finite number, got {value}")


class Clipping(ABC):
    """The factors of an example, a function of only that example's own norms."""

    @property
    @abstractmethod
    def sensitivity(self) -> float:
        """Return the largest L2 norm of one example's clipped gradient, a float."""

    @abstractmethod
    def factors(self, squared_norms: Tensor, slack: float) -> Tensor:
        """Return the factors by which examples' gradients are multiplied.

        Args:
            squared_norms: (layers, B), finite: squared L2 norms by layer and example.
            slack: relative error of a computed norm that the clip allows for.

        Returns:
            A tensor (layers, B); (1, B) if all layers share one factor.
        """

    def check(self, layers: Sequence[str]) -> None:  # noqa: B027 - most clippings fit any model
        """Raise UserError if this clipping does not fit a model with these layers. Returns nothing.

        Args:
            layers: names of the trainable layers.
        """


@dataclass(frozen=True)
class FlatClipping(Clipping):
    """A clip of a record's whole gradient to one norm: g / max(1, ||g|| / C).

    Guarantee: a record adds at most `sensitivity` = C to a sum, rounding included.

    Each argument is an attribute of the same name.

    Args:
        clip_norm: C, an L2 norm over all parameters jointly.

    Raises:
        UserError: C is not positive and finite.

    Source: Abadi et al., "Deep Learning with Differential Privacy" (2016), Algorithm 1.

    Example:
        >>> import dpdist, torch
        >>> clipping = dpdist.FlatClipping(1.0)
        >>> norms = torch.tensor([[9.0, 0.01], [16.0, 0.01]])  # squared: 2 layers, 2 records
        >>> clipping.factors(norms, slack=0.0)
        tensor([[0.2000, 1.0000]])
    """

    clip_norm: float

    def __post_init__(self) -> None:
        _positive("clip_norm", self.clip_norm)

    @property
    def sensitivity(self) -> float:
        """Return the largest L2 norm of one example's clipped gradient, a float: `clip_norm`."""
        return self.clip_norm

    def factors(self, squared_norms: Tensor, slack: float) -> Tensor:
        """Return the factor of each example's gradient, a tensor (1, B) with values in (0, 1].

        Args:
            squared_norms: (layers, B), squared L2 norms of the gradients by layer and example.
            slack: relative error of a computed norm that the clip allows for.
        """
        norms = squared_norms.sum(0, keepdim=True).sqrt()
        return (self.clip_norm / (norms * (1 + slack))).clamp(max=1.0)


@dataclass(frozen=True)
class AutomaticClipping(Clipping):
    """A normalization of a record's gradient: C g / (||g|| + gamma).

    Guarantee: a record adds at most `sensitivity` = C to a sum, rounding included: the computed
    norm enters with the same slack as in the flat clip, and gamma only shortens further.

    Each argument is an attribute of the same name.

    Args:
        clip_norm: C; 1 loses nothing, since the learning rate scales the step.
        gamma: keeps small gradients small, which the paper's convergence proof needs; 0.01 is the
            value of its experiments.

    Raises:
        UserError: a value is not positive and finite.

    Source: Bu et al., "Automatic Clipping" (2023).

    Example:
        >>> import dpdist, torch
        >>> dpdist.AutomaticClipping(1.0).factors(torch.tensor([[0.9801]]), slack=0.0)
        tensor([[1.]])
    """

    clip_norm: float
    gamma: float = 0.01

    def __post_init__(self) -> None:
        _positive("clip_norm", self.clip_norm)
        _positive("gamma", self.gamma)

    @property
    def sensitivity(self) -> float:
        """Return the largest L2 norm of one example's clipped gradient, a float: `clip_norm`."""
        return self.clip_norm

    def factors(self, squared_norms: Tensor, slack: float) -> Tensor:
        """Return the factor of each example's gradient, a tensor (1, B) with values above 0.

        Args:
            squared_norms: (layers, B), squared L2 norms of the gradients by layer and example.
            slack: relative error of a computed norm that the clip allows for.
        """
        norms = squared_norms.sum(0, keepdim=True).sqrt()
        return self.clip_norm / (norms * (1 + slack) + self.gamma)


@dataclass(frozen=True)
class NoClipping(Clipping):
    """Unclipped gradients, for training without privacy: an example's contribution is unbounded."""

    @property
    def sensitivity(self) -> float:
        return math.inf

    def factors(self, squared_norms: Tensor, slack: float) -> Tensor:
        return torch.ones_like(squared_norms[:1])


@dataclass(frozen=True)
class PerLayerClipping(Clipping):
    """A clip of the gradient of each layer l to its own norm C_l.

    Guarantee: a record adds at most `sensitivity` = sqrt(sum_l C_l^2) to a sum, rounding included.

    Each argument is an attribute of the same name.

    Args:
        clip_norm: the total sensitivity; without `layer_norms` each of the L layers gets
            clip_norm / sqrt(L).
        layer_norms: C_l in the order of `GradientEngine.layers`, whose root sum of squares is
            `clip_norm`: `PerLayerClipping.from_layer_norms` computes it.

    Raises:
        UserError: a norm is not positive and finite, or `clip_norm` is not the total.

    Source: McMahan et al., "Learning Differentially Private Recurrent Language Models" (2018).

    Example:
        >>> import dpdist
        >>> dpdist.PerLayerClipping.from_layer_norms([3.0, 4.0]).sensitivity
        5.0
    """

    clip_norm: float
    layer_norms: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        _positive("clip_norm", self.clip_norm)
        if self.layer_norms is not None:
            for norm in self.layer_norms:
                _positive("every layer norm", norm)
            total = math.sqrt(math.fsum(norm * norm for norm in self.layer_norms))
            if not math.isclose(total, self.clip_norm, rel_tol=1e-9):
                raise UserError(
                    f"the layer norms have total sensitivity {total:g}, not clip_norm = "
                    f"{self.clip_norm:g}: use PerLayerClipping.from_layer_norms(layer_norms)"
                )

    @classmethod
    def from_layer_norms(cls, layer_norms: Sequence[float]) -> PerLayerClipping:
        """Return the `PerLayerClipping` with these norms.

        Args:
            layer_norms: C_l in the order of `GradientEngine.layers`.

        Returns:
            A `PerLayerClipping`; its `clip_norm` is the root sum of squares of the norms.

        Raises:
            UserError: a norm is not positive and finite.
        """
        norms = tuple(float(norm) for norm in layer_norms)
        return cls(math.sqrt(math.fsum(norm * norm for norm in norms)), norms)

    @property
    def sensitivity(self) -> float:
        """Return the largest L2 norm of one example's clipped gradient, a float: `clip_norm`."""
        return self.clip_norm

    def check(self, layers: Sequence[str]) -> None:
        """Raise UserError unless there is one norm for each layer of a model. Returns nothing.

        Args:
            layers: names of the model's layers. Without `layer_norms` any number is accepted.
        """
        if self.layer_norms is not None and len(self.layer_norms) != len(layers):
            raise UserError(
                f"{len(self.layer_norms)} layer norms given for {len(layers)} trainable layers: "
                + ", ".join(layers)
            )

    def factors(self, squared_norms: Tensor, slack: float) -> Tensor:
        """Return the factor of each layer and example, a tensor (layers, B) with values in (0, 1].

        Args:
            squared_norms: (layers, B), squared L2 norms of the gradients by layer and example.
            slack: relative error of a computed norm that the clip allows for.
        """
        count = squared_norms.shape[0]
        limits = self.layer_norms or (self.clip_norm / math.sqrt(count),) * count
        limit = torch.tensor(limits, dtype=squared_norms.dtype, device=squared_norms.device)
        return (limit[:, None] / (squared_norms.sqrt() * (1 + slack))).clamp(max=1.0)


def make_clipping(rule: str, clip_norm: float) -> Clipping:
    """Return the clipping rule with total sensitivity clip_norm, infinite for "none"."""
    if rule == "none":
        return NoClipping()
    if rule == "automatic":
        return AutomaticClipping(clip_norm)
    if rule == "per-layer":
        return PerLayerClipping(clip_norm)
    return FlatClipping(clip_norm)
