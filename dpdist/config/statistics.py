"""The recipe's section `statistics`: constants of columns, estimated before the training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from dpdist.core.fields import Finite, NoiseMultiplier, Positive, Rule, Section, Text, key_error
from dpdist.core.preprocessing import LARGEST_COUNTED, ColumnPreprocessing

MEDIAN = "median"
Share = Annotated[float, Field(ge=0, le=1)]


class StatisticsColumn(Section):
    """A column of numbers or dates whose range and fill are estimated with noise.

    Attributes:
        range: The widest possible range [LOW, HIGH], declared without looking at the data, which
            contains the estimated one. Default: a fixed grid of all numbers up to 5e8.
        missing: Value of a missing cell: median, which is estimated with the range; flag; or a
            constant.
    """

    range: tuple[Finite, Finite] | None = None
    missing: Finite | Literal["median", "flag"] = "median"

    def rules(self) -> Iterator[Rule]:
        """Yield the rules of the options."""
        if self.range is not None:
            low, high = self.range
            yield Rule(not low < high, f"must be LOW, HIGH, got {low:g}, {high:g}", "range")


class StatisticsRecipe(Section):
    """Range and fill of columns, estimated once from noisy counts before the training.

    `privacy.epsilon` covers them and the training together.

    Attributes:
        columns: By name, the features whose range and fill become constants of
            data.columns.preprocessing.
        epsilon: Largest privacy cost of only the statistics, at privacy.delta. Give either this or
            `noise_multiplier`.
        noise_multiplier: Standard deviation of the noise on the counts, in units of the L2 norm
            that a record adds to all of them.
        quantiles: Fractions of a column's numbers below the low and the high end of the range.
        constants: The estimated constants. The run writes it; leave it out.
    """

    columns: dict[Text, StatisticsColumn] = Field(min_length=1, max_length=10_000)
    epsilon: Positive | None = None
    noise_multiplier: NoiseMultiplier | None = None
    quantiles: tuple[Share, Share] = (0.01, 0.99)
    constants: dict[Text, ColumnPreprocessing] = Field(default={}, max_length=10_000)

    @field_validator("columns", mode="before")
    @classmethod
    def _without_options(cls, value: Any) -> Any:
        """Accept only a name for a column without options."""
        if not isinstance(value, Mapping):
            return value
        return {name: {} if each is None else each for name, each in value.items()}

    def rules(self) -> Iterator[Rule]:
        """Yield the rules between the options."""
        both = (self.epsilon is None) == (self.noise_multiplier is None)
        yield Rule(both, "give exactly one of epsilon and noise_multiplier")
        yield Rule(self.noise_multiplier == 0, "must be > 0, got 0", "noise_multiplier")
        low, high = self.quantiles
        yield Rule(not low < high, f"must be LOW, HIGH, got {low:g}, {high:g}", "quantiles")
        other = self.constants and self.constants.keys() != self.columns.keys()
        yield Rule(other, "must be of the columns; leave it out", "constants")


def fill_bought_rules(section: Any, rules: Any) -> Any:
    """Return preprocessing by column, with the constants of estimated columns.

    Before the estimate, these have their widest range, and its low end as fill.

    Args:
        section: the section `statistics`, as plain data.
        rules: data.columns.preprocessing, as plain data.

    Raises:
        ValueError: an estimated column has a different range or fill there.
    """
    columns = section.get("columns") if isinstance(section, Mapping) else None
    if not (isinstance(columns, Mapping) and isinstance(rules, Mapping)):
        return rules
    constants = section.get("constants")
    filled = dict(rules)
    for name, options in columns.items():
        rule = rules.get(name) or {}
        if not isinstance(rule, Mapping):
            continue
        bought = constants.get(name) if isinstance(constants, Mapping) else None
        wanted = bought if isinstance(bought, Mapping) else _widest(rule, options)
        for key in ("range", "missing"):
            given = rule.get(key)
            if given is not None and not _equal(given, wanted.get(key)):
                at = f"data.columns.preprocessing.{name}.{key}"
                raise key_error(at, f"must be left out with statistics.columns.{name}")
        filled[name] = {**rule, **{key: wanted.get(key) for key in ("range", "missing")}}
    return filled


def _widest(rule: Mapping[str, Any], options: Any) -> dict[str, Any]:
    """Return range and fill of a column before the estimate."""
    options = options if isinstance(options, Mapping) else {}
    lowest = 0.0 if rule.get("log1p") else -LARGEST_COUNTED
    ends = options.get("range")
    if not isinstance(ends, list | tuple) or not ends:
        ends = (lowest, LARGEST_COUNTED)
    fill = options.get("missing", MEDIAN)
    return {"range": ends, "missing": ends[0] if fill == MEDIAN else fill}


def _equal(one: Any, other: Any) -> bool:
    return (list(one) if isinstance(one, list | tuple) else one) == (
        list(other) if isinstance(other, list | tuple) else other
    )
