"""Words of commands that several tests give."""

from __future__ import annotations


def sets(*assignments: str) -> list[str]:
    """Return the words `--set KEY=VALUE` of each assignment."""
    return [word for each in assignments for word in ("--set", each)]
