"""The engine and whole trainings on a device: nothing is left on the CPU, and of a step one vector
crosses over. The device is a simulated one: what a GPU computes is not shown here."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.networks import Of
from support.simulated_device import count_transfers, simulated_device
from support.training import make, parameters
from torch import Tensor, nn

from dpdist.gradients import engine as engines
from dpdist.gradients import noise as device_noise
from dpdist.gradients.clipping import FlatClipping, PerLayerClipping
from dpdist.gradients.engine import GradientEngine, cross_entropy
from dpdist.gradients.noise import add_noise
from dpdist.gradients.perturbations import (
    InputPerturbation,
    ModulePerturbation,
    ParameterPerturbation,
    Perturbation,
)
from dpdist.gradients.sampling import Blocks
from dpdist.papers.secure_sgd.shares import FixedHiddenPerturbation
from dpdist.randomness.noise_location import ModuleNoise
from dpdist.training import worker
from dpdist.training.collectives import Reducer
from dpdist.training.job import prepare

KEY, STD = bytes(range(32)), torch.linspace(0, 1, 256).view(4, 8, 8)


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2),
        nn.ConvTranspose2d(4, 2, 2, stride=2), nn.InstanceNorm2d(2, affine=True),
        nn.Conv2d(2, 2, 3, stride=2, groups=2), nn.Flatten(), nn.LazyLinear(8), nn.LayerNorm(8),
        nn.PReLU(), nn.Linear(8, 3),
    )  # fmt: skip


def series(kind: type[nn.RNNBase]) -> nn.Module:
    return Of(
        lambda m, x: m.head(m.layer(x)[0][:, -1]),
        layer=kind(5, 6, batch_first=True), head=nn.Linear(6, 3),
    )  # fmt: skip


def text() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 4, padding_idx=0), nn.Flatten(), nn.Linear(20, 3))


def batch_of(network: str, count: int) -> Tensor:
    if network == "text":
        return torch.randint(0, 7, (count, 5))
    return torch.rand(count, 1, 8, 8) if network == "images" else torch.rand(count, 4, 5)


NETWORKS = {
    "images": images, "text": text, "lstm": lambda: series(nn.LSTM),
    "conv1d": lambda: nn.Sequential(nn.Conv1d(4, 3, 2), nn.Flatten(), nn.Linear(12, 3)),
}  # fmt: skip


def built(network: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model, inputs = NETWORKS[network](), batch_of(network, 12)
    with torch.no_grad():
        model(inputs)  # lazy layers
    return model, inputs, torch.randint(0, 3, (len(inputs),))


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the engine's self-check, which has a test of its own."""
    monkeypatch.setattr(engines, "check_example_independence", lambda *_: True)


def on_both(network: str, **options: Any) -> tuple[Tensor, Tensor]:
    """The clipped sums of the CPU and of the device."""
    model, inputs, targets = built(network)
    augmentation, make_draws = options.pop("augmentation", None), options.pop("draws", Perturbation)
    sums = []
    for device in (torch.device("cpu"), simulated_device()):
        there = copy.deepcopy(model).to(device)
        engine = GradientEngine(
            there,
            cross_entropy,
            perturbation=make_draws(),
            **{"clipping": FlatClipping(0.5)} | options,
        )
        engine.augmentation = augmentation
        found = engine.clipped_sum(
            inputs.to(device), targets.to(device), draw_key=KEY, record_ids=torch.arange(12) * 3
        )
        assert found.flat.device == device and not found.nonfinite
        sums.append(found.flat.cpu())
    return sums[0], sums[1]


def same(found: tuple[Tensor, Tensor]) -> None:
    assert float((found[0] - found[1]).norm()) <= 1e-5 * float(found[0].norm())


@pytest.mark.parametrize("network", NETWORKS)
def test_every_rule_gives_the_sum_of_the_cpu(network: str, unchecked) -> None:
    same(on_both(network, micro_batch=5))


def test_the_self_check_works_there() -> None:
    same(on_both("conv1d", micro_batch=5))


@pytest.mark.parametrize(
    "options",
    [
        {"clipping": PerLayerClipping(1.0)},
        {"blocks": Blocks(2, 8), "micro_batch": 4},
        {"vmap": True},
        {"draws": lambda: ParameterPerturbation(2, 0.1, input_std=0.1)},
        {"draws": lambda: InputPerturbation(3, torch.full((1, 8, 8), 0.1))},
        {"draws": lambda: FixedHiddenPerturbation("0", STD, KEY)},
        {"draws": lambda: ModulePerturbation(2, ModuleNoise({"0": STD, "2": 0.1}, "relative"))},
    ],
    ids="+".join,
)  # fmt: skip
def test_every_way_of_clipping_and_drawing_gives_it(options: dict[str, Any], unchecked) -> None:
    same(on_both("images", **options))


HGM = {"name": "hgm-cnn", "options": {"filters": [3], "kernels": [3], "strides": [2], "dense": 6}}
SHORT = {"batch_size": 10, "steps": 2, "learning_rate": 0.1}
METHODS: dict[str, dict[str, Any]] = {
    "dp-sgd": {
        "training": SHORT | {"optimizer": "adam", "ema": 0.9, "crop": 1}, "model": "linear"
    },
    "paid": {"method": {"name": "secure-sgd", "redistribution": {"source": "paid"}}, "model": HGM},
    "functional": {
        "method": {"name": "functional", "rounds": 1},
        "model": {"name": "scattering", "options": {"widths": [1.0], "stride": 1, "cosines": 3}},
    },
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_a_training_on_a_device_is_the_one_on_a_cpu(method, tmp_path, unchecked) -> None:
    found = []
    for device in (torch.device("cpu"), simulated_device()):
        sections = {
            "data": {"name": "digits", "max_train": 30}, "training": SHORT, **METHODS[method]
        }  # fmt: skip
        recipe, folder = make(tmp_path, device.type, **sections)
        worker.run_training(prepare(recipe, folder, "test"), Reducer(0, 1, device))
        found.append(parameters(folder))
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-5)


def test_noise_drawn_there_is_the_cpu_s(tmp_path, monkeypatch, unchecked) -> None:
    """The sum goes down, for its name in the ledger, and no vector comes up: the same parameters,
    to the bit, as with the CPU's noise."""
    monkeypatch.setattr(GradientEngine, "measure_moves", lambda *_: 0.0)
    device, found = simulated_device(), []
    training = {"batch_size": 10, "steps": 3, "learning_rate": 0.1, "optimizer": "adam"}
    for where in ("host", "device"):
        recipe, folder = make(
            tmp_path, where, data={"name": "digits", "max_train": 100}, training=training,
            resources={"noise": where}, model="linear",
        )  # fmt: skip
        steps, original = [], worker.Loop.take

        def step(self, *arguments, steps=steps, original=original):
            with count_transfers() as seen:
                taken = original(self, *arguments)
            steps.append((seen, self.step.engine.size))
            return taken

        with monkeypatch.context() as patch:
            patch.setattr(worker.Loop, "take", step)
            worker.run_training(prepare(recipe, folder, "test"), Reducer(0, 1, device))
        seen, size = steps[1]
        found.append(parameters(folder))
        assert seen.down.count((size,)) == 1
        assert seen.up.count((size,)) == (where == "host")
    assert torch.equal(*found)


def test_the_device_s_generator_makes_the_cpu_s_numbers() -> None:
    """In shards, and over its own pieces of them; the key alone comes up, once for each."""
    device = simulated_device()
    device_noise.check_device_noise(device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_noise, "_DEVICE_PIECE", 48)
        total = torch.linspace(-2, 2, 1000, dtype=torch.float64)
        whole = add_noise(total.numpy(), KEY, 0.7)
        for low, high in ((0, 1000), (0, 385), (385, 386), (386, 1000)):
            mine = total[low:high].to(device)
            with count_transfers() as seen:
                found = device_noise.add_device_noise(mine, KEY, 0.7, low)
            assert set(seen.up) == {(16,)} and not seen.down
            assert torch.equal(found.cpu(), torch.from_numpy(whole[low:high]))
