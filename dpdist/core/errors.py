"""Errors that a command reports in one line: a user's mistake, a cluster's fault, an interruption.

A user's mistake ends a command with exit code 2, an interruption with 130.
"""

import errno
import re
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of commands.

    Attributes:
        DONE: The command finished, and all its checks passed.
        REFUTED: The command finished, and a check failed: `audit` or `membership` measured more
            than the proved epsilon, `attack --check-certificates` contradicted a certificate, or
            `verify` found a release to be invalid. A fault of dpdist itself, which prints a
            traceback, also has this code.
        USER_ERROR: The input is wrong, or the cluster or the disk failed: an unknown or wrong
            recipe key, option or file, a damaged run, a full disk. One line for each tells you how
            to fix it, and you may run the same command again.
        INTERRUPTED: Ctrl-C or SIGTERM ended the command; the same command continues.
    """

    DONE = 0
    REFUTED = 1
    USER_ERROR = 2
    INTERRUPTED = 130


def with_page(message: str, see: str) -> str:
    """Return the message followed by the page of the documentation that helps.

    see: a page in `docs/` and an anchor, written in full ("how-to/cluster.md#faults") so that a
    test can check that it exists; "" without a page. A message that ends with a page, such as that
    of a quoted error, is returned as it is.
    """
    return message if not see or _PLACE.search(message) else f"{message} (docs/{see})"


_PLACE = re.compile(r" \(docs/[^\s()]+\)$")


class DocumentedError(Exception):
    """An error whose message may end with the page that helps (`with_page`)."""

    def __init__(self, message: str = "", *, see: str = "") -> None:
        super().__init__(with_page(message, see))


class UserError(DocumentedError):
    """An error in an input, a file or a setting, which you can fix.

    `str(error)` is the message: the key or file, its rule and value, the fix, and the page that
    explains it (the argument `see`), if there is one. A command prints it in one line and ends with
    exit code 2.

    Example:
        >>> import dpdist
        >>> try:
        ...     dpdist.load("no-such-folder")
        ... except dpdist.UserError as error:
        ...     print(error)
        no-such-folder: no such folder
    """


class ClusterError(DocumentedError):
    """A fault of the cluster or of Ray rather than of an input.

    `str(error)` is the message: the fault, its place and the fix. You may run the same command
    again.

    Example:
        >>> import dpdist
        >>> issubclass(dpdist.ClusterError, dpdist.UserError)
        False
    """


class Interrupted(Exception):
    """Ctrl-C during work that the same command continues."""


class InvalidResultsError(UserError):
    """All results so far are invalid: the work is neither repeated nor continued."""


class DiskFullError(UserError):
    """A disk that is full, over its quota or read-only, or a limit on file sizes."""


def is_disk_full(error: BaseException | None) -> bool:
    """Return whether a full disk caused the error, so that a retry would fail."""
    while error is not None:
        if isinstance(error, DiskFullError) or (
            isinstance(error, OSError) and error.errno in _DISK_FULL_ERRNOS
        ):
            return True
        error = error.__cause__
    return False


_DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


def is_permission_or_limit_error(error: OSError) -> bool:
    """Return whether permissions or limits of the machine caused the error."""
    return error.errno in _PERMISSION_OR_LIMIT_ERRNOS


_PERMISSION_OR_LIMIT_ERRNOS = (
    errno.EACCES,
    errno.EPERM,
    errno.EMFILE,
    errno.ENFILE,
    errno.EAGAIN,
    errno.ENOMEM,
)
