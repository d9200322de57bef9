"""Synthetic strokes and scenes follow from their seed alone and have distinguishable classes."""

from __future__ import annotations

import builtins

import numpy as np
import pytest

from dpdist import data
from dpdist.core.errors import UserError
from dpdist.data import synthetic
from dpdist.data.registry import SYNTHETIC_RECORDS

DRAW = {"strokes": synthetic.draw_strokes, "scenes": synthetic.draw_scenes}
BOTH = pytest.mark.parametrize(
    ("name", "classes", "shape"), [("strokes", 200, (1, 28, 28)), ("scenes", 100, (3, 32, 32))]
)


@pytest.mark.slow
@BOTH
def test_they_follow_from_the_seed_alone(name, classes, shape, monkeypatch):
    draw = DRAW[name]

    def refused(*arguments, **options):
        raise AssertionError(f"{name} read {arguments}")

    draw(1, seed=0)  # numpy's own parts are imported where they are first used
    monkeypatch.setattr(builtins, "open", refused)
    monkeypatch.setattr(builtins, "__import__", refused)
    np.random.seed(1)
    images, labels = draw(300, seed=0)
    np.random.seed(2)
    again, _ = draw(300, seed=0)
    others, same_labels = draw(300, seed=1)
    monkeypatch.undo()
    assert images.shape == (300, *shape) and images.dtype == np.uint8
    assert np.array_equal(images, again) and np.array_equal(labels, same_labels)
    assert not (images == others).all((1, 2, 3)).any()
    assert not (images[:100] == images[100:200]).all((1, 2, 3)).any()
    assert set(labels) == set(range(classes))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least"), [("strokes", 0.5), ("scenes", 0.12)])
def test_the_classes_are_the_same_for_every_seed(name, least):
    first, labels = DRAW[name](2000, seed=0, classes=20)
    second, _ = DRAW[name](400, seed=1, classes=20)
    means = np.stack([first[labels == sign].mean(0).ravel() for sign in range(20)])
    distances = np.linalg.norm(second.reshape(400, 1, -1) / 1.0 - means, axis=2)
    assert (distances.argmin(1) == labels[:400]).mean() > least  # chance: 0.05


@pytest.mark.slow
@BOTH
def test_they_are_a_data_set_by_name(name, classes, shape, monkeypatch, tmp_path):
    monkeypatch.setenv("DPDIST_CACHE", str(tmp_path))
    monkeypatch.setitem(SYNTHETIC_RECORDS, name, 400)
    splits = [data.load(data.DataSource(name, classes), s) for s in ("train", "test")]
    assert [len(split) for split in splits] == [400, 40]
    assert splits[0].name == f"{name}/train" and splits[0].input_shape == shape
    assert splits[0].classes == classes
    assert not np.isin(splits[1].hashes, splits[0].hashes).any()
    with pytest.raises(UserError, match=r"data\.classes: "):
        data.load(data.DataSource(name, 10), "train")
