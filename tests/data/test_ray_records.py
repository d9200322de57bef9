"""Ray Data becomes records in an order that blocks do not decide."""

from __future__ import annotations

import numpy as np
import pytest
import ray
import torch

from dpdist.data.adapters import as_records

X = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
Y = np.array([0, 1, 2, 0, 1, 2])
KEY = bytes(range(32))


@pytest.mark.slow
def test_ray_data_are_materialized_in_one_order():
    # "local": a cluster that another test started at the same time is not joined.
    ray.init("local", num_cpus=1, include_dashboard=False, ignore_reinit_error=True)
    try:
        rows = [{"x": x.tolist(), "label": int(y), "who": f"p{y}"}
                for x, y in zip(X, Y, strict=True)]  # fmt: skip
        named = {"inputs": "x", "target": "label", "unit": "who"}
        some = as_records(ray.data.from_items(rows), **named)
        turned = as_records(ray.data.from_items(rows[::-1]).repartition(3), **named)
    finally:
        ray.shutdown()
    assert some.keyed_fingerprint(KEY) == turned.keyed_fingerprint(KEY)
    found = sorted(some.batch(slice(None)).tolist())
    assert np.allclose(found, sorted(X.tolist()))
    for row in range(6):  # a record keeps its label
        place = int((torch.from_numpy(X) == some.batch(slice(row, row + 1))).all(1).nonzero())
        assert int(some.targets(slice(row, row + 1))) == Y[place]
