"""Data sets of the tests as a user has them: a folder of Parquet files, one for each split."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image


def png(pixels: np.ndarray) -> bytes:
    """Return an image file of these pixels: uint8 (H, W) or (H, W, 3)."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def write_split(folder: Path, split: str = "train", **columns: Any) -> Path:
    """Write a split with these columns into a data set's folder; return its file.

    A row of a two-dimensional array is a list of numbers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    listed = {
        name: list(column) if getattr(column, "ndim", 1) == 2 else column
        for name, column in columns.items()
    }
    path = folder / f"{split}.parquet"
    pq.write_table(pa.table(listed), path)
    return path


def write_images(folder: Path, split: str, images: np.ndarray, labels: Any = None) -> Path:
    """Write a split of images, uint8 (N, H, W) or (N, H, W, 3), as PNG files in a column `image`.

    labels: 0, 1, 2, 0, ... by default.
    """
    labels = np.arange(len(images)) % 3 if labels is None else labels
    return write_split(folder, split, image=[png(image) for image in images], label=labels)
