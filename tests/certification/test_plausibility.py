from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pytest
from support.plausibility import certified_accuracy_ceiling

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
