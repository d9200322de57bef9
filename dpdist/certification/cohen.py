"""Certified Adversarial Robustness via Randomized Smoothing (Cohen, Rosenfeld, Kolter, ICML 2019).

The smoothed classifier g says the class that f says most often under noise:

    g(x) = argmax_c  p_c,   p_c = Pr[f(x + e) = c],   e ~ N(0, sigma^2 I).

Theorem 1, with p_B = 1 - p_A: if p_A >= p_lower > 1/2 then g(x + d) = A for all d of L2 norm below
R = sigma Phi^-1(p_lower). CERTIFY and PREDICT (Section 3.2) estimate g and R from draws of f; each
errs with probability at most alpha. This is the code that `dpdist certify` and `predict` run; other
noises have their own radius in other norms (``dpdist.certification.noises``). Draws are made in
canonical blocks, so that a block can be counted anywhere and again: see ``dpdist.bulk.job``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike

from dpdist.base.binomial import clopper_pearson_lower, two_sided_p_value
from dpdist.certification.certificate import (
    Partial,
    counted,
    sample,
    select,
    selected_by,
    totals,
)
from dpdist.certification.noises import Noise
from dpdist.certification.quadrature import stated
from dpdist.certification.smoothing import Smoothing
from dpdist.certification.verdict import ABSTAIN, Verdict

if TYPE_CHECKING:
    from torch import Tensor

    from dpdist.certification.certificate import CertificateTable, Counter
    from dpdist.certification.places import SmoothedPlace


class Cohen(Smoothing):
    """CERTIFY: n0 draws choose a class, exactly n others bound its probability from below."""

    mode: Literal["fixed"] = "fixed"
    free: ClassVar[frozenset[str]] = frozenset({"radii"})  # only what is to be shown of the results
    usual_batch: ClassVar[int] = 1000
    device_batch: ClassVar[int] = 32768
    keeps_blocks: ClassVar[bool] = False
    drawn: ClassVar[frozenset[str]] = frozenset({"histogram"})

    def work(
        self,
        counter: Counter,
        x: Tensor,
        index: int,
        low: int,
        high: int,
        batch: int,
        place: SmoothedPlace,
    ) -> Partial:
        """SampleUnderNoise: blocks low..high-1 of the n draws; the first also chooses the class."""
        partial: Partial = {}
        if low == 0:
            partial["selected"] = select(counter, self.n0, x, index)
        blocks = [sample(counter, x, index, block, batch, self.n) for block in range(low, high)]
        return partial | counted(np.sum(blocks, axis=0), min(high * batch, self.n) - low * batch)

    def verdict(self, partials: Sequence[Partial], place: SmoothedPlace) -> Verdict:
        """The certificate, from the counts of all blocks."""
        counts = totals(partials, "histogram", self.n)
        return certify(
            selected_by(partials), counts, self.alpha, place.certified, self.n, self.bound
        )

    def label(
        self, counter: Counter, x: Tensor, index: int, batch: int, place: SmoothedPlace
    ) -> int:
        """PREDICT, from n draws."""
        return predict(self.counts(counter, x, index, batch), self.alpha, self.n)

    def certify_other(
        self, counter: Counter, x: Tensor, index: int, than: int, batch: int, place: SmoothedPlace
    ) -> Verdict:
        """Only the selected class can be certified: where it is ``than``, no other is."""
        selected = select(counter, self.n0, x, index)
        if selected == than:
            return Verdict(ABSTAIN, selected, 0, 0, 0.0, 0.0)
        return super().certify_other(counter, x, index, than, batch, place)

    @classmethod
    def again(cls, found: CertificateTable, norm: str, batch: int) -> tuple[Cohen, SmoothedPlace]:
        from dpdist.certification.places import SmoothedPlace

        settings = cls.model_validate(
            {"sigma": found.sigma, "n0": found.n0, "n": found.n, "alpha": found.alpha}
            | {"batch": batch, "noise": found.noise}
        )
        quadrature = stated(found.about, found.sigma)
        return settings, SmoothedPlace(settings.smoothing, quadrature=quadrature)

    @classmethod
    def bound(cls, hits: ArrayLike, draws: ArrayLike, alpha: float) -> Any:
        """LowerConfBound: Clopper-Pearson, Pr[p < bound] <= alpha."""
        return clopper_pearson_lower(hits, draws, alpha)


def certify(
    selected: int,
    counts: np.ndarray,
    alpha: float,
    noise: Noise,
    draws: int | None = None,
    bound: Callable[..., Any] = clopper_pearson_lower,
) -> Verdict:
    """CERTIFY, given a class chosen by other draws and the counts of n draws: int (classes,).

    With probability at least 1 - alpha over the draws: the smoothed classifier says the prediction
    in the ball of the radius around the input, or the verdict abstains. draws: n, of which some may
    have had no class, and count against the selected one; None: all had one. bound: LowerConfBound.
    """
    k, n = int(counts[selected]), int(counts.sum()) if draws is None else draws
    p_lower = float(bound(k, n, alpha))
    certified = p_lower > 0.5
    return Verdict(
        prediction=selected if certified else ABSTAIN,
        selected=selected,
        k=k,
        n=n,
        p_lower=p_lower,
        radius=float(noise.radius(p_lower)),  # Gaussian: sigma Phi^-1(p_lower), rounded down
        histogram=tuple(int(count) for count in counts),
    )


def predict(counts: np.ndarray, alpha: float, draws: int | None = None) -> int:
    """PREDICT (Proposition 1): the most frequent class, or -1 unless it beats the second.

    Another class than the smoothed classifier's is returned with probability at most alpha. draws:
    how many were made; those without a class are an outcome beside the classes, which is never
    returned. None: all had one.
    """
    undefined = 0 if draws is None else draws - int(np.sum(counts))
    order = np.argsort(-np.asarray(counts), kind="stable")
    first, second = int(counts[order[0]]), int(counts[order[1]]) if len(order) > 1 else 0
    second = max(second, undefined)
    sure = first >= undefined and two_sided_p_value(first, first + second) <= alpha
    return int(order[0]) if sure else ABSTAIN
