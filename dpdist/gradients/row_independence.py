"""Show by the operations of a pass that a model treats each record alone.

Examples can show that a model mixes records, never that it does not. The operations can: torch's
dispatcher names every one that a pass executes, backward included, and of those on a list
(`row_operations`) it is known along which dimension of the result the records lie, given where they
lie in the arguments. A pass of known operations carries record i in row i alone, from the inputs to
the losses and to all that a layer's rule reads. What is not on the list, or works along the
records' dimension (a mean over the batch, a softmax, a reshape through it), shows nothing. What no
operation names is watched beside them (`value_reads`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from dpdist.gradients.capture import Layer, Objective, find_layers, run_pass
from dpdist.gradients.row_operations import METADATA, PUBLIC, Mark, Mixes, Operation, Place
from dpdist.gradients.rules import LayerCall
from dpdist.gradients.value_reads import catching_function, unwatched, watched

_ROWS: Place = (0, 1)  # record i in row i


def mixing_operation(
    model: nn.Module, objective: Objective, inputs: Tensor, targets: Tensor
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

    Example: `mixing_operation(nn.Linear(4, 2), losses, torch.rand(8, 4), labels)` is None; behind
    a module that subtracts `x.mean(0)` it is "aten.mean.dim takes the dimension of the records".
    """
    if len(inputs) < 2:
        return None
    tracer = _Tracer(model, len(inputs))
    devices = [inputs.device] if inputs.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.autograd.set_multithreading_enabled(False):
        for _ in range(2):  # the second one would read what the first one left behind
            try:
                _trace(model, objective, inputs.clone(), targets.clone(), tracer)
            except Exception as error:  # whatever a user's module does
                tracer.refuse(f"the pass cannot be followed ({type(error).__name__})")
    tracer.check_left(model)
    return tracer.reason


def _trace(
    model: nn.Module, objective: Objective, inputs: Tensor, targets: Tensor, tracer: _Tracer
) -> None:
    """One pass as the engine runs it, and one that differentiates the inputs."""
    values = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    tracer.begin([inputs, targets], values.values())

    def followed(outputs: Tensor, wanted: Tensor) -> Tensor:
        losses = objective(outputs, wanted)
        with unwatched():
            tracer.check(losses, _ROWS, "the losses")
            # What adds the losses up is the engine, and only their gradients go on from there.
            summed = losses.clone()
            tracer.mark(summed, PUBLIC)
        return summed

    with tracer, watched(tracer.read, tracer.unseen):
        run_pass(model, find_layers(model), followed, inputs, targets, values, tracer.check_call)
        if inputs.is_floating_point():
            seen = inputs.detach().requires_grad_()
            with torch.enable_grad():
                losses = followed(torch.func.functional_call(model, values, (seen,)), targets)
                if losses.requires_grad:
                    found = torch.autograd.grad(losses.sum(), [seen], allow_unused=True)
                    with unwatched():
                        tracer.check(found[0], _ROWS, "the gradient of the inputs")


class _Tracer(TorchDispatchMode):
    """Follows where the records lie through every operation, until one is not known.

    reason: why nothing is shown; None as long as something is.
    """

    def __init__(self, model: nn.Module, count: int) -> None:
        super().__init__()
        self.reason: str | None = None
        self._count, self._turn = count, 0
        self._marks: Any = WeakTensorKeyDictionary()  # and the layout of that time
        self._sharing: dict[int, list[TensorWeakRef]] = {}  # tensors by the memory they lie in
        self._own: set[int] = set()  # memory of the model, which no pass may write to
        # Memory that others than torch may read; kept, so that its number stays its own.
        self._shown: dict[int, torch.UntypedStorage] = {}
        self._keep(_tensors_of(model))

    def _keep(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self.mark(tensor, PUBLIC)
            self._own.add(_memory(tensor))

    def begin(self, records: Sequence[Tensor], own: Iterable[Tensor]) -> None:
        """The next pass, on these records."""
        self._turn += 1
        self._keep(own)
        for tensor in records:
            self.mark(tensor, Mark(_ROWS))

    def mark(self, tensor: Tensor, mark: Mark) -> None:
        layout = _layout(tensor)
        if tensor not in self._marks:
            others = self._sharing.get(layout[0], [])
            alive = [other for other in others if other() is not None]
            self._sharing[layout[0]] = [*alive, TensorWeakRef(tensor)]
        turn = self._turn if mark.rows is not None else 0
        self._marks[tensor] = Mark(mark.rows, mark.same, mark.lost, turn), layout

    def _known(self, tensor: Tensor) -> Mark | None:
        """Its mark. Refuses what holds other memory than when it was marked: no operation does."""
        mark, layout = self._marks.get(tensor, (None, None))
        if mark is not None and layout != _layout(tensor):
            self.refuse("the numbers of a tensor were exchanged (data)")
        return mark

    def read(self, tensor: Tensor, name: str) -> None:
        """Take note that Python reads a tensor's memory, now or once more is written there."""
        with unwatched():
            if self.of_records(tensor):
                self.refuse(f"{name} gives values of records to Python")
            self._show(tensor)

    def _show(self, tensor: Tensor) -> None:
        self._shown[_memory(tensor)] = tensor.untyped_storage()

    def unseen(self, name: str) -> None:
        """Take note of a call behind which nothing is seen."""
        self.refuse(f"{name} leaves what can be followed")

    def check_left(self, model: nn.Module) -> None:
        """Refuse a model that holds records when its passes are over: one of another shape might
        read them."""
        if self.reason is None and any(map(self.of_records, _tensors_of(model))):
            self.refuse("records are left in the model")

    def refuse(self, why: str) -> None:
        self.reason = self.reason or why

    def of_records(self, tensor: Any) -> bool:
        """Whether it may hold values of records."""
        if not isinstance(tensor, Tensor):
            return False
        mark = self._known(tensor)
        return mark is None or mark.lost or mark.rows is not None

    def check(self, tensor: Tensor | None, place: Place, what: str) -> None:
        """Refuse unless row i of the tensor is of record i alone, or the same for all records."""
        if tensor is None or self.reason is not None:
            return
        mark = self._known(tensor)
        if mark is None or mark.lost or (mark.rows is not None and mark.turn != self._turn):
            self.refuse(f"nothing is known of {what}")
            return
        known = place in mark.same if mark.rows is None else mark.rows == place
        if not known or tensor.shape[place[0]] != self._count:
            self.refuse(f"record i is not in row i of {what}")

    @unwatched()
    def check_call(self, layer: Layer, call: LayerCall) -> None:
        """Hold what a layer's rule reads against the dimension where the rule takes records."""
        recurrent = isinstance(layer.module, nn.RNNBase)
        second = isinstance(layer.module, nn.RNNBase) and not layer.module.batch_first
        for tensors in (pytree.tree_leaves((call.inputs, call.kwargs)), call.backsignals):
            for number, tensor in enumerate(tensors):
                if isinstance(tensor, Tensor):
                    # States of a recurrent layer have its sub-layers first.
                    dimension = int(second or (recurrent and number > 0))
                    self._check_read(tensor, dimension, layer.name)

    def _check_read(self, tensor: Tensor, dimension: int, layer: str) -> None:
        mark = self._known(tensor)
        public = mark is not None and mark.rows is None and not mark.lost
        # A rule takes for rows what is as long as the batch; the rest is shared by all records.
        if not public or tensor.shape[dimension : dimension + 1] == (self._count,):
            self.check(tensor, (dimension, 1), f"what layer {layer} reads")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.reason is not None:
            return func(*args, **kwargs)
        hook = sys.getprofile()  # `unwatched`, without its cost for each operation
        sys.setprofile(None)
        try:
            return self._follow(func, args, kwargs)
        finally:
            sys.setprofile(hook)

    def _follow(self, func: Any, args: Any, kwargs: Any) -> Any:
        call = Operation(func, args, kwargs, self._known, self._count)
        result = func(*args, **kwargs)
        try:
            call.check_given(self._turn)
            marks = call.marks(result)
            for tensor, mark in zip(call.results, marks, strict=True):
                found = mark
                if any(tensor is old for old in call.written) and call.name not in METADATA:
                    found = self._written(call, tensor, mark)
                self.mark(tensor, found)
            for tensor in call.written:
                if not any(tensor is result for result in call.results):
                    self.mark(tensor, self._written(call, tensor, PUBLIC))
            if call.name == "as_strided" and not _numbers(call["self"], call.results[0]).all():
                raise Mixes("reads more than its tensor")
            for tensor in call.results if call.from_elsewhere else ():
                if call.from_python or all(_memory(tensor) != _memory(t) for t in call.tensors):
                    self._show(tensor)
            if call.may_raise and (name := catching_function(_trace.__code__)):
                raise Mixes(f"may raise an error for a record's value, and {name} goes on after it")
        except Exception as error:  # caught here: the model's own code might catch it
            why = error if isinstance(error, Mixes) else f"cannot be followed: {error!r}"
            self.refuse(f"{func} {why}")
        return result

    def _written(self, call: Operation, tensor: Tensor, mark: Mark) -> Mark:
        """What a tensor holds that was written to, and what shares its memory still does."""
        before = call.mark(tensor)
        if _memory(tensor) in self._own:
            raise Mixes("writes to a tensor of the model")
        if _memory(tensor) in self._shown and (mark.rows is not None or mark.lost):
            raise Mixes("writes records to memory that Python can read")
        if before.rows is not None and (mark.rows == before.rows or before.rows in mark.same):
            return before
        if before.rows is None and mark.rows is None and before.same <= mark.same:
            return before
        others = [other() for other in self._sharing.get(_memory(tensor), [])]
        shared = [each for each in others if each is not None and each is not tensor]
        if any(_overlap(each, tensor) for each in shared):
            raise Mixes("writes to memory that other tensors share")
        return mark


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    """Which numbers of which memory a tensor holds."""
    return _memory(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors in the same memory, of equally long numbers, have a number in common."""
    return one.element_size() != other.element_size() or bool(_numbers(one, other).any())


def _numbers(one: Tensor, other: Tensor) -> Tensor:
    """For each number of the other tensor in the same memory, whether it is one of the first's."""
    taken = torch.zeros(one.untyped_storage().nbytes() // one.element_size(), dtype=torch.bool)
    taken.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return taken.as_strided(other.shape, other.stride(), other.storage_offset())


def _tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """Parameters, buffers, and tensors that modules hold as plain attributes."""
    for module in model.modules():
        held = {name: value for name, value in vars(module).items() if name != "_modules"}
        yield from (leaf for leaf in pytree.tree_leaves(held) if isinstance(leaf, Tensor))
