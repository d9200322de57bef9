"""Certificates counted on a device: the numbers of its generator, the same tables as that generator
gives on a CPU, little that crosses over. The device is a simulated one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import certificates
from support.certificates import Data, with_changes
from support.local_execution import TestExecutor, run_without_ray
from support.networks import save_small_cnn
from support.simulated_device import NAME, count_transfers, simulated_device
from support.threads import new_settings_after
from torch import nn

from dpdist import models
from dpdist.attacks.gradient_attacks import Ball, RandomizedClassifier, attack
from dpdist.certification import inference
from dpdist.certification.certificate import Certificate
from dpdist.certification.cohen import Cohen
from dpdist.certification.inference import (
    ACCELERATOR_FORMS,
    CPU,
    DEFAULT_FORMS,
    REDUCED_PRECISION_FORMS,
    Aes,
    Philox,
    choose_backend,
)
from dpdist.certification.predict import Predictor
from dpdist.certification.registry import settings_of
from dpdist.certification.worker import (
    Assignment,
    InputWorkUnit,
    KeyedGenerator,
    Worker,
    probe,
)
from dpdist.core.errors import UserError
from dpdist.randomness import device_generators
from dpdist.randomness.keys import StreamKeys
from dpdist.randomness.noise_location import InputNoise, ModuleNoise, find_noise_location

SHAPE, KEY = (1, 6, 6), bytes(range(32))
SOURCE = StreamKeys("test", "seed", "model", "data", "gaussian", 0.5)


@pytest.mark.parametrize("vector", device_generators.PHILOX_TEST_VECTORS)
def test_words_are_the_published_ones(vector) -> None:
    counter, key, known = vector
    assert device_generators.philox(counter, key) == known
    for device in (CPU, simulated_device()):
        places = tuple(torch.tensor([word], device=device) for word in counter)
        assert tuple(int(word) for word in device_generators.philox(places, key)) == known


def test_a_device_that_multiplies_otherwise_is_refused(monkeypatch) -> None:
    device_generators.check_philox.cache_clear()
    monkeypatch.setattr(device_generators, "_product", lambda word, which: (word, word))
    with pytest.raises(UserError, match="integers"):
        Philox()


def test_streams_begin_anywhere_and_end() -> None:
    whole = torch.stack(device_generators.philox_words(KEY, 0, 1000, CPU))
    for low, high in ((0, 1), (999, 1000), (7, 600)):
        part = device_generators.philox_words(KEY, low, high - low, simulated_device())
        assert torch.equal(whole[:, low:high], torch.stack(part).cpu())
    device_generators.philox_words(KEY, (1 << 32) - 1, 1, CPU)
    with pytest.raises(ValueError, match="places"):
        device_generators.philox_words(KEY, (1 << 32) - 1, 2, CPU)


def test_every_bit_of_a_key_counts() -> None:
    """Words of keys that differ in one bit: half of the bits differ, of any place of the word."""
    first = torch.cat(device_generators.philox_words(KEY, 0, 500, CPU))
    for bit in range(0, 8 * device_generators.PHILOX_KEY_BYTES, 7):
        other = bytearray(KEY)
        other[bit // 8] ^= 1 << bit % 8
        moved = first ^ torch.cat(device_generators.philox_words(bytes(other), 0, 500, CPU))
        share = [float((moved >> place & 1).double().mean()) for place in range(32)]
        # 2,000 coins for each place: 6 deviations, 23 x 32 places, false failure below 2e-6.
        assert max(abs(s - 0.5) for s in share) < 6 * 0.5 / np.sqrt(2000)


def network(noise: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model with noise in that place, and settings that certify it."""
    model = models.initialize(models.ModelSpec("small-cnn", SHAPE, 3, {"width": 4}), 3)
    if noise == "hidden":
        split = models.require_split(model)
        models.attach_noise(model, torch.rand(split.hidden_shape(SHAPE)) + 0.1)
        return model, {}
    if noise == "several":
        ModuleNoise({"0": 0.2, "3": 0.1}, input_std=0.5).attach(model)
    return model, {"sigma": 0.5}


def assignment(
    settings: Certificate, model: nn.Module, device: torch.device, reexecuted: bytes | None = KEY
) -> Assignment:
    inputs = torch.rand(9, *SHAPE, generator=torch.Generator().manual_seed(0)).numpy()
    place = settings.build_sampler(model, SHAPE)
    made = Assignment(
        model, settings, place, SOURCE, 3, SHAPE, inputs, device=device.type, gpus=1,
        reexecution_key=reexecuted,
    )  # fmt: skip
    return replace(made, spec=probe(made))


@pytest.mark.parametrize(
    ("noise", "mode"),
    [
        ("gaussian", {}),
        ("hidden", {}),
        ("several", {}),
        ("gaussian", {"mode": "target-radius", "radii": (0.1, 0.3)}),
    ],
)
def test_counts_are_those_of_the_generator_on_a_cpu(noise: str, mode: dict[str, Any]) -> None:
    model, section = network(noise)
    counted = {"n0": 10, "n": 90, "batch": 50, "generator": "philox", "backend": "eager"}
    settings = settings_of({**section, **mode, **counted})
    rows, blocks = [], settings.num_units(50)
    for device in (CPU, simulated_device()):
        x = np.full(SHAPE, 0.4, np.float32)
        (checked,) = Worker(assignment(settings, model, device))([InputWorkUnit(2, 0, blocks, x)])
        rows.append({k: v for k, v in checked.items() if k != "seconds"})
        worker = Worker(assignment(settings, model, device, reexecuted=None))
        worker([InputWorkUnit(1, 0, 1, x)])  # parts that are made once
        with count_transfers() as seen:
            (row,) = worker([InputWorkUnit(2, 0, blocks, x)])
        rows.append({k: v for k, v in row.items() if k != "seconds"})
        assert next(worker._assignment.model.parameters()).device == CPU  # the caller's own
    assert all(row == rows[0] for row in rows)  # where rows are executed again too
    # The input goes there, counts of a block come back.
    assert seen.up == [SHAPE] and seen.waits == 0
    assert all(shape in ((3,), (3, 3)) for shape in seen.down) and len(seen.down) <= 4


def test_another_number_format_is_a_classifier_of_its_own() -> None:
    model, _ = network("gaussian")
    batch = torch.rand(50, *SHAPE)
    for device in (CPU, simulated_device()):
        spec, classify = choose_backend(model.to(device).eval(), batch.to(device), "bf16")
        assert spec.backend == "bf16" and classify.logits(batch.to(device)).dtype == torch.float32
        want = model.bfloat16()(batch.to(device).bfloat16()).argmax(1)
        assert torch.equal(classify(batch.to(device)), want)
        model = model.float()
    # for the asking only
    assert not {*DEFAULT_FORMS, *ACCELERATOR_FORMS} & {*REDUCED_PRECISION_FORMS}


@pytest.fixture
def certify(tmp_path, monkeypatch):
    run_without_ray(monkeypatch)
    simulated_device()
    monkeypatch.setattr(inference, "GPU", NAME)
    monkeypatch.setattr(inference, "make_deterministic", lambda device: None)
    save_small_cnn(tmp_path / "model")
    settings = Cohen(sigma=0.5, n0=10, n=90, batch=50, seed="5", backend="eager")

    def run(name: str, have: float = 0.0, **options: Any) -> tuple[list[dict[str, Any]], Path]:
        monkeypatch.setattr(TestExecutor, "gpus", have)
        own = with_changes(settings, **options.pop("settings", {}))
        found = certificates.certify(tmp_path / "model", Data(2), own, tmp_path / name, **options)
        return found.to_pylist(), tmp_path / name

    return run


def test_a_certification_on_gpus_is_the_generators_on_a_cpu(certify) -> None:
    on_cpu, _ = certify("cpu", settings={"generator": "philox"}, gpus=0)
    there, folder = certify("gpu", 1.0, gpus=0.5, actors=2, chunk_seconds=1e-3)
    assert there == on_cpu
    classifier = json.loads((folder / "settings.json").read_text())["classifier"]
    assert (classifier["device"], classifier["generator"]) == (NAME, "philox")
    plain, folder = certify("plain")
    assert plain != on_cpu and "generator" not in (folder / "settings.json").read_text()
    # Where the cluster has GPUs they are used, and a certification stays on what it began on.
    assert certify("default", 2.0)[0] == there
    for name, gpus, where in (("default", 0, "GPUs"), ("plain", 1, "CPUs")):
        _, folder = certify(name, 2.0)
        for made in ("certificates.parquet", "journal.jsonl"):
            (folder / made).unlink()
        with pytest.raises(UserError, match=where):
            certify(name, 2.0, gpus=gpus)
        assert certify(name, 2.0)[0] == (there if gpus == 0 else plain)


def test_a_gpu_is_made_repeatable(monkeypatch) -> None:
    cudnn, matmul, asked = torch.backends.cudnn, torch.backends.cuda.matmul, []
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.setattr(torch, "use_deterministic_algorithms", asked.append)
    with new_settings_after():
        inference.make_deterministic(torch.device("cpu"))
        assert not asked
        cudnn.allow_tf32 = matmul.allow_tf32 = True
        inference.make_deterministic(torch.device("cuda"))
        assert asked == [True] and not cudnn.allow_tf32 and not matmul.allow_tf32


def test_predictions_never_take_the_generator_of_a_table() -> None:
    """Their noise is secret: who could work it out could choose the input."""
    model, section = network("gaussian")
    settings = settings_of(
        {**section, "n": 50, "n0": 10, "generator": "philox", "backend": "eager"}
    )
    predictor = Predictor(model, settings, 3, SHAPE)
    assert isinstance(predictor._worker._assignment.stream, Aes)


@pytest.mark.parametrize(("name", "norm"), [("pgd", "linf"), ("mim", "l2")])
def test_attacks_work_where_the_model_is(name, norm) -> None:
    model, _ = network("hidden")
    x, size = torch.rand(5, *SHAPE), torch.full((5,), 0.1, dtype=torch.float64)
    targets, found = torch.arange(5) % 3, []
    for device in (CPU, simulated_device()):
        model = model.to(device).eval().requires_grad_(False)
        for place in (find_noise_location(model), InputNoise(0.2)):
            found.append(
                attack(
                    name, RandomizedClassifier(model, place),
                    Ball(x.to(device), size.to(device), norm), targets.to(device), range(5),
                    KeyedGenerator(SOURCE), steps=2, samples=3, restarts=2,
                ).cpu()
            )  # fmt: skip
    for a, b in zip(found[:2], found[2:], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
