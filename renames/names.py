"""Rename names of the tree by table.

    python names.py CHECKOUT --table a.json [b.json ...] [--commit] [--report FILE] [--dry]

Run it with the checkout's own Python (mypy is used as a library). Deterministic and re-runnable: a
target that is not there is reported and skipped. See the end of the file for the stages.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import hashlib
import io
import json
import os
import pickle
import re
import subprocess
import sys
import time
import tokenize
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
PRODUCT = ("dpdist", "cluster", "tuning")
SERIAL_CALLS = {"asdict", "astuple", "fields", "vars"}
SERIAL_METHODS = {"_asdict", "model_dump", "model_dump_json"}
REFLECT = {"getattr", "setattr", "hasattr", "delattr"}
HISTORY = {"CHANGELOG.md"}
IDENT = re.compile(r"[A-Za-z_]\w*")
CHAIN = re.compile(r"(?<![\w.\-/])[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*(?![\w\-/])")
DOTTED = re.compile(r"(?<![\w./-])(?:dpdist|tests|benchmarks)(?:\.[A-Za-z_]\w*)+(?::[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)?")


class Report:
    def __init__(self) -> None:
        self.lines: dict[str, list[str]] = defaultdict(list)

    def add(self, kind: str, text: str) -> None:
        if text not in self.lines[kind]:
            self.lines[kind].append(text)

    def __str__(self) -> str:
        return "\n".join(f"== {kind} ({len(lines)})\n" + "\n".join(f"  {x}" for x in sorted(lines))
                         for kind, lines in sorted(self.lines.items()))


# ------------------------------------------------------------------ files and scopes


@dataclass(eq=False)
class Scope:
    kind: str  # module class func comp
    node: ast.AST
    parent: "Scope | None"
    file: "File"
    bound: dict[str, list] = field(default_factory=lambda: defaultdict(list))
    outer: set[str] = field(default_factory=set)  # global and nonlocal
    names: list[tuple[ast.AST, str, int]] = field(default_factory=list)  # node, name, char offset
    inner: list["Scope"] = field(default_factory=list)

    def find(self, name: str) -> "Scope | None":
        at, first = self, True
        while at is not None:
            if name in at.bound and (at.kind != "class" or first) and name not in at.outer:
                return at
            # a comprehension's or annotation's first step out of it sees the class
            first = first and at.kind == "comp"
            at = at.parent
        return None

    def cls(self) -> "Scope | None":
        at = self
        while at is not None and at.kind != "class":
            at = at.parent
        return at


class File:
    def __init__(self, root: Path, rel: str) -> None:
        self.rel, self.text = rel, (root / rel).read_text()
        self.lines = self.text.splitlines(keepends=True)
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))
        self.ascii = [line.isascii() for line in self.lines]
        self.module = ""
        self.tree: ast.Module | None = None
        self.scope: Scope | None = None
        self.parents: dict[ast.AST, ast.AST] = {}
        self.docs: list[tuple[int, int, Scope]] = []  # docstrings and comments: begin, end, scope
        self.spans: list[tuple[int, int, Scope]] = []  # of scopes, by lines

    def offset(self, line: int, column: int) -> int:
        if not self.ascii[line - 1]:
            column = len(self.lines[line - 1].encode()[:column].decode())
        return self.starts[line - 1] + column

    def where(self, offset: int) -> str:
        import bisect

        return f"{self.rel}:{bisect.bisect_right(self.starts, offset)}"

    def parse(self) -> None:
        self.tree = ast.parse(self.text)
        for node in ast.walk(self.tree):
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
        self.scope = Scope("module", self.tree, None, self)
        Scopes(self).run()

    def next_name(self, offset: int, name: str) -> int:
        found = re.compile(rf"(?<!\w){re.escape(name)}(?!\w)").search(self.text, offset)
        assert found, (self.rel, offset, name)
        return found.start()

    def scope_at_line(self, line: int) -> Scope:
        best, size = self.scope, 10**9
        for first, last, scope in self.spans:
            if first <= line <= last and last - first < size:
                best, size = scope, last - first
        return best


FUNCS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Scopes:
    def __init__(self, file: File) -> None:
        self.f = file

    def run(self) -> None:
        scope = self.f.scope
        for statement in self.f.tree.body:
            self.visit(statement, scope)
        self.doc(self.f.tree, scope)

    def doc(self, node, scope) -> None:
        if node.body and isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant) \
                and isinstance(node.body[0].value.value, str):
            v = node.body[0].value
            self.f.docs.append((self.f.offset(v.lineno, v.col_offset), self.f.offset(v.end_lineno, v.end_col_offset), scope))

    def new(self, kind, node, scope) -> Scope:
        made = Scope(kind, node, scope, self.f)
        scope.inner.append(made)
        if kind in ("class", "func") and not isinstance(node, ast.Lambda):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            self.f.spans.append((first, node.end_lineno, made))
        return made

    def bind(self, scope, name, what) -> None:
        while scope.kind == "comp" and what[0] == "walrus":
            scope = scope.parent
        scope.bound[name].append(what)

    def name(self, scope, node, name, offset) -> None:
        scope.names.append((node, name, offset))

    def args(self, a: ast.arguments, outer: Scope, inner: Scope) -> None:
        for arg in [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]:
            self.bind(inner, arg.arg, ("param", arg))
            self.name(inner, arg, arg.arg, self.f.offset(arg.lineno, arg.col_offset))
            if arg.annotation:
                self.annotation(arg.annotation, outer)
        for default in [*a.defaults, *filter(None, a.kw_defaults)]:
            self.visit(default, outer)

    def annotation(self, node, scope) -> None:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                parent = self.f.parents.get(inner)
                if isinstance(parent, ast.Subscript) and "Literal" in ast.unparse(parent.value):
                    continue
                try:
                    tree = ast.parse(inner.value, mode="eval")
                except SyntaxError:
                    continue
                at = self.f.offset(inner.lineno, inner.col_offset) + 1
                if self.f.text[at:at + len(inner.value)] != inner.value:
                    continue
                for n in ast.walk(tree):
                    if isinstance(n, ast.Name):
                        n.ctx = ast.Load()
                        self.name(scope, n, n.id, at + n.col_offset)
        self.visit(node, scope)

    def visit(self, node, scope) -> None:
        f = self.f
        if isinstance(node, FUNCS):
            self.bind(scope, node.name, ("def", node))
            inner = self.new("func", node, scope)
            for d in node.decorator_list:
                self.visit(d, scope)
            at = f.next_name(f.offset(node.lineno, node.col_offset) + (9 if isinstance(node, ast.AsyncFunctionDef) else 3), node.name)
            self.name(scope, node, node.name, at)
            self.args(node.args, scope, inner)
            if node.returns:
                self.annotation(node.returns, scope)
            self.doc(node, inner)
            for s in node.body:
                self.visit(s, inner)
        elif isinstance(node, ast.ClassDef):
            self.bind(scope, node.name, ("class", node))
            inner = self.new("class", node, scope)
            for d in [*node.decorator_list, *node.bases, *(k.value for k in node.keywords)]:
                self.visit(d, scope)
            self.name(scope, node, node.name, f.next_name(f.offset(node.lineno, node.col_offset) + 5, node.name))
            self.doc(node, inner)
            for s in node.body:
                self.visit(s, inner)
        elif isinstance(node, ast.Lambda):
            inner = self.new("func", node, scope)
            self.args(node.args, scope, inner)
            self.visit(node.body, inner)
        elif isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            inner = self.new("comp", node, scope)
            for i, gen in enumerate(node.generators):
                self.visit(gen.iter, scope if i == 0 else inner)
                self.visit(gen.target, inner)
                for c in gen.ifs:
                    self.visit(c, inner)
            for part in ("elt", "key", "value"):
                if hasattr(node, part):
                    self.visit(getattr(node, part), inner)
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, (ast.Store, ast.Del)):
                parent = f.parents.get(node)
                self.bind(scope, node.id, ("walrus" if isinstance(parent, ast.NamedExpr) else "assign", node))
            self.name(scope, node, node.id, self.position(node))
        elif isinstance(node, ast.AnnAssign):
            self.annotation(node.annotation, scope)
            self.visit(node.target, scope)
            if node.value:
                self.visit(node.value, scope)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                if isinstance(node, ast.Import):
                    local = alias.asname or alias.name.split(".")[0]
                    self.bind(scope, local, ("import", alias.name if alias.asname else alias.name.split(".")[0], None))
                else:
                    self.bind(scope, alias.asname or alias.name, ("import", node.module or "", alias.name, node.level))
                self.name(scope, alias, alias.name, f.offset(alias.lineno, alias.col_offset))
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            scope.outer |= set(node.names)
            at = f.offset(node.lineno, node.col_offset)
            for name in node.names:
                self.name(scope, node, name, f.next_name(at, name))
        elif isinstance(node, ast.ExceptHandler):
            if node.type:
                self.visit(node.type, scope)
            if node.name:
                self.bind(scope, node.name, ("assign", node))
                self.name(scope, node, node.name, f.next_name(f.text.index(" as ", f.offset(node.type.end_lineno, node.type.end_col_offset)) + 4, node.name))
            for s in node.body:
                self.visit(s, scope)
        elif isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name:
            self.bind(scope, node.name, ("assign", node))
            if isinstance(node, ast.MatchAs) and node.pattern:
                self.visit(node.pattern, scope)
        else:
            for child in ast.iter_child_nodes(node):
                self.visit(child, scope)

    def position(self, node) -> int:
        at = self.f.offset(node.lineno, node.col_offset)
        if self.f.text.startswith(node.id, at):
            return at
        return -1  # in an f-string whose positions Python 3.11 does not tell


# ------------------------------------------------------------------ the tree


class Tree:
    def __init__(self, root: Path, report: Report) -> None:
        self.root, self.report = root, report
        listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout.split("\n")
        self.all = [p for p in listed if p and not (root / p).is_symlink() and (root / p).is_file()]
        self.files: dict[str, File] = {}
        self.by_module: dict[str, File] = {}
        taken: set[str] = set()
        pys = [p for p in self.all if p.endswith(".py")]
        packages = {str(Path(p).parent) for p in pys if p.endswith("__init__.py")}
        for p in sorted(pys, key=lambda p: (p.split("/")[0] not in PRODUCT, not p.startswith("tests/"), p)):
            f = self.files[p] = File(root, p)
            parts = p[:-3].split("/")
            if parts[-1] == "__init__":
                parts = parts[:-1]
            if parts[0] in PRODUCT:
                parts = parts if parts[0] == "dpdist" else ["dpdist", *parts]
                f.module = ".".join(parts)
            else:
                folder = str(Path(p).parent)
                short = parts[-1]
                if folder in packages:
                    short = ".".join(parts[1:])
                f.module = short if short not in taken and short != "conftest" else "_".join(parts)
            taken.add(f.module)
            self.by_module[f.module] = f
        for f in self.files.values():
            f.parse()

    # names of modules, as a file sees them
    def module(self, file: File, dotted: str, level: int = 0) -> str | None:
        if level:
            base = file.module.split(".")
            base = base if file.rel.endswith("__init__.py") else base[:-1]
            base = base[: len(base) - level + 1]
            dotted = ".".join([*base, *([dotted] if dotted else [])])
        if dotted == "dpdist" or dotted.startswith("dpdist."):
            return dotted if dotted in self.by_module else None
        for folder in (str(Path(file.rel).parent), "tests", "benchmarks"):
            for tail in (".py", "/__init__.py"):
                p = os.path.normpath(f"{folder}/{dotted.replace('.', '/')}{tail}")
                if p in self.files and not p.startswith(PRODUCT):
                    return self.files[p].module
        return None

    def lookup(self, module: str, name: str, seen=()) -> tuple | None:
        """The entity that `module.name` is: ("g", module, name), ("mod", module) or None."""
        f = self.by_module.get(module)
        if f is None or (module, name) in seen:
            return None
        for what in f.scope.bound.get(name, []):
            if what[0] == "import":
                return self.imported(f, what, (*seen, (module, name)))
            return ("g", module, name)
        if f"{module}.{name}" in self.by_module:
            return ("mod", f"{module}.{name}")
        return None

    def imported(self, f: File, what: tuple, seen=()) -> tuple | None:
        if what[2] is None:
            m = self.module(f, what[1])
            return ("mod", m) if m else None
        m = self.module(f, what[1], what[3])
        if m is None:
            whole = self.module(f, f"{what[1]}.{what[2]}", what[3])
            return ("mod", whole) if whole else None
        return self.lookup(m, what[2], seen)

    def entity(self, scope: Scope, name: str) -> tuple | None:
        """What a bare name is in a scope."""
        at = scope.find(name)
        if at is None:
            return None
        for what in at.bound[name]:
            if what[0] == "import":
                return self.imported(at.file, what)
        if at.kind == "module":
            return ("g", at.file.module, name)
        if at.kind == "class":
            return ("c", at, name)
        return ("l", at, name)

    def definition(self, entity: tuple | None) -> ast.AST | None:
        if entity and entity[0] == "g":
            f = self.by_module[entity[1]]
            for what in f.scope.bound[entity[2]]:
                if what[0] in ("def", "class"):
                    return what[1]
        return None


# ------------------------------------------------------------------ mypy


@dataclass
class Info:
    """A class, without mypy."""

    fullname: str
    lineage: list[str]
    names: dict[str, tuple[str, ...]]  # with the classes of ours in each member's type
    is_protocol: bool
    typeddict: bool
    bases: list["Info"] = field(default_factory=list)  # the mro's


class Types:
    """What mypy knows, by file and position; kept for a tree that is read again."""

    SKIP = {"node", "info", "names", "type", "unanalyzed_type", "definition", "analyzed", "expanded",
            "original_def", "ref", "def_var"}

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        os.chdir(tree.root)
        sha = hashlib.blake2b(digest_size=12)
        for f in tree.files.values():
            sha.update(f"{f.rel} {f.module}\0{f.text}\0".encode())
        kept = HERE / ".facts" / f"{sha.hexdigest()}.pickle"
        if not kept.exists():
            kept.parent.mkdir(exist_ok=True)
            with kept.with_suffix(".new").open("wb") as out:
                pickle.dump(self._extract(), out)
            kept.with_suffix(".new").rename(kept)
        with kept.open("rb") as read:
            self.at, self.calls, self.all_classes, self.class_of, self.external, self.unseen = pickle.load(read)
        for rel in self.unseen:
            tree.report.add("not seen by mypy", rel)
        ours = {full for full, (_, own) in self.all_classes.items() if own}
        infos = {full: info for full, (info, _) in self.all_classes.items()}
        for info in infos.values():
            info.bases = [infos[b] for b in info.lineage if b in infos]
        self.classes: dict[str, Info] = {full: infos[full] for full in sorted(ours)}

    def _extract(self) -> tuple:
        import mypy.nodes as nodes
        from mypy import build
        from mypy.config_parser import parse_config_file
        from mypy.modulefinder import BuildSource
        from mypy.options import Options

        tree = self.tree
        options = Options()
        parse_config_file(options, lambda: None, "pyproject.toml", sys.stdout, sys.stderr)
        options.packages = []
        options.export_types = options.preserve_asts = True
        options.native_parser = False
        options.warn_unused_ignores = False
        options.namespace_packages = True
        options.sqlite_cache = False
        options.cache_dir = str(HERE / ".cache")
        options.incremental = True
        self._forget(Path(options.cache_dir), [f.module for f in tree.files.values()])
        sources = []
        for f in tree.files.values():
            rel = f.rel
            if rel.split("/")[0] in ("cluster", "tuning"):
                rel = "dpdist/" + rel
            sources.append(BuildSource(rel, f.module))
        begun = time.time()
        result = build.build(sources, options)
        print(f"mypy: {time.time() - begun:.0f} s, {len(result.errors)} messages", flush=True)
        (HERE / "mypy.txt").write_text("\n".join(map(str, result.errors)))
        at: dict[str, dict[tuple, tuple]] = {}
        calls: dict[str, dict[tuple, tuple]] = {}
        classes: dict[str, tuple[Info, bool]] = {}
        class_of: dict[tuple, str] = {}
        unseen = []
        kids: dict[type, list[str]] = {}
        types = result.types
        same: dict[tuple, tuple] = {}

        def keep(info, own: bool) -> None:
            if info.fullname in classes and (classes[info.fullname][1] or not own):
                return
            names = {}
            for name, sym in info.names.items():
                t = getattr(sym.node, "type", None) if own else None
                names[name] = tuple(sorted(self.instances(t))) if t is not None else ()
            made = Info(info.fullname, [b.fullname for b in info.mro], names, bool(info.is_protocol),
                        getattr(info, "typeddict_type", None) is not None)
            classes[info.fullname] = (made, own)
            for base in info.mro[1:]:
                keep(base, False)

        for f in tree.files.values():
            state = result.graph.get(f.module)
            here: dict[tuple, tuple] = {}
            called: dict[tuple, tuple] = {}
            at[f.rel], calls[f.rel] = here, called
            if state is None or state.tree is None:
                unseen.append(f.rel)
                continue
            seen: set[int] = set()
            stack: list = [state.tree]
            while stack:
                node = stack.pop()
                if id(node) in seen:
                    continue
                seen.add(id(node))
                kind = type(node)
                if isinstance(node, nodes.Expression):
                    t = types.get(node)
                    if t is not None and node.end_line is not None:
                        key = (node.line, node.column, node.end_line, node.end_column)
                        got = tuple(sorted(set(self._owners(t))))
                        here[key] = same.setdefault(got, got)
                        reached = self._callees(t)
                        if reached:
                            called[key] = same.setdefault(reached, reached)
                elif kind is nodes.ClassDef:
                    info = node.info
                    if info and info.fullname:
                        keep(info, True)
                        class_of[(f.rel, node.line, node.name)] = info.fullname
                if kind not in kids:
                    kids[kind] = [a for a in dir(kind) if not a.startswith("_") and a not in self.SKIP
                                  and type(getattr(kind, a)).__name__ == "getset_descriptor"]
                for a in kids[kind]:
                    try:
                        v = getattr(node, a)
                    except AttributeError:
                        continue
                    todo = [v]
                    while todo:
                        v = todo.pop()
                        if isinstance(v, (list, tuple)):
                            todo.extend(v)
                        elif isinstance(v, nodes.Node) and not isinstance(v, nodes.TypeInfo):
                            stack.append(v)
        external: set[str] = set()
        for m in ("builtins", "pathlib", "torch._tensor", "torch._C", "torch", "torch.nn.modules.module", "numpy",
                  "collections", "argparse", "subprocess", "hashlib", "threading", "typing", "torch.optim.optimizer",
                  "pyarrow.parquet", "ray", "datetime", "types", "torch.utils.data.dataset", "json", "os", "io",
                  "socket", "asyncio", "concurrent.futures._base", "contextlib", "random", "re", "tempfile", "enum"):
            mod = result.manager.modules.get(m)
            if mod is None:
                continue
            for sym in list(mod.names.values()):
                if isinstance(sym.node, nodes.TypeInfo):
                    external |= set(sym.node.names)
        return at, calls, classes, class_of, external, unseen

    @staticmethod
    def _forget(cache: Path, modules: list[str]) -> None:
        """Third parties' types are kept, the tree's own files are read afresh."""
        for module in modules:
            base = cache / "3.11" / module.replace(".", "/")
            for folder in (base, base / "__init__"):
                for tail in (".meta.json", ".data.json", ".meta.ff", ".data.ff", ".err.json", ".deps.json", ".meta_ex.ff"):
                    Path(str(folder) + tail).unlink(missing_ok=True)

    def _owners(self, t) -> list[str]:
        """Full names of the classes that an expression may be of; "any" for what is not known."""
        from mypy import types as T

        t = T.get_proper_type(t)
        if isinstance(t, T.Instance):
            return [t.type.fullname]
        if isinstance(t, T.UnionType):
            return [o for item in t.items for o in self._owners(item)]
        if isinstance(t, T.TypeType):
            return self._owners(t.item)
        if isinstance(t, T.CallableType):
            return self._owners(t.ret_type) if t.is_type_obj() else ["builtins.function"]
        if isinstance(t, T.Overloaded):
            return self._owners(t.items[0])
        if isinstance(t, T.TupleType):
            return [t.partial_fallback.type.fullname]
        if isinstance(t, T.TypedDictType):
            return [t.fallback.type.fullname]
        if isinstance(t, T.LiteralType):
            return [t.fallback.type.fullname]
        if isinstance(t, T.TypeVarType):
            return self._owners(t.upper_bound)
        if isinstance(t, T.NoneType):
            return []
        return ["any"]

    def _callees(self, t) -> tuple:
        from mypy import types as T

        found = []
        t = T.get_proper_type(t)
        for item in t.items if isinstance(t, (T.Overloaded, T.UnionType)) else [t]:
            item = T.get_proper_type(item)
            if isinstance(item, T.CallableType) and item.is_type_obj() or isinstance(item, T.TypeType):
                found += [("class", o, 0) for o in self._owners(item)]
            elif isinstance(item, T.CallableType) and item.definition is not None:
                d = item.definition
                d = getattr(d, "func", d)
                found.append(("func", getattr(d, "name", ""), d.line))
            elif isinstance(item, T.Instance):
                found.append(("call", item.type.fullname, 0))
        return tuple(found)

    def type_of(self, f: File, node: ast.AST) -> tuple | None:
        return self.get(self.at, f, node)

    def get(self, table: dict, f: File, node: ast.AST) -> tuple | None:
        """By position; mypy says of what stands first in an f-string's braces that it begins with it."""
        end = (node.end_lineno, node.end_col_offset)
        found = table[f.rel].get((node.lineno, node.col_offset, *end))
        at = f.parents.get(node)
        if found is None and isinstance(at, ast.FormattedValue):
            while at is not None and isinstance(at, ast.expr):
                if isinstance(at, ast.JoinedStr):
                    found = found or table[f.rel].get((at.lineno, at.col_offset, *end))
                at = f.parents.get(at)
        return found

    def owners(self, t: tuple | None) -> tuple:
        return ("any",) if t is None else t

    def instances(self, t) -> set[str]:
        """All classes within a type: for what is serialised with it."""
        from mypy import types as T

        found: set[str] = set()
        stack = [t]
        for _ in range(200):
            if not stack:
                break
            t = stack.pop()
            if t is None:
                continue
            t = T.get_proper_type(t)
            if isinstance(t, T.Instance):
                found.add(t.type.fullname)
                stack.extend(t.args)
            elif isinstance(t, (T.UnionType, T.TupleType)):
                stack.extend(t.items)
        return found


# ------------------------------------------------------------------ the table


@dataclass
class Rename:
    target: str
    kind: str
    new: str
    source: str
    package: str = ""
    force: bool = False
    old: str = ""
    dead: str = ""
    keys: list = field(default_factory=list)


def package_of(module: str) -> str:
    parts = module.split(".")
    if parts[0] != "dpdist":
        return "tests"
    return parts[1] if len(parts) > 1 else "dpdist"


class Renamer:
    def __init__(self, tree: Tree, types: Types, report: Report) -> None:
        self.tree, self.types, self.report = tree, types, report
        self.edits: dict[str, dict[tuple[int, int], tuple[str, str]]] = defaultdict(dict)
        self.g: dict[tuple, Rename] = {}  # ("g", module, name)
        self.modules: dict[str, Rename] = {}
        self.fam: dict[tuple, Rename] = {}  # family
        self.par: dict[tuple[ast.AST, str], Rename] = {}  # (function node, name): parameters and locals
        self.parent: dict[tuple, tuple] = {}
        self.outside: set[tuple] = set()
        self._families()
        self._index()
        self._structural()

    # ---- families
    def root_of(self, key: tuple) -> tuple:
        while self.parent.get(key, key) != key:
            self.parent[key] = self.parent.get(self.parent[key], self.parent[key])
            key = self.parent[key]
        return key

    def union(self, a: tuple, b: tuple) -> None:
        a, b = sorted((self.root_of(a), self.root_of(b)))
        self.parent[b] = a

    def _families(self) -> None:
        self.members: dict[tuple, set[tuple]] = defaultdict(set)
        self.definers: dict[str, dict[str, list[str]]] = {}
        classes = self.types.classes
        protocols = []
        for full, info in classes.items():
            table: dict[str, list[str]] = defaultdict(list)
            for base in info.bases:
                for name in base.names:
                    table[name].append(base.fullname)
            self.definers[full] = table
            for name, bases in table.items():
                if name.startswith("__") and name.endswith("__"):
                    continue
                own = [b for b in bases if b in classes]
                for b in own:
                    self.parent.setdefault((b, name), (b, name))
                for a, b in zip(own, own[1:]):
                    self.union((a, name), (b, name))
                if own and len(own) < len(bases):
                    self.outside.add((own[0], name))
            if info.is_protocol:
                protocols.append(info)
        self.protocols = protocols
        self._close()

    def _close(self) -> None:
        self.members.clear()
        for key in list(self.parent):
            self.members[self.root_of(key)].add(key)
        self.outside = {self.root_of(k) for k in self.outside}

    def _structural(self) -> None:
        """Classes that have all that a Protocol asks for belong to it; where it asks for one
        thing, only those that have it as a method."""
        for p in self.protocols:
            wanted = sorted(n for n in p.names if not n.startswith("__"))
            for full, table in self.definers.items():
                if full == p.fullname or not wanted or not set(wanted) <= set(table):
                    continue
                if len(wanted) == 1 and not all(
                        (c, wanted[0]) in self.methods and not self._is_property(c, wanted[0])
                        for c in (p.fullname, table[wanted[0]][0])):
                    continue
                for name in wanted:
                    b = table[name][0]
                    if b in self.types.classes:
                        self.union((p.fullname, name), (b, name))
        self._close()
        for name in list(self.by_name):
            self.by_name[name] = {e for e in self.by_name[name] if e[0] != "m"}
        for fam, members in self.members.items():
            for _, name in members:
                self.by_name[name].add(("m", *fam))

    def family(self, cls: str, name: str) -> tuple | None:
        table = self.definers.get(cls)
        if table is None or name not in table:
            return None
        for b in table[name]:
            return self.root_of((b, name)) if b in self.types.classes else ("outside", name)
        return None

    def _index(self) -> None:
        """Every entity by its bare name; classes and functions by their nodes."""
        self.node_of_class: dict[str, tuple[File, ast.ClassDef]] = {}
        self.full_of_node: dict[ast.AST, str] = {}
        self.scope_of: dict[ast.AST, Scope] = {}
        self.methods: dict[tuple[str, str], list[ast.AST]] = defaultdict(list)
        self.by_name: dict[str, set[tuple]] = defaultdict(set)
        self.funcs_by_name: dict[str, list[ast.AST]] = defaultdict(list)
        for f in self.tree.files.values():
            for name, whats in f.scope.bound.items():
                if whats[0][0] != "import":
                    self.by_name[name].add(("g", f.module, name))
            stack = [f.scope]
            while stack:
                s = stack.pop()
                self.scope_of[s.node] = s
                stack.extend(s.inner)
                if s.kind == "class":
                    full = self.types.class_of.get((f.rel, s.node.lineno, s.node.name))
                    if full is None and s.parent.kind == "module":
                        full = f"{f.module}.{s.node.name}"
                    if full:
                        self.node_of_class[full] = (f, s.node)
                        self.full_of_node[s.node] = full
                        for name, whats in s.bound.items():
                            for what in whats:
                                if what[0] == "def":
                                    self.methods[(full, name)].append(what[1])
                if s.kind == "func" and not isinstance(s.node, ast.Lambda):
                    self.funcs_by_name[s.node.name].append(s.node)
                    for name, whats in s.bound.items():
                        if whats[0][0] == "param":
                            self.by_name[name].add(("p", s.node, name))
        for fam, members in self.members.items():
            for _, name in members:
                self.by_name[name].add(("m", *fam))

    def renamed(self, entity: tuple) -> Rename | None:
        if entity[0] == "g":
            return self.g.get(entity)
        if entity[0] == "m":
            return self.fam.get(entity[1:])
        if entity[0] == "p":
            return self.par.get(entity[1:])
        if entity[0] == "mod":
            return self.modules.get(entity[1])
        return None

    def unique(self, name: str, kinds: str = "gmp", product: bool = False) -> tuple[Rename | None, bool]:
        """(rename, whether some entity of this name is renamed): a rename only where all are alike."""
        found = [e for e in self.by_name.get(name, ()) if e[0] in kinds]
        if product:
            found = [e for e in found if self.in_product(e)]
        all_ = [self.renamed(e) for e in found]
        some = [r for r in all_ if r]
        if some and len(some) == len(all_) and len({r.new for r in some}) == 1:
            return min(some, key=lambda r: r.package), True
        return None, bool(some)

    def in_product(self, e: tuple) -> bool:
        if e[0] == "g":
            return e[1].split(".")[0] == "dpdist"
        if e[0] == "m":
            return e[1].split(".")[0] == "dpdist"
        if e[0] == "p":
            return self.scope_of[e[1]].file.rel.split("/")[0] in PRODUCT
        return True

    # ---- reading the table
    def read(self, renames: list[Rename]) -> None:
        for r in renames:
            self._target(r)
            if r.dead:
                self.report.add("refused or missing", f"{r.target} -> {r.new} ({r.source}): {r.dead}")

    def _target(self, r: Rename) -> None:
        module, _, qual = r.target.partition(":")
        module = re.sub(r"^(cluster|tuning)(?=\.|$)", r"dpdist.\1", module)
        file = self.tree.by_module.get(module)
        if file is None and module.startswith(("tests.", "benchmarks.", "examples.", "docs.")):
            file = next((f for f in self.tree.files.values() if f.rel[:-3].replace("/", ".") == module), None)
        if file is None:
            r.dead = "no such module"
            return
        module = file.module
        r.package = package_of(module)
        new = r.new = r.new.split(".")[-1].split(":")[-1]
        if not new.isidentifier() or re.fullmatch("False|None|True|and|as|assert|async|await|break|class|continue|def|del|elif|else|except|finally|for|from|global|if|import|in|is|lambda|nonlocal|not|or|pass|raise|return|try|while|with|yield", new):
            r.dead = "the new name is no identifier"
            return
        if not qual or r.kind == "module":
            r.old = module.rsplit(".", 1)[-1]
            whole = module.rsplit(".", 1)[0] + "." + new
            if whole in self.tree.by_module or new in self.tree.by_module.get(module.rsplit(".", 1)[0], file).scope.bound:
                r.dead = f"{whole} is there already"
                return
            self._put(self.modules, module, r)
            return
        param = None
        if qual.endswith(")"):
            qual, _, param = qual[:-1].partition("(")
        parts = qual.split(".")
        r.old = param or parts[-1]
        if r.old == new:
            r.dead = "has this name already"
            return
        scope = file.scope
        for part in parts if param else parts[:-1]:
            nodes = [w[1] for w in scope.bound.get(part, []) if w[0] in ("def", "class")]
            if not nodes:
                r.dead = f"no {part} there"
                return
            scope = self.scope_of[nodes[0]]
            last_nodes = nodes
        if param:
            if scope.kind == "class":
                inits = self.methods.get((self.full_of_node.get(scope.node, ""), "__init__"))
                if inits:
                    scope, last_nodes = self.scope_of[inits[0]], inits
                else:
                    self._member(r, scope, param)
                    return
            self._param(r, last_nodes, param)
            return
        name = parts[-1]
        if scope.kind == "module":
            if name not in scope.bound:
                r.dead = f"no {name} there"
                return
            if scope.bound[name][0][0] == "import":
                r.dead = f"{name} is imported there"
                return
            if new in vars(builtins) and new not in ("license", "credits", "copyright"):
                r.dead = f"{new} is a builtin"
                return
            d = self.tree.definition(("g", module, name))
            if isinstance(d, ast.ClassDef):
                full = self.full_of_node.get(d)
                if full in self.reprd and not r.force:
                    r.dead = f"its repr is made text or key at {self.reprd[full]}"
                    return
            self._put(self.g, ("g", module, name), r)
        elif scope.kind == "class":
            if isinstance(next((w[1] for w in scope.bound.get(name, []) if w[0] == "class"), None), ast.ClassDef):
                r.dead = "a class in a class is not handled"
                return
            self._member(r, scope, name)
        else:
            if name not in scope.bound:
                r.dead = f"no {name} there"
                return
            self._param(r, last_nodes, name)

    def _put(self, where: dict, key, r: Rename) -> None:
        before = where.get(key)
        if before is not None and before.new != r.new:
            r.dead = f"conflict: {before.target} -> {before.new} ({before.source})"
            self.report.add("conflicts", f"{r.target} -> {r.new} ({r.source}) against {before.target} -> {before.new} ({before.source})")
            return
        if before is None:
            where[key] = r
        where[key].keys.append((where, key))

    def _member(self, r: Rename, scope: Scope, name: str) -> None:
        full = self.full_of_node.get(scope.node)
        fam = self.family(full, name) if full else None
        if fam is None:
            r.dead = f"no member {name} there"
            return
        if fam[0] == "outside" or fam in self.outside:
            r.dead = "a base outside of the tree has it"
            return
        if name.startswith("__") and name.endswith("__"):
            r.dead = "a special name"
            return
        classes = {c for c, _ in self.members[fam]}
        family_classes = {c for c, table in self.definers.items() if classes & set(table.get(name, []))} | classes
        for c in sorted(family_classes):
            pass
        is_method = any((c, name) in self.methods and not self._is_property(c, name) for c in classes)
        if not is_method:
            for c in sorted(family_classes):
                info = self.types.classes[c]
                if any(b.startswith("pydantic.") for b in info.lineage) and name in info.names \
                        and self._is_field(c, name) and not name.startswith("_"):
                    r.dead = "a recipe key" if not r.force else ""
                if not r.force and self._is_field(c, name):
                    if c in self.serial:
                        r.dead = f"serialised: {self.serial[c]}"
                    elif c in self.reprd:
                        r.dead = f"its repr is made text or key at {self.reprd[c]}"
                if any(b in ("enum.Enum",) for b in info.lineage) and not r.force and c in self.reprd:
                    r.dead = f"an Enum's name is made text at {self.reprd[c]}"
                if r.dead:
                    return
        self._put(self.fam, fam, r)

    def _is_property(self, c: str, name: str) -> bool:
        return any("property" in ast.unparse(d) for n in self.methods[(c, name)] for d in n.decorator_list)

    def _is_field(self, c: str, name: str) -> bool:
        if c not in self.node_of_class:
            return False
        return any(isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name) and s.target.id == name
                   and "ClassVar" not in ast.unparse(s.annotation) for s in self.node_of_class[c][1].body)

    def _param(self, r: Rename, nodes: list[ast.AST], name: str) -> None:
        todo: list[ast.AST] = list(nodes)
        first = self.scope_of[nodes[0]]
        is_param = any(w[0] == "param" for w in first.bound.get(name, []))
        if not any(name in self.scope_of[n].bound for n in nodes):
            r.dead = f"no {name} there"
            return
        if is_param and first.parent.kind == "class":
            full = self.full_of_node.get(first.parent.node)
            method = nodes[0].name
            if not method.startswith("__"):
                fam = self.family(full, method) if full else None
                if fam and (fam[0] == "outside" or fam in self.outside):
                    r.dead = "a base outside of the tree has the method"
                    return
                for c, n in self.members.get(fam, ()):
                    todo += [m for m in self.methods.get((c, n), ()) if m not in todo]
        for node in todo:
            s = self.scope_of[node]
            if not any(w[0] == "param" for w in s.bound.get(name, [])) and is_param:
                continue
            if s.file.rel.startswith("dpdist/cli/") and is_param and any(
                    re.search(r"command|callback|argument|option", ast.unparse(d)) for d in node.decorator_list):
                r.dead = "a flag of the command line"
                return
            if is_param and node in self.starred and not r.force:
                r.dead = f"called with **: {self.starred[node]}"
                return
        for node in todo:
            if name in self.scope_of[node].bound and (not is_param or any(w[0] == "param" for w in self.scope_of[node].bound[name])):
                self._put(self.par, (node, name), r)

    # ---- collisions
    def kill(self, r: Rename, why: str) -> None:
        if r.dead:
            return
        r.dead = why
        self.report.add("refused or missing", f"{r.target} -> {r.new} ({r.source}): {why}")
        for where, key in r.keys:
            if where.get(key) is r:
                del where[key]

    def final(self, s: Scope, name: str) -> tuple[str, Rename | None]:
        """What a name bound in a scope will be called, and by whose word."""
        what = s.bound[name][0]
        r = None
        if what[0] == "import":
            if what[2] == name:
                e = self.tree.imported(s.file, what)
                r = self.renamed(e) if e else None
                r = r if r and r.old == name else None
        elif s.kind == "module":
            r = self.g.get(("g", s.file.module, name))
        elif s.kind == "func":
            r = self.par.get((s.node, name))
        elif s.kind == "class":
            full = self.full_of_node.get(s.node)
            fam = self.family(full, name) if full else None
            r = self.fam.get(fam) if fam else None
        return (r.new, r) if r else (name, None)

    def settle(self) -> None:
        """Drop what would collide, until nothing does."""
        scopes = [s for f in self.tree.files.values() for s in self._all_scopes(f)]
        for _ in range(30):
            dropped = 0
            finals: dict[int, dict[str, tuple[str, Rename | None]]] = {}
            inverse: dict[int, dict[str, list[tuple[str, Rename | None]]]] = {}
            for s in scopes:
                own = finals[id(s)] = {n: self.final(s, n) for n in s.bound if n not in s.outer}
                back: dict[str, list] = defaultdict(list)
                for n, (new, r) in own.items():
                    back[new].append((n, r))
                inverse[id(s)] = back
                for new, found in back.items():
                    if len(found) > 1:
                        changed = sorted((r for n, r in found if r), key=lambda r: (r.target, r.new))
                        if len(changed) == len(found):
                            changed = changed[1:]
                        for r in changed:
                            line = getattr(s.node, "lineno", 1)
                            self.kill(r, f"{new} is there already, {s.file.rel}:{line}")
                            dropped += 1
            for s in scopes:
                for node, name, offset in s.names:
                    if isinstance(node, ast.alias):
                        continue
                    home = s.find(name)
                    new, r = finals[id(home)].get(name, (name, None)) if home else (name, None)
                    at, first = s, True
                    while at is not None and at is not home:
                        if at.kind != "class" or first:
                            for n, other in inverse[id(at)].get(new, ()):
                                if n == new and r is None:
                                    continue
                                loser = other if other and n != new else r
                                if loser and not loser.dead:
                                    self.kill(loser, f"{new} would mean another thing at {s.file.rel}:{getattr(node, 'lineno', 0)} ({name})")
                                    dropped += 1
                        first = first and at.kind == "comp"
                        at = at.parent
            for c, table in sorted(self.definers.items()):
                if c not in self.types.classes:
                    continue
                back = defaultdict(dict)
                for n in table:
                    fam = self.family(c, n)
                    r = self.fam.get(fam)
                    back[r.new if r else n][n] = r
                for new, found in back.items():
                    if len(found) > 1:
                        changed = sorted((r for r in found.values() if r), key=lambda r: (r.target, r.new))
                        if len(changed) == len(found):
                            changed = changed[1:]
                        for r in changed:
                            if not r.dead:
                                self.kill(r, f"{c} has {new} already")
                                dropped += 1
            if not dropped:
                return

    # ---- what is serialised
    def scan(self) -> None:
        self.serial: dict[str, str] = {}
        self.reprd: dict[str, str] = {}
        self.starred: dict[ast.AST, str] = {}
        below: dict[str, set[str]] = defaultdict(set)
        for full, info in self.types.classes.items():
            for base in info.lineage:
                below[base].add(full)
        direct: dict[str, str] = {}
        for f in self.tree.files.values():
            product = f.rel.split("/")[0] in PRODUCT
            for node in ast.walk(f.tree):
                arg, what = None, ""
                if isinstance(node, ast.Call):
                    fn = node.func
                    name = fn.id if isinstance(fn, ast.Name) else fn.attr if isinstance(fn, ast.Attribute) else ""
                    ours = isinstance(fn, ast.Name) and self.tree.entity(f.scope, name) is not None
                    if name in SERIAL_CALLS and node.args and not ours:
                        arg, what = node.args[0], name
                    elif name in SERIAL_METHODS and isinstance(fn, ast.Attribute):
                        arg, what = fn.value, name
                    elif name in ("repr", "str") and len(node.args) == 1 and isinstance(fn, ast.Name):
                        self._repr(f, node.args[0], product)
                    if any(k.arg is None for k in node.keywords):
                        self._star(f, node, direct, product)
                elif isinstance(node, ast.FormattedValue):
                    self._repr(f, node.value, product)
                elif isinstance(node, ast.Attribute) and node.attr == "__dict__":
                    arg, what = node.value, "__dict__"
                if arg is None or not product:
                    continue
                owners = self.owners_of(f, arg)
                for o in owners:
                    if o in self.types.classes:
                        direct.setdefault(o, f"{what} at {f.rel}:{node.lineno}")
                    elif o == "any":
                        self.report.add("serialised, of unknown type", f"{f.rel}:{node.lineno}: {ast.unparse(node)[:80]}")
        stack = list(direct.items())
        while stack:
            full, why = stack.pop()
            for c in below.get(full, {full}):
                if c in self.serial or c not in self.types.classes:
                    continue
                self.serial[c] = why
                for name, found in self.types.classes[c].names.items():
                    for inner in found if self._is_field(c, name) else ():
                        if inner in self.types.classes and inner not in self.serial:
                            stack.append((inner, f"{why}, within {c}"))
        for full, info in self.types.classes.items():
            if info.typeddict:
                self.serial[full] = "TypedDict"

    def _repr(self, f: File, arg: ast.AST, product: bool) -> None:
        if not product or not hasattr(arg, "lineno"):
            return
        t = self.types.type_of(f, arg)
        if t is None:
            return
        for o in self.types.owners(t):
            info = self.types.classes.get(o)
            if info is None or not o.startswith("dpdist."):
                continue
            own = [b.fullname for b in info.bases if ("__str__" in b.names or "__format__" in b.names) and b.fullname != "builtins.object"]
            if any((b, "__str__") in self.methods or (b, "__repr__") in self.methods for b in info.lineage):
                continue
            if any(b in ("builtins.str", "builtins.int", "builtins.BaseException", "builtins.float") for b in info.lineage) or own:
                continue
            self.reprd.setdefault(o, f"{f.rel}:{arg.lineno}")
            self.report.add("repr of a class of ours", f"{o} at {f.rel}:{arg.lineno}")

    def _star(self, f: File, node: ast.Call, direct: dict, product: bool) -> None:
        for kind, what in self.callees(f, node):
            if kind == "class" and product and what.startswith("dpdist."):
                if not all(isinstance(k.value, ast.Dict) for k in node.keywords if k.arg is None):
                    direct.setdefault(what, f"** at {f.rel}:{node.lineno}")
            elif kind == "func" and product:
                self.starred.setdefault(what, f"{f.rel}:{node.lineno}")
            elif kind == "func":
                self.report.add("called with ** in tests", f"{what.name} at {f.rel}:{node.lineno}")

    # ---- what an expression is
    def enclosing(self, f: File, node: ast.AST) -> Scope:
        at = f.parents.get(node)
        while at is not None and not (at in self.scope_of and not isinstance(at, (ast.Lambda,))):
            at = f.parents.get(at)
        return self.scope_of[at] if at is not None else f.scope

    def static(self, f: File, node: ast.AST) -> tuple | None:
        """("g"...), ("mod"...), for names and attributes of modules."""
        if isinstance(node, ast.Name):
            e = self.tree.entity(self.scope_for(f, node), node.id)
            return e if e and e[0] in ("g", "mod") else None
        if isinstance(node, ast.Attribute):
            e = self.static(f, node.value)
            if e and e[0] == "mod":
                return self.tree.lookup(e[1], node.attr)
        return None

    def scope_for(self, f: File, node: ast.AST) -> Scope:
        found = self._scope_of_name.get(id(node))
        return found if found is not None else self.enclosing(f, node)

    def prepare(self) -> None:
        self._scope_of_name: dict[int, Scope] = {}
        for s in self.scope_of.values():
            for node, _, _ in s.names:
                self._scope_of_name[id(node)] = s

    def class_entity(self, e: tuple | None) -> str | None:
        d = self.tree.definition(e)
        return self.full_of_node.get(d) if isinstance(d, ast.ClassDef) else None

    def owners_of(self, f: File, node: ast.AST) -> list[str]:
        e = self.static(f, node)
        c = self.class_entity(e)
        if c:
            return [c]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super":
            s = self.enclosing(f, node).cls()
            full = self.full_of_node.get(s.node) if s else None
            return [full] if full else ["any"]
        t = self.types.type_of(f, node)
        found = self.types.owners(t)
        if isinstance(node, ast.Name) and node.id in ("self", "cls") and set(found) <= {"any"}:
            s = self.enclosing(f, node).cls()
            full = self.full_of_node.get(s.node) if s else None
            return [full] if full else ["any"]
        return found

    def callees(self, f: File, node: ast.Call) -> list[tuple]:
        """[("func", node)] or [("class", full)] that a call may reach; ("name", n) where unknown."""
        fn = node.func
        name = fn.id if isinstance(fn, ast.Name) else fn.attr if isinstance(fn, ast.Attribute) else ""
        if name == "partial" and node.args:
            return self.called(f, node.args[0])
        if name == "replace" and node.args and (isinstance(fn, ast.Name) or ast.unparse(fn) == "dataclasses.replace") \
                and self.static(f, fn) is None:
            return [("class", o) for o in self.owners_of(f, node.args[0])]
        if name == "_replace":
            return [("class", o) for o in self.owners_of(f, fn.value)]
        return self.called(f, fn)

    def called(self, f: File, fn: ast.AST) -> list[tuple]:
        if isinstance(fn, ast.Attribute) and fn.attr == "remote":
            return self.called(f, fn.value)
        if isinstance(fn, ast.Call) and isinstance(fn.func, ast.Attribute) and fn.func.attr == "options":
            return self.called(f, fn.func.value)
        e = self.static(f, fn)
        d = self.tree.definition(e)
        if isinstance(d, ast.ClassDef):
            full = self.full_of_node.get(d)
            return [("class", full)] if full else []
        if d is not None:
            return [("func", d)]
        if isinstance(fn, ast.Name):
            local = self.tree.entity(self.scope_for(f, fn), fn.id)
            if local and local[0] in ("l", "c"):
                for what in local[1].bound[fn.id]:
                    if what[0] == "def":
                        return [("func", what[1])]
                    if what[0] == "class":
                        full = self.full_of_node.get(what[1])
                        return [("class", full)] if full else []
        found: list[tuple] = []
        if isinstance(fn, ast.Attribute):
            for o in self.owners_of(f, fn.value):
                for b in self.definers.get(o, {}).get(fn.attr, []):
                    if isinstance(fn.value, ast.Call) and getattr(fn.value.func, "id", "") == "super" and b == o:
                        continue
                    if (b, fn.attr) in self.methods:
                        found += [("func", m) for m in self.methods[(b, fn.attr)]]
                        break
        if found:
            return found
        t = self.types.type_of(f, fn)
        for kind, name, line in self.types.get(self.types.calls, f, fn) or ():
            if kind == "class":
                found.append(("class", name))
            elif kind == "func":
                found += [("func", n) for n in self.funcs_by_name.get(name, ()) if n.lineno == line]
            else:
                for b in self.definers.get(name, {}).get("__call__", []):
                    found += [("func", m) for m in self.methods.get((b, "__call__"), ())]
                    break
        if found:
            return found
        known = self.types.owners(t)
        if t is None or "any" in known:
            name = fn.id if isinstance(fn, ast.Name) else fn.attr if isinstance(fn, ast.Attribute) else ""
            return [("name", name)] if name else []
        return []

    # ---- edits
    def edit(self, f: File, offset: int, old: str, r: Rename) -> None:
        if offset < 0 or f.text[offset:offset + len(old)] != old:
            self.report.add("not placed", f"{f.rel} ~{offset}: {old} -> {r.new}")
            return
        key = (offset, offset + len(old))
        before = self.edits[f.rel].get(key)
        if before and before[0] != r.new:
            self.report.add("two edits of one token", f"{f.where(offset)}: {old} -> {before[0]} / {r.new}")
            return
        self.edits[f.rel][key] = (r.new, r.package)

    def run(self) -> None:
        for f in self.tree.files.values():
            self._names(f)
            self._nodes(f)
            self._strings(f)
            self._docs(f)
        for p in self.tree.all:
            if p in HISTORY or p.endswith(".py"):
                continue
            if p.endswith(".md"):
                self._markdown(p)
            elif p.endswith(".ipynb"):
                self._notebook(p)
            elif p.endswith((".toml", ".yaml", ".yml", ".cfg", ".in", ".txt")) or p in ("Makefile", ".ci/run"):
                self._plain(p)

    @staticmethod
    def _all_scopes(f: File):
        stack = [f.scope]
        while stack:
            s = stack.pop()
            yield s
            stack.extend(s.inner)

    def _names(self, f: File) -> None:
        for s in self._all_scopes(f):
            for node, name, offset in s.names:
                if isinstance(node, ast.alias):
                    self._alias(f, s, node, offset)
                    continue
                e = self.tree.entity(s, name)
                if e is None:
                    continue
                if e[0] == "g":
                    r = self.g.get(e)
                    if r and name == e[2]:
                        self.edit(f, self._at(f, node, name, offset), name, r)
                elif e[0] == "mod":
                    r = self.modules.get(e[1])
                    if r and name == r.old:
                        self.edit(f, offset, name, r)
                elif e[0] == "l":
                    r = self.par.get((e[1].node, name))
                    if r:
                        self.edit(f, self._at(f, node, name, offset), name, r)
                elif e[0] == "c":
                    full = self.full_of_node.get(e[1].node)
                    fam = self.family(full, name) if full else None
                    r = self.fam.get(fam) if fam else None
                    if r:
                        self.edit(f, self._at(f, node, name, offset), name, r)

    def _at(self, f: File, node: ast.AST, name: str, offset: int) -> int:
        if offset >= 0:
            return offset
        return self._in_fstring(f, node, name)

    def _in_fstring(self, f: File, node: ast.AST, name: str) -> int:
        """Where Python 3.11 does not say: the same occurrence within the whole f-string."""
        at = node
        outer = None
        while at is not None:
            if isinstance(at, ast.JoinedStr):
                outer = at
            at = f.parents.get(at)
        if outer is None:
            return -1
        same = [n for n in ast.walk(outer) if (isinstance(n, ast.Name) and n.id == name) or (isinstance(n, ast.Attribute) and n.attr == name)]
        begin, end = f.offset(outer.lineno, outer.col_offset), f.offset(outer.end_lineno, outer.end_col_offset)
        spots = []
        for m in re.finditer(rf"(?<!\w){re.escape(name)}(?!\w)", f.text[begin:end]):
            before = f.text[begin:begin + m.start()]
            if before.count("{") > before.count("}"):
                spots.append(begin + m.start())
        if len(spots) == 1 or len(spots) == len(same):
            # document order
            order = sorted(same, key=lambda n: (n.lineno, n.col_offset))
            return spots[order.index(node)] if len(spots) > 1 else spots[0]
        return -1

    def _alias(self, f: File, s: Scope, alias: ast.alias, offset: int) -> None:
        parent = f.parents[alias]
        if isinstance(parent, ast.Import):
            m = self.tree.module(f, alias.name)
            self._dotted_module(f, alias.name, offset)
            return
        m = self.tree.module(f, parent.module or "", parent.level)
        if m is None:
            whole = self.tree.module(f, f"{parent.module}.{alias.name}", parent.level) if parent.module else None
            e = ("mod", whole) if whole else None
        else:
            e = self.tree.lookup(m, alias.name)
        if e is None:
            return
        r = self.renamed(e)
        if r and r.old == alias.name:
            self.edit(f, offset, alias.name, r)
            if alias.asname == alias.name:
                self.edit(f, f.offset(alias.end_lineno, alias.end_col_offset) - len(alias.asname), alias.asname, r)

    def _dotted_module(self, f: File, dotted: str, offset: int) -> None:
        parts = dotted.split(".")
        for n in range(1, len(parts) + 1):
            m = self.tree.module(f, ".".join(parts[:n]))
            r = self.modules.get(m) if m else None
            if r:
                self.edit(f, offset + len(".".join(parts[:n])) - len(parts[n - 1]), parts[n - 1], r)

    def _nodes(self, f: File) -> None:
        for node in ast.walk(f.tree):
            if isinstance(node, ast.ImportFrom) and node.module and self.modules:
                at = f.text.index(node.module, f.offset(node.lineno, node.col_offset) + 4)
                if node.level == 0:
                    self._dotted_module(f, node.module, at)
            elif isinstance(node, ast.Attribute):
                r = self._attribute(f, node)
                if r:
                    at = f.offset(node.end_lineno, node.end_col_offset) - len(node.attr)
                    if f.text[at:at + len(node.attr)] != node.attr or f.text[at - 1:at].isalnum():
                        at = self._in_fstring(f, node, node.attr)
                    self.edit(f, at, node.attr, r)
            elif isinstance(node, ast.Call):
                self._keywords(f, node)
                self._reflection(f, node)
            elif isinstance(node, ast.MatchClass):
                for k in node.kwd_attrs:
                    if self.unique(k, "m")[1]:
                        self.report.add("by hand: match", f"{f.rel}:{node.lineno}: {k}")

    def _attribute(self, f: File, node: ast.Attribute) -> Rename | None:
        name = node.attr
        if name not in self._interesting:
            return None
        e = self.static(f, node.value)
        if e and e[0] == "mod":
            inner = self.tree.lookup(e[1], name)
            r = self.renamed(inner) if inner else None
            return r if r and r.old == name else None
        if self.foreign(f, node.value):
            return None
        return self.member(f, self.owners_of(f, node.value), name, f"{f.rel}:{node.lineno}", node)

    def foreign(self, f: File, node: ast.AST) -> bool:
        """Whether an expression is a module of others, or of one."""
        if self.types.type_of(f, node) is not None:
            return False
        while isinstance(node, ast.Attribute):
            node = node.value
        if not isinstance(node, ast.Name):
            return False
        home = self.scope_for(f, node).find(node.id)
        if home is None:
            return False
        what = home.bound[node.id][0]
        return what[0] == "import" and self.tree.imported(f, what) is None

    def key_of(self, f: File, node: ast.AST) -> str:
        """A place, whatever lines are above it."""
        names, at = [], f.parents.get(node)
        while at is not None:
            if isinstance(at, (ast.ClassDef, *FUNCS)):
                names.append(at.name)
            at = f.parents.get(at)
        return f"{f.rel}|{'.'.join(reversed(names))}|{ast.unparse(node)}"

    def member(self, f: File, owners: list[str], name: str, where: str, node: ast.AST | None = None) -> Rename | None:
        fams, unknown = set(), False
        for o in owners:
            fam = self.family(o, name)
            if fam is not None:
                fams.add(fam)
            elif o in ("any", "builtins.object", "torch.nn.modules.module.Module", "types.ModuleType", "types.SimpleNamespace") \
                    or o in self.types.classes or o.startswith("torch."):
                unknown = True
        found = {self.fam[fam].new: self.fam[fam] for fam in fams if fam in self.fam}
        if fams:
            if len(found) > 1 or (found and any(fam not in self.fam for fam in fams)):
                self.report.add("by hand: union of families", f"{where}: .{name}: {sorted(map(str, fams))}")
                return None
            return next(iter(found.values()), None)
        if unknown and node is not None:
            f = self.tree.files[where.rpartition(":")[0]]
            key = self.key_of(f, node)
            if key in self.hints:
                outer = [o[7:] for o in self.hints[key] if o.startswith("module:")]
                if outer:
                    inner = self.tree.lookup(outer[0], name)
                    return self.renamed(inner) if inner else None
                hinted = [self.family(o, name) for o in self.hints[key]]
                found = {fam: self.fam.get(fam) for fam in hinted if fam is not None}
                new = {r.new if r else None for r in found.values()}
                if len(new) == 1 or not new:
                    return next(iter(found.values()), None)
                self.report.add("by hand: seen with several classes", f"{where}: .{name} {sorted(map(str, found))}")
                return None
            if isinstance(node, ast.Attribute) and (self.unique(name, "m")[1]):
                self.sites[(f.rel, f.offset(node.value.lineno, node.value.col_offset), f.offset(node.value.end_lineno, node.value.end_col_offset))] = key
        if unknown:
            r, some = self.unique(name, "m")
            if r and name not in self.types.external:
                self.report.add("guessed", f"{where}: .{name} -> {r.new}")
                return r
            if some:
                kind = "not decided, a library's name" if name in self.types.external else "not decided"
                self.report.add(kind, f"{where}: .{name}")
        return None

    def _keywords(self, f: File, node: ast.Call) -> None:
        wanted = [k for k in node.keywords if k.arg in self._interesting]
        if not wanted:
            return
        callees = self.callees(f, node)
        for k in wanted:
            found: list[Rename | None] = []
            for kind, what in callees:
                if kind == "func":
                    if any(w[0] == "param" for w in self.scope_of[what].bound.get(k.arg, [])):
                        found.append(self.par.get((what, k.arg)))
                elif kind == "class":
                    found += self._constructor(what, k.arg)
                elif kind == "name":
                    sure = [self.par.get((n, k.arg)) for n in self.funcs_by_name.get(what, ())
                            if any(w[0] == "param" for w in self.scope_of[n].bound.get(k.arg, []))]
                    if sure and all(sure):
                        self.report.add("guessed", f"{f.rel}:{node.lineno}: {what}({k.arg}=)")
                        found += sure
                    elif any(sure):
                        self.report.add("not decided", f"{f.rel}:{node.lineno}: {what}({k.arg}=)")
            new = {r.new if r else None for r in found}
            if len(new) > 1:
                self.report.add("by hand: keyword", f"{f.rel}:{node.lineno}: {k.arg}= -> {new}")
            elif found and found[0]:
                self.edit(f, f.offset(k.lineno, k.col_offset), k.arg, found[0])

    def _constructor(self, full: str, name: str) -> list[Rename | None]:
        for b in self.definers.get(full, {}).get("__init__", []):
            for m in self.methods.get((b, "__init__"), ()):
                if any(w[0] == "param" for w in self.scope_of[m].bound.get(name, [])):
                    return [self.par.get((m, name))]
                if m.args.kwarg is None:
                    return []
        fam = self.family(full, name)
        return [self.fam.get(fam)] if fam else []

    def _reflection(self, f: File, node: ast.Call) -> None:
        fn = node.func
        name = fn.id if isinstance(fn, ast.Name) else fn.attr if isinstance(fn, ast.Attribute) else ""
        spec = None
        if name in REFLECT and len(node.args) >= 2 and (isinstance(fn, ast.Name) or name in ("setattr", "delattr")):
            spec = (node.args[0], node.args[1])
        elif name in ("object", "spy", "patch") and isinstance(fn, ast.Attribute) and len(node.args) >= 2:
            spec = (node.args[0], node.args[1])
        elif name in ("attrgetter", "methodcaller") and node.args:
            spec = (None, node.args[0])
        if not spec or not isinstance(spec[1], ast.Constant) or not isinstance(spec[1].value, str):
            return
        text = spec[1].value
        if text not in self._interesting:
            return
        where = f"{f.rel}:{node.lineno}"
        r = None
        if spec[0] is not None:
            e = self.static(f, spec[0])
            if e and e[0] == "mod":
                inner = self.tree.lookup(e[1], text)
                r = self.renamed(inner) if inner else None
                self._string_edit(f, spec[1], text, r)
                return
            r = self.member(f, self.owners_of(f, spec[0]), text, where)
        else:
            r = self.unique(text, "m")[0]
        self._string_edit(f, spec[1], text, r)

    def _string_edit(self, f: File, node: ast.Constant, text: str, r: Rename | None) -> None:
        if r:
            at = f.offset(node.lineno, node.col_offset) + 1
            self.edit(f, at, text, r)
            self.placed.add(id(node))

    # ---- strings
    def _strings(self, f: File) -> None:
        doc = {(b, e) for b, e, _ in f.docs}
        lazy = "__getattr__" in f.scope.bound or f.rel.endswith("__init__.py")
        exported: set[int] = set()
        for s in f.tree.body:
            if isinstance(s, (ast.Assign, ast.AugAssign)) and "__all__" in ast.unparse(s)[:12]:
                exported |= {id(n) for n in ast.walk(s)}
        slots: dict[int, str] = {}
        for s in self._all_scopes(f):
            if s.kind == "class":
                for st in s.node.body:
                    if isinstance(st, ast.Assign) and "__slots__" in ast.unparse(st.targets[0]):
                        slots |= {id(n): self.full_of_node.get(s.node, "") for n in ast.walk(st)}
        mutants = f.rel.startswith("tests/mutants/")
        for node in ast.walk(f.tree):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in self.placed:
                continue
            begin, end = f.offset(node.lineno, node.col_offset), f.offset(node.end_lineno, node.end_col_offset)
            if (begin, end) in doc:
                continue
            text = node.value
            if self._type_string(f, node, begin):
                continue
            if text in self._interesting:
                e = self.tree.lookup(f.module, text) if (lazy or id(node) in exported) else None
                r = self.renamed(e) if e else None
                if r and r.old == text:
                    self.edit(f, begin + 1, text, r)
                    continue
                if id(node) in slots:
                    fam = self.family(slots[id(node)], text)
                    if fam in self.fam:
                        self.edit(f, begin + 1, text, self.fam[fam])
                        continue
                if self._dynamic(f, node) and self.unique(text, "m", product=True)[1]:
                    self.report.add("LOOK: strings beside a dynamic getattr", f"{f.rel}:{node.lineno}: {text!r}")
                self.report.add("strings that are a renamed name", f"{f.rel}:{node.lineno}: {text!r}")
                continue
            if mutants:
                if re.fullmatch(r"[\w/]+\.py", text):
                    self._dotted(f, begin, end)
                continue
            if f.rel == "tests/house_figures.py" and "\n" in text:
                for m in re.finditer(r"\S+", f.text[begin:end]):
                    self._walk_word(f, begin + m.start(), m.group())
                continue
            if "dpdist" in text or "/" in text or "tests." in text:
                self._dotted(f, begin, end)
                if re.search(r"(from|import) dpdist", text):
                    self._code(f, begin, end, None)

    def _dynamic(self, f: File, node: ast.AST) -> bool:
        if not hasattr(f, "_dyn"):
            f._dyn = set()
            for n in ast.walk(f.tree):
                if isinstance(n, ast.Call) and getattr(n.func, "id", getattr(n.func, "attr", "")) in REFLECT \
                        and len(n.args) > 1 and not isinstance(n.args[1], ast.Constant):
                    f._dyn.add(self.enclosing(f, n).node)
        return bool(f._dyn) and (self.enclosing(f, node).node in f._dyn or self.enclosing(f, node).kind != "func"
                                 and f.rel.split("/")[0] in PRODUCT)

    def _type_string(self, f: File, node: ast.Constant, begin: int) -> bool:
        """Types in strings, outside of annotations."""
        parent, child = f.parents.get(node), node
        while isinstance(parent, (ast.List, ast.Tuple)):
            parent, child = f.parents.get(parent), parent
        inside = isinstance(parent, ast.Subscript) and parent.slice is child and re.search(
            r"Callable|list|dict|type|tuple|Iterator|Sequence|Mapping|Iterable|Optional|Union|Type", ast.unparse(parent.value))
        inside = inside or (isinstance(parent, ast.Call) and getattr(parent.func, "id", "") in ("cast", "TypeVar"))
        if not inside or "Literal" in ast.unparse(f.parents.get(node)):
            return False
        try:
            tree = ast.parse(node.value, mode="eval")
        except SyntaxError:
            return False
        for n in ast.walk(tree):
            if isinstance(n, ast.Name):
                e = self.tree.lookup(f.module, n.id)
                r = self.renamed(e) if e else None
                if r and r.old == n.id:
                    self.edit(f, begin + 1 + n.col_offset, n.id, r)
        return True

    def _walk_word(self, f: File, at: int, word: str) -> None:
        head, _, member = word.partition(".")
        head = head.strip('"')
        found = [e for e in self.by_name.get(head, ()) if e[0] == "g" and self.in_product(e)]
        found = [e for e in found if isinstance(self.tree.definition(e), (ast.ClassDef, *FUNCS))]
        if member:
            found = [e for e in found if self.family(self.class_entity(e) or "", member.strip('"'))]
        if len(found) != 1:
            return
        r = self.g.get(found[0])
        if r:
            self.edit(f, at + word.index(head), head, r)
        c = self.class_entity(found[0])
        if member and c:
            member = member.strip('"')
            r = self.fam.get(self.family(c, member))
            if r:
                self.edit(f, at + word.index("." + member) + 1, member, r)

    def _dotted(self, f: "File | Text", begin: int, end: int) -> None:
        """Dotted names and paths of modules."""
        text = f.text[begin:end]
        for m in DOTTED.finditer(text):
            parts = re.split(r"[.:]", m.group())
            spots, at = [], begin + m.start()
            for part in parts:
                spots.append(at)
                at += len(part) + 1
            n = len(parts)
            while n > 1 and ".".join(parts[:n]) not in self.tree.by_module:
                n -= 1
            for k in range(2, n + 1):
                r = self.modules.get(".".join(parts[:k]))
                if r:
                    self.edit(f, spots[k - 1], parts[k - 1], r)
            if n == len(parts) or parts[0] != "dpdist":
                continue
            e = self.tree.lookup(".".join(parts[:n]), parts[n])
            r = self.renamed(e) if e else None
            if r and r.old == parts[n]:
                self.edit(f, spots[n], parts[n], r)
            c = self.class_entity(e)
            if c and n + 1 < len(parts):
                r = self.fam.get(self.family(c, parts[n + 1]))
                if r:
                    self.edit(f, spots[n + 1], parts[n + 1], r)
        for module, r in self.modules.items():
            path = self.tree.by_module[module].rel
            for m in re.finditer(rf"(?<![\w/])(?:dpdist/)?{re.escape(path[:-3])}(?=\.py|::|\b(?!/))", text):
                self.edit(f, begin + m.end() - len(r.old), r.old, r)

    # ---- text
    def _code(self, f: "File | Text", begin: int, end: int, scope: Scope | None) -> None:
        """Python quoted in a text: what it imports of ours, and members that are plainly ours."""
        text = f.text[begin:end]
        local: dict[str, tuple | None] = {}
        for m in re.finditer(r"from (dpdist[\w.]*) import (\([^)]*\)|[^\n;\"'\\\\]*)", text):
            for part in re.finditer(r"(\w+)(?:\s+as\s+(\w+))?", m.group(2)):
                e = self.tree.lookup(m.group(1), part.group(1)) if m.group(1) in self.tree.by_module else None
                if e is None:
                    continue
                local[part.group(2) or part.group(1)] = e
                r = self.renamed(e)
                if r and r.old == part.group(1):
                    self.edit(f, begin + m.start(2) + part.start(1), part.group(1), r)
        for m in re.finditer(r"(?m)^\W*(?:from (?!dpdist)[\w.]+ import|import) (.*)$", text):
            for part in re.finditer(r"(\w+(?:\.\w+)*)(?:\s+as\s+(\w+))?", m.group(1)):
                if not part.group(1).startswith("dpdist"):
                    local[part.group(2) or part.group(1).split(".")[0]] = None
                elif part.group(2):
                    local[part.group(2)] = ("mod", part.group(1))
        local.setdefault("dpdist", ("mod", "dpdist"))
        for m in CHAIN.finditer(text):
            self._chain(f, begin + m.start(), m.group(), None, local, code=True)
        for m in re.finditer(r"(?<=[\])]\.)\w+|(?<=\)\.)\w+", text):
            if m.group() in self._interesting:
                self._loose_member(f, begin + m.start(), m.group(), m.group())
        try:
            tree = ast.parse(text)
        except SyntaxError:
            return
        starts, at = [], 0
        for line in text.splitlines(keepends=True):
            starts.append(at)
            at += len(line)

        def spot(line: int, column: int) -> int:
            row = text[starts[line - 1]:].split("\n", 1)[0]
            return begin + starts[line - 1] + len(row.encode()[:column].decode())

        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                e = local.get(node.func.id) if isinstance(node.func, ast.Name) else None
                if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                    outer = local.get(node.func.value.id)
                    e = self.tree.lookup(outer[1], node.func.attr) if outer and outer[0] == "mod" else None
                d = self.tree.definition(e)
                for k in node.keywords:
                    r = None
                    if isinstance(d, ast.ClassDef):
                        r = next(iter(self._constructor(self.full_of_node.get(d, ""), k.arg or "")), None)
                    elif d is not None:
                        r = self.par.get((d, k.arg))
                    elif k.arg in self._interesting:
                        r = self.unique(k.arg, "pm", product=True)[0] if "_" in k.arg else None
                    if r:
                        self.edit(f, spot(k.lineno, k.col_offset), k.arg, r)
            elif isinstance(node, ast.ClassDef):
                base = next((self.class_entity(local[b.id]) for b in node.bases
                             if isinstance(b, ast.Name) and local.get(b.id)), None)
                if not base:
                    continue
                for part in node.body:
                    name = part.name if isinstance(part, FUNCS) else getattr(getattr(part, "target", None), "id", "")
                    fam = self.family(base, name)
                    r = self.fam.get(fam) if fam else None
                    if r:
                        at = spot(part.lineno, part.col_offset)
                        at = f.text.index(name, at + (4 if isinstance(part, FUNCS) else 0))
                        self.edit(f, at, name, r)
                for part in ast.walk(node):
                    if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self":
                        fam = self.family(base, part.attr)
                        r = self.fam.get(fam) if fam else None
                        if r:
                            self.edit(f, spot(part.end_lineno, part.end_col_offset) - len(part.attr), part.attr, r)

    def _loose_member(self, f, at: int, name: str, chain: str) -> None:
        r, some = self.unique(name, "m", product=True)
        if r and ("_" in name.strip("_") or not name.islower()) and name not in self.types.external:
            self.edit(f, at, name, r)
        elif some:
            self.report.add("not decided (text)", f"{f.where(at)}: {chain}")

    def _chain(self, f, at: int, chain: str, scope: Scope | None, local: dict, code: bool) -> None:
        parts = chain.split(".")
        if not any(p in self._interesting for p in parts):
            return
        if parts[0] == "dpdist":
            return  # `_dotted` has it
        spots = []
        for part in parts:
            spots.append(at)
            at += len(part) + 1
        head, e = parts[0], None
        if head in local:
            e = local[head]
            if e is None:
                return
        elif scope is not None:
            e = self._visible(scope, head)
        plain = head.islower() and "_" not in head.strip("_")
        if e is None and not code and (not plain or len(parts) > 1):
            if len(parts) == 1:
                if head in self._interesting:
                    r, some = self.unique(head, "gmp", product=True)
                    if r:
                        self.edit(f, spots[0], head, r)
                    elif some:
                        self.report.add("not decided (text)", f"{f.where(spots[0])}: {chain}")
                return
            found = [x for x in self.by_name.get(head, ()) if x[0] == "g" and self.in_product(x)]
            found = [x for x in found if self.family(self.class_entity(x) or "", parts[1])] or found
            e = found[0] if len(found) == 1 and head[:1].isupper() else None
        elif e is None and not code:
            if head in self._interesting and self.unique(head, "gmp", product=True)[1]:
                self.report.add("not decided (text)", f"{f.where(spots[0])}: {chain}")
            return
        if e:
            r = self.renamed(e)
            if r and r.old == head:
                self.edit(f, spots[0], head, r)
        for i in range(1, len(parts)):
            name = parts[i]
            if e and e[0] == "mod":
                e = self.tree.lookup(e[1], name)
                r = self.renamed(e) if e else None
                if r and r.old == name:
                    self.edit(f, spots[i], name, r)
                continue
            c = self.class_entity(e) if e else None
            fam = self.family(c, name) if c else None
            if fam is not None:
                if fam in self.fam:
                    self.edit(f, spots[i], name, self.fam[fam])
            elif name in self._interesting and name not in ("py", "md", "yaml", "json", "html", "jsonl", "parquet"):
                self._loose_member(f, spots[i], name, chain)
            e = None

    def _visible(self, scope: Scope, name: str) -> tuple | None:
        """What a name in a docstring or comment is: of the function, its class, its module."""
        at = scope
        while at is not None:
            if name in at.bound and at.kind != "class":
                whats = at.bound[name]
                if whats[0][0] == "import":
                    return self.tree.imported(at.file, whats[0])
                if at.kind == "module":
                    return ("g", at.file.module, name)
                return ("p", at.node, name)
            if at.kind == "class":
                full = self.full_of_node.get(at.node)
                init = self.methods.get((full, "__init__"), ())
                fam = self.family(full, name) if full else None
                if fam is not None:
                    return ("m", *fam)
                for m in init:
                    if name in self.scope_of[m].bound:
                        return ("p", m, name)
            at = at.parent
        return None

    def _docs(self, f: File) -> None:
        comments = []
        for t in tokenize.generate_tokens(io.StringIO(f.text).readline):
            if t.type == tokenize.COMMENT:
                begin = f.starts[t.start[0] - 1] + t.start[1]
                comments.append((begin, begin + len(t.string), f.scope_at_line(t.start[0])))
        for begin, end, scope in [*f.docs, *comments]:
            self._prose(f, begin, end, scope)
        for begin, end, scope in f.docs:
            text = f.text[begin:end]
            node = scope.node
            funcs = [node] if isinstance(node, FUNCS) else []
            if isinstance(node, ast.ClassDef):
                funcs = self.methods.get((self.full_of_node.get(node, ""), "__init__"), [])
            args = re.search(r"\n\s*(Args|Attributes):\n", text)
            if args:
                for m in re.finditer(r"(?m)^(\s+)((?:\*{0,2}\w+)(?:, \*{0,2}\w+)*)(?=:|\s\()", text[args.end():]):
                    for part in IDENT.finditer(m.group(2)):
                        name = part.group()
                        r = next((self.par[(n, name)] for n in funcs if (n, name) in self.par), None)
                        if r is None and isinstance(node, ast.ClassDef):
                            fam = self.family(self.full_of_node.get(node, ""), name)
                            r = self.fam.get(fam) if fam else None
                        if r:
                            self.edit(f, begin + args.end() + m.start(2) + part.start(), name, r)
            for m in re.finditer(r"(?m)^\s*(?:>>>|\.\.\.) (.*)$", text):
                self._code(f, begin + m.start(1), begin + m.end(1), scope)

    def _prose(self, f, begin: int, end: int, scope: Scope | None) -> None:
        self._dotted(f, begin, end)
        for m in re.finditer(r"``?([^`\n]+(?:\n[^`\n]+)?)``?", f.text[begin:end]):
            span = m.group(1)
            try:
                ast.parse(re.sub(r"\s+", " ", span).strip(" ,:"), mode="eval")
            except (SyntaxError, ValueError):
                continue
            for c in CHAIN.finditer(span):
                before = span[:c.start()]
                if before.endswith(("'", '"')) or before.count('"') % 2 or before.count("'") % 2:
                    continue
                if span[c.end():c.end() + 1] == "=" and span[c.end():c.end() + 2] != "==" and "(" in before:
                    r, some = self.unique(c.group(), "pm", product=True)
                    if r and "_" in c.group():
                        self.edit(f, begin + m.start(1) + c.start(), c.group(), r)
                    elif some:
                        self.report.add("not decided (text)", f"{f.where(begin + m.start(1))}: {span}")
                    continue
                self._chain(f, begin + m.start(1) + c.start(), c.group(), scope, {}, code=False)

    def _markdown(self, p: str) -> None:
        f = Text(self.tree.root, p)
        at, fence = 0, None
        spans: list[tuple[int, int, str]] = []
        plain = []
        for line in f.text.splitlines(keepends=True):
            mark = re.match(r"\s*```(\w*)", line)
            if mark:
                if fence is None:
                    fence, start = mark.group(1), at + len(line)
                else:
                    spans.append((start, at, fence))
                    fence = None
            elif fence is None:
                plain.append((at, at + len(line)))
            at += len(line)
        for begin, end, kind in spans:
            self._dotted(f, begin, end)
            if kind in ("python", "py"):
                self._code(f, begin, end, None)
        # join neighbouring lines: a span in backticks may be broken
        begin = None
        for b, e in [*plain, (len(f.text) + 9, 0)]:
            if begin is not None and b != last:
                self._prose(f, begin, last, None)
                begin = None
            if begin is None:
                begin = b
            last = e

    def _notebook(self, p: str) -> None:
        f = Text(self.tree.root, p)
        for m in re.finditer(r'"source": \[(.*?)\n   \]', f.text, re.S):
            self._dotted(f, m.start(1), m.end(1))
            self._code(f, m.start(1), m.end(1), None)

    def _plain(self, p: str) -> None:
        f = Text(self.tree.root, p)
        self._dotted(f, 0, len(f.text))

    def go(self, renames: list[Rename]) -> None:
        self.placed: set[int] = set()
        self.sites: dict[tuple, str] = {}
        hints = HERE / "hints_raw.json"
        raw: dict[str, list[str]] = json.loads(hints.read_text()) if hints.exists() else {}
        self.hints = {key: sorted({next((c for c in line.split() if c in self.types.classes or c.startswith("module:")), "")
                                   for line in lines}) for key, lines in raw.items()}
        self.prepare()
        self.scan()
        self.read(renames)
        self.settle()
        self._interesting = {r.old for r in renames if not r.dead}
        self.run()


class Text:
    def __init__(self, root: Path, rel: str) -> None:
        self.rel, self.text = rel, (root / rel).read_text()

    def where(self, offset: int) -> str:
        return f"{self.rel}:{self.text.count(chr(10), 0, offset) + 1}"


# ------------------------------------------------------------------ planted faults


def pieces(source: str) -> list[int | None]:
    """For each character of a literal's value, where in its source it stands (-1: made by an escape)."""
    spots: list[int] = []
    line_starts = [0]
    for line in source.splitlines(keepends=True):
        line_starts.append(line_starts[-1] + len(line))
    for t in tokenize.generate_tokens(io.StringIO("(" + source + "\n)").readline):
        if t.type != tokenize.STRING:
            continue
        at = line_starts[t.start[0] - 1] + t.start[1] - (1 if t.start[0] == 1 else 0)
        prefix = re.match(r"[A-Za-z]*", t.string).group().lower()
        quote = t.string[len(prefix):len(prefix) + 3]
        width = 3 if quote in ('"""', "'''") and len(t.string) >= len(prefix) + 6 else 1
        i, end = len(prefix) + width, len(t.string) - width
        while i < end:
            c = t.string[i]
            if c == "\\" and "r" not in prefix:
                n = t.string[i + 1]
                size = {"x": 4, "u": 6, "U": 10}.get(n, 2)
                if n == "\n":
                    i += 2
                    continue
                spots.append(-1)
                i += size
            else:
                spots.append(at + i)
                i += 1
    return spots


def apply(text: str, edits: dict[tuple[int, int], str]) -> str:
    for (b, e), new in sorted(edits.items(), reverse=True):
        text = text[:b] + new + text[e:]
    return text


def mutant_edits(tree: Tree, chosen: dict[str, dict[tuple[int, int], str]], report: Report, moved: dict[str, str]) -> dict[str, dict[tuple[int, int], str]]:
    """Edits of the quotations in tests/mutants."""
    done: dict[str, dict[tuple[int, int], str]] = defaultdict(dict)
    for f in tree.files.values():
        if not f.rel.startswith("tests/mutants/"):
            continue
        for file, old_node, new_node in faults(f):
            if file not in tree.files or file not in chosen:
                continue
            src = tree.files[file].text
            at = src.find(old_node.value)
            if at < 0 or src.count(old_node.value) != 1:
                continue
            own = chosen[file]
            names: dict[str, set[str]] = defaultdict(set)
            inside = [(k, v) for k, v in own.items() if at <= k[0] and k[1] <= at + len(old_node.value)]
            for (b, e), new in inside:
                names[src[b:e]].add(new)
            spots = pieces(f.text[(o := f.offset(old_node.lineno, old_node.col_offset)):f.offset(old_node.end_lineno, old_node.end_col_offset)])
            for (b, e), new in inside:
                place = [spots[i] for i in range(b - at, e - at)]
                if -1 in place or place != list(range(place[0], place[0] + e - b)):
                    report.add("by hand: planted fault", f"{f.rel}:{old_node.lineno}: {src[b:e]}")
                    continue
                done[f.rel][(o + place[0], o + place[0] + e - b)] = new
            # the planted text: first by what the quoted one says, then by the whole file
            value = new_node.value
            n0 = f.offset(new_node.lineno, new_node.col_offset)
            spots = pieces(f.text[n0:f.offset(new_node.end_lineno, new_node.end_col_offset)])
            whole: dict[str, set[str | None]] = defaultdict(set)
            for m in IDENT.finditer(src):
                if (m.start(), m.end()) in own:
                    whole[m.group()].add(own[(m.start(), m.end())])
                elif m.group() not in whole:
                    pass
            code = {(m.start(), m.end()) for m in IDENT.finditer(src)} - set(own)
            unedited = {src[b:e] for b, e in code if src[b:e] in whole and not in_words(tree.files[file], b)}
            inside_kept = {m.group() for m in IDENT.finditer(old_node.value)
                           if (at + m.start(), at + m.end()) not in own}
            for m in IDENT.finditer(value):
                name = m.group()
                if name in names and len(names[name]) == 1:
                    if name in inside_kept:
                        report.add("look: planted fault", f"{f.rel}:{new_node.lineno}: {name}")
                    new = next(iter(names[name]))
                elif name not in inside_kept and len(whole.get(name, ())) == 1:
                    if name in unedited:
                        report.add("look: planted fault", f"{f.rel}:{new_node.lineno}: {name}")
                        continue
                    new = next(iter(whole[name]))
                else:
                    continue
                place = spots[m.start():m.end()]
                if -1 in place:
                    report.add("by hand: planted fault", f"{f.rel}:{new_node.lineno}: {name}")
                    continue
                done[f.rel][(n0 + place[0], n0 + place[0] + len(name))] = new
    return done


def in_words(f: File, offset: int) -> bool:
    if not hasattr(f, "_words"):
        f._words = []
        for t in tokenize.generate_tokens(io.StringIO(f.text).readline):
            if t.type in (tokenize.COMMENT, tokenize.STRING):
                f._words.append((f.starts[t.start[0] - 1] + t.start[1], f.starts[t.end[0] - 1] + t.end[1]))
    return any(b <= offset < e for b, e in f._words)


def faults(f: File):
    """(file, old, new) nodes of the planted faults."""
    constants: dict[str, str] = {}
    for s in f.tree.body:
        if isinstance(s, ast.Assign) and isinstance(s.value, ast.Constant) and isinstance(s.value.value, str):
            constants[s.targets[0].id] = s.value.value

    def text(n):
        return n.value if isinstance(n, ast.Constant) else constants.get(getattr(n, "id", ""), "")

    for node in ast.walk(f.tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "group" and node.args:
            for t in node.args[2:]:
                if isinstance(t, ast.Tuple) and len(t.elts) == 3 and all(isinstance(x, ast.Constant) for x in t.elts[:2]):
                    yield text(node.args[0]), t.elts[0], t.elts[1]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Fault":
            got = dict(zip(("file", "tests", "old", "new"), node.args)) | {k.arg: k.value for k in node.keywords}
            if all(isinstance(got.get(k), ast.Constant) for k in ("old", "new")):
                yield text(got["file"]), got["old"], got["new"]


def loose(text: str) -> str:
    """A pattern that finds a text after a formatter laid its lines out anew."""
    parts = re.findall(r"\w+|[^\w\s]", text)
    out = []
    for i, p in enumerate(parts):
        if i:
            out.append(r",?\s*" if p in ")]}" else r"\s*")
            if parts[i - 1] in ("=", "if", "return") or parts[i - 1] == "while":
                out.append(r"(?:\(\s*)?")
            if p == ":" and i == len(parts) - 1:
                out.append(r"(?:\)\s*)?")
        out.append(re.escape(p))
    return "".join(out) + ("" if text.rstrip().endswith(":") else r"(?:(?<=\d)\s*\))?")


def mend_mutants(root: Path, report: Report) -> None:
    """Quotations that the formatter laid out anew."""
    for path in sorted((root / "tests/mutants").glob("*.py")):
        seen_keys: set[str] = set()
        for _ in range(200):
            f = File(root, str(path.relative_to(root)))
            f.parse()
            for file, old, new in faults(f):
                if not (root / file).exists():
                    continue
                src = (root / file).read_text()
                if src.count(old.value) == 1:
                    continue
                key = f"{f.rel}:{old.lineno}"
                text = old.value
                found = list(re.finditer(loose(text.strip()), src))
                if not found and "  #" in text:
                    text = re.sub(r"[ \t]*#[^\n]*", "", text)
                    found = list(re.finditer(loose(text.strip()), src))
                if len(found) != 1 or key in seen_keys:
                    report.add("by hand: quotation", f"{key}: {old.value!r} found {len(found)} times")
                    continue
                lead = text[:len(text) - len(text.lstrip())]
                tail = text[len(text.rstrip()):]
                got, end = found[0].group(), found[0].end()

                def open_in(t: str) -> int:
                    return sum(t.count(c) for c in "([{") - sum(t.count(c) for c in ")]}")

                if open_in(got) > open_in(text):
                    more = re.match(r"\s*,?\s*\)", src[end:])
                    if not more:
                        report.add("by hand: quotation", f"{key}: {old.value!r} has another bracket")
                        continue
                    got += more.group()
                want = lead + got + tail
                if src.count(want) != 1:
                    want = got
                if src.count(want) != 1 or want == old.value:
                    report.add("by hand: quotation", f"{key}: {old.value!r}")
                    continue
                seen_keys.add(key)
                b, e = f.offset(old.lineno, old.col_offset), f.offset(old.end_lineno, old.end_col_offset)
                lines = want.splitlines(keepends=True)
                made = ("\n" + " " * old.col_offset).join(json.dumps(x, ensure_ascii=False) for x in lines)
                path.write_text(f.text[:b] + made + f.text[e:])
                report.add("look: quotation laid out anew", f"{key}: {want!r}")
                break
            else:
                break


# ------------------------------------------------------------------ long lines


def mend_long(root: Path, report: Report) -> None:
    exe = root / ".venv/bin/ruff"
    for _ in range(6):
        got = subprocess.run([exe, "check", "--select", "E501", "--output-format", "json", "."], cwd=root, capture_output=True, text=True)
        found = json.loads(got.stdout or "[]")
        if not found:
            return
        by_file = defaultdict(list)
        for x in found:
            by_file[x["filename"]].append(x["location"]["row"])
        moved = False
        for name, rows in by_file.items():
            path = Path(name)
            if not name.endswith(".py"):
                report.add("by hand: long line", f"{name}: {rows}")
                continue
            lines = path.read_text().splitlines(keepends=True)
            f = File(root, str(path.relative_to(root)))
            f.parse()
            for row in sorted(rows, reverse=True):
                line = lines[row - 1]
                start = f.starts[row - 1]
                indent = line[:len(line) - len(line.lstrip())]
                if line.lstrip().startswith("#"):
                    cut = line.rfind(" ", 0, 100)
                    rest = line[cut + 1:]
                    lines[row - 1] = line[:cut].rstrip() + "\n"
                    if row < len(lines) and lines[row].startswith(indent + "# ") and not lines[row].startswith(indent + "#  "):
                        lines[row] = indent + "# " + rest.rstrip("\n") + " " + lines[row][len(indent) + 2:]
                    else:
                        lines.insert(row, indent + "# " + rest)
                    moved = True
                elif any(b <= start + 99 < e for b, e, _ in f.docs):
                    cut = line.rfind(" ", 0, 100)
                    rest = line[cut + 1:]
                    if cut <= len(indent):
                        report.add("by hand: long line", f"{f.rel}:{row}")
                        continue
                    lines[row - 1] = line[:cut].rstrip() + "\n"
                    nxt = lines[row] if row < len(lines) else ""
                    same = nxt[:len(nxt) - len(nxt.lstrip())]
                    if nxt.strip() and not nxt.strip().startswith(('"""', "- ", ">>>", "Args:", "Returns:", "Raises:")) \
                            and '"""' not in rest and (same == indent or line.lstrip().startswith('"""')) and not re.match(r"\s*\w+: ", nxt):
                        lines[row] = same + rest.rstrip("\n") + " " + nxt.lstrip()
                    else:
                        hang = indent if not re.match(r"\s+\w+(, \w+)*: ", line) else indent + "    "
                        lines.insert(row, hang + rest)
                    moved = True
                elif (cut := break_kept(f, row, line)) is not None:
                    lines[row - 1] = cut
                    moved = True
                elif re.search(r"\S  # ", line):
                    code, _, comment = line.rstrip("\n").rpartition("  # ")
                    lines[row - 1:row] = [indent + "# " + comment + "\n", code + "\n"]
                    moved = True
                else:
                    if not kept(f, row) and (cut := push_string(line, lines[row] if row < len(lines) else "")) is not None:
                        lines[row - 1], lines[row] = cut
                        moved = True
                    elif not kept(f, row) and (cut := split_string(line)) is not None:
                        lines[row - 1] = cut
                        moved = True
                    elif (cut := break_text(f, row, line)) is not None:
                        where, text = cut
                        lines[where - 1] = text
                        moved = True
                    else:
                        report.add("by hand: long line", f"{f.rel}:{row}: {line.strip()[:80]}")
            path.write_text("".join(lines))
        fmt(root)
        if not moved:
            return


def kept(f: File, row: int) -> bool:
    """Whether the formatter leaves a line alone."""
    if not hasattr(f, "_ends"):
        f._ends = [t.start[0] for t in tokenize.generate_tokens(io.StringIO(f.text).readline) if t.type == tokenize.NEWLINE]
    end = next((e for e in f._ends if e >= row), row)
    marks = [line.strip() for line in f.lines[:row] if line.strip() in ("# fmt: off", "# fmt: on")]
    return "# fmt: skip" in f.lines[end - 1] or marks[-1:] == ["# fmt: off"]


def break_kept(f: File, row: int, line: str) -> str | None:
    """A line of a statement that the formatter leaves alone: broken behind a comma."""
    if not kept(f, row):
        return None
    if line.rstrip().endswith("# fmt: skip") and len(line.rstrip()) - len("  # fmt: skip") <= 100 \
            and line.count("(") == line.count(")"):
        return line.replace("  # fmt: skip", "")
    tokens = []
    try:
        for t in tokenize.generate_tokens(io.StringIO(line.strip() + "\n").readline):
            tokens.append(t)
    except (tokenize.TokenError, IndentationError):
        pass
    lead = len(line) - len(line.lstrip())
    ends = [lead + t.end[1] for t in tokens if t.type == tokenize.OP and t.string == "," and lead + t.end[1] <= 100
            and t.end[0] == 1 and line[lead + t.end[1]:].strip(" ,\n")]
    if not ends:
        return None
    deep = 4 if line[:ends[-1]].count("(") > line[:ends[-1]].count(")") else 0
    return line[:ends[-1]] + "\n" + " " * (lead + deep) + line[ends[-1]:].lstrip()


def break_text(f: File, row: int, line: str) -> tuple[int, str] | None:
    """A line within a string of several lines: a list of words is wrapped, others are excused."""
    for t in tokenize.generate_tokens(io.StringIO(f.text).readline):
        if t.type == tokenize.STRING and t.start[0] <= row <= t.end[0] and t.start[0] < t.end[0]:
            if f.rel == "tests/house_figures.py":
                lead = line[:len(line) - len(line.lstrip())]
                cut = line.rfind(" ", 0, 100)
                return row, line[:cut] + "\n" + lead + line[cut + 1:]
            last = f.lines[t.end[0] - 1]
            if "noqa" in last:
                return None
            return t.end[0], last.rstrip("\n") + "  # noqa: E501\n"
    return None


def push_string(line: str, following: str) -> tuple[str, str] | None:
    """Move the last words of a string to the next one of the same concatenation."""
    shape = re.compile(r"^(\s*)([fF]?)(\"|')(.*)\3([,)]*)\s*$")
    a, b = shape.match(line.rstrip("\n")), shape.match(following.rstrip("\n"))
    if not a or not b or a.group(3) != b.group(3) or a.group(5):
        return None
    if a.group(3) in re.sub(r"\\\\.|\{[^{}]*\}", "", a.group(4)) or not a.group(4).endswith(" "):
        return None
    text, depth, cuts = a.group(4), 0, []
    lead = len(a.group(1)) + len(a.group(2)) + 1
    for i, c in enumerate(text[:-1]):
        depth += (c == "{") - (c == "}")
        if c == " " and (depth == 0 or not a.group(2)) and lead + i + 2 <= 100:
            cuts.append(i + 1)
    if not cuts:
        return None
    head, tail = text[:cuts[-1]], text[cuts[-1]:]
    p, q = a.group(2), b.group(2)
    if p and not q:
        if "{" in tail:
            if "{" in b.group(4) or "}" in b.group(4):
                return None
            q = "f"
    elif q and not p and ("{" in tail or "}" in tail):
        return None
    if p and "{" not in head:
        p = ""
    quote = a.group(3)
    return (f"{a.group(1)}{p}{quote}{head}{quote}\n", f"{b.group(1)}{q}{quote}{tail}{b.group(4)}{quote}{b.group(5)}\n")


def split_string(line: str) -> str | None:
    """Cut the longest string literal of a line in two, in parentheses."""
    try:
        tokens = []
        for t in tokenize.generate_tokens(io.StringIO(line.strip() + "\n").readline):
            tokens.append(t)
    except (tokenize.TokenError, IndentationError):
        pass
    strings = [t for t in tokens if t.type == tokenize.STRING and not t.string.endswith('"""')]
    if not strings:
        return None
    t = max(strings, key=lambda t: len(t.string))
    lead = len(line) - len(line.lstrip())
    begin, text = lead + t.start[1], t.string
    prefix = re.match(r"[A-Za-z]*", text).group()
    quote, depth, cuts = text[len(prefix)], 0, []
    for i in range(len(prefix) + 1, len(text) - 1):
        if "f" in prefix.lower():
            depth += (text[i] == "{") - (text[i] == "}")
        if text[i] == " " and depth == 0 and text[i - 1] != "\\":
            cuts.append(i + 1)
    cuts = [c for c in cuts if begin + c <= 97 and len(prefix) + 2 < c < len(text) - 1]
    if not cuts:
        return None
    a, b = text[:cuts[-1]] + quote, prefix + quote + text[cuts[-1]:]
    indent = line[:lead]
    before, after = line[:begin], line[begin + len(text):]
    if not before.strip() and after.strip() in ("", ","):
        made = indent + a + "\n" + indent + b + after
    else:
        made = before + "(" + a + " " + b + ")" + after
    for p, q in ((a, b),):
        for x in (p, q):  # an f without a field is an f too many
            if "f" in prefix.lower() and "{" not in x:
                made = made.replace(x, re.sub(r"(?i)^f", "", x))
    return made


def lift_comments(text: str) -> str:
    """Comments behind code that make a line too long, onto a line of their own before it."""
    lines = text.splitlines(keepends=True)
    if all(len(line) <= 101 for line in lines):
        return text
    found = [t for t in tokenize.generate_tokens(io.StringIO(text).readline)
             if t.type == tokenize.COMMENT and len(t.line.rstrip("\n")) > 100 and t.line[:t.start[1]].strip()
             and t.start[0] == t.end[0] and not re.match(r"#\s*(type:|noqa|fmt:|pragma|ruff:)", t.string)
             and "# fmt: skip" not in t.line]
    for t in reversed(found):
        row = t.start[0] - 1
        line = lines[row]
        if not line.isascii() and line[:t.start[1]] + t.string != line.rstrip("\n"):
            continue
        code = line[:t.start[1]].rstrip()
        lead = line[:len(line) - len(line.lstrip())]
        lines[row] = lead + t.string + "\n" + code + "\n"
    made = "".join(lines)
    try:
        return made if ast.dump(ast.parse(made)) == ast.dump(ast.parse(text)) else text
    except SyntaxError:
        return text


def fmt(root: Path) -> None:
    exe = root / ".venv/bin/ruff"
    subprocess.run([exe, "check", "-q", "--fix", "--select", "I,RUF022", "."], cwd=root, capture_output=True)
    got = subprocess.run([exe, "format", "-q", "."], cwd=root, capture_output=True, text=True)
    if got.returncode:
        print(got.stderr[-2000:], flush=True)


# ------------------------------------------------------------------ stages


def write(tree: Tree, r: Renamer, packages: set[str], report: Report, originals: dict[str, str]) -> None:
    """Lay the tree out with the edits of these packages."""
    chosen: dict[str, dict[tuple[int, int], str]] = {}
    for rel, edits in r.edits.items():
        own = {k: new for k, (new, p) in edits.items() if p in packages}
        if own:
            chosen[rel] = own
    for rel, edits in mutant_edits(tree, chosen, report, {}).items():
        chosen.setdefault(rel, {}).update(edits)
    for rel, text in originals.items():
        if rel not in chosen:
            (tree.root / rel).write_text(text)
    for rel, edits in chosen.items():
        text = apply(originals.setdefault(rel, (tree.root / rel).read_text()), edits)
        (tree.root / rel).write_text(lift_comments(text) if rel.endswith(".py") else text)
    for module, x in r.modules.items():
        path = tree.by_module[module].rel
        new = str(Path(path).with_name(x.new + ".py"))
        if x.package in packages and (tree.root / path).exists():
            subprocess.run(["git", "mv", path, new], cwd=tree.root, check=True)
            originals[new] = originals.pop(path, (tree.root / new).read_text())
    fmt(tree.root)
    mend_long(tree.root, report)
    mend_mutants(tree.root, report)
    patches = HERE / "patches.json"
    for x in json.loads(patches.read_text()) if patches.exists() else []:
        path = tree.root / x["file"]
        text = path.read_text() if path.exists() else ""
        if text.count(x["old"]) == 1:
            path.write_text(text.replace(x["old"], x["new"]))
        elif x["new"] not in text:
            report.add("patches that do not fit", f"{x['file']}: {x['old']!r}")
    fmt(tree.root)


def checks(root: Path) -> list[str]:
    bad = []
    for command in (["ruff", "check", "-q", "."], ["ruff", "format", "-q", "--check", "."], ["mypy"]):
        got = subprocess.run([root / ".venv/bin" / command[0], *command[1:]], cwd=root, capture_output=True, text=True)
        if got.returncode:
            bad.append(" ".join(command) + "\n" + (got.stdout + got.stderr)[-4000:])
    return bad


def probe(tree: Tree, r: Renamer, out: Path) -> None:
    """Wrap each undecided receiver: `x.name` becomes `_nmprobe(x, 7).name`."""
    by_file: dict[str, list] = defaultdict(list)
    keys = []
    for (rel, begin, end), key in sorted(r.sites.items()):
        f = tree.files[rel]
        try:
            ast.parse("(" + f.text[begin:end] + "\n)")
        except SyntaxError:
            continue
        by_file[rel].append((begin, end, len(keys)))
        keys.append(key)
    for rel, spots in by_file.items():
        marks = []
        for begin, end, n in spots:
            marks += [(begin, 1, -end, "_nmprobe("), (end, 0, begin, f", {n})")]
        text = tree.files[rel].text
        done = []
        at = 0
        for place, _, _, word in sorted(marks, key=lambda m: (m[0], m[1], m[2] if m[1] else -m[2])):
            done += [text[at:place], word]
            at = place
        made = "".join(done) + text[at:]
        try:
            ast.parse(made)
        except SyntaxError as error:
            print("not instrumented:", rel, error)
            continue
        (tree.root / rel).write_text(made)
    out.write_text(json.dumps(keys))
    print(f"{len(keys)} places in {len(by_file)} files")


PINS = [(
    "dpdist/attacks/attacked_copies.py",
    'digest = hashlib.blake2b(f"{dataset.fingerprint} {at}".encode(), digest_size=16)',
    '# The words of the first versions: copies that were made keep their name.\n'
    '        named = f"At(attack={at.attack!r}, size={at.size!r}, norm={at.norm!r})"\n'
    '        digest = hashlib.blake2b(f"{dataset.fingerprint} {named}".encode(), digest_size=16)',
)]


def pin(root: Path, commit: bool) -> None:
    """Write out the words that digests are made of, where they were a class's name."""
    changed = False
    for rel, old, new in PINS:
        path = root / rel
        if path.exists() and path.read_text().count(old) == 1:
            path.write_text(path.read_text().replace(old, new))
            changed = True
    if changed and commit:
        subprocess.run(["git", "commit", "-qam", "Pin the words that the digest of attacked copies is made of"], cwd=root, check=True)


TITLE = "Use the field's terms for names in {}"


def main() -> int:
    p = argparse.ArgumentParser()
    p.add_argument("checkout", type=Path)
    p.add_argument("--table", nargs="+", type=Path, required=True)
    p.add_argument("--commit", action="store_true")
    p.add_argument("--one-commit", action="store_true", help="all packages in one")
    p.add_argument("--dry", action="store_true", help="only report")
    p.add_argument("--report", type=Path)
    p.add_argument("--probe", type=Path, help="instrument what is not decided, so that a run of the tests says it")
    a = p.parse_args()
    root = a.checkout.resolve()
    if subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=root, capture_output=True, text=True).stdout.strip():
        print("the checkout has changes that are not committed", file=sys.stderr)
        return 2
    if not a.dry and not a.probe:
        pin(root, a.commit or a.one_commit)
    renames, words = [], {}
    for path in a.table:
        for x in json.loads(path.read_text()):
            if "new" not in x:
                words[x["target"]] = x
                continue
            renames.append(Rename(x["target"], x.get("kind", ""), x["new"], path.name, force=bool(x.get("force"))))
    for x in renames:
        if x.target in words:
            x.force = x.force or bool(words[x.target].get("force"))
            x.new = words[x.target].get("rename", x.new)
    renames = [x for x in renames if not words.get(x.target, {}).get("drop")]
    renames.sort(key=lambda r: (r.target, r.new))
    report = Report()
    tree = Tree(root, report)
    types = Types(tree)
    r = Renamer(tree, types, report)
    r.go(renames)
    live = [x for x in renames if not x.dead]
    print(f"{len(live)} of {len(renames)} renames, {sum(map(len, r.edits.values()))} edits in {len(r.edits)} files", flush=True)
    if a.probe:
        probe(tree, r, a.probe)
        a.dry = True
    status = 0
    if not a.dry:
        originals: dict[str, str] = {}
        packages = sorted({p for edits in r.edits.values() for _, p in edits.values()})
        done: set[str] = set()
        pending: list[str] = []
        if a.one_commit:
            write(tree, r, set(packages), report, originals)
            bad = checks(root)
            if bad:
                report.add("checks", "\n".join(bad))
            subprocess.run(["git", "add", "-A"], cwd=root, check=True)
            body = "By script, from tables of names, in: " + ", ".join(packages) + "."
            import textwrap

            subprocess.run(["git", "commit", "-q", "-m", "Use the field's terms for names", "-m", textwrap.fill(body, 72)], cwd=root, check=True)
            print("committed", "(checks fail, see the report)" if bad else "", flush=True)
            status, packages = int(bool(bad)), []
        for package in packages if a.commit or a.one_commit else ["*"]:
            done = done | {package} if a.commit else set(packages)
            write(tree, r, done, report, originals)
            bad = checks(root)
            pending.append(package)
            if bad:
                report.add("checks", f"after {package}:\n" + "\n".join(bad))
                status = 1
                continue
            status = 0
            if a.commit:
                subprocess.run(["git", "add", "-A"], cwd=root, check=True)
                title = TITLE.format(", ".join(pending))
                subprocess.run(["git", "commit", "-q", "-m", title], cwd=root, check=True)
                print("committed:", title, flush=True)
                pending = []
        if a.commit and pending:
            print("not committed, checks fail:", pending)
    (a.report or HERE / "report.txt").write_text(str(report) + "\n")
    for kind, lines in sorted(report.lines.items()):
        print(f"{len(lines):5} {kind}")
    return status


if __name__ == "__main__":
    sys.exit(main())
