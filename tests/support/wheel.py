"""The wheel of this checkout, built and installed offline."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INSTALL = ("-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-compile")
_BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


def build_wheel(folder: Path) -> Path:
    """Built in `folder` from a copy: what an old build/ holds would get into it."""
    source, out = folder / "source", folder / "dist"
    for name in ("cluster", "dpdist", "tuning", "recipes"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    for name in ("cluster.yaml", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    out.mkdir()
    build = [sys.executable, "-c", _BUILD, str(out)]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    return next(out.glob("*.whl"))
