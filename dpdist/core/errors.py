"""Errors that a command reports in one line: a user's mistake, a cluster's fault, an interruption.

A user's mistake ends a command with exit code 2, an interruption with 130.
"""

import errno
import re
from enum import IntEnum


class ExitCode(IntEnum):
    """How a command ended, as its exit code.

    Attributes:
        DONE: The command did its work, and every check that it made holds.
        REFUTED: The command did its work, and a check failed: `audit` or `membership` found more
            than the proved epsilon, `attack --check-certificates` contradicted a certificate, or
            `verify` found a release that does not hold. A fault of dpdist itself, which prints a
            traceback, has this code too.
        USER_ERROR: The command refused its input, or the cluster or the disk failed: an unknown or
            wrong recipe key, option or file, a damaged run, a full disk. One line for each says
            what to mend, and the same command may be run again.
        INTERRUPTED: Ctrl-C or SIGTERM ended the command; the same command continues.
    """

    DONE = 0
    REFUTED = 1
    USER_ERROR = 2
    INTERRUPTED = 130


def with_page(message: str, see: str) -> str:
    """Return the message with the place in the documentation that helps at its end.

    see: a page below `docs/` and an anchor on it, always written out ("how-to/cluster.md#faults"),
    so that a test can hold that it exists; "" for a message that says all. A message that ends with
    a place already, that of the error it quotes, keeps this one.
    """
    return message if not see or _PLACE.search(message) else f"{message} (docs/{see})"


_PLACE = re.compile(r" \(docs/[^\s()]+\)$")


class DocumentedError(Exception):
    """An error whose message may end with the page that helps; see `with_page`."""

    def __init__(self, message: str = "", *, see: str = "") -> None:
        super().__init__(with_page(message, see))


class UserError(DocumentedError):
    """An error in an input, a file or a setting, which you can fix.

    `str(error)` is the message: the key or file, its rule and its value, a remedy, and the page
    that explains it (the argument `see`), if there is one. A command prints it in one line and ends
    with exit code 2.

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

    `str(error)` is the message: the fault, its place and a remedy. You may run the same command
    again.

    Example:
        >>> import dpdist
        >>> issubclass(dpdist.ClusterError, dpdist.UserError)
        False
    """


class Interrupted(Exception):
    """Ctrl-C during work that the same command continues."""


class InvalidResultsError(UserError):
    """Work that found all its results so far worthless: it is neither tried again nor continued."""


class DiskFullError(UserError):
    """A disk that is full, over its quota or read-only, or a limit on the size of files.

    The user makes room and runs the command again.
    """


def is_disk_full(error: BaseException | None) -> bool:
    """Return whether a full disk caused the error, so that a repetition would fail again."""
    while error is not None:
        if isinstance(error, DiskFullError) or (
            isinstance(error, OSError) and error.errno in _DISK_FULL_ERRNOS
        ):
            return True
        error = error.__cause__
    return False


_DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


def is_permission_or_limit_error(error: OSError) -> bool:
    """Return whether the machine refuses an operation by permissions or limits, for any caller."""
    return error.errno in _PERMISSION_OR_LIMIT_ERRNOS


_PERMISSION_OR_LIMIT_ERRNOS = (
    errno.EACCES,
    errno.EPERM,
    errno.EMFILE,
    errno.ENFILE,
    errno.EAGAIN,
    errno.ENOMEM,
)
