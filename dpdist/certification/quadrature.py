"""Gaussian noise on the input and behind the first layer, in one pass: both certify together.

The network is rest(W x + W e + n), e ~ N(0, s^2 I), n ~ N(0, r^2 diag(Kr)): all that is drawn is
Gaussian before the first thing that is not linear. A shift d of the input moves the mean of what
the rest sees by W d, under the covariance S = s^2 W W^T + r^2 diag(Kr), and whatever the rest does
is post-processing: it is randomised smoothing at Mahalanobis length (d^T W^T S^-1 W d)^(1/2). With
Delta the L2 norm of (Kr)^-1/2 W,

    d^T W^T S^-1 W d <= |d|^2 / (s^2 + (r / Delta)^2),

with equality for some d, so both noises certify what noise of s^2 + (r / Delta)^2 on the input
alone would: sizes add in quadrature. Proof in docs/how-to/certification.md. Where the second noise
is not Gaussian, or not behind an affine first layer, the larger of the two sizes holds and no more;
for a product of two passes with one noise each, the harmonic sum. kappa + phi, as DPAL's
Proposition 1 has it, holds for neither.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpdist.base.errors import UserError
from dpdist.base.reading import check_shape
from dpdist.certification.noises import NOISES, Gaussian, Noise

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import nn

    from dpdist.randomness.places import Place

_DOWN = 1 - 1e-12  # rounding of the quotient, the squares and the root


@dataclass(frozen=True)
class Quadrature:
    """sigma: s, on the input. hidden: r, root mean square behind the first layer. sensitivity: a
    bound of Delta, that layer's L2 norm over sqrt(Kr)."""

    sigma: float
    hidden: float
    sensitivity: float

    @property
    def behind(self) -> float:
        """The noise on the input that the hidden noise alone is worth: r / Delta."""
        return self.hidden / self.sensitivity * _DOWN

    @property
    def both(self) -> float:
        """The noise on the input that both together are worth; never rounded up."""
        return math.hypot(self.sigma, self.behind) * _DOWN

    @property
    def as_printed(self) -> float:
        """What kappa + phi takes them for. It does not hold; for comparison only."""
        return self.sigma + self.behind

    @property
    def about(self) -> dict[str, Any]:
        """What a table says of it beside sigma, as JSON."""
        return {"hidden": self.hidden, "sensitivity": {"l2": self.sensitivity}}


def of_place(
    where: Place, model: nn.Module, input_shape: tuple[int, ...], sigma: float
) -> Quadrature | None:
    """Of a model with noise at ``where``, input noise sigma included; None where that is all that
    certifies its inputs."""
    noise = where.behind_affine(model, input_shape)
    if noise is None:
        return None
    from dpdist.certification.operator_norms import l2_to_l2
    from dpdist.models import require_split

    layer = require_split(model).affine(input_shape)
    return Quadrature(sigma, noise.scale, l2_to_l2(layer, input_shape, noise.shares))


def of_table(table: pa.Table) -> Quadrature | None:
    """What a table of votes states; None where its input noise alone certifies."""
    from dpdist.certification.table import about

    return stated(about(table), table["sigma"][0].as_py())


def certified_by(table: pa.Table) -> Noise:
    """The noise on the input that all noise of a table of votes is worth."""
    both = of_table(table)
    if both is not None:
        return Gaussian(both.both)
    return NOISES[table["noise"][0].as_py()](table["sigma"][0].as_py())


def stated(about: Mapping[str, Any], sigma: float) -> Quadrature | None:
    """What a table's description states, at its sigma. Raises UserError where it is damaged."""
    if "hidden" not in about:
        return None
    where, shape = "the table's description", {"hidden": float, "sensitivity.l2": float}
    found = check_shape(dict(about), where, shape)
    hidden, sensitivity = float(found["hidden"]), float(found["sensitivity"]["l2"])
    if not (0 < hidden < math.inf and 0 < sensitivity < math.inf):
        raise UserError(f"{where}: damaged: hidden and sensitivity.l2 must be > 0")
    return Quadrature(sigma, hidden, sensitivity)
