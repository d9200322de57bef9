"""Results that are a mistake in units rather than a finding are named first."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import dpdist
from dpdist.certification import statistics
from dpdist.certification.table import input_range
from dpdist.reports.export import table_as_json


class Scaled(nn.Module):
    """A linear classifier of two features, on whatever scale they are."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x[:, 0] - x[:, 1], x[:, 1] - x[:, 0]], 1) / self.scale


def points(scale: float) -> tuple[np.ndarray, np.ndarray]:
    x = scale * np.random.default_rng(0).random((30, 2), dtype=np.float32)
    return x, (x[:, 1] > x[:, 0]).astype(np.int64)


def certified(scale: float, tmp_path: Path, sigma: float = 0.25) -> dpdist.CertificateTable:
    # Of 30 fair coins one is certified by chance once in 30,000 times.
    settings = dpdist.Cohen(sigma=sigma, n=200, n0=20, alpha=1e-6, radii=(0.05, 0.1), seed="a")
    found = dpdist.certify(
        Scaled(scale), points(scale), settings, folder=tmp_path, executor="local"
    )
    assert isinstance(found, dpdist.CertificateTable)
    return found


def test_an_unscaled_table_is_doubted_and_a_scaled_one_is_not(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="all radii"):
        odd = certified(3000.0, tmp_path / "odd")
    (text,) = statistics.doubts(odd)
    assert "0.1" in text
    assert not (odd.path.parent / "range.json").exists()  # held by nothing, so nowhere
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert statistics.doubts(certified(1.0, tmp_path / "fine", 0.1)) == []


def test_an_abstention_on_everything_is_doubted(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="abstained"):
        drowned = certified(0.001, tmp_path, 5.0)
    (text,) = statistics.doubts(drowned)
    assert "abstained" in text and "sigma 5" in text


class _Inputs:
    def batch(self, rows: np.ndarray) -> torch.Tensor:
        return torch.arange(4000.0).reshape(2000, 2)[torch.from_numpy(rows)]


def test_the_range_is_that_of_the_chosen_inputs() -> None:
    assert input_range(_Inputs(), range(100, 200)) == (200.0, 399.0)
    assert input_range(_Inputs(), range(2000)) == (0.0, 3999.0)  # the last of many is looked at


@pytest.mark.parametrize(("every", "doubted"), [(None, True), (3, False)])
def test_the_first_inputs_of_data_in_the_order_of_classes_are_no_sample(
    every: int | None, doubted: bool, tmp_path: Path
) -> None:
    x, labels = points(1.0)
    order = np.argsort(labels, kind="stable")
    part = {"every": every} if every else {"max_inputs": 10}
    settings = dpdist.Cohen(
        sigma=0.1, n=200, n0=20, alpha=1e-6, radii=(0.05, 0.1), seed="a", **part
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = dpdist.certify(
            Scaled(), (x[order], labels[order]), settings, folder=tmp_path, executor="local"
        )
    told = [text for text in statistics.doubts(found) if "order of their classes" in text]
    assert bool(told) is doubted
    assert statistics.population_row(found).value.startswith("not stated") is doubted
    assert (table_as_json(found)["population"] == []) is doubted
