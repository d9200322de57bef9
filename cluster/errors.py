"""What a command says in one line, with exit code 2."""


class UserError(Exception):
    """Something the user can mend. The message says what was wrong, where, and what would be
    right."""


class ClusterError(Exception):
    """A cluster that cannot do what was asked. The message says what, where, and what would be
    right."""
