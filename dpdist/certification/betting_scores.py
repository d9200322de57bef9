"""Certificates from expected scores bounded by betting: tighter, from a histogram of the scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from dpdist.base.errors import UserError
from dpdist.base.table_files import Column
from dpdist.certification import betting
from dpdist.certification.certificate import Partial, selected_by, totals
from dpdist.certification.expected_score_bounds import ScoreBounds, Sensitivity
from dpdist.certification.scores import ExpectedScores, ScoreVerdict, decide, row

if TYPE_CHECKING:
    import pyarrow as pa

    from dpdist.certification.places import ScoredPlace
    from dpdist.certification.reading import CertificateTable

_ANY: Column = (object, None)


class BettingScores(ExpectedScores):
    """As expected scores, bounded by betting (`dpdist.certification.betting`).

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
        """From the bins of all classes, one after the other."""
        counts, excess = (np.reshape(bins[name], (-1, betting.BINS)) for name in self.binned)
        if self.one_sided:
            return betting.one_score_bound(counts, excess, selected, 1 - self.alpha)
        return betting.score_bounds(counts, excess, 1 - self.alpha)

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
        super().check(table, where)
        width = np.diff(betting.ENDS)
        for each in table.select(["n", "sums", *cls.binned]).to_pylist():
            classes = len(each["sums"])
            counts, excess = (np.asarray(each[name] or (), dtype=np.int64) for name in cls.binned)
            sound = counts.size == excess.size == classes * betting.BINS
            if sound:
                counts, excess = (found.reshape(classes, -1) for found in (counts, excess))
                sums = (counts * betting.ENDS[:-1] + excess).sum(1)
                sound = bool((counts.sum(1) == each["n"]).all() and (sums == each["sums"]).all())
                sound = sound and bool(((excess >= 0) & (excess <= counts * width)).all())
            if not sound:
                raise UserError(f"{where}: damaged: its histograms of scores are not of its draws")
        if len(set(table["one_sided"].to_pylist())) > 1:
            raise UserError(f"{where}: damaged: its rows differ in one_sided")

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
