"""One split of a data set: memory-mapped inputs and labels, cheap to hand to a worker."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dpdist.errors import UserError


@dataclass(frozen=True)
class Dataset:
    """A split stored as inputs.npy, labels.npy and meta.json in `folder`; only the path is pickled.

    name: "mnist/train". inputs: (N, C, H, W) uint8 images, or (N, features) float32.
    labels: (N,) int64 in 0..classes-1. fingerprint: hex digest of the records, in order. limit: use
    the first records only. largest_group: most records of one group, when a group column is named.
    """

    folder: Path
    name: str
    classes: int
    fingerprint: str
    limit: int | None = None
    largest_group: int | None = None

    @staticmethod
    def open(folder: Path) -> Dataset:
        meta = json.loads((folder / "meta.json").read_text())
        return Dataset(
            folder,
            meta["name"],
            meta["classes"],
            meta["fingerprint"],
            largest_group=meta.get("largest_group"),
        )

    def first(self, limit: int | None) -> Dataset:
        """The first `limit` records as a data set of its own (None: all)."""
        if limit is None or limit >= len(self):
            return self
        return replace(self, limit=limit, fingerprint=f"{self.fingerprint}-first-{limit}")

    @cached_property
    def inputs(self) -> np.ndarray:
        return np.load(self.folder / "inputs.npy", mmap_mode="r", allow_pickle=False)[: self.limit]

    @cached_property
    def labels(self) -> np.ndarray:
        return np.load(self.folder / "labels.npy", mmap_mode="r", allow_pickle=False)[: self.limit]

    def __getstate__(self) -> dict:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.inputs.shape[1:])

    def batch(self, indices: np.ndarray | slice) -> Tensor:
        """Inputs as float32 (B, *input_shape); images are divided by 255 into [0, 1]."""
        rows = np.ascontiguousarray(self.inputs[indices])
        tensor = torch.from_numpy(rows if rows.flags.writeable else rows.copy())
        return tensor.float().div_(255) if rows.dtype == np.uint8 else tensor

    def targets(self, indices: np.ndarray | slice) -> Tensor:
        """Labels as int64 (B,)."""
        return torch.from_numpy(np.array(self.labels[indices]))


def check_same_kind(train: Dataset, test: Dataset) -> None:
    """Raise UserError unless the two splits can be used with one model, and are two.

    Scores on the test split are published, so it must not be the protected one.
    """
    if train.fingerprint.partition("-first-")[0] == test.fingerprint:
        raise UserError(
            f"{train.name} and {test.name} hold the same records: scores on private records would "
            "be published"
        )
    if train.input_shape != test.input_shape:
        raise UserError(
            f"{train.name} has inputs of shape {train.input_shape}, {test.name} of "
            f"{test.input_shape}"
        )
