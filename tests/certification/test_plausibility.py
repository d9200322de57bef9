from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pytest
from support.plausibility import certified_accuracy_ceiling, contradictions

ROOT = Path(os.environ.get("DPDIST_DATA_ROOT", Path(__file__).parents[2] / "../shared/data"))


@pytest.fixture(scope="module")
def mnist() -> tuple[np.ndarray, np.ndarray]:
    """The first 1,000 test images, scaled to [-1, 1], and their labels."""
    path = ROOT / "mnist" / "test.parquet"
    if not path.exists():
        pytest.skip(f"MNIST is not at {path} (DPDIST_DATA_ROOT names another place)")
    import pyarrow.parquet as pq
    from PIL import Image

    rows = pq.read_table(path).slice(0, 1000).to_pylist()
    pixels = [np.asarray(Image.open(io.BytesIO(row["image"]["bytes"]))) for row in rows]
    return np.stack(pixels) / 127.5 - 1, np.array([row["label"] for row in rows])


def test_certificates_that_overlap_are_found() -> None:
    inputs = np.array([[0.0], [1.0], [1.5], [9.0]])
    assert contradictions(inputs, np.array([0, 1, 1, 0]), np.array([0.4, 0.5, 9, 0]), "l2") == [
        (0, 2)
    ]
    assert contradictions(inputs, np.array([0, 1, 1, 0]), np.array([0.5, 0.5, 0.5, 7]), "l2") == []
    assert contradictions(inputs, np.array([0, -1, 1, 0]), np.array([5, 5, 0, 5]), "linf") == []
    with pytest.raises(ValueError):
        contradictions(inputs, np.zeros(4), np.zeros(4), "l3")


def test_honest_certificates_of_a_known_boundary_never_contradict() -> None:
    rng = np.random.default_rng(0)
    points = rng.normal(size=(400, 5))
    side = points[:, 0] > 0
    distance = np.abs(points[:, 0])
    assert contradictions(points, side.astype(int), distance, "l2") == []
    assert len(contradictions(points, side.astype(int), 3 * distance, "l2")) > 0


def test_ceiling_of_a_small_set() -> None:
    inputs = np.array([[0.0], [0.1], [5.0], [9.0]])
    labels = np.array([0, 1, 0, 1])
    assert certified_accuracy_ceiling(inputs, labels, 0.01, "l2") == 1.0
    assert certified_accuracy_ceiling(inputs, labels, 0.2, "l2") == 0.75
    assert certified_accuracy_ceiling(inputs, labels, 0.06, "l2") == 0.75  # 0.1 < 2 * 0.06
    assert certified_accuracy_ceiling(inputs, labels, 0.049, "l2") == 1.0
    assert certified_accuracy_ceiling(inputs, labels, 10.0, "l2") == 0.5


@pytest.mark.slow
def test_mnist_refuses_impossible_curves(mnist: tuple[np.ndarray, np.ndarray]) -> None:
    images, labels = mnist
    share = np.bincount(labels).max() / len(labels)
    # L1 noise on [-1, 1] pixels at L-infinity size mu certifies an L1 ball of radius 784 mu. At
    # 0.4 no two classes can coexist; 72.41 % at 0.6 has been published.
    assert certified_accuracy_ceiling(images, labels, 784 * 0.4, "l1") == pytest.approx(share)
    assert certified_accuracy_ceiling(images, labels, 784 * 0.2, "l1") <= 0.51
    # Isotropic L2 noise: radius 28 mu in [-1, 1] units; one class's share at 0.6.
    assert certified_accuracy_ceiling(images, labels, 28 * 0.6, "l2") == pytest.approx(share)
    # Small sizes are possible: the check refuses nothing there.
    assert certified_accuracy_ceiling(images, labels, 0.5, "l2") == 1.0


def test_a_curve_of_perfect_certificates_is_refused(mnist: tuple[np.ndarray, np.ndarray]) -> None:
    images, labels = mnist[0][:300], mnist[1][:300]
    assert contradictions(images, labels, np.full(300, 784 * 0.4), "l1")
    assert not contradictions(images, labels, np.full(300, 0.5), "l2")
