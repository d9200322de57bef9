"""Smoothing with as many draws as the decision needs: target radii, and a confidence sequence.

The tests themselves, with their errors, are in ``dpdist.certification.sequential``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

import numpy as np
from numpy.typing import ArrayLike
from pydantic import ValidationError, model_validator

from dpdist.base.binomial import clopper_pearson_upper
from dpdist.base.errors import UserError
from dpdist.base.reading import reason
from dpdist.base.rounding import exact
from dpdist.certification.certificate import Certificate, Partial, require, sample, select
from dpdist.certification.cohen import Cohen, predict
from dpdist.certification.quadrature import certified_by
from dpdist.certification.smoothing import Smoothing
from dpdist.certification.verdict import ABSTAIN, Verdict

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor

    from dpdist.certification.certificate import CertificateTable, Counter, SampledPlace
    from dpdist.certification.places import SmoothedPlace

# Error of the upper bound by which hopeless inputs are given up (never adds a certificate).
FUTILE = 0.01
_Kind = TypeVar("_Kind", bound=Certificate)
HITS = "hits"  # column: how often the selected class was said by each look, from the first one on


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
    drawn: ClassVar[frozenset[str]] = frozenset({"selected", HITS})

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
        k = block = number = 0
        hits = []
        for number, look in enumerate(looks):
            while block * batch < look:
                k += int(sample(counter, x, index, block, batch, self.n)[selected])
                block += 1
            hits.append(k)
            if test.look(number, k):
                break
        return {
            "selected": selected,
            "k": k,
            "n": looks[number],
            "looks": number + 1,
            "passed": test.passed(),
            HITS: hits,
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
            hits=partial.get(HITS),
        )

    @classmethod
    def table_schema(cls) -> pa.Schema:
        import pyarrow as pa

        return super().table_schema().append(pa.field(HITS, pa.list_(pa.int64())))

    @classmethod
    def sound_counts(cls, table: pa.Table) -> np.ndarray:
        """Counts at the looks that were planned; earlier versions kept the last look's alone."""
        looks = _planned(table)
        k, n, number, cap = (table[name].to_numpy() for name in ("k", "n", "looks", "cap"))
        inside = (number >= 1) & (number <= len(looks)) & (table["selected"].to_numpy() >= 0)
        inside &= (cap == looks[-1]) & (looks[np.clip(number, 1, len(looks)) - 1] == n) & (k <= n)
        steps = np.diff(looks, prepend=0)
        for place, hits in enumerate(_hits(table)):
            if hits is None:
                continue
            more = np.diff(hits, prepend=0)
            inside[place] &= (
                len(more) == number[place]
                and bool(((more >= 0) & (more <= steps[: len(more)])).all())
                and hits[-1] == k[place]
            )
        return inside

    @classmethod
    def made(cls, table: pa.Table, alpha: float) -> dict[str, np.ndarray]:
        """What the counts at the looks decide, by the tests' own thresholds."""
        from dpdist.certification.sequential import thresholds

        settings = stated_targets(cls, table)
        radii = np.array(settings.radii)
        p0 = np.array(settings.hypotheses(certified_by(table)))
        looks = _planned(table)
        needed = np.array([thresholds(p, alpha, tuple(looks.tolist())).needed for p in p0])
        passed = _possible(table, radii, needed)
        for place, hits in enumerate(_hits(table)):
            if hits is not None:
                rejected = (np.array(hits) >= needed[:, : len(hits)]).any(1)
                passed[place] = int(np.minimum.accumulate(rejected).sum())
        last, certified = np.maximum(passed - 1, 0), passed > 0
        return {
            "prediction": np.where(certified, table["selected"].to_numpy(), ABSTAIN),
            "radius": np.where(certified, radii[last], 0.0),
            "target": radii[last],
            "p_lower": np.where(certified, p0[last], 0.0),
        }

    @classmethod
    def rebound(cls, table: Any, alpha: float) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        raise UserError(
            "results of early stopping (mode target) certify their radius at their alpha and "
            "nothing else; certify again with mode fixed or anytime to choose alpha later"
        )

    def mode_parts(self) -> list[str]:
        return [self.mode, "r-" + "-".join(map(exact, self.radii))]


def stated_targets(kind: type[_Kind], table: pa.Table) -> _Kind:
    """The settings that a table of target radii states. Raises UserError where they are none."""
    from dpdist.certification.table import about

    stated = about(table).get("settings", {})
    given = {name: stated[name] for name in stated.keys() & kind.model_fields.keys()}
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise UserError(f"the table's description: damaged: {reason(error)}") from None


def executed_batch(table: pa.Table) -> int:
    """The rows of the executed batch that a table states. Raises UserError where it does not."""
    from dpdist.certification.table import about

    batch = about(table).get("classifier", {}).get("batch")
    if type(batch) is not int or batch < 1:
        raise UserError("the table's description: damaged: classifier.batch must be >= 1")
    return batch


def blocks_hold(table: pa.Table) -> np.ndarray:
    """Return whether each row of a test after every block has the draws of so many blocks as it
    states, the last of them perhaps in part, and no more hits than draws: bool (N,)."""
    k, n, looks, cap = (table[name].to_numpy() for name in ("k", "n", "looks", "cap"))
    batch = executed_batch(table)
    blocks = (looks == -(-n // batch)) & (n == np.minimum(looks * batch, cap)) & (n >= 1)
    return blocks & (k <= n) & (table["selected"].to_numpy() >= 0)


def _planned(table: pa.Table) -> np.ndarray:
    """Numbers of draws at the looks of a table, int64."""
    from dpdist.certification.sequential import planned_looks

    looks = planned_looks(table["cap"][0].as_py(), executed_batch(table))
    return np.array(looks, dtype=np.int64)


def _hits(table: pa.Table) -> list[list[int] | None]:
    """Counts of each row at its looks; None where an earlier version did not keep them."""
    if HITS not in table.column_names:
        return [None] * table.num_rows
    return table[HITS].to_pylist()


def _possible(table: pa.Table, radii: np.ndarray, needed: np.ndarray) -> np.ndarray:
    """How many radii each row of an earlier version's table says have passed: int64 (N,).

    It kept the last count alone. What it says must be possible with that: each radius at some look,
    one of them at the last where all of them passed. Another number stands where it is not.
    """
    k, radius = table["k"].to_numpy(), table["radius"].to_numpy()
    stated = np.where(
        table["prediction"].to_numpy() == ABSTAIN, 0, np.searchsorted(radii, radius) + 1
    )
    number = table["looks"].to_numpy()
    taken = np.arange(needed.shape[1]) < number[:, None]
    reached = ((needed[None] <= k[:, None, None]) & taken[:, None]).any(2)  # (N, radii)
    at_last = k[:, None] >= needed[:, number - 1].T
    asked = np.arange(len(radii)) < stated[:, None]
    possible = (reached | ~asked).all(1) & ((stated < len(radii)) | at_last.any(1))
    return np.where(possible, stated, np.where(stated > 0, 0, len(radii)))


class Anytime(_Sequential):
    """A confidence sequence: stops when every radius is decided, and may be re-bounded later."""

    mode: Literal["anytime"] = "anytime"
    spending: ClassVar[str] = "beta mixture, 1/alpha"
    counted: ClassVar[str] = "at most {n:,} draws, valid at any time"
    drawn: ClassVar[frozenset[str]] = frozenset({"selected"})

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
        p_lower = float(self.bound(partial["k"], partial["n"], self.alpha))
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
    def sound_counts(cls, table: pa.Table) -> np.ndarray:
        """Return whether each row has the draws of the blocks that it states, and no more hits."""
        return blocks_hold(table)

    @classmethod
    def constants(cls, table: pa.Table, settings: Mapping[str, Any]) -> dict[str, Any]:
        radii = stated_targets(cls, table).radii
        return {**super().constants(table, settings), "target": radii[-1] if radii else None}

    @classmethod
    def bound(cls, hits: ArrayLike, draws: ArrayLike, alpha: float) -> Any:
        from dpdist.certification.sequential import anytime_lower

        return anytime_lower(hits, draws, alpha)
