"""Notice values of tensors that reach Python on ways that no operation names.

An operation that hands a number to Python (`item`, a branch) is seen by who follows operations. A
printed tensor, an array or an address on its memory is none, and neither is an error that an
operation raises for a value and the model's code catches. Here they are seen where Python calls
them: by the interpreter's profile hook, which no mode of torch switches off.
"""

from __future__ import annotations

import dis
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, _tensor_str
from torch.overrides import TorchFunctionMode

import dpdist

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
_UNSEEN = frozenset((
    "_to_dlpack", "_to_dlpack_versioned", "start_new_thread", "start_joinable_thread", "fork",
    "setprofile", "_pop_torch_dispatch_stack", "_pop_torch_function_stack",
))  # fmt: skip
_KNOWN = tuple(f"{Path(str(module.__file__)).parent}/" for module in (torch, dpdist))
# Python itself goes on after an error in these: a loop by number ends, a deletion is done.
_SILENT = ("__getitem__", "__del__")

# An error is asked for its kind, or is over.
_CAUGHT = frozenset((
    "CHECK_EXC_MATCH", "CHECK_EG_MATCH", "WITH_EXCEPT_START", "POP_EXCEPT", "RETURN_VALUE",
    "RETURN_CONST",
))  # fmt: skip

# Of a tensor, the name of what reads it.
Notice = Callable[[Tensor, str], None]


@contextmanager
def watched(read: Notice, unseen: Callable[[str], None]) -> Iterator[None]:
    """Tell of every call that reads a tensor's memory or hands it on, until the end of the block.

    Args:
        read: called with the tensor and the name of what reads it.
        unseen: called with the name of a call behind which nothing can be seen.
    """

    def look(frame: FrameType, event: str, called: Any) -> None:
        if event == "call":
            if frame.f_code in _IN_PYTHON:
                first = frame.f_code.co_varnames[0]
                read(frame.f_locals[first], _IN_PYTHON[frame.f_code])
        elif event == "c_call":
            name = called.__name__
            if name in _IN_C:
                if isinstance(called.__self__, Tensor):
                    read(called.__self__, name)
            elif name in _UNSEEN and not frame.f_code.co_filename.startswith(_KNOWN):
                unseen(name)

    importlib.import_module("torch._dynamo")  # torch would within the block, which is slow there
    before = sys.getprofile()
    sys.setprofile(look)
    try:
        with _FromPython():
            yield
    finally:
        sys.setprofile(before)


@contextmanager
def unwatched() -> Iterator[None]:
    """Leave out what the block calls: it is none of the model's."""
    hook = sys.getprofile()
    sys.setprofile(None)
    try:
        with torch._C.DisableTorchFunction():
            yield
    finally:
        sys.setprofile(hook)


class _FromPython(TorchFunctionMode):
    """Has Python call the methods that C code calls (`map`), of which no hook is told otherwise."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def catching_function(last: CodeType) -> str | None:
    """Return the name of a function now being executed that would go on after an error raised here.

    Functions of torch and of dpdist are left out: they catch no error to learn a value.

    Args:
        last: code of the function at which to stop looking, outwards.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not last:
        code = frame.f_code
        if not code.co_filename.startswith(_KNOWN) and (
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
