"""Crop and flip: the same image for the label, moved and mirrored at random, drawn for each record.

What a draw of record i sees is a function of record i, the step's key and the draw, so that the
gradient that is clipped is still the record's own: augmentation costs no privacy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from dpdist.gradients.perturbations import words_per_record


@dataclass(frozen=True)
class CropAndFlip:
    """crop: images are padded with zeros by so many pixels, and a window of the old size is cut out
    where it falls (He et al. 2016). flip: mirrored with probability 1/2."""

    crop: int
    flip: bool

    def __call__(self, images: Tensor, record_ids: Tensor, draw_key: bytes, draw: int) -> Tensor:
        """Images (B, C, H, W); row b depends on row b, the key, the draw and record_ids[b]."""
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
