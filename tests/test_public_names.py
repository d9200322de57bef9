"""What `import dpdist` offers: each name is there, listed and typed."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
from pathlib import Path

import pytest

import dpdist


def test_every_name_is_listed_and_there():
    assert set(dpdist.__all__) <= set(dir(dpdist))
    for name in dpdist.__all__:
        assert getattr(dpdist, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        _ = dpdist.nothing


def test_one_version_stands_everywhere():
    root = Path(__file__).resolve().parents[1]
    for name, line in (("pyproject.toml", 'version = "{}"'), ("CITATION.cff", "version: {}")):
        assert line.format(dpdist.__version__) in (root / name).read_text().splitlines(), name
    released = rf"## {re.escape(dpdist.__version__)} \(\d{{4}}-\d\d-\d\d\)"
    announced = rf"{re.escape(dpdist.__version__)}, .* is in preparation: "
    changes = (root / "CHANGELOG.md").read_text()
    assert len(re.findall(rf"^(?:{released}|{announced})", changes, flags=re.M)) == 1


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
    shown = facts._repr_html_()
    assert shown.startswith("<table><caption>Run x (") and shown.endswith("</table>")
    assert shown.count("<tr>") == len(facts.summary()) and "Test accuracy" in shown
    hidden = dataclasses.replace(
        facts, training_summary=facts.training_summary | {"secret": "not shown"}
    )
    assert repr(hidden).startswith("Run x (") and "not shown" not in repr(hidden)
    with pytest.raises(dpdist.UserError, match="nowhere"):
        dpdist.load_results("nowhere")
