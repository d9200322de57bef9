from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from dpdist import models
from dpdist.certification.noise import Gaussian
from dpdist.certification.worker import NoiseBankCounter, split_first_layer
from dpdist.randomness import keys
from dpdist.randomness.keys import AesWords, StreamKeys

pytestmark = pytest.mark.guarantee

SOURCE = StreamKeys("test", "seed", "model", "data", "gaussian", 0.5)


def model(name: str = "mlp", **changes: object) -> nn.Module:
    spec = models.ModelSpec(name, (1, 6, 6), 3, **changes)  # type: ignore[arg-type]
    return models.initialise(spec, 1).eval()


def bank(network: nn.Module, *, evict: bool = True) -> NoiseBankCounter:
    parts = split_first_layer(network)
    assert parts is not None
    return NoiseBankCounter(
        *parts, "frozen", Gaussian(0.5), SOURCE, 3, [(200, 1, 6, 6), (50, 1, 6, 6)], evict=evict
    )


@pytest.mark.parametrize(
    "network",
    [model(), model(mean=(0.3,), std=(0.5,)), model("linear")],
)
def test_the_split_is_the_model(network: nn.Module) -> None:
    noise, inputs = torch.randn(200, 1, 6, 6), torch.rand(200, 1, 6, 6)
    with torch.no_grad():
        expected = network(noise + inputs).argmax(1)
        parts = split_first_layer(network)
        assert parts is not None
        assert torch.allclose(parts[1](parts[0](inputs)), network(inputs), atol=1e-5)
    assert (bank(network).classify_noisy(noise, inputs) == expected).all()


def test_other_structures_are_left_alone() -> None:
    assert split_first_layer(nn.Sequential(nn.ReLU(), nn.Linear(3, 2))) is None
    assert split_first_layer(nn.Sequential(nn.Flatten())) is None
    assert split_first_layer(model("small-cnn")) is None


@pytest.mark.parametrize("evict", [True, False])
def test_counts_are_those_of_the_same_noise_on_every_input(evict: bool) -> None:
    network, it = model(), bank(model(), evict=evict)
    for index in range(3):
        x = torch.rand(1, 6, 6, generator=torch.Generator().manual_seed(index))
        for block in (0, 1, 0):
            noise = torch.empty(200, 1, 6, 6)
            key = SOURCE.key(None, keys.ESTIMATE, block)
            Gaussian(0.5).draw(AesWords().fill(key, noise.numel()), noise.numpy().reshape(-1))
            with torch.no_grad():
                expected = torch.bincount(network(noise + x).argmax(1), minlength=3)
            got = it.histogram(x, index, keys.ESTIMATE, block, 200, 200)
            assert np.abs(got - expected.numpy()).max() <= 1  # a tie in the last bits at most


def test_kept_blocks_stay_within_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from dpdist.certification import worker

    x = torch.rand(1, 6, 6)
    for evict in (True, False):
        it = bank(model(), evict=evict)
        one = it.histogram(x, 0, keys.ESTIMATE, 0, 200, 200)
        monkeypatch.setattr(worker, "_CACHE_BYTES", 2 * it._kept_bytes)
        for block in range(6):
            it.histogram(x, 0, keys.ESTIMATE, block, 200, 200)
        assert len(it._cache) <= 2 and it._kept_bytes <= worker._CACHE_BYTES
        assert (it.histogram(x, 0, keys.ESTIMATE, 0, 200, 200) == one).all()
        monkeypatch.undo()


def test_the_certificate_of_one_input_is_as_honest_as_ever() -> None:
    # Counts over 40 blocks against an independent estimate: false failure 1e-4.
    network, it = model(), bank(model())
    x = torch.rand(1, 6, 6, generator=torch.Generator().manual_seed(9))
    counts = sum(it.histogram(x, 0, keys.ESTIMATE, b, 200, 200) for b in range(40))
    noise = 0.5 * torch.randn(8000, 1, 6, 6, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        other = torch.bincount(network(noise + x).argmax(1), minlength=3).numpy()
    kept = (counts + other) > 0  # type: ignore[operator]
    assert stats.chi2_contingency(np.stack([counts, other])[:, kept]).pvalue > 1e-4
