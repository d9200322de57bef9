"""What a script's training shows on a terminal, and how Ctrl-C ends it between two steps.

Only public and released values are shown: steps, their rate, and epsilon so far.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dpdist.core import console
from dpdist.privacy.guarantee import format_epsilon

_EPSILON_SECONDS = 5.0  # at least, between two computations of epsilon
_EPSILON_SHARE = 50  # computing epsilon takes at most 1/50 of the time


@contextmanager
def whole_step(asked: list[bool], tell: bool) -> Iterator[None]:
    """Let the first Ctrl-C wait for the end of a step; the second one ends it at once.

    Args:
        asked: gets an entry at a Ctrl-C.
        tell: whether to print it; only one of several workers does.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not (in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler):
        yield
        return

    def note(*_: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(True)
        if tell:  # not by print, which may be what was interrupted
            before = console.erasure() or "\n"
            os.write(2, f"{before}finishing this step; Ctrl-C again ends it at once\n".encode())

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def tell_resumed(done: int, replayed: int) -> None:
    """Print where a run resumes, and how many of its next steps epsilon already counts."""
    again = f", replaying {replayed:,} steps already counted in epsilon" if replayed else ""
    if done or replayed:
        console.log(f"resuming at step {done:,}{again}")


@contextmanager
def shown_progress(done: int, steps: int, wanted: bool = True) -> Iterator[Callable[[Any], None]]:
    """Yield a function of a `StepReport` that updates a line of progress.

    It shows nothing unless standard error is a terminal or this is a notebook.

    Args:
        done: number of steps before the first report.
        steps: number of steps of the plan.
        wanted: False shows nothing.
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    notebook = shell is not None and type(shell).__name__ == "ZMQInteractiveShell"
    if not (wanted and (notebook or sys.stderr.isatty())):
        yield lambda report: None
        return
    began, last, cost, epsilon = time.monotonic(), 0.0, 0.0, ""
    with console.progress("training", "steps") as show:

        def tell(report: Any) -> None:
            nonlocal last, cost, epsilon
            now, count = time.monotonic(), report.step + 1
            if count == steps or now - last > max(_EPSILON_SECONDS, _EPSILON_SHARE * cost):
                epsilon = f"epsilon {format_epsilon(report.epsilon)}"
                last, cost = time.monotonic(), time.monotonic() - now
            show(count, steps, (count - done) / max(now - began, 1e-9), epsilon)

        yield tell
