"""The wheel of this checkout, built and installed offline."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INSTALL = ("-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-compile")
_BUILD = "import sys; from setuptools import build_meta; build_meta.build_{}(sys.argv[1])"


def build(source: Path, kind: str, folder: Path) -> Path:
    """The "wheel" or "sdist" of a source tree, in a folder of its own below `folder`."""
    out = folder / f"{kind}-of-{source.name}"
    out.mkdir()
    command = [sys.executable, "-c", _BUILD.format(kind), str(out)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    return next(path for path in out.iterdir() if path.suffix in (".whl", ".gz"))


def build_wheel(folder: Path) -> Path:
    """Built in `folder` from a copy: what an old build/ holds would get into it."""
    source = folder / "source"
    for name in ("cluster", "dpdist", "tuning"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    for name in ("cluster.yaml", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    return build(source, "wheel", folder)
