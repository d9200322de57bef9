"""Results that are a mistake in units rather than a finding are named first."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dpdist
from dpdist.certification import statistics
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


def certified(
    model: nn.Module, data: tuple[np.ndarray, np.ndarray], folder: Path, sigma: float, **part: Any
) -> dpdist.CertificateTable:
    # Of 30 fair coins one is certified by chance once in 30,000 times.
    part = {"radii": (0.05, 0.1)} | part
    settings = dpdist.Cohen(sigma=sigma, n=200, n0=20, alpha=1e-6, seed="a", **part)
    return dpdist.certify(model, data, settings, folder=folder, executor="local")


@pytest.mark.parametrize(("scale", "sigma", "doubt"), [(3000.0, 0.25, "0.1"), (0.001, 5.0, "5")])
def test_an_unscaled_table_and_an_abstention_on_everything_are_doubted(
    tmp_path: Path, scale: float, sigma: float, doubt: str
) -> None:
    with pytest.warns(UserWarning):
        odd = certified(Scaled(scale), points(scale), tmp_path, sigma)
    (text,) = statistics.doubts(odd)
    assert doubt in text


def one_hot(seed: int) -> np.ndarray:
    codes = np.random.default_rng(seed).integers(0, 4, (30, 2))
    return np.eye(4, dtype=np.float32)[codes].reshape(30, 8)


def words(seed: int) -> np.ndarray:
    """Counts of nine words in sixteen inputs, scaled to norm 1 as those of `text` are."""
    random = np.random.default_rng(seed)
    counts = np.stack([np.bincount(random.integers(0, 16, 9), minlength=16) for _ in range(30)])
    return (counts / np.linalg.norm(counts, axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize(("inputs", "step"), [(one_hot(0), 1.0), (words(0), 0.25)])
def test_radii_below_a_step_of_categories_or_counts_are_doubted(
    inputs: np.ndarray, step: float, tmp_path: Path
) -> None:
    labels = (inputs[:, 1] > inputs[:, 0]).astype(np.int64)
    with pytest.warns(UserWarning, match="steps of about"):
        found = certified(Scaled(), (inputs, labels), tmp_path / "small", 0.1)
    assert found.input_step == pytest.approx(step, rel=0.2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        large = certified(Scaled(), (inputs, labels), tmp_path / "large", 1.0, radii=(1.0, 2.0))
    assert not any("steps of about" in text for text in statistics.doubts(large))


def test_a_scaled_table_is_not_doubted(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert statistics.doubts(certified(Scaled(), points(1.0), tmp_path, 0.1)) == []


@pytest.mark.parametrize(("part", "doubted"), [({"max_inputs": 10}, True), ({"every": 3}, False)])
def test_the_first_inputs_of_data_in_the_order_of_classes_are_no_sample(
    part: dict[str, int], doubted: bool, tmp_path: Path
) -> None:
    x, labels = points(1.0)
    order = np.argsort(labels, kind="stable")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = certified(Scaled(), (x[order], labels[order]), tmp_path, 0.1, **part)
    told = [text for text in statistics.doubts(found) if "order of their classes" in text]
    assert bool(told) is doubted
    assert (table_as_json(found)["population"] == []) is doubted
