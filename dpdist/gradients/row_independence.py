"""Show by the operations of a pass that a model treats each record alone.

Examples can show that a model mixes records, never that it does not. The operations can: torch's
dispatcher names every one that a pass executes, backward included, and of those on a list
(`row_operations`) it is known along which dimension of the result the records lie, given where they
lie in the arguments. A pass of known operations carries record i in row i alone, from the inputs to
the losses and to all that a layer's rule reads. What is not on the list, or works along the
records' dimension (a mean over the batch, a softmax, a reshape through it), shows nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from dpdist.gradients.capture import Layer, Objective, find_layers, run_pass
from dpdist.gradients.row_operations import METADATA, PUBLIC, Mark, Mixes, Operation, Place
from dpdist.gradients.rules import LayerCall

_ROWS: Place = (0, 1)  # record i in row i


def mixing_operation(
    model: nn.Module, objective: Objective, inputs: Tensor, targets: Tensor
) -> str | None:
    """Return the first operation of a pass that is not known to treat each record alone, or None.

    Guarantee: where it is None, row i of the losses, of what every trained layer reads and gets
    back, and of the losses' gradient with respect to the inputs depends on row i of inputs and
    targets alone, in every pass of this shape that executes the same operations. No record's value
    chooses others: a pass that hands one to Python (`item`, `tolist`, a branch on a comparison) is
    not accepted. What is left to trust: that an operation does what its name says, and that the
    model's code does not change from call to call by other means (a counter, a clock).

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
    return tracer.reason


def _trace(
    model: nn.Module, objective: Objective, inputs: Tensor, targets: Tensor, tracer: _Tracer
) -> None:
    """One pass as the engine runs it, and one that differentiates the inputs."""
    values = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    tracer.begin([inputs, targets], values.values())

    def followed(outputs: Tensor, wanted: Tensor) -> Tensor:
        losses = objective(outputs, wanted)
        tracer.check(losses, _ROWS, "the losses")
        # What adds the losses up is the engine, and only their gradients go on from there.
        summed = losses.clone()
        tracer.mark(summed, PUBLIC)
        return summed

    with _Values(tracer), tracer:
        run_pass(model, find_layers(model), followed, inputs, targets, values, tracer.check_call)
        if inputs.is_floating_point():
            seen = inputs.detach().requires_grad_()
            with torch.enable_grad():
                losses = followed(torch.func.functional_call(model, values, (seen,)), targets)
                if losses.requires_grad:
                    found = torch.autograd.grad(losses.sum(), [seen], allow_unused=True)
                    tracer.check(found[0], _ROWS, "the gradient of the inputs")


# Ways on which a tensor's values reach Python without an operation.
_READS = frozenset((
    "numpy", "tolist", "__array__", "__dlpack__", "data_ptr", "storage", "untyped_storage",
    "__reduce_ex__", "share_memory_",
))  # fmt: skip


class _Values(TorchFunctionMode):
    """Notices values that leave a tensor for Python."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, owner = getattr(func, "__name__", ""), getattr(func, "__self__", None)
        if name in _READS and args and self._tracer.of_records(args[0]):
            self._tracer.refuse(f"{name} gives values of records to Python")
        if name == "__set__" and owner is torch.Tensor.data:
            self._tracer.refuse("puts other numbers into a tensor (data)")
        return func(*args, **(kwargs or {}))


class _Tracer(TorchDispatchMode):
    """Follows where the records lie through every operation, until one is not known.

    reason: why nothing is shown; None as long as something is.
    """

    def __init__(self, model: nn.Module, count: int) -> None:
        super().__init__()
        self.reason: str | None = None
        self._count, self._turn = count, 0
        self._marks: Any = WeakTensorKeyDictionary()
        self._sharing: dict[int, list[TensorWeakRef]] = {}  # tensors by the memory they lie in
        self._own: set[int] = set()  # memory of the model, which no pass may write to
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
        if tensor not in self._marks:
            others = self._sharing.get(_memory(tensor), [])
            alive = [other for other in others if other() is not None]
            self._sharing[_memory(tensor)] = [*alive, TensorWeakRef(tensor)]
        turn = self._turn if mark.rows is not None else 0
        self._marks[tensor] = Mark(mark.rows, mark.same, mark.lost, turn)

    def refuse(self, why: str) -> None:
        self.reason = self.reason or why

    def of_records(self, tensor: Any) -> bool:
        """Whether it may hold values of records."""
        if not isinstance(tensor, Tensor):
            return False
        mark = self._marks.get(tensor)
        return mark is None or mark.lost or mark.rows is not None

    def check(self, tensor: Tensor | None, place: Place, what: str) -> None:
        """Refuse unless row i of the tensor is of record i alone, or the same for all records."""
        if tensor is None or self.reason is not None:
            return
        mark = self._marks.get(tensor)
        if mark is None or mark.lost or (mark.rows is not None and mark.turn != self._turn):
            self.refuse(f"nothing is known of {what}")
            return
        known = place in mark.same if mark.rows is None else mark.rows == place
        if not known or tensor.shape[place[0]] != self._count:
            self.refuse(f"record i is not in row i of {what}")

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
        mark = self._marks.get(tensor)
        public = mark is not None and mark.rows is None and not mark.lost
        # A rule takes for rows what is as long as the batch; the rest is shared by all records.
        if not public or tensor.shape[dimension : dimension + 1] == (self._count,):
            self.check(tensor, (dimension, 1), f"what layer {layer} reads")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.reason is not None:
            return func(*args, **kwargs)
        call = Operation(func, args, kwargs, self._marks.get, self._count)
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
        except Exception as error:  # caught here: the model's own code might catch it
            why = error if isinstance(error, Mixes) else f"cannot be followed: {error!r}"
            self.refuse(f"{func} {why}")
        return result

    def _written(self, call: Operation, tensor: Tensor, mark: Mark) -> Mark:
        """What a tensor holds that was written to, and what shares its memory still does."""
        before = call.mark(tensor)
        if _memory(tensor) in self._own:
            raise Mixes("writes to a tensor of the model")
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


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors in the same memory, of equally long numbers, have a number in common."""
    if one.element_size() != other.element_size():
        return True
    taken = torch.zeros(one.untyped_storage().nbytes() // one.element_size(), dtype=torch.bool)
    taken.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def _tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """Parameters, buffers, and tensors that modules hold as plain attributes."""
    for module in model.modules():
        held = {name: value for name, value in vars(module).items() if name != "_modules"}
        yield from (leaf for leaf in pytree.tree_leaves(held) if isinstance(leaf, Tensor))
