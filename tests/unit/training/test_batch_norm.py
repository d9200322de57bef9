"""BatchNorm in runs without privacy: torch's own gradient, refused wherever something is proved."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.training import KEY, make, train, train_and_crash
from torch import nn

from dpdist import models
from dpdist.core.errors import UserError
from dpdist.gradients.clipping import FlatClipping, NoClipping
from dpdist.gradients.engine import GradientEngine, cross_entropy
from dpdist.models import ModelSpec
from dpdist.papers.residual.whole_batch import WholeBatchEngine
from dpdist.runs.folder import RunFolder
from dpdist.training.job import prepare

OPEN = {
    "noise_multiplier": 0, "clipping": "none", "delta": 1e-5, "run_key": KEY,
}  # fmt: skip
SMALL = {"name": "resnet-rp", "options": {"width": 8, "norm": "batch"}}


def network() -> nn.Module:
    return models.initialize(
        ModelSpec("resnet-rp", (1, 8, 8), 10, {"width": 8, "norm": "batch"}), 0
    )


def run(tmp: Path, name: str = "run", **more: Any) -> tuple[Any, RunFolder]:
    base: dict[str, Any] = {
        "data": {"name": "digits", "max_train": 300}, "model": SMALL, "privacy": OPEN,
        "method": {"name": "whole-batch"},
        "training": {"batch_size": 60, "steps": 4, "learning_rate": 0.1},
    }  # fmt: skip
    return make(tmp, name, **{**base, **more})


def test_the_sum_is_autograd_s_gradient_of_the_whole_batch():
    engine = WholeBatchEngine(network(), cross_entropy, clipping=NoClipping())
    x, y = torch.rand(24, 1, 8, 8), torch.arange(24) % 10
    found = engine.clipped_sum(x, y)
    own = network().train()
    loss = nn.functional.cross_entropy(own(x), y, reduction="sum")
    loss.backward()  # type: ignore[no-untyped-call]
    expected = torch.cat([p.grad.flatten() for p in own.parameters() if p.grad is not None])
    assert torch.allclose(found.flat.float(), expected, rtol=1e-4, atol=1e-5)
    assert found.loss_sum == pytest.approx(float(loss.detach()), rel=1e-5) and found.examples == 24
    found_statistics = engine.written_buffers
    for name, buffer in own.named_buffers():
        assert torch.allclose(found_statistics[name], buffer, atol=1e-6)
    assert len(found_statistics) == 21 and math.isinf(engine.sensitivity)
    empty = engine.clipped_sum(x[:0], y[:0])
    assert empty.examples == 0 and not empty.flat.any()


def test_no_engine_that_clips_takes_it():
    for clipping in (FlatClipping(1.0), NoClipping()):
        with pytest.raises(UserError, match="normalizes"):
            GradientEngine(network(), cross_entropy, clipping=clipping)
    with pytest.raises(UserError, match=r"privacy\.clipping"):
        WholeBatchEngine(network(), cross_entropy, clipping=FlatClipping(1.0))


def test_statistics_survive_a_crash(tmp_path, monkeypatch):
    checkpoints = {"checkpoint_seconds": 1e-9}
    recipe, folder = run(tmp_path, "whole", resources=checkpoints)
    assert prepare(recipe, folder, "test").plan.guarantee().epsilon == math.inf
    expected = train(recipe, folder)
    recipe, again = run(tmp_path, "cut", resources=checkpoints)
    train_and_crash(recipe, again, monkeypatch, 2)
    assert torch.equal(train(recipe, again), expected)
    whole, cut = (dict(models.load(f.model_folder).named_buffers()) for f in (folder, again))
    for name, buffer in whole.items():
        assert torch.equal(buffer, cut[name])
