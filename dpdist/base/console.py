"""What the user sees: short lines, one live progress line with rate and time left, one summary
table."""

from __future__ import annotations

import json
import math
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


def say(text: str) -> None:
    """A line about what is going on (standard error: standard output is for results)."""
    print(text, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """A result on standard output, as one line of JSON. A number that is not finite, which JSON
    cannot hold, becomes its name: "inf"."""
    print(json.dumps(_finite(value), allow_nan=False), flush=True)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def progress(
    title: str, unit: str, rate_unit: str | None = None
) -> Iterator[Callable[[int, int, float], None]]:
    """A callback (done, total, rate) that keeps one line up to date.

    rate: of `unit` per second, unless `rate_unit` names what it counts; the time left is then
    taken from the pace so far.

    On a terminal the line is rewritten; elsewhere a line is printed every ten seconds. Shows
    nothing but
    progress: losses and accuracies on training data are private.
    """
    live = sys.stderr.isatty()
    last_shown = last_length = 0.0
    began = time.monotonic()
    final = ""

    def show(done: int, total: int, rate: float) -> None:
        nonlocal last_shown, last_length, final
        now = time.monotonic()
        if done < total and now - last_shown < (0.2 if live else 10.0):
            return
        pace = rate if rate_unit is None else done / max(now - began, 1e-9)
        left = _clock((total - done) / pace) if pace > 0 else "?"
        percent = 100 * done // max(total, 1)
        line = f"{title}: {done:,} of {total:,} {unit} ({percent}%)"
        line += f", {rate:,.1f} {rate_unit or unit}/s, {left} left"
        final = f"{title}: {done:,} of {total:,} {unit} in {_clock(now - began)}"
        last_shown = now
        if live:
            sys.stderr.write("\r" + line.ljust(int(last_length)))
            sys.stderr.flush()
            last_length = len(line)
        elif done < total:
            say(line)

    try:
        yield show
    finally:
        if final:
            sys.stderr.write(("\r" if live else "") + final.ljust(int(last_length)) + "\n")
            sys.stderr.flush()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def table(rows: Sequence[tuple[str, str]], title: str = "") -> str:
    """Two aligned columns under a title, plain text."""
    width = max(len(name) for name, _ in rows)
    lines = [f"{name.ljust(width)}  {value}" for name, value in rows]
    rule = "-" * max(len(line) for line in [*lines, title])
    return "\n".join(([title] if title else []) + [rule, *lines, rule])


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns; a long last column is wrapped to the terminal."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header) - 1)]
    indent = sum(widths) + 2 * len(widths)
    room = max(40, shutil.get_terminal_size().columns - indent)
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
