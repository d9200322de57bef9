"""Rows of accuracies, as runs, tables of certificates, releases and their cards show them."""

from __future__ import annotations

from collections.abc import Iterable

from dpdist.core.console import Row, format_exact, format_percent, format_significant

_SYMBOLS = {"l1": "ℓ1", "l2": "ℓ2", "linf": "ℓ∞"}


def certified_row(
    shares: Iterable[tuple[float, float]], norm: str, sigma: float, title: str = ""
) -> Row:
    """Return the row of certified accuracy.

    Args:
        shares: radius, and share of inputs that are right and certified there.
        norm: norm of the radii.
        sigma: deviation of the noise.
        title: settings of the table, where there are several.
    """
    at = (f"{format_percent(share, 1)} % at r={format_exact(radius)}" for radius, share in shares)
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
) -> list[Row]:
    """Return the rows of what was measured on test data; none of what is None."""
    of = f"{inputs:,} {unit}"
    if next_tokens is not None:
        of = f"{next_tokens:,} next tokens of {inputs:,} documents"
    rows = []
    if accuracy is not None:
        rows.append(Row("test accuracy", f"{format_percent(accuracy, 1)} % ({of})", brief=True))
    if perplexity is not None:
        beside = ""
        if base_perplexity is not None:
            base = format_significant(base_perplexity, 4, round_down=True)
            beside = f"the public base alone: {base}"
        said = f"{format_significant(perplexity, 4)} ({of})"
        rows.append(Row("perplexity", said, beside, brief=True))
    return rows
