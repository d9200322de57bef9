"""Certificates of one input from expected scores under the model's own hidden noise.

The network is rest(first(x) + N(0, std^2)), first affine. A change of the input of size mu moves
first(x) / sqrt(K r) by at most mu times a norm of the first layer, so all that lies behind the
noise is a Gaussian mechanism of noise sigma_r at that sensitivity: PixelDP's condition, HGM's, and
the exact Gaussian profile all apply (``dpdist.certification.score_bounds``). Sizes are in input
units.

Scores are the softmax rounded down to multiples of 2^-20. Their sums are integers, so a table does
not depend on how the draws were cut into pieces; and they are scores in [0, 1] like any others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
from pydantic import Field, ValidationError

from dpdist.certification import score_bounds
from dpdist.certification.certificate import (
    ABSTAIN,
    Certificate,
    CertifiedSizes,
    Partial,
    Verdict,
    counted,
    lists,
    select,
    selected_by,
    selected_hits,
    totals,
)
from dpdist.certification.noise import gaussian_l2_radius
from dpdist.certification.score_bounds import SCORE_UNIT, ScoreBounds, Sensitivity
from dpdist.core.binomial import clopper_pearson_lower
from dpdist.core.console import exact, percent
from dpdist.core.errors import UserError
from dpdist.core.fields import Number
from dpdist.core.files import Column, check_shape

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor, nn

    from dpdist.certification.certificate import CertificateTable
    from dpdist.certification.worker import HiddenNoiseSampler, ScoredPlace

NORMS = ("l2", "linf")
# Each certificate of a table: what it is in words, and how pictures draw it.
CERTIFICATES = {
    "classical": ("PixelDP, epsilon_r <= 1", None),
    "extended": ("HGM, corrected", ":"),  # Eq. 10: extended (heterogeneous) Gaussian mechanism
    "analytic": ("AGM", None),  # the same condition with the exact (epsilon, delta) profile
    "exact": ("exact profile", "-"),  # of expected scores: no epsilon_r
    "cohen": ("vote (Cohen)", "--"),  # exact profile of the majority vote, Clopper-Pearson
}
VOTE = "cohen"  # the one that speaks of votes; the others speak of mean scores
AS_PRINTED = "as_printed_linf"
SIZE_COLUMNS = (*(f"{name}_{norm}" for name in CERTIFICATES for norm in NORMS), AS_PRINTED)

ScoreBound = Literal["hoeffding", "bernstein", "counts"]
_ANY: Column = (object, None)
_Kind = TypeVar("_Kind", bound="ExpectedScores")
COUNTS = "counts"  # the bound by which scores are votes: one for the class that a draw says


# Sums of squares of scores, each at most SCORE_UNIT^2, are stored as int64.
MOST_DRAWS = 2**63 // SCORE_UNIT**2 - 1


class OfHiddenNoise(Certificate):
    """Base of certificates of scores under the noise behind a model's first layer."""

    n: Annotated[int, Number, Field(ge=2, le=MOST_DRAWS)] = 100_000

    noise: ClassVar[str] = "hidden-gaussian"
    noise_bank: ClassVar[bool] = False
    sigma: ClassVar[None] = None
    votes: ClassVar[bool] = False
    device_batch: ClassVar[int] = 32768

    def place(self, model: nn.Module, input_shape: tuple[int, ...]) -> ScoredPlace:
        from dpdist.certification.worker import ScoredPlace

        return ScoredPlace.of(model, input_shape)

    @classmethod
    def attacked_as(cls, noise: str, sigma: float) -> tuple[str, float | None] | None:
        return "hidden", None


class ExpectedScores(OfHiddenNoise):
    """Certify by mean scores under the noise behind a model's own first layer.

    Guarantee: for each input by itself, with probability at least 1 - `alpha` over the draws, the
    class with the largest expected score (by "counts": with most votes) stays the same everywhere
    within the certified size, or the verdict abstains. The table's radius is the exact Gaussian
    size in `norm`. One table has the sizes of PixelDP, HGM and Secure-SGD too, in L2 and
    L-infinity, and those of Cohen's vote, each valid by itself. The column as_printed_linf is a
    formula of a paper that does not hold.

    Args:
        n: draws for each input, at least 2.
        n0: draws that choose the class of the vote, used for nothing else.
        alpha: error probability of each input's bounds, all classes and both sides together; papers
            call 1 - alpha eta.
        bound: "hoeffding", "bernstein" (empirical), or "counts": Clopper and Pearson's of how often
            each class had the largest score.
        norm: "l2" or "linf": the norm of the table's radius, in input units. All further fields are
            those of `dpdist.Cohen`, without `sigma`, `noise` and `noise_bank`.

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
        >>> table = dpdist.certify(model, (inputs, labels), settings, here=True)
        >>> table.prediction.tolist(), table.certified_accuracy(0.1)
        ([0, 1], 1.0)
    """

    bound: ScoreBound = "hoeffding"
    norm: Literal["l2", "linf"] = "l2"

    mode: ClassVar[str] = "scores"
    free: ClassVar[frozenset[str]] = frozenset({"radii"})
    binned: ClassVar[tuple[str, ...]] = ()  # what of the scores' histograms is added up
    belongs: ClassVar[str] = "without sigma, by expected scores"
    drawn: ClassVar[frozenset[str]] = frozenset({"histogram", "sums", "squares"})

    @classmethod
    def fits(cls, section: Mapping[str, Any]) -> bool:
        return section.get("sigma") is None

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
        """Blocks low..high-1 of one input; the first also chooses the class for the vote."""
        partial: Partial = {}
        if low == 0:
            partial["selected"] = select(counter, self.n0, x, index)
        blocks = [
            counter.block(
                x, index, block, batch, min(batch, self.n - block * batch), binned=bool(self.binned)
            )
            for block in range(low, high)
        ]
        for name in ("sums", "squares", "histogram", *self.binned):
            found = np.sum([getattr(block, name) for block in blocks], axis=0)
            partial[name] = found.ravel().tolist()
        draws = sum(block.draws for block in blocks)
        return partial | counted(np.asarray(partial["histogram"]), draws)

    def verdict(self, partials: Sequence[Partial], place: ScoredPlace) -> ScoreVerdict:
        sums, squares = totals(partials, "sums"), totals(partials, "squares")
        histogram, selected = totals(partials, "histogram", self.n), selected_by(partials)
        return decide(sums, squares, histogram, selected, self, place.sigma, place.norms)

    def verdict_on(
        self, votes: bool, verdict: ScoreVerdict, place: ScoredPlace
    ) -> ScoreVerdict | Verdict:
        if votes == (self.bound == COUNTS):
            return verdict
        if votes:
            return verdict.of_votes(self)
        known = (verdict.sums, verdict.squares, verdict.histogram)
        sums, squares, histogram = (np.array(found) for found in known)
        settings = self.model_copy(update={"bound": "hoeffding"})
        return decide(
            sums, squares, histogram, verdict.selected, settings, place.sigma, place.norms
        )

    def row(
        self, index: int, label: int, verdict: ScoreVerdict, place: ScoredPlace
    ) -> dict[str, Any]:
        return row(index, label, verdict, self, place.sigma)

    @classmethod
    def table_schema(cls) -> pa.Schema:
        import pyarrow as pa

        from dpdist.certification.table import SCHEMA

        more = [("bound", pa.string()), ("p_upper", pa.float64())]
        more += [("sums", pa.list_(pa.int64())), ("squares", pa.list_(pa.int64()))]
        more += [(name, pa.float64()) for name in SIZE_COLUMNS]
        return pa.schema([*SCHEMA, *(pa.field(name, of, nullable=False) for name, of in more)])

    @classmethod
    def columns(cls) -> Mapping[str, Column]:
        numbers: Column = (float, 0)
        return {
            **dict.fromkeys((*SIZE_COLUMNS, "p_upper"), numbers),
            "sums": (object, None),
            "squares": (object, None),
            "bound": (str, None),
        }

    @classmethod
    def constants(cls, table: pa.Table, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return also the bound and its sides, where the settings state them."""
        stated = {name: settings[name] for name in ("bound", "one_sided") if name in settings}
        own = {name: value for name, value in stated.items() if name in cls.model_fields}
        return {**super().constants(table, settings), "noise": cls.noise, **own}

    @classmethod
    def check(cls, table: pa.Table, where: str) -> None:
        if not all(table["sums"].to_pylist()):
            raise UserError(f"{where}: damaged: column 'sums' must hold a sum for each class")
        if len(set(table["bound"].to_pylist())) > 1:
            raise UserError(f"{where}: damaged: its rows differ in bound")
        super().check(table, where)

    @classmethod
    def sound_counts(cls, table: pa.Table) -> np.ndarray:
        """Votes, scores and their squares of so many draws, no more than there can be."""
        found = lists(table, "histogram", "sums", "squares")
        if found is None:
            return np.zeros(len(table), bool)
        votes, sums, squares = found
        n = table["n"].to_numpy()
        sound = selected_hits(table, votes) & (n >= 2) & (n <= MOST_DRAWS)
        sound &= (sums >= 0).all(1) & (sums.sum(1) <= n * SCORE_UNIT)
        result: np.ndarray = sound & ((squares >= 0) & (squares <= sums * SCORE_UNIT)).all(1)
        return result

    @classmethod
    def made(cls, table: pa.Table, alpha: float) -> dict[str, np.ndarray]:
        found = lists(table, "sums", "squares", "histogram")
        assert found is not None
        sums, squares, histogram = found
        settings = stated_settings(ExpectedScores, table, alpha)
        bounds = bounds_of(sums, squares, histogram, settings)
        return cls.made_of(table, alpha, bounds, bounds.label)

    @classmethod
    def made_of(
        cls, table: pa.Table, alpha: float, bounds: ScoreBounds, label: np.ndarray
    ) -> dict[str, np.ndarray]:
        """`made`, from bounds of all rows, and the class that they are for."""
        found = lists(table, "sums")
        assert found is not None
        n = table["n"].to_numpy()
        vote = np.asarray(clopper_pearson_lower(table["k"].to_numpy(), n, alpha))
        printed = score_bounds.score_bounds_hoeffding(
            found[0] / SCORE_UNIT, n[:, None], 1 - alpha, paper_faithful=True
        )
        scale, norms = table["sigma"][0].as_py(), stated_norms(table)
        sizes = certified_sizes(bounds, vote, printed, scale, norms)
        radius = sizes[f"exact_{table['norm'][0].as_py()}"]
        prediction = np.where(radius > 0, label, ABSTAIN)
        more = {"p_lower": bounds.p_a, "p_upper": bounds.p_b}
        return {**sizes, **more, "radius": radius, "prediction": prediction}

    @classmethod
    def by_votes(cls, table: pa.Table) -> bool:
        result: bool = table["bound"][0].as_py() == COUNTS
        return result

    @classmethod
    def sizes(cls, table: pa.Table) -> tuple[CertifiedSizes, ...]:
        """Every certificate in both norms. The vote answers with a class of its own; as printed,
        the class of the largest mean score, whatever the sound certificates are made of."""
        counted = cls.by_votes(table)
        answers = {name: table["prediction"].to_numpy() for name in CERTIFICATES}
        answers[VOTE] = table["selected"].to_numpy()
        found = []
        for norm in NORMS:
            for name, (title, line) in CERTIFICATES.items():
                size = table[f"{name}_{norm}"].to_numpy()
                answer = np.where(size > 0, answers[name], ABSTAIN)
                by = answer, size, line, name
                found.append(CertifiedSizes(name, norm, title, *by, votes=counted or name == VOTE))
        size = table[AS_PRINTED].to_numpy()
        means = np.array([int(np.argmax(sums)) for sums in table["sums"].to_pylist()])
        answer, name = np.where(size > 0, means, ABSTAIN), AS_PRINTED.removesuffix("_linf")
        label = "as printed (claimed, does not hold)"
        title = "as printed (does not hold)"
        printed = CertifiedSizes(
            name, "linf", title, answer, size, label=label, holds=False, votes=False
        )
        return (*found, printed)

    @classmethod
    def rebound(cls, table: pa.Table, alpha: float) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        return rebound_rows(table, alpha), {"rebound_bound": None}

    @classmethod
    def lines(cls, found: CertificateTable, at: Sequence[float]) -> list[tuple[str, str]]:
        """One for each certificate and norm."""

        def shares(sizes: CertifiedSizes) -> str:
            held = sizes.certified(found.label)
            return ", ".join(f"{percent(np.mean(held >= size))} % at {exact(size)}" for size in at)

        return [(f"{sizes.norm} {sizes.label}", shares(sizes)) for sizes in found.sizes]

    @classmethod
    def words(cls, found: CertificateTable) -> str:
        return f"Expected scores under the model's own noise, {found.n:,} draws an input"

    @classmethod
    def terms(cls, found: CertificateTable) -> dict[str, Any]:
        return {"bound": found.table["bound"][0].as_py()}

    @classmethod
    def again(
        cls, found: CertificateTable, norm: str, batch: int
    ) -> tuple[ExpectedScores, ScoredPlace]:
        from dpdist.certification.worker import ScoredPlace

        (bound,) = found.table["bound"].unique().to_pylist()
        settings = cls.model_validate(
            {"n": found.n, "n0": found.n0, "alpha": found.alpha, "bound": bound}
            | {"norm": norm, "batch": batch}
        )
        return settings, ScoredPlace(found.sigma, Sensitivity(**found.about["sensitivity"]))

    def name_parts(self) -> list[str]:
        return [self.mode, self.bound, self.norm, f"n-{self.n}", f"eta-{1 - self.alpha:g}"]


class BettingScores(ExpectedScores):
    """Expected scores, bounded by betting (`dpdist.certification.score_bounds`).

    one_sided: bound only the class that n0 other draws chose, from below and at the whole error;
    the others have at most what it leaves. Otherwise every class from both sides.
    """

    bound: Literal["betting"] = "betting"  # type: ignore[assignment]
    one_sided: bool = Field(
        default=False, description="bound the selected class only; others have what it leaves"
    )

    mode: ClassVar[str] = "betting"
    binned: ClassVar[tuple[str, ...]] = ("bins", "excess")  # of `betting.binned`
    belongs: ClassVar[str] = "with bound betting, by expected scores"
    drawn: ClassVar[frozenset[str]] = frozenset({"histogram", "squares"})

    @classmethod
    def fits(cls, section: Mapping[str, Any]) -> bool:
        return super().fits(section) and section.get("bound") == "betting"

    def verdict(self, partials: Sequence[Partial], place: ScoredPlace) -> ScoreVerdict:
        sums, squares = totals(partials, "sums"), totals(partials, "squares")
        bins = {name: totals(partials, name) for name in self.binned}
        histogram, selected = totals(partials, "histogram", self.n), selected_by(partials)
        bounds = self.bounds(bins, selected)
        found = decide(sums, squares, histogram, selected, self, place.sigma, place.norms, bounds)
        found.more.update({name: tuple(each.tolist()) for name, each in bins.items()})
        return found

    def bounds(self, bins: Mapping[str, Any], selected: int) -> ScoreBounds:
        """Return the bounds from the bins of all classes, one after the other."""
        counts, excess = (np.reshape(bins[name], (-1, score_bounds.BINS)) for name in self.binned)
        if self.one_sided:
            return score_bounds.one_score_bound(counts, excess, selected, 1 - self.alpha)
        return score_bounds.score_bounds(counts, excess, 1 - self.alpha)

    def row(
        self, index: int, label: int, verdict: ScoreVerdict, place: ScoredPlace
    ) -> dict[str, Any]:
        return super().row(index, label, verdict, place) | {"one_sided": self.one_sided}

    @classmethod
    def table_schema(cls) -> pa.Schema:
        import pyarrow as pa

        more = [(name, pa.list_(pa.int64())) for name in cls.binned]
        more.append(("one_sided", pa.bool_()))
        fields = (pa.field(name, of, nullable=False) for name, of in more)
        return pa.schema([*super().table_schema(), *fields])

    @classmethod
    def columns(cls) -> Mapping[str, Column]:
        return {**super().columns(), **dict.fromkeys((*cls.binned, "one_sided"), _ANY)}

    @classmethod
    def check(cls, table: pa.Table, where: str) -> None:
        width = np.diff(score_bounds.ENDS)
        for each in table.select(["n", "sums", *cls.binned]).to_pylist():
            classes = len(each["sums"])
            counts, excess = (np.asarray(each[name] or (), dtype=np.int64) for name in cls.binned)
            sound = counts.size == excess.size == classes * score_bounds.BINS
            if sound:
                counts, excess = (found.reshape(classes, -1) for found in (counts, excess))
                sums = (counts * score_bounds.ENDS[:-1] + excess).sum(1)
                sound = bool((counts.sum(1) == each["n"]).all() and (sums == each["sums"]).all())
                sound = sound and bool(((excess >= 0) & (excess <= counts * width)).all())
            if not sound:
                raise UserError(f"{where}: damaged: its histograms of scores are not of its draws")
        if len(set(table["one_sided"].to_pylist())) > 1:
            raise UserError(f"{where}: damaged: its rows differ in one_sided")
        super().check(table, where)

    @classmethod
    def made(cls, table: pa.Table, alpha: float) -> dict[str, np.ndarray]:
        """Return the columns that follow from the bounds that the rows state.

        The bounds must be those that the capital allows: not numbers elsewhere. Made anew
        they would take twenty times as long.
        """
        one_sided = table["one_sided"][0].as_py()
        lower, upper = (table[name].to_numpy() for name in ("p_lower", "p_upper"))
        labels = np.full(len(lower), ABSTAIN)
        rows = table.select(["selected", *cls.binned]).to_pylist()
        for place, each in enumerate(rows):
            bins, excess = (np.reshape(each[name], (-1, score_bounds.BINS)) for name in cls.binned)
            selected = each["selected"] if one_sided else None
            stated = lower[place], upper[place]
            labels[place] = score_bounds.label_of(bins, excess, *stated, alpha, selected)
        known = labels != ABSTAIN
        p_a, p_b = np.where(known, lower, np.nan), np.where(known, upper, np.nan)
        both = np.stack([np.nan_to_num(p_a), np.zeros(len(lower))], 1)
        others = np.stack([np.ones(len(lower)), np.clip(np.nan_to_num(p_b, nan=1.0), 0, 2)], 1)
        made = cls.made_of(table, alpha, ScoreBounds(both, others), labels)
        return {**made, "p_lower": p_a, "p_upper": p_b}

    @classmethod
    def rebound(cls, table: pa.Table, alpha: float) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        from dpdist.certification.table import about

        norms, rows = Sensitivity(**about(table)["sensitivity"]), []
        for old in table.to_pylist():
            kept = {name: old[name] for name in ("n", "n0", "norm", "one_sided")}
            settings, selected = cls(**kept, alpha=alpha), old["selected"]
            bounds = settings.bounds(old, selected)
            sums, squares, votes = (np.asarray(old[n]) for n in ("sums", "squares", "histogram"))
            verdict = decide(sums, squares, votes, selected, settings, old["sigma"], norms, bounds)
            new = row(old["index"], old["label"], verdict, settings, old["sigma"])
            rows.append({**old, **new})
        return rows, {}

    @classmethod
    def words(cls, found: CertificateTable) -> str:
        return f"{super().words(found)}, bounded by betting"

    @classmethod
    def terms(cls, found: CertificateTable) -> dict[str, Any]:
        return {**super().terms(found), "one_sided": found.table["one_sided"][0].as_py()}

    @classmethod
    def again(
        cls, found: CertificateTable, norm: str, batch: int
    ) -> tuple[BettingScores, ScoredPlace]:
        settings, place = super().again(found, norm, batch)
        return settings.model_copy(update={"one_sided": cls.terms(found)["one_sided"]}), place  # type: ignore[return-value]

    def name_parts(self) -> list[str]:
        sides = ["one-sided"] if self.one_sided else []
        return [self.mode, *sides, self.norm, f"n-{self.n}", f"eta-{1 - self.alpha:g}"]


@dataclass(frozen=True)
class ScoreVerdict:
    """The certificates of one input. Sizes are 0 where nothing is certified.

    prediction: the class with the largest lower bound, -1 unless its exact size is positive.
    sizes: by column, certificate_norm. k of n draws voted for ``selected``, which n0 other draws
    chose. more: columns of a kind of its own.
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

    def of_votes(self, settings: ExpectedScores) -> Verdict:
        """Return the certificate of the vote on the same draws, in the settings' norm."""
        radius = self.sizes[f"{VOTE}_{settings.norm}"]
        return Verdict(
            prediction=self.selected if radius > 0 else ABSTAIN,
            selected=self.selected,
            k=self.k,
            n=self.n,
            p_lower=float(clopper_pearson_lower(self.k, self.n, settings.alpha)),
            radius=radius,
            histogram=self.histogram,
        )


def bounds_of(
    sums: np.ndarray, squares: np.ndarray, histogram: np.ndarray, settings: ExpectedScores
) -> ScoreBounds:
    """Bounds of all expected scores, valid together at the settings' error."""
    n, eta = settings.n, 1 - settings.alpha
    if settings.bound == COUNTS:
        return score_bounds.score_bounds_counts(histogram, eta, n)
    if settings.bound == "bernstein":
        return score_bounds.score_bounds_bernstein(
            sums / SCORE_UNIT, squares / SCORE_UNIT**2, n, eta
        )
    return score_bounds.score_bounds_hoeffding(sums / SCORE_UNIT, n, eta)


def decide(
    sums: np.ndarray,
    squares: np.ndarray,
    histogram: np.ndarray,
    selected: int,
    settings: ExpectedScores,
    scale: float,
    norms: Sensitivity,
    bounds: ScoreBounds | None = None,
) -> ScoreVerdict:
    """Compute every certificate from the integer sums of one input.

    scale: sigma_r, to which sizes are proportional. bounds: by default those of the settings.
    """
    bounds = bounds or bounds_of(sums, squares, histogram, settings)
    k = int(histogram[selected])
    vote = float(clopper_pearson_lower(k, settings.n, settings.alpha))
    printed = score_bounds.score_bounds_hoeffding(
        sums / SCORE_UNIT, settings.n, 1 - settings.alpha, paper_faithful=True
    )
    sizes = certified_sizes(bounds, vote, printed, scale, norms)
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


def certified_sizes(
    bounds: ScoreBounds, vote: Any, printed: ScoreBounds, scale: float, norms: Sensitivity
) -> dict[str, Any]:
    """Return the size of every certificate, by column: a number each, or (N,) of N inputs.

    vote: lower bound of the selected class's probability. printed: bounds as the papers print them.
    """
    units = {
        "classical": score_bounds.classical_gaussian_size(bounds, 1.0, 1.0),
        "extended": score_bounds.extended_gaussian_size(bounds, 1.0, 1.0),
        "analytic": score_bounds.analytic_gaussian_size(bounds, 1.0, 1.0),
        "exact": score_bounds.exact_gaussian_size(bounds, 1.0, 1.0),
        VOTE: gaussian_l2_radius(vote, 1.0),
    }
    down = 1 - 1e-12  # rounding of the products below
    sizes = {
        f"{name}_{norm}": unit * scale / getattr(norms, norm) * down
        for name, unit in units.items()
        for norm in NORMS
    }
    sizes[AS_PRINTED] = score_bounds.heterogeneous_gaussian_size(
        printed, scale, norms.as_printed, paper_faithful=True
    )
    return sizes


def stated_norms(table: pa.Table) -> Sensitivity:
    """The norms of the first layer that a table states. Raises UserError where it states none."""
    from dpdist.certification.table import about

    where, names = "the table's description", [each.name for each in fields(Sensitivity)]
    found = check_shape(about(table), where, {f"sensitivity.{name}": float for name in names})
    norms = Sensitivity(**{name: float(found["sensitivity"][name]) for name in names})
    if not all(0 < getattr(norms, name) < math.inf for name in names):
        raise UserError(f"{where}: damaged: sensitivity must be > 0")
    return norms


def stated_settings(kind: type[_Kind], table: pa.Table, alpha: float) -> _Kind:
    """The settings that a table's rows state, at an error. Raises UserError where they are none."""
    names = [n for n in ("n", "n0", "norm", "bound", "one_sided") if n in table.column_names]
    given = {name: table[name][0].as_py() for name in names if name in kind.model_fields}
    try:
        return kind.model_validate({**given, "alpha": alpha})
    except ValidationError as error:
        raise UserError(f"the table: damaged: its rows are of no settings: {error}") from None


def row(
    index: int, label: int, verdict: ScoreVerdict, settings: ExpectedScores, scale: float
) -> dict[str, Any]:
    """One row of a table of expected scores; the first columns are those of every table."""
    found = asdict(verdict)
    return {
        **found.pop("sizes"),
        **found.pop("more"),
        **found,
        "index": index,
        "label": label,
        "n0": settings.n0,
        "alpha": settings.alpha,
        "norm": settings.norm,
        "noise": settings.noise,
        "sigma": scale,
        "mode": settings.mode,
        "cap": settings.n,
        "looks": 1,
        "target": None,
        "spending": settings.spending,
        "bound": settings.bound,
    }


def rebound_rows(
    table: pa.Table, alpha: float, bound: ScoreBound | None = None
) -> list[dict[str, Any]]:
    """The same sums at another error or by another bound (chosen without seeing the sums)."""
    from dpdist.certification.table import about

    norms = Sensitivity(**about(table)["sensitivity"])
    rows = []
    for old in table.to_pylist():
        kept = {name: old[name] for name in ("n", "n0", "norm")}
        settings = ExpectedScores(**kept, alpha=alpha, bound=bound or old["bound"])
        sums, squares, histogram = (np.asarray(old[n]) for n in ("sums", "squares", "histogram"))
        verdict = decide(sums, squares, histogram, old["selected"], settings, old["sigma"], norms)
        rows.append(row(old["index"], old["label"], verdict, settings, old["sigma"]))
    return rows
