"""Test whether a model treats each example alone, whatever is in the batch and wherever it stands.

A certificate, an attack and a private gradient speak of one function of one example. A model that
looks at its batch (a batch mean, batch normalization without stored statistics, experts with a
capacity that the batch shares) or at the row (a mask by position) is none. No finite test shows
independence; this one compares values, so detached values and integer inputs are covered too. Rows
of the counting itself are executed again later, on the inputs themselves:
`dpdist.certification.reexecution`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from dpdist.core.errors import UserError

# A row's last bits depend on its place and company: by some 1e-6 of an output in float32. Where
# that is not known from float64, where nothing of it is left, more must be allowed. Each output has
# its own: beside a class masked by -1e9 all that the others say is below 1e-6 of the largest.
_EXACT, _COARSE = 1e-8, 1e-3
_TIMES = 100  # the float32 error of a few rows, for what others may have
_FINER = 1e-7  # of the float32 error, for what cancels in float64
_ROWS, _NUMBERS = 64, 2**20  # tried in float64, which is slow for large models

Forward = Callable[[Tensor], Tensor]


def find_batch_dependence(
    model: nn.Module, batch: Tensor, copies: Tensor | None = None, *, alone: bool = False
) -> str | None:
    """Return how the answer to one example depends on the others, in words; None if not seen.

    All of a batch of different inputs is tried in the model's own precision, some rows in float64;
    then a batch of copies of one input, which is what certificates execute: experts that are never
    full for different inputs are full for copies. The model stays in its mode, and copies of it are
    asked: what one kept of a batch, the next one does not know.

    Args:
        batch: (B, ...) inputs of the kind and number that is executed; the model's outputs for them
            must be finite.
        copies: (B, ...) one input with the executed noise on each row. Default: rows that lie near
            the first one of the batch.
        alone: every row is executed in a batch of one, so nothing is there to depend on: tried is
            alone whether an answer is another one when it is asked for again.
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
    """Return a copy that shares the parameters of the model; all else, buffers too, is its own.

    Raises UserError for a module that cannot be copied: what it keeps of one batch could not be
    told from what it knows of the next.
    """
    try:
        return copy.deepcopy(model, {id(each): each for each in model.parameters()})
    except Exception as error:  # whatever a user's model does
        raise UserError(
            f"the model must be one that copy.deepcopy copies, got {type(error).__name__}: {error}"
            "; make what it holds beside its parameters (locks, handles, tensors that follow from "
            "parameters) when it is called"
        ) from error


def rounding_tolerance(model: nn.Module, batch: Tensor) -> Tensor:
    """Return by how much rounding alone may change each output: float64, the shape of one answer.

    batch: (B, ...) inputs whose outputs are finite. Measured on some of them against float64; where
    the model works in its own precision only, a thousandth of the largest output.
    """
    with torch.no_grad():
        some = _rows_tried_in_float64(batch)
        own = model(some)
        found = _evaluate_in_float64(model, some)
        coarse = _COARSE * _largest_outputs(own)
        return coarse if found is None else _combined_tolerance(own, found[2], coarse)


def _rows_tried_in_float64(batch: Tensor) -> Tensor:
    """The rows that are tried in float64."""
    return batch[: max(4, min(_ROWS, _NUMBERS // max(1, batch[0].numel())))]


def _evaluate_in_float64(model: nn.Module, some: Tensor) -> tuple[nn.Module, Tensor, Tensor] | None:
    """The model and the rows in float64, and its answers; None where it has its own precision."""
    wide = some.double() if some.is_floating_point() else some
    try:
        exact = copy.deepcopy(model).double()
        return exact, wide, exact(wide)
    except Exception:  # whatever a user's model does
        return None


def _combined_tolerance(own: Tensor, exact: Tensor, coarse: Tensor) -> Tensor:
    """What rounding may do to each output, of the answers to some rows in both precisions."""
    return torch.minimum(coarse, _TIMES * _largest_error(own, exact) + 1e-6 * _largest_outputs(own))


def _largest_error(own: Tensor, exact: Tensor) -> float:
    return float((own.double() - exact).abs().max())


def _largest_outputs(answers: Tensor) -> Tensor:
    """The largest of each output over a batch (B, ...): float64 (...)."""
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
    """As `find_batch_dependence`, for any function of a batch with one row of answers for each row.

    allowed: the largest difference that is rounding, of each answer: (...). fresh: makes the same
    function, which has not been asked yet; None: it keeps nothing of what it was asked.
    """
    if alone:
        return _compare(forward, batch, [_asked_again(batch)], allowed, fresh)
    copies = _interpolated_rows(batch) if copies is None else copies
    return _compare(forward, batch, _arrangements(batch), allowed, fresh) or _compare(
        forward, copies, _copy_arrangements(copies, batch), allowed, fresh
    )


_Arrangement = tuple[str, Tensor, Tensor]  # in words, which rows stand first, the batch so arranged


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
            except Exception as error:  # whatever a user's model does
                return f"it fails {what} ({type(error).__name__})"
            off = (answer - expected[rows]).abs()
            # What is no number already (a copy beyond the number format) has no answer to change.
            beyond = ~(off <= allowed) & expected[rows].isfinite()
            if beyond.any():  # becoming no number is a difference
                worst = float(off[beyond].max())
                return f"the same example gets another answer {what} (off by {worst:.2g})"
    return None


def _asked_again(batch: Tensor) -> _Arrangement:
    return "when asked again", torch.arange(len(batch)), batch


def _arrangements(batch: Tensor) -> Iterator[_Arrangement]:
    size = len(batch)
    rows = torch.arange(size)
    yield _asked_again(batch)
    generator = torch.Generator().manual_seed(0)
    for order in (rows.flip(0), rows.roll(1), torch.randperm(size, generator=generator)):
        yield "in another position", order, batch[order]
    for kept, left in ((rows[::2], rows[1::2]), (rows[1::2], rows[::2])):
        if len(kept):
            for company in (torch.zeros_like(batch[left]), _distant_rows(batch[left])):
                yield "in other company", kept, torch.cat([batch[kept], company])
    for count in dict.fromkeys((1, max(1, size // 3))):
        yield f"in a batch of {count}", rows[-count:], batch[-count:]


def _copy_arrangements(copies: Tensor, others: Tensor) -> Iterator[_Arrangement]:
    """Copies of one input in several numbers among other inputs; the last ones, which whatever is
    shared by a batch reaches last. others: (B, ...)."""
    size = len(copies)
    rows = torch.arange(size)
    yield "in another position among copies of itself", rows.flip(0), copies.flip(0)
    for count in dict.fromkeys((size // 2, size // 4, 2, 1)):
        if 0 < count < size:
            kept, company = rows[-count:], others[: size - count]
            what = f"as one of {count} copies among other inputs, not of {size}"
            yield what, kept, torch.cat([copies[kept], company])
    yield "alone, not among copies of itself", rows[-1:], copies[-1:]


def _interpolated_rows(batch: Tensor) -> Tensor:
    """Rows near the first one: a tenth of the way to each other row. Of whole numbers, copies."""
    first = batch[:1].expand_as(batch)
    return first + 0.1 * (batch - first) if batch.is_floating_point() else first.clone()


def _distant_rows(rows: Tensor) -> Tensor:
    """Other inputs that a model takes: features far away, of whole numbers (tokens) other ones."""
    return 10 * rows.flip(0) + 3 if rows.is_floating_point() else rows.flip(0).roll(1, -1)
