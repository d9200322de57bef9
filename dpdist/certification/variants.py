"""Cohen's certificate by other bounds: Hoeffding's, and a separate bound of the runner-up.

The certificate with a separate bound of the runner-up has R = sigma / 2 (Phi^-1(p_a) -
Phi^-1(p_b)), for p_a a lower bound of the class's probability and p_b an upper bound of every
other's; CERTIFY takes p_b = 1 - p_a. If the rest is spread over several classes, the runner-up has
less and the radius is larger; a class without a majority can be certified. Nine tenths of alpha are
for p_a, a tenth for p_b, both by Clopper and Pearson, p_b from the largest count among the other
classes. Other tools split the error over these classes, which is not necessary.
*Proof.* The true runner-up is one class b, whatever was drawn. Its own bound, at a tenth of alpha,
is wrong with that probability; the bound from the largest count is at least that bound. With a
valid p_a it makes the radius too large only if it is below b's probability. As p_b is never taken
above 1 - p_a, the radius is never below Cohen's at 0.9 alpha. A draw without a class (its logits
are not finite) counts as the runner-up's, whichever class that is: then that count is never too
small, and answers without a class are bounded with the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import ArrayLike
from pydantic import model_validator

from dpdist.certification.certificate import (
    PartialCounts,
    Verdict,
    require_setting,
    selected_class,
    total_counts,
)
from dpdist.certification.cohen import Cohen, equivalent_input_noise
from dpdist.certification.noise import Gaussian, Noise, gaussian_l2_radius_two_class
from dpdist.certification.table import ABSTAIN
from dpdist.core.binomial import clopper_pearson_lower, clopper_pearson_upper, hoeffding_lower

if TYPE_CHECKING:
    import pyarrow as pa


# --- Hoeffding's bound of votes ---------------------------------------------------------------


class HoeffdingVotes(Cohen):
    """Settings of a vote as `dpdist.Cohen`, with Hoeffding's bound of the probability.

    Guarantee: that of `dpdist.Cohen`, at the same `alpha`. On the same draws no radius is larger.
    It is for comparison with certificates that use this bound, such as PixelDP's (Lecuyer et al.,
    2019). In a recipe, set ``bound: hoeffding`` in addition to sigma.

    Each argument is an attribute of the same name.

    Args:
        sigma: standard deviation of the noise, in input units; all further fields are those of
            `dpdist.Cohen`.

    Raises:
        pydantic.ValidationError: as for `dpdist.Cohen`.

    Source:
        Hoeffding, Journal of the American Statistical Association 1963.

    Example:
        >>> import dpdist
        >>> by_hoeffding = dpdist.HoeffdingVotes(sigma=0.25).lower_bound(990, 1000, 0.001)
        >>> by_cohen = dpdist.Cohen(sigma=0.25).lower_bound(990, 1000, 0.001)
        >>> round(float(by_hoeffding), 3), round(float(by_cohen), 3)
        (0.931, 0.976)
    """

    mode: Literal["hoeffding"] = "hoeffding"  # type: ignore[assignment]
    bound: Literal["hoeffding"] = "hoeffding"
    vote_title: ClassVar[str] = "vote (Hoeffding)"
    draws_words: ClassVar[str] = "{n:,} draws an input, bounded by Hoeffding's inequality"

    @classmethod
    def lower_bound(cls, hits: ArrayLike, draws: ArrayLike, alpha: float) -> Any:
        """Return Hoeffding's lower confidence bound of a class's probability.

        Arguments, shapes and errors are those of `dpdist.Cohen.lower_bound`.

        Returns:
            A float64 in [0, 1], never above Clopper and Pearson's; for arrays, a float64 array of
            the broadcast shape of hits and draws.
        """
        return hoeffding_lower(hits, draws, alpha)


# --- the runner-up's own bound ----------------------------------------------------------------


_OF_RUNNER_UP = 0.1  # of the error


class TwoClass(Cohen):
    """Settings of a vote as `dpdist.Cohen` that also bounds the runner-up. Gaussian noise only.

    Guarantee: for each input by itself, with probability at least 1 - `alpha` over the draws, the
    smoothed classifier answers the certified class everywhere within the certified L2 radius, or
    the verdict abstains. The radius is sigma / 2 (Phi^-1(p_a) - Phi^-1(p_b)). Nine tenths of alpha
    are for the lower bound p_a of the class, a tenth for the upper bound p_b of every other class.
    The radius is never below that of `dpdist.Cohen` at 0.9 alpha. The module's docstring has the
    proof.

    Each argument is an attribute of the same name.

    Args:
        sigma: standard deviation of the noise, in input units; all further fields are those of
            `dpdist.Cohen`, with `noise` "gaussian".

    Raises:
        pydantic.ValidationError: as for `dpdist.Cohen`, or the noise is not Gaussian.

    Source:
        Cohen, Rosenfeld and Kolter, ICML 2019: Theorem 1, with both bounds.

    Example:
        >>> import numpy as np, torch, dpdist
        >>> inputs, labels = np.eye(2, dtype=np.float32), np.array([0, 1])
        >>> model = torch.nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.eye(2))  # answers the larger coordinate
        >>> settings = dpdist.TwoClass(sigma=0.25, n=1000)
        >>> table = dpdist.certify(model, (inputs, labels), settings, executor="local")
        >>> table.prediction.tolist(), bool((table.radius > 0.25).all())
        ([0, 1], True)
    """

    mode: Literal["two-class"] = "two-class"  # type: ignore[assignment]
    draws_words: ClassVar[str] = "{n:,} draws an input, the runner-up bounded by its own"

    @model_validator(mode="after")
    def _require_gaussian(self) -> Self:
        require_setting(self.noise == Gaussian.name, "noise", "gaussian when mode is two-class")
        return self

    def decide(self, partials: Sequence[PartialCounts], sampler: Any) -> Verdict:
        """Return the certificate of one input by both bounds, a `Verdict`, from all its counts.

        Args:
            partials: results of `sample` that together cover every block once.
            sampler: the result of `build_sampler(model, input_shape)`.

        Returns:
            A `Verdict`: `prediction` (int, the certified class; -1: abstains), `radius` (float, L2
            in input units; 0 if it abstains), `p_lower` (float, lower bound of the class's
            probability), `p_upper` (float, upper bound of every other class's), `selected` (int),
            `k` of `n` draws for it, and `histogram` (draws of each class).
        """
        counts = total_counts(partials, "histogram", self.n)
        return certify_against_runner_up(
            selected_class(partials), counts, self.alpha, sampler.equivalent_noise, self.n
        )

    @classmethod
    def extra_columns(cls) -> Mapping[str, Any]:
        return {**super().extra_columns(), "p_upper": (float, 0)}

    @classmethod
    def recompute_columns(cls, table: pa.Table, alpha: float) -> dict[str, np.ndarray]:
        counts = np.asarray(table["histogram"].to_pylist(), dtype=np.int64)
        selected = table["selected"].to_numpy()
        lower, upper = runner_up_bounds(counts, selected, alpha, table["n"].to_numpy())
        sigma = equivalent_input_noise(table).sigma
        radius = np.asarray(gaussian_l2_radius_two_class(lower, upper, sigma))
        prediction = np.where(radius > 0, selected, ABSTAIN)
        return {"p_lower": lower, "p_upper": upper, "radius": radius, "prediction": prediction}

    @classmethod
    def achievable_radius(cls, table: pa.Table, label_probability: np.ndarray) -> np.ndarray | None:
        """Return the L2 radius of each input with unlimited draws, float64 (N,), in input units.

        Args:
            table: the table of certificates, of which the noise and the number of classes are read.
            label_probability: (N,), the probability of each input's label under the noise.

        Returns:
            An array of radii, if the other classes have equal parts of the remaining probability;
            -1 if the label's probability is not above such a part. Never None.
        """
        others = max(1, len(table["histogram"][0]) - 1)
        rest = (1 - label_probability) / others
        radius = gaussian_l2_radius_two_class(
            label_probability, rest, equivalent_input_noise(table).sigma
        )
        return np.where(label_probability > rest, radius, -1.0)


def runner_up_bounds(
    counts: np.ndarray, selected: np.ndarray, alpha: ArrayLike, draws: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return bounds below each selected class's probability and above every other's.

    Each pair is wrong with probability at most alpha.

    Args:
        counts: int (N, classes).
        selected: class of each row, (N,).
        alpha: error of each row, or one for all.
        draws: (N,), their number, including those without a class.

    Returns:
        Lower and upper bounds, float64 (N,) each.
    """
    others = counts.copy()
    others[np.arange(len(counts)), selected] = 0
    hits = counts.sum(1) - others.sum(1)
    runner_up = others.max(1) + draws - counts.sum(1)
    lower = np.asarray(clopper_pearson_lower(hits, draws, (1 - _OF_RUNNER_UP) * np.asarray(alpha)))
    upper = clopper_pearson_upper(runner_up, draws, _OF_RUNNER_UP * np.asarray(alpha))
    left = np.nextafter(1 - lower, 2)
    return lower, np.minimum(np.minimum(upper, left), 1.0)


def certify_against_runner_up(
    selected: int, counts: np.ndarray, alpha: float, noise: Noise, draws: int | None = None
) -> Verdict:
    """Return the verdict as `dpdist.certification.cohen.certify`, by both bounds."""
    n = int(counts.sum()) if draws is None else draws
    (p_lower,), (p_upper,) = runner_up_bounds(
        counts[None], np.array([selected]), alpha, np.array([n])
    )
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
