"""Bound accuracies on fresh inputs and compare two runs, from tables of certificates.

**Fresh inputs.** The bounds are of this trained model and the population from which the table's
inputs are an independent sample: A(r), the probability that the smoothed classifier is correct on a
fresh input and keeps its answer at every distance below r; and C(r), the probability that the
label's own probability is large enough for a certificate of radius r, with enough draws. Proof.
Let Z_i be whether input i has a correct certificate of radius >= r. These are independent, as the
inputs and their draws are, with one probability q. If the classifier is not correct and robust at
r, such a certificate is false, which has probability at most alpha for every input, so q <= A +
alpha (1 - A), and A >= (q - alpha) / (1 - alpha). For an input that counts for C(r), the upper
bound of its label's probability reaches r with probability at least 1 - alpha, so the fraction w of
inputs with such a bound has (1 - alpha) C <= w. Clopper-Pearson bounds q from below and w from
above. False certificates are thus covered by alpha itself, once, not by a quantile of their number.
Both fall with r: a bound at one radius is valid at all smaller ones (A), or all larger ones (C).

**Two classifiers on the same inputs.** Each input gives a pair: whether the first is correct (and
certified) there, and whether the second is. The pairs are taken as independent samples from one
population of inputs, and the statement is about that population, for these two models and these
certificates. Inputs on which both succeed or both fail do not distinguish them; of the others, the
*discordant* ones, each is the second's with probability 1/2 if both succeed equally often (McNemar,
Psychometrika 1947).

**Whole curves.** At size r the difference of the later run and the first is D(r) = P[R2 >= r] -
P[R1 >= r], with R1 and R2 the certified sizes of one input by both, below 0 if its answer is
incorrect. Sizes from 0 on are cut into cells that do not depend on the results. Both fractions fall
with r, so for every r in a cell (a, b], of which the first includes 0,

    P[R2 >= b] - P[R1 > a]  <=  D(r)  <=  P[R2 > a] - P[R1 >= b],

and each side is a difference of two successes on the same inputs, which has an exact bound. All
bounds of all cells are valid together (union bound). More cells make each bound slightly wider, but
narrower cells make the band much tighter, so there are many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy

from dpdist.certification.noise import norm_name
from dpdist.certification.table import ABSTAIN, CertificateTable, range_words
from dpdist.certification.table_reader import achievable_label_radii
from dpdist.core.binomial import (
    clopper_pearson_interval,
    clopper_pearson_lower,
    clopper_pearson_upper,
    two_sided_p_value,
)
from dpdist.core.console import Row, format_bound, format_exact, format_percent
from dpdist.core.result_rows import certified_row

# --- two classifiers on the same inputs -------------------------------------------------------


ERROR = 0.05
# Of the interval's error; the rest is for the split of the discordant inputs, which matters most.
SHARE_OF_DISCORDANT = 0.1


@dataclass(frozen=True)
class Comparison:
    """The second classifier compared with the first, on ``inputs`` inputs.

    first, second: fraction of the inputs on which each succeeds. only_first, only_second: number of
    inputs on which only one of them succeeds. low, high: interval of the population's difference
    (``difference_interval``). p_value, anytime: of the hypothesis that both succeed equally often.
    """

    inputs: int
    first: float
    second: float
    only_first: int
    only_second: int
    low: float
    high: float
    p_value: float
    anytime: float

    @property
    def difference(self) -> float:
        """Return the fraction of the second minus that of the first."""
        return (self.only_second - self.only_first) / self.inputs


def compare(first: np.ndarray, second: np.ndarray, error: float = ERROR) -> Comparison:
    """Return the comparison of the successes of two classifiers on the same inputs, bool (N,) each.

    error: of the interval. Raises ValueError for arrays of unequal length, or empty ones.
    """
    if first.shape != second.shape or not first.size:
        raise ValueError(f"both must be of the same inputs, got {first.shape} and {second.shape}")
    only_first, only_second = int((first & ~second).sum()), int((second & ~first).sum())
    low, high = difference_interval(only_first, only_second, first.size, error)
    return Comparison(
        inputs=first.size,
        first=float(first.mean()),
        second=float(second.mean()),
        only_first=only_first,
        only_second=only_second,
        low=low,
        high=high,
        p_value=mcnemar_p_value(only_first, only_second),
        anytime=anytime_p_value(first, second),
    )


def mcnemar_p_value(only_first: int, only_second: int) -> float:
    """Return the exact two-sided p value that both succeed equally often.

    The number of inputs must be fixed in advance. It is at most u with probability at most u, for
    every fraction of discordant inputs: the test is Binomial(discordant, 1/2), given their number.
    """
    return two_sided_p_value(only_second, only_first + only_second)


def difference_interval(
    only_first: int, only_second: int, inputs: int, error: float = ERROR
) -> tuple[float, float]:
    """Return an interval of the second's fraction minus the first's, wrong with at most ``error``.

    The difference is d (2 s - 1), with d the fraction of discordant inputs and s the second's
    fraction of those. Clopper-Pearson intervals of d (a tenth of the error) and of s given their
    number (nine tenths) are valid together by the union bound; the interval has every difference
    that they allow. So it is conservative, never approximate. It excludes 0 only if the p value of
    McNemar is below 9/10 of the error.
    """
    discordant = only_first + only_second
    spent = SHARE_OF_DISCORDANT * error
    fewest, most = clopper_pearson_interval(discordant, inputs, spent)
    low, high = 0.0, 1.0
    if discordant:
        low, high = map(float, clopper_pearson_interval(only_second, discordant, error - spent))
    worst, best = 2 * low - 1, 2 * high - 1
    return (
        float(worst * (most if worst < 0 else fewest)),
        float(best * (most if best > 0 else fewest)),
    )


def anytime_p_value(first: np.ndarray, second: np.ndarray) -> float:
    """Return the p value that both succeed equally often, valid however often one looks.

    first, second: bool (N,), in the order in which inputs are added. If both succeed equally often,
    the probability that it is *ever* at most u, as inputs are added without end, is at most u.

    After m discordant inputs, x of them the second's, the likelihood ratio of s ~ Beta(1/2, 1/2)
    against s = 1/2 is 2^m B(x + 1/2, m - x + 1/2) / B(1/2, 1/2): a martingale at s = 1/2, and ever
    above 1/u with probability at most u (Ville). The p value is 1 over the largest so far.
    """
    won = second[first != second]
    draws, hits = np.arange(1, won.size + 1), np.cumsum(won)
    evidence = scipy.special.betaln(hits + 0.5, draws - hits + 0.5) - scipy.special.betaln(0.5, 0.5)
    return float(np.exp(-np.max(evidence + draws * math.log(2), initial=0.0)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return each p value, corrected for all of them (Holm).

    The probability that any true hypothesis has a corrected p value of at most u is at most u, for
    every dependence. Source: Holm, Scandinavian Journal of Statistics 1979.
    """
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p, kind="stable")
    corrected = np.empty_like(p)
    corrected[order] = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    bounded: list[float] = np.minimum(corrected, 1.0).tolist()
    return bounded


# --- fresh inputs -----------------------------------------------------------------------------


_ROUNDING = 1e-12  # outwards


@dataclass(frozen=True)
class PopulationBound:
    """Bounds at one radius: low <= A(radius), and C(radius) <= certifiable.

    At least 1 - certifiable of the population cannot be certified by certificates of this kind with
    any number of draws, although it may be robust. None if counts of all classes were not kept.
    """

    radius: float
    accuracy_lower_bound: float
    certifiable_upper_bound: float | None


def population_bounds(
    certificates: CertificateTable, radii: Sequence[float] | None = None, error: float = ERROR
) -> list[PopulationBound]:
    """Return lower bounds of the certified accuracy on a population, a list of `PopulationBound`.

    The population is that of which the certified inputs are a sample. All bounds are valid
    together, with probability at least 1 - error over the choice of inputs and all their draws.
    Each bound has an equal part of the error (union bound).

    Args:
        certificates: a table of certificates, as `dpdist.load_results` reads it.
        radii: radii in input units, not chosen by the results; None: `reported_radii` of the table.
        error: error probability of all bounds together.

    Returns:
        A list of `PopulationBound`, one for each radius: `radius`, `accuracy_lower_bound` (float in
        [0, 1]), and `certifiable_upper_bound`, an upper bound of the fraction that more draws could
        certify (float; None if the table has no counts of all classes).

    Raises:
        ValueError: `error` is not between 0 and 1.

    Example:
        After `dpdist.run` made runs/small:

        >>> import dpdist
        >>> (table,) = dpdist.load_results("small").tables
        >>> [bounds.radius for bounds in dpdist.population_bounds(table, radii=[0.0, 0.25])]
        [0.0, 0.25]
    """
    radii = certificates.reported_radii if radii is None else radii
    count, alpha, held = len(certificates.index), certificates.alpha, certificates.size_if_correct()
    reach = achievable_label_radii(certificates.table)
    level = error / (len(radii) * (1 if reach is None else 2)) if radii else error
    stated = []
    for radius in radii:
        correct = clopper_pearson_lower(int((held >= radius).sum()), count, level)
        low = (float(correct) - alpha) / (1 - alpha) * (1 - _ROUNDING)
        certifiable = None
        if reach is not None:
            reached = clopper_pearson_upper(int((reach >= radius).sum()), count, level)
            certifiable = min(1.0, float(reached) / (1 - alpha) * (1 + _ROUNDING))
        stated.append(PopulationBound(radius, max(0.0, low), certifiable))
    return stated


def doubts(found: CertificateTable) -> list[str]:
    """Return what is doubtful about a table's results as a whole, a list of texts; usually empty.

    If certified accuracy is the same at all shown radii, or every input abstains, the noise is
    often tiny or huge relative to the inputs' values.
    """
    radii, texts = found.reported_radii, list[str]()
    shares = [found.certified_accuracy(radius) for radius in radii]
    low, high = found.input_range or (0.0, 1.0)
    if found.holds_images and not (low >= -_RANGE_SLACK and high <= 1 + _RANGE_SLACK):
        texts.append(
            f"the values of the images are in {low:.4g} to {high:.4g}, outside 0 to 1, and sigma "
            "and radii are in these units: if they were normalized, certify images in 0 to 1 with "
            "normalize=(mean, std), or --normalize MEAN/STD"
        )
    step = found.input_step
    if step is not None and smallest_shown_radius(found) < step:
        share = format_percent(found.certified_accuracy(step), 1, round_down=True)
        texts.append(
            f"the inputs are categories, counts or whole numbers, in steps of about {step:.2g}: a "
            f"smaller radius covers no change of one, and {share} % of the inputs are certified at "
            "that size"
        )
    if lacks_classes(found):
        held, all_of = len(np.unique(found.label)), found.job_record["classes"]
        texts.append(
            f"the inputs are in the order of their classes, and the first {len(found.index):,} "
            f"have {held} of {all_of}, so they do not represent the others; take every k-th "
            "(certify.every) instead of the first ones (certify.max_inputs)"
        )
    if found.abstention_rate == 1:
        return [
            *texts,
            f"the classifier abstained on all {len(found.index):,} inputs: sigma {found.sigma:g} "
            "may be too large for them, or n too small",
        ]
    if len(radii) > 1 and shares[0] > 0 and len(set(shares)) == 1 and len(found.index) > 1:
        texts.append(
            f"certified accuracy is the same at all radii up to {format_exact(radii[-1])}: the "
            f"inputs' values may be large compared with sigma {found.sigma:g}, and then no radius "
            "means much; scale the inputs by public constants, or certify larger radii"
        )
    _, counts = np.unique(found.label, return_counts=True)
    smoothed = int((found.size_if_correct() >= 0).sum())
    if text := commonest_class_doubt(smoothed, len(found.index), int(counts.max())):
        _, answers = np.unique(found.prediction[found.prediction >= 0], return_counts=True)
        share = format_percent(answers.max() / len(found.index), 1)
        texts.append(f"with its noise, {text}; it answers one class on {share} % of the inputs")
    return texts


def lacks_classes(found: CertificateTable) -> bool:
    """Return whether a table holds the first inputs of data in the order of their classes."""
    limited = found.job_record["settings"].get("max_inputs") is not None
    labels = found.label
    ordered = len(labels) >= _ORDERED_BY_CHANCE and bool((np.diff(labels) >= 0).all())
    return limited and ordered and len(np.unique(labels)) < found.job_record["classes"]


_ORDERED_BY_CHANCE = 10  # labels: fewer are in order by chance too often
_RANGE_SLACK = 1e-3  # of what resizing and formats of images round


def commonest_class_doubt(correct: int, inputs: int, commonest: int) -> str | None:
    """Return the doubt that a model beats always answering the commonest class, or None.

    Args:
        correct: number of inputs that the model classifies correctly.
        inputs: number of all inputs.
        commonest: number of inputs of the commonest class.
    """
    sure = float(clopper_pearson_interval(correct, inputs, 2 * ERROR)[0])
    if sure > commonest / inputs:
        return None
    return (
        "the model is not shown to be more accurate than always answering the commonest class, "
        f"{format_percent(commonest / inputs, 1)} %"
    )


def verdict(found: CertificateTable) -> str:
    """Return a table in one sentence, with its doubts first."""
    clauses = [*doubts(found), f"with its noise, the model is {certified_clause(found)}"]
    sentence = "; ".join(clauses)
    return f"{sentence[0].upper()}{sentence[1:]}."


def smallest_shown_radius(table: CertificateTable) -> float:
    """Return the smallest radius above 0 that a report shows."""
    return min((radius for radius in table.reported_radii if radius > 0), default=0.0)


def certified_clause(found: CertificateTable) -> str:
    """Return the fraction of inputs certified at the smallest radius above 0, in words."""
    radius = smallest_shown_radius(found)
    share = format_percent(found.certified_accuracy(radius), 1, round_down=True)
    return (
        f"correct and certified not to change within {norm_name(found.norm)} distance "
        f"{format_exact(radius)} on {share} % of {len(found.index):,}"
    )


def certified_rows(found: CertificateTable, title: str = "") -> list[Row]:
    """Return the row of a table's radius, and one of each size if it has several."""
    radii = found.reported_radii
    shares = [(radius, found.certified_accuracy(radius)) for radius in radii]
    rows = [certified_row(shares, found.norm, found.sigma, title)]
    for sizes in found.sizes if len(found.sizes) > 1 else ():
        held = sizes.size_if_correct(found.label)
        at = [(radius, float(np.mean(held >= radius))) for radius in radii]
        one = certified_row(at, sizes.norm, found.sigma, sizes.short_title or sizes.title)
        rows.append(one._replace(name=f"{sizes.norm} {sizes.short_title or sizes.title}",
                                 brief=False))  # fmt: skip
    return rows


def input_rows(found: CertificateTable) -> list[Row]:
    """Return rows of the clean accuracy of a table's inputs, and of their range and sigma."""
    rows = []
    if found.clean_accuracy is not None:
        share = format_percent(found.clean_accuracy)
        rows.append(Row("clean accuracy of these", f"{share} % of {len(found.index):,} inputs"))
    if found.input_range is not None:
        rows.append(Row("units", range_words(*found.input_range, found.sigma)))
    return rows


def radius_row(found: CertificateTable) -> Row:
    """Return the row of a table's average certified radius."""
    value = format_bound(found.average_radius, 4)
    return Row("average certified radius", value, "an incorrect or abstained input counts as 0")


def table_rows(found: CertificateTable) -> list[Row]:
    """Return the printed rows of a table, the verdict first."""
    abstained = int((found.prediction == ABSTAIN).sum())
    rows = [
        Row("verdict", verdict(found)),
        *certified_rows(found),
        Row("inputs", f"{len(found.index):,}"),
        *input_rows(found),
        Row("abstained", f"{abstained:,}"),
        radius_row(found),
        population_row(found),
        Row("draws", f"{sum(found.table['n'].to_pylist()):,}"),
        Row("alpha", f"{found.alpha:g} each"),
    ]
    classifier = found.job_record.get("classifier", {})
    if classifier:
        executed = f"{classifier['backend']}, batches of {classifier['batch']}"
        if "device" in classifier:
            executed += f", on {classifier['machine']}"
        if "generator" in classifier:
            executed += f", noise of {classifier['generator']}"
        rows.append(Row("executed", "; ".join([executed, *classifier["notes"]])))
    return rows


POPULATION = "of the population, at least"


def stated_bounds(certificates: CertificateTable) -> list[PopulationBound]:
    """Return the bounds that reports state; none if the inputs are evidently not a sample."""
    return [] if lacks_classes(certificates) else population_bounds(certificates)


def population_row(certificates: CertificateTable) -> Row:
    """Return the row with a lower bound of the population's accuracy.

    Reports, `certify`, `release` and `verify` all print this row of a table.
    """
    stated = stated_bounds(certificates)
    if not stated:
        return Row(POPULATION, "not stated: the inputs lack classes, as they are in their order")
    shares = ", ".join(
        f"{format_percent(at.accuracy_lower_bound, round_down=True)} % at {format_exact(at.radius)}"
        for at in stated
    )
    return Row(POPULATION, f"{shares} ({100 * (1 - ERROR):g} %, all radii together)")


# --- whole curves -----------------------------------------------------------------------------


CELLS = 64


@dataclass(frozen=True, eq=False)
class CurveDifference:
    """A band of the difference of two certified accuracies at every size, all sizes together.

    For every size in (knots[j], knots[j + 1]], the first with 0 itself, the population's
    difference is at least low[j] and at most high[j]. knots: (J + 1,) ascending; low, high:
    (J,).
    """

    knots: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @property
    def better_ranges(self) -> list[tuple[float, float]]:
        """Return the ranges of sizes, (above, up to), at which the later run is better."""
        return self._stretches(self.low > 0)

    @property
    def worse_ranges(self) -> list[tuple[float, float]]:
        """Return the ranges of sizes, (above, up to), at which the later run is worse."""
        return self._stretches(self.high < 0)

    def _stretches(self, cells: np.ndarray) -> list[tuple[float, float]]:
        steps = np.diff(np.concatenate([[0], cells.astype(np.int8), [0]]))
        begins, ends = np.flatnonzero(steps == 1), np.flatnonzero(steps == -1)
        return list(zip(self.knots[begins].tolist(), self.knots[ends].tolist(), strict=True))


def curve_difference(
    first: np.ndarray, second: np.ndarray, max_size: float, error: float = ERROR, cells: int = CELLS
) -> CurveDifference:
    """Return the band of the difference of two runs' certified sizes, up to `max_size`.

    first, second: certified sizes of the same inputs, float64 (N,). The band is wrong at any size
    with probability at most `error`, over the choice of inputs; `max_size` must not be chosen by
    the results. The certificates are taken as they are.
    """
    knots = np.linspace(0.0, max_size, cells + 1)
    beyond = np.concatenate([[-1e-300], knots[1:-1]])  # 0 is a certified size
    above, reached = beyond[:, None], knots[1:, None]
    level = error / (2 * cells)
    low = _difference_lower_bounds(first > above, second >= reached, level)
    high = -_difference_lower_bounds(second > above, first >= reached, level)
    return CurveDifference(knots, low, high)


def _difference_lower_bounds(first: np.ndarray, second: np.ndarray, error: float) -> np.ndarray:
    """Return lower bounds of the second's fraction minus the first's, float64 (J,).

    first, second: bool (J, N). Each bound is wrong with at most ``error``. As
    `difference_interval`, on one side.
    """
    only_second = (second & ~first).sum(1)
    discordant = (first ^ second).sum(1)
    spent = SHARE_OF_DISCORDANT * error
    fewest, most = clopper_pearson_interval(discordant, first.shape[1], spent)
    split = clopper_pearson_lower(only_second, np.maximum(discordant, 1), error - spent)
    worst = 2 * split - 1
    return np.asarray(worst * np.where(worst < 0, most, fewest))
