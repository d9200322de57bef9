"""Scripts of benchmarks/ and papers/ as modules."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
BENCHMARKS, PAPERS = CHECKOUT / "benchmarks", CHECKOUT / "papers"
# By path, without the suffix. Helpers begin with an underscore.
SCRIPTS = sorted(
    path.relative_to(CHECKOUT).with_suffix("").as_posix()
    for folder in (BENCHMARKS, PAPERS)
    for path in folder.rglob("[a-z]*.py")
)


def load(name: str, patch: pytest.MonkeyPatch | None = None) -> ModuleType:
    """Return a script as a module.

    Like `python benchmarks/speed/NAME.py` it finds the files beside it, whatever was imported under
    their names before; afterwards no test does, some of whose packages are called as these are.

    Args:
        name: of the script, its path from the checkout without the suffix.
        patch: restores the variables of the environment that `--quick` sets.
    """
    for variable in ("DPDIST_CACHE", "HOME", "XDG_CACHE_HOME") if patch is not None else ():
        patch.setenv(variable, os.environ.get(variable, ""))
    path = CHECKOUT / f"{name}.py"
    spec = importlib.util.spec_from_file_location(re.sub(r"\W", "_", name), path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as within:
        within.syspath_prepend(str(BENCHMARKS))
        within.syspath_prepend(str(path.parent))
        for script in path.parent.glob("*.py"):
            within.delitem(sys.modules, script.stem, raising=False)
        known = set(sys.modules)
        spec.loader.exec_module(module)
    for other in set(sys.modules) - known:
        place = Path(getattr(sys.modules[other], "__file__", None) or ".")
        if place.is_relative_to(BENCHMARKS) or place.is_relative_to(PAPERS):
            del sys.modules[other]
    return module
