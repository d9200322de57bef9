"""Hoeffding's bound of votes beside Clopper and Pearson's: the number, its error, and every way to
ask for it."""

from __future__ import annotations

from decimal import Decimal, getcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import dpdist
from dpdist.certification import table_reader
from dpdist.certification.cohen import Cohen
from dpdist.certification.variants import HoeffdingVotes
from dpdist.core.binomial import clopper_pearson_lower, hoeffding_lower
from dpdist.core.errors import UserError

ALPHAS = (0.3, 0.05, 0.001, 1e-12)
COUNTS = [(k, n) for n in (1, 7, 100, 12_345, 10**8) for k in {0, n // 2, n - n // 10, n - 1, n}]


def exact(hits: int, draws: int, alpha: float) -> Decimal:
    """The bound in 60 digits, from its formula."""
    getcontext().prec = 60
    width = ((1 / Decimal(alpha)).ln() / (2 * draws)).sqrt()
    return max(Decimal(hits) / draws - width, Decimal(0))


@pytest.mark.parametrize("alpha", ALPHAS)
def test_it_is_hoeffdings_number_rounded_down_and_never_above_clopper_and_pearsons(
    alpha: float,
) -> None:
    for hits, draws in COUNTS:
        found, wanted = float(hoeffding_lower(hits, draws, alpha)), exact(hits, draws, alpha)
        assert Decimal(found) <= wanted and float(wanted) - found <= 1e-12
        assert found <= float(clopper_pearson_lower(hits, draws, alpha))


@pytest.mark.parametrize(
    ("section", "kind"),
    [
        ({"sigma": 0.5, "bound": "hoeffding"}, HoeffdingVotes),
        ({"sigma": 0.5, "mode": "hoeffding"}, HoeffdingVotes),
        ({"sigma": 0.5, "mode": "hoeffding", "bound": "clopper-pearson"}, Cohen),
    ],
)
def test_a_section_asks_for_it(section: dict, kind: type) -> None:
    found = dpdist.settings_of(section)
    assert type(found) is kind
    assert dpdist.settings_of(found.model_dump()) == found
    usual, hoeffding = Cohen(sigma=0.5, n=77), HoeffdingVotes(sigma=0.5, n=77)
    assert dpdist.settings_of({"bound": "hoeffding"}, usual) == hoeffding
    assert dpdist.settings_of({"bound": "clopper-pearson"}, hoeffding) == usual
    with pytest.raises(UserError, match=r"bound: .*clopper-pearson.*hoeffding"):
        dpdist.settings_of({"bound": "clopper"}, usual)


def test_the_table_states_it_is_checked_by_it_and_certified_anew_by_it(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    x = np.random.default_rng(0).random((5, 4), dtype=np.float32)
    y = model(torch.from_numpy(x)).argmax(1).numpy()
    settings = HoeffdingVotes(sigma=0.05, n=500, n0=20, seed="a")
    found = dpdist.certify(model, (x, y), settings, folder=tmp_path / "h", executor="local")
    cohen = Cohen(sigma=0.05, n=500, n0=20, seed="a")
    other = dpdist.certify(model, (x, y), cohen, folder=tmp_path / "c", executor="local")
    assert found.table["k"].to_pylist() == other.table["k"].to_pylist()  # the same draws
    p = [float(exact(k, 500, 0.001)) for k in found.table["k"].to_pylist()]
    assert found.table["p_lower"].to_numpy() == pytest.approx(np.asarray(p), abs=1e-12)
    assert (found.radius <= other.radius).all() and "Hoeffding" in found.description
    again = table_reader.recertify(found.table, 0.2)
    wider = [float(exact(k, 500, 0.2)) for k in found.table["k"].to_pylist()]
    assert again["p_lower"].to_numpy() == pytest.approx(np.asarray(wider), abs=1e-12)
