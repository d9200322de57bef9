"""The hidden noise of a run: computed once, before the first step, and kept in the private folder.

Worker 0 computes it and the others read it, so that all workers and all restarts train under the
same deviations. What it reads, and what that costs, is the recipe's choice
(`dpdist.methods.options.Redistribution`); the plan charges it.
"""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from cluster.reading import read_bytes
from cluster.storage import write_atomic
from dpdist import data, models
from dpdist.errors import UserError
from dpdist.gradients.keys import derive_key, new_run_key
from dpdist.gradients.sampling import poisson_sample
from dpdist.methods import hgm
from dpdist.methods.options import HiddenNoiseMethod, Redistribution
from dpdist.methods.pixeldp import equal_noise, noise_scale
from dpdist.methods.sensitivity import keep_within
from dpdist.models import HiddenNoise, ModelSpec
from dpdist.recipe import Recipe
from dpdist.training.job import TrainJob, initial_model, read_run_key
from dpdist.training.records import public_data

_TENSOR = "std"


def ensure_hidden_noise(job: TrainJob, spec: ModelSpec, dataset: data.Dataset) -> None:
    """Compute the run's hidden noise, unless it is there or the method has none (worker 0)."""
    method, path = job.recipe.method, job.folder.hidden_noise
    if isinstance(method, HiddenNoiseMethod) and not path.exists():
        std = deviations(job, method, spec, dataset)
        write_atomic(path, save_tensors({_TENSOR: std.contiguous()}))


def read_hidden_noise(job: TrainJob, model: nn.Module) -> HiddenNoise | None:
    """The run's hidden noise, for the model's first layer; None when the method has none."""
    if not isinstance(job.recipe.method, HiddenNoiseMethod):
        return None
    path = job.folder.hidden_noise
    try:
        std = load_tensors(read_bytes(path))[_TENSOR]
    except (UserError, KeyError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read: {error}; is the storage shared?") from error
    return HiddenNoise(models.require_split(model).name, std)


def digest(noise: HiddenNoise | None) -> str:
    """Names the deviations: part of what may not change under one attempt."""
    raw = b"" if noise is None else noise.std.numpy().tobytes()
    return hashlib.blake2b(raw, digest_size=8).hexdigest()


def deviations(
    job: TrainJob, method: HiddenNoiseMethod, spec: ModelSpec, dataset: data.Dataset
) -> Tensor:
    """Standard deviation of every hidden component: float32 of the hidden shape."""
    split = models.require_split(initial_model(job.recipe, spec))
    scale = noise_scale(method, int(np.prod(spec.input_shape)))
    section = method.redistribution
    if section is None:
        return equal_noise(scale, split.hidden_shape(spec.input_shape))
    if section.source == "paid":
        powers = _paid(job, method, section, spec, dataset)
    elif section.source == "public":
        public = public_data(job.recipe)
        assert public is not None
        powers = _open(job.recipe, method, section, spec, public)
    else:
        powers = _open(job.recipe, method, section, spec, dataset)
    return hgm.heterogeneous_noise(scale, hgm.shares(powers, section.floor))


def _open(
    recipe: Recipe,
    method: HiddenNoiseMethod,
    section: Redistribution,
    spec: ModelSpec,
    records: data.Dataset,
) -> Tensor:
    """Equation 7 on records used without privacy, by the network trained on them.

    That is the run's own network before its first step, a frozen classifier with the weights it
    has; records of other classes need another last layer, and so a network from its seed.
    """
    # Any many are enough for a mean; evenly spaced, whatever order the file has.
    count = min(section.max_records, len(records))
    rows = np.linspace(0, len(records) - 1, count).astype(np.int64)
    try:
        inputs = hgm.resized(records.batch(rows), spec.input_shape)
    except ValueError as error:
        raise UserError(f"method.redistribution.data: {records.name}: {error}") from error
    labels = records.targets(rows)
    if records.classes == spec.classes:
        model = initial_model(recipe, spec)
    else:
        other = dataclasses.replace(spec, classes=records.classes)
        model = models.initialise(other, recipe.training.init_seed)
    split = models.require_split(model)
    hgm.train_openly(
        model, inputs, labels, section.steps, lambda: keep_within(split, method.sensitivity)
    )
    return hgm.mean_powers(split, inputs, labels, section.beta)


def _paid(
    job: TrainJob,
    method: HiddenNoiseMethod,
    section: Redistribution,
    spec: ModelSpec,
    dataset: data.Dataset,
) -> Tensor:
    """Equation 7 on private records: one clipped sum over a Poisson sample, released with noise.

    The noise is fresh each time this runs: a sum whose release nobody saw costs nothing, and the
    same noise is never added to two sums. A fixed run key gives the same noise again.
    """
    fixed = job.recipe.privacy.run_key is not None
    key = derive_key(read_run_key(job.folder) if fixed else new_run_key(), "redistribution")
    split = models.require_split(initial_model(job.recipe, spec))
    keep_within(split, method.sensitivity)
    sample_key = derive_key(key, "sample")
    members = poisson_sample(sample_key, 0, len(dataset), section.sample_rate, records=len(dataset))
    total = torch.zeros(split.hidden_shape(spec.input_shape), dtype=torch.float64)
    for start in range(0, len(members), 1000):
        some = members[start : start + 1000]
        inputs, labels = dataset.batch(some), dataset.targets(some)
        total += hgm.clipped_powers(split, inputs, labels, section.beta, section.clip_norm)
    return hgm.noised_powers(total, key, section.noise_multiplier, section.clip_norm)
