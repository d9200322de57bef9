"""Tensors made of arrays from elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


def tensor_of(array: np.ndarray) -> Tensor:
    """Return an array as a tensor: on the same memory, or a copy where that must not be written.

    Arrays that come out of Ray's object store or of a mapped file are read-only, of which torch
    warns on the user's terminal.
    """
    import torch

    return torch.from_numpy(array if array.flags.writeable else array.copy())
