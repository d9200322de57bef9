"""Whether freed memory stays in the process.

By default glibc returns every block of some megabytes to the kernel when it is freed. The page
faults of the next step then take a third of a small model's step.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc accepts no more
_KEEP = 1 << 30


@functools.cache
def raise_malloc_thresholds() -> None:
    """Raise glibc's trim and mmap thresholds, once per process."""
    mallopt = _glibc("mallopt")
    if mallopt is not None and mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD):
        mallopt(_M_TRIM_THRESHOLD, _KEEP)


def return_freed_memory() -> None:
    """Return freed memory to the kernel, after work that is not repeated."""
    trim = _glibc("malloc_trim")
    if trim is not None:
        trim(0)


def _glibc(function: str) -> Any:
    """Return a function of glibc; None without glibc."""
    return getattr(ctypes.CDLL(None), function, None) if sys.platform.startswith("linux") else None
