"""Rows alone are executed where nothing else was: not even globals are shared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dpdist.certification.reexecution import FreshProcess, SameProcess
from dpdist.core.errors import UserError
from dpdist.models.factory_code import FactoryCode

pytestmark = pytest.mark.whole

MODULE = """
import torch
from torch import nn

CALLS = []


class Counts(nn.Module):
    calls = 0

    def forward(self, x):
        CALLS.append(len(x))
        Counts.calls += 1
        if float(x.sum()) < 0:
            raise ValueError("no negative rows")
        print("printed by the model")
        return torch.tensor([[float(len(CALLS)), float(Counts.calls)]]).expand(len(x), -1)
"""


@pytest.mark.long
def test_neither_globals_nor_attributes_of_classes_are_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "counting_globally.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    from counting_globally import Counts  # type: ignore[import-not-found]

    model, rows = Counts().eval(), torch.rand(3, 2)
    model(rows)
    assert SameProcess(model)(rows)[:, 0].tolist() == [2.0, 3.0, 4.0]  # what a copy shares
    alone = FreshProcess(model, "eager", FactoryCode())
    for _ in range(2):
        assert alone(rows).tolist() == [[1.0, 1.0]] * 3
    with pytest.raises(UserError, match=r"a process of its own.*: no negative rows"):
        alone(-rows)
    assert alone(rows).tolist() == [[1.0, 1.0]] * 3
    other = FactoryCode(("counting_globally:Counts",), {"counting_globally": "other"})
    with pytest.raises(UserError, match="must be the code with which the model was saved"):
        FreshProcess(model, "eager", other)(rows)
