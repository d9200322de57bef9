"""Cohen's certificate by the randomised Clopper-Pearson bound, whose error is alpha, not less.

Clopper and Pearson's bound is wrong less often than alpha, because counts are whole numbers. A
number u, uniform and independent of the draws, fills the gaps: the bound is the largest p with
Pr[X > k] + u Pr[X = k] <= alpha (Voráček, arXiv 2406.17830). Here u is a random unit of the input,
keyed and pinned like its noise, so it cannot be drawn again until it pleases, and it is stored with
the counts, so that any reader makes the bound again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import model_validator

from dpdist.base.binomial import randomised_lower
from dpdist.base.errors import UserError
from dpdist.certification.certificate import Partial, require, selected_by, totals
from dpdist.certification.cohen import Cohen, certify
from dpdist.certification.verdict import Verdict

if TYPE_CHECKING:
    import pyarrow as pa

    from dpdist.base.table_files import Column
    from dpdist.certification.places import SmoothedPlace
    from dpdist.certification.sampling import Counter

_BOUND = "bound"  # the stage of the unit that is u
LEAST = 0.1  # of u: no luck is worth more than ten times the error; larger u are always sound


class Randomised(Cohen):
    """Cohen's procedure, with the count's chance of being larger filled up by a keyed number."""

    mode: Literal["randomised"] = "randomised"  # type: ignore[assignment]
    spending: ClassVar[str] = "none, randomised"
    counted: ClassVar[str] = "{n:,} draws an input, their bound randomised"

    @model_validator(mode="after")
    def _error(self) -> Self:
        require(self.alpha < LEAST, "alpha", f"below {LEAST} when mode is randomised")
        return self

    def beside(self, counter: Counter, index: int) -> Partial:
        return {"u": max(LEAST, counter.uniform(index, _BOUND))}

    def verdict(self, partials: Sequence[Partial], place: SmoothedPlace) -> Verdict:
        u = next(each["u"] for each in partials if "u" in each)
        counts, bound = totals(partials, "histogram", self.n), partial(randomised_lower, u=u)
        found = certify(selected_by(partials), counts, self.alpha, place.certified, bound)
        return replace(found, u=u)

    @classmethod
    def table_schema(cls) -> pa.Schema:
        import pyarrow as pa

        return super().table_schema().append(pa.field("u", pa.float64(), nullable=False))

    @classmethod
    def columns(cls) -> Mapping[str, Column]:
        return {**super().columns(), "u": (float, LEAST)}

    @classmethod
    def check(cls, table: pa.Table, where: str) -> None:
        super().check(table, where)
        if not all(LEAST <= u <= 1 for u in table["u"].to_pylist()):
            raise UserError(f"{where}: damaged: column 'u' must lie between {LEAST} and 1")

    @classmethod
    def rebound(cls, table: pa.Table, alpha: float) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        if alpha >= LEAST:  # a u below alpha would prove every radius by a full count
            raise UserError(f"alpha: must be below {LEAST} for mode randomised, got {alpha:g}")
        return super().rebound(table, alpha)

    @classmethod
    def bound_again(cls, row: dict[str, Any], alpha: float) -> float:
        return float(randomised_lower(row["k"], row["n"], alpha, row["u"]))
