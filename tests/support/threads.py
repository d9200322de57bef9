"""One thread of torch's, for tests whose workers are threads already."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


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
