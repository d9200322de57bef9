"""Digest live objects by value: a module or a function, with everything that it computes with.

A digest names the classifier that a finished table of certificates is about. Two objects of one
digest give the same answers: it covers code, tensors, attributes, closures, and the globals that a
script's or a notebook's functions read. Code that can be imported is covered by its sources
(`factory_code`); libraries, and dpdist itself, are named. The digest is the same in every process:
no address, no order of a set and no line number is in it.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import logging
import re
import types
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np

from dpdist.core.errors import UserError
from dpdist.models.factory_code import digests, is_library

_OF_A_CLASS = (  # members of a class that say nothing of what it does, or only where it stands
    "__abstractmethods__", "__annotations__", "__dict__", "__doc__", "__firstlineno__",
    "__module__", "__qualname__", "__static_attributes__", "__weakref__", "_abc_impl",
)  # fmt: skip
_BY_REPR = (bool, int, complex, str, bytes, type(None), type(...), type(NotImplemented), range,
            slice, re.Pattern, PurePath)  # fmt: skip
_BUILT_IN = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.MethodWrapperType, types.GetSetDescriptorType, types.MemberDescriptorType,
    types.ClassMethodDescriptorType,
)  # fmt: skip
_MAIN = ("__main__", "__mp_main__")
_OF_HEAP = 1 << 9  # of a class made by Python code


class _NoDigest(Exception):
    """Something whose value cannot be read."""


def object_digest(*values: Any) -> str | None:
    """Return a digest of these objects, of everything that they compute with.

    Args:
        values: torch modules, functions, other callables, and plain values.

    Returns:
        32 hex digits; None where a part has a state that cannot be read, such as a compiled graph,
        an open file or a generator of random numbers.
    """
    digest = _Digest()
    try:
        for value in values:
            digest.add(value)
    except (_NoDigest, RecursionError):
        return None
    return digest.hexdigest()


def code_bytes(code: types.CodeType) -> bytes:
    """Return what a function executes, as bytes: without its name of a file and its lines."""
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    plain = [_constant(each) for each in code.co_consts if not isinstance(each, types.CodeType)]
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    own = f"{code.co_name} {names} {plain} ".encode() + code.co_code + code.co_exceptiontable
    return own + b"".join(code_bytes(each) for each in inner)


def _constant(value: Any) -> str:
    """Return a constant of a function as text; a set has no order in it."""
    if isinstance(value, frozenset):
        return f"frozenset{sorted(map(_constant, value))}"
    if isinstance(value, tuple):
        return f"({','.join(map(_constant, value))})"
    return repr(value)


def _globals_of(code: types.CodeType) -> set[str]:
    """Return the names that a function, and functions inside it, may read from the globals."""
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return set(code.co_names).union(*map(_globals_of, inner))


class _Digest:
    """Adds values one after the other; an object that comes again is named by its first place."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16, person=b"dpdist.object")
        self._places: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no id is given twice

    def hexdigest(self) -> str:
        return self._hash.hexdigest()

    def add(self, value: Any) -> None:
        if isinstance(value, enum.Enum):
            self._put("enum", f"{type(value).__qualname__}.{value.name}")
        elif isinstance(value, float):
            self._put("float", value.hex())
        elif isinstance(value, _BY_REPR):
            self._put(type(value).__name__, repr(value))
        elif isinstance(value, np.generic):
            self._put(f"scalar {value.dtype.str}", value.tobytes())
        elif isinstance(value, tuple):
            self._each(f"tuple {type(value).__qualname__}", value)
        elif isinstance(value, set | frozenset):
            self._put(type(value).__name__, " ".join(sorted(map(_of_element, value))))
        elif isinstance(value, types.CodeType):
            self._put("code", code_bytes(value))
        elif isinstance(value, _BUILT_IN):
            owner = getattr(value, "__self__", None)
            self._put("built in", getattr(value, "__qualname__", value.__name__))
            if owner is not None and not isinstance(owner, types.ModuleType):
                self.add(owner)
        elif id(value) in self._places:
            self._put("again", str(self._places[id(value)]))
        else:
            self._places[id(value)] = len(self._kept)
            self._kept.append(value)
            self._compound(value)

    def _put(self, kind: str, told: str | bytes = b"") -> None:
        raw = told.encode("utf-8", "surrogatepass") if isinstance(told, str) else told
        self._hash.update(f"{kind}:{len(raw)}:".encode() + raw)

    def _compound(self, value: Any) -> None:
        import torch

        if isinstance(value, torch.Tensor):
            self._tensor(value)
        elif isinstance(value, torch.dtype | torch.device):
            self._put("torch", str(value))
        elif isinstance(value, np.ndarray):
            self._put(f"array {value.dtype.str}", str(value.shape))
            self.add(value.tolist() if value.dtype.hasobject else value.tobytes())
        elif isinstance(value, list):
            self._each("list", value)
        elif isinstance(value, types.ModuleType):
            self._module(value.__name__)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, logging.Logger):
            self._put("logger", value.name)
        else:
            self._callable(value)

    def _callable(self, value: Any) -> None:
        if isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self._each("method", (value.__func__, value.__self__))
        elif isinstance(value, staticmethod | classmethod):
            self._each("static" if isinstance(value, staticmethod) else "class", (value.__func__,))
        elif isinstance(value, property):
            self._each("property", (value.fget, value.fset, value.fdel))
        elif isinstance(value, functools.partial):
            self._each("partial", (value.func, value.args, value.keywords))
        else:
            self._instance(value)

    def _each(self, kind: str, values: Sequence[Any]) -> None:
        self._put(kind, str(len(values)))
        for value in values:
            self.add(value)

    def _tensor(self, tensor: Any) -> None:
        import torch

        self._put(f"tensor {tensor.dtype}", str(tuple(tensor.shape)))
        try:
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            self._put("", flat.view(torch.uint8).numpy().tobytes())
        except (RuntimeError, TypeError) as error:  # sparse, quantized, without memory
            raise _NoDigest from error

    def _module(self, name: str) -> None:
        """Add a module by name, and by the sources that its code lies in."""
        self._put("module", name)
        if name in _MAIN or is_library(name):
            return
        try:
            sources = digests(f"{name}:")
        except UserError as error:
            raise _NoDigest from error
        if not sources:
            raise _NoDigest
        self._put("sources", repr(sorted(sources.items())))

    def _named(self, value: Any) -> bool:
        """Add by name what can be imported; return whether it could."""
        name = getattr(value, "__module__", None) or ""
        if name in _MAIN or "<locals>" in value.__qualname__:
            return False
        self._put("name", f"{name}.{value.__qualname__}")
        self._module(name)
        return True

    def _class(self, kind: type) -> None:
        if self._named(kind):
            return
        self._put("class", kind.__qualname__)
        for base in kind.__bases__:
            self.add(base)
        for name, value in sorted(vars(kind).items()):
            if name not in _OF_A_CLASS:
                self._put("member", name)
                self.add(value)

    def _function(self, function: types.FunctionType) -> None:
        if function.__closure__ is None and self._named(function):
            return
        self.add(function.__code__)
        self.add(function.__defaults__)
        self.add(function.__kwdefaults__)
        for cell in function.__closure__ or ():
            try:
                self.add(cell.cell_contents)
            except ValueError:
                self._put("empty cell")
        if is_library(function.__module__ or ""):
            return
        for name in sorted(_globals_of(function.__code__) & function.__globals__.keys()):
            self._put("global", name)
            self.add(function.__globals__[name])

    def _instance(self, value: Any) -> None:
        """Add an object's class and attributes; those of a mapping, its items too."""
        kind = type(value)
        slots = [name for base in kind.__mro__ for name in _slots_of(base)]
        if not (hasattr(value, "__dict__") or slots or isinstance(value, dict)):
            raise _NoDigest
        if not isinstance(value, Mapping) and _has_hidden_state(kind):
            raise _NoDigest
        self._put("object")
        self.add(kind)
        if isinstance(value, Mapping):
            self._each("items", [part for pair in value.items() for part in pair])
        for name, each in vars(value).items() if hasattr(value, "__dict__") else ():
            self._put("attribute", name)
            # Hooks lie under numbers that count all hooks of a process.
            self.add(list(each.values()) if name.endswith("_hooks") and each else each)
        for name in slots:
            if hasattr(value, name):
                self._put("slot", name)
                self.add(getattr(value, name))


def _of_element(value: Any) -> str:
    digest = _Digest()
    digest.add(value)
    return digest.hexdigest()


def _slots_of(kind: type) -> list[str]:
    found = vars(kind).get("__slots__", ())
    names = [found] if isinstance(found, str) else list(found)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _has_hidden_state(kind: type) -> bool:
    """Return whether objects of a class may hold more than their attributes.

    Those of a class written in C do, and those of one that defines how they are pickled.
    """
    return any(
        "__reduce__" in vars(base) or "__reduce_ex__" in vars(base) or not base.__flags__ & _OF_HEAP
        for base in kind.__mro__
        if base is not object
    )
