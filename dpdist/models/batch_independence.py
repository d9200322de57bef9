"""Test whether a model treats each example alone, whatever the batch and its position in it.

Certificates, attacks and private gradients need a function of one example. A model that reads its
batch (a batch mean, batch normalization without stored statistics, experts with a capacity that the
batch shares) or the row (a mask by position) is not one. No finite test proves independence; this
one compares values, so detached values and integer inputs are covered. Rows of the counting itself
are executed again later, on the actual inputs: `dpdist.certification.reexecution`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from dpdist.core.errors import UserError

# A row's last bits depend on its position and other rows, by about 1e-6 of an output in float32.
# Without a comparison with float64 a larger difference must be allowed. Each output has its own
# tolerance: next to a class masked by -1e9 all other logits are below 1e-6 of the largest.
_EXACT, _COARSE = 1e-8, 1e-3
_TIMES = 100  # multiple of the float32 error of a few rows, for other rows
_FINER = 1e-7  # fraction of the float32 error, for what cancels in float64
_ROWS, _NUMBERS = 64, 2**20  # most rows and values in float64, which is slow for large models

Forward = Callable[[Tensor], Tensor]


def find_batch_dependence(
    model: nn.Module, batch: Tensor, copies: Tensor | None = None, *, alone: bool = False
) -> str | None:
    """Return in words how the output for one example depends on others; None if not detected.

    A batch of different inputs is tested in the model's precision, and some rows in float64; then a
    batch of copies of one input, as certificates execute: experts that are never full for different
    inputs are full for copies. The model stays in its mode. Copies of it are executed, so that
    state kept from one batch is not there in the next.

    Args:
        model: the module.
        batch: (B, ...) inputs of the kind and number that is executed; the model's outputs for them
            must be finite.
        copies: (B, ...) one input with the executed noise on each row. Default: rows near the first
            one of the batch.
        alone: whether every row is executed in a batch of one; then only a repeated execution is
            compared.
    """
    if alone:
        batch = batch[:1]
    copies = _interpolated_rows(batch) if copies is None else copies
    with torch.no_grad():
        used = fresh_copy(model)
        allowed, some = _COARSE * _largest_outputs(used(batch)), _rows_tried_in_float64(batch)
        found = _evaluate_in_float64(model, some)
        if found is not None:
            exact, wide, answers = found
            own = used(some)
            fine = _EXACT * _largest_outputs(answers) + _FINER * _largest_error(own, answers)
            wide_copies = _rows_tried_in_float64(copies).to(wide)
            if seen := find_output_difference(exact, wide, fine, wide_copies, alone=alone):
                return seen
            allowed = _combined_tolerance(own, answers, allowed)
    return find_output_difference(
        used, batch, allowed, copies, lambda: fresh_copy(model), alone=alone
    )


def fresh_copy(model: nn.Module) -> nn.Module:
    """Return a copy of the model that shares only its parameters, not its buffers.

    Raises UserError for a module that cannot be copied: state kept from one batch could not be
    detected in the next.
    """
    try:
        return copy.deepcopy(model, {id(each): each for each in model.parameters()})
    except Exception as error:  # any error of a user's model
        raise UserError(
            f"the model must be one that copy.deepcopy copies, got {type(error).__name__}: {error}"
            "; create what it has besides parameters (locks, handles, tensors computed from "
            "parameters) when it is called"
        ) from error


def rounding_tolerance(model: nn.Module, batch: Tensor) -> Tensor:
    """Return how much rounding may change each output: float64, the shape of one output.

    It is measured on some inputs against float64; if the model only runs in its own precision, it
    is a thousandth of the largest output.

    batch: (B, ...) inputs whose outputs are finite.
    """
    with torch.no_grad():
        some = _rows_tried_in_float64(batch)
        own = model(some)
        found = _evaluate_in_float64(model, some)
        coarse = _COARSE * _largest_outputs(own)
        return coarse if found is None else _combined_tolerance(own, found[2], coarse)


def _rows_tried_in_float64(batch: Tensor) -> Tensor:
    """Return the rows that are tested in float64."""
    return batch[: max(4, min(_ROWS, _NUMBERS // max(1, batch[0].numel())))]


def _evaluate_in_float64(model: nn.Module, some: Tensor) -> tuple[nn.Module, Tensor, Tensor] | None:
    """Return model, rows and outputs in float64; None if the model does not run in it."""
    wide = some.double() if some.is_floating_point() else some
    try:
        exact = copy.deepcopy(model).double()
        return exact, wide, exact(wide)
    except Exception:  # any error of a user's model
        return None


def _combined_tolerance(own: Tensor, exact: Tensor, coarse: Tensor) -> Tensor:
    """Return the tolerance of each output, from outputs of some rows in both precisions."""
    return torch.minimum(coarse, _TIMES * _largest_error(own, exact) + 1e-6 * _largest_outputs(own))


def _largest_error(own: Tensor, exact: Tensor) -> float:
    return float((own.double() - exact).abs().max())


def _largest_outputs(answers: Tensor) -> Tensor:
    """Return the largest magnitude of each output over a batch (B, ...): float64 (...)."""
    return answers.double().abs().amax(0)


def find_output_difference(
    forward: Forward,
    batch: Tensor,
    allowed: Tensor,
    copies: Tensor | None = None,
    fresh: Callable[[], Forward] | None = None,
    *,
    alone: bool = False,
) -> str | None:
    """Return as `find_batch_dependence`, for any function of a batch with one output row per row.

    allowed: tolerance of each output, (...). fresh: returns the same function without state; None
    if it has no state.
    """
    if alone:
        return _compare(forward, batch, [_asked_again(batch)], allowed, fresh)
    copies = _interpolated_rows(batch) if copies is None else copies
    return _compare(forward, batch, _arrangements(batch), allowed, fresh) or _compare(
        forward, copies, _copy_arrangements(copies, batch), allowed, fresh
    )


_Arrangement = tuple[str, Tensor, Tensor]  # description, indices of the first rows, the batch


def _compare(
    forward: Forward,
    batch: Tensor,
    arrangements: Iterable[_Arrangement],
    allowed: Tensor,
    fresh: Callable[[], Forward] | None = None,
) -> str | None:
    with torch.no_grad():
        expected = forward(batch)
        for what, rows, arranged in arrangements:
            again = forward if fresh is None else fresh()
            try:
                answer = again(arranged)[: len(rows)]
            except Exception as error:  # any error of a user's model
                return f"it fails {what} ({type(error).__name__})"
            off = (answer - expected[rows]).abs()
            # Outputs that are not finite (a copy beyond the number format) are not compared.
            beyond = ~(off <= allowed) & expected[rows].isfinite()
            if beyond.any():  # also if an output becomes NaN
                worst = float(off[beyond].max())
                return f"the same example has a different output {what} (off by {worst:.2g})"
    return None


def _asked_again(batch: Tensor) -> _Arrangement:
    return "when executed again", torch.arange(len(batch)), batch


def _arrangements(batch: Tensor) -> Iterator[_Arrangement]:
    size = len(batch)
    rows = torch.arange(size)
    yield _asked_again(batch)
    generator = torch.Generator().manual_seed(0)
    for order in (rows.flip(0), rows.roll(1), torch.randperm(size, generator=generator)):
        yield "in a different position", order, batch[order]
    for kept, left in ((rows[::2], rows[1::2]), (rows[1::2], rows[::2])):
        if len(kept):
            for company in (torch.zeros_like(batch[left]), _distant_rows(batch[left])):
                yield "among other inputs", kept, torch.cat([batch[kept], company])
    for count in dict.fromkeys((1, max(1, size // 3))):
        yield f"in a batch of {count}", rows[-count:], batch[-count:]


def _copy_arrangements(copies: Tensor, others: Tensor) -> Iterator[_Arrangement]:
    """Yield several numbers of copies of one input among other inputs (B, ...).

    They are the last copies, which receive last what a batch shares.
    """
    size = len(copies)
    rows = torch.arange(size)
    yield "in a different position among copies of itself", rows.flip(0), copies.flip(0)
    for count in dict.fromkeys((size // 2, size // 4, 2, 1)):
        if 0 < count < size:
            kept, company = rows[-count:], others[: size - count]
            what = f"as one of {count} copies among other inputs, not of {size}"
            yield what, kept, torch.cat([copies[kept], company])
    yield "alone, not among copies of itself", rows[-1:], copies[-1:]


def _interpolated_rows(batch: Tensor) -> Tensor:
    """Return rows a tenth of the way from the first one to each other; of integers, copies."""
    first = batch[:1].expand_as(batch)
    return first + 0.1 * (batch - first) if batch.is_floating_point() else first.clone()


def _distant_rows(rows: Tensor) -> Tensor:
    """Return other valid inputs: distant features, or other tokens."""
    return 10 * rows.flip(0) + 3 if rows.is_floating_point() else rows.flip(0).roll(1, -1)
