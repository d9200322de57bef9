"""Every name is used."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DEFINITIONS = ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef

# Called by a library, by the name that it knows.
CALLED_FROM_OUTSIDE = {
    "handleError": "logging", "backend_cls": "ray.train", "find_spec": "importlib",
    "on_trial_result": "ray.tune", "on_trial_start": "ray.tune", "on_trial_error": "ray.tune",
    "compose_node": "yaml", "_maybe_compose": "dp_accounting",
    "_repr_html_": "notebooks", "check_health": "ray.serve", "format_commands": "click",
    **dict.fromkeys((
        "add_callback", "training_step", "get_train_dataloader", "_inner_training_loop",
        "_run_epoch", "_save_checkpoint", "save_model", "save_state", "hyperparameter_search",
        "create_model_card",
    ), "transformers.Trainer"),
    **dict.fromkeys((
        "configure_callbacks", "val_dataloader", "on_fit_start", "on_train_start",
        "on_train_batch_start", "on_validation_start", "validation_step",
    ), "lightning.pytorch"),
}  # fmt: skip

# Called by users from Python only.
KEPT = {
    "answerer": "a release's answers", "from_layer_norms": "given limits of layers",
    "load_adapter": "an adapter on its base",
    "from_journal_bytes": "an archived ledger", "prepare_search": "a search without its command",
    **dict.fromkeys(("to_arrow", "to_pandas"), "a table of certificates"),
    **dict.fromkeys(("for_step", "unit_id", "examples", "keyed_fingerprint"), "own loops"),
}  # fmt: skip


@cache
def _trees() -> dict[Path, ast.Module]:
    return {
        path: ast.parse(path.read_text())
        for package in ("cluster", "dpdist", "tuning", "benchmarks")
        for path in sorted((ROOT / package).rglob("*.py"))
    }


def _uses(tree: ast.AST) -> Counter[str]:
    """How often each name is read, called, exported or named in a string of its own."""
    found: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            found[node.id] += 1
        elif isinstance(node, ast.Attribute):
            found[node.attr] += 1
        elif isinstance(node, ast.Constant) and re.fullmatch(r"[\w.:]+", str(node.value)):
            found[re.split(r"[.:]", str(node.value))[-1]] += 1
    return found


def _unused(definitions: dict[str, ast.AST], uses: Counter[str]) -> list[str]:
    """Functions, methods and classes whose name occurs nowhere but in their own body."""
    found = []
    for where, tree in definitions.items():
        for node in ast.walk(tree):
            if not isinstance(node, DEFINITIONS) or node.name.startswith("__"):
                continue
            decorated = " ".join(map(ast.unparse, node.decorator_list))
            if re.search(r"command|callback|validator|serializer", decorated):
                continue
            if uses[node.name] < 20 and uses[node.name] <= _uses(node)[node.name]:
                found.append(f"{where}: {node.name}")
    return found


@pytest.mark.slow
@pytest.mark.long
def test_what_is_defined_is_used():
    uses: Counter[str] = Counter()
    for tree in _trees().values():
        uses += _uses(tree)
    ours = {
        str(path.relative_to(ROOT)): tree
        for path, tree in _trees().items()
        if path.relative_to(ROOT).parts[0] != "benchmarks"
    }
    known = KEPT.keys() | CALLED_FROM_OUTSIDE.keys()
    assert [name for name in _unused(ours, uses) if name.split(": ")[1] not in known] == []


def test_unused_names_are_found():
    text = "def a(): return a()\ndef b(): return c\nclass K:\n    def m(self): return self.m\nb()"
    tree = ast.parse(text)
    assert _unused({"x": tree}, _uses(tree)) == ["x: a", "x: K", "x: m"]
