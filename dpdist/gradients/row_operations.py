"""List the torch operations that treat each record alone, given the dimension of the records.

One function for each kind of operation: from where the records lie in its arguments to where they
lie in its results, or an error if it mixes them. `OPERATIONS` is the list; an operation that is
not on it is unknown. Shapes are those of one executed pass, so every dimension is a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

# Where records lie in a tensor: (dimension, inner). Index i of that dimension belongs to record
# (i // inner) % count. (0, 1) in (B, ...) is "row i is record i"; a reshape of (B, heads, T) to
# (B * heads, T) has them at (0, heads), one of (T, B, width) to (T * B, width) at (0, 1).
RecordLocation = tuple[int, int]


@dataclass(frozen=True)
class TensorMark:
    """The knowledge about a tensor's rows.

    location: where the records lie; None: it depends on no record. uniform_locations: of one that
    depends on none, the places at which it has equal parts for all records, so that it may meet
    rows there. lost: its parts belong to no single record (a gradient of weights), and nothing may
    read it. turn: number of the pass whose records these are.
    """

    location: RecordLocation | None = None
    uniform_locations: frozenset[RecordLocation] = frozenset()
    mixed: bool = False
    pass_number: int = 0


PUBLIC = TensorMark()
MIXED = TensorMark(mixed=True)


class MixesRecords(Exception):
    """An operation is not known to treat each record alone; the words complete its name."""


_ALONG = "takes the dimension of the records"
_UNEQUAL = "meets numbers that differ from row to row"


class Operation:
    """One call of an operation: its arguments by name, with shapes and marks from before it ran.

    marks: gives a tensor's mark. count: of records in the pass. results: its tensors, once it ran.
    """

    def __init__(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        marks: Callable[[Tensor], TensorMark | None],
        count: int,
    ) -> None:
        self.func, self.count = func, count
        self.arguments: dict[str, Any] = {}
        self.mutated: list[Tensor] = []
        for place, argument in enumerate(func._schema.arguments):
            value = kwargs.get(argument.name, argument.default_value)
            self.arguments[argument.name] = value = args[place] if place < len(args) else value
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.mutated += _tensors(value)
        name = func._schema.name.partition("::")[2]
        self.name = name.rstrip("_") if self.mutated else name
        self.tensors = _tensors(self.arguments)
        self._shapes = {id(tensor): tuple(tensor.shape) for tensor in self.tensors}
        self._marks = {id(tensor): marks(tensor) for tensor in self.tensors}
        self._inspected: set[int] = set()
        self.results: list[Tensor] = []

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def argument_tensors(self, *names: str) -> list[Tensor]:
        """The tensors among these arguments."""
        return _tensors([self.arguments.get(name) for name in names])

    def shape(self, tensor: Tensor) -> tuple[int, ...]:
        return self._shapes[id(tensor)]

    def mark(self, tensor: Tensor) -> TensorMark:
        self._inspected.add(id(tensor))
        return self._marks[id(tensor)] or PUBLIC

    def check_arguments(self, pass_number: int) -> None:
        """Raise Mixes for arguments of which nothing is known."""
        for tensor in self.tensors:
            mark = self._marks[id(tensor)]
            if mark is None and not self.wraps_python_memory:
                raise MixesRecords("reads a tensor from outside the model")
            if mark is not None and mark.mixed:
                raise MixesRecords("reads a sum over records")
            if mark is not None and mark.location is not None and mark.pass_number != pass_number:
                raise MixesRecords("reads records of an earlier pass")

    @property
    def depends_on_records(self) -> bool:
        """Whether any argument depends on records."""
        marks = (self._marks[id(tensor)] for tensor in self.tensors)
        return any(mark is not None and mark.location is not None for mark in marks)

    @property
    def wraps_python_memory(self) -> bool:
        """Whether it takes a tensor that Python made, around memory that it may still hold."""
        return self.name in _FROM_PYTHON

    @property
    def may_use_foreign_memory(self) -> bool:
        """Whether its results may lie in memory that torch did not make for them."""
        return self.wraps_python_memory or self.name not in OPERATIONS

    @property
    def may_raise(self) -> bool:
        """Whether it raises an error for some values of records."""
        if self.name in _RAISES_ON_INTEGERS and all(
            each.is_floating_point() for each in self.results
        ):
            return False
        return self.depends_on_records and self.name in _RAISES | _RAISES_ON_INTEGERS

    def result_marks(self, result: Any) -> list[TensorMark]:
        """Return the marks of the tensors in its result. Raises Mixes."""
        leaves = [leaf for leaf in pytree.tree_leaves(result) if leaf is not None]
        self.results = _tensors(leaves)
        if torch.Tag.nondeterministic_seeded in self.func.tags and self.arguments.get(
            "dropout_p", 1
        ):
            raise MixesRecords("draws random numbers")
        if self.depends_on_records and len(self.results) < len(leaves):
            raise MixesRecords("gives values of records to Python")
        if self.func.namespace != "aten":
            raise MixesRecords("is not on the list of known operations")
        rule = OPERATIONS.get(self.name)
        if self.depends_on_records and rule is not _shape_only:
            if rule is None:
                raise MixesRecords("is not on the list of known operations")
            return self._apply_rule(rule)
        old = "empty" in self.name or self.name in _ONTO_MEMORY
        if old and any(each.numel() for each in self.results):
            raise MixesRecords("leaves memory as it was")
        return [
            TensorMark(uniform_locations=frozenset(same))
            for same in self._find_uniform_locations(rule)
        ]

    def _apply_rule(self, rule: Rule) -> list[TensorMark]:
        """Return the marks by a rule, checked against all arguments and the results' shapes."""
        self._inspected.clear()
        found = rule(self)
        marks = found if isinstance(found, list) else [found] * len(self.results)
        for tensor in self.tensors:
            if id(tensor) not in self._inspected and (self._marks[id(tensor)] or PUBLIC).location:
                raise MixesRecords("has an argument that its rule leaves out")
        for tensor, mark in zip(self.results, marks, strict=True):
            if mark.location is not None and mark.location not in possible_locations(
                tensor.shape, self.count
            ):
                raise MixesRecords(_ALONG)
        return marks

    def _find_uniform_locations(self, rule: Rule | None) -> list[set[RecordLocation]]:
        """Where each result, of no records, is the same for all of them: where records would lie
        in it if they lay where an argument is the same for all."""
        repeats = _REPEATS.get(self.name)
        found = [set(repeats(self, result) if repeats else ()) for result in self.results]
        for tensor in self.tensors if rule is not None else ():
            own = self._marks[id(tensor)] or PUBLIC
            for place in own.uniform_locations:
                self._marks[id(tensor)] = TensorMark(place)
                try:
                    assert rule is not None
                    for same, mark in zip(found, self._apply_rule(rule), strict=True):
                        same |= set() if mark.location is None else {mark.location}
                except MixesRecords:
                    pass
            self._marks[id(tensor)] = own
        return found


def _tensors(nested: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(nested) if isinstance(leaf, Tensor)]


def possible_locations(shape: Sequence[int], count: int) -> Iterator[RecordLocation]:
    """Every place where records may lie in a tensor of this shape."""
    for dimension, size in enumerate(shape):
        if size and size % count == 0:
            each = size // count
            yield from ((dimension, inner) for inner in range(1, each + 1) if each % inner == 0)


Rule = Callable[[Operation], "TensorMark | list[TensorMark]"]
LocationMap = Callable[[Operation, Tensor, RecordLocation], "RecordLocation | None"]


# ---- one tensor: each place goes to another one, or is taken


def _unary_rule(location_map: LocationMap, *names: str) -> Rule:
    """An operation on the one tensor among these arguments ("self", "input" without any)."""

    def rule(call: Operation) -> TensorMark:
        (tensor,) = call.argument_tensors(*(names or ("self", "input")))
        rows = call.mark(tensor).location
        moved = None if rows is None else location_map(call, tensor, rows)
        if moved is None:
            raise MixesRecords(_ALONG)
        return TensorMark(moved)

    return rule


def _keep_location(call: Operation, tensor: Tensor, place: RecordLocation) -> RecordLocation | None:
    return place


def _view(call: Operation, tensor: Tensor, place: RecordLocation) -> RecordLocation | None:
    """A reshape leaves the order of the elements alone."""
    if "dtype" in call.arguments:
        return None
    old, new = call.shape(tensor), call.results[0].shape
    stride = place[1] * math.prod(old[place[0] + 1 :])  # elements from one record to the next
    for dimension, size in enumerate(new):
        below = math.prod(new[dimension + 1 :])
        if below <= stride < below * size:
            inner, rest = divmod(stride, below)
            return None if rest or size % (inner * call.count) else (dimension, inner)
    return None


def _permute(call: Operation, tensor: Tensor, place: RecordLocation) -> RecordLocation | None:
    size = len(call.shape(tensor))
    order = list(range(size))
    if "dims" in call.arguments:
        order = [each % size for each in call["dims"]]
    elif call.name == "t":
        order.reverse()
    else:
        one, other = (call[name] % size for name in call.arguments if name != "self")
        order[one], order[other] = order[other], order[one]
    return order.index(place[0]), place[1]


def _dimensions(chosen: Any, size: int) -> set[int]:
    """Dimensions as an operation takes them: without any, all."""
    given = [chosen] if isinstance(chosen, int) else chosen or range(size)
    return {each % max(1, size) for each in given}


def _along_dimensions(argument: str, keeps: bool | None = None) -> LocationMap:
    """Return the moves of an operation along the dimensions in `argument`.

    keeps: whether they stay; None: as asked.
    """

    def moves(call: Operation, tensor: Tensor, place: RecordLocation) -> RecordLocation | None:
        taken = _dimensions(call.arguments.get(argument), len(call.shape(tensor)))
        if place[0] in taken:
            return None
        stay = call.arguments.get("keepdim", False) if keeps is None else keeps
        gone = 0 if stay else sum(each < place[0] for each in taken)
        return place[0] - gone, place[1]

    return moves


def _slice(call: Operation, tensor: Tensor, place: RecordLocation) -> RecordLocation | None:
    """All of a dimension, or another one than the records'."""
    whole = call.results[0].shape[place[0]] == call.shape(tensor)[place[0]]
    return place if whole else None


def _into_new_dimension(
    call: Operation, tensor: Tensor, place: RecordLocation
) -> RecordLocation | None:
    dimension = call["dim"] % len(call.results[0].shape)
    return place[0] + (dimension <= place[0]), place[1]


def _pad(call: Operation, tensor: Tensor, place: RecordLocation) -> RecordLocation | None:
    pads = call["pad"] if "pad" in call.arguments else call["padding"]
    return place if place[0] < len(call.shape(tensor)) - len(pads) // 2 else None


def _before(last: int) -> LocationMap:
    """Return the moves of an operation that treats all but the last dimensions alone."""

    def moves(call: Operation, tensor: Tensor, place: RecordLocation) -> RecordLocation | None:
        return place if place[0] < len(call.shape(tensor)) - last else None

    return moves


def _unfold_backward(
    call: Operation, tensor: Tensor, place: RecordLocation
) -> RecordLocation | None:
    size = len(call["input_sizes"])
    return None if place[0] in (call["dim"] % size, size) else place


def _into_more(call: Operation, tensor: Tensor, place: RecordLocation) -> RecordLocation | None:
    """expand and repeat: the same numbers, more often."""
    return place[0] + len(call.results[0].shape) - len(call.shape(tensor)), place[1]


def _repeats(call: Operation, result: Tensor) -> Iterator[RecordLocation]:
    """Index i holds what index i % size did: the same for all records where inner is a multiple."""
    (tensor,) = call.argument_tensors("self")
    more = len(result.shape) - len(call.shape(tensor))
    old = [1] * more + list(call.shape(tensor))
    return (
        place
        for place in possible_locations(result.shape, call.count)
        if place[1] % old[place[0]] == 0
    )


def _all_locations(call: Operation, result: Tensor) -> Iterator[RecordLocation]:
    """One number, as often as asked for."""
    return possible_locations(result.shape, call.count)


# ---- several tensors


def _common_location(
    call: Operation, tensors: Sequence[Tensor], size: int
) -> RecordLocation | None:
    """The one place of the records in tensors that are broadcast to `size` dimensions; None without
    records. Raises Mixes where they lie elsewhere, or a tensor of no record differs there.
    """
    found: set[RecordLocation] = set()
    for tensor in tensors:
        rows = call.mark(tensor).location
        if rows is not None:
            found.add((rows[0] + size - len(call.shape(tensor)), rows[1]))
    if len(found) > 1:
        raise MixesRecords("brings records together that lie along different dimensions")
    for place in found:
        if not all(_matches_location(call, tensor, place, size) for tensor in tensors):
            raise MixesRecords(_UNEQUAL)
        return place
    return None


def _matches_location(call: Operation, tensor: Tensor, place: RecordLocation, size: int) -> bool:
    """Whether a tensor broadcast to `size` dimensions has rows at this place, or equal ones."""
    mark, shape = call.mark(tensor), call.shape(tensor)
    own = (place[0] - size + len(shape), place[1])
    if mark.location is not None:
        return mark.location == own
    return own[0] < 0 or shape[own[0]] == 1 or own in mark.uniform_locations


def _pointwise(call: Operation) -> TensorMark:
    """Each number of the result from those at its own place."""
    if call.arguments.get("reduction"):  # of a loss; 0 is none
        raise MixesRecords("adds up over records")
    if call.name == "where" and "self" not in call.arguments:  # the places of what is true
        raise MixesRecords(_ALONG)
    tensors = call.tensors
    if call.name == "copy":  # what was there is gone
        tensors = call.argument_tensors("src")
        call.mark(call["self"])
    shape = tuple(call.results[0].shape)
    if tensors and np.broadcast_shapes(*map(call.shape, call.tensors)) != shape:
        raise MixesRecords("has a result of another shape")
    return TensorMark(_common_location(call, tensors, len(shape)))


def _aligned(*names: str, location_map: LocationMap = _keep_location) -> Rule:
    """Tensors with as many dimensions each, whose records lie at one place, not broadcast.
    location_map: to where that place goes; None: it is taken."""

    def rule(call: Operation) -> TensorMark:
        tensors = call.argument_tensors(*names)
        places_of = {mark.location for mark in map(call.mark, tensors)} - {None}
        if len(places_of) > 1:
            raise MixesRecords("brings records together that lie along different dimensions")
        (place,) = places_of or {None}
        if place is None:
            return PUBLIC
        sizes = {call.shape(t)[place[0] : place[0] + 1] for t in tensors}
        equal = all(
            call.mark(t).location or place in call.mark(t).uniform_locations for t in tensors
        )
        if len(sizes) > 1 or len({len(call.shape(t)) for t in tensors}) > 1 or not equal:
            raise MixesRecords(_UNEQUAL)
        moved = location_map(call, tensors[0], place)
        if moved is None:
            raise MixesRecords(_ALONG)
        return TensorMark(moved)

    return rule


def _batch(*names: str, weights: Sequence[str] = ()) -> Rule:
    """Return the rule of an operation that takes dimension 0 of these arguments for the batch.

    It works with the same weights on each of it.
    """

    def rule(call: Operation) -> TensorMark:
        _check_weights(call, weights)
        if "N" in call.arguments and call["N"] != call.shape(call["input"])[0]:
            raise MixesRecords(_ALONG)
        return TensorMark(_first_dimension(call, call.argument_tensors(*names)))

    return rule


def _check_weights(call: Operation, weights: Sequence[str]) -> None:
    """Raise Mixes where weights depend on records, or gradients of weights are asked for."""
    if any(call.mark(tensor).location is not None for tensor in call.argument_tensors(*weights)):
        raise MixesRecords("has weights that depend on records")
    if any(call.arguments.get("output_mask", ())[1:]):
        raise MixesRecords("sums gradients over records")


def _first_dimension(call: Operation, tensors: Sequence[Tensor]) -> RecordLocation | None:
    """The place of the records along dimension 0 of all of them; None without records."""
    rows = {mark.location for mark in map(call.mark, tensors)} - {None}
    for place in rows:
        assert place is not None
        if len(rows) > 1 or place[0] != 0:
            raise MixesRecords(_ALONG)
        if not all(
            call.mark(t).location or place in call.mark(t).uniform_locations for t in tensors
        ):
            raise MixesRecords(_UNEQUAL)
        return place
    return None


def _concatenation(call: Operation) -> TensorMark:
    """cat and stack."""
    tensors = [t for t in call.argument_tensors("tensors") if call.shape(t) != (0,)]
    dimension = call["dim"] % len(call.results[0].shape)
    place = _common_location(call, tensors, len(call.shape(tensors[0])))
    if place is None:
        return PUBLIC
    if call.name == "stack":
        return TensorMark((place[0] + (dimension <= place[0]), place[1]))
    if place[0] == dimension:
        raise MixesRecords("puts records behind one another")
    return TensorMark(place)


def _product(call: Operation) -> TensorMark:
    """mm and bmm, (..., n, k) times (..., k, m), and what adds a tensor to that."""
    names = {"mm": ("self", "mat2"), "bmm": ("self", "mat2"), "addmm": ("mat1", "mat2"),
             "baddbmm": ("batch1", "batch2")}[call.name]  # fmt: skip
    left, right = call.argument_tensors(*names)
    size = len(call.shape(left))
    one, other = call.mark(left).location, call.mark(right).location
    if (one is not None and one[0] == size - 1) or (other is not None and other[0] == size - 2):
        raise MixesRecords("sums over the records")
    inside = [rows is not None and rows[0] >= size - 2 for rows in (one, other)]
    if not any(inside):  # each matrix of a stack by itself
        place = _common_location(call, [left, right], size)
    elif one is not None and other is not None:
        raise MixesRecords("multiplies records with records")
    else:
        place = one if inside[0] else other
    for tensor in call.argument_tensors("self") if call.name in ("addmm", "baddbmm") else ():
        if place is None or not _matches_location(call, tensor, place, size):
            raise MixesRecords(_UNEQUAL)
    return TensorMark(place)


def _layer_norm(call: Operation) -> TensorMark:
    _check_weights(call, ("weight", "bias"))
    tensors = call.argument_tensors("grad_out", "input", "mean", "rstd")
    size = len(call.shape(call["input"]))
    place = _common_location(call, tensors, size)
    if place is not None and place[0] >= size - len(call["normalized_shape"]):
        raise MixesRecords(_ALONG)
    return TensorMark(place)


def _batch_norm(call: Operation) -> list[TensorMark]:
    """Over channels that belong to one record each, as an instance normalisation has it."""
    place = _common_location(
        call, call.argument_tensors("grad_out", "input"), len(call.shape(call["input"]))
    )
    if place is None:
        return [PUBLIC] * len(call.results)
    training = call.arguments.get("training", call.arguments.get("train"))
    if not training or place[0] != 1 or call.argument_tensors("running_mean", "running_var"):
        raise MixesRecords(_ALONG)
    channel = (0, place[1])
    for tensor in call.argument_tensors("weight", "bias", "save_mean", "save_invstd"):
        if not _matches_location(call, tensor, channel, 1):
            raise MixesRecords(_UNEQUAL)
    return [TensorMark(place), *[TensorMark(channel)] * (len(call.results) - 1)]


def _nll(call: Operation) -> TensorMark | list[TensorMark]:
    if call["reduction"] != 0:
        raise MixesRecords("adds up over records")
    if len(call.shape(call["self"])) not in (2, 4):
        raise MixesRecords(_ALONG)
    _check_weights(call, ("weight",))
    place = _first_dimension(call, call.argument_tensors("grad_output", "self", "target"))
    found = TensorMark(place)
    return [found, PUBLIC] if call.name.endswith("forward") else found  # no weights are added up


def _embedding(call: Operation) -> TensorMark:
    _check_weights(call, ("weight",))
    return TensorMark(call.mark(call["indices"]).location)


def _index(call: Operation) -> TensorMark:
    """One tensor of whole numbers along one dimension; with values, what puts them there."""
    (x,) = call.argument_tensors("self")
    chosen = [(d, each) for d, each in enumerate(call["indices"]) if each is not None]
    if len(chosen) != 1 or chosen[0][1].dtype in (torch.bool, torch.uint8):
        raise MixesRecords("is known for one tensor of whole numbers")
    dimension, index = chosen[0]
    rows, own, more = call.mark(x).location, call.mark(index).location, len(call.shape(index)) - 1
    values = call.argument_tensors("values")
    if own is not None:
        if rows is not None or values:
            raise MixesRecords("chooses among records by records")
        return TensorMark((dimension + own[0], own[1]))
    if not values:
        if rows is not None and rows[0] == dimension:
            raise MixesRecords(_ALONG)
        after = rows is not None and rows[0] > dimension
        return PUBLIC if rows is None else TensorMark((rows[0] + more * after, rows[1]))
    given = call.mark(values[0]).location
    if given is None and rows is None:
        return PUBLIC
    if given is None or len(call.shape(values[0])) != len(call.shape(x)) + more:
        raise MixesRecords(_UNEQUAL)
    if dimension <= given[0] <= dimension + more:
        raise MixesRecords(_ALONG)
    back = (given[0] - more * (given[0] > dimension), given[1])
    if not _matches_location(call, x, back, len(call.shape(x))):
        raise MixesRecords(_UNEQUAL)
    return TensorMark(back)


def _index_select(call: Operation) -> TensorMark | list[TensorMark]:
    _check_weights(call, ("index",))
    return _unary_rule(_along_dimensions("dim", keeps=True), "self")(call)


def _attention(call: Operation) -> TensorMark | list[TensorMark]:
    """Queries, keys and values (B, heads, T, width), each record with its own."""
    names = ("grad_out", "grad_out_", "query", "key", "value", "out", "logsumexp")
    place = _first_dimension(call, call.argument_tensors(*names))
    for tensor in call.argument_tensors("attn_mask", "attn_bias"):
        if place is None or not _matches_location(call, tensor, place, 4):
            raise MixesRecords(_UNEQUAL)
    if any(call.arguments.get("grad_input_mask", ())[3:]):
        raise MixesRecords("sums gradients over records")
    found = TensorMark(place)
    drawn = len(call.results) > 3 and not call.name.endswith("backward")
    return [found, found, PUBLIC, PUBLIC] if drawn else found  # keys of draws that there are none


def _rnn_layer(call: Operation) -> list[TensorMark]:
    """One layer through time (T, B, width), with states (B, width)."""
    _check_weights(call, [name for name in call.arguments if name.startswith("weight")])
    if call["batch_sizes"]:
        raise MixesRecords("is known for sequences of one length")
    place = _common_location(call, call.argument_tensors("input", "output", "grad_output"), 3)
    states = call.argument_tensors("hx_", "cx_", "cx_tmp", "hy_", "cy_", "grad_hy", "grad_cy")
    if place is None or place[0] != 1:
        raise MixesRecords(_ALONG)
    if not all(_matches_location(call, tensor, (0, place[1]), 2) for tensor in states):
        raise MixesRecords(_UNEQUAL)
    for tensor in call.argument_tensors("workspace"):  # of the forward pass, for this one alone
        call.mark(tensor)
    own, state = TensorMark(place), TensorMark((0, place[1]))
    if "grad_output" in call.arguments:
        return [own, *[MIXED] * 4, state, state]
    return [own, state, state, PUBLIC]


def _shape_only(call: Operation) -> TensorMark:
    """Return the mark of a result that needs only a shape, filled with one public number."""
    return PUBLIC


def _python_created(call: Operation) -> TensorMark:
    """Numbers that Python made: no values of records reach it."""
    raise MixesRecords(_ALONG)


# ---- the list

_FROM_PYTHON = ("lift_fresh", "lift", "lift_fresh_copy")
# What makes a tensor of memory that is there: it may hold anything.
_ONTO_MEMORY = ("set", "resize", "resize_as", "from_file")
# What raises an error for a number that is not among those it knows, or for one that is zero.
_RAISES = frozenset((
    "embedding", "index", "index_put", "index_select", "gather", "scatter", "scatter_add",
    "nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward",
    "binary_cross_entropy",
))  # fmt: skip
# in whole numbers alone
_RAISES_ON_INTEGERS = frozenset(("div", "floor_divide", "fmod", "pow", "remainder"))
_FILLED = (
    "zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones",
    "new_full", "scalar_tensor", "zero", "fill",
)  # fmt: skip
_REPEATS: dict[str, Callable[[Operation, Tensor], Iterator[RecordLocation]]] = {
    "expand": _repeats, "repeat": _repeats, **dict.fromkeys(_FILLED, _all_locations),
}  # fmt: skip
METADATA = ("transpose", "t", "squeeze", "unsqueeze", "detach")  # in place: the numbers stay

POINTWISE = (
    "abs", "acos", "acosh", "add", "addcdiv", "addcmul", "asin", "asinh", "atan", "atan2",
    "atanh", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "ceil", "celu", "clamp",
    "clamp_max", "clamp_min", "copy", "cos", "cosh", "deg2rad", "div", "elu", "elu_backward",
    "eq", "erf", "erfc", "exp", "exp2", "expm1", "floor", "floor_divide", "fmax", "fmin",
    "fmod", "frac", "ge", "gelu", "gelu_backward", "gt", "hardsigmoid", "hardsigmoid_backward",
    "hardswish", "hardswish_backward", "hardtanh", "hardtanh_backward", "isfinite", "isinf",
    "isnan", "le", "leaky_relu", "leaky_relu_backward", "lerp", "log", "log10", "log1p", "log2",
    "logaddexp", "logical_and", "logical_not", "logical_or", "logical_xor", "lt", "masked_fill",
    "maximum", "minimum", "mish", "mish_backward", "mul", "nan_to_num", "ne", "neg", "pow",
    "reciprocal", "relu", "relu6", "remainder", "round", "rsqrt", "rsub", "selu", "sgn",
    "sigmoid", "sigmoid_backward", "sign", "silu", "silu_backward", "sin", "sinh", "softplus",
    "softplus_backward", "softshrink", "sqrt", "square", "sub", "tan", "tanh", "tanh_backward",
    "threshold", "threshold_backward", "trunc", "where", "xlogy", "_prelu_kernel",
    "_prelu_kernel_backward", "mse_loss", "mse_loss_backward", "smooth_l1_loss",
    "smooth_l1_loss_backward", "huber_loss", "huber_loss_backward", "binary_cross_entropy",
    "binary_cross_entropy_backward", "binary_cross_entropy_with_logits",
)  # fmt: skip
_LAST_DIMENSIONS = {  # what works on the last dimensions: how many
    1: ("avg_pool1d", "upsample_nearest1d", "upsample_linear1d", "reflection_pad1d",
        "replication_pad1d"),
    2: ("avg_pool2d", "_adaptive_avg_pool2d", "adaptive_max_pool2d", "max_pool2d_with_indices",
        "upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d", "reflection_pad2d",
        "replication_pad2d", "tril", "triu"),
    3: ("avg_pool3d", "_adaptive_avg_pool3d", "adaptive_max_pool3d", "max_pool3d_with_indices",
        "upsample_nearest3d", "upsample_trilinear3d", "pixel_shuffle", "pixel_unshuffle"),
}  # fmt: skip
_RULES: list[tuple[Rule, tuple[str, ...]]] = [
    (_pointwise, POINTWISE),
    (_shape_only, _FILLED),
    (_python_created, _FROM_PYTHON),
    (_unary_rule(_view), ("view", "_unsafe_view", "squeeze", "unsqueeze")),
    (_unary_rule(_keep_location), ("detach", "alias", "clone", "_to_copy")),
    (_unary_rule(_permute), ("permute", "transpose", "t")),
    (_unary_rule(_into_more), ("expand", "repeat")),
    (_concatenation, ("cat", "stack")),
    (_unary_rule(_along_dimensions("dim")), (
        "sum", "mean", "amax", "amin", "any", "all", "logsumexp", "var", "std",
        "var_mean", "linalg_vector_norm", "norm", "argmax", "argmin", "max", "min",
        "count_nonzero",
    )),
    (_unary_rule(_along_dimensions("dim", keeps=True)), (
        "_softmax", "_log_softmax", "_safe_softmax", "cumsum", "logcumsumexp",
        "sort", "topk", "split", "unsafe_split", "split_with_sizes", "unsafe_split_with_sizes",
        "glu",
    )),
    (_unary_rule(_along_dimensions("dim", keeps=False)), ("select", "unbind")),
    (_unary_rule(_along_dimensions("dims", keeps=True)), ("flip", "roll")),
    (_unary_rule(_along_dimensions("dimension", keeps=True)), ("unfold",)),
    (_unary_rule(_unfold_backward, "grad_in"), ("unfold_backward",)),
    (_unary_rule(_slice), ("slice",)),
    (_unary_rule(_slice, "grad_output"), ("slice_backward",)),
    (_unary_rule(_into_new_dimension, "grad_output"), ("select_backward",)),
    (_unary_rule(_pad), ("constant_pad_nd",)),
    (_aligned("grad_output", "output", location_map=_along_dimensions("dim", keeps=True)),
     ("_softmax_backward_data", "_log_softmax_backward_data")),
    (_aligned("grad_output", "self", location_map=_along_dimensions("dim", keeps=True)),
        ("glu_backward",)),
    (_aligned("self", "index", "src", location_map=_along_dimensions("dim", keeps=True)), (
        "gather", "scatter", "scatter_add",
    )),
    (_product, ("mm", "addmm", "bmm", "baddbmm")),
    (_embedding, ("embedding",)),
    (_index, ("index", "index_put", "_unsafe_index")),
    (_index_select, ("index_select",)),
    (_batch("input", weights=("weight", "bias")), ("convolution", "native_group_norm")),
    (_batch("grad_output", "input", weights=("weight",)), ("convolution_backward",)),
    (_batch("grad_out", "input", "mean", "rstd", weights=("weight",)),
     ("native_group_norm_backward",)),
    (_layer_norm, (
        "native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm",
        "_fused_rms_norm_backward",
    )),
    (_batch_norm, ("native_batch_norm", "native_batch_norm_backward")),
    (_nll, ("nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward")),
    (_attention, (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_efficient_attention_backward",
    )),
    (_rnn_layer, ("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward")),
]  # fmt: skip
OPERATIONS: dict[str, Rule] = {name: rule for rule, names in _RULES for name in names}
for _count, _names in _LAST_DIMENSIONS.items():
    for _name in _names:
        OPERATIONS[_name] = _unary_rule(_before(_count))
        backward = _aligned("grad_output", "self", "indices", location_map=_before(_count))
        OPERATIONS[f"{_name}_backward"] = backward
