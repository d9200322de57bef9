"""One parameter's per-example gradients, from what every layer call adds in its cheapest form.

`PerExampleGradient` adds the contributions of one parameter over draws, repeated calls of a module
and modules that share the parameter, so cross terms are right by construction.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dpdist.base.errors import UserError
from dpdist.gradients.forms import (
    FEW_POSITIONS,
    Contribution,
    Dense,
    Order,
    Outer,
    Rows,
    add_embedding_rows,
    add_products,
    add_rows,
    dense_sum,
    materialising_is_cheaper,
    outer_squared_norms,
    rows_squared_norms,
    squared_lengths,
)


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
        self._held: Outer | None = None  # whose input the next draw may see again
        self._version = 0  # of that input
        self._holds = draws > 1 and not dense_only

    def add(self, contribution: Contribution) -> None:
        """Add what one call of a layer gives.

        Where all draws see the same input (a first layer under perturbed parameters), the left
        factors are added up and the product is made once: sum_k left_k ⊗ right.
        """
        if not (
            self._holds and isinstance(contribution, Outer) and contribution.source is not None
        ):
            self._add(contribution)
        elif self._held is None:
            self._held, self._version = contribution, contribution.source._version
        elif contribution.saw_what(self._held):
            self._held = replace(self._held, left=self._held.left + contribution.left)
        else:
            self._let_go()
            self._add(contribution)

    def _let_go(self) -> None:
        """Where two inputs differ, no third draw is expected to see one of them again.

        Raises UserError when the input was written to since it was seen.
        """
        self._holds, held, self._held = False, self._held, None
        if held is not None:
            if held.source is not None and held.source._version != self._version:
                raise UserError(
                    "the model changes its input in place, so that the next draw sees another one: "
                    "let it work on a copy"
                )
            self._add(held)

    def _add(self, contribution: Contribution) -> None:
        if isinstance(contribution, Rows):
            if self._dense_only:
                self._add_dense(contribution.dense(), None, fresh=True)
            else:
                self._rows.append(contribution)
        elif isinstance(contribution, Dense):
            self._add_dense(contribution.values, contribution.order, fresh=False)
        elif not self._dense_only and self._wait(contribution):
            self._order = contribution.order
            self._waiting.append(replace(contribution, source=None))  # its memory is not needed
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
        few = piece.left.shape[1] < FEW_POSITIONS
        return self._draws > 1 and few and self._materialise(piece)

    def _stored_shape(self, order: Order) -> tuple[int, ...]:
        shape = [0] * len(self.shape)
        for size, place in zip(self.shape, order or range(len(shape)), strict=True):
            shape[place] = size
        return tuple(shape)

    def _add_dense(self, values: Tensor, order: Order, *, fresh: bool) -> None:
        if values.dtype in (torch.float16, torch.bfloat16):  # norms and sums would round in half
            values, fresh = values.float(), True
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
        if self._held is not None:  # of all draws
            self._draws = 1
            self._let_go()
        if len(self._outer) > 1:
            left = torch.cat([piece.left for piece in self._outer], dim=1)
            right = torch.cat([piece.right for piece in self._outer], dim=1)
            self._outer = [Outer(left, right, self._order)]
        if len(self._rows) > 1:
            ids = torch.cat([piece.ids for piece in self._rows], dim=1)
            values = torch.cat([piece.values for piece in self._rows], dim=1)
            self._rows = [Rows(ids, values, self._rows[0].rows)]
        if self._waiting:
            self._add_dense(dense_sum(self._waiting), self._order, fresh=True)
            self._waiting = []
        if self._outer and self._dense is not None:  # calls with different numbers of positions
            self._add_dense(self._outer.pop().dense(), self._order, fresh=True)

    def squared_norms(self) -> Tensor | None:
        """(B,) squared L2 norms in float64, never below the true ones by more than the rounding
        slack: what squares lose to underflow is added."""
        self._merge()
        if self._dense is not None:
            return squared_lengths(self._dense.flatten(1))
        if self._outer:
            return outer_squared_norms(self._outer[0])
        if self._rows:
            return rows_squared_norms(self._rows[0])
        return None

    def pieces(self) -> list[Tensor]:
        """Return the tensors (B, ...) that norms and sums are made of."""
        self._merge()
        dense = [] if self._dense is None else [self._dense]
        outer = [tensor for piece in self._outer for tensor in (piece.left, piece.right)]
        return (
            dense + outer + [tensor for piece in self._rows for tensor in (piece.ids, piece.values)]
        )

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
            add_rows(self._dense.flatten(1), factors, total.view(-1), run)
        for piece in self._outer:
            add_products(piece, factors, total)
        for rows in self._rows:
            add_embedding_rows(rows, factors, total)
        if self._order is not None:
            out += total.permute(self._order)

    def nbytes(self) -> int:
        """Bytes held after all draws, from what one draw left: to choose the micro-batch."""
        self._let_go()
        factors = [tensor for piece in self._outer for tensor in (piece.left, piece.right)]
        factors += [piece.values for piece in self._rows]
        factors += [piece.left for piece in self._waiting]
        held = sum(tensor.nbytes for tensor in factors)
        # Windows overlap: what is held is the input they look at.
        held += sum(piece.right.untyped_storage().nbytes() for piece in self._waiting)
        return held * self._draws + (0 if self._dense is None else self._dense.nbytes)
