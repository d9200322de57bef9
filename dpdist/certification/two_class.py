"""Cohen's certificate with the runner-up's own bound: sigma / 2 (Phi^-1(p_a) - Phi^-1(p_b)).

Theorem 1 of Cohen et al. (ICML 2019) certifies that radius for p_a a lower bound of the class's
probability and p_b an upper bound of every other's; their CERTIFY takes p_b = 1 - p_a. Where the
rest is spread over several classes the runner-up has less, and the radius is larger; a class may
even be certified that has no majority.

Nine tenths of alpha are for p_a, a tenth for p_b, both by Clopper and Pearson, p_b from the largest
count among the other classes. Other tools share the error among these classes; none is needed.
*Proof.* The runner-up is one class b by the truth, whatever was drawn. Its own bound, at a tenth of
alpha, is wrong with that probability; the bound from the largest count is never smaller, and beside
a true p_a it makes the radius too large only if it is below b's probability. As p_b <= 1 - p_a is
taken where it is smaller, the radius is never below Cohen's at 0.9 alpha.

A draw without a class (its logits are not finite) counts as the runner-up's, whoever that is: then
its count is never too small, and an answer that is no class is bounded with the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np
from numpy.typing import ArrayLike
from pydantic import model_validator

from dpdist.base.binomial import clopper_pearson_lower, clopper_pearson_upper
from dpdist.certification.certificate import Partial, require, selected_by, totals
from dpdist.certification.cohen import Cohen
from dpdist.certification.noises import Gaussian, Noise
from dpdist.certification.quadrature import certified_by
from dpdist.certification.radii import gaussian_l2_radius_two_class
from dpdist.certification.verdict import ABSTAIN, Verdict

if TYPE_CHECKING:
    import pyarrow as pa

    from dpdist.base.table_files import Column
    from dpdist.certification.places import SmoothedPlace

_OF_RUNNER_UP = 0.1  # of the error


class TwoClass(Cohen):
    """Cohen's procedure, the runner-up bounded by its own count. Gaussian noise."""

    mode: Literal["two-class"] = "two-class"  # type: ignore[assignment]
    counted: ClassVar[str] = "{n:,} draws an input, the runner-up bounded by its own"

    @model_validator(mode="after")
    def _gaussian(self) -> Self:
        require(self.noise == Gaussian.name, "noise", "gaussian when mode is two-class")
        return self

    def verdict(self, partials: Sequence[Partial], place: SmoothedPlace) -> Verdict:
        counts = totals(partials, "histogram", self.n)
        return certify(selected_by(partials), counts, self.alpha, place.certified, self.n)

    @classmethod
    def table_schema(cls) -> pa.Schema:
        import pyarrow as pa

        return super().table_schema().append(pa.field("p_upper", pa.float64(), nullable=False))

    @classmethod
    def columns(cls) -> Mapping[str, Column]:
        return {**super().columns(), "p_upper": (float, 0), "histogram": (object, None)}

    @classmethod
    def made(cls, table: pa.Table, alpha: float) -> dict[str, np.ndarray]:
        counts = np.asarray(table["histogram"].to_pylist(), dtype=np.int64)
        selected = table["selected"].to_numpy()
        lower, upper = bounds(counts, selected, alpha, table["n"].to_numpy())
        sigma = certified_by(table).sigma
        radius = np.asarray(gaussian_l2_radius_two_class(lower, upper, sigma))
        prediction = np.where(radius > 0, selected, ABSTAIN)
        return {"p_lower": lower, "p_upper": upper, "radius": radius, "prediction": prediction}

    @classmethod
    def reach(cls, table: pa.Table, label: np.ndarray) -> np.ndarray:
        """With what is left spread evenly over the other classes."""
        others = max(1, len(table["histogram"][0]) - 1)
        rest = (1 - label) / others
        radius = gaussian_l2_radius_two_class(label, rest, certified_by(table).sigma)
        return np.where(label > rest, radius, -1.0)


def bounds(
    counts: np.ndarray, selected: np.ndarray, alpha: ArrayLike, draws: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Below each selected class's probability and above every other's, each pair wrong with
    probability at most alpha. counts: int (N, classes); selected, alpha: of each row; draws (N,):
    how many were made, those without a class included."""
    others = counts.copy()
    others[np.arange(len(counts)), selected] = 0
    hits = counts.sum(1) - others.sum(1)
    runner_up = others.max(1) + draws - counts.sum(1)
    lower = np.asarray(clopper_pearson_lower(hits, draws, (1 - _OF_RUNNER_UP) * np.asarray(alpha)))
    upper = clopper_pearson_upper(runner_up, draws, _OF_RUNNER_UP * np.asarray(alpha))
    left = np.nextafter(1 - lower, 2)
    return lower, np.minimum(np.minimum(upper, left), 1.0)


def certify(
    selected: int, counts: np.ndarray, alpha: float, noise: Noise, draws: int | None = None
) -> Verdict:
    """As `dpdist.certification.cohen.certify`, by both bounds. counts: int (classes,)."""
    n = int(counts.sum()) if draws is None else draws
    (p_lower,), (p_upper,) = bounds(counts[None], np.array([selected]), alpha, np.array([n]))
    radius = float(gaussian_l2_radius_two_class(p_lower, p_upper, noise.sigma))
    return Verdict(
        prediction=selected if radius > 0 else ABSTAIN,
        selected=selected,
        k=int(counts[selected]),
        n=n,
        p_lower=float(p_lower),
        radius=radius,
        histogram=tuple(int(count) for count in counts),
        p_upper=float(p_upper),
    )
