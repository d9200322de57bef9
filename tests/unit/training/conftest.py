"""Shared by the tests of training."""

from support.threads import one_thread_each

__all__ = ["one_thread_each"]
