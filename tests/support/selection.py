"""Cases of a parameter that only the long tests run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first_cases(values: Iterable[Any], kept: int) -> list[Any]:
    """Return the cases of a parameter, of which those behind the first `kept` are long."""
    return [
        value if place < kept else pytest.param(value, marks=pytest.mark.long)
        for place, value in enumerate(values)
    ]
