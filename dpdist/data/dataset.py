"""One split of a data set: memory-mapped inputs and labels, cheap to hand to a worker."""

from __future__ import annotations

import hashlib
import json
import os
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
    the first records only; share: of these, the records whose hash lies in [low, high).
    largest_group: most records of one group, when a group column is named.
    """

    folder: Path
    name: str
    classes: int
    fingerprint: str
    limit: int | None = None
    largest_group: int | None = None
    share: tuple[float, float] | None = None

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

    def part(self, low: float, high: float) -> Dataset:
        """The records whose hash lies in [low, high), 0 <= low < high <= 1: about that share.

        A record's hash depends on its own content alone: adding or removing one record moves no
        other one between parts (equal records lie in the same part).
        """
        if (low, high) == (0.0, 1.0):
            return self
        fingerprint = f"{self.fingerprint}-part-{low:.17g}-{high:.17g}"
        return replace(self, share=(low, high), fingerprint=fingerprint)

    @cached_property
    def _stored(self) -> np.ndarray:
        return np.load(self.folder / "inputs.npy", mmap_mode="r", allow_pickle=False)[: self.limit]

    @cached_property
    def _rows(self) -> np.ndarray | None:
        """Positions of this part's records among those stored; None for all of them."""
        if self.share is None:
            return None
        hashes = _hashes(self.folder)[: self.limit]
        return np.flatnonzero((hashes >= self.share[0]) & (hashes < self.share[1]))

    @property
    def inputs(self) -> np.ndarray:
        """The inputs as stored; a copy for a part by hash."""
        return self._stored if self._rows is None else self._stored[self._rows]

    @property
    def hashes(self) -> np.ndarray:
        """A number in [0, 1) for each record, from its content alone: float64 (N,)."""
        hashes = _hashes(self.folder)[: self.limit]
        return hashes if self._rows is None else hashes[self._rows]

    @cached_property
    def labels(self) -> np.ndarray:
        path = self.folder / "labels.npy"
        stored = np.load(path, mmap_mode="r", allow_pickle=False)[: self.limit]
        return stored if self._rows is None else stored[self._rows]

    def __getstate__(self) -> dict:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self._stored.shape[1:])

    def batch(self, indices: np.ndarray | slice) -> Tensor:
        """Inputs as float32 (B, *input_shape); images are divided by 255 into [0, 1]."""
        chosen = indices if self._rows is None else self._rows[indices]
        rows = np.ascontiguousarray(self._stored[chosen])
        tensor = torch.from_numpy(rows if rows.flags.writeable else rows.copy())
        return tensor.float().div_(255) if rows.dtype == np.uint8 else tensor

    def targets(self, indices: np.ndarray | slice) -> Tensor:
        """Labels as int64 (B,)."""
        return torch.from_numpy(np.array(self.labels[indices]))


def base_fingerprint(fingerprint: str) -> str:
    """The fingerprint of the whole stored split that a data set is a part of."""
    return fingerprint.partition("-first-")[0].partition("-part-")[0]


def _hashes(folder: Path) -> np.ndarray:
    """A number in [0, 1) for each stored record, from its content alone; kept beside the data."""
    path = folder / "hashes.npy"
    if not path.exists():
        inputs = np.load(folder / "inputs.npy", mmap_mode="r", allow_pickle=False)
        labels = np.load(folder / "labels.npy", mmap_mode="r", allow_pickle=False)
        found = np.empty(len(labels), dtype=np.uint64)
        for record, label in enumerate(labels):
            digest = hashlib.blake2b(digest_size=8, person=b"dpdist.part")
            digest.update(np.ascontiguousarray(inputs[record]).tobytes())
            digest.update(int(label).to_bytes(8, "little"))
            found[record] = int.from_bytes(digest.digest(), "little")
        partial = folder / f".hashes.{os.getpid()}.npy"
        np.save(partial, (found >> np.uint64(11)) * 2.0**-53)
        os.replace(partial, path)
    return np.load(path, allow_pickle=False)


def check_same_kind(train: Dataset, test: Dataset) -> None:
    """Raise UserError unless the two splits can be used with one model, and are two.

    Scores on the test split are published, so it must not be the protected one.
    """
    if base_fingerprint(train.fingerprint) == test.fingerprint:
        raise UserError(
            f"{train.name} and {test.name} hold the same records: scores on private records would "
            "be published"
        )
    if train.input_shape != test.input_shape:
        raise UserError(
            f"{train.name} has inputs of shape {train.input_shape}, {test.name} of "
            f"{test.input_shape}"
        )
