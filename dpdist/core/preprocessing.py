"""The recipe's rules by which cells of a column become inputs, with public constants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from dpdist.core.fields import Finite, Rule, Section, Text

# In noisy counts of a column (`dpdist.data.histograms`), a record adds 1 to each of these
# histograms; larger numbers are in the outermost cells.
COUNTED_LEVELS, LARGEST_COUNTED = 3, 2.0**29
SECONDS = {"seconds": 1, "hours": 3600, "days": 86_400, "years": 31_556_952}


def word_of(value: Any) -> str:
    """Return a category as text: 1 and 1.0 are "1". Raises ValueError for a boolean."""
    if isinstance(value, bool):
        raise ValueError("must be in quotes: YAML reads yes, no, on and off as true and false")
    whole = isinstance(value, float) and value.is_integer()
    return str(int(value) if whole else value).strip()


class DateNumbers(Section):
    """Convert dates to numbers.

    Attributes:
        origin: The date, such as 1900-01-01, that becomes 0.
        unit: The unit of time since the origin.
    """

    origin: Text
    unit: Literal["seconds", "hours", "days", "years"] = "days"

    def rules(self) -> Iterator[Rule]:
        """Yield the rules of the options."""
        try:
            datetime.fromisoformat(self.origin)
        except ValueError:
            yield Rule(True, f"must be a date, YYYY-MM-DD, got {self.origin}", "origin")


class ColumnPreprocessing(Section):
    """How the cells of one column become inputs, by public constants, each record by itself.

    Attributes:
        range: Public constants [LOW, HIGH] that become 0 and 1; values beyond are cut.
        missing: Replacement of a missing cell. A constant is in the column's units, or one of the
            categories. `flag` gives 0, and adds a column that is 1 if the cell is missing. Without
            it, a missing cell raises an error.
        categories: Public list of the values of a column, which becomes a column of 0 and 1 for
            each, and one for any other value.
        codes: Use one column of the categories' numbers from 0 instead, for an embedding; other
            values have the next number.
        date: Convert dates to numbers.
        log1p: Apply log(1 + value), also to the ends of `range`.
        text: Number of inputs of a column of text. Each word is counted at one of them, chosen by a
            hash of the word. The counts of a text are then scaled to L2 norm 1. A missing text
            gives zeros.
        drop: Leave out a column that a pattern in `features` names.
    """

    range: tuple[Finite, Finite] | None = None
    missing: Finite | Text | None = None
    categories: tuple[Annotated[Text, BeforeValidator(word_of)], ...] = Field(
        default=(), max_length=10_000
    )
    codes: bool = False
    date: DateNumbers | None = None
    log1p: bool = False
    text: int | None = Field(default=None, ge=2, le=100_000)
    drop: bool = False

    def rules(self) -> Iterator[Rule]:
        """Yield the rules between the options."""
        if self.range is not None:
            low, high = self.range
            yield Rule(not low < high, f"must be LOW, HIGH, got {low:g}, {high:g}", "range")
            yield Rule(self.log1p and low <= -1, "must begin above -1 with log1p", "range")
        twice = len(set(self.categories)) < len(self.categories)
        yield Rule(twice, "must name each value once", "categories")
        yield Rule(self.codes and not self.categories, "needs categories", "codes")
        words = bool(self.categories)
        numbers = self.range or self.date or self.log1p
        yield Rule(words and numbers, "must be left out with range, date or log1p", "categories")
        fill = self.missing
        rule = "must be flag, or one of the categories"
        filled = fill in (None, "flag") or word_of(fill) in self.categories
        yield Rule(words and not filled, rule, "missing")
        other = not words and isinstance(fill, str) and fill != "flag"
        yield Rule(other, f"must be flag or a number, got {fill}", "missing")
        mixed = self.text is not None and bool(words or numbers or fill not in (None, "flag"))
        yield Rule(mixed, "must be left out with other rules except missing: flag", "text")
        low = self.log1p and self.range is None and isinstance(fill, float) and fill <= -1
        yield Rule(low, f"must be above -1 with log1p, got {fill}", "missing")

    @property
    def in_unit_range(self) -> bool:
        """Return whether the inputs are in [0, 1] for all cells."""
        scaled = self.range is not None or self.text is not None
        return scaled or (bool(self.categories) and not self.codes)

    def names(self, column: str) -> list[str]:
        """Return the names of a column's inputs."""
        kinds = [f"{column}={word}" for word in (*self.categories, "other")]
        names = kinds if self.categories and not self.codes else [column]
        if self.text is not None:
            names = [f"{column} words {place}" for place in range(self.text)]
        return [*names, f"{column} missing"] if self.missing == "flag" else names

    def describe(self) -> str:
        """Return the rule in words, for a card."""
        filled = "" if self.missing is None else f"missing cells become {self.missing}"
        filled = "missing cells are flagged" if self.missing == "flag" else filled
        words = [
            f"{len(self.categories)} categories and other" if self.categories else "",
            "as numbers" if self.codes else "",
            f"words counted in {self.text} inputs by hash" if self.text else "",
            f"{self.date.unit} since {self.date.origin}" if self.date else "",
            f"cut to [{self.range[0]:g}, {self.range[1]:g}]" if self.range else "",
            "log(1 + x)" if self.log1p else "",
            "scaled to [0, 1]" if self.range else "",
            filled,
            "left out" if self.drop else "",
        ]
        return ", ".join(filter(None, words)) or "as it is"


def range_of_label(rules: Mapping[str, ColumnPreprocessing], label: str) -> tuple[float, float]:
    """Return the numbers of a label that a model learns as 0 and 1, by default these."""
    rule = rules.get(label)
    return (rule and rule.range) or (0.0, 1.0)
