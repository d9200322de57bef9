"""Smoothing with as many draws as the decision needs: target radii, and a confidence sequence.

The tests themselves, with their errors, are in ``dpdist.certification.sequential``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import model_validator

from dpdist.base.binomial import clopper_pearson_upper
from dpdist.base.errors import UserError
from dpdist.certification.certificate import Certificate, Partial, require, sample, select
from dpdist.certification.cohen import Cohen, predict
from dpdist.certification.smoothing import Smoothing
from dpdist.certification.verdict import ABSTAIN, Verdict

if TYPE_CHECKING:
    from torch import Tensor

    from dpdist.certification.places import SampledPlace, SmoothedPlace
    from dpdist.certification.reading import CertificateTable
    from dpdist.certification.sampling import Counter

# Error of the upper bound by which hopeless inputs are given up (never adds a certificate).
FUTILE = 0.01


class _Sequential(Smoothing):
    """A sequential test is one unit of work; n is its cap."""

    def units(self, batch: int) -> int:
        return 1

    def label(
        self, counter: Counter, x: Tensor, index: int, batch: int, place: SampledPlace
    ) -> int:
        return predict(self.counts(counter, x, index, batch), self.alpha, self.n)

    @classmethod
    def again(
        cls, found: CertificateTable, norm: str, batch: int
    ) -> tuple[Certificate, SampledPlace]:
        """By Cohen's procedure at the cap, whatever stopped the table's own."""
        return Cohen.again(found, norm, batch)


class TargetRadius(_Sequential):
    """Early stopping: exact tests of the target radii at planned looks; certifies those only."""

    mode: Literal["target"] = "target"
    spending: ClassVar[str] = "alpha*sqrt(n/cap), exact binomial"
    counted: ClassVar[str] = "given radii decided by at most {n:,} draws"

    @model_validator(mode="after")
    def _targets(self) -> Self:
        require(bool(self.radii), "radii", "given when mode is target")
        return self

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
        from dpdist.certification.sequential import TargetTest, planned_looks

        selected = select(counter, self.n0, x, index)
        hypotheses = self.hypotheses(place.certified)
        looks = planned_looks(self.n, batch)
        test = TargetTest(hypotheses, self.alpha, looks, FUTILE)
        hits = block = number = 0
        for number, look in enumerate(looks):
            while block * batch < look:
                hits += int(sample(counter, x, index, block, batch, self.n)[selected])
                block += 1
            if test.look(number, hits):
                break
        return {
            "selected": selected,
            "k": hits,
            "n": looks[number],
            "looks": number + 1,
            "passed": test.passed(),
        }

    def verdict(self, partials: Sequence[Partial], place: SmoothedPlace) -> Verdict:
        (partial,) = partials
        passed = partial["passed"]
        last = max(passed - 1, 0)
        return Verdict(
            prediction=partial["selected"] if passed else ABSTAIN,
            selected=partial["selected"],
            k=partial["k"],
            n=partial["n"],
            p_lower=self.hypotheses(place.certified)[last] if passed else 0.0,
            radius=self.radii[last] if passed else 0.0,
            looks=partial["looks"],
            target=self.radii[last],
        )

    @classmethod
    def rebound(cls, table: Any, alpha: float) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        raise UserError(
            "results of early stopping (mode target) certify their radius at their alpha and "
            "nothing else; certify again with mode fixed or anytime to choose alpha later"
        )

    def mode_parts(self) -> list[str]:
        return [self.mode, "r-" + "-".join(f"{radius:g}" for radius in self.radii)]


class Anytime(_Sequential):
    """A confidence sequence: stops when every radius is decided, and may be re-bounded later."""

    mode: Literal["anytime"] = "anytime"
    spending: ClassVar[str] = "beta mixture, 1/alpha"
    counted: ClassVar[str] = "at most {n:,} draws, valid at any time"

    @model_validator(mode="after")
    def _error(self) -> Self:
        require(self.alpha < 0.25, "alpha", "below 1/4 when mode is anytime")
        return self

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
        from dpdist.certification.sequential import beta_mixture_rejects

        selected = select(counter, self.n0, x, index)
        p0 = self.hypotheses(place.certified)
        hits = draws = block = passed = 0
        while draws < self.n:
            counts = sample(counter, x, index, block, batch, self.n)
            hits += int(counts[selected])
            draws = min(draws + batch, self.n)  # those without a class are draws too
            block += 1
            while passed < len(p0) and beta_mixture_rejects(hits, draws, p0[passed], self.alpha):
                passed += 1
            if p0 and (
                passed == len(p0) or clopper_pearson_upper(hits, draws, FUTILE) <= p0[passed]
            ):
                break
        return {"selected": selected, "k": hits, "n": draws, "looks": block}

    def verdict(self, partials: Sequence[Partial], place: SmoothedPlace) -> Verdict:
        (partial,) = partials
        p_lower = self.bound(partial["k"], partial["n"], self.alpha)
        return Verdict(
            prediction=partial["selected"] if p_lower > 0.5 else ABSTAIN,
            selected=partial["selected"],
            k=partial["k"],
            n=partial["n"],
            p_lower=p_lower,
            radius=float(place.certified.radius(p_lower)),
            looks=partial["looks"],
            target=self.radii[-1] if self.radii else None,
        )

    @classmethod
    def bound(cls, hits: int, draws: int, alpha: float) -> float:
        from dpdist.certification.sequential import anytime_lower

        return float(anytime_lower(hits, draws, alpha))
