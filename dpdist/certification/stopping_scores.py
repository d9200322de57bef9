"""Certified scores with as many draws as the decision needs: target radii, tested by betting.

Under the noise p_a and p_b are the expected scores of two classes, and a's stays the larger one
while the input moves less than r if Phi^-1(p_a) - Phi^-1(p_b) > 2 t, with t = r times the norm of
the first layer over the noise. That is so where

    (1 + p_a - p_b) / 2 > Phi(t),

because p_a - p_b is the mass of the interval from Phi^-1(p_b) to Phi^-1(p_a) under N(0, 1), and an
interval of length 2 t or less has at most the mass 2 Phi(t) - 1. The left side is the mean of a
score in [0, 1], the *lead* of a over b; it is never less than a's own, so a test of leads passes
wherever one of p_a alone would, with p_b <= 1 - p_a.

The class a is chosen by draws used for nothing else. Its lead over each other class is tested by
betting (`dpdist.certification.betting`): the capital exceeds 1 / alpha at any number of draws with
probability at most alpha. A radius is certified when *every* lead has passed. If it is false, one
lead is too small, by the truth and not by the draws, and this one's test alone errs with alpha: no
class pays for another. Radii are tested in ascending order and the first failure ends them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
import scipy
from pydantic import model_validator

from dpdist.base.errors import UserError
from dpdist.base.rounding import exact, percent
from dpdist.certification import betting
from dpdist.certification.certificate import CertifiedSizes, Partial, require, select
from dpdist.certification.expected_score_bounds import SCORE_UNIT
from dpdist.certification.scores import BettingScores, OfHiddenNoise, stated_norms
from dpdist.certification.stopping import FUTILE, blocks_hold, stated_targets
from dpdist.certification.verdict import ABSTAIN, Verdict

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor, nn

    from dpdist.certification.certificate import CertificateTable
    from dpdist.certification.places import ScoredPlace
    from dpdist.certification.sampling import HiddenNoiseSampler

_NEAR_ONE = 1 - 1e-12


class LeadTest:
    """Of the leads over all other classes against ascending means; `passed` of them are shown.

    futile: error by which hopeless inputs are given up; it can lose a certificate, never add one.
    """

    def __init__(self, means: Sequence[float], alpha: float, futile: float = FUTILE) -> None:
        self._means, self._alpha, self._futile = means, alpha, futile
        self._scores = betting.ENDS / SCORE_UNIT
        self._counts = np.zeros((len(self._scores), 1))
        self.passed = 0

    def look(self, counts: np.ndarray, excess: np.ndarray) -> bool:
        """Take what more draws say, as `betting.binned` makes it; True when all is decided."""
        self._counts = self._counts + betting.at_ends(counts, excess).T
        while self.passed < len(self._means) and self._shown(self._means[self.passed]):
            self.passed += 1
        if self.passed == len(self._means):
            return True
        left = 1 - self._means[self.passed]
        return bool(betting.means_above(self._counts, 1 - self._scores, left, self._futile).any())

    def _shown(self, mean: float) -> bool:
        return bool(betting.means_above(self._counts, self._scores, mean, self._alpha).all())


class TargetScores(OfHiddenNoise):
    """Early stopping of expected scores: given radii, tested by betting after every block of draws.

    norm: of the radii. n: draws at most. It certifies the largest radius that passed, no more.
    """

    mode: Literal["target-scores"] = "target-scores"
    norm: Literal["l2", "linf"] = "l2"

    spending: ClassVar[str] = "betting, 1/alpha"
    belongs: ClassVar[str] = "with mode target-scores"
    drawn: ClassVar[frozenset[str]] = frozenset({"selected", "k"})

    @model_validator(mode="after")
    def _targets(self) -> Self:
        require(bool(self.radii), "radii", f"given when mode is {self.mode}")
        rising = all(a < b for a, b in zip(self.radii[:-1], self.radii[1:], strict=True))
        require(rising, "radii", "ascending")
        return self

    @classmethod
    def fits(cls, section: Mapping[str, Any]) -> bool:
        return section.get("sigma") is None and section.get("mode") == cls.mode_name()

    def place(self, model: nn.Module, input_shape: tuple[int, ...]) -> ScoredPlace:
        place = super().place(model, input_shape)
        if not all(p < _NEAR_ONE for p in self.hypotheses(place)):
            raise UserError(f"certify.radii: must be reachable with its noise, got {self.radii}")
        return place

    def hypotheses(self, place: ScoredPlace) -> tuple[float, ...]:
        """What the leads must exceed for each radius, a hair above the exact number."""
        scale = getattr(place.norms, self.norm) / place.sigma
        exact = [float(scipy.special.ndtr(radius * scale)) for radius in self.radii]
        return tuple(p + (1 - p) * 1e-9 for p in exact)

    def units(self, batch: int) -> int:
        return 1

    def work(
        self,
        counter: HiddenNoiseSampler,
        x: Tensor,
        index: int,
        low: int,
        high: int,
        batch: int,
        place: ScoredPlace,
    ) -> Partial:
        selected = select(counter, self.n0, x, index)
        test = LeadTest(self.hypotheses(place), self.alpha)
        votes = draws = block = 0
        while draws < self.n:
            rows = min(batch, self.n - draws)
            found = counter.block(x, index, block, batch, rows, binned=True, leader=selected)
            assert found.bins is not None and found.excess is not None
            votes, draws, block = votes + int(found.histogram[selected]), draws + rows, block + 1
            if test.look(found.bins, found.excess):
                break
        return {
            "selected": selected, "k": votes, "n": draws, "looks": block, "passed": test.passed
        }  # fmt: skip

    def verdict(self, partials: Sequence[Partial], place: ScoredPlace) -> Verdict:
        (partial,) = partials
        passed = partial["passed"]
        last = max(passed - 1, 0)
        return Verdict(
            prediction=partial["selected"] if passed else ABSTAIN,
            selected=partial["selected"],
            k=partial["k"],
            n=partial["n"],
            p_lower=self.hypotheses(place)[last] if passed else 0.0,
            radius=self.radii[last] if passed else 0.0,
            looks=partial["looks"],
            target=self.radii[last],
        )

    def row(self, index: int, label: int, verdict: Verdict, place: ScoredPlace) -> dict[str, Any]:
        found = dataclasses.asdict(verdict)
        found |= {"index": index, "label": label, "sigma": place.sigma, "cap": self.n}
        named = ("n0", "alpha", "norm", "noise", "mode", "spending")
        return found | {name: getattr(self, name) for name in named}

    @classmethod
    def constants(cls, table: pa.Table, settings: Mapping[str, Any]) -> dict[str, Any]:
        return {**super().constants(table, settings), "noise": cls.noise}

    @classmethod
    def sound_counts(cls, table: pa.Table) -> np.ndarray:
        """Blocks of draws as they were executed."""
        return blocks_hold(table)

    @classmethod
    def made(cls, table: pa.Table, alpha: float) -> dict[str, np.ndarray]:
        """One of the radii that were asked for, of the selected class, or none. The scores of the
        draws are not kept: whether it passed cannot be made again."""
        from dpdist.certification.places import ScoredPlace

        settings = stated_targets(cls, table)
        place = ScoredPlace(table["sigma"][0].as_py(), stated_norms(table))
        radii, p0 = np.array(settings.radii), np.array(settings.hypotheses(place))
        certified = table["prediction"].to_numpy() != ABSTAIN
        last = np.searchsorted(radii, table["radius"].to_numpy()).clip(0, len(radii) - 1)
        return {
            "prediction": np.where(certified, table["selected"].to_numpy(), ABSTAIN),
            "radius": np.where(certified, radii[last], 0.0),
            "target": np.where(certified, radii[last], radii[0]),
            "p_lower": np.where(certified, p0[last], 0.0),
        }

    @classmethod
    def sizes(cls, table: pa.Table) -> tuple[CertifiedSizes, ...]:
        """The targets that expected scores passed: of the exact profile."""
        answer, size = table["prediction"].to_numpy(), table["radius"].to_numpy()
        norm = table["norm"][0].as_py()
        title = "exact profile, targets"
        return (CertifiedSizes("exact", norm, title, answer, size, "-", votes=False),)

    @classmethod
    def rebound(cls, table: pa.Table, alpha: float) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        raise UserError(
            "results of early stopping (mode target-scores) certify their radius at their alpha "
            "and nothing else; certify again with bound betting to choose alpha later"
        )

    @classmethod
    def lines(cls, found: CertificateTable, at: Sequence[float]) -> list[tuple[str, str]]:
        name = f"certified at {found.norm.upper()} radius"
        return [(f"{name} {exact(r)}", f"{percent(found.certified_accuracy(r))} %") for r in at]

    @classmethod
    def words(cls, found: CertificateTable) -> str:
        return (
            "Expected scores under the model's own noise, given radii decided by at most "
            f"{found.n:,} draws"
        )

    @classmethod
    def terms(cls, found: CertificateTable) -> dict[str, Any]:
        return {"norm": found.norm, "radii": found.radii}

    @classmethod
    def again(
        cls, found: CertificateTable, norm: str, batch: int
    ) -> tuple[BettingScores, ScoredPlace]:
        """By bets on the class alone at the cap, whatever stopped the table's own."""
        from dpdist.certification.expected_score_bounds import Sensitivity
        from dpdist.certification.places import ScoredPlace

        settings = BettingScores.model_validate(
            {"n": found.n, "n0": found.n0, "alpha": found.alpha, "one_sided": True}
            | {"norm": norm, "batch": batch}
        )
        return settings, ScoredPlace(found.sigma, Sensitivity(**found.about["sensitivity"]))

    def name_parts(self) -> list[str]:
        radii = "-".join(map(exact, self.radii))
        return [self.mode, self.norm, f"r-{radii}", f"n-{self.n}", f"eta-{1 - self.alpha:g}"]
