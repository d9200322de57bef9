"""The list of planted faults stays usable: each snippet occurs exactly once, each test exists."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from mutants import FAULTS
from support import sources

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.long
@pytest.mark.parametrize("file", sorted({fault.file for fault in FAULTS}))
def test_every_fault_can_be_planted(file):
    text = (ROOT / file).read_text()
    wrong = [f"{f.old!r} occurs {text.count(f.old)} times" for f in FAULTS
             if f.file == file and (text.count(f.old) != 1 or f.old == f.new)]  # fmt: skip
    assert wrong == []
    for fault in FAULTS:
        if fault.file == file:
            compile(text.replace(fault.old, fault.new), file, "exec")


@pytest.mark.long
def test_every_test_named_is_there():
    for name in sorted({test for fault in FAULTS for test in fault.tests}):
        path, _, test = name.partition("::")
        assert (ROOT / path).exists(), name
        assert not test or test in sources.functions_of(ROOT / path), name


def test_there_are_enough_and_no_two_are_alike():
    assert len(FAULTS) >= 120
    assert max(Counter(fault.name for fault in FAULTS).values()) == 1
