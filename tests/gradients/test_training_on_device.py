"""The engine and whole trainings on a device: nothing is left on the CPU, and of a step one vector
crosses over. The device is a simulated one: what a GPU computes is not shown here."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from support.simulated_device import count_transfers, simulated_device
from support.training import make, parameters
from torch import Tensor, nn

from dpdist.gradients import engine as engines
from dpdist.gradients import noise as device_noise
from dpdist.gradients.clipping import AutomaticClipping, FlatClipping, PerLayerClipping
from dpdist.gradients.engine import GradientEngine, cross_entropy
from dpdist.gradients.noise import add_noise
from dpdist.gradients.perturbations import (
    CropAndFlip,
    HiddenPerturbation,
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


class Scale(nn.Module):
    """A layer without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Last(nn.Module):
    def __init__(self, recurrent: nn.Module) -> None:
        super().__init__()
        self.recurrent = recurrent

    def forward(self, x: Tensor) -> Tensor:
        return self.recurrent(x)[0][:, -1]


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2),
        nn.ConvTranspose2d(4, 2, 2, stride=2), nn.InstanceNorm2d(2, affine=True),
        nn.Conv2d(2, 2, 3, stride=2, groups=2), nn.Flatten(), nn.LazyLinear(8), nn.LayerNorm(8),
        Scale(), nn.Linear(8, 3),
    )  # fmt: skip


def series(kind: type[nn.RNNBase]) -> nn.Module:
    return nn.Sequential(Last(kind(5, 6, batch_first=True)), nn.Linear(6, 3))


def text() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 4, padding_idx=0), nn.Flatten(), nn.Linear(20, 3))


def batch_of(network: str, count: int) -> Tensor:
    if network == "text":
        return torch.randint(0, 7, (count, 5))
    return torch.rand(count, 1, 8, 8) if network == "images" else torch.rand(count, 4, 5)


NETWORKS = {
    "images": images, "text": text, "lstm": lambda: series(nn.LSTM), "gru": lambda: series(nn.GRU),
    "conv1d": lambda: nn.Sequential(nn.Conv1d(4, 3, 2), nn.Flatten(), nn.Linear(12, 3)),
}  # fmt: skip


def few(names: Iterable[str], *quick: str) -> list[Any]:
    """The quick ones; the others with the long tests."""
    return [pytest.param(n, marks=[pytest.mark.slow] * (n not in quick)) for n in names]


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


@pytest.mark.parametrize("network", few(NETWORKS, "text", "conv1d"))
def test_the_self_check_works_there(network: str) -> None:
    same(on_both(network, micro_batch=5))


@pytest.mark.parametrize(
    "options",
    [
        {"clipping": PerLayerClipping(1.0)},
        {"clipping": AutomaticClipping(1.0)},
        {"blocks": Blocks(2, 8), "micro_batch": 4},
        {"vmap": True},
        {"augmentation": CropAndFlip(1, True)},
        {"draws": lambda: ParameterPerturbation(2, 0.1, input_std=0.1)},
        {"draws": lambda: ParameterPerturbation(2, 0.1, per_example=True)},
        {"draws": lambda: InputPerturbation(3, torch.full((1, 8, 8), 0.1))},
        {"draws": lambda: HiddenPerturbation(2, "0", STD)},
        {"draws": lambda: FixedHiddenPerturbation("0", STD, KEY)},
        {"draws": lambda: ModulePerturbation(2, ModuleNoise({"0": STD, "2": 0.1}, "relative"))},
    ],
    ids="+".join,
)  # fmt: skip
def test_every_way_of_clipping_and_drawing_gives_it(options: dict[str, Any], unchecked) -> None:
    same(on_both("images", **options))


def test_a_gradient_that_is_not_finite_counts_as_zero_there_too(unchecked) -> None:
    model, inputs, targets = built("images")
    inputs[3] = torch.nan
    engine = GradientEngine(model.to(simulated_device()), cross_entropy, clipping=FlatClipping(0.5))
    found = engine.clipped_sum(inputs.to(simulated_device()), targets.to(simulated_device()))
    assert found.nonfinite == 1 and bool(found.flat.isfinite().all())


def test_nothing_but_numbers_comes_back_from_a_clipped_sum(unchecked) -> None:
    """However many records there are: one number for each pass, and one for all losses."""
    model, inputs, targets = built("images")
    device = simulated_device()
    engine = GradientEngine(
        model.to(device), cross_entropy, clipping=FlatClipping(0.5), micro_batch=4
    )
    inputs, targets = inputs.to(device), targets.to(device)
    engine.clipped_sum(inputs, targets)
    with count_transfers() as seen:
        engine.clipped_sum(inputs, targets)
    assert seen.waits == 3 and seen.down == [(3,)]
    assert all(len(shape) == 1 for shape in seen.up)  # which rows are in a pass


def test_a_forgotten_tensor_is_found() -> None:
    device = simulated_device()
    with pytest.raises(RuntimeError, match="device"):
        torch.zeros(2, device=device) + torch.zeros(2)
    with pytest.raises(TypeError):
        torch.zeros(2, device=device).numpy()


OPEN = {
    "noise_multiplier": 0, "clipping": "none", "delta": 1e-4, "adjacency": "replace-one",
    "run_key": "5a" * 32,
}  # fmt: skip
HGM = {"name": "hgm-cnn", "options": {"filters": [3], "kernels": [3], "strides": [2], "dense": 6}}
SHORT = {"batch_size": 10, "steps": 2, "learning_rate": 0.1}
METHODS: dict[str, dict[str, Any]] = {
    "dp-sgd": {"training": SHORT | {"optimizer": "adam", "ema": 0.9, "crop": 1}},
    "dplis": {"method": {"name": "dplis", "augmentations": 2}},
    "input-noise": {
        "method": {"name": "input-noise", "sigma": 0.2, "augmentations": 2, "consistency": 1.0}
    },
    "pixeldp": {"method": {"name": "pixeldp", "epsilon_r": 1.0}, "model": HGM, "privacy": OPEN},
    "paid": {"method": {"name": "secure-sgd", "redistribution": {"source": "paid"}}, "model": HGM},
    "stobatch": {
        "method": {"name": "stobatch", "size": [0.05, 0.2], "steps": 2, "split": 0.36},
        "model": {"name": "small-cnn", "options": {"width": 4, "activation": "tanh"}},
    },
    "residual": {
        "method": {"name": "residual", "gamma": 0.5, "input_norm": 3.5},
        "model": {"name": "resnet-rp", "options": {"width": 4, "groups": 2}},
    },
    "functional": {
        "method": {"name": "functional", "rounds": 1},
        "model": {"name": "scattering", "options": {"widths": [1.0], "stride": 1, "cosines": 3}},
    },
    "dpal": {
        "method": {
            "name": "dpal", "encoder_sensitivity": 450, "output_sensitivity": 32, "steps": 2,
            "images": 20, "augmentations": 20,
        },
        "model": {
            "name": "dpal-cnn", "options": {"filters": [4, 4], "dense": 16}, "mean": [0.5],
            "std": [0.5],
        },
        "privacy": OPEN,
    },
    "canaries": {"audit": {"kind": "canaries", "canaries": 20, "canary": "gradient"}},
}  # fmt: skip


QUICK = ("dp-sgd", "dplis", "input-noise", "pixeldp", "paid", "functional")


@pytest.mark.parametrize("method", few(METHODS, *QUICK))
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


def test_of_a_step_one_vector_comes_back(tmp_path, monkeypatch, unchecked) -> None:
    """The sum, in one piece; nothing for each example, and as many numbers for any batch."""
    waits = []
    for count in (10, 40):
        training = {"batch_size": count, "steps": 3, "learning_rate": 0.1}
        data = {"name": "digits", "max_train": 100}
        recipe, folder = make(
            tmp_path, f"of-{count}", data=data, training=training, resources={"micro_batch": 64}
        )
        steps, original = [], worker.Loop.take

        def step(self, *arguments, steps=steps, original=original):
            with count_transfers() as seen:
                taken = original(self, *arguments)
            steps.append((seen, self.step.engine.size))
            return taken

        with monkeypatch.context() as patch:
            patch.setattr(worker.Loop, "take", step)
            worker.run_training(prepare(recipe, folder, "test"), Reducer(0, 1, simulated_device()))
        seen, size = steps[1]  # neither the first, with its checks, nor the last, which saves
        assert [shape for shape in seen.down if shape == (size,)] == [(size,)]
        assert sum(shape != (size,) for shape in seen.down) <= 2  # tails of a few numbers
        assert [shape for shape in seen.up if shape == (size,)] == [(size,)]  # the noisy one
        assert all(len(shape) <= 1 or shape[1:] == (1, 8, 8) for shape in seen.up)
        waits.append(seen.waits)
    assert waits[0] == waits[1] <= 4


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_noise_drawn_there_is_the_cpu_s(tmp_path, monkeypatch, unchecked, optimizer) -> None:
    """The sum goes down, for its name in the ledger, and no vector comes up: the same parameters,
    to the bit, as with the CPU's noise."""
    device, found = simulated_device(), []
    training = {"batch_size": 10, "steps": 3, "learning_rate": 0.1, "optimizer": optimizer}
    for where in ("host", "device"):
        recipe, folder = make(
            tmp_path, where, data={"name": "digits", "max_train": 100}, training=training,
            resources={"noise": where},
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
