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

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

# Where records lie in a tensor: (dimension, inner). Index i of that dimension belongs to record
# (i // inner) % count. (0, 1) in (B, ...) is "row i is record i"; a reshape of (B, heads, T) to
# (B * heads, T) has them at (0, heads), one of (T, B, width) to (T * B, width) at (0, 1).
Place = tuple[int, int]


@dataclass(frozen=True)
class Mark:
    """The knowledge about a tensor's rows.

    rows: where the records lie; None: it depends on no record. same: of one that depends on none,
    the places at which it has equal parts for all records, so that it may meet rows there. lost:
    its parts belong to no single record (a gradient of weights), and nothing may read it. turn:
    number of the pass whose records these are.
    """

    rows: Place | None = None
    same: frozenset[Place] = frozenset()
    lost: bool = False
    turn: int = 0


PUBLIC = Mark()
LOST = Mark(lost=True)


class Mixes(Exception):
    """An operation is not known to treat each record alone; the words complete its name."""


_ALONG = "takes the dimension of the records"
_UNEQUAL = "meets numbers that differ from row to row"


class Operation:
    """One call of an operation: its arguments by name, with shapes and marks from before it ran.

    marks: gives a tensor's mark. count: of records in the pass. results: its tensors, once it ran.
    """

    def __init__(
        self, func: Any, args: Any, kwargs: Any, marks: Callable[[Tensor], Mark | None], count: int
    ) -> None:
        self.func, self.count = func, count
        self.given: dict[str, Any] = {}
        self.written: list[Tensor] = []
        for place, argument in enumerate(func._schema.arguments):
            value = kwargs.get(argument.name, argument.default_value)
            self.given[argument.name] = value = args[place] if place < len(args) else value
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.written += _tensors(value)
        name = func._schema.name.partition("::")[2]
        self.name = name.rstrip("_") if self.written else name
        self.tensors = _tensors(self.given)
        self._shapes = {id(tensor): tuple(tensor.shape) for tensor in self.tensors}
        self._marks = {id(tensor): marks(tensor) for tensor in self.tensors}
        self._asked: set[int] = set()
        self.results: list[Tensor] = []

    def __getitem__(self, name: str) -> Any:
        return self.given[name]

    def some(self, *names: str) -> list[Tensor]:
        """The tensors among these arguments."""
        return _tensors([self.given.get(name) for name in names])

    def shape(self, tensor: Tensor) -> tuple[int, ...]:
        return self._shapes[id(tensor)]

    def mark(self, tensor: Tensor) -> Mark:
        self._asked.add(id(tensor))
        return self._marks[id(tensor)] or PUBLIC

    def check_given(self, turn: int) -> None:
        """Raise Mixes for arguments of which nothing is known."""
        for tensor in self.tensors:
            mark = self._marks[id(tensor)]
            if mark is None and not self.from_python:
                raise Mixes("reads a tensor from outside the model")
            if mark is not None and mark.lost:
                raise Mixes("reads a sum over records")
            if mark is not None and mark.rows is not None and mark.turn != turn:
                raise Mixes("reads records of an earlier pass")

    @property
    def of_records(self) -> bool:
        """Whether any argument depends on records."""
        marks = (self._marks[id(tensor)] for tensor in self.tensors)
        return any(mark is not None and mark.rows is not None for mark in marks)

    @property
    def from_python(self) -> bool:
        """Whether it takes a tensor that Python made, around memory that it may still hold."""
        return self.name in _FROM_PYTHON

    @property
    def from_elsewhere(self) -> bool:
        """Whether its results may lie in memory that torch did not make for them."""
        return self.from_python or self.name not in OPERATIONS

    @property
    def may_raise(self) -> bool:
        """Whether it raises an error for some values of records."""
        if self.name in _WHOLE and all(each.is_floating_point() for each in self.results):
            return False
        return self.of_records and self.name in _RAISES | _WHOLE

    def marks(self, result: Any) -> list[Mark]:
        """Return the marks of the tensors in its result. Raises Mixes."""
        leaves = [leaf for leaf in pytree.tree_leaves(result) if leaf is not None]
        self.results = _tensors(leaves)
        if torch.Tag.nondeterministic_seeded in self.func.tags and self.given.get("dropout_p", 1):
            raise Mixes("draws random numbers")
        if self.of_records and len(self.results) < len(leaves):
            raise Mixes("gives values of records to Python")
        if self.func.namespace != "aten":
            raise Mixes("is not on the list of known operations")
        rule = OPERATIONS.get(self.name)
        if self.of_records and rule is not _shape_alone:
            if rule is None:
                raise Mixes("is not on the list of known operations")
            return self._by(rule)
        old = "empty" in self.name or self.name in _ONTO_MEMORY
        if old and any(each.numel() for each in self.results):
            raise Mixes("leaves memory as it was")
        return [Mark(same=frozenset(same)) for same in self._same(rule)]

    def _by(self, rule: Rule) -> list[Mark]:
        """Return the marks by a rule, checked against all arguments and the results' shapes."""
        self._asked.clear()
        found = rule(self)
        marks = found if isinstance(found, list) else [found] * len(self.results)
        for tensor in self.tensors:
            if id(tensor) not in self._asked and (self._marks[id(tensor)] or PUBLIC).rows:
                raise Mixes("has an argument that its rule leaves out")
        for tensor, mark in zip(self.results, marks, strict=True):
            if mark.rows is not None and mark.rows not in places(tensor.shape, self.count):
                raise Mixes(_ALONG)
        return marks

    def _same(self, rule: Rule | None) -> list[set[Place]]:
        """Where each result, of no records, is the same for all of them: where records would lie
        in it if they lay where an argument is the same for all."""
        repeats = _REPEATS.get(self.name)
        found = [set(repeats(self, result) if repeats else ()) for result in self.results]
        for tensor in self.tensors if rule is not None else ():
            own = self._marks[id(tensor)] or PUBLIC
            for place in own.same:
                self._marks[id(tensor)] = Mark(place)
                try:
                    assert rule is not None
                    for same, mark in zip(found, self._by(rule), strict=True):
                        same |= set() if mark.rows is None else {mark.rows}
                except Mixes:
                    pass
            self._marks[id(tensor)] = own
        return found


def _tensors(nested: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(nested) if isinstance(leaf, Tensor)]


def places(shape: Sequence[int], count: int) -> Iterator[Place]:
    """Every place where records may lie in a tensor of this shape."""
    for dimension, size in enumerate(shape):
        if size and size % count == 0:
            each = size // count
            yield from ((dimension, inner) for inner in range(1, each + 1) if each % inner == 0)


Rule = Callable[[Operation], "Mark | list[Mark]"]
Moves = Callable[[Operation, Tensor, Place], "Place | None"]


# ---- one tensor: each place goes to another one, or is taken


def _moved(moves: Moves, *names: str) -> Rule:
    """An operation on the one tensor among these arguments ("self", "input" without any)."""

    def rule(call: Operation) -> Mark:
        (tensor,) = call.some(*(names or ("self", "input")))
        rows = call.mark(tensor).rows
        moved = None if rows is None else moves(call, tensor, rows)
        if moved is None:
            raise Mixes(_ALONG)
        return Mark(moved)

    return rule


def _stays(call: Operation, tensor: Tensor, place: Place) -> Place | None:
    return place


def _view(call: Operation, tensor: Tensor, place: Place) -> Place | None:
    """A reshape leaves the order of the elements alone."""
    if "dtype" in call.given:
        return None
    old, new = call.shape(tensor), call.results[0].shape
    stride = place[1] * math.prod(old[place[0] + 1 :])  # elements from one record to the next
    for dimension, size in enumerate(new):
        below = math.prod(new[dimension + 1 :])
        if below <= stride < below * size:
            inner, rest = divmod(stride, below)
            return None if rest or size % (inner * call.count) else (dimension, inner)
    return None


def _permute(call: Operation, tensor: Tensor, place: Place) -> Place | None:
    size = len(call.shape(tensor))
    order = list(range(size))
    if "dims" in call.given:
        order = [each % size for each in call["dims"]]
    elif call.name == "t":
        order.reverse()
    else:
        one, other = (call[name] % size for name in call.given if name != "self")
        order[one], order[other] = order[other], order[one]
    return order.index(place[0]), place[1]


def _dimensions(chosen: Any, size: int) -> set[int]:
    """Dimensions as an operation takes them: without any, all."""
    given = [chosen] if isinstance(chosen, int) else chosen or range(size)
    return {each % max(1, size) for each in given}


def _over(argument: str, keeps: bool | None = None) -> Moves:
    """Return the moves of an operation along the dimensions in `argument`.

    keeps: whether they stay; None: as asked.
    """

    def moves(call: Operation, tensor: Tensor, place: Place) -> Place | None:
        taken = _dimensions(call.given.get(argument), len(call.shape(tensor)))
        if place[0] in taken:
            return None
        stay = call.given.get("keepdim", False) if keeps is None else keeps
        gone = 0 if stay else sum(each < place[0] for each in taken)
        return place[0] - gone, place[1]

    return moves


def _slice(call: Operation, tensor: Tensor, place: Place) -> Place | None:
    """All of a dimension, or another one than the records'."""
    whole = call.results[0].shape[place[0]] == call.shape(tensor)[place[0]]
    return place if whole else None


def _into_new_dimension(call: Operation, tensor: Tensor, place: Place) -> Place | None:
    dimension = call["dim"] % len(call.results[0].shape)
    return place[0] + (dimension <= place[0]), place[1]


def _pad(call: Operation, tensor: Tensor, place: Place) -> Place | None:
    pads = call["pad"] if "pad" in call.given else call["padding"]
    return place if place[0] < len(call.shape(tensor)) - len(pads) // 2 else None


def _before(last: int) -> Moves:
    """Return the moves of an operation that treats all but the last dimensions alone."""

    def moves(call: Operation, tensor: Tensor, place: Place) -> Place | None:
        return place if place[0] < len(call.shape(tensor)) - last else None

    return moves


def _unfold_backward(call: Operation, tensor: Tensor, place: Place) -> Place | None:
    size = len(call["input_sizes"])
    return None if place[0] in (call["dim"] % size, size) else place


def _into_more(call: Operation, tensor: Tensor, place: Place) -> Place | None:
    """expand and repeat: the same numbers, more often."""
    return place[0] + len(call.results[0].shape) - len(call.shape(tensor)), place[1]


def _repeats(call: Operation, result: Tensor) -> Iterator[Place]:
    """Index i holds what index i % size did: the same for all records where inner is a multiple."""
    (tensor,) = call.some("self")
    more = len(result.shape) - len(call.shape(tensor))
    old = [1] * more + list(call.shape(tensor))
    return (place for place in places(result.shape, call.count) if place[1] % old[place[0]] == 0)


def _everywhere(call: Operation, result: Tensor) -> Iterator[Place]:
    """One number, as often as asked for."""
    return places(result.shape, call.count)


# ---- several tensors


def _agreed(call: Operation, tensors: Sequence[Tensor], size: int) -> Place | None:
    """The one place of the records in tensors that are broadcast to `size` dimensions; None without
    records. Raises Mixes where they lie elsewhere, or a tensor of no record differs there.
    """
    found: set[Place] = set()
    for tensor in tensors:
        rows = call.mark(tensor).rows
        if rows is not None:
            found.add((rows[0] + size - len(call.shape(tensor)), rows[1]))
    if len(found) > 1:
        raise Mixes("brings records together that lie along different dimensions")
    for place in found:
        if not all(_meets(call, tensor, place, size) for tensor in tensors):
            raise Mixes(_UNEQUAL)
        return place
    return None


def _meets(call: Operation, tensor: Tensor, place: Place, size: int) -> bool:
    """Whether a tensor broadcast to `size` dimensions has rows at this place, or equal ones."""
    mark, shape = call.mark(tensor), call.shape(tensor)
    own = (place[0] - size + len(shape), place[1])
    if mark.rows is not None:
        return mark.rows == own
    return own[0] < 0 or shape[own[0]] == 1 or own in mark.same


def _pointwise(call: Operation) -> Mark:
    """Each number of the result from those at its own place."""
    if call.given.get("reduction"):  # of a loss; 0 is none
        raise Mixes("adds up over records")
    if call.name == "where" and "self" not in call.given:  # the places of what is true
        raise Mixes(_ALONG)
    tensors = call.tensors
    if call.name == "copy":  # what was there is gone
        tensors = call.some("src")
        call.mark(call["self"])
    shape = tuple(call.results[0].shape)
    if tensors and torch.broadcast_shapes(*map(call.shape, call.tensors)) != shape:
        raise Mixes("has a result of another shape")
    return Mark(_agreed(call, tensors, len(shape)))


def _aligned(*names: str, but: Moves = _stays) -> Rule:
    """Tensors with as many dimensions each, whose records lie at one place, not broadcast. but: to
    where that place goes; None: it is taken."""

    def rule(call: Operation) -> Mark:
        tensors = call.some(*names)
        places_of = {mark.rows for mark in map(call.mark, tensors)} - {None}
        if len(places_of) > 1:
            raise Mixes("brings records together that lie along different dimensions")
        (place,) = places_of or {None}
        if place is None:
            return PUBLIC
        sizes = {call.shape(t)[place[0] : place[0] + 1] for t in tensors}
        equal = all(call.mark(t).rows or place in call.mark(t).same for t in tensors)
        if len(sizes) > 1 or len({len(call.shape(t)) for t in tensors}) > 1 or not equal:
            raise Mixes(_UNEQUAL)
        moved = but(call, tensors[0], place)
        if moved is None:
            raise Mixes(_ALONG)
        return Mark(moved)

    return rule


def _batch(*names: str, weights: Sequence[str] = ()) -> Rule:
    """Return the rule of an operation that takes dimension 0 of these arguments for the batch.

    It works with the same weights on each of it.
    """

    def rule(call: Operation) -> Mark:
        _check_weights(call, weights)
        if "N" in call.given and call["N"] != call.shape(call["input"])[0]:
            raise Mixes(_ALONG)
        return Mark(_first_dimension(call, call.some(*names)))

    return rule


def _check_weights(call: Operation, weights: Sequence[str]) -> None:
    """Raise Mixes where weights depend on records, or gradients of weights are asked for."""
    if any(call.mark(tensor).rows is not None for tensor in call.some(*weights)):
        raise Mixes("has weights that depend on records")
    if any(call.given.get("output_mask", ())[1:]):
        raise Mixes("sums gradients over records")


def _first_dimension(call: Operation, tensors: Sequence[Tensor]) -> Place | None:
    """The place of the records along dimension 0 of all of them; None without records."""
    rows = {mark.rows for mark in map(call.mark, tensors)} - {None}
    for place in rows:
        assert place is not None
        if len(rows) > 1 or place[0] != 0:
            raise Mixes(_ALONG)
        if not all(call.mark(t).rows or place in call.mark(t).same for t in tensors):
            raise Mixes(_UNEQUAL)
        return place
    return None


def _joined(call: Operation) -> Mark:
    """cat and stack."""
    tensors = [t for t in call.some("tensors") if call.shape(t) != (0,)]
    dimension = call["dim"] % len(call.results[0].shape)
    place = _agreed(call, tensors, len(call.shape(tensors[0])))
    if place is None:
        return PUBLIC
    if call.name == "stack":
        return Mark((place[0] + (dimension <= place[0]), place[1]))
    if place[0] == dimension:
        raise Mixes("puts records behind one another")
    return Mark(place)


def _product(call: Operation) -> Mark:
    """mm and bmm, (..., n, k) times (..., k, m), and what adds a tensor to that."""
    names = {"mm": ("self", "mat2"), "bmm": ("self", "mat2"), "addmm": ("mat1", "mat2"),
             "baddbmm": ("batch1", "batch2")}[call.name]  # fmt: skip
    left, right = call.some(*names)
    size = len(call.shape(left))
    one, other = call.mark(left).rows, call.mark(right).rows
    if (one is not None and one[0] == size - 1) or (other is not None and other[0] == size - 2):
        raise Mixes("sums over the records")
    inside = [rows is not None and rows[0] >= size - 2 for rows in (one, other)]
    if not any(inside):  # each matrix of a stack by itself
        place = _agreed(call, [left, right], size)
    elif one is not None and other is not None:
        raise Mixes("multiplies records with records")
    else:
        place = one if inside[0] else other
    for tensor in call.some("self") if call.name in ("addmm", "baddbmm") else ():
        if place is None or not _meets(call, tensor, place, size):
            raise Mixes(_UNEQUAL)
    return Mark(place)


def _layer_norm(call: Operation) -> Mark:
    _check_weights(call, ("weight", "bias"))
    tensors = call.some("grad_out", "input", "mean", "rstd")
    size = len(call.shape(call["input"]))
    place = _agreed(call, tensors, size)
    if place is not None and place[0] >= size - len(call["normalized_shape"]):
        raise Mixes(_ALONG)
    return Mark(place)


def _batch_norm(call: Operation) -> list[Mark]:
    """Over channels that belong to one record each, as an instance normalisation has it."""
    place = _agreed(call, call.some("grad_out", "input"), len(call.shape(call["input"])))
    if place is None:
        return [PUBLIC] * len(call.results)
    training = call.given.get("training", call.given.get("train"))
    if not training or place[0] != 1 or call.some("running_mean", "running_var"):
        raise Mixes(_ALONG)
    channel = (0, place[1])
    for tensor in call.some("weight", "bias", "save_mean", "save_invstd"):
        if not _meets(call, tensor, channel, 1):
            raise Mixes(_UNEQUAL)
    return [Mark(place), *[Mark(channel)] * (len(call.results) - 1)]


def _nll(call: Operation) -> Mark | list[Mark]:
    if call["reduction"] != 0:
        raise Mixes("adds up over records")
    if len(call.shape(call["self"])) not in (2, 4):
        raise Mixes(_ALONG)
    _check_weights(call, ("weight",))
    place = _first_dimension(call, call.some("grad_output", "self", "target"))
    found = Mark(place)
    return [found, PUBLIC] if call.name.endswith("forward") else found  # no weights are added up


def _embedding(call: Operation) -> Mark:
    _check_weights(call, ("weight",))
    return Mark(call.mark(call["indices"]).rows)


def _index(call: Operation) -> Mark:
    """One tensor of whole numbers along one dimension; with values, what puts them there."""
    (x,) = call.some("self")
    chosen = [(d, each) for d, each in enumerate(call["indices"]) if each is not None]
    if len(chosen) != 1 or chosen[0][1].dtype in (torch.bool, torch.uint8):
        raise Mixes("is known for one tensor of whole numbers")
    dimension, index = chosen[0]
    rows, own, more = call.mark(x).rows, call.mark(index).rows, len(call.shape(index)) - 1
    values = call.some("values")
    if own is not None:
        if rows is not None or values:
            raise Mixes("chooses among records by records")
        return Mark((dimension + own[0], own[1]))
    if not values:
        if rows is not None and rows[0] == dimension:
            raise Mixes(_ALONG)
        after = rows is not None and rows[0] > dimension
        return PUBLIC if rows is None else Mark((rows[0] + more * after, rows[1]))
    given = call.mark(values[0]).rows
    if given is None and rows is None:
        return PUBLIC
    if given is None or len(call.shape(values[0])) != len(call.shape(x)) + more:
        raise Mixes(_UNEQUAL)
    if dimension <= given[0] <= dimension + more:
        raise Mixes(_ALONG)
    back = (given[0] - more * (given[0] > dimension), given[1])
    if not _meets(call, x, back, len(call.shape(x))):
        raise Mixes(_UNEQUAL)
    return Mark(back)


def _index_select(call: Operation) -> Mark | list[Mark]:
    _check_weights(call, ("index",))
    return _moved(_over("dim", keeps=True), "self")(call)


def _attention(call: Operation) -> Mark | list[Mark]:
    """Queries, keys and values (B, heads, T, width), each record with its own."""
    names = ("grad_out", "grad_out_", "query", "key", "value", "out", "logsumexp")
    place = _first_dimension(call, call.some(*names))
    for tensor in call.some("attn_mask", "attn_bias"):
        if place is None or not _meets(call, tensor, place, 4):
            raise Mixes(_UNEQUAL)
    if any(call.given.get("grad_input_mask", ())[3:]):
        raise Mixes("sums gradients over records")
    found = Mark(place)
    drawn = len(call.results) > 3 and not call.name.endswith("backward")
    return [found, found, PUBLIC, PUBLIC] if drawn else found  # keys of draws that there are none


def _rnn_layer(call: Operation) -> list[Mark]:
    """One layer through time (T, B, width), with states (B, width)."""
    _check_weights(call, [name for name in call.given if name.startswith("weight")])
    if call["batch_sizes"]:
        raise Mixes("is known for sequences of one length")
    place = _agreed(call, call.some("input", "output", "grad_output"), 3)
    states = call.some("hx_", "cx_", "cx_tmp", "hy_", "cy_", "grad_hy", "grad_cy")
    if place is None or place[0] != 1:
        raise Mixes(_ALONG)
    if not all(_meets(call, tensor, (0, place[1]), 2) for tensor in states):
        raise Mixes(_UNEQUAL)
    for tensor in call.some("workspace"):  # of the forward pass, for this one alone
        call.mark(tensor)
    own, state = Mark(place), Mark((0, place[1]))
    if "grad_output" in call.given:
        return [own, *[LOST] * 4, state, state]
    return [own, state, state, PUBLIC]


def _shape_alone(call: Operation) -> Mark:
    """Return the mark of a result that needs only a shape, filled with one public number."""
    return PUBLIC


def _from_python(call: Operation) -> Mark:
    """Numbers that Python made: no values of records reach it."""
    raise Mixes(_ALONG)


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
_WHOLE = frozenset(("div", "floor_divide", "fmod", "pow", "remainder"))  # in whole numbers alone
_FILLED = (
    "zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones",
    "new_full", "scalar_tensor", "zero", "fill",
)  # fmt: skip
_REPEATS: dict[str, Callable[[Operation, Tensor], Iterator[Place]]] = {
    "expand": _repeats, "repeat": _repeats, **dict.fromkeys(_FILLED, _everywhere),
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
_LAST = {  # what works on the last dimensions: how many
    1: ("avg_pool1d", "upsample_nearest1d", "upsample_linear1d", "reflection_pad1d",
        "replication_pad1d"),
    2: ("avg_pool2d", "_adaptive_avg_pool2d", "adaptive_max_pool2d", "max_pool2d_with_indices",
        "upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d", "reflection_pad2d",
        "replication_pad2d", "tril", "triu"),
    3: ("avg_pool3d", "_adaptive_avg_pool3d", "adaptive_max_pool3d", "max_pool3d_with_indices",
        "upsample_nearest3d", "upsample_trilinear3d", "pixel_shuffle", "pixel_unshuffle"),
}  # fmt: skip
_ALIKE: list[tuple[Rule, tuple[str, ...]]] = [
    (_pointwise, POINTWISE),
    (_shape_alone, _FILLED),
    (_from_python, _FROM_PYTHON),
    (_moved(_view), ("view", "_unsafe_view", "squeeze", "unsqueeze")),
    (_moved(_stays), ("detach", "alias", "clone", "_to_copy")),
    (_moved(_permute), ("permute", "transpose", "t")),
    (_moved(_into_more), ("expand", "repeat")),
    (_joined, ("cat", "stack")),
    (_moved(_over("dim")), (
        "sum", "mean", "amax", "amin", "prod", "any", "all", "logsumexp", "var", "std",
        "var_mean", "linalg_vector_norm", "norm", "argmax", "argmin", "max", "min",
        "count_nonzero",
    )),
    (_moved(_over("dim", keeps=True)), (
        "_softmax", "_log_softmax", "_safe_softmax", "cumsum", "cumprod", "logcumsumexp",
        "sort", "topk", "split", "unsafe_split", "split_with_sizes", "unsafe_split_with_sizes",
        "glu",
    )),
    (_moved(_over("dim", keeps=False)), ("select", "unbind")),
    (_moved(_over("dims", keeps=True)), ("flip", "roll")),
    (_moved(_over("dimension", keeps=True)), ("unfold",)),
    (_moved(_unfold_backward, "grad_in"), ("unfold_backward",)),
    (_moved(_slice), ("slice",)),
    (_moved(_slice, "grad_output"), ("slice_backward",)),
    (_moved(_into_new_dimension, "grad_output"), ("select_backward",)),
    (_moved(_pad), ("constant_pad_nd",)),
    (_aligned("grad_output", "output", but=_over("dim", keeps=True)),
     ("_softmax_backward_data", "_log_softmax_backward_data")),
    (_aligned("grad_output", "self", but=_over("dim", keeps=True)), ("glu_backward",)),
    (_aligned("self", "index", "src", but=_over("dim", keeps=True)), (
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
OPERATIONS: dict[str, Rule] = {name: rule for rule, names in _ALIKE for name in names}
for _count, _names in _LAST.items():
    for _name in _names:
        OPERATIONS[_name] = _moved(_before(_count))
        backward = _aligned("grad_output", "self", "indices", but=_before(_count))
        OPERATIONS[f"{_name}_backward"] = backward
