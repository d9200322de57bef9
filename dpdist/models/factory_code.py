"""Compute digests of the code of a model outside the zoo: of its modules, and of live objects.

A factory "package.module:factory" is covered by the source of its module, of the packages around
it, and of the modules that any of these imports or names in a string, if they are in the folder of
the factory's top-level module or package, or below that package (if that is installed, only of the
same package). Installed libraries, Python itself, dpdist, modules imported by a computed name, and
files that the code reads are not covered. Digests depend on names of modules, not on their paths,
so they are the same on every host. A changed comment changes a digest (docs/how-to/extending.md).

Nothing is imported to compute a digest.

Live objects are digested by value, with everything they compute with: code, tensors, attributes,
closures, and the globals that functions of a script or notebook read. Two objects of one digest
return the same outputs. Importable code is covered by its sources, and libraries by name. The
digest is the same in every process: it has no address, order of a set or line number.
"""

from __future__ import annotations

import ast
import enum
import functools
import hashlib
import inspect
import logging
import os
import re
import sys
import sysconfig
import threading
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path, PurePath
from typing import Any, TypeGuard

from dpdist.core.errors import UserError

_OWN_PACKAGE = "dpdist"
_MODULE = re.compile(r"\.?[^\W\d]\w*(\.[^\W\d]\w*)*")
# Python 3.11 fails with a SystemError if two threads parse at once (CPython 106905).
_PARSE_LOCK = threading.Lock()
_INSTALLED = {"site-packages", "dist-packages"}
MAIN = ("__main__", "__mp_main__")  # names of the started program, which cannot be imported
# By module, when it was imported: its `ModuleSpec`, which a reload changes, and digests.
_DIGESTS_AT_IMPORT: dict[str, tuple[Any, dict[str, str]]] = {}


@dataclass(frozen=True)
class FactoryCode:
    """The code of some factories. modules: digest by module; empty if a model has none."""

    factories: tuple[str, ...] = ()
    modules: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_factories(cls, factories: Sequence[str]) -> FactoryCode:
        """Return the code of these factories in this process.

        Raises UserError for a module whose source cannot be read.
        """
        found: dict[str, str] = {}
        for name in factories:
            found |= source_digests(name)
        return cls(tuple(factories), dict(sorted(found.items())))

    def check(self, context: object) -> None:
        """Raise UserError if this process has different code."""
        if not self.modules:
            return
        here = FactoryCode.from_factories(self.factories).modules
        every = sorted(self.modules.keys() | here.keys())
        if other := [name for name in every if self.modules.get(name) != here.get(name)]:
            raise UserError(
                f"{context}: model.name: must have the code with which the model was saved, but "
                f"{', '.join(other)} of {', '.join(self.factories)} changed since, so the trained "
                "and certified function may differ; restore the code, or train again",
                see="how-to/extending.md#a-model",
            )


def source_digests(factory: str) -> dict[str, str]:
    """Return the digest of each covered module by name, from when the factory was imported.

    Raises UserError for a module whose source cannot be read.
    """
    module = factory.partition(":")[0]
    if (
        module in _DIGESTS_AT_IMPORT
        and _DIGESTS_AT_IMPORT[module][0] is _identity(module) is not None
    ):
        return _DIGESTS_AT_IMPORT[module][1]
    found = _compute_digests(module, factory)
    if is_library(module):  # an installed package may have thousands of files: read them once
        record_digests(factory, found)
    return found


def require_current_sources(factory: str, context: object) -> None:
    """Raise UserError if a covered module's file changed since this process imported it.

    A new process would execute the file; this one executes the loaded code.
    """
    loaded, stored = source_digests(factory), _compute_digests(factory.partition(":")[0], factory)
    record_digests(factory, loaded)  # for a class of a script this is the first time
    every = sorted(loaded.keys() | stored.keys())
    if other := [name for name in every if loaded.get(name) != stored.get(name)]:
        raise UserError(
            f"{context}: {', '.join(other)} of {factory} changed since this process imported it; "
            "restart the process to run the new code, and the same call continues"
        )


def record_digests(factory: str, found: dict[str, str]) -> None:
    """Store the digests from just before the factory's module was imported."""
    module = factory.partition(":")[0]
    known = _DIGESTS_AT_IMPORT.get(module)
    if known is None or known[0] is not _identity(module):
        _DIGESTS_AT_IMPORT[module] = (_identity(module), found)


def _identity(module: str) -> Any:
    loaded = sys.modules.get(module)
    return getattr(loaded, "__spec__", None) or loaded


def _compute_digests(module: str, factory: str) -> dict[str, str]:
    top = module.partition(".")[0]
    if top == _OWN_PACKAGE or top in sys.builtin_module_names:
        return {}
    roots = _root_folders(top)
    found: dict[str, str] = {}
    waiting = [*_module_and_packages(module)]
    while waiting:
        name = waiting.pop()
        first = name.partition(".")[0]
        if name in found or not (first == top or _is_in_roots(first, roots, top)):
            continue
        spec = _find_module_spec(name)
        raw = None if spec is None else _read_source(spec)
        if spec is None or raw is None:
            continue
        found[name] = _digest_bytes(raw.replace(b"\r\n", b"\n"))
        waiting += _imports(raw, name, top, spec.submodule_search_locations is not None)
    if module in sys.modules and module not in found:
        raise UserError(
            f"model.name: the source of {factory!r} cannot be read; put the factory into a "
            "separate module, a file that ends in .py"
        )
    return found


def is_library(module: str) -> bool:
    """Return whether a module is Python's, dpdist's or of an installed package, and not main."""
    if module in MAIN:
        return False
    top = module.partition(".")[0]
    ours = top == _OWN_PACKAGE or top in sys.stdlib_module_names or top in sys.builtin_module_names
    return ours or (_find_module_spec(top) is not None and not _root_folders(top))


def is_covered_module(factory: str, module: str) -> bool:
    """Return whether the digests of a factory cover a module that its code uses."""
    top, first = factory.partition(":")[0].partition(".")[0], module.partition(".")[0]
    return first == top or _is_in_roots(first, _root_folders(top), top)


def _is_in_roots(first: str, roots: set[str], top: str) -> bool:
    """Return whether a top-level module is in one of the roots, or below the package `top`."""
    inside = tuple(os.path.join(root, top) + os.sep for root in roots)
    return any(
        folder in roots or f"{folder}{os.sep}".startswith(inside) for folder in _root_folders(first)
    )


def _root_folders(top: str) -> set[str]:
    """Return the folders of a top-level module or package; empty if it is installed."""
    spec = _find_module_spec(top)
    if spec is None:
        return set()
    places = list(spec.submodule_search_locations or ()) or [spec.origin or ""]
    folders = {os.path.dirname(os.path.abspath(place)) for place in places}
    standard = sysconfig.get_path("stdlib")
    return {
        folder
        for folder in folders
        if not (
            f"{folder}{os.sep}".startswith(standard + os.sep)
            or _INSTALLED & {*folder.split(os.sep)}
        )
    }


def _find_module_spec(name: str) -> ModuleSpec | None:
    """Return the spec of a module as this process loaded or would load it, without importing it."""
    loaded = sys.modules.get(name)
    spec = getattr(loaded, "__spec__", None)
    if spec is not None or loaded is not None:
        file = getattr(loaded, "__file__", None)  # a script has no spec
        return spec or (None if file is None else spec_from_file_location(name, file))
    outer, _, _ = name.rpartition(".")
    path = None
    if outer:
        around = _find_module_spec(outer)
        path = None if around is None else around.submodule_search_locations
        if path is None:
            return None
    for finder in sys.meta_path:
        try:
            if (spec := finder.find_spec(name, path)) is not None:
                return spec
        except KeyError:  # a namespace of a package that is not imported yet
            return _namespace(name, path or [])
        except (ImportError, ValueError, AttributeError):
            continue
    return None


def _namespace(name: str, path: Iterable[str]) -> ModuleSpec | None:
    """Return the spec of a namespace package below these folders, or None."""
    last = name.rpartition(".")[2]
    places = [place for each in path if os.path.isdir(place := os.path.join(each, last))]
    spec = ModuleSpec(name, None)
    spec.submodule_search_locations = places
    return spec if places else None


def _read_source(spec: ModuleSpec) -> bytes | None:
    """Return the bytes of a module's file, empty for a namespace package; None for others."""
    if not spec.has_location or spec.origin is None:
        return b"" if spec.submodule_search_locations is not None else None
    try:
        result: bytes | None = spec.loader.get_data(spec.origin)  # type: ignore[union-attr]
        return result
    except (AttributeError, OSError):
        return None


# By a source's digest, name, top-level package and form.
_IMPORTS: dict[tuple[bytes, str, str, bool], tuple[str, ...]] = {}


def _imports(raw: bytes, name: str, top: str, package: bool) -> tuple[str, ...]:
    """Return the modules that a source may import when it runs, and their packages."""
    key = hashlib.blake2b(raw, digest_size=16).digest(), name, top, package
    if key not in _IMPORTS:
        _IMPORTS[key] = tuple(_find_imports(raw, name, top, package))
    return _IMPORTS[key]


def _find_imports(raw: bytes, name: str, top: str, package: bool) -> Iterator[str]:
    """Yield the modules of `_imports`, from import statements, calls and strings.

    A string that names a module of the package `top` counts, as packages list lazy imports so.
    """
    try:
        with _PARSE_LOCK:
            tree = ast.parse(raw)
    except (SyntaxError, ValueError):  # an extension, or not Python: importing it raises an error
        return
    around = name if package else name.rpartition(".")[0]
    for node in _executed_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _module_and_packages(alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = around.split(".")
                kept = parts[: len(parts) - node.level + 1]
                base = ".".join([*kept, *([base] if base else [])])
            if base:
                yield from _module_and_packages(base)
                yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and _is_name(node.value):
            if node.value.partition(".")[0] == top:
                yield from _module_and_packages(node.value)
        elif isinstance(node, ast.Call) and node.args:
            called = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
            named = getattr(node.args[0], "value", None)
            if called in ("import_module", "__import__") and _is_name(named):
                yield from _module_and_packages(f"{around}{named}" if named[0] == "." else named)


def _is_name(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and bool(_MODULE.fullmatch(value))


def _executed_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes except those for type checkers."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        children = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            children = list(node.orelse)
        waiting += children


def _module_and_packages(name: str) -> Iterator[str]:
    """Yield the names of the packages around a module, then its own."""
    parts = name.split(".")
    yield from (".".join(parts[: end + 1]) for end in range(len(parts)))


# --- code of a script -------------------------------------------------------------------------


def code_digest_of(*things: Any) -> str:
    """Return a digest of the code of classes, functions and modules' classes, and of the script.

    It covers the modules that define them and their imports (`source_digests`), and the started
    file; in a notebook, the classes and functions themselves; of installed libraries, the versions.
    """
    from torch import nn

    found: dict[str, str] = {}
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main is not None and Path(main).is_file():
        found["__main__"] = _digest_bytes(Path(main).read_bytes())
    parts = [type(m) for each in things if isinstance(each, nn.Module) for m in each.modules()]
    known: dict[str, dict[str, str]] = {}  # by module, so that a package is read once
    for thing in [*dict.fromkeys(parts), *(each for each in things if callable(each))]:
        home, name = str(getattr(thing, "__module__", "")), getattr(thing, "__qualname__", "")
        if is_library(home):
            top = home.partition(".")[0]
            found[top] = str(getattr(sys.modules.get(top), "__version__", ""))
        elif not isinstance(thing, nn.Module):
            if home not in known:
                known[home] = {}
                if home not in MAIN:
                    with suppress(UserError):
                        known[home] = source_digests(f"{home}:{name}")
            found |= known[home] or {f"{home}:{name}": _digest_bytes(_source(thing))}
    return _digest_bytes(repr(sorted(found.items())).encode())


def _source(thing: Any) -> bytes:
    """Return the source of a class or function; without source, its bytecode."""
    try:
        return inspect.getsource(thing).encode()
    except (OSError, TypeError):
        functions = [*vars(thing).values()] if isinstance(thing, type) else [thing]
        codes = [each.__code__ for each in functions if isinstance(each, types.FunctionType)]
        return b"".join(map(code_bytes, codes))


def _digest_bytes(raw: bytes) -> str:
    return hashlib.blake2b(raw, digest_size=16).hexdigest()


# --- live objects -----------------------------------------------------------------------------


_OF_A_CLASS = (  # members of a class that do not affect what it computes
    "__abstractmethods__", "__annotations__", "__dict__", "__doc__", "__firstlineno__",
    "__module__", "__qualname__", "__static_attributes__", "__weakref__", "_abc_impl",
)  # fmt: skip
_SINGLETONS = (type(None), type(...), type(NotImplemented))
_BY_REPR = (*_SINGLETONS, bool, int, complex, str, bytes, range, slice, re.Pattern, PurePath)
_BUILT_IN = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.MethodWrapperType, types.GetSetDescriptorType, types.MemberDescriptorType,
    types.ClassMethodDescriptorType,
)  # fmt: skip
_OF_HEAP = 1 << 9  # flag of a class defined by Python code


class _NoDigest(Exception):
    """An object whose state cannot be read."""


def object_digest(*values: Any) -> str | None:
    """Return a digest of these objects and of everything that they compute with.

    Args:
        values: torch modules, functions, other callables, and plain values.

    Returns:
        32 hex digits; None if the state of a part cannot be read, such as that of a compiled graph,
        an open file or a random generator.
    """
    digest = _Digest()
    try:
        for value in values:
            digest.add(value)
    except (_NoDigest, RecursionError):
        return None
    return digest.hexdigest()


def code_bytes(code: types.CodeType) -> bytes:
    """Return what a function executes as bytes, without file name and line numbers."""
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    plain = [_constant(each) for each in code.co_consts if not isinstance(each, types.CodeType)]
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    own = f"{code.co_name} {names} {plain} ".encode() + code.co_code + code.co_exceptiontable
    return own + b"".join(code_bytes(each) for each in inner)


def _constant(value: Any) -> str:
    """Return a constant of a function as text, with sets sorted."""
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
    """A digest to which values are added; a repeated object is named by its first position."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16, person=b"dpdist.object")
        self._places: dict[int, int] = {}
        self._kept: list[Any] = []  # alive, so that ids are unique

    def hexdigest(self) -> str:
        return self._hash.hexdigest()

    def add(self, value: Any) -> None:
        if isinstance(value, enum.Enum):
            self._put("enum", f"{type(value).__qualname__}.{value.name}")
        elif isinstance(value, float):
            self._put("float", value.hex())
        elif isinstance(value, _BY_REPR):
            self._put(type(value).__name__, repr(value))
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
        import numpy as np
        import torch

        if isinstance(value, torch.Tensor):
            self._tensor(value)
        elif isinstance(value, torch.dtype | torch.device):
            self._put("torch", str(value))
        elif isinstance(value, np.ndarray | np.generic):
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
        """Add a module by name and by its sources."""
        self._put("module", name)
        if name in MAIN or is_library(name):
            return
        try:
            sources = source_digests(f"{name}:")
        except UserError as error:
            raise _NoDigest from error
        if not sources:
            raise _NoDigest
        self._put("sources", repr(sorted(sources.items())))

    def _named(self, value: Any) -> bool:
        """Add an importable object by name; return whether it is importable."""
        name = getattr(value, "__module__", None) or ""
        if name in MAIN or "<locals>" in value.__qualname__:
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
        """Add an object's class and attributes, and the items of a mapping."""
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
            # Keys of hooks count all hooks of the process.
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
    """Return whether objects of a class may have state besides their attributes.

    That is so for a class written in C, or one that defines how it is pickled.
    """
    return any(
        "__reduce__" in vars(base) or "__reduce_ex__" in vars(base) or not base.__flags__ & _OF_HEAP
        for base in kind.__mro__
        if base is not object
    )
