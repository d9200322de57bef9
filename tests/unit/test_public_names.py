"""What `import dpdist` offers: each name is there, listed and typed."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

import dpdist


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
