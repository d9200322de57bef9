"""Per-example gradients of one parameter, in three forms; their norms and weighted sums.

A layer call adds to a parameter's per-example gradients in its cheapest form; all forms have the
example on dimension 0:

* dense: the per-example gradients themselves.
* outer product: a sum over positions of left ⊗ right. Its norm needs only the Gram matrices of the
  two factors ("ghost norm", Goodfellow 2015; Li et al. 2022), its clipped sum one matrix product.
* embedding rows: one row per looked-up token.

Channels-last convolutions produce their gradients as (out, kh, kw, in); `order` is the permutation
that brings such a gradient to the parameter's own shape, applied to the sum only.

`PerExampleGradient` adds the contributions of one parameter over draws, repeated calls of a module
and modules that share the parameter, so cross terms are correct by construction. An embedding that
is also the output layer has both outer products and rows; the inner product of the two,
sum_st left[t, id_s] <values_s, right_t>, needs no gradient of the table's size either.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dpdist.core.errors import UserError
from dpdist.core.torch_settings import DETERMINISTIC
from dpdist.gradients.random_passes import States

# --- three forms ------------------------------------------------------------------------------


# Materializing writes the per-example gradient once and reads it twice; those are memory-bound
# passes, each worth about this many multiply-adds per element of a matrix product.
_TRAFFIC_COST = 4.0
# Above this many elements a parameter's per-example gradients are not kept when the Gram matrices
# are smaller.
_LARGE = 1 << 18
# Patches are copied out this many bytes per thread at a time: they are multiplied while still in
# the cache, four times faster than all at once on large images.
_CHUNK_BYTES = 3 << 19
# Below this many positions a product is bound by writing its result.
FEW_POSITIONS = 64
# Factors are widened to float64, and products of them made, this many bytes at a time.
_WIDE_BYTES = 32 << 20
# Squares are added up in their own precision this many at a time: the bound on a norm's rounding
# grows with it (`squared_row_norms`), so `dpdist.gradients.clipping.rounding_slack` rests on it.
_BLOCK = 128
# The smallest squared norm of a gradient of T positions, in units of T^2 (sum_t |l_t| |r_t|)^2:
# `dpdist.gradients.clipping.sum_slack` rests on it.
_CANCELLATION_FLOOR = 2.0**-42


Order = tuple[int, ...] | None


@dataclass
class DenseGradient:
    """values: (B, *parameter.shape), or in the stored order (see `OuterProductGradient.order`)."""

    values: Tensor
    order: Order = None


@dataclass
class OuterProductGradient:
    """left: (B, T, o), right: (B, T, i); gradient of example b: sum_t left[b, t] ⊗ right[b, t].

    right may be an overlapping view (B, *positions, *window) of a convolution's input, whose last
    `window` dimensions make up i: its patches are then copied in pieces that stay in the cache.
    order: see the module's docstring. source: the layer's input if right was computed from it;
    calls with the same input have the same right factor.
    """

    left: Tensor
    right: Tensor
    order: Order = None
    source: Tensor | None = None

    @property
    def widths(self) -> tuple[int, int]:
        """Return (o, i)."""
        return self.left.shape[2], self.right[0].numel() // self.left.shape[1]

    def has_same_input(self, other: OuterProductGradient) -> bool:
        """Return whether both have the same input, by its memory."""
        own, its = self.source, other.source
        if own is None or its is None or self.left.shape != other.left.shape:
            return False
        return (own.data_ptr(), own.shape, own.stride(), own.dtype) == (
            its.data_ptr(),
            its.shape,
            its.stride(),
            its.dtype,
        )

    def with_copied_patches(self) -> OuterProductGradient:
        """Return the same with a (B, T, i) right factor: patches of a convolution are copied."""
        batch, positions, _ = self.left.shape
        return OuterProductGradient(self.left, self.right.reshape(batch, positions, -1), self.order)

    def batch_slices(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield slices of the batch with their left^T (b, o, T) and right (b, T, i).

        Patches are in one buffer, which the next slice overwrites.
        """
        batch, positions, _ = self.left.shape
        if self.right.dim() == 3:
            yield slice(0, batch), self.left.transpose(1, 2), self.right
            return
        example = self.right[0].numel() * self.right.element_size()
        step = max(1, torch.get_num_threads() * _CHUNK_BYTES // example)
        buffer = self.right.new_empty(min(step, batch), *self.right.shape[1:])
        for start in range(0, batch, step):
            piece = slice(start, min(start + step, batch))
            patches = buffer[: piece.stop - start].copy_(self.right[piece])
            yield piece, self.left[piece].transpose(1, 2), patches.view(len(patches), positions, -1)

    def to_dense(self) -> Tensor:
        """Return the per-example gradients, (B, o, i)."""
        out = self.left.new_empty(len(self.left), *self.widths)
        for piece, left, right in self.batch_slices():
            torch.bmm(left, right, out=out[piece])
        return out

    def accumulate_into(self, total: Tensor) -> None:
        """Add the per-example gradients to total (B, o, i)."""
        for piece, left, right in self.batch_slices():
            total[piece].baddbmm_(left, right)


@dataclass
class EmbeddingGradient:
    """ids: (B, T) integers in [0, rows), values: (B, T, d); ids < 0 contribute nothing."""

    ids: Tensor
    values: Tensor
    num_embeddings: int

    def to_dense(self) -> Tensor:
        batch, _, width = self.values.shape
        out = self.values.new_zeros(batch, self.num_embeddings, width)
        live = self.ids >= 0
        example = torch.arange(batch, device=self.ids.device)[:, None].expand_as(self.ids)
        index = (example[live], self.ids[live])
        with sums_in_order(out.device):
            return out.index_put_(index, self.values[live], accumulate=True)


Contribution = DenseGradient | OuterProductGradient | EmbeddingGradient


def materializing_is_cheaper(positions: int, out_width: int, in_width: int) -> bool:
    """Return whether keeping per-example gradients beats Gram matrices and a second product."""
    size, grams = out_width * in_width, positions * positions
    if size > _LARGE and grams < size:
        return False
    return _TRAFFIC_COST * size < grams * (out_width + in_width)


def sum_outer_products(parts: list[OuterProductGradient]) -> Tensor:
    """Return the sum of the parts' gradients (B, o, i), as one product over all positions."""
    batch = len(parts[0].left)
    out = parts[0].left.new_empty(batch, *parts[0].widths)
    positions = [part.left.shape[1] for part in parts]
    example = sum(part.right[0].numel() * part.right.element_size() for part in parts)
    step = max(1, torch.get_num_threads() * _CHUNK_BYTES // example)
    for start in range(0, batch, step):
        piece = slice(start, start + step)
        left = torch.cat([part.left[piece] for part in parts], dim=1)
        right = left.new_empty(len(left), sum(positions), out.shape[2])
        for part, place in zip(parts, right.split(positions, dim=1), strict=True):
            window = part.right.shape[1:]
            place.view(len(left), *window).copy_(part.right[piece])
        torch.bmm(left.transpose(1, 2), right, out=out[piece])
    return out


@contextmanager
def sums_in_order(device: torch.device) -> Iterator[None]:
    """Let torch's CPU kernels add numbers in a fixed order until the end of the block.

    With several threads its sum by index (`index_put_`, the gradient of `h[:, places]`) splits all
    numbers among them, regardless of records, and the threads add in any order: one record's bits
    then change with its neighbors' and from one pass to the next.
    """
    with nullcontext() if device.type != "cpu" else DETERMINISTIC.block():
        yield


def rounds_factors(device: torch.device) -> bool:
    """Return whether float32 products round their factors: by autocast, TF32 or bfloat16."""
    backends: Any = torch.backends
    products = backends.cuda.matmul if device.type == "cuda" else backends.mkldnn.matmul
    return torch.is_autocast_enabled(device.type) or products.fp32_precision not in ("none", "ieee")


def add_rows(values: Tensor, factors: Tensor, total: Tensor, run_length: int) -> None:
    """Add factors @ values (B, size) to total (size,): sums of `run_length` rows in their own
    precision, sums of these in float64."""
    if values.dtype == torch.float64 or run_length == 1:
        for piece, weights in zip(values.split(32), factors.split(32), strict=True):
            total.addmv_(piece.double().t(), weights)
        return
    whole = len(values) // run_length * run_length
    weights = factors.to(values.dtype)
    if whole:
        runs = values[:whole].unflatten(0, (-1, run_length))
        total += torch.bmm(weights[:whole].view(-1, 1, run_length), runs).sum(
            (0, 1), dtype=torch.float64
        )
    if whole < len(values):
        total += weights[whole:] @ values[whole:]


def add_products(piece: OuterProductGradient, factors: Tensor, total: Tensor) -> None:
    """Add sum_b factors[b] * sum_t left[b, t] ⊗ right[b, t], computed in float64, to `total`.

    The products are computed separately and added to `total` once. A product that started with
    `total` would round its large intermediate terms differently after any change of another record.

    Args:
        piece: (B, T, o) and (B, T, i).
        factors: float64 (B,).
        total: float64, o * i numbers, contiguous.
    """
    left, right = piece.left, piece.right
    matrix = total.view(left.shape[2], right.shape[2])
    step = max(1, _WIDE_BYTES // (8 * left.shape[1] * (left.shape[2] + right.shape[2])))
    rows = max(1, _WIDE_BYTES // (8 * right.shape[2]))
    for start in range(0, len(left), step):
        some = slice(start, start + step)
        other, weights = right[some].double(), factors[some, None, None]
        if left.shape[2] > other.shape[2]:
            other = other * weights
        other = other.flatten(0, 1)
        # The left factor may be as wide as a vocabulary.
        wide = max(rows, _WIDE_BYTES // (8 * len(other)))
        for targets, columns in zip(matrix.split(wide), left[some].split(wide, 2), strict=True):
            one = columns.double()
            if left.shape[2] <= right.shape[2]:
                one = one * weights
            one = one.flatten(0, 1).t()
            for target, part in zip(targets.split(rows), one.split(rows), strict=True):
                target += part @ other


def add_embedding_rows(piece: EmbeddingGradient, factors: Tensor, total: Tensor) -> None:
    """Add sum_b factors[b] * the gradient of example b to `total`, in float64.

    As in `add_products`, the sum of one pass is computed separately and added once.

    Args:
        piece: (B, T) ids and (B, T, d) values.
        factors: float64 (B,).
        total: float64 (rows, d).
    """
    live = piece.ids >= 0
    ids, place = piece.ids[live].unique(return_inverse=True)
    values = (piece.values.double() * factors[:, None, None])[live]
    sums = total.new_zeros(len(ids), total.shape[1]).index_add_(0, place, values)
    total.index_add_(0, ids, sums)


def _by_example(values: Tensor) -> Tensor:
    """Return (B, ...) as (B, n), also for a parameter that is one number."""
    return values.reshape(len(values), math.prod(values.shape[1:]))


def squared_row_norms(values: Tensor) -> Tensor:
    """Return the squared norms of the rows, none too small by more than its rounding.

    Guarantee: the computed norm is at least (1 - 2^-17.9) times the true one for float32, and
    (1 - 2^-44) times for float64, for rows of up to 2^28 numbers and any order of summation.
    `_BLOCK` squares are added in the precision of `values`: their sum is off by at most
    128 u / (1 - 128 u) of itself, u = 2^-24 (Higham, Accuracy and Stability of Numerical
    Algorithms, section 3.1), and its root by u more. Everything after that is float64, again in
    blocks. A sum of all entries in float32 can be too small by any factor: many equal entries all
    round down. A bound on the loss by underflow is added.

    Args:
        values: (B, n), float32 or float64.

    Returns:
        (B,), float64.
    """
    width = values.shape[1]
    whole = width - width % _BLOCK
    parts = [values[:, :whole].unflatten(1, (-1, _BLOCK))] if whole else []
    parts += [values[:, None, whole:]] if whole < width or not width else []
    lengths = torch.cat([torch.linalg.vector_norm(part, dim=2) for part in parts], dim=1)
    squares = lengths.double().square()
    while squares.shape[1] > _BLOCK:
        missing = -squares.shape[1] % _BLOCK
        squares = torch.nn.functional.pad(squares, (0, missing)).unflatten(1, (-1, _BLOCK)).sum(2)
    return squares.sum(1) + width * _underflow_bound(values.dtype)


def _underflow_bound(dtype: torch.dtype) -> float:
    """Return a bound on the part of a square that underflow takes in this precision."""
    return 2 * torch.finfo(dtype).smallest_normal


def outer_squared_norms(piece: OuterProductGradient) -> Tensor:
    """Return the squared norms of sum_t left[b, t] ⊗ right[b, t], not computed: float64 (B,).

    Guarantee: never below the true ones by more than `squared_row_norms` allows, see
    `_gram_squared_norms`.
    """
    left, right = piece.left, piece.right
    if left.shape[1] == 1:
        return squared_row_norms(left[:, 0]) * squared_row_norms(right[:, 0])
    positions, widths = left.shape[1], left.shape[2] + right.shape[2]
    example = 8 * positions * (widths + 3 * positions)
    norms = [
        _gram_squared_norms(_gram(one), _gram(other), widths)
        for one, other in zip(*_in_pieces(example, left, right), strict=True)
    ]
    return torch.cat(norms)


def tied_squared_norms(outer: OuterProductGradient, rows: EmbeddingGradient) -> Tensor:
    """Return squared norms (B,), float64, for an embedding that is also the output layer.

    The rows are outer products of the looked-up rows' unit vectors and the values, so the sum of
    both is an outer product over all positions of both, and the norm is that of its Gram matrices.

    Guarantee: as of `outer_squared_norms`. An entry of the left Gram matrix between a unit vector
    and a left factor is one number of that factor, so it is exact.

    Args:
        outer: left (B, T, rows), right (B, T, d).
        rows: ids (B, S), values (B, S, d).
    """
    left, right = outer.left, outer.right
    positions = left.shape[1] + rows.ids.shape[1]
    widths = left.shape[2] + right.shape[2]
    example = 8 * positions * (widths + right.shape[2] + 3 * positions)
    norms = []
    for one, other, ids, values in zip(
        *_in_pieces(example, left, right, rows.ids, rows.values), strict=True
    ):
        same = ((ids[:, :, None] == ids[:, None, :]) & (ids >= 0)[:, :, None]).double()
        picked = one.gather(2, ids.clamp(min=0)[:, None, :].expand(-1, one.shape[1], -1)).double()
        picked = picked * (ids >= 0)[:, None, :]  # (b, T, S)
        gram_left = torch.cat(
            [
                torch.cat([_gram(one), picked], dim=2),
                torch.cat([picked.transpose(1, 2), same], dim=2),
            ],
            dim=1,
        )
        gram_right = _gram(torch.cat([other.double(), values.double()], dim=1))
        norms.append(_gram_squared_norms(gram_left, gram_right, widths))
    return torch.cat(norms)


def embedding_squared_norms(piece: EmbeddingGradient) -> Tensor:
    """Return the squared norms of an embedding's per-example gradients: float64 (B,).

    Guarantee: as of `outer_squared_norms`; an embedding's left factors are the unit vectors of the
    looked-up rows, so that their Gram matrix is exact.
    """
    positions, width = piece.values.shape[1:]
    example = 8 * positions * (width + 3 * positions)
    norms = []
    for ids, values in zip(*_in_pieces(example, piece.ids, piece.values), strict=True):
        same = (ids[:, :, None] == ids[:, None, :]) & (ids >= 0)[:, :, None]
        norms.append(_gram_squared_norms(_gram(values), same.double(), width))
    return torch.cat(norms)


def _in_pieces(example_bytes: int, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Split the batch into pieces that need little memory in float64."""
    step = max(1, _WIDE_BYTES // max(1, example_bytes))
    return [tensor.split(step) for tensor in tensors]


def _gram(factor: Tensor) -> Tensor:
    """Return the Gram matrices of (B, T, w): float64 (B, T, T).

    A factor as wide as a vocabulary is widened in groups of columns.
    """
    columns = max(1, _WIDE_BYTES // (8 * factor.shape[0] * factor.shape[1]))
    total, odd = None, factor.shape[1] % 2
    for part in factor.split(columns, dim=2):
        wide = part.double()
        if odd:  # else the alignment, and so the rounding, of matrices would differ
            wide = torch.nn.functional.pad(wide, (0, 0, 0, 1))
        product = torch.bmm(wide, wide.transpose(1, 2))
        total = product if total is None else total.add_(product)
    assert total is not None
    return total[:, : factor.shape[1], : factor.shape[1]]


def _gram_squared_norms(gram_left: Tensor, gram_right: Tensor, widths: int) -> Tensor:
    """Return sum_st gram_left[s, t] gram_right[s, t], raised by a bound on its rounding.

    Guarantee: never below the true squared norm N^2 of sum_t l_t ⊗ r_t, for every number of
    positions T and every width, but for a relative 2^-50. With M = (sum_t |l_t| |r_t|)^2 and
    u = 2^-53, an entry of a Gram matrix of w products is off by at most w u |l_s| |l_t| (Higham,
    section 3.1, and Cauchy-Schwarz), the product of two entries by (w_l + w_r + 1) u of
    |l_s| |l_t| |r_s| |r_t|, and the sum of T^2 products by T^2 u more: at most
    (w_l + w_r + T^2 + 1) u M in all. Twice that is added, which covers terms of second order and
    the rounding of M. If positions cancel, N^2 is far below M; with a bound that does not grow with
    the widths, or Gram matrices in float32, such a gradient would escape the clip.

    A further `_CANCELLATION_FLOOR` T^2 M keeps N^2 / M, and so what rounding adds to the sum of
    clipped gradients, from becoming arbitrarily small: see `dpdist.gradients.clipping.sum_slack`.

    Args:
        gram_left, gram_right: float64 (B, T, T).
        widths: w_l + w_r; an exact Gram matrix counts as 0.

    Returns:
        (B,), float64.
    """
    positions = gram_left.shape[1]
    total = (gram_left * gram_right).sum((1, 2)).clamp(min=0)
    squares = [gram.diagonal(dim1=1, dim2=2) for gram in (gram_left, gram_right)]
    magnitude = (squares[0] * squares[1]).sqrt().sum(1).square()
    rounding = (widths + positions**2 + 8) * 2.0**-52
    bounded = total + (rounding + positions**2 * _CANCELLATION_FLOOR) * magnitude
    lost = widths * sum(square.sum(1) for square in squares) + positions
    return bounded + positions * _underflow_bound(torch.float64) * lost


# --- contributions to one parameter -----------------------------------------------------------


class PerExampleGradient:
    """The per-example gradients of one parameter, accumulated over draws and calls.

    draws: expected number of each contribution, for the choice of form.
    shared: whether modules share the parameter, so that contributions of different forms meet. A
    small parameter's gradients are materialized; those of a large one, such as an embedding that is
    also the output layer, keep their forms if all are outer products and rows.
    """

    def __init__(self, shape: torch.Size, *, draws: int = 1, shared: bool = False) -> None:
        self.shape = shape
        self._draws = draws
        self._shared = shared
        self._dense_only = shared and math.prod(shape) <= _LARGE
        self._order: Order = None
        self._dense: Tensor | None = None  # (B, *stored shape)
        self._owned = False
        self._deferred: list[OuterProductGradient] = []  # to be materialized together
        self._outer: list[OuterProductGradient] = []
        self._rows: list[EmbeddingGradient] = []
        # the call whose input the next draw may see again
        self._shared_input_call: OuterProductGradient | None = None
        self._version = 0  # of that input
        self._expects_shared_input = draws > 1 and not shared

    def add(self, contribution: Contribution) -> None:
        """Add the contribution of one call of a layer.

        If all draws see the same input (a first layer under perturbed parameters), the left factors
        are summed and the product is computed once: sum_k left_k ⊗ right.
        """
        if not (
            self._expects_shared_input
            and isinstance(contribution, OuterProductGradient)
            and contribution.source is not None
        ):
            self._add(contribution)
        elif self._shared_input_call is None:
            self._shared_input_call, self._version = contribution, contribution.source._version
        elif contribution.has_same_input(self._shared_input_call):
            self._shared_input_call = replace(
                self._shared_input_call, left=self._shared_input_call.left + contribution.left
            )
        else:
            self._flush_shared_input()
            self._add(contribution)

    def _flush_shared_input(self) -> None:
        """Add the call that was kept for draws with the same input, and expect no more of them.

        Raises UserError if the model wrote to the input since then.
        """
        held, self._shared_input_call = self._shared_input_call, None
        self._expects_shared_input = False
        if held is not None:
            if held.source is not None and held.source._version != self._version:
                raise UserError(
                    "the model changes its input in place, so that the next draw sees a different "
                    "one: let it work on a copy"
                )
            self._add(held)

    def _add(self, contribution: Contribution) -> None:
        if isinstance(contribution, EmbeddingGradient):
            if self._dense_only:
                self._add_dense(contribution.to_dense(), None, fresh=True)
            else:
                self._rows.append(contribution)
        elif isinstance(contribution, DenseGradient):
            self._add_dense(contribution.values, contribution.order, fresh=False)
        elif not self._shared and self._should_defer(contribution):
            self._order = contribution.order
            self._deferred.append(replace(contribution, source=None))  # frees the input
        elif self._dense_only or self._materialize(contribution):
            if self._dense is not None and self._owned and not self._shared:
                contribution.accumulate_into(self._dense.view(-1, *contribution.widths))
            else:
                self._add_dense(contribution.to_dense(), contribution.order, fresh=True)
        elif self._shared and contribution.order is not None:
            self._add_dense(contribution.to_dense(), contribution.order, fresh=True)
        else:
            self._order = contribution.order
            self._outer.append(contribution.with_copied_patches())

    def _materialize(self, piece: OuterProductGradient) -> bool:
        return materializing_is_cheaper(piece.left.shape[1] * self._draws, *piece.widths)

    def _should_defer(self, piece: OuterProductGradient) -> bool:
        """Return whether one product over all draws beats adding to memory K times."""
        few = piece.left.shape[1] < FEW_POSITIONS
        return self._draws > 1 and few and self._materialize(piece)

    def _stored_shape(self, order: Order) -> tuple[int, ...]:
        shape = [0] * len(self.shape)
        for size, place in zip(self.shape, order or range(len(shape)), strict=True):
            shape[place] = size
        return tuple(shape)

    def _add_dense(self, values: Tensor, order: Order, *, fresh: bool) -> None:
        if values.dtype in (torch.float16, torch.bfloat16):  # norms and sums would round in half
            values, fresh = values.float(), True
        values = values.reshape(len(values), *self._stored_shape(order))
        if self._shared and order is not None:  # other modules may store in another order
            values = values.permute(0, *(1 + place for place in order)).contiguous()
            order = None
        if self._dense is None:
            self._dense, self._owned, self._order = values, fresh, order
        elif self._owned:
            self._dense += values
        else:  # the first one may alias a layer's output gradient
            self._dense, self._owned = self._dense + values, True

    def _merge(self) -> None:
        """Convert several forms to one, so that norms include the cross terms."""
        if self._shared_input_call is not None:  # of all draws
            self._draws = 1
            self._flush_shared_input()
        if len(self._outer) > 1:
            left = torch.cat([piece.left for piece in self._outer], dim=1)
            right = torch.cat([piece.right for piece in self._outer], dim=1)
            self._outer = [OuterProductGradient(left, right, self._order)]
        if len(self._rows) > 1:
            ids = torch.cat([piece.ids for piece in self._rows], dim=1)
            values = torch.cat([piece.values for piece in self._rows], dim=1)
            self._rows = [EmbeddingGradient(ids, values, self._rows[0].num_embeddings)]
        if self._deferred:
            self._add_dense(sum_outer_products(self._deferred), self._order, fresh=True)
            self._deferred = []
        if self._outer and self._dense is not None:  # calls with different numbers of positions
            self._add_dense(self._outer.pop().to_dense(), self._order, fresh=True)
        if self._rows and self._dense is not None:
            self._add_dense(self._rows.pop().to_dense(), None, fresh=True)

    def squared_norms(self) -> Tensor | None:
        """Return the squared L2 norms, float64 (B,), or None without a contribution.

        They are never below the true ones by more than the rounding slack.
        """
        self._merge()
        if self._dense is not None:
            return squared_row_norms(_by_example(self._dense))
        if self._outer and self._rows:
            return tied_squared_norms(self._outer[0], self._rows[0])
        if self._outer:
            return outer_squared_norms(self._outer[0])
        if self._rows:
            return embedding_squared_norms(self._rows[0])
        return None

    def of_example(self, place: int) -> Tensor:
        """Return one example's gradient in float64, in the order in which it is stored."""
        self._merge()
        if self._dense is not None:
            return self._dense[place].double()
        total = torch.zeros(
            self._stored_shape(self._order), dtype=torch.float64, device=self._device
        )
        one = torch.ones(1, dtype=torch.float64, device=self._device)
        self._add_factored(place, one, total)
        return total

    @property
    def _device(self) -> torch.device:
        kept = [piece.left for piece in self._outer] + [rows.values for rows in self._rows]
        return kept[0].device

    def select(self, keep: Tensor | slice) -> None:
        """Keep some examples, a mask (B,) or a slice, and drop all values of the others.

        A factor of 0 would not do: 0 * Inf is NaN.
        """
        if self._dense is not None:
            self._dense, self._owned = self._dense[keep], False
        self._outer = [
            OuterProductGradient(piece.left[keep], piece.right[keep], piece.order)
            for piece in self._outer
        ]
        self._rows = [
            EmbeddingGradient(piece.ids[keep], piece.values[keep], piece.num_embeddings)
            for piece in self._rows
        ]

    def add_weighted_sum(self, factors: Tensor, out: Tensor, run_length: int) -> None:
        """Add sum_b factors[b] * gradient[b] to `out`, in float64.

        factors: float64 (B,). out: float64, contiguous, of the parameter's shape. run_length:
        number of per-example gradients that are first added in their own precision
        (`clipping.max_run_length`). Sums over positions are always float64: of positions that
        cancel only rounding is left.
        """
        total = out
        if self._order is not None:
            total = out.new_zeros(self._stored_shape(self._order))
        if self._dense is not None:
            add_rows(_by_example(self._dense), factors, total.view(-1), run_length)
        factored = [piece.left for piece in self._outer] + [rows.values for rows in self._rows]
        if any(values.dtype == torch.float64 for values in factored):
            # Positions that cancel, in one form or between two, round within their own record.
            for place, factor in enumerate(factors):
                own, one = torch.zeros_like(total), torch.ones_like(factors[:1])
                self._add_factored(place, one, own)
                total += factor * own
        elif factored:
            self._add_factored(None, factors, total)
        if self._order is not None:
            out += total.permute(self._order)

    def _add_factored(self, place: int | None, factors: Tensor, total: Tensor) -> None:
        """Add the gradients that are kept as factors, of one example or of all (None)."""

        def take(values: Tensor) -> Tensor:
            # Copied: the location in memory must not change the rounding.
            return values if place is None else values[place : place + 1].clone()

        for piece in self._outer:
            chosen = replace(piece, left=take(piece.left), right=take(piece.right))
            add_products(chosen, factors, total)
        for rows in self._rows:
            taken = replace(rows, ids=take(rows.ids), values=take(rows.values))
            add_embedding_rows(taken, factors, total)

    def nbytes(self) -> int:
        """Return the bytes in use after all draws, from those after one draw."""
        self._flush_shared_input()
        factors = [tensor for piece in self._outer for tensor in (piece.left, piece.right)]
        factors += [piece.values for piece in self._rows]
        factors += [piece.left for piece in self._deferred]
        held = sum(tensor.nbytes for tensor in factors)
        # Windows overlap: their memory is that of the input.
        held += sum(piece.right.untyped_storage().nbytes() for piece in self._deferred)
        return held * self._draws + (0 if self._dense is None else self._dense.nbytes)


# --- one captured call of a layer -------------------------------------------------------------


@dataclass
class LayerCall:
    """The inputs and outputs of a layer's call that a rule may read.

    inputs, kwargs: the arguments of `module.forward`, detached. shared: places of their leaves that
    belong to no example, although one may be as long as the batch. output_gradients: gradients of
    the summed loss with respect to every tensor of the (flattened) output, zeros for unused ones.
    parameters: the values in this call by local name (perturbed under parameter draws). trainable:
    the local names of the trained parameters. states: states of torch's generators at the start of
    the call, if the layer draws and its rule runs it again.
    """

    module: nn.Module
    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]
    output_gradients: list[Tensor]
    parameters: dict[str, Tensor]
    trainable: frozenset[str]
    shared: frozenset[int] = frozenset()
    states: States | None = None

    @property
    def input(self) -> Tensor:
        """Return the tensor input of a layer that has one."""
        result: Tensor = self.inputs[0] if self.inputs else self.kwargs["input"]
        return result

    @property
    def output_gradient(self) -> Tensor:
        return self.output_gradients[0]
