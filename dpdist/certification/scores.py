"""Certificates of one input from expected scores under the model's own hidden noise.

The network is rest(first(x) + N(0, std^2)), first affine. A change of the input of size mu moves
first(x) / sqrt(K r) by at most mu times a norm of the first layer, so all that lies behind the
noise is a Gaussian mechanism of noise sigma_r at that sensitivity: PixelDP's condition, HGM's, and
the exact Gaussian profile all apply (``dpdist.certification.pixeldp``). Sizes are in input units.

Scores are the softmax rounded down to multiples of 2^-20. Their sums are integers, so a table does
not depend on how the draws were cut into pieces; and they are scores in [0, 1] like any others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from torch import Tensor

from dpdist.certification import operator_norms, pixeldp
from dpdist.certification import table as tables
from dpdist.certification.bounds import clopper_pearson_lower
from dpdist.certification.pixeldp import ScoreBounds
from dpdist.certification.procedures import Partial, select
from dpdist.certification.radii import gaussian_l2_radius
from dpdist.certification.sampling import SCORE_UNIT, HiddenNoiseSampler
from dpdist.certification.score_columns import AS_PRINTED, NORMS, SCHEMA
from dpdist.certification.score_settings import ScoreBound, ScoreSettings
from dpdist.certification.verdict import ABSTAIN
from dpdist.errors import UserError
from dpdist.models import HiddenNoise, SplitModel


@dataclass(frozen=True)
class Sensitivity:
    """Norms of the first layer over sqrt(K r), from the input to L2; true upper bounds.

    as_printed: the one HGM's Equation 6 prints for one feature map. It is none.
    """

    l2: float
    linf: float
    as_printed: float


def sensitivity(split: SplitModel, noise: HiddenNoise, input_shape: tuple[int, ...]) -> Sensitivity:
    """Of the actual first layer, normalisation included. Raises UserError without noise."""
    if not bool((noise.std > 0).all()) or not bool(noise.std.isfinite().all()):
        raise UserError("every hidden component needs noise: some deviations are not positive")
    layer, shares = split.affine(input_shape), noise.shares
    l2 = operator_norms.l2_to_l2(layer, input_shape, shares)
    linf = operator_norms.linf_to_l2(layer, input_shape, shares, l2=l2)
    printed = operator_norms.hgm_linf_to_l2_as_printed(
        layer, input_shape, shares, feature_map=0 if shares.dim() > 1 else None
    )
    return Sensitivity(l2, linf, printed)


@dataclass(frozen=True)
class ScoreVerdict:
    """The certificates of one input. Sizes are 0 where nothing is certified.

    prediction: the class with the largest lower bound, -1 unless its exact size is positive.
    sizes: by column, certificate_norm. k of n draws voted for ``selected``, which n0 other draws
    chose.
    """

    prediction: int
    selected: int
    k: int
    n: int
    p_lower: float
    p_upper: float
    radius: float
    sums: tuple[int, ...]
    squares: tuple[int, ...]
    histogram: tuple[int, ...]
    sizes: dict[str, float]


class ExpectedScores:
    """Sums of scores over n draws in canonical blocks, then every certificate at once."""

    spending = "none"

    def __init__(
        self, settings: ScoreSettings, batch: int, scale: float, norms: Sensitivity
    ) -> None:
        self._settings, self._batch = settings, batch
        self._scale, self._norms = scale, norms

    @property
    def units(self) -> int:
        return -(-self._settings.n // self._batch)

    def work(
        self, sampler: HiddenNoiseSampler, x: Tensor, index: int, low: int, high: int
    ) -> Partial:
        """Blocks low..high-1 of one input; the first also chooses the class for the vote."""
        partial: Partial = {}
        if low == 0:
            partial["selected"] = select(sampler, self._settings, x, index)
        n, batch = self._settings.n, self._batch
        blocks = [
            sampler.block(x, index, block, batch, min(batch, n - block * batch))
            for block in range(low, high)
        ]
        for name in ("sums", "squares", "histogram"):
            partial[name] = np.sum([getattr(block, name) for block in blocks], axis=0).tolist()
        return partial

    def verdict(self, partials: Sequence[Partial]) -> ScoreVerdict:
        sums, squares, histogram = (
            np.sum([partial[name] for partial in partials], axis=0)
            for name in ("sums", "squares", "histogram")
        )
        if histogram.sum() != self._settings.n:
            raise ValueError(f"{histogram.sum()} draws counted instead of {self._settings.n}")
        selected = next(partial["selected"] for partial in partials if "selected" in partial)
        return decide(sums, squares, histogram, selected, self._settings, self._scale, self._norms)


def bounds_of(
    sums: np.ndarray, squares: np.ndarray, histogram: np.ndarray, settings: ScoreSettings
) -> ScoreBounds:
    """Bounds of all expected scores, valid together at the settings' error."""
    n, eta = settings.n, 1 - settings.alpha
    if settings.bound == "counts":
        return pixeldp.score_bounds_counts(histogram, eta)
    if settings.bound == "bernstein":
        return pixeldp.score_bounds_bernstein(sums / SCORE_UNIT, squares / SCORE_UNIT**2, n, eta)
    return pixeldp.score_bounds_hoeffding(sums / SCORE_UNIT, n, eta)


def decide(
    sums: np.ndarray,
    squares: np.ndarray,
    histogram: np.ndarray,
    selected: int,
    settings: ScoreSettings,
    scale: float,
    norms: Sensitivity,
) -> ScoreVerdict:
    """Every certificate from the integer sums of one input.

    scale: sigma_r. Sizes are proportional to scale / norm, so each is computed once.
    """
    bounds = bounds_of(sums, squares, histogram, settings)
    k = int(histogram[selected])
    vote = float(clopper_pearson_lower(k, settings.n, settings.alpha))
    units = {
        "classical": pixeldp.classical_gaussian_size(bounds, 1.0, 1.0),
        "extended": pixeldp.extended_gaussian_size(bounds, 1.0, 1.0),
        "analytic": pixeldp.analytic_gaussian_size(bounds, 1.0, 1.0),
        "exact": pixeldp.exact_gaussian_size(bounds, 1.0, 1.0),
        "cohen": float(gaussian_l2_radius(vote, 1.0)),
    }
    down = 1 - 1e-12  # rounding of the products below
    sizes = {
        f"{name}_{norm}": unit * scale / getattr(norms, norm) * down
        for name, unit in units.items()
        for norm in NORMS
    }
    printed = pixeldp.score_bounds_hoeffding(
        sums / SCORE_UNIT, settings.n, 1 - settings.alpha, paper_faithful=True
    )
    sizes[AS_PRINTED] = pixeldp.heterogeneous_gaussian_size(
        printed, scale, norms.as_printed, paper_faithful=True
    )
    radius = sizes[f"exact_{settings.norm}"]
    return ScoreVerdict(
        prediction=bounds.label if radius > 0 else ABSTAIN,
        selected=selected,
        k=k,
        n=settings.n,
        p_lower=bounds.p_a,
        p_upper=bounds.p_b,
        radius=radius,
        sums=tuple(int(v) for v in sums),
        squares=tuple(int(v) for v in squares),
        histogram=tuple(int(v) for v in histogram),
        sizes=sizes,
    )


def row(
    index: int, label: int, verdict: ScoreVerdict, settings: ScoreSettings, scale: float
) -> dict[str, Any]:
    """One row of a table of expected scores; the first columns are those of every table."""
    return {
        "index": index,
        "label": label,
        "prediction": verdict.prediction,
        "selected": verdict.selected,
        "k": verdict.k,
        "n": verdict.n,
        "n0": settings.n0,
        "alpha": settings.alpha,
        "p_lower": verdict.p_lower,
        "radius": verdict.radius,
        "norm": settings.norm,
        "noise": settings.noise,
        "sigma": scale,
        "mode": settings.mode,
        "cap": settings.n,
        "looks": 1,
        "target": None,
        "spending": "none",
        "histogram": verdict.histogram,
        "bound": settings.bound,
        "p_upper": verdict.p_upper,
        "sums": verdict.sums,
        "squares": verdict.squares,
        **verdict.sizes,
    }


def rebound_scores(table: pa.Table, alpha: float, bound: ScoreBound | None = None) -> pa.Table:
    """The same sums at another error or by another bound (chosen without seeing the sums)."""
    about = tables.about(table)
    norms = Sensitivity(**about["sensitivity"])
    rows = []
    for old in table.to_pylist():
        settings = ScoreSettings(
            n=old["n"], n0=old["n0"], alpha=alpha, bound=bound or old["bound"], norm=old["norm"]
        )
        sums, squares, histogram = (np.asarray(old[n]) for n in ("sums", "squares", "histogram"))
        verdict = decide(sums, squares, histogram, old["selected"], settings, old["sigma"], norms)
        rows.append(row(old["index"], old["label"], verdict, settings, old["sigma"]))
    note = {**about, "rebound_alpha": alpha, "rebound_bound": bound}
    return tables.build(rows, note, SCHEMA)


def describe(norms: Sensitivity) -> dict[str, float]:
    """The norms as JSON, stored with every table."""
    return asdict(norms)
