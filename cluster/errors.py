"""The one exception for a cluster that cannot do what was asked."""


class ClusterError(Exception):
    """The message says what was wrong, where, and what would be right; the CLI exits with code
    2."""
