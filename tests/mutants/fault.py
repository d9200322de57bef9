"""What a planted fault is."""

from __future__ import annotations

from dataclasses import dataclass

WIRING = "tests/wiring"


@dataclass(frozen=True)
class Fault:
    """In `file`, `old` (which occurs once) becomes `new`; that breaks what `breaks` says, and one of
    `tests` (files or single tests, none of which needs Ray) must fail."""

    file: str
    tests: tuple[str, ...]
    old: str
    new: str
    breaks: str

    @property
    def name(self) -> str:
        return f"{self.file}: {self.breaks}"


def group(file: str, tests: str, *faults: tuple[str, str, str]) -> list[Fault]:
    """Faults of one file that the same tests must kill; tests: separated by blanks, without the
    leading tests/ and the .py."""
    paths = tuple(_path(name) for name in tests.split())
    return [Fault(file, paths, old, new, breaks) for old, new, breaks in faults]


def _path(name: str) -> str:
    file, _, test = name.partition("::")
    return f"tests/{file}.py" + (f"::{test}" if test else "")
