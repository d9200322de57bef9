"""The result of an audit: an empirical lower bound of epsilon, beside what is proved and claimed.

One JSON file each, with everything needed to judge it: confidence, what the adversary saw, which
data sets it told apart, how many trials, and the rule that turned them into guesses.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dpdist.base.errors import UserError
from dpdist.base.reading import read_json
from dpdist.base.rounding import exact
from dpdist.base.storage import write_json
from dpdist.privacy.guarantee import check_delta, format_epsilon

CONSISTENT = "consistent"
BUG = "exceeds proved: a bug"
REFUTED = "refutes the claim"

_SHAPE = {
    "kind": str, "method": str, "view": str, "neighbours": str, "rule": str, "verdict": str,
    "trials": int, "epsilon": float, "delta": float, "alpha": float, "exploratory": bool,
    "curve_rejected": bool, "details": dict, "assumptions": list,
}  # fmt: skip


@dataclass(frozen=True)
class Audited:
    """epsilon: the lower bound at `delta`, too large with probability at most alpha.

    kind: of audit; method: the theorem. view: what the adversary saw. neighbours: which data sets
    it told apart. trials: runs, releases or guesses that were counted. rule: threshold or guesses,
    and how they were fixed. proved, claimed: epsilon at the same delta (infinite where nothing is
    proved; None where nothing is claimed). curve_rejected: whether the whole trade-off curve of
    what is proved was rejected, which needs no epsilon. assumptions: what epsilon rests on besides;
    empty: nothing. exploratory: one of more audits than alpha was divided by. model: its hash.
    """

    kind: str
    method: str
    epsilon: float
    delta: float
    alpha: float
    view: str
    neighbours: str
    trials: int
    rule: str
    proved: float
    claimed: float | None = None
    curve_rejected: bool = False
    exploratory: bool = False
    assumptions: tuple[str, ...] = ()
    model: str | None = None
    details: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None

    def __post_init__(self) -> None:
        check_delta(self.delta)
        if not (0 < self.alpha < 1 and self.trials >= 0 and 0 <= self.epsilon < math.inf):
            raise ValueError("alpha lies between 0 and 1; trials and epsilon are finite and >= 0")
        if self.proved < 0 or math.isnan(self.proved) or (self.claimed or 0) < 0:
            raise ValueError("what is proved and claimed is >= 0")

    @property
    def bug(self) -> bool:
        """Whether it contradicts what is proved: code or proof is wrong."""
        return not self.exploratory and (self.curve_rejected or self.epsilon > self.proved)

    @property
    def verdict(self) -> str:
        if self.bug:
            return BUG
        refuted = self.claimed is not None and self.epsilon > self.claimed
        return REFUTED if refuted and not self.exploratory else CONSISTENT

    @property
    def line(self) -> str:
        """The audit in one line."""
        verdict = "exploratory, no statement" if self.exploratory else self.verdict
        return (
            f"epsilon >= {format_epsilon(self.epsilon, lower_bound=True)} at delta = "
            f"{exact(self.delta)}, confidence {100 * (1 - self.alpha):g} % ({self.method}; "
            f"{self.neighbours}; the adversary saw {self.view}; {self.trials:,} trials): {verdict}"
        )

    @property
    def short(self) -> str:
        """For a table: the bound, how it was made, and what is wrong if anything is."""
        bound = format_epsilon(self.epsilon, lower_bound=True)
        wrong = "" if self.verdict == CONSISTENT else f": {self.verdict}"
        return f">= {bound} ({self.kind}){wrong}"

    @property
    def three(self) -> str:
        """Claimed, proved and audited side by side."""
        claimed = "nothing" if self.claimed is None else format_epsilon(self.claimed)
        proved = "nothing" if math.isinf(self.proved) else format_epsilon(self.proved)
        audited = format_epsilon(self.epsilon, lower_bound=True)
        at = f"at delta = {exact(self.delta)}"
        return f"claimed {claimed}, proved {proved}, audited >= {audited} {at}"

    def write(self, path: Path) -> None:
        """Into one JSON file; `read` inverts it."""
        record = {**asdict(self), "verdict": self.verdict}
        del record["path"]
        record["proved"] = "inf" if math.isinf(self.proved) else self.proved
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, record)

    @classmethod
    def read(cls, path: Path) -> Audited:
        """Raises UserError when it is damaged, or its verdict is not that of its numbers."""
        record = read_json(path, _SHAPE)
        said = record.pop("verdict")
        try:
            record["proved"] = float(record["proved"])
            record["assumptions"] = tuple(map(str, record["assumptions"]))
            found = cls(**record, path=path)
            if not isinstance(found.model, str | None):
                raise ValueError("model must be text")
        except (TypeError, ValueError, KeyError) as error:
            raise UserError(f"{path}: damaged: {error}") from None
        if said != found.verdict:
            raise UserError(
                f"{path}: damaged: says {said!r} where its numbers say {found.verdict!r}"
            )
        return found
