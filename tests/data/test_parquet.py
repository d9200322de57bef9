"""Reading Parquet: both layouts, and every complaint with file and row."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from support.datasets import png, write_split

from dpdist.core.errors import UserError
from dpdist.data import DataSource, load, split_by_id
from dpdist.data.record_hashes import to_model_inputs


def images(count: int = 6, side: int = 5) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (side, side), dtype=np.uint8) for _ in range(count)]


def write(root, name="shapes", split="train", *, rows=None, labels=None, image=None):
    rows = [{"bytes": png(p), "path": "x.png"} for p in images()] if rows is None else rows
    labels = list(range(len(rows))) if labels is None else labels
    write_split(root / name, split, **{image or "image": rows}, label=labels)


def test_images_round_trip(tmp_path):
    write(tmp_path)
    dataset = load(DataSource("shapes", 6, tmp_path), "train")
    assert dataset.input_shape == (1, 5, 5)
    assert np.array_equal(dataset.inputs[:, 0], np.stack(images()))
    assert dataset.labels.tolist() == list(range(6))
    batch = dataset.batch(np.array([3, 1]))
    assert batch.dtype.is_floating_point and float(batch.max()) <= 1
    assert np.allclose(batch[0, 0].numpy() * 255, images()[3])


def test_shards_are_one_data_set_and_cache_is_used(tmp_path):
    write(tmp_path, split="train-00000-of-00002")
    write(tmp_path, split="train-00001-of-00002")
    source = DataSource("shapes", 6, tmp_path)
    first = load(source, "train")
    assert len(first) == 12
    assert load(source, "train").folder == first.folder


def test_some_labels_are_a_data_set_of_their_own(tmp_path):
    """Renumbered in the order asked for; no other record shows in anything, its number included."""
    write(tmp_path, labels=[3, 0, 5, 3, 1, 5])
    source = DataSource("shapes", 6, tmp_path, labels=(5, 3))
    chosen = load(source, "train")
    assert (chosen.classes, chosen.labels.tolist()) == (2, [1, 0, 1, 0])
    assert np.array_equal(chosen.inputs[:, 0], np.stack(images())[[0, 2, 3, 5]])
    assert chosen.folder.stat().st_mode & 0o077 == 0
    first = chosen.first(3)  # not a part: it is whole
    assert len(first) == 3
    kept = [image for place, image in enumerate(images()) if place in (0, 2, 3, 5)]
    rows = [{"bytes": png(image), "path": ""} for image in kept]
    write(tmp_path, name="alone", rows=rows, labels=[1, 0, 1, 0])
    alone = load(DataSource("alone", 2, tmp_path), "train")
    assert chosen.fingerprint == alone.fingerprint
    with pytest.raises(UserError, match=r"data\.labels"):
        load(DataSource("shapes", 6, tmp_path, labels=(2, 4)), "train")


def test_dataset_pickles_small_and_first_is_another_data_set(tmp_path):
    write(tmp_path)
    dataset = load(DataSource("shapes", 6, tmp_path), "train")
    assert dataset.inputs is not None
    copy = pickle.loads(pickle.dumps(dataset))
    assert len(pickle.dumps(dataset)) < 1000
    assert np.array_equal(copy.inputs, dataset.inputs)
    part = dataset.first(2)
    assert len(part) == len(pickle.loads(pickle.dumps(part))) == 2
    assert part.fingerprint != dataset.fingerprint


def test_digits_are_built_in_and_the_split_is_stable():
    train, test = (load(DataSource("digits", 10), split) for split in ("train", "test"))
    assert len(train) + len(test) == 1797
    assert 300 < len(test) < 420
    assert train.inputs.dtype == np.uint8 and train.inputs.max() == 255


def test_split_by_id_never_moves_other_records():
    sides = split_by_id(1000, 0.3, "salt")
    assert np.array_equal(split_by_id(999, 0.3, "salt"), sides[:999])
    assert not np.array_equal(split_by_id(1000, 0.3, "other"), sides)
    # Binomial(1000, 0.3): outside 200..400 with probability below 1e-11
    assert 200 < sides.sum() < 400


@pytest.mark.slow
def test_real_mnist(data_root):
    test = load(DataSource("mnist", 10, data_root), "test")
    assert len(test) == 10_000 and test.input_shape == (1, 28, 28)
    # The class counts and the mean pixel of the original files.
    counts = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert np.bincount(test.labels).tolist() == counts
    assert abs(float(test.inputs.mean()) / 255 - 0.1325) < 5e-4


def test_bytes_become_the_same_floats_as_in_torch():
    values = np.arange(256, dtype=np.uint8).repeat(5)  # more than a vector's width, and a rest
    assert np.array_equal(
        to_model_inputs(values), torch.from_numpy(values).float().div_(255).numpy()
    )
    floats = np.array([0.25, -0.0], dtype=np.float32)
    assert to_model_inputs(floats) is floats
