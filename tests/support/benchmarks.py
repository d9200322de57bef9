"""Scripts of benchmarks/ as modules."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
# Helpers begin with an underscore; so `make bench` finds the scripts, too.
SCRIPTS = sorted(path.stem for path in BENCHMARKS.glob("[a-z]*.py"))


def load(name: str, patch: pytest.MonkeyPatch | None = None) -> ModuleType:
    """Return a script as a module.

    Like `python benchmarks/NAME.py` it finds the files beside it, whatever was imported under their
    names before; afterwards no test does, some of whose packages are called as these are.

    Args:
        name: of the script, without its suffix.
        patch: restores the variables of the environment that `--quick` sets.
    """
    for variable in ("DPDIST_CACHE", "HOME", "XDG_CACHE_HOME") if patch is not None else ():
        patch.setenv(variable, os.environ.get(variable, ""))
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as within:
        within.syspath_prepend(str(BENCHMARKS))
        for script in BENCHMARKS.glob("*.py"):
            within.delitem(sys.modules, script.stem, raising=False)
        known = set(sys.modules)
        spec.loader.exec_module(module)
    for other in set(sys.modules) - known:
        if Path(getattr(sys.modules[other], "__file__", None) or ".").parent == BENCHMARKS:
            del sys.modules[other]
    return module
