"""What a table of certificates says of inputs that are not in it.

Claimed of the population that the table's inputs are an independent sample of, and of this trained
model: A(r), the probability that the smoothed classifier is right on a fresh input and keeps its
answer at every distance below r; and C(r), that the label's own probability is large enough for a
certificate of radius r, given draws enough.

Proof. Whether input i has a right certificate of radius >= r is Z_i: independent, as the inputs and
their draws are, with one probability q. Where the classifier is not right and robust at r such a
certificate is false, which has probability at most alpha whatever the input, so
q <= A + alpha (1 - A), and A >= (q - alpha) / (1 - alpha). An input that counts for C(r) has an
upper bound of its label's probability that reaches r with probability at least 1 - alpha, so the
share w of inputs with such a bound has (1 - alpha) C <= w. Clopper-Pearson bounds q from below and
w from above. False certificates are thus paid for by alpha itself, once: not by a quantile of their
number.

Both fall with r: what is stated at one radius holds at all below (A), or beyond (C).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dpdist.base.binomial import clopper_pearson_lower, clopper_pearson_upper
from dpdist.base.errors import UserError
from dpdist.base.rounding import exact, percent
from dpdist.certification.certificate import CertificateTable
from dpdist.certification.paired import ERROR
from dpdist.certification.rebound import label_reach

_ROUNDING = 1e-12  # outwards


@dataclass(frozen=True)
class OfPopulation:
    """At one radius: low <= A(radius), and C(radius) <= certifiable.

    So at least 1 - certifiable of the population cannot be certified by certificates of this kind,
    with any number of draws. None where the counts of all classes were not kept. As in a band of
    the set, no attack is in it: an input that is not certifiable may be robust all the same.
    """

    radius: float
    low: float
    certifiable: float | None


def population_bounds(
    found: CertificateTable, at: Sequence[float] | None = None, error: float = ERROR
) -> list[OfPopulation]:
    """Return what holds, with probability at least 1 - error, of all radii and bounds together.

    Over the choice of inputs and all their draws. Each bound has an equal part of the error (union
    bound).

    Args:
        at: radii, not chosen by the results. By default all that are printed of the table, so that
            every place states the same.
        error: of all of them together.

    Raises:
        UserError: the inputs share one noise bank, so their draws are not independent.
    """
    at = found.shown_radii if at is None else at
    if found.terms["noise_bank"]:
        raise UserError(
            f"{found.path}: its inputs share one noise bank: they are no independent sample"
        )
    count, alpha, held = len(found.index), found.alpha, found.certified()
    reach = label_reach(found.table) if found.kind.votes else None
    level = error / (len(at) * (1 if reach is None else 2)) if at else error
    stated = []
    for radius in at:
        right = clopper_pearson_lower(int((held >= radius).sum()), count, level)
        low = (float(right) - alpha) / (1 - alpha) * (1 - _ROUNDING)
        certifiable = None
        if reach is not None:
            reached = clopper_pearson_upper(int((reach >= radius).sum()), count, level)
            certifiable = min(1.0, float(reached) / (1 - alpha) * (1 + _ROUNDING))
        stated.append(OfPopulation(radius, max(0.0, low), certifiable))
    return stated


def line(found: CertificateTable) -> tuple[str, str]:
    """Return name and value of a summary's line: certified accuracy of the population, at least."""
    name = "of the population, at least"
    if found.terms["noise_bank"]:
        return name, "nothing is stated: the inputs share one noise bank"
    stated = population_bounds(found)
    shares = ", ".join(f"{percent(each.low)} % at {exact(each.radius)}" for each in stated)
    return name, f"{shares} ({100 * (1 - ERROR):g} %, all radii together)"
