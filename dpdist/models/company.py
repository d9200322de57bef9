"""Does a model treat each example alone, whatever is in the batch with it, and wherever it stands?

A certificate, an attack and a private gradient speak of one function of one example. A model that
looks at its batch (a batch mean, batch normalisation without stored statistics) or at the row (a
mask by position) is none. No finite test shows independence; this one compares values, so what is
detached from the graph and integer inputs are seen too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

# A row's last bits depend on its place and company: by some 1e-6 of an output in float32. Where
# that is not known from float64, where nothing of it is left, more must be allowed. Each output has
# its own: beside a class masked by -1e9 all that the others say is below 1e-6 of the largest.
_EXACT, _COARSE = 1e-8, 1e-3
_TIMES = 100  # the float32 error of a few rows, for what others may have
_FINER = 1e-7  # of the float32 error, for what cancels in float64
_ROWS, _NUMBERS = 64, 2**20  # tried in float64, which is slow for large models

Forward = Callable[[Tensor], Tensor]


def mixing(model: nn.Module, batch: Tensor) -> str | None:
    """How the answer to one example depends on the others, in words; None where that is not seen.

    batch: (B, ...) of the kind and size that is executed. All of it is tried in the model's own
    precision, some rows in float64. The model stays in its mode and is left alone; its outputs must
    be finite.
    """
    with torch.no_grad():
        allowed = _COARSE * _sizes(model(batch))
        some = batch[: max(4, min(_ROWS, _NUMBERS // batch[0].numel()))]
        wide = some.double() if some.is_floating_point() else some
        try:
            exact = copy.deepcopy(model).double()
            answers = exact(wide)
        except Exception:  # it works in its own precision only
            return difference(model, batch, allowed)
        own = model(some)
        rounding = float((own.double() - answers).abs().max())
        if found := difference(exact, wide, _EXACT * _sizes(answers) + _FINER * rounding):
            return found
        allowed = torch.minimum(allowed, _TIMES * rounding + 1e-6 * _sizes(own))
    return difference(model, batch, allowed)


def _sizes(answers: Tensor) -> Tensor:
    """The largest of each output over a batch (B, ...): float64 (...)."""
    return answers.double().abs().amax(0)


def difference(forward: Forward, batch: Tensor, allowed: Tensor) -> str | None:
    """As `mixing`, for any function of a batch with one row of answers for each row.

    allowed: the largest difference that is rounding, of each answer: (...).
    """
    with torch.no_grad():
        expected = forward(batch)
        for what, rows, arranged in _arrangements(batch):
            try:
                answer = forward(arranged)[: len(rows)]
            except Exception as error:  # whatever a user's model does
                return f"it fails {what} ({type(error).__name__})"
            off = (answer - expected[rows]).abs()
            if (beyond := ~(off <= allowed)).any():  # not a number is a difference
                worst = float(off[beyond].max())
                return f"the same example gets another answer {what} (off by {worst:.2g})"
    return None


def _arrangements(batch: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(in words, which rows of the batch stand first, the batch so arranged)."""
    size = len(batch)
    rows = torch.arange(size)
    yield "when asked again", rows, batch
    generator = torch.Generator().manual_seed(0)
    for order in (rows.flip(0), rows.roll(1), torch.randperm(size, generator=generator)):
        yield "in another position", order, batch[order]
    for kept, left in ((rows[::2], rows[1::2]), (rows[1::2], rows[::2])):
        if len(kept):
            for company in (torch.zeros_like(batch[left]), _far(batch[left])):
                yield "in other company", kept, torch.cat([batch[kept], company])
    for count in dict.fromkeys((1, max(1, size // 3))):
        yield f"in a batch of {count}", rows[-count:], batch[-count:]


def _far(rows: Tensor) -> Tensor:
    """Other inputs that a model takes: features far away, of whole numbers (tokens) other ones."""
    return 10 * rows.flip(0) + 3 if rows.is_floating_point() else rows.flip(0).roll(1, -1)
