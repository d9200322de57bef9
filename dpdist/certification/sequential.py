"""Certificates that stop drawing when a decision is reached: target radii, confidence sequences.

The error is exact although counts are examined more than once. A test against one probability p0
with planned looks has thresholds from the exact distribution of the counts at p0, so the error over
all looks together is at most alpha. A confidence sequence is valid at every number of draws at
once. Clopper-Pearson on an early-stopped count is neither (its error at alpha = 0.001 is about
0.004).

Target radii of expected scores are tested by betting. Let p_a and p_b be the expected scores of two
classes under the noise. Class a keeps the larger one while the input moves by less than r if
Phi^-1(p_a) - Phi^-1(p_b) > 2 t, with t = r times the norm of the first layer over the noise. This
follows from

    (1 + p_a - p_b) / 2 > Phi(t),

because p_a - p_b is the mass of the interval from Phi^-1(p_b) to Phi^-1(p_a) under N(0, 1), and an
interval of length 2 t or less has at most the mass 2 Phi(t) - 1. The left side is the mean of a
score in [0, 1], the *lead* of a over b. It is at least a's own score, so a test of leads passes
whenever a test of p_a would, with p_b <= 1 - p_a. The class a is chosen by separate draws. Its lead
over each other class is tested by betting (`dpdist.certification.score_bounds`): the capital
exceeds 1 / alpha at any number of draws with probability at most alpha. A radius is certified if
*every* lead has passed. If the radius is false, one lead is too small, whatever was drawn, and only
the test of that lead has to err: the classes do not share alpha. Radii are tested in ascending
order and the first failure ends the tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, final

import numpy as np
import scipy
from numpy.typing import ArrayLike
from pydantic import model_validator

from dpdist.certification import score_bounds
from dpdist.certification.certificate import (
    Certificate,
    NoiseSampler,
    PartialCounts,
    Verdict,
    require_ascending,
    require_setting,
    select_class,
)
from dpdist.certification.cohen import (
    Cohen,
    Smoothing,
    columns_of_bound,
    equivalent_input_noise,
    sample_under_noise,
)
from dpdist.certification.expected_scores import (
    BettingScores,
    HiddenNoiseCertificate,
    read_sensitivity,
    recreate_scores,
)
from dpdist.certification.noise import Noise
from dpdist.certification.score_bounds import SCORE_UNIT
from dpdist.certification.table import (
    ABSTAIN,
    CertificateTable,
    CertifiedSizes,
    base_schema,
    read_job_record,
    read_settings,
)
from dpdist.core.binomial import check_alpha, clopper_pearson_upper
from dpdist.core.console import format_exact
from dpdist.core.errors import UserError
from dpdist.core.files import ColumnSpec

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor, nn

    from dpdist.certification.certificate import ClassCounter
    from dpdist.certification.worker import HiddenNoiseCounter, ScoreSampler, VoteSampler


# --- sequential tests of a probability --------------------------------------------------------


# Probability below which a tail is dropped; it is counted as an error all the same.
_NEGLIGIBLE = 1e-25


def planned_looks(cap: int, step: int, count: int = 26) -> tuple[int, ...]:
    """Return the numbers of draws at which a decision may be made, geometric multiples of step."""
    grid = np.geomspace(min(step, cap), cap, count)
    rounded = np.unique(np.minimum(-(-grid // step) * step, cap).astype(int))
    return tuple(int(look) for look in rounded)


@dataclass(frozen=True)
class Thresholds:
    """Reject p <= p0 at looks[i] if the cumulative count reaches critical_counts[i].

    A critical count above the look means that no decision is possible there. error: the exact
    probability at p0 of ever rejecting, at most alpha.
    """

    p0: float
    alpha: float
    looks: tuple[int, ...]
    critical_counts: tuple[int, ...]
    error: float


@lru_cache(maxsize=256)
def compute_thresholds(p0: float, alpha: float, looks: tuple[int, ...]) -> Thresholds:
    """Return thresholds for H0: p <= p0 that spend alpha * sqrt(n / cap) of the error by look n.

    Computed by the exact binomial recursion over the looks (direct convolution of probabilities,
    all of one sign, so every value has full relative precision). The count grows with p, so the
    error is largest at p0 itself. Spending: Lan and DeMets, Biometrika 1983; boundary at p0 by
    Armitage, McPherson and Rowe, JRSS A 1969.

    Raises ValueError unless 0 < p0 < 1, 0 < alpha < 1 and the looks ascend.
    """
    check_alpha(alpha)
    if not 0 < p0 < 1:
        raise ValueError(f"p0 must lie strictly between 0 and 1, got {p0}")
    if not looks or any(a >= b for a, b in zip((0, *looks[:-1]), looks, strict=True)):
        raise ValueError(f"looks must be positive and ascending, got {looks}")
    cap = looks[-1]
    low, alive = 0, np.ones(1)  # Pr[count = low + i and not rejected yet]
    spent = 0.0
    needed = []
    before = 0
    for look in looks:
        start, pmf = _binomial_window(look - before, p0)
        low, alive = low + start, np.convolve(alive, pmf)
        budget = alpha * np.sqrt(look / cap) - spent
        tail = np.cumsum(alive[::-1])[::-1]  # Pr[count >= low + i, alive], smallest first summed
        first = int(np.searchsorted(-tail, -budget, side="left"))
        needed.append(min(low + first, look + 1) if first < len(alive) else look + 1)
        if first < len(alive):
            spent += float(tail[first])
        alive = alive[:first]
        before = look
    # The dropped mass, as if all of it would have been rejected.
    lost = 2 * len(looks) * _NEGLIGIBLE
    return Thresholds(p0, alpha, looks, tuple(needed), spent + lost)


def _binomial_window(draws: int, p: float) -> tuple[int, np.ndarray]:
    """Return first count and probabilities of Binomial(draws, p), without its negligible tails."""
    low = int(scipy.stats.binom.ppf(_NEGLIGIBLE, draws, p))
    high = int(scipy.stats.binom.isf(_NEGLIGIBLE, draws, p))
    low, high = max(low, 0), min(max(high, low), draws)
    return low, scipy.stats.binom.pmf(np.arange(low, high + 1), draws, p)


class TargetTest:
    """Several radii, ascending, each as a test against its p0 on the same cumulative counts.

    The tests are made in a fixed order and the first failure ends them, so the probability that
    any certified radius is false is at most alpha (fixed-sequence procedure: Maurer, Hothorn and
    Lehmacher 1995).
    """

    def __init__(
        self, probabilities: tuple[float, ...], alpha: float, looks: tuple[int, ...]
    ) -> None:
        self.looks = looks
        self._tests = [compute_thresholds(p0, alpha, looks) for p0 in probabilities]
        self._rejected = [False] * len(probabilities)

    def passed(self) -> int:
        """Return the number of radii, from the smallest on, that are certified."""
        return next((i for i, done in enumerate(self._rejected) if not done), len(self._rejected))

    def update(self, look_index: int, hits: int) -> bool:
        """Add the cumulative count at a look; return True if nothing more can be decided."""
        for i, test in enumerate(self._tests):
            self._rejected[i] |= hits >= test.critical_counts[look_index]
        first = self.passed()
        if first == len(self._tests):
            return True
        test, draws = self._tests[first], self.looks[look_index]
        later = slice(look_index + 1, None)
        reachable = any(
            hits + look - draws >= needed
            for look, needed in zip(self.looks[later], test.critical_counts[later], strict=True)
        )
        return not reachable or is_futile(hits, draws, test.p0)


# Error of the upper bound by which an input is given up. It can only lose certificates, never add a
# false one, because no threshold depends on it.
FUTILITY_ALPHA = 0.01


def is_futile(hits: int, draws: int, p0: float) -> bool:
    """Return whether an upper bound of the probability is at most p0, so that no test will pass."""
    return bool(clopper_pearson_upper(hits, draws, FUTILITY_ALPHA) <= p0)


def beta_mixture_log_evidence(hits: ArrayLike, draws: ArrayLike, p0: ArrayLike) -> np.ndarray:
    """Return ln of the test martingale against p <= p0: the likelihood ratio averaged over p > p0.

    The average is over the uniform distribution on (p0, 1), so that the ratio's expectation is at
    most 1 for every p <= p0; by Ville's inequality it ever exceeds 1 / alpha with probability at
    most alpha. Robbins, Annals of Mathematical Statistics 1970.
    """
    k = np.asarray(hits, dtype=np.float64)
    n = np.asarray(draws, dtype=np.float64)
    p = np.asarray(p0, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        above = np.log(scipy.special.betaincc(k + 1, n - k + 1, p)) - np.log1p(-p)
        null = scipy.special.xlogy(k, p) + scipy.special.xlog1py(n - k, -p)
    result: np.ndarray = scipy.special.betaln(k + 1, n - k + 1) + above - null
    return result


def beta_mixture_rejects(
    hits: ArrayLike, draws: ArrayLike, p0: ArrayLike, alpha: float
) -> np.ndarray:
    """Return whether p <= p0 is rejected; the error over all numbers of draws is at most alpha."""
    # The slack covers the rounding of ln beta, which grows with the counts.
    limit = np.log(1 / alpha) + 1e-9 + 1e-14 * np.asarray(draws, dtype=np.float64)
    result: np.ndarray = beta_mixture_log_evidence(hits, draws, p0) >= limit
    return result


def anytime_lower(hits: ArrayLike, draws: ArrayLike, alpha: float) -> np.ndarray:
    """Return a lower confidence bound of the probability, valid at all numbers of draws together.

    It is the smallest p0 that the beta mixture does not reject at threshold 1 / alpha; 0 without
    draws. It may be computed after any number of draws, chosen by any rule, and later at a
    different alpha that was chosen beforehand. Vectorized, for counts up to 1e9.

    Raises ValueError unless 0 <= hits <= draws and 0 < alpha < 1/4.
    """
    k, n = np.broadcast_arrays(
        np.asarray(hits, dtype=np.float64), np.asarray(draws, dtype=np.float64)
    )
    check_alpha(alpha)
    if alpha >= 0.25:
        # Beyond, the evidence need not fall monotonically where it crosses the threshold.
        raise ValueError(f"alpha must be below 1/4 for a confidence sequence, got {alpha}")
    if np.any((k < 0) | (k > n)):
        raise ValueError("hits must lie between 0 and draws")
    low, high = np.zeros(k.shape), np.where(n > 0, k / np.maximum(n, 1), 0.0)
    for _ in range(100):
        middle = (low + high) / 2
        rejected = (middle > 0) & beta_mixture_rejects(k, n, middle, alpha)
        low, high = np.where(rejected, middle, low), np.where(rejected, high, middle)
    return low[()]


# --- certificates of a list of radii ----------------------------------------------------------


def _verdict_of_passed(
    partial: PartialCounts, radii: Sequence[float], hypotheses: Sequence[float]
) -> Verdict:
    """Return the certificate of the largest of `radii` that passed its test, if one did."""
    passed = partial["passed"]
    last = max(passed - 1, 0)
    return Verdict(
        prediction=partial["selected"] if passed else ABSTAIN,
        selected=partial["selected"],
        k=partial["k"],
        n=partial["n"],
        p_lower=hypotheses[last] if passed else 0.0,
        radius=radii[last] if passed else 0.0,
        looks=partial["looks"],
        target=radii[last],
        hits=partial.get(HITS),
    )


def _columns_of_passed(
    table: pa.Table, radii: Sequence[float], hypotheses: Sequence[float], passed: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the columns of rows of which the first `passed` radii, int (N,), passed their tests.

    Its keys are "prediction" (-1: abstains), "radius" (0 if none passed), "target" and "p_lower".
    """
    last, certified = np.maximum(passed - 1, 0), passed > 0
    return {
        "prediction": np.where(certified, table["selected"].to_numpy(), ABSTAIN),
        "radius": np.where(certified, np.array(radii)[last], 0.0),
        "target": np.array(radii)[last],
        "p_lower": np.where(certified, np.array(hypotheses)[last], 0.0),
    }


# --- certificates by votes --------------------------------------------------------------------


HITS = "hits"  # column: draws of the selected class at each look, from the first one on


class SequentialSmoothing(Smoothing):
    """Votes by a sequential test, which is one unit of work; n is its cap."""

    @final
    def num_units(self, batch: int) -> int:
        """Return 1, an int: a sequential test is one unit of work, for any `batch`."""
        return 1

    @final
    def hypotheses(self, noise: Noise) -> tuple[float, ...]:
        """Return the class probability that the test of each radius must exceed.

        Args:
            noise: the noise that certifies.

        Returns:
            A tuple of floats, one for each of `radii` in order: the probability above which the
            radius is certified, moved up by 1e-9 of its distance to 1 against rounding. Empty
            without radii.
        """
        exact = [noise.probability_for_radius(radius) for radius in self.radii]
        return tuple(p + (1 - p) * 1e-9 for p in exact)

    @classmethod
    def recreate(
        cls, certificates: CertificateTable, norm: str, batch: int
    ) -> tuple[Certificate, NoiseSampler]:
        """Return Cohen's procedure with as many draws as the table's tests could make.

        Returns:
            A pair (settings, sampler): a `dpdist.Cohen`, and the `VoteSampler` that adds the
            table's noise and counts the classes. Pass it to `settings.sample` and
            `settings.decide` as `sampler`. Arguments are those of `Certificate.recreate`.
        """
        return Cohen.recreate(certificates, norm, batch)


class TargetRadius(SequentialSmoothing):
    """Settings of exact tests of given radii, at planned looks that stop once all is decided.

    Guarantee: for each input by itself, the probability over the draws that a certified radius is
    false is at most `alpha`, over all looks and all radii together. Radii are tested in ascending
    order, and the first failure ends the tests. Only radii of the list are certified, so an input's
    radius is the largest that passed. The table cannot be bounded again at a different alpha.

    Each argument is an attribute of the same name.

    Args:
        sigma: standard deviation of the noise, in input units.
        radii: the radii to decide, in input units of the noise's norm, ascending; at least one.
        n: the most draws for each input; an input stops earlier when it is decided.
        alpha: error probability of each input's certificate, strictly between 0 and 1.
        batch: looks are at multiples of it; all further fields are those of `dpdist.Cohen`.

    Raises:
        pydantic.ValidationError: as for `dpdist.Cohen`; or radii are missing, do not ascend or
            cannot be reached with this noise.

    Source:
        Armitage, McPherson and Rowe, JRSS A 1969; spending by Lan and DeMets, Biometrika 1983.

    Example:
        >>> import numpy as np, torch, dpdist
        >>> inputs, labels = np.eye(2, dtype=np.float32), np.array([0, 1])
        >>> model = torch.nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.eye(2))  # answers the larger coordinate
        >>> settings = dpdist.TargetRadius(sigma=0.25, radii=(0.25,), n=10_000, batch=100)
        >>> table = dpdist.certify(model, (inputs, labels), settings, executor="local")
        >>> table.radius.tolist(), max(table.to_arrow()["n"].to_pylist()) < 10_000
        ([0.25, 0.25], True)
    """

    mode: Literal["target-radius"] = "target-radius"
    draws_words: ClassVar[str] = "given radii decided by at most {n:,} draws"

    @model_validator(mode="after")
    def _require_radii(self) -> Self:
        require_setting(bool(self.radii), "radii", "given when mode is target-radius")
        return self

    def sample(
        self,
        counter: ClassCounter,
        x: Tensor,
        index: int,
        low: int,
        high: int,
        batch: int,
        sampler: VoteSampler,
    ) -> PartialCounts:
        """Draw until every radius of one input is decided, and return the counts, a dict.

        Arguments are those of `Certificate.sample`, with low 0 and high 1: all draws are one unit.

        Returns:
            A dict of JSON values for `decide`: "selected" (int, the class), "n" (int, the draws
            that were made, at most the settings' n), "k" (int, those of them that returned the
            class), "looks" (int, planned looks reached), "passed" (int, radii certified) and "hits"
            (list of int, k at each look).
        """
        selected = select_class(counter, self.n0, x, index)
        looks = planned_looks(self.n, batch)
        test = TargetTest(self.hypotheses(sampler.equivalent_noise), self.alpha, looks)
        k = block = number = 0
        hits = []
        for number, look in enumerate(looks):
            while block * batch < look:
                counts = sample_under_noise(
                    counter, x, index, range(block, block + 1), batch, self.n
                )
                k, block = k + int(counts[selected]), block + 1
            hits.append(k)
            if test.update(number, k):
                break
        return {
            "selected": selected,
            "k": k,
            "n": looks[number],
            "looks": number + 1,
            "passed": test.passed(),
            HITS: hits,
        }

    def decide(self, partials: Sequence[PartialCounts], sampler: VoteSampler) -> Verdict:
        """Return the certificate of one input, a `Verdict`, from its counts.

        Args:
            partials: a list of one result of `sample`.
            sampler: the result of `build_sampler(model, input_shape)`.

        Returns:
            A `Verdict`: `prediction` (int, the class; -1 if no radius passed), `radius` (float, the
            largest of `radii` that passed, in input units, in L2 for Gaussian noise, else L1; 0 if
            none), `p_lower` (float, lower bound of the class's probability that the test of this
            radius proved; 0 if none), `target` (`radius`, or the smallest of `radii` if none
            passed), `selected` (int, the class), `k` of `n` draws for it, `looks` and `hits` (as in
            `sample`).
        """
        (partial,) = partials
        return _verdict_of_passed(partial, self.radii, self.hypotheses(sampler.equivalent_noise))

    def name_parts(self) -> list[str]:
        sigma, mode, *rest = super().name_parts()
        return [sigma, mode, "r-" + "-".join(map(format_exact, self.radii)), *rest]

    spending: ClassVar[str] = "alpha*sqrt(n/cap), exact binomial"

    @classmethod
    def table_schema(cls) -> pa.Schema:
        import pyarrow as pa

        return base_schema().append(pa.field(HITS, pa.list_(pa.int64())))

    @classmethod
    def extra_columns(cls) -> Mapping[str, ColumnSpec]:
        return {HITS: (object, None)}

    @classmethod
    def consistent_counts(cls, table: pa.Table) -> np.ndarray:
        looks = _looks_of_table(table)
        k, n, number, cap = (table[name].to_numpy() for name in ("k", "n", "looks", "cap"))
        inside: np.ndarray = (
            (number >= 1) & (number <= len(looks)) & (table["selected"].to_numpy() >= 0)
        )
        inside &= (cap == looks[-1]) & (looks[np.clip(number, 1, len(looks)) - 1] == n) & (k <= n)
        steps = np.diff(looks, prepend=0)
        for place, hits in enumerate(table[HITS].to_pylist()):
            more = np.diff(hits, prepend=0)
            inside[place] &= (
                len(more) == number[place]
                and bool(((more >= 0) & (more <= steps[: len(more)])).all())
                and hits[-1] == k[place]
            )
        return inside

    @classmethod
    def recompute_columns(cls, table: pa.Table, alpha: float) -> dict[str, np.ndarray]:
        settings = read_settings(cls, read_job_record(table), "the table's description")
        p0 = settings.hypotheses(equivalent_input_noise(table))
        looks = tuple(_looks_of_table(table).tolist())
        needed = np.array([compute_thresholds(p, alpha, looks).critical_counts for p in p0])
        passed = np.array(
            [
                np.minimum.accumulate((np.array(hits) >= needed[:, : len(hits)]).any(1)).sum()
                for hits in table[HITS].to_pylist()
            ]
        )
        return _columns_of_passed(table, settings.radii, p0, passed)

    @classmethod
    def recertify(cls, table: pa.Table, alpha: float) -> dict[str, np.ndarray]:
        raise _stopped_early(cls.mode_name(), "mode fixed or anytime")


def _stopped_early(mode: str, instead: str) -> UserError:
    return UserError(
        f"results of early stopping (mode {mode}) certify their radius at their own alpha only; "
        f"certify again with {instead} to choose alpha later",
        see="how-to/certification.md#continue-or-change-alpha",
    )


def read_executed_batch(table: pa.Table) -> int:
    """Return the rows of the executed batch that a table states. Raises UserError if damaged."""
    batch = read_job_record(table).get("classifier", {}).get("batch")
    if type(batch) is not int or batch < 1:
        raise UserError("the table's description: damaged: classifier.batch must be >= 1")
    return batch


def consistent_blocks(table: pa.Table) -> np.ndarray:
    """Return whether each row has the draws of its blocks, and no more hits than draws: bool (N,).

    The test is made after every block; the last block may be drawn in part.
    """
    k, n, looks, cap = (table[name].to_numpy() for name in ("k", "n", "looks", "cap"))
    batch = read_executed_batch(table)
    blocks = (looks == -(-n // batch)) & (n == np.minimum(looks * batch, cap)) & (n >= 1)
    result: np.ndarray = blocks & (k <= n) & (table["selected"].to_numpy() >= 0)
    return result


def _looks_of_table(table: pa.Table) -> np.ndarray:
    """Return the numbers of draws at the looks of a table, int64."""
    looks = planned_looks(table["cap"][0].as_py(), read_executed_batch(table))
    return np.array(looks, dtype=np.int64)


class Anytime(SequentialSmoothing):
    """Settings of a confidence sequence, which is valid at every number of draws at once.

    Guarantee: for each input by itself, with probability at least 1 - `alpha` over the draws, the
    smoothed classifier answers the certified class everywhere within the certified radius, or the
    verdict abstains, whenever the draws were stopped. Drawing stops when every radius of the list
    is decided. The table may be bounded again at a different alpha that was chosen beforehand.

    Each argument is an attribute of the same name.

    Args:
        sigma: standard deviation of the noise, in input units.
        radii: the radii that end the draws once they are decided, in input units of the noise's
            norm, ascending; without any, each input takes all n draws.
        n: the most draws for each input.
        alpha: error probability of each input's certificate, strictly between 0 and 1/4.
        batch: draws between two decisions; all further fields are those of `dpdist.Cohen`.

    Raises:
        pydantic.ValidationError: as for `dpdist.Cohen`; or alpha is 1/4 or more.

    Source:
        Ville's inequality, for the likelihood ratio averaged over a beta distribution.

    Example:
        >>> import numpy as np, torch, dpdist
        >>> inputs, labels = np.eye(2, dtype=np.float32), np.array([0, 1])
        >>> model = torch.nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.eye(2))  # answers the larger coordinate
        >>> settings = dpdist.Anytime(sigma=0.25, radii=(0.25,), n=10_000, batch=100)
        >>> table = dpdist.certify(model, (inputs, labels), settings, executor="local")
        >>> table.certified_accuracy(0.25), max(table.to_arrow()["n"].to_pylist()) < 10_000
        (1.0, True)
    """

    mode: Literal["anytime"] = "anytime"
    draws_words: ClassVar[str] = "at most {n:,} draws, valid at any time"

    @model_validator(mode="after")
    def _validate_alpha(self) -> Self:
        require_setting(self.alpha < 0.25, "alpha", "below 1/4 when mode is anytime")
        return self

    def sample(
        self,
        counter: ClassCounter,
        x: Tensor,
        index: int,
        low: int,
        high: int,
        batch: int,
        sampler: VoteSampler,
    ) -> PartialCounts:
        """Draw until all radii of one input are decided, or n draws, and return counts, a dict.

        Arguments are those of `Certificate.sample`, with low 0 and high 1: all draws are one unit.

        Returns:
            A dict of JSON values for `decide`: "selected" (int, the class), "n" (int, the draws
            that were made, at most the settings' n), "k" (int, those of them that returned the
            class) and "looks" (int, number of blocks).
        """
        selected = select_class(counter, self.n0, x, index)
        p0 = self.hypotheses(sampler.equivalent_noise)
        hits = draws = block = passed = 0
        while draws < self.n:
            counts = sample_under_noise(counter, x, index, range(block, block + 1), batch, self.n)
            hits += int(counts[selected])
            draws = min(draws + batch, self.n)  # those without a class are draws too
            block += 1
            while passed < len(p0) and beta_mixture_rejects(hits, draws, p0[passed], self.alpha):
                passed += 1
            if p0 and (passed == len(p0) or is_futile(hits, draws, p0[passed])):
                break
        return {"selected": selected, "k": hits, "n": draws, "looks": block}

    def decide(self, partials: Sequence[PartialCounts], sampler: VoteSampler) -> Verdict:
        """Return the certificate of one input, a `Verdict`, from its counts.

        Args:
            partials: a list of one result of `sample`.
            sampler: the result of `build_sampler(model, input_shape)`.

        Returns:
            A `Verdict`: `prediction` (int; -1: abstains), `radius` (float, in input units, in L2
            for Gaussian noise, else L1; 0 if it abstains), `p_lower` (float, lower bound of the
            class's probability), `target` (the largest of `radii`; None without radii), `selected`
            (int) and `k` of `n` draws for it.
        """
        (partial,) = partials
        p_lower = float(self.lower_bound(partial["k"], partial["n"], self.alpha))
        return Verdict(
            prediction=partial["selected"] if p_lower > 0.5 else ABSTAIN,
            selected=partial["selected"],
            k=partial["k"],
            n=partial["n"],
            p_lower=p_lower,
            radius=float(sampler.equivalent_noise.radius(p_lower)),
            looks=partial["looks"],
            target=self.radii[-1] if self.radii else None,
        )

    @classmethod
    def lower_bound(cls, hits: ArrayLike, draws: ArrayLike, alpha: float) -> Any:
        """Return a lower confidence bound of a class's probability, valid at all numbers of draws.

        Args:
            hits: draws that answered the class, 0 <= hits <= draws: an int, or an array of counts.
            draws: all draws so far: an int, or an array that broadcasts with hits.
            alpha: probability that any bound of the whole sequence of draws exceeds the true
                probability; below 1/4.

        Returns:
            A float64 in [0, 1]; for arrays, a float64 array of the broadcast shape of hits and
            draws.

        Raises:
            ValueError: a count or alpha is out of range.
        """
        return anytime_lower(hits, draws, alpha)

    spending: ClassVar[str] = "beta mixture, 1/alpha"

    @classmethod
    def consistent_counts(cls, table: pa.Table) -> np.ndarray:
        return consistent_blocks(table)

    @classmethod
    def constant_columns(cls, table: pa.Table, settings: Mapping[str, Any]) -> dict[str, Any]:
        radii = read_settings(cls, read_job_record(table), "the table's description").radii
        return {**super().constant_columns(table, settings), "target": radii[-1] if radii else None}

    @classmethod
    def recompute_columns(cls, table: pa.Table, alpha: float) -> dict[str, np.ndarray]:
        k, n = table["k"].to_numpy(), table["n"].to_numpy()
        return columns_of_bound(table, np.asarray(cls.lower_bound(k, n, alpha)))


# --- certificates by expected scores ----------------------------------------------------------


_NEAR_ONE = 1 - 1e-12


class LeadTest:
    """A test of the leads over all other classes against ascending means.

    passed: the number of means that all leads exceed. futility_alpha: error by which an input is
    given up; it can only lose certificates.
    """

    def __init__(
        self, means: Sequence[float], alpha: float, futility_alpha: float = FUTILITY_ALPHA
    ) -> None:
        self._means, self._alpha, self._futility_alpha = means, alpha, futility_alpha
        self._scores = score_bounds.BIN_EDGES / SCORE_UNIT
        self._counts = np.zeros((len(self._scores), 1))
        self.passed = 0

    def update(self, counts: np.ndarray, excess: np.ndarray) -> bool:
        """Add the binned leads of more draws; return True if all is decided."""
        self._counts = self._counts + score_bounds.bin_edge_weights(counts, excess).T
        for mean in self._means[self.passed :]:
            above = score_bounds.means_exceed(self._counts, self._scores, mean, self._alpha)
            if not above.all():
                below = score_bounds.means_exceed(
                    self._counts, 1 - self._scores, 1 - mean, self._futility_alpha
                )
                return bool(below.any())
            self.passed += 1
        return True


class TargetScores(HiddenNoiseCertificate):
    """Early stopping of expected scores: given radii, tested by betting after every block of draws.

    It certifies the largest radius that passed.

    Attributes:
        n: The most draws for each input.
        radii: The radii to decide, in input units, ascending.
        norm: The norm of the radii.
    """

    mode: Literal["target-scores"] = "target-scores"
    norm: Literal["l2", "linf"] = "l2"

    @model_validator(mode="after")
    def _require_radii(self) -> Self:
        require_setting(bool(self.radii), "radii", f"given when mode is {self.mode}")
        require_ascending(self.radii)
        return self

    def build_sampler(self, model: nn.Module, input_shape: tuple[int, ...]) -> ScoreSampler:
        place = super().build_sampler(model, input_shape)
        if not all(p < _NEAR_ONE for p in self.hypotheses(place)):
            raise UserError(
                f"certify.radii: must be reachable with its noise, got {self.radii}",
                see="how-to/certification.md#choose-the-mode",
            )
        return place

    def hypotheses(self, sampler: ScoreSampler) -> tuple[float, ...]:
        """Return the lead to exceed for each radius, rounded up."""
        scale = getattr(sampler.sensitivity, self.norm) / sampler.sigma
        exact = [float(scipy.special.ndtr(radius * scale)) for radius in self.radii]
        return tuple(p + (1 - p) * 1e-9 for p in exact)

    def num_units(self, batch: int) -> int:
        return 1

    def sample(
        self,
        counter: HiddenNoiseCounter,
        x: Tensor,
        index: int,
        low: int,
        high: int,
        batch: int,
        sampler: ScoreSampler,
    ) -> PartialCounts:
        selected = select_class(counter, self.n0, x, index)
        test = LeadTest(self.hypotheses(sampler), self.alpha)
        votes = draws = block = 0
        while draws < self.n:
            rows = min(batch, self.n - draws)
            found = counter.sample_block(x, index, block, batch, rows, binned=True, leader=selected)
            assert found.bins is not None and found.excess is not None
            votes, draws, block = votes + int(found.histogram[selected]), draws + rows, block + 1
            if test.update(found.bins, found.excess):
                break
        return {
            "selected": selected, "k": votes, "n": draws, "looks": block, "passed": test.passed
        }  # fmt: skip

    def decide(self, partials: Sequence[PartialCounts], sampler: ScoreSampler) -> Verdict:
        (partial,) = partials
        return _verdict_of_passed(partial, self.radii, self.hypotheses(sampler))

    def name_parts(self) -> list[str]:
        radii = "-".join(map(format_exact, self.radii))
        return [self.mode, self.norm, f"r-{radii}", f"n-{self.n}", f"eta-{1 - self.alpha:g}"]

    spending: ClassVar[str] = "betting, 1/alpha"

    @classmethod
    def consistent_counts(cls, table: pa.Table) -> np.ndarray:
        return consistent_blocks(table)

    @classmethod
    def recompute_columns(cls, table: pa.Table, alpha: float) -> dict[str, np.ndarray]:
        # From the radius that a row states: whether it passed its test cannot be recomputed, since
        # the scores of the draws are not kept.
        from dpdist.certification.worker import ScoreSampler

        settings = read_settings(cls, read_job_record(table), "the table's description")
        sampler = ScoreSampler(table["sigma"][0].as_py(), read_sensitivity(table))
        stated = np.searchsorted(settings.radii, table["radius"].to_numpy())
        last = stated.clip(0, len(settings.radii) - 1)
        passed = np.where(table["prediction"].to_numpy() != ABSTAIN, last + 1, 0)
        return _columns_of_passed(table, settings.radii, settings.hypotheses(sampler), passed)

    @classmethod
    def read_sizes(cls, table: pa.Table) -> tuple[CertifiedSizes, ...]:
        answer, size = table["prediction"].to_numpy(), table["radius"].to_numpy()
        norm = table["norm"][0].as_py()
        title = "exact profile, targets"
        return (CertifiedSizes("exact", norm, title, answer, size, predicts_by_vote=False),)

    @classmethod
    def recertify(cls, table: pa.Table, alpha: float) -> dict[str, np.ndarray]:
        raise _stopped_early(cls.mode_name(), "bound betting")

    @classmethod
    def recreate(
        cls, certificates: CertificateTable, norm: str, batch: int
    ) -> tuple[BettingScores, ScoreSampler]:
        """Return one-sided betting with as many draws as the table's tests could make."""
        return recreate_scores(BettingScores, certificates, norm, batch, one_sided=True)

    @classmethod
    def describe(cls, certificates: CertificateTable) -> str:
        return (
            "Expected scores under the model's own noise, given radii decided by at most "
            f"{certificates.n:,} draws"
        )

    @classmethod
    def comparison_key(cls, certificates: CertificateTable) -> dict[str, Any]:
        return {"norm": certificates.norm, "radii": certificates.radii}
