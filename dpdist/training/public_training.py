"""Steps of training on public records, WITHOUT privacy: initial weights, deformations, accuracy.

With random deformations a network learns much from few public images. Only public pre-training
uses them: they have no privacy cost and no guarantee. A private training's own randomness is
within the record: `dpdist.gradients.perturbations`, with crop and flip, which public training has
as well.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor, nn

from dpdist import data, models
from dpdist.config.sections import ModelRecipe, PublicRecipe
from dpdist.core.errors import UserError
from dpdist.core.files import read_bytes
from dpdist.gradients.engine import cross_entropy, squared_error
from dpdist.models import ModelSpec
from dpdist.models.features import resize_images
from dpdist.models.zoo import WhiteningLayer, batch_statistics, download_weights
from dpdist.randomness.keys import derive_key
from dpdist.training.collectives import FlatOptimizer, flat_views
from dpdist.training.model_setup import augmentation

# --- deformations of images -------------------------------------------------------------------


_LATTICE = 5  # points per side from which the elastic displacement is interpolated


_ROTATE, _SHEAR = 0.3, 0.35  # at most, radians
_SCALE = 0.6, 0.95  # of width and height of the whole image on the canvas, drawn separately
_SHIFT, _ELASTIC = 0.15, 0.07  # at most; standard deviation on the lattice; in half widths
_MIDDLE, _CONTRAST = (0.3, 0.65), (2.0, 5.0)  # gray value that becomes 1/2; factor around it


def deform_images(inputs: Tensor, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return images (B, C, h, w) deformed at random onto canvases `shape` (C, H, W).

    The ranges turn 8 x 8 digits into pen strokes. One bicubic resampling does the scaling up, the
    affine map and the elastic displacement; then the contrast, which makes strokes thick or thin,
    and clamping to [0, 1]. Raises UserError for records that are not images or have other channels.
    """
    if inputs.dim() != 4 or len(shape) != 3 or inputs.shape[1] != shape[0]:
        raise UserError(
            f"public.augment: needs images of {shape[0]} channels, got records of shape "
            f"{tuple(inputs.shape[1:])}"
        )
    count = len(inputs)

    def draw(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, generator=generator)

    turn = draw(-_ROTATE, _ROTATE)
    slant = draw(-_SHEAR, _SHEAR)
    rows = [
        torch.stack([turn.cos(), turn.sin() + slant], 1) / draw(*_SCALE)[:, None],
        torch.stack([-turn.sin(), turn.cos()], 1) / draw(*_SCALE)[:, None],
    ]
    moves = [draw(-_SHIFT, _SHIFT) for _ in rows]
    affine = torch.stack(
        [torch.cat([row, move[:, None]], 1) for row, move in zip(rows, moves, strict=True)], 1
    )
    grid = nn.functional.affine_grid(affine, [count, *shape], align_corners=False)
    lattice = torch.randn(count, 2, _LATTICE, _LATTICE, generator=generator) * _ELASTIC
    bend = nn.functional.interpolate(
        lattice, size=tuple(shape[1:]), mode="bicubic", align_corners=False
    )
    images = nn.functional.grid_sample(
        inputs, grid + bend.permute(0, 2, 3, 1), mode="bicubic", align_corners=False
    )
    middle = draw(*_MIDDLE)[:, None, None, None]
    images = (images - middle) * draw(*_CONTRAST)[:, None, None, None] + 0.5
    return images.clamp(0, 1)


# --- public training --------------------------------------------------------------------------


ProgressCallback = Callable[[int, int, float], None]  # steps done, steps, per second


def train_public(
    model: nn.Module,
    records: data.Dataset,
    shape: tuple[int, ...],
    section: PublicRecipe,
    part: str,
    progress: ProgressCallback,
) -> int:
    """Train the `part` of a model by its section of the recipe, and return the number of steps.

    Raises UserError if it diverges.
    """
    training = section.training
    steps = training.steps
    if steps is None:
        assert training.epochs is not None
        steps = max(1, training.epochs * len(records) // training.batch_size)
    parameters = [p for p in model.parameters() if p.requires_grad]
    flat = flat_views(parameters)
    optimizer = FlatOptimizer(training, steps, flat)
    order = np.random.default_rng(training.init_seed)
    generator = torch.Generator().manual_seed(training.init_seed)
    key = hashlib.blake2b(f"dpdist.pretrain/{training.init_seed}".encode(), digest_size=32).digest()
    changed, queue = augmentation(training), np.empty(0, dtype=np.int64)
    began = time.monotonic()
    with batch_statistics(model.train()):
        for step in range(steps):
            if len(queue) < training.batch_size:
                queue = order.permutation(len(records))
            rows, queue = queue[: training.batch_size], queue[training.batch_size :]
            inputs = records.batch(rows)
            if not section.augment:
                inputs = _resize_to_model(inputs, shape, records)
            else:
                inputs = deform_images(inputs, shape, generator)
            if changed is not None:
                inputs = changed(inputs, torch.from_numpy(rows), derive_key(key, "step", step), 0)
            noisy = inputs
            if section.sigma is not None:
                noisy = inputs + section.sigma * torch.randn(inputs.shape, generator=generator)
            if part == models.DENOISER:
                loss = squared_error(model(noisy), inputs).mean() / inputs[0].numel()
            else:
                loss = cross_entropy(model(noisy), records.targets(rows)).mean()
            gradients = torch.autograd.grad(loss, parameters)
            optimizer.update(flat, torch.cat([g.reshape(-1) for g in gradients]), step)
            progress(step + 1, steps, (step + 1) / max(1e-9, time.monotonic() - began))
    if not torch.isfinite(flat).all():
        raise UserError("public.training: the weights are not finite; lower the learning rate")
    flat.copy_(optimizer.published_parameters(flat))
    return steps


_WHITENED = 20_000  # at most, public records in a covariance


def whiten_features(
    model: nn.Module, records: data.Dataset, shape: tuple[int, ...], section: PublicRecipe
) -> None:
    """Fit the model's whitening layer, if any, to public records with their training's noise."""
    for layer in (each for each in model.modules() if isinstance(each, WhiteningLayer)):
        seen: list[Tensor] = []
        hook = layer.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0]))
        generator = torch.Generator().manual_seed(section.training.init_seed)
        size = layer.in_features
        count, total = 0, torch.zeros(size, dtype=torch.float64)
        squares = torch.zeros(size, size, dtype=torch.float64)
        rows = np.linspace(0, len(records) - 1, min(_WHITENED, len(records))).astype(np.int64)
        with torch.inference_mode(), hook:
            for some in np.array_split(rows, math.ceil(len(rows) / 500)):
                inputs = _resize_to_model(records.batch(some), shape, records)
                noise = torch.randn(inputs.shape, generator=generator)
                model(inputs + (section.sigma or 0.0) * noise)
                features = seen.pop().double()
                count, total = count + len(features), total + features.sum(0)
                squares += features.T @ features
        mean = total / count
        layer.fit(mean, squares / count - mean[:, None] * mean)


def _resize_to_model(inputs: Tensor, shape: tuple[int, ...], records: data.Dataset) -> Tensor:
    try:
        return resize_images(inputs, shape)
    except ValueError as error:
        raise UserError(f"public.data: {records.name}: {error}") from error


def reconstruction_error(
    model: nn.Module, test: data.Dataset, sigma: float, batch: int = 1000
) -> float:
    """Return the root mean squared error of a pixel after a denoiser, at input noise sigma."""
    noise = torch.Generator().manual_seed(0)
    total = 0.0
    with torch.inference_mode():
        for start in range(0, len(test), batch):
            inputs = test.batch(slice(start, start + batch))
            noisy = inputs + sigma * torch.randn(inputs.shape, generator=noise)
            total += float(squared_error(model(noisy), inputs).double().sum())
    return math.sqrt(total / (len(test) * math.prod(test.input_shape)))


def accuracy(model: nn.Module, test: data.Dataset, batch: int = 1000) -> float:
    """Return the fraction of the test records' targets that the model predicts correctly."""
    right = asked = 0
    with torch.inference_mode():
        for start in range(0, len(test), batch):
            rows = slice(start, start + batch)
            targets = test.targets(rows)
            there = targets >= 0
            found = models.predicted_classes(model(test.batch(rows)))
            right += int((found == targets)[there].sum())
            asked += int(there.sum())
    return right / max(1, asked)


def load_public_weights(model: nn.Module, section: PublicRecipe, network: ModelRecipe) -> str:
    """Copy public weights into the model before its first step; return their name for the card."""
    if section.weights == "torchvision":
        architecture = network.options.get("architecture", "resnet18")
        if network.name != "torchvision":
            raise UserError("public.weights: torchvision: needs public.model.name: torchvision")
        try:
            tensors, name = download_weights(architecture)
        except (OSError, RuntimeError, ValueError) as error:
            raise UserError(
                f"public.weights: torchvision's weights of {architecture} cannot be loaded: "
                f"{error}; give a file instead"
            ) from error
        copy_weights(model, tensors, name)
        return f"torchvision's {name}"
    assert section.weights is not None
    path = section.weights
    try:
        tensors = load_tensors(read_bytes(path))
    except SafetensorError as error:
        raise UserError(f"public.weights: {path}: cannot be read: {error}") from error
    copy_weights(model, tensors, str(path))
    return f"weights from a file, {path.name} (declared public, not checked)"


def replace_head(model: nn.Module, spec: ModelSpec, seed: int) -> nn.Module:
    """Return a network for other classes, `spec`, with the trained tensors of the same shape.

    `seed` initializes the others. Raises UserError if less than half of the tensors fit.
    """
    fresh = models.initialize(spec, seed)
    own, trained = fresh.state_dict(), model.state_dict()
    copied = {n: v for n, v in trained.items() if n in own and own[n].shape == v.shape}
    wanted = [n for n in own if spec.denoiser is None or n.startswith(f"{models.CLASSIFIER}.")]
    fits = copied.keys() & wanted
    if len(fits) < len(wanted) / 2:
        raise UserError(
            f"public.data: other classes than the private data's, and of {spec.name} only "
            f"{len(fits)} of {len(wanted)} tensors have the same shape for both"
        )
    fresh.load_state_dict(copied, strict=False)
    return fresh


def copy_weights(model: nn.Module, tensors: Mapping[str, Tensor], path: str) -> None:
    """Copy a torchvision state dict into a model, except layers whose shapes differ (the head).

    Raises UserError if less than half of the tensors fit.
    """
    network = getattr(model, "network", model)  # behind a normalization
    own = network.state_dict()
    fits = {n: v for n, v in tensors.items() if n in own and own[n].shape == v.shape}
    if len(fits) < len(own) / 2:
        raise UserError(
            f"public.weights: {path}: {len(fits)} of the model's {len(own)} tensors are in it; are "
            "these the weights of another architecture?"
        )
    network.load_state_dict(fits, strict=False)
