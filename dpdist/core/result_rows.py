"""Rows of accuracies for runs, tables of certificates, releases and cards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dpdist.core.console import Row, format_exact, format_percent, format_significant
from dpdist.core.metrics import ACCURACY, RMSE, Metrics

_SYMBOLS = {"l1": "ℓ1", "l2": "ℓ2", "linf": "ℓ∞"}


def certified_row(
    shares: Iterable[tuple[float, float]], norm: str, sigma: float, title: str = ""
) -> Row:
    """Return the row of certified accuracy.

    Args:
        shares: radius, and fraction of inputs that are correct and certified at it.
        norm: norm of the radii.
        sigma: standard deviation of the noise.
        title: settings of the table, if there are several.
    """
    at = (
        f"{format_percent(share, 1, round_down=True)} % at r={format_exact(radius)}"
        for radius, share in shares
    )
    value = "   ".join(text.replace(" ", "\u00a0") for text in at)
    how = f"({_SYMBOLS.get(norm, norm)}, σ={sigma:g})"
    return Row(f"certified, {title}" if title else "certified accuracy", value, how, brief=True)


def accuracy_rows(
    accuracy: float | None,
    inputs: int,
    unit: str = "inputs",
    *,
    next_tokens: int | None = None,
    perplexity: float | None = None,
    base_perplexity: float | None = None,
    metrics: Metrics | None = None,
    commonest: int = 0,
) -> list[Row]:
    """Return the rows of results on test data, without those that are None.

    Args:
        accuracy: fraction of correct answers.
        inputs: number of inputs.
        unit: name of the inputs.
        next_tokens: number of next tokens, if these were predicted.
        perplexity: of next tokens.
        base_perplexity: of only the public base.
        metrics: more metrics (`dpdist.core.metrics`).
        commonest: number of inputs of the most frequent class; 0 if unknown.
    """
    of = f"{inputs:,} {unit}"
    if next_tokens is not None:
        of = f"{next_tokens:,} next tokens of {inputs:,} documents"
    rows = []
    if accuracy is not None:
        beside = _interval((metrics or {}).get(ACCURACY, []), 100, " %")
        if commonest:
            share = f"the commonest class alone: {format_percent(commonest / inputs, 1)} %"
            beside = "; ".join(filter(None, [beside, share]))
        value = f"{format_percent(accuracy, 1)} % ({of})"
        rows.append(Row("test accuracy", value, beside, brief=True))
    if perplexity is not None:
        beside = ""
        if base_perplexity is not None:
            base = format_significant(base_perplexity, 4, round_down=True)
            beside = f"the public base alone: {base}"
        said = f"{format_significant(perplexity, 4)} ({of})"
        rows.append(Row("perplexity", said, beside, brief=True))
    for name, found in (metrics or {}).items():
        if name != ACCURACY:
            brief = name in ("AUC", RMSE)
            rows.append(Row(name, f"{found[0]:.3g}", _interval(found), brief=brief))
    return rows


def _interval(found: Sequence[float], scale: float = 1, unit: str = "") -> str:
    if len(found) != 3:
        return ""
    low, high = (f"{scale * bound:.3g}{unit}" for bound in found[1:])
    return f"95 % interval {low} to {high}"
