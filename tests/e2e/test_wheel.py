"""The wheel holds what the checkout holds; dpdist works wherever it lies, beside a user's own files
that have the names of our folders."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.wheel import INSTALL, build_wheel

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """\
import cluster, tuning
import dpdist
from dpdist.cluster.cluster_file import templates
from dpdist.tuning import space
assert set(templates()) == {"aws", "gcp", "local", "kuberay", "rayjob", "slurm"}
assert cluster.OWNER == tuning.OWNER == "the user"
if __name__ == "__main__":
    print(dpdist.__file__)
    folder = dpdist.run("small.yaml")
    print(dpdist.load_results(folder).recipe.name)
"""
SMALL = """\
data: {name: digits}
model: {name: small-cnn, options: {width: 4}}
privacy: {noise_multiplier: 1.0, delta: 1.0e-4}
training: {batch_size: 100, steps: 3, learning_rate: 0.5}
certify: {sigma: 0.25, n: 100, max_inputs: 4, radii: [0.1]}
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def place(wheel, tmp_path_factory) -> Path:
    """Where the wheel is installed."""
    folder = tmp_path_factory.mktemp("place")
    pip = [sys.executable, *INSTALL, "--target", str(folder), str(wheel)]
    subprocess.run(pip, check=True, capture_output=True)
    return folder


@pytest.fixture
def run(place, tmp_path):
    """Run Python beside a user's own cluster.py and tuning.py: its standard output."""
    for name in ("cluster", "tuning"):
        (tmp_path / f"{name}.py").write_text('OWNER = "the user"\n')
    (tmp_path / "small.yaml").write_text(SMALL)

    def call(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        env = {**os.environ, "PYTHONPATH": str(place)}
        done = subprocess.run(command, cwd=tmp_path, env=env, text=True, capture_output=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return call


def test_the_wheel_holds_every_source_and_resource(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {"dpdist/py.typed"}
    for folder, at in (("dpdist", ""), ("cluster", "dpdist/"), ("tuning", "dpdist/")):
        for pattern in ("*.py", "*.html", "*.md", "*.yaml"):
            found = (ROOT / folder).rglob(pattern)
            wanted |= {at + str(path.relative_to(ROOT)) for path in found}
    assert wanted - names == set()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"dpdist"}


@pytest.mark.timeout(600)
def test_workers_of_ray_beside_a_user_s_own_files(run, place, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    where, name = run("script.py").split()
    assert where.startswith(str(place)) and name == "small"
