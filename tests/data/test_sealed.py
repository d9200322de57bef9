"""A decoded split that was damaged in the cache is refused, and made again once it is removed."""

from __future__ import annotations

import os
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.folder_contents import empty, gone, half

from dpdist.core.errors import UserError
from dpdist.data import record_hashes
from dpdist.data.parquet import Columns, load_split

FILES = ("inputs.npy", "labels.npy", "meta.json")


@pytest.fixture
def made(tmp_path):
    """Makes or opens the split, which lies in the cache afterwards."""
    values = [float(n) for n in range(20)]
    table = pa.table({"x": values, "y": values[::-1], "label": [n % 3 for n in range(20)]})
    pq.write_table(table, tmp_path / "train.parquet")
    columns = Columns(features=("x", "y"))

    def load():
        return load_split([tmp_path / "train.parquet"], "d/train", 3, columns, tmp_path / "cache")

    return load


def one_bit(path):
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 4
    path.write_bytes(raw)


def a_pickle(path):
    path.write_bytes(b"\x80\x04]." * 20)


@pytest.mark.parametrize("damage", [gone, empty, half, one_bit, a_pickle])
@pytest.mark.parametrize("name", [*FILES, "sums.json", record_hashes.HASHES_FILE])
def test_a_damaged_file_is_refused(made, name, damage):
    split = made()
    kept = split.hashes.copy()
    damage(split.folder / name)
    if damage is gone and name == record_hashes.HASHES_FILE:  # made again of the inputs
        assert np.array_equal(made().hashes, kept)
        return
    with pytest.raises(UserError, match="damaged") as caught:
        _ = made().hashes
    assert "\n" not in str(caught.value) and str(split.folder) in str(caught.value)
    shutil.rmtree(split.folder)
    again = made()
    assert (
        np.array_equal(again.hashes, kept) and again.stored_fingerprint == split.stored_fingerprint
    )


def test_a_copied_cache_is_the_same(made):
    """Other times, the same content."""
    folder = made().folder
    for path in folder.iterdir():
        os.utime(path, ns=(1, 1))
    assert len(made()) == 20


def test_another_size_is_seen_though_the_time_is_the_same(made):
    labels = made().folder / "labels.npy"
    before = labels.stat()
    labels.write_bytes(labels.read_bytes() + b"0")
    os.utime(labels, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(UserError, match=r"labels\.npy:"):
        made()
