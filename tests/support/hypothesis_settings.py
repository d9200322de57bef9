"""Which tests run where, and how many cases hypothesis generates."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings

RUN_SLOW_TESTS = "DPDIST_TESTS_ALL"  # set by tests/conftest.py when the slow tests run too
DEVICE_TEST_SUFFIX = "_on_device.py"  # how files of tests on the simulated device end


def hypothesis_settings(count: int, **more: Any) -> settings:
    """`count` cases with the slow tests, elsewhere the first quarter of them."""
    few = max(5, count // 4)
    count = count if RUN_SLOW_TESTS in os.environ else few
    return settings(**{"max_examples": count, "deadline": None, "derandomize": True} | more)
