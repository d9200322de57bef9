"""Three forms of what one layer call adds to one parameter's per-example gradients; their norms and
weighted sums.

All have the example on dimension 0:

* `Dense`: the per-example gradients themselves.
* `Outer`: a sum over positions of left ⊗ right. Its norm needs only the Gram matrices of the two
  factors ("ghost norm", Goodfellow 2015; Li et al. 2022), its clipped sum one matrix product.
* `Rows`: an embedding's gradient, one row per looked-up token.

Channels-last convolutions produce their gradients as (out, kh, kw, in); `order` is the permutation
that brings such a gradient to the parameter's own shape, applied to the sum only.
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
FEW_POSITIONS = 64
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
    order: see the module's head. source: what right was made of, where that is the layer's input;
    calls that saw the same input have the same right factor.
    """

    left: Tensor
    right: Tensor
    order: Order = None
    source: Tensor | None = None

    @property
    def widths(self) -> tuple[int, int]:
        """(o, i)."""
        return self.left.shape[2], self.right[0].numel() // self.left.shape[1]

    def saw_what(self, other: Outer) -> bool:
        """saw_what(other) did: the same memory, which both hold."""
        own, its = self.source, other.source
        if own is None or its is None or self.left.shape != other.left.shape:
            return False
        return (own.data_ptr(), own.shape, own.stride(), own.dtype) == (
            its.data_ptr(), its.shape, its.stride(), its.dtype
        )  # fmt: skip

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


def dense_sum(parts: list[Outer]) -> Tensor:
    """(B, o, i): the sum of the parts' per-example gradients, as one product over all positions."""
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


def add_rows(values: Tensor, factors: Tensor, total: Tensor, run: int) -> None:
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


def add_products(piece: Outer, factors: Tensor, total: Tensor) -> None:
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


def squared_lengths(values: Tensor) -> Tensor:
    """(B,) squared norms of rows (B, n) in float64, not below the true ones by underflow."""
    lengths = torch.linalg.vector_norm(values, dim=1).double().square()
    return lengths if values.dtype == torch.float64 else lengths + values.shape[1] * _LOST


def outer_squared_norms(piece: Outer) -> Tensor:
    left, right = piece.left, piece.right
    if left.shape[1] == 1:
        return squared_lengths(left[:, 0]) * squared_lengths(right[:, 0])
    grams = [torch.bmm(factor, factor.transpose(1, 2)) for factor in (left, right)]
    total = grams[0].mul(grams[1]).sum((1, 2))
    return _gram_product(grams[0], grams[1], total, left.shape[2], right.shape[2])


def rows_squared_norms(piece: Rows) -> Tensor:
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
