"""What one layer call adds to one parameter's per-example gradients, kept in its cheapest form.

Three forms, all with the example on dimension 0:

* `Dense`: the per-example gradients themselves.
* `Outer`: a sum over positions of left ⊗ right. Its norm needs only the Gram matrices of the two
  factors ("ghost norm", Goodfellow 2015; Li et al. 2022), its clipped sum one matrix product.
* `Rows`: an embedding's gradient, one row per looked-up token.

Channels-last convolutions produce their gradients as (out, kh, kw, in); `order` is the permutation
that brings such a gradient to the parameter's own shape, applied to the sum only.

`PerExampleGradient` adds the contributions of one parameter over draws, repeated calls of a module
and modules that share the parameter, so cross terms are right by construction.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Materialising writes the per-example gradient once and reads it twice; those are memory-bound
# passes, each worth about this many multiply-adds per element of a matrix product.
_TRAFFIC_COST = 4.0
# Above this many elements a parameter's per-example gradients are not kept when the Gram matrices
# are smaller.
_LARGE = 1 << 18
# Patches are copied out this many bytes per thread at a time: they are multiplied while still in
# the cache, four times faster than all at once on large images.
_CHUNK_BYTES = 3 << 19
# Below this many positions a product is bound by writing its result.
_FEW_POSITIONS = 64
# Factors are widened to float64 this many bytes at a time.
_WIDE_BYTES = 32 << 20
# Squares below this may be lost to underflow in float32.
_LOST = 2.0**-125


Order = tuple[int, ...] | None


@dataclass
class Dense:
    """values: (B, *parameter.shape), or in the stored order (see `Outer.order`)."""

    values: Tensor
    order: Order = None


@dataclass
class Outer:
    """left: (B, T, o), right: (B, T, i); gradient of example b: sum_t left[b, t] ⊗ right[b, t].

    right may be an overlapping view (B, *positions, *window) of a convolution's input, whose last
    `window` dimensions make up i: its patches are then copied out in pieces that stay in the cache.
    order: see the module's head.
    """

    left: Tensor
    right: Tensor
    order: Order = None

    @property
    def widths(self) -> tuple[int, int]:
        """(o, i)."""
        return self.left.shape[2], self.right[0].numel() // self.left.shape[1]

    def matrices(self) -> Outer:
        """The same with a (B, T, i) right factor: the patches of a convolution are copied out."""
        batch, positions, _ = self.left.shape
        return Outer(self.left, self.right.reshape(batch, positions, -1), self.order)

    def pieces(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Slices of the batch with their left^T (b, o, T) and right (b, T, i)."""
        batch, positions, _ = self.left.shape
        step = batch
        if self.right.dim() > 3:
            example = self.right[0].numel() * self.right.element_size()
            step = max(1, torch.get_num_threads() * _CHUNK_BYTES // example)
        for start in range(0, batch, step):
            piece = slice(start, min(start + step, batch))
            right = self.right[piece]
            yield piece, self.left[piece].transpose(1, 2), right.reshape(len(right), positions, -1)

    def dense(self) -> Tensor:
        """(B, o, i)."""
        out = self.left.new_empty(len(self.left), *self.widths)
        for piece, left, right in self.pieces():
            torch.bmm(left, right, out=out[piece])
        return out

    def add_to(self, total: Tensor) -> None:
        """total (B, o, i) += the per-example gradients."""
        for piece, left, right in self.pieces():
            total[piece].baddbmm_(left, right)


@dataclass
class Rows:
    """ids: (B, T) integers in [0, rows), values: (B, T, d); ids < 0 contribute nothing."""

    ids: Tensor
    values: Tensor
    rows: int

    def dense(self) -> Tensor:
        batch, _, width = self.values.shape
        out = self.values.new_zeros(batch, self.rows, width)
        live = self.ids >= 0
        example = torch.arange(batch, device=self.ids.device)[:, None].expand_as(self.ids)
        index = (example[live], self.ids[live])
        return out.index_put_(index, self.values[live], accumulate=True)


Contribution = Dense | Outer | Rows


def materialising_is_cheaper(positions: int, out_width: int, in_width: int) -> bool:
    """Per-example gradients (kept and reused) against Gram matrices and a second product."""
    size, grams = out_width * in_width, positions * positions
    if size > _LARGE and grams < size:
        return False
    return _TRAFFIC_COST * size < grams * (out_width + in_width)


class PerExampleGradient:
    """The per-example gradients of one parameter, accumulated over draws and calls.

    draws: how many times each contribution is expected, for the choice of form.
    dense_only: the parameter is shared between modules, so contributions of different forms meet.
    """

    def __init__(self, shape: torch.Size, *, draws: int = 1, dense_only: bool = False) -> None:
        self.shape = shape
        self._draws = draws
        self._dense_only = dense_only
        self._order: Order = None
        self._dense: Tensor | None = None  # (B, *stored shape)
        self._owned = False
        self._waiting: list[Outer] = []  # to be materialised together
        self._outer: list[Outer] = []
        self._rows: list[Rows] = []

    def add(self, contribution: Contribution) -> None:
        if isinstance(contribution, Rows):
            if self._dense_only:
                self._add_dense(contribution.dense(), None, fresh=True)
            else:
                self._rows.append(contribution)
        elif isinstance(contribution, Dense):
            self._add_dense(contribution.values, contribution.order, fresh=False)
        elif not self._dense_only and self._wait(contribution):
            self._order = contribution.order
            self._waiting.append(contribution)
        elif self._dense_only or self._materialise(contribution):
            if self._dense is not None and self._owned and not self._dense_only:
                contribution.add_to(self._dense.view(-1, *contribution.widths))
            else:
                self._add_dense(contribution.dense(), contribution.order, fresh=True)
        else:
            self._order = contribution.order
            self._outer.append(contribution.matrices())

    def _materialise(self, piece: Outer) -> bool:
        return materialising_is_cheaper(piece.left.shape[1] * self._draws, *piece.widths)

    def _wait(self, piece: Outer) -> bool:
        """With few positions, one product over all draws beats adding to memory K times."""
        few = piece.left.shape[1] < _FEW_POSITIONS
        return self._draws > 1 and few and self._materialise(piece)

    def _stored_shape(self, order: Order) -> tuple[int, ...]:
        shape = [0] * len(self.shape)
        for size, place in zip(self.shape, order or range(len(shape)), strict=True):
            shape[place] = size
        return tuple(shape)

    def _add_dense(self, values: Tensor, order: Order, *, fresh: bool) -> None:
        values = values.reshape(len(values), *self._stored_shape(order))
        if self._dense_only and order is not None:  # other modules may store in another order
            values = values.permute(0, *(1 + place for place in order)).contiguous()
            order = None
        if self._dense is None:
            self._dense, self._owned, self._order = values, fresh, order
        elif self._owned:
            self._dense += values
        else:  # the first one may alias a layer's output gradient
            self._dense, self._owned = self._dense + values, True

    def _merge(self) -> None:
        """Bring several forms to one, so that norms include the cross terms."""
        if len(self._outer) > 1:
            left = torch.cat([piece.left for piece in self._outer], dim=1)
            right = torch.cat([piece.right for piece in self._outer], dim=1)
            self._outer = [Outer(left, right, self._order)]
        if len(self._rows) > 1:
            ids = torch.cat([piece.ids for piece in self._rows], dim=1)
            values = torch.cat([piece.values for piece in self._rows], dim=1)
            self._rows = [Rows(ids, values, self._rows[0].rows)]
        if self._waiting:
            self._add_dense(_dense_sum(self._waiting), self._order, fresh=True)
            self._waiting = []
        if self._outer and self._dense is not None:  # calls with different numbers of positions
            self._add_dense(self._outer.pop().dense(), self._order, fresh=True)

    def squared_norms(self) -> Tensor | None:
        """(B,) squared L2 norms in float64, never below the true ones by more than the rounding
        slack: what squares lose to underflow is added."""
        self._merge()
        if self._dense is not None:
            return _squared_lengths(self._dense.flatten(1))
        if self._outer:
            return _outer_squared_norms(self._outer[0])
        if self._rows:
            return _rows_squared_norms(self._rows[0])
        return None

    def select(self, keep: Tensor | slice) -> None:
        """Keep some examples, a mask (B,) or a slice: the others' Inf, which 0 * Inf would keep, is
        dropped too."""
        if self._dense is not None:
            self._dense, self._owned = self._dense[keep], False
        self._outer = [
            Outer(piece.left[keep], piece.right[keep], piece.order) for piece in self._outer
        ]
        self._rows = [Rows(piece.ids[keep], piece.values[keep], piece.rows) for piece in self._rows]

    def add_weighted_sum(self, factors: Tensor, out: Tensor, run: int) -> None:
        """out += sum over examples of factors[b] * gradient[b], in float64.

        factors: float64 (B,). out: float64, contiguous, of the parameter's shape. run: how many
        per-example gradients may be added in their own precision first (`clipping.short_run`).
        Sums over positions are float64 always: positions that cancel leave nothing but rounding.
        """
        total = out
        if self._order is not None:
            total = out.new_zeros(self._stored_shape(self._order))
        if self._dense is not None:
            _add_rows(self._dense.flatten(1), factors, total.view(-1), run)
        for piece in self._outer:
            _add_products(piece, factors, total)
        for rows in self._rows:
            values = rows.values.double() * factors[:, None, None]
            live = rows.ids >= 0
            total.index_add_(0, rows.ids[live], values[live])
        if self._order is not None:
            out += total.permute(self._order)

    def nbytes(self) -> int:
        """Bytes held after all draws, from what one draw left: to choose the micro-batch."""
        factors = [tensor for piece in self._outer for tensor in (piece.left, piece.right)]
        factors += [piece.values for piece in self._rows]
        factors += [piece.left for piece in self._waiting]
        held = sum(tensor.nbytes for tensor in factors)
        # Windows overlap: what is held is the input they look at.
        held += sum(piece.right.untyped_storage().nbytes() for piece in self._waiting)
        return held * self._draws + (0 if self._dense is None else self._dense.nbytes)


def _dense_sum(parts: list[Outer]) -> Tensor:
    """(B, o, i): the sum of the parts' per-example gradients, as one product over all positions."""
    batch = len(parts[0].left)
    out = parts[0].left.new_empty(batch, *parts[0].widths)
    example = sum(part.right[0].numel() * part.right.element_size() for part in parts)
    step = max(1, torch.get_num_threads() * _CHUNK_BYTES // example)
    for start in range(0, batch, step):
        piece = slice(start, start + step)
        left = torch.cat([part.left[piece] for part in parts], dim=1)
        right = torch.cat(
            [part.right[piece].reshape(len(left), part.left.shape[1], -1) for part in parts], dim=1
        )
        torch.bmm(left.transpose(1, 2), right, out=out[piece])
    return out


def _add_rows(values: Tensor, factors: Tensor, total: Tensor, run: int) -> None:
    """total (size,) += factors @ values (B, size): runs of `run` rows at once, and their sums in
    float64."""
    if values.dtype == torch.float64 or run == 1:
        for piece, weights in zip(values.split(32), factors.split(32), strict=True):
            total.addmv_(piece.double().t(), weights)
        return
    whole = len(values) // run * run
    weights = factors.to(values.dtype)
    if whole:
        runs = values[:whole].unflatten(0, (-1, run))
        total += torch.bmm(weights[:whole].view(-1, 1, run), runs).sum((0, 1), dtype=torch.float64)
    if whole < len(values):
        total += weights[whole:] @ values[whole:]


def _add_products(piece: Outer, factors: Tensor, total: Tensor) -> None:
    """total (o * i) += sum over examples and positions of factor * left ⊗ right."""
    left, right = piece.left, piece.right
    matrix = total.view(left.shape[2], right.shape[2])
    step = max(1, _WIDE_BYTES // (8 * left.shape[1] * (left.shape[2] + right.shape[2])))
    for start in range(0, len(left), step):
        some = slice(start, start + step)
        one, other, weights = left[some].double(), right[some].double(), factors[some, None, None]
        if one.shape[2] <= other.shape[2]:
            one = one * weights
        else:
            other = other * weights
        matrix.addmm_(one.flatten(0, 1).t(), other.flatten(0, 1))


def _squared_lengths(values: Tensor) -> Tensor:
    """(B,) squared norms of rows (B, n) in float64, not below the true ones by underflow."""
    lengths = torch.linalg.vector_norm(values, dim=1).double().square()
    return lengths if values.dtype == torch.float64 else lengths + values.shape[1] * _LOST


def _outer_squared_norms(piece: Outer) -> Tensor:
    left, right = piece.left, piece.right
    if left.shape[1] == 1:
        return _squared_lengths(left[:, 0]) * _squared_lengths(right[:, 0])
    grams = [torch.bmm(factor, factor.transpose(1, 2)) for factor in (left, right)]
    total = grams[0].mul(grams[1]).sum((1, 2))
    return _gram_product(grams[0], grams[1], total, left.shape[2], right.shape[2])


def _rows_squared_norms(piece: Rows) -> Tensor:
    live = piece.ids >= 0
    same = (piece.ids[:, :, None] == piece.ids[:, None, :]) & live[:, :, None]
    gram = torch.bmm(piece.values, piece.values.transpose(1, 2))
    total = gram.masked_fill(~same, 0).sum((1, 2))
    return _gram_product(gram, same.to(gram.dtype), total, piece.values.shape[2], 0)


def _gram_product(
    gram_left: Tensor, gram_right: Tensor, total: Tensor, width_left: int, width_right: int
) -> Tensor:
    """`total` in float64, raised by bounds on its rounding when positions cancel each other and on
    its underflow.

    |rounding| <= c u (sum_t |left_t| |right_t|)^2: without it, an example whose positions nearly
    cancel could get a norm of zero and escape the clip. An entry of a Gram matrix is a sum of
    `width` products, each of which may lose 2^-125; the other matrix multiplies the loss, and the
    sum of its entries is at most T times its trace. width 0: the matrix is exact.
    """
    positions = gram_left.shape[1]
    squares = [
        gram.diagonal(dim1=1, dim2=2).double().clamp(min=0) for gram in (gram_left, gram_right)
    ]
    magnitude = (squares[0] * squares[1]).sqrt().sum(1).square()
    unit = torch.finfo(total.dtype).eps * math.sqrt(positions)
    bounded = total.double().clamp(min=0) + 4 * unit * magnitude
    if total.dtype == torch.float64:
        return bounded
    lost = width_left * squares[1].sum(1) + width_right * squares[0].sum(1) + positions
    return bounded + positions * _LOST * lost
