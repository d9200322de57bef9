"""Cases of a parameter that only the slow tests run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first_cases(values: Iterable[Any], kept: int) -> list[Any]:
    """Return the cases of a parameter, of which those behind the first `kept` are slow."""
    return [
        value if place < kept else pytest.param(value, marks=pytest.mark.slow)
        for place, value in enumerate(values)
    ]
