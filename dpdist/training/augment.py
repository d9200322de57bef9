"""Random deformations of public images, so that few of them teach a network much.

Only public pre-training uses them: they cost nothing and prove nothing. What a private training
does to a record at random stays within the record: `dpdist.gradients.perturbations`, and crop and
flip of `dpdist.gradients.augmentation`, which public training has as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dpdist.base.errors import UserError
from dpdist.sections.training import AugmentRecipe

_LATTICE = 5  # points a side that the elastic displacement is interpolated from


def deformed(
    inputs: Tensor, shape: Sequence[int], section: AugmentRecipe, generator: torch.Generator
) -> Tensor:
    """Images (B, C, h, w) on canvases `shape` (C, H, W), each deformed by draws of its own.

    One bicubic resampling does the scaling up, the affine map and the elastic displacement; then
    the contrast, which makes strokes thick or thin, and clamping to [0, 1]. Raises UserError for
    records that are no images or have other channels.
    """
    if inputs.dim() != 4 or len(shape) != 3 or inputs.shape[1] != shape[0]:
        raise UserError(
            f"public.augment: needs images of {shape[0]} channels, got records of shape "
            f"{tuple(inputs.shape[1:])}"
        )
    count = len(inputs)

    def draw(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, generator=generator)

    turn = draw(-section.rotate, section.rotate)
    slant = draw(-section.shear, section.shear)
    rows = [
        torch.stack([turn.cos(), turn.sin() + slant], 1) / draw(*section.scale)[:, None],
        torch.stack([-turn.sin(), turn.cos()], 1) / draw(*section.scale)[:, None],
    ]
    moves = [draw(-section.shift, section.shift) for _ in rows]
    affine = torch.stack(
        [torch.cat([row, move[:, None]], 1) for row, move in zip(rows, moves, strict=True)], 1
    )
    grid = nn.functional.affine_grid(affine, [count, *shape], align_corners=False)
    lattice = torch.randn(count, 2, _LATTICE, _LATTICE, generator=generator) * section.elastic
    bend = nn.functional.interpolate(
        lattice, size=tuple(shape[1:]), mode="bicubic", align_corners=False
    )
    images = nn.functional.grid_sample(
        inputs, grid + bend.permute(0, 2, 3, 1), mode="bicubic", align_corners=False
    )
    if section.contrast is not None:
        middle = draw(*section.middle)[:, None, None, None]
        images = (images - middle) * draw(*section.contrast)[:, None, None, None] + 0.5
    return images.clamp(0, 1)
