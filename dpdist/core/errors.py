"""Errors that a command reports in one line: a user's mistake, a cluster's fault, an interruption.

A user's mistake ends a command with exit code 2, an interruption with 130.
"""

import errno


class UserError(Exception):
    """Something the user can mend. The message says what was wrong, where, and what would be
    right."""


class ClusterError(Exception):
    """A cluster that cannot do what was asked. The message says what, where, and what would be
    right."""


class Interrupted(Exception):
    """Ctrl-C during work that the same command continues."""


class InvalidResults(UserError):
    """Work that found out that all its results so far are worthless: it is neither tried again nor
    continued."""


class NoRoom(UserError):
    """A disk that is full, over its quota or read-only, or a limit on the size of files: the user
    makes room and goes on."""


def no_room(error: BaseException | None) -> bool:
    """Whether this is, or was caused by, a full disk: a repetition would only meet it again."""
    while error is not None:
        if isinstance(error, NoRoom) or (isinstance(error, OSError) and error.errno in _NO_ROOM):
            return True
        error = error.__cause__
    return False


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


def is_refused(error: OSError) -> bool:
    """Whether the machine refuses something, by permissions or limits, whoever it was asked by."""
    return error.errno in _REFUSED


_REFUSED = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)
