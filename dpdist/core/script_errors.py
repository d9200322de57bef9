"""Show user errors and Ctrl-C in one line if a script or a notebook does not catch them.

`import dpdist` installs both hooks. Other errors keep their traceback. Warnings (`warn`) name a
line of the user.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import warnings
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol
from weakref import WeakSet

from dpdist.core.console import erasure
from dpdist.core.errors import ClusterError, ExitCode, Interrupted, UserError

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib"))
_SHOWN = (UserError, ClusterError)


def warn(text: str) -> None:
    """Warn about the line of the user's own code that called dpdist, also through a library."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_library(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    print(erasure(), end="", file=sys.stderr)
    warnings.warn(text, stacklevel=level)


def _is_library(file: str) -> bool:
    return file.startswith((_PACKAGE, *_LIBRARIES, "<frozen ", "<string>"))


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C during a training that the same script resumes; its message states where."""


_STOPPED = (TrainingInterrupted, Interrupted)


class Work(Protocol):
    """Work of a script that the same script resumes."""

    def keep_interrupted(self) -> str | None:
        """Save its state after Ctrl-C; return where it resumes, or None if it is not open."""


unfinished: WeakSet[Work] = WeakSet()


def install_error_hooks() -> None:
    """Make Python and IPython show these errors in one line. A second call changes nothing."""
    if not getattr(sys.excepthook, "of_dpdist", False):
        sys.excepthook = _OneLine(sys.excepthook)
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None:
        shell.set_custom_exc((*_SHOWN, *_STOPPED), _show_in_notebook)


class _OneLine:
    """A `sys.excepthook` that passes other errors to the previous one."""

    of_dpdist = True

    def __init__(self, before: Callable[..., Any]) -> None:
        self._before = before

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if issubclass(kind, _SHOWN):
            _print(error, _place(trace) if issubclass(kind, UserError) else "")
        elif issubclass(kind, _STOPPED):
            if str(error):  # only one of several workers has a message
                _print(error)
            raise SystemExit(ExitCode.INTERRUPTED)
        elif kind is KeyboardInterrupt and (
            lines := [line for work in unfinished if (line := work.keep_interrupted())]
        ):
            print("\n".join(lines), file=sys.stderr, flush=True)
            raise SystemExit(ExitCode.INTERRUPTED)
        else:
            self._before(kind, error, trace)


def _place(trace: TracebackType | None) -> str:
    """Return file and line of the innermost frame of the user's own code."""
    found = ""
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not (_is_library(name) or name.startswith("<")):
            found = f"{Path(name).name}:{trace.tb_lineno}: "
        trace = trace.tb_next
    return found


def _print(error: BaseException, place: str = "") -> None:
    for line in str(error).splitlines() or [type(error).__name__]:
        print(f"{place}{line}", file=sys.stderr, flush=True)


def _show_in_notebook(shell: Any, kind: Any, error: BaseException, *_: Any, **__: Any) -> None:
    _print(error)
