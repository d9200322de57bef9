"""Find which rows of a pass round alike.

A kernel may add up in another order on another row: a matrix product of few columns takes rows that
begin at other alignments in memory by other code. The last bit that differs is harmless where
gradients are continuous. On a kink it is not: a ReLU's input of exactly 0 in one row and of 1e-9 in
the next gives two gradients of one record, and one record more, which moves all behind it by a row,
would move their sum by far more than the clip. So rows are sorted into classes of equal bits, and a
record's class follows from its own id (`dpdist.gradients.blocks.padded`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

EXAMPLES = 64  # most that are tried
INVENTED_KEY = b"for invented examples alone".ljust(32)  # of what is drawn for them
_LEAST = 4
_NUMBERS = 4096  # of a row that are compared, unless `EXAMPLES` have fewer
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def row_classes(
    run: Callable[[Tensor, Tensor], Sequence[Tensor]], inputs: Tensor, targets: Tensor, rows: int
) -> np.ndarray | None:
    """Sort the rows of a pass into classes that give one example the same bits.

    Each example fills a whole pass, so rows that round alike have equal results. Kernels choose
    their code by shapes and addresses and not by values, so a few examples of many numbers tell:
    two rows of different code agree on all of them with negligible probability, not never.

    Args:
        run: executes a pass: inputs (rows, ...), targets (rows, ...) to tensors (rows, ...), all
            that a record's clipped vector is computed from.
        inputs, targets: (count, ...), invented: they hold nothing private.
        rows: of the pass.

    Returns:
        The class of each row, int64 (rows,); None where all rows are alike.
    """
    classes, seen = np.zeros(rows, np.int64), 0
    for number in range(len(inputs)):
        if number >= _LEAST and seen >= _NUMBERS:
            break
        found = run(_filled(inputs, number, rows), _filled(targets, number, rows))
        for tensor in found:
            classes = _refined(classes, tensor.detach())
            seen += tensor[0].numel()
    return classes if classes.any() else None


def _filled(examples: Tensor, number: int, rows: int) -> Tensor:
    return examples[number : number + 1].repeat(rows, *[1] * (examples.dim() - 1))


def _refined(classes: np.ndarray, tensor: Tensor) -> np.ndarray:
    """Split classes whose rows differ in a bit."""
    if not tensor[0].numel():
        return classes
    if tensor.dtype == torch.bool:
        tensor = tensor.to(torch.uint8)
    bits = tensor.view(_INTEGERS[tensor.element_size()])
    if bool((bits == bits[:1]).all()):
        return classes
    flat = np.ascontiguousarray(bits.flatten(1).cpu().numpy())
    whole = flat.view(np.dtype((np.void, flat.dtype.itemsize * flat.shape[1]))).ravel()
    _, labels = np.unique(whole, return_inverse=True)
    _, both = np.unique(np.stack([classes, labels]), axis=1, return_inverse=True)
    return both.ravel().astype(np.int64)
