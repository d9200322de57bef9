"""A privacy guarantee with everything needed to read it: epsilon alone is never enough."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from dpdist.core.console import Row, format_significant

Neighbors = Literal["add-or-remove-one", "replace-one"]
GuaranteeKind = Literal["proved", "claimed", "audited", "assumed: post-processing"]
POST_PROCESSED: GuaranteeKind = "assumed: post-processing"
CHOSEN_APART = "no run was chosen by looking at the results of an earlier one"
BEGAN_APART = (  # an assumption, in front of what an earlier run states
    "no joint number is stated of this run and of one whose weights it began with, since unit or "
    "relation is another: read both cards. That is run "
)
ROWS_MADE_ALONE = (
    "each row was made of one record only: no scaling, encoding, imputation or choice of features "
    "by the private records, but for statistics that epsilon counts"
)
FIXED_KEY = "NOT PRIVATE: fixed run key (for tests only)"


def check_delta(delta: float) -> None:
    """Raise ValueError unless 0 < delta < 1."""
    if not 0 < delta < 1:
        raise ValueError(f"delta must lie strictly between 0 and 1, got {delta}")


def format_epsilon(epsilon: float | str, digits: int = 4, *, lower_bound: bool = False) -> str:
    """Return epsilon as text with `digits` significant digits, rounded up.

    Args:
        epsilon: a number, or "inf" as `Guarantee.to_dict` writes it.
        digits: significant ones.
        lower_bound: round down instead.

    Returns:
        a text that, read as a float, is never below `epsilon` (never above a lower bound). What is
        written in so few digits stays as it is (`dpdist.core.console`).
    """
    return format_significant(float(epsilon), digits, round_down=lower_bound)


def format_delta(delta: float) -> str:
    """Return a delta with six significant digits, rounded up: the guarantee holds for it, too."""
    return format_significant(delta, 6)


@dataclass(frozen=True)
class Guarantee:
    """The (epsilon, delta)-differential privacy of one mechanism, and how to read it.

    Each argument is an attribute of the same name; `print` shows the guarantee in one line.

    Args:
        epsilon: >= 0; infinity if nothing is proved.
        delta: in [0, 1).
        adjacency: the relation of data sets, "add-or-remove-one" or "replace-one".
        kind: "proved" is an upper bound that dpdist proves, "claimed" the bound of a paper's own
            theorem, "audited" a lower bound measured on the trained mechanism. "assumed:
            post-processing" is proved for all that was released, while code that dpdist did not
            check changed the model between releases.
        source: accountant or theorem.
        assumptions: what must hold for the number to be true.
        size_public: whether the mechanism uses the true number of records.
        user: the unit in words, if it is a user; None: one record.
        fixed_key: whether a fixed run key drew the noise. The mechanism is as stated, and the run
            is NOT private: anyone who knows the key can subtract the noise. Equality of guarantees
            ignores it.

    Raises:
        ValueError: epsilon or delta is out of range.

    Example:
        >>> import dpdist
        >>> guarantee = dpdist.Guarantee(1.5, 1e-5, "add-or-remove-one", "proved", "PLD")
        >>> guarantee.relation
        'zero-out adjacency (data set size public)'
        >>> print(guarantee)
        (1.5, 1e-05)-DP, zero-out adjacency (data set size public), proved by PLD
    """

    epsilon: float
    delta: float
    adjacency: Neighbors
    kind: GuaranteeKind
    source: str
    assumptions: tuple[str, ...] = ()
    size_public: bool = True
    user: str | None = None
    fixed_key: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if math.isnan(self.epsilon) or self.epsilon < 0:
            raise ValueError(f"epsilon must be >= 0 (infinity allowed), got {self.epsilon}")
        if not 0 <= self.delta < 1:
            raise ValueError(f"delta must be in [0, 1), got {self.delta}")

    @property
    def relation(self) -> str:
        """Return the neighboring relation in words, a str.

        It is "add-or-remove-one", "replace-one", "zero-out adjacency (data set size public)", or
        "zero-out of" and the user in words. Zero-out means that a record (or user) is blanked out
        and their number stays the same, because a sampling rate or divisor is computed from the
        true number (REPLACE_SPECIAL in dp_accounting).
        """
        if self.user is not None:
            return f"zero-out of {self.user}"
        if self.adjacency == "add-or-remove-one" and self.size_public:
            return "zero-out adjacency (data set size public)"
        return self.adjacency

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and "relation" as a dict of JSON values.

        Infinite epsilon is "inf". The key "user" is missing if the unit is a record, and
        "fixed_key" is missing if it is False.
        """
        record = asdict(self)
        record["assumptions"] = list(self.assumptions)
        record["relation"] = self.relation
        if self.user is None:
            del record["user"]
        if not self.fixed_key:
            del record["fixed_key"]
        if math.isinf(self.epsilon):
            record["epsilon"] = "inf"
        return record

    def to_output_dict(self) -> dict[str, Any]:
        """Return the entries that a command prints, a dict by name.

        Its keys are "epsilon" (a float, which may be infinite), "delta" (float), "adjacency",
        "relation" and "accountant" (str; the `source`).
        """
        return {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "adjacency": self.adjacency,
            "relation": self.relation,
            "accountant": self.source,
        }

    @property
    def row(self) -> Row:
        """Return the `Row` about privacy that commands, pages and cards show.

        A `Row` has `name`, `value` and `beside` (how to read the value), all str, and `brief`
        (bool: whether short summaries show it).
        """
        return privacy_row(self.to_dict())

    def __str__(self) -> str:
        if math.isinf(self.epsilon):
            return f"not private: no finite epsilon is {self.kind} ({self.relation})"
        epsilon = format_epsilon(self.epsilon, lower_bound=self.kind == "audited")
        pair = f"({epsilon}, {format_significant(self.delta, 3)})-DP"
        said = f"{pair}, {self.relation}, {shown_kind(self.kind)} by {self.source}"
        said += left_out(self.assumptions)
        return f"{FIXED_KEY}; the mechanism alone: {said}" if self.fixed_key else said


def left_out(assumptions: Iterable[str]) -> str:
    """Return the text after an epsilon that leaves an earlier release out; usually ""."""
    for each in assumptions:
        if each.startswith(BEGAN_APART):
            return f", of this run alone, without {each.removeprefix(BEGAN_APART)}"
    return ""


def kind_of(assumptions: Iterable[str]) -> GuaranteeKind:
    """Return the kind of a run's guarantee that rests on these assumptions."""
    assumed = any(line.startswith(POST_PROCESSED) for line in assumptions)
    return POST_PROCESSED if assumed else "proved"


def shown_kind(kind: str) -> str:
    """Return what stands before "by" and the accountant's name."""
    return f"{POST_PROCESSED}; the releases proved" if kind == POST_PROCESSED else kind


def privacy_row(stated: Mapping[str, Any], why_not: str | None = None) -> Row:
    """Return the row about privacy that every command, page and card begins with.

    Args:
        stated: a guarantee, as `Guarantee.to_dict` writes it.
        why_not: why there is none, in words.
    """
    if why_not is None and stated.get("fixed_key"):
        why_not = FIXED_KEY
    if why_not is None and math.isinf(float(stated["epsilon"])):
        why_not = "NOT PRIVATE: epsilon is infinite, nothing is proved"
    if why_not is not None:
        return Row("privacy", why_not, brief=True)
    delta = re.sub(r"e-0?", "e-", f"{float(format_delta(stated['delta'])):.6e}")
    mantissa, _, exponent = delta.partition("e")
    delta = f"{mantissa.rstrip('0').rstrip('.')}e{exponent}"
    audited = stated["kind"] == "audited"
    epsilon = format_epsilon(stated["epsilon"], lower_bound=audited)
    relation = stated["relation"].removesuffix(" (data set size public)")
    accountant = stated["source"].partition(" (")[0]
    accountant += " accountant" if " " not in accountant else ""
    beside = f"{relation}, {accountant}{left_out(stated['assumptions'])}"
    value = f"ε\u00a0=\u00a0{epsilon} at δ\u00a0=\u00a0{delta} ({shown_kind(stated['kind'])})"
    return Row("privacy", value, beside, brief=True)
