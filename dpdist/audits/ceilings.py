"""What a guarantee says of every membership attack: the highest ROC that it allows.

It speaks of a game. Whose membership is a secret fair coin of its own, in a run that satisfies a
guarantee under add-or-remove, nobody tells better from the outcome than the guarantee's trade-off
curve allows, on average over runs. Where a random exact half is in, one record is in *instead of*
another: replace-one. A split that the adversary knows beforehand is bounded by nothing.

One model's ROC is a draw around that average, and its records share the model: a point above the
ceiling is a reason to audit, not a refutation. That needs the one-run test
(`dpdist.privacy.audit_bounds.OneRun`), or many models.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpdist.audits.roc import ALPHA, Roc
from dpdist.base.rounding import significant
from dpdist.privacy.claims import Claim
from dpdist.privacy.guarantee import Guarantee, Neighbours, format_epsilon
from dpdist.privacy.plan import PrivacyPlan
from dpdist.privacy.trade_off import Curve, approximate, ceiling, of_group, of_plan

LOOKED_AT = (0.001, 0.01, 0.1, 0.25, 0.5)  # false positive rates at which a ROC is held against it
_POINTS = 5_001


@dataclass(frozen=True)
class Ceiling:
    """The highest ROC under a guarantee. words: of whom, for tables and pictures."""

    words: str
    curve: Curve

    def at(self, false_positives: ArrayLike) -> NDArray[np.float64]:
        """The largest true positive rates at these false positive rates."""
        return ceiling(self.curve, false_positives)

    @property
    def auc(self) -> float:
        """The area below it: no attack's AUC is larger on average. Rounded up: the curve rises
        by 1 in all, so that trapezia lack half a step at most."""
        grid = np.linspace(0.0, 1.0, _POINTS)
        return min(1.0, float(np.trapezoid(self.at(grid), grid)) + 0.5 / (_POINTS - 1))

    def above(self, roc: Roc) -> list[float]:
        """Which of `LOOKED_AT` show a point of the ROC whose Clopper-Pearson rectangle, all
        rectangles together at 95 %, lies above: of one model, no refutation."""
        found = []
        for rate in LOOKED_AT:
            true, false = roc.at(rate, ALPHA / len(LOOKED_AT) / 2)
            if true.low > float(self.at(false.high)):
                found.append(rate)
        return found


def proved(plan: PrivacyPlan, game: Neighbours, words: str) -> Ceiling | None:
    """By the plan's own privacy loss; None where nothing is proved, or not under this relation."""
    curve = plan_curve(plan, game)
    return None if curve is None else Ceiling(f"proved ({words}, {game})", curve)


def plan_curve(plan: PrivacyPlan, game: Neighbours) -> Curve | None:
    """The trade-off curve of what a plan releases. A replacement is an addition and a removal
    wherever no loss is known for it."""
    try:
        curve = of_plan(replace(plan, neighbours=game))
    except ValueError:  # a phase that is not accounted under that relation
        curve = None
    if curve is None and (game, plan.neighbours) == ("replace-one", "add-or-remove-one"):
        own = of_plan(plan)
        return None if own is None else of_group(own, 2)
    return curve


def claimed(claim: Claim | None, game: Neighbours) -> Ceiling | None:
    """By the epsilon and delta that a paper claims; None where it claims none for this game."""
    if claim is None or claim.claimed is None:
        return None
    curve, own = approximate(claim.claimed.epsilon, claim.claimed.delta), claim.claimed.neighbours
    if own != game:
        if game != "replace-one":
            return None
        curve = of_group(curve, 2)
    return Ceiling(f"claimed ({in_words(claim.claimed)}, {claim.verdict})", curve)


def in_words(guarantee: Guarantee) -> str:
    """Epsilon and delta, for the words of a ceiling."""
    return f"epsilon {format_epsilon(guarantee.epsilon)} at delta {significant(guarantee.delta, 3)}"
