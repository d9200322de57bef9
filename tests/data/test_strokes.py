"""Drawn strokes: the same from the same seed, of no data set, and signs that can be told apart."""

from __future__ import annotations

import builtins

import numpy as np
import pytest

from dpdist import data
from dpdist.base.errors import UserError
from dpdist.data import catalog, strokes


def test_they_follow_from_the_seed_alone(monkeypatch):
    def refused(*arguments, **options):
        raise AssertionError(f"strokes read {arguments}")

    monkeypatch.setattr(builtins, "open", refused)
    monkeypatch.setattr(builtins, "__import__", refused)
    np.random.seed(1)
    images, labels = strokes.invented(300, seed=0)
    np.random.seed(2)
    again, _ = strokes.invented(300, seed=0)
    others, same_labels = strokes.invented(300, seed=1)
    monkeypatch.undo()
    assert images.shape == (300, 1, 28, 28) and images.dtype == np.uint8
    assert np.array_equal(images, again) and np.array_equal(labels, same_labels)
    assert not (images == others).all((1, 2, 3)).any()
    assert set(labels) == set(range(strokes.CLASSES)) and images.max((1, 2, 3)).min() == 255
    assert 0.05 < (images > 127).mean() < 0.3  # strokes, neither dots nor blots


def test_the_signs_are_the_same_for_every_seed():
    first, labels = strokes.invented(400, seed=0, classes=20)
    second, _ = strokes.invented(400, seed=1, classes=20)
    means = np.stack([first[labels == sign].mean(0).ravel() for sign in range(20)])
    distances = np.linalg.norm(second.reshape(400, 1, -1) - means, axis=2)
    assert (distances.argmin(1) == labels).mean() > 0.5  # chance: 0.05


def test_they_are_a_data_set_by_name(monkeypatch, tmp_path):
    monkeypatch.setenv("DPDIST_CACHE", str(tmp_path))
    monkeypatch.setattr(catalog, "RECORDS", 400)
    splits = [data.load(data.Source("strokes", strokes.CLASSES), s) for s in ("train", "test")]
    assert [len(split) for split in splits] == [400, 40]
    assert splits[0].name == "strokes/train" and splits[0].input_shape == (1, 28, 28)
    assert not np.isin(splits[1].hashes, splits[0].hashes).any()
    with pytest.raises(UserError, match=r"data\.classes: strokes has 200, got 10"):
        data.load(data.Source("strokes", 10), "train")
