"""Certificates of one input from expected scores under the model's own hidden noise.

The network is rest(first(x) + N(0, std^2)), first affine. A change of the input of size mu moves
first(x) / sqrt(K r) by at most mu times a norm of the first layer. So the network after the noise
is a Gaussian mechanism of noise sigma_r at that sensitivity: PixelDP's condition, HGM's, and the
exact Gaussian profile all apply (``dpdist.certification.score_bounds``). Sizes are in input units.

Scores are the softmax rounded down to multiples of 2^-20. Their sums are integers, so a table does
not depend on how the draws were split over workers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
from pydantic import Field, ValidationError

from dpdist.certification import score_bounds
from dpdist.certification.certificate import (
    Certificate,
    PartialCounts,
    Verdict,
    counts_to_json,
    select_class,
    selected_class,
    total_counts,
)
from dpdist.certification.noise import gaussian_l2_radius
from dpdist.certification.score_bounds import SCORE_UNIT, ScoreBounds, Sensitivity
from dpdist.certification.table import (
    ABSTAIN,
    HIDDEN_NOISE,
    CertificateTable,
    CertifiedSizes,
    consistent_histograms,
    list_columns,
    read_job_record,
)
from dpdist.core.binomial import clopper_pearson_lower
from dpdist.core.errors import UserError
from dpdist.core.fields import RejectBool
from dpdist.core.files import ColumnSpec, check_shape, error_text

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor, nn

    from dpdist.certification.worker import HiddenNoiseCounter, ScoreSampler

NORMS = ("l2", "linf")
CERTIFICATE_TITLES = {
    "classical": "PixelDP, epsilon_r <= 1",
    "extended": "HGM, corrected",  # Eq. 10: extended (heterogeneous) Gaussian mechanism
    "analytic": "AGM",  # the same condition with the exact (epsilon, delta) profile
    "exact": "exact profile",  # of expected scores: no epsilon_r
    "cohen": "vote (Cohen)",  # exact profile of the majority vote, Clopper-Pearson
}
VOTE_CERTIFICATE = "cohen"  # applies to the vote; the others apply to mean scores
AS_PRINTED = "as_printed_linf"
SIZE_COLUMNS = (*(f"{name}_{norm}" for name in CERTIFICATE_TITLES for norm in NORMS), AS_PRINTED)

ScoreBound = Literal["hoeffding", "bernstein", "counts"]

_Kind = TypeVar("_Kind", bound="ExpectedScores")
COUNTS_BOUND = "counts"  # the bound whose scores are votes: 1 for the class of a draw's answer


# Sums of squares of scores, each at most SCORE_UNIT^2, are stored as int64.
MAX_DRAWS = 2**63 // SCORE_UNIT**2 - 1


class HiddenNoiseCertificate(Certificate):
    """Base of certificates of scores under the noise after a model's first layer."""

    n: Annotated[int, RejectBool, Field(ge=2, le=MAX_DRAWS)] = 100_000

    noise: ClassVar[str] = HIDDEN_NOISE
    sigma: ClassVar[None] = None
    max_device_batch: ClassVar[int] = 32768

    def build_sampler(self, model: nn.Module, input_shape: tuple[int, ...]) -> ScoreSampler:
        """Return the sampler of the noise after the model's first layer.

        Args:
            model: the classifier, float32 inputs (B, *input_shape) to logits (B, classes).
            input_shape: shape of one input.

        Returns:
            A `ScoreSampler`, the argument `sampler` of `sample`, `predict` and `decide`.

        Raises:
            UserError: the model has no such noise.
        """
        from dpdist.certification.worker import ScoreSampler

        return ScoreSampler.from_model(model, input_shape)

    @classmethod
    def constant_columns(cls, table: pa.Table, settings: Mapping[str, Any]) -> dict[str, Any]:
        return {**super().constant_columns(table, settings), "noise": cls.noise}


class ExpectedScores(HiddenNoiseCertificate):
    """Settings of certificates by mean scores, with the noise after a model's own first layer.

    Guarantee: for each input by itself, with probability at least 1 - `alpha` over the draws, the
    class with the largest expected score (by "counts": with most votes) stays the same everywhere
    within the certified size, or the verdict abstains. The table's radius is the exact Gaussian
    size in `norm`. One table has the sizes of PixelDP, HGM and Secure-SGD too, in L2 and
    L-infinity, and those of Cohen's vote, each valid by itself. The column as_printed_linf has a
    formula of a paper that is not valid.

    Each argument is an attribute of the same name.

    Args:
        n: draws for each input, at least 2.
        n0: draws that choose the class of the vote, used for nothing else.
        alpha: error probability of each input's bounds, all classes and both sides together; papers
            call 1 - alpha eta.
        bound: "hoeffding", "bernstein" (empirical), or "counts": Clopper and Pearson's of how often
            each class had the largest score.
        norm: "l2" or "linf": the norm of the table's radius, in input units. All further fields are
            those of `dpdist.Cohen`, without `sigma` and `noise`.

    Raises:
        pydantic.ValidationError: a value is out of range, or `sigma` is given: the noise is the
            model's own.

    Source:
        Lecuyer et al., IEEE S&P 2019; Phan et al., IJCAI 2019; the sizes and their proofs:
        `dpdist.certification.score_bounds`.

    Example:
        >>> import numpy as np, torch, dpdist
        >>> from dpdist import models
        >>> inputs, labels = np.eye(2, dtype=np.float32), np.array([0, 1])
        >>> layers = [torch.nn.Linear(2, 2, bias=False) for _ in range(2)]
        >>> for scale, layer in zip((1, 10), layers):
        ...     _ = layer.weight.data.copy_(scale * torch.eye(2))
        >>> model = torch.nn.Sequential(*layers)
        >>> models.attach_noise(model, torch.full((2,), 0.25))  # behind the first layer
        >>> settings = dpdist.ExpectedScores(n=1000)
        >>> table = dpdist.certify(model, (inputs, labels), settings, executor="local")
        >>> table.prediction.tolist(), table.certified_accuracy(0.1)
        ([0, 1], 1.0)
    """

    bound: ScoreBound = "hoeffding"
    norm: Literal["l2", "linf"] = "l2"

    mode: ClassVar[str] = "scores"
    result_free_fields: ClassVar[frozenset[str]] = frozenset({"radii"})
    binned_fields: ClassVar[tuple[str, ...]] = ()  # fields of `BlockScores` that are also summed

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
        """Draw blocks low..high-1 of one input, and return the summed scores of each class, a dict.

        Arguments are those of `Certificate.sample`.

        Returns:
            A dict of JSON values for `decide`. "sums", "squares" and "histogram" are lists with an
            int for each class: the sum of its scores in units of 2^-20, the sum of their squares in
            units of 2^-40, and the draws in which its score was the largest. If low is 0,
            "selected" (int) is the class of the vote by n0 other draws. "undefined", a list of one
            int, counts draws without a class, if there are any.
        """
        partial: PartialCounts = {}
        if low == 0:
            partial["selected"] = select_class(counter, self.n0, x, index)
        blocks = [
            counter.sample_block(
                x,
                index,
                block,
                batch,
                min(batch, self.n - block * batch),
                binned=bool(self.binned_fields),
            )
            for block in range(low, high)
        ]
        for name in ("sums", "squares", "histogram", *self.binned_fields):
            found = np.sum([getattr(block, name) for block in blocks], axis=0)
            partial[name] = found.ravel().tolist()
        draws = sum(block.draws for block in blocks)
        return partial | counts_to_json(np.asarray(partial["histogram"]), draws)

    def decide(self, partials: Sequence[PartialCounts], sampler: ScoreSampler) -> ScoreVerdict:
        """Return all certificates of one input, a `ScoreVerdict`, from the sums of all blocks.

        Args:
            partials: results of `sample` that together cover every block once.
            sampler: the result of `build_sampler(model, input_shape)`.

        Returns:
            A `ScoreVerdict`: `prediction` (int, the certified class; -1: abstains), `radius`
            (float, in input units of the settings' `norm`; 0 if it abstains), `sizes` (dict of
            float by column, such as "exact_l2"), `p_lower` and `p_upper` (floats, lower bound of
            this class's expected score and upper bound of every other's), `sums`, `squares` and
            `histogram`.
        """
        names = ("sums", "squares", *self.binned_fields)
        counts = {name: total_counts(partials, name) for name in names}
        counts["histogram"] = total_counts(partials, "histogram", self.n)
        selected = selected_class(partials)
        return self.certify_counts(counts, selected, sampler.sigma, sampler.sensitivity)

    def certify_counts(
        self, counts: Mapping[str, Any], selected: int, scale: float, norms: Sensitivity
    ) -> ScoreVerdict:
        """Return all certificates of one input, a `ScoreVerdict` as `decide` returns it.

        Args:
            counts: "sums", "squares" and "histogram" of all its draws, as in `sample`.
            selected: the class that n0 other draws chose.
            scale: standard deviation of the noise, sigma_r.
            norms: a `Sensitivity` with `l2` and `linf`, upper bounds of the norms of the first
                layer.
        """
        sums, squares, votes = (np.asarray(counts[n]) for n in ("sums", "squares", "histogram"))
        return certify_scores(sums, squares, votes, selected, self, scale, norms)

    def verdict_for_classifier(
        self, predicts_by_vote: bool, verdict: ScoreVerdict, sampler: ScoreSampler
    ) -> ScoreVerdict | Verdict:
        """Return the certificate of one of the two classifiers that the same draws define.

        Args:
            predicts_by_vote: True for the classifier that answers the class of most draws, False
                for the one that answers the class of the largest mean score.
            verdict: a result of `decide`.
            sampler: the result of `build_sampler(model, input_shape)`.

        Returns:
            A `Verdict` for votes or a `ScoreVerdict` for mean scores, with `prediction` (the class;
            -1: abstains) and `radius` (float, in input units of the settings' `norm`; 0 if it
            abstains). It is `verdict` itself if `verdict` is of that classifier.
        """
        if predicts_by_vote == (self.bound == COUNTS_BOUND):
            return verdict
        if predicts_by_vote:
            return verdict.vote_verdict(self)
        settings = self.model_copy(update={"bound": "hoeffding"})
        return settings.certify_counts(
            vars(verdict), verdict.selected, sampler.sigma, sampler.sensitivity
        )

    def name_parts(self) -> list[str]:
        return [self.mode, self.bound, self.norm, f"n-{self.n}", f"eta-{1 - self.alpha:g}"]

    def table_row(
        self, index: int, label: int, verdict: ScoreVerdict, sampler: ScoreSampler
    ) -> dict[str, Any]:
        found = super().table_row(index, label, verdict, sampler)
        return {**found.pop("sizes"), **found.pop("more"), **found, "bound": self.bound}

    @classmethod
    def extra_columns(cls) -> Mapping[str, ColumnSpec]:
        return {
            "bound": (str, None),
            "p_upper": (float, 0),
            "sums": (object, None),
            "squares": (object, None),
            **dict.fromkeys(SIZE_COLUMNS, (float, 0)),
        }

    @classmethod
    def constant_columns(cls, table: pa.Table, settings: Mapping[str, Any]) -> dict[str, Any]:
        stated = {name: settings[name] for name in ("bound", "one_sided") if name in settings}
        own = {name: value for name, value in stated.items() if name in cls.model_fields}
        return {**super().constant_columns(table, settings), **own}

    @classmethod
    def check_table(cls, table: pa.Table, context: str) -> None:
        if not all(table["sums"].to_pylist()):
            raise UserError(f"{context}: damaged: column 'sums' must hold a sum for each class")
        if len(set(table["bound"].to_pylist())) > 1:
            raise UserError(f"{context}: damaged: its rows differ in bound")
        super().check_table(table, context)

    @classmethod
    def consistent_counts(cls, table: pa.Table) -> np.ndarray:
        found = list_columns(table, "histogram", "sums", "squares")
        if found is None:
            return np.zeros(len(table), bool)
        votes, sums, squares = found
        n = table["n"].to_numpy()
        sound = consistent_histograms(table, votes) & (n >= 2) & (n <= MAX_DRAWS)
        sound &= (sums >= 0).all(1) & (sums.sum(1) <= n * SCORE_UNIT)
        result: np.ndarray = sound & ((squares >= 0) & (squares <= sums * SCORE_UNIT)).all(1)
        return result

    @classmethod
    def recompute_columns(cls, table: pa.Table, alpha: float) -> dict[str, np.ndarray]:
        found = list_columns(table, "sums", "squares", "histogram")
        assert found is not None
        sums, squares, histogram = found
        settings = read_table_settings(ExpectedScores, table, alpha)
        bounds = compute_score_bounds(sums, squares, histogram, settings)
        return columns_of_bounds(table, alpha, bounds, bounds.label)

    @classmethod
    def read_sizes(cls, table: pa.Table) -> tuple[CertifiedSizes, ...]:
        """Return every certificate in L2 and L-infinity, a tuple of `CertifiedSizes`.

        Args:
            table: the table of certificates, a pyarrow Table.

        Returns:
            A `CertifiedSizes` for each certificate and norm: `name` and `norm` (str, such as
            "exact" and "l2"), `size` (float64 (N,), in input units of `norm`; 0 if it abstains),
            `prediction` (int64 (N,); -1: abstains) and `is_valid` (bool). The last one,
            "as_printed", is a formula of a paper that is not valid: its `is_valid` is False.
        """
        counted = table["bound"][0].as_py() == COUNTS_BOUND
        found = []
        for norm in NORMS:
            for name, title in CERTIFICATE_TITLES.items():
                vote = name == VOTE_CERTIFICATE
                size = table[f"{name}_{norm}"].to_numpy()
                answer = table["selected" if vote else "prediction"].to_numpy()
                answer = np.where(size > 0, answer, ABSTAIN)
                sizes = CertifiedSizes(name, norm, title, answer, size, short_title=name)
                found.append(replace(sizes, predicts_by_vote=counted or vote))
        size = table[AS_PRINTED].to_numpy()
        means = np.array([int(np.argmax(sums)) for sums in table["sums"].to_pylist()])
        printed = CertifiedSizes(
            AS_PRINTED.removesuffix("_linf"),
            "linf",
            "as printed (does not hold)",
            np.where(size > 0, means, ABSTAIN),
            size,
            short_title="as printed (claimed, does not hold)",
            is_valid=False,
            predicts_by_vote=False,
        )
        return (*found, printed)

    @classmethod
    def recertify(cls, table: pa.Table, alpha: float) -> dict[str, np.ndarray]:
        settings, norms = read_table_settings(cls, table, alpha), read_sensitivity(table)
        made = []
        for row in table.to_pylist():
            verdict = settings.certify_counts(row, row["selected"], row["sigma"], norms)
            names = ("prediction", "p_lower", "p_upper", "radius")
            made.append({**verdict.sizes, **{name: getattr(verdict, name) for name in names}})
        return {name: np.array([each[name] for each in made]) for name in made[0]}

    @classmethod
    def recreate(
        cls, certificates: CertificateTable, norm: str, batch: int
    ) -> tuple[ExpectedScores, ScoreSampler]:
        """Return the settings and the sampler that a table was certified with.

        Args:
            certificates: the table.
            norm: norm of the radius that the settings certify, "l2" or "linf".
            batch: draws in a block.

        Returns:
            A pair (settings, sampler): an instance of this class with the table's draws, error and
            bound, and the `ScoreSampler` that draws scores under the model's own noise. Pass it to
            `settings.sample` and `settings.decide` as `sampler`.
        """
        own = cls.comparison_key(certificates)  # the settings of this kind
        return recreate_scores(cls, certificates, norm, batch, **own)

    @classmethod
    def describe(cls, certificates: CertificateTable) -> str:
        """Return a line about a table's noise and draws, a str.

        It reads like "Expected scores under the model's own noise, 1,000 draws an input".

        Args:
            certificates: the table.
        """
        return f"Expected scores under the model's own noise, {certificates.n:,} draws an input"

    @classmethod
    def comparison_key(cls, certificates: CertificateTable) -> dict[str, Any]:
        names = [name for name in ("bound", "one_sided") if name in cls.model_fields]
        return {name: certificates.table[name][0].as_py() for name in names}


class BettingScores(ExpectedScores):
    """Expected scores, bounded by betting (`dpdist.certification.score_bounds`).

    Attributes:
        one_sided: Bound only the class that n0 other draws chose, from below and at the whole
            error; the others have at most what is left. False: bound every class from both sides.
    """

    bound: Literal["betting"] = "betting"  # type: ignore[assignment]
    one_sided: bool = False

    mode: ClassVar[str] = "betting"
    binned_fields: ClassVar[tuple[str, ...]] = ("bins", "excess")

    def certify_counts(
        self, counts: Mapping[str, Any], selected: int, scale: float, norms: Sensitivity
    ) -> ScoreVerdict:
        """Return all certificates of one input, from its counts with the bins of all classes."""
        bins, excess = (
            np.reshape(counts[name], (-1, score_bounds.NUM_BINS)) for name in self.binned_fields
        )
        if self.one_sided:
            bounds = score_bounds.score_bounds_betting_one_sided(
                bins, excess, selected, 1 - self.alpha
            )
        else:
            bounds = score_bounds.score_bounds_betting(bins, excess, 1 - self.alpha)
        sums, squares, votes = (np.asarray(counts[n]) for n in ("sums", "squares", "histogram"))
        found = certify_scores(sums, squares, votes, selected, self, scale, norms, bounds)
        kept = {name: tuple(np.asarray(counts[name]).tolist()) for name in self.binned_fields}
        found.more.update(kept, one_sided=self.one_sided)
        return found

    def name_parts(self) -> list[str]:
        sides = ["one-sided"] if self.one_sided else []
        return [self.mode, *sides, self.norm, f"n-{self.n}", f"eta-{1 - self.alpha:g}"]

    @classmethod
    def extra_columns(cls) -> Mapping[str, ColumnSpec]:
        bins = dict.fromkeys(cls.binned_fields, (object, None))
        return {**super().extra_columns(), **bins, "one_sided": (bool, None)}

    @classmethod
    def check_table(cls, table: pa.Table, context: str) -> None:
        width = np.diff(score_bounds.BIN_EDGES)
        for each in table.select(["n", "sums", *cls.binned_fields]).to_pylist():
            classes = len(each["sums"])
            counts, excess = (
                np.asarray(each[name] or (), dtype=np.int64) for name in cls.binned_fields
            )
            sound = counts.size == excess.size == classes * score_bounds.NUM_BINS
            if sound:
                counts, excess = (found.reshape(classes, -1) for found in (counts, excess))
                sums = (counts * score_bounds.BIN_EDGES[:-1] + excess).sum(1)
                sound = bool((counts.sum(1) == each["n"]).all() and (sums == each["sums"]).all())
                sound = sound and bool(((excess >= 0) & (excess <= counts * width)).all())
            if not sound:
                raise UserError(
                    f"{context}: damaged: its histograms of scores are not of its draws"
                )
        if len(set(table["one_sided"].to_pylist())) > 1:
            raise UserError(f"{context}: damaged: its rows differ in one_sided")
        super().check_table(table, context)

    @classmethod
    def recompute_columns(cls, table: pa.Table, alpha: float) -> dict[str, np.ndarray]:
        # The stated bounds are verified against the capital: to find them again takes twenty times
        # as long.
        one_sided = table["one_sided"][0].as_py()
        lower, upper = (table[name].to_numpy() for name in ("p_lower", "p_upper"))
        labels = np.full(len(lower), ABSTAIN)
        rows = table.select(["selected", *cls.binned_fields]).to_pylist()
        for i, row in enumerate(rows):
            bins, excess = (
                np.reshape(row[name], (-1, score_bounds.NUM_BINS)) for name in cls.binned_fields
            )
            selected = row["selected"] if one_sided else None
            stated = lower[i], upper[i]
            labels[i] = score_bounds.verified_label(bins, excess, *stated, alpha, selected)
        known = labels != ABSTAIN
        p_a, p_b = np.where(known, lower, np.nan), np.where(known, upper, np.nan)
        both = np.stack([np.nan_to_num(p_a), np.zeros(len(lower))], 1)
        others = np.stack([np.ones(len(lower)), np.clip(np.nan_to_num(p_b, nan=1.0), 0, 2)], 1)
        made = columns_of_bounds(table, alpha, ScoreBounds(both, others), labels)
        return {**made, "p_lower": p_a, "p_upper": p_b}

    @classmethod
    def describe(cls, certificates: CertificateTable) -> str:
        return f"{super().describe(certificates)}, bounded by betting"


def recreate_scores(
    kind: type[_Kind], certificates: CertificateTable, norm: str, batch: int, **own: Any
) -> tuple[_Kind, ScoreSampler]:
    """Return settings of a kind with a table's draws and error, and the sampler of its noise.

    own: settings that only this kind has.
    """
    from dpdist.certification.worker import ScoreSampler

    shared = {name: getattr(certificates, name) for name in ("n", "n0", "alpha")}
    settings = kind.model_validate({**shared, "norm": norm, "batch": batch, **own})
    sensitivity = Sensitivity(**certificates.job_record["sensitivity"])
    return settings, ScoreSampler(certificates.sigma, sensitivity)


@dataclass(frozen=True)
class ScoreVerdict:
    """The certificates of one input. Sizes are 0 where nothing is certified.

    prediction: the class with the largest lower bound, -1 unless its exact size is positive.
    sizes: by column, certificate_norm. k of n draws voted for ``selected``, which n0 other draws
    chose. more: additional columns of the kind.
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
    more: dict[str, Any] = field(default_factory=dict)
    looks: int = 1
    target: None = None

    def vote_verdict(self, settings: ExpectedScores) -> Verdict:
        """Return the certificate of the vote on the same draws, in the settings' norm."""
        radius = self.sizes[f"{VOTE_CERTIFICATE}_{settings.norm}"]
        return Verdict(
            prediction=self.selected if radius > 0 else ABSTAIN,
            selected=self.selected,
            k=self.k,
            n=self.n,
            p_lower=float(clopper_pearson_lower(self.k, self.n, settings.alpha)),
            radius=radius,
            histogram=self.histogram,
        )


def compute_score_bounds(
    sums: np.ndarray, squares: np.ndarray, histogram: np.ndarray, settings: ExpectedScores
) -> ScoreBounds:
    """Return bounds of all expected scores, valid together at the settings' error."""
    n, eta = settings.n, 1 - settings.alpha
    if settings.bound == COUNTS_BOUND:
        return score_bounds.score_bounds_counts(histogram, eta, n)
    if settings.bound == "bernstein":
        return score_bounds.score_bounds_bernstein(
            sums / SCORE_UNIT, squares / SCORE_UNIT**2, n, eta
        )
    return score_bounds.score_bounds_hoeffding(sums / SCORE_UNIT, n, eta)


def certify_scores(
    sums: np.ndarray,
    squares: np.ndarray,
    histogram: np.ndarray,
    selected: int,
    settings: ExpectedScores,
    scale: float,
    norms: Sensitivity,
    bounds: ScoreBounds | None = None,
) -> ScoreVerdict:
    """Return every certificate that follows from the integer sums of one input.

    scale: sigma_r, to which sizes are proportional. bounds: by default those of the settings.
    """
    bounds = bounds or compute_score_bounds(sums, squares, histogram, settings)
    k = int(histogram[selected])
    vote = float(clopper_pearson_lower(k, settings.n, settings.alpha))
    printed = score_bounds.score_bounds_hoeffding(
        sums / SCORE_UNIT, settings.n, 1 - settings.alpha, paper_faithful=True
    )
    sizes = compute_certified_sizes(bounds, vote, printed, scale, norms)
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


def compute_certified_sizes(
    bounds: ScoreBounds, vote: Any, printed: ScoreBounds, scale: float, norms: Sensitivity
) -> dict[str, Any]:
    """Return the size of every certificate, by column: a number, or an array (N,) for N inputs.

    vote: lower bound of the selected class's probability. printed: bounds as the papers print them.
    """
    units = {
        "classical": score_bounds.classical_gaussian_size(bounds, 1.0, 1.0),
        "extended": score_bounds.extended_gaussian_size(bounds, 1.0, 1.0),
        "analytic": score_bounds.analytic_gaussian_size(bounds, 1.0, 1.0),
        "exact": score_bounds.exact_gaussian_size(bounds, 1.0, 1.0),
        VOTE_CERTIFICATE: gaussian_l2_radius(vote, 1.0),
    }
    down = 1 - 1e-12  # rounding of the products below
    sizes = {
        f"{name}_{norm}": unit * scale / getattr(norms, norm) * down
        for name, unit in units.items()
        for norm in NORMS
    }
    sizes[AS_PRINTED] = score_bounds.hgm_size_as_printed(printed, scale, norms.as_printed)
    return sizes


def columns_of_bounds(
    table: pa.Table, alpha: float, bounds: ScoreBounds, label: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the columns that follow from bounds of all rows.

    label: (N,), the class with the largest lower bound.
    """
    found = list_columns(table, "sums")
    assert found is not None
    n = table["n"].to_numpy()
    vote = np.asarray(clopper_pearson_lower(table["k"].to_numpy(), n, alpha))
    printed = score_bounds.score_bounds_hoeffding(
        found[0] / SCORE_UNIT, n[:, None], 1 - alpha, paper_faithful=True
    )
    scale, norms = table["sigma"][0].as_py(), read_sensitivity(table)
    sizes = compute_certified_sizes(bounds, vote, printed, scale, norms)
    radius = sizes[f"exact_{table['norm'][0].as_py()}"]
    return {
        **sizes,
        "p_lower": bounds.p_a,
        "p_upper": bounds.p_b,
        "radius": radius,
        "prediction": np.where(radius > 0, label, ABSTAIN),
    }


def read_sensitivity(table: pa.Table) -> Sensitivity:
    """Return the norms of the first layer that a table states. Raises UserError if damaged."""
    where, names = "the table's description", [each.name for each in fields(Sensitivity)]
    found = check_shape(
        read_job_record(table), where, {f"sensitivity.{name}": float for name in names}
    )
    norms = Sensitivity(**{name: float(found["sensitivity"][name]) for name in names})
    if not all(0 < getattr(norms, name) < math.inf for name in names):
        raise UserError(f"{where}: damaged: sensitivity must be > 0")
    return norms


def read_table_settings(settings_class: type[_Kind], table: pa.Table, alpha: float) -> _Kind:
    """Return the settings that a table's rows state, at an error. Raises UserError if damaged."""
    names = [n for n in ("n", "n0", "norm", "bound", "one_sided") if n in table.column_names]
    given = {name: table[name][0].as_py() for name in names if name in settings_class.model_fields}
    try:
        return settings_class.model_validate({**given, "alpha": alpha})
    except ValidationError as error:
        raise UserError(f"the table: damaged: its rows' settings: {error_text(error)}") from None
