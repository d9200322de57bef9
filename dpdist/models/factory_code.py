"""Digest the code of a model from outside the zoo: the modules that define its function.

Covered is the source of the module that a factory "package.module:factory" names, of the packages
around it, and of the modules beside it that any of these imports or names in a string: in the same
folder as the factory's top-level module or package, below that package, or, where that is
installed, of the same package. Not covered are installed libraries, Python itself, dpdist, modules
imported by a computed name, and files that the code reads. Names of modules count, places do not:
the same code has the same digests in every folder and on every host. A changed comment is changed
code. docs/how-to/extending.md says so too.

Nothing is imported to find out.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from typing import Any, TypeGuard

from dpdist.core.errors import UserError

_OURS = "dpdist"
_MODULE = re.compile(r"\.?[^\W\d]\w*(\.[^\W\d]\w*)*")
# Python 3.11 ends in a SystemError where two threads make syntax trees at once (CPython 106905).
_PARSING = threading.Lock()
_INSTALLED = {"site-packages", "dist-packages"}
# What was read when a factory's module was imported: its `ModuleSpec`, another after a reload.
_READ: dict[str, tuple[Any, dict[str, str]]] = {}


@dataclass(frozen=True)
class FactoryCode:
    """The code of some factories. modules: digest by the module's name; empty where a model does
    not say of which code it is."""

    factories: tuple[str, ...] = ()
    modules: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, factories: Sequence[str]) -> FactoryCode:
        """Return the code that these factories have in this process. Raises UserError for a module
        whose source cannot be read."""
        found: dict[str, str] = {}
        for name in factories:
            found |= digests(name)
        return cls(tuple(factories), dict(sorted(found.items())))

    def check(self, where: object) -> None:
        """Raise UserError where this process has other code than is stated here."""
        if not self.modules:
            return
        here = FactoryCode.of(self.factories).modules
        every = sorted(self.modules.keys() | here.keys())
        if other := [name for name in every if self.modules.get(name) != here.get(name)]:
            raise UserError(
                f"{where}: model.name: must be the code with which the model was saved; "
                f"{', '.join(other)} of {', '.join(self.factories)} changed since, and so may the "
                "function have that was trained and certified: put the code back, or train again"
            )


def digests(factory: str) -> dict[str, str]:
    """Return the digest of each covered module, by its name.

    They are those of the time when the process imported the factory's module. Raises UserError for
    a module whose source cannot be read.
    """
    module = factory.partition(":")[0]
    if module in _READ and _READ[module][0] is _identity(module) is not None:
        return _READ[module][1]
    return _digests(module, factory)


def remember(factory: str, found: dict[str, str]) -> None:
    """Keep what `digests` returned just before the factory's module was imported."""
    module = factory.partition(":")[0]
    known = _READ.get(module)
    if known is None or known[0] is not _identity(module):
        _READ[module] = (_identity(module), found)


def _identity(module: str) -> Any:
    loaded = sys.modules.get(module)
    return getattr(loaded, "__spec__", None) or loaded


def _digests(module: str, factory: str) -> dict[str, str]:
    top = module.partition(".")[0]
    if top == _OURS or top in sys.builtin_module_names:
        return {}
    roots = _folders(top)
    found: dict[str, str] = {}
    waiting = [*_parents(module)]
    while waiting:
        name = waiting.pop()
        first = name.partition(".")[0]
        if name in found or not (first == top or _beside(first, roots, top)):
            continue
        spec = _find(name)
        raw = None if spec is None else _source(spec)
        if spec is None or raw is None:
            continue
        found[name] = hashlib.blake2b(raw.replace(b"\r\n", b"\n"), digest_size=16).hexdigest()
        waiting += _imports(raw, name, top, spec.submodule_search_locations is not None)
    if module in sys.modules and module not in found:
        raise UserError(
            f"model.name: the source of {factory!r} cannot be read; put the factory into a module "
            "of its own, a file that ends in .py"
        )
    return found


def is_library(module: str) -> bool:
    """Return whether a module is Python's, dpdist's or of an installed package."""
    top = module.partition(".")[0]
    ours = top == _OURS or top in sys.stdlib_module_names or top in sys.builtin_module_names
    return ours or (_find(top) is not None and not _folders(top))


def is_beside(factory: str, module: str) -> bool:
    """Return whether a module is one of those that are covered when the factory's code uses it."""
    top, first = factory.partition(":")[0].partition(".")[0], module.partition(".")[0]
    return first == top or _beside(first, _folders(top), top)


def _beside(first: str, roots: set[str], top: str) -> bool:
    """Return whether a top-level module lies in one of the roots, or below the package `top`."""
    inside = tuple(os.path.join(root, top) + os.sep for root in roots)
    return any(
        folder in roots or f"{folder}{os.sep}".startswith(inside) for folder in _folders(first)
    )


def _folders(top: str) -> set[str]:
    """The folders that hold a top-level module or package; none for one that is installed."""
    spec = _find(top)
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


def _find(name: str) -> ModuleSpec | None:
    """Where a module lies, as this process has loaded it or would; nothing is imported."""
    loaded = sys.modules.get(name)
    spec = getattr(loaded, "__spec__", None)
    if spec is not None or loaded is not None:
        file = getattr(loaded, "__file__", None)  # of a script, which has no spec
        return spec or (None if file is None else spec_from_file_location(name, file))
    outer, _, _ = name.rpartition(".")
    path = None
    if outer:
        around = _find(outer)
        path = None if around is None else around.submodule_search_locations
        if path is None:
            return None
    for finder in sys.meta_path:
        try:
            if (spec := finder.find_spec(name, path)) is not None:
                return spec
        except KeyError:  # a namespace in a package that is not imported yet
            return _namespace(name, path or [])
        except (ImportError, ValueError, AttributeError):
            continue
    return None


def _namespace(name: str, path: Iterable[str]) -> ModuleSpec | None:
    """The specification of a package without a file of its own, below these folders."""
    last = name.rpartition(".")[2]
    places = [place for each in path if os.path.isdir(place := os.path.join(each, last))]
    spec = ModuleSpec(name, None)
    spec.submodule_search_locations = places
    return spec if places else None


def _source(spec: ModuleSpec) -> bytes | None:
    """The bytes of a module's file; of a package without one, none."""
    if not spec.has_location or spec.origin is None:
        return b"" if spec.submodule_search_locations is not None else None
    try:
        result: bytes | None = spec.loader.get_data(spec.origin)  # type: ignore[union-attr]
        return result
    except (AttributeError, OSError):
        return None


def _imports(raw: bytes, name: str, top: str, package: bool) -> Iterator[str]:
    """Yield the modules that a source may import when it runs, and their packages.

    A string that names a module of the package `top` counts too: so do packages list what they
    import on first use.
    """
    try:
        with _PARSING:
            tree = ast.parse(raw)
    except (SyntaxError, ValueError):  # an extension, or no Python: importing it will say so
        return
    around = name if package else name.rpartition(".")[0]
    for node in _executed(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _parents(alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = around.split(".")
                kept = parts[: len(parts) - node.level + 1]
                base = ".".join([*kept, *([base] if base else [])])
            if base:
                yield from _parents(base)
                yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and _is_name(node.value):
            if node.value.partition(".")[0] == top:
                yield from _parents(node.value)
        elif isinstance(node, ast.Call) and node.args:
            called = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
            named = getattr(node.args[0], "value", None)
            if called in ("import_module", "__import__") and _is_name(named):
                yield from _parents(f"{around}{named}" if named[0] == "." else named)


def _is_name(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and bool(_MODULE.fullmatch(value))


def _executed(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those that only type checkers see."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        children = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            children = list(node.orelse)
        waiting += children


def _parents(name: str) -> Iterator[str]:
    """A module's name, behind those of the packages around it."""
    parts = name.split(".")
    yield from (".".join(parts[: end + 1]) for end in range(len(parts)))
