"""Print messages, progress and tables, and format numbers without overstating them.

A command prints short lines, one progress line with rate and time left, and one list of rows
(`Row`). Bounds are rounded in the direction in which they stay valid.
"""

from __future__ import annotations

import html
import json
import math
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_UP, Context, Decimal
from typing import Any, NamedTuple, Protocol, SupportsFloat

# --- messages, progress and tables ------------------------------------------------------------


_ERASE = "\r\x1b[2K"  # the terminal's row
_live: list[str] = []  # the progress line in the terminal's last row, if there is one


def log(text: str) -> None:
    """Print a line to standard error, above a progress line; results go to standard output."""
    print(f"{erasure()}{text}\n{''.join(_live)}", end="", file=sys.stderr, flush=True)


def erasure() -> str:
    """Return what erases the progress line from the terminal; it is empty without one."""
    return _ERASE * len(_live)


def print_json(value: Any) -> None:
    """Print a result to standard output as one line of JSON; infinity becomes "inf"."""
    print(json.dumps(_replace_nonfinite(value), allow_nan=False), flush=True)


def _replace_nonfinite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _replace_nonfinite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_nonfinite(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class ShowProgress(Protocol):
    """Show the progress of a command."""

    def __call__(self, done: int, total: int, rate: float, stage: str = "", /) -> None: ...


@contextmanager
def progress(title: str, unit: str, rate_unit: str | None = None) -> Iterator[ShowProgress]:
    """Yield a callback (done, total, rate, stage) that updates one line of the terminal.

    On a terminal the line is rewritten, cut to its width, and at the end replaced by the final
    state; elsewhere a line is printed every ten seconds. It shows only progress: losses and
    accuracies on training data are private.

    rate: `unit` per second, or `rate_unit` per second; with the latter the time left is computed
    from the pace since the first result of this session, before which workers start. stage: text
    after the numbers.
    """
    live = sys.stderr.isatty()
    last_shown = 0.0
    began = time.monotonic()
    earlier: int | None = None  # what an earlier session had done
    first: tuple[int, float] | None = None  # what was done when, at the first result
    final = ""

    def show(done: int, total: int, rate: float, stage: str = "", /) -> None:
        nonlocal earlier, first, last_shown, final
        now = time.monotonic()
        earlier = done if earlier is None else earlier
        if first is None and done > earlier:
            first = done, now
        final = f"{title}: {done:,} of {total:,} {unit} in {_format_duration(now - began)}"
        if done < total and now - last_shown < (0.2 if live else 10.0):
            return
        since, when = first or (done, now)
        pace = rate if rate_unit is None else (done - since) / max(now - when, 1e-9)
        left = _format_duration((total - done) / pace) if pace > 0 else "?"
        percent = 100 * done // max(total, 1)
        line = f"{title}: {done:,} of {total:,} {unit} ({percent}%)"
        if rate:
            line += f", {rate:,.1f}" if rate >= 1 else f", {rate:.2g}"
            line += f" {rate_unit or unit}/s"
        line += f", {left} left"
        line += f"; {stage}" if stage else ""
        last_shown = now
        if live:  # "^C" has room behind it
            _live[:] = [line[: _terminal_columns() - 3]]
            print(_ERASE + _live[0], end="", file=sys.stderr, flush=True)
        elif done < total:
            log(line)

    try:
        yield show
    finally:
        before = erasure()
        _live.clear()
        if final:
            log(before + final)


def _terminal_columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or _MAX_WIDTH
    except OSError:  # a terminal without a file, as IDLE's
        return _MAX_WIDTH


def _format_duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Row(NamedTuple):
    """One result, which the terminal, pages, cards and JSON all render.

    Attributes:
        name: name of the result, in lower case.
        value: the result. A no-break space keeps two words on one line.
        beside: how to interpret it.
        brief: whether it is shown at the end of a command; other rows are details.
    """

    name: str
    value: str
    beside: str = ""
    brief: bool = False

    @property
    def title(self) -> str:
        """Return the name with a capital."""
        return self.name[:1].upper() + self.name[1:]

    @property
    def text(self) -> str:
        """Return value and interpretation in one line."""
        between = " " if self.beside.startswith("(") else "; "
        return (self.value + between * bool(self.beside) + self.beside).replace("\u00a0", " ")


_MAX_WIDTH, _NARROW = 100, 40  # of a line, and of a value to which others are aligned
_SHORT = 32  # of a name to which values are aligned


def _width() -> int:
    """Return the columns of a line: $COLUMNS, or those of the terminal, but at most 100."""
    columns = shutil.get_terminal_size((_MAX_WIDTH, 24)).columns
    return columns if os.environ.get("COLUMNS") else min(_MAX_WIDTH, columns)


def format_table(rows: Sequence[Row | tuple[str, str]], title: str = "") -> str:
    """Return a title and rows as plain text, wrapped to the terminal except for long words.

    rows: each a `Row`, or name and value.
    """
    width = _width()
    shown = [Row(*row) for row in rows]
    left = 2 + max((len(row.name) for row in shown if len(row.name) <= _SHORT), default=0) + 2
    room = max(40, width - left)
    short = [row for row in shown if row.beside and len(row.value) + len(row.beside) + 3 <= room]
    column = max((len(row.value) for row in short if len(row.value) <= _NARROW), default=0)
    lines = [title] if title else []
    for row in shown:
        if row in short:
            gap = max(3, min(column + 5, room - len(row.beside)) - len(row.value))
            texts = [row.value + " " * gap + row.beside]
        else:
            texts = [
                line
                for part in (row.value, row.beside)
                for line in textwrap.wrap(
                    part.replace(" %", "\u00a0%"),
                    room,
                    break_long_words=False,
                    break_on_hyphens=False,
                )
            ] or [""]
        if len(row.name) > left - 4:
            texts.insert(0, "")  # a long name has a line of its own
        lines.append(f"  {row.title}".ljust(left) + texts[0])
        lines += [" " * left + text for text in texts[1:]]
    return "\n".join(line.rstrip() for line in lines).replace("\u00a0", " ")


def format_html_table(rows: Sequence[Row], title: str) -> str:
    """Return rows as an HTML table below a caption, for a notebook."""
    cells = "".join(
        f"<tr><th>{html.escape(row.title)}</th><td>{html.escape(row.text)}</td></tr>"
        for row in rows
    )
    return f"<table><caption>{html.escape(title)}</caption>{cells}</table>"


def format_markdown_table(rows: Sequence[Row]) -> str:
    """Return rows as a table of Markdown."""
    lines = [f"| {row.title} | {row.text.replace('|', '/')} |" for row in rows]
    return "\n".join(["| | |", "|---|---|", *lines])


def format_columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return aligned columns, the last one wrapped to the terminal."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header) - 1)]
    indent = sum(widths) + 2 * len(widths)
    room = max(40, _width() - indent)
    lines: list[str] = []
    for row in [header, *rows]:
        last = textwrap.wrap(row[-1], room) or [""]
        first = "".join(
            cell.ljust(width) + "  " for cell, width in zip(row[:-1], widths, strict=True)
        )
        lines.append((first + last[0]).rstrip())
        lines += [" " * indent + more for more in last[1:]]
        if row is header:
            lines.append("-" * (indent + min(room, max(len(r[-1]) for r in [header, *rows]))))
    return "\n".join(lines)


# --- numbers as text --------------------------------------------------------------------------


def format_percent(
    fraction: SupportsFloat, digits: int = 2, *, round_down: bool = False, round_up: bool = False
) -> str:
    """Return a fraction in %, without the sign, rounded to the nearest; only 1 is shown as 100.

    Args:
        fraction: between 0 and 1.
        digits: number of decimals.
        round_down: round down instead, for a lower bound such as a certified accuracy.
        round_up: round up instead, for an upper bound.

    Example:
        >>> format_percent(0.7639, 1), format_percent(0.7639, 1, round_down=True)
        ('76.4', '76.3')
        >>> format_percent(0.9996, 1), format_percent(1e-9, round_up=True)
        ('99.9', '0.01')
    """
    percent, step = Decimal(repr(float(fraction))) * 100, Decimal(1).scaleb(-digits)
    one_way = round_down or round_up or 100 - step < percent < 100
    return _rounded(percent, digits, _direction(round_up) if one_way else ROUND_HALF_UP)


def format_bound(number: SupportsFloat, digits: int = 3, *, round_up: bool = False) -> str:
    """Return a lower bound with this number of decimals, rounded down; round_up: rounded up.

    Example:
        >>> format_bound(0.9996), format_bound(0.0001, round_up=True)
        ('0.999', '0.001')
    """
    return _rounded(Decimal(repr(float(number))), digits, _direction(round_up))


def format_significant(number: SupportsFloat, digits: int = 4, *, round_down: bool = False) -> str:
    """Return an upper bound with this number of significant digits, rounded up.

    Args:
        number: the bound; infinity and NaN are shown by name.
        digits: at most 15, the precision of a float.
        round_down: round down instead, for a lower bound.

    Example:
        >>> format_significant(1e-5), format_significant(1.23456e-5), format_significant(99.99999)
        ('1e-05', '1.235e-05', '100')
        >>> format_significant(0.1), format_significant(0.12345, round_down=True)
        ('0.1', '0.1234')
    """
    context = Context(prec=digits, rounding=ROUND_FLOOR if round_down else ROUND_CEILING)
    return f"{float(context.plus(Decimal(repr(float(number))))):.{digits}g}"


def format_confidence(error: SupportsFloat) -> str:
    """Return 1 minus an error in %, without the sign and with all digits.

    Example:
        >>> format_confidence(0.05), format_confidence(1e-6)
        ('95', '99.9999')
    """
    left = (1 - Decimal(repr(float(error)))) * 100
    text = f"{left:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _direction(round_up: bool) -> str:
    return ROUND_CEILING if round_up else ROUND_FLOOR


def _rounded(number: Decimal, digits: int, rounding: str) -> str:
    """Return a decimal number rounded by a rule of `decimal`: 0.29 is 29 %, not a little less."""
    if not number.is_finite():
        return str(float(number))
    step = Decimal(1).scaleb(-digits)
    return f"{number.quantize(step, rounding=rounding):f}"


def format_exact(number: float) -> str:
    """Return a number with six digits if that is exact, else with all digits.

    Example:
        >>> format_exact(0.25), format_exact(0.12345678)
        ('0.25', '0.12345678')
    """
    short = f"{number:g}"
    return short if float(short) == float(number) else repr(float(number))
