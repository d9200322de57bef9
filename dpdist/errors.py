"""What a command says in one line: a user's mistake (exit code 2), an interruption (130)."""


class Interrupted(Exception):
    """Ctrl-C during work that the same command continues."""


class UserError(Exception):
    """Something the user can mend. The message says what was wrong, where, and what would be
    right."""
