"""What `import dpdist` offers: each name is there, listed and typed."""

from __future__ import annotations

import ast
import importlib
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest

import dpdist

ROOT = Path(__file__).resolve().parents[2]


def test_the_types_are_those_of_the_names():
    """What a type checker reads is what is imported on first use."""
    tree = ast.parse(Path(dpdist.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    typed = {
        alias.asname: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == dpdist._LAZY
    for name, module in typed.items():
        assert getattr(importlib.import_module(module), name) is getattr(dpdist, name)


def test_facts_by_path_and_as_a_table(golden, tmp_path, monkeypatch):
    folder = golden("digits", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    facts = dpdist.load_results("x")
    assert facts.guarantee == dpdist.load_results(folder.path).guarantee
    assert facts.guarantee == dpdist.load_results(str(folder.path)).guarantee
    with pytest.raises(dpdist.UserError, match="nowhere"):
        dpdist.load_results("nowhere")


def test_scripts_use_names_that_exist() -> None:
    """Those of benchmarks/, papers/ and examples/, most of which only the nightly tests run."""
    missing = []
    scripts = [
        path for at in ("benchmarks", "papers", "examples") for path in (ROOT / at).rglob("*.py")
    ]
    for path in scripts:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        modules: dict[str, object] = {"dpdist": dpdist}
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dpdist"):
                module = importlib.import_module(node.module)
                for each in node.names:
                    with suppress(ImportError):  # a module of the package
                        importlib.import_module(f"{node.module}.{each.name}")
                    found = getattr(module, each.name, missing)
                    if found is missing:
                        missing.append((path.name, node.module, each.name))
                    elif isinstance(found, ModuleType):
                        modules[each.asname or each.name] = found
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                owner = modules.get(node.value.id)
                if owner is not None and not hasattr(owner, node.attr):
                    missing.append((path.name, node.value.id, node.attr))
    assert len(scripts) > 40 and missing == []
