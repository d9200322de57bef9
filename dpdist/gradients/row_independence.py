"""Show by the operations of a pass that a model treats each record alone.

Examples can show that a model mixes records, never that it does not. The operations can: torch's
dispatcher names every one that a pass executes, backward included, and of those on a list
(`dpdist.gradients.row_operations`) it is known along which dimension of the result the records
lie, given where they lie in the arguments. A pass of known operations carries record i in row i
alone, from the inputs to the losses and to all that a layer's rule reads. An operation that is not
on the list, or works along the records' dimension (a mean over the batch, a softmax, a reshape
through it), shows nothing.

Values can also reach Python on ways that no operation names: a printed tensor, an array or an
address on its memory, or an error that an operation raises for a value and the model's code
catches. They are noticed where Python calls them, by the interpreter's profile hook, which no mode
of torch switches off.

Rows that round alike: a kernel may add up in another order on another row, since a matrix product
of few columns takes rows that begin at other alignments in memory by other code. The last bit that
differs is harmless where gradients are continuous. On a kink it is not: a ReLU's input of exactly
0 in one row and of 1e-9 in the next gives two gradients of one record, and one record more, which
moves all behind it by a row, would move their sum by far more than the clip. So rows are sorted
into classes of equal bits, and a record's class follows from its own id
(`dpdist.gradients.sampling.iter_padded_passes`).
"""

from __future__ import annotations

import dis
import hashlib
import importlib
import itertools
import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, _tensor_str, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from dpdist.core.version import PACKAGE
from dpdist.gradients.hooks import (
    Inputs,
    Layer,
    Objective,
    device_of,
    each_tensor,
    example_losses,
    find_layers,
    find_shared_arguments,
    followed_by,
    refuse_joint_zeros,
    rows_of,
    run_pass,
    run_with_values,
    tensors_of,
)
from dpdist.gradients.per_example import LayerCall, arithmetic_of
from dpdist.gradients.row_operations import (
    METADATA,
    POINTWISE,
    PUBLIC,
    MixesRecords,
    Operation,
    RecordLocation,
    TensorMark,
    possible_locations,
)

# --- values that reach Python -----------------------------------------------------------------


# What reads a tensor's memory, or hands it to others who may read it later: in C and in Python.
_IN_C = frozenset(("numpy", "tolist", "data_ptr", "untyped_storage"))
_METHODS = (
    Tensor.__array__, Tensor.__dlpack__, Tensor.__reduce_ex__, Tensor.storage,
    Tensor._typed_storage, Tensor.share_memory_, _tensor_str._str_intern,
)  # fmt: skip
_IN_PYTHON: dict[CodeType, str] = {
    method.__code__: method.__name__.strip("_") for method in _METHODS
}
# What does so unseen, or lets something run that is not seen here.
_UNTRACKED_CALLS = frozenset((
    "_to_dlpack", "_to_dlpack_versioned", "start_new_thread", "start_joinable_thread", "fork",
    "setprofile", "_pop_torch_dispatch_stack", "_pop_torch_function_stack",
))  # fmt: skip
_TRUSTED_FOLDERS = tuple(f"{folder}/" for folder in (Path(str(torch.__file__)).parent, PACKAGE))
# Python itself goes on after an error in these: a loop by number ends, a deletion is done.
_SILENT = ("__getitem__", "__del__")

# An error is asked for its kind, or is over.
_CAUGHT = frozenset((
    "CHECK_EXC_MATCH", "CHECK_EG_MATCH", "WITH_EXCEPT_START", "POP_EXCEPT", "RETURN_VALUE",
    "RETURN_CONST",
))  # fmt: skip

# Of a tensor, the name of what reads it.
TensorReadCallback = Callable[[Tensor, str], None]


@contextmanager
def watch_tensor_reads(
    on_read: TensorReadCallback, on_untracked_call: Callable[[str], None]
) -> Iterator[None]:
    """Tell of every call that reads a tensor's memory or hands it on, until the end of the block.

    Args:
        on_read: called with the tensor and the name of what reads it.
        on_untracked_call: called with the name of a call behind which nothing can be seen.
    """

    def look(frame: FrameType, event: str, called: Any) -> None:
        if event == "call":
            if frame.f_code in _IN_PYTHON:
                first = frame.f_code.co_varnames[0]
                on_read(frame.f_locals[first], _IN_PYTHON[frame.f_code])
        elif event == "c_call":
            name = called.__name__
            if name in _IN_C:
                if isinstance(called.__self__, Tensor):
                    on_read(called.__self__, name)
            elif name in _UNTRACKED_CALLS and not frame.f_code.co_filename.startswith(
                _TRUSTED_FOLDERS
            ):
                on_untracked_call(name)

    if not hasattr(TorchDispatchMode, "_should_skip_dynamo"):
        importlib.import_module("torch._dynamo")  # torch would in the block, which is slow there
    before = sys.getprofile()
    sys.setprofile(look)
    try:
        with _DispatchThroughPython():
            yield
    finally:
        sys.setprofile(before)


@contextmanager
def pause_watching() -> Iterator[None]:
    """Leave out what the block calls: it is none of the model's."""
    hook = sys.getprofile()
    sys.setprofile(None)
    try:
        with torch._C.DisableTorchFunction():
            yield
    finally:
        sys.setprofile(hook)


class _DispatchThroughPython(TorchFunctionMode):
    """Has Python call the methods that C code calls (`map`), of which no hook is told otherwise."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def find_catching_function(last: CodeType) -> str | None:
    """Return the name of a function now being executed that would go on after an error raised here.

    Functions of torch and of dpdist are left out: they catch no error to learn a value.

    Args:
        last: code of the function at which to stop looking, outwards.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not last:
        code = frame.f_code
        if not code.co_filename.startswith(_TRUSTED_FOLDERS) and (
            code.co_name in _SILENT
            or any(start <= frame.f_lasti < end for start, end in _guarded(code))
        ):
            return code.co_name
        frame = frame.f_back  # type: ignore[assignment]
    return None


@cache
def _guarded(code: CodeType) -> frozenset[tuple[int, int]]:
    """Return where an error among its instructions may be caught by a `try` or a `with`."""
    if not code.co_exceptiontable:
        return frozenset()
    steps = list(dis.get_instructions(code))
    places = {step.offset: place for place, step in enumerate(steps)}
    entries: Any = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]
    handlers = {(e.start, e.end): _handler(steps[places[e.target] :]) for e in entries}
    catching = {guarded for guarded, (_, _, goes_on) in handlers.items() if goes_on}
    while True:  # what raises an error again may do so where it is caught
        more = {
            guarded for guarded, (first, last, _) in handlers.items()
            if any(start <= last and first < end for start, end in catching)
        } - catching  # fmt: skip
        if not more:
            return frozenset(catching)
        catching |= more


def _handler(steps: list[dis.Instruction]) -> tuple[int, int, bool]:
    """Return where what handles an error begins and raises it again, as `finally` does, and whether
    it may do something else."""
    first = steps[0].offset
    last = next((step.offset for step in steps if step.opname == "RERAISE"), steps[-1].offset)
    if steps[0].opname != "PUSH_EXC_INFO":  # puts the stack in order, no more
        return first, last, False
    within = [step for step in steps if step.offset < last]
    leaves = any("JUMP" in s.opname and not first <= s.argval <= last for s in within)
    return first, last, leaves or any(step.opname in _CAUGHT for step in within)


# --- rows that round alike --------------------------------------------------------------------


MAX_EXAMPLES = 64  # most that are tried
SYNTHETIC_KEY = b"for invented examples alone".ljust(32)  # of what is drawn for them
_LEAST = 4
_NUMBERS = 4096  # of a row that are compared, unless `MAX_EXAMPLES` have fewer
# Trials of one operation on other numbers: most of them, and numbers that they may work on, for
# operations on single numbers, products and others.
_TRIALS, _TRIAL_NUMBERS = 512, {"pointwise": 1 << 25, "product": 1 << 23, "other": 1 << 22}
_ZEROS = 16  # trials of zeros alone: of both signs the larger one is 0.0 or -0.0
_telling: dict[tuple[str, str, str], Tensor] = {}  # by operation, types and other arguments
_CANDIDATES = 1 << 16  # numbers among which those are looked for that codes round apart
# Operations that are exact, or rounded correctly, by every code; and products of matrices.
_ROUNDED_ALIKE = frozenset((
    "abs", "add", "copy", "div", "mul", "neg", "relu", "rsub", "sqrt", "square", "sub",
    "threshold_backward", "where",
    "_to_copy", "cat", "clone", "constant_pad_nd", "embedding", "flip", "gather", "index",
    "index_select", "max_pool2d_with_indices", "nll_loss_forward", "repeat", "select_backward",
    "slice_backward", "sort", "stack",
))  # fmt: skip
_PRODUCTS = frozenset(("mm", "bmm", "mv", "addmm", "addmv", "baddbmm"))
_MANTISSA_BITS = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}
_REMEMBERED = 1 << 20  # most numbers of a model and examples that are remembered
_SETTINGS = (
    int, float, complex, str, type(None), torch.dtype, torch.memory_format, torch.device,
    torch.layout,
)  # fmt: skip
_PLAIN_TENSORS = (Tensor, nn.Parameter)
_UNKNOWN = (f"unknown {number}" for number in itertools.count())
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def find_row_classes(
    run: Callable[[Any, Tensor], Sequence[Tensor]],
    inputs: Inputs,
    targets: Tensor,
    rows: int,
    model: Sequence[Tensor] = (),
) -> np.ndarray | None:
    """Sort the rows of a pass into classes that give one example the same bits.

    Each example fills a whole pass, so rows that round alike have equal results. Kernels choose
    their code by shapes and addresses and not by values, so a few examples of many numbers tell:
    two rows of different code agree on all of them with negligible probability, not never. Numbers
    that are computed on the way are compared too: a step, such as the gradient of a hinge, hides
    last bits from what follows it, and yet falls otherwise by them. A row may have one number alone
    that other code computes, of which one in thirty tells the codes apart, and all examples may
    have zeros where records have none: operations are tried on more numbers, each by itself. After
    the first examples what is computed on the way is compared only where something was not tried.

    The classes are remembered in this process, by the executed operations and all numbers of a
    small model and of the examples. When these return, two passes are compared, not one for each
    example.

    Args:
        run: executes a pass: inputs (rows, ...), targets (rows, ...) to tensors (rows, ...), all
            that a record's clipped vector is computed from.
        inputs, targets: (count, ...), invented: they hold nothing private.
        rows: of the pass.
        model: all tensors of the model; without them nothing is remembered.

    Returns:
        The class of each row, int64 (rows,), numbered in the order of their first rows; None where
        all rows are alike.
    """
    if rows == 1:
        return None
    given = [*tensors_of(inputs), targets, *model]
    plain = bool(model) and all(map(_is_described, given))
    remembered = plain and sum(tensor.numel() for tensor in given) <= _REMEMBERED
    compared, seen = _RowComparison(rows, given if remembered else None), 0
    for number in range(len(targets)):
        if number >= _LEAST and seen >= _NUMBERS:
            break
        watched = compared if number < _LEAST or compared.untried else nullcontext()
        with torch.autograd.set_multithreading_enabled(False), watched:
            found = run(_filled(inputs, number, rows), _filled(targets, number, rows))
        for tensor in found:
            compared.refine(tensor.detach())
            seen += tensor[0].numel()
        del found  # before the next pass needs as much again
        if compared.knows_operations():
            break
    # What is executed may be other code where nothing looks on, such as compiled parts.
    for tensor in run(_filled(inputs, 0, rows), _filled(targets, 0, rows)):
        compared.refine(tensor.detach())
    compared.remember()
    return compared.classes if compared.classes.any() else None


class _RowComparison(TorchDispatchMode):
    """Sorts the rows of a pass by the bits of the real numbers that are computed in it.

    A dimension as long as the pass may be another one, of channels say: its rows differ by more
    than rounding, and nothing is learned from it. Views, and tensors without memory of their own in
    rows (sparse, nested), are not looked at: what they are made of is.

    Args:
        rows: of the pass.
        given: all numbers that a pass begins with; None: nothing is remembered.
    """

    _known: ClassVar[dict[bytes, np.ndarray]] = {}  # by all that the first pass executed
    _tried: ClassVar[dict[Any, np.ndarray]] = {}  # of one operation, by all but its numbers
    _trying: ClassVar[Any] = threading.RLock()

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self, rows: int, given: Sequence[Tensor] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.classes = np.zeros(rows, np.int64)
        self.untried = False  # whether something was compared by the numbers of passes alone
        self._operations: Any = None  # of the first pass, being hashed
        self._name: bytes | None = None  # of them all
        if given is not None:
            settings = arithmetic_of(given[0].device)
            self._operations = hashlib.blake2b(repr((rows, settings)).encode())
            for tensor in given:
                self._operations.update(repr(_described(tensor)).encode())
                numbers = tensor.detach().cpu().contiguous().view(-1)
                self._operations.update(numbers.view(torch.uint8).numpy())

    def refine(self, tensor: Tensor) -> None:
        """Split classes whose rows (rows, ...) differ in a bit."""
        self.classes = _refine_classes(self.classes, tensor)

    def knows_operations(self) -> bool:
        """Return whether all that the first pass executed was compared before; asked after each."""
        if self._operations is None:
            return False
        self._name, self._operations = self._operations.digest(), None
        known = self._known.get(self._name)
        if known is not None:
            self.classes = _join_classes(self.classes, known)
        return known is not None

    def remember(self) -> None:
        """Keep the classes for passes of the same operations."""
        if self._name is not None:
            self._known[self._name] = self.classes.copy()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._operations is not None:
            given, form = pytree.tree_flatten((args, kwargs))
            described = str(func), [_described(each) for each in given], str(form)
            self._operations.update(repr(described).encode())
        refuse_joint_zeros(func, args)
        result = func(*args, **(kwargs or {}))
        if _computes(func):
            found = _compared(result)
            places = [self._likely_places(each) for each in found]
            self._compare(found, places)
            if any(places) and _is_torchs_own(func):
                self._try_other_numbers(func, args, kwargs or {}, found, places)
            elif any(places) and found[0].device.type == "cpu":  # what it runs is not seen
                self.classes = np.arange(len(self.classes))
        return result

    def _compare(
        self,
        results: Sequence[Tensor],
        likely: Sequence[Sequence[RecordLocation]],
        *,
        exactly: bool = False,
    ) -> None:
        differ = _differ if exactly else _differ_by_rounding
        for result, places in zip(results, likely, strict=True):
            for each in (self._by_row(result, place) for place in places):
                if differ(each):
                    self.refine(each)

    def _by_row(self, tensor: Tensor, place: RecordLocation) -> Tensor:
        """Return a tensor by rows (rows, n), where the records lie at this place."""
        dimension, inner = place
        split: Tensor = tensor.unflatten(dimension, (-1, len(self.classes), inner))
        return split.movedim(dimension + 1, 0).flatten(1)

    def _likely_places(self, tensor: Tensor) -> list[RecordLocation]:
        """Return where the records may lie in a tensor: rows there are equal but for rounding."""
        rows, found = len(self.classes), []
        if not tensor.numel():
            return []
        allowed = None
        for place in possible_locations(tensor.shape, rows):
            split = tensor.unflatten(place[0], (-1, rows, place[1])).movedim(place[0] + 1, 0)
            pair = split[:: rows - 1]  # the first row and the last one
            some = pair[
                (slice(None), *(slice(None, None, max(1, size - 1)) for size in pair.shape[1:]))
            ]
            if not _all_equal(some.flatten(1)):  # in the corners already
                if allowed is None:
                    allowed = torch.finfo(tensor.dtype).eps ** 0.7 * _largest(tensor)
                if bool(((some[1] - some[0]).abs() > allowed).any()):
                    continue
            pair = pair.flatten(1)
            if _all_equal(pair) or _differ_by_rounding(pair):
                found.append(place)
        return found

    def _try_other_numbers(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        results: list[Tensor],
        likely: list[list[RecordLocation]],
    ) -> None:
        """Compare the rows of an operation's results on other numbers.

        A vector register leaves numbers over, such as the last 8 of 40, for other code. Of a
        sigmoid's results 4 in 100 differ by it, and of those of short sums a third: a row with one
        such number looks like the others in most passes.
        """
        kind, given = _trial_kind(func), pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in given[0] if isinstance(leaf, Tensor)]
        if kind is None or results[0].device.type != "cpu" or not all(map(_is_described, tensors)):
            self.untried = True
            return
        scale, parts = _argument(func, args, kwargs, "alpha"), any(t.is_complex() for t in tensors)
        if _plain_name(func) in _ROUNDED_ALIKE and scale in (None, 1) and not parts:
            return
        described = str([_described(leaf) for leaf in given[0]]), str(given[1]), str(likely)
        name: Any = str(func), len(self.classes), arithmetic_of(results[0].device), *described
        single, count = kind == "pointwise" and not parts, None
        if not single:
            count = self._count_trials(kind, tensors, results[0], likely[0])
            # Kernels choose their code by the first number's place in memory, too.
            name = count, *(each.data_ptr() % 64 for each in tensors), *name
            trials = self._scrambled_results(func, *given, count)
        else:
            trials = _other_results(func, *given, results[0].numel())
        # One number everywhere is everywhere the same result, not by rounding alone.
        exactly = single and all(map(torch.is_floating_point, tensors))
        with self._trying:  # of several threads, the others wait for the first one's trials
            if name not in self._tried:
                found = self._classes_of_trials(trials, results, likely, exactly=exactly)
                if found is None:  # by these numbers; others may be taken
                    self.untried |= count != 0
                    return
                self._tried[name] = found
        if self._tried[name].any():
            self.classes = _join_classes(self.classes, self._tried[name])

    def _classes_of_trials(
        self,
        trials: Iterable[list[Tensor]],
        results: list[Tensor],
        likely: list[list[RecordLocation]],
        *,
        exactly: bool,
    ) -> np.ndarray | None:
        """Return the classes of rows by trials alone; None where there were none."""
        shapes, ran = [each.shape for each in results], False
        before, self.classes = self.classes, np.zeros_like(self.classes)
        for found in trials:
            ran = True
            if [each.shape for each in found] == shapes:  # of other numbers, they may vary
                self._compare(found, likely, exactly=exactly)
        found_classes, self.classes = self.classes, before
        return found_classes if ran else None

    def _scrambled_results(
        self, func: Any, leaves: list[Any], form: Any, count: int
    ) -> Iterator[list[Tensor]]:
        """Yield an operation's results on scrambled numbers: rows that are equal stay so. Every
        second time all rows have the first one's, and last zeros of both signs."""
        places = [
            self._likely_places(*_compared(leaf)) if _compared(leaf) else [] for leaf in leaves
        ]
        for number in (*range(count), *range(-min(count, _ZEROS), 0)):
            filled, turn, renewed = list(leaves), number // 2, number >= 0 and number % 2 == 0
            for leaf, each in enumerate(leaves):
                if isinstance(each, Tensor):
                    own: Sequence[RecordLocation | None] = places[leaf] or (None,)
                    place = own[turn % len(own)]
                    turn //= len(own)
                    filled[leaf] = (
                        self._renewed(each, number, leaf, place)
                        if renewed
                        else _scrambled(each, number)
                    )
            if found := _results_of(func, filled, form):
                yield found
            elif not renewed:  # so it is with its own numbers
                return

    def _renewed(
        self, like: Tensor, number: int, leaf: int, place: RecordLocation | None
    ) -> Tensor:
        """Return a tensor of the same layout whose rows, at this place, are equal, while no two
        numbers of a row are: the first row's, with other bits where they are of usual size and with
        new numbers elsewhere, since zeros, infinities or equal numbers round to nothing. Every
        second time all are new."""
        if like.is_complex():
            return _by_parts(like, lambda parts: self._renewed(parts, number, leaf, place))
        if like.dtype not in _MANTISSA_BITS or not like.numel():
            return like.clone()
        before, bits = _before(like), _MANTISSA_BITS[like.dtype]
        other = like.new_ones(before + _span(like))[before:].as_strided(like.shape, like.stride())
        source, target = like, other
        if place is not None:
            dimension, inner = place
            source, target = (
                each.unflatten(dimension, (-1, len(self.classes), inner))
                for each in (source, target)
            )
            source = source.narrow(dimension + 1, 0, 1)
        for dimension, step in enumerate(target.stride()):
            if step == 0:  # one number for all of them
                source, target = (each.narrow(dimension, 0, 1) for each in (source, target))
        generator = torch.Generator().manual_seed(_TRIALS * leaf + number)
        new = 8 * torch.rand(source.shape, generator=generator, dtype=torch.float64) - 4
        size = source.abs()
        known = (size > 2.0**-bits) & (size < 2.0**bits)
        mixed = new.to(like.dtype)
        if number % 4:
            mixed = source.where(known, mixed)
        whole = mixed.contiguous().view(_INTEGERS[like.element_size()])
        whole ^= torch.randint(1 << bits, whole.shape, generator=generator, dtype=whole.dtype)
        try:
            target.copy_(whole.view(like.dtype).expand_as(target))
        except RuntimeError:  # windows that overlap
            return _scrambled(like, number)
        return other

    def _count_trials(
        self, kind: str, tensors: list[Tensor], result: Tensor, places: Sequence[RecordLocation]
    ) -> int:
        """Return how often an operation is tried: often where a row has few numbers, or its last
        ones may be those that a register leaves over, never where a row has many; and once where
        most are zero, since records may fill what is zero for all examples."""
        numbers, rows = result.numel() + sum(map(_span, tensors)), len(self.classes)
        narrow = min(result.numel() // rows, *result.shape[-2:][: result.dim() - 1], 1 << 30)
        if kind == "other":
            outermost = all(d == 0 and inner * rows == len(result) for d, inner in places)
            narrow = result.numel() // rows if outermost else 1
        wanted: int = _TRIALS // (2 * max(1, narrow))
        count = min(wanted, _TRIAL_NUMBERS[kind] // max(1, numbers))
        self.untried |= count < wanted
        mostly_zero = 2 * int(result.count_nonzero()) < result.numel()
        return max(count, int(mostly_zero and numbers <= _TRIAL_NUMBERS["pointwise"]))


def _plain_name(func: Any) -> str:
    """Return an operation's name, without the mark of one in place."""
    name: str = func._schema.name.partition("::")[2]
    return name.rstrip("_") if func._schema.is_mutable else name


def _argument(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    """Return an argument of an operation; None where it was not given."""
    names = [each.name for each in func._schema.arguments]
    return dict(zip(names, args, strict=False)).get(name, kwargs.get(name))


def _compared(result: Any) -> list[Tensor]:
    """Return the tensors of real numbers in a result; of complex numbers, both parts."""
    leaves = [
        torch.view_as_real(each.detach().resolve_conj()) if _is_complex(each) else each
        for each in pytree.tree_leaves(result)
    ]
    return [each.detach() for each in leaves if _is_plain(each)]


def _is_complex(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_complex() and _is_described(value)


def _is_torchs_own(func: Any) -> bool:
    """Return whether it is one of torch's operations, which may be tried on any numbers."""
    return isinstance(func, torch._ops.OpOverload) and func.namespace == "aten"


@cache
def _computes(func: Any) -> bool:
    """Return whether an operation's results are numbers of its own."""
    unfilled = any(word in str(func) for word in ("empty", "resize"))
    return not (getattr(func, "is_view", False) or unfilled)


@cache
def _trial_kind(func: Any) -> str | None:
    """Return "pointwise" for an operation on single numbers, "product" for one of matrices, "other"
    for torch's others, and None for what cannot be repeated."""
    drawn = torch.Tag.nondeterministic_seeded in func.tags
    if drawn and all(each.name != "dropout_p" for each in func._schema.arguments):
        return None
    if _plain_name(func) in _PRODUCTS:
        return "product"
    pointwise = torch.Tag.pointwise in func.tags or _plain_name(func) in POINTWISE
    return "pointwise" if pointwise else "other"


def _results_of(func: Any, filled: list[Any], form: Any) -> list[Tensor]:
    """Return an operation's results that are compared; none where it does not take the numbers."""
    args, kwargs = pytree.tree_unflatten(filled, form)
    try:
        result = func(*args, **kwargs)
    except RuntimeError:  # such as a logarithm of what must be a probability
        return []
    return _compared(result)


def _other_results(func: Any, leaves: list[Any], form: Any, numbers: int) -> Iterator[list[Tensor]]:
    """Yield an operation's results where each tensor of real numbers has one number everywhere."""
    count = min(_TRIALS, max(_LEAST, _TRIAL_NUMBERS["pointwise"] // max(1, numbers)))
    telling = _telling_numbers(func, leaves, form)[:count]
    values = torch.cat([telling, _numbers(count, len(leaves))])[: max(2 * _LEAST, count // 4)]
    zeros = 0.0 * values.new_tensor(list(itertools.product((1.0, -1.0), repeat=2)))
    values = torch.cat([zeros.repeat(1, len(leaves))[:, : len(leaves)], values])
    for own in values.tolist():
        filled = [
            _laid_out_as(leaf, value) if isinstance(leaf, Tensor) else leaf
            for leaf, value in zip(leaves, own, strict=True)
        ]
        if found := _results_of(func, filled, form):
            yield found


def _numbers(count: int, each: int) -> Tensor:
    values = 8 * torch.rand(count, each, generator=torch.Generator().manual_seed(0)) - 4
    values[::2] /= 4  # within (-1, 1), where every function is defined
    values[1::4] = values[1::4].abs() / 4  # probabilities
    return values


def _telling_numbers(func: Any, leaves: list[Any], form: Any) -> Tensor:
    """Return numbers for each tensor, (count, tensors), that an operation rounds otherwise one by
    one than side by side: by these a few trials tell which rows have numbers left over."""
    kinds = [each.dtype if isinstance(each, Tensor) else _described(each) for each in leaves]
    name = str(func), str(kinds), str(form)
    if name in _telling:
        return _telling[name]
    values = _candidates(leaves)
    count = len(values)
    results = []
    for step in (1, 2):  # numbers that do not lie side by side go through no vector register
        filled = list(leaves)
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                filled[place] = leaf.new_ones(step * count)[::step]
                if leaf.is_floating_point():
                    filled[place].copy_(values[:, place])
        results.append(_results_of(func, filled, form))
    differ = torch.zeros(count, dtype=torch.bool)
    for one, other in zip(*results, strict=True):
        if len(one) == count:
            same = (one == other) | (one.isnan() & other.isnan())
            differ |= ~same.flatten(1).all(1) if same.dim() > 1 else ~same
    _telling[name] = values[differ][:_TRIALS]
    return _telling[name]


def _candidates(leaves: list[Any]) -> Tensor:
    """Return numbers for each tensor, (count, leaves), float64: usual ones; some as large and small
    as numbers go, where codes overflow or lose bits otherwise; none in one tensor; and all of the
    half precisions."""
    values = _numbers(_CANDIDATES, len(leaves)).double()
    values *= 4.0 ** (torch.arange(_CANDIDATES)[:, None] // 4 % 5 - 3)
    kinds = {leaf.dtype for leaf in leaves if _is_plain(leaf)}
    reach = min((math.log2(torch.finfo(kind).max) for kind in kinds), default=1.0)
    powers = 2 * torch.rand(values.shape, generator=torch.Generator().manual_seed(1)) - 1
    values[2::4] *= 2.0 ** (reach * powers[2::4])  # for each tensor another one
    values[3::8] *= 2.0 ** (reach * powers[3::8, :1])
    for leaf in range(len(leaves)):
        values[7 + 64 * leaf :: 1 << 12, leaf] = math.nan
    if len(kinds) == 1 and kinds <= {torch.float16, torch.bfloat16}:
        bits = torch.arange(1 << 16)[:, None] * (2 * torch.arange(len(leaves)) + 1)
        values = torch.cat([values, bits.to(torch.int16).view(*kinds).double()])
    return values


def _laid_out_as(like: Tensor, value: float) -> Tensor:
    """Return a tensor of the same layout that has one number everywhere; whole numbers stay."""
    if not like.is_floating_point():
        return like.clone()
    return like.new_full((_span(like),), value).as_strided(like.shape, like.stride())


def _span(like: Tensor) -> int:
    """Return from its first number to its last one how many places there are."""
    steps = zip(like.shape, like.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps) if like.numel() else 0


def _before(like: Tensor) -> int:
    """Return how many numbers behind a multiple of 64 bytes a tensor begins: kernels choose their
    code by the first number's place in memory, too."""
    return like.data_ptr() % 64 // like.element_size()


def _by_parts(like: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the function's result for the real and imaginary parts, as complex numbers."""
    stored = like.conj() if like.is_conj() else like
    made = torch.view_as_complex(function(torch.view_as_real(stored)))
    return made.conj() if like.is_conj() else made


def _scrambled(like: Tensor, number: int) -> Tensor:
    """Return a tensor of the same layout with other last bits, equal ones where they were equal,
    between half and twice what they were. At numbers below 0 all become zeros."""
    if like.is_complex():
        return _by_parts(like, lambda parts: _scrambled(parts, number))
    if like.dtype not in _MANTISSA_BITS or not like.numel():
        return like.clone()
    bits = _MANTISSA_BITS[like.dtype]
    mask, factor = (1 << bits) - 1, 2 * pow(3, 13 * number + 7, 1 << 13) + 1
    own = like.as_strided((_span(like),), (1,))
    other = like.new_empty(_before(like) + len(own))[_before(like) :]
    whole, mixed = (each.view(_INTEGERS[like.element_size()]) for each in (own, other))
    torch.bitwise_right_shift(whole, bits // 2, out=mixed)
    mixed.bitwise_xor_(whole).mul_(factor).add_(factor**2 % 997).bitwise_and_(mask)
    mixed.bitwise_or_(whole & ~mask)
    other.copy_(torch.where(own.isfinite(), other, own))
    other.masked_fill_(own == 0, 0.0)
    if number < 0:
        signed = torch.zeros_like(other).copysign((mixed >> bits - 4 & 1).to(like.dtype) - 0.5)
        other.copy_(torch.where(own.isfinite(), signed, own))
    return other.as_strided(like.shape, like.stride())


def _is_plain(value: Any) -> bool:
    """Return whether it is a tensor of real numbers with memory of its own for each."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    return value.layout == torch.strided and not value.is_nested


def _is_described(value: Any) -> bool:
    """Return whether shape, type and layout are all that tells this tensor's kernels apart."""
    if type(value) not in _PLAIN_TENSORS or value.layout != torch.strided:
        return False
    return not (value.is_nested or value.is_quantized)


def _described(argument: Any) -> Any:
    """Return by what an operation may choose its kernel in one argument; for an argument of an
    unknown kind, a word that is never returned twice."""
    if _is_described(argument):
        laid_out = argument.stride(), argument.storage_offset()
        return tuple(argument.shape), str(argument.dtype), str(argument.device), *laid_out
    return argument if isinstance(argument, _SETTINGS) else next(_UNKNOWN)


def _largest(tensor: Tensor) -> float:
    """Return the largest size of its finite numbers."""
    least, most = map(float, torch.aminmax(tensor))
    if not (math.isfinite(least) and math.isfinite(most)):
        least, most = map(float, torch.aminmax(tensor.nan_to_num(0.0, 0.0, 0.0)))
    return max(-least, most)


def _all_equal(rows: Tensor) -> bool:
    """Return whether all rows are equal to the first one, also in zeros' signs and in what is no
    number."""
    bits = rows.view(_INTEGERS[rows.element_size()])
    same = bits == bits[:1]
    return bool(same.all()) or bool((same | (rows.isnan() & rows[:1].isnan())).all())


def _differ(rows: Tensor) -> bool:
    """Return whether rows differ, be it by no more than a sign of zero."""
    return bool(rows.numel()) and not _all_equal(rows)


def _differ_by_rounding(rows: Tensor) -> bool:
    """Return whether rows differ, and by no more than other orders of summation explain."""
    if not _differ(rows):
        return False
    kind = torch.finfo(rows.dtype)
    usual = rows.abs() < kind.max / 2  # what masks an entry is as large as numbers go, or infinite
    first = rows[:1].expand_as(rows)
    if not bool((usual | (rows == first) | (rows.isnan() & first.isnan())).all()):
        return False
    allowed = kind.eps**0.7 * rows.where(usual, 0).abs().max()
    return bool(((rows - first).abs().where(usual, 0) <= allowed).all())


def _filled(examples: Inputs, number: int, rows: int) -> Inputs:
    def fill(tensor: Tensor) -> Tensor:
        return tensor[number : number + 1].repeat(rows, *[1] * (tensor.dim() - 1))

    return each_tensor(fill, examples)


def _refine_classes(classes: np.ndarray, tensor: Tensor) -> np.ndarray:
    """Split classes whose rows differ in a bit."""
    if not tensor[0].numel():
        return classes
    if tensor.dtype == torch.bool:
        tensor = tensor.to(torch.uint8)
    bits = tensor.view(_INTEGERS[tensor.element_size()])
    if bool((bits == bits[:1]).all()):
        return classes
    flat = np.ascontiguousarray(bits.reshape(len(bits), -1).cpu().numpy())
    whole = flat.view(np.dtype((np.void, flat.dtype.itemsize * flat.shape[1]))).ravel()
    return _join_classes(classes, np.unique(whole, return_inverse=True)[1])


def _join_classes(classes: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return the classes of rows that are alike by both."""
    _, first, both = np.unique(
        np.stack([classes, others]), axis=1, return_index=True, return_inverse=True
    )
    # By their first rows: the order of values is another one for other parameters, and a training
    # that continues from a checkpoint would put its records into other rows.
    return np.argsort(np.argsort(first))[both.ravel()].astype(np.int64)


# --- tracing a pass ---------------------------------------------------------------------------


_ROWS: RecordLocation = (0, 1)  # record i in row i


def find_mixing_operation(
    model: nn.Module, objective: Objective, inputs: Inputs, targets: Tensor
) -> str | None:
    """Return the first operation of a pass that is not known to treat each record alone, or None.

    Guarantee: where it is None, row i of the losses, of what every trained layer reads and gets
    back, and of the losses' gradient with respect to the inputs depends on row i of inputs and
    targets alone, in every pass of this shape that executes the same operations. No record's value
    chooses others. Not accepted is a pass that

    * hands a value to Python: `item`, `tolist`, a branch, an array, a printed tensor, an address;
    * writes records to memory that Python was shown before, or lays a tensor onto other memory;
    * executes an operation that raises an error for some values (a look-up, a gather, a whole
      division) where code outside torch and dpdist would go on after the error;
    * reads what an earlier pass left behind, or leaves records in the model for another one;
    * starts threads or processes, where nothing is seen.

    What is left to trust: that an operation does what its name says, and that the model's code is
    not made to deceive. Code can find out that it is being followed, or count its calls, and behave
    otherwise in training; it can switch off how it is followed, read the process' memory past
    torch, or keep records outside the model for a pass three calls later.

    Args:
        inputs: (B, ...), public or invented, of the shape that is executed; values do not matter.
        targets: (B, ...), as the objective takes them.

    Example: `find_mixing_operation(nn.Linear(4, 2), losses, torch.rand(8, 4), labels)` is None;
    behind a module that subtracts `x.mean(0)` it is "aten.mean.dim takes the dimension of the
    records".
    """
    if rows_of(inputs) < 2:
        return None
    tracer, device = _RecordTracer(model, rows_of(inputs)), device_of(inputs)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.autograd.set_multithreading_enabled(False):
        for _ in range(2):  # the second one would read what the first one left behind
            try:
                copied = each_tensor(Tensor.clone, inputs)
                _trace(model, objective, copied, targets.clone(), tracer)
            except Exception as error:  # whatever a user's module does
                tracer.refuse(f"the pass cannot be followed ({type(error).__name__})")
    tracer.check_no_records_left(model)
    return tracer.reason


def _trace(
    model: nn.Module, objective: Objective, inputs: Inputs, targets: Tensor, tracer: _RecordTracer
) -> None:
    """One pass as the engine runs it, and one that differentiates the inputs."""
    values = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    layers = find_layers(model)
    find_shared_arguments(model, layers, objective, inputs, targets)
    tracer.begin_pass([*tensors_of(inputs), targets], values.values())

    def checked(losses: Tensor) -> Tensor:
        with pause_watching():
            tracer.check_rows(losses, _ROWS, "the losses")
            # What adds the losses up is the engine, and only their gradients go on from there.
            summed = losses.clone()
            tracer.mark(summed, PUBLIC)
        return summed

    followed = followed_by(objective, checked)
    with tracer, watch_tensor_reads(tracer.on_read, tracer.on_untracked_call):
        run_pass(model, layers, followed, inputs, targets, values, tracer.check_call)
        if any(each.is_floating_point() for each in tensors_of(inputs)):
            seen = each_tensor(_differentiable, inputs)
            floating = [each for each in tensors_of(seen) if each.requires_grad]

            def differentiate() -> None:
                losses = example_losses(model, followed, values, seen, targets)
                if losses.requires_grad:
                    found = torch.autograd.grad(losses.sum(), floating, allow_unused=True)
                    with pause_watching():
                        for gradient in found:
                            tracer.check_rows(gradient, _ROWS, "the gradient of the inputs")

            with torch.enable_grad():
                run_with_values(model, values, differentiate)


def _differentiable(tensor: Tensor) -> Tensor:
    detached = tensor.detach()
    return detached.requires_grad_() if detached.is_floating_point() else detached


class _RecordTracer(TorchDispatchMode):
    """Follows where the records lie through every operation, until one is not known.

    reason: why nothing is shown; None as long as something is.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: no compiler is at work, which torch would import only to keep it out."""
        return False

    def __init__(self, model: nn.Module, count: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reason: str | None = None
        self._count, self._turn = count, 0
        self._marks: Any = WeakTensorKeyDictionary()  # and the layout of that time
        self._sharing: dict[int, list[TensorWeakRef]] = {}  # tensors by the memory they lie in
        self._own: set[int] = set()  # memory of the model, which no pass may write to
        # Memory that others than torch may read; kept, so that its number stays its own.
        self._exposed_memory: dict[int, torch.UntypedStorage] = {}
        self._mark_model_tensors(_model_tensors(model))

    def _mark_model_tensors(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self.mark(tensor, PUBLIC)
            self._own.add(_memory(tensor))

    def begin_pass(self, records: Sequence[Tensor], own: Iterable[Tensor]) -> None:
        """The next pass, on these records."""
        self._turn += 1
        self._mark_model_tensors(own)
        for tensor in records:
            self.mark(tensor, TensorMark(_ROWS))

    def mark(self, tensor: Tensor, mark: TensorMark) -> None:
        layout = _layout(tensor)
        if tensor not in self._marks:
            others = self._sharing.get(layout[0], [])
            alive = [other for other in others if other() is not None]
            self._sharing[layout[0]] = [*alive, TensorWeakRef(tensor)]
        turn = self._turn if mark.location is not None else 0
        self._marks[tensor] = (
            TensorMark(mark.location, mark.uniform_locations, mark.mixed, turn),
            layout,
        )

    def _find_mark(self, tensor: Tensor) -> TensorMark | None:
        """Its mark. Refuses what holds other memory than when it was marked: no operation does."""
        mark: TensorMark | None
        mark, layout = self._marks.get(tensor, (None, None))
        if mark is not None and layout != _layout(tensor):
            self.refuse("the numbers of a tensor were exchanged (data)")
        return mark

    def on_read(self, tensor: Tensor, name: str) -> None:
        """Take note that Python reads a tensor's memory, now or once more is written there."""
        with pause_watching():
            if self.may_hold_records(tensor):
                self.refuse(f"{name} gives values of records to Python")
            self._expose_memory(tensor)

    def _expose_memory(self, tensor: Tensor) -> None:
        self._exposed_memory[_memory(tensor)] = tensor.untyped_storage()

    def on_untracked_call(self, name: str) -> None:
        """Take note of a call behind which nothing is seen."""
        self.refuse(f"{name} leaves what can be followed")

    def check_no_records_left(self, model: nn.Module) -> None:
        """Refuse a model that holds records when its passes are over: one of another shape might
        read them."""
        if self.reason is None and any(map(self.may_hold_records, _model_tensors(model))):
            self.refuse("records are left in the model")

    def refuse(self, why: str) -> None:
        self.reason = self.reason or why

    def may_hold_records(self, tensor: Any) -> bool:
        """Whether it may hold values of records."""
        if not isinstance(tensor, Tensor):
            return False
        mark = self._find_mark(tensor)
        return mark is None or mark.mixed or mark.location is not None

    def check_rows(self, tensor: Tensor | None, location: RecordLocation, label: str) -> None:
        """Refuse unless row i of the tensor is of record i alone, or the same for all records."""
        if tensor is None or self.reason is not None:
            return
        mark = self._find_mark(tensor)
        if (
            mark is None
            or mark.mixed
            or (mark.location is not None and mark.pass_number != self._turn)
        ):
            self.refuse(f"nothing is known of {label}")
            return
        known = (
            location in mark.uniform_locations
            if mark.location is None
            else mark.location == location
        )
        if not known or tensor.shape[location[0]] != self._count:
            self.refuse(f"record i is not in row i of {label}")

    @pause_watching()
    def check_call(self, layer: Layer, call: LayerCall) -> None:
        """Hold what a layer's rule reads against the dimension where the rule takes records."""
        recurrent = isinstance(layer.module, nn.RNNBase)
        second = isinstance(layer.module, nn.RNNBase) and not layer.module.batch_first
        for tensors in (pytree.tree_leaves((call.inputs, call.kwargs)), call.output_gradients):
            shared = call.shared if tensors is not call.output_gradients else ()
            for number, tensor in enumerate(tensors):
                if isinstance(tensor, Tensor):
                    # States of a recurrent layer have its sub-layers first.
                    dimension = int(second or (recurrent and number > 0))
                    self._check_read(tensor, dimension, layer.name, number in shared)

    def _check_read(self, tensor: Tensor, dimension: int, layer: str, shared: bool) -> None:
        mark = self._find_mark(tensor)
        public = mark is not None and mark.location is None and not mark.mixed
        # A rule takes for rows what is as long as the batch; the rest is shared by all records.
        if shared and not public:
            self.refuse(f"records are in what layer {layer} reads for all of them")
        as_long = tensor.shape[dimension : dimension + 1] == (self._count,)
        if not public or (as_long and not shared):
            self.check_rows(tensor, (dimension, 1), f"what layer {layer} reads")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.reason is not None:
            return func(*args, **kwargs)
        hook = sys.getprofile()  # `pause_watching`, without its cost for each operation
        sys.setprofile(None)
        try:
            return self._trace_operation(func, args, kwargs)
        finally:
            sys.setprofile(hook)

    def _trace_operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        call = Operation(func, args, kwargs, self._find_mark, self._count)
        result = func(*args, **kwargs)
        try:
            call.check_arguments(self._turn)
            marks = call.result_marks(result)
            for tensor, mark in zip(call.results, marks, strict=True):
                found = mark
                if any(tensor is old for old in call.mutated) and call.name not in METADATA:
                    found = self._mark_after_write(call, tensor, mark)
                self.mark(tensor, found)
            for tensor in call.mutated:
                if not any(tensor is result for result in call.results):
                    self.mark(tensor, self._mark_after_write(call, tensor, PUBLIC))
            if (
                call.name == "as_strided"
                and not _shared_elements(call["self"], call.results[0]).all()
            ):
                raise MixesRecords("reads more than its tensor")
            for tensor in call.results if call.may_use_foreign_memory else ():
                if call.wraps_python_memory or all(
                    _memory(tensor) != _memory(t) for t in call.tensors
                ):
                    self._expose_memory(tensor)
            if call.may_raise and (name := find_catching_function(_trace.__code__)):
                raise MixesRecords(
                    f"may raise an error for a record's value, and {name} goes on after it"
                )
        except Exception as error:  # caught here: the model's own code might catch it
            why = error if isinstance(error, MixesRecords) else f"cannot be followed: {error!r}"
            self.refuse(f"{func} {why}")
        return result

    def _mark_after_write(self, call: Operation, tensor: Tensor, mark: TensorMark) -> TensorMark:
        """What a tensor holds that was written to, and what shares its memory still does."""
        before = call.mark(tensor)
        if _memory(tensor) in self._own:
            raise MixesRecords("writes to a tensor of the model")
        if _memory(tensor) in self._exposed_memory and (mark.location is not None or mark.mixed):
            raise MixesRecords("writes records to memory that Python can read")
        if before.location is not None and (
            mark.location == before.location or before.location in mark.uniform_locations
        ):
            return before
        if (
            before.location is None
            and mark.location is None
            and before.uniform_locations <= mark.uniform_locations
        ):
            return before
        others = [other() for other in self._sharing.get(_memory(tensor), [])]
        shared = [each for each in others if each is not None and each is not tensor]
        if any(_overlap(each, tensor) for each in shared):
            raise MixesRecords("writes to memory that other tensors share")
        return mark


def _memory(tensor: Tensor) -> int:
    result: int = tensor.untyped_storage()._cdata
    return result


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    """Which numbers of which memory a tensor holds."""
    return _memory(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors in the same memory, of equally long numbers, have a number in common."""
    return one.element_size() != other.element_size() or bool(_shared_elements(one, other).any())


def _shared_elements(one: Tensor, other: Tensor) -> Tensor:
    """For each number of the other tensor in the same memory, whether it is one of the first's."""
    taken = torch.zeros(one.untyped_storage().nbytes() // one.element_size(), dtype=torch.bool)
    taken.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return taken.as_strided(other.shape, other.stride(), other.storage_offset())


def _model_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Parameters, buffers, and tensors that modules hold as plain attributes."""
    for module in model.modules():
        held = {name: value for name, value in vars(module).items() if name != "_modules"}
        yield from (leaf for leaf in pytree.tree_leaves(held) if isinstance(leaf, Tensor))
