"""The wheel holds what the checkout holds, and works wherever pip puts it."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.wheel import INSTALL, build_wheel

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def target(wheel, tmp_path_factory) -> Path:
    """`pip install --target`."""
    folder = tmp_path_factory.mktemp("target")
    pip = [sys.executable, *INSTALL, "--target", str(folder), str(wheel)]
    subprocess.run(pip, check=True, capture_output=True)
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
