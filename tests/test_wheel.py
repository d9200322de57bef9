"""The wheel holds what the checkout holds, and works wherever pip puts it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
SOURCES = ("cluster", "dpdist", "tuning", "recipes")
FILES = ("cluster.yaml", "pyproject.toml", "README.md", "LICENSE")


def build_wheel(folder: Path) -> Path:
    """The wheel of this checkout, built offline from a copy: an old build/ would get into it."""
    source = folder / "source"
    for name in SOURCES:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    for name in FILES:
        shutil.copy(ROOT / name, source)
    out = folder / "dist"
    out.mkdir()
    subprocess.run([sys.executable, "-c", BUILD, str(out)], cwd=source, check=True,
                   capture_output=True)  # fmt: skip
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def target(wheel, tmp_path_factory) -> Path:
    """`pip install --target`."""
    folder = tmp_path_factory.mktemp("target")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*pip, "--target", str(folder), str(wheel)], check=True, capture_output=True)
    return folder


@pytest.fixture
def run(target, tmp_path):
    """Run Python with the installed wheel, in an empty folder: its standard output."""

    def call(*arguments: str) -> str:
        command, env = [sys.executable, *arguments], {**os.environ, "PYTHONPATH": str(target)}
        done = subprocess.run(command, cwd=tmp_path, env=env, text=True, capture_output=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return call


def test_the_wheel_holds_every_source_and_resource(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = [*(ROOT / "dpdist").rglob("*.py"), *(ROOT / "dpdist").rglob("*.html")]
    wanted = {str(path.relative_to(ROOT)) for path in sources}
    wanted |= {f"dpdist/recipes/{path.name}" for path in (ROOT / "recipes").glob("*.yaml")}
    wanted.add("dpdist/py.typed")
    assert wanted - names == set()


def test_the_command_line_of_the_wheel(run, target):
    assert run("-c", "import dpdist; print(dpdist.__file__)").startswith(str(target))
    assert "Differentially private training" in run("-m", "dpdist", "--help")
    assert len(run("-m", "dpdist", "recipes").splitlines()) >= len(list(ROOT.glob("recipes/*")))
    aws = (ROOT / "cluster.yaml").read_text()
    assert run("-m", "dpdist", "cluster", "template", "aws") == aws
    run("-m", "dpdist", "run", "digits", "--dry-run")
