"""Commands and readers in this process, under a time limit: whatever they are given, they do it or
refuse it in words, leave nothing of what was refused, and accept nothing that is invalid."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from dpdist.cli.main import main
from dpdist.core.errors import ClusterError, UserError
from dpdist.privacy.ledger import JournalError

SEED = int(os.environ.get("DPDIST_FUZZ_SEED", "0"))  # of all generated cases
CPU_SECONDS, SECONDS = 20.0, 120.0  # of one case; the slowest takes three on a free machine


class Hung(BaseException):
    """The time limit; nothing of ours catches it."""


def cases(count: int, *drawn: st.SearchStrategy[Any]) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a test that is called with so many generated cases, which `SEED` chooses."""
    chosen = settings(
        max_examples=count, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    return lambda test: seed(SEED)(chosen(given(*drawn)(test)))


def read(
    case: object, reader: Callable[[], Any], *, place: Path | None = None, invalid: bool = False
) -> None:
    """Call a reader, which may refuse and then leaves the folder `place` as it was.

    invalid: it must.
    """
    before = listing(place)
    hypothesis.note(f"{case!s:.900}")
    try:
        with _limit():
            reader()
    except (UserError, ClusterError, JournalError):
        assert listing(place) == before, "left behind"
    else:
        assert not invalid, "invalid, and accepted"


def call(case: object, place: Path, *arguments: object, invalid: bool = False) -> None:
    """Run a command in the folder `place`, which a refusal must leave as it is.

    invalid: it must be refused, before work would begin.
    """
    before = listing(place)
    code, said = run(place, *arguments)
    begun = "would begin" in said
    hypothesis.note(f"{' '.join(map(str, arguments)):.300}\n  {case!s:.600}\n  {said[-1500:]}")
    assert code in (0, 2), f"exit code {code}"
    if code == 2:
        assert said.strip() and len(said) <= 4000, "refused without a word, or with thousands"
        assert begun or listing(place) == before, "left behind"
    assert not invalid or (code == 2 and not begun), "invalid, and accepted"


def run(place: Path, *arguments: object) -> tuple[int, str]:
    """Run a command in a folder; return its exit code and what it says on standard error."""
    err, argv, path, code = io.StringIO(), sys.argv, list(sys.path), 0
    sys.argv = ["dpdist", *map(str, arguments)]
    try:
        with (
            contextlib.chdir(place), _limit(), contextlib.redirect_stderr(err),
            contextlib.redirect_stdout(io.StringIO()),
        ):  # fmt: skip
            main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    finally:
        sys.argv, sys.path[:] = argv, path
    return code, err.getvalue()


@contextlib.contextmanager
def _limit() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise Hung

    limits = [
        (signal.SIGALRM, signal.ITIMER_REAL, SECONDS),
        (signal.SIGVTALRM, signal.ITIMER_VIRTUAL, CPU_SECONDS),
    ]
    before = [signal.signal(kind, stop) for kind, _, _ in limits]
    for _, timer, seconds in limits:
        signal.setitimer(timer, seconds)
    try:
        yield
    except Hung as hung:
        raise AssertionError("hung") from hung
    finally:
        for (kind, timer, _), handler in zip(limits, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(kind, handler)


def listing(folder: Path | None) -> dict[str, str]:
    """Every path below a folder, with a digest of each regular file; none for no folder."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*")) if folder else ():
        regular = path.is_file() and not path.is_symlink()
        content = hashlib.blake2b(path.read_bytes()).hexdigest() if regular else ""
        found[str(path.relative_to(folder))] = content
    return found
