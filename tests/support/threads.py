"""One thread of torch's, for tests whose workers are threads already; torch's settings after a test
that changes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from dpdist.cluster.versions import NEW_BACKENDS, set_backend


@contextmanager
def new_settings_after() -> Iterator[None]:
    """torch computes as in a new process afterwards, whatever is set meanwhile."""
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")
        for name, settings in NEW_BACKENDS.items():
            for key, value in settings.items():
                set_backend(name, key, value)


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def one_thread_each() -> Iterator[None]:
    """More of torch's own would fight the workers for the cores. Whoever imports it has it."""
    with one_thread():
        yield
