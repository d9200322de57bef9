"""Words of commands that several tests give."""

from __future__ import annotations


def sets(section: str, *assignments: str) -> list[str]:
    """Return the words `--set SECTION.KEY=VALUE` of each assignment; the name has no section."""
    named = [each if each.startswith("name=") else f"{section}.{each}" for each in assignments]
    return [word for each in named for word in ("--set", each)]
