"""A certificate of one's own has the table and the words of its parent, and is listed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dpdist.certification.certificate import Certificate
from dpdist.certification.cohen import Cohen
from dpdist.certification.expected_scores import ExpectedScores, ScoreTable
from dpdist.certification.registry import CERTIFICATES, kind_of
from dpdist.certification.table import (
    CertificateTable,
    CohenTable,
    TableFormat,
)
from dpdist.core.errors import UserError


def test_an_own_class_has_the_table_and_the_words_of_its_parent() -> None:
    class Own(ExpectedScores):
        pass

    assert kind_of(Own).settings is Own and kind_of(Own).table_class is ScoreTable
    assert kind_of(Own).table_format.settings_class is Own
    assert kind_of(Own).description is kind_of(ExpectedScores).description
    assert all(kind_of(of).settings is of for of in CERTIFICATES)

    class Alone(Certificate):
        def build_sampler(self, model: Any, input_shape: Any) -> Any: ...

        def sample(self, *given: Any) -> Any: ...

        def decide(self, partials: Any, sampler: Any) -> Any: ...

        def name_parts(self) -> Any: ...

    with pytest.raises(UserError, match=r"Alone: must be listed in .*registry\.KINDS"):
        kind_of(Alone)


def test_a_table_that_does_not_say_how_its_points_are_certified_is_not_attacked() -> None:
    class Own(CohenTable):
        recreate = TableFormat.recreate

    found = CertificateTable.__new__(CertificateTable)
    found.__dict__.update(path=Path("x"), mode="own")
    with pytest.raises(UserError, match="x: certificates of mode own cannot be attacked: Own has"):
        Own(Cohen).recreate(found, "l2", 10)
