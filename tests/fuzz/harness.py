"""Commands and readers in this process, under a time limit, and four counters that must stay 0:
tracebacks, hangs, remnants of what was refused, and accepted input that is invalid."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from dpdist import pipeline
from dpdist.cli.main import main
from dpdist.core.errors import ClusterError, UserError
from dpdist.privacy.ledger import JournalError

SEED = int(os.environ.get("DPDIST_FUZZ_SEED", "0"))  # of all generated cases
CPU_SECONDS, SECONDS = 20.0, 120.0  # of one case; the slowest takes three on a free machine


class Hung(BaseException):
    """The time limit; nothing of ours catches it."""


@dataclass
class Fuzz:
    """What was tried and what went wrong. `call` never raises."""

    cases: int = 0
    refused: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def read(
        self,
        case: object,
        reader: Callable[[], Any],
        *,
        place: Path | None = None,
        invalid: bool = False,
        errors: tuple[type[Exception], ...] = (UserError, ClusterError, JournalError),
    ) -> None:
        """Call a reader, which may raise `errors` and then leaves the folder `place` as it was.

        invalid: it must raise one of them.
        """
        before, self.cases = listing(place), self.cases + 1
        try:
            with _limit():
                reader()
            if invalid:
                self._add("acceptances", case, "invalid, and accepted", "")
        except errors as error:
            self.refused += 1
            if changed := _changed(before, place):
                self._add("remnants", case, f"left behind: {changed}", str(error))
        except Hung:
            self._add("hangs", case, "hung", traceback.format_exc(limit=-4))
        except BaseException:
            self._add("tracebacks", case, "raised", traceback.format_exc(limit=-6))

    def call(self, case: object, place: Path, *arguments: object, invalid: bool = False) -> None:
        """Run a command in the folder `place`, which a refusal must leave as it is.

        invalid: it must be refused, before work would begin.
        """
        before, self.cases = listing(place), self.cases + 1
        code, said = _run(place, [str(argument) for argument in arguments])
        begun = "would begin" in said
        about = f"{' '.join(map(str, arguments)):.300}\n  {case!s:.600}"
        if code == 2:
            self.refused += 1
            changed = _changed(before, place)
            if changed and not begun:
                self._add("remnants", about, f"left behind: {changed}", said)
            elif not said.strip() or len(said) > 4000:
                self._add("tracebacks", about, "refused without a word, or with thousands", said)
        elif code != 0:
            self._add("hangs" if code == -1 else "tracebacks", about, f"exit code {code}", said)
        if invalid and (code == 0 or begun):
            self._add("acceptances", about, "invalid, and accepted", said)

    def _add(self, counter: str, case: object, fault: str, said: str) -> None:
        self.counts[counter] += 1
        self.faults.append(f"{case!s:.900}\n  {fault}\n  {said[-1500:]}")

    def verdict(self, at_least: int) -> None:
        """Print the counters. Raises AssertionError unless all are 0 and the cases enough."""
        names = ("tracebacks", "hangs", "remnants", "acceptances")
        counted = ", ".join(f"{name} {self.counts[name]}" for name in names)
        said = f"{self.cases} cases, {self.refused} refused; {counted}; DPDIST_FUZZ_SEED={SEED}"
        print(said)
        assert not self.faults, "\n\n".join([said, *self.faults[:20]])
        assert self.cases >= at_least


def _run(place: Path, arguments: list[str]) -> tuple[int, str]:
    out, err = io.StringIO(), io.StringIO()
    here, argv, path = Path.cwd(), sys.argv, list(sys.path)
    code, said = 0, ""
    os.chdir(place)
    sys.argv = ["dpdist", *arguments]
    try:
        with _limit(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except Hung:
        code, said = -1, f"hung: {traceback.format_exc(limit=-4)}"
    except BaseException:
        code, said = -2, traceback.format_exc()
    finally:
        sys.argv, sys.path[:] = argv, path
        os.chdir(here)
    return code, err.getvalue() + said


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
    finally:
        for (kind, timer, _), handler in zip(limits, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(kind, handler)


def _changed(before: dict[str, str], place: Path | None) -> list[str]:
    """Some paths below a folder that are not as they were."""
    return sorted({path for path, _ in before.items() ^ listing(place).items()})[:5]


def listing(folder: Path | None) -> dict[str, str]:
    """Every path below a folder, with a digest of each regular file; none for no folder."""
    found: dict[str, str] = {}
    if folder is None:
        return found
    for path in sorted(folder.rglob("*")):
        regular = path.is_file() and not path.is_symlink()
        content = hashlib.blake2b(path.read_bytes()).hexdigest() if regular else ""
        found[str(path.relative_to(folder))] = content
    return found


@contextlib.contextmanager
def no_ray(*_: Any, **__: Any) -> Iterator[None]:
    """In the place of `pipeline.run_session`: everything up to where work would begin."""
    raise UserError("would begin")
    yield


def without_ray(patch: Any) -> None:
    patch.setattr(pipeline, "run_session", no_ray)


def cases(count: int, *drawn: SearchStrategy[Any]) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a test that is called with so many generated cases."""
    chosen = settings(
        max_examples=count, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    return lambda test: seed(SEED)(chosen(given(*drawn)(test)))
