"""Commands in this process, under a time limit: a fault is a traceback, a hang or a remnant."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpdist import pipeline
from dpdist.base.errors import UserError
from dpdist.commands.cli import main

CPU_SECONDS, SECONDS = 20.0, 120.0  # of one case; the slowest takes three on a free machine


class Hung(BaseException):
    """The time limit; nothing of ours catches it."""


@dataclass
class Fuzz:
    """What was tried and what went wrong. `call` never raises."""

    cases: int = 0
    refused: int = 0
    faults: list[str] = field(default_factory=list)

    def call(self, case: object, place: Path, *arguments: object) -> None:
        """Run a command in the folder `place`, which a refusal must leave as it is."""
        before, self.cases = listing(place), self.cases + 1
        code, said = _run(place, [str(argument) for argument in arguments])
        fault = ""
        if code == 2:
            self.refused += 1
            changed = {p for p, _ in set(before.items()) ^ set(listing(place).items())}
            if changed and "would begin" not in said:
                fault = f"left behind: {sorted(changed)[:5]}"
            elif not said.strip() or len(said) > 4000:
                fault = "refused without a word, or with thousands"
        elif code != 0:
            fault = f"exit code {code}"
        if fault:
            command = " ".join(map(str, arguments))[:300]
            self.faults.append(f"{command}\n  {case!s:.600}\n  {fault}\n  {said[-1500:]}")

    def verdict(self, at_least: int) -> None:
        print(f"{self.cases} cases, {self.refused} refused, {len(self.faults)} faults")
        assert not self.faults, "\n\n".join(self.faults[:20])
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


def listing(folder: Path) -> dict[str, str]:
    """Every path below a folder, with a digest of each regular file."""
    found = {}
    for path in sorted(folder.rglob("*")):
        regular = path.is_file() and not path.is_symlink()
        content = hashlib.blake2b(path.read_bytes()).hexdigest() if regular else ""
        found[str(path.relative_to(folder))] = content
    return found


@contextlib.contextmanager
def no_ray(*_: Any, **__: Any) -> Iterator[None]:
    """In the place of `pipeline.session`: everything up to where work would begin."""
    raise UserError("would begin")
    yield


def without_ray(patch: Any) -> None:
    patch.setattr(pipeline, "session", no_ray)
