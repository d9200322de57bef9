"""Random noise before the clip: on parameters, inputs or hidden layers, in K draws each.

The gradient that is clipped is weight * sum over the draws of the example's gradient under that
draw; weight = 1/K gives the mean. If draws differ in kind, each has its own weight, which
multiplies its loss. Draws are independent of the private data (their scales must be: a scale
computed from private records would let one record move all gradients), so they sit before the
clip and neither cost nor provide privacy. A crop or flip of record i is a function of record i, the
step's key and the draw, and costs no privacy for the same reason.

Keys: shared draws depend on (draw_key, draw index) only, per-example draws on (draw_key, draw
index, record id). So they are the same for any number of workers and any micro-batch. Each is a
Philox stream (numpy) whose key is derived by BLAKE2b from the step's draw key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from dpdist.core.errors import UserError
from dpdist.randomness.keys import KEY_BYTES, derive_key
from dpdist.randomness.noise_location import ModuleNoise
from dpdist.randomness.noisy_modules import perturb_output

# --- crop and flip ----------------------------------------------------------------------------


@dataclass(frozen=True)
class CropAndFlip:
    """A random crop and flip of images.

    crop: number of pixels of zero padding, of which a random window of the old size is taken (He et
    al. 2016). flip: whether to mirror with probability 1/2.
    """

    crop: int
    flip: bool

    def __call__(self, images: Tensor, record_ids: Tensor, draw_key: bytes, draw: int) -> Tensor:
        """Return images (B, C, H, W); row b depends on row b, key, draw and record_ids[b]."""
        words = words_per_record(draw_key, "draws/augment", draw, record_ids, 3)
        height, width = images.shape[-2:]
        places = words[:, :2] % np.uint64(2 * self.crop + 1)  # uneven by less than 2^-56
        down, right = torch.from_numpy(places.astype(np.int64)).to(images.device).T
        mirrored = torch.from_numpy((words[:, 2] >> np.uint64(63)).astype(bool))
        rows = down[:, None] + torch.arange(height, device=images.device)
        columns = torch.arange(width, device=images.device).repeat(len(images), 1)
        if self.flip:
            columns[mirrored] = columns[mirrored].flip(1)
        columns = right[:, None] + columns
        record = torch.arange(len(images), device=images.device)[:, None, None]
        padded = pad(images, [self.crop] * 4).permute(0, 2, 3, 1)
        seen = padded[record, rows[:, :, None], columns[:, None, :]]
        return seen.permute(0, 3, 1, 2).contiguous()


# --- noise ------------------------------------------------------------------------------------


Aggregate = Literal["mean", "sum"]


def standard_normal_shared(draw_key: bytes, purpose: str, draw: int, size: int) -> Tensor:
    """Return `size` float32 standard normals shared by the batch."""
    philox = np.random.Philox(key=_philox_key(draw_key, purpose, draw))
    return torch.from_numpy(np.random.Generator(philox).standard_normal(size, dtype=np.float32))


def standard_normal_per_record(
    draw_key: bytes, purpose: str, draw: int, record_ids: Tensor, size: int
) -> Tensor:
    """Return float32 standard normals (B, size); row b depends on key, draw and record_ids[b].

    The record id is in the high words of Philox' 256-bit counter, so streams never overlap.
    """
    out = np.empty((len(record_ids), size), dtype=np.float32)
    streams = _per_record(draw_key, purpose, draw, record_ids)
    for row, philox in zip(out, streams, strict=True):
        np.random.Generator(philox).standard_normal(dtype=np.float32, out=row)
    return torch.from_numpy(out)


def words_per_record(
    draw_key: bytes, purpose: str, draw: int, record_ids: Tensor, count: int
) -> np.ndarray:
    """Return uniform uint64 (B, count); row b depends on the key, the draw and record_ids[b]."""
    streams = _per_record(draw_key, purpose, draw, record_ids)
    rows = [philox.random_raw(count) for philox in streams]
    return np.array(rows, dtype=np.uint64).reshape(len(record_ids), count)


def _per_record(
    draw_key: bytes, purpose: str, draw: int, record_ids: Tensor
) -> Iterator[np.random.Philox]:
    key = _philox_key(draw_key, purpose, draw)
    for record in record_ids.tolist():
        yield np.random.Philox(key=key, counter=[0, 0, record, 1])


def _philox_key(draw_key: bytes, purpose: str, draw: int) -> int:
    if len(draw_key) != KEY_BYTES:
        raise UserError(f"draws need a draw_key of {KEY_BYTES} bytes, got {len(draw_key)}")
    return int.from_bytes(derive_key(draw_key, purpose, draw)[:16], "little")


class Perturbation:
    """The base class of perturbations, and the one of plain DP-SGD: no noise, one draw.

    count: K. aggregate: "mean" of the K gradients, or "sum" (as the DPlis authors' code does).
    gradient_scale: a constant that multiplies the aggregated gradient before the clip. With
    count 1 and gradient_scale K this is the control that separates smoothing from the sum's larger
    gradients: clip_C(K g) is clip_{C/K}(g) with a K-fold step.
    """

    per_example = False
    hidden_modules: tuple[str, ...] = ()
    draw_weights: tuple[float, ...] | None = None  # of the losses of draws; None: equal weights
    input_std: float | Tensor = 0.0  # of noise on the inputs, fresh for every record and draw

    def __init__(
        self, count: int = 1, *, aggregate: Aggregate = "mean", gradient_scale: float = 1.0
    ) -> None:
        self.count = count
        self.aggregate = aggregate
        self.gradient_weight = gradient_scale * (1.0 / count if aggregate == "mean" else 1.0)

    def perturb_parameters(
        self, parameters: Mapping[str, Tensor], draw_key: bytes, draw: int
    ) -> dict[str, Tensor]:
        """Return the trainable parameters of this draw by name; the given tensors do not change."""
        return dict(parameters)

    def perturb_inputs(
        self, inputs: Tensor, record_ids: Tensor | None, draw_key: bytes, draw: int
    ) -> Tensor:
        """Return the inputs (B, ...) of this draw."""
        std = self.input_std
        if not isinstance(std, Tensor) and std == 0:
            return inputs
        std = std.to(inputs.device) if isinstance(std, Tensor) else std
        return inputs + std * _per_record_noise(inputs, record_ids, draw_key, "draws/inputs", draw)

    def perturb_output(
        self, output: Tensor, record_ids: Tensor | None, draw_key: bytes, draw: int, module: int = 0
    ) -> Tensor:
        """Return the output (B, ...) of `hidden_modules[module]` in this draw.

        Row b depends on row b, the key, the draw and record_ids[b] only.
        """
        return output


class ParameterPerturbation(Perturbation):
    """theta + std * N(0, I) on every trainable parameter (DPlis, PoPETs 2021, Equation 6).

    std: per-weight standard deviation; public. per_example: whether every record has its own noise
    (the paper's Algorithm 2; memory is micro-batch x parameters); False shares one draw over the
    batch, as the authors' code does. Both are equally private. input_std: standard deviation of
    noise on the inputs, fresh for every record and draw.
    """

    def __init__(
        self,
        count: int,
        std: float,
        *,
        per_example: bool = False,
        aggregate: Aggregate = "mean",
        input_std: float = 0.0,
    ) -> None:
        super().__init__(count, aggregate=aggregate)
        self.std, self.input_std, self.per_example = std, input_std, per_example

    def perturb_parameters(
        self, parameters: Mapping[str, Tensor], draw_key: bytes, draw: int
    ) -> dict[str, Tensor]:
        size = sum(value.numel() for value in parameters.values())
        noise = standard_normal_shared(draw_key, "draws/parameters", draw, size)
        return self._perturbed(parameters, noise)

    def perturb_parameters_per_example(
        self, parameters: Mapping[str, Tensor], record_ids: Tensor, draw_key: bytes, draw: int
    ) -> dict[str, Tensor]:
        """Return `parameters` with a leading batch dimension: (B, *shape)."""
        size = sum(value.numel() for value in parameters.values())
        noise = standard_normal_per_record(draw_key, "draws/parameters", draw, record_ids, size)
        return self._perturbed(parameters, noise)

    def _perturbed(self, parameters: Mapping[str, Tensor], noise: Tensor) -> dict[str, Tensor]:
        pieces = noise.split([value.numel() for value in parameters.values()], dim=-1)
        out = {}
        for (name, value), piece in zip(parameters.items(), pieces, strict=True):
            shaped = piece.view(*noise.shape[:-1], *value.shape)
            out[name] = value + self.std * shaped.to(value)
        return out


def _per_record_noise(
    like: Tensor, record_ids: Tensor | None, draw_key: bytes, purpose: str, draw: int
) -> Tensor:
    if record_ids is None:
        raise UserError(
            "per-example draws need record_ids: the noise of a record is keyed by its id"
        )
    size = like[0].numel() if len(like) else 0
    noise = standard_normal_per_record(draw_key, purpose, draw, record_ids, size)
    return noise.view_as(like).to(like)


class InputPerturbation(Perturbation):
    """x + std * N(0, I), fresh for every record and draw (augmentation with noise; Cohen et al.).

    std: standard deviation in input units, a number or a tensor that broadcasts against one
    example; public. Subclasses override `perturb_inputs` for other augmentations: example b may
    depend on example b, the key and public data only.
    """

    def __init__(self, count: int, std: float | Tensor) -> None:
        super().__init__(count)
        self.input_std = std


class HiddenPerturbation(Perturbation):
    """h + std * N(0, I) on the output of one module, fresh for every record and draw.

    module: its name in `model.named_modules()`. std: a number, or a tensor that broadcasts against
    one example's output: the heterogeneous Gaussian's redistribution (HGM, IJCAI 2019); public.
    """

    def __init__(self, count: int, module: str, std: float | Tensor) -> None:
        super().__init__(count)
        self.hidden_modules, self.std = (module,), std

    def perturb_output(
        self, output: Tensor, record_ids: Tensor | None, draw_key: bytes, draw: int, module: int = 0
    ) -> Tensor:
        std = self.std.to(output) if isinstance(self.std, Tensor) else self.std
        return output + std * _per_record_noise(output, record_ids, draw_key, "draws/hidden", draw)


class ModulePerturbation(Perturbation):
    """Noise on the outputs of several modules and on the input, fresh for every record and draw.

    It is the noise of `location` at prediction (residual perturbation). The noise of module i is
    keyed by the purpose draws/block/i.
    """

    def __init__(self, count: int, location: ModuleNoise, *, aggregate: Aggregate = "mean") -> None:
        super().__init__(count, aggregate=aggregate)
        self.location, self.input_std = location, location.input_std
        self.hidden_modules = tuple(location.stds)

    def perturb_output(
        self, output: Tensor, record_ids: Tensor | None, draw_key: bytes, draw: int, module: int = 0
    ) -> Tensor:
        normals = _per_record_noise(output, record_ids, draw_key, f"draws/block/{module}", draw)
        std = self.location.stds[self.hidden_modules[module]]
        return perturb_output(output, normals, std, self.location.mode, self.location.floor)
